"""Show losses above the scale of a figure as triangles at its upper edge, and count them in a sentence."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hpo.text_format import format_count, format_number
from hpo.views.loss_scale import LossScale
from hpo.views.page.axes import compute_linear_ticks, make_axis, round_number

EDGE_POSITION = 1.08  # position of the triangles; the scale is from 0 to 1
TRIANGLE_SYMBOL = "triangle-up"
TRIANGLE_SIZE = 9
SEPARATOR_POSITION = 1.04
_AXIS_END, _AXIS_START = 1.12, -0.06


def make_loss_layout(losses: Iterable[float], scale: LossScale) -> dict[str, Any]:
    """Return the plotly layout of an axis for losses, with a dotted line below out-of-range losses if there are any."""
    if not any(map(scale.is_out_of_range, losses)):
        return {"yaxis": make_axis("loss", [scale.lowest, scale.highest], log=scale.is_logarithmic)}
    return {
        "yaxis": make_cut_axis("loss", scale),
        "shapes": [make_separator("y", scale.compute_loss(SEPARATOR_POSITION))],
    }


def make_cut_axis(title: str, scale: LossScale) -> dict[str, Any]:
    """Return a plotly axis with space beyond the scale for out-of-range values."""
    made = make_axis(title, [scale.lowest, scale.highest], log=scale.is_logarithmic)
    ends = [scale.compute_loss(fraction) for fraction in (_AXIS_START, _AXIS_END)]
    if scale.is_logarithmic:
        return made | {"range": [math.log10(end) for end in ends]}
    # Plotly's own ticks would extend to the edge.
    ticks = compute_linear_ticks(scale.lowest, scale.highest)
    return made | {"tickvals": ticks, "ticktext": [f"{tick:.8g}" for tick in ticks], "range": ends}


def make_separator(along: str, at: float) -> dict[str, Any]:
    """Return a dotted line at value `at` of axis `along` ("x" or "y"), between the scale and out-of-range values."""
    across = "y" if along == "x" else "x"
    ends = {
        f"{across}ref": "paper",
        f"{across}0": 0,
        f"{across}1": 1,
        f"{along}0": at,
        f"{along}1": at,
    }
    return {
        "type": "line",
        **ends,
        "line": {"color": "--muted", "width": 1, "dash": "dot"},
        "layer": "below",
    }


def compute_loss_heights(losses: Iterable[float], scale: LossScale) -> list[float]:
    """Return the value at which each loss is drawn, rounded. Out-of-range losses are drawn just above the scale."""
    largest, length = (
        max(abs(scale.lowest), abs(scale.highest)),
        scale.highest / 2 - scale.lowest / 2,
    )
    more = math.floor(math.log10(largest / length / 2)) if length and largest > 2 * length else 0
    return [
        round_number(
            scale.compute_loss(EDGE_POSITION) if scale.is_out_of_range(loss) else loss,
            min(17, 6 + more),
        )
        for loss in losses
    ]


def make_loss_markers(
    losses: Sequence[float], scale: LossScale, marker: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the y values and the marker of a trace, with triangles for out-of-range losses."""
    made = dict(marker)
    triangles = [scale.is_out_of_range(loss) for loss in losses]
    if any(triangles):
        symbol, size = marker["symbol"], marker["size"]
        symbols = [symbol] * len(losses) if isinstance(symbol, str) else symbol
        made["symbol"] = [
            _find_triangle_symbol(own) if triangle else own
            for triangle, own in zip(triangles, symbols, strict=True)
        ]
        made["size"] = [TRIANGLE_SIZE if triangle else size for triangle in triangles]
        # Plotly would draw points of different sizes as bubbles.
        made |= {"opacity": 1, "line": {"width": 0}}
    return {"y": compute_loss_heights(losses, scale), "marker": made}


def _find_triangle_symbol(symbol: str) -> str:
    """Return the triangle that replaces a symbol. It is open (not filled) if the symbol is open."""
    return f"{TRIANGLE_SYMBOL}-open" if "-open" in symbol else TRIANGLE_SYMBOL


def format_high_loss(loss: float, scale: LossScale, more: str = "") -> str:
    """Return a line with the loss and the text `more` for the label of a point; "" if the loss is in range."""
    return f"<br>loss {format_number(loss)}{more}" if scale.is_out_of_range(loss) else ""


def describe_out_of_range(
    losses: Iterable[float], scale: LossScale, noun: str = "evaluation"
) -> str:
    """Return a sentence with the number of out-of-range losses; "" if there are none. They are counted as `noun`s."""
    far = [loss for loss in losses if scale.is_out_of_range(loss)]
    if not far:
        return ""
    verb, highest = ("goes", "a loss of") if len(far) == 1 else ("go", "losses of up to")
    how = f"with {highest} {format_number(max(far))}: \N{BLACK UP-POINTING TRIANGLE} at the upper edge."
    return f"{format_count(len(far), noun)} {verb} beyond the scale, {how}"
