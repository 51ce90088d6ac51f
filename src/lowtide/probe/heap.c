/* The heap counter: an LD_PRELOAD library that counts the bytes a process holds, and can cap those of tensors.
 *
 * It keeps two books.  "heap" has every block of malloc and its relatives, by usable size.  "tensor" has every block
 * requested through posix_memalign with an alignment of 64 bytes or more, by requested size: c10's CPU allocator makes such
 * requests, and so does oneDNN for its scratchpads, so the workspace inside an operator is counted too.
 *
 * A request from c10's allocator that would raise the tensor book above a cap fails with ENOMEM; c10 turns that into a
 * RuntimeError, and the process survives.  (oneDNN does not survive a refusal: its requests are counted, never refused.)
 * There are two caps: one for the process, and one for the calling thread.
 *
 * If it was not preloaded, it can be attached later (lowtide_attach); it then keeps only the tensor book.
 *
 * One file: the wrappers of malloc and its relatives share the static books, and the compiler must see all code that runs
 * in them.
 *
 * Besides, it keeps a line of a solver's off standard output.
 *
 * Not counted: mmap'ed memory (NumPy and Python arenas of some sizes, MKL's own buffers), and other processes' memory.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <link.h>
#include <malloc.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
#define TENSOR_ALIGNMENT 64
#define SHARDS 256
#define FIRST_SLOTS 256

/* Python reads these fields through ctypes, and writes the caps and the peaks of windows: keep them in step with
 * runtime/device/heap_counters.py, and with the indices in probe/counters.py. */
struct counters {
  _Atomic int64_t layout;           /* size of this struct: detects a stale library */
  _Atomic int64_t tensor_live;      /* bytes */
  _Atomic int64_t tensor_peak;      /* bytes, since the process began */
  _Atomic int64_t tensor_op_peak;   /* bytes, since Python last wrote it (per operator) */
  _Atomic int64_t tensor_step_peak; /* bytes, since Python last wrote it (per step) */
  _Atomic int64_t tensor_blocks;    /* live blocks */
  _Atomic int64_t heap_live;        /* bytes */
  _Atomic int64_t heap_peak;        /* bytes, since Python last wrote it */
  _Atomic int64_t heap_requests;    /* allocations so far; 0 means that malloc is not interposed */
  _Atomic int64_t cap;              /* upper limit of tensor_live for the process, bytes; 0: none */
  _Atomic int64_t denied;           /* requests refused */
  _Atomic int64_t denied_bytes;     /* size of the last refused request */
  _Atomic int64_t library_live;     /* bytes of the tensor book that c10 did not request: oneDNN's workspaces */
  _Atomic int64_t library_op_peak;  /* bytes, since Python last wrote it */
  _Atomic int64_t outside_peak;     /* highest heap_live - tensor_live, bytes, since Python last wrote it */
};

EXPORT struct counters lowtide_heap = {.layout = sizeof(struct counters)};

static __thread int64_t thread_cap __attribute__((tls_model("initial-exec")));

/* Address of the calling thread's own cap (value 0: none); valid as long as that thread lives. */
EXPORT int64_t *lowtide_thread_cap(void) { return &thread_cap; }

static void *(*real_malloc)(size_t);
static void *(*real_calloc)(size_t, size_t);
static void *(*real_realloc)(void *, size_t);
static void (*real_free)(void *);
static int (*real_posix_memalign)(void **, size_t, size_t);
static void *(*real_aligned_alloc)(size_t, size_t);
static void *(*real_memalign)(size_t, size_t);
static size_t (*real_usable_size)(void *);

/* dlsym itself may allocate before the real functions are known; those few blocks live here and are never freed. */
static char bootstrap[64 * 1024] __attribute__((aligned(16)));
static _Atomic size_t bootstrap_used;
static __thread int resolving __attribute__((tls_model("initial-exec")));

static void *bootstrap_take(size_t bytes) {
  size_t at = atomic_fetch_add(&bootstrap_used, (bytes + 31) & ~(size_t)15);
  if (at + bytes + 16 > sizeof bootstrap) return NULL;
  *(size_t *)(bootstrap + at) = bytes;
  return bootstrap + at + 16;
}

static int in_bootstrap(const void *block) {
  return (const char *)block >= bootstrap && (const char *)block < bootstrap + sizeof bootstrap;
}

static void resolve(void) {
  if (real_free || resolving) return;
  resolving = 1;
  real_malloc = dlsym(RTLD_NEXT, "malloc");
  real_calloc = dlsym(RTLD_NEXT, "calloc");
  real_realloc = dlsym(RTLD_NEXT, "realloc");
  real_posix_memalign = dlsym(RTLD_NEXT, "posix_memalign");
  real_aligned_alloc = dlsym(RTLD_NEXT, "aligned_alloc");
  real_memalign = dlsym(RTLD_NEXT, "memalign");
  real_usable_size = dlsym(RTLD_NEXT, "malloc_usable_size");
  real_free = dlsym(RTLD_NEXT, "free");
  resolving = 0;
}

/* --- standard output -------------------------------------------------------------------------------------------------- */

/* HiGHS, which solves programs of plans, prints "HighsMipSolverData::transformNewIntegerFeasibleSolution tmpSolver.run();"
 * although its output is off.  Standard output is the script's, so that line is left out. */
static int (*real_puts)(const char *);

EXPORT int puts(const char *text) {
  if (!strncmp(text, "HighsMipSolverData::", 20)) return 0;
  if (!real_puts) real_puts = dlsym(RTLD_NEXT, "puts");
  return real_puts ? real_puts(text) : EOF;
}

/* --- table of tensor blocks: open addressing, sharded by address --------------------------------------------------- */

struct slot {
  uintptr_t block; /* 0: empty */
  int64_t bytes;   /* negative: requested by a library, not by c10 */
};

static struct shard {
  pthread_mutex_t lock;
  struct slot *slots;
  size_t capacity; /* a power of two */
  size_t used;
} shards[SHARDS] = {[0 ... SHARDS - 1] = {.lock = PTHREAD_MUTEX_INITIALIZER}};

static size_t hash(uintptr_t block) { return (size_t)((block >> 6) * UINT64_C(0x9E3779B97F4A7C15) >> 16); }

static struct shard *shard_of(uintptr_t block) { return &shards[hash(block) % SHARDS]; }

static size_t home(const struct shard *s, uintptr_t block) { return (hash(block) / SHARDS) & (s->capacity - 1); }

static struct slot *map_slots(size_t capacity) {
  void *p = mmap(NULL, capacity * sizeof(struct slot), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  return p == MAP_FAILED ? NULL : p;
}

static void put(struct shard *s, uintptr_t block, int64_t bytes) {
  size_t i = home(s, block);
  while (s->slots[i].block) i = (i + 1) & (s->capacity - 1);
  s->slots[i] = (struct slot){block, bytes};
  s->used++;
}

static int grow(struct shard *s) {
  size_t old_capacity = s->capacity;
  struct slot *old = s->slots;
  size_t capacity = old_capacity ? old_capacity * 2 : FIRST_SLOTS;
  struct slot *fresh = map_slots(capacity);
  if (!fresh) return 0;
  s->slots = fresh;
  s->capacity = capacity;
  s->used = 0;
  for (size_t i = 0; i < old_capacity; i++)
    if (old[i].block) put(s, old[i].block, old[i].bytes);
  if (old) munmap(old, old_capacity * sizeof(struct slot));
  return 1;
}

static int remember(uintptr_t block, int64_t bytes) {
  struct shard *s = shard_of(block);
  int kept = 1;
  pthread_mutex_lock(&s->lock);
  if (s->used * 2 >= s->capacity) kept = grow(s);
  if (kept) put(s, block, bytes);
  pthread_mutex_unlock(&s->lock);
  return kept;
}

/* Remove a block from the table and return the bytes stored for it; 0 if it is not a tensor block. */
static int64_t forget(uintptr_t block) {
  struct shard *s = shard_of(block);
  int64_t bytes = 0;
  pthread_mutex_lock(&s->lock);
  if (s->capacity) {
    size_t mask = s->capacity - 1, i = home(s, block);
    while (s->slots[i].block && s->slots[i].block != block) i = (i + 1) & mask;
    if (s->slots[i].block) {
      bytes = s->slots[i].bytes;
      s->used--;
      /* Backward-shift deletion, so that tombstones do not accumulate. */
      for (size_t j = (i + 1) & mask; s->slots[j].block; j = (j + 1) & mask) {
        size_t h = home(s, s->slots[j].block);
        if (((j - h) & mask) >= ((j - i) & mask)) {
          s->slots[i] = s->slots[j];
          i = j;
        }
      }
      s->slots[i].block = 0;
    }
  }
  pthread_mutex_unlock(&s->lock);
  return bytes;
}

/* Bytes of the tensor block at an address; 0 if there is none. */
EXPORT int64_t lowtide_block_bytes(const void *block) {
  struct shard *s = shard_of((uintptr_t)block);
  int64_t bytes = 0;
  pthread_mutex_lock(&s->lock);
  if (s->capacity) {
    size_t mask = s->capacity - 1, i = home(s, (uintptr_t)block);
    while (s->slots[i].block && s->slots[i].block != (uintptr_t)block) i = (i + 1) & mask;
    if (s->slots[i].block) bytes = s->slots[i].bytes;
  }
  pthread_mutex_unlock(&s->lock);
  return bytes < 0 ? -bytes : bytes;
}

static void before_fork(void) {
  for (int i = 0; i < SHARDS; i++) pthread_mutex_lock(&shards[i].lock);
}

static void after_fork(void) {
  for (int i = SHARDS - 1; i >= 0; i--) pthread_mutex_unlock(&shards[i].lock);
}

__attribute__((constructor)) static void start(void) {
  resolve();
  pthread_atfork(before_fork, after_fork, after_fork);
}

/* --- the books ---------------------------------------------------------------------------------------------------- */

static void lift(_Atomic int64_t *peak, int64_t live) {
  int64_t seen = atomic_load_explicit(peak, memory_order_relaxed);
  while (live > seen && !atomic_compare_exchange_weak_explicit(peak, &seen, live, memory_order_relaxed,
                                                               memory_order_relaxed)) {
  }
}

static void heap_add(void *block) {
  int64_t bytes = (int64_t)real_usable_size(block);
  int64_t live = atomic_fetch_add_explicit(&lowtide_heap.heap_live, bytes, memory_order_relaxed) + bytes;
  atomic_fetch_add_explicit(&lowtide_heap.heap_requests, 1, memory_order_relaxed);
  lift(&lowtide_heap.heap_peak, live);
  lift(&lowtide_heap.outside_peak, live - atomic_load_explicit(&lowtide_heap.tensor_live, memory_order_relaxed));
}

static void heap_drop(void *block) {
  int64_t bytes = (int64_t)real_usable_size(block);
  atomic_fetch_sub_explicit(&lowtide_heap.heap_live, bytes, memory_order_relaxed);
}

/* Take a block off the tensor book; bytes as stored in the table. */
static void tensor_drop(int64_t bytes) {
  if (bytes < 0) {
    bytes = -bytes;
    atomic_fetch_sub_explicit(&lowtide_heap.library_live, bytes, memory_order_relaxed);
  }
  atomic_fetch_sub_explicit(&lowtide_heap.tensor_live, bytes, memory_order_relaxed);
  atomic_fetch_sub_explicit(&lowtide_heap.tensor_blocks, 1, memory_order_relaxed);
}

static void tensor_release(void *block) {
  if ((uintptr_t)block % TENSOR_ALIGNMENT) return;
  int64_t bytes = forget((uintptr_t)block);
  if (bytes) tensor_drop(bytes);
}

static int over(int64_t live, int64_t cap) { return cap > 0 && live > cap; }

/* Address range of libc10.so; looked up at tensor requests until the library is found. */
static _Atomic uintptr_t c10_low, c10_high;

static int find_c10(struct dl_phdr_info *info, size_t size, void *unused) {
  (void)size;
  (void)unused;
  const char *name = strrchr(info->dlpi_name, '/');
  if (!name || strncmp(name, "/libc10.so", 10)) return 0;
  uintptr_t low = UINTPTR_MAX, high = 0;
  for (int i = 0; i < info->dlpi_phnum; i++) {
    if (info->dlpi_phdr[i].p_type != PT_LOAD) continue;
    uintptr_t at = info->dlpi_addr + info->dlpi_phdr[i].p_vaddr, end = at + info->dlpi_phdr[i].p_memsz;
    if (at < low) low = at;
    if (end > high) high = end;
  }
  atomic_store(&c10_low, low);
  atomic_store(&c10_high, high);
  return 1;
}

static int from_c10(uintptr_t caller) {
  if (!atomic_load_explicit(&c10_high, memory_order_relaxed)) dl_iterate_phdr(find_c10, NULL);
  return caller >= atomic_load_explicit(&c10_low, memory_order_relaxed) &&
         caller < atomic_load_explicit(&c10_high, memory_order_relaxed);
}

/* Add bytes to the tensor book before they are allocated; returns 0 if a cap refuses them. */
static int tensor_reserve(int64_t bytes, int64_t *live, int c10) {
  *live = atomic_fetch_add_explicit(&lowtide_heap.tensor_live, bytes, memory_order_relaxed) + bytes;
  if (!c10) return 1;
  if (!over(*live, atomic_load_explicit(&lowtide_heap.cap, memory_order_relaxed)) && !over(*live, thread_cap)) return 1;
  atomic_fetch_sub_explicit(&lowtide_heap.tensor_live, bytes, memory_order_relaxed);
  atomic_store_explicit(&lowtide_heap.denied_bytes, bytes, memory_order_relaxed);
  atomic_fetch_add_explicit(&lowtide_heap.denied, 1, memory_order_relaxed);
  return 0;
}

/* --- the interposed functions ------------------------------------------------------------------------------------- */

EXPORT void *malloc(size_t bytes) {
  resolve();
  if (!real_malloc) return bootstrap_take(bytes);
  void *block = real_malloc(bytes);
  if (block) heap_add(block);
  return block;
}

EXPORT void *calloc(size_t count, size_t bytes) {
  resolve();
  if (!real_calloc) {
    size_t total;
    if (__builtin_mul_overflow(count, bytes, &total)) return NULL;
    return bootstrap_take(total); /* static memory is zero, and never reused */
  }
  void *block = real_calloc(count, bytes);
  if (block) heap_add(block);
  return block;
}

EXPORT void free(void *block) {
  if (!block || in_bootstrap(block)) return;
  resolve();
  heap_drop(block);
  tensor_release(block); /* before the real free: another thread may get the same address at once */
  real_free(block);
}

EXPORT void *realloc(void *block, size_t bytes) {
  resolve();
  if (in_bootstrap(block)) {
    void *moved = malloc(bytes);
    size_t old = *(size_t *)((char *)block - 16);
    if (moved) memcpy(moved, block, old < bytes ? old : bytes);
    return moved;
  }
  if (!real_realloc) return bootstrap_take(bytes);
  if (!block) return malloc(bytes);
  int64_t before = (int64_t)real_usable_size(block);
  /* A resized tensor block leaves the tensor book; c10 never resizes one. */
  int64_t tensor = (uintptr_t)block % TENSOR_ALIGNMENT ? 0 : forget((uintptr_t)block);
  void *moved = real_realloc(block, bytes);
  if (!moved && bytes) {
    if (tensor) remember((uintptr_t)block, tensor);
    return NULL;
  }
  if (tensor) tensor_drop(tensor);
  atomic_fetch_sub_explicit(&lowtide_heap.heap_live, before, memory_order_relaxed);
  if (moved) heap_add(moved);
  return moved;
}

/* posix_memalign that keeps the tensor book, and the heap book if `heap` is set. */
static int counted_memalign(void **out, size_t alignment, size_t bytes, uintptr_t caller, int heap) {
  int tensor = alignment >= TENSOR_ALIGNMENT && bytes > 0;
  int c10 = tensor && from_c10(caller);
  int64_t live = 0;
  if (tensor && !tensor_reserve((int64_t)bytes, &live, c10)) return ENOMEM;
  int failed = real_posix_memalign(out, alignment, bytes);
  if (!failed && tensor && !remember((uintptr_t)*out, c10 ? (int64_t)bytes : -(int64_t)bytes)) {
    real_free(*out);
    failed = ENOMEM;
  }
  if (failed) {
    if (tensor) atomic_fetch_sub_explicit(&lowtide_heap.tensor_live, (int64_t)bytes, memory_order_relaxed);
    return failed;
  }
  if (heap && *out) heap_add(*out);
  if (!tensor) return 0;
  atomic_fetch_add_explicit(&lowtide_heap.tensor_blocks, 1, memory_order_relaxed);
  lift(&lowtide_heap.tensor_peak, live);
  lift(&lowtide_heap.tensor_op_peak, live);
  lift(&lowtide_heap.tensor_step_peak, live);
  if (!c10) {
    int64_t library = atomic_fetch_add_explicit(&lowtide_heap.library_live, (int64_t)bytes, memory_order_relaxed);
    lift(&lowtide_heap.library_op_peak, library + (int64_t)bytes);
  }
  return 0;
}

EXPORT int posix_memalign(void **out, size_t alignment, size_t bytes) {
  resolve();
  if (!real_posix_memalign) return ENOMEM;
  return counted_memalign(out, alignment, bytes, (uintptr_t)__builtin_return_address(0), 1);
}

EXPORT void *aligned_alloc(size_t alignment, size_t bytes) {
  resolve();
  if (!real_aligned_alloc) return NULL;
  void *block = real_aligned_alloc(alignment, bytes);
  if (block) heap_add(block);
  return block;
}

EXPORT void *memalign(size_t alignment, size_t bytes) {
  resolve();
  if (!real_memalign) return NULL;
  void *block = real_memalign(alignment, bytes);
  if (block) heap_add(block);
  return block;
}

/* --- attaching to a process that is running ------------------------------------------------------------------------
 *
 * If the library was not preloaded (in a notebook), the entries for posix_memalign and free in the global offset tables
 * of libc10 and libtorch_cpu are redirected here: those two own all tensor blocks and oneDNN's scratchpads.  The heap book
 * is not kept then.
 */

static int attached_posix_memalign(void **out, size_t alignment, size_t bytes) {
  return counted_memalign(out, alignment, bytes, (uintptr_t)__builtin_return_address(0), 0);
}

static void attached_free(void *block) {
  if (!block) return;
  tensor_release(block); /* before the real free: another thread may get the same address at once */
  real_free(block);
}

#if defined(__x86_64__)
#define IS_SLOT(type) ((type) == R_X86_64_JUMP_SLOT || (type) == R_X86_64_GLOB_DAT)
#elif defined(__aarch64__)
#define IS_SLOT(type) ((type) == R_AARCH64_JUMP_SLOT || (type) == R_AARCH64_GLOB_DAT)
#else
#define IS_SLOT(type) 0
#endif

/* glibc relocates the addresses in dynamic entries; musl leaves them as offsets. */
static const char *placed(uintptr_t base, uintptr_t at) { return (const char *)(at < base ? base + at : at); }

static int redirect(void **slot, void *target) {
  size_t page = (size_t)sysconf(_SC_PAGESIZE);
  void *start = (void *)((uintptr_t)slot & ~(page - 1));
  if (mprotect(start, page, PROT_READ | PROT_WRITE)) return 0; /* slots are aligned: none crosses a page */
  __atomic_store_n(slot, target, __ATOMIC_SEQ_CST);
  return 1;
}

struct attachment {
  const char *function;
  void *target;
  int redirected;
};

static int attach_object(struct dl_phdr_info *info, size_t size, void *given) {
  struct attachment *attachment = given;
  (void)size;
  const char *name = strrchr(info->dlpi_name, '/');
  if (!name || (strncmp(name, "/libc10.so", 10) && strncmp(name, "/libtorch_cpu.so", 16))) return 0;
  uintptr_t base = info->dlpi_addr;
  const ElfW(Dyn) *entry = NULL;
  for (int i = 0; i < info->dlpi_phnum; i++)
    if (info->dlpi_phdr[i].p_type == PT_DYNAMIC) entry = (const ElfW(Dyn) *)(base + info->dlpi_phdr[i].p_vaddr);
  if (!entry) return 0;
  const ElfW(Sym) *symbols = NULL;
  const char *strings = NULL;
  const ElfW(Rela) *tables[2] = {NULL, NULL};
  size_t sizes[2] = {0, 0};
  for (; entry->d_tag != DT_NULL; entry++) {
    if (entry->d_tag == DT_SYMTAB) symbols = (const ElfW(Sym) *)placed(base, entry->d_un.d_ptr);
    if (entry->d_tag == DT_STRTAB) strings = placed(base, entry->d_un.d_ptr);
    if (entry->d_tag == DT_JMPREL) tables[0] = (const ElfW(Rela) *)placed(base, entry->d_un.d_ptr);
    if (entry->d_tag == DT_PLTRELSZ) sizes[0] = entry->d_un.d_val;
    if (entry->d_tag == DT_RELA) tables[1] = (const ElfW(Rela) *)placed(base, entry->d_un.d_ptr);
    if (entry->d_tag == DT_RELASZ) sizes[1] = entry->d_un.d_val;
  }
  if (!symbols || !strings) return 0;
  for (int t = 0; t < 2; t++) {
    for (size_t i = 0; tables[t] && i < sizes[t] / sizeof(ElfW(Rela)); i++) {
      const ElfW(Rela) *rela = &tables[t][i];
      if (!IS_SLOT(ELF64_R_TYPE(rela->r_info))) continue;
      if (strcmp(strings + symbols[ELF64_R_SYM(rela->r_info)].st_name, attachment->function)) continue;
      attachment->redirected += redirect((void **)(base + rela->r_offset), attachment->target);
    }
  }
  return 0;
}

/* Start to count in a process that began without this library; returns whether that was possible. */
EXPORT int lowtide_attach(void) {
  static int attached;
  if (attached) return 1;
  /* Search the global scope: an allocator that the user preloaded comes before the C library's. */
  void *aligned = dlsym(RTLD_DEFAULT, "posix_memalign"), *release = dlsym(RTLD_DEFAULT, "free");
  if (!aligned || !release) return 0;
  real_posix_memalign = (int (*)(void **, size_t, size_t))aligned;
  real_free = (void (*)(void *))release;
  /* free first: no block may enter the book whose release would be missed. */
  struct attachment frees = {"free", (void *)attached_free, 0};
  struct attachment takes = {"posix_memalign", (void *)attached_posix_memalign, 0};
  dl_iterate_phdr(attach_object, &frees);
  if (frees.redirected) dl_iterate_phdr(attach_object, &takes);
  attached = frees.redirected && takes.redirected;
  return attached;
}

/* Book a tensor block that was allocated before the library was attached. */
EXPORT void lowtide_adopt(const void *block, int64_t bytes) {
  if (bytes <= 0 || lowtide_block_bytes(block) || !remember((uintptr_t)block, bytes)) return;
  atomic_fetch_add_explicit(&lowtide_heap.tensor_blocks, 1, memory_order_relaxed);
  int64_t live = atomic_fetch_add_explicit(&lowtide_heap.tensor_live, bytes, memory_order_relaxed) + bytes;
  lift(&lowtide_heap.tensor_peak, live);
}
