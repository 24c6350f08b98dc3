"""Simulate the life of a run: sessions that are killed, stopped and resumed, and one to its end.

After each session, the run directory is compared with what was printed and what the ranks have
done.
"""

from __future__ import annotations

import faulthandler
import math
import os
import pickle
import random
import sys
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpo.errors import ExitStatus, RunError
from hpo.space import Float, Int, SearchSpace
from hpo.store.checkpoints import CheckpointStore, read_checkpoint_info
from hpo.store.evaluations import Evaluation, find_root
from hpo.store.record import Record
from tests.simulator.job import Fault, Outcome, Plan, SimulatedJob
from tests.simulator.trainers import Behavior, choose_behavior

_MOST_SESSIONS = 5
_REAL_SECONDS = 120.0  # after which a session counts as an endless loop
# Each ends the session, unless it waits for a change of the disk or a claim that does not come.
_ENDS = (
    "kill job",
    *["kill at disk"] * 3,
    "kill at checkpoint",
    "kill at checkpoint",
    "kill rank",
    "lose host",
    "SIGTERM",
    "SIGUSR1",
    "SIGINT",
    "disk",
)
_STATUSES: frozenset[int | None] = frozenset(
    [ExitStatus.BUDGET_SPENT, ExitStatus.NOTHING_SUCCEEDED]
)
_STATUSES_AFTER: dict[str, tuple[int | None, ...]] = {
    "kill job": (None,),
    "kill at disk": (None,),
    "kill at checkpoint": (None,),
    "kill rank": (None, ExitStatus.CRASHED),
    "lose host": (None, ExitStatus.CRASHED),
    "disk": (ExitStatus.CRASHED, ExitStatus.USAGE_ERROR),
    **dict.fromkeys(("SIGTERM", "SIGUSR1", "SIGINT"), (ExitStatus.UNFINISHED,)),
}
_MEAN_TIMES = (1e-3, 0.1, 20.0, 20.0, 20.0)  # of faults, in seconds: a run starts, or searches
_DISTURBANCES = ("suspend rank", "suspend job", "second job")
# Beginnings of failures that an objective without a fault can have.
_OTHER_FAILURES = ("timeout: ", "the job crashed ")


# The second has 72 individuals, so that workers propose the same ones.
_SPACES = (
    SearchSpace(x=Float(0, 1, mutable=True), y=Float(0, 1)),
    SearchSpace(x=Int(1, 12, mutable=True), y=Int(1, 6)),
)


class ViolationError(AssertionError):
    """The run has done what it must not do."""


class Life:
    """The life of one run. The seed decides all that happens.

    Attributes:
        log: The sessions so far, as lines of text.
        evaluations: Number of trials in the record.
        switches: Number of steps of all threads.
    """

    def __init__(self, seed: int, folder: Path) -> None:
        self.seed = seed
        self.folder = folder
        self.log: list[str] = []
        self.evaluations = 0
        self.switches = 0
        self._run_dir = folder / "run"
        self._journal = self._run_dir / "study.log"
        self._was_suspended = False
        self._printed: set[int] = set()
        self._claimed: Counter[int] = Counter()
        self._begun: set[int] = set()
        self._rng = random.Random(f"life {seed}")
        self._fault_share = self._rng.choice([0.0, 0.0, 0.1, 0.3, 0.7])
        self._mean_seconds = self._rng.choice([1.0, 4.0, 4.0, 30.0])  # of an evaluation
        self._options = self._choose_options()
        self._space = self._rng.choice(_SPACES)

    def _choose_options(self) -> dict[str, Any]:
        rng = self._rng
        options: dict[str, Any] = {
            "search_space": Path("simulated.py"),
            "run_dir": self._run_dir,
            "resume": True,
            "evaluations": rng.choice([3, 10, 25, 50]),
            "propagators": ("random",),
            "test": False,
            "seed": self.seed,
            "collective_timeout": rng.choice([5.0, 30.0, 120.0]),
            # Without a limit, an evaluation on one rank may hang.
            "evaluation_timeout": rng.choice([20.0, 60.0]) if self._fault_share else math.inf,
            "checkpoint_every": rng.choice([None, 1.0, 1.0, math.inf]),
            "max_failures": rng.choice([0, 0, 5]),
            "pollination": rng.random() < 0.7,
        }
        if options["checkpoint_every"] != math.inf and rng.random() < 0.2:
            return {**options, "pbt": True}
        pruner = rng.choice(["none", "none", "median", "asha", "hyperband"])
        return {**options, "pruner": pruner, "confirm_seeds": rng.choice([0, 0, 0, 1])}

    def run(self) -> None:
        """Run all sessions, and check the run after each. Raise Violation at the first mistake."""
        last = self._rng.randrange(_MOST_SESSIONS)
        for number in range(last + 1):
            self._run_session(number, is_last=number == last)

    def _run_session(self, number: int, is_last: bool) -> None:
        plan = self._make_plan(number, is_last)
        faults = ", ".join(f"{one.kind} {one.rank} at {one.at:.1f} s" for one in plan.faults)
        size = plan.options["ranks_per_worker"]
        self.log.append(
            f"session {number}: {plan.ranks} ranks, {size} per worker, {plan.hosts} hosts; {faults}"
        )
        durable = {status.st_ino: status.st_size for _, status in self._list_files()}
        outcome = run_in_process(plan, self.folder / f"output-{number}")
        self.log.append(f"  {_describe(outcome)}")
        self.switches += outcome.switches
        if outcome.violation:
            raise ViolationError(outcome.violation)
        if outcome.is_killed and self._rng.random() < 0.5:
            self._lose_power({**durable, **outcome.synced})
        self._check_session(plan, outcome, is_last)

    def _make_plan(self, number: int, is_last: bool) -> Plan:
        rng = self._rng
        size = rng.choice([1, 2, 2, 3])
        ranks = size * rng.randint(1, 4)
        kinds = [] if is_last else [rng.choice(_ENDS)]
        while rng.random() < 0.2:
            kinds.append(rng.choice(_DISTURBANCES))
        return Plan(
            seed=f"{self.seed}/{number}",
            ranks=ranks,
            hosts=min(rng.choice([1, 1, 2]), ranks),
            options={**self._options, "ranks_per_worker": size},
            space=self._space,
            choose=self._choose_behavior,
            latency=rng.choice([1e-5, 1e-3, 0.05]),
            preemption=rng.choice([0.0, 0.1, 0.5]),
            slowness=rng.choice([0.0, 0.0, 1e-3, 0.1]),
            start=number * 100_000.0,
            faults=[
                Fault(rng.expovariate(1 / rng.choice(_MEAN_TIMES)), kind, rng.randrange(ranks))
                for kind in kinds
            ],
        )

    def _choose_behavior(self, root: int) -> Behavior:
        return choose_behavior(f"{self.seed}/{root}", self._fault_share, self._mean_seconds)

    def _list_files(self) -> list[tuple[Path, os.stat_result]]:
        paths = [*self._run_dir.glob("*.json"), *self._run_dir.glob("checkpoints/*.safetensors")]
        return [(path, path.stat()) for path in sorted([*paths, *self._run_dir.glob("study.log")])]

    def _lose_power(self, durable: Mapping[int, int]) -> None:
        """Cut off a part of the bytes that were not flushed. `durable` has sizes by inode."""
        for path, status in self._list_files():
            size = self._rng.randint(
                min(durable.get(status.st_ino, 0), status.st_size), status.st_size
            )
            os.truncate(path, size)
            if size < status.st_size:
                self.log.append(f"  {path.name} has lost bytes {size} to {status.st_size}")

    # What must hold

    def _check_session(self, plan: Plan, outcome: Outcome, is_last: bool) -> None:
        self._printed.update(outcome.printed)
        self._begun.update(outcome.begun)
        self._claimed.update(number for number, _ in outcome.claimed)
        allowed = _STATUSES.union(*(_STATUSES_AFTER.get(one.kind, ()) for one in plan.faults))
        _require(outcome.status in allowed, f"the status was {outcome.status}")
        bugs = [text for text in outcome.warnings if "Traceback" in text]
        _require(not bugs, bugs[0].splitlines()[-1] if bugs else "")
        has_pauses = any(one.kind.startswith("suspend") for one in plan.faults)
        self._was_suspended |= has_pauses
        is_calm = self._fault_share == 0.0 and not self._was_suspended and len(plan.faults) == 1
        is_late = is_calm and outcome.is_late
        _require(not is_late, "it was stopped, and did not end in time")
        evaluations = self._read_evaluations()
        self.evaluations = len(evaluations)
        self._check_record(evaluations)
        self._check_losses(evaluations)
        if is_last:
            self._check_end(evaluations, outcome)

    def _read_evaluations(self) -> list[Evaluation]:
        if not self._journal.exists():
            return []
        try:
            return Record(self._journal, "run").read_evaluations()
        except KeyError:  # The session was killed before it created the study.
            return []
        except RunError as error:
            raise ViolationError(str(error)) from error

    def _check_record(self, evaluations: Sequence[Evaluation]) -> None:
        for trial in self._printed:
            has_ended = trial < len(evaluations) and _has_ended(evaluations[trial])
            _require(has_ended, f"trial {trial} was printed, and its end is not in the record")
        for trial in (*self._begun, *self._claimed):
            _require(trial < len(evaluations), f"trial {trial} has begun, and is not in the record")
        for trial, count in self._claimed.items():
            _require(count == 1, f"trial {trial} was claimed {count} times")
        firsts = [one for one in evaluations if one.retry_of is None and one.tests is None]
        params = Counter(frozenset(one.params.items()) for one in firsts)
        for found, count in params.items():
            _require(count == 1, f"{count} individuals have {dict(found)}")
        retries = Counter(one.retry_of for one in evaluations if one.retry_of is not None)
        for one in evaluations:
            is_interrupted = one.failure == "interrupted" and one.tests is None
            is_continued = is_interrupted or one.state == "promoted"
            text = (
                f"trial {one.trial}, which is {one.state}, was retried {retries[one.trial]} times"
            )
            is_sound = retries[one.trial] == 1 if is_continued else retries[one.trial] <= 1
            _require(is_sound, text)

    def _check_losses(self, evaluations: Sequence[Evaluation]) -> None:
        """Compare all losses with those of the objectives, and look for the checkpoints."""
        roots: dict[int, int] = {}
        store = CheckpointStore(self._run_dir / "checkpoints")
        for one in evaluations:
            root = find_root(one, roots)
            behavior = self._choose_behavior(root)
            for step, loss in one.curve.items():
                expected = dict(enumerate(behavior.losses, 1)).get(step)
                _require(loss == expected, f"trial {one.trial} has {loss} at step {step}")
            if one.state == "complete":
                is_whole = len(one.curve) == len(behavior.losses) or behavior.fault == "return"
                text = f"trial {one.trial} has the loss {one.loss}, of {dict(one.curve)}"
                _require(is_whole and one.loss == min(one.curve.values(), default=None), text)
                text = f"trial {one.trial} is complete, in spite of {behavior.fault!r}"
                _require(behavior.fault in ("", "linger", "return"), text)
            is_expected = (one.failure or "").startswith(_OTHER_FAILURES)
            if one.state == "failed" and not behavior.fault:
                _require(is_expected, f"trial {one.trial} failed: {one.failure}")
            is_sound = not behavior.fault and not self._was_suspended
            if one.state in ("waiting", "running") and is_sound:
                before = one if one.retry_of is None else evaluations[one.retry_of]
                step = max(one.checkpoint_step, before.checkpoint_step)
                is_lost = step > 0 and _count_saved_losses(store.get_path(root)) < step
                _require(not is_lost, f"the checkpoint of trial {one.trial} is lost")

    def _check_end(self, evaluations: Sequence[Evaluation], outcome: Outcome) -> None:
        unfinished = [one.trial for one in evaluations if one.state in ("running", "waiting")]
        finished = sum(one.counts_for_budget for one in evaluations)
        budget = self._options["evaluations"]
        _require(finished <= budget, f"{finished} individuals were evaluated, of {budget}")
        # With --max-failures, an evaluation may succeed while the run stops.
        if outcome.status == ExitStatus.NOTHING_SUCCEEDED and not self._options["max_failures"]:
            found = [one.trial for one in evaluations if one.state == "complete"]
            _require(not found, f"trials {found} are complete, and the status is that of none")
            _require(finished == budget, f"only {finished} of {budget} individuals were evaluated")
        if outcome.status == ExitStatus.BUDGET_SPENT:
            _require(not unfinished, f"the run has ended, and trials {unfinished} have not")
            _require(finished == budget, f"only {finished} of {budget} individuals were evaluated")


def _count_saved_losses(path: Path) -> int:
    """Return the number of losses in a checkpoint; 0 if it cannot be read."""
    try:
        return len(read_checkpoint_info(path).losses)
    except ValueError:
        return 0


def _has_ended(evaluation: Evaluation) -> bool:
    """Return whether a trial has ended, also if a broken worker has failed it.

    Other workers retry such a trial, and its state is "interrupted".
    """
    is_retried = evaluation.state == "interrupted" and evaluation.failure != "interrupted"
    return evaluation.has_ended or is_retried


def _require(holds: bool, text: str) -> None:
    if not holds:
        raise ViolationError(text)


def _describe(outcome: Outcome) -> str:
    """Return what is known of a session, in a line."""
    return (
        f"status {outcome.status} after {outcome.seconds:.1f} s, {len(outcome.begun)} begun, "
        f"{len(outcome.printed)} printed, {outcome.messages} messages, {outcome.switches} steps, "
        f"trace {outcome.trace}"
    )


def run_in_process(plan: Plan, output: Path) -> Outcome:
    """Run a session in a forked process, which is really killed; its output goes to a file."""
    result = output.with_suffix(".result")
    process = os.fork()
    if process == 0:
        _run_and_exit(plan, output, result)
    _, status = os.waitpid(process, 0)
    if not result.exists():
        return Outcome(violation=f"it ended with {status}:\n{output.read_text()[-3000:]}")
    outcome = pickle.loads(result.read_bytes())
    assert isinstance(outcome, Outcome)
    return outcome


def _run_and_exit(plan: Plan, output: Path, result: Path) -> None:
    exit_now = os._exit  # The simulation replaces it.
    status = 1
    try:
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT, 0o600)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        faulthandler.dump_traceback_later(_REAL_SECONDS, exit=True)
        outcome = SimulatedJob(plan).run()
        result.write_bytes(pickle.dumps(outcome))
        sys.stdout.flush()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        exit_now(status)
