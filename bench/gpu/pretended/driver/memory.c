// Memory of the GPU: memory of the host that takes room only where something is written.
#include "driver.h"
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define TOTAL ((size_t)141 << 30)
#define GRANULARITY ((size_t)2 << 20)
#define MAX_ALLOCATIONS 65536

typedef struct {
  uintptr_t begin;
  size_t size; // 0 for an entry that is free
  bool host;
} Range;

static Range ranges[MAX_ALLOCATIONS];
static int entries; // that were ever taken
static size_t used;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

// The allocation that an address is in; NULL for none. The caller holds the lock.
static Range *range_at(uintptr_t address) {
  for (int i = 0; i < entries; i++)
    if (ranges[i].size && address - ranges[i].begin < ranges[i].size) return &ranges[i];
  return NULL;
}

static CUresult allocate_in(CUdeviceptr *out, size_t size, bool host) {
  size_t rounded = (size + GRANULARITY - 1) / GRANULARITY * GRANULARITY;
  if (!size) return CUDA_ERROR_INVALID_VALUE;
  pthread_mutex_lock(&lock);
  Range *free_entry = NULL;
  for (int i = 0; i < entries && !free_entry; i++)
    if (!ranges[i].size) free_entry = &ranges[i];
  if (!free_entry && entries < MAX_ALLOCATIONS) free_entry = &ranges[entries++];
  // One unit more than needed, so that the begin can be aligned as a GPU's allocations are.
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void *found = MAP_FAILED;
  if (free_entry && used + rounded <= TOTAL)
    found = mmap(NULL, rounded + GRANULARITY, PROT_READ | PROT_WRITE, flags, -1, 0);
  if (found != MAP_FAILED) {
    uintptr_t begin = ((uintptr_t)found + GRANULARITY - 1) / GRANULARITY * GRANULARITY;
    if (begin > (uintptr_t)found) munmap(found, begin - (uintptr_t)found);
    if (begin < (uintptr_t)found + GRANULARITY)
      munmap((void *)(begin + rounded), (uintptr_t)found + GRANULARITY - begin);
    *free_entry = (Range){begin, rounded, host};
    used += host ? 0 : rounded;
    *out = (CUdeviceptr)begin;
  }
  pthread_mutex_unlock(&lock);
  return found == MAP_FAILED ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}

static CUresult allocate(CUdeviceptr *out, size_t size) { return allocate_in(out, size, false); }

static CUresult release(CUdeviceptr address) {
  pthread_mutex_lock(&lock);
  Range *range = range_at(address);
  bool right = range && range->begin == address;
  if (right) {
    munmap((void *)range->begin, range->size);
    used -= range->host ? 0 : range->size;
    range->size = 0;
  }
  pthread_mutex_unlock(&lock);
  return right || !address ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuDeviceTotalMem(size_t *out, CUdevice device) {
  (void)device;
  *out = TOTAL;
  return CUDA_SUCCESS;
}

CUresult cuMemGetInfo(size_t *unused, size_t *total) {
  *total = TOTAL;
  *unused = TOTAL - used;
  return CUDA_SUCCESS;
}

CUresult cuMemAlloc(CUdeviceptr *out, size_t size) { return allocate(out, size); }
CUresult cuMemFree(CUdeviceptr address) { return release(address); }

CUresult cuMemAllocAsync(CUdeviceptr *out, size_t size, CUstream stream) {
  (void)stream;
  return allocate(out, size);
}

CUresult cuMemAllocFromPoolAsync(CUdeviceptr *out, size_t size, CUmemoryPool pool, CUstream stream) {
  (void)pool, (void)stream;
  return allocate(out, size);
}

CUresult cuMemFreeAsync(CUdeviceptr address, CUstream stream) {
  (void)stream;
  return release(address);
}

CUresult cuMemAllocManaged(CUdeviceptr *out, size_t size, unsigned flags) {
  (void)flags;
  return allocate(out, size);
}

CUresult cuMemGetAddressRange(CUdeviceptr *begin, size_t *size, CUdeviceptr address) {
  pthread_mutex_lock(&lock);
  Range *range = range_at(address);
  if (range && begin) *begin = range->begin;
  if (range && size) *size = range->size;
  pthread_mutex_unlock(&lock);
  return range ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

// --- memory of the host ---------------------------------------------------------------------------------------------

CUresult cuMemHostAlloc(void **out, size_t size, unsigned flags) {
  CUdeviceptr found = 0;
  (void)flags;
  CUresult status = allocate_in(&found, size, true);
  *out = (void *)(uintptr_t)found;
  return status;
}

CUresult cuMemAllocHost(void **out, size_t size) { return cuMemHostAlloc(out, size, 0); }
CUresult cuMemFreeHost(void *address) { return release((CUdeviceptr)(uintptr_t)address); }

CUresult cuMemHostRegister(void *address, size_t size, unsigned flags) {
  (void)address, (void)size, (void)flags;
  return CUDA_SUCCESS;
}

CUresult cuMemHostUnregister(void *address) {
  (void)address;
  return CUDA_SUCCESS;
}

CUresult cuMemHostGetDevicePointer(CUdeviceptr *out, void *address, unsigned flags) {
  (void)flags;
  *out = (CUdeviceptr)(uintptr_t)address;
  return CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void *out, CUpointer_attribute attribute, CUdeviceptr address) {
  pthread_mutex_lock(&lock);
  Range *range = range_at(address);
  pthread_mutex_unlock(&lock);
  if (!range) return CUDA_ERROR_INVALID_VALUE; // memory that CUDA does not know
  if (attribute == CU_POINTER_ATTRIBUTE_MEMORY_TYPE)
    *(unsigned *)out = range->host ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
  else if (attribute == CU_POINTER_ATTRIBUTE_CONTEXT) *(CUcontext *)out = the_context;
  else if (attribute == CU_POINTER_ATTRIBUTE_DEVICE_POINTER) *(CUdeviceptr *)out = address;
  else if (attribute == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL) *(int *)out = 0;
  else if (attribute == CU_POINTER_ATTRIBUTE_IS_MANAGED) *(unsigned *)out = 0;
  else return CUDA_ERROR_NOT_SUPPORTED;
  return CUDA_SUCCESS;
}

// --- virtual memory: an address range is mapped as soon as it is reserved --------------------------------------------

CUresult cuMemGetAllocationGranularity(size_t *out, const CUmemAllocationProp *properties,
                                       CUmemAllocationGranularity_flags kind) {
  (void)properties, (void)kind;
  *out = GRANULARITY;
  return CUDA_SUCCESS;
}

CUresult cuMemAddressReserve(CUdeviceptr *out, size_t size, size_t alignment, CUdeviceptr wanted,
                             unsigned long long flags) {
  (void)wanted, (void)flags;
  return alignment > GRANULARITY ? CUDA_ERROR_NOT_SUPPORTED : allocate(out, size);
}

CUresult cuMemAddressFree(CUdeviceptr address, size_t size) {
  (void)size;
  return release(address);
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *out, size_t size, const CUmemAllocationProp *properties,
                     unsigned long long flags) {
  (void)properties, (void)flags;
  *out = size;
  return CUDA_SUCCESS;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  (void)handle;
  return CUDA_SUCCESS;
}

CUresult cuMemMap(CUdeviceptr address, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
                  unsigned long long flags) {
  (void)address, (void)size, (void)offset, (void)handle, (void)flags;
  return CUDA_SUCCESS;
}

CUresult cuMemUnmap(CUdeviceptr address, size_t size) {
  (void)address, (void)size;
  return CUDA_SUCCESS;
}

CUresult cuMemSetAccess(CUdeviceptr address, size_t size, const CUmemAccessDesc *access, size_t count) {
  (void)address, (void)size, (void)access, (void)count;
  return CUDA_SUCCESS;
}

// --- pools -----------------------------------------------------------------------------------------------------------

CUresult cuDeviceGetDefaultMemPool(CUmemoryPool *out, CUdevice device) {
  (void)device;
  *out = (CUmemoryPool)1;
  return CUDA_SUCCESS;
}

CUresult cuMemPoolCreate(CUmemoryPool *out, const CUmemPoolProps *properties) {
  (void)properties;
  *out = (CUmemoryPool)2;
  return CUDA_SUCCESS;
}

CUresult cuMemPoolSetAttribute(CUmemoryPool pool, CUmemPool_attribute attribute, void *value) {
  (void)pool, (void)attribute, (void)value;
  return CUDA_SUCCESS;
}

CUresult cuMemPoolSetAccess(CUmemoryPool pool, const CUmemAccessDesc *access, size_t count) {
  (void)pool, (void)access, (void)count;
  return CUDA_SUCCESS;
}

// --- copies and fills ------------------------------------------------------------------------------------------------

static CUresult copy(uintptr_t to, uintptr_t from, size_t size) {
  memmove((void *)to, (const void *)from, size);
  return CUDA_SUCCESS;
}

CUresult cuMemcpyHtoD(CUdeviceptr to, const void *from, size_t size) { return copy(to, (uintptr_t)from, size); }
CUresult cuMemcpyDtoH(void *to, CUdeviceptr from, size_t size) { return copy((uintptr_t)to, from, size); }
CUresult cuMemcpyDtoD(CUdeviceptr to, CUdeviceptr from, size_t size) { return copy(to, from, size); }

// A captured copy is a node of a graph, and done when the graph is launched: here never.
CUresult cuMemcpyHtoDAsync(CUdeviceptr to, const void *from, size_t size, CUstream stream) {
  return is_capturing(stream) ? CUDA_SUCCESS : copy(to, (uintptr_t)from, size);
}

CUresult cuMemcpyDtoHAsync(void *to, CUdeviceptr from, size_t size, CUstream stream) {
  return is_capturing(stream) ? CUDA_SUCCESS : copy((uintptr_t)to, from, size);
}

CUresult cuMemcpyDtoDAsync(CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream) {
  record("'call': 'copy', 'to': %llu, 'from': %llu, 'bytes': %zu", (unsigned long long)to, (unsigned long long)from,
         size);
  return is_capturing(stream) ? CUDA_SUCCESS : copy(to, from, size);
}

// Zeros need no room: the pages are given back.
static void fill(uintptr_t begin, size_t size, const void *pattern, size_t width) {
  static const uint32_t zero;
  pthread_mutex_lock(&lock);
  Range *range = range_at(begin);
  pthread_mutex_unlock(&lock);
  if (!range) return; // a launch that is recorded only has made-up addresses
  uintptr_t first = (begin + 4095) / 4096 * 4096, last = (begin + size) / 4096 * 4096;
  if (!memcmp(pattern, &zero, width) && first < last) {
    madvise((void *)first, last - first, MADV_DONTNEED);
    memset((void *)begin, 0, first - begin);
    memset((void *)last, 0, begin + size - last);
    return;
  }
  for (size_t i = 0; i + width <= size; i += width) memcpy((void *)(begin + i), pattern, width);
}

static CUresult filled(CUdeviceptr to, const void *pattern, size_t width, size_t count, CUstream stream) {
  uint32_t value = 0;
  memcpy(&value, pattern, width);
  record("'call': 'fill', 'address': %llu, 'value': %u, 'bytes': %zu, 'capturing': %s", (unsigned long long)to, value,
         count * width, is_capturing(stream) ? "true" : "false");
  if (!is_capturing(stream)) fill(to, count * width, pattern, width);
  return CUDA_SUCCESS;
}

CUresult cuMemsetD8(CUdeviceptr to, unsigned char value, size_t count) { return filled(to, &value, 1, count, NULL); }
CUresult cuMemsetD16(CUdeviceptr to, unsigned short value, size_t count) { return filled(to, &value, 2, count, NULL); }
CUresult cuMemsetD32(CUdeviceptr to, unsigned value, size_t count) { return filled(to, &value, 4, count, NULL); }

CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t count, CUstream stream) {
  return filled(to, &value, 1, count, stream);
}

CUresult cuMemsetD16Async(CUdeviceptr to, unsigned short value, size_t count, CUstream stream) {
  return filled(to, &value, 2, count, stream);
}

CUresult cuMemsetD32Async(CUdeviceptr to, unsigned value, size_t count, CUstream stream) {
  return filled(to, &value, 4, count, stream);
}
