#define _GNU_SOURCE
#include "arena.h"
#include "device.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

/* Slots: fine where small jobs live, coarse where a large lane would have too many of them. */
static const struct {
    unsigned count;
    uint64_t size;
} regions[] = {{64, GRANULE}, {48, 4 * GRANULE}, {112, 16 * GRANULE}, {1u << 20, 64 * GRANULE}};

#define SEND_PATIENCE 2000
#define RETURN_AFTER 3 /* boundaries at which a promoted slot was found empty before the lane's chunk comes back */

enum state { EMPTY, SHARED, PRIVATE };

struct slot {
    uint64_t handle;
    uint8_t state;
    uint8_t published; /* the service has, or gave us, this very chunk */
    uint8_t empty_for; /* boundaries, while private */
    uint8_t made;      /* by us: the driver counts it as ours, whoever maps it */
    uint8_t stale;     /* it must not be touched again, and could not be unmapped yet */
    uint8_t alone;     /* made since the service is gone: nobody else can have it */
};

struct segment {
    uint64_t offset, size, handle;
};

struct segments { /* by offset */
    struct segment *all;
    size_t count, room;
};

static struct {
    pthread_mutex_t lock;
    const struct device *device;
    volatile uint64_t *page;
    int channel;
    uint64_t reserved, private_base, lane_base;
    struct segments private, lane;
    struct slot *slots;
    unsigned slot_count;
    unsigned top; /* one past the last slot that is backed */
    int holes;    /* a slot may have lost its backing since `back_segments` looked */
    uint64_t made_bytes; /* of the lane's chunks */
    uint64_t private_bytes, promoted_bytes, private_quota, lane_quota;
    uint64_t sent, received;
    int stale;           /* some slot is */
    uint64_t unanswered; /* the number of a NEW_LANE that has not been answered */
    int lost; /* the service is gone: nobody to ask, nobody to share with */
    int refused;
    struct record out[MOST_RECORDS];
    int out_fds[MOST_RECORDS];
    unsigned out_count, out_fd_count;
    uint64_t *unreleased; /* handles that the driver would not take back; it is asked again */
    size_t unreleased_count;
    long calls, fail_at;
    int error;
} arena = {.lock = PTHREAD_MUTEX_INITIALIZER};

#define CALL(operation, ...) (++arena.calls == arena.fail_at ? (arena.error = -99) : seen(arena.device->operation(__VA_ARGS__)))

static int seen(int status) {
    if (status)
        arena.error = arena.device->last_error();
    return status;
}

static uint64_t rounded(uint64_t size) {
    return (size + GRANULE - 1) / GRANULE * GRANULE;
}

/* Slots. */

uint64_t salus_slot_offset(unsigned slot) {
    uint64_t offset = 0;
    for (size_t r = 0;; r++) {
        if (slot < regions[r].count)
            return offset + slot * regions[r].size;
        slot -= regions[r].count;
        offset += regions[r].count * regions[r].size;
    }
}

uint64_t salus_slot_size(unsigned slot) {
    for (size_t r = 0;; r++) {
        if (slot < regions[r].count)
            return regions[r].size;
        slot -= regions[r].count;
    }
}

unsigned salus_slot_at(uint64_t offset) {
    unsigned slot = 0;
    for (size_t r = 0;; r++) {
        uint64_t length = regions[r].count * regions[r].size;
        if (offset < length)
            return slot + (unsigned)(offset / regions[r].size);
        slot += regions[r].count;
        offset -= length;
    }
}

static uint64_t slot_end(unsigned slot) {
    return salus_slot_offset(slot) + salus_slot_size(slot);
}

/* Segments. */

static size_t after(const struct segments *list, uint64_t offset) {
    size_t low = 0, high = list->count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (list->all[middle].offset < offset)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static struct segment *insert(struct segments *list, uint64_t offset, uint64_t size) {
    size_t at = after(list, offset);
    if (list->count == list->room) {
        size_t room = list->room ? 2 * list->room : 64;
        struct segment *all = realloc(list->all, room * sizeof *all);
        if (!all)
            return NULL;
        list->all = all;
        list->room = room;
    }
    memmove(list->all + at + 1, list->all + at, (list->count - at) * sizeof *list->all);
    list->count++;
    list->all[at] = (struct segment){offset, size, 0};
    return &list->all[at];
}

static int take_out(struct segments *list, uint64_t offset, struct segment *found) {
    size_t at = after(list, offset);
    if (at == list->count || list->all[at].offset != offset)
        return -1;
    *found = list->all[at];
    memmove(list->all + at, list->all + at + 1, (list->count - at - 1) * sizeof *list->all);
    list->count--;
    return 0;
}

/* The first gap that is large enough. In the lane, what fills a slot or more begins at one: less is promoted with it. */
static int find_gap(const struct segments *list, uint64_t size, int by_slots, uint64_t *offset) {
    uint64_t at = 0;
    for (size_t i = 0; i <= list->count; i++) {
        uint64_t end = i < list->count ? list->all[i].offset : arena.reserved;
        if (by_slots && at < end) {
            unsigned slot = salus_slot_at(at);
            if (size >= salus_slot_size(slot) && salus_slot_offset(slot) != at)
                at = slot_end(slot);
        }
        if (at + size <= end) {
            *offset = at;
            return 0;
        }
        if (i < list->count)
            at = list->all[i].offset + list->all[i].size;
    }
    return -1;
}

static uint64_t lane_bytes(void) {
    return arena.top ? slot_end(arena.top - 1) : 0;
}

/* What the service and `salus ps` see. */
static void tell_page(void) {
    arena.page[PRIVATE_BYTES] = arena.private_bytes;
    arena.page[PROMOTED_BYTES] = arena.promoted_bytes;
    arena.page[LANE_BYTES] = lane_bytes();
    arena.page[MADE_BYTES] = arena.made_bytes;
}

/* The channel. */

static void go_lost(void) {
    arena.lost = 1;
    arena.private_quota = arena.lane_quota = UINT64_MAX;
}

static void flush(void) {
    union {
        char bytes[CMSG_SPACE(sizeof arena.out_fds)];
        struct cmsghdr align;
    } control;
    struct iovec data = {arena.out, arena.out_count * sizeof *arena.out};
    struct msghdr message = {.msg_iov = &data, .msg_iovlen = 1};
    ssize_t sent;

    if (!arena.out_count)
        return;
    if (arena.out_fd_count) {
        struct cmsghdr *header;
        memset(&control, 0, sizeof control);
        message.msg_control = control.bytes;
        message.msg_controllen = CMSG_SPACE(arena.out_fd_count * sizeof(int));
        header = CMSG_FIRSTHDR(&message);
        header->cmsg_level = SOL_SOCKET;
        header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN(arena.out_fd_count * sizeof(int));
        memcpy(CMSG_DATA(header), arena.out_fds, arena.out_fd_count * sizeof(int));
    }
    if (!arena.lost) {
        int patience = SEND_PATIENCE;
        do {
            sent = sendmsg(arena.channel, &message, MSG_NOSIGNAL);
            if (sent < 0 && (errno == ETOOMANYREFS || errno == ENOBUFS || errno == ENOMEM) && patience-- > 0) {
                usleep(5000); /* too many descriptors are on their way; the service takes them in */
                errno = EINTR;
            }
        } while (sent < 0 && errno == EINTR);
        if (sent < 0)
            go_lost();
        else
            arena.page[JOB_PACKETS] = ++arena.sent;
    }
    for (unsigned i = 0; i < arena.out_fd_count; i++)
        close(arena.out_fds[i]);
    arena.out_count = arena.out_fd_count = 0;
}

static void say(uint32_t kind, unsigned slot, uint64_t a, uint64_t b, int fd) {
    if (arena.out_count == MOST_RECORDS)
        flush();
    arena.out[arena.out_count++] = (struct record){kind, slot, a, b};
    if (fd >= 0)
        arena.out_fds[arena.out_fd_count++] = fd;
}

/* Backing. */

static void let_go(uint64_t handle) {
    uint64_t *more;
    if (!CALL(release, handle))
        return;
    more = realloc(arena.unreleased, (arena.unreleased_count + 1) * sizeof *more);
    if (more) {
        arena.unreleased = more;
        more[arena.unreleased_count++] = handle;
    }
}

static void let_go_again(void) {
    size_t count = arena.unreleased_count;
    arena.unreleased_count = 0;
    for (size_t i = 0; i < count; i++)
        let_go(arena.unreleased[i]);
}

static int back(unsigned slot, uint64_t handle, int made) {
    uint64_t address = arena.lane_base + salus_slot_offset(slot), size = salus_slot_size(slot);
    if (CALL(map, address, size, handle))
        return -1;
    if (CALL(allow, address, size)) {
        arena.device->unmap(address, size);
        return -1;
    }
    arena.slots[slot] = (struct slot){.handle = handle, .state = SHARED, .published = !made, .made = (uint8_t)made, .alone = made && arena.lost};
    if (made)
        arena.made_bytes += size;
    if (slot >= arena.top)
        arena.top = slot + 1;
    return 0;
}

/* A slot whose memory could not be given back stays as it is: better too much than something in use. */
static int unback(unsigned slot) {
    struct slot *found = &arena.slots[slot];
    uint64_t handle = found->handle;
    if (found->state == EMPTY)
        return 0;
    if (CALL(unmap, arena.lane_base + salus_slot_offset(slot), salus_slot_size(slot)))
        return -1;
    if (found->state == PRIVATE) {
        arena.private_bytes -= salus_slot_size(slot);
        arena.promoted_bytes -= salus_slot_size(slot);
    } else if (found->made)
        arena.made_bytes -= salus_slot_size(slot);
    *found = (struct slot){0};
    arena.holes = 1;
    while (arena.top && arena.slots[arena.top - 1].state == EMPTY)
        arena.top--;
    let_go(handle);
    return 0;
}

static int back_with_new(unsigned slot) {
    uint64_t handle;
    if (CALL(create, salus_slot_size(slot), &handle))
        return -1;
    if (back(slot, handle, 1)) {
        let_go(handle);
        return -1;
    }
    return 0;
}

/* What backs the slot is not ours any more. If it cannot be unmapped now, that is tried again before anything runs. */
static void give_up(unsigned slot) {
    if (slot < arena.slot_count && arena.slots[slot].state == SHARED && unback(slot))
        arena.slots[slot].stale = arena.stale = 1;
}

/* What cannot be had leaves the slot empty: before the job runs, it gets a chunk of its own making. */
static void take_chunk(unsigned slot, int fd) {
    uint64_t handle;
    give_up(slot);
    if (slot >= arena.slot_count || arena.slots[slot].state != EMPTY || fd < 0)
        return;
    if (!CALL(import_fd, fd, salus_slot_size(slot), &handle) && back(slot, handle, 0))
        let_go(handle);
}

static void answer_new_lane(void) {
    if (arena.unanswered && !arena.stale) {
        say(LEFT, 0, 0, arena.unanswered, -1);
        arena.unanswered = 0;
    }
}

static void leave_lane(uint64_t number) {
    for (unsigned slot = arena.top; slot-- > 0;)
        give_up(slot);
    arena.unanswered = number;
    answer_new_lane();
}

/* 0 when nothing is mapped that must not be touched. */
static int clear_stale(void) {
    int left = 0;
    for (unsigned slot = arena.top; arena.stale && slot-- > 0;)
        if (arena.slots[slot].stale && unback(slot))
            left = 1;
    arena.stale = left;
    answer_new_lane();
    return left ? -1 : 0;
}

static void obey(const struct record *record, int fd) {
    switch (record->kind) {
    case QUOTA:
        arena.private_quota = record->a;
        arena.lane_quota = record->b;
        break;
    case REFUSED:
        arena.refused = 1;
        break;
    case CHUNK:
        take_chunk(record->slot, fd);
        break;
    case HOLE:
        give_up(record->slot);
        break;
    case NEW_LANE:
        leave_lane(record->b);
        break;
    }
}

/* One packet; waits for it. */
static void receive(void) {
    struct record records[MOST_RECORDS];
    int fds[MOST_RECORDS];
    unsigned count, fd_count = 0, next = 0;
    union {
        char bytes[CMSG_SPACE(sizeof fds)];
        struct cmsghdr align;
    } control;
    struct iovec data = {records, sizeof records};
    struct msghdr message = {
        .msg_iov = &data, .msg_iovlen = 1, .msg_control = control.bytes, .msg_controllen = sizeof control.bytes};
    struct cmsghdr *header;
    ssize_t got;

    do
        got = recvmsg(arena.channel, &message, MSG_CMSG_CLOEXEC);
    while (got < 0 && errno == EINTR);
    if (got <= 0) {
        go_lost();
        return;
    }
    arena.received++;
    for (header = CMSG_FIRSTHDR(&message); header; header = CMSG_NXTHDR(&message, header))
        if (header->cmsg_level == SOL_SOCKET && header->cmsg_type == SCM_RIGHTS) {
            fd_count = (unsigned)((header->cmsg_len - CMSG_LEN(0)) / sizeof(int));
            memcpy(fds, CMSG_DATA(header), fd_count * sizeof(int));
        }
    count = (unsigned)((size_t)got / sizeof *records);
    for (unsigned i = 0; i < count; i++) {
        int fd = records[i].kind == CHUNK && next < fd_count ? fds[next++] : -1;
        obey(&records[i], fd);
    }
    for (unsigned i = 0; i < fd_count; i++)
        close(fds[i]);
}

/* Takes in what has been sent so far. The page says how much that is, so that nothing on its way is missed. */
static void listen_all(void) {
    while (!arena.lost && arena.received < arena.page[SERVICE_PACKETS])
        receive();
}

/* Waits until the quotas are this large; -1 if they never will be. 0 is: what it has. */
static int want(uint64_t private_bytes, uint64_t lane) {
    if (private_bytes <= arena.private_quota && lane <= arena.lane_quota)
        return 0;
    if (!arena.lost)
        listen_all();
    if (private_bytes <= arena.private_quota && lane <= arena.lane_quota)
        return 0;
    arena.refused = 0;
    arena.page[WAITING_FOR_MEMORY] = 1;
    tell_page();
    say(WANT, 0, private_bytes > arena.private_bytes ? private_bytes : arena.private_bytes,
        lane > lane_bytes() ? lane : lane_bytes(), -1);
    flush();
    while (!arena.refused && (private_bytes > arena.private_quota || lane > arena.lane_quota)) {
        receive();
        flush(); /* what it answered, if it had to leave its lane */
    }
    arena.page[WAITING_FOR_MEMORY] = 0;
    return arena.refused ? -1 : 0;
}

/* In and out. */

#define ENTER                                                                                                          \
    int entered_;                                                                                                      \
    pthread_mutex_lock(&arena.lock);                                                                                   \
    entered_ = arena.device ? arena.device->enter() : 0
#define LEAVE                                                                                                          \
    do {                                                                                                               \
        if (arena.device)                                                                                              \
            arena.device->leave(entered_);                                                                             \
        pthread_mutex_unlock(&arena.lock);                                                                             \
    } while (0)

int salus_arena_open(const char *device, int ordinal, volatile uint64_t *page, int channel, uint64_t reserve) {
    const struct device *chosen = strcmp(device, "cuda") ? &host_device : &cuda_device;
    int status;
    pthread_mutex_lock(&arena.lock);
    if (arena.device) {
        pthread_mutex_unlock(&arena.lock);
        return -10;
    }
    arena.device = chosen;
    arena.page = page;
    arena.channel = channel;
    arena.sent = arena.received = 0;
    arena.reserved = rounded(reserve);
    arena.private_quota = arena.lane_quota = arena.private_bytes = arena.promoted_bytes = arena.made_bytes = 0;
    arena.lost = arena.refused = arena.stale = 0;
    arena.unanswered = 0;
    arena.top = 0;
    arena.slot_count = salus_slot_at(arena.reserved);
    /* Its first call, `open`, makes what `enter` needs. */
    status = seen(chosen->open(ordinal));
    if (!status) {
        int entered = chosen->enter();
        arena.slots = calloc(arena.slot_count ? arena.slot_count : 1, sizeof *arena.slots);
        if (!arena.slots)
            status = -11;
        else if (CALL(reserve, arena.reserved, &arena.private_base))
            status = -12;
        else if (CALL(reserve, arena.reserved, &arena.lane_base)) {
            chosen->unreserve(arena.private_base, arena.reserved);
            status = -12;
        }
        chosen->leave(entered);
    }
    if (status) {
        free(arena.slots);
        arena.slots = NULL;
        arena.slot_count = 0;
        arena.device = NULL;
    }
    pthread_mutex_unlock(&arena.lock);
    return status;
}

void salus_arena_close(void) {
    ENTER;
    if (arena.device) {
        struct segment found;
        for (unsigned slot = arena.top; slot-- > 0;)
            unback(slot);
        let_go_again();
        while (arena.private.count && !take_out(&arena.private, arena.private.all[0].offset, &found)) {
            arena.device->unmap(arena.private_base + found.offset, found.size);
            arena.device->release(found.handle);
        }
        arena.device->unreserve(arena.private_base, arena.reserved);
        arena.device->unreserve(arena.lane_base, arena.reserved);
        arena.device->leave(entered_);
        for (unsigned i = 0; i < arena.out_fd_count; i++)
            close(arena.out_fds[i]);
        arena.out_count = arena.out_fd_count = 0;
        free(arena.slots);
        free(arena.private.all);
        free(arena.lane.all);
        free(arena.unreleased);
        arena.unreleased = NULL;
        arena.unreleased_count = 0;
        arena.slots = NULL;
        arena.slot_count = 0;
        arena.private = arena.lane = (struct segments){0};
        arena.device = NULL;
    }
    pthread_mutex_unlock(&arena.lock);
}

int salus_arena_last_error(void) {
    return arena.error;
}

static void *private_alloc(uint64_t size) {
    struct segment *made;
    uint64_t offset, handle, address;
    if (find_gap(&arena.private, size, 0, &offset) || want(arena.private_bytes + size, 0))
        return NULL;
    address = arena.private_base + offset;
    if (CALL(create, size, &handle))
        return NULL;
    if (CALL(map, address, size, handle))
        goto release;
    if (CALL(allow, address, size))
        goto unmap;
    made = insert(&arena.private, offset, size);
    if (!made)
        goto unmap;
    made->handle = handle;
    arena.private_bytes += size;
    tell_page();
    return (void *)address;
unmap:
    arena.device->unmap(address, size);
release:
    let_go(handle);
    return NULL;
}

static void *lane_alloc(uint64_t size) {
    uint64_t offset;
    unsigned first, last;
    if (find_gap(&arena.lane, size, 1, &offset))
        return NULL;
    first = salus_slot_at(offset);
    last = salus_slot_at(offset + size - 1);
    if (last >= arena.slot_count || want(0, slot_end(last)) || !insert(&arena.lane, offset, size))
        return NULL;
    for (unsigned slot = first; slot <= last; slot++)
        if (arena.slots[slot].state == EMPTY && back_with_new(slot)) {
            struct segment gone;
            /* What was made for it stays: the lane has it, and the next one will want it. */
            take_out(&arena.lane, offset, &gone);
            tell_page();
            return NULL;
        }
    tell_page();
    return (void *)(arena.lane_base + offset);
}

void *salus_private_alloc(size_t size, int device, void *stream) {
    void *found;
    (void)device, (void)stream;
    ENTER;
    found = arena.device && size ? private_alloc(rounded(size)) : NULL;
    LEAVE;
    return found;
}

void salus_private_free(void *pointer, size_t size, int device, void *stream) {
    struct segment found;
    (void)size, (void)device, (void)stream;
    ENTER;
    if (arena.device && !take_out(&arena.private, (uint64_t)pointer - arena.private_base, &found)) {
        if (CALL(unmap, (uint64_t)pointer, found.size)) {
            /* Still mapped: keep the addresses, so that nobody gets them again. */
            struct segment *kept = insert(&arena.private, found.offset, found.size);
            if (kept)
                kept->handle = found.handle;
        } else {
            let_go(found.handle);
            arena.private_bytes -= found.size;
        }
        tell_page();
    }
    LEAVE;
}

void *salus_lane_alloc(size_t size, int device, void *stream) {
    void *found;
    (void)device, (void)stream;
    ENTER;
    found = arena.device && size ? lane_alloc(rounded(size)) : NULL;
    LEAVE;
    return found;
}

void salus_lane_free(void *pointer, size_t size, int device, void *stream) {
    struct segment found;
    (void)size, (void)device, (void)stream;
    ENTER;
    /* The chunks stay: they are the lane's. */
    if (arena.device)
        (void)take_out(&arena.lane, (uint64_t)pointer - arena.lane_base, &found);
    LEAVE;
}

/* Around a lease. */

static int back_segments(void) {
    if (!arena.holes)
        return 0;
    for (size_t i = 0; i < arena.lane.count; i++) {
        const struct segment *segment = &arena.lane.all[i];
        unsigned last = salus_slot_at(segment->offset + segment->size - 1);
        for (unsigned slot = salus_slot_at(segment->offset); slot <= last; slot++)
            if (arena.slots[slot].state == EMPTY && back_with_new(slot))
                return -1;
    }
    arena.holes = 0;
    return 0;
}

int salus_arena_resume(int poison) {
    int status = 0;
    ENTER;
    if (arena.device) {
        let_go_again();
        listen_all();
        status = clear_stale();
        if (!status)
            status = back_segments();
        for (unsigned slot = 0; slot < arena.top && !status && poison; slot++)
            if (arena.slots[slot].state == SHARED)
                status = CALL(fill, arena.lane_base + salus_slot_offset(slot), salus_slot_size(slot), 0xFFFFFFFFu);
        flush();
        tell_page();
    }
    LEAVE;
    return status;
}

int salus_arena_would_promote(const uint64_t *ranges, size_t count) {
    int found = 0;
    ENTER;
    for (size_t i = 0; arena.device && i < count && !found; i++) {
        uint64_t begin = ranges[2 * i] - arena.lane_base;
        unsigned last = salus_slot_at(begin + ranges[2 * i + 1] - 1);
        for (unsigned slot = salus_slot_at(begin); slot <= last && !found; slot++)
            found = arena.slots[slot].state == SHARED;
    }
    LEAVE;
    return found;
}

static void own(unsigned slot) {
    if (arena.slots[slot].made)
        arena.made_bytes -= salus_slot_size(slot);
    arena.slots[slot] = (struct slot){.handle = arena.slots[slot].handle, .state = PRIVATE};
    arena.private_bytes += salus_slot_size(slot);
    arena.promoted_bytes += salus_slot_size(slot);
}

int salus_arena_yield(const uint64_t *ranges, size_t count) {
    int status = 0, fd;
    size_t next = 0;
    ENTER;
    for (unsigned slot = 0; arena.device && slot < arena.top; slot++) {
        struct slot *found = &arena.slots[slot];
        uint64_t begin = arena.lane_base + salus_slot_offset(slot), end = begin + salus_slot_size(slot);
        int live;
        if (found->state == EMPTY)
            continue;
        while (next < count && ranges[2 * next] + ranges[2 * next + 1] <= begin)
            next++;
        live = next < count && ranges[2 * next] < end;
        if (found->state == SHARED && live) {
            /* It needs room of its own; without it the lane cannot be left. */
            if (want(arena.private_bytes + salus_slot_size(slot), 0)) {
                status = -1;
                break;
            }
            if (found->published)
                say(TAKE, slot, 0, 0, -1);
            own(slot);
        } else if (found->state == PRIVATE) {
            found->empty_for = live ? 0 : found->empty_for + 1;
            if (found->empty_for >= RETURN_AFTER)
                status = 1;
        } else if (!found->published) {
            if (CALL(export_fd, found->handle, &fd)) {
                /* Nobody else can have it. It stays ours, and others make their own. */
                own(slot);
                continue;
            }
            found->published = 1;
            say(PUBLISH, slot, 0, 0, fd);
        }
    }
    flush();
    if (arena.device)
        tell_page();
    /* What was not heard did not happen: the service would hand on what is ours now. */
    if (arena.lost)
        status = -1;
    LEAVE;
    return status;
}

int salus_arena_settle(void) {
    ENTER;
    for (unsigned slot = 0; arena.device && slot < arena.top; slot++)
        if (arena.slots[slot].state == PRIVATE && arena.slots[slot].empty_for >= RETURN_AFTER && !unback(slot))
            say(DROP, slot, 0, 0, -1);
    flush();
    if (arena.device)
        tell_page();
    LEAVE;
    return 0;
}

int salus_arena_detach(void) {
    int status = 0;
    ENTER;
    if (arena.device) {
        go_lost();
        for (unsigned slot = arena.top; slot-- > 0;)
            if (!arena.slots[slot].alone)
                give_up(slot);
        status = clear_stale();
        if (!status)
            status = back_segments();
        tell_page();
    }
    LEAVE;
    return status;
}

int salus_arena_listen(void) {
    ENTER;
    if (arena.device) {
        listen_all();
        (void)clear_stale();
        flush();
        tell_page();
    }
    LEAVE;
    return 0;
}

/* Tests. */

void salus_arena_fail_at(long call) {
    arena.calls = 0;
    arena.fail_at = call;
}

long salus_arena_calls(void) {
    return arena.calls;
}
