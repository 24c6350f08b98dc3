"""Print what `hpo check-cluster` has found: the job, a table of the hosts, and a table of the process groups."""

from __future__ import annotations

from collections.abc import Sequence

from hpo.check.cluster_facts import ClusterFacts, GroupSpeed
from hpo.text_format import format_count, format_number, format_tenths, make_printable
from hpo.views.table_format import format_table, make_table

_MOST_HOSTS = 32  # rows of the table


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
    ranks = [facts.list_ranks(host) for host in hosts]
    own = [[facts.ranks[index] for index in indices] for indices in ranks]
    columns = [
        ("host", [facts.get_name(host) for host in hosts]),
        ("ranks", list(map(format_ranges, ranks))),
        ("workers", [format_ranges([facts.layout.find_worker(index) for index in indices]) for indices in ranks]),
        ("cores", [f"{len({c for rank in on for c in rank.cores})} of {on[0].host_cores}" for on in own]),
        ("templates", [str(facts.count_templates(host)) for host in hosts]),
        ("threads per rank", [_format_span(facts.compute_threads(host)) for host in hosts]),
    ]
    if any(rank.gpus.visible for rank in facts.ranks):
        columns += [
            ("GPUs", [str(len({gpu for rank in on for gpu in rank.gpus.visible})) for on in own]),
            ("GPUs per rank", [_format_span([len(rank.gpus.own_numbers) for rank in on]) for on in own]),
        ]
    if len(facts.hosts) > 1:
        clocks = [
            f"{round(1000 * clock.seconds, 1) + 0.0:+.1f} ± {1000 * clock.error:.1f}"
            for clock in facts.clocks[: len(hosts)]
        ]
        columns.append(("clock (ms)", ["", *clocks[1:]]))
    table = make_table(columns)
    table.columns[0].justify = "left"
    rest = len(facts.hosts) - len(hosts)
    print(format_table("", table, *([f"and {format_count(rest, 'host')} more"] if rest else [])).lstrip("\n"))


def _print_groups(facts: ClusterFacts) -> None:
    between = [facts.between_hosts] if facts.between_hosts else []
    kinds = [
        ("a worker on one host", [speed for speed in facts.speeds if not facts.spans_hosts(speed.ranks)]),
        ("a worker that spans hosts", [speed for speed in facts.speeds if facts.spans_hosts(speed.ranks)]),
        ("one rank of each host", between),
    ]
    of_kinds = [(name, [speed for speed in speeds if not speed.failure]) for name, speeds in kinds]
    rows = [_make_group_row(facts, name, measured) for name, measured in of_kinds if measured]
    if not rows:
        return
    headings = ("process group", "groups", "ranks", "backend", "connect (s)", "latency (ms)", "bandwidth (GB/s)")
    table = make_table(list(zip(headings, zip(*rows, strict=True), strict=True)))
    table.columns[0].justify = "left"
    print(format_table("", table).lstrip("\n"))


def _make_group_row(facts: ClusterFacts, name: str, speeds: Sequence[GroupSpeed]) -> tuple[str, ...]:
    """Return the cells of a row: the numbers are those of the slowest of several process groups."""
    ranks = speeds[0].ranks
    is_group = len(ranks) > 1
    return (
        name,
        str(len(speeds)),
        str(len(ranks)),
        facts.choose_backend(ranks) if is_group else "",
        format_tenths(max(speed.connect for speed in speeds)),
        format_number(1000 * max(speed.latency for speed in speeds), 2) if is_group else "",
        format_number(min(speed.bandwidth for speed in speeds) / 1e9, 2) if is_group else "",
    )


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
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low}-{high}"
