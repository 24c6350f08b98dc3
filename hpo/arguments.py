"""The command lines of run_islands.py and hpo, as typer reads them."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from hpo.errors import UsageError
from hpo.options import (
    DEFAULT_COLLECTIVE_TIMEOUT,
    DEFAULT_EVALUATIONS,
    DEFAULT_PROPAGATORS,
    DEFAULT_PRUNER,
    LOG_LEVELS,
    PROPAGATORS,
    Options,
)

# typer brings its own copy of click since 0.20, and used the real one before: this is its base class in both.
_Mistake: Any = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")


def _app(**options: Any) -> typer.Typer:
    return typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False, **options)


def _parser(kind: Callable[[str], Any], name: str) -> Callable[[str], Any]:
    """Make a parser whose message shows the value, which typer's own does not."""

    def parse(text: str) -> Any:
        try:
            return kind(text)
        except ValueError:
            raise typer.BadParameter(f"{text!r} is not {name}") from None

    return parse


def _seconds(given: str | float) -> float:
    """Read a duration: seconds, numbers with units, or hours, minutes and seconds as schedulers write them."""
    text = str(given)  # typer gives defaults too
    if re.fullmatch(r"\d+(:\d\d){1,2}", text):
        parts = [int(part) for part in text.split(":")]
        return float(sum(part * 60**place for place, part in enumerate(reversed(parts))))
    if not re.fullmatch(r"(\d+(\.\d+)?[smhd]?)+", text):
        raise ValueError(text)
    units = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
    return sum(float(number) * units[unit] for number, _, unit in re.findall(r"(\d+(\.\d+)?)([smhd]?)", text))


_duration = _parser(_seconds, "a duration, such as 90, 90s, 10m, 1h30m, 2d or 1:30:00")
_whole = _parser(int, "a whole number")
_number = _parser(float, "a number")


def call(app: typer.Typer, program: str) -> int:
    """Run a typer app on this process's command line and give its exit status; a mistake is one line on stderr."""
    try:
        return int(app(standalone_mode=False, prog_name=program) or 0)
    except (_Mistake, UsageError) as error:
        message = error.format_message() if isinstance(error, _Mistake) else str(error)
        print(
            f"error: {message.rstrip('.')}",
            *([] if isinstance(error, UsageError) else [f"(see {program} --help)"]),
            file=sys.stderr,
        )
        return 2


def run_islands_app(default: Path, chosen: Callable[[Options], None]) -> typer.Typer:
    """Make the command line of run_islands.py, which gives its options to `chosen`."""
    app = _app()

    @app.command()
    def run_islands(
        search_space: Annotated[
            Path, typer.Argument(metavar="[SEARCH_SPACE]", help="Python file with a `space` and an `objective`.")
        ] = default,
        evaluations: Annotated[
            Optional[int],
            typer.Option(
                metavar="N",
                parser=_whole,
                help=f"Evaluations in the whole run, shared by all workers.  [default: {DEFAULT_EVALUATIONS}]",
            ),
        ] = None,
        generations: Annotated[
            Optional[int],
            typer.Option(metavar="G", parser=_whole, help="Instead of --evaluations: G times the number of workers."),
        ] = None,
        islands: Annotated[int, typer.Option(metavar="N", parser=_whole, help="Islands to deal the workers to.")] = 2,
        ranks_per_worker: Annotated[
            int, typer.Option(metavar="N", parser=_whole, help="MPI ranks that train one network together.")
        ] = 2,
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
                parser=_number,
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
            typer.Option(metavar="N", parser=_whole, help="Seed of weights, order and breeding.  [default: 0]"),
        ] = None,
        run_dir: Annotated[
            Optional[Path],
            typer.Option(metavar="DIR", help="Where the run is kept.  [default: a new runs/NAME-DATE-TIME]"),
        ] = None,
        resume: Annotated[
            bool, typer.Option("--resume", help="Go on with the run in --run-dir; start it if there is none yet.")
        ] = False,
        top_n: Annotated[int, typer.Option(metavar="N", parser=_whole, help="Individuals in the final tables.")] = 3,
        start_with: Annotated[
            Optional[Path],
            typer.Option(metavar="FILE", help="JSON list of hyperparameters, complete or partial, to evaluate first."),
        ] = None,
        start_from: Annotated[
            Optional[str],
            typer.Option(
                metavar="RUN_DIR|URL",
                help="Take over what another run of the same space has evaluated, outside of the budget.",
            ),
        ] = None,
        confirm: Annotated[
            Optional[int],
            typer.Option(
                metavar="K",
                parser=_whole,
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
                parser=_duration,
                help="Give up on a rank that its worker's other ranks have waited for.  [default: 10m]",
                show_default=False,
            ),
        ] = DEFAULT_COLLECTIVE_TIMEOUT,
        evaluation_timeout: Annotated[
            Optional[float],
            typer.Option(metavar="TIME", parser=_duration, help="Stop an evaluation at its next loss after this long."),
        ] = None,
        time_limit: Annotated[
            Optional[float],
            typer.Option(
                metavar="TIME",
                parser=_duration,
                help="Stop the run after this long; the end of a SLURM job is known without it.",
            ),
        ] = None,
        max_failures: Annotated[
            Optional[int],
            typer.Option(metavar="N", parser=_whole, help="Stop the run if its first N evaluations fail."),
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
            typer.Option(metavar="X", parser=_number, help="End the run when a loss is X or lower."),
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
                log_level=log_level,
            )
        )

    return app


def hpo_app() -> typer.Typer:
    """Make the command line of hpo, for what needs no MPI."""
    app = _app()

    @app.callback(invoke_without_command=True)
    def hpo(context: typer.Context) -> None:
        """Look at runs of run_islands.py, and look after them."""
        if context.invoked_subcommand is None:
            print(context.get_help())

    @app.command()
    def top(
        run_dir: Annotated[
            Path, typer.Argument(metavar="RUN_DIR", help="The directory of a run, running or finished.")
        ],
        n: Annotated[int, typer.Option("-n", metavar="N", parser=_whole, help="Individuals per table.")] = 3,
        storage: Annotated[
            Optional[str], typer.Option(metavar="URL", help="The study's storage, where it needs a password.")
        ] = None,
        as_json: Annotated[bool, typer.Option("--json", help="Print JSON: summary.json without the times.")] = False,
    ) -> None:
        """Print the best individuals of each island and of the whole run."""
        from hpo.reader import RunReader
        from hpo.report.tables import print_tables

        if n < 1:
            raise UsageError(f"-n must be at least 1, not {n}")
        summary = RunReader(run_dir, storage).summary(n)
        if as_json:
            print(json.dumps(summary, indent=2))
        else:
            print_tables(summary)

    @app.command(context_settings={"allow_interspersed_args": False})
    def run(
        context: typer.Context,
        command: Annotated[
            list[str],
            typer.Argument(metavar="COMMAND...", help="mpirun -n 8 python run_islands.py --run-dir runs/NAME"),
        ],
        restarts: Annotated[
            int, typer.Option(metavar="N", parser=_whole, help="How often in a row to start again without progress.")
        ] = 3,
    ) -> None:
        """Run a job, and start it again with --resume when it crashes."""
        from hpo.supervisor import Supervisor

        context.exit(Supervisor(command, restarts, lambda text: print(f"hpo run: {text}", flush=True)).run())

    return app
