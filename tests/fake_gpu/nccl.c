/* An NCCL that communicates through shared memory of one host. Each call returns when it is done: nothing is asynchronous.
 *
 *   FAKE_NCCL_HANG=1                   ncclCommInitRank never returns, as with a wrong network interface
 *   FAKE_NCCL_COLLECTIVE_DESTROY=1     ncclCommDestroy waits for all ranks
 */
#include "fake.h"

#define SLOT (64ul << 20)      /* bytes that each rank may exchange at once */
#define HEAD 4096
#define COMM_BYTES (200l << 20) /* what a communicator takes of a GPU's memory */

typedef struct { _Atomic int arrived, round; } Head;
struct ncclComm { int rank, size, device; Head *head; char *slots; };

static void await_all(ncclComm_t comm) {
  int round = comm->head->round, sleep = 100;
  if (atomic_fetch_add(&comm->head->arrived, 1) + 1 == comm->size) {
    comm->head->arrived = 0;
    atomic_fetch_add(&comm->head->round, 1);
    return;
  }
  while (comm->head->round == round) { /* a rank that waits for long takes no time of the others */
    usleep(sleep);
    sleep = sleep < 20000 ? sleep * 2 : sleep;
  }
}

static char *find_slot(ncclComm_t comm, int rank) { return comm->slots + SLOT * rank; }

ncclResult_t ncclGetVersion(int *version) { *version = NCCL_VERSION_CODE; return ncclSuccess; }

ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
  static _Atomic int count;
  memset(id, 0, sizeof *id);
  snprintf(id->internal, 60, "/fake-nccl-%d-%d", getpid(), atomic_fetch_add(&count, 1));
  return ncclSuccess;
}

static ncclResult_t open_comm(ncclComm_t *made, int size, ncclUniqueId id, int rank) {
  if (getenv("FAKE_NCCL_HANG")) {
    fake_log("ncclInitHangs", size);
    for (;;) pause();
  }
  struct ncclComm *comm = calloc(1, sizeof *comm);
  comm->rank = rank, comm->size = size, comm->device = fake_current_device();
  int file = shm_open(id.internal, O_RDWR | O_CREAT, 0600);
  if (ftruncate(file, HEAD + SLOT * size)) return ncclSystemError;
  char *memory = mmap(NULL, HEAD + SLOT * size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
  close(file);
  comm->head = (Head *)memory, comm->slots = memory + HEAD;
  fake_log("ncclInit", size);
  fake_add_bytes(comm->device, COMM_BYTES);
  *(int *)find_slot(comm, rank) = fake_number_of(comm->device);
  await_all(comm);
  if (rank == 0) shm_unlink(id.internal);
  int is_shared = 0;
  for (int i = 0; i < size; i++)
    for (int j = 0; j < i; j++) is_shared |= *(int *)find_slot(comm, i) == *(int *)find_slot(comm, j);
  await_all(comm);
  *made = comm;
  return is_shared ? ncclInvalidUsage : ncclSuccess;
}

ncclResult_t ncclCommInitRank(ncclComm_t *made, int size, ncclUniqueId id, int rank) {
  return open_comm(made, size, id, rank);
}
ncclResult_t ncclCommInitRankConfig(ncclComm_t *made, int size, ncclUniqueId id, int rank, ncclConfig_t *config) {
  return open_comm(made, size, id, rank);
}
ncclResult_t ncclCommInitRankScalable(ncclComm_t *made, int size, int rank, int count, ncclUniqueId *ids,
                                      ncclConfig_t *config) {
  return open_comm(made, size, ids[0], rank);
}

ncclResult_t ncclCommSplit(ncclComm_t parent, int color, int key, ncclComm_t *made, ncclConfig_t *config) {
  ncclUniqueId id;
  if (parent->rank == 0) {
    ncclGetUniqueId(&id);
    memcpy(parent->slots, &id, sizeof id);
  }
  await_all(parent);
  memcpy(&id, parent->slots, sizeof id);
  await_all(parent);
  *made = NULL;
  return color < 0 ? ncclSuccess : open_comm(made, parent->size, id, parent->rank); /* one color for all ranks */
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  fake_log("ncclDestroy", comm->size);
  if (comm->size > 1 && getenv("FAKE_NCCL_COLLECTIVE_DESTROY")) await_all(comm);
  fake_add_bytes(comm->device, -COMM_BYTES);
  return ncclSuccess;
}
ncclResult_t ncclCommAbort(ncclComm_t comm) { fake_log("ncclAbort", comm ? comm->size : 0); return ncclSuccess; }
ncclResult_t ncclCommFinalize(ncclComm_t comm) { return ncclSuccess; }
ncclResult_t ncclCommUserRank(const ncclComm_t comm, int *rank) { *rank = comm->rank; return ncclSuccess; }
ncclResult_t ncclCommCount(const ncclComm_t comm, int *count) { *count = comm->size; return ncclSuccess; }
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *error) { *error = ncclSuccess; return ncclSuccess; }
const char *ncclGetErrorString(ncclResult_t result) {
  return result == ncclInvalidUsage ? "invalid usage (fake: two ranks on one GPU)" : "an error of the fake NCCL";
}
const char *ncclGetLastError(ncclComm_t comm) { return ""; }

static size_t get_width(ncclDataType_t type) {
  switch (type) {
    case ncclInt8: case ncclUint8: return 1;
    case ncclFloat16: case ncclBfloat16: return 2;
    case ncclInt32: case ncclUint32: case ncclFloat32: return 4;
    default: return 8;
  }
}

#define REDUCE(TYPE)                                                                                   \
  for (size_t i = 0; i < count; i++) {                                                                 \
    TYPE value = ((TYPE *)find_slot(comm, 0))[i];                                                      \
    for (int rank = 1; rank < comm->size; rank++) {                                                    \
      TYPE other = ((TYPE *)find_slot(comm, rank))[i];                                                 \
      if (op == ncclMax) value = value > other ? value : other;                                        \
      else if (op == ncclMin) value = value < other ? value : other;                                   \
      else if (op == ncclProd) value *= other;                                                         \
      else value += other;                                                                             \
    }                                                                                                  \
    ((TYPE *)out)[i] = op == ncclAvg ? value / comm->size : value;                                     \
  }

/* Half precision is not added: the first rank's values stand for the result. */
static void reduce(ncclComm_t comm, char *out, size_t count, ncclDataType_t type, ncclRedOp_t op) {
  if (type == ncclFloat32) { REDUCE(float) }
  else if (type == ncclFloat64) { REDUCE(double) }
  else if (type == ncclInt64 || type == ncclUint64) { REDUCE(int64_t) }
  else if (type == ncclInt32 || type == ncclUint32) { REDUCE(int32_t) }
  else if (get_width(type) == 1) { REDUCE(uint8_t) }
  else memcpy(out, find_slot(comm, 0), count * get_width(type));
}

ncclResult_t ncclAllReduce(const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t stream) {
  size_t width = get_width(type), most = SLOT / width;
  for (size_t done = 0; done < count; done += most) {
    size_t part = count - done < most ? count - done : most;
    memcpy(find_slot(comm, comm->rank), (char *)from + done * width, part * width);
    await_all(comm);
    reduce(comm, (char *)to + done * width, part, type, op);
    await_all(comm);
  }
  return ncclSuccess;
}

ncclResult_t ncclReduce(const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t op, int root,
                        ncclComm_t comm, cudaStream_t stream) {
  return ncclAllReduce(from, to ? to : (void *)from, count, type, op, comm, stream);
}

ncclResult_t ncclBroadcast(const void *from, void *to, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                           cudaStream_t stream) {
  size_t size = count * get_width(type);
  for (size_t done = 0; done < size; done += SLOT) {
    size_t part = size - done < SLOT ? size - done : SLOT;
    if (comm->rank == root) memcpy(comm->slots, (char *)from + done, part);
    await_all(comm);
    memmove((char *)to + done, comm->slots, part);
    await_all(comm);
  }
  return ncclSuccess;
}

ncclResult_t ncclBcast(void *data, size_t count, ncclDataType_t type, int root, ncclComm_t comm, cudaStream_t stream) {
  return ncclBroadcast(data, data, count, type, root, comm, stream);
}

ncclResult_t ncclAllGather(const void *from, void *to, size_t count, ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t stream) {
  size_t size = count * get_width(type);
  memcpy(find_slot(comm, comm->rank), from, size);
  await_all(comm);
  for (int rank = 0; rank < comm->size; rank++) memcpy((char *)to + rank * size, find_slot(comm, rank), size);
  await_all(comm);
  return ncclSuccess;
}

ncclResult_t ncclReduceScatter(const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t op,
                               ncclComm_t comm, cudaStream_t stream) {
  size_t size = count * get_width(type);
  char *whole = malloc(size * comm->size);
  ncclAllReduce(from, whole, count * comm->size, type, op, comm, stream);
  memcpy(to, whole + size * comm->rank, size);
  free(whole);
  return ncclSuccess;
}
