"""Test that the state of a process is restored, by whatever interface of torch it was changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hpo.trainer.process_state import ProcessState

BACKENDS: Any = torch.backends  # It has more attributes than its types say.


def use_new_interface() -> None:
    BACKENDS.cuda.matmul.fp32_precision = "tf32"


def use_old_interface() -> None:
    torch.set_float32_matmul_precision("medium")


def use_both_interfaces() -> None:
    torch.set_float32_matmul_precision("high")
    BACKENDS.cuda.matmul.fp32_precision = "ieee"


def set_all_precisions() -> None:
    BACKENDS.fp32_precision = "tf32"
    BACKENDS.cudnn.conv.fp32_precision = "ieee"
    BACKENDS.mkldnn.matmul.fp32_precision = "bf16"


def set_switches() -> None:
    BACKENDS.cuda.enable_flash_sdp(False)
    BACKENDS.cudnn.benchmark = True
    BACKENDS.cudnn.benchmark_limit = 3
    BACKENDS.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_grad_enabled(False)


def read_state() -> list[object]:
    precisions = [
        *(
            BACKENDS.fp32_precision,
            BACKENDS.cuda.matmul.fp32_precision,
            BACKENDS.cudnn.conv.fp32_precision,
        ),
        *(BACKENDS.cudnn.rnn.fp32_precision, BACKENDS.mkldnn.matmul.fp32_precision),
    ]
    switches = [
        *(
            BACKENDS.cuda.flash_sdp_enabled(),
            BACKENDS.cudnn.benchmark,
            BACKENDS.cudnn.benchmark_limit,
        ),
        BACKENDS.cuda.matmul.allow_bf16_reduced_precision_reduction,
        *(torch.are_deterministic_algorithms_enabled(), torch.is_grad_enabled()),
    ]
    return [*precisions, *switches, torch.get_float32_matmul_precision()]


@pytest.mark.parametrize(
    "change",
    [use_new_interface, use_old_interface, use_both_interfaces, set_all_precisions, set_switches],
)
def test_changes_of_torch_are_restored(change: Callable[[], None]) -> None:
    before = read_state()
    state = ProcessState()
    change()
    assert state.restore()
    assert read_state() == before
