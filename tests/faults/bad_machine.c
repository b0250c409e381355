/* A machine whose time of day is off by WALL_OFF seconds, and on which a file is at the disk DISK_BYTES_A_SECOND later than asked; below
   POOR_DISK are no links, locks, sockets, rights, times and synced folders, as on exFAT or a drive in the network: as all programs see it that
   ask the C library. Loaded into them by LD_PRELOAD; their children have it too. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

static long wall_off, disk_rate;
static const char *poor_disk;

__attribute__((constructor)) static void read_environment(void) {
    const char *off = getenv("WALL_OFF"), *rate = getenv("DISK_BYTES_A_SECOND");
    wall_off = off ? atol(off) : 0;
    disk_rate = rate ? atol(rate) : 0;
    poor_disk = getenv("POOR_DISK");
}

static int refused(int poor, int why) {
    if (poor) errno = why;
    return poor;
}

static int is_poor(const char *path) { return poor_disk && path && !strncmp(path, poor_disk, strlen(poor_disk)); }

static int is_poor_file(int file) {
    char name[64], path[4096];
    snprintf(name, sizeof name, "/proc/self/fd/%d", file);
    ssize_t length = readlink(name, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return is_poor(path);
}

int link(const char *old, const char *new) {
    int (*right)(const char *, const char *) = dlsym(RTLD_NEXT, "link");
    return refused(is_poor(new), EPERM) ? -1 : right(old, new);
}

int symlink(const char *old, const char *new) {
    int (*right)(const char *, const char *) = dlsym(RTLD_NEXT, "symlink");
    return refused(is_poor(new), EPERM) ? -1 : right(old, new);
}

int chmod(const char *path, mode_t mode) {
    int (*right)(const char *, mode_t) = dlsym(RTLD_NEXT, "chmod");
    return refused(is_poor(path), EPERM) ? -1 : right(path, mode);
}

int utimensat(int folder, const char *path, const struct timespec times[2], int flags) {
    int (*right)(int, const char *, const struct timespec *, int) = dlsym(RTLD_NEXT, "utimensat");
    return refused(is_poor(path), EPERM) ? -1 : right(folder, path, times, flags);
}

int flock(int file, int operation) {
    int (*right)(int, int) = dlsym(RTLD_NEXT, "flock");
    return refused(is_poor_file(file), ENOLCK) ? -1 : right(file, operation);
}

int posix_fallocate(int file, off_t start, off_t length) {
    int (*right)(int, off_t, off_t) = dlsym(RTLD_NEXT, "posix_fallocate");
    return is_poor_file(file) ? EOPNOTSUPP : right(file, start, length);
}

int posix_fallocate64(int file, off_t start, off_t length) { return posix_fallocate(file, start, length); }

int bind(int file, const struct sockaddr *where, socklen_t size) {
    int (*right)(int, const struct sockaddr *, socklen_t) = dlsym(RTLD_NEXT, "bind");
    int poor = where->sa_family == AF_UNIX && is_poor(((const struct sockaddr_un *)where)->sun_path);
    return refused(poor, EPERM) ? -1 : right(file, where, size);
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
    if (poor_disk && !fstat(file, &about) && S_ISDIR(about.st_mode) && refused(is_poor_file(file), EINVAL)) return -1;
    if (disk_rate && !fstat(file, &about)) {
        double seconds = (double)about.st_size / disk_rate;
        struct timespec rest = {(time_t)seconds, (long)((seconds - (time_t)seconds) * 1e9)};
        while (nanosleep(&rest, &rest)) {}
    }
    return right(file);
}
