"""A session: its study, and its manifest.

It selects the checkpoints to keep, and the individuals to confirm.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from hpo.results.confirmation import ConfirmationPlan, make_plan
from hpo.space import SearchSpace
from hpo.store.cached_storage import CachedStorage
from hpo.store.evaluations import Evaluation
from hpo.store.inheritance import find_trials_to_keep
from hpo.store.manifest import Manifest
from hpo.store.pareto_front import select_top
from hpo.store.record import Record
from hpo.store.run_dir import RunDir
from hpo.store.storage import StorageRetry, list_studies, open_storage


@dataclass(frozen=True)
class Session:
    """A session: one start of a run, which may resume an earlier session. It exists only on the first rank."""

    run_dir: RunDir
    storage: str
    """The storage of the study, with its password."""
    manifest: Manifest
    headline: str = ""
    """The lines that are printed when the session begins."""
    patience: StorageRetry | None = None
    """Repeats each access to the storage while the storage is unavailable. If it is None, such an access fails."""

    @property
    def confirmation_plan(self) -> ConfirmationPlan:
        """The plan to confirm the best with other seeds."""
        return make_plan(self.manifest)

    def open_record(self) -> Record:
        """Open the study of the search to read it. Each process and thread needs its own record."""
        return Record(self.storage, self.manifest.study, self.patience)

    def open_confirmations(self) -> Record:
        """Open the study that confirms the best. `create_confirmations` must have created it."""
        return Record(self.storage, self.manifest.confirmation_study, self.patience)

    def open_own_record(self, study: str) -> tuple[Record, CachedStorage]:
        """Open a study for its only writer.

        Args:
            study: The name of the study of the search, or of the study that confirms the best.

        Returns:
            The study, and the storage that caches it in this process.
        """
        storage = open_storage(self.storage, self.patience)
        cached_storage = CachedStorage(storage, storage.get_study_id_from_name(study), self.patience)
        return Record(cached_storage, study), cached_storage

    def find_roots_to_inherit(self, record: Record) -> set[int]:
        """Return the trials whose checkpoints must be kept, because other evaluations can inherit them.

        An evaluation that was resumed or promoted has several trials. Its checkpoint has the number of the first of
        them. The set is empty without population based training.
        """
        islands = self.manifest.layout.islands
        return (
            record.find_roots(find_trials_to_keep(record.read_evaluations(), islands)) if self.manifest.pbt else set()
        )

    def select_best(self, evaluations: Sequence[Evaluation], n: int) -> list[Evaluation]:
        """Return the n best of these evaluations by the objectives of the run."""
        return select_top(evaluations, n, self.manifest.objectives)

    def find_to_confirm(
        self, evaluations: Sequence[Evaluation], confirmations: Sequence[Evaluation], n: int
    ) -> list[Evaluation]:
        """Return the evaluations to confirm with other seeds.

        Args:
            evaluations: All evaluations of the search.
            confirmations: All evaluations of the study that confirms the best.
            n: The number of individuals to confirm.

        Returns:
            The n best, and the individuals that earlier sessions confirmed. If n has changed since the previous
            session, only the n best.
        """
        best = self.select_best(evaluations, n)
        if any(session.options.get("top_n", n) != n for session in self.manifest.sessions[-2:]):
            return best
        finished = [confirmation for confirmation in confirmations if confirmation.is_finished]
        confirmed = {confirmation.confirms for confirmation in self.confirmation_plan.select_planned(finished)}
        # An individual with fewer seeds was not among the best of a later session.
        seeds = Counter(
            confirmation.confirms
            for confirmation in self.confirmation_plan.select_planned(confirmations)
            if confirmation.confirms in confirmed
        )
        others = [trial for trial, count in seeds.items() if trial is not None and count == max(seeds.values())]
        return [*best, *(evaluations[trial] for trial in others if evaluations[trial] not in best)]

    def has_confirmations(self) -> bool:
        """Return whether the study that confirms the best exists."""
        return self.manifest.confirmation_study in list_studies(self.storage, self.patience)

    def create_confirmations(self, space: SearchSpace) -> None:
        """Create the study that confirms the best, unless it exists."""
        name = self.manifest.confirmation_study
        existing = self.open_confirmations() if self.has_confirmations() else None
        if existing is None or not ("space" in existing.read_attributes() or existing.read_evaluations()):
            run = self.manifest
            Record.create(self.storage, name, space.describe(), confirms=run.study, objectives=run.objectives)
