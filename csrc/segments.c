/* Where the slots of the lane are, and lists of what was cut from a range of addresses. Nothing here asks the device for
 * anything. */
#include "state.h"

/* Slots: fine where small jobs live, coarse where a large lane would have too many of them. */
static const struct {
    unsigned count;
    uint64_t size;
} regions[] = {{64, GRANULE}, {48, 4 * GRANULE}, {112, 16 * GRANULE}, {1u << 20, 64 * GRANULE}};

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

uint64_t slot_end(unsigned slot) {
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

/* Where the gap before the i-th one begins. */
static uint64_t gap_before(const struct segments *list, size_t i) {
    return i ? list->all[i - 1].offset + list->all[i - 1].size : 0;
}

struct segment *insert(struct segments *list, uint64_t offset, uint64_t size) {
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
    list->all[at] = (struct segment){.offset = offset, .size = size};
    return &list->all[at];
}

struct segment *at_offset(const struct segments *list, uint64_t offset) {
    size_t at = after(list, offset);
    return at < list->count && list->all[at].offset == offset ? &list->all[at] : NULL;
}

int take_out(struct segments *list, uint64_t offset, struct segment *found) {
    struct segment *there = at_offset(list, offset);
    uint64_t gap;
    if (!there)
        return -1;
    *found = *there;
    memmove(there, there + 1, (size_t)(list->all + list->count - there - 1) * sizeof *there);
    list->count--;
    gap = gap_before(list, (size_t)(there - list->all));
    if (gap < list->before)
        list->before = gap;
    return 0;
}

/* The first gap that is large enough. In the lane, what fills a slot or more begins at one: less is promoted with it.
 *
 * It is not looked for where one of this size, or of a smaller one, was looked for in vain and nothing was freed since.
 */
int find_gap(struct segments *list, uint64_t size, int by_slots, uint64_t *offset) {
    size_t first = size < list->too_small ? 0 : after(list, list->before);
    list->too_small = size;
    for (size_t i = first; i <= list->count; i++) {
        uint64_t at = list->before = gap_before(list, i);
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
    }
    return -1;
}
