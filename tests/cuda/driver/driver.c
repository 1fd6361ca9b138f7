/* A CUDA driver without a device: libcuda.so.1 for tests of everything above it.
 *
 * Memory lies on the host. Copies and fills happen at once; of kernels nothing runs, but a launch
 * is refused where a driver would refuse it. Streams and events exist, and a
 * stream that is captured refuses what a driver refuses then. The addresses of a block that was freed
 * are never given out again, and nothing lies there, so that whoever still uses it is found.
 *
 * The environment says how many devices there are (FUSESTEP_STUB_DEVICES), the version of CUDA
 * (FUSESTEP_STUB_VERSION, such as 13000), and which call fails (FUSESTEP_STUB_FAILS="NAME:K:CODE":
 * call K of that function, from 1, gives that error).
 */
#define _GNU_SOURCE
#define __CUDA_API_VERSION_INTERNAL 1
#include <cuda.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define API __attribute__((visibility("default"))) CUresult
#define POISON 0x7F
#define MOST_DEVICES 8
#define MOST_BLOCKS (1 << 16)
#define GAP (1 << 16)
#define MOST_THREADS 1024

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* -- what tests ask ------------------------------------------------------------------------- */

struct block {
    char *begin;
    size_t size;
    int device, is_freed;
};
static struct block blocks[MOST_BLOCKS];
static long n_blocks;
static size_t in_use;

static struct block *block_at(unsigned long long address) {
    for (struct block *b = blocks + n_blocks - 1; b >= blocks; b--)
        if ((char *)address >= b->begin && (char *)address < b->begin + b->size) return b;
    return NULL;
}
/* 1 for the memory of a block, 0 for that of one that was freed, -1 for anything else. */
__attribute__((visibility("default"))) int stub_state(unsigned long long address) {
    struct block *found = block_at(address);
    return found ? !found->is_freed : -1;
}

static long setting(const char *name, long otherwise) {
    const char *text = getenv(name);
    return text ? atol(text) : otherwise;
}

/* Whether this call is the one that is to fail; its error. */
static CUresult injected(const char *name) {
    static long calls;
    const char *text = getenv("FUSESTEP_STUB_FAILS"), *colon = text ? strchr(text, ':') : NULL;
    if (!colon || strncmp(text, name, colon - text) || name[colon - text]) return CUDA_SUCCESS;
    char *end;
    long k = strtol(colon + 1, &end, 10);
    return __sync_add_and_fetch(&calls, 1) == k ? (CUresult)atol(end + 1) : CUDA_SUCCESS;
}
#define MAY_FAIL                                                                                   \
    do {                                                                                           \
        CUresult given = injected(__func__);                                                       \
        if (given) return given;                                                                   \
    } while (0)

/* -- devices and contexts ------------------------------------------------------------------- */

static struct CUctx_st { int device; } contexts[MOST_DEVICES];
static __thread CUcontext current[64];
static __thread int depth;

static int device_now(void) { return depth ? current[depth - 1]->device : 0; }

API cuInit(unsigned flags) {
    MAY_FAIL;
    for (int i = 0; i < MOST_DEVICES; i++) contexts[i].device = i;
    return CUDA_SUCCESS;
}
API cuDriverGetVersion(int *version) {
    *version = setting("FUSESTEP_STUB_VERSION", 13000);
    return CUDA_SUCCESS;
}
API cuDeviceGetCount(int *n) { *n = setting("FUSESTEP_STUB_DEVICES", 1); return CUDA_SUCCESS; }
API cuDeviceGet(CUdevice *device, int number) { *device = number; return CUDA_SUCCESS; }
API cuDeviceGetName(char *name, int length, CUdevice device) {
    snprintf(name, length, "driver without a device");
    return CUDA_SUCCESS;
}
API cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device) {
    memset(uuid, 0, sizeof *uuid);
    uuid->bytes[0] = device + 1;
    return CUDA_SUCCESS;
}
API cuDeviceTotalMem_v2(size_t *bytes, CUdevice device) {
    *bytes = 80UL << 30;
    return CUDA_SUCCESS;
}
API cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    switch ((int)attribute) { /* an H100 */
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = 9; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = 0; break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = 132; break;
    default: *value = 1;
    }
    return CUDA_SUCCESS;
}
API cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    MAY_FAIL;
    *context = &contexts[device];
    return CUDA_SUCCESS;
}
API cuDevicePrimaryCtxRelease_v2(CUdevice device) { return CUDA_SUCCESS; }
API cuDevicePrimaryCtxReset_v2(CUdevice device) { return CUDA_SUCCESS; }
API cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *is_active) {
    *flags = 0, *is_active = 1;
    return CUDA_SUCCESS;
}
API cuDevicePrimaryCtxSetFlags_v2(CUdevice device, unsigned flags) { return CUDA_SUCCESS; }
API cuCtxGetCurrent(CUcontext *context) {
    *context = depth ? current[depth - 1] : NULL;
    return CUDA_SUCCESS;
}
API cuCtxSetCurrent(CUcontext context) {
    if (!context) {
        depth -= depth > 0;
        return CUDA_SUCCESS;
    }
    depth += depth == 0;
    current[depth - 1] = context;
    return CUDA_SUCCESS;
}
API cuCtxPushCurrent_v2(CUcontext context) { current[depth++] = context; return CUDA_SUCCESS; }
API cuCtxPopCurrent_v2(CUcontext *context) {
    return depth ? (*context = current[--depth], CUDA_SUCCESS) : CUDA_ERROR_INVALID_CONTEXT;
}
API cuCtxGetDevice(CUdevice *device) {
    return depth ? (*device = device_now(), CUDA_SUCCESS) : CUDA_ERROR_INVALID_CONTEXT;
}
API cuCtxSynchronize(void) { MAY_FAIL; return CUDA_SUCCESS; }
API cuCtxGetFlags(unsigned *flags) { *flags = 0; return CUDA_SUCCESS; }
API cuCtxGetId(CUcontext context, unsigned long long *id) {
    *id = (unsigned long long)(context ? context->device : 0) + 1;
    return CUDA_SUCCESS;
}
API cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0, *greatest = -5;
    return CUDA_SUCCESS;
}

/* -- memory --------------------------------------------------------------------------------- */

API cuMemGetInfo_v2(size_t *free_bytes, size_t *total) {
    *total = 80UL << 30, *free_bytes = *total - in_use;
    return CUDA_SUCCESS;
}
/* Each block has pages of its own, and what it holds at first is no number that anybody expects.
   Lists are named by the address that their position 0 would have: in the gap before a block. */
API cuMemAlloc_v2(CUdeviceptr *address, size_t size) {
    MAY_FAIL;
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    char *gap = mmap(NULL, GAP + size, PROT_NONE, flags, -1, 0), *found = gap + GAP;
    if (gap == MAP_FAILED || n_blocks == MOST_BLOCKS) return CUDA_ERROR_OUT_OF_MEMORY;
    mprotect(found, size, PROT_READ | PROT_WRITE);
    memset(found, POISON, size < 4096 ? size : 4096);
    pthread_mutex_lock(&lock);
    blocks[n_blocks++] = (struct block){found, size, device_now(), 0};
    in_use += size;
    pthread_mutex_unlock(&lock);
    *address = (CUdeviceptr)found;
    return CUDA_SUCCESS;
}
API cuMemFree_v2(CUdeviceptr address) {
    pthread_mutex_lock(&lock);
    struct block *found = block_at(address);
    int is_known = found && found->begin == (char *)address && !found->is_freed;
    if (is_known) { /* the addresses stay taken, the memory goes back to the system */
        int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE;
        found->is_freed = 1, in_use -= found->size;
        mmap(found->begin, found->size, PROT_NONE, flags, -1, 0);
    }
    pthread_mutex_unlock(&lock);
    return is_known ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
API cuMemHostAlloc(void **address, size_t size, unsigned flags) {
    return posix_memalign(address, 4096, size) ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}
API cuMemAllocHost_v2(void **address, size_t size) { return cuMemHostAlloc(address, size, 0); }
API cuMemFreeHost(void *address) { free(address); return CUDA_SUCCESS; }
API cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr address) {
    if (attribute != CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL) {
        *(long *)value = 0;
        return CUDA_SUCCESS;
    }
    struct block *found = block_at(address);
    if (!found || found->is_freed) return CUDA_ERROR_INVALID_VALUE;
    *(int *)value = found->device;
    return CUDA_SUCCESS;
}
API cuPointerGetAttributes(unsigned n, CUpointer_attribute *attributes, void **values,
                           CUdeviceptr address) { return CUDA_SUCCESS; }

/* -- streams, captures, events -------------------------------------------------------------- */

static struct CUstream_st { int is_capturing; } streams[1 << 12];
static long n_streams;
static int n_capturing;

static int is_captured(CUstream stream) {
    return (size_t)stream > 16 && stream->is_capturing; /* small numbers are those of CUDA itself */
}
#define NOT_IN_A_CAPTURE(stream)                                                                   \
    do {                                                                                           \
        if (is_captured(stream)) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;                     \
    } while (0)

API cuStreamCreate(CUstream *stream, unsigned flags) {
    *stream = &streams[__sync_fetch_and_add(&n_streams, 1) % (1 << 12)];
    return CUDA_SUCCESS;
}
API cuStreamCreateWithPriority(CUstream *stream, unsigned flags, int priority) {
    return cuStreamCreate(stream, flags);
}
API cuStreamDestroy_v2(CUstream stream) { return CUDA_SUCCESS; }
API cuStreamSynchronize(CUstream stream) {
    MAY_FAIL;
    NOT_IN_A_CAPTURE(stream);
    return CUDA_SUCCESS;
}
API cuStreamQuery(CUstream stream) { return CUDA_SUCCESS; }
API cuStreamGetFlags(CUstream stream, unsigned *flags) { *flags = 0; return CUDA_SUCCESS; }
API cuStreamGetCtx(CUstream stream, CUcontext *context) {
    *context = &contexts[device_now()];
    return CUDA_SUCCESS;
}
API cuStreamGetId(CUstream stream, unsigned long long *id) {
    *id = (unsigned long long)stream;
    return CUDA_SUCCESS;
}
API cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) {
    if (!stream && n_capturing) return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    *status = is_captured(stream) ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
    return CUDA_SUCCESS;
}
API cuStreamBeginCapture_v2(CUstream stream, CUstreamCaptureMode mode) {
    stream->is_capturing = 1, n_capturing++;
    return CUDA_SUCCESS;
}
API cuStreamEndCapture(CUstream stream, CUgraph *graph) {
    stream->is_capturing = 0, n_capturing--;
    *graph = calloc(1, 8);
    return CUDA_SUCCESS;
}
API cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags) { return CUDA_SUCCESS; }
API cuEventCreate(CUevent *event, unsigned flags) { *event = calloc(1, 8); return CUDA_SUCCESS; }
API cuEventDestroy_v2(CUevent event) { free(event); return CUDA_SUCCESS; }
API cuEventRecord(CUevent event, CUstream stream) { return CUDA_SUCCESS; }
API cuEventQuery(CUevent event) {
    return n_capturing ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED : CUDA_SUCCESS;
}
API cuEventSynchronize(CUevent event) { return CUDA_SUCCESS; }
API cuEventElapsedTime_v2(float *milliseconds, CUevent begin, CUevent end) {
    *milliseconds = 1.0f;
    return CUDA_SUCCESS;
}

/* -- copies and fills ----------------------------------------------------------------------- */

#define MUST_BE_THERE(address)                                                                     \
    do {                                                                                           \
        if (stub_state(address) != 1) return CUDA_ERROR_ILLEGAL_ADDRESS;                           \
    } while (0)

API cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t n, CUstream stream) {
    MAY_FAIL;
    NOT_IN_A_CAPTURE(stream);
    MUST_BE_THERE(to);
    memcpy((void *)to, from, n);
    return CUDA_SUCCESS;
}
API cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t n, CUstream stream) {
    MAY_FAIL;
    NOT_IN_A_CAPTURE(stream);
    MUST_BE_THERE(from);
    memcpy(to, (void *)from, n);
    return CUDA_SUCCESS;
}
API cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t n, CUstream stream) {
    NOT_IN_A_CAPTURE(stream);
    MUST_BE_THERE(to);
    MUST_BE_THERE(from);
    memmove((void *)to, (void *)from, n);
    return CUDA_SUCCESS;
}
API cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t n) {
    return cuMemcpyHtoDAsync_v2(to, from, n, NULL);
}
API cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t n) {
    return cuMemcpyDtoHAsync_v2(to, from, n, NULL);
}
API cuMemcpyDtoD_v2(CUdeviceptr to, CUdeviceptr from, size_t n) {
    return cuMemcpyDtoDAsync_v2(to, from, n, NULL);
}
API cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t n, CUstream stream) {
    MUST_BE_THERE(to);
    memset((void *)to, value, n);
    return CUDA_SUCCESS;
}
API cuMemsetD8_v2(CUdeviceptr to, unsigned char value, size_t n) {
    return cuMemsetD8Async(to, value, n, NULL);
}

/* -- modules and launches ------------------------------------------------------------------- */

API cuLibraryLoadData(CUlibrary *library, const void *code, CUjit_option *options, void **values,
                      unsigned n, CUlibraryOption *more, void **more_values, unsigned m) {
    MAY_FAIL;
    *library = calloc(1, 8);
    return CUDA_SUCCESS;
}
API cuLibraryUnload(CUlibrary library) { return CUDA_SUCCESS; }
API cuLibraryGetKernel(CUkernel *kernel, CUlibrary library, const char *name) {
    *kernel = (CUkernel)strdup(name);
    return CUDA_SUCCESS;
}
API cuLibraryGetModule(CUmodule *module, CUlibrary library) {
    *module = (CUmodule)library;
    return CUDA_SUCCESS;
}
API cuKernelGetFunction(CUfunction *function, CUkernel kernel) {
    *function = (CUfunction)kernel;
    return CUDA_SUCCESS;
}
API cuKernelGetAttribute(int *value, CUfunction_attribute attribute, CUkernel kernel, CUdevice d) {
    *value = 1;
    return CUDA_SUCCESS;
}
API cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
    *value = 1;
    return CUDA_SUCCESS;
}
API cuLaunchKernelEx(const CUlaunchConfig *given, CUfunction function, void **arguments,
                     void **extra) {
    MAY_FAIL;
    unsigned threads = given->blockDimX * given->blockDimY * given->blockDimZ;
    if (!given->gridDimX || !given->gridDimY || !given->gridDimZ || !threads ||
        given->gridDimY > 65535 || given->gridDimZ > 65535 || threads > MOST_THREADS ||
        given->blockDimZ > 64 || given->gridDimX > 0x7FFFFFFF)
        return CUDA_ERROR_INVALID_VALUE;
    return CUDA_SUCCESS;
}

/* -- errors, and the addresses of all of these ---------------------------------------------- */

API cuGetErrorName(CUresult error, const char **name) {
    *name = error == CUDA_ERROR_OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_OF_THE_STUB";
    return CUDA_SUCCESS;
}
API cuGetErrorString(CUresult error, const char **text) { return cuGetErrorName(error, text); }
API cuGetProcAddress_v2(const char *name, void **address, int version, cuuint64_t flags,
                        CUdriverProcAddressQueryResult *status) {
    static const char *endings[] = {"_v4", "_v3", "_v2", ""};
    Dl_info own;
    dladdr((void *)cuInit, &own);
    void *library = dlopen(own.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    for (int i = 0; i < 4; i++) {
        char full[256];
        snprintf(full, sizeof full, "%s%s", name, endings[i]);
        if ((*address = dlsym(library, full))) {
            if (status) *status = CU_GET_PROC_ADDRESS_SUCCESS;
            return CUDA_SUCCESS;
        }
    }
    if (status) *status = CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    return CUDA_ERROR_NOT_FOUND;
}
API cuGetProcAddress(const char *name, void **address, int version, cuuint64_t flags) {
    return cuGetProcAddress_v2(name, address, version, flags, NULL);
}
