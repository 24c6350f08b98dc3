"""Write the options of all commands, and the names of the API, into the pages of docs/reference.

    python docs/write_reference.py

Code hosts show the pages as they are, so the tables are a part of them. A test compares them with
the commands and docstrings.
"""

from __future__ import annotations

import inspect
import pydoc
import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from typer.main import get_command

from hpo.cli.commands import app as hpo_app
from hpo.cli.mpi_commands import group_parameters, make_command_app, make_search

REFERENCE = Path(__file__).parent / "reference"
PAGES = {
    "search-command.md": (
        "run_islands.py",
        make_command_app(make_search(Path("search_spaces/digits_cnn.py"))),
    ),
    "commands.md": ("hpo", hpo_app),
}
API_PAGE = "api.md"
# A part of the page of the API: its table, and the directives that Sphinx replaces by docstrings.
_API_PART = re.compile(
    r"(<!-- python docs/write_reference.py -->\n).*?(<!-- end -->\n\n```\{eval-rst\}\n(.*?)```)",
    re.DOTALL,
)
_WRITTEN = re.compile(
    r"(?<=<!-- python docs/write_reference.py -->\n).*(?=<!-- end -->)", re.DOTALL
)


def fill_page(page: str) -> str:
    """Return the text of a page of docs/reference with the current options of its commands."""
    name, app = PAGES[page]
    command = get_command(app)
    lines = list(_describe_command(name, command))
    for sub in getattr(command, "commands", {}).values():
        lines += [f"## `{name} {sub.name}`", ""]
        if sub.name == "search":
            lines += ["It has a [page of its own](search-command.md).", ""]
        else:
            lines += _describe_command(f"{name} {sub.name}", sub)
    text = "\n" + "\n".join(lines)
    return _WRITTEN.sub(lambda _: text, (REFERENCE / page).read_text("utf-8"), count=1)


def fill_api_page() -> str:
    """Return the text of the page of the API with the current first lines of docstrings."""

    def fill_part(match: re.Match[str]) -> str:
        return f"{match[1]}\n{_describe_names(match[3])}\n{match[2]}"

    return _API_PART.sub(fill_part, (REFERENCE / API_PAGE).read_text("utf-8"))


def _describe_names(directives: str) -> str:
    """Return a table of the functions and classes that Sphinx's directives name."""
    rows = ["| | |", "|---|---|"]
    modules = re.findall(r"module:: (\S+)", directives) or ["hpo"]
    named = re.findall(r"auto\w+:: ([\w.]+).*(?:\n +:members: (.+))?", directives)
    for name, members in named:
        for each in [name, *(f"{name}.{member}" for member in members.split(", ") if member)]:
            found = pydoc.locate(each if each.startswith("hpo.") else f"{modules[0]}.{each}")
            summary = (inspect.getdoc(found) or "").partition("\n")[0].replace("``", "`")
            if inspect.isfunction(found):
                rows.append(f"| `{each}()` | {summary} |")
            elif isinstance(found, (type, property, cached_property)):
                rows.append(f"| `{each}` | {summary} |")
    return "\n".join(rows) + "\n"


def _describe_command(name: str, command: Any) -> Iterator[str]:
    """Describe a command in Markdown: its usage, purpose, arguments and options."""
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    usage = [name, "[OPTIONS]", *map(_format_usage, arguments)]
    usage += ["COMMAND ..."] if hasattr(command, "commands") else []
    yield from ("```text", " ".join(usage), "```", "", command.help, "")
    context = command.context_class(command, info_name=name)
    groups = group_parameters(command.params)
    for heading, parameters in groups:
        yield from ([f"**{heading}**", ""] if len(groups) > 2 else [])
        yield from ("| | |", "|---|---|")
        for parameter in parameters:
            record = parameter.get_help_record(context)
            if record is not None:
                names = parameter.metavar if parameter in arguments else record[0]
                cells = [f"`{names.replace(' / ', '`, `')}`", re.sub(r"\s+", " ", record[1])]
                yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
        yield ""


def _format_usage(argument: Any) -> str:
    return str(argument.metavar) if argument.required else f"[{argument.metavar}]"


if __name__ == "__main__":
    for page in PAGES:
        (REFERENCE / page).write_text(fill_page(page), "utf-8")
    (REFERENCE / API_PAGE).write_text(fill_api_page(), "utf-8")
