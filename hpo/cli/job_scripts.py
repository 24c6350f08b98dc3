"""Write job scripts for SLURM and PBS: the commands `hpo slurm-script` and `hpo pbs-script`."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Optional

import typer

from hpo.cli.command_line import make_count_option, parse_duration
from hpo.cli.search_source import find_search_space
from hpo.errors import UsageError
from hpo.layout import Layout

_SECONDS_TO_STOP = 120  # before the time limit of the job
_MIN_SECONDS = 600
_NOT_FOUND = "not found"
_FIRST_JOB = (
    "# The first job starts the run, and later jobs resume it. Options of the search, such as "
    "--evaluations, come here."
)
_CORES_WITH_GPUS = 4  # per rank. One core would have to load the data besides the training.


@dataclass(frozen=True)
class JobRequest:
    """Resources that a job script requests from the scheduler."""

    search_space: Path
    nodes: int
    ranks_per_node: int
    gpus_per_node: int
    cpus_per_rank: int
    seconds: float
    """Time limit of the job."""
    layout: Layout

    def __post_init__(self) -> None:
        for name in ("nodes", "ranks_per_node", "cpus_per_rank"):
            if getattr(self, name) < 1:
                raise UsageError(
                    f"--{name.replace('_', '-')} must be at least 1, got {getattr(self, name)}"
                )
        if self.gpus_per_node < 0:
            raise UsageError(f"--gpus-per-node must be at least 0, got {self.gpus_per_node}")
        if self.seconds < _MIN_SECONDS:
            raise UsageError(f"--time must be at least 10m, got {self.seconds:g} s")
        find_search_space(self.search_space)

    @property
    def name(self) -> str:
        """The name of the job, of which the names of its script and its run directory are made."""
        return re.sub(r"[^\w.-]", "_", self.search_space.stem)

    @property
    def command(self) -> str:
        """The command of the search, after its launcher."""
        size = str(self.layout.ranks_per_worker)
        search = ["hpo", "search", str(self.search_space), "--ranks-per-worker", size]
        return shlex.join([*search, "--run-dir", f"runs/{self.name}", "--resume"])


def write_slurm_script(request: JobRequest) -> str:
    """Return a job script for SLURM."""
    directives = [
        f"--job-name={request.name}",
        f"--nodes={request.nodes}",
        f"--ntasks-per-node={request.ranks_per_node}",
        *([f"--gpus-per-node={request.gpus_per_node}"] if request.gpus_per_node else []),
        f"--cpus-per-task={request.cpus_per_rank}",
        f"--time={_format_time(request.seconds)}",
        f"--signal=USR1@{_SECONDS_TO_STOP}",
        "--requeue",
        "--no-kill",
    ]
    requested = "\n".join(f"#SBATCH {directive}" for directive in directives)
    # The plugin of srun for the MPI of this environment. If it is not known, srun has a default.
    plugins = {"Open MPI": "pmix", "MPICH": "pmi2", "Intel": "pmi2", "MVAPICH": "pmi2"}
    mpi = find_mpi()
    found = [] if mpi.startswith(_NOT_FOUND) else [plugins[name] for name in plugins if name in mpi]
    srun = f"srun --mpi={found[0]}" if found else "srun"
    return f"""#!/bin/bash
# Save this as {request.name}.sh, and submit it: sbatch {request.name}.sh
# SLURM sends SIGUSR1 {_SECONDS_TO_STOP} s before the time limit: the run stops, and this script \
submits itself again.
# If a node is lost, the run continues on the other nodes.
{requested}
{describe_environment()}
# srun does not read --cpus-per-task of the job since SLURM 22.05.
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK

{_FIRST_JOB}
hpo supervise {srun} --kill-on-bad-exit=1 \\
    {request.command}
if [ $? -eq 75 ]; then sbatch {shlex.quote(request.name + ".sh")}; fi
"""


def write_pbs_script(request: JobRequest) -> str:
    """Return a job script for PBS."""
    cores = request.ranks_per_node * request.cpus_per_rank
    chunk = f"select={request.nodes}:ncpus={cores}:mpiprocs={request.ranks_per_node}"
    chunk += f":ngpus={request.gpus_per_node}" if request.gpus_per_node else ""
    return f"""#!/bin/bash
# Save this as {request.name}.sh, and submit it: qsub {request.name}.sh
# The run stops {_SECONDS_TO_STOP} s before the time limit, and this script submits itself again.
#PBS -N {request.name}
#PBS -l {chunk}
#PBS -l walltime={_format_time(request.seconds)}

cd "$PBS_O_WORKDIR" || exit
{describe_environment()}
# The run stops one minute before this time (seconds since 1970).
export HPO_JOB_END_TIME=$(($(date +%s) + {int(request.seconds) - _SECONDS_TO_STOP + 60}))
{_FIRST_JOB}
# For Open MPI, write --hostfile instead of -f.
hpo supervise mpirun -f "$PBS_NODEFILE" -n {request.layout.ranks} \\
    {request.command}
if [ $? -eq 75 ]; then qsub {shlex.quote(request.name + ".sh")}; fi
"""


def describe_environment() -> str:
    """Return lines for a job script that activate this environment, and load its modules."""
    modules = os.environ.get("LOADEDMODULES", "").replace(":", " ")
    lines = [f"module load {modules}"] if modules else []
    activate = Path(sys.prefix, "bin", "activate")
    conda = os.environ.get("CONDA_PREFIX", "")
    if activate.exists():
        lines.append(f". {shlex.quote(str(activate))}")
    elif conda:
        lines.append(f'eval "$(conda shell.bash hook)" && conda activate {shlex.quote(conda)}')
    return "".join(f"{line}\n" for line in ["", *lines])


def find_mpi() -> str:
    """Return the name and version of the MPI library, without starting MPI."""
    try:
        import mpi4py

        # Otherwise, the import starts MPI, which would have to be finalized.
        mpi4py.rc.initialize = False
        from hpo.ranks.communicator import describe_mpi

        return describe_mpi()
    except (ImportError, RuntimeError) as error:  # The MPI library is missing.
        reason, *_ = str(error).split("\n")
        return f"{_NOT_FOUND} ({reason})"


def add_script_commands(app: typer.Typer) -> None:
    """Add the commands `hpo slurm-script` and `hpo pbs-script`."""
    app.command("slurm-script")(_make_command("Print a job script for SLURM.", write_slurm_script))
    app.command("pbs-script")(_make_command("Print a job script for PBS.", write_pbs_script))


_SearchSpace = Annotated[
    Path, typer.Argument(metavar="SEARCH_SPACE", help="A search file, or a name.")
]
_Time = Annotated[
    float, typer.Option(metavar="DURATION", parser=parse_duration, help="Time limit of a job.")
]
_Nodes = Annotated[int, make_count_option("Nodes.")]
_Gpus = Annotated[int, make_count_option("GPUs per node.")]
_Ranks = Annotated[
    Optional[int], make_count_option("Ranks per node.  [default: one per GPU, or 1]")
]
_Cores = Annotated[
    Optional[int], make_count_option("CPU cores per rank.  [default: 4 with GPUs, otherwise 1]")
]
_WorkerRanks = Annotated[
    Optional[int], make_count_option("Ranks per worker.  [default: 2; 1 if odd]")
]


def _make_command(summary: str, write: Callable[[JobRequest], str]) -> Callable[..., None]:
    def command(  # noqa: PLR0913 - an argument for each option
        search_space: _SearchSpace,
        time: _Time,
        nodes: _Nodes = 1,
        gpus_per_node: _Gpus = 0,
        ranks_per_node: _Ranks = None,
        cpus_per_rank: _Cores = None,
        ranks_per_worker: _WorkerRanks = None,
    ) -> None:
        ranks = ranks_per_node if ranks_per_node is not None else max(1, gpus_per_node)
        layout = Layout.choose(max(1, nodes * ranks), ranks_per_worker, None)
        if cpus_per_rank is None:
            cpus_per_rank = _CORES_WITH_GPUS if gpus_per_node else 1
        request = JobRequest(search_space, nodes, ranks, gpus_per_node, cpus_per_rank, time, layout)
        print(write(request), end="")

    command.__doc__ = summary
    return command


def _format_time(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"
