/* A CUDA driver that says yes: cuTile's launcher runs without a GPU, asks for machine code, and launches nothing.
   One context on one device of compute capability 9.0. Compiled by tests/test_host_code.py. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

static int thing;

static int yes(void) { return 0; }
static int version(int *out) { *out = 13000; return 0; }
static int zero(int *out) { *out = 0; return 0; }
static int one(int *out) { *out = 1; return 0; }
static int not_capturing(void *stream, int *out) { *out = 0; return 0; }
static int handle(void **out) { *out = &thing; return 0; }
static int of_stream(void *stream, void **out) { *out = &thing; return 0; }
static int number(void *of, unsigned long long *out) { *out = 1; return 0; }
static int text(int error, const char **out) { *out = "no error"; return 0; }
static int pointer_attribute(int *out, int attribute, uint64_t pointer) { *out = attribute == 2 ? 2 : 0; return 0; }

static int device_attribute(int *out, int attribute, int device) {
    *out = attribute == 75 ? 9 : attribute == 76 ? 0 : 1 << 30; /* the compute capability, and limits of the grid */
    return 0;
}

int cuGetProcAddress_v2(const char *name, void **out, int version_wanted, uint64_t flags, void *status) {
    static const struct { const char *name; void *function; } known[] = {
        {"cuDriverGetVersion", version}, {"cuDeviceGet", zero}, {"cuDeviceGetCount", one},
        {"cuDeviceGetAttribute", device_attribute}, {"cuCtxGetCurrent", handle}, {"cuCtxPopCurrent", handle},
        {"cuDevicePrimaryCtxRetain", handle}, {"cuCtxGetDevice", zero}, {"cuCtxGetId", number},
        {"cuStreamGetCtx", of_stream}, {"cuStreamGetId", number}, {"cuStreamIsCapturing", not_capturing},
        {"cuLibraryGetKernel", handle}, {"cuLibraryLoadData", handle}, {"cuMemAlloc", handle}, {"cuMemAllocHost", handle},
        {"cuPointerGetAttribute", pointer_attribute}, {"cuGetErrorString", text}, {"cuKernelGetFunction", handle},
    };
    *out = (void *)yes;
    for (size_t place = 0; place < sizeof known / sizeof *known; place++)
        if (!strcmp(name, known[place].name)) *out = known[place].function;
    if (status) *(int *)status = 0;
    return 0;
}
