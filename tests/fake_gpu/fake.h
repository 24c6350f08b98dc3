/* What the fake CUDA runtime and the fake NCCL share. */
#ifndef FAKE_H
#define FAKE_H
#define _GNU_SOURCE
#include <cuda_runtime_api.h>
#include <errno.h>
#include <fcntl.h>
#include <nccl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

void fake_log(const char *event, long value);
int fake_current_device(void);
int fake_number_of(int device);                 /* number of a visible device on the host */
void fake_add_bytes(int device, long bytes);    /* count memory that this process holds on a device */
#endif
