/* A second counter, written apart from the package's, to judge it by: what is taken by posix_memalign at 64 bytes (torch's
 * CPU allocator does nothing else), under one lock, in an open table of addresses. Slow and plain. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>

#define SLOTS (1 << 20)
static struct { void *address; int64_t bytes; } table[SLOTS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int (*next_memalign)(void **, size_t, size_t);
static void (*next_free)(void *);
int64_t judge_live, judge_peak;

static size_t slot_of(void *p) { return ((uintptr_t)p >> 6) * 0x9E3779B97F4A7C15ull >> 44; }

int posix_memalign(void **out, size_t alignment, size_t bytes) {
  if (!next_memalign) next_memalign = dlsym(RTLD_NEXT, "posix_memalign");
  int failed = next_memalign(out, alignment, bytes);
  if (failed || alignment != 64) return failed;
  pthread_mutex_lock(&lock);
  size_t i = slot_of(*out);
  while (table[i].address && table[i].address != (void *)1) i = (i + 1) % SLOTS;
  table[i].address = *out;
  table[i].bytes = (int64_t)bytes;
  judge_live += (int64_t)bytes;
  if (judge_live > judge_peak) judge_peak = judge_live;
  pthread_mutex_unlock(&lock);
  return 0;
}

void free(void *p) {
  if (!next_free) next_free = dlsym(RTLD_NEXT, "free");
  if (p && ((uintptr_t)p & 63) == 0) {
    pthread_mutex_lock(&lock);
    for (size_t i = slot_of(p); table[i].address; i = (i + 1) % SLOTS)
      if (table[i].address == p) {
        judge_live -= table[i].bytes;
        table[i].address = (void *)1;
        break;
      }
    pthread_mutex_unlock(&lock);
  }
  next_free(p);
}
