"""The template and a trainer without processes: what they answer, through JSON, as ranks get it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hpo.problem import AskedConstraints, Description, Problem, load_description
from hpo.results.winner import RunTest
from hpo.trainer import constraints, testing
from hpo.trainer.search_file import BoundSearch, SearchFile, load_search_file


def through_json(content: Any) -> Any:
    """Return data as it arrives at the other end of a channel."""
    return json.loads(json.dumps(content))


class InProcess:
    """Answers the requests of a rank in this process; `requests` are the kinds of those that have come."""

    def __init__(self) -> None:
        self.search: SearchFile | None = None
        self.requests: list[str] = []
        self.constraints = AskedConstraints(self._ask_trainer)

    def ask(self, kind: str, **content: Any) -> dict[str, Any]:
        """Answer as a template does."""
        content = through_json(content)
        self.requests.append(kind)
        if kind == "load":
            self.search = load_search_file(Path(content["path"]))
            return dict(through_json(self.search.describe()))
        assert self.search is not None
        if kind == "bind":
            return dict(through_json(self.search.bind(content["assignments"])))
        assert kind == "check_setting"
        self.search.check_setting(content["assignment"])
        return {}

    def load(self, path: Path) -> Description:
        """Return the description of a search file."""
        return load_description(path, self.ask, self.constraints)

    def _ask_trainer(self, **content: Any) -> Mapping[str, Any]:
        assert self.search is not None
        self.requests.append("constraints")
        return dict(through_json(constraints.answer(self.search, through_json(content))))


def describe(path: Path) -> Description:
    """Return the description of a search file."""
    return InProcess().load(path)


def problem_of(path: Path, *assignments: str) -> Problem:
    """Return a problem: a search file and its settings."""
    return describe(path).bound(assignments)


def run_test_of(search: BoundSearch) -> RunTest:
    """Return a function that runs the test of a search file as a trainer does."""

    def run_test(params: dict[str, Any], weights: Path) -> Iterator[Mapping[str, Any]]:
        yield from map(through_json, testing.test(search, through_json(params), weights))

    return run_test
