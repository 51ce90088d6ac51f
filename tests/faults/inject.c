/* An LD_PRELOAD library that counts the calls by which files, processes and memory are had, and lets one of them fail.
 *
 * Counted are calls on files under one folder (FAULTS_UNDER), reads of pipes and sockets, new processes, and requests of
 * torch's allocator while Lowtide caps it.  All processes of a command count together, in a mapped file (FAULTS_COUNTS).
 * FAULTS_FAIL=CLASS:N:ERRNO lets the N-th call of a class fail, with "+" at the end every one from the N-th on.
 * Each failed call is written to FAULTS_LOG.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <spawn.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

/* In the order of injected.CLASSES. */
enum class { OPEN, WRITE, MAP, SYNC, RENAME, RESERVE, FOLDER, PROCESS, PIPE, DENIED, MEMORY, CLASSES };
static const char *const names[CLASSES] = {"open",   "write",   "map",  "sync",   "rename", "reserve",
                                           "folder", "process", "pipe", "denied", "memory"};

static _Atomic int64_t *counts;
static enum class failing = CLASSES;
static int64_t from, until;
static int error_code;
static char under[PATH_MAX];
static size_t under_length;

/* What runtime/device/memory_meter.py reads of Lowtide's own counters, where they are preloaded too: see probe/heap.c. */
static struct {
  _Atomic int64_t before_cap[9], cap, denied, denied_bytes;
} *heap;
static int64_t *(*thread_cap)(void);

__attribute__((constructor)) static void start(void) {
  heap = dlsym(RTLD_DEFAULT, "lowtide_heap");
  thread_cap = (int64_t * (*)(void)) dlsym(RTLD_DEFAULT, "lowtide_thread_cap");
  const char *path = getenv("FAULTS_COUNTS"), *what = getenv("FAULTS_FAIL"), *folder = getenv("FAULTS_UNDER");
  if (!path || !folder) return;
  strncpy(under, folder, sizeof under - 1);
  under_length = strlen(under);
  int file = (int)syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CLOEXEC);
  if (file < 0) return;
  void *mapped = (void *)syscall(SYS_mmap, NULL, CLASSES * sizeof *counts, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  syscall(SYS_close, file);
  if (mapped == MAP_FAILED) return;
  char name[32] = "", forever = 0;
  if (what && sscanf(what, "%31[a-z]:%ld:%d%c", name, &from, &error_code, &forever) >= 3) {
    for (int c = 0; c < CLASSES; c++)
      if (!strcmp(name, names[c])) failing = c;
    until = forever == '+' ? INT64_MAX : from;
  }
  counts = mapped;
}

static void note(const char *format, ...) {
  const char *path = getenv("FAULTS_LOG");
  if (!path) return;
  char line[PATH_MAX + 64];
  va_list values;
  va_start(values, format);
  int length = vsnprintf(line, sizeof line, format, values);
  va_end(values);
  int file = (int)syscall(SYS_openat, AT_FDCWD, path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0644);
  if (file < 0) return;
  syscall(SYS_write, file, line, (size_t)length);
  syscall(SYS_close, file);
}

/* Counts one call, and says whether it is to fail. */
static int fails(enum class c, const char *on) {
  int64_t n = atomic_fetch_add(&counts[c], 1) + 1;
  if (c != failing || n < from || n > until) return 0;
  note("%d %s %ld %s\n", getpid(), names[c], n, on);
  errno = error_code;
  return 1;
}

static int is_ours(const char *path) {
  return !strncmp(path, under, under_length) && (path[under_length] == '/' || !path[under_length]);
}

static int of_folder(enum class c, int folder, const char *path) {
  if (!counts || !path) return 0;
  char whole[2 * PATH_MAX];
  if (path[0] != '/') {
    char link[64], at[PATH_MAX];
    snprintf(link, sizeof link, folder == AT_FDCWD ? "/proc/self/cwd" : "/proc/self/fd/%d", folder);
    ssize_t length = readlink(link, at, sizeof at - 1);
    if (length < 0) return 0;
    at[length] = 0;
    snprintf(whole, sizeof whole, "%s/%s", at, path);
    path = whole;
  }
  return is_ours(path) && fails(c, path);
}

/* A folder is opened to list it, as to remove it. */
static int opens(int folder, const char *path, int flags) {
  struct stat found;
  if (!counts || (!(flags & O_CREAT) && path && !fstatat(folder, path, &found, 0) && S_ISDIR(found.st_mode))) return 0;
  return of_folder(OPEN, folder, path);
}

static int of_path(enum class c, const char *path) { return of_folder(c, AT_FDCWD, path); }

static int of_file(enum class c, int file) {
  if (!counts || file < 0) return 0;
  char link[64], at[PATH_MAX];
  snprintf(link, sizeof link, "/proc/self/fd/%d", file);
  ssize_t length = readlink(link, at, sizeof at - 1);
  if (length < 0) return 0;
  at[length] = 0;
  return is_ours(at) && fails(c, at);
}

static int of_pipe(int file) {
  struct stat found;
  if (!counts || file <= 0 || fstat(file, &found)) return 0;
  return (S_ISFIFO(found.st_mode) || S_ISSOCK(found.st_mode)) && fails(PIPE, "a pipe");
}

static int of_process(const char *how) { return counts && fails(PROCESS, how); }

#define REAL(result, name, ...)                                \
  static result (*real)(__VA_ARGS__);                          \
  if (!real) real = (result (*)(__VA_ARGS__))dlsym(RTLD_NEXT, name)

#define OPENS(name)                                                       \
  int name(const char *path, int flags, ...) {                            \
    REAL(int, #name, const char *, int, ...);                             \
    va_list values;                                                       \
    va_start(values, flags);                                              \
    mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(values, mode_t) : 0; \
    va_end(values);                                                       \
    return opens(AT_FDCWD, path, flags) ? -1 : real(path, flags, mode);   \
  }
OPENS(open)
OPENS(open64)

#define OPENS_AT(name)                                                    \
  int name(int folder, const char *path, int flags, ...) {                \
    REAL(int, #name, int, const char *, int, ...);                        \
    va_list values;                                                       \
    va_start(values, flags);                                              \
    mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(values, mode_t) : 0; \
    va_end(values);                                                       \
    return opens(folder, path, flags) ? -1 : real(folder, path, flags, mode); \
  }
OPENS_AT(openat)
OPENS_AT(openat64)

ssize_t write(int file, const void *data, size_t bytes) {
  REAL(ssize_t, "write", int, const void *, size_t);
  return of_file(WRITE, file) ? -1 : real(file, data, bytes);
}

ssize_t writev(int file, const struct iovec *parts, int count) {
  REAL(ssize_t, "writev", int, const struct iovec *, int);
  return of_file(WRITE, file) ? -1 : real(file, parts, count);
}

#define WRITES_AT(name, offset)                                                  \
  ssize_t name(int file, const void *data, size_t bytes, offset at) {            \
    REAL(ssize_t, #name, int, const void *, size_t, offset);                     \
    return of_file(WRITE, file) ? -1 : real(file, data, bytes, at);              \
  }
WRITES_AT(pwrite, off_t)
WRITES_AT(pwrite64, off64_t)

#define MAPS(name, offset)                                                                  \
  void *name(void *where, size_t bytes, int protection, int flags, int file, offset at) {   \
    REAL(void *, #name, void *, size_t, int, int, int, offset);                             \
    int fail = file >= 0 && !(flags & MAP_ANONYMOUS) && of_file(MAP, file);                 \
    return fail ? MAP_FAILED : real(where, bytes, protection, flags, file, at);             \
  }
MAPS(mmap, off_t)
MAPS(mmap64, off64_t)

int fsync(int file) {
  REAL(int, "fsync", int);
  return of_file(SYNC, file) ? -1 : real(file);
}

int fdatasync(int file) {
  REAL(int, "fdatasync", int);
  return of_file(SYNC, file) ? -1 : real(file);
}

int rename(const char *old, const char *fresh) {
  REAL(int, "rename", const char *, const char *);
  return of_path(RENAME, fresh) ? -1 : real(old, fresh);
}

int renameat(int from_folder, const char *old, int to_folder, const char *fresh) {
  REAL(int, "renameat", int, const char *, int, const char *);
  return of_folder(RENAME, to_folder, fresh) ? -1 : real(from_folder, old, to_folder, fresh);
}

int link(const char *old, const char *fresh) {
  REAL(int, "link", const char *, const char *);
  return of_path(RENAME, fresh) ? -1 : real(old, fresh);
}

#define TRUNCATES(name, offset)                     \
  int name(int file, offset size) {                 \
    REAL(int, #name, int, offset);                  \
    return of_file(RESERVE, file) ? -1 : real(file, size); \
  }
TRUNCATES(ftruncate, off_t)
TRUNCATES(ftruncate64, off64_t)

#define RESERVES(name, offset)                                  \
  int name(int file, offset since, offset size) {               \
    REAL(int, #name, int, offset, offset);                      \
    return of_file(RESERVE, file) ? error_code : real(file, since, size); \
  }
RESERVES(posix_fallocate, off_t)
RESERVES(posix_fallocate64, off64_t)

int mkdir(const char *path, mode_t mode) {
  REAL(int, "mkdir", const char *, mode_t);
  return of_path(FOLDER, path) ? -1 : real(path, mode);
}

int mkdirat(int folder, const char *path, mode_t mode) {
  REAL(int, "mkdirat", int, const char *, mode_t);
  return of_folder(FOLDER, folder, path) ? -1 : real(folder, path, mode);
}

pid_t fork(void) {
  REAL(pid_t, "fork", void);
  return of_process("fork") ? -1 : real();
}

/* A function cannot wrap vfork, whose child returns through the parent's frames; a fork does the same, slower. */
pid_t vfork(void) {
  REAL(pid_t, "fork", void);
  return of_process("vfork") ? -1 : real();
}

int posix_spawn(pid_t *pid, const char *path, const posix_spawn_file_actions_t *actions, const posix_spawnattr_t *attributes,
                char *const arguments[], char *const environment[]) {
  REAL(int, "posix_spawn", pid_t *, const char *, const posix_spawn_file_actions_t *, const posix_spawnattr_t *,
       char *const[], char *const[]);
  return of_process("posix_spawn") ? error_code : real(pid, path, actions, attributes, arguments, environment);
}

/* ERRNO 0: the other end has gone. */
ssize_t read(int file, void *data, size_t bytes) {
  REAL(ssize_t, "read", int, void *, size_t);
  if (!of_pipe(file)) return real(file, data, bytes);
  return error_code ? -1 : 0;
}

static int capped(void) { return heap && (atomic_load(&heap->cap) > 0 || (thread_cap && *thread_cap() > 0)); }

/* Lowtide's counter stands before this library and is asked first.  "denied": as if it had refused; "memory": the
 * machine has no more. */
int posix_memalign(void **out, size_t alignment, size_t bytes) {
  REAL(int, "posix_memalign", void **, size_t, size_t);
  if (counts && alignment >= 64 && bytes && capped()) {
    int denied = fails(DENIED, "an allocation");
    if (denied) {
      atomic_store(&heap->denied_bytes, (int64_t)bytes);
      atomic_fetch_add(&heap->denied, 1);
    }
    if (denied | fails(MEMORY, "an allocation")) return ENOMEM;
  }
  return real(out, alignment, bytes);
}
