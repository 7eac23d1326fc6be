// NVML, as far as XLA asks: one device, and the version of its driver. NVIDIA's header is in no wheel.
#include <stdio.h>

enum { SUCCESS = 0 };

int nvmlInit_v2(void) { return SUCCESS; }
int nvmlShutdown(void) { return SUCCESS; }

int nvmlDeviceGetCount_v2(unsigned *out) {
  *out = 1;
  return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **out) {
  *out = (void *)(unsigned long)(index + 1);
  return SUCCESS;
}

int nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **out) {
  (void)id;
  *out = (void *)1;
  return SUCCESS;
}

int nvmlSystemGetDriverVersion(char *out, unsigned length) {
  snprintf(out, length, "580.95.05");
  return SUCCESS;
}

int nvmlSystemGetCudaDriverVersion_v2(int *out) {
  *out = 13000;
  return SUCCESS;
}
