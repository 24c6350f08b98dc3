"""A directive that writes the reference of a command line, so that it has every option."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from typer.main import get_command

from hpo.cli.commands import app as hpo_app
from hpo.cli.mpi_commands import group_parameters, make_command_app, make_search

PROGRAMS = {
    "run_islands.py": make_command_app(make_search(Path("search_spaces/digits_cnn.py"))),
    "hpo": hpo_app,
}


class CommandLine(SphinxDirective):
    """Write the help of a program, and of each of its subcommands in a section."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return the nodes of the program that the directive names."""
        program = self.arguments[0]
        command = get_command(PROGRAMS[program])
        sections = [
            self._section(f"{program} {sub.name}", sub)
            for sub in getattr(command, "commands", {}).values()
        ]
        return [*self._described(program, command), *sections]

    def _section(self, name: str, command: Any) -> nodes.Node:
        title = nodes.title("", "", nodes.literal("", name))
        section = nodes.section(
            "", title, *self._described(name, command), ids=[nodes.make_id(name)], names=[name]
        )
        self.state.document.note_implicit_target(section, section)
        return section

    def _described(self, name: str, command: Any) -> list[nodes.Node]:
        return self.parse_text_to_nodes("\n".join(_described(name, command)))


def _described(name: str, command: Any) -> Iterator[str]:
    """Describe a command in MyST Markdown: its usage, purpose, arguments and options."""
    context = command.context_class(command, info_name=name)
    arguments = [
        parameter for parameter in command.params if parameter.param_type_name == "argument"
    ]
    usage = [
        name,
        "[OPTIONS]",
        *map(_usage, arguments),
        *(["COMMAND ..."] if hasattr(command, "commands") else []),
    ]
    yield from (
        "```text",
        " ".join(usage),
        "```",
        "",
        command.help,
        "",
        f"```{{program}} {name}",
        "```",
        "",
    )
    groups = list(group_parameters(command.params))
    for heading, parameters in groups:
        if len(groups) > 2:
            yield from (f"```{{rubric}} {heading}", "```", "")
        for parameter in parameters:
            record = parameter.get_help_record(context)
            if record is not None:
                names, text = record
                names = parameter.metavar if parameter in arguments else names.replace(" / ", ", ")
                yield from (f"```{{option}} {names}", text, "```", "")


def _usage(argument: Any) -> str:
    return str(argument.metavar) if argument.required else f"[{argument.metavar}]"


def setup(app: Sphinx) -> dict[str, bool]:
    """Be a Sphinx extension."""
    app.add_directive("commandline", CommandLine)
    return {"parallel_read_safe": True}
