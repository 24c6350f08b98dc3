"""What a run prints while it goes on, as plain lines."""

from __future__ import annotations

import io
import re
import time

import pytest

from hpo.report import progress
from hpo.store.trials import Evaluation
from tests.support.outcome import lines_of


def one(trial: int, began: float, ended: float | None = None) -> Evaluation:
    state, loss = ("running", float("inf")) if ended is None else ("complete", 1.0 / (trial + 1))
    times = (began, float("nan") if ended is None else ended)
    return Evaluation(trial, state, loss, {"lr": 0.1}, 0, trial % 4, 0, 10.0, started=times[0], ended=times[1])


def test_each_evaluation_is_a_line_and_the_time_left_knows_what_is_half_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_ESTIMATES", 0.0)
    now = time.time()
    past = [one(trial, now - 9000, now - 8990) for trial in range(4)]
    ended = [one(trial, now - 15, now - 5) for trial in range(4, 8)]
    running = [one(trial, now - 5) for trial in range(8, 12)]
    news, out = iter([past, [*ended, *running]]), io.StringIO()
    with progress.Progress(lambda: next(news, []), 20, out):
        while "left" not in out.getvalue():
            time.sleep(0.05)
    text = out.getvalue()
    assert [(line["done"], line["best"]) for line in lines_of(text)] == [(str(n), "best") for n in (5, 6, 7, 8)]
    found = re.search(r"^-- best so far 0.125 \(trial 7: lr=0.1\), .* gone, about (\S+) s left$", text, re.MULTILINE)
    assert found
    # Four in ten seconds each, and four half done: six in 15 s; twelve are left, of which two are done by halves.
    assert float(found[1]) == pytest.approx(25, abs=1)
