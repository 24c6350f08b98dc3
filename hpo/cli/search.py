"""The options of a search on the command line, as typer reads them: of run_islands.py, and of hpo search."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from hpo.breeding.names import DEFAULT_PROPAGATORS, PROPAGATORS
from hpo.cli.command_line import duration, duration_or_off, new_app, number, number_or_off, whole
from hpo.cli.script import FLAGS, LOSS, METRICS, OF_PROGRAM, SPACE, find_source
from hpo.run.options import DEFAULT_EVALUATIONS, DEFAULT_PRUNER, KEPT, LOG_LEVELS, Options, kept_options
from hpo.trackers import TRACKERS

# By the fields of Options, whose defaults are those of the command line.
_OPTIONS: dict[str, Any] = {
    "search_space": Annotated[
        Path, typer.Argument(metavar="SEARCH_SPACE", help="Python file with a `space` and an `objective`.")
    ],
    "evaluations": Annotated[
        Optional[int],
        typer.Option(
            metavar="N",
            parser=whole,
            help=f"Evaluations in the whole run, shared by all workers.  [default: {DEFAULT_EVALUATIONS}]",
        ),
    ],
    "generations": Annotated[
        Optional[int],
        typer.Option(metavar="G", parser=whole, help="Instead of --evaluations: G times the number of workers."),
    ],
    "islands": Annotated[
        Optional[int],
        typer.Option(
            metavar="N",
            parser=whole,
            help="Islands to deal the workers to.  [default: 2, or as many as --propagators; 1 where there is one "
            "worker]",
        ),
    ],
    "ranks_per_worker": Annotated[
        Optional[int],
        typer.Option(
            metavar="N",
            parser=whole,
            help="MPI ranks that train one network together.  [default: 2, or 1 where the ranks are odd in number]",
        ),
    ],
    "propagators": Annotated[
        Optional[str],
        typer.Option(
            metavar="NAME,...",
            help=f"How islands breed, dealt to them in turn: {', '.join(PROPAGATORS)}.  "
            f"[default: {','.join(DEFAULT_PROPAGATORS)}]",
        ),
    ],
    "migration_probability": Annotated[
        Optional[float],
        typer.Option(
            metavar="P",
            parser=number,
            help="Chance that an island sends its best while its workers evaluate one each.  [default: 0.9]",
        ),
    ],
    "pollination": Annotated[
        Optional[bool],
        typer.Option(
            "--pollination/--migration",
            help="Send copies to other islands, or the individuals themselves.  [default: --pollination]",
            show_default=False,
        ),
    ],
    "seed": Annotated[
        Optional[int],
        typer.Option(metavar="N", parser=whole, help="Seed of weights, order and breeding.  [default: 0]"),
    ],
    "run_dir": Annotated[
        Optional[Path],
        typer.Option(metavar="DIR", help="Where the run is kept.  [default: a new runs/NAME-DATE-TIME]"),
    ],
    "resume": Annotated[
        bool, typer.Option("--resume", help="Go on with the run in --run-dir; start it if there is none yet.")
    ],
    "top_n": Annotated[
        Optional[int],
        typer.Option(metavar="N", parser=whole, help="Individuals in the final tables.  [default: 3]"),
    ],
    "start_with": Annotated[
        Optional[Path],
        typer.Option(metavar="FILE", help="JSON list of hyperparameters, complete or partial, to evaluate first."),
    ],
    "start_from": Annotated[
        Optional[str],
        typer.Option(
            metavar="RUN_DIR|URL",
            help="Take over what another run or any Optuna study of the same space has evaluated, outside of the "
            "budget.",
        ),
    ],
    "inherit": Annotated[
        Optional[bool],
        typer.Option(
            "--inherit/--no-inherit",
            help="Let individuals begin with the weights of one of the best that differs in tunable parameters alone.  "
            "[default: --no-inherit]",
            show_default=False,
        ),
    ],
    "confirm": Annotated[
        Optional[int],
        typer.Option(
            metavar="K",
            parser=whole,
            help="At the end, train the --top-n best with K other seeds, and rank them by mean.  [default: 0]",
        ),
    ],
    "settings": Annotated[
        Optional[list[str]],
        typer.Option("--set", metavar="NAME=VALUE", help="A setting of the search space; may be given many times."),
    ],
    "storage": Annotated[
        Optional[str],
        typer.Option(metavar="URL", help="Optuna storage for the study.  [default: the journal RUN_DIR/study.log]"),
    ],
    "collective_timeout": Annotated[
        Optional[float],
        typer.Option(
            metavar="TIME",
            parser=duration,
            help="Fail an evaluation if a rank blocks its peers this long (90s, 10m).  [default: 10m]",
            show_default=False,
        ),
    ],
    "fresh_trainers": Annotated[
        Optional[bool],
        typer.Option(
            "--fresh-trainers/--no-fresh-trainers",
            help="Start each evaluation in processes of its own.  [default: --no-fresh-trainers]",
            show_default=False,
        ),
    ],
    "save_every": Annotated[
        Optional[float],
        typer.Option(
            metavar="TIME|off",
            parser=duration_or_off,
            help="How often to write what an evaluation goes on from after a death.  [default: in 1% of the time, and "
            "every 10 s at most]",
            show_default=False,
        ),
    ],
    "grow": Annotated[
        Optional[bool],
        typer.Option(
            "--grow/--no-grow",
            help="Let workers without work join others in theirs: at the end of a run, and for what is promoted.  "
            "[default: --no-grow]",
            show_default=False,
        ),
    ],
    "evaluation_timeout": Annotated[
        Optional[float],
        typer.Option(
            metavar="TIME|off",
            parser=duration_or_off,
            help="Stop an evaluation at its next loss after this long.  [default: off]",
        ),
    ],
    "time_limit": Annotated[
        Optional[float],
        typer.Option(
            metavar="TIME",
            parser=duration,
            help="Stop the run after this long; the end of a SLURM job is known without it.",
        ),
    ],
    "max_failures": Annotated[
        Optional[int],
        typer.Option(
            metavar="N",
            parser=whole,
            help="Stop the run if its first N evaluations fail; 0 for never.  [default: 0]",
        ),
    ],
    "pruner": Annotated[
        Optional[str],
        typer.Option(
            metavar="NAME",
            help="When to pause or give up an evaluation: none, median, percentile:P, asha, hyperband or one-epoch.  "
            f"[default: {DEFAULT_PRUNER}]",
        ),
    ],
    "target_loss": Annotated[
        Optional[float],
        typer.Option(
            metavar="X|off", parser=number_or_off, help="End the run when a loss is X or lower.  [default: off]"
        ),
    ],
    "trackers": Annotated[
        Optional[list[str]],
        typer.Option(
            "--tracker",
            metavar="NAME",
            help=f"Show the run to {', '.join(TRACKERS)}, each its extra; may be given many times.",
        ),
    ],
    "space": SPACE,
    "loss": LOSS,
    "metrics": METRICS,
    "flags": FLAGS,
    "resume_args": Annotated[
        Optional[str],
        typer.Option(
            metavar="ARGUMENTS",
            help="What lets the program continue an evaluation from its own checkpoint, such as "
            "'--resume {folder}/last.pt'; {folder} is a folder of that evaluation.",
        ),
    ],
    "first_report": Annotated[
        Optional[int],
        typer.Option(metavar="N", parser=whole, help="Let pruners judge from the program's Nth loss on.  [default: 1]"),
    ],
    "log_level": Annotated[str, typer.Option(metavar="LEVEL", help=f"What goes to stderr: {', '.join(LOG_LEVELS)}.")],
}


def search_app(
    default: Path | None, chosen: Callable[[Options], None], command: Sequence[str] | None = None
) -> typer.Typer:
    """Make the command line of a search, which calls `chosen` with its options.

    Without a `default`, a search space has to be named, or a `command` given, which stands behind ``--``.
    """
    app = new_app()
    app.command("search")(search_command(default, chosen, command))
    return app


def search_command(
    default: Path | None, chosen: Callable[[Options], None], command: Sequence[str] | None = None
) -> Callable[..., None]:
    """Make the function that typer calls with what is on the command line, a parameter for each option."""

    def search(**given: Any) -> None:
        """Search the hyperparameters of a network with islands of multi-rank workers.

        Start it under MPI: mpirun -n 8 python run_islands.py, or mpirun -n 8 hpo search SEARCH_SPACE. For a program
        for torchrun: mpirun -n 8 hpo search --space NAME=PARAMETER --loss REGEX -- train.py --epochs 3
        """
        propagators = given.pop("propagators")
        given["propagators"] = tuple(name.strip() for name in propagators.split(",")) if propagators is not None else ()
        given["settings"] = tuple(given["settings"] or ())
        given["trackers"] = tuple(dict.fromkeys(given["trackers"] or ()))
        of_program = {name: given.pop(name) for name in OF_PROGRAM}
        named = given.pop("search_space")
        path, source = find_source(named if named != default or command is None else None, command, of_program)
        kept = kept_options(given["run_dir"], given["resume"])
        given = {name: value for name, value in given.items() if value is not None}
        chosen(Options(search_space=path, source=source, **{**kept, **given}))

    defaults = {field.name: field.default for field in dataclasses.fields(Options)}
    defaults |= {
        "search_space": default or (inspect.Parameter.empty if command is None else None),
        **dict.fromkeys(("propagators", "space", "loss", "metrics", "flags", "resume_args", "first_report")),
        "settings": None,
        "trackers": None,
        **dict.fromkeys(KEPT),
    }
    parameters = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=defaults[name], annotation=annotation)
        for name, annotation in _OPTIONS.items()
    ]
    search.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    search.__annotations__ = dict(_OPTIONS)
    return search
