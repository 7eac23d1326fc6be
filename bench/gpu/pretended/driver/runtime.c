// The CUDA runtime, which is linked into JAX's plugin, and needs tables that only NVIDIA's driver has.
//
// `install.py` makes each of its functions jump to `runtime_NAME`, or to `runtime_other` where this file has none.
#include "driver.h"
#include <cuda_runtime_api.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

// Make a function jump to another one: `movabs rax, target; jmp rax`. 0, or -1 if the code cannot be written.
int redirect(void *function, void *target) {
  unsigned char code[12] = {0x48, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xe0};
  uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), begin = (uintptr_t)function / page * page;
  size_t size = (uintptr_t)function + sizeof code - begin;
  memcpy(code + 2, &target, sizeof target);
  if (mprotect((void *)begin, size, PROT_READ | PROT_WRITE | PROT_EXEC)) return -1;
  memcpy(function, code, sizeof code);
  return mprotect((void *)begin, size, PROT_READ | PROT_EXEC);
}

cudaError_t runtime_other(void) { return cudaErrorNotSupported; }

cudaError_t runtime_cudaRuntimeGetVersion(int *out) {
  *out = 13000;
  return cudaSuccess;
}

cudaError_t runtime_cudaDriverGetVersion(int *out) {
  *out = 13000;
  return cudaSuccess;
}

cudaError_t runtime_cudaGetDeviceCount(int *out) {
  *out = 1;
  return cudaSuccess;
}

cudaError_t runtime_cudaGetDevice(int *out) {
  *out = 0;
  return cudaSuccess;
}

cudaError_t runtime_cudaSetDevice(int device) { return device ? cudaErrorInvalidDevice : cudaSuccess; }
cudaError_t runtime_cudaGetLastError(void) { return cudaSuccess; }
cudaError_t runtime_cudaPeekAtLastError(void) { return cudaSuccess; }

cudaError_t runtime_cudaDeviceGetAttribute(int *out, enum cudaDeviceAttr attribute, int device) {
  return (cudaError_t)cuDeviceGetAttribute(out, (CUdevice_attribute)attribute, device); // the numbers are the same
}

const char *runtime_cudaGetErrorString(cudaError_t error) {
  (void)error;
  return "an error of the pretended runtime";
}

const char *runtime_cudaGetErrorName(cudaError_t error) { return runtime_cudaGetErrorString(error); }

// Kernels of XLA's own library, whose code is in the plugin: each symbol is a function.
cudaError_t runtime_cudaGetFuncBySymbol(cudaFunction_t *out, const void *symbol) {
  static Module library = {.magic = 0};
  static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
  static const void *symbols[MAX_FUNCTIONS];
  pthread_mutex_lock(&lock);
  int found = 0;
  while (found < library.count && symbols[found] != symbol) found++;
  bool fits = found < MAX_FUNCTIONS;
  if (fits && found == library.count) {
    symbols[library.count++] = symbol;
    Function *function = &library.functions[found];
    snprintf(function->name, sizeof function->name, "symbol %p", symbol);
    adopt(function, &library);
  }
  if (fits) *out = (cudaFunction_t)&library.functions[found];
  pthread_mutex_unlock(&lock);
  return fits ? cudaSuccess : cudaErrorMemoryAllocation;
}

cudaError_t runtime_cudaFuncGetAttributes(struct cudaFuncAttributes *out, const void *function) {
  (void)function;
  memset(out, 0, sizeof *out);
  out->maxThreadsPerBlock = 1024;
  return cudaSuccess;
}
