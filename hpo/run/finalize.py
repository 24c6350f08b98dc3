"""The end of a run: test the best network, and write the report."""

from __future__ import annotations

import sys
from pathlib import Path

from hpo.errors import UsageError
from hpo.problem import Problem
from hpo.process.failure import format_with_hint
from hpo.results.reader import RunReader
from hpo.results.recommendation import (
    FailedTestError,
    RunTest,
    find_confirmed_entry,
    run_winner_test,
)
from hpo.store.weights import remove_other_weights
from hpo.text_format import make_printable


def finalize_run(
    run_dir: Path, storage: str | None, problem: Problem, run_test: RunTest | None
) -> None:
    """Test the winner, and write the report.

    The winner is the evaluation that the run recommends. Confirmed individuals were trained again
    with other seeds. If the winner is a confirmed individual, the weights of the other confirmed
    individuals are removed. The result of the run is already recorded, so each failure is only a
    warning.

    Args:
        storage: The URL of the storage of the study, with its password. None: the storage in
            run.json.
        problem: The search file, which may have a function `test`, and its settings.
        run_test: A function that runs the user's `test` in a trainer (see
            `hpo.results.recommendation`). None if the run is being stopped. There is then too
            little time for the test, and for the report's importances and expected loss, which need
            models.
    """
    try:
        run = RunReader(run_dir, storage)
    except UsageError as error:  # The manifest was edited or removed.
        print(f"warning: no report was written: {error}", file=sys.stderr)
        return
    if run_test is not None:
        _test_winner(run, problem, run_test)
        _remove_other_weights(run)
    advised = _print_advice(run)
    try:
        from hpo.views.page.html_report import write_report

        write_report(run, run.run_dir.report_html, ask_models=run_test is not None)
        print(
            "\n" * advised + make_printable(f"The report is {run.run_dir.report_html}"), flush=True
        )
    except Exception as error:
        reason = f"{type(error).__name__}: {format_with_hint(error)}"
        warning = (
            f"warning: no report was written ({reason}): hpo report {run.run_dir.path} does it"
        )
        print(make_printable(warning), file=sys.stderr)


def _print_advice(run: RunReader) -> bool:
    """Print advice to the user about this run, and return whether there is any advice."""
    try:
        from hpo.views.summary_tables import print_advice

        advice = run.find_advice()
        print_advice(advice)
    except Exception as error:
        print(
            make_printable(
                f"warning: no advice ({type(error).__name__}: {format_with_hint(error)})"
            ),
            file=sys.stderr,
        )
        return False
    return bool(advice)


def _remove_other_weights(run: RunReader) -> None:
    winner = run.find_winner()
    if winner is not None and find_confirmed_entry(winner, run.read_confirmations()):
        remove_other_weights(run.run_dir.confirmed_weights, winner.trial)


def _test_winner(run: RunReader, problem: Problem, run_test: RunTest) -> None:
    winner = run.find_winner()
    if winner is None or not problem.file.has_test:
        return
    from hpo.views.winner_text import explain_missing_test, format_test_result

    try:
        content = run_winner_test(
            run.run_dir, problem, winner, run_test, run.read_confirmations(all_plans=True)
        )
    except Exception as error:
        reason = (
            str(error)
            if isinstance(error, FailedTestError)
            else f"{type(error).__name__}: {format_with_hint(error)}"
        )
        print(
            make_printable(f"warning: the best network could not be tested ({reason})"),
            file=sys.stderr,
        )
        return
    lines = (
        format_test_result(run, winner, content) if content else [explain_missing_test(run, winner)]
    )
    print(*map(make_printable, filter(None, lines)), sep="\n", end="\n" if any(lines) else "")
