"""The search file of `hpo check-cluster`: measure the speed of a process group."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from hpo import Int, SearchSpace, Worker

space = SearchSpace(mebibytes=Int(1, 1024))

_SECONDS = 1.0  # approximate duration of each measurement
_MOST_CALLS = 200


def objective(
    params: Mapping[str, int], worker: Worker
) -> Iterator[tuple[float, dict[str, float]]]:
    """Yield the latency of the process group, in seconds, and these metrics.

    - ``latency``: median seconds of an all-reduce of one number.
    - ``bandwidth``: bytes per second of an all-reduce of a tensor with ``mebibytes``. It is the bus
      bandwidth 2 (n - 1) / n * bytes / seconds of NVIDIA's nccl-tests (doc/PERFORMANCE.md). It does
      not depend on the number n of ranks if all links are equally fast.
    - ``seconds``: duration of both measurements.
    """
    began = time.monotonic()
    elements = int(params["mebibytes"]) * (1 << 20) // 4
    latency = _time_all_reduce(torch.zeros(1, device=worker.device))
    seconds = _time_all_reduce(torch.zeros(elements, device=worker.device))
    bandwidth = 2 * (worker.size - 1) / worker.size * 4 * elements / seconds
    seconds_of_all = _find_largest(time.monotonic() - began, worker.device)
    yield latency, {"latency": latency, "bandwidth": bandwidth, "seconds": seconds_of_all}


def _time_all_reduce(tensor: Tensor) -> float:
    """Return the median seconds of an all-reduce on the slowest rank. Collective."""
    _call_all_reduce(tensor)  # The first call makes the connections.
    count = int(_SECONDS / _find_largest(_call_all_reduce(tensor), tensor.device))
    times = [_call_all_reduce(tensor) for _ in range(max(3, min(_MOST_CALLS, count)))]
    return _find_largest(statistics.median(times), tensor.device)


def _find_largest(value: float, device: torch.device) -> float:
    """Return the largest value of all ranks. Collective: call on all ranks."""
    largest = torch.tensor([value], device=device)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return float(largest.item())


def _call_all_reduce(tensor: Tensor) -> float:
    began = time.perf_counter()
    dist.all_reduce(tensor)
    if tensor.device.type != "cpu":
        torch.accelerator.synchronize(tensor.device)
    return time.perf_counter() - began
