"""Test searches whose evaluations the caller runs (`hpo.Search`)."""

from __future__ import annotations

import errno
import gc
import json
import math
import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hpo
from hpo.errors import RunError
from hpo.results.reader import RunReader
from hpo.store import evaluation_locks
from hpo.store.evaluation_locks import open_evaluation_locks
from hpo.store.evaluations import Evaluation
from hpo.store.run_dir import RunDir, held_locks
from tests.support.launch import PROGRAMS
from tests.support.limits import scale

_SPACE = hpo.SearchSpace(
    lr=hpo.Float(1e-4, 1e-1, log=True), layers=hpo.Int(1, 4), act=hpo.Categorical("relu", "tanh")
)


def _ask(search: hpo.Search) -> hpo.Trial:
    trial = search.ask()
    assert trial is not None
    return trial


def _compute_loss(params: Mapping[str, Any]) -> float:
    wide = abs(math.log10(params["lr"]) + 2.5)
    return wide + float(params["layers"]) + float(params["act"] == "tanh")


def _read(folder: Path) -> list[Evaluation]:
    return RunReader(folder).read_evaluations()


@pytest.fixture
def search(tmp_path: Path) -> hpo.Search:
    return hpo.Search(_SPACE, tmp_path / "run", evaluations=40)


def test_later_individuals_are_better_than_random_ones(tmp_path: Path) -> None:
    means = {}
    for propagator in ("ga", "tpe", "random"):
        search = hpo.Search(
            _SPACE, tmp_path / propagator, evaluations=30, propagator=propagator, seed=3
        )
        while trial := search.ask():
            search.tell(trial, _compute_loss(trial.params))
        evaluations = _read(tmp_path / propagator)
        means[propagator] = np.mean([evaluation.loss for evaluation in evaluations[15:]])
        assert [evaluation.trial for evaluation in evaluations] == list(range(30))
        assert len({tuple(evaluation.params.items()) for evaluation in evaluations}) == 30
        assert all(
            evaluation.loss == _compute_loss(evaluation.params) for evaluation in evaluations
        )
    assert max(means["ga"], means["tpe"]) < means["random"]


def test_told_results_are_in_the_record_and_the_views(tmp_path: Path) -> None:
    search = hpo.Search(_SPACE, tmp_path / "run", objectives=(hpo.maximize("score"), "size"))
    told = _ask(search)
    search.tell(told, torch.tensor([0.75]), size=np.float32(3), note=math.nan)
    (evaluation,) = _read(tmp_path / "run")
    assert (evaluation.state, evaluation.loss, evaluation.other_values) == ("complete", -0.75, (3,))
    assert evaluation.metrics == {"score": 0.75, "size": 3.0}
    assert evaluation.params == told.params
    assert evaluation.seconds > 0
    assert sum(evaluation.hosts.values()) == 1
    assert search.run.best == evaluation
    assert "0.75" in search.run._repr_html_()


def test_failures_are_recorded_with_their_reason(search: hpo.Search, tmp_path: Path) -> None:
    first, second, third = (_ask(search) for _ in range(3))
    search.tell(first, math.nan)
    search.fail(second, "out of memory\non GPU 0")
    try:
        raise RuntimeError("diverged")
    except RuntimeError as error:
        search.fail(third, error)
    evaluations = _read(tmp_path / "run")
    assert [evaluation.state for evaluation in evaluations] == ["failed"] * 3
    assert [evaluation.failure for evaluation in evaluations] == [
        "the validation loss is nan",
        "out of memory on GPU 0",
        "RuntimeError: diverged",
    ]
    assert 'raise RuntimeError("diverged")' in evaluations[2].traceback
    assert [evaluation.worker for evaluation in evaluations] == [0, 1, 2]  # They ran at once.


def test_a_session_begins_only_when_options_change(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    for evaluations, count in ((4, 4), (None, 4), (6, 6), (None, 6)):
        search = hpo.Search(_SPACE, folder, evaluations=evaluations)
        while trial := search.ask():
            search.tell(trial, _compute_loss(trial.params))
        assert len(_read(folder)) == count
    manifest = RunReader(folder).manifest
    assert [session.options["evaluations"] for session in manifest.sessions] == [4, 6]
    assert manifest.budget == 6
    copied: dict[str, Any] = {}
    exec((folder / manifest.sessions[-1].file).read_text(), copied)
    assert copied["space"].describe() == _SPACE.describe()


def test_the_same_seed_breeds_the_same_individuals(tmp_path: Path) -> None:
    params = []
    for name, seed in (("a", 5), ("b", 5), ("c", 6)):
        search = hpo.Search(_SPACE, tmp_path / name, evaluations=12, seed=seed)
        while trial := search.ask():
            search.tell(trial, _compute_loss(trial.params))
        params.append([evaluation.params for evaluation in _read(tmp_path / name)])
    assert params[0] == params[1] != params[2]


def test_exhausted_space_ends_the_search(tmp_path: Path) -> None:
    space = hpo.SearchSpace(layers=hpo.Int(1, 3), act=hpo.Categorical("relu", "tanh"))
    space.require(lambda p: p["layers"] > 1 or p["act"] == "relu", "one layer needs relu")
    search = hpo.Search(space, tmp_path / "run")
    while trial := search.ask():
        search.tell(trial, trial.params["layers"])
    assert len(_read(tmp_path / "run")) == 5


def test_search_begins_with_the_priors(tmp_path: Path) -> None:
    space = hpo.SearchSpace(lr=hpo.Float(1e-4, 1e-1, log=True, prior=0.02), layers=hpo.Int(1, 4))
    trial = _ask(hpo.Search(space, tmp_path / "run"))
    assert trial.params["lr"] == 0.02
    assert _read(tmp_path / "run")[0].propagator == "priors"


# Several processes, threads and searches


def _start(folder: Path, evaluations: int) -> subprocess.Popen[str]:
    command = [sys.executable, str(PROGRAMS / "asking.py"), str(folder), str(evaluations)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _finish(process: subprocess.Popen[str]) -> list[str]:
    """Let a program of `_start` tell all further results, and return the lines that it prints."""
    output, _ = process.communicate("\n" * 100, timeout=scale(60))
    assert process.returncode == 0
    return output.splitlines()


@pytest.mark.slow
def test_processes_share_the_evaluations_of_a_run(tmp_path: Path) -> None:
    with ExitStack() as resources:
        processes = [resources.enter_context(_start(tmp_path / "run", 24)) for _ in range(3)]
        for process in processes:  # They ask and tell at the same time.
            assert process.stdin is not None
            process.stdin.write("\n" * 100)
            process.stdin.flush()
        outputs = [_finish(process) for process in processes]
    assert [output.pop() for output in outputs] == ["[]"] * 3  # Neither torch nor MPI was imported.
    assert sorted(int(number) for output in outputs for number in output) == list(range(24))
    evaluations = _read(tmp_path / "run")
    assert [evaluation.state for evaluation in evaluations] == ["complete"] * 24
    assert len({tuple(evaluation.params.items()) for evaluation in evaluations}) == 24
    assert len(RunReader(tmp_path / "run").manifest.sessions) == 1


@pytest.mark.slow
def test_trial_of_a_killed_process_is_evaluated_by_another(tmp_path: Path) -> None:
    with _start(tmp_path / "run", 5) as killed, _start(tmp_path / "run", 5) as other:
        assert killed.stdout is not None
        lost = int(killed.stdout.readline())
        killed.kill()
        killed.wait(scale(60))
        _finish(other)
    evaluations = _read(tmp_path / "run")
    assert evaluations[lost].state == "interrupted"
    (retry,) = (evaluation for evaluation in evaluations if evaluation.retry_of == lost)
    assert (retry.state, retry.params) == ("complete", evaluations[lost].params)
    assert sum(evaluation.state == "complete" for evaluation in evaluations) == 5


def test_forked_processes_evaluate_different_individuals(
    search: hpo.Search, tmp_path: Path
) -> None:
    kept = _ask(search)
    with multiprocessing.get_context("fork").Pool(2, _share, (search,)) as pool:
        told = pool.map_async(_evaluate_one, range(4), chunksize=1).get(scale(60))
    assert sorted(told) == [1, 2, 3, 4]
    search.tell(kept, 1.0)
    evaluations = _read(tmp_path / "run")
    assert [evaluation.state for evaluation in evaluations] == ["complete"] * 5
    assert len({tuple(evaluation.params.items()) for evaluation in evaluations}) == 5


_shared: list[hpo.Search] = []


def _share(search: hpo.Search) -> None:
    _shared.append(search)


def _evaluate_one(_: int) -> int:
    trial = _shared[0].ask()
    assert trial is not None
    _shared[0].tell(trial, _compute_loss(trial.params))
    return trial.number


def test_threads_evaluate_different_individuals(tmp_path: Path) -> None:
    space = hpo.SearchSpace(width=hpo.Int(1, 25))
    search = hpo.Search(space, tmp_path / "run", propagator="random")

    def evaluate(_: int) -> int:
        trial = _ask(search)
        search.tell(trial, trial.params["width"])
        return trial.number

    with ThreadPoolExecutor(4) as pool:
        assert sorted(pool.map(evaluate, range(20))) == list(range(20))
    assert len({tuple(evaluation.params.items()) for evaluation in _read(tmp_path / "run")}) == 20


def test_searches_in_a_process_do_not_take_each_others_trials(
    search: hpo.Search, tmp_path: Path
) -> None:
    other = hpo.Search(_SPACE, tmp_path / "run")
    trial = _ask(search)
    assert other.ask() not in (None, trial)
    with pytest.raises(ValueError, match="trial 0 is not running in this search"):
        other.tell(trial, 1.0)
    search.tell(trial, 1.0)
    assert [evaluation.state for evaluation in _read(tmp_path / "run")] == ["complete", "running"]


def test_trial_of_an_abandoned_search_is_evaluated_again(tmp_path: Path) -> None:
    """A user runs the cell of a notebook again that creates a search."""
    search = hpo.Search(_SPACE, tmp_path / "run")
    abandoned = _ask(search)
    del search
    gc.collect()
    trial = _ask(hpo.Search(_SPACE, tmp_path / "run"))
    assert (trial.number, trial.params) == (1, abandoned.params)


def test_all_trials_of_an_ended_job_are_evaluated_at_once(tmp_path: Path) -> None:
    """A job array has reached its time limit, and is submitted again."""
    code = (
        "import sys, hpo; space = eval(sys.argv[2], vars(hpo))\n"
        "search = hpo.Search(space, sys.argv[1], evaluations=6)\n"
        "print([search.ask().number for _ in range(6)], flush=True); sys.stdin.readline()"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "run"), repr(_SPACE)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as array:
        assert array.stdout is not None
        assert array.stdout.readline() == "[0, 1, 2, 3, 4, 5]\n"
        array.kill()
    searches = [hpo.Search(_SPACE, tmp_path / "run") for _ in range(6)]
    assert [_ask(search).number for search in searches] == list(range(6, 12))
    evaluations = _read(tmp_path / "run")
    assert [each.retry_of for each in evaluations[6:]] == list(range(6))


def test_trial_of_searches_that_were_abandoned_does_not_fail(tmp_path: Path) -> None:
    """A user interrupts the cell that creates the search again and again."""
    params = []
    for _ in range(6):
        search = hpo.Search(_SPACE, tmp_path / "run", evaluations=1)
        params.append(_ask(search).params)
        del search
        gc.collect()
    assert params == [params[0]] * 6
    assert {each.crash_count for each in _read(tmp_path / "run")} == {0}


def test_process_forked_while_a_thread_locks_does_not_hang(search: hpo.Search) -> None:
    has_locked, may_end = threading.Event(), threading.Event()

    def lock() -> None:
        with held_locks.guard:
            has_locked.set()
            may_end.wait(scale(60))

    thread = threading.Thread(target=lock)
    thread.start()
    has_locked.wait(scale(60))
    context = multiprocessing.get_context("fork")
    child = context.Process(target=_share_and_evaluate, args=(search,))
    child.start()
    child.join(scale(60))
    may_end.set()
    thread.join()
    child.kill()
    assert child.exitcode == 0


def _share_and_evaluate(search: hpo.Search) -> None:
    search.tell(_ask(search), 1.0)


def test_threads_that_open_a_run_at_once_share_its_locks(tmp_path: Path) -> None:
    for number in range(100):
        folder = tmp_path / str(number)
        folder.mkdir()
        with ThreadPoolExecutor(8) as pool:
            opened = list(pool.map(open_evaluation_locks, [RunDir(folder)] * 8))
        assert len(set(map(id, opened))) == 1


# Writes that fail


def test_result_can_be_given_again_after_a_failed_write(
    search: hpo.Search, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = _ask(search)
    _fail_once(monkeypatch, OSError(errno.ENOSPC, "No space left on device"))
    with pytest.raises(RunError, match="No space left on device"):
        search.tell(trial, 0.5)
    assert [each.state for each in _read(tmp_path / "run")] == ["running"]
    search.tell(trial, 0.5)
    search.tell(_ask(search), 0.25)
    assert [each.loss for each in _read(tmp_path / "run")] == [0.5, 0.25]


def test_trial_whose_start_is_interrupted_is_not_lost(
    search: hpo.Search, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _fail_once(monkeypatch, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        search.ask()
    search.tell(_ask(search), 0.5)
    states = [each.state for each in _read(tmp_path / "run")]
    assert "running" not in states
    assert states.count("complete") == 1


def _fail_once(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    errors = [error]
    fsync = os.fsync

    def fail_first(file: int) -> None:
        if errors:
            raise errors.pop()
        fsync(file)

    monkeypatch.setattr(os, "fsync", fail_first)


# Mistakes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"space": {"lr": 1}}, r"space must be a SearchSpace, got {'lr': 1}"),
        ({"evaluations": 0}, "evaluations must be a whole number, at least 1 .*, got 0"),
        ({"evaluations": "5"}, "evaluations must be a whole number, .*, got '5'"),
        ({"seed": -1}, "seed must be a whole number, at least 0 .*, got -1"),
        ({"propagator": "cmaes"}, "propagator must be one of 'ga', 'tpe', 'random', got 'cmaes'"),
        ({"objectives": ["accuracy"]}, "the first objective must be 'loss', got 'accuracy'"),
        ({"run_dir": __file__}, "must be a directory, got .*test_ask_tell.py is a file"),
    ],
)
def test_wrong_argument_is_refused_before_anything_is_written(
    arguments: dict[str, Any], message: str, tmp_path: Path
) -> None:
    valid = {"space": _SPACE, "run_dir": tmp_path / "run"}
    with pytest.raises(ValueError, match=message):
        hpo.Search(**{**valid, **arguments})
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("space", "objectives", "message"),
    [
        (hpo.SearchSpace(lr=hpo.Float(1e-4, 1.0)), ["loss"], "of another search space: parameter"),
        (_SPACE, ["loss", "size"], "other objectives: they were loss, and are loss, size"),
    ],
)
def test_run_of_another_search_is_refused(
    space: hpo.SearchSpace, objectives: list[str], message: str, tmp_path: Path
) -> None:
    hpo.Search(_SPACE, tmp_path / "run")
    before = (tmp_path / "run/run.json").read_bytes()
    with pytest.raises(ValueError, match=message):
        hpo.Search(space, tmp_path / "run", objectives=objectives)
    assert (tmp_path / "run/run.json").read_bytes() == before


def test_run_of_a_search_file_is_refused(tmp_path: Path) -> None:
    hpo.Search(_SPACE, tmp_path / "run")
    path = tmp_path / "run/run.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "search_space": "net.py"}))
    with pytest.raises(ValueError, match=r"holds a run of net\.py: .* hpo search --resume"):
        hpo.Search(_SPACE, tmp_path / "run")


@pytest.mark.parametrize(
    ("tell", "error", "message"),
    [
        (lambda search, trial: search.tell(trial, "low"), TypeError, "the loss must be a number"),
        (lambda search, trial: search.tell(trial, 1, a="b"), TypeError, "metric 'a' must be"),
        (lambda search, _: search.tell(None, 1), TypeError, r"got None\. ask\(\) returns None at"),
        (
            lambda search, _: search.fail(0, "x"),
            TypeError,
            "that ask.. has returned, got 0",
        ),
    ],
)
def test_wrong_result_leaves_the_trial_running(
    tell: Callable[[hpo.Search, hpo.Trial], None],
    error: type[Exception],
    message: str,
    search: hpo.Search,
    tmp_path: Path,
) -> None:
    trial = _ask(search)
    with pytest.raises(error, match=message):
        tell(search, trial)
    search.tell(trial, 0.5)
    with pytest.raises(ValueError, match="its result was told already"):
        search.tell(trial, 0.5)
    assert [evaluation.loss for evaluation in _read(tmp_path / "run")] == [0.5]


def test_missing_objective_leaves_the_trial_running(tmp_path: Path) -> None:
    objectives = [hpo.maximize("score"), "size"]
    search = hpo.Search(_SPACE, tmp_path / "run", objectives=objectives)
    trial = _ask(search)
    with pytest.raises(ValueError, match=r"'size' is an objective, .*tell\(trial, 0.5, size=...\)"):
        search.tell(trial, 0.5)
    with pytest.raises(ValueError, match="no metric must be named 'loss'"):
        search.tell(trial, 0.5, size=2, loss=7)
    search.tell(trial, 0.5, size=2)
    search.tell(_ask(search), 0.5, size=math.nan)
    evaluations = _read(tmp_path / "run")
    assert [each.state for each in evaluations] == ["complete", "failed"]
    assert evaluations[0].values == (-0.5, 2.0)
    assert evaluations[1].failure == "the objective size is nan"


def test_copy_of_a_trial_equals_it_and_that_of_other_runs_not(
    search: hpo.Search, tmp_path: Path
) -> None:
    trial = _ask(search)
    same = _ask(hpo.Search(_SPACE, tmp_path / "other"))
    assert (same.number, same.params) == (trial.number, trial.params)
    with pytest.raises(ValueError, match="trial 0 is not running in this search"):
        search.tell(same, 0.5)
    search.tell(pickle.loads(pickle.dumps(trial)), 0.5)
    assert {trial: 1}[trial] == 1


# The locks exclude a run of ranks, which holds `RunDir.hold_lock` in another process.


def test_run_of_ranks_cannot_start_while_a_trial_is_evaluated(
    search: hpo.Search, tmp_path: Path
) -> None:
    trial = _ask(search)
    assert "is in use by another run" in _lock_in_other_process(tmp_path / "run")
    assert RunDir(tmp_path / "run").is_in_use
    search.tell(trial, 0.5)
    assert RunDir(tmp_path / "run").is_in_use is False
    assert _lock_in_other_process(tmp_path / "run") == ""


def _lock_in_other_process(folder: Path) -> str:
    code = (
        "import sys; from pathlib import Path; from hpo.store.run_dir import RunDir\n"
        "with RunDir(Path(sys.argv[1])).hold_lock(): pass"
    )
    command = [sys.executable, "-c", code, str(folder)]
    return subprocess.run(command, capture_output=True, text=True, timeout=scale(60)).stderr


@contextmanager
def _hold(code: str, path: Path) -> Iterator[int]:
    """Run code that locks a file, in another process, and yield the number of the process."""
    code = f"import sys\n{code}\n    print(flush=True)\n    sys.stdin.readline()"
    command = [sys.executable, "-c", code, str(path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        yield holder.pid
        holder.communicate("\n", timeout=scale(60))


def test_ask_names_the_run_of_ranks_that_keeps_it_out(
    search: hpo.Search, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        "from pathlib import Path; from hpo.store.run_dir import RunDir\n"
        "with RunDir(Path(sys.argv[1])).hold_lock():"
    )
    with _hold(code, tmp_path / "run") as process:
        monkeypatch.setattr(evaluation_locks, "_MOST_SECONDS", 0.0)
        with pytest.raises(ValueError, match=f"in use by process {process} on .* wait for"):
            search.ask()
    assert search.ask() is not None


def test_waiting_for_a_lock_in_vain_keeps_the_own_trials(
    search: hpo.Search, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = _ask(search)
    code = (
        "import fcntl\nwith open(sys.argv[1], 'a+') as f:\n    fcntl.lockf(f, fcntl.LOCK_EX, 1, 0)"
    )
    with _hold(code, tmp_path / "run/lock"):
        monkeypatch.setattr(evaluation_locks, "_MOST_SECONDS", 0.0)
        with pytest.raises(ValueError, match="in use by other processes"):
            search.ask()
        assert RunDir(tmp_path / "run").holder == ""
    assert "is in use by another run" in _lock_in_other_process(tmp_path / "run")
    search.tell(trial, 0.5)
