"""The problem of a run as data: the description of a search file, and its settings.

Only the template imports the search file (see `hpo.trainer.search_file`). Ranks have only the
description, which contains no code of the user.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpo.objectives import ONLY_LOSS, Objectives
from hpo.script_objective import Script
from hpo.space import ConstraintSet, SearchSpace
from hpo.space.parameters import format_parameter, parse_parameter

AskTemplate = Callable[..., dict[str, Any]]
"""Function `ask(kind, **content)` that sends a request to the template, and returns the answer.

The template is the process that trainers are forked from. The function raises a UsageError if the
template refuses the request.
"""

# Candidates in one message; the other process answers in a few milliseconds.
_MOST_IN_REQUEST = 1000


@dataclass(frozen=True)
class SearchDescription:
    """The description of a search file, as data without code of the user."""

    path: Path
    """The path that the user gave."""
    location: Path
    """The absolute path, as stack traces show it."""
    source: bytes = field(repr=False)
    """The content that was imported. The file may have changed since."""
    space: SearchSpace
    objectives: Objectives = ONLY_LOSS
    has_settings: bool = False
    """Whether the file has a dataclass `Settings`; likewise the functions `prepare` and `test`."""
    has_prepare: bool = False
    has_test: bool = False
    script: Script | None = None
    """The program that is the objective, if it is not a function."""

    @classmethod
    def from_data(
        cls, data: Mapping[str, Any], constraints: ConstraintSet | None = None
    ) -> SearchDescription:
        """Return the description that `data` represents. This is the inverse of `data`.

        Without `constraints`, a space with constraints cannot be sampled.
        """
        objectives = {name: tuple(names) for name, names in data["objectives"].items()}
        return cls(
            path=Path(data["path"]),
            location=Path(data["location"]),
            source=base64.b64decode(data["source"]),
            space=load_space(data["space"], constraints),
            objectives=Objectives(**objectives),
            has_settings=data["has_settings"],
            has_prepare=data["has_prepare"],
            has_test=data["has_test"],
            script=Script.from_data(data["script"]) if data["script"] is not None else None,
        )

    @property
    def data(self) -> dict[str, Any]:
        """The description as data that JSON can hold."""
        return {
            "path": str(self.path),
            "location": str(self.location),
            "source": base64.b64encode(self.source).decode("ascii"),
            "space": dump_space(self.space),
            "objectives": {
                name: list(names) for name, names in dataclasses.asdict(self.objectives).items()
            },
            "has_settings": self.has_settings,
            "has_prepare": self.has_prepare,
            "has_test": self.has_test,
            "script": self.script.data if self.script is not None else None,
        }

    @property
    def sha256(self) -> str:
        """The SHA-256 hash of `source`, the imported content of the search file, in hexadecimal."""
        return hashlib.sha256(self.source).hexdigest()


@dataclass(frozen=True)
class Problem:
    """The search file and the settings of a run."""

    file: SearchDescription
    setting_values: Mapping[str, Any]
    """The values of the settings, as JSON can hold them."""
    assignments: tuple[str, ...] = ()
    """The settings as NAME=VALUE texts. A trainer reads them."""

    @classmethod
    def from_data(
        cls, data: Mapping[str, Any], constraints: ConstraintSet | None = None
    ) -> Problem:
        """Return the problem that `data` represents, as `SearchDescription.from_data` does."""
        file = SearchDescription.from_data(data["file"], constraints)
        return cls(file, data["values"], tuple(data["assignments"]))

    @property
    def data(self) -> dict[str, Any]:
        """The problem as data that JSON can hold."""
        return {
            "file": self.file.data,
            "values": dict(self.setting_values),
            "assignments": list(self.assignments),
        }

    @property
    def space(self) -> SearchSpace:
        """The search space."""
        return self.file.space


@dataclass(frozen=True)
class RemoteConstraints:
    """Constraints that another process checks (see `hpo.trainer.search_file`)."""

    send_request: Callable[..., Mapping[str, Any]]
    """Sends its keyword arguments as a request, and returns the content of the answer."""

    def find_violated(self, batch: Sequence[Mapping[str, Any]]) -> list[int | None]:
        """Return the index of the first violated constraint, or None, for each set."""
        violated: list[int | None] = []
        for start in range(0, len(batch), _MOST_IN_REQUEST):
            part = [dict(params) for params in batch[start : start + _MOST_IN_REQUEST]]
            violated += self.send_request(params=part)["violated"]
        return violated

    def find_problem(self) -> str:
        """Return why the constraints are unsound, or "" if they are sound."""
        return str(self.send_request(check=True)["problem"])


def _refuse_request(**_: Any) -> Mapping[str, Any]:
    raise RuntimeError("no process checks the constraints")


def load_description(
    path: Path,
    ask: AskTemplate,
    constraints: ConstraintSet | None = None,
    source: bytes | None = None,
) -> SearchDescription:
    """Let the template import a search file, or `source` instead, and return its description.

    Raise a UsageError if it is not a search file, or if its import fails. The message then has the
    traceback.
    """
    content = {} if source is None else {"source": base64.b64encode(source).decode("ascii")}
    return SearchDescription.from_data(ask("load", path=str(path), **content), constraints)


def dump_space(space: SearchSpace) -> dict[str, Any]:
    """Return a search space as data that JSON can hold, with the texts of constraints."""
    parameters = {name: format_parameter(each) for name, each in space.parameters.items()}
    return {"parameters": parameters, "constraints": list(space.constraint_texts)}


def load_space(data: Mapping[str, Any], constraints: ConstraintSet | None = None) -> SearchSpace:
    """Return the search space from the data that `dump_space` returned.

    Without `constraints`, any check of the constraints raises a RuntimeError.
    """
    codes = data["parameters"]
    space = SearchSpace(**{name: parse_parameter(code) for name, code in codes.items()})
    if data["constraints"]:
        constraints = constraints or RemoteConstraints(_refuse_request)
        space.delegate_constraints(data["constraints"], constraints)
    return space
