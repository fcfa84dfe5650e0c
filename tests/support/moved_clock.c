/* Adds the seconds in the file MOVED_CLOCK (8 bytes of this machine's order) to the time of day.
 *
 * Loaded by LD_PRELOAD. The monotonic clocks stay as they are. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static int (*true_gettime)(clockid_t, struct timespec *);
static const volatile int64_t *moved;

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("MOVED_CLOCK");
    int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    true_gettime = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    if (fd < 0)
        return;
    void *page = mmap(NULL, sizeof *moved, PROT_READ, MAP_SHARED, fd, 0);
    if (page != MAP_FAILED)
        moved = page;
    close(fd);
}

int clock_gettime(clockid_t clock, struct timespec *found) {
    if (!true_gettime)
        begin();
    int failed = true_gettime(clock, found);
    if (!failed && moved && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        found->tv_sec += *moved;
    return failed;
}

int gettimeofday(struct timeval *restrict found, void *restrict zone) {
    struct timespec now;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &now);
    found->tv_sec = now.tv_sec;
    found->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *found) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME_COARSE, &now);
    if (found)
        *found = now.tv_sec;
    return now.tv_sec;
}
