/* Faults below the program: a library that the loader puts before the C library.
 *
 * FAULT_CALL   the function that fails: write, fsync, rename, open, mkdir, read, map, or clock
 * FAULT_AT     the number of the first call that fails, from 1
 * FAULT_COUNT  how many calls fail from there on
 * FAULT_ERRNO  their errno; of a clock the seconds by which it jumps
 * FAULT_UNDER  only files below this folder count
 * FAULT_SEEN   a file that gets a byte for each call that failed
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static atomic_long calls;

static long number(const char *name) {
    const char *text = getenv(name);
    return text ? atol(text) : 0;
}

/* Whether this call of a function is one that fails. */
static int fails(const char *call) {
    const char *chosen = getenv("FAULT_CALL");
    if (!chosen || strcmp(chosen, call) != 0) return 0;
    long at = atomic_fetch_add(&calls, 1) + 1, first = number("FAULT_AT");
    if (at < first || at >= first + number("FAULT_COUNT")) return 0;
    const char *seen = getenv("FAULT_SEEN");
    int (*real_open)(const char *, int, ...) = dlsym(RTLD_NEXT, "open");
    ssize_t (*real_write)(int, const void *, size_t) = dlsym(RTLD_NEXT, "write");
    int file = seen ? real_open(seen, O_WRONLY | O_CREAT | O_APPEND, 0600) : -1;
    if (file >= 0) {
        (void)!real_write(file, "x", 1);
        close(file);
    }
    errno = (int)number("FAULT_ERRNO");
    return 1;
}

static int path_counts(const char *path) {
    const char *under = getenv("FAULT_UNDER");
    return under && strncmp(path, under, strlen(under)) == 0;
}

static int file_counts(int file) {
    char name[64], path[PATH_MAX];
    snprintf(name, sizeof name, "/proc/self/fd/%d", file);
    ssize_t length = readlink(name, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return path_counts(path);
}

#define REAL(result, name, ...) result (*real)(__VA_ARGS__) = dlsym(RTLD_NEXT, name)

ssize_t write(int file, const void *bytes, size_t count) {
    REAL(ssize_t, "write", int, const void *, size_t);
    return file > 2 && file_counts(file) && fails("write") ? -1 : real(file, bytes, count);
}

ssize_t writev(int file, const struct iovec *parts, int count) {
    REAL(ssize_t, "writev", int, const struct iovec *, int);
    return file > 2 && file_counts(file) && fails("write") ? -1 : real(file, parts, count);
}

ssize_t pwrite64(int file, const void *bytes, size_t count, off64_t offset) {
    REAL(ssize_t, "pwrite64", int, const void *, size_t, off64_t);
    return file_counts(file) && fails("write") ? -1 : real(file, bytes, count, offset);
}

ssize_t read(int file, void *bytes, size_t count) {
    REAL(ssize_t, "read", int, void *, size_t);
    return file > 2 && file_counts(file) && fails("read") ? -1 : real(file, bytes, count);
}

int fsync(int file) {
    REAL(int, "fsync", int);
    return file_counts(file) && fails("fsync") ? -1 : real(file);
}

int rename(const char *from, const char *to) {
    REAL(int, "rename", const char *, const char *);
    return path_counts(to) && fails("rename") ? -1 : real(from, to);
}

int mkdir(const char *path, mode_t mode) {
    REAL(int, "mkdir", const char *, mode_t);
    return path_counts(path) && fails("mkdir") ? -1 : real(path, mode);
}

int open64(const char *path, int flags, ...) {
    va_list rest;
    va_start(rest, flags);
    mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0;
    va_end(rest);
    REAL(int, "open64", const char *, int, ...);
    return path_counts(path) && flags & O_CREAT && fails("open") ? -1 : real(path, flags, mode);
}

void *mmap64(void *place, size_t length, int protection, int flags, int file, off64_t offset) {
    REAL(void *, "mmap64", void *, size_t, int, int, int, off64_t);
    int counts = file >= 0 && file_counts(file);
    return counts && fails("map") ? MAP_FAILED : real(place, length, protection, flags, file, offset);
}

void *mmap(void *place, size_t length, int protection, int flags, int file, off_t offset) {
    return mmap64(place, length, protection, flags, file, offset);
}

int clock_gettime(clockid_t clock, struct timespec *time) {
    REAL(int, "clock_gettime", clockid_t, struct timespec *);
    int result = real(clock, time);
    int before = errno;
    if (result == 0 && clock == CLOCK_REALTIME && fails("clock")) time->tv_sec += number("FAULT_ERRNO");
    errno = before;
    return result;
}
