"""Which of its networks an individual hands over, and which evaluation has trained it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hpo.errors import UsageError
from hpo.store.evaluations import Evaluation
from hpo.store.run_dir import RunDir
from hpo.store.weights import WeightsInfo, find_weights, make_weights_path, read_weights_info, read_weights_trial


@dataclass(frozen=True)
class TrainedNetwork:
    """A network whose weights are kept in the file `path`.

    `trained_by` is an evaluation of the search, or one that confirms its best.
    """

    path: Path
    info: WeightsInfo
    trained_by: Evaluation

    @property
    def name(self) -> str:
        """What to call it: its trial, and the seed if that is not the run's."""
        one = self.trained_by
        return f"trial {self.info.trial}" + ("" if one.confirms is None else f" with seed {one.seed} ({one.label})")


def find_network(run_dir: RunDir, chosen: Evaluation, confirmations: Sequence[Evaluation]) -> TrainedNetwork | None:
    """Return the kept network of an individual that has the lowest loss; None without any.

    Networks that were trained with the run's settings come first.
    """
    own, confirmed = find_weights(run_dir, chosen.trial), make_weights_path(run_dir.confirmed_weights, chosen.trial)
    found: list[TrainedNetwork] = []
    for path in (own, confirmed if read_weights_trial(confirmed) == chosen.trial else None):
        with suppress(UsageError):  # Damaged weights are not handed over.
            about = read_weights_info(path) if path else None
            if path is None or about is None:
                continue
            among = [chosen] if about.confirmation is None else confirmations
            found += [TrainedNetwork(path, about, one) for one in among if about.confirmation in (None, one.trial)]
    settings = run_dir.read_manifest().settings
    return min(found, key=lambda network: (network.info.settings != settings, network.trained_by.loss), default=None)
