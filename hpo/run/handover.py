"""What a run leaves for a person when it has ended: its best network tested, and a page to look at."""

from __future__ import annotations

import sys
from pathlib import Path

from hpo.errors import UsageError
from hpo.problem import Problem
from hpo.process.failure import with_hint
from hpo.process.place import Places, frames_of
from hpo.results.reader import RunReader
from hpo.results.winner import examine
from hpo.text import number, printable


def hand_over(run_dir: Path, storage: str | None, problem: Problem, to_test: bool) -> None:
    """Test the winner's network, where the search space says how, and write the report.

    The result has been recorded by now, so that a failure of either is only a warning.
    """
    try:
        run = RunReader(run_dir, storage)
    except UsageError as error:  # somebody has edited or removed what describes the run
        print(f"warning: no report was written: {error}", file=sys.stderr)
        return
    if to_test:
        _test(run, problem)
    advised = _advise(run)
    try:
        from hpo.report.page.write import write_report

        write_report(run, run.run_dir.report_html)
        print("\n" * advised + printable(f"The report is {run.run_dir.report_html}"), flush=True)
    except Exception as error:
        reason = f"{type(error).__name__}: {with_hint(error)}"
        warning = f"warning: no report was written ({reason}): hpo report {run.run_dir.path} does it"
        print(printable(warning), file=sys.stderr)


def _advise(run: RunReader) -> bool:
    """Print what follows from the run, and tell whether anything does."""
    try:
        from hpo.report.tables import print_advice

        advice = run.advice()
        print_advice(advice)
    except Exception as error:
        print(printable(f"warning: no advice ({type(error).__name__}: {with_hint(error)})"), file=sys.stderr)
        return False
    return bool(advice)


def _test(run: RunReader, problem: Problem) -> None:
    winner = run.winner()
    try:
        content = examine(run.run_dir, problem, winner) if winner else None
    except (Exception, SystemExit) as error:
        place = Places(problem.file.location).of(frames_of(error))
        reason = f"{f'{place}: ' if place else ''}{type(error).__name__}: {with_hint(error)}"
        print(printable(f"warning: the best network could not be tested ({reason})"), file=sys.stderr)
        return
    if content:
        metrics = ", ".join(f"{printable(name)} {number(value)}" for name, value in content["metrics"].items())
        print(f"On test data, which the search has not seen, the network of trial {content['trial']} has {metrics}")
