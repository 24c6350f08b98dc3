"""Optuna's own tools on a run: its dashboard, its plots, and studies that it has made as the start of a run."""

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
from tests.support.run_output import load_trials
from tests.support.runs import add_evaluation, make_run, make_run_of_everything

SECONDS = 100.0  # for anything that is waited for, on a machine that has much else to do


def study_of(run_dir: Path) -> optuna.Study:
    """Open a run's study as docs/search/warm-start.md does."""
    storage = optuna.storages.JournalStorage(JournalFileBackend(str(run_dir / "study.log")))
    return optuna.load_study(study_name=run_dir.name, storage=storage)


def is_running(run_dir: Path) -> bool:
    """Tell whether a run has begun, and an evaluation has had its first loss."""
    if not (run_dir / "run.json").exists():
        return False
    return any(trial.state.name == "RUNNING" and trial.intermediate_values for trial in load_trials(run_dir))


def test_journal_with_discarded_trials_is_read(tmp_path: Path) -> None:
    """Other programs write the operation, which Optuna 5 knows and skips."""
    record = make_run(tmp_path / "run")
    add_evaluation(record)
    entry = {"op_code": JournalOperation.DISCARD_TRIALS, "worker_id": "x", "study_id": 0, "trial_ids": [0]}
    with (tmp_path / "run" / "study.log").open("a") as journal:
        journal.write(json.dumps(entry) + "\n")
    add_evaluation(Record(tmp_path / "run" / "study.log", "run"))
    assert [one.trial for one in RunReader(tmp_path / "run").read_evaluations()] == [0, 1]
    assert [trial.number for trial in study_of(tmp_path / "run").trials] == [0, 1]


def test_required_optuna_is_the_one_that_is_tested() -> None:
    needed = re.search(r'"optuna>=(\d+)', (ROOT / "pyproject.toml").read_text())
    tested = re.search(r"^optuna==(\d+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert needed is not None
    assert tested is not None
    assert needed[1] == tested[1] == optuna.__version__.split(".")[0]


class Dashboard:
    """The server of optuna-dashboard, asked for what its pages load."""

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
        (number,) = [s["study_id"] for s in self.get("/api/studies")["study_summaries"] if s["study_name"] == name]
        found: dict[str, Any] = self.get(f"/api/studies/{number}")
        return found


@contextmanager
def dashboard(journal: Path) -> Iterator[Dashboard]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(Path(sys.executable).with_name("optuna-dashboard")), str(journal), "--port", str(port)]
    with (journal.parent.parent / "dashboard").open("w") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    try:
        until(lambda: server.poll() is not None or answers(port))
        assert server.poll() is None, Path(log.name).read_text()
        yield Dashboard(port)
    finally:
        server.terminate()
        server.wait(timeout=30)


def answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def shown(trial: optuna.trial.FrozenTrial) -> dict[str, Any]:
    """Return what the dashboard is to show of a trial."""
    return {
        "number": trial.number,
        "state": trial.state.name.capitalize(),
        "values": trial.values,
        "params": {name: str(value) for name, value in trial.params.items()},
        "intermediate_values": trial.intermediate_values,
        "user_attrs": {n: v if isinstance(v, str) else json.dumps(v) for n, v in trial.user_attrs.items()},
    }


def seen(trial: dict[str, Any]) -> dict[str, Any]:
    """Return what the dashboard shows of a trial."""
    return {
        **{name: trial.get(name) for name in ("number", "state", "values")},
        "params": {param["name"]: param["param_external_value"] for param in trial["params"]},
        "intermediate_values": {value["step"]: value["value"] for value in trial["intermediate_values"]},
        "user_attrs": {attribute["key"]: attribute["value"] for attribute in trial["user_attrs"]},
    }


def plain_objective(trial: optuna.Trial) -> float:
    """Be an objective as Optuna's users write it, of the parameters of searches/held.py."""
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


def test_a_run_from_a_plain_study_is_in_the_dashboard_while_it_goes_on_and_afterwards(
    mpi: Mpi, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    storage = optuna.storages.JournalStorage(JournalFileBackend(str(tmp_path / "plain.log")))
    plain = optuna.create_study(study_name="plain", storage=storage, sampler=optuna.samplers.RandomSampler(seed=1))
    plain.optimize(plain_objective, n_trials=20, catch=ValueError)
    known = [t for t in plain.trials if t.values and t.params["act"] != "gelu"]
    assert {trial.state.name for trial in plain.trials} == {"COMPLETE", "PRUNED", "FAIL"}
    assert {trial.state.name for trial in known} == {"COMPLETE", "PRUNED"}

    command = [ROOT / "run_islands.py", SEARCHES / "held.py", "--islands", 1, "--evaluations", 3, "--run-dir", "run"]
    command += ["--warm-start", "plain.log#plain", "--set", f"file={tmp_path}/go"]
    job = mpi.start(2, *command, cwd=tmp_path)
    journal = tmp_path / "run" / "study.log"
    try:
        until(lambda: job.poll() is not None or is_running(tmp_path / "run"))
        with dashboard(journal) as server:
            trials = server.study("run")["trials"]
            running = shown(load_trials(tmp_path / "run")[-1])
            assert running["state"] == "Running"
            assert running["intermediate_values"] == {1: int(running["params"]["layers"]) + 1.0}
            assert seen(trials[-1]) == running
            (tmp_path / "go").touch()
            end = wait_for_job(job)
            until(lambda: [trial["state"] for trial in server.study("run")["trials"][len(known) :]] == ["Complete"] * 3)
            study = server.study("run")
    finally:
        (tmp_path / "go").touch()
        wait_for_job(job)
    assert (end.returncode, end.stderr) == (0, "")
    assert f"with {len(known)} evaluations of plain.log#plain" in end.stdout
    after = load_trials(tmp_path / "run")
    assert [seen(trial) for trial in study["trials"]] == [shown(trial) for trial in after]
    assert study["best_trials"][0]["number"] == study_of(tmp_path / "run").best_trial.number
    assert [parameter["name"] for parameter in study["union_search_space"]] == sorted(after[-1].params)

    best_first = sorted(known, key=lambda trial: (trial.values, trial.number))
    for trial, original in zip(after, best_first, strict=False):
        assert (trial.state, trial.values) == (original.state, original.values)
        digits = {"lr": float(f"{original.params['lr']:.12g}")}
        assert trial.params == {**original.params, **digits}
        assert list(trial.intermediate_values.values()) == list(original.intermediate_values.values())
        assert trial.user_attrs["imported_from"] == f"trial {original.number} of plain.log#plain"

    capfdbinary.readouterr()
    assert call_hpo("export", tmp_path / "run", "--to", "json") == 0
    rows = json.loads(capfdbinary.readouterr().out)
    assert [(row["trial"], row["loss"], row["metric_accuracy"]) for row in rows] == [
        (trial.number, trial.values[0], trial.user_attrs.get("metrics", {}).get("accuracy")) for trial in after
    ]


@pytest.mark.slow
def test_the_dashboard_shows_a_run_with_everything_in_it_and_leaves_it_alone(tmp_path: Path) -> None:
    run_dir = make_run_of_everything(tmp_path)
    before = (run_dir / "study.log").read_bytes()
    with dashboard(run_dir / "study.log") as server:
        for study in ("run", "run-confirm"):
            trials = server.study(study)["trials"]
            assert [seen(trial) for trial in trials] == [shown(trial) for trial in load_trials(run_dir, study)]
    assert (run_dir / "study.log").read_bytes() == before


# Which trials a run_of_everything has in which state.
COMPLETE, PRUNED, FAILED, RUNNING, WAITING = [0, 2, 3, 4, 5], [1, 6], [7, 8], [9], [10]
LOSSES = [1.0, 3.0, 4.0, 5.0, 6.0]


def points(figure: Any, axis: str = "y", name: str | None = None) -> list[list[Any]]:
    """Return what each trace of a figure shows, on one axis; only those of a name, if one is given."""
    traces = [trace for trace in figure.data if name is None or trace.name == name]
    return [list(trace[axis]) for trace in traces if axis in trace and trace[axis] is not None]


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:matplotlib")  # which optuna imports, if it is there
@pytest.mark.slow
def test_every_plot_that_optuna_has_for_one_loss_shows_the_trials_of_a_run(tmp_path: Path) -> None:
    study = study_of(make_run_of_everything(tmp_path))
    params = {name: [study.trials[number].params[name] for number in COMPLETE] for name in study.best_params}
    from optuna import visualization as plots  # pytest, as it looks for tests, would load what is lazy here

    history = plots.plot_optimization_history(study)
    assert points(history, "x", "Objective Value") == [COMPLETE]
    assert points(history, "y", "Objective Value") == [LOSSES]

    traces = plots.plot_intermediate_values(study).data
    curves = {trace.name: dict(zip(trace.x, trace.y, strict=True)) for trace in traces}
    assert curves == {f"Trial{n}": study.trials[n].intermediate_values for n in sorted(COMPLETE + PRUNED + RUNNING)}

    states = {"COMPLETE": COMPLETE, "PRUNED": PRUNED, "FAIL": FAILED, "RUNNING": RUNNING, "WAITING": WAITING}
    assert {trace.name: list(trace.y) for trace in plots.plot_timeline(study).data} == states

    slices = plots.plot_slice(study)
    assert [sorted(losses) for losses in points(slices)] == [LOSSES] * 4
    assert [sorted(map(str, values)) for values in points(slices, "x")] == [
        sorted(repr(value) for value in params[name]) for name in sorted(params)
    ]

    pairs = len(params) ** 2
    as_shown = [[value if type(value) in (int, float) else str(value) for value in params[n]] for n in sorted(params)]
    assert points(plots.plot_rank(study))[:pairs] == as_shown * len(params)
    contours = points(plots.plot_contour(study), "y", "Feasible Trial")
    assert len(contours) == pairs - len(params)
    assert all(values in as_shown for values in contours)
    parallel = points(plots.plot_parallel_coordinate(study))[: len(COMPLETE)]
    assert [len(line) for line in parallel] == [len(params) + 1] * len(COMPLETE)
    assert points(plots.plot_edf(study))[0][-1] == 1.0
    assert points(plots.plot_edf(study))[0][0] == 1 / len(COMPLETE)

    importances = plots.plot_param_importances(study)
    assert set(importances.data[0].y) == set(params)
    assert sum(importances.data[0].x) == pytest.approx(1.0)
    assert importances.data[0].y[-1] in ("depth", "lr"), "of which the loss is made"

    cost = plots.plot_pareto_front(
        study, targets=lambda trial: (trial.values[0], trial.user_attrs["seconds"]), target_names=["loss", "seconds"]
    )
    assert sorted(loss for losses in points(cost, "x") for loss in losses) == LOSSES
    assert len(points(plots.plot_terminator_improvement(study))[0]) == len(study.trials)

    of_several_losses = {"plot_hypervolume_history"}
    plotted = {name for name in dir(plots) if name.startswith("plot_")} - of_several_losses
    source = Path(__file__).read_text()
    assert {name for name in plotted if f"plots.{name}(" not in source} == set(), "these are new in Optuna"


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:matplotlib")  # which optuna imports, if it is there
@pytest.mark.slow
def test_plots_that_optuna_has_for_several_objectives_show_the_trials_of_a_run(tmp_path: Path) -> None:
    record = make_run(tmp_path / "run", objectives=Objectives(("loss", "size", "speed"), ("speed",)))
    for loss, size, speed in ((1.0, 9.0, 5.0), (2.0, 5.0, 5.0), (3.0, 9.0, 4.0), (3.0, 9.0, 6.0)):
        add_evaluation(record, curve={1: loss}, metrics={"size": size, "speed": speed})
    study = study_of(tmp_path / "run")
    from optuna import visualization as plots  # pytest, as it looks for tests, would load what is lazy here

    front = plots.plot_pareto_front(study, include_dominated_trials=False)
    scene = front.layout.scene
    assert [axis.title.text for axis in (scene.xaxis, scene.yaxis, scene.zaxis)] == ["loss", "size", "speed"]
    assert sorted(zip(*(points(front, axis)[-1] for axis in "xyz"), strict=True)) == [(1, 9, 5), (2, 5, 5), (3, 9, 6)]
    history = plots.plot_hypervolume_history(study, [4.0, 10.0, 0.0])
    # (4 - 1)(10 - 9)5, and of the second (4 - 2)(10 - 5)5 but for (4 - 2)(10 - 9)5; of the last one, 1 is new.
    assert points(history)[0] == [15, 55, 55, 56]
    losses = plots.plot_optimization_history(study, target=lambda trial: trial.values[0], target_name="loss")
    assert points(losses, "y", "loss") == [[1, 2, 3, 3]]
