"""Test on which hosts the ranks of a worker are."""

from __future__ import annotations

import random

import pytest

from hpo.errors import UsageError
from hpo.evaluation.host import check_gpus
from hpo.layout import describe_spanning_workers, order_ranks


@pytest.mark.parametrize(
    ("hosts", "size", "order"),
    [
        ("aabb", 2, [0, 1, 2, 3]),
        ("abab", 2, [0, 2, 1, 3]),
        ("abcabc", 2, [0, 3, 1, 4, 2, 5]),
        ("aaaabc", 2, [0, 1, 2, 3, 4, 5]),
        ("abcccc", 2, [0, 1, 2, 3, 4, 5]),
        ("acccbc", 2, [0, 4, 1, 2, 3, 5]),
        ("aaabbb", 2, [0, 1, 3, 4, 2, 5]),
        ("abab", 4, [0, 2, 1, 3]),
        ("abba", 1, [0, 3, 1, 2]),
    ],
)
def test_order_ranks_fills_hosts_with_whole_workers(
    hosts: str, size: int, order: list[int]
) -> None:
    assert order_ranks([ord(host) for host in hosts], size) == order


def test_order_ranks_has_fewest_spanning_workers() -> None:
    """No order has fewer: a host with k ranks holds at most k // size whole workers."""
    chance = random.Random(0)
    for _ in range(300):
        size, workers = chance.randint(1, 4), chance.randint(1, 8)
        hosts = [chance.randint(0, 4) for _ in range(size * workers)]
        order = order_ranks(hosts, size)
        assert (order[0], sorted(order)) == (0, list(range(size * workers)))
        groups = [
            {hosts[rank] for rank in order[start : start + size]}
            for start in range(0, len(order), size)
        ]
        spanning = sum(len(group) > 1 for group in groups)
        assert spanning == workers - sum(hosts.count(host) // size for host in set(hosts))
        text = describe_spanning_workers([hosts[rank] for rank in order], size)
        assert (f"{spanning} worker" in text) if spanning else not text


@pytest.mark.parametrize(
    ("hosts", "size", "text"),
    [
        ([0, 0, 1, 1], 2, ""),
        (
            [0, 0, 0, 0, 1, 2],
            2,
            "1 worker of 3 spans several hosts. To avoid this, start a multiple of 2 ranks on ",
        ),
        ([0, 0, 1, 1, 2, 2, 3, 3], 4, "2 workers of 2 span several hosts"),
    ],
)
def test_spanning_workers_are_described(hosts: list[int], size: int, text: str) -> None:
    described = describe_spanning_workers(hosts, size)
    assert described.startswith(text)
    assert described.endswith("each host" if "avoid" in text else text)


def test_rank_without_gpu_is_refused() -> None:
    check_gpus([("a", 2, ""), ("b", 1, "")])
    check_gpus([("a", 0, ""), ("b", 0, "")])
    with pytest.raises(
        UsageError,
        match=r"^1 rank on b sees no GPU, but ranks on a do\. Request GPUs for all ranks",
    ):
        check_gpus([("a", 2, ""), ("a", 2, ""), ("b", 0, "")])
    with pytest.raises(UsageError, match=r"^3 ranks on a, b see no GPU, but ranks on a do"):
        check_gpus([("a", 2, ""), ("a", 0, ""), ("b", 0, ""), ("b", 0, "")])
    with pytest.raises(
        UsageError,
        match=r"use the GPUs of each host\. b: no driver\. To compute on CPUs: export CUDA_V",
    ):
        check_gpus([("a", 2, ""), ("b", 0, "no driver"), ("b", 0, "no driver")])
