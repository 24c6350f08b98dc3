"""The command line of run_islands.py, as typer reads it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Optional

import typer

from hpo.breeding.names import DEFAULT_PROPAGATORS, PROPAGATORS
from hpo.cli.command_line import duration, new_app, number, whole
from hpo.run.options import (
    DEFAULT_COLLECTIVE_TIMEOUT,
    DEFAULT_EVALUATIONS,
    DEFAULT_PRUNER,
    LOG_LEVELS,
    Options,
)
from hpo.trackers import TRACKERS


def run_islands_app(default: Path, chosen: Callable[[Options], None]) -> typer.Typer:
    """Make the command line of run_islands.py, which gives its options to `chosen`."""
    app = new_app()

    @app.command()
    def run_islands(
        search_space: Annotated[
            Path, typer.Argument(metavar="SEARCH_SPACE", help="Python file with a `space` and an `objective`.")
        ] = default,
        evaluations: Annotated[
            Optional[int],
            typer.Option(
                metavar="N",
                parser=whole,
                help=f"Evaluations in the whole run, shared by all workers.  [default: {DEFAULT_EVALUATIONS}]",
            ),
        ] = None,
        generations: Annotated[
            Optional[int],
            typer.Option(metavar="G", parser=whole, help="Instead of --evaluations: G times the number of workers."),
        ] = None,
        islands: Annotated[
            Optional[int],
            typer.Option(
                metavar="N",
                parser=whole,
                help="Islands to deal the workers to.  [default: 2, or as many as --propagators; 1 where there is one "
                "worker]",
            ),
        ] = None,
        ranks_per_worker: Annotated[
            Optional[int],
            typer.Option(
                metavar="N",
                parser=whole,
                help="MPI ranks that train one network together.  [default: 2, or 1 where the ranks are odd in number]",
            ),
        ] = None,
        propagators: Annotated[
            Optional[str],
            typer.Option(
                metavar="NAME,...",
                help=f"How islands breed, dealt to them in turn: {', '.join(PROPAGATORS)}.  "
                f"[default: {','.join(DEFAULT_PROPAGATORS)}]",
            ),
        ] = None,
        migration_probability: Annotated[
            float,
            typer.Option(
                metavar="P",
                parser=number,
                help="Chance that an island sends its best while its workers evaluate one each.",
            ),
        ] = 0.9,
        pollination: Annotated[
            bool,
            typer.Option(
                "--pollination/--migration", help="Send copies to other islands, or the individuals themselves."
            ),
        ] = True,
        seed: Annotated[
            Optional[int],
            typer.Option(metavar="N", parser=whole, help="Seed of weights, order and breeding.  [default: 0]"),
        ] = None,
        run_dir: Annotated[
            Optional[Path],
            typer.Option(metavar="DIR", help="Where the run is kept.  [default: a new runs/NAME-DATE-TIME]"),
        ] = None,
        resume: Annotated[
            bool, typer.Option("--resume", help="Go on with the run in --run-dir; start it if there is none yet.")
        ] = False,
        top_n: Annotated[int, typer.Option(metavar="N", parser=whole, help="Individuals in the final tables.")] = 3,
        start_with: Annotated[
            Optional[Path],
            typer.Option(metavar="FILE", help="JSON list of hyperparameters, complete or partial, to evaluate first."),
        ] = None,
        start_from: Annotated[
            Optional[str],
            typer.Option(
                metavar="RUN_DIR|URL",
                help="Take over what another run or any Optuna study of the same space has evaluated, outside of the "
                "budget.",
            ),
        ] = None,
        confirm: Annotated[
            Optional[int],
            typer.Option(
                metavar="K",
                parser=whole,
                help="At the end, train the --top-n best with K other seeds, and rank them by mean.  [default: 0]",
            ),
        ] = None,
        settings: Annotated[
            Optional[list[str]],
            typer.Option("--set", metavar="NAME=VALUE", help="A setting of the search space; may be given many times."),
        ] = None,
        storage: Annotated[
            Optional[str],
            typer.Option(metavar="URL", help="Optuna storage for the study.  [default: the journal RUN_DIR/study.log]"),
        ] = None,
        collective_timeout: Annotated[
            float,
            typer.Option(
                metavar="TIME",
                parser=duration,
                help="Give up on a rank that its worker's other ranks have waited for.  [default: 10m]",
                show_default=False,
            ),
        ] = DEFAULT_COLLECTIVE_TIMEOUT,
        evaluation_timeout: Annotated[
            Optional[float],
            typer.Option(metavar="TIME", parser=duration, help="Stop an evaluation at its next loss after this long."),
        ] = None,
        time_limit: Annotated[
            Optional[float],
            typer.Option(
                metavar="TIME",
                parser=duration,
                help="Stop the run after this long; the end of a SLURM job is known without it.",
            ),
        ] = None,
        max_failures: Annotated[
            Optional[int],
            typer.Option(metavar="N", parser=whole, help="Stop the run if its first N evaluations fail."),
        ] = None,
        pruner: Annotated[
            Optional[str],
            typer.Option(
                metavar="NAME",
                help="When to give up an evaluation: none, median, percentile:P, asha or hyperband.  "
                f"[default: {DEFAULT_PRUNER}]",
            ),
        ] = None,
        target_loss: Annotated[
            Optional[float],
            typer.Option(metavar="X", parser=number, help="End the run when a loss is X or lower."),
        ] = None,
        trackers: Annotated[
            Optional[list[str]],
            typer.Option(
                "--tracker",
                metavar="NAME",
                help=f"Show the run to {', '.join(TRACKERS)}, each its extra; may be given many times.",
            ),
        ] = None,
        log_level: Annotated[
            str, typer.Option(metavar="LEVEL", help=f"What goes to stderr: {', '.join(LOG_LEVELS)}.")
        ] = "warning",
    ) -> None:
        """Search the hyperparameters of a network with islands of multi-rank workers.

        Start it under MPI: mpirun -n 8 python run_islands.py
        """
        chosen(
            Options(
                search_space=search_space,
                evaluations=evaluations,
                generations=generations,
                islands=islands,
                ranks_per_worker=ranks_per_worker,
                propagators=tuple(name.strip() for name in propagators.split(",")) if propagators is not None else (),
                migration_probability=migration_probability,
                pollination=pollination,
                seed=seed,
                run_dir=run_dir,
                resume=resume,
                top_n=top_n,
                start_with=start_with,
                start_from=start_from,
                confirm=confirm,
                settings=tuple(settings or ()),
                storage=storage,
                collective_timeout=collective_timeout,
                evaluation_timeout=evaluation_timeout,
                time_limit=time_limit,
                max_failures=max_failures,
                pruner=pruner,
                target_loss=target_loss,
                trackers=tuple(dict.fromkeys(trackers or ())),
                log_level=log_level,
            )
        )

    return app
