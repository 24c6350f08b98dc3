"""A sweeper for Hydra: ``python train.py --multirun hydra/sweeper=hpo 'lr=interval(0.1,1)'``.

The sweep is `hpo search` over the application, as a script. Hydra imports this module whenever an
application starts, so it imports what it needs for a sweep only in a sweep.
"""

from __future__ import annotations

import json
import keyword
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import field, make_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra._internal.utils import get_args_parser
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep
from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import CompactHydraException
from hydra.experimental.callback import Callback
from hydra.plugins.sweeper import Sweeper
from omegaconf import OmegaConf

import hpo
from hpo.errors import ExitStatus
from hpo.evaluation_api import count_reports, reads_lines
from hpo.objectives import parse_report
from hpo.options import OPTIONS, PROGRAM_OPTIONS, Kind, format_value
from hpo.process.launcher import describe_launcher
from hpo.script_objective import EVALUATION_PLACEHOLDERS, SCORE, escape_placeholders

if TYPE_CHECKING:
    from hydra.types import HydraContext, TaskFunction
    from omegaconf import DictConfig

    from hpo.space.parameters import Parameter

# Overrides of the sweep, which its jobs do not get.
_OWN_OVERRIDES = ("hydra/sweeper", "hydra.sweeper", "hydra.mode", "hydra.sweep.", "hydra.run.")
# The sweeper sets them, or they are for search files.
_OTHER_OPTIONS = (
    *("run_dir", "resume", "ranks_per_worker", "space", "flags", "maximize"),
    *("settings", "pbt", "test"),
)
_OPTIONS = {
    name: option
    for name, option in {**OPTIONS, **PROGRAM_OPTIONS}.items()
    if name not in _OTHER_OPTIONS
}

SweeperConfig = make_dataclass(
    "SweeperConfig",
    [
        ("_target_", str, f"{__name__}.HpoSweeper"),
        ("workers", int, 1),
        ("ranks_per_worker", int, 1),
        ("launch", Any, None),
        ("maximize", bool, False),
        ("max_failure_rate", float, 1.0),
        ("params", dict[str, Any], field(default_factory=dict)),
        *((name, Any, None) for name in _OPTIONS),
    ],
)
ConfigStore.instance().store(
    group="hydra/sweeper", name="hpo", node=SweeperConfig, provider="hpo-islands"
)


class ReportReturnValue(Callback):
    """Reports what the application returns as its loss, unless it has reported losses itself.

    The value is a number, or a tuple of a number and a dict of metrics.
    """

    def __init__(self, maximize: bool = False) -> None:
        self._maximize = maximize

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **_: Any) -> None:  # noqa: ARG002
        """Report the return value of a job that has succeeded."""
        if job_return.status != JobStatus.COMPLETED or count_reports() or reads_lines():
            return
        value = job_return.return_value
        if value is None:  # A rank that has no result.
            return
        value, metrics = value if isinstance(value, tuple) and len(value) == 2 else (value, {})
        try:
            number, numbers = parse_report(value, dict(metrics))
        except TypeError as error:
            text = "the application must return a loss, or a loss and a dict of metrics"
            print(f"TypeError: {text}: {error}", file=sys.stderr)
            # Hydra would print any other exception as a warning, and go on.
            raise SystemExit(1) from None
        except ValueError:  # It is not finite.
            hpo.report(value)
            return
        if self._maximize:
            numbers = {**numbers, SCORE: number}
            number = -number
        hpo.report(number, **numbers)


class HpoSweeper(Sweeper):
    """Runs `hpo search` over the application, and returns the overrides of the best job."""

    def __init__(self, **settings: Any) -> None:
        self._settings: dict[str, Any] = {
            name: OmegaConf.to_object(value) if OmegaConf.is_config(value) else value
            for name, value in settings.items()
        }

    def setup(
        self,
        *,
        hydra_context: HydraContext,
        task_function: TaskFunction,  # noqa: ARG002 - the jobs run the application as a script
        config: DictConfig,
    ) -> None:
        """Keep the configuration."""
        self._loader = hydra_context.config_loader
        self._config = config

    def sweep(self, arguments: list[str]) -> dict[str, Any]:
        """Search the space of the sweeps in `arguments`, and return the best overrides."""
        if (launcher := describe_launcher(os.environ)) != "no launcher":
            raise CompactHydraException(
                f"a sweep must be started once, not by {launcher}: hydra.sweeper.launch gives the "
                "command that starts its ranks, such as 'srun -n 8'"
            )
        given = [
            f"{name}={value if isinstance(value, str) else json.dumps(value)}"
            for name, value in self._settings["params"].items()
        ]
        parser = OverridesParser.create(config_loader=self._loader)
        space = _Space(parser.parse_overrides([*given, *arguments]))
        if not space.parameters:
            raise CompactHydraException(self._describe_proposal(space.fixed))
        # A mistake in an override is found before anything starts.
        self._loader.load_sweep_config(self._config, [*space.fixed, *space.list_examples()])
        folder = Path(str(self._config.hydra.sweep.dir)).absolute()
        if not str(folder).isprintable() or re.search(r"['\\$]", str(folder)):
            raise CompactHydraException(
                f"hydra.sweep.dir must have no quotes, backslashes and $, got {str(folder)!r}"
            )
        folder.mkdir(parents=True, exist_ok=True)
        OmegaConf.save(self._config, folder / "multirun.yaml")
        status = _run_to_the_end([*self._make_launcher(), *self._make_search(space, folder)])
        if status == ExitStatus.UNFINISHED:
            print(f"The same command with hydra.sweep.dir={folder} resumes the sweep")
        if status:
            raise SystemExit(status)
        return self._read_results(space, folder)

    def _describe_proposal(self, fixed: list[str]) -> str:
        """Return what is wrong without anything to search, and what could be searched."""
        from hpo.cli.hydra_proposal import HydraConfig

        given = {each.partition("=")[0].lstrip("+~") for each in fixed}

        def is_valid(override: str) -> bool:
            if override.partition("=")[0] in given:
                return False
            with suppress(Exception):  # Any error of Hydra, for keys and values of all kinds.
                space = _Space(OverridesParser.create().parse_overrides([override]))
                self._loader.load_sweep_config(self._config, [*fixed, *space.list_examples()])
                return bool(space.parameters)
            return False

        chosen, others = HydraConfig(self._loader, self._config, fixed).propose(is_valid)
        message = "the overrides have nothing to search."
        if not chosen:
            chosen, others = others, []
        if not chosen:
            example = "'lr=tag(log,interval(1e-4,1e-1))'"
            return f"{message} Give an interval, a range or choices, such as {example}"
        lines = [f"{message} From the configuration, these are proposed:", " ".join(chosen)]
        if others:
            lines += ["And these are possible:", " ".join(others)]
        return "\n".join(lines)

    def _make_launcher(self) -> list[str]:
        ranks = self._settings["workers"] * self._settings["ranks_per_worker"]
        words = shlex.split(self._settings["launch"] or f"mpirun -n {ranks}")
        if shutil.which(words[0]) is None:
            raise CompactHydraException(
                f"hydra.sweeper.launch: {words[0]} is not installed. Run: pip install "
                "'hpo-islands[mpich]', or load the MPI module of the cluster"
            )
        return words

    def _make_search(self, space: _Space, folder: Path) -> list[str]:
        """Return the command of the search, whose jobs are evaluations of the application."""
        beside = Path(sys.executable).with_name("hpo")
        words = [str(beside) if beside.exists() else "hpo", "search"]
        for name, parameter in space.parameters.items():
            words += ["--space", f"{name}={parameter!r}"]
        words += ["--ranks-per-worker", str(self._settings["ranks_per_worker"])]
        words += ["--run-dir", str(folder), "--resume"]
        for name, option in _OPTIONS.items():
            # A pattern is that of a loss or of a score.
            is_score = name == "loss" and self._settings["maximize"]
            flag = "--maximize" if is_score else option.flags
            words += _format_option(flag, option.kind, self._settings[name])
        callback = "hydra.callbacks.hpo_sweeper"
        job = [
            *map(escape_placeholders, self._list_own_overrides()),
            *map(escape_placeholders, space.fixed),
            *(f"{key}={{{name}}}" for name, key in space.keys.items()),
            "hydra.mode=RUN",
            "hydra.run.dir='{folder}'",
            "hydra.job.num={trial}",
            f"+{callback}._target_={__name__}.{ReportReturnValue.__name__}",
            f"+{callback}.maximize={str(self._settings['maximize']).lower()}",
        ]
        return [*words, "--", *_find_application(), *_list_flags(), *job]

    def _list_own_overrides(self) -> list[str]:
        """Return the overrides of Hydra itself, without those of the sweep."""
        given = self._config.hydra.overrides.hydra
        return [each for each in given if not each.lstrip("+~").startswith(_OWN_OVERRIDES)]

    def _read_results(self, space: _Space, folder: Path) -> dict[str, Any]:
        """Write the best overrides to optimization_results.yaml, as other sweepers do."""
        from hpo.results.reader import RunReader

        run = RunReader(folder)
        best = run.find_winner()
        if best is None:
            raise CompactHydraException(f"no evaluation has succeeded: see hpo top {folder}")
        ended = [each for each in run.read_evaluations() if each.counts_for_budget]
        failed = sum(each.state == "failed" for each in ended)
        limit = self._settings["max_failure_rate"]
        if failed > limit * len(ended):
            raise CompactHydraException(
                f"{failed} of {len(ended)} evaluations have failed, and "
                f"hydra.sweeper.max_failure_rate is {limit:g}: see hpo top {folder} --failed"
            )
        params = {space.keys[name]: value for name, value in best.params.items()}
        result = best.loss
        if self._settings["maximize"]:  # Losses that the application reports stay losses.
            result = best.metrics.get(SCORE, result)
        results = {"name": "hpo", "best_evaluated_params": params, "best_evaluated_result": result}
        OmegaConf.save(OmegaConf.create(results), folder / "optimization_results.yaml")
        return params


class _Space:
    """The sweeps among overrides as hyperparameters, and the other overrides."""

    def __init__(self, overrides: Sequence[Override]) -> None:
        self.fixed: list[str] = []
        self.parameters: dict[str, Parameter] = {}
        self.keys: dict[str, str] = {}
        """The keys of the overrides by the names of their hyperparameters."""
        last = {each.get_key_element(): each for each in overrides}  # The command line comes last.
        for key, override in last.items():
            parameter = _make_parameter(override) if override.is_sweep_override() else None
            if parameter is None:
                self.fixed.append(_format_fixed(override))
                continue
            name = _make_name(key, self.keys)
            self.keys[name] = key
            self.parameters[name] = parameter

    def list_examples(self) -> list[str]:
        """Return an override for each hyperparameter."""
        from random import Random

        try:
            params = hpo.SearchSpace(**self.parameters).draw(Random(0))
        except ValueError as error:
            raise CompactHydraException(str(error)) from error
        return [f"{self.keys[name]}={value}" for name, value in params.items()]


def _make_parameter(sweep: Override) -> Parameter | None:
    """Return the hyperparameter of a sweep; None if it has only one value."""
    value = sweep.value()
    is_log = "log" in getattr(value, "tags", ())
    if isinstance(value, IntervalSweep):
        low: Any = value.start
        high: Any = value.end
        kind = hpo.Int if isinstance(low, int) else hpo.Float
        return kind(low, high, log=is_log)
    texts = list(dict.fromkeys(sweep.sweep_string_iterator()))
    if not texts:
        raise CompactHydraException(f"{sweep.input_line} has no value")
    if len(texts) == 1:
        return None
    if isinstance(value, RangeSweep):
        numbers = sorted(map(float, texts))
        if all(text.lstrip("-").isdecimal() for text in texts):
            distance = int(numbers[1] - numbers[0])
            return hpo.Int(int(numbers[0]), int(numbers[-1]), log=is_log, step=distance)
        return hpo.Float(numbers[0], numbers[-1], log=is_log, step=abs(float(value.step)))
    is_ordinal = "ordinal" in getattr(value, "tags", ())
    choices = map(_parse_choice, texts)
    return hpo.Ordinal(*choices) if is_ordinal else hpo.Categorical(*choices)


def _parse_choice(text: str) -> bool | int | float | str:
    """Return a choice as a number or a boolean, or as it is written in an override."""
    with suppress(ValueError):
        value = json.loads(text.lower())
        if isinstance(value, (bool, int, float)):
            return value
    return text


def _format_fixed(override: Override) -> str:
    if override.is_sweep_override():
        (value,) = override.sweep_string_iterator()
        return f"{override.get_key_element()}={value}"
    return str(override.input_line)


def _make_name(key: str, taken: dict[str, str]) -> str:
    """Return a name for the hyperparameter of an override, such as optimizer_lr."""
    name = re.sub(r"\W+", "_", key).strip("_") or "value"
    if name[0].isdigit() or keyword.iskeyword(name) or name in EVALUATION_PLACEHOLDERS:
        name = f"value_{name}"
    while name in taken:
        name += "_"
    return name


def _format_option(flags: str, kind: Kind, value: Any) -> list[str]:
    """Return an option of `hpo search` as words of its command line; none without a value."""
    on, _, off = flags.partition("/")
    if isinstance(value, bool):
        return list(filter(None, [on if value else off]))
    if isinstance(value, list) and kind.types == (tuple,) and kind.parse is None:  # Repeatable.
        return [word for each in value for word in (on, str(each))]
    if isinstance(value, (dict, list)) and kind.types == (str,):
        value = json.dumps(value)
    return [] if value is None else [on, format_value(value)]


def _find_application() -> list[str]:
    """Return the application as the words after `--`: a script, or -m and a module."""
    main = sys.modules["__main__"]
    if main.__spec__ is not None:
        return ["-m", main.__spec__.name]
    return [str(Path(sys.argv[0]).absolute())]


def _list_flags() -> list[str]:
    """Return the flags of the command line that choose the configuration."""
    given = vars(get_args_parser().parse_known_args()[0])
    names = ("config_path", "config_name", "config_dir")
    pairs = [(f"--{name.replace('_', '-')}", given[name]) for name in names if given[name]]
    return [word for pair in pairs for word in pair]


def _run_to_the_end(command: Sequence[str]) -> int:
    """Run a command, and return its status. Ctrl-C is left to the command."""
    before = signal.signal(signal.SIGINT, lambda *_: None)
    # The last line on stderr is then an exception, and no advice to set this variable.
    environment = {**os.environ, "HYDRA_FULL_ERROR": "1"}
    try:
        return subprocess.Popen(command, env=environment).wait()
    finally:
        signal.signal(signal.SIGINT, before)
