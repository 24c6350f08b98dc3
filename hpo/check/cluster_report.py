"""Facts about a job that `hpo check-cluster` collects, their tables, and its findings."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpo.check.finding import Finding, look, ok, wrong
from hpo.evaluation.host import (
    RankPlace,
    choose_backend,
    compute_thread_share,
    has_separated_worker,
)
from hpo.layout import Layout, describe_spanning_workers
from hpo.text_format import format_count, format_list, format_number, format_tenths, make_printable
from hpo.views.tables import format_table, make_table

# Seconds from the first host; a failure is attributed to the rank that has failed first.
_LARGEST_OFFSET = 0.05
_SLOWEST_WRITE = 0.1  # seconds
_SLOWEST_VIEW = 2.0  # seconds
_SLOW_WORKER = 0.5  # share of the median bandwidth
_MIN_TO_COMPARE = 3  # workers
_MOST_FAILURES = 3  # printed
_MOST_HOSTS = 32  # rows of the table


@dataclass(frozen=True)
class RankFacts(RankPlace):
    """One rank and its share of its host."""

    cores: tuple[int, ...]
    """CPU cores that the rank may use."""
    host_cores: int
    """Number of CPU cores of the host; hardware threads count as cores."""
    threads_per_core: int
    """Number of hardware threads of a physical core."""
    container: str
    """A text that is equal on ranks of the same container, which share a template."""


@dataclass(frozen=True)
class ClockOffset:
    """The clock of a host, compared with the clock of the first host."""

    seconds: float
    """The time of the host minus the time of the first host."""
    error: float
    """Maximum error of `seconds`."""


@dataclass(frozen=True)
class FolderView:
    """How a host sees the folder in which the run directory is, or would be made."""

    seconds_to_see: float | None
    """Seconds until the host has seen a change by the first host; None if it was too late."""
    sees_lock: bool
    """Whether the host sees that the first host has locked a file."""
    is_seen: bool = False
    """Whether the first host has seen a file of this host in time."""
    write_error: str = ""
    """Why the host cannot write in the folder; empty if it can."""


@dataclass(frozen=True)
class FolderFacts:
    """The folder in which the run directory is, or would be made."""

    path: Path
    file_system: str
    """Type of the file system, such as nfs4; empty if it is unknown."""
    free: int
    """Free bytes."""
    has_locks: bool
    write_seconds: float
    """Median seconds to write a small file, flush it to the disk and rename it."""


@dataclass(frozen=True)
class GroupSpeed:
    """The speed of a process group of trainers."""

    ranks: tuple[int, ...]
    """Indices of its ranks in the job."""
    failure: str
    """Why it could not be measured; empty if it was measured."""
    connect: float = 0.0
    """Seconds until the trainers had connected and begun to measure."""
    latency: float = 0.0
    """Median seconds of an all-reduce of one number."""
    bandwidth: float = 0.0
    """Bytes per second, as in NVIDIA's nccl-tests (bus bandwidth)."""


@dataclass(frozen=True)
class ClusterFacts:
    """All that `hpo check-cluster` has found out."""

    layout: Layout
    ranks: Sequence[RankFacts]
    """The ranks in the order of a run. Those of a worker are consecutive."""
    clocks: Sequence[ClockOffset]
    """The clocks of the hosts, in the order of their first ranks."""
    folder: FolderFacts
    views: Sequence[FolderView]
    """How the hosts see the folder, in the same order."""
    speeds: Sequence[GroupSpeed]
    """The process group of each worker. They were measured at the same time, as in a run."""
    between_hosts: GroupSpeed | None
    """The process group with one rank of each host; None on a single host."""
    mpi: str
    """Name and version of the MPI library."""
    launcher: str
    scheduler: str
    """Name of the scheduler and number of the job; empty without a scheduler."""
    job_end_variable: str
    """The environment variable that has the job's end; empty if there is none."""

    @property
    def hosts(self) -> list[int]:
        """The numbers of the hosts, in the order of their first ranks."""
        return list(dict.fromkeys(rank.host for rank in self.ranks))

    def list_ranks(self, host: int) -> list[int]:
        """Return the indices of the ranks on a host."""
        return [index for index, rank in enumerate(self.ranks) if rank.host == host]

    def get_name(self, host: int) -> str:
        """Return the name of a host."""
        return next(rank.host_name for rank in self.ranks if rank.host == host)

    def list_names(self, ranks: Sequence[int]) -> list[str]:
        """Return the names of the hosts of these ranks, without repetitions."""
        return list(dict.fromkeys(self.ranks[rank].host_name for rank in ranks))

    def count_templates(self, host: int) -> int:
        """Return the number of templates on a host. Ranks of the same container share one."""
        return len({self.ranks[rank].container for rank in self.list_ranks(host)})

    def spans_hosts(self, ranks: Sequence[int]) -> bool:
        """Return whether these ranks are on several hosts."""
        return len({self.ranks[rank].host for rank in ranks}) > 1


def print_cluster(facts: ClusterFacts) -> None:
    """Print the facts, without a judgement."""
    where = f" in {facts.scheduler}" if facts.scheduler else ""
    print(make_printable(f"{facts.mpi}; ranks started by {facts.launcher}{where}"))
    folder = facts.folder
    kind = f"{folder.file_system}, " if folder.file_system else ""
    print(make_printable(f"{folder.path}: {kind}{folder.free / 1e9:.0f} GB free"))
    _print_hosts(facts)
    _print_groups(facts)


def _print_hosts(facts: ClusterFacts) -> None:
    hosts = facts.hosts[:_MOST_HOSTS]
    has_gpus = any(rank.gpus.visible for rank in facts.ranks)
    has_clocks = len(facts.hosts) > 1
    headings = ["host", "ranks", "workers", "cores", "templates", "threads per rank"]
    headings += ["GPUs", "GPUs per rank"] * has_gpus + ["clock (ms)"] * has_clocks
    rows: list[list[str]] = []
    for host in hosts:
        indices = facts.list_ranks(host)
        ranks = [facts.ranks[index] for index in indices]
        cores = [list(rank.cores) for rank in ranks]
        threads = [compute_thread_share(cores, index) for index in range(len(cores))]
        row = [
            ranks[0].host_name,
            format_ranges(indices),
            format_ranges([facts.layout.find_worker(index) for index in indices]),
            f"{len(set().union(*cores))} of {ranks[0].host_cores}",
            str(facts.count_templates(host)),
            _format_span(threads),
        ]
        if has_gpus:
            row.append(str(len({gpu for rank in ranks for gpu in rank.gpus.visible})))
            row.append(_format_span([len(rank.gpus.own_numbers) for rank in ranks]))
        if has_clocks:
            clock = facts.clocks[len(rows)]
            offset = round(1000 * clock.seconds, 1) + 0.0
            row.append(f"{offset:+.1f} ± {1000 * clock.error:.1f}" if rows else "")
        rows.append(row)
    rest = len(facts.hosts) - len(hosts)
    _print_table(headings, rows, f"and {format_count(rest, 'host')} more" if rest else "")


def _print_groups(facts: ClusterFacts) -> None:
    """Print the process groups by kind. The numbers are those of the slowest of several groups."""
    spanning = [speed for speed in facts.speeds if facts.spans_hosts(speed.ranks)]
    kinds = {
        "a worker on one host": [speed for speed in facts.speeds if speed not in spanning],
        "a worker that spans hosts": spanning,
        "one rank of each host": [facts.between_hosts] if facts.between_hosts else [],
    }
    rows = []
    for name, speeds in kinds.items():
        measured = [speed for speed in speeds if not speed.failure]
        if not measured:
            continue
        ranks = measured[0].ranks
        row = [name, str(len(measured)), str(len(ranks)), "", "", "", ""]
        row[4] = format_tenths(max(speed.connect for speed in measured))
        if len(ranks) > 1:
            row[3] = choose_backend([facts.ranks[rank].gpus for rank in ranks])
            row[5] = format_number(1000 * max(speed.latency for speed in measured), 2)
            row[6] = format_number(min(speed.bandwidth for speed in measured) / 1e9, 2)
        rows.append(row)
    headings = ["process group", "groups", "ranks", "backend"]
    if rows:
        _print_table([*headings, "connect (s)", "latency (ms)", "bandwidth (GB/s)"], rows)


def _print_table(headings: Sequence[str], rows: Sequence[Sequence[str]], *below: str) -> None:
    table = make_table(list(zip(headings, zip(*rows, strict=True), strict=True)))
    table.columns[0].justify = "left"
    print(format_table("", table, *below).lstrip("\n"))


def format_ranges(numbers: Sequence[int]) -> str:
    """Return numbers as text with ranges, such as ``0-3, 8``."""
    ranges: list[list[int]] = []
    for number in sorted(set(numbers)):
        if ranges and number == ranges[-1][-1] + 1:
            ranges[-1][1:] = [number]
        else:
            ranges.append([number])
    return ", ".join("-".join(map(str, ends)) for ends in ranges)


def _format_span(numbers: Sequence[int]) -> str:
    low = min(numbers)
    high = max(numbers)
    return str(low) if low == high else f"{low}-{high}"


def judge_cluster(facts: ClusterFacts) -> list[Finding]:
    """Return the findings of all probes, the wrong ones first."""
    levels = ("wrong", "look", "ok")
    found = [finding for probe in PROBES for finding in probe(facts)]
    return sorted(found, key=lambda finding: levels.index(finding.level))


def find_spanning_workers(facts: ClusterFacts) -> Iterator[Finding]:
    """Look for workers whose ranks are on several hosts."""
    text = describe_spanning_workers(
        [rank.host for rank in facts.ranks], facts.layout.ranks_per_worker
    )
    if text:
        text, _, advice = text.partition(". ")
        yield look(text, advice)
    elif facts.layout.ranks_per_worker > 1:
        yield ok("The ranks of each worker are on one host")


def find_crowded_cores(facts: ClusterFacts) -> Iterator[Finding]:
    """Look for ranks that share a core, or that cannot use all cores."""
    crowded: dict[str, list[str]] = {}
    bound = []
    for host in facts.hosts:
        ranks = [facts.ranks[index] for index in facts.list_ranks(host)]
        usable = {core for rank in ranks for core in rank.cores}
        name = facts.get_name(host)
        if len(usable) < len(ranks):
            text = f"{format_count(len(ranks), 'rank')} share {format_count(len(usable), 'core')}"
            crowded.setdefault(text, []).append(name)
        elif len(usable) < ranks[0].host_cores and all(
            len(rank.cores) <= rank.threads_per_core for rank in ranks
        ):
            bound.append(name)
    if crowded:
        text = format_list([f"{text} on {format_list(names)}" for text, names in crowded.items()])
        yield look(text, "Start fewer ranks on each host, or request more cores per rank")
    if bound:
        yield look(
            f"Each rank on {format_list(bound)} is bound to one core, and other cores are not used",
            "For srun, request --cpus-per-task and export SRUN_CPUS_PER_TASK. For mpirun, add "
            "--bind-to none",
        )
    if not crowded and not bound:
        yield ok("Each rank has a core or more")


def find_misused_gpus(facts: ClusterFacts) -> Iterator[Finding]:
    """Look for GPUs that no rank uses, or several ranks, or ranks with several GPUs."""
    visible = {gpu for rank in facts.ranks for gpu in rank.gpus.visible}
    own = [gpu for rank in facts.ranks for gpu in rank.gpus.own_ids]
    if not visible:
        return
    if unused := len(visible - set(own)):
        yield look(
            f"{format_count(unused, 'GPU')} of {len(visible)} not used",
            "Start one rank for each GPU",
        )
    if shared := len({gpu for gpu in own if own.count(gpu) > 1}):
        yield look(
            f"{format_count(shared, 'GPU')} of {len(visible)} shared by several ranks",
            "Ranks of a worker that share a GPU communicate with gloo, which is slow. Start one "
            "rank for each GPU",
        )
    if several := max(len(rank.gpus.own_numbers) for rank in facts.ranks) - 1:
        yield look(
            f"Ranks have up to {several + 1} GPUs each. Only parallel=pipeline uses more than the "
            "first",
            "Start one rank for each GPU",
        )
    gpus = [rank.gpus for rank in facts.ranks]
    if has_separated_worker(facts.layout, [rank.host for rank in facts.ranks], gpus):
        text = "Ranks of a worker see different GPUs, so NVLink between these GPUs may not be used"
        yield look(text, "Request srun --gpus-per-node=N --gpu-bind=none")
    if not (unused or shared or several):
        yield ok("Each GPU has one rank")


def find_several_templates(facts: ClusterFacts) -> Iterator[Finding]:
    """Look for hosts on which ranks cannot share a template."""
    counts = {host: facts.count_templates(host) for host in facts.hosts}
    if several := [
        f"{count} on {facts.get_name(host)}" for host, count in counts.items() if count > 1
    ]:
        yield look(
            "Ranks are in different containers or cgroups, so there are several templates: "
            f"{format_list(several)}",
            "Each template needs 540 MB, and the data of prepare. To share one, start one "
            "container for each host",
        )


def compare_groups(facts: ClusterFacts) -> Iterator[Finding]:
    """Look for process groups that fail, and for slow ones."""
    speeds = [*facts.speeds, *([facts.between_hosts] if facts.between_hosts else [])]
    failures: dict[str, list[GroupSpeed]] = {}
    for speed in speeds:
        if speed.failure:  # Equal failures may differ in addresses and ranks.
            failures.setdefault(re.sub(r"\d+", "#", speed.failure), []).append(speed)
    causes = list(failures.values())
    for failed in causes[:_MOST_FAILURES]:
        names = facts.list_names([rank for speed in failed for rank in speed.ranks])
        advice = ""
        if any(facts.spans_hosts(speed.ranks) for speed in failed):
            advice = (
                "Set the network of the process group: export GLOO_SOCKET_IFNAME=..., for GPUs "
                "NCCL_SOCKET_IFNAME"
            )
        count = format_count(len(failed), "process group")
        text = f"{count} failed, on {format_list(names)}: {failed[0].failure}"
        yield wrong(text, advice)
    if rest := sum(map(len, causes[_MOST_FAILURES:])):
        yield wrong(f"{format_count(rest, 'process group')} more failed, for other reasons")
    if causes:
        return
    yield ok("The trainers of all workers have started and communicated")
    of_groups = [speed for speed in facts.speeds if len(speed.ranks) > 1]
    if len(of_groups) >= _MIN_TO_COMPARE:
        median = statistics.median(speed.bandwidth for speed in of_groups)
        slow = [
            f"{facts.layout.find_worker(speed.ranks[0])} on "
            f"{format_list(facts.list_names(speed.ranks))}"
            for speed in of_groups
            if speed.bandwidth < _SLOW_WORKER * median
        ]
        if slow:
            share = f"{100 * _SLOW_WORKER:.0f}% of the median bandwidth of the workers"
            yield look(f"Workers with less than {share}: {format_list(slow)}")


def compare_clocks(facts: ClusterFacts) -> Iterator[Finding]:
    """Look for hosts whose clocks differ from that of the first host."""
    if len(facts.clocks) < 2:
        return
    late = [
        f"{facts.get_name(host)} by {format_number(abs(offset.seconds), 2)} s"
        for host, offset in zip(facts.hosts, facts.clocks, strict=True)
        if abs(offset.seconds) - offset.error > _LARGEST_OFFSET
    ]
    if late:
        yield look(
            f"Clocks differ from {facts.get_name(facts.hosts[0])}: {format_list(late)}",
            "Synchronize them, for example with chrony. Of several failures, the earliest is taken "
            "as the cause",
        )
    else:
        latest = max(offset.seconds + offset.error for offset in facts.clocks)
        earliest = min(offset.seconds - offset.error for offset in facts.clocks)
        most = format_number(1000 * (latest - earliest), 2)
        yield ok(f"The clocks of the hosts differ by at most {most} ms")


def inspect_folder(facts: ClusterFacts) -> Iterator[Finding]:
    """Look for hosts that do not share the run directory, and for slow writes to it."""
    folder = facts.folder
    views = list(zip(facts.hosts, facts.views, strict=True))[1:]
    unseen = [facts.get_name(host) for host, view in views if view.seconds_to_see is None]
    if unseen:
        yield wrong(
            f"{format_list(unseen)} do{'es' if len(unseen) == 1 else ''} not see the files of "
            f"{facts.get_name(facts.hosts[0])} in {folder.path}",
            "Give a --run-dir on a file system that all hosts share",
        )
        return
    for host, view in views:
        if view.write_error:
            yield wrong(f"{facts.get_name(host)} cannot write in {folder.path}: {view.write_error}")
    hidden = [
        facts.get_name(host) for host, view in views if not view.is_seen and not view.write_error
    ]
    slow = [
        facts.get_name(host) for host, view in views if (view.seconds_to_see or 0.0) > _SLOWEST_VIEW
    ]
    if hidden or slow:
        names = format_list([*hidden, *(name for name in slow if name not in hidden)])
        yield look(
            f"Changes in {folder.path} are seen late on other hosts, or from other hosts: {names}",
        )
    if not folder.has_locks:
        yield look(
            f"{folder.path} has no locks: a second run in the same run directory would not be "
            "detected",
            "On Lustre, mount it with -o flock",
        )
    elif unlocked := [facts.get_name(host) for host, view in views if not view.sees_lock]:
        yield look(
            f"Locks in {folder.path} are not seen on {format_list(unlocked)}: a second run from "
            "there in the same run directory would not be detected",
        )
    if folder.write_seconds > _SLOWEST_WRITE:
        text = f"A durable write to {folder.path} takes {format_number(folder.write_seconds, 2)} s"
        yield look(text, "Each loss is written durably. Give a --run-dir on a faster file system")
    elif not hidden and not slow:
        everywhere = ", and all hosts see the same files" if views else ""
        milliseconds = format_number(1000 * folder.write_seconds, 2)
        yield ok(f"A durable write to {folder.path} takes {milliseconds} ms{everywhere}")


def find_job_end(facts: ClusterFacts) -> Iterator[Finding]:
    """Look for the end of the job, before which a run must stop."""
    if facts.job_end_variable:
        yield ok(f"A run stops before its job ends, by {facts.job_end_variable}")
    elif facts.scheduler:
        yield look(
            "No environment variable has the end time of this job: a run may be killed at its time "
            "limit, and lose a part of its work",
            "Add #SBATCH --signal=USR1@120 to the job script, or export HPO_JOB_END_TIME",
        )


PROBES: Sequence[Callable[[ClusterFacts], Iterator[Finding]]] = (
    find_spanning_workers,
    find_crowded_cores,
    find_misused_gpus,
    find_several_templates,
    compare_groups,
    compare_clocks,
    inspect_folder,
    find_job_end,
)
