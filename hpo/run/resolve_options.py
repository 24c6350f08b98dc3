"""Resolve the options of a session: given now, kept from the previous session, or defaults."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from hpo.errors import UsageError
from hpo.layout import Layout
from hpo.options import RECORDED_OPTIONS, Options, format_value, read_kept_options
from hpo.store.manifest import Manifest
from hpo.store.run_dir import RunDir
from hpo.text_format import format_count, make_printable

_AMOUNTS = ("evaluations", "confirm_seeds", "top_n")  # Losses remain comparable if these change.


def resolve_options(given: Mapping[str, Any], ranks: int) -> tuple[Options, Layout]:
    """Return all options of a session, and its layout.

    A resumed run keeps the options of its previous session, unless they are given again. It has at
    least one island per propagator, but at most one per worker. Its workers keep their number of
    ranks, on which losses may depend, if this divides the number of ranks.

    Args:
        given: The fields of `Options` that the user has given.

    Raises:
        UsageError: An option is not valid, or two options exclude each other.
    """
    if "evaluations" in given and "generations" in given:
        raise UsageError(
            "--evaluations and --generations exclude each other, "
            f"got {given['evaluations']} and {given['generations']}. "
            "--generations G means G evaluations per worker"
        )
    previous = _read_manifest(given)
    last = {} if previous is None else previous.sessions[-1].options
    kept = read_kept_options(last)
    kept_islands = kept.pop("islands", None)
    options = Options(**{**kept, **given})
    # A resumed run may have fewer workers than propagators: the first propagators then continue.
    named = () if last else given.get("propagators", ())
    if options.islands is not None and len(named) > options.islands:
        raise UsageError(
            f"--propagators {','.join(named)}: each propagator needs its own island, "
            f"and --islands is {options.islands}"
        )
    size = options.ranks_per_worker
    if size is None and previous is not None and ranks % previous.layout.ranks_per_worker == 0:
        size = previous.layout.ranks_per_worker
    layout = Layout.choose(ranks, size, options.islands, named)
    if last and options.islands is None:
        islands = max(kept_islands or 2, len(options.propagators))
        layout = replace(layout, islands=min(islands, layout.workers))
        options = replace(options, islands=islands if kept_islands else None)
    if options.generations is not None:
        options = replace(options, evaluations=options.generations * layout.workers)
    return options, layout


def _read_manifest(given: Mapping[str, Any]) -> Manifest | None:
    """Return the manifest of the previous session; None if no run is resumed."""
    run_dir = given.get("run_dir")
    if not given.get("resume") or run_dir is None:
        return None
    path = RunDir(run_dir).run_json
    with suppress(OSError):  # `RunDir.check_usable` reports a directory that cannot be used.
        if not path.exists():
            return None
        manifest = RunDir(run_dir).read_manifest()
        options = manifest.sessions[-1].options
        if missing := sorted(RECORDED_OPTIONS.keys() - options.keys()):
            raise UsageError(
                f"{path}: 'options' of the last session must have {', '.join(missing)}. "
                "Restore the file"
            )
        return manifest
    return None


def describe_worker_size(before: Layout, now: Layout) -> str:
    """Return a line of text if workers have another number of ranks than before, else ""."""
    if before.ranks_per_worker == now.ranks_per_worker:
        return ""
    return (
        f"workers had {format_count(before.ranks_per_worker, 'rank')} before, and have "
        f"{now.ranks_per_worker} now: losses may not be comparable"
    )


def describe_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return a line of text for each kept option that has changed since the previous session.

    Amounts such as --evaluations are left out. The options are JSON values.
    """
    lines = []
    for name, option in RECORDED_OPTIONS.items():
        is_compared = option.is_kept and name not in _AMOUNTS and name in before
        if is_compared and before[name] != now[name]:
            hint = ": losses may not be comparable" if name == "seed" else ""
            then = _describe_value(name, before[name])
            value = _describe_value(name, now[name])
            lines.append(
                make_printable(f"{option.name} was {then} before, and is {value} now{hint}")
            )
    return lines


def _describe_value(name: str, value: Any) -> str:
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return "off" if value == RECORDED_OPTIONS[name].default else "on"
    return format_value(value)
