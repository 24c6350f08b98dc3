"""The options of a run: one field for each, with its default, help, group and valid values.

The command line, its help, the checks of values, run.json and `--resume` follow from these fields.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from hpo.errors import UsageError
from hpo.text_format import format_repr

PROPAGATORS = ("ga", "tpe", "cmaes", "pso", "nelder-mead", "propulate", "random")
NUMERIC_PROPAGATORS = ("cmaes", "pso", "nelder-mead")
"""The propagators that need a space without categorical parameters."""
MULTI_OBJECTIVE_PROPAGATORS = ("ga", "tpe", "random")
"""The propagators that can search with several objectives."""
PROPAGATORS_WITHOUT_MPI = ("ga", "tpe", "random")
"""The propagators of this project. The others are Propulate's, which initialise MPI."""
PBT_PROPAGATORS = ("ga", "tpe", "random")
"""The propagators that tell the merit of the parent from the merit of the hyperparameters."""
DEFAULT_PROPAGATORS = ("ga",)
TRACKERS = ("tensorboard", "mlflow", "wandb")
"""The trackers: names of their packages, and of the extras that install them."""
PRUNERS = ("none", "median", "asha", "hyperband", "one-epoch")
"""The pruners besides ``percentile:P``."""
LOG_LEVELS = ("debug", "info", "warning", "error")

_OFF = "off"
_LONGEST_SECONDS = 365 * 86400.0  # Operating systems cannot wait much longer.
_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}  # seconds


def parse_seconds(text: str) -> float:
    """Convert a duration to seconds: a number, 1h30m, or H:M:S as in job scripts.

    Raise a ValueError for any other text.
    """
    if re.fullmatch(r"\d+(:\d\d){1,2}", text):
        parts = reversed(text.split(":"))
        return float(sum(int(part) * 60**power for power, part in enumerate(parts)))
    if not re.fullmatch(r"(\d+(\.\d+)?[smhd]?)+", text):
        raise ValueError(text)
    numbers = re.findall(r"(\d+(?:\.\d+)?)([smhd]?)", text)
    return sum(float(number) * _UNITS[unit] for number, unit in numbers)


def parse_percentile(pruner: str) -> float:
    """Return P of the pruner ``percentile:P``, which stops all but the best P percent.

    Raise a ValueError for any other text, and if P is not between 0 and 100.
    """
    found = re.fullmatch(r"percentile:(\d+(?:\.\d+)?)", pruner)
    if found is None or not 0 < float(found[1]) < 100:
        raise ValueError(pruner)
    return float(found[1])


def _is_pruner(name: str) -> bool:
    with suppress(ValueError):
        return name in PRUNERS or bool(parse_percentile(name))
    return False


@dataclass(frozen=True)
class Kind:
    """The values that an option can have, on the command line and in run.json."""

    metavar: str | None = None
    """The value in the help; None for a switch."""
    types: tuple[type, ...] = (str,)
    parse: Callable[[str], Any] | None = None
    """Converts a text, or raises a ValueError. If it is None, texts are not converted."""
    noun: str = ""
    """The values in words, for the message about a text that cannot be parsed."""
    limits: str = ""
    """The values in words, for the message about a value that is out of range."""
    is_valid: Callable[[Any], bool] = lambda _: True
    unit: str = ""
    off: float | None = None
    """The number that the word off stands for; None if the option cannot be switched off."""


SWITCH = Kind(types=(bool,))
TEXT = Kind("NAME")
TEXTS = Kind("NAME", (tuple,))
PATH = Kind("FILE", (Path,))
NAMES = Kind(
    "NAME,...",
    (tuple,),
    lambda text: tuple(name.strip() for name in text.split(",")),
    limits=f"among {', '.join(PROPAGATORS)}",
    is_valid=lambda names: bool(names) and all(name in PROPAGATORS for name in names),
)
PRUNER = Kind(
    "NAME",
    limits="none, median, percentile:P with P between 0 and 100, asha, hyperband or one-epoch",
    is_valid=_is_pruner,
)
WHOLE = Kind(
    "N",
    (int,),
    int,
    noun="a whole number",
    limits="at least 0 and less than 2**63",
    is_valid=lambda number: 0 <= number < 2**63,
)
TRIALS = Kind(
    "N,...",
    (tuple,),
    lambda text: tuple(map(int, text.split(","))),
    noun="numbers of trials, such as 0,14",
    limits="numbers of trials, such as 0,14",
    is_valid=lambda trials: all(type(trial) is int and trial >= 0 for trial in trials),
)
COUNT = replace(
    WHOLE, limits="at least 1 and less than 2**63", is_valid=lambda number: 1 <= number < 2**63
)
PROBABILITY = Kind(
    "P",
    (float, int),
    float,
    noun="a number",
    limits="from 0 to 1",
    is_valid=lambda number: 0 <= number <= 1,
)
LOSS = Kind(
    "X|off",
    (float, int),
    float,
    noun="a number, or off",
    limits="a finite number",
    is_valid=lambda number: abs(number) <= sys.float_info.max,
    off=-math.inf,
)
DURATION = Kind(
    "TIME",
    (float, int),
    parse_seconds,
    noun="a duration, such as 90, 90s, 10m, 1h30m, 2d or 1:30:00",
    limits="from 1 second to 365 days",
    is_valid=lambda seconds: 1 <= seconds <= _LONGEST_SECONDS,
    unit=" s",
)
LIMIT = replace(DURATION, metavar="TIME|off", noun="a duration, or off", off=math.inf)


@dataclass(frozen=True)
class Option:
    """An option of the command line, besides its name and its default."""

    help: str
    group: str
    """The heading in the help."""
    kind: Kind
    flags: str = ""
    """A switch has two flags, such as --pbt/--no-pbt."""
    default: Any = None
    default_text: str | None = None
    """The default in the help. If it is None, it is made from the default; "" shows none."""
    is_recorded: bool = True
    """Whether run.json holds the value for each session."""
    is_kept: bool = True
    """Whether a resumed run keeps the recorded value, as it does unless the job determines it."""

    @property
    def name(self) -> str:
        """The flag in messages. That of a switch negates its default."""
        first, _, second = self.flags.partition("/")
        return second if self.default is True else first

    def check(self, value: Any) -> None:
        """Raise a UsageError if a value is out of range."""
        if value is None or value == self.kind.off or self.kind.is_valid(value):
            return
        shown = f"{value:g}{self.kind.unit}" if self.kind.unit else value
        if isinstance(value, tuple):
            shown = format_value(value)
        elif isinstance(value, str):
            shown = format_repr(value)
        raise UsageError(f"{self.name} must be {self.kind.limits}, got {shown}")


def format_value(value: Any) -> str:
    """Return a value of an option, or its JSON value, as it is written on the command line."""
    if value is None:
        return ""
    if isinstance(value, (list, tuple)):
        return ",".join(map(str, value))
    if isinstance(value, float) and math.isinf(value):
        return _OFF
    is_integral = isinstance(value, float) and value.is_integer() and abs(value) < 2**53
    return str(int(value) if is_integral else value)


def _option(default: Any, help: str, group: str, kind: Kind, **others: Any) -> Any:  # noqa: A002
    return dataclasses.field(
        default=default, metadata={"option": Option(help, group, kind, default=default, **others)}
    )


# The field of an option that run.json does not hold among the options of a session. The manifest
# has the settings and the storage besides, and --resume keeps them.
_of_this_job = partial(_option, is_recorded=False, is_kept=False)


@dataclass(frozen=True)
class Options:
    """The options of a run.

    Raises:
        UsageError: An option is not valid, or two options exclude each other.
    """

    search_space: Path

    evaluations: int = _option(64, "Evaluations of the run.", "Budget", COUNT)
    generations: int | None = _of_this_job(
        None, "Instead of --evaluations: G per worker.", "Budget", replace(COUNT, metavar="G")
    )
    time_limit: float | None = _of_this_job(
        None, "Stop the run after this.", "Budget", DURATION, default_text="end of a SLURM job"
    )
    evaluation_timeout: float = _option(
        math.inf, "Fail an evaluation that takes longer.", "Budget", LIMIT
    )
    collective_timeout: float = _option(
        600.0,
        "Fail an evaluation if a rank blocks the others this long.",
        "Budget",
        DURATION,
        default_text="10m",
    )
    target_loss: float = _option(-math.inf, "End the run at a loss of at most X.", "Budget", LOSS)
    max_failures: int = _option(
        0, "Stop if the first N evaluations fail; 0: never.", "Budget", WHOLE
    )

    ranks_per_worker: int | None = _option(
        None,
        "MPI ranks that train one network.",
        "Layout",
        COUNT,
        default_text="2; 1 if ranks are odd",
        is_kept=False,
    )
    islands: int | None = _option(
        None,
        "Islands.",
        "Layout",
        COUNT,
        default_text="2, or one for each propagator; 1 with one worker",
    )
    fresh_trainers: bool = _option(
        False,
        "Start new processes for each evaluation.",
        "Layout",
        SWITCH,
        flags="--fresh-trainers/--no-fresh-trainers",
    )

    settings: tuple[str, ...] = _of_this_job(
        (),
        "Setting of the search space; repeatable.",
        "Search",
        replace(TEXTS, metavar="NAME=VALUE"),
        flags="--set",
    )
    propagators: tuple[str, ...] = _option(
        DEFAULT_PROPAGATORS,
        f"{', '.join(PROPAGATORS)}; islands take several in turn.",
        "Search",
        NAMES,
    )
    seed: int = _option(0, "Seed of weights, data order and breeding.", "Search", WHOLE)
    migration_probability: float = _option(
        0.9, "Probability that an island sends its best, per generation.", "Search", PROBABILITY
    )
    pollination: bool = _option(
        True,
        "Send copies to other islands, or move individuals.",
        "Search",
        SWITCH,
        flags="--pollination/--migration",
    )
    pbt: bool = _option(
        False,
        "Start from the weights of a parent; only mutable parameters differ.",
        "Search",
        SWITCH,
        flags="--pbt/--no-pbt",
    )
    enqueue: str | None = _of_this_job(
        None,
        "JSON list of (partial) hyperparameters to evaluate first.",
        "Search",
        replace(TEXT, metavar="FILE|JSON"),
    )
    warm_start: str | None = _of_this_job(
        None,
        "Learn from another run, or from an Optuna study.",
        "Search",
        replace(TEXT, metavar="RUN_DIR|URL"),
    )
    warm_start_values: tuple[str, ...] = _of_this_job(
        (),
        "Value of a new hyperparameter in evaluations of --warm-start; repeatable.",
        "Search",
        replace(TEXTS, metavar="NAME=VALUE"),
        flags="--warm-start-value",
    )
    confirm_seeds: int = _option(
        0,
        "Train the --top-n best with K other seeds at the end.",
        "Search",
        replace(WHOLE, metavar="K"),
    )
    confirm_trials: tuple[int, ...] = _option(
        (), "Trials that --confirm-seeds trains besides the best.", "Search", TRIALS, is_kept=False
    )
    test: bool = _option(
        True,
        "Test the best on data that the search has not seen.",
        "Search",
        SWITCH,
        flags="--test/--no-test",
    )

    pruner: str = _option(
        "none",
        "none, median, percentile:P, asha, hyperband or one-epoch.",
        "Early stopping",
        PRUNER,
    )

    resume: bool = _of_this_job(
        False, "Continue the run in --run-dir, or start it.", "Checkpoints", SWITCH, default_text=""
    )
    checkpoint_every: float | None = _option(
        None,
        "Interval of checkpoints.",
        "Checkpoints",
        LIMIT,
        default_text="10s, longer if they take over 1% of the time",
    )

    run_dir: Path | None = _of_this_job(
        None,
        "Directory of the run.",
        "Output",
        replace(PATH, metavar="DIR"),
        default_text="a new runs/NAME-DATE-TIME",
    )
    storage: str | None = _of_this_job(  # It may have a password. The manifest has it without.
        None,
        "Optuna storage of the study.",
        "Output",
        replace(TEXT, metavar="URL"),
        default_text="journal RUN_DIR/study.log",
    )
    top_n: int = _option(3, "Individuals in each final table.", "Output", COUNT)
    trackers: tuple[str, ...] = _of_this_job(
        (),
        f"Log to {', '.join(TRACKERS)} (extras); repeatable.",
        "Output",
        TEXTS,
        flags="--tracker",
    )
    as_json: bool = _of_this_job(
        False,
        "Print the result as JSON, and all else to stderr.",
        "Output",
        SWITCH,
        flags="--json",
        default_text="",
    )
    log_level: str = _of_this_job(
        "warning",
        f"Messages on stderr: {', '.join(LOG_LEVELS)}.",
        "Output",
        Kind(
            "LEVEL",
            limits=f"one of {', '.join(LOG_LEVELS)}",
            is_valid=lambda level: level in LOG_LEVELS,
        ),
    )
    source: bytes | None = dataclasses.field(default=None, repr=False)
    """The content of the search file, if the command line defines it; None if the file has it."""

    def __post_init__(self) -> None:
        for name in self.propagators:
            if name not in PROPAGATORS:
                raise UsageError(
                    f"--propagators must be among {', '.join(PROPAGATORS)}, got {name!r}"
                )
        for field, option in OPTIONS.items():
            option.check(getattr(self, field))
        if self.storage is not None and "://" not in self.storage:
            raise UsageError(  # The message does not have the value, which may have a password.
                "--storage must be the URL of an Optuna storage, such as sqlite:///study.db or "
                "postgresql://me:word@host/db"
            )
        if self.warm_start == "":
            raise UsageError(
                "--warm-start must be the directory of a run, or the URL of an Optuna storage, got "
                "''"
            )
        if self.warm_start_values and self.warm_start is None:
            raise UsageError("--warm-start-value must be used with --warm-start")
        if self.confirm_trials and not self.confirm_seeds:
            raise UsageError("--confirm-trials must be used with --confirm-seeds")
        if self.resume and self.run_dir is None:
            raise UsageError(
                "--resume must be used with --run-dir. Give the directory of the run to resume"
            )
        check_trackers(self.trackers)


@dataclass(frozen=True)
class ProgramOptions:
    """The options that describe a training program, which follows ``--`` on the command line."""

    space: tuple[str, ...] = _of_this_job(
        (),
        "A hyperparameter, such as 'lr=Float(1e-4, 1e-1, log=True)'; repeatable.",
        "Program behind --",
        replace(TEXTS, metavar="NAME=PARAMETER"),
    )
    loss: str | None = _of_this_job(
        None,
        "Regular expression of printed losses, such as 'val_loss=(\\S+)'.",
        "Program behind --",
        replace(TEXT, metavar="REGEX"),
        default_text="from hpo.report",
    )
    maximize: str | None = _of_this_job(
        None,
        "Regular expression of a printed score, of which the highest is best.",
        "Program behind --",
        replace(TEXT, metavar="REGEX"),
    )
    step: str | None = _of_this_job(
        None,
        "Regular expression of a printed epoch, whose last loss counts.",
        "Program behind --",
        replace(TEXT, metavar="REGEX"),
        default_text="each loss counts",
    )
    metrics: tuple[str, ...] = _of_this_job(
        (),
        "Regular expression of a printed metric; repeatable.",
        "Program behind --",
        replace(TEXTS, metavar="NAME=REGEX"),
        flags="--metric",
    )
    flags: tuple[str, ...] = _of_this_job(
        (),
        "A boolean hyperparameter: --NAME if true, absent if false; repeatable.",
        "Program behind --",
        TEXTS,
        flags="--flag",
    )
    resume_args: str = _of_this_job(
        "",
        "Arguments to continue from a checkpoint, such as '--resume {folder}/last.pt'.",
        "Program behind --",
        replace(TEXT, metavar="ARGUMENTS"),
    )
    resume_file: str = _of_this_job(
        "",
        "Checkpoint in {folder}, such as 'checkpoint-*': the newest match counts.",
        "Program behind --",
        replace(TEXT, metavar="PATH"),
        default_text="as in --resume-args",
    )
    first_report: int = _of_this_job(
        1,
        "Prune a program from its Nth loss on.",
        "Early stopping",
        replace(WHOLE, is_valid=lambda _: True),  # Script checks it.
    )


def _list_options(owner: type) -> dict[str, Option]:
    found = {}
    for field in dataclasses.fields(owner):
        if "option" in field.metadata:
            option: Option = field.metadata["option"]
            flags = option.flags or f"--{field.name.replace('_', '-')}"
            found[field.name] = replace(option, flags=flags)
    return found


OPTIONS = _list_options(Options)
"""The options of a run, by the names of their fields."""
PROGRAM_OPTIONS = _list_options(ProgramOptions)
"""The options that describe a program, by the names of their fields."""
RECORDED_OPTIONS = {name: option for name, option in OPTIONS.items() if option.is_recorded}
"""The options that run.json holds for each session, by the names of their fields."""


def to_json(options: Options) -> dict[str, Any]:
    """Return the recorded options as JSON values. Infinite values become the word off."""
    values = {}
    for name in RECORDED_OPTIONS:
        value = getattr(options, name)
        if isinstance(value, float) and math.isinf(value):
            value = _OFF
        values[name] = list(value) if isinstance(value, tuple) else value
    return values


def from_json(name: str, value: Any) -> Any:
    """Return the value of an option from its JSON value."""
    if value == _OFF and RECORDED_OPTIONS[name].kind.off is not None:
        return RECORDED_OPTIONS[name].kind.off
    return tuple(value) if isinstance(value, list) else value


def is_valid_json(name: str, value: Any) -> bool:
    """Return whether run.json may hold a JSON value for an option. Unknown options may have any."""
    option = RECORDED_OPTIONS.get(name)
    if option is None or value is None:
        return option is None or option.default is None
    read = from_json(name, value)
    if option.kind.off is not None and read == option.kind.off:
        return True
    return type(read) in option.kind.types and option.kind.is_valid(read)


def read_kept_options(last: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that a resumed run keeps of the JSON values of its last session."""
    kept = {name for name, option in RECORDED_OPTIONS.items() if option.is_kept}
    return {name: from_json(name, value) for name, value in last.items() if name in kept}


def check_trackers(names: Sequence[str]) -> None:
    """Check that trackers are known and that their packages are installed, without importing them.

    Raise a UsageError for the first name of which this is not true.
    """
    for name in names:
        if name not in TRACKERS:
            raise UsageError(f"--tracker must be one of {', '.join(TRACKERS)}, got {name!r}.")
        found = None
        with suppress(ImportError):
            found = importlib.util.find_spec(name)
        # A folder with the name of the package has no origin.
        if found is None or found.origin is None:
            raise UsageError(
                f"--tracker {name}: the package is not installed. Run: pip install "
                f"'hpo-islands[{name}]'"
            )
