"""Test which GPUs a rank gets, and the variables that show them to its trainer. No GPU is needed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hpo.evaluation.devices import Gpus, assign_gpus, choose_backend, make_gpu_variables
from hpo.evaluation.torchrun import make_torchrun_variables


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
def test_assign_gpus_divides_visible_gpus(gpus_of_ranks: list[tuple[str, ...]], shares: list[list[int]]) -> None:
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
        assert make_gpu_variables(peers, rank, environment) == ({"CUDA_VISIBLE_DEVICES": shown}, own[rank])


def test_gpu_variables_with_different_gpus_keep_own() -> None:
    peers = [Gpus(("a", "b"), (0, 1)), Gpus(("c",), (0,))]
    assert [make_gpu_variables(peers, rank, {}) for rank in range(2)] == [({}, [0, 1]), ({}, [0])]
    assert make_gpu_variables([Gpus(), Gpus()], 1, {"CUDA_VISIBLE_DEVICES": ""}) == ({}, [])


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
        assert {name: found[name] for name in ("RANK", "WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE")} == {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(hosts)),
            "ROLE_RANK": str(rank),
            "ROLE_WORLD_SIZE": str(len(hosts)),
        }
        assert (found["LOCAL_RANK"], found["LOCAL_WORLD_SIZE"]) == (str(local[rank]), str(sizes[rank]))
        assert (found["GROUP_RANK"], found["GROUP_WORLD_SIZE"]) == (str(nodes[rank]), str(len(set(hosts))))
        assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("10.0.0.1", "1234")
        assert found["TORCHELASTIC_USE_AGENT_STORE"] == "True"


def test_torchrun_variables_are_complete() -> None:
    """The expected names are read from the source code of torchrun's agent."""
    from torch.distributed.elastic.agent.server import local_elastic_agent

    assert local_elastic_agent.__file__ is not None
    source = Path(local_elastic_agent.__file__).read_text()
    names = set(re.findall(r'"([A-Z_]+)":', source[source.index("worker_env = {") :].partition("}")[0]))
    assert len(names) > 10
    assert names - {"TORCH_NCCL_ASYNC_ERROR_HANDLING"} <= make_torchrun_variables(0, [0], ("127.0.0.1", 1)).keys()
