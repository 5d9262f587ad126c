// What a kernel library needs at run time, linked into it so that it depends on libc and libpthread alone: the slots
// through which TVM's generated code starts parallel loops and takes scratch memory, its error reporting, and the
// command loop that runs a whole step in one call.
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
#define CACHE_LINE 64
#define MAX_THREADS 256
// Pieces per thread of a parallel loop: a thread that is late or slowed down then leaves little for the others to wait
// for, at about 10 ns per piece.
#define PIECES_PER_THREAD 8
// Busy waiting before an idle worker sleeps (about 100 us): longer than the serial kernels between two parallel ones.
#define SPINS_BEFORE_SLEEP 4000

#if defined(__x86_64__)
#define PAUSE() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define PAUSE() __asm__ volatile("yield")
#else
#define PAUSE() ((void)0)
#endif

// ---- errors -------------------------------------------------------------------------------------------------------

static _Thread_local char last_error[1024];

EXPORT const char *v41c_last_error(void) { return last_error; }

void TVMFFIErrorSetRaisedFromCStrParts(const char *kind, const char **parts, int32_t count) {
  int used = snprintf(last_error, sizeof last_error, "%s: ", kind);
  for (int32_t i = 0; i < count && used < (int)sizeof last_error; ++i)
    if (parts[i]) used += snprintf(last_error + used, sizeof last_error - used, "%s", parts[i]);
}

void TVMFFIErrorSetRaisedFromCStr(const char *kind, const char *message) {
  TVMFFIErrorSetRaisedFromCStrParts(kind, &message, 1);
}

// ---- parallel loops -----------------------------------------------------------------------------------------------

typedef struct {
  void *sync_handle;
  int32_t num_task;
} Environment;  // TVMParallelGroupEnv

typedef int (*Loop)(int task, Environment *environment, void *closure);  // FTVMParallelLambda

// A loop is published by storing `ticket` = generation << 32 | pieces left. Whoever decrements it owns one piece; the
// other fields stay valid while a piece is unfinished, and the generation makes a stale decrement fail. The launching
// thread takes pieces like any worker, so a loop completes even if no worker ever comes.
static struct {
  _Alignas(CACHE_LINE) _Atomic uint64_t ticket;
  _Alignas(CACHE_LINE) _Atomic int32_t done;
  _Atomic int failed;
  Loop loop;
  void *closure;
  Environment environment;
  _Alignas(CACHE_LINE) _Atomic int sleepers;
  _Atomic int threads;  // in use, the launching one included; 0 before the first call
  int workers;          // created so far
  pthread_mutex_t sleep_mutex;
  pthread_cond_t wake;
  pthread_mutex_t launch_mutex;
} pool = {.sleep_mutex = PTHREAD_MUTEX_INITIALIZER,
          .wake = PTHREAD_COND_INITIALIZER,
          .launch_mutex = PTHREAD_MUTEX_INITIALIZER};

static _Thread_local int inside_loop;

static int pieces_left(uint64_t ticket) { return (uint32_t)ticket != 0; }

static void take_pieces(void) {
  uint64_t ticket = atomic_load(&pool.ticket);
  while (pieces_left(ticket)) {
    if (!atomic_compare_exchange_weak(&pool.ticket, &ticket, ticket - 1)) continue;
    int task = pool.environment.num_task - (int)(uint32_t)ticket;
    inside_loop = 1;
    int error = pool.loop(task, &pool.environment, pool.closure);
    inside_loop = 0;
    if (error) atomic_store(&pool.failed, error);
    atomic_fetch_add_explicit(&pool.done, 1, memory_order_release);
    ticket = atomic_load(&pool.ticket);
  }
}

static void *worker(void *argument) {
  int index = (int)(intptr_t)argument;
  for (;;) {
    int spins = 0;
    while (!pieces_left(atomic_load_explicit(&pool.ticket, memory_order_acquire)) ||
           index >= atomic_load_explicit(&pool.threads, memory_order_relaxed)) {
      if (++spins < SPINS_BEFORE_SLEEP) {
        PAUSE();
        continue;
      }
      pthread_mutex_lock(&pool.sleep_mutex);
      atomic_fetch_add(&pool.sleepers, 1);
      if (!pieces_left(atomic_load(&pool.ticket)) || index >= atomic_load(&pool.threads))
        pthread_cond_wait(&pool.wake, &pool.sleep_mutex);
      atomic_fetch_sub(&pool.sleepers, 1);
      pthread_mutex_unlock(&pool.sleep_mutex);
      spins = 0;
    }
    take_pieces();
  }
  return NULL;
}

// A forked process has none of the workers, and may have been forked while one held a lock.
static void forget_workers(void) {
  pthread_mutex_init(&pool.sleep_mutex, NULL);
  pthread_mutex_init(&pool.launch_mutex, NULL);
  pthread_cond_init(&pool.wake, NULL);
  atomic_store(&pool.ticket, 0);
  atomic_store(&pool.sleepers, 0);
  atomic_store(&pool.threads, 0);
  pool.workers = 0;
}

static void watch_forks(void) { pthread_atfork(NULL, NULL, forget_workers); }

// Threads of parallel loops from now on, this one included; 0 asks for one per processor this process may use.
// Returns the number in effect: fewer if the system refuses more threads.
EXPORT int32_t v41c_set_threads(int32_t count) {
  if (count <= 0) {
    cpu_set_t available;
    count = sched_getaffinity(0, sizeof available, &available) == 0 ? CPU_COUNT(&available) : 1;
  }
  if (count > MAX_THREADS) count = MAX_THREADS;
  static pthread_once_t watched = PTHREAD_ONCE_INIT;
  pthread_once(&watched, watch_forks);
  pthread_mutex_lock(&pool.launch_mutex);
  while (pool.workers < count - 1) {
    pthread_t thread;
    if (pthread_create(&thread, NULL, worker, (void *)(intptr_t)(pool.workers + 1)) != 0) break;
    pthread_detach(thread);
    ++pool.workers;
  }
  if (count > pool.workers + 1) count = pool.workers + 1;
  atomic_store(&pool.threads, count);
  pthread_mutex_unlock(&pool.launch_mutex);
  return count;
}

static int run_loop(Loop loop, void *closure, int pieces) {
  int threads = atomic_load_explicit(&pool.threads, memory_order_relaxed);
  if (threads == 0) threads = v41c_set_threads(0);
  if (threads == 1 || inside_loop) {
    Environment whole = {NULL, 1};
    return loop(0, &whole, closure);
  }
  pthread_mutex_lock(&pool.launch_mutex);
  if (pieces <= 0) pieces = threads * PIECES_PER_THREAD;
  pool.loop = loop;
  pool.closure = closure;
  pool.environment = (Environment){NULL, pieces};
  atomic_store(&pool.failed, 0);
  atomic_store(&pool.done, 0);
  uint64_t generation = (atomic_load(&pool.ticket) >> 32) + 1;
  atomic_store(&pool.ticket, generation << 32 | (uint32_t)pieces);
  if (atomic_load(&pool.sleepers)) {
    pthread_mutex_lock(&pool.sleep_mutex);
    pthread_cond_broadcast(&pool.wake);
    pthread_mutex_unlock(&pool.sleep_mutex);
  }
  take_pieces();
  for (int spins = 0; atomic_load_explicit(&pool.done, memory_order_acquire) != pieces; ++spins) {
    if (spins < SPINS_BEFORE_SLEEP)
      PAUSE();
    else
      sched_yield();
  }
  int error = atomic_load(&pool.failed);
  pthread_mutex_unlock(&pool.launch_mutex);
  return error;
}

void *__TVMBackendParallelLaunch = (void *)run_loop;

// ---- scratch memory of one loop iteration -------------------------------------------------------------------------

#define BLOCKS 16

static _Thread_local struct {
  void *memory;
  uint64_t size_bytes;
  int used;
} blocks[BLOCKS];

static void *take_block(int device_type, int device, uint64_t size_bytes, int type_code, int type_bits) {
  (void)device_type, (void)device, (void)type_code, (void)type_bits;
  int slot = -1;
  for (int i = 0; i < BLOCKS; ++i) {
    if (blocks[i].used) continue;
    if (blocks[i].size_bytes >= size_bytes) {
      blocks[i].used = 1;
      return blocks[i].memory;
    }
    slot = i;
  }
  void *memory;
  if (posix_memalign(&memory, CACHE_LINE, (size_bytes + 4095) & ~(uint64_t)4095)) return NULL;
  if (slot >= 0) {
    free(blocks[slot].memory);
    blocks[slot].memory = memory;
    blocks[slot].size_bytes = size_bytes;
    blocks[slot].used = 1;
  }
  return memory;
}

static int give_block(int device_type, int device, void *memory) {
  (void)device_type, (void)device;
  for (int i = 0; i < BLOCKS; ++i)
    if (blocks[i].memory == memory) {
      blocks[i].used = 0;
      return 0;
    }
  free(memory);
  return 0;
}

void *__TVMBackendAllocWorkspace = (void *)take_block;
void *__TVMBackendFreeWorkspace = (void *)give_block;

// ---- tables on disk -----------------------------------------------------------------------------------------------

// Ask for the pages of some rows of a mapped table, ascending row numbers, while other work goes on: the calls start the
// reads and do not wait for them. Neighbouring pages are asked for at once. A refusal (a table that is no mapped file)
// changes nothing: the rows are then read when they are used.
int32_t v41c_read_ahead(const void *table, int64_t row_bytes, const int64_t *rows, int64_t count) {
  const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), base = (uintptr_t)table;
  uintptr_t begin = 0, end = 0;
  for (int64_t i = 0; i <= count; ++i) {
    uintptr_t first = 0, last = 0;
    if (i < count) {
      first = (base + (uintptr_t)(rows[i] * row_bytes)) / page * page;
      last = (base + (uintptr_t)((rows[i] + 1) * row_bytes) + page - 1) / page * page;
      if (end && first <= end) {
        if (last > end) end = last;
        continue;
      }
    }
    if (end) madvise((void *)begin, end - begin, MADV_WILLNEED);
    begin = first, end = last;
  }
  return 0;
}

// ---- rows of states -----------------------------------------------------------------------------------------------

typedef struct {
  char *state, *journal;  // of slot 0
  int64_t row_bytes, length, ratio;  // of a row; rows of a slot, which begin again after the last; tokens of a row
} Rows;

// Copies the rows that the tokens of a slot at positions first … end - 1 write from `begin` on, and no others: into the
// slot's `journal_bytes` of the journal, where those of position `first` are the first, or back from there.
EXPORT void v41c_copy_rows(const Rows *states, int64_t count, int64_t journal_bytes, int64_t slot, int64_t first,
                           int64_t end, int64_t begin, int32_t back) {
  for (const Rows *s = states; s != states + count; ++s) {
    char *state = s->state + slot * s->length * s->row_bytes, *journal = s->journal + slot * journal_bytes;
    for (int64_t row = begin / s->ratio, last = end / s->ratio; row < last;) {
      const int64_t place = row % s->length, rest = s->length - place, left = last - row;
      const int64_t rows = left < rest ? left : rest;
      char *here = state + place * s->row_bytes, *copy = journal + (row - first / s->ratio) * s->row_bytes;
      memcpy(back ? here : copy, back ? copy : here, (size_t)(rows * s->row_bytes));
      row += rows;
    }
  }
}

// ---- the command loop ---------------------------------------------------------------------------------------------

typedef struct {
  int32_t type_index;  // 1 integer, 4 opaque pointer
  uint32_t padding;
  union {
    int64_t integer;
    void *pointer;
  } value;
} Argument;  // TVMFFIAny

typedef int (*Kernel)(void *self, const Argument *arguments, int32_t count, Argument *result);

typedef struct {
  Kernel kernel;
  const Argument *arguments;
  int64_t count;
} Command;

// Runs the commands in order. Returns 0, or the number, from 1, of the one that failed; `v41c_last_error` says why.
EXPORT int64_t v41c_run(const Command *commands, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    Argument result = {0};
    if (commands[i].kernel(NULL, commands[i].arguments, (int32_t)commands[i].count, &result)) return i + 1;
  }
  return 0;
}
