"""Find what a Hydra application can sweep in the configuration that Hydra prints."""

from __future__ import annotations

import ast
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hpo.cli.script_options import ScriptOption
from hpo.errors import UsageError
from hpo.space.parameters import Float, Int, Parameter
from hpo.text_format import cut_text

_SECONDS = 300  # An application may import torch on a slow file system.
_NUMBERS = (bool, int, float)


def uses_hydra(tree: ast.AST) -> bool:
    """Return whether a script has a function that ``hydra.main`` decorates."""
    nodes = list(ast.walk(tree))
    imported = (node for node in nodes if isinstance(node, ast.ImportFrom))
    if any(node.module == "hydra" and node.names[0].name == "main" for node in imported):
        return True
    attributes = (node for node in nodes if isinstance(node, ast.Attribute))
    return any(ast.unparse(node) == "hydra.main" for node in attributes)


def read_hydra_options(path: Path) -> list[ScriptOption]:
    """Return the groups and values of an application's configuration as options.

    The application is started with ``--cfg all``, with which Hydra does not call its function.
    """
    config = _read_config(path)
    hydra = config.pop("hydra")
    folders = [
        Path(source["path"])
        for source in hydra["runtime"]["config_sources"]
        if source["provider"] == "main" and source["schema"] == "file"
    ]
    values = dict(_list_values(config))
    options = []
    for group in hydra["runtime"]["choices"]:
        files = [file for folder in folders for file in sorted(folder.glob(f"{group}/*.yaml"))]
        if group.startswith("hydra/") or len(files) < 2:
            continue
        options.append(ScriptOption(f"--{group}", choices=[file.stem for file in files]))
        common = set.intersection(*(_list_keys(group, file) for file in files))
        # A value that is not in all configurations of a group cannot be swept together with it.
        inside = {key for key in values if key.startswith(f"{group.replace('/', '.')}.")}
        values = {key: values[key] for key in values if key in common or key not in inside}
    numbers = {key: value for key, value in values.items() if isinstance(value, _NUMBERS)}
    options += [ScriptOption(f"--{key}", type(v).__name__, v) for key, v in numbers.items()]
    return options


def format_sweep(
    path: Path, chosen: Mapping[str, Parameter], others: Mapping[str, Parameter]
) -> str:
    """Return the command that sweeps the chosen parameters, and the others as comments.

    The parameters are named by the keys of their overrides.
    """
    words = ["hydra/sweeper=hpo", "hydra.sweeper.workers=4", "hydra.sweeper.evaluations=100"]
    start = f"python {shlex.quote(str(path))} --multirun {' '.join(words)}"
    command = " \\\n    ".join([start, *_format_overrides(chosen)])
    comments = [f"#   {override}\n" for override in _format_overrides(others)]
    title = "# Others, which may be added:\n" if comments else ""
    return f"{command}\n{title}{''.join(comments)}"


def _format_overrides(parameters: Mapping[str, Parameter]) -> list[str]:
    return [shlex.quote(f"{key}={_format_values(each)}") for key, each in parameters.items()]


def _format_values(parameter: Parameter) -> str:
    if not isinstance(parameter, (Int, Float)):
        return ",".join(map(_format_choice, parameter.choices))
    values = f"interval({parameter.low},{parameter.high})"
    if isinstance(parameter, Int):
        values = f"int({values})"
    return f"tag(log,{values})" if parameter.log else values


def _format_choice(choice: object) -> str:
    return str(choice).lower() if isinstance(choice, bool) else str(choice)


def _read_config(path: Path) -> dict[str, Any]:
    command = [sys.executable, str(path), "--cfg", "all"]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        raise UsageError(
            f"{path} --cfg all, which prints its configuration, has not ended in {_SECONDS} s"
        ) from None
    _, found, text = f"\n{ended.stdout}".partition("\nhydra:\n")
    if ended.returncode != 0 or not found:
        lines = [line for line in ended.stderr.splitlines() if line.strip()]
        reason = cut_text(lines[-1]) if ended.returncode and lines else "it printed none"
        raise UsageError(f"{path} --cfg all, which prints its configuration, failed: {reason}")
    return _parse_yaml(f"hydra:\n{text}")


def _parse_yaml(text: str) -> dict[str, Any]:
    from omegaconf import OmegaConf  # Hydra requires it.

    content: Any = OmegaConf.to_container(OmegaConf.create(text))  # interpolations stay texts
    return dict(content)


def _list_values(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in config.items():
        if isinstance(value, dict):
            yield from _list_values(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _list_keys(group: str, file: Path) -> set[str]:
    """Return the keys that a configuration of a group sets, if it has the usual package."""
    content = _parse_yaml(file.read_text("utf-8"))
    return {key for key, _ in _list_values(content, f"{group.replace('/', '.')}.")}
