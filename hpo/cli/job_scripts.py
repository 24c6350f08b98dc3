"""Write job scripts for SLURM and PBS: the commands `hpo slurm-script` and `hpo pbs-script`."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Optional

import typer

from hpo.cli.command_line import call_app, make_count_option, parse_duration
from hpo.cli.mpi_commands import make_command_app, make_search
from hpo.cli.mpi_library import NOT_FOUND, find_mpi
from hpo.cli.search_source import split_command
from hpo.errors import UsageError
from hpo.layout import Layout
from hpo.options import Options
from hpo.process.standard_streams import warn
from hpo.store.run_dir import RUNS_DIR
from hpo.supervise.slurm import read_output
from hpo.text_format import format_count, format_duration

_SECONDS_TO_STOP = 120  # before the time limit of the job
_MIN_SECONDS = 600
_FIRST_JOB = "# The first job starts the run, and later jobs resume it."
_LOST_NODE = "# If a node is lost, the run continues on the other nodes.\n"
_CORES_WITH_GPUS = 4  # per rank. One core would have to load the data besides the training.
_GPUS_OF_NODE = re.compile(r"(\d+)\+?\|.*?\bgpu:(?:[^:,(]*:)?(\d+)")  # of `sinfo --format=%c|%G`


@dataclass(frozen=True)
class JobRequest:
    """Resources that a job script requests from the scheduler, and the search that it runs."""

    arguments: Sequence[str]
    """The arguments of `hpo search`."""
    options: Options
    """The options in these arguments."""
    layout: Layout
    nodes: int
    ranks_per_node: int
    gpus_per_node: int
    cpus_per_rank: int
    seconds: float
    """Time limit of the job."""
    directives: Sequence[str]
    """Other options of the command that submits the job."""

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
        for directive in self.directives:
            if not re.fullmatch(r"-\S.*", directive):
                raise UsageError(
                    f"--directive must be an option, such as --qos=high, got {directive!r}"
                )

    @property
    def name(self) -> str:
        """The name of the job, of which the names of its script and its run directory are made."""
        return re.sub(r"[^\w.-]", "_", self.options.search_space.stem)

    @property
    def command(self) -> str:
        """The command of the search, after its launcher."""
        own, program = split_command(self.arguments)
        if self.options.run_dir is None:
            own += ["--run-dir", str(RUNS_DIR / self.name)]
        own += [] if self.options.resume else ["--resume"]
        return shlex.join(["hpo", "search", *own, *(["--", *program] if program else [])])


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
        *request.directives,
    ]
    requested = "\n".join(f"#SBATCH {directive}" for directive in directives)
    # The plugin of srun for the MPI of this environment. If it is not known, srun has a default.
    plugins = {"Open MPI": "pmix", "MPICH": "pmi2", "Intel": "pmi2", "MVAPICH": "pmi2"}
    mpi = find_mpi()
    found = [] if mpi.startswith(NOT_FOUND) else [plugins[name] for name in plugins if name in mpi]
    srun = f"srun --mpi={found[0]}" if found else "srun"
    return f"""#!/bin/bash
# Save this as {request.name}.sh, and submit it: sbatch {request.name}.sh
# SLURM sends SIGUSR1 {_SECONDS_TO_STOP} s before the time limit: the run stops, and this script \
submits itself again.
{_LOST_NODE if request.nodes > 1 else ""}{requested}
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
    directives = "".join(f"#PBS {directive}\n" for directive in request.directives)
    return f"""#!/bin/bash
# Save this as {request.name}.sh, and submit it: qsub {request.name}.sh
# The run stops {_SECONDS_TO_STOP} s before the time limit, and this script submits itself again.
#PBS -N {request.name}
#PBS -l {chunk}
#PBS -l walltime={_format_time(request.seconds)}
{directives}
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


def add_script_commands(app: typer.Typer) -> None:
    """Add the commands `hpo slurm-script` and `hpo pbs-script`."""
    slurm = ("SLURM", write_slurm_script, ("--partition={}", "--account={}"))
    pbs = ("PBS", write_pbs_script, ("-q {}", "-A {}"))
    app.command("slurm-script")(_make_command(*slurm))
    app.command("pbs-script")(_make_command(*pbs))


_Search = Annotated[
    list[str],
    typer.Argument(
        metavar="SEARCH_SPACE", help="A search file or name; after --, options of hpo search."
    ),
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
    Optional[int],
    make_count_option("CPU cores per rank.  [default: its GPUs' share of a node, or 4; or 1]"),
]
_Partition = Annotated[
    Optional[str], typer.Option(metavar="NAME", help="Partition of SLURM, or queue of PBS.")
]
_Account = Annotated[Optional[str], typer.Option(metavar="NAME", help="Account that pays.")]
_Directives = Annotated[
    Optional[list[str]],
    typer.Option(
        metavar="OPTION", help="Another option of sbatch or qsub, such as --qos=high; repeatable."
    ),
]


def _make_command(
    scheduler: str, write: Callable[[JobRequest], str], names: tuple[str, str]
) -> Callable[..., None]:
    """Return a command that prints a job script.

    `names` are the scheduler's options for the partition and the account.
    """

    def command(  # noqa: PLR0913 - an argument for each option
        search: _Search,
        time: _Time,
        nodes: _Nodes = 1,
        gpus_per_node: _Gpus = 0,
        ranks_per_node: _Ranks = None,
        cpus_per_rank: _Cores = None,
        partition: _Partition = None,
        account: _Account = None,
        directive: _Directives = None,
    ) -> None:
        own, program = split_command(search)
        given = call_app(make_command_app(make_search(program=program)), "hpo search", own)
        if not isinstance(given, dict):
            return  # --help
        ranks = ranks_per_node if ranks_per_node is not None else max(1, gpus_per_node)
        nodes_with_gpus = _list_nodes_with_gpus(partition) if partition or gpus_per_node else []
        if partition and nodes_with_gpus and not gpus_per_node:
            warn(
                f"warning: nodes of partition {partition} have GPUs, and the job requests none. "
                f"Give --gpus-per-node {nodes_with_gpus[0][1]}"
            )
        if cpus_per_rank is None:
            cpus_per_rank = _choose_cores(nodes_with_gpus, ranks, gpus_per_node)
        chosen = zip(names, (partition, account), strict=True)
        directives = [option.format(shlex.quote(value)) for option, value in chosen if value]
        directives += directive or []
        options = Options(**given)
        layout = Layout.choose(
            max(1, nodes * ranks), options.ranks_per_worker, options.islands, options.propagators
        )
        request = JobRequest(
            arguments=search,
            options=options,
            layout=layout,
            nodes=nodes,
            ranks_per_node=ranks,
            gpus_per_node=gpus_per_node,
            cpus_per_rank=cpus_per_rank,
            seconds=time,
            directives=directives,
        )
        print(write(request), end="")
        if "evaluations" not in given:
            _warn_of_default_budget(request)

    command.__doc__ = f"""Print a job script for {scheduler}.

    Options of hpo search follow after --: my_search.py --time 12h -- --evaluations 500
    """
    return command


def _list_nodes_with_gpus(partition: str | None) -> list[tuple[int, int]]:
    """Return the numbers of cores and GPUs of each kind of node with GPUs, if SLURM knows any."""
    of_partition = [f"--partition={partition}"] if partition else []
    listed = read_output(["sinfo", "--noheader", "--format=%c|%G", *of_partition])
    nodes = map(_GPUS_OF_NODE.match, listed.splitlines())
    return [(int(node[1]), int(node[2])) for node in nodes if node and int(node[2])]


def _choose_cores(nodes: Sequence[tuple[int, int]], ranks: int, gpus: int) -> int:
    """Return the number of cores per rank: its share of a node's cores, if the nodes are known.

    `ranks` and `gpus` are numbers per node.
    """
    if not gpus:
        return 1
    shares = [cores * gpus // of_node // max(1, ranks) for cores, of_node in nodes]
    return min(filter(None, shares), default=_CORES_WITH_GPUS)


def _warn_of_default_budget(request: JobRequest) -> None:
    """Warn that the search may end before the job, or need another job."""
    budget = request.options.evaluations
    workers = request.layout.workers
    each = request.seconds * workers / budget
    warn(
        f"warning: the search has {budget} evaluations for {format_count(workers, 'worker')}. They "
        f"fill the time of a job if one takes {format_duration(each)}. Choose a number, after "
        f"the first --: --evaluations {10 * budget}"
    )


def _format_time(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"
