// The GPU, and contexts.
#include "driver.h"
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

int capability(void) {
  const char *given = getenv("PRETENDED_CAPABILITY");
  return given ? atoi(given) : 90;
}

// CUDA C++ Programming Guide, "Technical Specifications per Compute Capability": KiB of a multiprocessor.
static int shared_of_multiprocessor(void) {
  switch (capability()) {
  case 80: case 87: return 164 << 10;
  case 86: case 89: case 120: return 100 << 10;
  default: return 228 << 10;
  }
}

int shared_optin(void) { return shared_of_multiprocessor() - (1 << 10); }

CUresult cuInit(unsigned flags) { return flags ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS; }

CUresult cuDriverGetVersion(int *out) {
  *out = 13000;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int *out) {
  *out = 1;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice *out, int ordinal) {
  *out = 0;
  return ordinal ? CUDA_ERROR_INVALID_DEVICE : CUDA_SUCCESS;
}

// The numbers of an H200 where they do not depend on the capability.
CUresult cuDeviceGetAttribute(int *out, CUdevice_attribute attribute, CUdevice device) {
  (void)device;
  switch (attribute) {
  case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *out = capability() / 10; break;
  case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *out = capability() % 10; break;
  case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK: *out = SHARED_DEFAULT; break;
  case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: *out = shared_optin(); break;
  case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: *out = shared_of_multiprocessor(); break;
  case CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK: *out = 1 << 10; break;
  case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
  case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X:
  case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y: *out = 1024; break;
  case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z: *out = 64; break;
  case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X: *out = INT32_MAX; break;
  case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y:
  case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z: *out = 65535; break;
  case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *out = 32; break;
  case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK:
  case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR:
  case CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY: *out = 65536; break;
  case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR: *out = 2048; break;
  case CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR: *out = 32; break;
  case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *out = 132; break;
  case CU_DEVICE_ATTRIBUTE_CLOCK_RATE: *out = 1980000; break;
  case CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE: *out = 2619000; break;
  case CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH: *out = 6144; break;
  case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE: *out = 50 << 20; break;
  case CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT: *out = 512; break;
  case CU_DEVICE_ATTRIBUTE_PCI_BUS_ID: *out = 1; break;
  case CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT: *out = 3; break;
  case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
  case CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS:
  case CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY:
  case CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY:
  case CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED:
  case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED: *out = 1; break;
  default: *out = 0;
  }
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetName(char *out, int length, CUdevice device) {
  (void)device;
  snprintf(out, length, "NVIDIA H200");
  return CUDA_SUCCESS;
}

#undef cuDeviceGetUuid
CUresult cuDeviceGetUuid(CUuuid *out, CUdevice device) {
  memset(out, device + 1, sizeof *out);
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetUuid_v2(CUuuid *out, CUdevice device) { return cuDeviceGetUuid(out, device); }

CUresult cuDeviceGetPCIBusId(char *out, int length, CUdevice device) {
  snprintf(out, length, "0000:%02x:00.0", device + 1);
  return CUDA_SUCCESS;
}

CUresult cuDeviceCanAccessPeer(int *out, CUdevice device, CUdevice peer) {
  (void)device, (void)peer;
  *out = 0;
  return CUDA_SUCCESS;
}

// --- contexts: each device has one -----------------------------------------------------------------------------------

CUcontext const the_context = (CUcontext)0x1000;
static __thread CUcontext current;
static __thread CUcontext stack[64];
static __thread int depth;

CUresult cuDevicePrimaryCtxRetain(CUcontext *out, CUdevice device) {
  *out = the_context;
  return device ? CUDA_ERROR_INVALID_DEVICE : CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRelease(CUdevice device) {
  (void)device;
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
  (void)device;
  *flags = 0;
  *active = 1;
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxSetFlags(CUdevice device, unsigned flags) {
  (void)device, (void)flags;
  return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext context) {
  current = context;
  return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *out) {
  *out = current;
  return CUDA_SUCCESS;
}

CUresult cuCtxPushCurrent(CUcontext context) {
  if (depth == 64) return CUDA_ERROR_INVALID_CONTEXT;
  stack[depth++] = current;
  current = context;
  return CUDA_SUCCESS;
}

CUresult cuCtxPopCurrent(CUcontext *out) {
  if (!depth) return CUDA_ERROR_INVALID_CONTEXT;
  if (out) *out = current;
  current = stack[--depth];
  return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice(CUdevice *out) {
  *out = 0;
  return current ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

CUresult cuCtxGetFlags(unsigned *out) {
  *out = 0;
  return CUDA_SUCCESS;
}

CUresult cuCtxGetApiVersion(CUcontext context, unsigned *out) {
  (void)context;
  *out = 3020;
  return CUDA_SUCCESS;
}

#undef cuStreamGetCtx
CUresult cuStreamGetCtx(CUstream stream, CUcontext *out) {
  (void)stream;
  *out = the_context;
  return CUDA_SUCCESS;
}

CUresult cuGetErrorName(CUresult status, const char **out) {
  static __thread char number[32];
  switch (status) {
  case CUDA_SUCCESS: *out = "CUDA_SUCCESS"; break;
  case CUDA_ERROR_INVALID_VALUE: *out = "CUDA_ERROR_INVALID_VALUE"; break;
  case CUDA_ERROR_INVALID_IMAGE: *out = "CUDA_ERROR_INVALID_IMAGE"; break;
  case CUDA_ERROR_NO_BINARY_FOR_GPU: *out = "CUDA_ERROR_NO_BINARY_FOR_GPU"; break;
  case CUDA_ERROR_INVALID_HANDLE: *out = "CUDA_ERROR_INVALID_HANDLE"; break;
  case CUDA_ERROR_NOT_FOUND: *out = "CUDA_ERROR_NOT_FOUND"; break;
  case CUDA_ERROR_NOT_SUPPORTED: *out = "CUDA_ERROR_NOT_SUPPORTED"; break;
  default:
    snprintf(number, sizeof number, "CUDA error %d", (int)status);
    *out = number;
  }
  return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult status, const char **out) { return cuGetErrorName(status, out); }

// --- names -----------------------------------------------------------------------------------------------------------

CUresult cuGetExportTable(const void **out, const CUuuid *id) {
  (void)id;
  *out = NULL;
  return CUDA_ERROR_NOT_FOUND;
}

// The newest variant of a function that this driver has.
#undef cuGetProcAddress
CUresult cuGetProcAddress_v2(const char *name, void **out, int version, cuuint64_t flags,
                             CUdriverProcAddressQueryResult *status) {
  static const char *const variants[] = {"_v3", "_v2", ""};
  (void)version, (void)flags;
  Dl_info mine;
  dladdr((void *)(uintptr_t)cuInit, &mine);
  void *library = dlopen(mine.dli_fname, RTLD_NOW | RTLD_NOLOAD);
  *out = NULL;
  for (int i = 0; i < 3 && !*out; i++) {
    char full[256];
    snprintf(full, sizeof full, "%s%s", name, variants[i]);
    *out = dlsym(library, full);
  }
  if (status) *status = *out ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  return *out ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}
