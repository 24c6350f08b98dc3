"""Judge the facts of `hpo check-cluster`: find what is wrong with a job, and advise."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator

from hpo.check.cluster_facts import ClusterFacts, GroupSpeed
from hpo.check.finding import Finding
from hpo.evaluation.host import has_separated_worker
from hpo.placement import describe_spanning_workers
from hpo.text_format import format_count, format_number

_LARGEST_OFFSET = 0.05  # seconds from the first host; a failure is attributed to the rank that has failed first
_SLOWEST_WRITE = 0.1  # seconds
_SLOWEST_VIEW = 2.0  # seconds
_SLOW_WORKER = 0.5  # share of the median bandwidth
_MIN_TO_COMPARE = 3  # workers
_MOST_FAILURES = 3  # printed


def judge_cluster(facts: ClusterFacts) -> list[Finding]:
    """Return the findings, the wrong ones first."""
    found = [
        *_judge_placement(facts),
        *_judge_cores(facts),
        *_judge_gpus(facts),
        *_judge_templates(facts),
        *_judge_groups(facts),
        *_judge_clocks(facts),
        *_judge_folder(facts),
        *_judge_job_end(facts),
    ]
    levels = ("wrong", "look", "ok")
    return sorted(found, key=lambda finding: levels.index(finding.level))


def _judge_placement(facts: ClusterFacts) -> Iterator[Finding]:
    text = describe_spanning_workers([rank.host for rank in facts.ranks], facts.layout.ranks_per_worker)
    if text:
        text, _, advice = text.partition(". ")
        yield Finding("look", text, advice)
    elif facts.layout.ranks_per_worker > 1:
        yield Finding("ok", "The ranks of each worker are on one host")


def _judge_cores(facts: ClusterFacts) -> Iterator[Finding]:
    crowded: dict[str, list[str]] = {}
    bound = []
    for host in facts.hosts:
        ranks = [facts.ranks[index] for index in facts.list_ranks(host)]
        usable = {core for rank in ranks for core in rank.cores}
        name = facts.get_name(host)
        if len(usable) < len(ranks):
            text = f"{format_count(len(ranks), 'rank')} share {format_count(len(usable), 'core')}"
            crowded.setdefault(text, []).append(name)
        elif len(usable) < ranks[0].host_cores and all(len(rank.cores) <= rank.threads_per_core for rank in ranks):
            bound.append(name)
    if crowded:
        text = _shorten([f"{text} on {_shorten(names)}" for text, names in crowded.items()])
        yield Finding("look", text, "Start fewer ranks on each host, or request more cores per rank")
    if bound:
        yield Finding(
            "look",
            f"Each rank on {_shorten(bound)} is bound to one core, and other cores are not used",
            "For srun, request --cpus-per-task and export SRUN_CPUS_PER_TASK. For mpirun, add --bind-to none",
        )
    if not crowded and not bound:
        yield Finding("ok", "Each rank has a core or more")


def _judge_gpus(facts: ClusterFacts) -> Iterator[Finding]:
    visible = {gpu for rank in facts.ranks for gpu in rank.gpus.visible}
    own = [gpu for rank in facts.ranks for gpu in rank.gpus.own_ids]
    if not visible:
        return
    if unused := len(visible - set(own)):
        yield Finding(
            "look", f"{format_count(unused, 'GPU')} of {len(visible)} not used", "Start one rank for each GPU"
        )
    if shared := len({gpu for gpu in own if own.count(gpu) > 1}):
        yield Finding(
            "look",
            f"{format_count(shared, 'GPU')} of {len(visible)} shared by several ranks",
            "Ranks of a worker that share a GPU communicate with gloo, which is slow. Start one rank for each GPU",
        )
    if several := max(len(rank.gpus.own_numbers) for rank in facts.ranks) - 1:
        text = f"Ranks have up to {several + 1} GPUs each. Only parallel=pipeline uses more than the first"
        yield Finding("look", text, "Start one rank for each GPU")
    gpus = [rank.gpus for rank in facts.ranks]
    if has_separated_worker(facts.layout, [rank.host for rank in facts.ranks], gpus):
        text = "Ranks of a worker see different GPUs, so NVLink between these GPUs may not be used"
        yield Finding("look", text, "Request srun --gpus-per-node=N --gpu-bind=none")
    if not (unused or shared or several):
        yield Finding("ok", "Each GPU has one rank")


def _judge_templates(facts: ClusterFacts) -> Iterator[Finding]:
    several = []
    for host in facts.hosts:
        count = facts.count_templates(host)
        several += [f"{count} on {facts.get_name(host)}"] * (count > 1)
    if several:
        yield Finding(
            "look",
            f"Ranks are in different containers or cgroups, so there are several templates: {_shorten(several)}",
            "Each template needs 540 MB, and the data of prepare. To share one, start one container for each host",
        )


def _judge_groups(facts: ClusterFacts) -> Iterator[Finding]:
    speeds = [*facts.speeds, *([facts.between_hosts] if facts.between_hosts else [])]
    failures: dict[str, list[GroupSpeed]] = {}
    for speed in speeds:
        if speed.failure:  # Equal failures may differ in addresses and ranks.
            failures.setdefault(re.sub(r"\d+", "#", speed.failure), []).append(speed)
    causes = list(failures.values())
    for failed in causes[:_MOST_FAILURES]:
        names, failure, advice = facts.list_names([rank for one in failed for rank in one.ranks]), failed[0].failure, ""
        if any(facts.spans_hosts(one.ranks) for one in failed):
            advice = "Set the network of the process group: export GLOO_SOCKET_IFNAME=..., for GPUs NCCL_SOCKET_IFNAME"
        text = f"{format_count(len(failed), 'process group')} failed, on {_shorten(names)}: {failure}"
        yield Finding("wrong", text, advice)
    if rest := sum(map(len, causes[_MOST_FAILURES:])):
        yield Finding("wrong", f"{format_count(rest, 'process group')} more failed, for other reasons")
    if causes:
        return
    yield Finding("ok", "The trainers of all workers have started and communicated")
    of_groups = [speed for speed in facts.speeds if len(speed.ranks) > 1]
    if len(of_groups) >= _MIN_TO_COMPARE:
        median = statistics.median(speed.bandwidth for speed in of_groups)
        slow = [
            f"{facts.layout.find_worker(speed.ranks[0])} on {_shorten(facts.list_names(speed.ranks))}"
            for speed in of_groups
            if speed.bandwidth < _SLOW_WORKER * median
        ]
        if slow:
            share = f"{100 * _SLOW_WORKER:.0f}% of the median bandwidth of the workers"
            yield Finding("look", f"Workers with less than {share}: {_shorten(slow)}")


def _judge_clocks(facts: ClusterFacts) -> Iterator[Finding]:
    if len(facts.clocks) < 2:
        return
    late = [
        f"{facts.get_name(host)} by {format_number(abs(offset.seconds), 2)} s"
        for host, offset in zip(facts.hosts, facts.clocks, strict=True)
        if abs(offset.seconds) - offset.error > _LARGEST_OFFSET
    ]
    if late:
        yield Finding(
            "look",
            f"Clocks differ from {facts.get_name(facts.hosts[0])}: {_shorten(late)}",
            "Synchronize them, for example with chrony. Of several failures, the earliest is taken as the cause",
        )
    else:
        latest = max(offset.seconds + offset.error for offset in facts.clocks)
        earliest = min(offset.seconds - offset.error for offset in facts.clocks)
        most = format_number(1000 * (latest - earliest), 2)
        yield Finding("ok", f"The clocks of the hosts differ by at most {most} ms")


def _judge_folder(facts: ClusterFacts) -> Iterator[Finding]:
    folder, views = facts.folder, list(zip(facts.hosts, facts.views, strict=True))[1:]
    unseen = [facts.get_name(host) for host, view in views if view.seconds_to_see is None]
    if unseen:
        yield Finding(
            "wrong",
            f"{_shorten(unseen)} do{'es' if len(unseen) == 1 else ''} not see the files of "
            f"{facts.get_name(facts.hosts[0])} in {folder.path}",
            "Give a --run-dir on a file system that all hosts share",
        )
        return
    for host, view in views:
        if view.write_error:
            yield Finding("wrong", f"{facts.get_name(host)} cannot write in {folder.path}: {view.write_error}")
    hidden = [facts.get_name(host) for host, view in views if not view.is_seen and not view.write_error]
    slow = [facts.get_name(host) for host, view in views if (view.seconds_to_see or 0.0) > _SLOWEST_VIEW]
    if hidden or slow:
        names = _shorten([*hidden, *(name for name in slow if name not in hidden)])
        yield Finding("look", f"Changes in {folder.path} are seen late on other hosts, or from other hosts: {names}")
    if not folder.has_locks:
        yield Finding(
            "look",
            f"{folder.path} has no locks: a second run in the same run directory would not be detected",
            "On Lustre, mount it with -o flock",
        )
    elif unlocked := [facts.get_name(host) for host, view in views if not view.sees_lock]:
        yield Finding(
            "look",
            f"Locks in {folder.path} are not seen on {_shorten(unlocked)}: a second run from there in the same run "
            "directory would not be detected",
        )
    if folder.write_seconds > _SLOWEST_WRITE:
        text = f"A durable write to {folder.path} takes {format_number(folder.write_seconds, 2)} s"
        yield Finding("look", text, "Each loss is written durably. Give a --run-dir on a faster file system")
    elif not hidden and not slow:
        everywhere = ", and all hosts see the same files" if views else ""
        milliseconds = format_number(1000 * folder.write_seconds, 2)
        yield Finding("ok", f"A durable write to {folder.path} takes {milliseconds} ms{everywhere}")


def _judge_job_end(facts: ClusterFacts) -> Iterator[Finding]:
    if facts.job_end_variable:
        yield Finding("ok", f"A run stops before its job ends, by {facts.job_end_variable}")
    elif facts.scheduler:
        yield Finding(
            "look",
            "No variable has the end of this job: a run may be killed at its time limit, and lose a part of its work",
            "Add #SBATCH --signal=USR1@120 to the job script, or export HPO_JOB_END_TIME",
        )


def _shorten(texts: list[str], most: int = 4) -> str:
    """Return the texts separated by commas; only the first ones if there are many."""
    rest = f" and {len(texts) - most} more" if len(texts) > most else ""
    return ", ".join(texts[:most]) + rest
