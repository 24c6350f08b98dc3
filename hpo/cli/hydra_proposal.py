"""Propose what to sweep of a Hydra application, from its configuration."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from hydra.core.config_loader import ConfigLoader
from omegaconf import DictConfig, OmegaConf

from hpo.cli.proposal import choose_options, make_parameter_code
from hpo.cli.script_options import ScriptOption
from hpo.space.parameters import Float, Int, Parameter, parse_parameter

_MOST_OTHERS = 16  # Hydra needs 50 ms for each.


class HydraConfig:
    """The configuration of an application, which Hydra composes for each choice of a group.

    Args:
        loader: Hydra's loader.
        config: The composed configuration of the sweep.
        fixed: The overrides that all jobs have.
    """

    def __init__(self, loader: ConfigLoader, config: DictConfig, fixed: Sequence[str]) -> None:
        self._loader = loader
        self._config = config
        self._fixed = fixed

    def propose(self, is_valid: Callable[[str], bool]) -> tuple[list[str], list[str]]:
        """Return the overrides of a sweep, and others that may be added, as words of a shell.

        Args:
            is_valid: Whether an override can be swept.
        """
        options = self._list_options()
        chosen = choose_options(options)
        others = [option for option in options if option not in chosen][:_MOST_OTHERS]
        both = (filter(None, map(_format_override, each)) for each in (chosen, others))
        proposed, more = ([shlex.quote(one) for one in each if is_valid(one)] for each in both)
        return proposed, more

    def _list_options(self) -> list[ScriptOption]:
        """Return groups with several choices, and the numbers that exist with each choice."""
        start = self._compose()
        choices = {group: self._try_choices(group, start) for group in _list_groups(start)}
        composed = [one for found in choices.values() for one in found.values()]
        shared = set.intersection(*({*_list_groups(one)} for one in [start, *composed]))
        groups = {group: choices[group] for group in choices if group in shared}
        values = dict(_list_values(start))
        for found in groups.values():
            for one in found.values():
                known = dict(_list_values(one))
                values = {key: value for key, value in values.items() if key in known}
        options = [
            ScriptOption(f"--{group}", choices=list(found)) for group, found in groups.items()
        ]
        return options + [ScriptOption(f"--{k}", type(v).__name__, v) for k, v in values.items()]

    def _try_choices(self, group: str, start: DictConfig) -> dict[str, DictConfig]:
        """Return the configuration with each choice of a group; none if the present one is not one.

        Choices with which Hydra cannot compose the configuration are left out.
        """
        found = {}
        for choice in self._loader.get_group_options(group.partition("@")[0]):
            with suppress(Exception):  # Any error of Hydra, OmegaConf and YAML.
                found[choice] = self._compose(f"{group}={choice}")
        is_choice = start.hydra.runtime.choices[group] in found
        return found if is_choice and len(found) > 1 else {}

    def _compose(self, *overrides: str) -> DictConfig:
        return self._loader.load_sweep_config(self._config, [*self._fixed, *overrides])


def _list_groups(config: DictConfig) -> list[str]:
    chosen = config.hydra.runtime.choices
    return [name for name in chosen if not name.startswith("hydra/") and chosen[name] is not None]


def _list_values(config: DictConfig) -> Iterator[tuple[str, bool | int | float]]:
    """Yield the numbers and booleans of a configuration, with the keys of their overrides."""
    content: Any = OmegaConf.to_container(config)
    content.pop("hydra")
    yield from _list_leaves(content, "")


def _list_leaves(content: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in content.items():
        if isinstance(value, dict):
            yield from _list_leaves(value, f"{prefix}{name}.")
        elif isinstance(value, (bool, int, float)) and not str(name).startswith("_"):
            yield f"{prefix}{name}", value  # `_partial_` and others are of hydra.utils.instantiate


def _format_override(option: ScriptOption) -> str:
    """Return the override that sweeps a group or value; "" if its range is unknown."""
    key = option.flag[len("--") :]
    if option.choices:
        return f"{key}={','.join(option.choices)}"
    with suppress(ValueError):  # A number may be infinite, or too large.
        if code := make_parameter_code(option)[0]:
            return f"{key}={_format_values(parse_parameter(code))}"
    return ""


def _format_values(parameter: Parameter) -> str:
    if not isinstance(parameter, (Int, Float)):
        return ",".join(str(choice).lower() for choice in parameter.choices)
    values = f"interval({parameter.low},{parameter.high})"
    if isinstance(parameter, Int):
        values = f"int({values})"
    return f"tag(log,{values})" if parameter.log else values
