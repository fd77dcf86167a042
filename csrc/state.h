/* What the parts of the arena share: its state, and the functions of one part that others call. The lock is held in all
 * of them.
 *
 * arena.c    what backs slots; the way in and out, and allocations
 * segments.c where slots are, and lists of segments
 * boundary.c around a lease
 * captures.c CUDA graphs that are being captured
 * lending.c  memory that several processes of a job use
 * channel.c  packets to and from the service; the wait for memory
 * paging.c   to the host and back
 * homes.c    the host memory for that
 * threads.c  what the other threads of the process are at
 * python.c   and those of Python
 */
#ifndef SALUS_STATE_H
#define SALUS_STATE_H

#define _GNU_SOURCE
#include "arena.h"
#include "device.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#define RETURN_AFTER 3 /* boundaries at which a promoted slot was found empty before the lane's chunk comes back */
#define RETRY_US 20000
#define SCARCE_NS 5000000000u /* for so long a chunk is waited for that the device does not have */
#define SHORT_NS 10000000000u /* for so long after the service spoke of paging, it comes back at the first one */

enum state {
    EMPTY,
    SHARED,
    PRIVATE,
    SAVED, /* the job is suspended in mid-iteration: what it had there is on the host */
};

/* A chunk of host memory, pinned, that keeps what is paged out. It stays mapped at an address of its own. */
struct home {
    uint64_t handle, at; /* at 0: there is none */
};

struct slot {
    uint64_t handle;
    uint8_t state;
    uint8_t published; /* the service has, or gave us, this very chunk */
    uint8_t empty_for; /* boundaries, while private */
    uint8_t made;      /* by us: the driver counts it as ours, whoever maps it */
    uint8_t stale;     /* it must not be touched again, and could not be unmapped yet */
    uint8_t alone;     /* made since the service is gone: nobody else can have it */
    uint8_t out;       /* its home is mapped in place of its chunk */
    uint8_t parked;    /* while SAVED: `handle` is the lane's chunk, to be used once there is a lease again */
    struct home home;
};

struct segment {
    uint64_t offset, size, handle;
    struct home home;
    uint8_t out; /* as in a slot */
    uint8_t spare; /* of `homes`: nobody's, kept for the next one of its size */
};

struct segments { /* by offset */
    struct segment *all;
    size_t count, room;
    uint64_t too_small, before; /* no gap that begins before there has room for this size, or for a larger one */
};

struct arena {
    pthread_mutex_t lock;
    const struct device *device;
    volatile uint64_t *page;
    int channel;
    uint64_t reserved, private_base, lane_base;
    uint64_t home_base, stage_base; /* where homes are mapped, and chunks on their way back */
    struct segments private, lane, homes;
    uint64_t lane_changes;
    struct slot *slots;
    unsigned slot_count;
    unsigned top; /* one past the last slot that is backed */
    int holes;    /* a slot may have lost its backing since `back_segments` looked */
    uint64_t made_bytes; /* of the lane's chunks */
    uint64_t private_bytes, promoted_bytes, private_quota, lane_quota;
    uint64_t needed;     /* of private bytes: with this quota it would have had to ask for no more, since it was paged out */
    uint64_t live_most;  /* of private bytes: so much was in use at a boundary since then */
    uint64_t short_until; /* nanoseconds: there is not enough memory for everybody */
    unsigned captures;   /* of CUDA graphs, under way (captures.c) */
    unsigned waits;      /* calls of the driver without the lock, under way (captures.c) */
    unsigned lent;       /* loans to other processes (lending.c) */
    int left;            /* it gave its lease up, and nothing of it lives where `empty_for` says so */
    uint64_t sent, received;
    int stale;           /* some slot is */
    uint64_t unanswered; /* the number of a NEW_LANE that has not been answered */
    int leaves;          /* and has yet to be obeyed */
    int may_leave_late;
    int lost;  /* the service is gone: nobody to ask, nobody to share with */
    int alone; /* and does not come back */
    int impatient; /* whoever wants memory now cannot wait for a service to come back */
    int refused;
    struct record out[MOST_RECORDS];
    int out_fds[MOST_RECORDS];
    unsigned out_count, out_fd_count;
    uint64_t *unreleased; /* handles that the driver would not take back; it is asked again */
    size_t unreleased_count;
    long calls, fail_at;
    long scarce; /* so many chunks the device does not have, for tests */
    int error;
    /* Paging. */
    int moving;             /* PAGE_OUT or PAGE_IN was ordered and is not done; 0: neither */
    int reverts;            /* what could not be paged out whole comes back */
    int keep_homes;         /* for the next time */
    int prepares;           /* host memory may be made ready */
    int suspends;           /* what is moving out takes its part of the lane along */
    int suspended;          /* in mid-iteration, without a lease */
    int away;               /* paged out, or on its way: nothing may be made on the device */
    uint64_t moving_since;  /* milliseconds */
    uint64_t out_bytes, home_bytes, spare_bytes; /* spare ones are counted among the homes */
};

extern struct arena arena;

#define CALL(operation, ...) (++arena.calls == arena.fail_at ? (arena.error = -99) : seen(arena.device->operation(__VA_ARGS__)))


int seen(int status);
uint64_t lane_bytes(void);
void tell_page(void);
void let_go(uint64_t handle);
void let_go_again(void);
int map_and_allow(uint64_t address, uint64_t size, uint64_t handle);
int unback(unsigned slot);
void give_up_all(void);
void leave_now(void);
int clear_stale(void);
int come_back_alone(void);
void own(unsigned slot);

/* Around calls of the driver that are made without the lock; not 0: not now, a graph is captured. */
int begin_driver_calls(void);
void end_driver_calls(void);
int back_segments(void);
void obey(const struct record *record, int fd);

uint64_t slot_end(unsigned slot);
struct segment *insert(struct segments *list, uint64_t offset, uint64_t size);
struct segment *at_offset(const struct segments *list, uint64_t offset);
int take_out(struct segments *list, uint64_t offset, struct segment *found);
int find_gap(struct segments *list, uint64_t size, int by_slots, uint64_t *offset);

void drop_empty(unsigned least);

void go_lost(void);
void say(uint32_t kind, unsigned slot, uint64_t a, uint64_t b, int fd);
void flush(void);
void listen_all(void);
int may_have(uint64_t private_bytes, uint64_t lane);
int want(uint64_t private_bytes, uint64_t lane);

enum { DONE, MORE, BUSY, FAILED, WOKE };
/* Goes on with what is `moving`, for about so many bytes; with Python's lock, or from within an allocation. */
int page_some(uint64_t most, int with_python);
uint64_t now_ns(void);
int python_rests(void);

int others_sleep(void);
int others_rest(void);
uint64_t work_of_others(void);
/* Brings everything back now, whatever it takes. */
int page_in_all(void);
void order_paging(int kind, int flag);
/* What is to be paged out stays. */
void stop_paging_out(void);
void undo_paging(void);
/* None is made where there is one. */
int make_home(struct home *home, uint64_t size);
void free_home(struct home *home, uint64_t size);
void free_spares(uint64_t least);

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

#endif
