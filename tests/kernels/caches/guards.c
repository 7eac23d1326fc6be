/* Preloaded: large blocks of memory that XLA allocates begin and end at pages which the process may not touch.

   Blocks lie in one region of addresses, of which none is used twice: a block that was freed is no more touched. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

extern void *__libc_memalign(size_t alignment, size_t size);
extern void __libc_free(void *block);

enum { PAGE = 4096, LEAST = 1 << 11 };
#define PAGES ((size_t)1 << 24)

static char *region;
static size_t used;           /* pages of the region */
static uint32_t sizes[PAGES]; /* of the block that begins in a page, in pages */

__attribute__((constructor)) static void reserve(void) {
  if (sysconf(_SC_PAGESIZE) != PAGE) return;
  void *place = mmap(NULL, PAGES * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (place != MAP_FAILED) region = place;
}

static void *guarded(size_t alignment, size_t size) {
  if (!region || size < LEAST || alignment > PAGE) return NULL;
  size_t pages = (size + PAGE - 1) / PAGE;
  size_t first = __sync_fetch_and_add(&used, pages + 1) + 1;
  if (first + pages >= PAGES) return NULL;
  char *end = region + (first + pages) * PAGE;
  if (mprotect(region + first * PAGE, pages * PAGE, PROT_READ | PROT_WRITE)) abort();
  char *begin = (char *)((uintptr_t)(end - size) & ~(uintptr_t)(alignment - 1));
  sizes[(size_t)(begin - region) / PAGE] = (uint32_t)pages;
  return begin;
}

/* 1 if a block that begins here lies between guards. */
int is_guarded(void *block) {
  size_t place = (size_t)((char *)block - region) / PAGE;
  return region && (char *)block >= region && place < PAGES && sizes[place] > 0;
}

void *aligned_alloc(size_t alignment, size_t size) {
  void *block = guarded(alignment, size);
  return block ? block : __libc_memalign(alignment, size);
}

int posix_memalign(void **block, size_t alignment, size_t size) {
  *block = aligned_alloc(alignment, size);
  return *block ? 0 : ENOMEM;
}

void *memalign(size_t alignment, size_t size) { return aligned_alloc(alignment, size); }

void free(void *block) {
  if (!is_guarded(block)) {
    __libc_free(block);
    return;
  }
  size_t place = (size_t)((char *)block - region) / PAGE, nbytes = (size_t)sizes[place] * PAGE;
  madvise(region + place * PAGE, nbytes, MADV_DONTNEED);
  mprotect(region + place * PAGE, nbytes, PROT_NONE);
}
