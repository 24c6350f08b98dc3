"""Format rungs as columns of a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hpo.text_format import format_number


def make_rung_columns(rungs: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    """Return the columns of a table with one row per rung. Each column is a pair of its heading and its cells."""
    names = {"epochs": "rung", "reached": "reached", "went_on": "continued", "paused": "paused"}
    if len({rung["bracket"] for rung in rungs}) > 1:
        names = {"bracket": "bracket", **names}
    columns = [(name, [str(rung[key]) for rung in rungs]) for key, name in names.items()]
    columns.append(("best", ["" if rung["best"] is None else format_number(rung["best"]) for rung in rungs]))
    return [*columns, ("next promotion", [format_next_promotion(rung) for rung in rungs])]


def format_next_promotion(rung: Mapping[str, Any]) -> str:
    """Return which paused trial of a rung is promoted next, and when, as text; empty if no trial is paused."""
    first = rung["next"]
    if first is None:
        return ""
    loss = "" if first["loss"] is None else f", {format_number(first['loss'])}"
    candidate = f"trial {first['trial']}{loss}"
    if first["at"] is None:
        return f"{candidate}: never"
    if first["at"] <= rung["reached"]:
        return f"{candidate}: now"
    return f"{candidate}: after {first['at']} have reached it"
