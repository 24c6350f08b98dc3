"""The options of a run, checked against each other."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpo.breeding.propagator_names import PROPAGATORS
from hpo.errors import UsageError
from hpo.store.recorded_options import OPTIONS, from_json
from hpo.store.run_dir import RunDir
from hpo.store.storage_url import is_url
from hpo.trackers import check_trackers

DEFAULT_EVALUATIONS = 64
DEFAULT_COLLECTIVE_TIMEOUT = 600.0  # seconds
DEFAULT_PRUNER = "none"
LONGEST_SECONDS = 365 * 86400.0  # seconds. Operating systems cannot wait much longer.
LOG_LEVELS = ("debug", "info", "warning", "error")
# hpo.run.request resolves these options, and the layout depends on the islands.
_RESOLVED = ("evaluations", "islands", "propagators", "seed", "confirm_seeds", "pbt", "pruner")
KEPT_OPTIONS = tuple(name for name, option in OPTIONS.items() if option.is_kept_on_resume and name not in _RESOLVED)
"""The fields of `Options` that a resumed run takes from its previous session, unless they are given again."""


@dataclass(frozen=True)
class Options:
    """The options of a run, as the user gave them.

    None means that an option was not given. It then has its default or, if the run is resumed, its value of the
    previous session.

    Raises:
        UsageError: An option is not valid, or two options exclude each other.
    """

    search_space: Path
    evaluations: int | None = None
    generations: int | None = None
    islands: int | None = None
    ranks_per_worker: int | None = None
    propagators: tuple[str, ...] = ()
    migration_probability: float = 0.9
    pollination: bool = True
    seed: int | None = None
    run_dir: Path | None = None
    resume: bool = False
    top_n: int = 3
    enqueue: Path | None = None
    warm_start: str | None = None
    pbt: bool | None = None
    confirm_seeds: int | None = None
    settings: tuple[str, ...] = ()
    storage: str | None = None
    collective_timeout: float = DEFAULT_COLLECTIVE_TIMEOUT
    evaluation_timeout: float | None = None
    fresh_trainers: bool = False
    checkpoint_every: float | None = None
    time_limit: float | None = None
    max_failures: int | None = None
    target_loss: float | None = None
    pruner: str | None = None
    trackers: tuple[str, ...] = ()
    log_level: str = "warning"
    source: bytes | None = field(default=None, repr=False)
    """The content of the search file if `search_space` is a program instead of a search file; otherwise None."""

    @property
    def target(self) -> float:
        """The loss at which the search ends; minus infinity without a target."""
        return -math.inf if self.target_loss is None else self.target_loss

    def __post_init__(self) -> None:
        if self.evaluations is not None and self.generations is not None:
            raise UsageError(
                f"--evaluations and --generations exclude each other, got {self.evaluations} and {self.generations}. "
                "--generations G means G evaluations per worker"
            )
        for option, number, lowest in (
            ("--evaluations", self.evaluations, 1),
            ("--generations", self.generations, 1),
            ("--top-n", self.top_n, 1),
            ("--seed", self.seed, 0),
            ("--max-failures", self.max_failures, 0),
            ("--confirm-seeds", self.confirm_seeds, 0),
        ):
            if number is not None and not lowest <= number < 2**63:
                raise UsageError(f"{option} must be at least {lowest} and less than 2**63, got {number}")
        for option, seconds in (
            ("--collective-timeout", self.collective_timeout),
            ("--evaluation-timeout", None if self.evaluation_timeout == math.inf else self.evaluation_timeout),
            ("--time-limit", self.time_limit),
            ("--checkpoint-every", None if self.checkpoint_every == math.inf else self.checkpoint_every),
        ):
            if seconds is not None and not 1 <= seconds <= LONGEST_SECONDS:
                raise UsageError(f"{option} must be from 1 second to 365 days, got {seconds:g} s")
        if self.storage is not None and not is_url(self.storage):
            raise UsageError(  # The message does not have the value, which may have a password.
                "--storage must be the URL of an Optuna storage, such as sqlite:///study.db or "
                "postgresql://me:word@host/db"
            )
        self._check_search()
        if not 0 <= self.migration_probability <= 1:
            raise UsageError(f"--migration-probability must be from 0 to 1, got {self.migration_probability}")
        if self.log_level not in LOG_LEVELS:
            raise UsageError(f"--log-level must be one of {', '.join(LOG_LEVELS)}, got {self.log_level}")
        check_trackers(self.trackers)
        if self.resume and self.run_dir is None:
            raise UsageError("--resume must be used with --run-dir. Give the directory of the run to resume")

    def _check_search(self) -> None:
        if self.warm_start == "":
            raise UsageError("--warm-start must be the directory of a run, or the URL of an Optuna storage, got ''")
        for name in self.propagators:
            if name not in PROPAGATORS:
                raise UsageError(f"--propagators must be among {', '.join(PROPAGATORS)}, got {name!r}")
        if self.islands is not None and len(self.propagators) > self.islands:
            raise UsageError(
                f"--propagators {','.join(self.propagators)}: each propagator needs its own island, and --islands is "
                f"{self.islands}"
            )
        if self.target_loss is not None and not (math.isfinite(self.target_loss) or self.target_loss == -math.inf):
            raise UsageError(f"--target-loss must be a finite number, got {self.target_loss}")

    def compute_budget(self, workers: int) -> int | None:
        """Return the number of evaluations of the whole run; None without --evaluations and --generations.

        The value of --generations is a number per worker, so it is multiplied by `workers`.
        """
        return self.generations * workers if self.generations is not None else self.evaluations


def read_last_options(run_dir: Path | None, resume: bool) -> dict[str, Any]:
    """Return the options of the previous session from run.json, as JSON values; {} if no run is resumed."""
    with suppress(OSError):  # `RunDir.check_usable` reports a directory that cannot be used.
        if resume and run_dir is not None and RunDir(run_dir).run_json.exists():
            return dict(RunDir(run_dir).read_manifest().sessions[-1].options)
    return {}


def read_kept_options(run_dir: Path | None, resume: bool) -> dict[str, Any]:
    """Return the values of `KEPT_OPTIONS` in the previous session, by name, except values that are None."""
    last = read_last_options(run_dir, resume)
    return {name: from_json(name, last[name]) for name in KEPT_OPTIONS if last.get(name) is not None}
