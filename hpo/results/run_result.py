"""The result of a run, from which advice is derived, and the commands that continue or change it.

A session is one start of the run. A script is a training program that follows `--` on the command
line.
"""

from __future__ import annotations

import itertools
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpo.options import RECORDED_OPTIONS, format_value, from_json
from hpo.store.evaluations import Evaluation, find_best, rank_evaluations
from hpo.store.inheritance import has_inheritance
from hpo.store.manifest import Manifest
from hpo.store.pruning import is_search_over
from hpo.store.storage_url import has_hidden_password, is_url

# Options that describe a training script. Each has a value.
_SCRIPT_OPTIONS = ("--space", "--loss", "--metric", "--flag", "--resume-args", "--first-report")
_MAX_COMMAND_LENGTH = 1000  # Characters. Longer commands are left out, because no user types them.


@dataclass(frozen=True)
class RunResult:
    """The result of a run until now, from which all advice is derived."""

    run_dir: Path
    manifest: Manifest
    """The content of run.json."""
    evaluations: Sequence[Evaluation]
    """All evaluations of the search."""
    confirmations: Sequence[Evaluation]
    """The confirmations that the latest session planned."""
    distributions: Mapping[str, Any]
    """The Optuna distribution of each hyperparameter by its name."""
    session_start: float
    """The start of the latest session in seconds since the epoch; minus infinity if it is unknown."""
    last_summary: Mapping[str, Any]
    """The content of summary.json of the latest session; empty if the session is still running or has crashed."""
    is_running: bool
    """Whether the latest session is probably still running."""
    broken_workers: Sequence[str] = ()
    """Descriptions of the workers that have left the latest session."""

    @property
    def is_exhausted(self) -> bool:
        """Whether all individuals of the search space have been evaluated."""
        return self.last_summary.get("exhausted") is True

    @property
    def is_spent(self) -> bool:
        """Whether the search is complete, so that a resumed run would train nothing more."""
        run = self.manifest
        is_over_now = is_search_over(self.evaluations, run.budget, run.pruner, run.objectives)
        return self.is_exhausted or is_over_now or self.is_target_reached

    @property
    def is_target_reached(self) -> bool:
        """Whether an evaluation has reached the target loss of the latest session."""
        found, target = (
            find_best(self.evaluations),
            from_json("target_loss", self.options.get("target_loss")),
        )
        return found is not None and target is not None and found.loss <= target

    @property
    def options(self) -> Mapping[str, Any]:
        """The options of the latest session as JSON values."""
        return self.manifest.sessions[-1].options

    @property
    def has_inheritance(self) -> bool:
        """Whether any evaluation started from a parent's checkpoint. Its loss then depends on the parent, too."""
        return has_inheritance(self.evaluations)

    def rank_complete(self) -> list[Evaluation]:
        """Return the complete evaluations with a finite loss, best first."""
        finite = [evaluation for evaluation in self.evaluations if math.isfinite(evaluation.loss)]
        return rank_evaluations(finite, len(finite))

    def select_session(self) -> list[Evaluation]:
        """Return the evaluations and confirmations that ended in the latest session."""
        return [
            evaluation
            for evaluation in (*self.evaluations, *self.confirmations)
            if evaluation.has_ended
            and not evaluation.imported_from
            and evaluation.started >= self.session_start
        ]

    def format_resume_command(self, *options: str) -> str:
        """Return the command that resumes the run with `options`; empty if it is too long.

        It repeats the options of the latest session that `--resume` does not keep, such as
        `--ranks-per-worker`.
        """
        storage = self.manifest.storage
        kept = {name for name, option in RECORDED_OPTIONS.items() if option.is_kept}
        again = [
            *self._list_given_options(without=kept),
            *(["--storage", storage] if has_hidden_password(storage) else []),
        ]
        return self._format_command("--run-dir", str(self.run_dir), "--resume", *again, *options)

    def format_confirm_command(self, seeds: int) -> str:
        """Return the command that trains the best individuals again with other seeds.

        If the run trains a script without the placeholder `{seed}`, the arguments `--seed '{seed}'`
        are added.
        """
        command = self.format_resume_command("--confirm-seeds", str(seeds))
        return f"{command} --seed '{{seed}}'" if command and self.lacks_seed else command

    @property
    def has_space_in_command(self) -> bool:
        """Whether the run trains a script, so that the command line defines the search space."""
        return "--" in self._split_command()

    @property
    def lacks_seed(self) -> bool:
        """Whether the command of a script lacks the placeholder `{seed}`."""
        words = self._split_command()
        return "--" in words and not any("{seed}" in word for word in words[words.index("--") :])

    def format_new_command(self, *options: str, **settings: object) -> str:
        """Return the command that starts a new run with the options and settings of this run.

        A target loss that this run has reached is left out.

        Args:
            *options: Options to add or change.
            **settings: Settings to add or change.
        """
        values = [f"{name}={text}" for name, text in {**self.manifest.set, **settings}.items()]
        without = {name for name, option in RECORDED_OPTIONS.items() if option.name in options}
        again = self._list_given_options(
            without | ({"target_loss"} if self.is_target_reached else set())
        )
        storage = ["--storage", self.manifest.storage] if is_url(self.manifest.storage) else []
        return self._format_command(
            *(word for value in values for word in ("--set", value)), *again, *storage, *options
        )

    def _list_given_options(self, without: set[str]) -> list[str]:
        """Return the options of the latest session that differ from their defaults, except the options in `without`."""
        words: list[str] = []
        for name in (name for name in self.options if name in RECORDED_OPTIONS.keys() - without):
            option, value = RECORDED_OPTIONS[name], from_json(name, self.options[name])
            if value not in (None, option.default):
                words += (
                    [option.name] if isinstance(value, bool) else [option.name, format_value(value)]
                )
        return words

    def _format_command(self, *options: str) -> str:
        """Return a command with the program and search space of the latest session; "" if the command is too long."""
        words = self._split_command()
        end = words.index("--") if "--" in words else len(words)
        command = shlex.join([*self._find_program(words[:end]), *options, *words[end:]])
        return command if len(command) <= _MAX_COMMAND_LENGTH else ""

    def _split_command(self) -> list[str]:
        try:
            return shlex.split(self.manifest.command)
        except ValueError:  # A user has edited run.json.
            return []

    def _find_program(self, words: list[str]) -> list[str]:
        search_space = self.manifest.search_space
        pairs = [pair for pair in itertools.pairwise(words) if pair[0] in _SCRIPT_OPTIONS]
        of_script = list(itertools.chain.from_iterable(pairs))
        of_script += [
            word
            for word in words
            if word.startswith(tuple(f"{option}=" for option in _SCRIPT_OPTIONS))
        ]
        if of_script:
            return [*words[:2], *of_script] if words[0] == "hpo" else [words[0], *of_script]
        if words[:2] == ["hpo", "search"]:
            return [*words[:2], search_space]
        if not words or not words[0].endswith(".py"):
            return []
        return [words[0], search_space] if search_space in words[1:] else words[:1]
