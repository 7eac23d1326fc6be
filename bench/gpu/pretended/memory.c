// Memory of the GPU: memory of the host.
#include "driver.h"
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t count, CUstream stream) {
  record("'call': 'fill', 'address': %llu, 'value': %u, 'bytes': %zu, 'capturing': %s", (unsigned long long)to, value,
         count, is_capturing(stream) ? "true" : "false");
  return CUDA_SUCCESS;
}
