"""Environments of processes: variables that launchers of MPI jobs set, and how a template is started without them."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from hpo.process.linux import has_gpu_files

# Trainers must not inherit these variables, since libraries for torchrun would use them: Accelerate
# reads PMI_SIZE, DeepSpeed OMPI_COMM_WORLD_SIZE, and Lightning SLURM_NTASKS.
_LAUNCHER_PREFIXES = (
    "PMI_",
    "PMIX_",
    "OMPI_",
    "PRTE_",
    "MPI_LOCAL",
    "MPIEXEC_",
    "HYDI_",
    "HYDRA_",
    "MV2_COMM_",
    "PALS_",
    "PMIX",
)
_TASK_VARIABLES = (
    "PROCID",
    "LOCALID",
    "NODEID",
    "TASK_PID",
    "GTIDS",
    "NTASKS",
    "NPROCS",
    "NTASKS_PER_NODE",
    "TASKS_PER_NODE",
)

# Variables of SLURM come last: a job script has them too, and mpirun in it sets the others.
_RANK_VARIABLES = (
    "PMI_RANK",
    "PMIX_RANK",
    "OMPI_COMM_WORLD_RANK",
    "MV2_COMM_WORLD_RANK",
    "PALS_RANKID",
    "SLURM_PROCID",
)
_LOCAL_RANK_VARIABLES = (
    *(
        "MPI_LOCALRANKID",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "PALS_LOCAL_RANKID",
    ),
    "SLURM_LOCALID",
)


_TEMPLATE_CODE = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); "
    "from hpo.trainer.template_server import main; main(json.loads(sys.argv[1]))"
)


def make_plain_environment() -> dict[str, str]:
    """Return this rank's environment without the variables that a launcher sets for a rank.

    PYTHONHASHSEED is set, so that sets have the same order on all ranks. Python reads it when it
    starts.
    """
    tasks = {f"SLURM_{name}" for name in _TASK_VARIABLES}
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith((*_LAUNCHER_PREFIXES, "SLURM_STEP_")) and name not in tasks
    }
    seed = kept.get("PYTHONHASHSEED", "")
    return {**kept, "PYTHONHASHSEED": seed if seed.isdecimal() else "0"}


def make_template_command(state: Mapping[str, Any]) -> list[str]:
    """Return the command line of a template, which imports modules from the same paths as this process.

    Args:
        state: Descriptor of the listening socket (`listener`) and number of the parent process
        (`parent`).
    """
    return [sys.executable, "-u", "-c", _TEMPLATE_CODE, json.dumps(state), json.dumps(sys.path)]


def make_template_environment() -> dict[str, str]:
    """Return the environment variables of a template, which imports with one thread and does not initialise CUDA."""
    environment = make_plain_environment()
    # torch warns of hosts whose names it cannot resolve, and works without them. It also raises the
    # errors that it logs, except those of NCCL's watchdog, which then ends the process.
    environment.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR" if has_gpu_files() else "FATAL")
    threads = {
        f"{library}_NUM_THREADS": "1"
        for library in ("OMP", "OPENBLAS", "MKL", "NUMEXPR", "VECLIB_MAXIMUM")
    }
    return {**environment, **threads, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}


def is_first_on_host(environment: Mapping[str, str]) -> bool:
    """Return whether this rank is its host's first according to the launcher; true if the launcher sets no variable."""
    return _is_zero(_LOCAL_RANK_VARIABLES, environment)


def is_first_rank(environment: Mapping[str, str]) -> bool:
    """Return whether this rank is the job's first according to the launcher; true if the launcher sets no variable."""
    return _is_zero(_RANK_VARIABLES, environment)


def describe_launcher(environment: Mapping[str, str]) -> str:
    """Return the launcher that has started this rank, as far as its variables show it."""
    if {"HYDI_CONTROL_FD", "OMPI_COMM_WORLD_SIZE", "MPI_LOCALRANKID", "MV2_COMM_WORLD_RANK"} & {
        *environment
    }:
        return "mpirun"
    if "PALS_RANKID" in environment:
        return "PALS"
    if {"SLURM_PROCID", "SLURM_STEP_ID"} <= {*environment} and {"PMI_RANK", "PMIX_RANK"} & {
        *environment
    }:
        return "srun"
    return "a launcher with PMI" if {"PMI_RANK", "PMIX_RANK"} & {*environment} else "no launcher"


def describe_scheduler(environment: Mapping[str, str]) -> str:
    """Return the scheduler and the job of this process; an empty text without a scheduler."""
    jobs = {"SLURM": "SLURM_JOB_ID", "PBS": "PBS_JOBID", "LSF": "LSB_JOBID"}
    return next(
        (
            f"{name} job {environment[variable]}"
            for name, variable in jobs.items()
            if variable in environment
        ),
        "",
    )


def _is_zero(names: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Return whether the first of these variables that is set is 0; true if none is set."""
    return next((environment[name] for name in names if name in environment), "0") == "0"
