"""The training program that is the objective of a run: its command line, and its missing losses."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpo.problem import Problem
from hpo.script_objective import NUMBER_GROUP, Script, propose_loss_pattern


@dataclass(frozen=True)
class Program:
    """The training program that a run starts for each evaluation."""

    script: Script
    settings: Mapping[str, Any]
    """Values of the settings, by name."""
    hyperparameters: Sequence[str]
    """Names of all hyperparameters."""
    search_file: str = ""
    """The file that names the program; empty if it was given on the command line."""

    @classmethod
    def from_problem(cls, problem: Problem) -> Program | None:
        """Return the program of a problem; None if its objective is a function."""
        script = problem.file.script
        path = str(problem.file.path)
        if script is None:
            return None
        search_file = "" if path == str(Path(script.name)) else path
        return cls(script, problem.setting_values, list(problem.space.parameters), search_file)

    def make_command(
        self, params: Mapping[str, Any], known: Mapping[str, Any], checkpoint: Path | None = None
    ) -> list[str]:
        """Return the command line of an evaluation.

        `known` has its trial, folder, seed and ranks. It resumes from `checkpoint`, its own file,
        if any.
        """
        others = {**self.settings, **known}
        absent = [name for name in self.hyperparameters if name not in params]
        command = list(self.script.make_arguments(params, others, absent))
        if checkpoint is not None:
            values = {**others, "checkpoint": checkpoint, **params}
            command += self.script.make_resume_arguments(values)
        return command

    def find_checkpoint(self, params: Mapping[str, Any], known: Mapping[str, Any]) -> Path | None:
        """Return the checkpoint that the program has written to the evaluation's folder, if any."""
        return self.script.find_checkpoint({**self.settings, **known, **params})

    def explain_missing_loss(self, lines: Sequence[str], unparsed: str) -> tuple[str, str]:
        """Return why no loss was found in the printed lines, and what the user must change.

        `unparsed` is the latest match of the loss pattern that is not a number, in its line.
        """
        script = self.script
        found_none = "no loss was found in what the program printed"
        where = f" in the Script of {self.search_file}" if self.search_file else ""
        if unparsed:
            name = script.pattern_name
            failure = (
                f"no loss was found: --{name} has matched {unparsed}, which is not a number; its "
                f"group must match the number alone, such as {NUMBER_GROUP}"
            )
            return failure, f"another {name}={where}" if where else f"another --{name}"
        if script.maximize is None and (pattern := propose_loss_pattern(lines)):
            option = f"loss={pattern!r}{where}" if where else f"--loss {shlex.quote(pattern)}"
            return f"{found_none}; {option} would read it", option
        name = script.pattern_name
        option = f"{name}=REGEX{where}" if where else f"--{name} REGEX"
        if script.pattern is not None:
            return f"{found_none}: no line matches '{script.pattern}'", f"another {option}"
        score = "maximize=REGEX" if where else "--maximize"
        option = f"{option} for the lines that it prints, or {score} for a score"
        return (
            f"no loss was found: call hpo.report(loss) in the program, or give {option}",
            f"hpo.report(loss) or {'loss=REGEX' if where else '--loss'}",
        )
