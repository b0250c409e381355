/* A machine whose time of day is off by WALL_OFF seconds, and on which a file is at the disk DISK_BYTES_A_SECOND later than asked: as all
   programs see it that ask the C library. Loaded into them by LD_PRELOAD; their children have it too. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long wall_off, disk_rate;

__attribute__((constructor)) static void read_environment(void) {
    const char *off = getenv("WALL_OFF"), *rate = getenv("DISK_BYTES_A_SECOND");
    wall_off = off ? atol(off) : 0;
    disk_rate = rate ? atol(rate) : 0;
}

int clock_gettime(clockid_t clock, struct timespec *told) {
    int (*right)(clockid_t, struct timespec *) = dlsym(RTLD_NEXT, "clock_gettime");
    int failed = right(clock, told);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) told->tv_sec += wall_off;
    return failed;
}

int gettimeofday(struct timeval *restrict told, void *restrict zone) {
    int (*right)(struct timeval *, void *) = dlsym(RTLD_NEXT, "gettimeofday");
    int failed = right(told, zone);
    if (!failed) told->tv_sec += wall_off;
    return failed;
}

time_t time(time_t *told) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (told) *told = now.tv_sec;
    return now.tv_sec;
}

int fsync(int file) {
    int (*right)(int) = dlsym(RTLD_NEXT, "fsync");
    struct stat about;
    if (disk_rate && !fstat(file, &about)) {
        double seconds = (double)about.st_size / disk_rate;
        struct timespec rest = {(time_t)seconds, (long)((seconds - (time_t)seconds) * 1e9)};
        while (nanosleep(&rest, &rest)) {}
    }
    return right(file);
}
