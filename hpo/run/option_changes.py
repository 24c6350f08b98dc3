"""Record the options of a session (one start of a run), and compare them with the options of the previous session."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpo.run.request import RunRequest
from hpo.store.recorded_options import OPTIONS, to_json
from hpo.text_format import make_printable

_AMOUNT_OPTIONS = ("evaluations", "confirm_seeds", "top_n")  # Losses remain comparable if these options change.


def collect_options(request: RunRequest) -> dict[str, Any]:
    """Return the options of this session, with defaults filled in, as JSON values for run.json."""
    before = request.previous.sessions[-1].options if request.previous else {}
    given = vars(request.options)
    resolved = {name: getattr(request, name) for name in ("propagators", "seed", "pruner", "confirm_seeds", "pbt")}
    islands = given["islands"] if given["islands"] is not None else before.get("islands")
    return to_json({**given, **resolved, "evaluations": request.budget, "islands": islands})


def describe_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return a line of text for each option that has changed since the previous session.

    Some options are left out: amounts such as --evaluations, and options that a resumed run does not keep.

    Args:
        before: The options of the previous session.
        now: The options of this session.
    """
    lines = []
    for name, option in OPTIONS.items():
        if option.is_kept_on_resume and name not in _AMOUNT_OPTIONS and name in before and before[name] != now[name]:
            value_before, value_now = (_describe_value(name, values[name]) for values in (before, now))
            hint = ": losses may not be comparable" if name == "seed" else ""
            lines.append(make_printable(f"{option.name} was {value_before} before, and is {value_now} now{hint}"))
    return lines


def _describe_value(name: str, value: Any) -> str:
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return "off" if value == OPTIONS[name].default else "on"
    return OPTIONS[name].format_words(value)[1]
