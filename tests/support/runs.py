"""Make run directories without MPI, by a session or from times, losses and states."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from optuna.distributions import BaseDistribution
from optuna.trial import FrozenTrial, TrialState

from hpo import Categorical, Float, Int, SearchSpace
from hpo.evaluation.host import Gpus, RankPlace
from hpo.layout import Layout
from hpo.objectives import ONLY_LOSS, Objectives
from hpo.run.request import make_request
from hpo.run.resolve_options import resolve_options
from hpo.run.session import Session, begin_session, enter_run_dir
from hpo.store.evaluations import Assignment, rank_evaluations
from hpo.store.manifest import FORMAT, Manifest, parse_manifest
from hpo.store.record import Record
from hpo.store.run_dir import RunDir
from hpo.store.study_writer import Claims
from hpo.trainer.search_file import load_search_file
from tests.support.in_process_template import InProcessTemplate
from tests.support.launch import SEARCHES

QUICK = SEARCHES / "quick.py"
HOSTILE = "rank 1: ValueError: =1+1, \x1b[31m\0<b>[red]\N{PILE OF POO}\udcff" + "x" * 10_000
SPACE = SearchSpace(
    layers=Int(1, 5),
    activation=Categorical("relu", "tanh"),
    lr=Float(1e-4, 1.0, log=True),
    gamma=Float(0.5, 1.0),
)
START_SECONDS = 1_800_000_000.0  # In seconds since the epoch: 2027-01-15 08:00:00 UTC.

MANIFEST_CONTENT: dict[str, Any] = {
    "space": {"lr": "Float(0.0, 1.0)"},
    "layout": {"ranks": 8, "ranks_per_worker": 2, "islands": 2},
    "hosts": ["node1"],
    "budget": 64,
    "seed": 0,
    "propagators": ["ga"],
    "pruner": "none",
    "confirm_seeds": 0,
    "format": FORMAT,
    "settings": {"epochs": 4},
    "set": {},
    "storage": "study.log",
    "study": "run",
    "command": "run_islands.py --run-dir run",
    "versions": {"python": "3.11"},
    "sessions": [{"file": "search_space-1.py", "sha256": "0" * 64, "commit": None, "dirty": None}],
}


def make_manifest(**changes: Any) -> Manifest:
    """Return a manifest (content of run.json) with default fields, except for `changes`."""
    return parse_manifest({**MANIFEST_CONTENT, **changes}, Path("run.json"))


def claim_evaluation(
    record: Record,
    params: Mapping[str, Any] | None,
    distributions: Mapping[str, BaseDistribution],
    budget: int,
    **attributes: Any,
) -> Assignment:
    """Claim (begin) an evaluation of `params`. If `params` is None, claim a waiting evaluation."""
    claims = Claims(record, distributions, budget)
    attributes = {"island": 0, "worker": 0, "generation": 0, **attributes}
    assignment = claims.claim(params, **attributes)
    assert assignment is not None
    return assignment


def start_session(run_dir: Path, search_file: Path = QUICK, **options: Any) -> Session:
    """Begin or resume a session as run_islands.py does, with two workers of two ranks."""
    given = {"search_space": search_file, "run_dir": run_dir, **options}
    requested, _ = resolve_options(given, ranks=16)
    here = InProcessTemplate()
    request = make_request(requested, Layout(4, 2, 2), here.ask, here.constraints)
    with ExitStack() as held:
        entered = enter_run_dir(requested.run_dir, search_file.stem, requested.resume, held)
        return begin_session(entered, request, [RankPlace(0, "host", Gpus())] * 4)


def start_evaluation(record: Record, depth: int, **others: Any) -> Assignment:
    """Start an evaluation of tests/searches/quick.py on island 1, and report three losses."""
    act = "relu" if depth < 5 else "tanh"
    params = {"depth": depth, "act": act, "flag": depth % 2 == 0, "lr": depth / 10, **others}
    distributions = load_search_file(QUICK).space.make_distributions()
    attributes = {"island": 1, "worker": 1, "generation": depth, "propagator": "ga"}
    attributes |= {"hosts": {"node": 2}, "gpus": {"node": ["0", "1"]}}
    assignment = claim_evaluation(record, params, distributions, 99, **attributes)
    for epoch in (1, 2, 3):
        record.report(assignment, epoch, depth + 1 / epoch)
    return assignment


def complete_evaluations(record: Record, *depths: int) -> None:
    """Complete an evaluation of tests/searches/quick.py for each depth. Its loss is the depth."""
    for depth in depths:
        record.complete(
            start_evaluation(record, depth), float(depth), 1.5, {"accuracy": depth / 10}
        )


def make_run_of_everything(folder: Path) -> Path:
    """Make a run with evaluations in all states.

    Trials 0 and 1 are imported, 2 to 5 complete, 6 is pruned, 7 has failed, 8 was interrupted, 9
    runs, and 10 waits to retry trial 8. One confirmation of the best is complete, and one waits.
    """
    before = start_session(folder / "before").open_record()
    complete_evaluations(before, 1)
    before.prune(start_evaluation(before, 2), 2.5, 0.5, {})
    session = start_session(folder / "run", warm_start=str(folder / "before"), confirm_seeds=2)
    record, space = session.open_record(), load_search_file(QUICK).space
    complete_evaluations(record, 3, 4, 5, 6)
    record.prune(start_evaluation(record, 7), 7.3, 0.7, {})
    record.fail(start_evaluation(record, 8), HOSTILE, "Traceback ...", 0.8)
    interrupted, running = start_evaluation(record, 9, lr=0.95), start_evaluation(record, 9)
    record.interrupt(interrupted)
    assert running.params["lr"] == 0.9
    session.create_confirmations(space)
    confirmations = session.open_confirmations()
    total = session.confirmation_plan.enqueue_planned(
        confirmations, rank_evaluations(record.read_evaluations(), 1), space
    )
    assignment = claim_evaluation(confirmations, None, {}, total, island=0, worker=0)
    confirmations.complete(assignment, 1.25, 2.0, {})
    return folder / "run"


def make_run(
    path: Path, space: SearchSpace = SPACE, objectives: Objectives = ONLY_LOSS, **changes: Any
) -> Record:
    """Make a run directory with an empty study, and return its record."""
    path.mkdir(parents=True)
    searched = {"space": space.describe(), "study": path.name, "objectives": asdict(objectives)}
    content = {**MANIFEST_CONTENT, **searched, **changes}
    run_dir = RunDir(path)
    run_dir.run_json.write_text(json.dumps(content))
    return Record.create(run_dir.journal, path.name, space.describe(), objectives=objectives)


def add_evaluation(
    record: Record,
    state: TrialState = TrialState.COMPLETE,
    *,
    curve: Mapping[int, float] | None = None,
    params: Mapping[str, Any] | None = None,
    began: float = START_SECONDS,
    seconds: float = 1.0,
    space: SearchSpace = SPACE,
    **attributes: Any,
) -> None:
    """Add an evaluation with a start, `seconds` of duration, and losses by epoch.

    The values of other objectives than the loss are taken from the attribute `metrics`.
    """
    curve = {1: 1.0, 2: 0.5} if curve is None else curve
    ended, others = (
        state.is_finished(),
        record.objectives.select_metric_values(attributes.get("metrics", {})),
    )
    has_loss = state in (TrialState.COMPLETE, TrialState.PRUNED)
    trial = FrozenTrial(
        number=-1,
        trial_id=-1,
        state=state,
        value=None,
        values=[min(curve.values()), *others] if has_loss else None,
        datetime_start=datetime.fromtimestamp(began),
        datetime_complete=datetime.fromtimestamp(began + seconds) if ended else None,
        params=dict(params or {"layers": 1, "activation": "relu", "lr": 0.1, "gamma": 0.9}),
        distributions=space.make_distributions(),
        user_attrs={
            "island": 0,
            "worker": 0,
            "generation": 0,
            "propagator": "ga",
            "seconds": seconds,
            **attributes,
        },
        system_attrs={},
        intermediate_values=dict(curve),
    )
    record._storage.create_new_trial(record._study_id, template_trial=trial)


def add_search(record: Record, count: int, workers: int = 4) -> None:
    """Add `count` evaluations of a search whose losses improve.

    Some evaluations are pruned, and some fail.
    """
    rng = random.Random(0)
    free = [START_SECONDS] * workers
    for trial in range(count):
        worker = min(range(workers), key=free.__getitem__)
        seconds = rng.uniform(2, 6)
        lowest = 0.05 + 2 * math.exp(-trial / (count / 5)) * rng.random() + 0.1 * rng.random()
        curve = {epoch: lowest * (0.5 + 2 / epoch) for epoch in range(1, 5)}
        state = TrialState.COMPLETE
        attributes: dict[str, Any] = {"metrics": {"accuracy": 1 - lowest / 4}}
        if trial % 9 == 5:
            state, curve = TrialState.PRUNED, {1: curve[1], 2: curve[2]}
        if trial % 13 == 7:
            reason = f"rank {trial % 2}: ValueError: too bad in train.py:{trial % 3}"
            state, attributes = (
                TrialState.FAIL,
                {"failure": reason, "traceback": f"Traceback of trial {trial}\nmore"},
            )
        add_evaluation(
            record,
            state,
            curve=curve,
            params={
                "layers": rng.randint(1, 5),
                "activation": rng.choice(["relu", "tanh"]),
                "lr": 10 ** rng.uniform(-4, 0),
                "gamma": rng.uniform(0.5, 1.0),
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
