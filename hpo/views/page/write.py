"""The report of a run: one HTML file that opens anywhere, with no network and no server."""

from __future__ import annotations

import base64
import importlib.util
import json
import shlex
import time
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from hpo.errors import UsageError
from hpo.objectives import Objectives
from hpo.parameters import is_conditional
from hpo.results.names import all_names, metrics_shown, params_shown
from hpo.results.network import network_of
from hpo.results.reader import RunReader
from hpo.results.summary import by_reason, summarize
from hpo.results.winner import examined, winner_of
from hpo.store.evaluations import Evaluation
from hpo.store.evaluations import best as best_of
from hpo.store.front import far_apart
from hpo.store.manifest import Manifest
from hpo.store.run_dir import write_whole
from hpo.store.weights import kept_weights, trial_of_weights
from hpo.text import day, duration, escaped, number, numbers, tenths, value
from hpo.views.confirmed import confirmed_sentences
from hpo.views.expected import expected_text
from hpo.views.front import costs_of_entries, improved, objectives_first, together, trial_text, what_it_is, worth
from hpo.views.individuals import choose_names, names_told_apart
from hpo.views.page import front, hyperparameters, lineage, losses, rungs, work
from hpo.views.page.figure import Figure
from hpo.views.rungs import rung_columns

_MOST_FAILURES, _MOST_OF_FRONT = 50, 100
_COLUMNS = ("place", "loss", "trial", "island", "worker", "generation", "seconds")
_FOLDER = Path(__file__).parent


def write_report(run: RunReader, path: Path, ask_models: bool = True) -> None:
    """Write the report of a run as it stands; raises RunError where the file cannot be written."""
    write_whole(path, report_of(run, top_n=10, ask_models=ask_models))


def report_of(run: RunReader, top_n: int, ask_models: bool = True) -> bytes:
    """Return the content of the report of a run as it stands."""
    return render(run, top_n, time.time(), ask_models).encode(errors="backslashreplace")


def render(run: RunReader, top_n: int, now: float, ask_models: bool = True) -> str:
    """Return the report of a run as HTML; evaluations that still run are drawn until `now`, seconds since the epoch."""
    goes_on = run.run_dir.in_use is not False
    evaluations, confirmations = run.evaluations(), run.confirmations()
    distributions = run.distributions()
    summary = summarize(evaluations, run.manifest, top_n, confirmations, ask_models)
    important = names_told_apart(summary)
    # A conditional hyperparameter that no evaluation has is in the space, and has no distribution.
    ranked = [entry["name"] for entry in summary["importances"] if entry["name"] in distributions]
    order = list(dict.fromkeys([*ranked, *distributions]))
    objectives = run.manifest.objectives
    top_metrics, top_params = _headings(summary["top"], important, distributions, objectives)
    layout, best = run.manifest.layout, winner_of(evaluations, confirmations, objectives)
    fronts = front.fronts(evaluations, objectives)
    drawn = {
        "best": None if objectives.are_several else losses.best_and_runner_up(evaluations, best),
        "hypervolume": front.hypervolume(evaluations, objectives),
        "history": losses.history(evaluations),
        "parallel": hyperparameters.parallel_coordinates(
            evaluations, {name: distributions[name] for name in distributions if name in top_params}
        ),
        "rungs": rungs.rungs_reached(evaluations, run.manifest.pruner, objectives),
        "schedule": lineage.schedule(evaluations, best, distributions),
        "descent": lineage.descent(evaluations, best),
        "curves": losses.learning_curves(evaluations, best),
        "timeline": work.timeline([*evaluations, *confirmations], layout.workers, now if goes_on else None),
        "immigrants": work.immigrants(evaluations),
    }
    slices = hyperparameters.slices(evaluations, distributions, order)
    template = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    template.filters |= {"number": number, "numbers": numbers, "value": value, "duration": duration, "tenths": tenths}
    template.filters |= {"day": day, "trial": trial_text}
    template.filters["lines"] = lambda text: escaped(text, keep="\n\t")
    return template.get_template("page.html").render(
        about=_about(run.manifest),
        space=run.manifest.space,
        name=run.run_dir.study_name,
        made=now,
        goes_on=goes_on,
        summary=summary,
        best=best,
        test=examined(run.run_dir, best) if best else None,
        weights=trial_of_weights(run.run_dir.weights),
        network=network_of(run.run_dir, best, run.confirmations(all_plans=True)) if best else None,
        best_json=json.dumps(best.params) if best else "",
        best_metrics=metrics_shown(best.metrics, best.params, _COLUMNS) if best else {},
        top_metrics=top_metrics,
        top_params=top_params,
        params_of_top=all_names(entry["params"] for entry in summary["top"]),
        confirmed=_confirmed(summary, best),
        comparison=confirmed_sentences(summary, [f"trial {entry['trial']}" for entry in summary["confirmed"]]),
        advice=run.advice(),
        lineage=summary["lineage"],
        pruner=run.manifest.pruner,
        rungs=rung_columns(summary["rungs"]),
        runner_up=losses.runner_up(evaluations, best),
        first=min((one.started for one in evaluations if not one.imported_from and one.started > 0), default=now),
        importances=summary["importances"],
        important=important,
        conditional=any(map(is_conditional, run.manifest.space.values())),
        islands=_islands(evaluations),
        failures=_failures([*evaluations, *confirmations]),
        figures=drawn,
        slices=slices,
        count=len(evaluations),
        several=objectives.are_several,
        improved=improved(objectives),
        front=_front(run, summary["front"], important, distributions),
        expected=expected_text(summary),
        front_about=what_it_is(len(summary["front"]), objectives),
        front_worth=worth(summary["hypervolume"], objectives),
        fronts=fronts,
        figures_json=_packed(json.dumps(_by_name([*drawn.values(), *fronts, *slices]), allow_nan=False)),
        plotly=_packed(_plotly()),
    )


def _about(run: Manifest) -> list[tuple[str, str]]:
    """Return what the last session has run, as pairs of names and texts."""
    return [
        ("command", run.command),
        ("search space", run.search_space),
        ("started", run.started),
        ("layout", str(run.layout)),
        ("hosts", ", ".join(run.hosts)),
        ("budget", f"{run.budget} evaluations"),
        ("seed", str(run.seed)),
        ("propagators", ", ".join(run.propagators)),
        ("pruner", run.pruner),
        ("settings", ", ".join(f"{name} = {value}" for name, value in run.settings.items())),
        ("study", f"{run.study} in {run.storage}"),
        ("versions", ", ".join(f"{name} {version}" for name, version in run.versions.items())),
    ]


def _confirmed(summary: Mapping[str, Any], best: Evaluation | None) -> dict[str, Any] | None:
    """Return the best individual's confirmation; None where the best was not chosen by a confirmation."""
    first: dict[str, Any] | None = next(iter(summary["confirmed"]), None)
    if first is None or best is None or summary["unconfirmed"] or first["mean"] is None:
        return None
    return first


def _by_name(drawn: Sequence[Figure | None]) -> dict[str, Any]:
    return {figure.name: {"data": figure.data, "layout": figure.layout} for figure in drawn if figure}


def _headings(
    entries: Sequence[Mapping[str, Any]],
    important: Sequence[str],
    distributions: Mapping[str, Any],
    objectives: Objectives,
) -> tuple[dict[str, str], dict[str, str]]:
    """Return the metrics and the hyperparameters that a table of individuals has columns for, with their headings."""
    shown = choose_names([entry["params"] for entry in entries], important)
    metrics = objectives_first(sorted({name for entry in entries for name in entry["metrics"]}), objectives)
    params = {name: text for name, text in params_shown(distributions, _COLUMNS).items() if name in shown}
    return metrics_shown(metrics, distributions, _COLUMNS), params


def _front(
    run: RunReader, entries: Sequence[Mapping[str, Any]], important: Sequence[str], distributions: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the content of the table of the front; of a long front, individuals that are far apart."""
    objectives = run.manifest.objectives
    entries = entries if len(entries) <= _MOST_OF_FRONT else together(entries, objectives)
    rows = [entries[index] for index in far_apart(costs_of_entries(entries, objectives), _MOST_OF_FRONT)]
    metrics, params = _headings(rows, important, distributions, objectives)
    files = {entry["trial"]: kept_weights(run.run_dir, entry["trial"]) for entry in rows}
    weights = {trial: path.relative_to(run.run_dir.path) for trial, path in files.items() if path}
    ways = [f"--by {shlex.quote(name)}" for name in objectives.names]
    return {"rows": rows, "metrics": metrics, "params": params, "weights": weights, "ways": ways}


def _islands(evaluations: Sequence[Evaluation]) -> list[dict[str, Any]]:
    """Return what each island evaluated, its best, and the immigrants on it at its last evaluation."""
    found = []
    for island in sorted({one.island for one in evaluations if one.counts}):
        own = [one for one in evaluations if one.island == island and one.counts]
        last = max(own, key=lambda one: one.started)
        found.append({"island": island, "evaluations": len(own), "best": best_of(own), "immigrants": last.immigrants})
    return found


def _failures(evaluations: Sequence[Evaluation]) -> list[dict[str, Any]]:
    """Return failures by their reasons, the most frequent first, with the last evaluation of each."""
    groups = by_reason(evaluations)[:_MOST_FAILURES]
    return [{"reason": reason, "count": len(group), "last": group[-1]} for reason, group in groups]


def _packed(text: str | bytes) -> str:
    """Return a text compressed, for the page to unpack: plotly.js takes 2 MB like this, and 4.8 MB otherwise."""
    content = text.encode() if isinstance(text, str) else text
    return base64.b64encode(zlib.compress(content, 6)).decode()


def _plotly() -> bytes:
    """Return the script that draws; plotly itself, which takes 0.4 s to import, is not needed."""
    package = importlib.util.find_spec("plotly")
    if package is None or package.origin is None:
        raise UsageError("the report needs the package plotly: pip install plotly")
    return (Path(package.origin).parent / "package_data" / "plotly.min.js").read_bytes()
