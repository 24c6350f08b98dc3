"""Test `hpo show`, which prints an evaluation, and `hpo top --failed`, as text and as JSON."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from optuna.trial import TrialState
from rich.cells import cell_len

from hpo import Categorical, Float, SearchSpace
from hpo.results.reader import RunReader
from hpo.store.evaluations import rank_evaluations
from hpo.store.record import Record
from hpo.store.run_dir import RunDir
from hpo.trainer.search_file import load_search_file
from hpo.views.live.run_status import compute_run_status
from hpo.views.live.run_watch import RunListing
from hpo.views.live.table_rows import make_failure_rows
from hpo.views.page.html_report import render_report
from tests.support.endurance import FAULTY
from tests.support.launch import PROGRAM, ROOT, Hpo, Mpi, make_hpo_command
from tests.support.limits import scale
from tests.support.runs import (
    HOSTILE,
    MANIFEST_CONTENT,
    QUICK,
    START_SECONDS,
    add_evaluation,
    claim_evaluation,
    complete_evaluations,
    make_run,
    make_run_of_everything,
    start_evaluation,
    start_session,
)

PLACED = "rank 1, my_search.py:33: ValueError: injected"
LATE = "timeout: rank 0 waited 15 s at my_search.py:20 for rank 1, which was at my_search.py:15"
TRACEBACK = (
    'Traceback (most recent call last):\n  File "my_search.py", line 33, in objective\n'
    "ValueError: injected\n"
)


def parse_facts(text: str) -> dict[str, str]:
    """Parse the lines above the losses.

    Return a text for each name; lines that belong to one name are joined by "; ".
    """
    facts: dict[str, str] = {}
    name = ""
    for line in text.split("\n\n")[1].splitlines():
        if line.startswith("    ") and name == "losses":
            continue
        if line[:14].strip():
            name = line[:14].strip()
        facts[name] = f"{facts[name]}; {line[14:]}" if name in facts else line[14:]
    return facts


def add_failure(record: Record, failure: str = PLACED, **values: Any) -> None:
    add_evaluation(record, TrialState.FAIL, failure=failure, **{"traceback": TRACEBACK, **values})


def test_show_prints_every_state(tmp_path: Path, hpo: Hpo) -> None:
    run_dir = make_run_of_everything(tmp_path)
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    shown = {}
    for name in (*map(str, range(11)), "confirm-0", "confirm-1"):
        status, out, err = hpo("show", run_dir, name)
        assert (status, err) == (0, "")
        first, shown[name] = out.splitlines()[0], parse_facts(out)
        assert first.startswith(f"trial {name} of {run_dir}: ")
        shown[name]["state"] = first.partition(": ")[2]
    states = ["complete", "pruned", "complete", "pruned", "failed"]
    assert [shown[str(trial)]["state"] for trial in (0, 1, 5, 6, 7)] == states
    assert shown["8"]["state"] == "interrupted, and retried as trial 10"
    assert shown["10"]["retry of"] == "trial 8, which was interrupted"
    nothing = "the run is not active; --resume evaluates it"
    assert [shown[name]["state"] for name in ("9", "10", "confirm-1")] == [
        f"not ended: {nothing}",
        *[f"waiting: {nothing}"] * 2,
    ]
    assert shown["1"]["imported from"] == f"trial 1 of {tmp_path}/before, to island 1, worker 1"
    assert "seed" not in shown["1"], "the seed belongs to another run"
    assert shown["4"]["bred"] == "island 1, worker 1, generation 5, propagator ga"
    assert shown["4"]["parameters"] == "depth = 5; act = tanh; flag = False; lr = 0.5"
    assert (shown["4"]["loss"], shown["4"]["metrics"]) == ("5.0", "accuracy = 0.5")
    assert shown["6"]["losses"] == "3 epochs, the lowest 7.333 after epoch 3"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d \S+, after 0.7 s", shown["6"]["ended"])
    assert shown["0"]["confirmed by"] == "confirm-0: 1.25; confirm-1: waiting"
    assert shown["confirm-0"]["confirms"] == "trial 0, with another seed; on island 0, worker 0"
    seeds = [evaluation.seed for evaluation in RunReader(run_dir).read_confirmations()]
    assert [shown[f"confirm-{n}"]["seed"] for n in (0, 1)] == list(map(str, seeds))
    assert not {"bred", "started", "logs"} & shown["10"].keys()
    assert before == {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}, (
        "show must not write"
    )


def test_show_prints_pause_promotion_and_inheritance(tmp_path: Path, hpo: Hpo) -> None:
    record, run_dir = make_run(tmp_path / "run", pruner="asha"), tmp_path / "run"
    add_evaluation(record, TrialState.PRUNED, curve={1: 0.9}, paused_after=1)
    add_evaluation(record, TrialState.PRUNED, curve={1: 0.8}, paused_after=1)
    add_evaluation(
        record, curve={1: 0.8, 2: 0.5}, retry_of=1, resumed_from_step=1, seconds_before=0.5
    )
    add_evaluation(record, curve={1: 0.4}, inherits=2)
    shown = []
    for trial in range(4):
        status, out, err = hpo("show", run_dir, trial)
        assert (status, err) == (0, "")
        shown.append({**parse_facts(out), "state": out.splitlines()[0].partition(": ")[2]})
    assert shown[0]["state"] == "paused after 1 epoch"
    assert shown[1]["state"] == "paused after 1 epoch, and promoted: it continues as trial 2"
    assert shown[2]["retry of"] == "trial 1, which was promoted"
    assert shown[2]["resumed"] == "from the checkpoint of that trial, after 1 epoch"
    assert shown[3]["inherits"] == "the checkpoint at the end of trial 2"
    known = json.loads(hpo("show", run_dir, 1, "--json")[1])
    assert (known["state"], known["paused_after"], known["retried_by"]) == ("promoted", 1, 2)
    rows = json.loads(hpo("export", run_dir, "--to", "json")[1])
    assert [(row["state"], row["inherits"]) for row in rows] == [
        ("paused", None),
        ("promoted", None),
        ("complete", None),
        ("complete", 2),
    ]


def test_show_without_trial_chooses_winner_or_latest_failure(tmp_path: Path, hpo: Hpo) -> None:
    record = make_run(tmp_path / "run")
    run_dir = tmp_path / "run"
    status, out, err = hpo("show", run_dir)
    nothing = "no evaluation has succeeded or failed. Name one of its trials:"
    assert (status, out, err) == (2, "", f"error: {run_dir}: {nothing} none yet\n")
    add_evaluation(record, TrialState.RUNNING)
    assert hpo("show", run_dir)[2] == f"error: {run_dir}: {nothing} 0\n"
    for seconds in (1.0, 9.0, 5.0):
        add_failure(record, seconds=seconds)
    first = f"trial 2 of {run_dir}: failed (the latest failure, since no evaluation has succeeded)"
    assert hpo("show", run_dir)[1].splitlines()[0] == first, "trial 2 ended last"
    add_evaluation(record, curve={1: 0.4})
    add_evaluation(record, curve={1: 0.3})
    first = f"trial 5 of {run_dir}: complete (the winner: the lowest loss)"
    assert hpo("show", run_dir)[1].splitlines()[0] == first


def test_show_without_trial_chooses_confirmed_winner(tmp_path: Path, hpo: Hpo) -> None:
    session, space = (
        start_session(tmp_path / "run", confirm_seeds=1, top_n=2),
        load_search_file(QUICK).space,
    )
    record = session.open_record()
    complete_evaluations(record, 1, 2)
    session.create_confirmations(space)
    confirmations = session.open_confirmations()
    total = session.confirmation_plan.enqueue_planned(
        confirmations, rank_evaluations(record.read_evaluations(), 2), space
    )
    for loss in (9.0, 8.0):
        assert (
            hpo("show", tmp_path / "run")[1]
            .splitlines()[0]
            .endswith("complete (the winner: the lowest loss)")
        )
        assignment = claim_evaluation(confirmations, None, {}, total, island=0, worker=0)
        confirmations.complete(assignment, loss, 1.0, {})
    first = hpo("show", tmp_path / "run")[1].splitlines()[0]
    assert first.endswith("run: complete (the winner: the lowest mean loss over other seeds)")
    assert first.startswith("trial 1 of ")


def test_confirmations_with_other_settings_count_as_a_cost_only(tmp_path: Path, hpo: Hpo) -> None:
    space = load_search_file(QUICK).space
    for settings in ((), ("epochs=3",)):
        session = start_session(tmp_path / "run", resume=True, confirm_seeds=2, settings=settings)
        record = session.open_record()
        if not settings:
            complete_evaluations(record, 1)
        session.create_confirmations(space)
        confirmations = session.open_confirmations()
        best = rank_evaluations(record.read_evaluations(), 1)
        total = session.confirmation_plan.enqueue_planned(confirmations, best, space)
        for _ in range(2):
            assignment = claim_evaluation(confirmations, None, {}, total, hosts={"node": 1})
            confirmations.complete(assignment, 1.5, 3600.0, {})
    details = json.loads(hpo("show", tmp_path / "run", 0, "--json")[1])
    assert details["confirmed_by"] == ["confirm-2", "confirm-3"]
    summary = json.loads(hpo("top", tmp_path / "run", "--json")[1])
    assert [len(each["losses"]) for each in summary["confirmed"]] == [2]
    assert summary["rank_hours"]["confirmations"] == 4.0
    start_session(tmp_path / "run", resume=True, confirm_seeds=0)
    summary = json.loads(hpo("top", tmp_path / "run", "--json")[1])
    assert (summary["confirmed"], summary["rank_hours"]["confirmations"]) == ([], 4.0)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("11", "{0} has no trial 11. Its trials: 0 to 10 and confirm-0 to confirm-1"),
        ("confirm-2", "{0} has no trial confirm-2. Its trials: 0 to 10 and confirm-0 to confirm-1"),
        ("best", "TRIAL must be a number or confirm-N, got 'best'"),
        ("\N{SUPERSCRIPT TWO}", "TRIAL must be a number or confirm-N, got "),
        ("9" * 30, "TRIAL must be a number or confirm-N, got "),
    ],
)
def test_show_unknown_trial_prints_one_message(
    tmp_path: Path, hpo: Hpo, name: str, message: str
) -> None:
    run_dir = make_run_of_everything(tmp_path)
    status, out, err = hpo("show", run_dir, name)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert message.format(run_dir) in err


@pytest.mark.slow
def test_show_prints_running_and_waiting_evaluations(tmp_path: Path, hpo: Hpo) -> None:
    session = start_session(tmp_path / "run")
    record = session.open_record()
    start_evaluation(record, 3)
    record.interrupt(start_evaluation(record, 4))
    with session.run_dir.hold_lock():
        code = "import sys; from hpo.cli import main; "
        code += f"sys.argv = ['hpo', 'show', {str(tmp_path / 'run')!r}"
        running, killed, waiting = (
            subprocess.run(
                [sys.executable, "-c", f"{code}, '{trial}']; main()"],
                cwd=ROOT,
                capture_output=True,
                text=True,
                timeout=scale(60),
                check=True,
            ).stdout
            for trial in (0, 1, 2)
        )
    assert parse_facts(killed)["ended"].startswith("when its job was killed; found ")
    assert running.splitlines()[0].endswith(": running")
    assert re.fullmatch(r"not yet, after \d+\.\d s", parse_facts(running)["ended"])
    assert "    1  4       2  3.5     3  3.333" in running.splitlines()
    assert waiting.splitlines()[0].endswith(": waiting")
    session.run_dir.lock.write_text("process 1 on node17 since 2026-01-01 00:00:00\n")
    assert "running, or the run has crashed" in hpo("show", tmp_path / "run", 0)[1]


def test_show_prints_crashes_and_retries(tmp_path: Path, hpo: Hpo) -> None:
    record = start_session(tmp_path / "run").open_record()
    start_evaluation(record, 3)
    for _ in range(2):
        assert record.requeue_interrupted() == 1
        assert claim_evaluation(record, None, {}, 9, island=0, worker=0, generation=0)
    facts = parse_facts(hpo("show", tmp_path / "run", 2)[1])
    assert facts["retry of"] == "trial 1, which was interrupted"
    assert facts["crashes"] == "the job crashed 2 times in a row during its earlier trials"
    assert "resumed" not in facts


def test_show_prints_checkpoint_and_resume(tmp_path: Path, hpo: Hpo) -> None:
    record = start_session(tmp_path / "run").open_record()
    record.record_checkpoint(start_evaluation(record, 1), 3)
    record.requeue_interrupted()
    assert parse_facts(hpo("show", tmp_path / "run", 0)[1])["checkpoint"] == "after 3 epochs"
    again = claim_evaluation(record, None, {}, 9)
    record.record_resume(again, [0.5, 0.25, 0.75], 2.5)
    record.complete(again, 0.25, 4.0, {})
    facts = parse_facts(hpo("show", tmp_path / "run", 1)[1])
    assert facts["resumed"] == "from the checkpoint of that trial, after 3 epochs"
    assert facts["ended"].endswith(", after 4.0 s, 2.5 s of it before the resume")
    assert "crash_count" not in facts
    content = json.loads(hpo("show", tmp_path / "run", 1, "--json")[1])
    assert (content["resumed_from_step"], content["losses"]) == (
        3,
        {"1": 0.5, "2": 0.25, "3": 0.75},
    )


def test_show_samples_losses_of_long_curve(tmp_path: Path, hpo: Hpo) -> None:
    record = make_run(tmp_path / "run")
    curve = {epoch: 1 + 1 / epoch for epoch in range(1, 1001)} | {777: 0.25}
    add_evaluation(record, curve=curve)
    add_evaluation(record, curve={epoch: 1 / epoch for epoch in range(1, 13)})
    out = hpo("show", tmp_path / "run", 0)[1]
    heading = "1000 epochs, the lowest 0.25 after epoch 777; 52 are shown, --json has all"
    assert parse_facts(out)["losses"] == heading
    table = out[out.index(heading) + len(heading) + 1 :].splitlines()
    assert len(table) <= 11
    assert max(map(len, table)) < 80
    cells = {
        int(epoch): float(loss) for epoch, loss in re.findall(r"(\d+)  ([\d.]+)", "\n".join(table))
    }
    assert set(cells) == {1, 777, *range(20, 1001, 20)}
    assert all(loss == pytest.approx(curve[epoch], rel=1e-3) for epoch, loss in cells.items())
    losses = json.loads(hpo("show", tmp_path / "run", 0, "--json")[1])["losses"]
    assert losses == {str(epoch): loss for epoch, loss in curve.items()}
    few = hpo("show", tmp_path / "run", 1)[1]
    assert re.findall(r"(\d+)  [\d.]+", few[few.index("12 epochs") :]) == [
        str(epoch) for epoch in range(1, 13)
    ]


EVIL = "\x1b[2J\x07\r\x08\x9b31m\u202e\u2028\0\udcff\t\N{PILE OF POO}"


def test_show_escapes_control_characters_in_records(tmp_path: Path, hpo: Hpo) -> None:
    long = "w" * 10_000
    run_dir, space = tmp_path / "run", SearchSpace(x=Categorical(EVIL, long), y=Float(0, 1))
    record = make_run(run_dir, space)
    traceback = f"Traceback{EVIL}:\n  File 'x{EVIL}'\n\n\traise{EVIL}\r\nValueError: {EVIL}\n"
    others = {"propagator": EVIL, "metrics": {EVIL: 0.5}, "immigrants": {EVIL: 2}}
    add_failure(
        record, f"{EVIL}\n{EVIL}", traceback=traceback, params={"x": EVIL, "y": 0.5}, space=space
    )
    add_failure(record, HOSTILE, params={"x": long, "y": 0.5}, space=space, **others)
    add_evaluation(
        record,
        params={"x": EVIL, "y": 0.5},
        space=space,
        imported_from=f"\n{EVIL}",
        metrics={EVIL: 0.5},
    )
    (run_dir / "test.json").write_text(
        json.dumps({"trial": 2, "times": 1, "metrics": {EVIL: 1}, "predictions": []})
    )
    (run_dir / "logs").mkdir()
    (run_dir / "logs" / "0.txt").write_bytes(
        f"rank 0 | {EVIL}\nrank 1 | {EVIL}".encode(errors="surrogatepass")
    )
    for arguments in (
        ["show", run_dir, 0],
        ["show", run_dir, 1],
        ["show", run_dir, 2],
        ["top", run_dir, "--failed"],
    ):
        status, out, err = hpo(*arguments)
        assert (status, err) == (0, "")
        assert out.replace("\n", "").isprintable()
        assert "\N{PILE OF POO}" in out
    *_, first, second, third, fourth, fifth = hpo("show", run_dir, 0)[1].splitlines()
    assert [first[:13], second[:13], third, fourth[:17], fifth[:15]] == [
        *("    Traceback", "      File 'x", "", "            raise", "    ValueError:"),
    ]
    assert hpo("show", run_dir, 0)[1].splitlines()[-7:-5] == ["", "traceback:"]
    assert parse_facts(hpo("show", run_dir, 1)[1])["parameters"] == f"x = {long}; y = 0.5"
    content = json.loads(hpo("show", run_dir, 0, "--json")[1])
    assert content["traceback"] == traceback.replace("\udcff", "\\udcff")
    assert content["params"]["x"] == EVIL.replace("\udcff", "\\udcff")
    for arguments in (
        ["top", run_dir],
        ["best", run_dir],
        ["export", run_dir, "--to", EVIL],
        ["show", run_dir, EVIL],
    ):
        out, err = hpo(*arguments)[1:]
        assert (out + err).replace("\n", "").isprintable()
        assert "\\u202e" in out + err
    assert len(hpo("best", run_dir)[2].splitlines()) == 2


def test_lock_holder_control_characters_are_escaped(tmp_path: Path, hpo: Hpo) -> None:
    run_dir = RunDir(tmp_path)
    run_dir.lock.write_text("process 1 on \x1b[31m\N{RIGHT-TO-LEFT OVERRIDE} since 2026\n")
    assert run_dir.holder == r"process 1 on \x1b[31m\u202e since 2026"
    with run_dir.lock.open("a") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        command_line = (
            "import sys; from pathlib import Path; from hpo.store.run_dir import RunDir\n"
            "try: RunDir(Path(sys.argv[1])).hold_lock().__enter__()\n"
            "except ValueError as error: print(error)"
        )
        given = [sys.executable, "-c", command_line, str(tmp_path)]
        message = subprocess.run(
            given, cwd=ROOT, capture_output=True, text=True, timeout=scale(60), check=True
        ).stdout
    assert message.startswith(
        rf"{tmp_path} is in use by process 1 on \x1b[31m\u202e since 2026: wait for it"
    )
    (tmp_path / "run.json").write_text(
        json.dumps({**MANIFEST_CONTENT, "space": {"\x1b[31m": "x"}, "budget": "\x1b[31m"})
    )
    (tmp_path / "\x1b[31m").mkdir()
    for path in (tmp_path, tmp_path / "\x1b[31m"):
        assert r"\x1b[31m" in (message := hpo("top", path)[2])
        assert message.removesuffix("\n").isprintable()


@pytest.mark.slow
def test_show_in_ascii_locale_escapes_characters(tmp_path: Path) -> None:
    run_dir = make_run_of_everything(tmp_path)
    for arguments in (["show", run_dir, 7], ["top", run_dir, "--failed"], ["top", run_dir]):
        environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
        done = subprocess.run(
            make_hpo_command(*arguments),
            cwd=ROOT,
            env=environment,
            capture_output=True,
            timeout=scale(60),
        )
        assert (done.returncode, done.stderr) == (0, b"")
        assert b"[red]\\U0001f4a9\\udcffxxx" in done.stdout
        assert done.stdout.isascii()


def test_show_prints_output_of_evaluation(tmp_path: Path, hpo: Hpo) -> None:
    run_dir = make_run_of_everything(tmp_path)
    assert parse_facts(hpo("show", run_dir, 7)[1])["logs"] == "nothing was kept"
    assert json.loads(hpo("show", run_dir, 7, "--json")[1])["logs"] is None
    paths = [RunDir(run_dir).get_log_path(7), RunDir(run_dir).get_log_path(0, confirms=True)]
    assert paths == [run_dir / "logs" / "7.txt", run_dir / "logs" / "confirm-0.txt"]
    paths[0].parent.mkdir()

    paths[1].write_text("rank 0 | epoch 1\nrank 1 | epo")
    out = hpo("show", run_dir, "confirm-0")[1]
    assert out.endswith(f"\n\noutput, {paths[1]}:\n    rank 0 | epoch 1\n    rank 1 | epo\n")

    paths[0].write_bytes(b"rank 0 | caf\xe9\n")
    out = hpo("show", run_dir, 7)[1]
    assert (
        f"\n\noutput, {paths[0]}:\n    rank 0 | caf\N{REPLACEMENT CHARACTER}\n\ntraceback:\n" in out
    )

    paths[0].write_text("".join(f"rank 0 | line {line}\n" for line in range(1, 1235)) + "half")
    out = hpo("show", run_dir, 7)[1]
    assert f"\n\noutput, without its first 1035 lines, {paths[0]}:\n    rank 0 | line 1036\n" in out
    assert "    rank 0 | line 1234\n    half\n\n" in out
    assert "line 1035\n" not in out
    content = json.loads(hpo("show", run_dir, 7, "--json")[1])["logs"]
    assert (content["path"], content["before"], len(content["lines"])) == (str(paths[0]), 1035, 200)
    assert (content["lines"][0], content["lines"][-1]) == ("rank 0 | line 1036", "half")

    paths[0].write_text(f"{'x' * 5_000_000}\nlast\n")
    out = hpo("show", run_dir, 7)[1]
    assert 1_000_000 < len(out) < 1_100_000
    assert "xxx\n    last\n" in out

    paths[0].write_text("")
    assert parse_facts(hpo("show", run_dir, 7)[1])["logs"] == "nothing was kept"
    paths[0].unlink()
    paths[0].mkdir()
    assert (
        parse_facts(hpo("show", run_dir, 7)[1])["logs"]
        == f"{paths[0]} cannot be read: it is not a file"
    )


def test_show_reads_study_in_other_storage(tmp_path: Path, hpo: Hpo) -> None:
    url = f"sqlite:///{tmp_path}/study.db"
    session = start_session(tmp_path / "run", storage=url)
    record = session.open_record()
    record.fail(start_evaluation(record, 3), PLACED, TRACEBACK, 0.8)
    for more in ([], ["--storage", url]):
        status, out, err = hpo("show", tmp_path / "run", *more)
        assert (status, err) == (0, "")
        assert out.endswith(
            "traceback:\n" + "".join(f"    {line}\n" for line in TRACEBACK.splitlines())
        )
        assert parse_facts(out)["failure"] == PLACED


def parse_rows(table: str) -> list[list[str]]:
    """Parse the rows of a table, from the line below the headings to the next empty line."""
    return [re.split(r" {3,}", line.strip()) for line in table.split("\n\n")[0].splitlines()[3:]]


def test_top_failed_lists_latest_first(tmp_path: Path, hpo: Hpo) -> None:
    record = make_run(tmp_path / "my runs" / "it")
    run_dir = tmp_path / "my runs" / "it"
    assert hpo("top", run_dir, "--failed") == (0, "No evaluation failed.\n", "")
    assert hpo("top", run_dir, "--failed", "--json") == (0, "[]\n", "")
    add_evaluation(record)
    add_failure(
        record, began=START_SECONDS + 9, island=1, worker=3, seconds=2.5, curve={1: 0.5, 2: 0.25}
    )
    add_failure(record, LATE, began=START_SECONDS + 5, curve={})
    add_evaluation(record, TrialState.FAIL, failure="interrupted")
    more = f"hpo show '{run_dir}' 1 shows everything about trial 1\n"
    out = hpo("top", run_dir, "--failed")[1]
    columns = "trial island worker seconds epochs layers activation lr gamma failure"
    assert " ".join(out.splitlines()[1].split()) == columns
    assert parse_rows(out) == [
        [
            "1",
            "1",
            "3",
            "2.5",
            "2",
            "1",
            "relu",
            "0.1",
            "0.9",
            "my_search.py:33: ValueError: injected",
        ],
        ["2", "0", "0", "1.0", "0", "1", "relu", "0.1", "0.9", LATE],
    ]
    assert out.endswith(f"\n\nall 2 failures; {more}")
    for trial in range(10):
        add_failure(record, f"rank 0: {trial}", began=START_SECONDS - 100 - trial)
    out = hpo("top", run_dir, "--failed")[1]
    assert [row[0] for row in parse_rows(out)] == ["1", "2", "4"]
    assert out.endswith(f"the latest 3 of 12 failures; {more}")
    assert len(parse_rows(hpo("top", run_dir, "--failed", "-n", 12)[1])) == 12
    assert hpo("top", run_dir, "--failed", "-n", 0)[0] == 2
    content = json.loads(hpo("top", run_dir, "--failed", "-n", 2, "--json")[1])
    assert [
        (failure["trial"], failure["failure"], failure["traceback"]) for failure in content
    ] == [
        (1, PLACED, TRACEBACK),
        (2, LATE, TRACEBACK),
    ]
    assert content[0] == json.loads(hpo("show", run_dir, 1, "--json")[1])


def test_top_failed_marks_confirmations(tmp_path: Path, hpo: Hpo) -> None:
    run_dir = make_run_of_everything(tmp_path)
    session = start_session(run_dir, resume=True)
    confirmations = session.open_confirmations()
    assignment = claim_evaluation(confirmations, None, {}, 2, island=0, worker=1)
    confirmations.fail(assignment, PLACED, TRACEBACK, 3.0)
    out = hpo("top", run_dir, "--failed")[1]
    assert [row[:4] for row in parse_rows(out)] == [
        ["confirm-1", "0", "1", "3.0"],
        ["7", "1", "1", "0.8"],
    ]
    assert out.endswith(
        f"all 2 failures; hpo show {run_dir} confirm-1 shows everything about trial confirm-1\n"
    )
    failures = json.loads(hpo("top", run_dir, "--json")[1])["failures"]
    assert {(entry["trial"], entry["confirms"]) for entry in failures} == {(7, None), (1, 0)}
    snapshot = RunReader(run_dir).take_snapshot()
    rows = make_failure_rows([*snapshot.evaluations, *snapshot.confirmations])
    assert set(rows.keys) == {"confirm-1", "7"}
    index = rows.keys.index("confirm-1")
    assert rows.cells(index) == ("1", "confirm-1", "my_search.py:33: ValueError: injected")


def run_in_terminal(columns: int, *arguments: object) -> str:
    """Run a command in a terminal with this number of columns, and return its output."""
    terminal, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = {
        name: text for name, text in os.environ.items() if name not in ("COLUMNS", "LINES")
    }
    with subprocess.Popen(
        make_hpo_command(*arguments), cwd=ROOT, env=environment, stdout=slave, stderr=slave
    ) as process:
        os.close(slave)
        written = b""
        with suppress(OSError):  # Reading fails after the process has closed the other end.
            while some := os.read(terminal, 65536):
                written += some
        assert process.wait(timeout=scale(60)) == 0
    os.close(terminal)
    return written.decode().replace("\r\n", "\n")


@pytest.mark.slow
def test_top_failed_fits_terminal_width(tmp_path: Path) -> None:
    record = make_run(tmp_path / "run")
    add_failure(record, f"{PLACED} {'and so on ' * 30}end")
    add_failure(record, "\N{PILE OF POO}" * 200)
    wide = run_in_terminal(150, "top", tmp_path / "run", "--failed").split("\n\n")[0].splitlines()
    assert [cell_len(line) for line in wide[3:]] == [150, 150]
    assert all(line.endswith("\u2026") for line in wide[3:])
    assert max(map(cell_len, wide)) == 150
    narrow = run_in_terminal(30, "top", tmp_path / "run", "--failed").split("\n\n")[0].splitlines()
    assert [cell_len(line[line.index("0.9   ") + 6 :]) for line in narrow[3:]] == [40, 40], (
        "a readable part remains"
    )
    piped = subprocess.run(
        make_hpo_command("top", tmp_path / "run", "--failed"),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=scale(60),
        check=True,
    )
    assert piped.stdout.split("\n\n")[0].endswith("so on end"), "without a terminal, nothing is cut"


def test_top_groups_failures_and_names_latest_trial(tmp_path: Path, hpo: Hpo) -> None:
    run_dir = tmp_path / "run"
    record = make_run(run_dir)
    add_failure(record, LATE, began=START_SECONDS + 50)
    add_failure(record, PLACED, began=START_SECONDS + 20)
    add_failure(record, PLACED.replace("rank 1", "rank 0"), began=START_SECONDS + 10)
    add_failure(record, "rank 3: ValueError: injected", began=START_SECONDS + 30)
    placed = "my_search.py:33: ValueError: injected"
    reasons = json.loads(hpo("top", run_dir, "--json")[1])["failures"]
    assert reasons == [
        {"reason": placed, "count": 2, "trial": 1, "confirms": None, "has_traceback": True},
        {"reason": LATE, "count": 1, "trial": 0, "confirms": None, "has_traceback": True},
        {
            "reason": "ValueError: injected",
            "count": 1,
            "trial": 3,
            "confirms": None,
            "has_traceback": True,
        },
    ]
    out = hpo("top", run_dir)[1]
    table = out[out.index("Failures") :].splitlines()
    assert [line.split(maxsplit=1) for line in table[3:6]] == [
        ["2", placed],
        ["1", LATE],
        ["1", "ValueError: injected"],
    ]
    assert table[6] == f"hpo show {run_dir} 1 shows the traceback"
    page = render_report(RunReader(run_dir), 10, START_SECONDS + 100)
    assert "<p>Trial 1 on island 0" in page
    assert "<p>Trial 2 on island 0" not in page
    silent = make_run(tmp_path / "silent")
    add_failure(silent, "the trainer was ended by SIGKILL", traceback="")
    assert f"hpo show {tmp_path}/silent 0 shows more of it" in hpo("top", tmp_path / "silent")[1]


def test_listing_names_command_for_failed_trial(tmp_path: Path) -> None:
    path = tmp_path / "a run"
    record = make_run(path)
    add_evaluation(record, began=START_SECONDS + 100)
    first = RunReader(path).take_snapshot()
    listing = RunListing(first, path)
    add_failure(record, f"{PLACED}{' and so on' * 30}", began=START_SECONDS + 10)
    add_failure(record, LATE, began=START_SECONDS + 20, traceback="")
    snapshot = RunReader(path).take_snapshot()
    listed = list(listing.format_lines(compute_run_status(snapshot)))[1:]
    assert [
        line.endswith(f"  (hpo show '{path}' {trial})")
        for line, trial in zip(listed, (1, 2), strict=True)
    ]
    assert "  rank 1, my_search.py:33: ValueError: injected and so on" in listed[0]
    assert list(listing.format_lines(compute_run_status(snapshot))) == []


def test_real_failure_is_shown_with_traceback(mpi: Mpi, tmp_path: Path) -> None:
    options = ["--set", "way=raise@training,none,backward", "--evaluations", 3, "--islands", 1]
    job = mpi.run(2, PROGRAM, FAULTY, "--run-dir", "run", *options, cwd=tmp_path)
    assert (job.returncode, job.stderr) == (0, "")
    hint = re.search(r"^(hpo show run \d) shows the traceback$", job.stdout, re.MULTILINE)
    assert hint
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}

    def run_command(line: str) -> str:
        given = make_hpo_command(*line.split()[1:])
        done = subprocess.run(
            given, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=scale(60)
        )
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    shown = run_command(hint[1])
    assert shown.splitlines()[0] == f"trial {hint[1][-1]} of run: failed"
    assert parse_facts(shown)["failure"].endswith("ValueError: injected")
    traceback = shown[shown.index("\ntraceback:\n    Traceback (most recent call last):\n") :]
    assert re.search(
        r'\n      File ".*faulty.py", line \d+, in train\n        act\(way, "training"', traceback
    )
    assert traceback.endswith("\n    ValueError: injected\n")
    failed = run_command("hpo top run --failed")
    assert [row[-1].partition("ValueError")[2] for row in parse_rows(failed)] == [
        ": injected: in the backward pass",
        ": injected",
    ]
    assert run_command("hpo show run").startswith(
        "trial 1 of run: complete (the winner: the lowest loss)\n"
    )
