"""Make axes for figures: linear, logarithmic and categorical."""

from __future__ import annotations

import itertools
import math
import re
import sys
from collections.abc import Sequence
from typing import Any

from hpo.text_format import cut_text, format_value

_MAX_WHOLE_TICKS = 6
_LONGEST_TICK = 24  # characters
_LARGEST_POWER = 308  # largest exponent of ten of a float

UprightAxis = tuple[list[Any], list[tuple[float, str]]]
"""Heights of all values on a vertical axis from 0 to 1, and of all ticks, each with its text."""


def is_log(distribution: Any) -> bool:
    """Return whether a hyperparameter is searched on a logarithmic scale."""
    return bool(getattr(distribution, "log", False))


def make_axis(
    title: str, values: Sequence[float] = (), *, log: bool = False, whole: bool = False
) -> dict[str, Any]:
    """Return a plotly axis.

    Args:
        values: Values on the axis; needed only for `log` and `whole`.
        log: Whether the scale is logarithmic.
        whole: Whether the ticks are whole numbers.
    """
    axis: dict[str, Any] = {"title": {"text": escape_markup(title)}, "zeroline": False}
    if log and values:
        ticks = _compute_log_ticks(min(values), max(values))
        axis |= {"type": "log", "tickvals": ticks, "ticktext": [f"{tick:g}" for tick in ticks]}
    if whole:
        steps = (step * 10**power for power in itertools.count() for step in (1, 2, 5))
        axis["dtick"] = next(step for step in steps if max(values) <= 10 * step)
    return axis


def wrap_name(text: str, width: int) -> list[str]:
    """Split a name into lines of at most `width` characters, escaped for plotly.

    It is split after underscores if possible.
    """
    lines = [""]
    for part in re.findall(r"[^_]*_+|[^_]+", cut_text(text, 80)):
        for start in range(0, len(part), width):
            piece = part[start : start + width]
            if lines[-1] and len(lines[-1]) + len(piece) > width:
                lines.append("")
            lines[-1] += piece
    return [escape_markup(line) for line in lines]


def shorten_middle(text: str) -> str:
    """Replace the middle of a long text by an ellipsis, and escape the text for plotly."""
    half = _LONGEST_TICK // 2
    if len(text) > _LONGEST_TICK:
        text = f"{text[:half]}\N{HORIZONTAL ELLIPSIS}{text[-half:]}"
    return escape_markup(text)


def make_category_ticks(choices: Sequence[Any]) -> dict[str, Any]:
    """Return the ticks of an axis on which the choices are at 0, 1, 2 and so on."""
    return {
        "tickvals": list(range(len(choices))),
        "ticktext": [shorten_middle(format_value(item)) for item in choices],
    }


def make_upright_axis(values: Sequence[Any], distribution: Any, log: bool) -> UprightAxis:
    """Return the heights of all values on a vertical axis, and its ticks."""
    choices = getattr(distribution, "choices", None)
    if choices is not None:
        span = max(1, len(choices) - 1)
        heights = {choice: index / span for index, choice in enumerate(choices)}
        labels = [(heights[choice], format_value(choice)) for choice in choices]
        return [heights[item] for item in values], labels
    low, high = min(values), max(values)

    def compute_height(item: float) -> float:
        if low == high:
            return 0.5
        if log:
            length = math.log10(high) - math.log10(low)
            return round((math.log10(item) - math.log10(low)) / length, 4)
        # Halves, because a difference may overflow.
        return round(float((item / 2 - low / 2) / (high / 2 - low / 2)), 4)

    def format_tick(tick: float) -> str:
        return f"{tick:g}" if log and tick not in (low, high) else format_value(tick)

    ticks = [low, (low + high) / 2, high]
    if log:
        ticks = [low, *_compute_log_ticks(low, high, margin=0.06), high]
    elif isinstance(low, int) and high - low < _MAX_WHOLE_TICKS:
        ticks = list(range(low, high + 1))
    labels = [(compute_height(tick), format_tick(tick)) for tick in dict.fromkeys(ticks)]
    return [compute_height(item) for item in values], labels


def _compute_log_ticks(low: float, high: float, margin: float = 0.0) -> list[float]:
    """Return powers of ten between `low` and `high`, and also 2 and 5 times these if they are few.

    Ticks within `margin` of either end are left out. `margin` is a fraction of the axis.
    """
    least, most = math.log10(low), math.log10(high)
    gap = (most - least) * margin
    powers = range(math.floor(least), math.ceil(most) + 1)
    steps = (1, 2, 5) if len(powers) < 5 else (1,)
    every = max(1, len(powers) // 12)
    ticks = []
    for power in powers[::every]:
        for step in steps:
            tick = step * 10.0**power if power < _LARGEST_POWER else math.inf
            if tick > 0 and least + gap <= math.log10(tick) <= most - gap:
                ticks.append(tick)
    return ticks


def compute_linear_ticks(low: float, high: float) -> list[float]:
    """Return a few round numbers between `low` and `high`, which may be equal."""
    if low == high:
        return [low]
    least = max(high / 8 - low / 8, sys.float_info.min)
    power = 10.0 ** math.floor(math.log10(least))
    step = next(step * power for step in (1, 2, 5, 10) if step * power >= least)
    return [count * step for count in range(math.ceil(low / step), math.floor(high / step) + 1)]


def escape_markup(text: str) -> str:
    """Escape < and &, because plotly reads them as markup, and cut the text to 80 characters."""
    return cut_text(text, 80).replace("&", "&amp;").replace("<", "&lt;")


def round_number(item: float, digits: int = 6) -> float:
    """Round a number to significant digits. More are seldom visible, and would enlarge the file."""
    return float(f"{item:.{digits}g}")
