"""The template and a trainer without processes: what they answer, through JSON, as ranks get it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hpo.problem import Problem, RemoteConstraints, SearchDescription, load_description
from hpo.results.recommendation import RunTest
from hpo.trainer import constraint_server, final_test
from hpo.trainer.search_file import BoundSearch, SearchFile, load_search_file


def send_through_json(content: Any) -> Any:
    """Return data as it arrives at the other end of a channel."""
    return json.loads(json.dumps(content))


class InProcessTemplate:
    """Answers the requests of a rank in this process; `requests` are the kinds of those that have come."""

    def __init__(self) -> None:
        self.search: SearchFile | None = None
        self.requests: list[str] = []
        self.constraints = RemoteConstraints(self._ask_trainer)

    def ask(self, kind: str, **content: Any) -> dict[str, Any]:
        """Answer as a template does."""
        content = send_through_json(content)
        self.requests.append(kind)
        if kind == "load":
            self.search = load_search_file(Path(content["path"]))
            return dict(send_through_json(self.search.describe()))
        assert self.search is not None
        if kind == "bind":
            return dict(send_through_json(self.search.make_setting_values(content["assignments"])))
        assert kind == "check_setting"
        self.search.check_setting(content["assignment"])
        return {}

    def load(self, path: Path) -> SearchDescription:
        """Return the description of a search file."""
        return load_description(path, self.ask, self.constraints)

    def _ask_trainer(self, **content: Any) -> Mapping[str, Any]:
        assert self.search is not None
        self.requests.append("constraints")
        return dict(
            send_through_json(constraint_server.answer_constraint_request(self.search, send_through_json(content)))
        )


def describe_search_file(path: Path) -> SearchDescription:
    """Return the description of a search file."""
    return InProcessTemplate().load(path)


def load_problem(path: Path, *assignments: str) -> Problem:
    """Return a problem: a search file and its settings."""
    return describe_search_file(path).bind_settings(assignments)


def make_run_test(search: BoundSearch) -> RunTest:
    """Return a function that runs the test of a search file as a trainer does."""

    def run_test(params: dict[str, Any], weights: Path) -> Iterator[Mapping[str, Any]]:
        yield from map(send_through_json, final_test.run_test(search, send_through_json(params), weights))

    return run_test
