"""Test the output of `--help`: options are in groups, and texts are short and complete."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
from typer.main import get_command

from hpo.cli.commands import app
from hpo.cli.mpi_commands import (
    group_parameters,
    make_check,
    make_cluster_check,
    make_command_app,
    make_search,
)
from tests.support.launch import Hpo

SEARCH: Any = get_command(make_command_app(make_search()))
CHECK: Any = get_command(make_command_app(make_check()))
CHECK_CLUSTER: Any = get_command(make_command_app(make_cluster_check()))
GROUPS = [
    "Budget",
    "Layout",
    "Search",
    "Early stopping",
    "Checkpoints",
    "Output",
    "Program behind --",
]


def test_groups_have_each_search_option_once() -> None:
    grouped = Counter(
        each.name
        for heading, found in group_parameters(SEARCH.params)
        if heading in GROUPS
        for each in found
    )
    assert set(grouped.values()) == {1}
    assert set(grouped) == {parameter.name for parameter in SEARCH.params} - {"search_space"}


@pytest.mark.parametrize(
    "command", [SEARCH, CHECK, CHECK_CLUSTER], ids=["search", "check", "check-cluster"]
)
def test_group_parameters_yields_each_parameter_once(command: Any) -> None:
    found = [parameter for _, group in group_parameters(command.params) for parameter in group]
    assert sorted(parameter.name for parameter in found) == sorted(
        parameter.name for parameter in command.params
    )


def test_help_summaries_are_complete_sentences(hpo: Hpo) -> None:
    status, out, _ = hpo("--help")
    assert status == 0
    commands = dict(re.findall(r"^  ([\w-]+) +(.+)$", out.split("Commands:")[1], re.MULTILINE))
    expected: Any = get_command(app)
    assert set(commands) == set(expected.commands)
    assert [
        text for text in commands.values() if not text.endswith(".") or text.endswith("..")
    ] == []


@pytest.mark.parametrize(
    "command", [SEARCH, CHECK, CHECK_CLUSTER], ids=["search", "check", "check-cluster"]
)
def test_help_of_each_option_has_at_most_12_words(command: Any) -> None:
    texts = {
        parameter.name: re.sub(r"\[default: .*\]", "", parameter.help)
        for parameter in command.params
    }
    lengths = {name: len(text.split()) for name, text in texts.items() if name != "search_space"}
    assert {name: length for name, length in lengths.items() if length > 12} == {}


def test_help_lists_each_option_in_its_group(hpo: Hpo) -> None:
    _, out, _ = hpo("search", "--help")
    sections = re.split(r"^(\S.*):$", out, flags=re.MULTILINE)
    shown = dict(zip(sections[1::2], sections[2::2], strict=True))
    assert [heading for heading in shown if heading in GROUPS] == GROUPS
    assert "--evaluations N" in shown["Budget"]
    assert "--run-dir DIR" in shown["Output"]
    assert "10m, 1h30m" in out, "--help must show the format of TIME."
