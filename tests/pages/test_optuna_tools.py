"""Test Optuna's tools with runs of this project: dashboard, plots, and warm starts from studies."""

from __future__ import annotations

import http.client
import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.storages.journal import JournalFileBackend
from optuna.storages.journal._storage import JournalOperation

from hpo.objectives import Objectives
from hpo.results.reader import RunReader
from hpo.store.record import Record
from tests.support.launch import ROOT, SEARCHES, Mpi, call_hpo, wait_for_job
from tests.support.limits import scale
from tests.support.run_output import load_trials
from tests.support.runs import add_evaluation, make_run, make_run_of_everything

SECONDS = 100.0  # time limit of all waits, for busy machines


def load_study(run_dir: Path) -> optuna.Study:
    """Open a run's study as docs/operation/viewers.md does."""
    storage = optuna.storages.JournalStorage(JournalFileBackend(str(run_dir / "study.log")))
    return optuna.load_study(study_name=run_dir.name, storage=storage)


def is_running(run_dir: Path) -> bool:
    """Return whether a run has a running evaluation that has reported a loss."""
    if not (run_dir / "run.json").exists():
        return False
    return any(
        trial.state.name == "RUNNING" and trial.intermediate_values
        for trial in load_trials(run_dir)
    )


def test_journal_with_discarded_trials_is_read(tmp_path: Path) -> None:
    """The journal has an operation that other programs write, and that Optuna 5 skips."""
    record = make_run(tmp_path / "run")
    add_evaluation(record)
    entry = {
        "op_code": JournalOperation.DISCARD_TRIALS,
        "worker_id": "x",
        "study_id": 0,
        "trial_ids": [0],
    }
    with (tmp_path / "run" / "study.log").open("a") as journal:
        journal.write(json.dumps(entry) + "\n")
    add_evaluation(Record(tmp_path / "run" / "study.log", "run"))
    assert [evaluation.trial for evaluation in RunReader(tmp_path / "run").read_evaluations()] == [
        0,
        1,
    ]
    assert [trial.number for trial in load_study(tmp_path / "run").trials] == [0, 1]


def test_required_optuna_version_is_tested() -> None:
    needed = re.search(r'"optuna>=(\d+)', (ROOT / "pyproject.toml").read_text())
    tested = re.search(r"^optuna==(\d+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert needed is not None
    assert tested is not None
    assert needed[1] == tested[1] == optuna.__version__.split(".")[0]


class Dashboard:
    """Client that requests from optuna-dashboard the data that its pages load."""

    def __init__(self, port: int) -> None:
        self._port = port

    def get(self, path: str) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=SECONDS)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            content = response.read()
            assert response.status == 200, content
            return json.loads(content)
        finally:
            connection.close()

    def study(self, name: str) -> dict[str, Any]:
        (number,) = [
            s["study_id"]
            for s in self.get("/api/studies")["study_summaries"]
            if s["study_name"] == name
        ]
        found: dict[str, Any] = self.get(f"/api/studies/{number}")
        return found


@contextmanager
def dashboard(journal: Path) -> Iterator[Dashboard]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        str(Path(sys.executable).with_name("optuna-dashboard")),
        str(journal),
        "--port",
        str(port),
    ]
    with (journal.parent.parent / "dashboard").open("w") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    try:
        wait_until(lambda: server.poll() is not None or answers(port))
        assert server.poll() is None, Path(log.name).read_text()
        yield Dashboard(port)
    finally:
        server.terminate()
        server.wait(timeout=scale(30))


def answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + scale(SECONDS)
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def make_expected(trial: optuna.trial.FrozenTrial) -> dict[str, Any]:
    """Return the values that the dashboard should show for a trial."""
    return {
        "number": trial.number,
        "state": trial.state.name.capitalize(),
        "values": trial.values,
        "params": {name: str(value) for name, value in trial.params.items()},
        "intermediate_values": trial.intermediate_values,
        "user_attrs": {
            n: v if isinstance(v, str) else json.dumps(v) for n, v in trial.user_attrs.items()
        },
    }


def read_dashboard_trial(trial: dict[str, Any]) -> dict[str, Any]:
    """Return the values that the dashboard shows for a trial."""
    return {
        **{name: trial.get(name) for name in ("number", "state", "values")},
        "params": {param["name"]: param["param_external_value"] for param in trial["params"]},
        "intermediate_values": {
            value["step"]: value["value"] for value in trial["intermediate_values"]
        },
        "user_attrs": {attribute["key"]: attribute["value"] for attribute in trial["user_attrs"]},
    }


def plain_objective(trial: optuna.Trial) -> float:
    """Evaluate a trial as Optuna users do, with the search space of searches/held.py."""
    layers = trial.suggest_int("layers", 1, 9, step=2)
    width = trial.suggest_int("width", 16, 1024, log=True)
    act = trial.suggest_categorical("act", ["relu", "tanh", "gelu"])
    trial.suggest_categorical("bias", [True, False])
    trial.suggest_float("momentum", 0.0, 1.0, step=0.25)
    lr = trial.suggest_float("lr", 1e-4, 1.0, log=True)
    for step in range(3):
        trial.report(layers + 1 / (step + 1), step)
        if width > 600 and trial.number > 4:
            raise optuna.TrialPruned
    if act == "gelu" and trial.number % 2:
        raise ValueError("not today")
    return layers + lr


def test_dashboard_shows_warm_started_run_during_and_after(
    mpi: Mpi, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    storage = optuna.storages.JournalStorage(JournalFileBackend(str(tmp_path / "plain.log")))
    plain = optuna.create_study(
        study_name="plain", storage=storage, sampler=optuna.samplers.RandomSampler(seed=1)
    )
    plain.optimize(plain_objective, n_trials=20, catch=ValueError)
    known = [t for t in plain.trials if t.values and t.params["act"] != "gelu"]
    assert {trial.state.name for trial in plain.trials} == {"COMPLETE", "PRUNED", "FAIL"}
    assert {trial.state.name for trial in known} == {"COMPLETE", "PRUNED"}

    command = [
        ROOT / "run_islands.py",
        SEARCHES / "held.py",
        "--islands",
        1,
        "--evaluations",
        3,
        "--run-dir",
        "run",
    ]
    command += ["--warm-start", "plain.log#plain", "--set", f"file={tmp_path}/go"]
    job = mpi.start(2, *command, cwd=tmp_path)
    journal = tmp_path / "run" / "study.log"
    try:
        wait_until(lambda: job.poll() is not None or is_running(tmp_path / "run"))
        with dashboard(journal) as server:
            trials = server.study("run")["trials"]
            running = make_expected(load_trials(tmp_path / "run")[-1])
            assert running["state"] == "Running"
            assert running["intermediate_values"] == {1: int(running["params"]["layers"]) + 1.0}
            assert read_dashboard_trial(trials[-1]) == running
            (tmp_path / "go").touch()
            end = wait_for_job(job)
            wait_until(
                lambda: (
                    [trial["state"] for trial in server.study("run")["trials"][len(known) :]]
                    == ["Complete"] * 3
                )
            )
            study = server.study("run")
    finally:
        (tmp_path / "go").touch()
        wait_for_job(job)
    assert (end.returncode, end.stderr) == (0, "")
    assert f"with {len(known)} evaluations of plain.log#plain" in end.stdout
    after = load_trials(tmp_path / "run")
    assert [read_dashboard_trial(trial) for trial in study["trials"]] == [
        make_expected(trial) for trial in after
    ]
    assert study["best_trials"][0]["number"] == load_study(tmp_path / "run").best_trial.number
    assert [parameter["name"] for parameter in study["union_search_space"]] == sorted(
        after[-1].params
    )

    best_first = sorted(known, key=lambda trial: (trial.values, trial.number))
    for trial, original in zip(after, best_first, strict=False):
        assert (trial.state, trial.values) == (original.state, original.values)
        digits = {"lr": float(f"{original.params['lr']:.12g}")}
        assert trial.params == {**original.params, **digits}
        assert list(trial.intermediate_values.values()) == list(
            original.intermediate_values.values()
        )
        assert trial.user_attrs["imported_from"] == f"trial {original.number} of plain.log#plain"

    capfdbinary.readouterr()
    assert call_hpo("export", tmp_path / "run", "--to", "json") == 0
    rows = json.loads(capfdbinary.readouterr().out)
    assert [(row["trial"], row["loss"], row["metric_accuracy"]) for row in rows] == [
        (trial.number, trial.values[0], trial.user_attrs.get("metrics", {}).get("accuracy"))
        for trial in after
    ]


@pytest.mark.slow
def test_dashboard_shows_all_states_without_changing_study(tmp_path: Path) -> None:
    run_dir = make_run_of_everything(tmp_path)
    before = (run_dir / "study.log").read_bytes()
    with dashboard(run_dir / "study.log") as server:
        for study in ("run", "run-confirm"):
            trials = server.study(study)["trials"]
            assert [read_dashboard_trial(trial) for trial in trials] == [
                make_expected(trial) for trial in load_trials(run_dir, study)
            ]
    assert (run_dir / "study.log").read_bytes() == before


# Trial numbers by state in the run of make_run_of_everything.
COMPLETE, PRUNED, FAILED, RUNNING, WAITING = [0, 2, 3, 4, 5], [1, 6], [7, 8], [9], [10]
LOSSES = [1.0, 3.0, 4.0, 5.0, 6.0]


def collect_points(figure: Any, axis: str = "y", name: str | None = None) -> list[list[Any]]:
    """Return the values of each trace of a figure on one axis.

    If `name` is given, return only traces with this name.
    """
    traces = [trace for trace in figure.data if name is None or trace.name == name]
    return [list(trace[axis]) for trace in traces if axis in trace and trace[axis] is not None]


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
# Optuna imports it if it is installed.
@pytest.mark.filterwarnings("ignore::DeprecationWarning:matplotlib")
@pytest.mark.slow
def test_optuna_plots_for_one_loss_show_all_trials(tmp_path: Path) -> None:
    study = load_study(make_run_of_everything(tmp_path))
    params = {
        name: [study.trials[number].params[name] for number in COMPLETE]
        for name in study.best_params
    }
    # At module level, pytest would load its lazy imports.
    from optuna import visualization as plots

    history = plots.plot_optimization_history(study)
    assert collect_points(history, "x", "Objective Value") == [COMPLETE]
    assert collect_points(history, "y", "Objective Value") == [LOSSES]

    traces = plots.plot_intermediate_values(study).data
    curves = {trace.name: dict(zip(trace.x, trace.y, strict=True)) for trace in traces}
    assert curves == {
        f"Trial{n}": study.trials[n].intermediate_values
        for n in sorted(COMPLETE + PRUNED + RUNNING)
    }

    states = {
        "COMPLETE": COMPLETE,
        "PRUNED": PRUNED,
        "FAIL": FAILED,
        "RUNNING": RUNNING,
        "WAITING": WAITING,
    }
    assert {trace.name: list(trace.y) for trace in plots.plot_timeline(study).data} == states

    slices = plots.plot_slice(study)
    assert [sorted(losses) for losses in collect_points(slices)] == [LOSSES] * 4
    assert [sorted(map(str, values)) for values in collect_points(slices, "x")] == [
        sorted(repr(value) for value in params[name]) for name in sorted(params)
    ]

    pairs = len(params) ** 2
    as_shown = [
        [value if type(value) in (int, float) else str(value) for value in params[n]]
        for n in sorted(params)
    ]
    assert collect_points(plots.plot_rank(study))[:pairs] == as_shown * len(params)
    contours = collect_points(plots.plot_contour(study), "y", "Feasible Trial")
    assert len(contours) == pairs - len(params)
    assert all(values in as_shown for values in contours)
    parallel = collect_points(plots.plot_parallel_coordinate(study))[: len(COMPLETE)]
    assert [len(line) for line in parallel] == [len(params) + 1] * len(COMPLETE)
    assert collect_points(plots.plot_edf(study))[0][-1] == 1.0
    assert collect_points(plots.plot_edf(study))[0][0] == 1 / len(COMPLETE)

    importances = plots.plot_param_importances(study)
    assert set(importances.data[0].y) == set(params)
    assert sum(importances.data[0].x) == pytest.approx(1.0)
    assert importances.data[0].y[-1] in ("depth", "lr"), "the loss depends on depth and lr"

    cost = plots.plot_pareto_front(
        study,
        targets=lambda trial: (trial.values[0], trial.user_attrs["seconds"]),
        target_names=["loss", "seconds"],
    )
    assert sorted(loss for losses in collect_points(cost, "x") for loss in losses) == LOSSES
    assert len(collect_points(plots.plot_terminator_improvement(study))[0]) == len(study.trials)

    of_several_losses = {"plot_hypervolume_history"}
    plotted = {name for name in dir(plots) if name.startswith("plot_")} - of_several_losses
    source = Path(__file__).read_text()
    assert {name for name in plotted if f"plots.{name}(" not in source} == set(), (
        "new plots in Optuna need a test"
    )


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
# Optuna imports it if it is installed.
@pytest.mark.filterwarnings("ignore::DeprecationWarning:matplotlib")
@pytest.mark.slow
def test_optuna_plots_for_objectives_show_all_trials(tmp_path: Path) -> None:
    record = make_run(
        tmp_path / "run", objectives=Objectives(("loss", "size", "speed"), ("speed",))
    )
    for loss, size, speed in ((1.0, 9.0, 5.0), (2.0, 5.0, 5.0), (3.0, 9.0, 4.0), (3.0, 9.0, 6.0)):
        add_evaluation(record, curve={1: loss}, metrics={"size": size, "speed": speed})
    study = load_study(tmp_path / "run")
    # At module level, pytest would load its lazy imports.
    from optuna import visualization as plots

    front = plots.plot_pareto_front(study, include_dominated_trials=False)
    scene = front.layout.scene
    assert [axis.title.text for axis in (scene.xaxis, scene.yaxis, scene.zaxis)] == [
        "loss",
        "size",
        "speed",
    ]
    assert sorted(zip(*(collect_points(front, axis)[-1] for axis in "xyz"), strict=True)) == [
        (1, 9, 5),
        (2, 5, 5),
        (3, 9, 6),
    ]
    history = plots.plot_hypervolume_history(study, [4.0, 10.0, 0.0])
    # The first trial adds (4 - 1)(10 - 9)5, the second (4 - 2)(10 - 5)5 - (4 - 2)(10 - 9)5, and the
    # last one 1.
    assert collect_points(history)[0] == [15, 55, 55, 56]
    losses = plots.plot_optimization_history(
        study, target=lambda trial: trial.values[0], target_name="loss"
    )
    assert collect_points(losses, "y", "loss") == [[1, 2, 3, 3]]
