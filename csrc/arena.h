/* The arena of a job: what the framework's allocator calls, and what the client calls around it.
 *
 * Two ranges of addresses, reserved once:
 * - private: each segment of the framework is a chunk of its own;
 * - lane: cut into slots, the same in every process (below). A slot is backed by a chunk of the lane, which other jobs map
 *   as well, or by a private one (promoted), or by nothing. Segments are cut from it without regard to slots.
 *
 * The other end of the channel is the service. A packet is 1 to MOST_RECORDS records; descriptors come in the order of
 * the records that have one. Each side counts its packets on the shared page, so that the other knows what is to come.
 *
 * One lock. Nothing here calls Python or waits for a thread that might hold its lock; a wait for memory waits for the
 * service alone. On failure a function returns NULL or a number that is not 0; nothing here ends the process.
 */
#ifndef SALUS_ARENA_H
#define SALUS_ARENA_H

#include <stddef.h>
#include <stdint.h>

#define EXPORTED __attribute__((visibility("default")))
#define MOST_RECORDS 64

struct record {
    uint32_t kind;
    uint32_t slot;
    uint64_t a;
    uint64_t b;
};

enum {
    /* From the job. */
    WANT = 1,    /* a: private bytes, b: lane bytes; it waits until its quotas are that large, or for REFUSED */
    PUBLISH = 2, /* the lane's slot is backed by this chunk from now on; with a descriptor */
    TAKE = 3,    /* what backed the lane's slot is private to the job now: the lane has a hole there */
    DROP = 4,    /* the job has nothing mapped in this slot any more */
    LEFT = 5,    /* the job has nothing of the lane mapped; b: the number of the NEW_LANE this answers */
    OWN = 7,     /* after a reconnection: the job has a chunk of its own in this slot */
    PAGED = 6,   /* slot: PAGE_OUT or PAGE_IN, a: 1 if it was done, b: bytes on the host */
    /* From the service. */
    QUOTA = 11,    /* a: private bytes, b: lane bytes */
    REFUSED = 12,  /* the WANT cannot be met */
    CHUNK = 13,    /* the lane's slot is backed by this chunk; with a descriptor */
    HOLE = 15,     /* what backed the lane's slot is another job's own now: it must not be touched again */
    NEW_LANE = 14, /* the job is in another lane, or in none: nothing of the old one may stay mapped; b: a number */
    PAGE_OUT = 16, /* everything private to the host; a: the job waits in mid-iteration, and its part of the lane goes too */
    PAGE_IN = 17,  /* and back; a: keep the host memory for the next time */
    RESUME = 18,   /* one that went in mid-iteration has a lease again */
    PREPARE = 19,  /* it may be paged out soon: host memory can be made ready */
};

/* Words of the shared page (protocol/page.py). */
enum {
    REVOKE = 1,
    SERVICE_PACKETS = 4,
    SCRUB = 7,
    STATE = 8,
    ITERATIONS = 9,
    BUSY_NS = 10,
    BEGAN_NS = 11, /* from when on time counts as the job's; 0: it does not */
    BOUNDARIES = 12,
    PRIVATE_BYTES = 16,
    PROMOTED_BYTES = 17,
    LANE_BYTES = 18,
    JOB_PACKETS = 19,
    WAITING_FOR_MEMORY = 20, /* since when; 0: it does not */
    MADE_BYTES = 21,
    OUT_BYTES = 22,
    HOME_BYTES = 23,
    WENT_BYTES = 24,
    WENT_NS = 25,
    CAME_BYTES = 26,
    CAME_NS = 27,
    PASS = 28,
    PASS_SENT = 29,
    PASSED = 31,
    NEEDED_BYTES = 33,
};

EXPORTED int salus_arena_open(const char *device, int ordinal, volatile uint64_t *page, int channel, uint64_t reserve);
EXPORTED void salus_arena_close(void);
EXPORTED int salus_arena_last_error(void);

EXPORTED void *salus_private_alloc(size_t size, int device, void *stream);
EXPORTED void salus_private_free(void *pointer, size_t size, int device, void *stream);
EXPORTED void *salus_lane_alloc(size_t size, int device, void *stream);
EXPORTED void salus_lane_free(void *pointer, size_t size, int device, void *stream);

/* After a lease was granted: takes in what the service sent and backs every segment; with `poison`, what is dead is filled. */
EXPORTED int salus_arena_resume(int poison);
/* 1: paged out, 2: and in mid-iteration. */
EXPORTED int salus_arena_where(void);
/* The service was started again: a new page and a new channel. Whoever does not hold the lease of its lane keeps nothing of
 * the lane mapped; whoever does hands all of it over at its next boundary. */
EXPORTED int salus_arena_reconnect(volatile uint64_t *page, int channel, int holds);
/* Until the device has done everything that this process began; not 0 if it failed at that, or while a graph is captured. */
EXPORTED int salus_arena_wait(void);
/* A CUDA graph is captured from here to there; several may be at once. Meanwhile nothing in here waits for the device or
 * changes what is mapped: the lane is not left (`leave`, `resume` and `detach` fail), a `reconnect` gives 1 and has to be
 * asked for again, and what the service sends is taken in afterwards (`listen` gives 1 as long as something is). */
EXPORTED void salus_arena_capture_began(void);
EXPORTED void salus_arena_capture_ended(void);
/* Where it stands how often a segment of the lane was made or freed. Asked for once: to read it there costs no call. */
EXPORTED const uint64_t *salus_arena_lane_changes(void);
/* Before a lease is given up. The ranges (address, size, ...), by address, hold live data: what backs them becomes private.
 * Then the device is waited for; what was private and has been empty for a while is given back; and if the service says so,
 * what stays in the lane is cleared. With a ticket, the lease is then passed on. `when` is told when each of the four was
 * done. -1: the lease must be kept; -2: the device failed; 0: it can be given up; 1: it is another job's now. */
EXPORTED int salus_arena_leave(const uint64_t *ranges, size_t count, volatile uint64_t *word, uint64_t ticket,
                               int wants_more, uint64_t *when);
/* A lease that can be given up goes straight to the job that the service named for it, by the word that this one looks at.
 * Not if the lane is not what it was when the service named it, or if memory is waited for. 1: it is the other job's now. */
EXPORTED int salus_arena_pass(volatile uint64_t *word, uint64_t ticket, int wants_more);
/* The service is gone and this job holds no lease: gives the lane up and backs its segments with memory of its own. */
EXPORTED int salus_arena_detach(void);
/* The service does not come back: nobody is waited for any more. */
EXPORTED void salus_arena_go_alone(void);
/* Takes in what the service sent, whether there is a lease or not. */
EXPORTED int salus_arena_listen(void);
/* 1 if there is something to page, or host memory to be made ready (2), since the last `listen`. */
EXPORTED int salus_arena_has_to_page(void);
/* Pages about so many bytes. To be called with Python's lock held, so that no other thread begins to use the device.
 * 0: all is done; 1: there is more; 2: not now, somebody is at work. */
EXPORTED int salus_arena_page(uint64_t most);
/* Where Python's standard library is, and the file of the client: threads that wait there are known to use nothing. */
EXPORTED void salus_arena_trust(const char *stdlib, const char *lease);
/* Makes one piece of host memory ready. 0: all is; 1: there is more; -1: there is none to be had. */
EXPORTED int salus_arena_prepare(void);

/* Memory that several processes of a job use (lending.c). As long as something is lent, nothing is paged out: `more` is 1
 * before a loan, and -1 after it was returned. */
enum { NOT_OURS, EXPORTED_CHUNK, NOT_NOW, NO_MEMORY, REFUSED_BY_DRIVER };
EXPORTED void salus_arena_lend(int more);
/* The chunk that an address lies in: where it begins, its size, and a descriptor. A chunk of the lane is made private first.
 * NOT_NOW: it is on the host; NO_MEMORY: the job may not have so much of its own. */
EXPORTED int salus_arena_export(uint64_t address, uint64_t *base, uint64_t *size, int *fd);
/* Maps chunks of another process side by side, unless they are mapped already (by `key`), and gives a part of them as a
 * DLPack tensor of bytes. `loans` is memory of LOANS numbers that both sides have: the one of this loan is the borrower's
 * process until the tensor is dropped. NULL: it cannot be had. */
#define LOANS 4096
enum { RETURNED, ON_ITS_WAY };
EXPORTED void *salus_borrow(const char *device, int ordinal, const char *key, const int *fds, const uint64_t *sizes,
                            unsigned count, int loans, uint64_t offset, uint64_t length, unsigned number);
EXPORTED int salus_is_borrowed(uint64_t address);

/* While iterations follow one another (steps.c). To be called with Python's lock held: the page of the job, the optimizer whose
 * steps end iterations, and the hooks in Python that everything else is left to, which must live as long as the process.
 * Not 0: this Python lacks something. */
EXPORTED int salus_steps_follow(volatile uint64_t *page, const void *leader, void *before, void *after,
                                uint64_t longest_ns);
/* A hook, as an object of Python's. 0: before a step, does nothing; 1: before a step of an optimizer that has its state;
 * 2: after a step. */
EXPORTED void *salus_steps_hook(unsigned which);
/* Where it stands how many steps were counted so. */
EXPORTED const uint64_t *salus_steps_turns(void);

/* For tests. */
EXPORTED void salus_arena_fail_at(long call);
EXPORTED long salus_arena_calls(void);
/* The device does not have the next so many chunks that are asked for. */
EXPORTED void salus_arena_scarce(long chunks);
EXPORTED uint64_t salus_slot_offset(unsigned slot);
EXPORTED uint64_t salus_slot_size(unsigned slot);
EXPORTED unsigned salus_slot_at(uint64_t offset);

#endif
