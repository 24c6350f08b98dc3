"""Write the options of all commands into the pages of docs/reference.

    python docs/command_line.py

Code hosts show the pages as they are, so the tables are a part of them. A test compares them with
the commands.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
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
_WRITTEN = re.compile(r"(?<=<!-- python docs/command_line.py -->\n).*(?=<!-- end -->)", re.DOTALL)


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
