#include "state.h"

#include <unistd.h>

struct arena arena = {.lock = PTHREAD_MUTEX_INITIALIZER};

int seen(int status) {
    if (status)
        arena.error = arena.device->last_error();
    return status;
}

static uint64_t rounded(uint64_t size) {
    return (size + GRANULE - 1) / GRANULE * GRANULE;
}

uint64_t lane_bytes(void) {
    return arena.top ? slot_end(arena.top - 1) : 0;
}

/* What the service and `salus ps` see. */
void tell_page(void) {
    arena.page[PRIVATE_BYTES] = arena.private_bytes;
    arena.page[PROMOTED_BYTES] = arena.promoted_bytes;
    arena.page[LANE_BYTES] = lane_bytes();
    arena.page[MADE_BYTES] = arena.made_bytes;
    arena.page[OUT_BYTES] = arena.out_bytes;
    arena.page[HOME_BYTES] = arena.home_bytes;
    arena.page[NEEDED_BYTES] = arena.needed;
}

/* Backing. */

void let_go(uint64_t handle) {
    uint64_t *more;
    if (!CALL(release, handle))
        return;
    more = realloc(arena.unreleased, (arena.unreleased_count + 1) * sizeof *more);
    if (more) {
        arena.unreleased = more;
        more[arena.unreleased_count++] = handle;
    }
}

void let_go_again(void) {
    size_t count = arena.unreleased_count;
    arena.unreleased_count = 0;
    for (size_t i = 0; i < count; i++)
        let_go(arena.unreleased[i]);
}

int map_and_allow(uint64_t address, uint64_t size, uint64_t handle) {
    if (CALL(map, address, size, handle))
        return -1;
    if (CALL(allow, address, size)) {
        arena.device->unmap(address, size);
        return -1;
    }
    return 0;
}

static int back(unsigned slot, uint64_t handle, int made) {
    uint64_t size = salus_slot_size(slot);
    if (map_and_allow(arena.lane_base + salus_slot_offset(slot), size, handle))
        return -1;
    arena.slots[slot] = (struct slot){.handle = handle, .state = SHARED, .published = !made, .made = (uint8_t)made, .alone = made && arena.lost};
    if (made)
        arena.made_bytes += size;
    if (slot >= arena.top)
        arena.top = slot + 1;
    return 0;
}

/* It is unmapped. */
static void forget_backing(unsigned slot) {
    struct slot *found = &arena.slots[slot];
    uint64_t handle = found->handle, size = salus_slot_size(slot);
    int out = found->out, parked = found->parked;
    struct home home = found->home;
    if (found->state == PRIVATE) {
        arena.private_bytes -= size;
        arena.promoted_bytes -= size;
    } else if (found->made)
        arena.made_bytes -= size;
    *found = (struct slot){0};
    arena.holes = 1;
    while (arena.top && arena.slots[arena.top - 1].state == EMPTY)
        arena.top--;
    if (out)
        arena.out_bytes -= size;
    if (!out || parked)
        let_go(handle);
    free_home(&home, size);
}

/* A slot whose memory could not be given back stays as it is: better too much than something in use. */
int unback(unsigned slot) {
    if (arena.slots[slot].state == EMPTY)
        return 0;
    if (CALL(unmap, arena.lane_base + salus_slot_offset(slot), salus_slot_size(slot)))
        return -1;
    forget_backing(slot);
    return 0;
}

static int create(uint64_t size, uint64_t *handle) {
    if (arena.scarce && arena.scarce--) {
        arena.error = arena.device->no_memory;
        return -1;
    }
    return CALL(create, size, handle);
}

/* What the quota allows may not be there for a moment: others outside of Salus took it, or the driver did, for a library
 * that a job loaded. The service sees that before long and makes room. An error would be this job's end. */
static int make_chunk(uint64_t size, uint64_t *handle) {
    uint64_t since = now_ns();
    int status;
    while ((status = create(size, handle)) && arena.error == arena.device->no_memory && !arena.lost &&
           now_ns() - since < SCARCE_NS)
        usleep(RETRY_US);
    return status;
}

static int back_with_new(unsigned slot) {
    uint64_t handle;
    if (make_chunk(salus_slot_size(slot), &handle))
        return -1;
    if (back(slot, handle, 1)) {
        let_go(handle);
        return -1;
    }
    return 0;
}

int back_segments(void) {
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

/* What backs the slot is not ours any more. If it cannot be unmapped now, that is tried again before anything runs. */
static void give_up(unsigned slot) {
    if (slot < arena.slot_count && arena.slots[slot].state == SAVED && arena.slots[slot].parked) {
        arena.slots[slot].parked = 0;
        let_go(arena.slots[slot].handle);
    }
    if (slot < arena.slot_count && arena.slots[slot].state == SHARED && unback(slot))
        arena.slots[slot].stale = arena.stale = 1;
}

/* Neighbours are unmapped by one call, which costs as much as for one of them. */
void give_up_all(void) {
    for (unsigned slot = 0, next; slot < arena.top; slot = next) {
        for (next = slot; next < arena.top && arena.slots[next].state == SHARED; next++)
            ;
        if (next < slot + 2) {
            next = slot + 1;
            give_up(slot);
            continue;
        }
        uint64_t start = salus_slot_offset(slot);
        int together = !CALL(unmap, arena.lane_base + start, slot_end(next - 1) - start);
        for (unsigned i = next; i-- > slot;)
            together ? forget_backing(i) : give_up(i);
    }
}

/* What cannot be had leaves the slot empty: before the job runs, it gets a chunk of its own making. */
static void take_chunk(unsigned slot, int fd) {
    uint64_t handle;
    give_up(slot);
    if (slot < arena.slot_count && arena.slots[slot].state == SAVED && fd >= 0) {
        arena.slots[slot].parked = !CALL(import_fd, fd, salus_slot_size(slot), &arena.slots[slot].handle);
        return;
    }
    if (slot >= arena.slot_count || arena.slots[slot].state != EMPTY || fd < 0)
        return;
    if (!CALL(import_fd, fd, salus_slot_size(slot), &handle) && back(slot, handle, 0))
        let_go(handle);
}

static void answer_new_lane(void) {
    if (arena.unanswered && !arena.stale && !arena.leaves) {
        say(LEFT, 0, 0, arena.unanswered, -1);
        arena.unanswered = 0;
    }
}

void leave_now(void) {
    if (arena.leaves && !arena.captures) {
        arena.leaves = 0;
        give_up_all();
        answer_new_lane();
    }
}

/* 0 when nothing is mapped that must not be touched. */
int clear_stale(void) {
    int left = 0;
    if (arena.captures)
        return arena.stale ? -1 : 0;
    for (unsigned slot = arena.top; arena.stale && slot-- > 0;)
        if (arena.slots[slot].stale && unback(slot))
            left = 1;
    arena.stale = left;
    answer_new_lane();
    return left ? -1 : 0;
}

void obey(const struct record *record, int fd) {
    if (record->kind != PAGE_OUT)
        leave_now();
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
        arena.unanswered = record->b;
        arena.leaves = 1;
        if (!arena.may_leave_late)
            leave_now();
        break;
    case PAGE_OUT:
    case PAGE_IN:
    case RESUME:
        order_paging((int)record->kind, record->a != 0);
        break;
    case PREPARE:
        arena.prepares = arena.keep_homes = 1; /* it is only asked for where the host takes everybody */
        arena.short_until = now_ns() + SHORT_NS;
        break;
    }
}

/* In and out. */

static int reserve_all(void) {
    uint64_t *bases[] = {&arena.private_base, &arena.lane_base, &arena.home_base, &arena.stage_base};
    for (size_t i = 0; i < sizeof bases / sizeof *bases; i++)
        if (CALL(reserve, arena.reserved, bases[i])) {
            while (i-- > 0)
                arena.device->unreserve(*bases[i], arena.reserved);
            return -12;
        }
    return 0;
}

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
    arena.lost = arena.refused = arena.stale = arena.left = 0;
    arena.lent = 0;
    arena.needed = arena.live_most = arena.short_until = 0;
    arena.unanswered = 0;
    arena.leaves = 0;
    arena.moving = arena.suspended = arena.away = arena.prepares = arena.alone = 0;
    arena.keep_homes = 0;
    arena.out_bytes = arena.home_bytes = arena.spare_bytes = 0;
    arena.top = 0;
    arena.slot_count = salus_slot_at(arena.reserved);
    /* Its first call, `open`, makes what `enter` needs. */
    status = seen(chosen->open(ordinal));
    if (!status) {
        int entered = chosen->enter();
        arena.slots = calloc(arena.slot_count ? arena.slot_count : 1, sizeof *arena.slots);
        if (!arena.slots)
            status = -11;
        else
            status = reserve_all();
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
        arena.keep_homes = 0;
        for (unsigned slot = arena.top; slot-- > 0;)
            unback(slot);
        let_go_again();
        while (arena.private.count && !take_out(&arena.private, arena.private.all[0].offset, &found)) {
            arena.device->unmap(arena.private_base + found.offset, found.size);
            if (!found.out)
                arena.device->release(found.handle);
            free_home(&found.home, found.size);
        }
        free_spares(UINT64_MAX);
        arena.device->unreserve(arena.private_base, arena.reserved);
        arena.device->unreserve(arena.lane_base, arena.reserved);
        arena.device->unreserve(arena.home_base, arena.reserved);
        arena.device->unreserve(arena.stage_base, arena.reserved);
        arena.device->leave(entered_);
        for (unsigned i = 0; i < arena.out_fd_count; i++)
            close(arena.out_fds[i]);
        arena.out_count = arena.out_fd_count = 0;
        free(arena.slots);
        free(arena.private.all);
        free(arena.lane.all);
        free(arena.homes.all);
        free(arena.unreleased);
        arena.unreleased = NULL;
        arena.unreleased_count = 0;
        arena.slots = NULL;
        arena.slot_count = 0;
        arena.private = arena.lane = arena.homes = (struct segments){0};
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
    /* In this order: while it waits, others may come and go. */
    if (want(arena.private_bytes + size, 0) || find_gap(&arena.private, size, 0, &offset))
        return NULL;
    address = arena.private_base + offset;
    if (make_chunk(size, &handle))
        return NULL;
    if (map_and_allow(address, size, handle)) {
        let_go(handle);
        return NULL;
    }
    made = insert(&arena.private, offset, size);
    if (!made) {
        arena.device->unmap(address, size);
        let_go(handle);
        return NULL;
    }
    made->handle = handle;
    arena.private_bytes += size;
    tell_page();
    return (void *)address;
}

struct place { /* in the lane */
    uint64_t offset;
    unsigned first, last; /* slots */
};

static int find_place(uint64_t size, struct place *place) {
    if (find_gap(&arena.lane, size, 1, &place->offset))
        return -1;
    place->first = salus_slot_at(place->offset);
    place->last = salus_slot_at(place->offset + size - 1);
    return place->last >= arena.slot_count ? -1 : 0;
}

static void *take_place(const struct place *place, uint64_t size) {
    if (!insert(&arena.lane, place->offset, size))
        return NULL;
    arena.lane_changes++;
    return (void *)(arena.lane_base + place->offset);
}

/* Where nothing has to be made or waited for: the device is not asked for anything, so nobody needs to enter it. */
static void *lane_alloc_there(uint64_t size) {
    struct place place;
    if (find_place(size, &place) || !may_have(0, slot_end(place.last)))
        return NULL;
    for (unsigned slot = place.first; slot <= place.last; slot++)
        if (arena.slots[slot].state == EMPTY)
            return NULL;
    return take_place(&place, size);
}

static void *lane_alloc(uint64_t size) {
    struct place planned, place;
    uint64_t changes;
    void *found;
    do {
        changes = arena.lane_changes;
        if (find_place(size, &planned) || want(0, slot_end(planned.last)))
            return NULL;
        place = planned;
        /* While it waited, others may have come and gone. */
        if (arena.lane_changes != changes && find_place(size, &place))
            return NULL;
    } while (place.offset != planned.offset);
    found = take_place(&place, size);
    for (unsigned slot = place.first; found && slot <= place.last; slot++)
        if (arena.slots[slot].state == EMPTY && back_with_new(slot)) {
            struct segment gone;
            /* What was made for it stays: the lane has it, and the next one will want it. */
            take_out(&arena.lane, place.offset, &gone);
            found = NULL;
        }
    tell_page();
    return found;
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
                *kept = found;
        } else {
            if (found.out)
                arena.out_bytes -= found.size;
            else
                let_go(found.handle);
            free_home(&found.home, found.size);
            arena.private_bytes -= found.size;
        }
        tell_page();
    }
    LEAVE;
}

void *salus_lane_alloc(size_t size, int device, void *stream) {
    void *found = NULL;
    (void)device, (void)stream;
    pthread_mutex_lock(&arena.lock);
    if (arena.device && size) {
        found = lane_alloc_there(rounded(size));
        if (!found) {
            int entered = arena.device->enter();
            found = lane_alloc(rounded(size));
            if (arena.device)
                arena.device->leave(entered);
        }
    }
    pthread_mutex_unlock(&arena.lock);
    return found;
}

/* The chunks stay: they are the lane's. So nothing is asked of the device here either. */
void salus_lane_free(void *pointer, size_t size, int device, void *stream) {
    struct segment found;
    (void)size, (void)device, (void)stream;
    pthread_mutex_lock(&arena.lock);
    if (arena.device && !take_out(&arena.lane, (uint64_t)pointer - arena.lane_base, &found))
        arena.lane_changes++;
    pthread_mutex_unlock(&arena.lock);
}

const uint64_t *salus_arena_lane_changes(void) {
    return &arena.lane_changes;
}

/* Without the service, and with it again. */

int come_back_alone(void) {
    int status;
    arena.left = 0;
    leave_now();
    for (unsigned slot = arena.top; slot-- > 0;)
        if (!arena.slots[slot].alone)
            give_up(slot);
    status = clear_stale();
    if (!status)
        status = page_in_all();
    if (!status)
        status = back_segments();
    tell_page();
    return status;
}

int salus_arena_detach(void) {
    int status = 0;
    ENTER;
    if (arena.captures)
        status = -1;
    else if (arena.device) {
        arena.alone = 1;
        go_lost();
        status = come_back_alone();
    }
    LEAVE;
    return status;
}

int salus_arena_where(void) {
    int where;
    pthread_mutex_lock(&arena.lock);
    /* What is under way is undone when the new service is there. */
    where = arena.moving == PAGE_OUT || arena.moving == PAGE_IN ? (arena.suspended && !arena.suspends ? 2 : 0)
            : arena.suspended                                   ? 2
                                                                : arena.away;
    pthread_mutex_unlock(&arena.lock);
    return where;
}

int salus_arena_reconnect(volatile uint64_t *page, int channel, int holds) {
    int status = -1;
    ENTER;
    if (arena.captures)
        status = 1;
    else if (arena.device) {
        page[WAITING_FOR_MEMORY] = arena.page[WAITING_FOR_MEMORY];
        arena.page = page;
        close(arena.channel);
        arena.channel = channel;
        arena.sent = arena.received = 0;
        arena.lost = arena.refused = arena.prepares = 0;
        arena.unanswered = 0;
        arena.left = arena.left && !holds;
        leave_now();
        undo_paging();
        /* Until the service says more. */
        arena.private_quota = arena.private_bytes;
        arena.lane_quota = lane_bytes();
        for (unsigned slot = arena.top; slot-- > 0;) {
            struct slot *found = &arena.slots[slot];
            found->alone = 0;
            if (found->state == PRIVATE)
                say(OWN, slot, 0, 0, -1);
            else if (holds)
                found->published = 0;
            else
                give_up(slot);
        }
        (void)clear_stale();
        flush();
        tell_page();
        status = 0;
    }
    LEAVE;
    return status;
}

int salus_arena_listen(void) {
    int put_off = 0;
    ENTER;
    if (arena.captures)
        put_off = arena.leaves || arena.stale || arena.moving || arena.received < arena.page[SERVICE_PACKETS];
    else if (arena.device) {
        /* One that is paged out too leaves its lane while its memory is copied. */
        arena.may_leave_late = 1;
        listen_all();
        arena.may_leave_late = 0;
        if (arena.moving != PAGE_OUT)
            leave_now();
        (void)clear_stale();
        flush();
        tell_page();
    }
    LEAVE;
    return put_off;
}

int salus_arena_has_to_page(void) {
    int found;
    pthread_mutex_lock(&arena.lock);
    found = arena.device ? (arena.moving ? 1 : arena.prepares ? 2 : 0) : 0;
    arena.prepares = 0;
    pthread_mutex_unlock(&arena.lock);
    return found;
}

/* Tests. */

void salus_arena_fail_at(long call) {
    arena.calls = 0;
    arena.fail_at = call;
}

long salus_arena_calls(void) {
    return arena.calls;
}

void salus_arena_scarce(long chunks) {
    arena.scarce = chunks;
}
