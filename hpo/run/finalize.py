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
        run_test: Runs the user's `test` in a trainer (see `hpo.results.recommendation`). None if
            the run is being stopped. There is then too little time for the test, and for the
            report's importances and expected loss, which need models.
    """
    try:
        run = RunReader(run_dir, storage)
    except UsageError as error:  # The manifest was edited or removed.
        _warn(f"no report was written: {error}")
        return
    if run_test is not None:
        _test_winner(run, problem, run_test)
        _remove_other_weights(run)
    advised = _print_advice(run)
    try:
        from hpo.views.page.html_report import write_report

        write_report(run, run.run_dir.report_html, ask_models=run_test is not None)
        text = make_printable(f"The report is {run.run_dir.report_html}")
        print("\n" * advised + text, flush=True)
    except Exception as error:
        command = f"hpo report {run.run_dir.path}"
        _warn(f"no report was written ({_describe_error(error)}): {command} does it")


def _warn(text: str) -> None:
    print(make_printable(f"warning: {text}"), file=sys.stderr)


def _describe_error(error: Exception) -> str:
    return f"{type(error).__name__}: {format_with_hint(error)}"


def _print_advice(run: RunReader) -> bool:
    """Print advice to the user about this run, and return whether there is any advice."""
    try:
        from hpo.views.summary_tables import print_advice

        advice = run.find_advice()
        print_advice(advice)
    except Exception as error:
        _warn(f"no advice ({_describe_error(error)})")
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
        is_expected = isinstance(error, FailedTestError)
        reason = str(error) if is_expected else _describe_error(error)
        _warn(f"the best network could not be tested ({reason})")
        return
    if content:
        lines = format_test_result(run, winner, content)
    else:
        lines = [explain_missing_test(run, winner)]
    for line in filter(None, lines):
        print(make_printable(line))
