"""A search whose objective uses up all descriptors: every second evaluation for good, the others for a while."""

import time

import torch
import torch.distributed as dist

from hpo import Float, SearchSpace

space = SearchSpace(x=Float(0.0, 1.0))
kept: list[list[object]] = []


def objective(params, _):
    value = torch.ones(1)
    dist.all_reduce(value)
    for_good = len(kept) % 2 == 1
    kept.append([])
    opened = kept[-1] if for_good else []
    try:
        while True:
            opened.append(open("/dev/null"))  # noqa: PTH123, SIM115
    except OSError:
        if for_good:
            raise
    time.sleep(1.2)  # in which the run reads its record
    dist.all_reduce(value)
    yield params["x"]
