"""Communicators, sharing, workers and training on real MPI jobs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpo.layout import usable_cores
from tests.support.launch import PROGRAMS, SEARCHES, Mpi


def results(mpi: Mpi, ranks: int, program: str, folder: Path) -> list[dict[str, Any]]:
    job = mpi.run(ranks, "-m", "mpi4py", PROGRAMS / program, cwd=folder)
    assert (job.returncode, job.stderr) == (0, "")
    lines = [json.loads(line) for line in job.stdout.splitlines()]
    assert sorted(line["rank"] for line in lines) == list(range(ranks))
    return sorted(lines, key=lambda line: int(line["rank"]))


@pytest.mark.parametrize("ranks", [1, 8])
def test_communicators_deliver_and_ranks_that_wait_sleep(each_mpi: Mpi, ranks: int, tmp_path: Path) -> None:
    lines = results(each_mpi, ranks, "communication.py", tmp_path)
    for line in lines[1:]:
        assert max(line["cpu"].values()) < 0.05, line["cpu"]
    assert max(line["at_once"] for line in lines) <= 2
    if ranks > 1:
        assert len({line["inode"] for line in lines}) == 1, "one copy per host, not one per rank"
        assert lines[0]["inode"].split(":")[1][2:] not in ("", "0"), "not a file"


def test_what_is_prepared_comes_back_as_it_was() -> None:
    import torch
    from mpi4py import MPI

    from hpo.ranks.communicator import SleepingComm
    from hpo.ranks.sharing import Shared

    base = torch.arange(24.0).reshape(2, 3, 4)
    tensors = {
        "plain": base,
        "channels last": torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "transposed": base.transpose(0, 2),
        "sliced": base[:, ::2, 1:3],
        "one": base[:1, 2, 1],
        "none": base[:0],
        "scalar": torch.tensor(3),
        "expanded": torch.ones(3, 1).expand(3, 4),
        "half": base.bfloat16(),
        "true": base > 3,
        "conjugate": torch.tensor([1 + 2j, 3 - 1j]).conj(),
        "imaginary": torch.tensor([1 + 2j, 3 - 1j]).conj().imag,
        "trained": base.clone().requires_grad_(),
    }
    shared = Shared(tensors, SleepingComm(MPI.COMM_SELF))
    with shared:
        for copy in (shared.load(), shared.load()):
            for name, tensor in tensors.items():
                assert copy[name].equal(tensor), name
                assert (copy[name].dtype, copy[name].requires_grad) == (tensor.dtype, tensor.requires_grad), name
            assert copy["channels last"].is_contiguous(memory_format=torch.channels_last)
            copy["plain"].zero_()
            copy["one"].zero_()


def test_a_worker_of_any_size_trains_as_one_process_would(mpi: Mpi, tmp_path: Path) -> None:
    lines = results(mpi, 6, "training.py", tmp_path)
    assert [line["size"] for line in lines] == [1, 2, 2, 3, 3, 3]
    for line in lines:
        peers = [peer for peer in lines if peer["size"] == line["size"]]
        total = float(sum(peer["rank"] for peer in peers))
        assert line["group"] == [line["size"], peers.index(line), "gloo", total]
        assert line["losses"] == line["again"], "the same hyperparameters and seed give the same loss"
        assert line["losses"] == peers[0]["losses"], "the same loss on every rank"
        assert line["losses"] == pytest.approx(line["by_the_book"], abs=1e-5)
        assert line["losses"][-1] == pytest.approx(line["own_loss"], abs=1e-6)
        assert line["accuracy"] == pytest.approx(line["own_accuracy"], abs=1e-6)
        assert line["epochs_without_progress"] == 1 + 4
        assert line["threads"] == max(1, len(usable_cores()) // len(lines)), "the ranks share the cores"
    losses = lines[0]["losses"]
    assert losses[-1] < losses[0] - 0.1, "it learns"


def test_ranks_that_exchange_tensors_come_out_when_they_are_cut(mpi: Mpi, tmp_path: Path) -> None:
    for line in results(mpi, 4, "cutting.py", tmp_path):
        assert len(line["comes_out_after"]) == 32
        assert max(line["comes_out_after"]) < 10, "nobody has waited for a timeout, which is 20 s"


def test_a_signal_overrules_the_end_by_a_target_which_is_forgotten_for_what_comes_after(
    each_mpi: Mpi, tmp_path: Path
) -> None:
    for line in results(each_mpi, 3, "overruling.py", tmp_path):
        assert line["seen"] == ["the target is reached", None, None, "another target", "SIGINT", "SIGINT"]


def test_training_leaves_torchs_compiler_alone_until_it_is_used(mpi: Mpi, tmp_path: Path) -> None:
    for line in results(mpi, 2, "compiling.py", tmp_path):
        assert line["after_training"] is False
        assert line["after_compiling"] is True
        assert line["graphs"] >= 1
        assert line["difference"] == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize(
    ("cores_of_ranks", "threads"),
    [
        ([[0, 1]] * 8, [1] * 8),
        ([[0, 1, 2, 3]] * 2, [2, 2]),
        ([[0, 1, 2, 3], [4, 5, 6, 7]], [4, 4]),  # bound to cores of their own
        ([[0, 1, 2], [2, 3]], [2, 1]),
        ([[0, 1, 2]] * 3, [1, 1, 1]),
        ([[5]], [1]),
    ],
)
def test_cores_are_shared_among_the_ranks_that_may_use_them(
    cores_of_ranks: list[list[int]], threads: list[int]
) -> None:
    from hpo.evaluation.host import threads_of

    assert [threads_of(cores_of_ranks, rank) for rank in range(len(cores_of_ranks))] == threads


def test_ranks_sleep_while_they_wait_for_their_leader_and_for_the_end(each_mpi: Mpi, tmp_path: Path) -> None:
    options = ["--evaluations", 4, "--islands", 1, "--set", f"folder={tmp_path}", "--run-dir", tmp_path / "run"]
    job = each_mpi.run(4, "run_islands.py", SEARCHES / "waiting.py", *options, cwd=Path(__file__).parents[1])
    assert job.returncode == 0, job.stderr
    notes = {
        name: [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        for name in ("0-0", "0-1", "1-0", "1-1")
    }
    assert [note["event"] for note in notes["1-1"]] == ["start", "end"] * 3 + ["exit"]
    for name, event, seconds in (("0-1", "exit", 5.9), ("1-0", "exit", 3.5), ("1-1", "exit", 3.5)):
        last, end = notes[name][-2:]
        assert (last["event"], end["event"]) == ("end", event)
        wall, cpu = end["wall"] - last["wall"], end["cpu"] - last["cpu"]
        assert wall > seconds
        assert cpu / wall < 0.05, f"{name} used {cpu:.2f} s of CPU in {wall:.2f} s of waiting"
