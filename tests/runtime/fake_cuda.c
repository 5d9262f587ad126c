// A CUDA driver for tests: memory of this process, kernels that note their launches. Enough of the driver's interface for
// the real bindings to run on it, so that what they pack into a call is seen as a driver sees it.
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int Result;
enum { SUCCESS = 0, INVALID = 1, OUT_OF_MEMORY = 2, NOT_FOUND = 500 };
#define PUBLIC __attribute__((visibility("default")))

static FILE* notes(void) {
    static FILE* file;
    if (!file) {
        const char* path = getenv("FAKE_CUDA_NOTES");
        file = fopen(path ? path : "/dev/null", "a");
        setvbuf(file, NULL, _IOLBF, 0);
    }
    return file;
}

PUBLIC Result cuInit(unsigned flags) { return flags ? INVALID : SUCCESS; }
PUBLIC Result cuDriverGetVersion(int* version) { *version = 13000; return SUCCESS; }
PUBLIC Result cuDeviceGetCount(int* count) {
    *count = getenv("FAKE_CUDA_DEVICES") ? atoi(getenv("FAKE_CUDA_DEVICES")) : 1;
    return SUCCESS;
}
PUBLIC Result cuDeviceGet(int* device, int ordinal) { *device = ordinal; return SUCCESS; }
PUBLIC Result cuDeviceGetName(char* name, int size, int device) {
    snprintf(name, (size_t)size, "Stand-in %d", device);
    return SUCCESS;
}
PUBLIC Result cuDeviceGetAttribute(int* value, int kind, int device) {
    (void)device;
    *value = kind == 75 ? 9 : 0;  // compute capability 9.0
    return SUCCESS;
}
PUBLIC Result cuDevicePrimaryCtxRetain(void** context, int device) {
    *context = (void*)0x10;
    return device ? INVALID : SUCCESS;
}
PUBLIC Result cuCtxSetCurrent(void* context) { return context ? SUCCESS : INVALID; }
PUBLIC Result cuStreamCreate(void** stream, unsigned flags) {
    static uintptr_t last = 0x20;
    (void)flags;
    *stream = (void*)last++;
    return SUCCESS;
}
PUBLIC Result cuEventCreate(void** event, unsigned flags) {
    static uintptr_t last = 0x60;
    *event = (void*)last++;
    return flags == 2 ? SUCCESS : INVALID;  // events here are not timed
}
PUBLIC Result cuEventRecord(void* event, void* stream) {
    fprintf(notes(), "mark %p on %p\n", event, stream);
    return SUCCESS;
}
PUBLIC Result cuStreamWaitEvent(void* stream, void* event, unsigned flags) {
    fprintf(notes(), "wait %p on %p\n", event, stream);
    return flags ? INVALID : SUCCESS;
}
PUBLIC Result cuStreamSynchronize(void* stream) { return stream ? SUCCESS : INVALID; }
PUBLIC Result cuMemGetInfo_v2(size_t* available, size_t* total) { *available = *total = (size_t)1 << 30; return SUCCESS; }
PUBLIC Result cuMemAlloc_v2(uint64_t* address, size_t size) {
    if (size > (size_t)1 << 30) return OUT_OF_MEMORY;
    *address = (uint64_t)(uintptr_t)aligned_alloc(256, (size + 255) / 256 * 256);
    return SUCCESS;
}
PUBLIC Result cuMemHostRegister_v2(void* address, size_t size, unsigned flags) {
    fprintf(notes(), "register %zu %u\n", size, flags);
    return address ? SUCCESS : INVALID;
}
PUBLIC Result cuMemHostGetDevicePointer_v2(uint64_t* device, void* host, unsigned flags) {
    (void)flags;
    *device = (uint64_t)(uintptr_t)host;
    return SUCCESS;
}
PUBLIC Result cuMemsetD8Async(uint64_t address, unsigned char value, size_t size, void* stream) {
    (void)stream;
    memset((void*)(uintptr_t)address, value, size);
    return SUCCESS;
}
PUBLIC Result cuMemcpyHtoDAsync_v2(uint64_t target, const void* source, size_t size, void* stream) {
    (void)stream;
    memcpy((void*)(uintptr_t)target, source, size);
    return SUCCESS;
}
PUBLIC Result cuMemcpyDtoHAsync_v2(void* target, uint64_t source, size_t size, void* stream) {
    (void)stream;
    memcpy(target, (const void*)(uintptr_t)source, size);
    return SUCCESS;
}
PUBLIC Result cuMemcpyDtoDAsync_v2(uint64_t target, uint64_t source, size_t size, void* stream) {
    (void)stream;
    memcpy((void*)(uintptr_t)target, (const void*)(uintptr_t)source, size);
    return SUCCESS;
}
PUBLIC Result cuLibraryLoadData(void** library, const void* code, void* a, void* b, unsigned c, void* d, void* e,
                                unsigned f) {
    (void)a, (void)b, (void)c, (void)d, (void)e, (void)f;
    if (memcmp(code, "\x7f" "ELF", 4)) return INVALID;
    *library = (void*)0x30;
    return SUCCESS;
}
PUBLIC Result cuLibraryGetKernel(void** kernel, void* library, const char* name) {
    (void)library;
    if (!strcmp(name, "absent")) return NOT_FOUND;
    *kernel = strdup(name);
    return SUCCESS;
}
PUBLIC Result cuKernelSetAttribute(int attribute, int value, void* kernel, int device) {
    (void)device;
    fprintf(notes(), "attribute %s %d %d\n", (const char*)kernel, attribute, value);
    return SUCCESS;
}
PUBLIC Result cuKernelGetFunction(void** function, void* kernel) { *function = kernel; return SUCCESS; }

// Notes what a kernel with two pointers, an i32 and the two scratch pointers would read.
PUBLIC Result cuLaunchKernel(void* function, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by, unsigned bz,
                             unsigned shared, void* stream, void** parameters, void** extra) {
    (void)extra;
    fprintf(notes(), "launch %s on %p %u %u %u %u %u %u %u", (const char*)function, stream, x, y, z, bx, by, bz, shared);
    fprintf(notes(), " %llu %llu %d %llu %llu\n", *(unsigned long long*)parameters[0], *(unsigned long long*)parameters[1],
            *(int*)parameters[2], *(unsigned long long*)parameters[3], *(unsigned long long*)parameters[4]);
    return SUCCESS;
}
PUBLIC Result cuStreamBeginCapture_v2(void* stream, int mode) {
    (void)stream;
    fprintf(notes(), "begin %d\n", mode);
    return SUCCESS;
}
PUBLIC Result cuStreamEndCapture(void* stream, void** graph) {
    (void)stream;
    fprintf(notes(), "end\n");
    *graph = (void*)0x40;
    return SUCCESS;
}
PUBLIC Result cuGraphInstantiateWithFlags(void** made, void* graph, unsigned long long flags) {
    *made = (void*)0x50;
    return graph && !flags ? SUCCESS : INVALID;
}
PUBLIC Result cuGraphLaunch(void* graph, void* stream) {
    (void)stream;
    fprintf(notes(), "replay %p\n", graph);
    return SUCCESS;
}
PUBLIC Result cuGetErrorName(int status, const char** name) { (void)status; *name = "CUDA_ERROR"; return SUCCESS; }

#define ENTRY(name) {#name, (void*)name}
static const struct { const char* name; void* function; } ENTRIES[] = {
    ENTRY(cuInit), ENTRY(cuDriverGetVersion), ENTRY(cuDeviceGetCount), ENTRY(cuDeviceGet), ENTRY(cuDeviceGetName),
    ENTRY(cuDeviceGetAttribute),
    ENTRY(cuDevicePrimaryCtxRetain), ENTRY(cuCtxSetCurrent), ENTRY(cuStreamCreate), ENTRY(cuStreamSynchronize),
    ENTRY(cuEventCreate), ENTRY(cuEventRecord), ENTRY(cuStreamWaitEvent),
    {"cuMemGetInfo", (void*)cuMemGetInfo_v2}, {"cuMemAlloc", (void*)cuMemAlloc_v2},
    {"cuMemHostRegister", (void*)cuMemHostRegister_v2}, {"cuMemHostGetDevicePointer", (void*)cuMemHostGetDevicePointer_v2},
    ENTRY(cuMemsetD8Async), {"cuMemcpyHtoDAsync", (void*)cuMemcpyHtoDAsync_v2},
    {"cuMemcpyDtoHAsync", (void*)cuMemcpyDtoHAsync_v2}, {"cuMemcpyDtoDAsync", (void*)cuMemcpyDtoDAsync_v2},
    ENTRY(cuLibraryLoadData), ENTRY(cuLibraryGetKernel), ENTRY(cuKernelSetAttribute), ENTRY(cuKernelGetFunction),
    ENTRY(cuLaunchKernel), {"cuStreamBeginCapture", (void*)cuStreamBeginCapture_v2}, ENTRY(cuStreamEndCapture),
    ENTRY(cuGraphInstantiateWithFlags), ENTRY(cuGraphLaunch), ENTRY(cuGetErrorName),
};

PUBLIC Result cuGetProcAddress_v2(const char* symbol, void** found, int version, uint64_t flags, int* status) {
    (void)version, (void)flags;
    *found = NULL;
    for (size_t i = 0; i < sizeof ENTRIES / sizeof *ENTRIES; ++i)
        if (!strcmp(symbol, ENTRIES[i].name)) *found = ENTRIES[i].function;
    if (!strcmp(symbol, "cuGetProcAddress")) *found = (void*)cuGetProcAddress_v2;
    if (status) *status = *found ? 0 : 1;
    return *found ? SUCCESS : NOT_FOUND;
}
