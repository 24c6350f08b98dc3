"""Runs on disk as if they had been made: evaluations with known times, losses and ends, and no MPI."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from optuna.trial import FrozenTrial, TrialState

from hpo import Categorical, Float, Int, SearchSpace
from hpo.store.record import Record
from hpo.store.run_dir import RunDir
from tests.support.manifests import CONTENT

SPACE = SearchSpace(
    layers=Int(1, 5), activation=Categorical("relu", "tanh"), lr=Float(1e-4, 1.0, log=True), gamma=Float(0.5, 1.0)
)
BEGAN = 1_800_000_000.0  # seconds since the epoch: 2027-01-15 08:00:00 UTC


def make_run(path: Path, space: SearchSpace = SPACE, **about: Any) -> Record:
    """Make a run directory whose study is empty."""
    path.mkdir(parents=True)
    content = {**CONTENT, "space": space.describe(), "study": path.name, **about}
    run_dir = RunDir(path)
    run_dir.run_json.write_text(json.dumps(content))
    return Record.create(run_dir.journal, path.name, space.describe())


def add(
    record: Record,
    state: TrialState = TrialState.COMPLETE,
    *,
    curve: Mapping[int, float] | None = None,
    params: Mapping[str, Any] | None = None,
    began: float = BEGAN,
    seconds: float = 1.0,
    space: SearchSpace = SPACE,
    **attributes: Any,
) -> None:
    """Add an evaluation that began and ended when it did, with the loss after each epoch."""
    curve = {1: 1.0, 2: 0.5} if curve is None else curve
    ended = state.is_finished()
    trial = FrozenTrial(
        number=-1,
        trial_id=-1,
        state=state,
        value=min(curve.values()) if state in (TrialState.COMPLETE, TrialState.PRUNED) else None,
        datetime_start=datetime.fromtimestamp(began),
        datetime_complete=datetime.fromtimestamp(began + seconds) if ended else None,
        params=dict(params or {"layers": 1, "activation": "relu", "lr": 0.1, "gamma": 0.9}),
        distributions=space.distributions(),
        user_attrs={"island": 0, "worker": 0, "generation": 0, "propagator": "ga", "seconds": seconds, **attributes},
        system_attrs={},
        intermediate_values=dict(curve),
    )
    record._storage.create_new_trial(record._study_id, template_trial=trial)


def add_search(record: Record, count: int, workers: int = 4) -> None:
    """Add the evaluations of a search that gets better, in which some are pruned and some fail."""
    chance = random.Random(0)
    free = [BEGAN] * workers
    for trial in range(count):
        worker = min(range(workers), key=free.__getitem__)
        seconds = chance.uniform(2, 6)
        lowest = 0.05 + 2 * math.exp(-trial / (count / 5)) * chance.random() + 0.1 * chance.random()
        curve = {epoch: lowest * (0.5 + 2 / epoch) for epoch in range(1, 5)}
        state = TrialState.COMPLETE
        attributes: dict[str, Any] = {"metrics": {"accuracy": 1 - lowest / 4}}
        if trial % 9 == 5:
            state, curve = TrialState.PRUNED, {1: curve[1], 2: curve[2]}
        if trial % 13 == 7:
            reason = f"rank {trial % 2}: ValueError: too bad in train.py:{trial % 3}"
            state, attributes = TrialState.FAIL, {"failure": reason, "traceback": f"Traceback of trial {trial}\nmore"}
        add(
            record,
            state,
            curve=curve,
            params={
                "layers": chance.randint(1, 5),
                "activation": chance.choice(["relu", "tanh"]),
                "lr": 10 ** chance.uniform(-4, 0),
                "gamma": chance.uniform(0.5, 1.0),
            },
            began=free[worker],
            seconds=seconds,
            island=worker * 2 // workers,
            worker=worker,
            generation=trial // workers,
            immigrants={str(1 - worker * 2 // workers): trial // 10} if trial >= 10 else {},
            **attributes,
        )
        free[worker] += seconds + 0.2
