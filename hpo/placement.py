"""Place workers on hosts, if possible each worker on one host."""

from __future__ import annotations

from collections.abc import Sequence

from hpo.text_format import format_count


def order_ranks(hosts: Sequence[int], ranks_per_worker: int) -> list[int]:
    """Return all ranks in an order in which as few workers as possible span hosts. Rank 0 stays first.

    Launchers number ranks in different ways: with SLURM's ``--distribution=cyclic``, consecutive
    ranks are on different hosts, and ``srun -N3 -n6`` starts 4, 1 and 1 ranks. Each host gets as
    many whole workers as it has ranks for. The remaining ranks of all hosts form the other workers.

    Args:
        hosts: A number for the host of each rank: equal numbers mean the same host.
        ranks_per_worker: Number of consecutive ranks, in the returned order, that form a worker.
    """
    ranks_on_host: dict[int, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks_on_host.setdefault(host, []).append(rank)
    whole, rest = [], []
    for ranks in ranks_on_host.values():
        end = len(ranks) - len(ranks) % ranks_per_worker
        whole += ranks[:end]
        rest += ranks[end:]
    return rest + whole if rest[:1] == [0] else whole + rest


def describe_spanning_workers(hosts: Sequence[int], ranks_per_worker: int) -> str:
    """Return which workers span hosts, and how to avoid it if possible; an empty text if no worker does.

    Args:
        hosts: A number for the host of each rank, in the order of `order_ranks`.
        ranks_per_worker: Number of consecutive ranks that form a worker.
    """
    starts = range(0, len(hosts), ranks_per_worker)
    spanning = sum(len(set(hosts[start : start + ranks_per_worker])) > 1 for start in starts)
    if not spanning:
        return ""
    text = f"{format_count(spanning, 'worker')} of {len(starts)} span{'s' if spanning == 1 else ''} several hosts"
    if max(map(hosts.count, hosts)) < ranks_per_worker:
        return text
    return f"{text}. To avoid this, start a multiple of {ranks_per_worker} ranks on each host"
