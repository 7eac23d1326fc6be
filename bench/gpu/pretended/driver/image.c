// Images of modules: the parts of a cubin, an ELF file, that a launch depends on.
//
// NVIDIA documents no format. What is read here can be checked with `readelf` and `cuobjdump -elf`: a section
// `.nv.info.NAME` for each entry function holds attributes, among them one for each parameter.
#include "driver.h"
#include <elf.h>
#include <stdlib.h>
#include <string.h>

#define EM_CUDA 190
// Bytes at the begin of a block's shared memory that are the system's, from sm_90 on (the symbol .nv.reservedSmem.cap).
// Sections count them; the limits of the driver, 227 KiB of 228, do not.
#define RESERVED_SHARED 1024
#define ABI_VERSION 8 // index in e_ident; from version 8 on the flags have other fields

// Attributes of `.nv.info.NAME`: a byte of format, a byte of kind, 16 bits of value or size, and the payload.
enum { WITH_PAYLOAD = 4 };
enum { REQUIRED_THREADS = 0x10, PARAMETER = 0x17 };

typedef struct {
  uint32_t index;
  uint16_t ordinal, offset;
  uint32_t packed; // the size in bytes from bit 18 on
} Parameter;

bool runs_on(int architecture, int gpu) {
  if (architecture == 0) return true;
  // Triton compiles for sm_90a, sm_100a and so on, whose code runs on no other GPU.
  if (architecture >= 90) return architecture == gpu;
  return architecture / 10 == gpu / 10 && architecture <= gpu;
}

// CRC-32 as in zlib.
static uint32_t checksum_of(const uint8_t *bytes, size_t size) {
  uint32_t sum = UINT32_MAX;
  for (size_t i = 0; i < size; i++) {
    sum ^= bytes[i];
    for (int bit = 0; bit < 8; bit++) sum = sum >> 1 ^ (sum & 1 ? 0xedb88320u : 0);
  }
  return ~sum;
}

static int architecture_of(const Elf64_Ehdr *elf) {
  return elf->e_ident[ABI_VERSION] >= 8 ? elf->e_flags >> 8 & 0xff : elf->e_flags & 0xff;
}

static const char *name_of(const Elf64_Ehdr *elf, const Elf64_Shdr *section) {
  const Elf64_Shdr *sections = (const void *)((const char *)elf + elf->e_shoff);
  return (const char *)elf + sections[elf->e_shstrndx].sh_offset + section->sh_name;
}

static const char *after(const char *name, const char *prefix) {
  size_t length = strlen(prefix);
  return strncmp(name, prefix, length) ? NULL : name + length;
}

static CUresult read_attributes(Function *function, const uint8_t *at, size_t size) {
  const uint8_t *end = at + size;
  while (at + 4 <= end) {
    uint8_t format = at[0], kind = at[1];
    uint16_t value;
    memcpy(&value, at + 2, 2);
    at += 4;
    if (format != WITH_PAYLOAD) continue;
    if (at + value > end) return CUDA_ERROR_INVALID_IMAGE;
    if (kind == REQUIRED_THREADS && value >= 12) memcpy(function->block, at, 12);
    if (kind == PARAMETER && value >= sizeof(Parameter)) {
      Parameter found;
      memcpy(&found, at, sizeof found);
      if (found.ordinal >= MAX_PARAMETERS) return CUDA_ERROR_INVALID_IMAGE;
      function->sizes[found.ordinal] = found.packed >> 18;
      function->offsets[found.ordinal] = found.offset;
      if (function->count <= found.ordinal) function->count = found.ordinal + 1;
    }
    at += value;
  }
  return CUDA_SUCCESS;
}

static Function *function_of(Module *module, const char *name) {
  for (int i = 0; i < module->count; i++)
    if (!strcmp(module->functions[i].name, name)) return &module->functions[i];
  return NULL;
}

// The functions are those that have a section `.nv.info.NAME`.
static CUresult read_functions(const Elf64_Ehdr *elf, Module *module) {
  const Elf64_Shdr *sections = (const void *)((const char *)elf + elf->e_shoff);
  for (int i = 0; i < elf->e_shnum; i++) {
    const char *name = after(name_of(elf, &sections[i]), ".nv.info.");
    if (!name || strlen(name) >= sizeof module->functions->name || module->count == MAX_FUNCTIONS) continue;
    Function *function = &module->functions[module->count++];
    strcpy(function->name, name);
    function->described = true;
    CUresult status = read_attributes(function, (const uint8_t *)elf + sections[i].sh_offset, sections[i].sh_size);
    if (status) return status;
  }
  for (int i = 0; i < elf->e_shnum; i++) {
    const char *name = name_of(elf, &sections[i]), *of;
    Function *function;
    if ((of = after(name, ".text.")) && (function = function_of(module, of)))
      function->registers = sections[i].sh_info >> 24;
    if ((of = after(name, ".nv.shared.")) && (function = function_of(module, of))) {
      uint64_t reserved = module->architecture >= 90 ? RESERVED_SHARED : 0;
      function->static_shared = sections[i].sh_size > reserved ? sections[i].sh_size - reserved : 0;
    }
  }
  return CUDA_SUCCESS;
}

CUresult read_image(const void *image, Module *module) {
  const Elf64_Ehdr *elf = image;
  if (memcmp(elf->e_ident, ELFMAG, SELFMAG)) return CUDA_SUCCESS; // PTX, or a container of several images
  if (elf->e_machine != EM_CUDA || elf->e_shentsize != sizeof(Elf64_Shdr)) return CUDA_ERROR_INVALID_IMAGE;
  size_t headers = elf->e_shoff + (size_t)elf->e_shnum * elf->e_shentsize;
  size_t segments = elf->e_phoff + (size_t)elf->e_phnum * elf->e_phentsize;
  module->size = headers > segments ? headers : segments;
  module->checksum = checksum_of(image, module->size);
  module->architecture = architecture_of(elf);
  return read_functions(elf, module);
}
