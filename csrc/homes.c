#include "state.h"

/* Homes.
 *
 * Pinning takes ten times as long as copying, and a script's gradients come and go. So what is not needed any more is
 * kept for the next of its size, while the host has room for everybody; never more than was needed at once. */

static int reuse_home(struct home *home, uint64_t size) {
    for (size_t i = 0; arena.spare_bytes >= size && i < arena.homes.count; i++) {
        struct segment *spare = &arena.homes.all[i];
        if (!spare->spare || spare->size != size)
            continue;
        spare->spare = 0;
        arena.spare_bytes -= size;
        *home = (struct home){spare->handle, arena.home_base + spare->offset};
        return 1;
    }
    return 0;
}

int make_home(struct home *home, uint64_t size) {
    uint64_t offset, handle;
    struct segment *made;
    if (home->at || reuse_home(home, size))
        return 0;
    free_spares(size);
    if (find_gap(&arena.homes, size, 0, &offset) || CALL(create_host, size, &handle))
        return -1;
    if (map_and_allow(arena.home_base + offset, size, handle) || !(made = insert(&arena.homes, offset, size))) {
        let_go(handle);
        return -1;
    }
    made->handle = handle;
    *home = (struct home){handle, arena.home_base + offset};
    arena.home_bytes += size;
    return 0;
}

/* 0 when it is gone. */
static int destroy_home(const struct home *home, uint64_t size) {
    struct segment gone;
    if (CALL(unmap, home->at, size))
        return -1;
    let_go(home->handle);
    (void)take_out(&arena.homes, home->at - arena.home_base, &gone);
    arena.home_bytes -= size;
    return 0;
}

/* What it holds is not needed any more, and it is mapped nowhere else. */
void free_home(struct home *home, uint64_t size) {
    struct segment *kept;
    if (!home->at)
        return;
    kept = arena.keep_homes ? at_offset(&arena.homes, home->at - arena.home_base) : NULL;
    if (kept) {
        kept->spare = 1;
        arena.spare_bytes += size;
    } else if (destroy_home(home, size) && (kept = at_offset(&arena.homes, home->at - arena.home_base))) {
        /* It could not be unmapped: that is tried again with the spare ones. */
        kept->spare = 1;
        arena.spare_bytes += size;
    }
    *home = (struct home){0, 0};
}

/* At least so many bytes of those that are spare, or all there are. */
void free_spares(uint64_t least) {
    uint64_t wanted = arena.spare_bytes > least ? arena.spare_bytes - least : 0;
    for (size_t i = arena.homes.count; i-- > 0 && arena.spare_bytes > wanted;) {
        struct segment spare = arena.homes.all[i];
        struct home home = {spare.handle, arena.home_base + spare.offset};
        if (spare.spare && !destroy_home(&home, spare.size))
            arena.spare_bytes -= spare.size;
    }
}
