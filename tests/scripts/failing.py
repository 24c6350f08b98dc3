"""A script that fails in the chosen way on the second rank, after the first of three losses."""

import argparse
import ctypes
import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import hpo


def fail(way):  # noqa: C901 - a case for each way
    if way == "raise":
        raise ValueError("injected")
    if way == "status":
        sys.exit(3)
    if way == "text":
        sys.exit("no luck")
    if way == "hint":  # as Hydra
        print("\x1b[31mpackage.SomeError\x1b[0m: no luck", file=sys.stderr)
        sys.exit("Set a variable for a complete stack trace.")
    if way == "early":
        sys.exit()
    if way == "_exit":
        os._exit(0)
    if way == "_exit3":
        os._exit(3)
    if way == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if way == "segfault":
        ctypes.string_at(0)
    if way in ("hang", "forward", "backward"):
        time.sleep(3600)
    if way == "nan":
        hpo.report(float("nan"))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--way")
    parser.add_argument("--x", type=float)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(1, 1))
    for step in range(3):
        dist.all_reduce(torch.ones(1))
        output = model(torch.ones(1)) if args.way == "backward" else None
        if dist.get_rank() == 1 and step == 1:
            fail(args.way)
        if args.way in ("forward", "backward"):
            output = model(torch.ones(1)) if output is None else output
            output.sum().backward()
        dist.all_reduce(torch.ones(1))
        if dist.get_rank() == 0:
            hpo.report(args.x + 1 / (step + 1), step=step)
        elif args.way == "differ":
            hpo.report(5)


main()
