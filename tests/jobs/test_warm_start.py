"""Test runs with a warm start, with migration between islands, and with confirmation."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import statistics
import subprocess
import time
from collections import Counter
from dataclasses import astuple
from pathlib import Path

import optuna
import pytest

from hpo.errors import UsageError
from hpo.objectives import ONLY_LOSS
from hpo.results.confirmation import ConfirmationPlan, SeedNoise, estimate_seed_noise
from hpo.results.reader import RunReader
from hpo.run.initial_evaluations import read_warm_start
from hpo.store.evaluations import Evaluation
from hpo.trainer.search_file import load_search_file
from hpo.views.result_text import describe_confirmed
from tests.support.evaluations import make_evaluation
from tests.support.launch import ALONE, PROGRAM, SEARCHES, Mpi, wait_for_job
from tests.support.limits import scale
from tests.support.run_output import find_complete_losses, load_trials, parse_lines
from tests.support.runs import start_session

TINY = SEARCHES / "tiny.py"
NOISY = SEARCHES / "noisy.py"


@pytest.mark.parametrize("probability", [1, 0])
def test_islands_breed_from_immigrants_of_other_propagators(
    mpi: Mpi, tmp_path: Path, probability: int
) -> None:
    """The first island starts with a very good individual.

    Its values reach other islands only by migration, not by chance.
    """
    storage = f"sqlite:///{tmp_path}/study.db"
    given = {"a": 0.0123456789012, "b": 0.0234567890123, "c": 0.0345678901234, "d": 0.0456789012345}
    source = optuna.create_study(storage=storage)
    source.enqueue_trial(given)
    source.optimize(
        lambda trial: sum(trial.suggest_float(name, 0, 1) for name in given), n_trials=1
    )
    arguments = [
        PROGRAM,
        SEARCHES / "smooth.py",
        "--run-dir",
        "run",
        "--warm-start",
        storage,
        "--evaluations",
        60,
    ]
    layout = ["--ranks-per-worker", 1, "--islands", 3, "--propagators", "random,ga,propulate"]
    job = mpi.run(3, *arguments, *layout, "--migration-probability", probability, cwd=tmp_path)
    assert (job.returncode, job.stderr) == (0, "")
    trials = load_trials(tmp_path / "run")
    assert trials[0].params == pytest.approx(given, rel=1e-11)
    genes: dict[int, set[tuple[str, float]]] = {0: set(), 1: set(), 2: set()}
    heirs = dict.fromkeys(genes, 0)
    for trial in trials:
        island, own = (
            trial.user_attrs["island"],
            {gene for gene in trial.params.items() if 0 < gene[1] < 1},
        )
        heirs[island] += any(own & others for other, others in genes.items() if other != island)
        genes[island] |= own
    assert (heirs[0], heirs[2] > 0) == (0, probability == 1), heirs
    assert probability == 1 or heirs[1] == 0, heirs


def test_warm_start_imports_evaluations_of_a_run(mpi: Mpi, tmp_path: Path) -> None:
    storage = f"sqlite:///{tmp_path}/study.db"
    small = ["--ranks-per-worker", 1]
    arguments = [
        PROGRAM,
        TINY,
        "--run-dir",
        "first",
        "--storage",
        storage,
        "--confirm-seeds",
        1,
        *small,
    ]
    (tmp_path / "failing.json").write_text('[{"depth": 2, "act": "tanh"}]')
    first = mpi.run(2, *arguments, "--evaluations", 5, "--enqueue", "failing.json", cwd=tmp_path)
    assert (first.returncode, first.stderr) == (0, "")
    before = optuna.load_study(study_name="first", storage=storage).trials
    for source, run, ranks, layout in (
        ("first", "from_run", 4, []),
        (storage, "from_storage", 2, small),
    ):
        command = [
            PROGRAM,
            TINY,
            "--run-dir",
            run,
            "--evaluations",
            2,
            "--warm-start",
            source,
            *layout,
        ]
        job = mpi.run(ranks, *command, cwd=tmp_path)
        assert (job.returncode, job.stderr) == (0, "")
        known = sorted(
            (trial for trial in before if trial.values),
            key=lambda trial: (trial.values, trial.number),
        )
        assert (
            f"with {len(known)} evaluations of {source}, the best {known[0].values[0]:.4g}"
            in job.stdout
        )
        trials = load_trials(tmp_path / run)
        taken, new = trials[: len(known)], trials[len(known) :]
        for trial, original in zip(taken, known, strict=True):
            assert (trial.params, trial.values) == (original.params, original.values)
            assert trial.intermediate_values == original.intermediate_values
            assert trial.user_attrs["imported_from"] == f"trial {original.number} of {source}"
            assert (trial.datetime_start, trial.datetime_complete) == (
                original.datetime_start,
                original.datetime_complete,
            )
        assert {trial.user_attrs["island"] for trial in taken} == {0, 1}
        everything = {tuple(trial.params.values()) for trial in trials}
        assert len(everything) == len(trials) == 6, (
            "imported individuals must not be evaluated again"
        )
        summary = json.loads((tmp_path / run / "summary.json").read_text())
        counts = summary["evaluations"]
        assert counts["complete"] + counts["failed"] == len(new) <= 2
        assert (summary["imported"], summary["exhausted"]) == (len(known), True)
        assert f"of 2; {len(known)} imported" in job.stdout
    again = mpi.run(1, *command, "--islands", 1, "--resume", cwd=tmp_path)
    assert (again.returncode, again.stderr) == (0, "")
    assert len(load_trials(tmp_path / "from_storage")) == 6


def test_warm_start_from_an_invalid_source_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    storage = f"sqlite:///{tmp_path}/study.db"
    directions = optuna.study.StudyDirection
    for name, direction in (
        ("one", directions.MINIMIZE),
        ("other", directions.MAXIMIZE),
        ("empty", directions.MINIMIZE),
    ):
        study = optuna.create_study(study_name=name, storage=storage, direction=direction)
        if name != "empty":
            study.optimize(lambda trial: trial.suggest_float("lr", 0, 1), n_trials=1)
    (tmp_path / "folder").mkdir()
    for source, message in {
        "folder": "folder holds no run: there is no folder/run.json",
        "sqlite:///nowhere.db": "no such file: nowhere.db",
        "nosql://host": "the storage nosql://host: ",
        storage: (
            f"it has the studies 'one', 'other', 'empty'. Name one of them, as in {storage}#NAME"
        ),
        f"{storage}#two": (
            f"it has the studies 'one', 'other', 'empty'. Name one of them, as in {storage}#NAME"
        ),
        f"{storage}#other": "the study 'other' must minimise a loss",
        f"{storage}#one": (
            "no finished evaluation is valid in this search space: trial 0: unknown parameter 'lr'"
        ),
        f"{storage}#empty": "no finished evaluation is valid in this search space: it has none",
    }.items():
        with pytest.raises(UsageError) as raised:
            read_warm_start(source, load_search_file(TINY).space, ONLY_LOSS)
        assert str(raised.value).startswith(f"--warm-start {source}: {message}")
        assert len(str(raised.value).splitlines()) == 1
    with pytest.raises(UsageError, match=f"^{re.escape(str(raised.value))}$"):
        start_session(tmp_path / "run", TINY, warm_start=source)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "study.db"]


def noisy_loss(params: dict[str, float], seed: int, noise: float) -> float:
    import torch

    return params["x"] + noise * torch.rand(1, generator=torch.Generator().manual_seed(seed)).item()


def test_confirm_seeds_trains_the_best_with_other_seeds(mpi: Mpi, tmp_path: Path) -> None:
    arguments = [
        PROGRAM,
        NOISY,
        "--run-dir",
        "run",
        "--evaluations",
        8,
        "--confirm-seeds",
        3,
        "--top-n",
        2,
        "--seed",
        7,
    ]
    arguments += ["--set", "seconds=0.3"]
    job = mpi.run(4, *arguments, "--set", "noise=100", cwd=tmp_path)
    assert (job.returncode, job.stderr) == (0, "")
    confirming = parse_lines(
        job.stdout.split("confirming the best with 3 other seeds each: 6 evaluations")[1]
    )
    assert [line["done"] for line in confirming] == list("123456")
    trials = load_trials(tmp_path / "run")
    assert len(trials) == 8
    assert all(
        trial.values[0] == pytest.approx(noisy_loss(trial.params, 7, 100)) for trial in trials
    )
    best = sorted(trials, key=lambda trial: trial.values)[:2]
    confirmations = load_trials(tmp_path / "run", "run-confirm")
    assert Counter(trial.user_attrs["confirms"] for trial in confirmations) == {
        trial.number: 3 for trial in best
    }
    seeds = {trial.user_attrs["seed"] for trial in confirmations}
    assert len(seeds) == 6
    assert 7 not in seeds
    assert len({trial.user_attrs["worker"] for trial in confirmations}) == 2
    for trial in confirmations:
        assert trial.params == trials[trial.user_attrs["confirms"]].params
        assert trial.values[0] == pytest.approx(
            noisy_loss(trial.params, trial.user_attrs["seed"], 100)
        )
    confirmed = json.loads((tmp_path / "run" / "summary.json").read_text())["confirmed"]
    assert confirmed == sorted(confirmed, key=lambda entry: entry["mean"])
    for entry in confirmed:
        trial = trials[entry["trial"]]
        losses = [t.values[0] for t in confirmations if t.user_attrs["confirms"] == trial.number]
        assert entry["mean"] == pytest.approx(statistics.mean(losses))
        assert entry["deviation"] == pytest.approx(statistics.stdev(losses))
    assert confirmed[0]["may_be_best"]
    assert not confirmed[1]["as_good"], "three seeds are too few to show it"
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    sentences = describe_confirmed(RunReader(tmp_path / "run").make_summary(2))
    assert "may be the best" in sentences[0] or "is the best of these" in sentences[0]
    assert all(sentence in " ".join(job.stdout.split()) for sentence in sentences)
    noise = summary["seed_noise"]
    within = statistics.mean(entry["deviation"] ** 2 for entry in confirmed)
    between = max(0.0, statistics.variance(entry["mean"] for entry in confirmed) - within / 3)
    assert noise == {
        "deviation": pytest.approx(within**0.5),
        "share": pytest.approx(within / (within + between)),
    }
    assert (
        f"The seed accounts for {noise['share']:.0%} of the variance of these losses.\n"
        in job.stdout
    )
    more = mpi.run(
        2,
        *arguments,
        "--islands",
        1,
        "--set",
        "noise=100",
        "--resume",
        "--confirm-seeds",
        4,
        cwd=tmp_path,
    )
    assert (more.returncode, more.stderr) == (0, "")
    assert "confirming the best with 4 other seeds each: 2 evaluations left of 8" in more.stdout
    assert more.stdout.count("done  island") == 1, "the search is already complete"
    assert load_trials(tmp_path / "run", "run-confirm")[:6] == confirmations
    other = mpi.run(
        1, *arguments, *ALONE, "--set", "noise=1", "--resume", "--confirm-seeds", 1, cwd=tmp_path
    )
    assert (other.returncode, other.stderr) == (0, "")
    assert "noise was 100.0 before, and is 1.0 now" in other.stdout
    confirmed = json.loads((tmp_path / "run" / "summary.json").read_text())["confirmed"]
    assert [len(entry["losses"]) for entry in confirmed] == [1, 1], (
        "losses under other settings must not be compared"
    )
    assert "There are too few losses: nothing is compared with the best." in other.stdout


def test_confirm_seeds_rejects_a_study_of_another_run(tmp_path: Path) -> None:
    storage = f"sqlite:///{tmp_path}/study.db"
    start_session(tmp_path / "run-confirm", storage=storage, confirm_seeds=1)
    message = (
        f"--confirm-seeds: {storage} already holds a study named 'run-confirm', which is another "
        "run's"
    )
    with pytest.raises(UsageError, match=re.escape(message)):
        start_session(tmp_path / "run", storage=storage, confirm_seeds=1)
    assert not (tmp_path / "run").exists()


def test_confirmations_survive_a_stop_and_a_kill(mpi: Mpi, tmp_path: Path) -> None:
    log = tmp_path / "log"
    permits = tmp_path / "permits"
    permits.mkdir()
    arguments = [PROGRAM, NOISY, "--run-dir", "run", "--resume"]
    arguments += ["--confirm-seeds", "6", "--target-loss", "2", "--set", f"permits={permits}"]

    def allow(evaluations: int) -> None:
        for number in range(evaluations):
            (permits / str(number)).touch()

    def start(*layout: object, ranks: int) -> subprocess.Popen[str]:
        with log.open("a") as file:
            return mpi.start(ranks, *arguments, *layout, cwd=tmp_path, stdout=file.fileno())

    def wait_for_confirmations(count: int) -> None:
        """Wait until the latest session has printed that this many have ended."""
        deadline = time.monotonic() + scale(60)
        line = re.compile(rf"confirming(?!.*confirming).*\n *{count}/", re.DOTALL)
        while not line.search(log.read_text()):
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)

    def read_ended() -> dict[int, float]:
        return find_complete_losses(load_trials(tmp_path / "run", "run-confirm"))

    allow(2 + 3 + 1)  # Two or three individuals, and three or four of six confirmations.
    job = start(ranks=4)
    wait_for_confirmations(2)
    job.send_signal(signal.SIGUSR1)
    assert wait_for_job(job).returncode == 75
    assert re.search(r", of \d+; \d+ to confirm the best\n", log.read_text()), log.read_text()
    done = len(read_ended())
    for permit in permits.iterdir():
        permit.unlink()
    allow(2)
    job = start("--ranks-per-worker", 1, ranks=2)
    wait_for_confirmations(done + 2)
    os.killpg(job.pid, signal.SIGKILL)
    job.communicate(timeout=scale(30))
    before = read_ended()
    assert len(before) == done + 2
    allow(50)
    end = mpi.run(1, *arguments, *ALONE, cwd=tmp_path)
    assert (end.returncode, end.stderr) == (0, "")
    assert "Stopped: the loss of --target-loss 2 is reached" in end.stdout
    after = load_trials(tmp_path / "run", "run-confirm")
    assert {number: find_complete_losses(after)[number] for number in before} == before
    pairs = [
        (t.user_attrs["confirms"], t.user_attrs["seed"])
        for t in after
        if t.number in find_complete_losses(after)
    ]
    assert len(set(pairs)) == len(pairs) == 6 * len({trial for trial, _ in pairs})


def make_confirmation(trial: int, seed: int, loss: float, state: str = "complete") -> Evaluation:
    return make_evaluation(0, state, loss=loss, confirms=trial, seed=seed)


def test_estimate_seed_noise_finds_deviation_and_share() -> None:
    rng = random.Random(0)
    means = [rng.gauss(5, 0.4) for _ in range(2000)]
    drawn = [[rng.gauss(mean, 0.3) for _ in range(index % 5)] for index, mean in enumerate(means)]

    found = estimate_seed_noise(drawn)
    assert found is not None
    assert found.deviation == pytest.approx(0.3, rel=0.05)
    assert found.share == pytest.approx(0.09 / 0.25, rel=0.1), "groups of any size must work"
    huge = estimate_seed_noise([[1e300 * loss for loss in losses] for losses in drawn])
    assert huge is not None
    assert astuple(huge) == pytest.approx((1e300 * found.deviation, found.share))
    equal = estimate_seed_noise([[1.0, 2.0], [2.0, 1.0]])
    assert equal is not None
    assert equal.deviation == pytest.approx(0.5**0.5)
    assert equal.share == 1.0
    assert estimate_seed_noise([[1.0, 1.0], [2.0]]) == SeedNoise(0.0, 0.0)
    few: list[list[list[float]]] = [
        [],
        [[1.0, 2.0]],
        [[1.0], [2.0]],
        [[1.0, 2.0], []],
        [[1.0, 1.0], [1.0, 1.0]],
    ]
    for groups in few:
        assert estimate_seed_noise(groups) is None


def test_draw_seeds_is_reproducible_and_distinct_for_trials() -> None:
    plan = ConfirmationPlan(4, "0/{}")
    assert plan.draw_seeds(3)[:2] == ConfirmationPlan(2, "0/{}").draw_seeds(3), (
        "a larger number of seeds must keep the first seeds"
    )
    assert not set(plan.draw_seeds(3)) & {
        *plan.draw_seeds(4),
        *ConfirmationPlan(4, "1/{}").draw_seeds(3),
        *ConfirmationPlan(4, '0/{"epochs": 3}').draw_seeds(3),
    }
    recorded = [make_confirmation(3, seed, 1.0) for seed in (*plan.draw_seeds(3)[:3], 12345)]
    assert plan.select_planned(recorded) == [], (
        "one seed is missing, and the mean of the others may be too low"
    )
    last = make_confirmation(3, plan.draw_seeds(3)[3], 1.0, "running")
    assert plan.select_planned([*recorded, last]) == [*recorded[:3], last]
    best = [make_evaluation(3), make_evaluation(4)]
    assert plan.count_remaining(best, recorded) == 1 + 4
    assert ConfirmationPlan(0, "").count_remaining(best, recorded) == 0
