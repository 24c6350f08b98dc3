"""What advice is, and what it is worked out from."""

from __future__ import annotations

import itertools
import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpo.store.evaluations import Evaluation, find_best, rank_evaluations
from hpo.store.inheritance import has_inheritance
from hpo.store.manifest import Manifest
from hpo.store.recorded_options import OPTIONS, from_json
from hpo.store.storage_url import has_hidden_password, is_url
from hpo.store.successive_halving import is_search_over

# Options that describe a program, each with a value.
_SCRIPT_OPTIONS = ("--space", "--loss", "--metric", "--flag", "--resume-args", "--first-report")
_MAX_COMMAND_LENGTH = 1000  # characters of a command: nobody types more
_MAX_LISTED = 5  # things in a list


@dataclass(frozen=True)
class Advice:
    """What to do, the evidence for it, and the command to type; "" where there is none.

    `kind` is worker, confirm, bounds, epochs, flat or idle. Commands begin with the program that mpirun or another
    launcher starts.
    """

    kind: str
    text: str
    evidence: str
    command: str = ""


@dataclass(frozen=True)
class RunResult:
    """What is known of a run: `manifest` is its run.json, and `since` when its last session began, if that is known.

    `ended` is the summary.json of that session, empty while it goes on, or where it has died; `goes_on` tells whether
    it does, for all that can be told. Of the search space, there are the Optuna distributions.
    """

    run_dir: Path
    manifest: Manifest
    evaluations: Sequence[Evaluation]
    confirmations: Sequence[Evaluation]
    distributions: Mapping[str, Any]
    session_start: float
    last_summary: Mapping[str, Any]
    is_running: bool

    @property
    def is_exhausted(self) -> bool:
        """Whether there is nothing left to evaluate in the search space."""
        return self.last_summary.get("exhausted") is True

    @property
    def is_spent(self) -> bool:
        """Whether the search is at its end: a resumed run would train nothing else."""
        run = self.manifest
        is_over_now = is_search_over(self.evaluations, run.budget, run.pruner, run.objectives)
        return self.is_exhausted or is_over_now or self.is_target_reached

    @property
    def is_target_reached(self) -> bool:
        """Whether a loss is as low as --target-loss of the last session."""
        found, target = find_best(self.evaluations), from_json("target_loss", self.options.get("target_loss"))
        return found is not None and target is not None and found.loss <= target

    @property
    def options(self) -> Mapping[str, Any]:
        """The options of the last session, as JSON holds them."""
        return self.manifest.sessions[-1].options

    @property
    def has_inheritance(self) -> bool:
        """Whether any evaluation inherits, so that losses are not those of hyperparameters alone."""
        return has_inheritance(self.evaluations)

    def rank_complete(self) -> list[Evaluation]:
        """Return the complete evaluations that have a loss, best first."""
        finite = [one for one in self.evaluations if math.isfinite(one.loss)]
        return rank_evaluations(finite, len(finite))

    def select_session(self) -> list[Evaluation]:
        """Return what the last session has evaluated."""
        everything = [*self.evaluations, *self.confirmations]
        return [
            one for one in everything if one.has_ended and not one.imported_from and one.started >= self.session_start
        ]

    def format_resume_command(self, *options: str) -> str:
        """Write the command that resumes the run; it has the options that a resumed run does not keep."""
        storage = self.manifest.storage
        kept = {name for name, option in OPTIONS.items() if option.is_kept_on_resume}
        again = [
            *self._list_given_options(without=kept),
            *(["--storage", storage] if has_hidden_password(storage) else []),
        ]
        return self._format_command("--run-dir", str(self.run_dir), "--resume", *again, *options)

    def format_confirm_command(self, seeds: int) -> str:
        """Write the command that trains the best again with other seeds; a script without a place for them gets one."""
        command = self.format_resume_command("--confirm-seeds", str(seeds))
        return f"{command} --seed '{{seed}}'" if command and self.lacks_seed else command

    @property
    def has_space_in_command(self) -> bool:
        """Whether the search space was given on the command line, with a script."""
        return "--" in self._split_command()

    @property
    def lacks_seed(self) -> bool:
        """Whether the command of a script has no place for a seed."""
        words = self._split_command()
        return "--" in words and not any("{seed}" in word for word in words[words.index("--") :])

    def format_new_command(self, *options: str, **settings: object) -> str:
        """Write the command that starts another run, with the options and settings of this one and those given.

        A target that this run has reached is left out.
        """
        values = [f"{name}={text}" for name, text in {**self.manifest.set, **settings}.items()]
        without = {name for name, option in OPTIONS.items() if option.name in options}
        again = self._list_given_options(without | ({"target_loss"} if self.is_target_reached else set()))
        storage = ["--storage", self.manifest.storage] if is_url(self.manifest.storage) else []
        return self._format_command(
            *(word for value in values for word in ("--set", value)), *again, *storage, *options
        )

    def _list_given_options(self, without: set[str]) -> list[str]:
        """Return the options of the last session that differ from their defaults."""
        given = [(OPTIONS[name], value) for name, value in self.options.items() if name in OPTIONS.keys() - without]
        words = [option.format_words(value) for option, value in given if value not in (None, option.default)]
        return list(itertools.chain.from_iterable(words))

    def _format_command(self, *options: str) -> str:
        """Write a command with the program and the search space that the last session was started with."""
        words = self._split_command()
        place = words.index("--") if "--" in words else len(words)
        command = shlex.join([*self._find_program(words[:place]), *options, *words[place:]])
        return command if len(command) <= _MAX_COMMAND_LENGTH else ""

    def _split_command(self) -> list[str]:
        try:
            return shlex.split(self.manifest.command)
        except ValueError:  # a user has edited it
            return []

    def _find_program(self, words: list[str]) -> list[str]:
        search_space = self.manifest.search_space
        pairs = [pair for pair in itertools.pairwise(words) if pair[0] in _SCRIPT_OPTIONS]
        of_script = list(itertools.chain.from_iterable(pairs))
        of_script += [word for word in words if word.startswith(tuple(f"{option}=" for option in _SCRIPT_OPTIONS))]
        if of_script:
            return [*words[:2], *of_script] if words[0] == "hpo" else [words[0], *of_script]
        if words[:2] == ["hpo", "search"]:
            return [*words[:2], search_space]
        if not words or not words[0].endswith(".py"):
            return []
        return [words[0], search_space] if search_space in words[1:] else words[:1]


def compute_relative_gap(one: float, other: float) -> float:
    """Return the distance of two losses as a share of the larger one."""
    return abs(one - other) / max(abs(one), abs(other)) if one != other else 0.0


def format_percent(share: float) -> str:
    """Write a share as people read it."""
    if 0 < share < 0.001:
        return "less than 0.1%"
    return f"{100 * share:.2g}%" if share < 0.995 else f"{100 * share:.0f}%"


def format_list(items: Iterable[object], limit: int = _MAX_LISTED) -> str:
    """Write things in a row, the first few of many."""
    texts = list(map(str, items))
    rest = len(texts) - limit
    texts = [*texts[:limit], f"{rest} more"] if rest > 0 else texts
    return " and ".join(filter(None, [", ".join(texts[:-1]), *texts[-1:]]))
