"""Copy what an objective offers, and write it to files, as a trainer and its leader do."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from hpo.evaluation.draft_store import Draft, DraftStore
from hpo.process.messages import ReportAnswer
from hpo.store.checkpoints import WEIGHTS_PREFIX, CheckpointInfo
from hpo.trainer.offers import Offers


def copy_offers(offers: Offers, *, keeps_weights: bool, saves_checkpoint: bool) -> dict[str, Draft]:
    """Let a trainer copy weights and checkpoint after a loss.

    Return the copies that succeed, by their kinds.
    """
    copies = offers.copy(
        ReportAnswer(continues=True, keeps_weights=keeps_weights, saves_checkpoint=saves_checkpoint)
    )
    offers.forget_read_checkpoints()
    offers.clear()
    return dict(zip(copies.kinds, map(Draft.from_descriptor, copies.descriptors), strict=True))


def make_drafts(
    weights: Mapping[str, Tensor], params: Mapping[str, Any] | None = None
) -> DraftStore:
    """Return the drafts of an evaluation whose trainer has copied these weights."""
    offers = Offers(True, None, None)
    offers.offer_weights(weights)
    drafts = DraftStore(Path("unused"), params or {})
    drafts.keep_weights(copy_offers(offers, keeps_weights=True, saves_checkpoint=False)["weights"])
    return drafts


def write_checkpoint(
    path: Path, saved: Any, info: CheckpointInfo, weights: Mapping[str, Tensor] | None = None
) -> None:
    """Write the checkpoint file of an evaluation that has saved this state.

    `info` need not have its tree.
    """
    offers = Offers(True, None, None)
    offers.save_checkpoint(saved)
    drafts = (
        DraftStore(Path("unused"), info.params)
        if weights is None
        else make_drafts(weights, info.params)
    )
    progress = {"losses": info.losses, "metrics": info.metrics, "seconds": info.seconds}
    copy = copy_offers(offers, keeps_weights=False, saves_checkpoint=True)["checkpoint"]
    drafts.keep_checkpoint(copy, progress)
    try:
        drafts.make_checkpoint_file(path)
    finally:
        drafts.close()


def read_checkpoint_weights(path: Path) -> dict[str, Tensor]:
    """Return the weights of the lowest loss in a checkpoint file; empty if it has none."""
    with safe_open(path, "pt") as file:
        names = [name for name in file.keys() if name.startswith(WEIGHTS_PREFIX)]  # noqa: SIM118 - not a dict
        return {name.removeprefix(WEIGHTS_PREFIX): file.get_tensor(name) for name in names}
