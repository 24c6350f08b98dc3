"""Write the report of a run as one HTML file that needs neither network nor server."""

from __future__ import annotations

import base64
import importlib.util
import json
import shlex
import time
import zlib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jinja2

from hpo.errors import UsageError
from hpo.objectives import Objectives
from hpo.results.cost import Cost
from hpo.results.display_names import collect_names, name_metrics
from hpo.results.failures import find_failure_kinds
from hpo.results.reader import RunReader
from hpo.results.recommendation import find_network, read_winner_test
from hpo.space.parameters import is_conditional
from hpo.store.evaluations import Evaluation, find_best
from hpo.store.manifest import Manifest
from hpo.store.run_dir import write_atomically
from hpo.store.weights import find_weights, read_weights_trial
from hpo.text_format import (
    escape_invisible,
    format_date,
    format_duration,
    format_number,
    format_numbers,
    format_tenths,
    format_value,
)
from hpo.views.page.figures import draw_figures
from hpo.views.page.run_figures import find_runner_up
from hpo.views.result_text import (
    describe_confirmed,
    describe_front,
    describe_hypervolume,
    describe_winner,
    format_cost,
    format_expected_loss,
    format_trial,
    make_improved_heading,
    make_prior_columns,
    make_rung_columns,
    name_columns,
    select_front_rows,
)
from hpo.views.summary_tables import format_totals
from hpo.views.tables import MAX_HYPERPARAMETERS, choose_names, find_important_names

_MAX_FAILURES = 50
_MAX_FRONT_ROWS = 100
_RESERVED_COLUMNS = ("place", "loss", "trial", "island", "worker", "generation", "seconds")
_TEMPLATE_FOLDER = Path(__file__).parent


def write_report(run: RunReader, path: Path, ask_models: bool = True) -> None:
    """Write the report of the current state of a run. The models that it asks take seconds."""
    write_atomically(path, make_report(run, top_n=10, ask_models=ask_models))


def make_report(run: RunReader, top_n: int, ask_models: bool = True) -> bytes:
    """Return the report of the current state of a run, with a table of the best `top_n`."""
    return render_report(run, top_n, time.time(), ask_models).encode(errors="backslashreplace")


def render_report(run: RunReader, top_n: int, now: float, ask_models: bool = True) -> str:
    """Return the report of a run as HTML. Running evaluations are drawn until `now`."""
    may_be_running = run.run_dir.is_in_use is not False
    advice = run.find_advice()  # First, since it reads the manifest again.
    summary = run.make_summary(top_n, ask_models)
    evaluations = summary.evaluations
    confirmations = summary.confirmations
    all_confirmations = [*confirmations, *summary.earlier_confirmations]
    distributions = run.read_distributions()
    objectives = run.manifest.objectives
    best = summary.winner
    important = find_important_names(summary)
    top_metrics, top_params = _make_headings(summary.top, important, distributions, objectives)
    drawn = draw_figures(summary, distributions, now if may_be_running else None)
    data = {
        figure.name: {"data": figure.data, "layout": figure.make_full_layout()}
        for figure in drawn.list_all()
    }
    failures = find_failure_kinds([*evaluations, *confirmations], distributions)
    starts = [e.started for e in evaluations if e.started > 0 and not e.imported_from]
    confirmed = next(iter(summary.confirmed), None)
    if best is None or summary.unconfirmed or (confirmed and confirmed.mean is None):
        confirmed = None
    template = _make_environment().get_template("page.html")
    return template.render(
        about=_describe_run(run.manifest, summary.cost),
        name=run.run_dir.study_name,
        made=now,
        may_be_running=may_be_running,
        summary=summary,
        best=best,
        test=read_winner_test(run.run_dir, best) if best else None,
        weights=read_weights_trial(run.run_dir.best_weights),
        network=find_network(run.run_dir, best, all_confirmations) if best else None,
        best_json=json.dumps(best.params) if best else "",
        best_metrics=name_metrics(best.metrics, best.params, _RESERVED_COLUMNS) if best else {},
        top_metrics=top_metrics,
        top_params=top_params,
        params_of_top=collect_names(evaluation.params for evaluation in summary.top),
        confirmed=confirmed,
        confirmed_losses=[summary.get_evaluation(each.trial).loss for each in summary.confirmed],
        comparison=describe_confirmed(summary),
        advice=advice,
        rungs=make_rung_columns(summary.rungs),
        runner_up=find_runner_up(evaluations, best),
        first=min(starts, default=now),
        important=important,
        priors=make_prior_columns(summary.priors),
        conditional=any(map(is_conditional, run.manifest.space.values())),
        islands=_summarize_islands(evaluations),
        failures=failures[:_MAX_FAILURES],
        figures=drawn.by_name,
        slices=drawn.slices,
        several=objectives.is_multi_objective,
        improved=make_improved_heading(objectives),
        front=_make_front_table(run, summary.front, important, distributions),
        expected=format_expected_loss(summary),
        front_about=describe_front(len(summary.front), objectives),
        front_worth=describe_hypervolume(summary.hypervolume, objectives),
        fronts=drawn.fronts,
        figures_json=_compress(json.dumps(data, allow_nan=False)),
        plotly=_compress_plotly(),
    )


def render_overview(run: RunReader, top_n: int) -> str:
    """Return the answer of a run, its best individuals and its counts as HTML for a notebook."""
    summary = run.make_summary(top_n)
    winner = summary.winner
    answer = describe_winner(run, winner) if winner else ["no evaluation has succeeded"]
    objectives = run.manifest.objectives
    important = (
        find_important_names(summary) if len(run.manifest.space) > MAX_HYPERPARAMETERS else []
    )
    metrics, params = _make_headings(summary.top, important, run.read_distributions(), objectives)
    is_active = run.run_dir.is_in_use is not False
    return (
        _make_environment()
        .get_template("overview.html")
        .render(
            name=run.run_dir.study_name,
            answer=answer,
            summary=summary,
            metrics=metrics,
            params=params,
            totals=format_totals(summary, is_active).split("\n"),
        )
    )


def _describe_run(run: Manifest, cost: Cost) -> list[tuple[str, str]]:
    return [
        ("command", f"{run.launcher} {run.command}".strip()),
        ("search space", run.search_space),
        ("started", run.started),
        ("layout", str(run.layout)),
        ("hosts", ", ".join(run.hosts)),
        ("budget", f"{run.budget} evaluations"),
        ("cost", format_cost(cost) or "less than 0.1 hours"),
        ("seed", str(run.seed)),
        ("propagators", ", ".join(run.propagators)),
        ("pruner", run.pruner),
        ("settings", ", ".join(f"{name} = {value}" for name, value in run.settings.items())),
        ("study", f"{run.study} in {run.storage}"),
        ("versions", ", ".join(f"{name} {version}" for name, version in run.versions.items())),
    ]


def _make_headings(
    entries: Sequence[Evaluation],
    important: Sequence[str],
    distributions: Mapping[str, Any],
    objectives: Objectives,
) -> tuple[dict[str, str], dict[str, str]]:
    shown = choose_names([entry.params for entry in entries], important)
    metrics, params = name_columns(entries, distributions, objectives, _RESERVED_COLUMNS)
    return metrics, {name: text for name, text in params.items() if name in shown}


def _make_front_table(
    run: RunReader,
    entries: Sequence[Evaluation],
    important: Sequence[str],
    distributions: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the content of the table of the front; of a long one, individuals far apart."""
    objectives = run.manifest.objectives
    rows, ties = select_front_rows(entries, objectives, _MAX_FRONT_ROWS)
    metrics, params = _make_headings(rows, important, distributions, objectives)
    files = {entry.trial: find_weights(run.run_dir, entry.trial) for entry in rows}
    return {
        "rows": rows,
        "trials": {entry.trial: format_trial(entry.trial, ties) for entry in rows},
        "metrics": metrics,
        "params": params,
        "weights": {t: path.relative_to(run.run_dir.path) for t, path in files.items() if path},
        "ways": [f"--by {shlex.quote(name)}" for name in objectives.names],
    }


def _summarize_islands(evaluations: Sequence[Evaluation]) -> list[dict[str, Any]]:
    groups: dict[int, list[Evaluation]] = {}
    for evaluation in evaluations:
        if evaluation.counts_for_budget:
            groups.setdefault(evaluation.island, []).append(evaluation)
    return [
        {
            "island": island,
            "evaluations": len(group),
            "best": find_best(group),
            "immigrants": max(group, key=lambda evaluation: evaluation.started).immigrants,
        }
        for island, group in sorted(groups.items())
    ]


@cache  # Compiling the templates takes 0.2 s.
def _make_environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATE_FOLDER),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {
        "number": format_number,
        "numbers": format_numbers,
        "value": format_value,
        "duration": format_duration,
        "tenths": format_tenths,
        "day": format_date,
        "lines": lambda text: escape_invisible(text, keep="\n\t"),
    }
    return environment


def _compress(text: str | bytes) -> str:
    """Compress a text, which the page decompresses. plotly.js shrinks from 4.8 MB to 2 MB."""
    content = text.encode() if isinstance(text, str) else text
    return base64.b64encode(zlib.compress(content, 6)).decode()


@cache
def _compress_plotly() -> str:
    """Return the compressed code of plotly.js. Importing its Python package would take 0.4 s."""
    package = importlib.util.find_spec("plotly")
    if package is None or package.origin is None:
        raise UsageError("the report needs the package plotly: pip install plotly")
    return _compress((Path(package.origin).parent / "package_data" / "plotly.min.js").read_bytes())
