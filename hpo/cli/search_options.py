"""Define the options of run_islands.py and `hpo search` for typer, the library that parses command lines."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from hpo.breeding.propagator_names import DEFAULT_PROPAGATORS, PROPAGATORS
from hpo.cli.command_line import (
    make_app,
    parse_duration,
    parse_duration_or_off,
    parse_number,
    parse_number_or_off,
    parse_whole_number,
)
from hpo.cli.option_groups import GroupedCommand
from hpo.cli.program_options import (
    FLAGS_OPTION,
    LOSS_OPTION,
    METRICS_OPTION,
    PROGRAM_OPTIONS,
    SPACE_OPTION,
    find_source,
)
from hpo.cli.shipped_spaces import list_search_spaces
from hpo.run.options import DEFAULT_EVALUATIONS, DEFAULT_PRUNER, KEPT_OPTIONS, LOG_LEVELS, Options, read_kept_options
from hpo.trackers import TRACKERS

# The keys are the fields of Options, which also has the defaults.
_OPTIONS: dict[str, Any] = {
    "search_space": Annotated[
        Path,
        typer.Argument(
            metavar="SEARCH_SPACE",
            help=f"A Python file with `space` and `objective`, or one of {', '.join(list_search_spaces())}.",
        ),
    ],
    "evaluations": Annotated[
        Optional[int],
        typer.Option(
            metavar="N", parser=parse_whole_number, help=f"Evaluations of the run.  [default: {DEFAULT_EVALUATIONS}]"
        ),
    ],
    "generations": Annotated[
        Optional[int],
        typer.Option(metavar="G", parser=parse_whole_number, help="Instead of --evaluations: G per worker."),
    ],
    "islands": Annotated[
        Optional[int],
        typer.Option(
            metavar="N",
            parser=parse_whole_number,
            help="Islands.  [default: 2, or one for each propagator; 1 with one worker]",
        ),
    ],
    "ranks_per_worker": Annotated[
        Optional[int],
        typer.Option(
            metavar="N",
            parser=parse_whole_number,
            help="MPI ranks that train one network.  [default: 2; 1 if ranks are odd]",
        ),
    ],
    "propagators": Annotated[
        Optional[str],
        typer.Option(
            metavar="NAME,...",
            help=f"{', '.join(PROPAGATORS)}; islands take several in turn.  [default: {','.join(DEFAULT_PROPAGATORS)}]",
        ),
    ],
    "migration_probability": Annotated[
        Optional[float],
        typer.Option(
            metavar="P",
            parser=parse_number,
            help="Probability that an island sends its best, per generation.  [default: 0.9]",
        ),
    ],
    "pollination": Annotated[
        Optional[bool],
        typer.Option(
            "--pollination/--migration",
            help="Send copies to other islands, or move individuals.  [default: --pollination]",
            show_default=False,
        ),
    ],
    "seed": Annotated[
        Optional[int],
        typer.Option(
            metavar="N", parser=parse_whole_number, help="Seed of weights, data order and breeding.  [default: 0]"
        ),
    ],
    "run_dir": Annotated[
        Optional[Path],
        typer.Option(metavar="DIR", help="Directory of the run.  [default: a new runs/NAME-DATE-TIME]"),
    ],
    "resume": Annotated[bool, typer.Option("--resume", help="Continue the run in --run-dir, or start it.")],
    "top_n": Annotated[
        Optional[int],
        typer.Option(metavar="N", parser=parse_whole_number, help="Individuals in each final table.  [default: 3]"),
    ],
    "enqueue": Annotated[
        Optional[Path],
        typer.Option(metavar="FILE", help="JSON list of (partial) hyperparameters to evaluate first."),
    ],
    "warm_start": Annotated[
        Optional[str],
        typer.Option(metavar="RUN_DIR|URL", help="Learn from another run, or from an Optuna study."),
    ],
    "pbt": Annotated[
        Optional[bool],
        typer.Option(
            "--pbt/--no-pbt",
            help="Start from the weights of a parent; only mutable parameters differ.  [default: --no-pbt]",
            show_default=False,
        ),
    ],
    "confirm_seeds": Annotated[
        Optional[int],
        typer.Option(
            metavar="K",
            parser=parse_whole_number,
            help="Train the --top-n best with K other seeds at the end.  [default: 0]",
        ),
    ],
    "settings": Annotated[
        Optional[list[str]],
        typer.Option("--set", metavar="NAME=VALUE", help="Setting of the search space; repeatable."),
    ],
    "storage": Annotated[
        Optional[str],
        typer.Option(metavar="URL", help="Optuna storage of the study.  [default: journal RUN_DIR/study.log]"),
    ],
    "collective_timeout": Annotated[
        Optional[float],
        typer.Option(
            metavar="TIME",
            parser=parse_duration,
            help="Fail an evaluation if a rank blocks the others this long.  [default: 10m]",
            show_default=False,
        ),
    ],
    "fresh_trainers": Annotated[
        Optional[bool],
        typer.Option(
            "--fresh-trainers/--no-fresh-trainers",
            help="Start new processes for each evaluation.  [default: --no-fresh-trainers]",
            show_default=False,
        ),
    ],
    "checkpoint_every": Annotated[
        Optional[float],
        typer.Option(
            metavar="TIME|off",
            parser=parse_duration_or_off,
            help="Interval of checkpoints.  [default: 10s, longer if they take over 1% of the time]",
            show_default=False,
        ),
    ],
    "evaluation_timeout": Annotated[
        Optional[float],
        typer.Option(
            metavar="TIME|off",
            parser=parse_duration_or_off,
            help="Fail an evaluation that takes longer.  [default: off]",
        ),
    ],
    "time_limit": Annotated[
        Optional[float],
        typer.Option(
            metavar="TIME", parser=parse_duration, help="Stop the run after this.  [default: end of a SLURM job]"
        ),
    ],
    "max_failures": Annotated[
        Optional[int],
        typer.Option(
            metavar="N", parser=parse_whole_number, help="Stop if the first N evaluations fail; 0: never.  [default: 0]"
        ),
    ],
    "pruner": Annotated[
        Optional[str],
        typer.Option(
            metavar="NAME",
            help=f"none, median, percentile:P, asha, hyperband or one-epoch.  [default: {DEFAULT_PRUNER}]",
        ),
    ],
    "target_loss": Annotated[
        Optional[float],
        typer.Option(
            metavar="X|off", parser=parse_number_or_off, help="End the run at a loss of at most X.  [default: off]"
        ),
    ],
    "trackers": Annotated[
        Optional[list[str]],
        typer.Option("--tracker", metavar="NAME", help=f"Log to {', '.join(TRACKERS)} (extras); repeatable."),
    ],
    "space": SPACE_OPTION,
    "loss": LOSS_OPTION,
    "metrics": METRICS_OPTION,
    "flags": FLAGS_OPTION,
    "resume_args": Annotated[
        Optional[str],
        typer.Option(
            metavar="ARGUMENTS",
            help="Arguments to continue from a checkpoint, such as '--resume {folder}/last.pt'.",
        ),
    ],
    "first_report": Annotated[
        Optional[int],
        typer.Option(
            metavar="N", parser=parse_whole_number, help="Prune a program from its Nth loss on.  [default: 1]"
        ),
    ],
    "log_level": Annotated[str, typer.Option(metavar="LEVEL", help=f"Messages on stderr: {', '.join(LOG_LEVELS)}.")],
}


def make_search_app(
    default: Path | None, on_options: Callable[[Options], None], command: Sequence[str] | None = None
) -> typer.Typer:
    """Return the typer app of a search.

    Args:
        default: Path of the default search space. If None, the user must give a search space or a command.
        on_options: Function that is called with the parsed options.
        command: The program and its arguments, given after ``--``; None without ``--``.
    """
    app = make_app()
    app.command("search", cls=GroupedCommand)(make_search_command(default, on_options, command))
    return app


def make_search_command(
    default: Path | None, on_options: Callable[[Options], None], command: Sequence[str] | None = None
) -> Callable[..., None]:
    """Return the function that typer calls for a search. It has a parameter for each option.

    Args:
        default: Path of the default search space. If None, the user must give a search space or a command.
        on_options: Function that is called with the parsed options.
        command: The program and its arguments, given after ``--``; None without ``--``.
    """

    def search(**given: Any) -> None:
        """Search hyperparameters with islands of workers.

        Start it with MPI: mpirun -n 8 python run_islands.py, or mpirun -n 8 hpo search SEARCH_SPACE. For a program that
        is written for torchrun: mpirun -n 8 hpo search --space NAME=PARAMETER --loss REGEX -- train.py --epochs 3

        TIME is a number of seconds, or a duration such as 90s, 10m, 1h30m, 2d or 1:30:00.
        """
        propagators = given.pop("propagators")
        given["propagators"] = tuple(name.strip() for name in propagators.split(",")) if propagators is not None else ()
        given["settings"] = tuple(given["settings"] or ())
        given["trackers"] = tuple(dict.fromkeys(given["trackers"] or ()))
        program_options = {name: given.pop(name) for name in PROGRAM_OPTIONS}
        search_space = given.pop("search_space")
        if search_space == default and command is not None:
            search_space = None
        path, source = find_source(search_space, command, program_options)
        kept = read_kept_options(given["run_dir"], given["resume"])
        given = {name: value for name, value in given.items() if value is not None}
        on_options(Options(search_space=path, source=source, **{**kept, **given}))

    defaults = {field.name: field.default for field in dataclasses.fields(Options)}
    defaults |= {
        "search_space": default or (inspect.Parameter.empty if command is None else None),
        **dict.fromkeys(("propagators", "space", "loss", "metrics", "flags", "resume_args", "first_report")),
        "settings": None,
        "trackers": None,
        **dict.fromkeys(KEPT_OPTIONS),
    }
    parameters = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=defaults[name], annotation=annotation)
        for name, annotation in _OPTIONS.items()
    ]
    search.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    search.__annotations__ = dict(_OPTIONS)
    return search
