/* The functions of NVML that torch calls to count GPUs. FAKE_GPU_NO_NVML=1: NVML does not answer. */
#include <stdio.h>
#include <stdlib.h>

int nvmlInit_v2(void) { return getenv("FAKE_GPU_NO_NVML") != NULL; }
int nvmlInit(void) { return nvmlInit_v2(); }

int nvmlDeviceGetCount_v2(unsigned *count) {
  const char *text = getenv("FAKE_GPUS");
  *count = text ? atoi(text) : 0;
  return 0;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
  *handle = (void *)(long)(index + 1);
  return 0;
}

int nvmlDeviceGetUUID(void *handle, char *text, unsigned size) {
  snprintf(text, size, "GPU-%ld", (long)handle - 1);
  return 0;
}

/* torch calls these after a failed allocation. */
int nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **handle) {
  *handle = (void *)1;
  return 0;
}

int nvmlDeviceGetComputeRunningProcesses(void *handle, unsigned *count, void *processes) {
  *count = 0;
  return 0;
}
