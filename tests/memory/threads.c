/* Several threads allocate and free while another plays the service: quotas come late and little by little, so that
 * they wait. Built with the thread sanitizer by test_sanitizers.py; ends with "finished". */
#define _GNU_SOURCE
#include "arena.h"
#include "device.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define THREADS 4
#define ROUNDS 300

static volatile uint64_t page[512];
static int service_end;

static void *play_the_service(void *unused) {
    struct record asked[MOST_RECORDS];
    uint64_t packets = 0;
    (void)unused;
    while (recv(service_end, asked, sizeof asked, 0) > 0) {
        struct record answer;
        if (asked[0].kind != WANT)
            continue;
        usleep(200);
        answer = (struct record){QUOTA, 0, asked[0].a, asked[0].b};
        packets++;
        __atomic_store_n(&page[SERVICE_PACKETS], packets, __ATOMIC_SEQ_CST);
        send(service_end, &answer, sizeof answer, 0);
    }
    return NULL;
}

static void *work(void *number) {
    for (int round = 0; round < ROUNDS; round++) {
        int lane = (round + (int)(intptr_t)number) % 2;
        size_t size = (size_t)(1 + round % 3) * GRANULE;
        char *found = lane ? salus_lane_alloc(size, 0, NULL) : salus_private_alloc(size, 0, NULL);
        if (!found) {
            puts("out of memory");
            exit(1);
        }
        memset(found, round, 4096);
        if (round % 16 == 0)
            salus_arena_listen();
        if (lane)
            salus_lane_free(found, size, 0, NULL);
        else
            salus_private_free(found, size, 0, NULL);
    }
    return NULL;
}

int main(void) {
    int ends[2];
    pthread_t service, threads[THREADS];
    if (socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends) || salus_arena_open("host", 0, page, ends[0], (uint64_t)1 << 32))
        return 2;
    service_end = ends[1];
    pthread_create(&service, NULL, play_the_service, NULL);
    for (intptr_t i = 0; i < THREADS; i++)
        pthread_create(&threads[i], NULL, work, (void *)i);
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    shutdown(ends[0], SHUT_RDWR);
    pthread_join(service, NULL);
    salus_arena_close();
    puts("finished");
    return 0;
}
