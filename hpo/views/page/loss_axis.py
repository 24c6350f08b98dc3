"""Make loss axes. A loss above the scale is drawn as a triangle at the upper edge, and counted."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hpo.store.evaluations import Evaluation
from hpo.text_format import format_count, format_number
from hpo.views.loss_scale import LossScale, make_loss_scale
from hpo.views.page.axes import compute_linear_ticks, make_axis, round_number
from hpo.views.page.figure import Trace, make_points

EDGE_POSITION = 1.08  # position of the triangles; the scale is from 0 to 1
TRIANGLE_SYMBOL = "triangle-up"
TRIANGLE_SIZE = 9
_SEPARATOR_POSITION = 1.04
_AXIS_END, _AXIS_START = 1.12, -0.06


class LossAxis:
    """Vertical axis of a figure of losses.

    Args:
        losses: Losses of the figure.
        usual_losses: Losses that determine which losses are out of range (`make_loss_scale`).

    Attributes:
        scale: Range of losses below the triangles.
    """

    def __init__(self, losses: Sequence[float], usual_losses: Sequence[float]) -> None:
        self.scale = make_loss_scale(losses, usual_losses)

    def make_layout(self, losses: Iterable[float]) -> dict[str, Any]:
        """Return the layout of an axis for `losses`, with a dotted line below triangles."""
        is_cut = any(map(self.scale.is_out_of_range, losses))
        layout: dict[str, Any] = {"yaxis": make_cut_axis("loss", self.scale, is_cut)}
        if is_cut:
            layout["shapes"] = [make_separator("y", self.scale)]
        return layout

    def compute_heights(self, losses: Iterable[float]) -> list[float]:
        """Return the value at which each loss is drawn."""
        return compute_heights(losses, self.scale)

    def draw_points(
        self,
        x: Sequence[Any],
        evaluations: Sequence[Evaluation],
        name: str,
        marker: Mapping[str, Any],
        losses: Sequence[float] | None = None,
    ) -> Trace:
        """Draw a labelled point per evaluation, at `losses` or by default at its own loss."""
        if losses is None:
            losses = [evaluation.loss for evaluation in evaluations]
        marker = dict(marker)
        is_far = [self.scale.is_out_of_range(loss) for loss in losses]
        if any(is_far):
            symbol = marker["symbol"]
            symbols = [symbol] * len(losses) if isinstance(symbol, str) else symbol
            marker["symbol"] = [
                _find_triangle_symbol(own) if far else own
                for far, own in zip(is_far, symbols, strict=True)
            ]
            marker["size"] = [TRIANGLE_SIZE if far else marker["size"] for far in is_far]
            # Plotly would draw points of different sizes as bubbles.
            marker |= {"opacity": 1, "line": {"width": 0}}
        return {
            **make_points(x, evaluations, name),
            "y": self.compute_heights(losses),
            "marker": marker,
        }

    def format_high_loss(self, loss: float, more: str = "") -> str:
        """Return a line with the loss and `more` for the label of a point; "" if it is in range."""
        return f"<br>loss {format_number(loss)}{more}" if self.scale.is_out_of_range(loss) else ""

    def describe_out_of_range(self, losses: Iterable[float], noun: str = "evaluation") -> str:
        """Return a sentence with the number of out-of-range losses, as `noun`s; "" without any."""
        far = [loss for loss in losses if self.scale.is_out_of_range(loss)]
        if not far:
            return ""
        verb, highest = ("goes", "a loss of") if len(far) == 1 else ("go", "losses of up to")
        where = "\N{BLACK UP-POINTING TRIANGLE} at the upper edge"
        return (
            f"{format_count(len(far), noun)} {verb} beyond the scale, "
            f"with {highest} {format_number(max(far))}: {where}."
        )


def make_cut_axis(title: str, scale: LossScale, is_cut: bool) -> dict[str, Any]:
    """Return a plotly axis; if `is_cut`, with space beyond the scale for out-of-range values."""
    axis = make_axis(title, [scale.lowest, scale.highest], log=scale.is_logarithmic)
    if not is_cut:
        return axis
    ends = [scale.compute_loss(fraction) for fraction in (_AXIS_START, _AXIS_END)]
    if scale.is_logarithmic:
        return axis | {"range": [math.log10(end) for end in ends]}
    # Plotly's own ticks would extend to the edge.
    ticks = compute_linear_ticks(scale.lowest, scale.highest)
    return axis | {"tickvals": ticks, "ticktext": [f"{tick:.8g}" for tick in ticks], "range": ends}


def make_separator(along: str, scale: LossScale) -> dict[str, Any]:
    """Return a dotted line across axis `along` ("x" or "y"), between scale and triangles."""
    across = "y" if along == "x" else "x"
    value = scale.compute_loss(_SEPARATOR_POSITION)
    return {
        "type": "line",
        f"{across}ref": "paper",
        f"{across}0": 0,
        f"{across}1": 1,
        f"{along}0": value,
        f"{along}1": value,
        "line": {"color": "--muted", "width": 1, "dash": "dot"},
        "layer": "below",
    }


def compute_heights(losses: Iterable[float], scale: LossScale) -> list[float]:
    """Return the value at which each loss is drawn: just above the scale if it is out of range."""
    largest = max(abs(scale.lowest), abs(scale.highest))
    length = scale.highest / 2 - scale.lowest / 2
    digits = 6
    if length and largest > 2 * length:
        digits = min(17, 6 + math.floor(math.log10(largest / length / 2)))
    edge = scale.compute_loss(EDGE_POSITION)
    return [round_number(edge if scale.is_out_of_range(loss) else loss, digits) for loss in losses]


def _find_triangle_symbol(symbol: str) -> str:
    """Return the triangle that replaces a symbol. It is open (not filled) if the symbol is open."""
    return f"{TRIANGLE_SYMBOL}-open" if "-open" in symbol else TRIANGLE_SYMBOL
