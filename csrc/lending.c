/* Memory that several processes of one job use: chunks of this arena that are lent to others, and chunks that were borrowed.
 *
 * A chunk is lent as a descriptor, and mapped by the borrower as it is: no address changes, nothing is copied, and it does
 * not matter which thread, stream or captured graph uses it. A chunk that is lent belongs to the job alone. One of the lane
 * is made private first, and the service has been told of that before anybody else gets the descriptor. As long as
 * anything is lent, nothing is paged out: what a borrower wrote would be lost.
 *
 * What was borrowed is handed to the framework as a DLPack tensor, which it keeps and returns without Python's help. Each
 * loan has a number in memory that lender and borrower share: on its way, the borrower's process, or returned.
 *
 * Borrowing has a lock of its own, and needs no arena: a process that only borrows has none.
 */
#include "state.h"

#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

/* The lender. */

void salus_arena_lend(int more) {
    ENTER;
    arena.lent = more > 0 ? arena.lent + 1 : arena.lent ? arena.lent - 1 : 0;
    if (arena.device && more > 0)
        stop_paging_out();
    LEAVE;
}

/* 0 when the slot's chunk is the job's own and the service has been told. */
static int make_own(unsigned slot) {
    while (arena.slots[slot].state == SHARED) {
        if (want(arena.private_bytes + salus_slot_size(slot), 0))
            return -1;
        if (arena.slots[slot].state != SHARED)
            break; /* it was suspended while it waited */
        if (arena.slots[slot].published)
            say(TAKE, slot, 0, 0, -1);
        own(slot);
    }
    flush();
    tell_page();
    return 0;
}

static int export_of_lane(uint64_t offset, uint64_t *base, uint64_t *size, int *fd) {
    unsigned slot = salus_slot_at(offset);
    if (slot >= arena.slot_count)
        return NOT_OURS;
    if (make_own(slot))
        return NO_MEMORY;
    if (arena.slots[slot].state != PRIVATE || arena.slots[slot].out)
        return NOT_NOW;
    *base = arena.lane_base + salus_slot_offset(slot);
    *size = salus_slot_size(slot);
    return CALL(export_fd, arena.slots[slot].handle, fd) ? REFUSED_BY_DRIVER : EXPORTED_CHUNK;
}

static int export_of_private(uint64_t offset, uint64_t *base, uint64_t *size, int *fd) {
    for (size_t i = 0; i < arena.private.count; i++) {
        const struct segment *segment = &arena.private.all[i];
        if (offset < segment->offset || offset - segment->offset >= segment->size)
            continue;
        if (segment->out)
            return NOT_NOW;
        *base = arena.private_base + segment->offset;
        *size = segment->size;
        return CALL(export_fd, segment->handle, fd) ? REFUSED_BY_DRIVER : EXPORTED_CHUNK;
    }
    return NOT_OURS;
}

int salus_arena_export(uint64_t address, uint64_t *base, uint64_t *size, int *fd) {
    int status = NOT_OURS;
    ENTER;
    if (arena.device) {
        int in_lane = address - arena.lane_base < arena.reserved;
        if (in_lane || address - arena.private_base < arena.reserved)
            status = arena.moving || arena.away ? NOT_NOW
                     : in_lane                  ? export_of_lane(address - arena.lane_base, base, size, fd)
                                                : export_of_private(address - arena.private_base, base, size, fd);
    }
    LEAVE;
    return status;
}

/* The borrower. */

struct region { /* chunks side by side, as the lender has them */
    struct region *next;
    char *key;
    const struct device *device;
    uint64_t address, size;
    unsigned count, users;
    uint64_t *sizes;
    volatile int64_t *loans;
};

/* As dlpack.h has it. */
struct tensor {
    void *data;
    struct {
        int32_t type, id;
    } device;
    int32_t dimensions;
    struct {
        uint8_t code, bits;
        uint16_t lanes;
    } element;
    int64_t *shape, *strides;
    uint64_t offset;
};
struct managed {
    struct tensor tensor;
    void *context;
    void (*deleter)(struct managed *);
};

struct loan {
    struct managed managed;
    int64_t length;
    struct region *region;
    unsigned number;
    struct loan *next;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct region *regions;
static struct loan *late; /* to be returned, once no graph is captured any more */

static const struct device *open_device(const char *name, int ordinal) {
    static const struct device *opened;
    const struct device *device = strcmp(name, "cuda") ? &host_device : &cuda_device;
    if (opened != device && device->open(ordinal))
        return NULL;
    return opened = device;
}

static void unmap_region(struct region *region, unsigned mapped) {
    uint64_t at = region->address;
    for (unsigned i = 0; i < mapped; at += region->sizes[i++])
        region->device->unmap(at, region->sizes[i]);
    region->device->unreserve(region->address, region->size);
}

static int map_region(struct region *region, const int *fds) {
    uint64_t at, handle;
    unsigned mapped = 0;
    if (region->device->reserve(region->size, &region->address))
        return -1;
    for (at = region->address; mapped < region->count; at += region->sizes[mapped++]) {
        if (region->device->import_fd(fds[mapped], region->sizes[mapped], &handle))
            break;
        int status = region->device->map(at, region->sizes[mapped], handle);
        /* What is mapped stays, without the handle. */
        region->device->release(handle);
        if (status)
            break;
    }
    if (mapped == region->count && !region->device->allow(region->address, region->size))
        return 0;
    unmap_region(region, mapped);
    return -1;
}

static void forget_region(struct region *region) {
    if (region->loans)
        munmap((void *)region->loans, LOANS * sizeof *region->loans);
    free(region->key);
    free(region->sizes);
    free(region);
}

static struct region *new_region(const struct device *device, const char *key, const int *fds, const uint64_t *sizes,
                                 unsigned count, int loans) {
    struct region *region = calloc(1, sizeof *region);
    void *found;
    if (!region)
        return NULL;
    found = mmap(NULL, LOANS * sizeof *region->loans, PROT_READ | PROT_WRITE, MAP_SHARED, loans, 0);
    region->loans = found == MAP_FAILED ? NULL : found;
    region->device = device;
    region->key = strdup(key);
    region->count = count;
    region->sizes = calloc(count, sizeof *sizes);
    if (region->loans && region->key && region->sizes) {
        memcpy(region->sizes, sizes, count * sizeof *sizes);
        for (unsigned i = 0; i < count; i++)
            region->size += sizes[i];
        if (!map_region(region, fds)) {
            region->next = regions;
            return regions = region;
        }
    }
    forget_region(region);
    return NULL;
}

static struct region *known_region(const char *key) {
    struct region *region = regions;
    while (region && strcmp(region->key, key))
        region = region->next;
    return region;
}

static void unlink_region(const struct region *region) {
    struct region **at = &regions;
    while (*at != region)
        at = &(*at)->next;
    *at = region->next;
}

/* The lender may use the memory for something else once it is returned: so the device must be done with it by then. */
static void give_back(struct loan *loan) {
    struct region *region = loan->region;
    const struct device *device = region->device;
    int entered = device->enter(), is_last = !--region->users;
    device->idle();
    if (is_last) {
        unlink_region(region);
        unmap_region(region, region->count);
    }
    __atomic_store_n(&region->loans[loan->number], RETURNED, __ATOMIC_RELEASE);
    if (is_last)
        forget_region(region);
    device->leave(entered);
    free(loan);
}

static void give_back_late_ones(void) {
    while (late) {
        struct loan *loan = late;
        late = loan->next;
        give_back(loan);
    }
}

static void drop(struct managed *managed) {
    struct loan *loan = managed->context;
    pthread_mutex_lock(&lock);
    loan->next = late;
    late = loan;
    if (!begin_driver_calls()) {
        give_back_late_ones();
        end_driver_calls();
    }
    pthread_mutex_unlock(&lock);
}

void *salus_borrow(const char *name, int ordinal, const char *key, const int *fds, const uint64_t *sizes, unsigned count,
                   int loans, uint64_t offset, uint64_t length, unsigned number) {
    const struct device *device;
    struct region *region = NULL;
    struct loan *loan = calloc(1, sizeof *loan);
    pthread_mutex_lock(&lock);
    device = loan && number < LOANS ? open_device(name, ordinal) : NULL;
    if (device) {
        int entered = device->enter();
        region = known_region(key);
        if (!region)
            region = new_region(device, key, fds, sizes, count, loans);
        device->leave(entered);
    }
    if (!region || offset > region->size || length > region->size - offset) {
        if (region && !region->users) {
            int entered = device->enter();
            unlink_region(region);
            unmap_region(region, region->count);
            forget_region(region);
            device->leave(entered);
        }
        free(loan);
        pthread_mutex_unlock(&lock);
        return NULL;
    }
    region->users++;
    region->loans[number] = getpid();
    *loan = (struct loan){.length = (int64_t)length, .region = region, .number = number};
    loan->managed = (struct managed){
        .tensor = {.data = (void *)(region->address + offset),
                   .device = {device == &cuda_device ? 2 : 1, device == &cuda_device ? ordinal : 0},
                   .dimensions = 1,
                   .element = {1, 8, 1},
                   .shape = &loan->length},
        .context = loan,
        .deleter = drop,
    };
    pthread_mutex_unlock(&lock);
    return loan;
}

int salus_is_borrowed(uint64_t address) {
    int found = 0;
    pthread_mutex_lock(&lock);
    for (struct region *region = regions; region; region = region->next)
        found |= address - region->address < region->size;
    pthread_mutex_unlock(&lock);
    return found;
}
