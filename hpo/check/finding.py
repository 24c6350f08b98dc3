"""A finding of `hpo check` or `hpo check-cluster`, and how findings are printed."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Literal

from hpo.errors import ExitStatus
from hpo.process.standard_streams import print_result
from hpo.text_format import format_count, make_printable

_LINE_WIDTH = 100  # Findings are wrapped at this width, in characters.
_LEVEL_WIDTH = 7


@dataclass(frozen=True)
class Finding:
    """One finding of a check, such as an evaluation that fails."""

    level: Literal["ok", "look", "wrong"]
    """The severity. For "look", a person must decide whether the finding is a problem."""
    text: str
    advice: str = ""


ok = partial(Finding, "ok")
look = partial(Finding, "look")
wrong = partial(Finding, "wrong")


def print_findings(findings: Sequence[Finding], as_json: bool = False) -> ExitStatus:
    """Print findings and a summary, and return 0 if nothing is wrong, 1 otherwise.

    With `as_json`, they are the result of the command as well.
    """
    for finding in findings:
        lines = textwrap.wrap(make_printable(finding.text), _LINE_WIDTH - _LEVEL_WIDTH)
        lines += textwrap.wrap(make_printable(finding.advice), _LINE_WIDTH - _LEVEL_WIDTH)
        for index, line in enumerate(lines):
            print(f"{'' if index else finding.level:{_LEVEL_WIDTH}}{line}")
    levels = [finding.level for finding in findings]
    wrong = levels.count("wrong")
    counts = [f"{format_count(wrong, 'problem')}" if wrong else "Nothing is wrong"]
    if looks := levels.count("look"):
        counts.append(f"{format_count(looks, 'finding')} to look at")
    print(f"\n{', '.join(counts)}", flush=True)
    if as_json:
        print_result({"problems": wrong, "findings": list(map(asdict, findings))})
    return ExitStatus.CRASHED if wrong else ExitStatus.BUDGET_SPENT
