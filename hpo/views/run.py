"""Read a run in a notebook or a program (`hpo.load_run`), without torch or MPI."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpo.errors import UsageError
from hpo.results.reader import RunReader
from hpo.results.recommendation import find_network
from hpo.store.evaluations import Evaluation
from hpo.store.weights import read_weights

if TYPE_CHECKING:
    from plotly.graph_objects import Figure
    from torch import Tensor

_TOP_N = 10  # individuals in the overview
# Types of the columns that pandas would read as others if values are missing.
_PANDAS_TYPES = {"whole": "Int64", "number": "float64", "truth": "boolean"}


def load_run(run_dir: str | PathLike[str], storage: str | None = None) -> Run:
    """Return a run, running or finished. It needs neither torch nor MPI, and writes nothing.

    `storage` is the storage of the study, if it needs a password.

    Raises:
        ValueError: If the directory does not contain a readable run.
    """
    return Run(run_dir, storage)


class Run:
    """A run, which `hpo.load_run` returns. A notebook shows its best individuals.

    Everything is read when it is asked for, so a running run is seen as it is then. Tables are
    pandas data frames, or lists of dicts if pandas is not installed.
    """

    def __init__(self, run_dir: str | PathLike[str], storage: str | None = None) -> None:
        # A notebook may change its directory.
        self._opened = RunReader(Path(run_dir).expanduser().absolute(), storage)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self._opened.run_dir.path)!r})"

    @property
    def _reader(self) -> RunReader:
        # A session that resumes the run rewrites its manifest.
        self._opened.manifest = self._opened.run_dir.read_manifest()
        return self._opened

    def _repr_html_(self) -> str:
        from hpo.views.page.html_report import render_overview

        return render_overview(self._reader, _TOP_N)

    @property
    def best(self) -> Evaluation | None:
        """The evaluation that the run recommends, as `hpo best`; None if none has succeeded.

        It has `trial`, `loss`, `params`, `metrics`, `seconds` and `curve`, which are the losses by
        epoch.
        """
        return self._reader.find_winner()

    @property
    def front(self) -> list[Evaluation]:
        """The evaluations of the Pareto front, the lowest loss first.

        If the loss is the only objective, it is the evaluation with the lowest loss.
        """
        return self._reader.find_front()

    @property
    def evaluations(self) -> Any:
        """A table with a row per evaluation, with the columns of `hpo export`."""
        from hpo.views.export import make_evaluation_table

        table = make_evaluation_table(self._reader)
        rows = [dict(zip(table.column_types, row, strict=True)) for row in table.rows]
        return _make_table(table.column_types, rows)

    @property
    def curves(self) -> Any:
        """A table with a row per loss of each evaluation of the search: trial, epoch, loss."""
        rows = [
            {"trial": evaluation.trial, "epoch": epoch, "loss": loss}
            for evaluation in self._reader.read_evaluations()
            for epoch, loss in sorted(evaluation.curve.items())
        ]
        return _make_table({"trial": "whole", "epoch": "whole", "loss": "number"}, rows)

    @property
    def importances(self) -> Any:
        """A table of hyperparameters, the most important first: name, share, low, high.

        `share` is the share in the variance of the loss; `low` and `high` limit its 90% interval.
        It is empty for fewer than 20 complete evaluations. Computing it takes seconds.
        """
        found = self._reader.make_summary(_TOP_N).importances
        columns = {"name": "text", "share": "number", "low": "number", "high": "number"}
        return _make_table(columns, list(map(asdict, found)))

    @property
    def figures(self) -> dict[str, Figure]:
        """The figures of the report as plotly figures, by name, such as `history` and `slice lr`.

        Figures that the run has no data for are missing. The first use takes seconds, because
        hyperparameters are ordered by their importance.
        """
        from hpo.views.page.figures import draw_figures
        from hpo.views.page.plotly_figure import make_plotly_figure

        is_active = self._reader.run_dir.is_in_use is not False
        until = time.time() if is_active else None
        summary = self._reader.make_summary(_TOP_N)
        drawn = draw_figures(summary, self._reader.read_distributions(), until)
        names = summary.run.objectives.metric_names if drawn.fronts else ()
        figures = {
            **drawn.by_name,
            **{f"front {name}": each for name, each in zip(names, drawn.fronts, strict=True)},
            **{f"slice {each.title}": each for each in drawn.slices},
        }
        return {name: make_plotly_figure(each) for name, each in figures.items() if each}

    def best_weights(self) -> dict[str, Tensor]:
        """Return the weights of `best` as torch tensors, for `load_state_dict`.

        Raises:
            ValueError: If no weights of it are kept.
        """
        best = self.best
        run_dir = self._reader.run_dir
        if best is None:
            raise UsageError(f"{run_dir.path}: no evaluation has succeeded")
        network = find_network(run_dir, best, self._reader.read_confirmations(all_plans=True))
        weights = read_weights(network.path) if network else None
        if weights is None:
            raise UsageError(
                f"{run_dir.path} has no weights of trial {best.trial}. An objective offers them "
                "by worker.offer_weights, a script by hpo.offer_weights"
            )
        return weights.state

    def show(self, trial: int | str | None = None) -> None:
        """Print all about an evaluation, as `hpo show`; by default about `best`.

        `trial` is its number, or a label such as "confirm-0".
        """
        from hpo.views.evaluation_details import EvaluationLookup, format_evaluation

        lookup = EvaluationLookup.read(self._reader)
        why = ""
        if trial is None:
            evaluation, why = lookup.choose_evaluation()
        else:
            evaluation = lookup.find_evaluation(str(trial))
        details = lookup.collect_details(evaluation)
        lines = format_evaluation(details, self._reader.run_dir.path, why, time.time())
        print(*lines, sep="\n")

    def compare(self, other: Run, *others: Run) -> None:
        """Print the best of this and other runs, and what they cost, as `hpo compare`."""
        from hpo.views.comparison import format_comparison

        readers = [run._reader for run in (self, other, *others)]
        summaries = {str(each.run_dir.path): each.make_summary(1) for each in readers}
        print(format_comparison(summaries))


def _make_table(column_types: Mapping[str, str], rows: Sequence[dict[str, Any]]) -> Any:
    """Return rows as a pandas data frame, or as they are if pandas is not installed."""
    if importlib.util.find_spec("pandas") is None:
        return rows
    import pandas as pd

    types = {
        name: _PANDAS_TYPES[kind] for name, kind in column_types.items() if kind in _PANDAS_TYPES
    }
    return pd.DataFrame(rows, columns=list(column_types)).astype(types)
