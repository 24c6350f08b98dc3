"""Variables that launchers of MPI jobs set, and how a template is started without them."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpo.process.linux import find_parent, has_gpu_files, read_command_line

# Trainers must not inherit these variables, since libraries for torchrun would use them: Accelerate
# reads PMI_SIZE, DeepSpeed OMPI_COMM_WORLD_SIZE, and Lightning SLURM_NTASKS.
_LAUNCHER_PREFIXES = (
    *("PMI_", "PMIX", "OMPI_", "PRTE_", "MPI_LOCAL", "MPIEXEC_", "HYDI_", "MV2_COMM_"),
    *("PALS_", "SLURM_STEP_"),
)
_TASK_VARIABLES = (
    *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_TASK_PID", "SLURM_GTIDS"),
    *("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE"),
)

# Variables of SLURM come last: a job script has them too, and mpirun in it sets the others.
_RANK_VARIABLES = (
    *("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK"),
    *("PALS_RANKID", "SLURM_PROCID"),
)
_LOCAL_RANK_VARIABLES = (
    *("MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK"),
    *("PALS_LOCAL_RANKID", "SLURM_LOCALID"),
)

_VARIABLE_OPTIONS = frozenset(["-env", "-genv", "-x", "--env"])

_TEMPLATE_CODE = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); "
    "from hpo.trainer.template_server import main; main(json.loads(sys.argv[1]))"
)


def make_plain_environment() -> dict[str, str]:
    """Return this rank's environment without the variables that a launcher sets for a rank.

    PYTHONHASHSEED is set, so that sets have the same order on all ranks. Python reads it when it
    starts.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_LAUNCHER_PREFIXES) and name not in _TASK_VARIABLES
    }
    seed = kept.get("PYTHONHASHSEED", "")
    return {**kept, "PYTHONHASHSEED": seed if seed.isdecimal() else "0"}


def make_template_command(state: Mapping[str, Any]) -> list[str]:
    """Return the command line of a template, which has the import paths of this process.

    `state` has the descriptor of the listening socket (`listener`), and the number of the parent
    process (`parent`). A template that restarts itself has more in it.
    """
    return [sys.executable, "-u", "-c", _TEMPLATE_CODE, json.dumps(state), json.dumps(sys.path)]


def make_template_environment() -> dict[str, str]:
    """Return the variables of a template, which has one thread and does not initialise CUDA."""
    environment = make_plain_environment()
    # torch warns of hosts whose names it cannot resolve, and works without them. It also raises the
    # errors that it logs, except those of NCCL's watchdog, which then ends the process.
    environment.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR" if has_gpu_files() else "FATAL")
    libraries = ("OMP", "OPENBLAS", "MKL", "NUMEXPR", "VECLIB_MAXIMUM")
    threads = {f"{library}_NUM_THREADS": "1" for library in libraries}
    return {**environment, **threads, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}


def is_first_on_host(environment: Mapping[str, str]) -> bool:
    """Return whether the launcher calls this rank its host's first, or sets no variable."""
    return _is_zero(_LOCAL_RANK_VARIABLES, environment)


def is_first_rank(environment: Mapping[str, str]) -> bool:
    """Return whether the launcher calls this rank the job's first, or sets no variable."""
    return _is_zero(_RANK_VARIABLES, environment)


def describe_launcher(environment: Mapping[str, str]) -> str:
    """Return the launcher that has started this rank, as far as its variables show it."""
    names = environment.keys()
    has_pmi = "PMI_RANK" in names or "PMIX_RANK" in names
    of_mpirun = {
        "HYDI_CONTROL_FD",
        "OMPI_COMM_WORLD_SIZE",
        "MPI_LOCALRANKID",
        "MV2_COMM_WORLD_RANK",
    }
    if names & of_mpirun:
        return "mpirun"
    if "PALS_RANKID" in names:
        return "PALS"
    if has_pmi and {"SLURM_PROCID", "SLURM_STEP_ID"} <= names:
        return "srun"
    return "a launcher with PMI" if has_pmi else "no launcher"


def find_launch_words(environment: Mapping[str, str], ranks: int) -> list[str]:
    """Return the words before this program's name on the command line that started the job.

    These are for example `mpirun -n 8 python`. They are read from a parent of this process. If no
    parent has them, as with srun, only the number of ranks is known of the launcher's options.
    This is also so if they set variables, whose values may be secret.
    """
    launcher = describe_launcher(environment)
    process = os.getpid()
    while launcher != "no launcher" and (process := find_parent(process)) > 1:
        words = _drop_program(read_command_line(process))
        options = {word.partition("=")[0] for word in words}
        if words and _VARIABLE_OPTIONS.isdisjoint(options):
            name = Path(words[0]).name
            return [name if shutil.which(name) else words[0], *words[1:]]
    is_file = sys.argv[0].endswith(".py")  # Otherwise, it is an installed command.
    interpreter = (_drop_program(sys.orig_argv) or ["python"]) if is_file else []
    if launcher == "no launcher":
        return interpreter
    return ["srun" if launcher == "srun" else "mpirun", "-n", str(ranks), *interpreter]


def _drop_program(words: Sequence[str]) -> list[str]:
    """Return the words before this program and its arguments; none if they do not end with it."""
    before = len(words) - len(sys.argv)
    if before <= 0 or list(words[before + 1 :]) != sys.argv[1:]:
        return []
    same = Path(words[before]).name == Path(sys.argv[0]).name
    return list(words[:before]) if same else []


def describe_scheduler(environment: Mapping[str, str]) -> str:
    """Return the scheduler and the job of this process; an empty text without a scheduler."""
    for name, variable in {"SLURM": "SLURM_JOB_ID", "PBS": "PBS_JOBID", "LSF": "LSB_JOBID"}.items():
        if variable in environment:
            return f"{name} job {environment[variable]}"
    return ""


def _is_zero(names: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Return whether the first of these variables that is set is 0; true if none is set."""
    return next((environment[name] for name in names if name in environment), "0") == "0"
