/* What the other threads of this process are at, as the kernel sees it. */
#include "state.h"

#include <ctype.h>
#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>

#define REST_US 20000

/* The beginning of a file about a thread, as text; empty if the thread has ended. */
static void read_about(const char *thread, const char *what, char *text, size_t room) {
    char path[64];
    ssize_t got;
    int fd;
    text[0] = 0;
    snprintf(path, sizeof path, "/proc/self/task/%.20s/%s", thread, what);
    fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return;
    got = read(fd, text, room - 1);
    text[got > 0 ? got : 0] = 0;
    close(fd);
}

/* Whether it is on a processor, or in the middle of a call of the driver. */
static uint64_t is_awake(const char *thread) {
    char text[256], *end;
    read_about(thread, "stat", text, sizeof text);
    end = strrchr(text, ')');
    return end && (end[2] == 'R' || end[2] == 'D');
}

/* Its nanoseconds on a processor. */
static uint64_t work_of(const char *thread) {
    char text[64];
    read_about(thread, "schedstat", text, sizeof text);
    return strtoull(text, NULL, 10);
}

/* Added up over all threads but this one; the largest number there is, if they cannot be seen. */
static uint64_t of_others(uint64_t (*what)(const char *)) {
    char self[24];
    struct dirent *entry;
    uint64_t sum = 0;
    DIR *threads = opendir("/proc/self/task");
    if (!threads)
        return UINT64_MAX;
    snprintf(self, sizeof self, "%d", (int)gettid());
    while ((entry = readdir(threads)))
        if (isdigit((unsigned char)entry->d_name[0]) && strcmp(entry->d_name, self))
            sum += what(entry->d_name);
    closedir(threads);
    return sum;
}

int others_sleep(void) {
    return !of_others(is_awake);
}

uint64_t work_of_others(void) {
    return of_others(work_of);
}

/* One that copies from or to the host is on a processor most of the time; one that waits for Python's lock, hardly. */
int others_rest(void) {
    uint64_t before = work_of_others(), began = now_ns();
    usleep(REST_US);
    return work_of_others() - before < (now_ns() - began) / 20;
}
