// Modules, functions, TMA descriptors and launches: the checks of NVIDIA's driver, and a record of each.
#include "driver.h"
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

#define MODULE 0x6d6f64756c65u
#define MAP 0x70616d20616d74u // begins an encoded TMA descriptor; its number follows

// --- modules and functions ------------------------------------------------------------------------------------------

CUresult cuModuleLoadData(CUmodule *out, const void *image) {
  Module *module = calloc(1, sizeof *module);
  CUresult status = read_image(image, module);
  if (!status && !runs_on(module->architecture, capability())) status = CUDA_ERROR_NO_BINARY_FOR_GPU;
  record("'call': 'module', 'status': %d, 'architecture': %d, 'size': %zu, 'checksum': %u", status,
         module->architecture, module->size, module->checksum);
  if (status) {
    free(module);
    return status;
  }
  module->magic = MODULE;
  *out = (CUmodule)module;
  return CUDA_SUCCESS;
}

CUresult cuModuleUnload(CUmodule handle) {
  Module *module = (Module *)handle;
  if (!module || module->magic != MODULE) return CUDA_ERROR_INVALID_HANDLE;
  module->magic = 0; // functions of it may still be named by records: the memory stays
  return CUDA_SUCCESS;
}

void adopt(Function *function, Module *module) {
  module->magic = MODULE;
  function->module = module;
  function->max_dynamic_shared = SHARED_DEFAULT - (int)function->static_shared;
}

CUresult cuModuleGetFunction(CUfunction *out, CUmodule handle, const char *name) {
  Module *module = (Module *)handle;
  if (!module || module->magic != MODULE) return CUDA_ERROR_INVALID_HANDLE;
  Function *function = NULL;
  for (int i = 0; i < module->count && !function; i++)
    if (!strcmp(module->functions[i].name, name)) function = &module->functions[i];
  if (!function) {
    if (module->architecture || module->count == MAX_FUNCTIONS || strlen(name) >= sizeof function->name)
      return CUDA_ERROR_NOT_FOUND;
    function = &module->functions[module->count++]; // of an image that is not read
    strcpy(function->name, name);
  }
  adopt(function, module);
  *out = (CUfunction)function;
  return CUDA_SUCCESS;
}

CUresult cuModuleLoadDataEx(CUmodule *out, const void *image, unsigned count, CUjit_option *options, void **values) {
  (void)count, (void)options, (void)values;
  return cuModuleLoadData(out, image);
}

CUresult cuModuleLoadFatBinary(CUmodule *out, const void *image) { return cuModuleLoadData(out, image); }

// One place for all globals: kernels that would read them do not run.
CUresult cuModuleGetGlobal(CUdeviceptr *out, size_t *size, CUmodule module, const char *name) {
  static CUdeviceptr globals;
  static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
  const size_t room = 16 << 20;
  (void)module, (void)name;
  pthread_mutex_lock(&lock);
  CUresult status = globals ? CUDA_SUCCESS : cuMemAlloc(&globals, room);
  pthread_mutex_unlock(&lock);
  if (out) *out = globals;
  if (size) *size = room;
  return status;
}

CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *out, CUfunction function, int threads, size_t shared) {
  (void)function, (void)threads, (void)shared;
  *out = 2;
  return CUDA_SUCCESS;
}

CUresult cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *out, CUfunction function, int threads,
                                                              size_t shared, unsigned flags) {
  (void)flags;
  return cuOccupancyMaxActiveBlocksPerMultiprocessor(out, function, threads, shared);
}

CUresult cuFuncGetModule(CUmodule *out, CUfunction function) {
  *out = (CUmodule)((Function *)function)->module;
  return CUDA_SUCCESS;
}

CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) {
  (void)function, (void)config;
  return CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int *out, CUfunction_attribute attribute, CUfunction handle) {
  Function *function = (Function *)handle;
  switch (attribute) {
  case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
    *out = function->block[0] ? (int)(function->block[0] * function->block[1] * function->block[2]) : 1024;
    break;
  case CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES: *out = (int)function->static_shared; break;
  case CU_FUNC_ATTRIBUTE_NUM_REGS: *out = (int)function->registers; break;
  case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES: *out = function->max_dynamic_shared; break;
  default: *out = 0;
  }
  return CUDA_SUCCESS;
}

CUresult cuFuncSetAttribute(CUfunction handle, CUfunction_attribute attribute, int value) {
  Function *function = (Function *)handle;
  if (attribute != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) return CUDA_SUCCESS;
  bool fits = value >= 0 && value + (int)function->static_shared <= shared_optin();
  record("'call': 'opt-in', 'status': %d, 'function': '%s', 'bytes': %d", fits ? 0 : CUDA_ERROR_INVALID_VALUE,
         function->name, value);
  if (!fits) return CUDA_ERROR_INVALID_VALUE;
  function->max_dynamic_shared = value;
  return CUDA_SUCCESS;
}

// --- TMA descriptors ------------------------------------------------------------------------------------------------

static uint32_t bytes_of(CUtensorMapDataType type) {
  switch (type) {
  case CU_TENSOR_MAP_DATA_TYPE_UINT8: return 1;
  case CU_TENSOR_MAP_DATA_TYPE_UINT16:
  case CU_TENSOR_MAP_DATA_TYPE_FLOAT16:
  case CU_TENSOR_MAP_DATA_TYPE_BFLOAT16: return 2;
  case CU_TENSOR_MAP_DATA_TYPE_INT64:
  case CU_TENSOR_MAP_DATA_TYPE_UINT64:
  case CU_TENSOR_MAP_DATA_TYPE_FLOAT64: return 8;
  default: return 4;
  }
}

// The restrictions of `cuTensorMapEncodeTiled` (CUDA Driver API, "Tensor Map Object Management"), in words.
static const char *refused(const CUtensorMap *map, CUtensorMapDataType type, uint32_t rank, uint64_t address,
                           const uint64_t *dims, const uint64_t *strides, const uint32_t *box,
                           const uint32_t *steps, CUtensorMapSwizzle swizzle) {
  static const uint32_t widest[] = {UINT32_MAX, 32, 64, 128};
  if ((uintptr_t)map % 64) return "the map is not aligned to 64 bytes";
  if (type > CU_TENSOR_MAP_DATA_TYPE_TFLOAT32_FTZ) return "no such element type";
  if (rank < 1 || rank > 5) return "the rank is not 1 to 5";
  if (!address || address % 16) return "the address is no multiple of 16";
  for (uint32_t i = 0; i < rank; i++) {
    if (!dims[i] || dims[i] > UINT64_C(1) << 32) return "a dim is not 1 to 2^32";
    if (!box[i] || box[i] > 256) return "a side of the box is not 1 to 256";
    if (!steps[i] || steps[i] > 8) return "an element stride is not 1 to 8";
    if (i && (strides[i - 1] % 16 || strides[i - 1] >= UINT64_C(1) << 40))
      return "a stride is no multiple of 16 below 2^40";
  }
  uint32_t row = box[0] * bytes_of(type);
  if (row % 16) return "rows of the box are no multiple of 16 bytes";
  if (swizzle < 4 && row > widest[swizzle]) return "rows of the box are longer than the swizzle";
  return NULL;
}

CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
                                const cuuint64_t *dims, const cuuint64_t *strides, const cuuint32_t *box,
                                const cuuint32_t *steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  static uint64_t made;
  const char *reason = refused(map, type, rank, (uint64_t)address, dims, strides, box, steps, swizzle);
  if (capability() < 90) reason = "this GPU has no TMA";
  uint64_t number = __atomic_fetch_add(&made, 1, __ATOMIC_RELAXED);
  uint32_t shown = rank <= 5 ? rank : 5;
  record("'call': 'map', 'status': %d, 'reason': '%s', 'number': %llu, 'type': %d, 'address': %llu, 'dims': [%s], "
         "'strides': [%s], 'box': [%s], 'steps': [%s], 'interleave': %d, 'swizzle': %d, 'promotion': %d, 'fill': %d",
         reason ? CUDA_ERROR_INVALID_VALUE : 0, reason ? reason : "", (unsigned long long)number, type,
         (unsigned long long)(uintptr_t)address, listed(shown, dims), listed(shown ? shown - 1 : 0, strides),
         listed32(shown, box), listed32(shown, steps), interleave, swizzle, promotion, fill);
  if (reason) return CUDA_ERROR_INVALID_VALUE;
  memset(map, 0, sizeof *map);
  map->opaque[0] = MAP;
  map->opaque[1] = number;
  return CUDA_SUCCESS;
}

// --- launches -------------------------------------------------------------------------------------------------------

// The bytes of a parameter as a JSON value; reading never faults, because the pointer may be wrong.
static void write_parameter(char *out, size_t space, void *const *place, uint32_t size) {
  uint8_t bytes[4096];
  void *pointer = NULL;
  struct iovec mine = {&pointer, sizeof pointer}, theirs = {(void *)place, sizeof pointer};
  bool readable = size <= sizeof bytes && process_vm_readv(getpid(), &mine, 1, &theirs, 1, 0) == sizeof pointer;
  mine = (struct iovec){bytes, size}, theirs = (struct iovec){pointer, size};
  readable = readable && process_vm_readv(getpid(), &mine, 1, &theirs, 1, 0) == (ssize_t)size;
  uint64_t word[2] = {0};
  memcpy(word, bytes, size < sizeof word ? size : sizeof word);
  if (!readable) snprintf(out, space, "null");
  else if (size == sizeof(CUtensorMap) && word[0] == MAP)
    snprintf(out, space, "{'map': %llu, 'aligned': %s}", (unsigned long long)word[1],
             (uintptr_t)pointer % 64 ? "false" : "true");
  else if (size <= 8) snprintf(out, space, "%llu", (unsigned long long)word[0]);
  else snprintf(out, space, "'%u bytes'", size);
}

static const char *misfit(const Function *function, const uint32_t *grid, const uint32_t *block,
                          const uint32_t *cluster, uint32_t shared) {
  if (!grid[0] || !grid[1] || !grid[2] || grid[0] > INT32_MAX || grid[1] > 65535 || grid[2] > 65535) return "the grid";
  uint64_t threads = (uint64_t)block[0] * block[1] * block[2];
  if (!threads || threads > 1024 || block[2] > 64) return "the block";
  if (function->block[0] && memcmp(block, function->block, sizeof function->block))
    return "the threads that the code requires";
  if ((int)shared > function->max_dynamic_shared) return "the dynamic shared memory that the function has opted in for";
  for (int i = 0; i < 3; i++)
    if (grid[i] % cluster[i]) return "the grid, no multiple of the cluster";
  if (cluster[0] * cluster[1] * cluster[2] > (capability() < 90 ? 1 : 8)) return "the cluster";
  return NULL;
}

static CUresult launch(Function *function, const uint32_t *grid, const uint32_t *block, const uint32_t *cluster,
                       uint32_t shared, CUstream stream, void **parameters) {
  if (!function || !function->module || function->module->magic != MODULE) return CUDA_ERROR_INVALID_HANDLE;
  const char *reason = misfit(function, grid, block, cluster, shared);
  size_t space = 64 * (size_t)(function->count + 1);
  char *values = calloc(1, space);
  for (int i = 0; i < function->count; i++) {
    size_t used = strlen(values);
    if (i) used += snprintf(values + used, space - used, ", ");
    write_parameter(values + used, space - used, &parameters[i], function->sizes[i]);
  }
  record("'call': 'launch', 'status': %d, 'reason': '%s', 'function': '%s', 'described': %s, 'grid': [%s], "
         "'block': [%s], 'cluster': [%s], 'shared': %u, 'capturing': %s, 'checksum': %u, 'sizes': [%s], 'values': [%s]",
         reason ? CUDA_ERROR_INVALID_VALUE : 0, reason ? reason : "", function->name,
         function->described ? "true" : "false", listed32(3, grid), listed32(3, block), listed32(3, cluster), shared,
         is_capturing(stream) ? "true" : "false", function->module->checksum,
         listed32(function->count, function->sizes), values);
  free(values);
  capture_kernel(stream);
  return reason ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult check_launch(Function *function, const uint32_t *grid, const uint32_t *block, uint32_t shared,
                      void **parameters) {
  return launch(function, grid, block, (uint32_t[]){1, 1, 1}, shared, NULL, parameters);
}

CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                        unsigned block_y, unsigned block_z, unsigned shared, CUstream stream, void **parameters,
                        void **extra) {
  const uint32_t grid[] = {grid_x, grid_y, grid_z}, block[] = {block_x, block_y, block_z}, cluster[] = {1, 1, 1};
  if (extra) return CUDA_ERROR_NOT_SUPPORTED;
  return launch((Function *)function, grid, block, cluster, shared, stream, parameters);
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra) {
  const uint32_t grid[] = {config->gridDimX, config->gridDimY, config->gridDimZ};
  const uint32_t block[] = {config->blockDimX, config->blockDimY, config->blockDimZ};
  uint32_t cluster[] = {1, 1, 1};
  if (extra) return CUDA_ERROR_NOT_SUPPORTED;
  for (unsigned i = 0; i < config->numAttrs; i++)
    if (config->attrs[i].id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION) {
      cluster[0] = config->attrs[i].value.clusterDim.x;
      cluster[1] = config->attrs[i].value.clusterDim.y;
      cluster[2] = config->attrs[i].value.clusterDim.z;
    }
  return launch((Function *)function, grid, block, cluster, config->sharedMemBytes, config->hStream, parameters);
}
