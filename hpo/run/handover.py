"""The end of a run: its best network is tested, and a report is written."""

from __future__ import annotations

import sys
from pathlib import Path

from hpo.errors import UsageError
from hpo.problem import Problem
from hpo.process.failure import with_hint
from hpo.results.reader import RunReader
from hpo.results.winner import FailedTestError, RunTest, confirmed_entry, examine
from hpo.store.weights import keep_only
from hpo.text import printable


def hand_over(run_dir: Path, storage: str | None, problem: Problem, run_test: RunTest | None) -> None:
    """Test the winner's network if the search file has a `test`, and write the report.

    After that, no other individual that was confirmed keeps weights with other seeds.

    `run_test` runs the test in a trainer, see `hpo.results.winner.examine`; None if the run is being stopped, and there
    is no time for tests and models. The run's result has been recorded before: a failure of either is only a warning.
    """
    try:
        run = RunReader(run_dir, storage)
    except UsageError as error:  # The manifest was edited or removed.
        print(f"warning: no report was written: {error}", file=sys.stderr)
        return
    if run_test is not None:
        _test(run, problem, run_test)
        _tidy(run)
    advised = _advise(run)
    try:
        from hpo.views.page.write import write_report

        write_report(run, run.run_dir.report_html, ask_models=run_test is not None)
        print("\n" * advised + printable(f"The report is {run.run_dir.report_html}"), flush=True)
    except Exception as error:
        reason = f"{type(error).__name__}: {with_hint(error)}"
        warning = f"warning: no report was written ({reason}): hpo report {run.run_dir.path} does it"
        print(printable(warning), file=sys.stderr)


def _advise(run: RunReader) -> bool:
    """Print what follows from the run, and return whether anything does."""
    try:
        from hpo.views.tables import print_advice

        advice = run.advice()
        print_advice(advice)
    except Exception as error:
        print(printable(f"warning: no advice ({type(error).__name__}: {with_hint(error)})"), file=sys.stderr)
        return False
    return bool(advice)


def _tidy(run: RunReader) -> None:
    """Keep the weights of the confirmed winner, and of no other individual that was confirmed."""
    winner = run.winner()
    if winner is not None and confirmed_entry(winner, run.confirmations()):
        keep_only(run.run_dir.confirmed, winner.trial)


def _test(run: RunReader, problem: Problem, run_test: RunTest) -> None:
    winner = run.winner()
    if winner is None or not problem.file.has_test:
        return
    from hpo.views.winner import tested_lines, untested_line

    try:
        content = examine(run.run_dir, problem, winner, run_test, run.confirmations(all_plans=True))
    except Exception as error:
        reason = str(error) if isinstance(error, FailedTestError) else f"{type(error).__name__}: {with_hint(error)}"
        print(printable(f"warning: the best network could not be tested ({reason})"), file=sys.stderr)
        return
    lines = tested_lines(run, winner, content) if content else [untested_line(run, winner)]
    print(*map(printable, filter(None, lines)), sep="\n", end="\n" if any(lines) else "")
