/* To the host and back, at the same addresses.
 *
 * What is paged out stays within reach: its place is taken by pinned host memory (its home), which the device reads and
 * writes over the bus. So a script that looks at its parameters between iterations, or fills its next batch, finds them,
 * only slower; there is no address that must not be touched. Only while a chunk changes its place must nobody use it.
 * So nothing is moved unless the device is idle and every other thread is known to rest. As a rule the caller holds Python's
 * lock, and looks where each thread let go of it (python.c). From within an allocation that cannot be done: there, all
 * others must have done next to nothing for a while.
 *
 * On the way in, the next group is copied while the one before changes its place. On the way out that would be slower: the
 * driver waits for what the device has written to the host, and the small chunks are many.
 */
#include "state.h"

#include <time.h>
#include <unistd.h>

#define MOST_UNITS 1024
#define GROUP_BYTES ((uint64_t)64 << 20)
#define PATIENCE_MS 2000
#define WOKE_NS 100000
#define ACCESS_MS 10000
#define CAREFUL_BYTES ((uint64_t)64 << 20)

struct unit {
    uint64_t address, size;
    struct slot *slot; /* or NULL: a private segment */
    uint64_t *handle;
    struct home *home;
    uint8_t *out;
    uint64_t fresh, stage; /* on the way in: the new chunk, and where it is mapped meanwhile */
};

static struct unit units[MOST_UNITS];

uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static uint64_t now_ms(void) {
    return now_ns() / 1000000;
}

/* What is to be moved. */

static void set_out(const struct unit *unit, int out) {
    *unit->out = (uint8_t)out;
    arena.out_bytes += out ? unit->size : -unit->size;
}

static int holds_segment(unsigned slot) {
    for (size_t i = 0; i < arena.lane.count; i++) {
        const struct segment *segment = &arena.lane.all[i];
        if (segment->offset < slot_end(slot) && segment->offset + segment->size > salus_slot_offset(slot))
            return 1;
    }
    return 0;
}

static int slot_takes_part(unsigned number) {
    const struct slot *slot = &arena.slots[number];
    switch (arena.moving) {
    case PAGE_OUT:
        return (slot->state == PRIVATE && !slot->out) || (arena.suspended && slot->state == SHARED && holds_segment(number));
    case PAGE_IN:
        return slot->state == PRIVATE && slot->out;
    default:
        return slot->state == SAVED;
    }
}

static unsigned collect(uint64_t most) {
    unsigned count = 0;
    uint64_t bytes = 0;
    for (size_t i = 0; arena.moving != RESUME && i < arena.private.count && count < MOST_UNITS && bytes < most; i++) {
        struct segment *segment = &arena.private.all[i];
        if (segment->out == (arena.moving == PAGE_OUT))
            continue;
        units[count++] = (struct unit){
            arena.private_base + segment->offset, segment->size, NULL, &segment->handle, &segment->home,
            &segment->out, 0, 0};
        bytes += segment->size;
    }
    for (unsigned number = 0; number < arena.top && count < MOST_UNITS && bytes < most; number++) {
        struct slot *slot = &arena.slots[number];
        if (!slot_takes_part(number))
            continue;
        units[count++] = (struct unit){arena.lane_base + salus_slot_offset(number), salus_slot_size(number), slot,
                                       &slot->handle, &slot->home, &slot->out, 0, 0};
        bytes += salus_slot_size(number);
    }
    return count;
}

static int left_to_move(void) {
    struct unit kept = units[0];
    unsigned count = collect(1);
    units[0] = kept;
    return count != 0;
}

/* Before anything is moved: it goes whole or not at all. */
static int make_all_homes(void) {
    for (size_t i = 0; i < arena.private.count; i++)
        if (make_home(&arena.private.all[i].home, arena.private.all[i].size))
            return -1;
    for (unsigned slot = 0; slot < arena.top; slot++)
        if (slot_takes_part(slot) && make_home(&arena.slots[slot].home, salus_slot_size(slot)))
            return -1;
    return 0;
}

/* Before a copy: where it goes to. */

static int prepare_in(struct unit *unit, uint64_t stage) {
    int parked = unit->slot && unit->slot->parked;
    if (parked)
        unit->fresh = *unit->handle;
    else if (CALL(create, unit->size, &unit->fresh))
        return -1;
    unit->stage = stage;
    if (!CALL(map, stage, unit->size, unit->fresh))
        return 0;
    if (!parked)
        let_go(unit->fresh);
    return -1;
}

static void forget_stage(const struct unit *unit) {
    arena.device->unmap(unit->stage, unit->size);
    if (!(unit->slot && unit->slot->parked))
        let_go(unit->fresh);
}

/* After it: the two change places. What fails leaves everything as it was. */

/* It was cleared for others, and is needed here after all. */
static void fill_again(const struct unit *unit) {
    arena.device->copy(0, unit->address, unit->home->at, unit->size);
    arena.device->finish(0);
}

static int is_cleared(const struct unit *unit) {
    return unit->slot && unit->slot->state == SHARED && arena.page[SCRUB];
}

static void take_place_again(const struct unit *unit) {
    arena.device->map(unit->address, unit->size, *unit->handle);
    arena.device->allow(unit->address, unit->size);
    if (is_cleared(unit))
        fill_again(unit);
}

/* Units that lie side by side: by one call, or else one by one. */
static int unmap_all(unsigned first, unsigned end) {
    uint64_t size = units[end - 1].address + units[end - 1].size - units[first].address;
    if (!CALL(unmap, units[first].address, size))
        return 0;
    for (unsigned i = first; i < end; i++)
        if (CALL(unmap, units[i].address, units[i].size)) {
            while (i-- > first)
                take_place_again(&units[i]);
            return -1;
        }
    return 0;
}

/* Their homes take their place; nobody may reach them yet. */
static int leave_place(unsigned first, unsigned end) {
    unsigned cleared = first, mapped = first;
    while (cleared < end && (!is_cleared(&units[cleared]) || !CALL(fill, units[cleared].address, units[cleared].size, 0)))
        cleared++;
    if (cleared == end && !unmap_all(first, end)) {
        while (mapped < end && !CALL(map, units[mapped].address, units[mapped].size, units[mapped].home->handle))
            mapped++;
        if (mapped == end)
            return 0;
        for (unsigned i = first; i < end; i++) {
            if (i < mapped)
                arena.device->unmap(units[i].address, units[i].size);
            take_place_again(&units[i]);
        }
        return -1;
    }
    for (unsigned i = first; i < end && i <= cleared; i++)
        if (is_cleared(&units[i]))
            fill_again(&units[i]);
    return -1;
}

static void gone_out(const struct unit *unit) {
    uint64_t handle = *unit->handle;
    set_out(unit, 1);
    if (unit->slot && unit->slot->state == SHARED) {
        if (unit->slot->made)
            arena.made_bytes -= unit->size;
        *unit->slot = (struct slot){.state = SAVED, .out = 1, .home = unit->slot->home};
    }
    *unit->handle = 0;
    let_go(handle);
    arena.page[WENT_BYTES] += unit->size;
}

/* The units from `first` on that lie side by side: how many bytes, and one past the last. */
static uint64_t side_by_side(unsigned first, unsigned end, unsigned *next) {
    uint64_t size = 0;
    for (*next = first; *next < end && units[*next].address == units[first].address + size; ++*next)
        size += units[*next].size;
    return size;
}

static int swap_out(const struct unit *unit) {
    if (leave_place((unsigned)(unit - units), (unsigned)(unit - units) + 1))
        return -1;
    if (CALL(allow, unit->address, unit->size)) {
        arena.device->unmap(unit->address, unit->size);
        take_place_again(unit);
        return -1;
    }
    gone_out(unit);
    return 0;
}

/* What went out is the device's to give to others, and its home is mapped in its place; last of all the script may reach
 * it. That takes half as long as the copy, so nobody waits for it but the script, which rests. There is no way back from
 * here: while the driver refuses, it is asked again. */
static void give_access(unsigned count) {
    for (unsigned first = 0, next; first < count; first = next) {
        uint64_t size = side_by_side(first, count, &next), began = now_ms();
        while (CALL(allow, units[first].address, size) && now_ms() < began + ACCESS_MS)
            usleep(1000);
    }
}

static int back_in_place(const struct unit *unit) {
    if (CALL(unmap, unit->address, unit->size)) {
        forget_stage(unit);
        return -1;
    }
    if (!CALL(map, unit->address, unit->size, unit->fresh))
        return 0;
    arena.device->map(unit->address, unit->size, unit->home->handle);
    arena.device->allow(unit->address, unit->size);
    forget_stage(unit);
    return -1;
}

static void out_again(const struct unit *unit) {
    arena.device->unmap(unit->address, unit->size);
    arena.device->map(unit->address, unit->size, unit->home->handle);
    arena.device->allow(unit->address, unit->size);
    forget_stage(unit);
}

static void come_in(const struct unit *unit) {
    arena.device->unmap(unit->stage, unit->size);
    set_out(unit, 0);
    *unit->handle = unit->fresh;
    if (unit->slot && unit->slot->state == SAVED) {
        int parked = unit->slot->parked;
        *unit->slot = (struct slot){.handle = unit->fresh,
                                    .state = SHARED,
                                    .published = (uint8_t)parked,
                                    .made = (uint8_t)!parked,
                                    .alone = (uint8_t)(!parked && arena.lost),
                                    .home = unit->slot->home};
        if (!parked)
            arena.made_bytes += unit->size;
        free_home(unit->home, unit->size);
    } else if (!arena.keep_homes)
        free_home(unit->home, unit->size);
    arena.page[CAME_BYTES] += unit->size;
}

/* Neighbours change places together: what a call of the driver costs hardly depends on the size. */
static int swap_in(unsigned first, unsigned end) {
    for (unsigned next; first < end; first = next) {
        uint64_t size = side_by_side(first, end, &next);
        unsigned done = first;
        while (done < next && !back_in_place(&units[done]))
            done++;
        if (done == next && !CALL(allow, units[first].address, size)) {
            while (first < next)
                come_in(&units[first++]);
            continue;
        }
        for (unsigned i = first; i < done; i++)
            out_again(&units[i]);
        for (unsigned i = done < next ? done + 1 : next; i < end; i++)
            forget_stage(&units[i]);
        return -1;
    }
    return 0;
}

static int finished(void);

/* With Python's lock: first everything is copied, for what is mapped changes slowly while the device writes to the host. */
static int move_out(unsigned count) {
    uint64_t began = now_ns();
    unsigned gone = 0, next;
    int status = DONE;
    for (unsigned i = 0; i < count && status == DONE; i++)
        if (CALL(copy, 0, units[i].home->at, units[i].address, units[i].size))
            status = FAILED;
    leave_now();
    if (CALL(finish, 0))
        status = FAILED;
    while (gone < count && status == DONE) {
        side_by_side(gone, count, &next);
        if (leave_place(gone, next))
            status = FAILED;
        while (gone < next && status == DONE)
            gone_out(&units[gone++]);
    }
    arena.page[WENT_NS] += now_ns() - began;
    if (status == DONE && !left_to_move())
        (void)finished(); /* the next job need not wait for the rest */
    give_access(gone);
    return status;
}

/* As below; a small part only, that is reachable again at once. */
static int move_out_carefully(unsigned count) {
    uint64_t began = now_ns(), work = work_of_others();
    int status = DONE;
    for (unsigned i = 0; i < count && status == DONE; i++)
        if (CALL(copy, 0, units[i].home->at, units[i].address, units[i].size))
            status = FAILED;
    if (CALL(finish, 0))
        status = FAILED;
    if (status == DONE && (work_of_others() - work > WOKE_NS || !others_sleep()))
        status = WOKE;
    for (unsigned i = 0; i < count && status == DONE; i++)
        if (swap_out(&units[i]))
            status = FAILED;
    arena.page[WENT_NS] += now_ns() - began;
    return status;
}

/* Copies a group to where it is mapped meanwhile. */
static int begin_copies(unsigned first, unsigned end, int queue) {
    uint64_t size = units[end - 1].stage + units[end - 1].size - units[first].stage;
    if (CALL(allow, units[first].stage, size))
        return -1;
    for (unsigned i = first; i < end; i++)
        if (CALL(copy, queue, units[i].stage, units[i].home->at, units[i].size))
            return -1;
    return 0;
}

/* `careful`: other threads may wake up at any moment. One that did while its memory was copied may have changed it; then
 * nothing changes places, and it is tried again. While one group is copied the next is made ready. */
static int move_in(unsigned count, int careful) {
    uint64_t began = now_ns(), work = careful ? work_of_others() : 0, stage = arena.stage_base;
    unsigned first = 0, end = 0, next = 0;
    int status = DONE, queue = 0;
    do {
        uint64_t bytes = 0;
        for (; next < count && bytes < GROUP_BYTES && status == DONE; bytes += units[next++].size)
            if (prepare_in(&units[next], stage + bytes)) {
                status = FAILED;
                break;
            }
        stage += bytes;
        if (next > end && status == DONE && begin_copies(end, next, queue))
            status = FAILED;
        if (end > first && CALL(finish, !queue))
            status = FAILED;
        if (careful && status == DONE && (work_of_others() - work > WOKE_NS || !others_sleep()))
            status = WOKE;
        if (status == DONE && end > first && swap_in(first, end)) {
            status = FAILED;
            first = end; /* it has cleaned up after itself */
        }
        if (status != DONE) {
            arena.device->finish(queue);
            for (unsigned i = first; i < next; i++)
                forget_stage(&units[i]);
            break;
        }
        first = end;
        end = next;
        queue = !queue;
    } while (end > first);
    arena.page[CAME_NS] += now_ns() - began;
    return status;
}

/* Orders. */

static void answer(int kind, int done) {
    say(PAGED, (unsigned)kind, (uint64_t)done, arena.out_bytes, -1);
    tell_page(); /* the service looks there when it hears of it */
    flush();
}

/* What went out comes back. The service hears of it when it has. */
static void undo(void) {
    leave_now();
    arena.moving = PAGE_IN;
    arena.reverts = 1;
}

void stop_paging_out(void) {
    if (arena.moving == PAGE_OUT)
        undo();
}

void order_paging(int kind, int flag) {
    if (kind == PAGE_OUT && arena.lent) {
        answer(PAGE_OUT, 0);
        return;
    }
    arena.moving = kind;
    arena.moving_since = now_ms();
    arena.reverts = 0;
    arena.short_until = now_ns() + SHORT_NS;
    if (kind == PAGE_OUT) {
        arena.away = 1;
        arena.suspends = flag;
        /* One that is suspended already, and had no lease since, stays so. */
        arena.suspended |= flag;
    } else if (kind == PAGE_IN) {
        arena.suspends = 0;
        arena.needed = arena.private_bytes;
        arena.live_most = 0;
        arena.keep_homes = flag;
        if (!flag)
            free_spares(UINT64_MAX);
    }
}

/* A new service did not order what is under way: it is undone, and the job is where it was before. */
void undo_paging(void) {
    if (arena.suspended && !arena.suspends)
        arena.moving = 0; /* it counts as paged out, and the rest of it comes in with a PAGE_IN */
    else if (arena.moving == PAGE_OUT || arena.moving == PAGE_IN)
        undo();
}

/* It stays on the device after all: host memory that was made for it is not needed. */
static void free_unused_homes(void) {
    for (size_t i = 0; i < arena.private.count; i++)
        if (!arena.private.all[i].out)
            free_home(&arena.private.all[i].home, arena.private.all[i].size);
    for (unsigned slot = 0; slot < arena.top; slot++)
        if (!arena.slots[slot].out)
            free_home(&arena.slots[slot].home, salus_slot_size(slot));
}

/* Whatever else of the lane is mapped: nothing of this job is needed in it. 0 when none of it is any more. */
static int leave_the_rest(void) {
    for (unsigned slot = 0; arena.page[SCRUB] && slot < arena.top; slot++)
        if (arena.slots[slot].state == SHARED &&
            CALL(fill, arena.lane_base + salus_slot_offset(slot), salus_slot_size(slot), 0))
            return -1;
    give_up_all();
    return clear_stale();
}

static int finished(void) {
    int kind = arena.moving;
    leave_now();
    switch (kind) {
    case PAGE_OUT:
        if (arena.suspended && leave_the_rest())
            return BUSY;
        arena.suspends = 0; /* it has: from here on it counts as paged out in mid-iteration */
        break;
    case PAGE_IN:
        if (arena.reverts && arena.suspends) {
            /* The lease was never given up, and neither was the lane. */
            arena.moving = RESUME;
            return MORE;
        }
        arena.away = 0;
        break;
    default:
        if (back_segments())
            return BUSY;
        arena.suspended = arena.away = 0;
        arena.moving = 0;
        if (!arena.keep_homes)
            free_unused_homes();
        if (arena.reverts)
            answer(PAGE_OUT, 0);
        else
            tell_page();
        return DONE;
    }
    arena.moving = 0;
    if (kind == PAGE_IN && !arena.keep_homes)
        free_unused_homes();
    answer(arena.reverts ? PAGE_OUT : kind, !arena.reverts);
    return DONE;
}

int page_some(uint64_t most, int with_python) {
    unsigned count;
    int rest, status;
    if (!arena.moving)
        return DONE;
    if (arena.captures)
        return BUSY;
    if (!with_python)
        leave_now();
    if (arena.moving == PAGE_OUT && arena.left && !arena.suspended)
        drop_empty(1);
    count = collect(with_python || most < CAREFUL_BYTES ? most : CAREFUL_BYTES);
    if (!count)
        return finished();
    if (arena.moving == PAGE_OUT && make_all_homes()) {
        undo();
        return MORE;
    }
    rest = others_sleep() && (with_python ? python_rests() : others_rest());
    if (!rest || CALL(idle))
        status = WOKE;
    else if (arena.moving == PAGE_OUT)
        status = with_python ? move_out(count) : move_out_carefully(count);
    else
        status = move_in(count, !with_python);
    if (status == WOKE) {
        leave_now();
        if (arena.moving == PAGE_OUT && now_ms() > arena.moving_since + PATIENCE_MS)
            undo();
        return BUSY;
    }
    if (status != FAILED)
        return MORE;
    if (arena.moving == PAGE_OUT) {
        undo();
        return MORE;
    }
    if (arena.moving == PAGE_IN && !arena.reverts) {
        /* There is not enough memory, for now. The service tries again. */
        arena.moving = 0;
        answer(PAGE_IN, 0);
        return DONE;
    }
    return BUSY;
}

int page_in_all(void) {
    for (int kind = PAGE_IN; kind;) {
        unsigned count;
        arena.moving = kind;
        count = collect(UINT64_MAX);
        if (!count)
            kind = kind == PAGE_IN ? RESUME : 0;
        else if (CALL(idle) || move_in(count, 0) == FAILED)
            break;
    }
    if (arena.moving != RESUME || collect(1)) {
        arena.moving = 0;
        return -1;
    }
    arena.moving = arena.suspended = arena.away = 0;
    return 0;
}

int salus_arena_page(uint64_t most) {
    int status = DONE, entered;
    if (pthread_mutex_trylock(&arena.lock))
        return BUSY;
    if (arena.device && arena.moving) {
        entered = arena.device->enter();
        status = page_some(most, 1);
        arena.device->leave(entered);
    }
    pthread_mutex_unlock(&arena.lock);
    return status;
}

/* -1, 0 if it has one, or 1. It takes long, and others may wait for the lane. */
static int prepare_home(struct home *home, uint64_t size) {
    if (home->at)
        return 0;
    leave_now();
    flush();
    return make_home(home, size) ? -1 : 1;
}

int salus_arena_prepare(void) {
    int more = 0;
    ENTER;
    if (arena.captures)
        arena.prepares = 1; /* later */
    /* What comes in needs none. */
    else if (arena.device && (!arena.moving || arena.moving == PAGE_OUT)) {
        for (size_t i = 0; !more && i < arena.private.count; i++)
            more = prepare_home(&arena.private.all[i].home, arena.private.all[i].size);
        for (unsigned slot = 0; !more && slot < arena.top; slot++)
            if (arena.slots[slot].state == PRIVATE)
                more = prepare_home(&arena.slots[slot].home, salus_slot_size(slot));
    }
    if (more > 0)
        tell_page();
    LEAVE;
    return more;
}
