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
from hpo.space import Categorical, ConstraintSet, Float, Int, Ordinal, Parameter, SearchSpace

AskTemplate = Callable[..., dict[str, Any]]
"""Function `ask(kind, **content)` that sends a request to the template, and returns the answer.

The template is the process that trainers are forked from. The function raises a UsageError if the
template refuses the request.
"""

_PARAMETER_CLASSES: dict[str, type[Parameter]] = {
    kind.__name__: kind for kind in (Int, Float, Ordinal, Categorical)
}
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
    """Whether the file has a dataclass `Settings`."""
    has_prepare: bool = False
    """Whether the file has a function `prepare`."""
    has_test: bool = False
    """Whether the file has a function `test`."""
    script: Script | None = None
    """The program that is the objective, if it is not a function."""
    ask: AskTemplate | None = field(default=None, repr=False, compare=False)
    """Sends requests to the template that has imported the file; None without a template."""

    @classmethod
    def from_data(
        cls,
        data: Mapping[str, Any],
        ask: AskTemplate | None = None,
        constraints: ConstraintSet | None = None,
    ) -> SearchDescription:
        """Return the description that `data` represents. This is the inverse of `data`.

        Args:
            ask: Sends requests to the template. `check_setting` and `bind_settings` need it.
            constraints: Checks the constraints of the space. Without it, a space with constraints
                cannot be sampled.
        """
        return cls(
            path=Path(data["path"]),
            location=Path(data["location"]),
            source=base64.b64decode(data["source"]),
            space=load_space(data["space"], constraints),
            objectives=Objectives(
                **{name: tuple(names) for name, names in data["objectives"].items()}
            ),
            has_settings=data["has_settings"],
            has_prepare=data["has_prepare"],
            has_test=data["has_test"],
            script=Script.from_data(data["script"]) if data["script"] is not None else None,
            ask=ask,
        )

    @property
    def data(self) -> dict[str, Any]:
        """The description as data that JSON can hold."""
        return {
            "path": str(self.path),
            "location": str(self.location),
            "source": base64.b64encode(self.source).decode("ascii"),
            "sha256": self.sha256,
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

    def check_setting(self, assignment: str) -> None:
        """Raise a UsageError if a setting, given as NAME=VALUE, is not valid for this file."""
        assert self.ask is not None
        self.ask("check_setting", assignment=assignment)

    def bind_settings(self, assignments: Sequence[str]) -> Problem:
        """Return the problem: this search file with settings that are given as NAME=VALUE.

        Raise a UsageError if a setting is not valid.
        """
        assert self.ask is not None
        answer = self.ask("bind", assignments=list(assignments))
        return Problem(self, answer["values"], tuple(assignments))


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
        cls,
        data: Mapping[str, Any],
        ask: AskTemplate | None = None,
        constraints: ConstraintSet | None = None,
    ) -> Problem:
        """Return the problem that `data` represents. This is the inverse of `data`.

        The other arguments are those of `SearchDescription.from_data`.
        """
        file = SearchDescription.from_data(data["file"], ask, constraints)
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
        """Return the index of the first violated constraint for each set, or None."""
        violated: list[int | None] = []
        for start in range(0, len(batch), _MOST_IN_REQUEST):
            part = [dict(params) for params in batch[start : start + _MOST_IN_REQUEST]]
            violated += self.send_request(params=part)["violated"]
        return violated

    def find_problem(self) -> str:
        """Return why the constraints are unsound (see `find_constraint_problem`), or ""."""
        return str(self.send_request(check=True)["problem"])


class _UnavailableConstraints:
    """The constraints of a space on a rank that cannot check them, and raises a RuntimeError."""

    def find_violated(self, batch: Sequence[Mapping[str, Any]]) -> list[int | None]:
        raise RuntimeError(f"no process checks the constraints of {len(batch)} individuals")

    def find_problem(self) -> str:
        raise RuntimeError("no process checks the constraints")


def load_description(
    path: Path,
    ask: AskTemplate,
    constraints: ConstraintSet | None = None,
    source: bytes | None = None,
) -> SearchDescription:
    """Let the template import a search file, and return its description.

    Args:
        source: Content to import instead of the content of the file.

    Raises:
        UsageError: The file is not a search file, or its import fails; the message then has the
            traceback.
    """
    content = {} if source is None else {"source": base64.b64encode(source).decode("ascii")}
    return SearchDescription.from_data(ask("load", path=str(path), **content), ask, constraints)


def dump_space(space: SearchSpace) -> dict[str, Any]:
    """Return a search space as data that JSON can hold, with the texts of constraints."""
    parameters = {name: _dump_parameter(parameter) for name, parameter in space.parameters.items()}
    return {"parameters": parameters, "constraints": list(space.constraint_texts)}


def load_space(data: Mapping[str, Any], constraints: ConstraintSet | None = None) -> SearchSpace:
    """Return the search space from the data that `dump_space` returned.

    Args:
        constraints: Checks the constraints of the space. Without it, any check raises RuntimeError.
    """
    space = SearchSpace(
        **{name: _load_parameter(parameter) for name, parameter in data["parameters"].items()}
    )
    if data["constraints"]:
        space.delegate_constraints(
            data["constraints"], _UnavailableConstraints() if constraints is None else constraints
        )
    return space


def _dump_parameter(parameter: Parameter) -> dict[str, Any]:
    kind = next(name for name, kind in _PARAMETER_CLASSES.items() if isinstance(parameter, kind))
    fields = {field.name: getattr(parameter, field.name) for field in dataclasses.fields(parameter)}
    if parameter.when is not None:
        fields["when"] = {name: _dump_values(values) for name, values in parameter.when.items()}
    return {"kind": kind, **fields}


def _load_parameter(data: Mapping[str, Any]) -> Parameter:
    fields = dict(data)
    kind = _PARAMETER_CLASSES[fields.pop("kind")]
    choices = fields.pop("choices", ())
    when = fields.pop("when")
    if when is not None:
        when = {name: _load_values(values) for name, values in when.items()}
    return kind(*choices, when=when, **fields)


def _dump_values(values: Any) -> Any:
    # A range stays a range, since it may be long.
    if isinstance(values, range):
        return {"range": [values.start, values.stop, values.step]}
    return values


def _load_values(values: Any) -> Any:
    return range(*values["range"]) if isinstance(values, dict) else values
