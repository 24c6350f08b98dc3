"""The state of a run at one moment, and the commands that continue or change the run.

A script is a training program that follows `--` on the command line.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import shlex
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hpo.options import PROGRAM_OPTIONS, RECORDED_OPTIONS, format_value, from_json
from hpo.store.evaluations import Evaluation, find_best, format_label, rank_evaluations
from hpo.store.manifest import Manifest, SessionEntry, parse_start
from hpo.store.pruning import is_search_over
from hpo.store.storage_url import has_hidden_password, is_url

# Each has a value.
_SCRIPT_OPTIONS = [option.flags for option in PROGRAM_OPTIONS.values()]
# Options that are left out to evaluate a single individual.
_OPTIONS_OF_SEARCH = ("pruner", "target_loss", "confirm_seeds", "confirm_trials", "top_n")
_MAX_COMMAND_LENGTH = 1000  # Characters. Longer commands are left out, because no user types them.


EXHAUSTED_REASON = "the search space is exhausted"


@dataclass(frozen=True)
class RunSnapshot:
    """The state of a run at one moment.

    Only advice needs the distributions and the broken workers. Other readers leave them out.
    """

    taken_at: float
    """Time in seconds since the epoch."""
    manifest: Manifest
    evaluations: Sequence[Evaluation]
    confirmations: Sequence[Evaluation]
    """The confirmations that the latest session planned."""
    is_in_use: bool | None
    """Whether a process runs this run; None if this host cannot find out."""
    holder: str = ""
    """The process that runs this run, or ran it before it crashed."""
    last_summary: Mapping[str, Any] = field(default_factory=dict)
    """The content of summary.json; empty if the latest session is still running or has crashed."""
    run_dir: Path = Path()
    distributions: Mapping[str, Any] = field(default_factory=dict)
    """The Optuna distribution of each hyperparameter by its name."""
    broken_workers: Sequence[str] = ()
    """Descriptions of the workers that have left the latest session."""

    @property
    def stop_reason(self) -> str:
        """The reason why the run stopped before it was complete; empty if it did not."""
        if self.is_in_use:
            return ""
        exhausted = EXHAUSTED_REASON if self.last_summary.get("exhausted") else ""
        return str(self.last_summary.get("stopped") or exhausted)

    @property
    def remedy(self) -> str:
        """The command-line option that is needed to resume the run; empty if none is needed."""
        return "" if self.is_in_use else str(self.last_summary.get("remedy") or "")

    @property
    def is_running(self) -> bool:
        """Whether the latest session is probably still running."""
        return not self.last_summary and self.is_in_use is not False

    @property
    def is_spent(self) -> bool:
        """Whether the search is complete, so that a resumed run would train nothing more."""
        if self.last_summary.get("exhausted") is True or self.is_target_reached:
            return True
        run = self.manifest
        return is_search_over(self.evaluations, run.budget, run.pruner, run.objectives)

    @property
    def is_target_reached(self) -> bool:
        """Whether an evaluation has reached the target loss of the latest session."""
        best = find_best(self.evaluations)
        target = from_json("target_loss", self.options.get("target_loss"))
        return best is not None and target is not None and best.loss <= target

    @property
    def options(self) -> Mapping[str, Any]:
        """The options of the latest session as JSON values."""
        return self.manifest.sessions[-1].options

    def rank_complete(self) -> list[Evaluation]:
        """Return the complete evaluations with a finite loss, best first."""
        finite = [evaluation for evaluation in self.evaluations if math.isfinite(evaluation.loss)]
        return rank_evaluations(finite, len(finite))

    @property
    def has_space_in_command(self) -> bool:
        """Whether the run trains a script, so that the command line defines the search space."""
        return "--" in _split_words(self.manifest.command)

    def format_resume_command(self, *options: str) -> str:
        """Return the command that resumes the run with `options`; empty if it is too long.

        It repeats the options of the latest session that `--resume` does not keep, such as
        `--ranks-per-worker`.
        """
        kept = {name for name, option in RECORDED_OPTIONS.items() if option.is_kept}
        again = self._list_given_options(without=kept)
        if has_hidden_password(self.manifest.storage):
            again += ["--storage", self.manifest.storage]
        return self._format_command("--run-dir", str(self.run_dir), "--resume", *again, *options)

    def format_confirm_command(self, seeds: int) -> str:
        """Return the command that trains the best individuals again with other seeds.

        If the run trains a script without the placeholder `{seed}`, the arguments `--seed '{seed}'`
        are added. It is empty if the script has no such option, or if a search file has its
        command.
        """
        command = self.format_resume_command("--confirm-seeds", str(seeds))
        if not command or not self.manifest.lacks_seed:
            return command
        if not self.has_space_in_command:
            return ""
        words = _split_words(self.manifest.command)
        with suppress(OSError, IndexError):  # It may be a module, or a command.
            if "--seed" not in Path(words[words.index("--") + 1]).read_text(errors="replace"):
                return ""
        return f"{command} --seed '{{seed}}'"

    def format_new_command(self, *options: str, **settings: object) -> str:
        """Return the command that starts a new run with the options and settings of this run.

        The given options and settings are added or changed. A target loss that this run has reached
        is left out.
        """
        words: list[str] = []
        for name, text in {**self.manifest.set, **settings}.items():
            words += ["--set", f"{name}={text}"]
        without = {name for name, option in RECORDED_OPTIONS.items() if option.name in options}
        without.add("confirm_trials")  # A new run has other trials.
        if self.is_target_reached:
            without.add("target_loss")
        words += self._list_given_options(without)
        if is_url(self.manifest.storage):
            words += ["--storage", self.manifest.storage]
        return self._format_command(*words, *options)

    def format_repeat_command(self, evaluation: Evaluation, seed: int | None) -> str:
        """Return the command that evaluates an individual again in a new run, with equal losses.

        It has the search file, the settings and the number of ranks of that evaluation. It is empty
        if they are not known, for example after a warm start, or if weights were inherited.
        """
        session = self.manifest.find_session(evaluation.started)
        is_known = seed is not None and evaluation.ranks and self.manifest.command
        if session is None or not is_known or evaluation.inherits is not None:
            return ""
        settings: Mapping[str, str] = self.manifest.set
        if session.settings != self.manifest.settings:
            settings = {name: format_value(value) for name, value in session.settings.items()}
        options = {**session.options, **dict.fromkeys(_OPTIONS_OF_SEARCH)}
        session = replace(session, options=options)
        then = replace(self.manifest, sessions=(session,), set=settings)
        if not self.has_space_in_command:
            words = _split_words(self.manifest.command)
            program = words[: 2 if words[:1] == ["hpo"] else 1]
            file = self._find_search_file(session)
            then = replace(then, search_space=file, command=shlex.join([*program, file]))
        elif self.manifest.lacks_seed or evaluation.started < self._latest_start:
            return ""  # Earlier sessions may have had another command.
        label = format_label(evaluation.trial, evaluation.confirms is not None)
        return replace(self, manifest=then).format_new_command(
            *("--enqueue", json.dumps([evaluation.params]), "--evaluations", "1"),
            *("--ranks-per-worker", str(evaluation.ranks), "--seed", str(seed)),
            *("--run-dir", f"{self.run_dir}-trial-{label}"),
        )

    @property
    def _latest_start(self) -> float:
        """The start of the latest session in seconds since the epoch; -inf for the only one."""
        *earlier, latest = self.manifest.sessions
        return parse_start(latest.started) if earlier else -math.inf

    def _find_search_file(self, session: SessionEntry) -> str:
        """Return the path of a session's search file: of its copy, if the file has changed."""
        with suppress(OSError):
            source = Path(self.manifest.search_space).read_bytes()
            if hashlib.sha256(source).hexdigest() == session.sha256:
                return self.manifest.search_space
        return str(self.run_dir / session.file)

    def _list_given_options(self, without: Collection[str]) -> list[str]:
        """Return the options of the latest session that differ from their defaults."""
        words: list[str] = []
        for name, recorded in self.options.items():
            if name not in RECORDED_OPTIONS or name in without:
                continue
            option = RECORDED_OPTIONS[name]
            value = from_json(name, recorded)
            if value not in (None, option.default):
                words.append(option.name)
                words += [] if isinstance(value, bool) else [format_value(value)]
        return words

    def _format_command(self, *options: str) -> str:
        """Return a command with the run's program and search space.

        It is empty if it is too long, or if the run was not started by a command.
        """
        words = _split_words(self.manifest.command)
        if not words:
            return ""
        end = words.index("--") if "--" in words else len(words)
        program = self._find_program(words[:end])
        launcher = _split_words(self.manifest.launcher) if program else []
        command = shlex.join([*launcher, *program, *options, *words[end:]])
        return command if len(command) <= _MAX_COMMAND_LENGTH else ""

    def _find_program(self, words: Sequence[str]) -> Sequence[str]:
        search_space = self.manifest.search_space
        of_script: list[str] = []
        for option, value in itertools.pairwise(words):
            if option in _SCRIPT_OPTIONS:
                of_script += [option, value]
        prefixes = tuple(f"{option}=" for option in _SCRIPT_OPTIONS)
        of_script += [word for word in words if word.startswith(prefixes)]
        if of_script:
            return [*words[: 2 if words[0] == "hpo" else 1], *of_script]
        if list(words[:2]) == ["hpo", "search"]:
            return [*words[:2], search_space]
        if not words or not words[0].endswith(".py"):
            return []
        return [words[0], search_space] if search_space in words[1:] else words[:1]


def _split_words(command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError:  # A user has edited run.json.
        return []
