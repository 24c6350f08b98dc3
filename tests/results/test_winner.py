"""Test the best evaluation of a run: its saved weights, the test of its network, and `hpo best`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from optuna.trial import TrialState

from hpo import Prediction, TextSample
from hpo.errors import UsageError
from hpo.results.reader import RunReader
from hpo.results.recommendation import (
    FailedTestError,
    RunTest,
    find_winner,
    read_winner_test,
    run_winner_test,
)
from hpo.run.first_rank import finalize_run
from hpo.store.evaluations import Assignment, rank_evaluations
from hpo.store.record import Record
from hpo.store.weights import read_weights
from hpo.trainer.search_file import load_search_file
from tests.support.checkpoints import make_drafts
from tests.support.in_process_template import load_problem, make_run_test
from tests.support.launch import SEARCHES, run_hpo
from tests.support.runs import add_evaluation, make_run
from tests.support.writer_stubs import LeaderStub, make_writer

WEIGHING = SEARCHES / "weighing.py"


def begin_evaluation(leader: LeaderStub, lr: float) -> Assignment:
    return leader.begin({"layers": 1, "activation": "relu", "lr": lr, "gamma": 0.9})


def make_leaders(folder: Path, count: int) -> list[LeaderStub]:
    """Return stubs for `count` leaders of a run. All of them send weights to the same writer."""
    writer = make_writer(Record(folder / "study.log", folder.name), folder)
    return [LeaderStub(writer, settings={"epochs": 4}) for _ in range(count)]


def make_leader(folder: Path) -> LeaderStub:
    (leader,) = make_leaders(folder, 1)
    return leader


def wrap_test(test: Callable[..., Any]) -> RunTest:
    """Return a function that tests a network as a trainer does.

    It calls `test` instead of the test of the search file.
    """
    search = load_search_file(WEIGHING).bind_settings([])
    return make_run_test(replace(search, file=replace(search.file, test=test)))


def read_kept(folder: Path) -> tuple[int, float]:
    weights = read_weights(folder / "best.safetensors")
    assert weights is not None
    return weights.trial, weights.state["w"].item()


def make_test_content(metrics: dict[str, float]) -> dict[str, Any]:
    """Return the content of test.json after the network of trial 0 was tested once."""
    return {
        "trial": 0,
        "confirmation": None,
        "times": 1,
        "metrics": metrics,
        "predictions": [],
        "texts": [],
    }


def test_best_weights_are_kept_over_all_leaders(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    make_run(folder)
    one, other = make_leaders(folder, 2)
    assignments = [
        begin_evaluation(leader, lr)
        for leader, lr in ((one, 0.1), (other, 0.2), (one, 0.3), (one, 0.4))
    ]
    assert read_weights(folder / "best.safetensors") is None
    one.complete(assignments[2], 0.5, {"w": torch.tensor([1.0])})
    assert read_kept(folder) == (2, 1.0)
    # Both losses are lower than the saved one. The second trial completes before the first is
    # saved.
    assert one.is_wanted(assignments[0], 0.4)
    better = make_drafts({"w": torch.tensor([3.0])})
    other.complete(assignments[1], 0.3, {"w": torch.tensor([4.0])})
    one.recorder.notify.complete(assignments[0], 0.4, 1.0, {})
    one.keeper.save_weights(assignments[0], better)
    assert read_kept(folder) == (1, 4.0)
    assert not one.is_wanted(assignments[3], 0.3), "an equal loss is not better"
    assert sorted(path.name for path in folder.iterdir()) == [
        "best.safetensors",
        "run.json",
        "study.log",
    ]


def test_best_weights_of_equal_losses_are_of_the_first_trial(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    make_run(folder)
    leader = make_leader(folder)
    first, second = begin_evaluation(leader, 0.1), begin_evaluation(leader, 0.2)
    leader.complete(second, 0.5, {"w": torch.tensor([2.0])})
    leader.complete(first, 0.5, {"w": torch.tensor([1.0])})
    assert read_kept(folder) == (0, 1.0)
    assert rank_evaluations(RunReader(folder).read_evaluations(), 1)[0].trial == 0


def test_offered_weights_are_copied_at_once(tmp_path: Path) -> None:
    weights = torch.ones(2, 3).t()
    drafts = make_drafts({"w": weights})
    weights += 1  # The training continues.
    about = {"trial": "0", "params": "{}", "settings": "{}"}
    path = tmp_path / "best.safetensors"
    drafts.make_weights_file(path, about)
    drafts.close()
    written = read_weights(path)
    assert written is not None
    assert written.state["w"].tolist() == [[1.0, 1.0]] * 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64, torch.bool])
def test_weights_of_any_dtype_are_restored(tmp_path: Path, dtype: torch.dtype) -> None:
    make_run(tmp_path / "run")
    leader, tied = make_leader(tmp_path / "run"), torch.ones(3, dtype=dtype)
    leader.complete(
        begin_evaluation(leader, 0.1), 0.5, {"a": tied, "b": tied, "none": tied[:0], "one": tied[0]}
    )
    weights = read_weights(tmp_path / "run" / "best.safetensors")
    assert weights is not None
    assert {name: (tensor.dtype, tensor.shape) for name, tensor in weights.state.items()} == {
        name: (dtype, torch.Size(shape))
        for name, shape in {"a": [3], "b": [3], "none": [0], "one": []}.items()
    }


def test_weights_that_cannot_be_saved_print_a_warning(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    make_run(folder)
    leader = make_leader(folder)
    with monkeypatch.context() as full:
        full.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=60e6))
        leader.complete(begin_evaluation(leader, 0.1), 0.5, {"w": torch.ones(1)})
    assert "warning: the weights of the best so far cannot be kept" in capfd.readouterr().err
    (evaluation,) = RunReader(folder).read_evaluations()
    assert (evaluation.loss, evaluation.state) == (0.5, "complete"), (
        "the loss must be recorded anyway"
    )
    assert sorted(path.name for path in folder.iterdir()) == ["run.json", "study.log"]
    (folder / "best.safetensors").write_bytes(b"\x00" * 9)
    with pytest.raises(UsageError, match=r"best\.safetensors cannot be read"):
        read_weights(folder / "best.safetensors")


def test_find_winner_uses_confirmations_once_all_finished(tmp_path: Path) -> None:
    record, confirming = make_run(tmp_path / "run"), make_run(tmp_path / "confirming")
    for loss in (0.3, 0.1, 0.2):
        add_evaluation(
            record,
            curve={1: loss},
            params={"layers": 1, "activation": "relu", "lr": loss, "gamma": 0.9},
        )
    evaluations = record.read_evaluations()
    assert find_winner([], []) is None
    assert find_winner(evaluations, []) == evaluations[1]
    add_evaluation(confirming, curve={1: 0.2}, confirms=2, seed=1)
    add_evaluation(confirming, curve={1: 0.4}, confirms=1, seed=2)
    confirmations = confirming.read_evaluations()
    assert find_winner(evaluations, confirmations) == evaluations[2]
    add_evaluation(confirming, TrialState.RUNNING, curve={}, confirms=1, seed=3)
    assert find_winner(evaluations, confirming.read_evaluations()) == evaluations[1], (
        "confirmations must be ignored until all have finished"
    )
    failed = [replace(one, state="failed") for one in confirmations]
    assert find_winner(evaluations, failed) == evaluations[1]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"trial": 0}',
        '{"trial": 0, "times": 1, "metrics": 3, "predictions": []}',
        '{"trial": Infinity, "times": 1, "metrics": {}, "predictions": []}',
        '{"trial": 1, "times": 1, "metrics": {}, "predictions": []}',
        '{"trial": 0, "times": 1, "metrics": {}, "predictions": [], "texts": 3}',
        '{"trial": 0, "times": 1, "metrics": {}, "predictions": [], "texts": {}}',
        '{"trial": 0, "times": 1, "metrics": {}, "predictions": [], "texts": ["def "]}',
        '{"trial": 0, "times": 1, "metrics": {}, "predictions": [], "texts": [{"prompt": "def "}]}',
        "[" * 100_000,
    ],
)
def test_read_winner_test_ignores_an_edited_file(tmp_path: Path, text: str) -> None:
    record = make_run(tmp_path / "run")
    add_evaluation(record)
    run = RunReader(tmp_path / "run")
    run.run_dir.test_json.write_text(text)
    assert read_winner_test(run.run_dir, run.read_evaluations()[0]) is None


def test_winner_test_needs_weights_with_the_same_settings(tmp_path: Path) -> None:
    params = {"layers": 1, "activation": "relu", "lr": 0.1, "gamma": 0.9}
    make_run(tmp_path / "run")
    leader, problem = make_leader(tmp_path / "run"), load_problem(WEIGHING)
    leader.complete(begin_evaluation(leader, 0.1), 0.5, {"epoch": torch.tensor([3.0])})
    run = RunReader(tmp_path / "run")
    (winner,) = run.read_evaluations()
    assert winner.params == params
    run_test = wrap_test(lambda _, weights, __: {"epoch": weights["epoch"].item()})
    run_json = json.loads(run.run_dir.run_json.read_text())
    run.run_dir.run_json.write_text(json.dumps({**run_json, "settings": {"epochs": 5}}))
    assert run_winner_test(run.run_dir, problem, winner, run_test) is None, (
        "the weights were trained with other settings"
    )
    run.run_dir.run_json.write_text(json.dumps(run_json))
    assert run_winner_test(run.run_dir, problem, replace(winner, trial=7), run_test) is None, (
        "the weights belong to another trial"
    )
    tested = make_test_content({"epoch": 3.0})
    assert (
        run_winner_test(run.run_dir, problem, winner, run_test)
        == read_winner_test(run.run_dir, winner)
        == tested
    )
    assert run_winner_test(run.run_dir, problem, winner, run_test) is None, (
        "a network must be tested only once"
    )
    leader.complete(begin_evaluation(leader, 0.2), 0.4, {"epoch": torch.tensor([4.0])})
    better = rank_evaluations(run.read_evaluations(), 1)[0]
    again = run_winner_test(run.run_dir, problem, better, run_test)
    assert again is not None
    assert (again["trial"], again["times"]) == (1, 2)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ({"loss": float("nan")}, "the test metric 'loss' must be a finite number, got nan"),
        (
            ({}, [3]),
            "test must return metrics and a list of hpo.Prediction and hpo.TextSample, got 3",
        ),
        ("fine", "dictionary update sequence"),
    ],
)
def test_winner_test_rejects_wrong_results(tmp_path: Path, result: Any, message: str) -> None:
    make_run(tmp_path / "run")
    leader, problem = make_leader(tmp_path / "run"), load_problem(WEIGHING)
    leader.complete(begin_evaluation(leader, 0.1), 0.5, {"w": torch.ones(1)})
    run = RunReader(tmp_path / "run")
    with pytest.raises(FailedTestError, match=message):
        run_winner_test(
            run.run_dir, problem, run.read_evaluations()[0], wrap_test(lambda *_: result)
        )


@pytest.mark.parametrize(
    ("assignment", "reason"),
    [
        ("tests=badly", "weighing.py:35: ValueError: no test data today"),
        ("tests=well", "weighing.py:42: KeyError: 'epoch'"),
    ],
)
def test_finalize_if_test_fails_warns_with_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], assignment: str, reason: str
) -> None:
    make_run(tmp_path / "run")
    leader = make_leader(tmp_path / "run")
    leader.complete(begin_evaluation(leader, 0.1), 0.5, {"w": torch.ones(1)})
    run_test = make_run_test(load_search_file(WEIGHING).bind_settings([assignment]))
    finalize_run(tmp_path / "run", None, load_problem(WEIGHING, assignment), run_test)
    printed = capsys.readouterr()
    assert printed.err == f"warning: the best network could not be tested ({reason})\n"
    assert "The report is " in printed.out
    assert not (tmp_path / "run" / "test.json").exists()


METRICS = {"kind": "metrics", "metrics": {"loss": 0.25}}


def leave(*_: Any) -> None:
    raise SystemExit(3)


def raise_after_metrics(*_: Any) -> tuple[dict[str, float], Iterator[Any]]:
    return {"loss": 0.25}, (1 / 0 for _ in range(3))


def crash(parts: list[Mapping[str, Any]]) -> Callable[..., Iterator[Mapping[str, Any]]]:
    return lambda *_: iter(parts)


@pytest.mark.parametrize(
    ("run_test", "message", "is_tested"),
    [
        (wrap_test(leave), r"^test_winner.py:\d+: SystemExit: 3$", False),
        (
            wrap_test(raise_after_metrics),
            r"^test_winner.py:\d+: ZeroDivisionError: division by zero$",
            True,
        ),
        (crash([]), "it gave no metrics", False),
        (crash([{"kind": "failure", "text": "killed by SIGSEGV"}]), "^killed by SIGSEGV$", False),
        (
            crash(
                [
                    {"kind": "metrics", "metrics": {"loss": 0.25}},
                    {"kind": "failure", "text": "killed"},
                ]
            ),
            "killed",
            True,
        ),
    ],
)
def test_winner_test_that_fails_keeps_its_metrics(
    tmp_path: Path, run_test: Any, message: str, is_tested: bool
) -> None:
    make_run(tmp_path / "run")
    leader = make_leader(tmp_path / "run")
    leader.complete(begin_evaluation(leader, 0.1), 0.5, {"w": torch.ones(1)})
    run = RunReader(tmp_path / "run")
    (winner,) = run.read_evaluations()
    with pytest.raises(FailedTestError, match=message):
        run_winner_test(run.run_dir, load_problem(WEIGHING), winner, run_test)
    tested = make_test_content({"loss": 0.25})
    assert read_winner_test(run.run_dir, winner) == (tested if is_tested else None)


def test_winner_test_needs_readable_weights(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    leader, run_test = make_leader(tmp_path / "run"), wrap_test(lambda *_: {})
    leader.complete(begin_evaluation(leader, 0.1), 0.5, {"w": torch.ones(1)})
    run = RunReader(tmp_path / "run")
    (winner,) = run.read_evaluations()
    assert (
        run_winner_test(run.run_dir, load_problem(SEARCHES / "quick.py"), winner, run_test) is None
    ), "this search file has no test"
    (missing,) = run_test({}, tmp_path / "missing.safetensors")
    assert missing == {
        "kind": "failure",
        "text": f"FileNotFoundError: the weights {tmp_path}/missing.safetensors are missing",
    }
    run.run_dir.best_weights.write_bytes(b"\x00" * 9)
    (damaged,) = run_test({}, run.run_dir.best_weights)
    assert damaged["text"].startswith(f"UsageError: {run.run_dir.best_weights} cannot be read: ")
    assert run_winner_test(run.run_dir, load_problem(WEIGHING), winner, run_test) is None


def test_winner_test_keeps_first_samples_and_shortens_texts(
    tmp_path: Path,
) -> None:
    make_run(tmp_path / "run")
    leader, problem = make_leader(tmp_path / "run"), load_problem(WEIGHING)
    leader.complete(begin_evaluation(leader, 0.1), 0.5, {"w": torch.ones(1)})
    run, image = RunReader(tmp_path / "run"), np.zeros((4, 4), np.uint8)
    (winner,) = run.read_evaluations()
    hostile = "\0\u202e\udcff</pre>"
    samples = [
        *(Prediction(image, str(number), "b", 0.5) for number in range(100)),
        TextSample(hostile, hostile),
        TextSample("p" * 1_000_000 + "!", "t" * 1_000_000),
        *(TextSample("", str(number)) for number in range(100)),
    ]
    made = run_winner_test(run.run_dir, problem, winner, wrap_test(lambda *_: ({}, samples)))
    assert made is not None
    assert made == read_winner_test(run.run_dir, winner)
    assert [one["label"] for one in made["predictions"]] == [str(number) for number in range(60)]
    assert made["texts"][0] == {"prompt": hostile, "text": hostile}
    assert made["texts"][1] == {"prompt": "..." + "p" * 9_999 + "!", "text": "t" * 10_000 + "..."}
    assert [one["text"] for one in made["texts"][2:]] == [str(number) for number in range(18)]
    assert run.run_dir.test_json.stat().st_size < 100_000


def test_read_winner_test_without_texts_is_accepted(tmp_path: Path) -> None:
    record = make_run(tmp_path / "run")
    add_evaluation(record)
    run = RunReader(tmp_path / "run")
    run.run_dir.test_json.write_text(
        '{"trial": 0, "times": 1, "metrics": {"loss": 2}, "predictions": []}'
    )
    before: dict[str, Any] = {
        "trial": 0,
        "confirmation": None,
        "times": 1,
        "metrics": {"loss": 2.0},
        "predictions": [],
        "texts": [],
    }
    assert read_winner_test(run.run_dir, run.read_evaluations()[0]) == before


@pytest.mark.parametrize(
    ("prompt", "text", "wrong"), [(3, "a", "prompt"), ("a", None, "text"), ("a", b"b", "text")]
)
def test_text_sample_rejects_other_types(prompt: Any, text: Any, wrong: str) -> None:
    with pytest.raises(ValueError, match=f"the {wrong} of a text sample must be a string, got "):
        TextSample(prompt, text)


def test_finalize_prints_metrics_of_the_test_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path / "run")
    leader, problem = make_leader(tmp_path / "run"), load_problem(WEIGHING)
    leader.complete(begin_evaluation(leader, 0.1), 0.5, {"w": torch.ones(1)})
    finalize_run(
        tmp_path / "run", None, problem, wrap_test(lambda *_: {"\x1b[31m\nloss": 3.0, "loss": 0.25})
    )
    said = capsys.readouterr().out.splitlines()[0]
    assert said.endswith(r"the network of trial 0 has \x1b[31m loss 3, loss 0.25")


@pytest.mark.parametrize(
    "image", [np.zeros((4, 4)), np.zeros((3, 4, 4), np.uint8), np.zeros(4, np.uint8)]
)
def test_prediction_rejects_images_of_other_shapes(image: Any) -> None:
    with pytest.raises(ValueError, match="the image of a prediction must be uint8, of shape"):
        Prediction(image, "a", "b", 0.5)


def test_best_without_success_prints_an_error(tmp_path: Path) -> None:
    record = make_run(tmp_path / "run")
    add_evaluation(record, TrialState.FAIL, failure="no")
    handed = run_hpo("best", tmp_path / "run")
    assert (handed.returncode, handed.stdout) == (2, "")
    assert handed.stderr == f"error: {tmp_path / 'run'}: no evaluation has succeeded\n"
