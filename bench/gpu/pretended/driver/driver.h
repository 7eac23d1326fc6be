// A CUDA driver without a GPU: it checks what a driver checks, and records each launch. No kernel runs.
#pragma once
#include <cuda.h>
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#define MAX_PARAMETERS 256
#define MAX_FUNCTIONS 64

// --- the GPU --------------------------------------------------------------------------------------------------------

// The compute capability, 10 * major + minor: PRETENDED_CAPABILITY, 90 by default.
int capability(void);
// Dynamic shared memory of a block that an opt-in permits, in bytes.
int shared_optin(void);
// The only context.
extern CUcontext const the_context;
#define SHARED_DEFAULT 49152

// --- records --------------------------------------------------------------------------------------------------------

// Append one line of JSON to the file PRETENDED_RECORD. The format has no quotes: ' stands for ".
void record(const char *format, ...) __attribute__((format(printf, 1, 2)));
// The elements of an array, "1, 2, 3", in a buffer of the thread; up to four live at once.
const char *listed(size_t count, const uint64_t *values);
const char *listed32(size_t count, const uint32_t *values);

// --- machine code ---------------------------------------------------------------------------------------------------

// An entry function of a module, as its image describes it.
typedef struct Function {
  char name[512];
  bool described;                   // false for images in other formats: nothing below is known
  int count;                        // of parameters
  uint32_t sizes[MAX_PARAMETERS];   // of parameters, in bytes
  uint32_t offsets[MAX_PARAMETERS]; // in the parameters' constant memory
  uint32_t block[3];                // threads of a block that the code requires, 0 for any
  uint32_t static_shared;           // bytes
  uint32_t registers;               // of a thread
  int max_dynamic_shared;           // the function attribute, in bytes
  struct Module *module;
} Function;

typedef struct Module {
  uint64_t magic;
  int architecture; // 0 if unknown
  uint32_t checksum; // CRC-32 of the image
  size_t size;      // bytes of the image, 0 if unknown
  int count;
  Function functions[MAX_FUNCTIONS];
} Module;

// Read an image; CUDA_ERROR_INVALID_IMAGE if it is damaged.
CUresult read_image(const void *image, Module *module);
// False if the code of an architecture does not run on a capability.
bool runs_on(int architecture, int capability);

// --- streams --------------------------------------------------------------------------------------------------------

bool is_capturing(CUstream stream);
// Add a node to the graph of a stream that is captured.
void capture_kernel(CUstream stream);

// --- launches -------------------------------------------------------------------------------------------------------

// Make a function one of a module that is loaded, though it has no image.
void adopt(Function *function, Module *module);
// Check and record a node of a graph as if it was launched.
CUresult check_launch(Function *function, const uint32_t *grid, const uint32_t *block, uint32_t shared,
                      void **parameters);
