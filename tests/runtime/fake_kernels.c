// A toy model with the interface of compiled kernels: integer hashes over window rings and compressed rows, so that a
// key that is missing, stale or of another sequence changes every later result.
#include <stdint.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
#define WINDOW 4
#define WIDTH 64
#define VOCABULARY 31
#define HISTORY 2
#define RING 5

typedef struct {
  int32_t type_index;
  uint32_t padding;
  union {
    int64_t integer;
    void *pointer;
  } value;
} Argument;
typedef int (*Kernel)(void *self, const Argument *arguments, int32_t count, Argument *result);
typedef struct {
  Kernel kernel;
  const Argument *arguments;
  int64_t count;
} Command;

static const char *error = "";
static int32_t threads = 1;

EXPORT const char *v41c_last_error(void) { return error; }
EXPORT int32_t v41c_set_threads(int32_t count) { return threads = count ? count : 1; }
EXPORT int64_t v41c_run(const Command *commands, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    Argument result = {0};
    if (commands[i].kernel(0, commands[i].arguments, (int32_t)commands[i].count, &result)) return i + 1;
  }
  return 0;
}

typedef struct {
  char *state, *journal;
  int64_t row_bytes, length, ratio;
} Rows;

EXPORT void v41c_copy_rows(const Rows *states, int64_t count, int64_t journal_bytes, int64_t slot, int64_t first,
                           int64_t end, int64_t begin, int32_t back) {
  for (const Rows *s = states; s < states + count; ++s) {
    for (int64_t p = begin; p < end; ++p) {
      if (p % s->ratio != s->ratio - 1) continue;
      int64_t row = p / s->ratio, bytes = s->row_bytes;
      char *here = s->state + (slot * s->length + row % s->length) * bytes;
      char *copy = s->journal + slot * journal_bytes + (row - first / s->ratio) * bytes;
      memcpy(back ? here : copy, back ? copy : here, (size_t)bytes);
    }
  }
}

static uint32_t mix(uint32_t a, uint32_t b) {
  uint32_t h = (a * 31u + b * 17u + 12345u) * 2654435761u;
  return h ^ (h >> 15);
}

// Every kernel declares its arguments in order: P for pointers, I for integers.
static int check(const Argument *a, int32_t count, const char *kinds) {
  error = "ValueError: arguments differ\n from the kernel's";
  if (count != (int32_t)strlen(kinds)) return -1;
  for (int32_t i = 0; i < count; ++i) {
    if (a[i].type_index != (kinds[i] == 'P' ? 4 : 1)) return -1;
    if (kinds[i] == 'P' && (uintptr_t)a[i].value.pointer % 64) return -1;
  }
  return 0;
}

#define KERNEL(name, kinds) \
  static int name(const Argument *a); \
  EXPORT int __tvm_ffi_##name(void *self, const Argument *a, int32_t count, Argument *result) { \
    (void)self, (void)result; \
    return check(a, count, kinds) ? -1 : name(a); \
  } \
  static int name(const Argument *a)
#define POINTER(type, index) ((type *)a[index].value.pointer)
#define INTEGER(index) (a[index].value.integer)

// tokens, table (weight), embedded i32[T], T
KERNEL(embed, "PPPI") {
  const int32_t *tokens = POINTER(int32_t, 0), *table = POINTER(int32_t, 1);
  for (int64_t t = 0; t < INTEGER(3); ++t) POINTER(uint32_t, 2)[t] = (uint32_t)table[tokens[t]];
  return 0;
}

static uint32_t look(uint32_t *ring, uint32_t key, int32_t position, int32_t first) {
  uint32_t seen = 0;
  ring[position % WINDOW] = key;
  for (int32_t p = position - WINDOW + 1; p <= position; ++p)
    if (p >= 0 && p >= first) seen = mix(seen, ring[p % WINDOW]);
  return seen;
}

static uint32_t look_far(const uint32_t *rows, int64_t capacity, int32_t position) {
  uint32_t seen = 7;
  for (int32_t j = 0; j < (position + 1) / 2 && j < capacity; ++j) seen = mix(seen, rows[j]);
  return seen;
}

// embedded, positions, slots, first, kept, window!, compressed!, partial!, history!, stream bf16[T,64], ids i32[T],
// scratch, T, C2, S
KERNEL(encode, "PPPPPPPPPPPPIII") {
  const int32_t *positions = POINTER(int32_t, 1), *slots = POINTER(int32_t, 2), *first = POINTER(int32_t, 3);
  const int32_t *kept = POINTER(int32_t, 4);
  int64_t capacity = INTEGER(13);
  memset(POINTER(void, 11), 0xFF, 64);
  for (int64_t t = 0; t < INTEGER(12); ++t) {
    uint32_t embedded = POINTER(uint32_t, 0)[t];
    int32_t p = positions[t], s = slots[t];
    if (s < 0 || s >= INTEGER(14)) return -1;
    uint32_t *partial = POINTER(uint32_t, 7) + s * RING, *compressed = POINTER(uint32_t, 6) + s * capacity;
    uint32_t *history = POINTER(uint32_t, 8) + s * RING;
    partial[p % RING] = embedded;
    if (p % 2 == 1 && p >= kept[t] && p / 2 < capacity)
      compressed[p / 2] = mix(partial[(p - 1) % RING], partial[p % RING]);
    uint32_t gram = embedded;
    for (int32_t back = 1; back <= HISTORY; ++back) gram = mix(gram, p >= back ? history[(p - back) % RING] : 99u);
    history[p % RING] = embedded;
    uint32_t h = look(POINTER(uint32_t, 5) + s * WINDOW, mix(gram, (uint32_t)p), p, first[t]);
    h = mix(h, look_far(compressed, capacity, p));
    for (int64_t d = 0; d < WIDTH; ++d) POINTER(uint16_t, 9)[t * WIDTH + d] = (uint16_t)mix(h, (uint32_t)d);
    POINTER(uint32_t, 10)[t] = gram;
  }
  return 0;
}

// stream, ids, positions, slots, first, rows, window!, compressed, logits f32[R,31], main_hidden i32[T,3], T, R, C2
KERNEL(finish, "PPPPPPPPPPIII") {
  const int32_t *positions = POINTER(int32_t, 2), *slots = POINTER(int32_t, 3), *first = POINTER(int32_t, 4);
  int64_t tokens = INTEGER(10), rows = INTEGER(11), capacity = INTEGER(12);
  for (int64_t t = 0; t < tokens; ++t) {
    uint32_t key = POINTER(uint32_t, 1)[t];
    int32_t p = positions[t], s = slots[t];
    for (int64_t d = 0; d < WIDTH; ++d) key = mix(key, POINTER(uint16_t, 0)[t * WIDTH + d]);
    uint32_t h = look(POINTER(uint32_t, 6) + s * WINDOW, key, p, first[t]);
    h = mix(h, look_far(POINTER(uint32_t, 7) + s * capacity, capacity, p));
    for (uint32_t d = 0; d < 3; ++d) POINTER(uint32_t, 9)[t * 3 + d] = mix(h, d);
  }
  for (int64_t r = 0; r < rows; ++r) {
    int32_t t = POINTER(int32_t, 5)[r];
    if (t < 0 || t >= tokens) return -1;
    uint32_t h = POINTER(uint32_t, 9)[t * 3];
    for (uint32_t v = 0; v < VOCABULARY; ++v)
      POINTER(float, 8)[r * VOCABULARY + v] = (float)(mix(h, v) % 1000u) / 8.0f;
  }
  return 0;
}

// main_hidden, positions, slots, window!, T
KERNEL(draft_context, "PPPPI") {
  for (int64_t t = 0; t < INTEGER(4); ++t) {
    uint32_t h = 1;
    for (int d = 0; d < 3; ++d) h = mix(h, POINTER(uint32_t, 0)[t * 3 + d]);
    POINTER(uint32_t, 3)[POINTER(int32_t, 2)[t] * WINDOW + POINTER(int32_t, 1)[t] % WINDOW] = h;
  }
  return 0;
}

// tokens, positions, slots, first, window, logits f32[T,31], drafts i32[T], confidence f32[T], T
KERNEL(draft, "PPPPPPPPI") {
  const int32_t *positions = POINTER(int32_t, 1), *slots = POINTER(int32_t, 2), *first = POINTER(int32_t, 3);
  int32_t begin = 0;
  for (int64_t t = 0; t < INTEGER(8); ++t) {
    uint32_t h = (uint32_t)POINTER(int32_t, 0)[t];
    if (t == 0 || slots[t] != slots[t - 1]) begin = positions[t];
    for (int32_t p = begin - WINDOW; p < begin; ++p)
      if (p >= 0 && p >= first[t]) h = mix(h, POINTER(uint32_t, 4)[slots[t] * WINDOW + p % WINDOW]);
    for (uint32_t v = 0; v < VOCABULARY; ++v)
      POINTER(float, 5)[t * VOCABULARY + v] = (float)(mix(h, v) % 1000u) / 8.0f;
    POINTER(int32_t, 6)[t] = (int32_t)(h % VOCABULARY);
    POINTER(float, 7)[t] = (float)(h % 100u) / 10.0f;
  }
  return 0;
}
