"""Test trackers: each evaluation is shown once, whatever servers and processes do."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from hpo.errors import UsageError
from hpo.options import TRACKERS, Options
from hpo.run.session import Session
from hpo.store.evaluations import INTERRUPTED, Assignment
from hpo.store.record import Record
from hpo.trackers.tracker import remove_secrets
from hpo.trackers.tracker_processes import TrackerProcesses, track_run
from hpo.trackers.tracker_updater import Individuals, ShownEvaluations
from hpo.trainer.search_file import load_search_file
from tests.support.chaos import read_command_lines
from tests.support.evaluations import make_evaluation
from tests.support.launch import ROOT, Mpi
from tests.support.limits import scale
from tests.support.run_output import load_trials
from tests.support.runs import QUICK, claim_evaluation, start_session
from tests.support.tracker_readers import READERS, TrackedEvaluation, read_mlflow_status

PARAMS = {"depth": 1, "act": "relu", "flag": True, "lr": 0.1}
HOSTILE = "injected: [bold]\x1b[31m\x00 <script>\n\udcff" + "x" * 10_000

pytestmark = pytest.mark.filterwarnings(
    # Mlflow itself calls SQLAlchemy like this.
    "ignore:The ``noload`` loader strategy:DeprecationWarning"
)


@pytest.fixture(autouse=True)
def no_telemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forbid the MLflow client of the tests to contact servers."""
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")


def begin_run(run_dir: Path, resume: bool = False, evaluations: int = 6) -> Session:
    return start_session(run_dir, resume=resume, evaluations=evaluations)


def start_evaluation(record: Record, depth: int) -> Assignment:
    distributions = load_search_file(QUICK).space.make_distributions()
    context = {"island": 1, "worker": 2, "generation": 3, "propagator": "ga"}
    return claim_evaluation(record, {**PARAMS, "depth": depth}, distributions, 99, **context)


def start_trackers(session: Session, *names: str) -> tuple[TrackerProcesses, list[str]]:
    messages: list[str] = []
    tracking = TrackerProcesses(names, session.run_dir.path, notify=messages.append)
    tracking.add_study(session.storage, session.manifest.study)
    return tracking, messages


def wait_until(condition: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + scale(seconds)
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


def assert_same(
    shown: dict[str, TrackedEvaluation], expected: dict[str, TrackedEvaluation]
) -> None:
    assert shown.keys() == expected.keys()
    for name, evaluation in expected.items():
        found = shown[name]
        assert found.params == evaluation.params
        assert found.curve == pytest.approx(evaluation.curve, rel=1e-6)
        assert found.loss == pytest.approx(evaluation.loss, rel=1e-6)
        assert found.metrics == pytest.approx(evaluation.metrics, rel=1e-6)
        assert (found.ending, found.failure) == (evaluation.ending, evaluation.failure)


def read_ended_trials(run_dir: Path, name: str) -> set[int]:
    """Return the trials whose end a tracker has received, after the start of all earlier trials."""
    path = run_dir / name / "written.jsonl"
    lines = path.read_text().split("\n")[2:] if path.exists() else []
    return {json.loads(line)["trial"] for line in lines}


def find_tracker_pid(run_dir: Path, name: str) -> int:
    wanted = f"-m hpo.trackers {name} {run_dir}"
    (pid,) = [
        pid for pid, command in read_command_lines().items() if wanted in command.replace("\0", " ")
    ]
    return pid


@pytest.mark.parametrize("name", TRACKERS)
@pytest.mark.slow
def test_tracker_shows_evaluations_live_and_once(name: str, tmp_path: Path) -> None:
    run_dir = tmp_path / "my run"
    session = begin_run(run_dir)
    record = session.open_record()
    tracking, messages = start_trackers(session, name)
    interrupted, left = start_evaluation(record, 1), start_evaluation(record, 2)
    record.report(interrupted, 1, 3.0)
    record.report(left, 1, 4.0)
    complete = start_evaluation(record, 3)
    for step, loss in ((1, 0.5), (2, 0.25), (3, 0.75)):
        record.report(complete, step, loss)
    record.complete(
        complete, 0.25, 1.5, {"accuracy": 0.75, "loss": 9.0, "seconds": 8.0, "odd/\n\x1bname": -1.0}
    )
    wait_until(lambda: read_ended_trials(run_dir, name) == {2})
    pruned, failed = start_evaluation(record, 4), start_evaluation(record, 5)
    record.report(pruned, 1, 2.0)
    record.prune(pruned, 2.0, 0.5, {})
    record.fail(failed, HOSTILE, "Traceback", 0.1)
    # Running evaluations are sent before these.
    wait_until(lambda: read_ended_trials(run_dir, name) == {2, 3, 4})
    record.interrupt(interrupted)
    tracking.finish()
    assert tracking.wait(60)
    assert [line for line in messages if "warning" in line] == []

    cut = "injected: [bold]\\x1b[31m\\x00 <script>\n\\udcff"
    expected = {
        "trial-0000": TrackedEvaluation(PARAMS, {1: 3.0}, math.inf, {}, "badly", INTERRUPTED),
        "trial-0001": TrackedEvaluation(
            {**PARAMS, "depth": 2}, {1: 4.0}, math.inf, {}, "" if name == "tensorboard" else "badly"
        ),
        "trial-0002": TrackedEvaluation(
            {**PARAMS, "depth": 3},
            {1: 0.5, 2: 0.25, 3: 0.75},
            0.25,
            {"accuracy": 0.75, "metric_loss": 9.0, "metric_seconds": 8.0, "odd___name": -1.0},
            "well",
        ),
        "trial-0003": TrackedEvaluation({**PARAMS, "depth": 4}, {1: 2.0}, 2.0, {}, "well"),
        "trial-0004": TrackedEvaluation(
            {**PARAMS, "depth": 5}, {}, math.inf, {}, "badly", cut + "x" * (497 - len(cut)) + "..."
        ),
    }
    assert_same(READERS[name](run_dir), expected)
    if name == "mlflow":
        assert read_mlflow_status(run_dir) == "KILLED"

    # The next session retries the two running individuals, and evaluates another individual.
    record = begin_run(run_dir, resume=True).open_record()
    for depth in (1, 2, 6):
        record.complete(start_evaluation(record, depth), depth + 0.5, 1.0, {})
    for _ in range(2):
        assert track_run(run_dir, [name], None)
        for trial, depth, curve in ((0, 1, {1: 3.0}), (1, 2, {1: 4.0}), (7, 6, {})):
            expected[f"trial-{trial:04d}"] = TrackedEvaluation(
                {**PARAMS, "depth": depth}, curve, depth + 0.5, {}, "well"
            )
        assert_same(READERS[name](run_dir), expected)
    if name == "mlflow":
        assert read_mlflow_status(run_dir) == "FINISHED"


def test_tracker_skips_imported_evaluations(tmp_path: Path) -> None:
    session = begin_run(tmp_path / "run")
    record = session.open_record()
    record.complete(start_evaluation(record, 1), 0.5, 1.0, {})
    theirs = replace(record.read_evaluations()[0], params={**PARAMS, "depth": 7})
    distributions = load_search_file(QUICK).space.make_distributions()
    assert (
        record.import_evaluations(
            [theirs], distributions, lambda *_: {"imported_from": "theirs trial 0"}
        )
        == 1
    )
    assert track_run(tmp_path / "run", ["tensorboard"], None)
    assert READERS["tensorboard"](tmp_path / "run").keys() == {"trial-0000"}


def promote(record: Record, paused: int) -> Assignment:
    return record.promote(
        record.read_evaluations()[paused], {"island": 0, "worker": 5, "generation": 9}
    )


@pytest.mark.parametrize("name", TRACKERS)
@pytest.mark.slow
def test_tracker_shows_one_run_per_individual(name: str, tmp_path: Path) -> None:
    """Pause, promote and interrupt five individuals in different orders, in three sessions.

    A kill ends the second session.
    """
    run_dir = tmp_path / "run"
    record = begin_run(run_dir).open_record()
    tracking, messages = start_trackers(begin_run(run_dir, resume=True), name)
    begun = [start_evaluation(record, depth) for depth in range(1, 6)]
    for assignment in begun:
        record.report(assignment, 1, 4.0)
        record.prune(assignment, 4.0, 1.0, {}, paused_after=1)
    wait_until(lambda: read_ended_trials(run_dir, name) == {0, 1, 2, 3, 4})
    promoted = [promote(record, trial) for trial in range(4)]
    for assignment in promoted:
        record.record_resume(assignment, [4.0], 1.0)
        record.report(assignment, 2, 3.0)
    record.complete(promoted[0], 3.0, 2.0, {"accuracy": 0.5})
    wait_until(lambda: 5 in read_ended_trials(run_dir, name))
    # The tracker has already received the earlier losses of this individual.
    record.report(promoted[1], 3, 2.0)
    record.prune(promoted[1], 2.0, 3.0, {}, paused_after=3)
    record.interrupt(promoted[2])
    tracking.finish()
    assert tracking.wait(60)
    assert [line for line in messages if "warning" in line] == []
    left = "" if name == "tensorboard" else "badly"
    paused = "badly" if name == "mlflow" else "well"
    expected = {
        "trial-0000": TrackedEvaluation(PARAMS, {1: 4.0, 2: 3.0}, 3.0, {"accuracy": 0.5}, "well"),
        "trial-0001": TrackedEvaluation(
            {**PARAMS, "depth": 2}, {1: 4.0, 2: 3.0, 3: 2.0}, 2.0, {}, paused
        ),
        "trial-0002": TrackedEvaluation(
            {**PARAMS, "depth": 3}, {1: 4.0, 2: 3.0}, math.inf, {}, "badly", INTERRUPTED
        ),
        "trial-0003": TrackedEvaluation(
            {**PARAMS, "depth": 4}, {1: 4.0, 2: 3.0}, math.inf, {}, left
        ),
        "trial-0004": TrackedEvaluation({**PARAMS, "depth": 5}, {1: 4.0}, 4.0, {}, paused),
    }
    assert_same(READERS[name](run_dir), expected)

    # The job and its tracker are killed while individuals 1 and 2 are running. Individual 3 starts
    # again from its first epoch and reports different losses.
    session = begin_run(run_dir, resume=True)
    record = session.open_record()
    tracking, _ = start_trackers(session, name)
    again = [
        claim_evaluation(record, None, {}, 99),
        claim_evaluation(record, None, {}, 99),
        promote(record, 6),
    ]
    roots = {assignment.root: assignment for assignment in again}
    assert roots.keys() == {1, 2, 3}
    record.report(roots[3], 1, 3.5)
    for root, curve in ((1, [4.0, 3.0, 2.0]), (2, [4.0, 3.0])):
        record.record_resume(roots[root], curve, 1.0)
    record.complete(roots[3], 3.5, 1.0, {})
    wait_until(lambda: roots[3].number in read_ended_trials(run_dir, name))
    os.kill(find_tracker_pid(run_dir, name), signal.SIGKILL)
    tracking.finish()
    assert not tracking.wait(60)

    record = begin_run(run_dir, resume=True).open_record()
    for _ in range(2):
        assignment = claim_evaluation(record, None, {}, 99)
        curve = [4.0, 3.0, 2.0] if assignment.root == 1 else [4.0, 3.0]
        record.record_resume(assignment, curve, 1.0)
        record.report(assignment, len(curve) + 1, 1.0)
        record.complete(assignment, 1.0, 1.0, {})
    expected |= {
        "trial-0001": TrackedEvaluation(
            {**PARAMS, "depth": 2}, {1: 4.0, 2: 3.0, 3: 2.0, 4: 1.0}, 1.0, {}, "well"
        ),
        "trial-0002": TrackedEvaluation(
            {**PARAMS, "depth": 3}, {1: 4.0, 2: 3.0, 3: 1.0}, 1.0, {}, "well"
        ),
        "trial-0003": TrackedEvaluation({**PARAMS, "depth": 4}, {1: 3.5}, 3.5, {}, "well"),
    }
    assert track_run(run_dir, [name], None)
    assert_same(READERS[name](run_dir), expected)
    shutil.rmtree(run_dir / name)  # The tracker must then receive all evaluations again.
    assert track_run(run_dir, [name], None)
    assert_same(READERS[name](run_dir), expected)


@pytest.mark.slow
def test_individuals_in_flight_at_a_tracker_kill_are_shown_once(tmp_path: Path) -> None:
    """A tracker is killed while two individuals are running.

    One of them then completes, the other one is interrupted.
    """
    run_dir = tmp_path / "run"
    session = begin_run(run_dir)
    record = session.open_record()
    tracking, messages = start_trackers(session, "mlflow")
    start_evaluation(record, 1)
    record.complete(start_evaluation(record, 2), 0.5, 1.0, {})
    # More losses than a server accepts in one request.
    curve = {epoch: 1 / epoch for epoch in range(1, 1500)}
    long = replace(record.read_evaluations()[1], params={**PARAMS, "depth": 3}, curve=curve)
    assert (
        record.import_evaluations(
            [long], load_search_file(QUICK).space.make_distributions(), lambda *_: {}
        )
        == 1
    )
    late = start_evaluation(record, 4)
    record.report(late, 1, 3.0)
    wait_until(lambda: read_ended_trials(run_dir, "mlflow") == {1, 2})
    os.kill(find_tracker_pid(run_dir, "mlflow"), signal.SIGKILL)
    tracking.finish()
    assert not tracking.wait(60)
    assert messages == [
        "warning: --tracker mlflow: its process ended with status -9; it gets no more updates"
    ]
    record.report(late, 2, 2.0)
    record.complete(late, 2.0, 1.5, {"accuracy": 0.75})
    begin_run(run_dir, resume=True)
    assert track_run(run_dir, ["mlflow"], None)
    expected = {
        "trial-0000": TrackedEvaluation(PARAMS, {}, math.inf, {}, "badly", INTERRUPTED),
        "trial-0001": TrackedEvaluation({**PARAMS, "depth": 2}, {}, 0.5, {}, "well"),
        "trial-0002": TrackedEvaluation({**PARAMS, "depth": 3}, curve, 0.5, {}, "well"),
        "trial-0003": TrackedEvaluation(
            {**PARAMS, "depth": 4}, {1: 3.0, 2: 2.0}, 2.0, {"accuracy": 0.75}, "well"
        ),
    }
    # The reader asserts that each name occurs once.
    assert_same(READERS["mlflow"](run_dir), expected)


@pytest.mark.slow
def test_mlflow_killed_while_it_makes_its_store_recovers(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    session = begin_run(run_dir)
    record = session.open_record()
    record.complete(start_evaluation(record, 1), 0.5, 1.0, {})
    tracking, _ = start_trackers(session, "mlflow")
    wait_until(lambda: any(path.stat().st_size for path in (run_dir / "mlflow").glob("*.db")))
    os.kill(find_tracker_pid(run_dir, "mlflow"), signal.SIGKILL)
    tracking.finish()
    assert not tracking.wait(60)
    assert not (run_dir / "mlflow" / "mlflow.db").exists(), "MLflow cannot open an incomplete store"
    assert track_run(run_dir, ["mlflow"], None)
    assert_same(
        READERS["mlflow"](run_dir), {"trial-0000": TrackedEvaluation(PARAMS, {}, 0.5, {}, "well")}
    )


def test_shown_evaluations_with_damaged_file_is_empty(tmp_path: Path) -> None:
    path = tmp_path / "written.jsonl"
    path.write_bytes(
        b'\xff\xfe\n{"place": [], "study": {}, "trial": 0}\n"id"\n3\n' + b"[" * 100_000
    )
    with ShownEvaluations(path) as written:
        assert written.id
    with ShownEvaluations(path) as again:
        assert again.id == written.id


def test_shown_evaluations_survives_any_truncation(tmp_path: Path) -> None:
    record = begin_run(tmp_path / "run").open_record()
    for depth in range(1, 6):
        record.complete(start_evaluation(record, depth), 0.5, 1.0, {})
    evaluations = record.read_evaluations()
    path = tmp_path / "written.jsonl"
    with ShownEvaluations(path) as whole:
        for evaluation in evaluations[:4]:
            whole.add("here", "study", evaluation)
    content = path.read_bytes()
    for place in range(len(content) + 1):
        path.write_bytes(content[:place])
        with ShownEvaluations(path) as cut:
            held = [cut.contains("here", "study", evaluation) for evaluation in evaluations]
            cut.add("here", "study", evaluations[4])
        complete = content[:place].count(b"}") - 1
        assert held == [number < complete for number in range(5)]
        assert (cut.id == whole.id) == (complete >= 0)
        with ShownEvaluations(path) as again:
            assert again.id == cut.id
            assert [again.contains("here", "study", evaluation) for evaluation in evaluations] == [
                *held[:4],
                True,
            ]


class Server(ThreadingHTTPServer):
    """A minimal tracking server.

    It rejects request `number` of the kind `refused`, or never answers if `hangs` is true.
    """

    daemon_threads = True

    def __init__(self, refused: str = "", number: int = 0, hangs: bool = False) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.refused, self.number, self.hangs = refused, number, hangs
        self.requests: list[str] = []
        self.ended = threading.Event()

    def __enter__(self) -> Server:
        threading.Thread(target=self.serve_forever).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.shutdown()
        self.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


_RUN = {
    "run_id": "r",
    "run_uuid": "r",
    "experiment_id": "1",
    "status": "RUNNING",
    "lifecycle_stage": "active",
}
_ANSWERS = {
    "experiments/get-by-name": {
        "experiment": {"experiment_id": "1", "name": "quick", "lifecycle_stage": "active"}
    },
    "runs/create": {"run": {"info": _RUN, "data": {}}},
    "runs/update": {"run_info": _RUN},
}


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self._answer()

    def _answer(self) -> None:
        endpoint = self.path.partition("?")[0].partition("/mlflow/")[2]
        self.server.requests.append(endpoint)
        refused = (
            endpoint == self.server.refused
            and self.server.requests.count(endpoint) == self.server.number
        )
        if refused and self.server.hangs:
            self.server.ended.wait()
        answer = (
            {"error_code": "INVALID_PARAMETER_VALUE", "message": "injected"}
            if refused
            else _ANSWERS.get(endpoint, {})
        )
        self.send_response(400 if refused else 200)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize(
    ("refused", "number"),
    [
        ("experiments/get-by-name", 1),
        ("runs/create", 2),
        ("runs/log-batch", 2),
        ("runs/update", 1),
        ("runs/update", 2),
    ],
    ids=["begin", "start", "losses", "end", "close"],
)
@pytest.mark.slow
def test_tracker_failure_warns_once_and_stops_updates(
    refused: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = begin_run(tmp_path / "run")
    record = session.open_record()
    assignment = start_evaluation(record, 1)
    record.report(assignment, 1, 3.0)
    record.complete(assignment, 3.0, 1.0, {})
    with Server(refused, number) as server:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", server.url)
        tracking, messages = start_trackers(session, "mlflow", "tensorboard")
        tracking.finish()
        assert not tracking.wait(60)
        (line,) = messages
        assert line.startswith("warning: --tracker mlflow: ")
        assert line.endswith("injected; this tracker gets no more updates")
        assert server.requests[-1] == refused
        assert server.requests.count(refused) == number
    assert READERS["tensorboard"](tmp_path / "run")["trial-0000"].ending == "well"


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("to http://me:secret@host:1/x failed", "to http://***@host:1/x failed"),
        ("http://me:se/cr@t@host/x", "http://***@host/x"),
        ("url='htp://me:secret@host'", "url='htp://***@host'"),
        ("http://secret@host", "http://***@host"),
        ("'http://me:secre...", "'http://me:***"),
        ("http://host/x?a=1&access_token=secret&b=2", "http://host/x?a=1&access_token=***&b=2"),
        (
            "http://127.0.0.1:5000/x and https://mlflow.org/docs.",
            "http://127.0.0.1:5000/x and https://mlflow.org/docs.",
        ),
    ],
)
def test_remove_secrets_masks_credentials_in_urls(message: str, shown: str) -> None:
    assert remove_secrets(message) == shown


@pytest.mark.slow
def test_tracker_warning_has_no_password_or_control_characters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = begin_run(tmp_path / "run")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "htp://me:secret@host/\x1b[31m" + "x" * 500)
    tracking, messages = start_trackers(session, "mlflow")
    tracking.finish()
    assert not tracking.wait(60)
    (line,) = messages
    assert r"unsupported URI 'htp://***@host/\x1b[31mxxx" in line
    assert "secret" not in line


@pytest.mark.slow
def test_tracker_message_survives_ascii_locale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = begin_run(tmp_path / "run")
    record = session.open_record()
    record.complete(start_evaluation(record, 1), 3.0, 1.0, {})
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    with Server() as server:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", server.url)
        tracking, messages = start_trackers(session, "mlflow")
        tracking.finish()
        assert tracking.wait(60)
        assert server.requests.count("runs/update") == 2, (
            "the MLflow client prints an emoji for each"
        )
    assert [line for line in messages if "warning" in line] == []


@pytest.mark.slow
def test_tracker_that_hangs_is_killed_after_time_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = begin_run(tmp_path / "run")
    start_evaluation(session.open_record(), 1)
    with Server("runs/create", 2, hangs=True) as server:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", server.url)
        tracking, messages = start_trackers(session, "mlflow")
        wait_until(lambda: server.requests.count("runs/create") == 2)
        tracking.finish()
        assert not tracking.wait(0.1)
        (line,) = messages
        assert line.startswith(
            "warning: --tracker mlflow: it did not finish in time. To send the missing updates, use"
        )


@pytest.mark.slow
def test_tracker_that_computes_is_waited_for(tmp_path: Path) -> None:
    """The import of mlflow and a new store take longer than a tracker may be idle."""
    session = begin_run(tmp_path / "run")
    start_evaluation(session.open_record(), 1)
    tracking, messages = start_trackers(session, "mlflow")
    tracking.finish()
    assert tracking.wait(idle_seconds=scale(1.5)), messages


@pytest.mark.slow
def test_tracker_ends_soon_after_its_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = begin_run(tmp_path / "run")
    start_evaluation(session.open_record(), 1)
    job = (
        "import json, sys, time; from pathlib import Path; from hpo.trackers.tracker_processes "
        "import TrackerProcesses\n"
        "tracking = TrackerProcesses(['mlflow'], Path(sys.argv[1])); "
        "tracking.add_study(*sys.argv[2:]); time.sleep(3600)"
    )
    with Server("runs/create", 2, hangs=True) as server:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", server.url)
        arguments = [str(session.run_dir.path), session.storage, session.manifest.study]
        with subprocess.Popen([sys.executable, "-c", job, *arguments], cwd=ROOT) as process:
            wait_until(lambda: server.requests.count("runs/create") == 2)
            tracker = find_tracker_pid(session.run_dir.path, "mlflow")
            process.kill()
        wait_until(lambda: not Path(f"/proc/{tracker}").exists())


def read_expected(run_dir: Path) -> dict[str, TrackedEvaluation]:
    """Return the evaluations that trackers should show, from the studies of a run."""
    shown = {}
    for kind, study in (
        ("trial-{0:04d}", ""),
        ("confirms-{1:04d}-{0:04d}", f"{run_dir.name}-confirm"),
    ):
        for trial in load_trials(run_dir, study):
            assert trial.values is not None
            name = kind.format(trial.number, trial.user_attrs.get("confirms", 0))
            shown[name] = TrackedEvaluation(
                trial.params, trial.intermediate_values, trial.values[0], {}, "well"
            )
    return shown


def test_all_trackers_show_run_and_confirmations(mpi: Mpi, tmp_path: Path) -> None:
    options = ["--evaluations", 6, "--top-n", 2, "--confirm-seeds", 1, "--run-dir", "run"]
    trackers = [word for name in TRACKERS for word in ("--tracker", name)]
    done = mpi.run(
        2,
        ROOT / "run_islands.py",
        QUICK,
        "--ranks-per-worker",
        1,
        *options,
        *trackers,
        cwd=tmp_path,
    )
    assert done.returncode == 0
    hint = "no account is configured, so runs are stored offline. "
    hint += "To upload them: wandb sync run/wandb/off"
    assert f"--tracker wandb: {hint}" in done.stderr
    # Trackers may be slow if other processes use the cores.
    late = [line for line in done.stderr.splitlines() if "it did not finish in time" in line]
    assert len(done.stderr.splitlines()) == len(late) + 1
    assert track_run(tmp_path / "run", TRACKERS, None)
    expected = read_expected(tmp_path / "run")
    assert len(expected) == 8
    for name in TRACKERS:
        assert_same(READERS[name](tmp_path / "run"), expected)
    assert read_mlflow_status(tmp_path / "run") == "FINISHED"


def test_run_ends_although_tracker_hangs(
    mpi: Mpi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = [
        "--evaluations",
        50,
        "--target-loss",
        1000,
        "--run-dir",
        "run",
        "--set",
        "seconds=0.1",
    ]
    with Server("experiments/get-by-name", 1, hangs=True) as server:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", server.url)
        done = mpi.run(
            2,
            ROOT / "run_islands.py",
            QUICK,
            *options,
            "--islands",
            1,
            "--tracker",
            "mlflow",
            cwd=tmp_path,
        )
    assert done.returncode == 0
    assert done.stderr.splitlines() == [
        "warning: --tracker mlflow: it did not finish in time. To send the missing updates, use "
        "--resume or hpo track run --tracker mlflow"
    ]
    assert "The study is" in done.stdout


# mlflow is not importable, and the only wandb is a folder of that name in the current directory.
PROGRAM_WITHOUT_PACKAGES = """
import sys
from importlib.machinery import PathFinder

class MissingPackages:
    @staticmethod
    def find_spec(name, path, target=None):
        if name == "wandb":
            return PathFinder.find_spec(name, ["."])
        if name == "mlflow":
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, MissingPackages)

from hpo.cli import main

main()
"""


@pytest.mark.slow
def test_tracker_option_rejects_unknown_or_missing_package(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match="--tracker must be one of tensorboard, mlflow, wandb, got 'tensorbord'"
    ):
        Options(QUICK, trackers=("mlflow", "tensorbord"))
    (tmp_path / "wandb").mkdir()
    for name, installed in (("wandb", False), ("mlflow", False), ("tensorboard", True)):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM_WITHOUT_PACKAGES, "track", "nowhere", "--tracker", name],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 2
        command = f"pip install 'hpo-islands[{name}]'"
        reason = (
            "nowhere holds no run" if installed else f"the package is not installed. Run: {command}"
        )
        assert reason in done.stderr


def test_confirmation_that_was_withdrawn_is_not_shown() -> None:
    individuals = Individuals()
    (root,) = individuals.add_trials([make_evaluation(3, "waiting", started=math.nan)])
    assert individuals.find_latest(root) is None
    individuals.add_trials([make_evaluation(3, "interrupted", started=math.nan)])
    assert individuals.find_latest(root) is None
    individuals.add_trials([make_evaluation(4, "running", retry_of=3)])
    assert individuals.merge_trials(root).state == "running"
