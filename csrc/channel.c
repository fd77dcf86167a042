#include "state.h"

#include <errno.h>
#include <sys/socket.h>
#include <unistd.h>

#define SEND_PATIENCE 2000

void go_lost(void) {
    arena.lost = 1;
    if (arena.alone)
        arena.private_quota = arena.lane_quota = UINT64_MAX;
}

void salus_arena_go_alone(void) {
    pthread_mutex_lock(&arena.lock);
    arena.alone = 1;
    if (arena.lost)
        go_lost();
    pthread_mutex_unlock(&arena.lock);
}

void flush(void) {
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

void say(uint32_t kind, unsigned slot, uint64_t a, uint64_t b, int fd) {
    if (arena.out_count == MOST_RECORDS)
        flush();
    arena.out[arena.out_count++] = (struct record){kind, slot, a, b};
    if (fd >= 0)
        arena.out_fds[arena.out_fd_count++] = fd;
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
void listen_all(void) {
    while (!arena.lost && arena.received < arena.page[SERVICE_PACKETS])
        receive();
}

static void say_want(uint64_t private_bytes, uint64_t lane) {
    /* (What it is about to give back is in `arena.private_bytes` still.) */
    say(WANT, 0, private_bytes ? private_bytes : arena.private_bytes,
        lane > lane_bytes() ? lane : lane_bytes(), -1);
    flush();
}

/* It may be started again, and then the client reconnects, which needs the lock. -1: it does not come back. */
static int wait_for_service(void) {
    while (arena.lost && !arena.alone) {
        pthread_mutex_unlock(&arena.lock);
        usleep(RETRY_US);
        pthread_mutex_lock(&arena.lock);
    }
    return arena.lost ? -1 : 0;
}

/* Whoever is paged out, or suspended without a lease, makes nothing on the device, whatever its quotas are. */
int may_have(uint64_t private_bytes, uint64_t lane) {
    return !arena.away && !arena.suspended && private_bytes <= arena.private_quota && lane <= arena.lane_quota;
}

/* Waits until the quotas are this large; -1 if they never will be. 0 is: what it has. */
int want(uint64_t private_bytes, uint64_t lane) {
    uint64_t since, began;
    if (private_bytes > arena.needed)
        arena.needed = private_bytes;
    if (may_have(private_bytes, lane))
        return 0;
    if (!arena.lost)
        listen_all();
    if (may_have(private_bytes, lane))
        return 0;
    arena.refused = 0;
    since = now_ns();
    began = arena.page[BEGAN_NS];
    arena.page[WAITING_FOR_MEMORY] = since;
    tell_page();
    say_want(private_bytes, lane);
    while (arena.moving || arena.suspended || (arena.away && !arena.refused) ||
           (!arena.refused && (private_bytes > arena.private_quota || lane > arena.lane_quota))) {
        if (arena.lost) {
            if (arena.impatient)
                break;
            if (!wait_for_service())
                say_want(private_bytes, lane);
            else {
                go_lost();
                if ((arena.away || arena.suspended) && come_back_alone())
                    usleep(RETRY_US);
            }
        } else if (!arena.moving)
            receive();
        else if (page_some(UINT64_MAX, 0) == BUSY)
            usleep(1000);
        flush(); /* what it answered, if it had to leave its lane */
    }
    /* That was no time on the device. In this order; `Page.used` counts on it. */
    if (began && arena.page[BEGAN_NS] == began)
        arena.page[BEGAN_NS] = began + (now_ns() - since);
    arena.page[WAITING_FOR_MEMORY] = 0;
    return arena.refused || (arena.lost && arena.impatient) ? -1 : 0;
}
