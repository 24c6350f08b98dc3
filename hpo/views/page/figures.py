"""Draw all figures of a run, for its report and for notebooks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpo.results.summary import Summary
from hpo.views.page import front_figures, run_figures
from hpo.views.page.figure import Figure
from hpo.views.tables import choose_names, find_important_names


@dataclass(frozen=True)
class Figures:
    """The figures of a run."""

    by_name: Mapping[str, Figure | None]
    """The figures of which a run has one each; None if the run has no data for it."""
    fronts: Sequence[Figure]
    """The Pareto fronts, one for each objective except the loss; empty without other objectives."""
    slices: Sequence[Figure]
    """The loss over each hyperparameter, the most important first."""

    def list_all(self) -> Iterator[Figure]:
        """Return all figures that the run has data for."""
        yield from filter(None, (*self.by_name.values(), *self.fronts, *self.slices))


def draw_figures(
    summary: Summary, distributions: Mapping[str, Any], until: float | None
) -> Figures:
    """Draw all figures of a run. Running evaluations are drawn until the time `until`, if given.

    `distributions` are Optuna's, by the name of the hyperparameter.
    """
    evaluations = summary.evaluations
    confirmations = summary.confirmations
    objectives = summary.run.objectives
    winner = summary.winner
    compared = None
    if not objectives.is_multi_objective:
        compared = run_figures.draw_best_and_runner_up(evaluations, winner)
    shown = choose_names([e.params for e in summary.top], find_important_names(summary))
    across = {name: distributions[name] for name in distributions if name in shown}
    attempts = [*evaluations, *confirmations]
    workers = summary.run.layout.workers
    # A conditional hyperparameter without any evaluation is in the space, but has no distribution.
    ranked = [each.name for each in summary.importances if each.name in distributions]
    order = list(dict.fromkeys([*ranked, *distributions]))
    return Figures(
        {
            "best": compared,
            "hypervolume": front_figures.draw_hypervolume(evaluations, objectives),
            "history": run_figures.draw_history(evaluations),
            "parallel": run_figures.draw_parallel_coordinates(evaluations, across),
            "rungs": run_figures.draw_rungs(evaluations, summary.run.pruner, objectives),
            "schedule": run_figures.draw_schedule(evaluations, winner, distributions),
            "descent": run_figures.draw_descent(evaluations, winner),
            "curves": run_figures.draw_learning_curves(evaluations, winner),
            "timeline": run_figures.draw_timeline(attempts, workers, until),
            "immigrants": run_figures.draw_immigrants(evaluations),
        },
        front_figures.draw_fronts(evaluations, objectives),
        run_figures.draw_slices(evaluations, distributions, order),
    )
