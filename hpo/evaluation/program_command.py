"""The command line of a training program, and advice if its output has no loss."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpo.problem import Problem
from hpo.script_objective import Script, propose_loss_pattern

_MAX_SHOWN_LINES = 5


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
        self, params: Mapping[str, Any], known: Mapping[str, Any], continues: bool
    ) -> list[str]:
        """Return the command line of an evaluation.

        Args:
            known: Trial, folder and seed of the evaluation, by name.
            continues: Whether to add the arguments with which the program resumes from its own
                checkpoint files.
        """
        others = {**self.settings, **known}
        absent = [name for name in self.hyperparameters if name not in params]
        command = list(self.script.make_arguments(params, others, absent))
        if continues:
            command += self.script.make_resume_arguments({**others, **params})
        return command

    def can_resume(self, params: Mapping[str, Any], known: Mapping[str, Any]) -> bool:
        """Return whether the evaluation's folder has all files from which the program resumes."""
        values = {**self.settings, **known, **params}
        parts = self.script.make_resume_arguments(values)
        folder = str(known["folder"])
        files = [Path(part[part.index(folder) :]) for part in parts if folder in part]
        return bool(files) and all(file.exists() for file in files)


def advise_on_loss(lines: Sequence[str], program: Program, unparsed_text: str) -> tuple[str, str]:
    """Return why no loss was found in a program's output, and the option that the user must change.

    Args:
        lines: The last lines that the program printed.
        unparsed_text: The latest match of `--loss` that is not a number; empty if there is none.
    """
    script = program.script
    found_none = "no loss was found in what the program printed"
    where = f" in the Script of {program.search_file}" if program.search_file else ""
    if unparsed_text:
        failure = f"no loss was found: --loss has matched {unparsed_text!r}, which is not a number"
        return failure, f"another loss={where}" if where else "another --loss"
    if pattern := propose_loss_pattern(lines):
        option = f"loss={pattern!r}{where}" if where else f"--loss {shlex.quote(pattern)}"
        return f"{found_none}; {option} would read it", option
    option = f"loss=REGEX{where}" if where else "--loss REGEX"
    if script.loss is not None:
        return f"{found_none}: no line matches '{script.loss}'", f"another {option}"
    option = f"{option} for the lines that it prints"
    return (
        f"no loss was found: call hpo.report(loss) in the program, or give {option}",
        "hpo.report(loss) or --loss",
    )


def format_last_lines(lines: Sequence[str]) -> str:
    """Return the last few of `lines`, to show as the traceback of a failure; empty without any."""
    shown = "".join(f"    {line[:200]}\n" for line in lines[-_MAX_SHOWN_LINES:])
    return f"The last lines that it printed:\n{shown.rstrip()}" if shown else ""
