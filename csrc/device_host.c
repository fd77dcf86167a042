/* The host device: a chunk is a memfd, mapping is mmap. For machines without a GPU, and for tests with real processes. */
#define _GNU_SOURCE
#include "device.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

/* A process that touches memory beyond a file's end dies of a bus error. So no process can change the size of a chunk. */
#define SEALS (F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)

static int error_of_last_call;

static int failed(void) {
    error_of_last_call = errno;
    return -1;
}

static int host_open(int ordinal) {
    (void)ordinal;
    return 0;
}

static int host_reserve(uint64_t size, uint64_t *address) {
    void *found = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (found == MAP_FAILED)
        return failed();
    *address = (uint64_t)found;
    return 0;
}

static int host_unreserve(uint64_t address, uint64_t size) {
    return munmap((void *)address, size) ? failed() : 0;
}

static int host_create(uint64_t size, uint64_t *handle) {
    int fd = memfd_create("salus-chunk", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0)
        return failed();
    if (ftruncate(fd, (off_t)size) || fcntl(fd, F_ADD_SEALS, SEALS)) {
        failed();
        close(fd);
        return -1;
    }
    *handle = (uint64_t)fd;
    return 0;
}

static int host_release(uint64_t handle) {
    return close((int)handle) ? failed() : 0;
}

static int host_map(uint64_t address, uint64_t size, uint64_t handle) {
    void *found = mmap((void *)address, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, (int)handle, 0);
    return found == MAP_FAILED ? failed() : 0;
}

static int host_unmap(uint64_t address, uint64_t size) {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
    return mmap((void *)address, size, PROT_NONE, flags, -1, 0) == MAP_FAILED ? failed() : 0;
}

static int host_allow(uint64_t address, uint64_t size) {
    (void)address, (void)size;
    return 0;
}

static int host_export(uint64_t handle, int *fd) {
    *fd = fcntl((int)handle, F_DUPFD_CLOEXEC, 0);
    return *fd < 0 ? failed() : 0;
}

static int host_import(int fd, uint64_t size, uint64_t *handle) {
    struct stat found;
    int ours, seals = fcntl(fd, F_GET_SEALS);
    if (seals < 0 || (seals & SEALS) != SEALS || fstat(fd, &found) || (uint64_t)found.st_size != size) {
        errno = EINVAL;
        return failed();
    }
    ours = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (ours < 0)
        return failed();
    *handle = (uint64_t)ours;
    return 0;
}

static int host_copy(int queue, uint64_t to, uint64_t from, uint64_t size) {
    (void)queue;
    memcpy((void *)to, (const void *)from, size);
    return 0;
}

static int host_finish(int queue) {
    (void)queue;
    return 0;
}

static int host_idle(void) {
    return 0;
}

static int host_fill(uint64_t address, uint64_t size, uint32_t pattern) {
    uint32_t *words = (uint32_t *)address;
    for (uint64_t i = 0; i < size / sizeof *words; i++)
        words[i] = pattern;
    return 0;
}

static int host_enter(void) {
    return 0;
}

static void host_leave(int entered) {
    (void)entered;
}

static int host_last_error(void) {
    return error_of_last_call;
}

const struct device host_device = {
    .name = "host",
    .open = host_open,
    .reserve = host_reserve,
    .unreserve = host_unreserve,
    .create = host_create,
    .release = host_release,
    .map = host_map,
    .unmap = host_unmap,
    .allow = host_allow,
    .export_fd = host_export,
    .import_fd = host_import,
    .create_host = host_create,
    .copy = host_copy,
    .finish = host_finish,
    .idle = host_idle,
    .fill = host_fill,
    .enter = host_enter,
    .leave = host_leave,
    .last_error = host_last_error,
    .no_memory = ENOMEM,
};
