"""The command line and the environment of a template.

The template imports from the same paths as its rank. It gets no variables of MPI.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

from hpo.process.launcher import make_plain_environment
from hpo.process.linux import has_gpu_files

_CODE = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); "
    "from hpo.trainer.template_server import main; main(json.loads(sys.argv[1]))"
)


def make_template_command(state: Mapping[str, Any]) -> list[str]:
    """Return the command line of a template, which imports modules from the same paths as this process.

    Args:
        state: Descriptor of the listening socket (`listener`) and number of the parent process (`parent`).
    """
    return [sys.executable, "-u", "-c", _CODE, json.dumps(state), json.dumps(sys.path)]


def make_template_environment() -> dict[str, str]:
    """Return the environment variables of a template: it imports with one thread, and does not initialise CUDA."""
    environment = make_plain_environment()
    # torch warns of hosts whose names it cannot resolve, and works without them. It also raises the errors that it
    # logs, except those of NCCL's watchdog, which then ends the process.
    environment.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR" if has_gpu_files() else "FATAL")
    threads = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL", "NUMEXPR", "VECLIB_MAXIMUM")}
    return {**environment, **threads, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
