"""Find the saved network of an individual, and the evaluation that has trained it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hpo.errors import UsageError
from hpo.store.evaluations import Evaluation
from hpo.store.run_dir import RunDir
from hpo.store.weights import (
    WeightsInfo,
    find_weights,
    make_weights_path,
    read_weights_info,
    read_weights_trial,
)


@dataclass(frozen=True)
class TrainedNetwork:
    """A network whose weights were saved."""

    path: Path
    """The file of the weights."""
    info: WeightsInfo
    """The description of the weights, from the same file."""
    trained_by: Evaluation
    """The evaluation that has trained the network, of the search or of a confirmation."""

    @property
    def name(self) -> str:
        """The text to show, which is the trial, with the seed if a confirmation has trained the network."""
        trained_by = self.trained_by
        seed = (
            ""
            if trained_by.confirms is None
            else f" with seed {trained_by.seed} ({trained_by.label})"
        )
        return f"trial {self.info.trial}{seed}"


def find_network(
    run_dir: RunDir, chosen: Evaluation, confirmations: Sequence[Evaluation]
) -> TrainedNetwork | None:
    """Return the saved network of an individual; if there are several, the network with the lowest loss.

    The search or a confirmation has trained it. Networks that were trained with the
    current settings of the run are preferred.

    Args:
        chosen: The individual, an evaluation of the search.

    Returns:
        The network; None if the individual has no saved weights that can be read.
    """
    own, confirmed = (
        find_weights(run_dir, chosen.trial),
        make_weights_path(run_dir.confirmed_weights, chosen.trial),
    )
    found: list[TrainedNetwork] = []
    for path in (own, confirmed if read_weights_trial(confirmed) == chosen.trial else None):
        with suppress(UsageError):  # Damaged weights are ignored.
            info = read_weights_info(path) if path else None
            if path is None or info is None:
                continue
            candidates = [chosen] if info.confirmation is None else confirmations
            found += [
                TrainedNetwork(path, info, evaluation)
                for evaluation in candidates
                if info.confirmation in (None, evaluation.trial)
            ]
    settings = run_dir.read_manifest().settings
    return min(
        found,
        key=lambda network: (network.info.settings != settings, network.trained_by.loss),
        default=None,
    )
