/* A stand-in for rocSHMEM's host library: the same interface, on POSIX shared memory between processes of this machine.

   Compiled as C it exports plain names, as C++ the mangled names of namespace rocshmem. Like the real library, it aborts
   the process if it is called before init or after finalize. Environment variables make it fail:
     STAND_IN_FAIL         names of functions that return 1 or null
     STAND_IN_VERSION      the reported version, 3.4.0 by default
     STAND_IN_UNREACHABLE  a PE without direct access from other processes
     STAND_IN_LOG          a file to which each call appends a line
   LACKS_STREAMS omits some functions, EMPTY all of them. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <fcntl.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#ifdef __cplusplus
#include <array>
struct ihipStream_t;
struct ihipModule_t;
typedef struct ihipStream_t *hipStream_t;
typedef struct ihipModule_t *hipModule_t;
namespace rocshmem {
using rocshmem_uniqueid_t = std::array<uint8_t, 128>;
#else
typedef struct { uint8_t bytes[128]; } rocshmem_uniqueid_t;
typedef void *hipStream_t;
typedef void *hipModule_t;
#endif
typedef struct rocshmem_init_attr_t {
  int32_t rank, nranks;
  rocshmem_uniqueid_t uid;
  void *mpi_comm;
} rocshmem_init_attr_t;

#ifndef EMPTY

/* ---- shared memory: this struct, followed by a heap for each PE ---- */

enum { MAX_PES = 8, HEAP = 1 << 16 };
typedef struct { int attached, arrived, turn, unused; } Shared;

static Shared *shared;
static char *heaps;
static int my_pe, num_pes = 0, ended, next_byte;

static void note(const char *format, ...) {
  const char *path = getenv("STAND_IN_LOG");
  if (!path) return;
  char line[256];
  va_list args;
  va_start(args, format);
  int length = vsnprintf(line, sizeof line - 1, format, args);
  va_end(args);
  line[length] = '\n';
  int file = open(path, O_WRONLY | O_CREAT | O_APPEND, 0600);
  if (write(file, line, length + 1) < 0) abort();
  close(file);
}

static void must_run(const char *name) {
  if (num_pes && !ended) return;
  fprintf(stderr, "stand-in: %s %s\n", name, ended ? "after finalize" : "before init");
  abort();
}

static int fails(const char *name) {
  const char *names = getenv("STAND_IN_FAIL");
  return names && strstr(names, name);
}

static void wait_while(volatile int *word, int value) {
  struct timespec pause = {0, 200000};
  for (int i = 0; i < 100000 && __atomic_load_n(word, __ATOMIC_ACQUIRE) == value; i++) nanosleep(&pause, NULL);
  if (__atomic_load_n(word, __ATOMIC_ACQUIRE) == value) {
    fprintf(stderr, "stand-in: PE %d waited for its peers in vain\n", my_pe);
    abort();
  }
}

static void meet(void) {
  int turn = __atomic_load_n(&shared->turn, __ATOMIC_ACQUIRE);
  if (__atomic_add_fetch(&shared->arrived, 1, __ATOMIC_ACQ_REL) == num_pes) {
    __atomic_store_n(&shared->arrived, 0, __ATOMIC_RELEASE);
    __atomic_store_n(&shared->turn, turn + 1, __ATOMIC_RELEASE);
  } else {
    wait_while(&shared->turn, turn);
  }
}

static char *at(const void *local, int pe) {
  long offset = (const char *)local - (heaps + (long)my_pe * HEAP);
  if (offset < 0 || offset >= HEAP || pe < 0 || pe >= num_pes) abort();
  return heaps + (long)pe * HEAP + offset;
}

/* ---- streams: operations run when the test steps the stream, or immediately on stream 0 ---- */

typedef struct { void *to; const void *from; size_t nbytes; } Copy;
typedef struct { Copy copies[64]; int count; } Stream;

static void enqueue(hipStream_t stream, void *to, const void *from, size_t nbytes) {
  Copy copy = {to, from, nbytes};
  if (!stream) memcpy(to, from, nbytes);
  else ((Stream *)stream)->copies[((Stream *)stream)->count++] = copy;
}

#ifdef __cplusplus
extern "C" {
#endif
void *stand_in_stream(void) { return calloc(1, sizeof(Stream)); }

/* Run the next operation of a stream; return the number of remaining ones. */
int stand_in_step(void *stream) {
  Stream *s = (Stream *)stream;
  memcpy(s->copies[0].to, s->copies[0].from, s->copies[0].nbytes);
  memmove(s->copies, s->copies + 1, sizeof(Copy) * --s->count);
  return s->count;
}
#ifdef __cplusplus
}
#endif

/* ---- rocSHMEM's functions ---- */

void rocshmem_vendor_get_version_info(int *major, int *minor, int *patch) {
  const char *version = getenv("STAND_IN_VERSION");
  if (sscanf(version ? version : "3.4.0", "%d.%d.%d", major, minor, patch) != 3) abort();
}

int rocshmem_get_uniqueid(rocshmem_uniqueid_t *uid) {
  note("get_uniqueid");
  if (fails("get_uniqueid")) return 1;
  memset(uid, 0, sizeof *uid);
  snprintf((char *)uid, sizeof *uid, "/tdkernels-stand-in-%d-%ld", (int)getpid(), (long)clock());
  memset((char *)uid + 100, 0xa5, 28); /* so that all bytes must be transferred */
  return 0;
}

int rocshmem_set_attr_uniqueid_args(int rank, int nranks, rocshmem_uniqueid_t *uid, rocshmem_init_attr_t *attr) {
  note("set_attr_uniqueid_args %d %d", rank, nranks);
  if (fails("set_attr")) return 1;
  attr->rank = rank;
  attr->nranks = nranks;
  memcpy(&attr->uid, uid, sizeof *uid);
  attr->mpi_comm = NULL;
  return 0;
}

int rocshmem_init_attr(unsigned flags, rocshmem_init_attr_t *attr) {
  note("init_attr %u", flags);
  if (fails("init_attr") || flags != 1 || num_pes) return 1;
  for (int i = 100; i < 128; i++) if (((uint8_t *)&attr->uid)[i] != 0xa5) return 2;
  const char *name = (const char *)&attr->uid;
  long size = 4096 + (long)MAX_PES * HEAP;
  int file = shm_open(name, O_CREAT | O_RDWR, 0600);
  if (file < 0 || ftruncate(file, size)) return 3;
  shared = (Shared *)mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  heaps = (char *)shared + 4096;
  my_pe = attr->rank;
  num_pes = attr->nranks;
  if (__atomic_add_fetch(&shared->attached, 1, __ATOMIC_ACQ_REL) == num_pes) shm_unlink(name);
  meet();
  return 0;
}

int rocshmem_my_pe(void) {
  if (ended) must_run("my_pe");
  return num_pes ? my_pe : -1;
}

int rocshmem_n_pes(void) {
  if (ended) must_run("n_pes");
  return num_pes ? num_pes : -1;
}

void *rocshmem_malloc(size_t size) {
  must_run("malloc");
  note("malloc %zu", size);
  meet();
  if (fails("malloc") || next_byte + size > HEAP) return NULL;
  void *address = heaps + (long)my_pe * HEAP + next_byte;
  next_byte += (size + 127) / 128 * 128;
  return address;
}

void rocshmem_free(void *address) {
  must_run("free");
  note("free %ld", (long)((char *)address - heaps - (long)my_pe * HEAP));
  meet();
}

void *rocshmem_ptr(const void *address, int pe) {
  must_run("ptr");
  const char *unreachable = getenv("STAND_IN_UNREACHABLE");
  return unreachable && atoi(unreachable) == pe ? NULL : at(address, pe);
}

void rocshmem_barrier_all(void) {
  must_run("barrier_all");
  note("barrier_all");
  meet();
}

#ifndef LACKS_STREAMS
void rocshmem_putmem_on_stream(void *dest, const void *source, size_t nelems, int pe, hipStream_t stream) {
  must_run("putmem_on_stream");
  note("putmem_on_stream %zu %d", nelems, pe);
  enqueue(stream, at(dest, pe), at(source, my_pe), nelems);
}

void rocshmem_getmem_on_stream(void *dest, const void *source, size_t nelems, int pe, hipStream_t stream) {
  must_run("getmem_on_stream");
  note("getmem_on_stream %zu %d", nelems, pe);
  enqueue(stream, at(dest, my_pe), at(source, pe), nelems);
}
#endif

int rocshmem_hipmodule_init(hipModule_t module, hipStream_t stream) {
  must_run("hipmodule_init");
  note("hipmodule_init %p %p", (void *)module, (void *)stream);
  return fails("hipmodule_init") ? 1 : 0;
}

void rocshmem_finalize(void) {
  must_run("finalize");
  note("finalize");
  ended = 1;
}

__attribute__((destructor)) static void unloaded(void) { note("unloaded"); }

#endif
#ifdef __cplusplus
}
#endif
