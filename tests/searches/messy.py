"""A search whose objective changes whatever it can of its process, and fails where it does not find it as it was."""

import gc
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path

import numpy as np
import torch

from hpo import Float, SearchSpace

space = SearchSpace(x=Float(0.0, 1.0))
kept: dict[str, dict[str, object]] = {}


def surroundings():
    mask = os.umask(0)
    os.umask(mask)
    return {
        "folder": Path.cwd(),
        "umask": mask,
        "environment": dict(os.environ),
        "path": list(sys.path),
        "signals": [signal.getsignal(n) for n in (signal.SIGALRM, signal.SIGTERM, signal.SIGUSR2, signal.SIGURG)],
        "timer": signal.getitimer(signal.ITIMER_REAL),
        "filters": list(warnings.filters),
        "garbage": gc.isenabled(),
        "sockets": socket.getdefaulttimeout(),
        "turns": sys.getswitchinterval(),
        "numpy": np.geterr(),
        "torch": (torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled()),
        "anomaly": torch.is_anomaly_enabled(),
        "threads": torch.get_num_threads(),
        "precision": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "cudnn": torch.backends.cudnn.benchmark,
        "out": sys.stdout,
    }


def objective(params, _):
    now = surroundings()
    before = kept.setdefault("before", now)
    changed = [name for name in now if now[name] != before[name]]
    if changed:
        raise ValueError(f"not as it was: {changed}")
    os.chdir(tempfile.gettempdir())
    os.umask(0o077)
    os.environ["MESSY"] = "1"
    del os.environ["PATH"]
    sys.path = ["/nowhere", *sys.path]
    for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGURG):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, print)
    signal.setitimer(signal.ITIMER_REAL, 60)
    warnings.catch_warnings().__enter__()  # which puts another list in the place of the filters
    warnings.simplefilter("ignore")
    gc.disable()
    socket.setdefaulttimeout(0.001)
    sys.setswitchinterval(0.05)
    np.seterr(all="raise")
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.set_grad_enabled(False)
    torch.autograd.set_detect_anomaly(True)
    torch.set_num_threads(1 + torch.get_num_threads())
    torch.set_float32_matmul_precision("medium")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = True
    threading.Thread(target=time.sleep, args=(3600,), name="blocked").start()
    sys.stdout.close()
    yield params["x"]
