/* A CUDA runtime that pretends, for one host: devices, contexts, memory and copies behave, kernels compute nothing.
 *
 * It is preloaded (LD_PRELOAD) into processes with the CUDA build of torch, so that all host code of torch is the real
 * one. `build.py` adds a function that returns 0 for each other symbol that torch needs. Environment variables:
 *
 *   FAKE_GPUS=4              number of GPUs of the host
 *   FAKE_GPU_GB=80           memory of each
 *   FAKE_GPU_TABLE=FILE      shared by all processes: who holds how much memory of which GPU
 *   FAKE_GPU_EXCLUSIVE=1     compute mode EXCLUSIVE_PROCESS: one process per GPU
 *   FAKE_GPU_BROKEN=1,3      GPUs with an ECC error
 *   FAKE_GPU_OLD_DRIVER=1    the driver is too old for this runtime
 *   FAKE_GPU_ERROR=719       error of each synchronisation; a process may set it for itself while it runs
 *   FAKE_GPU_SLOW_FREE=2     seconds for which the memory of an ended process stays in use
 *   FAKE_GPU_LOG=FILE        one line for each event: process, event, GPU or number of ranks
 */
#include "fake.h"

#define MOST_ENTRIES 4096
#define MOST_BLOCKS 65536
#define MOST_GPUS 64
#define CONTEXT_BYTES (400l << 20)
#define MEBIBYTE (1l << 20)

typedef struct {
  _Atomic int process, gpu;
  _Atomic long bytes, ended_at; /* ended_at in seconds: when a process first saw that this one is gone */
} Entry;

static Entry *table;
static struct { char *start; size_t size; int device, is_on_host; } blocks[MOST_BLOCKS];
static int block_count, visible[MOST_GPUS], visible_count, initialised_by;
static __thread int current = 0;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static int read_number(const char *name, int fallback) {
  const char *text = getenv(name);
  return text && *text ? atoi(text) : fallback;
}

void fake_log(const char *event, long value) {
  const char *path = getenv("FAKE_GPU_LOG");
  if (!path) return;
  int file = open(path, O_WRONLY | O_CREAT | O_APPEND, 0644);
  dprintf(file, "%d %s %ld\n", getpid(), event, value);
  close(file);
}

int fake_number_of(int device) { return visible[device]; }
int fake_current_device(void) { return current; }

static void list_visible(int count) {
  const char *list = getenv("CUDA_VISIBLE_DEVICES");
  if (!list) {
    for (int gpu = 0; gpu < count; gpu++) visible[visible_count++] = gpu;
    return;
  }
  char *copy = strdup(list), *rest;
  for (char *name = strtok_r(copy, ",", &rest); name; name = strtok_r(NULL, ",", &rest)) {
    int is_named = !strncmp(name, "GPU-", 4) || !strncmp(name, "MIG-", 4);
    int gpu = is_named ? atoi(name + 4) : *name >= '0' && *name <= '9' ? atoi(name) : -1;
    if (gpu < 0 || gpu >= count) break; /* CUDA ignores the rest of the list */
    visible[visible_count++] = gpu;
  }
  free(copy);
}

static void initialise(void) {
  if (initialised_by) return;
  initialised_by = getpid();
  fake_log("cuInit", 0);
  list_visible(read_number("FAKE_GPUS", 0));
  const char *path = getenv("FAKE_GPU_TABLE");
  int file = open(path ? path : "/tmp/fake_gpu_table", O_RDWR | O_CREAT, 0644);
  if (ftruncate(file, MOST_ENTRIES * sizeof(Entry))) abort();
  table = mmap(NULL, MOST_ENTRIES * sizeof(Entry), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
}

static int check_driver(void) {
  pthread_mutex_lock(&lock);
  initialise();
  pthread_mutex_unlock(&lock);
  if (getenv("FAKE_GPU_OLD_DRIVER")) return cudaErrorInsufficientDriver;
  if (initialised_by != getpid()) return cudaErrorInitializationError; /* used in the parent before the fork */
  return visible_count ? cudaSuccess : cudaErrorNoDevice;
}

static int is_running(int process) { return process && (kill(process, 0) == 0 || errno == EPERM); }

static int is_held(Entry *entry) {
  if (!entry->process || is_running(entry->process)) return entry->process != 0;
  if (!entry->ended_at) entry->ended_at = time(NULL);
  return time(NULL) - entry->ended_at < read_number("FAKE_GPU_SLOW_FREE", 0);
}

static Entry *find_entry(int gpu) {
  for (int i = 0; i < MOST_ENTRIES; i++)
    if (table[i].process == getpid() && table[i].gpu == gpu) return &table[i];
  return NULL;
}

static Entry *make_entry(int gpu) {
  for (int i = 0; i < MOST_ENTRIES; i++) {
    int before = table[i].process;
    if (is_held(&table[i]) || !atomic_compare_exchange_strong(&table[i].process, &before, getpid())) continue;
    table[i].gpu = gpu, table[i].ended_at = 0, table[i].bytes = CONTEXT_BYTES;
    fake_log("context", gpu);
    return &table[i];
  }
  abort();
}

static long count_used(int gpu) {
  long bytes = 0;
  for (int i = 0; i < MOST_ENTRIES; i++)
    if (table[i].gpu == gpu && is_held(&table[i])) bytes += table[i].bytes;
  return bytes;
}

static int has_other_process(int gpu) {
  for (int i = 0; i < MOST_ENTRIES; i++)
    if (table[i].gpu == gpu && table[i].process != getpid() && is_held(&table[i])) return 1;
  return 0;
}

static int is_broken(int gpu) {
  const char *list = getenv("FAKE_GPU_BROKEN");
  for (const char *name = list; name && *name; name = strchr(name, ',') ? strchr(name, ',') + 1 : NULL)
    if (atoi(name) == gpu) return 1;
  return 0;
}

static int open_context(void) {
  int gpu = visible[current];
  if (is_broken(gpu)) return cudaErrorECCUncorrectable;
  if (find_entry(gpu)) return cudaSuccess;
  if (getenv("FAKE_GPU_EXCLUSIVE") && has_other_process(gpu)) return cudaErrorDevicesUnavailable;
  make_entry(gpu);
  return cudaSuccess;
}

#define REQUIRE_DRIVER do { int error = check_driver(); if (error) return error; } while (0)
#define REQUIRE_CONTEXT do { REQUIRE_DRIVER; int error = open_context(); if (error) return error; } while (0)

void fake_add_bytes(int device, long bytes) {
  Entry *entry = find_entry(visible[device]);
  (entry ? entry : make_entry(visible[device]))->bytes += bytes;
}

/* Devices */

cudaError_t cudaGetDeviceCount(int *count) {
  int error = check_driver();
  *count = error ? 0 : visible_count;
  return error;
}

cudaError_t cudaSetDevice(int device) {
  REQUIRE_DRIVER;
  if (device < 0 || device >= visible_count) return cudaErrorInvalidDevice;
  current = device;
  return open_context();
}

cudaError_t cudaGetDevice(int *device) {
  REQUIRE_DRIVER;
  *device = current;
  return cudaSuccess;
}

static long count_bytes(void) { return (long)read_number("FAKE_GPU_GB", 80) << 30; }

cudaError_t cudaMemGetInfo(size_t *free, size_t *total) {
  REQUIRE_CONTEXT;
  long used = count_used(visible[current]);
  *total = count_bytes(), *free = used > count_bytes() ? 0 : count_bytes() - used;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *found, int device) {
  REQUIRE_DRIVER;
  if (device >= visible_count) return cudaErrorInvalidDevice;
  memset(found, 0, sizeof *found);
  snprintf(found->name, sizeof found->name, "Fake H100");
  found->uuid.bytes[15] = visible[device] + 1, found->pciBusID = visible[device] + 1;
  found->totalGlobalMem = count_bytes(), found->major = 9, found->minor = 0;
  found->multiProcessorCount = 132, found->maxThreadsPerMultiProcessor = 2048, found->maxBlocksPerMultiProcessor = 32;
  found->warpSize = 32, found->maxThreadsPerBlock = 1024, found->regsPerBlock = 65536;
  found->sharedMemPerBlock = 49152, found->sharedMemPerMultiprocessor = 233472, found->sharedMemPerBlockOptin = 232448;
  found->maxThreadsDim[0] = found->maxThreadsDim[1] = 1024, found->maxThreadsDim[2] = 64;
  found->maxGridSize[0] = 2147483647, found->maxGridSize[1] = found->maxGridSize[2] = 65535;
  found->l2CacheSize = 50 << 20;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
  REQUIRE_DRIVER;
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
    case cudaDevAttrMultiProcessorCount: *value = 132; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = 2048; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = 49152; break;
    default: *value = 0;
  }
  return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char *text, int size, int device) {
  snprintf(text, size, "0000:%02x:00.0", visible[device] + 1);
  return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int *can, int from, int to) { *can = 1; return cudaSuccess; }
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *most) { *least = 0, *most = -5; return cudaSuccess; }
cudaError_t cudaDriverGetVersion(int *version) { *version = CUDART_VERSION; return cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int *version) { *version = CUDART_VERSION; return cudaSuccess; }
cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int device) { *pool = malloc(8); return cudaSuccess; }

/* Memory */

static void *map_bytes(size_t size) {
  return mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
}

static void add_block(void *start, size_t size, int is_on_host) {
  pthread_mutex_lock(&lock);
  blocks[block_count].start = start, blocks[block_count].size = size;
  blocks[block_count].device = current, blocks[block_count++].is_on_host = is_on_host;
  pthread_mutex_unlock(&lock);
}

static cudaError_t find_error(void) { return read_number("FAKE_GPU_ERROR", cudaSuccess); }

cudaError_t cudaMalloc(void **start, size_t size) {
  *start = NULL;
  REQUIRE_CONTEXT;
  if (find_error()) return find_error();
  if (count_used(visible[current]) + (long)size > count_bytes()) return cudaErrorMemoryAllocation;
  fake_add_bytes(current, size);
  add_block(*start = map_bytes(size), size, 0);
  return cudaSuccess;
}

cudaError_t cudaFree(void *start) {
  if (!start) return check_driver();
  pthread_mutex_lock(&lock);
  for (int i = 0; i < block_count; i++) {
    if (blocks[i].start != start) continue;
    munmap(start, blocks[i].size);
    if (!blocks[i].is_on_host) fake_add_bytes(blocks[i].device, -(long)blocks[i].size);
    blocks[i] = blocks[--block_count];
    break;
  }
  pthread_mutex_unlock(&lock);
  return cudaSuccess;
}

cudaError_t cudaHostAlloc(void **start, size_t size, unsigned flags) {
  REQUIRE_CONTEXT;
  add_block(*start = map_bytes(size), size, 1);
  return cudaSuccess;
}

cudaError_t cudaMallocHost(void **start, size_t size) { return cudaHostAlloc(start, size, 0); }
cudaError_t cudaFreeHost(void *start) { return cudaFree(start); }

static cudaError_t copy(void *to, const void *from, size_t size) {
  REQUIRE_DRIVER;
  if (find_error()) return find_error();
  memmove(to, from, size);
  return cudaSuccess;
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind) { return copy(to, from, size); }
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind kind, cudaStream_t stream) {
  return copy(to, from, size);
}
cudaError_t cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device, size_t size,
                                cudaStream_t stream) {
  return copy(to, from, size);
}
cudaError_t cudaMemset(void *start, int value, size_t size) { memset(start, value, size); return cudaSuccess; }
cudaError_t cudaMemsetAsync(void *start, int value, size_t size, cudaStream_t stream) {
  memset(start, value, size);
  return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *found, const void *pointer) {
  REQUIRE_DRIVER;
  memset(found, 0, sizeof *found);
  found->type = cudaMemoryTypeUnregistered;
  for (int i = 0; i < block_count; i++) {
    if ((char *)pointer < blocks[i].start || (char *)pointer >= blocks[i].start + blocks[i].size) continue;
    found->type = blocks[i].is_on_host ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
    found->device = blocks[i].device, found->devicePointer = (void *)pointer;
  }
  return cudaSuccess;
}

/* Streams, events and kernels */

static cudaError_t make_handle(void **handle) {
  REQUIRE_CONTEXT;
  *handle = malloc(16);
  return cudaSuccess;
}

cudaError_t cudaStreamCreate(cudaStream_t *made) { return make_handle((void **)made); }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *made, unsigned flags) { return make_handle((void **)made); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *made, unsigned flags, int priority) {
  return make_handle((void **)made);
}
cudaError_t cudaEventCreate(cudaEvent_t *made) { return make_handle((void **)made); }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *made, unsigned flags) { return make_handle((void **)made); }
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t from, cudaEvent_t to) { *ms = 0; return cudaSuccess; }
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) { *priority = 0; return cudaSuccess; }
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id,
                                     cudaGraph_t *graph, const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges,
                                     size_t *count) {
  *status = cudaStreamCaptureStatusNone;
  if (id) *id = 0;
  if (count) *count = 0;
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize(void) { return find_error(); }
cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return find_error(); }
cudaError_t cudaEventSynchronize(cudaEvent_t event) { return find_error(); }

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *found, const void *function) {
  memset(found, 0, sizeof *found);
  found->maxThreadsPerBlock = 1024, found->numRegs = 32;
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *function, int size, size_t shared) {
  *blocks = 2;
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *function, int size,
                                                                   size_t shared, unsigned flags) {
  *blocks = 2;
  return cudaSuccess;
}

static int answer_nothing(void) { return 0; }
static int get_primary_context(int device, unsigned *flags, int *is_active) {
  if (flags) *flags = 0;
  if (is_active) *is_active = 1;
  return 0;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **found, unsigned version, unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *status) {
  *found = strstr(name, "PrimaryCtxGetState") ? (void *)get_primary_context : (void *)answer_nothing;
  if (status) *status = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
void **__cudaRegisterFatBinary(void *binary) { static void *handle; return &handle; }

const char *cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorInitializationError: return "initialization error";
    case cudaErrorInsufficientDriver: return "CUDA driver version is insufficient for CUDA runtime version";
    case cudaErrorDevicesUnavailable: return "CUDA-capable device(s) is/are busy or unavailable";
    case cudaErrorNoDevice: return "no CUDA-capable device is detected";
    case cudaErrorInvalidDevice: return "invalid device ordinal";
    case cudaErrorECCUncorrectable: return "uncorrectable ECC error encountered";
    case cudaErrorIllegalAddress: return "an illegal memory access was encountered";
    case cudaErrorAssert: return "device-side assert triggered";
    case cudaErrorLaunchFailure: return "unspecified launch failure";
    default: return "an error that the fake does not name";
  }
}
const char *cudaGetErrorName(cudaError_t error) { return "cudaErrorFake"; }
