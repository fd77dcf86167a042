/* A device's physical memory: chunks that are created, mapped at addresses of our choice, and handed to other processes.
 *
 * One interface, two devices: CUDA (virtual memory management, loaded at run time) and host (memfd and mmap). Every call
 * goes through the functions below, which count it, so that a test can make the n-th one fail.
 * All return 0, or a number that is not.
 */
#ifndef SALUS_DEVICE_H
#define SALUS_DEVICE_H

#include <stddef.h>
#include <stdint.h>

#define GRANULE ((uint64_t)2 << 20)

struct device {
    const char *name;
    int (*open)(int ordinal);
    int (*reserve)(uint64_t size, uint64_t *address);
    int (*unreserve)(uint64_t address, uint64_t size);
    int (*create)(uint64_t size, uint64_t *handle);
    int (*release)(uint64_t handle);
    int (*map)(uint64_t address, uint64_t size, uint64_t handle);
    int (*unmap)(uint64_t address, uint64_t size);
    int (*allow)(uint64_t address, uint64_t size);
    int (*export_fd)(uint64_t handle, int *fd);
    /* The caller keeps the descriptor. */
    int (*import_fd)(int fd, uint64_t size, uint64_t *handle);
    /* Pinned memory of the host, to be mapped like a chunk; the device reaches it over the bus. */
    int (*create_host)(uint64_t size, uint64_t *handle);
    /* Begins to copy, in one of two queues; `finish` waits for one of them, `idle` for everything the process began. */
    int (*copy)(int queue, uint64_t to, uint64_t from, uint64_t size);
    int (*finish)(int queue);
    int (*idle)(void);
    int (*fill)(uint64_t address, uint64_t size, uint32_t pattern);
    /* Sees to it that the calling thread can make the calls above; `leave` undoes it. */
    int (*enter)(void);
    void (*leave)(int entered);
    /* The number of the last error of the driver itself, for messages; and the one that says that there is no memory. */
    int (*last_error)(void);
    int no_memory;
};

extern const struct device host_device;
extern const struct device cuda_device;

#endif
