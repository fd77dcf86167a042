/* The GPU, through the driver's virtual memory management. libcuda is loaded at run time; there is no header of CUDA's
 * here, so the few structures and numbers that are needed are written down below, as the driver's ABI has them. */
#include "symbols.h"

#include "device.h"

typedef int CUresult;
typedef void *CUcontext;

struct location {
    int type; /* 1: a device, 3: a node of the host */
    int id;
};
struct allocation {
    int type;             /* 1: pinned */
    int requested_handle; /* 1: a POSIX file descriptor */
    struct location location;
    void *windows;
    struct {
        unsigned char compression, rdma;
        unsigned short usage;
        unsigned char reserved[4];
    } flags;
};
struct access {
    struct location location;
    int flags; /* 3: read and write */
};

static struct {
    CUresult (*Init)(unsigned);
    CUresult (*DeviceGet)(int *, int);
    CUresult (*DeviceGetAttribute)(int *, int, int);
    CUresult (*DevicePrimaryCtxRetain)(CUcontext *, int);
    CUresult (*CtxGetCurrent)(CUcontext *);
    CUresult (*CtxPushCurrent)(CUcontext);
    CUresult (*CtxPopCurrent)(CUcontext *);
    CUresult (*AddressReserve)(uint64_t *, size_t, size_t, uint64_t, unsigned long long);
    CUresult (*AddressFree)(uint64_t, size_t);
    CUresult (*Create)(uint64_t *, size_t, const struct allocation *, unsigned long long);
    CUresult (*Release)(uint64_t);
    CUresult (*Map)(uint64_t, size_t, size_t, uint64_t, unsigned long long);
    CUresult (*Unmap)(uint64_t, size_t);
    CUresult (*SetAccess)(uint64_t, size_t, const struct access *, size_t);
    CUresult (*Export)(void *, uint64_t, int, unsigned long long);
    CUresult (*Import)(uint64_t *, void *, int);
    CUresult (*MemsetD32)(uint64_t, unsigned, size_t);
    CUresult (*CtxSynchronize)(void);
    CUresult (*StreamCreate)(void **, unsigned);
    CUresult (*StreamSynchronize)(void *);
    CUresult (*MemcpyDtoDAsync)(uint64_t, uint64_t, size_t, void *);
} cu;

static int device;
static CUcontext context;
static void *queues[2];
static CUresult error_of_last_call;

static int told(CUresult result) {
    if (result)
        error_of_last_call = result;
    return result;
}

static int load(void) {
    static const struct symbol symbols[] = {
#define CALL(field, name) SYMBOL(cu, field, name)
        CALL(Init, "cuInit"),
        CALL(DeviceGet, "cuDeviceGet"),
        CALL(DeviceGetAttribute, "cuDeviceGetAttribute"),
        CALL(DevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain"),
        CALL(CtxGetCurrent, "cuCtxGetCurrent"),
        CALL(CtxPushCurrent, "cuCtxPushCurrent_v2"),
        CALL(CtxPopCurrent, "cuCtxPopCurrent_v2"),
        CALL(AddressReserve, "cuMemAddressReserve"),
        CALL(AddressFree, "cuMemAddressFree"),
        CALL(Create, "cuMemCreate"),
        CALL(Release, "cuMemRelease"),
        CALL(Map, "cuMemMap"),
        CALL(Unmap, "cuMemUnmap"),
        CALL(SetAccess, "cuMemSetAccess"),
        CALL(Export, "cuMemExportToShareableHandle"),
        CALL(Import, "cuMemImportFromShareableHandle"),
        CALL(MemsetD32, "cuMemsetD32_v2"),
        CALL(CtxSynchronize, "cuCtxSynchronize"),
        CALL(StreamCreate, "cuStreamCreate"),
        CALL(StreamSynchronize, "cuStreamSynchronize"),
        CALL(MemcpyDtoDAsync, "cuMemcpyDtoDAsync_v2"),
#undef CALL
    };
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!library)
        return -1;
    return LOOK_UP(library, symbols, cu) ? -2 : 0;
}

static int cuda_open(int ordinal) {
    int can = 0, can_export = 0, status = load();
    if (status)
        return status;
    if (told(cu.Init(0)) || told(cu.DeviceGet(&device, ordinal)))
        return -3;
    /* Virtual memory management, and handles as file descriptors. */
    if (told(cu.DeviceGetAttribute(&can, 102, device)) || told(cu.DeviceGetAttribute(&can_export, 103, device)))
        return -3;
    if (!can || !can_export)
        return -4;
    return told(cu.DevicePrimaryCtxRetain(&context, device)) ? -3 : 0;
}

static int cuda_enter(void) {
    CUcontext current = NULL;
    if (!cu.CtxGetCurrent(&current) && current)
        return 0;
    return cu.CtxPushCurrent(context) ? 0 : 1;
}

static void cuda_leave(int entered) {
    CUcontext popped;
    if (entered)
        cu.CtxPopCurrent(&popped);
}

static int cuda_reserve(uint64_t size, uint64_t *address) {
    return told(cu.AddressReserve(address, size, 0, 0, 0));
}

static int cuda_unreserve(uint64_t address, uint64_t size) {
    return told(cu.AddressFree(address, size));
}

static int cuda_create(uint64_t size, uint64_t *handle) {
    struct allocation wanted;
    memset(&wanted, 0, sizeof wanted);
    wanted.type = 1;
    wanted.requested_handle = 1;
    wanted.location.type = 1;
    wanted.location.id = device;
    return told(cu.Create(handle, size, &wanted, 0));
}

static int cuda_release(uint64_t handle) {
    return told(cu.Release(handle));
}

static int cuda_map(uint64_t address, uint64_t size, uint64_t handle) {
    return told(cu.Map(address, size, 0, handle, 0));
}

static int cuda_unmap(uint64_t address, uint64_t size) {
    return told(cu.Unmap(address, size));
}

static int cuda_allow(uint64_t address, uint64_t size) {
    struct access access = {{1, device}, 3};
    return told(cu.SetAccess(address, size, &access, 1));
}

static int cuda_export(uint64_t handle, int *fd) {
    return told(cu.Export(fd, handle, 1, 0));
}

static int cuda_import(int fd, uint64_t size, uint64_t *handle) {
    (void)size;
    return told(cu.Import(handle, (void *)(intptr_t)fd, 1));
}

static int cuda_create_host(uint64_t size, uint64_t *handle) {
    struct allocation wanted;
    int can = 0, node = 0;
    /* Memory of the host under virtual memory management, and the node of the host that is nearest to the device. */
    if (cu.DeviceGetAttribute(&can, 141, device) || !can)
        return -4;
    (void)cu.DeviceGetAttribute(&node, 134, device);
    memset(&wanted, 0, sizeof wanted);
    wanted.type = 1;
    wanted.location.type = 3;
    wanted.location.id = node < 0 ? 0 : node;
    return told(cu.Create(handle, size, &wanted, 0));
}

static int cuda_copy(int queue, uint64_t to, uint64_t from, uint64_t size) {
    /* 1: it does not wait for the default stream. */
    if (!queues[queue] && told(cu.StreamCreate(&queues[queue], 1)))
        return -1;
    return told(cu.MemcpyDtoDAsync(to, from, size, queues[queue]));
}

static int cuda_finish(int queue) {
    return queues[queue] ? told(cu.StreamSynchronize(queues[queue])) : 0;
}

static int cuda_idle(void) {
    return told(cu.CtxSynchronize());
}

static int cuda_fill(uint64_t address, uint64_t size, uint32_t pattern) {
    CUresult result = cu.MemsetD32(address, pattern, size / sizeof pattern);
    return told(result ? result : cu.CtxSynchronize());
}

static int cuda_last_error(void) {
    return error_of_last_call;
}

const struct device cuda_device = {
    .name = "cuda",
    .open = cuda_open,
    .reserve = cuda_reserve,
    .unreserve = cuda_unreserve,
    .create = cuda_create,
    .release = cuda_release,
    .map = cuda_map,
    .unmap = cuda_unmap,
    .allow = cuda_allow,
    .export_fd = cuda_export,
    .import_fd = cuda_import,
    .create_host = cuda_create_host,
    .copy = cuda_copy,
    .finish = cuda_finish,
    .idle = cuda_idle,
    .fill = cuda_fill,
    .enter = cuda_enter,
    .leave = cuda_leave,
    .last_error = cuda_last_error,
    .no_memory = 2,
};
