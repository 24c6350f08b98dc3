"""A search file that changes its process: at its import, in `prepare`, in the objective."""

import io
import os
import sys
from pathlib import Path

import numpy as np
import torch

from hpo import Float, SearchSpace

np.seterr(all="raise")
os.chdir("/")
sys.stdout.buffer.write(b"bytes at import\n")
sys.stdout = io.TextIOWrapper(sys.stdout.buffer, line_buffering=True)
print("wrapped at import")

objectives = ("loss", "size")
space = SearchSpace(x=Float(1e-300, 1.0, log=True), y=Float(0.0, 1.0))


def prepare():
    torch.set_default_dtype(torch.float64)
    np.seterr(all="ignore")
    os.umask(0)
    os.environ["CHANGED"] = "by prepare"
    return np.arange(3)


def objective(params, worker):
    sys.stdout.buffer.write(b"bytes in an evaluation\n")
    sys.stdout.buffer.flush()
    sys.stdout = io.TextIOWrapper(sys.stdout.buffer)
    print("wrapped in an evaluation", flush=True)
    mask = os.umask(0o022)
    os.umask(mask)
    seen = [
        str(torch.get_default_dtype()),
        np.geterr()["over"],
        mask,
        os.environ.get("CHANGED"),
        str(Path.cwd()),
    ]
    assert worker.comm.allgather(seen) == [seen] * worker.size
    torch.set_default_dtype(torch.float64)
    print("seen", *seen, flush=True)
    return params["x"] + params["y"], {"size": 1 - params["y"]}
