"""Test the lines that a run prints: one per ended evaluation, with the remaining time."""

from __future__ import annotations

import io
import re
import time
from dataclasses import replace

import pytest

from hpo.store.evaluations import Evaluation
from hpo.views import progress
from hpo.views.progress import ProgressLines
from hpo.views.times import SessionTimes
from tests.support.evaluations import make_evaluation
from tests.support.run_output import parse_lines


def make_complete(trial: int, started: float) -> Evaluation:
    return make_evaluation(
        trial, loss=1.0 / (trial + 1), worker=trial % 4, started=started, ended=started + 10
    )


def test_progress_prints_ended_evaluations_and_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_ESTIMATES", 0.0)
    now = time.time()
    past = [make_complete(trial, now - 9000) for trial in range(4)]
    ended = [make_complete(trial, now - 15) for trial in range(4, 8)]
    running = [
        make_evaluation(trial, "running", worker=trial % 4, started=now - 5)
        for trial in range(8, 12)
    ]
    updates, out = iter([past, [*ended, *running]]), io.StringIO()
    with progress.ProgressPrinter(lambda: next(updates, []), 20, out):
        while "left" not in out.getvalue():
            time.sleep(0.05)
    text = out.getvalue()
    assert [(line["done"], line["best"]) for line in parse_lines(text)] == [
        (str(n), "best") for n in (5, 6, 7, 8)
    ]
    found = re.search(
        r"^-- best so far 0.125 \(trial 7: lr=0.1\), .* gone, about (\S+) s left$",
        text,
        re.MULTILINE,
    )
    assert found
    # Four evaluations have ended and four are half done, which is the work of six in 15 s. Of the
    # twelve left, the running ones count as half done, so ten evaluations need 25 s.
    assert float(found[1]) == pytest.approx(25, abs=1)


def test_time_limit_ends_the_time_left_and_start_up_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_ESTIMATES", 0.0)
    now = time.time()
    updates, out = iter([[], [make_complete(0, now - 20)]]), io.StringIO()
    times = SessionTimes(now - 3600, now + 120)
    with progress.ProgressPrinter(lambda: next(updates, []), 1000, out, times=times):
        while "left" not in out.getvalue():
            time.sleep(0.05)
    assert re.search(
        r"\), 1 h 00 min gone, about (2 min 00|1 min \d\d) s left$", out.getvalue(), re.M
    )


def test_progress_counts_promoted_individual_once() -> None:
    now = time.time()
    lines = ProgressLines([], 3)
    paused = make_evaluation(0, "paused", loss=0.5, started=now, ended=now + 1, paused_after=1)
    promoted = replace(paused, state="promoted")
    again = make_evaluation(2, loss=0.4, started=now + 2, ended=now + 4, retry_of=0)
    # The first trial is paused and promoted between two updates. The last one ends while another
    # trial is running.
    updates = [
        [promoted, make_evaluation(1, "running", started=now)],
        [replace(again, state="running")],
        [promoted, again, make_evaluation(1, "failed", started=now, ended=now + 3)],
        [make_evaluation(3, loss=0.3, started=now + 4, ended=now + 5), again],
    ]
    printed = [
        lines.format_line(evaluation)
        for evaluations in updates
        for evaluation in lines.take_ended(evaluations)
    ]
    assert [line.split()[0] for line in printed] == ["1/3", "2/3", "2/3", "3/3"]
    assert [line.split()[4] for line in printed] == ["paused", "failed", "0.4", "0.3"]
    assert lines.done_count == 3


def test_line_of_a_confirmation_has_no_generation() -> None:
    """A confirmation trains an individual again: no worker has bred it."""
    evaluation = make_evaluation(7, "complete", loss=0.5, worker=3, confirms=2)
    line = ProgressLines([], 6).format_line(evaluation)
    assert line.split() == ["1/6", "0", "3", "0.5", "0.0", "confirms", "2", "lr=0.1"]
