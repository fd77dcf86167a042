/* What happens around a lease: before it the lane is made whole, and at the boundary after it what is alive there becomes
 * private, the service hears of what is new, and the lease is passed on. */
#include "state.h"

int salus_arena_resume(int poison) {
    int status = 0;
    ENTER;
    if (arena.captures)
        status = -1;
    else if (arena.device) {
        arena.left = 0;
        let_go_again();
        listen_all();
        leave_now();
        status = arena.received < arena.page[SERVICE_PACKETS] ? -1 : clear_stale();
        /* A page-out that the service did not wait for. */
        if (!status && arena.away)
            status = page_in_all();
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

void own(unsigned slot) {
    if (arena.slots[slot].made)
        arena.made_bytes -= salus_slot_size(slot);
    arena.slots[slot] =
        (struct slot){.handle = arena.slots[slot].handle, .state = PRIVATE, .home = arena.slots[slot].home};
    arena.private_bytes += salus_slot_size(slot);
    arena.promoted_bytes += salus_slot_size(slot);
}

/* Whether a slot holds live data. `next` is the first of the ranges that may lie in it, and goes with the slots. */
static int is_live(unsigned slot, const uint64_t *ranges, size_t count, size_t *next) {
    uint64_t begin = arena.lane_base + salus_slot_offset(slot), end = begin + salus_slot_size(slot);
    while (*next < count && ranges[2 * *next] + ranges[2 * *next + 1] <= begin)
        ++*next;
    return *next < count && ranges[2 * *next] < end;
}

/* What there is of the lane at a boundary, in bytes. */
struct occupancy {
    uint64_t live;      /* in the lane: to be promoted */
    uint64_t unheard;   /* in the lane, and the service does not know of it */
    uint64_t empty;     /* of what was promoted */
    uint64_t to_return; /* of that, what `settle` will give back */
};

/* Counts for how many boundaries what was promoted has been empty. */
static struct occupancy look_at_lane(const uint64_t *ranges, size_t count) {
    unsigned least = now_ns() < arena.short_until ? 1 : RETURN_AFTER;
    struct occupancy sum = {0};
    size_t next = 0;
    for (unsigned slot = 0; slot < arena.top; slot++) {
        struct slot *found = &arena.slots[slot];
        int live = is_live(slot, ranges, count, &next);
        if (found->state == SHARED && live)
            sum.live += salus_slot_size(slot);
        else if (found->state == SHARED && !found->published)
            sum.unheard += salus_slot_size(slot);
        if (found->state != PRIVATE)
            continue;
        found->empty_for = live ? 0 : found->empty_for + 1;
        if (!live)
            sum.empty += salus_slot_size(slot);
        if (found->empty_for < least)
            continue;
        found->empty_for = RETURN_AFTER;
        sum.to_return += salus_slot_size(slot);
    }
    return sum;
}

/* Makes private what backs the ranges. The device may still be at work. -1: the lane cannot be left; 1: `settle` has to. */
static int promote(const uint64_t *ranges, size_t count) {
    int status = 0, fd;
    size_t next = 0;
    struct occupancy lane = {0};
    ENTER;
    arena.impatient = 1;
    /* Suspended in mid-iteration, by a service that was killed then: there is no boundary before it has been resumed. Nor
     * is there one within a capture. */
    if (arena.device && (arena.suspended || arena.captures))
        status = -1;
    else if (arena.device)
        lane = look_at_lane(ranges, count);
    /* All that it needs at once: where memory is short, room is made for each time that it asks. What is given back in a
     * moment makes room. */
    if (lane.live && want(arena.private_bytes - lane.to_return + lane.live, 0))
        status = -1;
    for (unsigned slot = 0; status >= 0 && (lane.live || lane.unheard) && slot < arena.top; slot++) {
        struct slot *found = &arena.slots[slot];
        int live = is_live(slot, ranges, count, &next);
        if (found->state == SHARED && live) {
            /* Without room of its own the lane cannot be left. */
            if (want(arena.private_bytes - lane.to_return + salus_slot_size(slot), 0)) {
                status = -1;
                break;
            }
            if (found->state != SHARED) {
                slot--; /* it was suspended while it waited; look again */
                continue;
            }
            if (found->published)
                say(TAKE, slot, 0, 0, -1);
            own(slot);
        } else if (found->state == SHARED && !found->published) {
            if (CALL(export_fd, found->handle, &fd)) {
                /* Nobody else can have it. It stays ours, and others make their own. */
                own(slot);
                continue;
            }
            found->published = 1;
            say(PUBLISH, slot, 0, 0, fd);
        }
    }
    if (status >= 0 && arena.private_bytes - lane.empty > arena.live_most)
        arena.live_most = arena.private_bytes - lane.empty;
    if (status >= 0 && lane.to_return)
        status = 1;
    flush();
    if (arena.device)
        tell_page();
    /* What was not heard did not happen: the service would hand on what is ours now. */
    if (arena.lost)
        status = -1;
    arena.impatient = 0;
    LEAVE;
    return status;
}

/* Gives back what was private and has been empty at so many boundaries. */
void drop_empty(unsigned least) {
    uint64_t least_needed;
    for (unsigned slot = 0; slot < arena.top; slot++) {
        uint64_t size = salus_slot_size(slot);
        if (arena.slots[slot].state != PRIVATE || arena.slots[slot].empty_for < least || unback(slot))
            continue;
        say(DROP, slot, 0, 0, -1);
        /* From here on it would be given back before others take its place. */
        least_needed = arena.live_most > arena.private_bytes ? arena.live_most : arena.private_bytes;
        if (arena.needed > least_needed)
            arena.needed = arena.needed - least_needed > size ? arena.needed - size : least_needed;
    }
}

/* Once the device is idle. */
static void settle(void) {
    ENTER;
    if (arena.device && !arena.captures)
        drop_empty(RETURN_AFTER);
    flush();
    if (arena.device)
        tell_page();
    LEAVE;
}

/* Clears what the job leaves in the lane, if the service says so. */
static int scrub(void) {
    int status = 0;
    ENTER;
    if (arena.captures)
        status = -1;
    for (unsigned slot = 0; arena.device && arena.page[SCRUB] && slot < arena.top && !status; slot++)
        if (arena.slots[slot].state == SHARED)
            status = CALL(fill, arena.lane_base + salus_slot_offset(slot), salus_slot_size(slot), 0) ? -1 : 0;
    LEAVE;
    return status;
}

static int has_to_scrub(void) {
    int has_to;
    pthread_mutex_lock(&arena.lock);
    has_to = arena.device && arena.page[SCRUB];
    pthread_mutex_unlock(&arena.lock);
    return has_to;
}

int salus_arena_leave(const uint64_t *ranges, size_t count, volatile uint64_t *word, uint64_t ticket, int wants_more,
                      uint64_t *when) {
    int status = promote(ranges, count);
    when[0] = now_ns();
    if (status < 0)
        return -1;
    if (salus_arena_wait())
        return -2;
    when[1] = now_ns();
    /* First what can fail: a lane that is not left has to be whole. */
    if (has_to_scrub() && scrub())
        return -1;
    if (status == 1)
        settle();
    pthread_mutex_lock(&arena.lock);
    arena.left = 1;
    pthread_mutex_unlock(&arena.lock);
    when[2] = now_ns();
    status = ticket ? salus_arena_pass(word, ticket, wants_more) : 0;
    when[3] = now_ns();
    return status;
}

/* Touches nothing of the device, and is on the way from one job to the next: it does not enter it. */
int salus_arena_pass(volatile uint64_t *word, uint64_t ticket, int wants_more) {
    int passed;
    pthread_mutex_lock(&arena.lock);
    passed = arena.device && !arena.lost && !arena.moving && !arena.suspended && !arena.out_count &&
             arena.page[PASS] == ticket && arena.page[PASS_SENT] == arena.sent && !arena.page[WAITING_FOR_MEMORY];
    if (passed) {
        arena.page[PASSED] = 2 * ticket + (wants_more != 0);
        /* In this order: whoever sees the other job run can see here why. */
        __atomic_store_n(word, 2 * ticket + 1, __ATOMIC_RELEASE);
    }
    pthread_mutex_unlock(&arena.lock);
    return passed;
}
