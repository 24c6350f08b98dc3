"""A callback for transformers' Trainer that reports its losses to the search.

Import it only in scripts that use it, since transformers takes seconds to import.
"""

from __future__ import annotations

import math
from typing import Any

from hpo.evaluation_api import report

try:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ModuleNotFoundError as error:
    reason = (
        f"hpo.training.transformers needs transformers ({error}): pip install "
        "'hpo-islands[transformers]'"
    )
    raise ModuleNotFoundError(reason) from None

_SPEED_SUFFIXES = ("_runtime", "_per_second")


class ReportCallback(TrainerCallback):
    """Report the loss and the other metrics each time a Trainer evaluates, on its main process.

    If no search runs the script, the callback does nothing. Metrics have the names that the Trainer
    logs, such as ``eval_accuracy``. Epochs, run times, speeds, and values that are not finite
    numbers are left out.

    Args:
        loss: Name of the metric to minimize. Nothing is reported if the Trainer's metrics lack it.

    Example:
        ::

            Trainer(model=model, args=args, callbacks=[ReportCallback()])
    """

    def __init__(self, loss: str = "eval_loss") -> None:
        self._loss = loss

    def on_evaluate(  # transformers passes the arguments by these names.
        self,
        args: TrainingArguments,  # noqa: ARG002
        state: TrainerState,
        control: TrainerControl,  # noqa: ARG002
        **kwargs: Any,
    ) -> None:
        """Report the ``metrics`` of an evaluation. transformers calls this method."""
        metrics = kwargs["metrics"]
        if state.is_world_process_zero and self._loss in metrics:
            others = {
                name: value for name, value in metrics.items() if self._is_reported(name, value)
            }
            report(metrics[self._loss], **others)

    def _is_reported(self, name: str, value: Any) -> bool:
        is_number = (
            isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        )
        return (
            is_number and name not in (self._loss, "epoch") and not name.endswith(_SPEED_SUFFIXES)
        )
