"""What a run prints while it goes on, as plain lines."""

from __future__ import annotations

import io
import re
import time

import pytest

from hpo.store.evaluations import Evaluation
from hpo.views import progress
from tests.support.evaluations import one
from tests.support.outcome import lines_of


def complete(trial: int, began: float) -> Evaluation:
    return one(trial, loss=1.0 / (trial + 1), worker=trial % 4, started=began, ended=began + 10)


def test_each_evaluation_is_a_line_and_the_time_left_knows_what_is_half_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_ESTIMATES", 0.0)
    now = time.time()
    past = [complete(trial, now - 9000) for trial in range(4)]
    ended = [complete(trial, now - 15) for trial in range(4, 8)]
    running = [one(trial, "running", worker=trial % 4, started=now - 5) for trial in range(8, 12)]
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
