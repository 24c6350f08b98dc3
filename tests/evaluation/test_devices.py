"""Test which GPUs a rank gets, and the variables that show them to its trainer; without GPUs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hpo.evaluation.host import (
    Gpus,
    assign_gpus,
    choose_backend,
    describe_gpus,
    has_separated_worker,
    make_gpu_variables,
)
from hpo.evaluation.rank_group import make_torchrun_variables
from hpo.layout import Layout


@pytest.mark.parametrize(
    ("gpus_of_ranks", "shares"),
    [
        ([("a", "b")] * 2, [[0], [1]]),
        ([("a", "b", "c", "d")] * 2, [[0, 1], [2, 3]]),
        ([("a", "b", "c")] * 2, [[0], [1]]),  # One GPU is left over.
        ([("a", "b")] * 4, [[0], [1], [0], [1]]),
        ([("a",), ("b",)], [[0], [0]]),  # Each rank sees its own GPU.
        ([("a", "b"), ("c", "d")], [[0, 1], [0, 1]]),
        ([("a", "b"), ("c", "d"), ("a", "b"), ("c", "d")], [[0], [0], [1], [1]]),
    ],
)
def test_assign_gpus_divides_visible_gpus(
    gpus_of_ranks: list[tuple[str, ...]], shares: list[list[int]]
) -> None:
    assert [list(assign_gpus(gpus_of_ranks, rank)) for rank in range(len(gpus_of_ranks))] == shares


FOUR = ("a", "b", "c", "d")


@pytest.mark.parametrize(
    ("gpus", "backend"),
    [
        ([Gpus()], "gloo"),
        ([Gpus(("a",), (0,))], "nccl"),
        ([Gpus(FOUR, (0, 1)), Gpus(FOUR, (2, 3))], "nccl"),
        ([Gpus(("a", "b"), (0,)), Gpus(("c", "d"), (0,))], "nccl"),  # on two hosts
        ([Gpus(("a", "b"), (0,)), Gpus(("a", "b"), (0,))], "gloo"),  # The ranks share one GPU.
        ([Gpus(("a",), (0,)), Gpus()], "gloo"),
    ],
)
def test_choose_backend_is_nccl_if_each_rank_has_a_gpu(gpus: list[Gpus], backend: str) -> None:
    assert choose_backend(gpus) == backend


@pytest.mark.parametrize(
    ("numbers", "visible", "shown", "own"),
    [
        ([(0,), (1,)], None, "0,1", [[0], [1]]),
        ([(2, 3), (0, 1)], None, "2,0,3,1", [[0, 2], [1, 3]]),
        ([(3,), (1,)], None, "3,1", [[0], [1]]),  # cuda:LOCAL_RANK is a rank's own GPU.
        ([(1,), (1,)], None, "1", [[0], [0]]),  # The ranks share one GPU.
        ([(2,), (0,)], "7,5,3,1", "3,7", [[0], [1]]),
        ([(1,)], "GPU-x,GPU-y,GPU-z,MIG-w", "GPU-y", [[0]]),
        ([(1,)], "7, 5,", "5", [[0]]),
    ],
)
def test_gpu_variables_list_worker_gpus_in_rank_order(
    numbers: list[tuple[int, ...]], visible: str | None, shown: str, own: list[list[int]]
) -> None:
    seen = FOUR if visible is None else FOUR[: len([name for name in visible.split(",") if name])]
    peers = [Gpus(seen, of_rank) for of_rank in numbers]
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    for rank in range(len(peers)):
        assert make_gpu_variables(peers, rank, environment) == (
            {"CUDA_VISIBLE_DEVICES": shown},
            own[rank],
        )


def test_gpu_variables_with_different_gpus_keep_own() -> None:
    peers = [Gpus(("a", "b"), (0, 1)), Gpus(("c",), (0,))]
    assert [make_gpu_variables(peers, rank, {}) for rank in range(2)] == [({}, [0, 1]), ({}, [0])]
    assert make_gpu_variables([Gpus(), Gpus()], 1, {"CUDA_VISIBLE_DEVICES": ""}) == ({}, [])


def test_gpu_variables_of_other_vendors() -> None:
    amd = [
        Gpus(FOUR, (number,), variables=("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"))
        for number in (2, 1)
    ]
    assert make_gpu_variables(amd, 0, {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}) == (
        {"HIP_VISIBLE_DEVICES": "6,5"},
        [0],
    )
    both = {"HIP_VISIBLE_DEVICES": "0,1,2,3", "CUDA_VISIBLE_DEVICES": "4,5,6,7"}
    assert make_gpu_variables(amd, 1, both) == ({"HIP_VISIBLE_DEVICES": "2,1"}, [1])
    intel = [
        Gpus(FOUR, (number,), variables=("ZE_AFFINITY_MASK",), backend="xccl") for number in (0, 1)
    ]
    assert make_gpu_variables(intel, 1, {"ZE_AFFINITY_MASK": "0.0,0.1,1.0,1.1"}) == (
        {"ZE_AFFINITY_MASK": "0.0,0.1"},
        [1],
    )
    assert choose_backend(intel) == "xccl"
    unknown = [Gpus(FOUR, (number,), variables=()) for number in (0, 1)]
    assert make_gpu_variables(unknown, 1, {}) == ({}, [1])


def test_slices_of_a_gpu_use_gloo_between_ranks() -> None:
    names = ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "NVIDIA A100-SXM4-40GB MIG 1g.5gb")
    slices = [Gpus(("MIG-a", "MIG-b"), (number,), names) for number in (0, 1)]
    assert (choose_backend(slices), choose_backend(slices[:1])) == ("gloo", "nccl")


@pytest.mark.parametrize(
    ("gpus", "backends", "text"),
    [
        ([Gpus()] * 2, ["gloo"], "on CPUs"),
        ([Gpus(FOUR, (0,), ("H100",) * 4)], ["nccl"], "1 GPU (H100), 1 per rank, nccl"),
        (
            [Gpus(("a",), (0,), ("H100",), is_shared=True)] * 2,
            ["gloo", "gloo"],
            "1 GPU (H100), several ranks on each, gloo",
        ),
        ([Gpus(FOUR, (0, 1)), Gpus(FOUR, (2, 3))], ["nccl"], "4 GPUs, 2 per rank, nccl"),
    ],
)
def test_gpus_of_a_run_are_described(gpus: list[Gpus], backends: list[str], text: str) -> None:
    assert describe_gpus(gpus, backends) == text


@pytest.mark.parametrize(
    ("hosts", "gpus", "separated"),
    [
        ([0, 0], [Gpus(("a",), (0,)), Gpus(("b",), (0,))], True),
        ([0, 1], [Gpus(("a",), (0,)), Gpus(("b",), (0,))], False),
        ([0, 0], [Gpus(FOUR, (0,)), Gpus(FOUR, (1,))], False),
    ],
)
def test_separated_gpus_of_a_worker_are_found(
    hosts: list[int], gpus: list[Gpus], separated: bool
) -> None:
    assert has_separated_worker(Layout(2, 2, 1), hosts, gpus) is separated


@pytest.mark.parametrize(
    ("hosts", "local", "sizes", "nodes"),
    [
        ([3], [0], [1], [0]),
        ([0, 0, 4, 4], [0, 1, 0, 1], [2, 2, 2, 2], [0, 0, 1, 1]),
        ([2, 0, 2, 2], [0, 0, 1, 2], [3, 1, 3, 3], [0, 1, 0, 0]),
    ],
)
def test_torchrun_variables_have_values_of_torchrun(
    hosts: list[int], local: list[int], sizes: list[int], nodes: list[int]
) -> None:
    for rank in range(len(hosts)):
        found = make_torchrun_variables(rank, hosts, ("10.0.0.1", 1234))
        assert {
            name: found[name] for name in ("RANK", "WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE")
        } == {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(hosts)),
            "ROLE_RANK": str(rank),
            "ROLE_WORLD_SIZE": str(len(hosts)),
        }
        assert (found["LOCAL_RANK"], found["LOCAL_WORLD_SIZE"]) == (
            str(local[rank]),
            str(sizes[rank]),
        )
        assert (found["GROUP_RANK"], found["GROUP_WORLD_SIZE"]) == (
            str(nodes[rank]),
            str(len(set(hosts))),
        )
        assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("10.0.0.1", "1234")
        assert found["TORCHELASTIC_USE_AGENT_STORE"] == "True"


def test_torchrun_variables_are_complete() -> None:
    """The expected names are read from the source code of torchrun's agent."""
    from torch.distributed.elastic.agent.server import local_elastic_agent

    assert local_elastic_agent.__file__ is not None
    source = Path(local_elastic_agent.__file__).read_text()
    names = set(
        re.findall(r'"([A-Z_]+)":', source[source.index("worker_env = {") :].partition("}")[0])
    )
    assert len(names) > 10
    assert (
        names - {"TORCH_NCCL_ASYNC_ERROR_HANDLING"}
        <= make_torchrun_variables(0, [0], ("127.0.0.1", 1)).keys()
    )
