"""The options of a session: recorded, kept by a resumed run, and compared with those of the session before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpo.run.request import Request
from hpo.store.session_options import OPTIONS, to_json
from hpo.text import printable

_AMOUNTS = ("evaluations", "confirm_seeds", "top_n")  # These may grow, and losses still compare.


def find_options(request: Request) -> dict[str, Any]:
    """Return the options of this session for run.json, with the values that they have in the run."""
    before = request.before.sessions[-1].options if request.before else {}
    given = vars(request.options)
    resolved = {name: getattr(request, name) for name in ("propagators", "seed", "pruner", "confirm_seeds", "pbt")}
    islands = given["islands"] if given["islands"] is not None else before.get("islands")
    return to_json({**given, **resolved, "evaluations": request.budget, "islands": islands})


def describe_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return lines that name the options which differ from the session before, except those for amounts."""
    lines = []
    for name, option in OPTIONS.items():
        if option.is_kept and name not in _AMOUNTS and name in before and before[name] != now[name]:
            then, here = (_described(name, values[name]) for values in (before, now))
            hint = ": losses may not compare" if name == "seed" else ""
            lines.append(printable(f"{option.name} was {then} before, and is {here} now{hint}"))
    return lines


def _described(name: str, value: Any) -> str:
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return "off" if value == OPTIONS[name].default else "on"
    return OPTIONS[name].words(value)[1]
