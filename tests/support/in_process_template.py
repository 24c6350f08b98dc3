"""Answer requests in the process of the test as a template and a trainer would.

The template is the process that trainers are forked from. The content of each answer is converted
to JSON and back, as between processes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hpo.problem import Problem, RemoteConstraints, SearchDescription, load_description
from hpo.results.recommendation import RunTest
from hpo.trainer import final_test
from hpo.trainer.search_file import (
    BoundSearch,
    SearchFile,
    answer_constraint_request,
    load_search_file,
)


def send_through_json(content: Any) -> Any:
    """Return data as it arrives at the other end of a channel."""
    return json.loads(json.dumps(content))


class InProcessTemplate:
    """A template that answers requests in this process instead.

    `requests` lists the kinds of all requests that were received.
    """

    def __init__(self) -> None:
        self.search: SearchFile | None = None
        self.requests: list[str] = []
        self.constraints = RemoteConstraints(self._ask_trainer)

    def ask(self, kind: str, **content: Any) -> dict[str, Any]:
        """Answer a request as the process of a template does."""
        content = send_through_json(content)
        self.requests.append(kind)
        if kind == "load":
            self.search = load_search_file(Path(content["path"]))
            return dict(send_through_json(self.search.describe()))
        assert self.search is not None
        if kind == "bind":
            values = self.search.bind_settings(content["assignments"]).values
            return {"values": send_through_json(values), "unsafe": "", "skipped": {}}
        assert kind == "check_setting"
        self.search.check_setting(content["assignment"])
        return {}

    def load(self, path: Path) -> SearchDescription:
        """Load a search file, and return its description."""
        return load_description(path, self.ask, self.constraints)

    def _ask_trainer(self, **content: Any) -> Mapping[str, Any]:
        assert self.search is not None
        self.requests.append("constraints")
        return dict(
            send_through_json(
                answer_constraint_request(self.search.space, send_through_json(content))
            )
        )


def describe_search_file(path: Path) -> SearchDescription:
    """Load a search file, and return its description."""
    return InProcessTemplate().load(path)


def load_problem(path: Path, *assignments: str) -> Problem:
    """Load a search file, and return the problem with settings that are given as NAME=VALUE."""
    template = InProcessTemplate()
    file = template.load(path)
    values = template.ask("bind", assignments=list(assignments))["values"]
    return Problem(file, values, assignments)


def make_run_test(search: BoundSearch) -> RunTest:
    """Return a function that runs the user's `test` of a search file, as a trainer would run it."""

    def run_test(params: dict[str, Any], weights: Path) -> Iterator[Mapping[str, Any]]:
        yield from map(
            send_through_json, final_test.run_test(search, send_through_json(params), weights)
        )

    return run_test
