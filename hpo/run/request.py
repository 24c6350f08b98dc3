"""Load what a run needs besides its options, and check that the options fit the search file."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpo.errors import RunError, UsageError
from hpo.layout import Layout
from hpo.objectives import Objectives
from hpo.options import (
    MULTI_OBJECTIVE_PROPAGATORS,
    NUMERIC_PROPAGATORS,
    PBT_PROPAGATORS,
    Options,
)
from hpo.problem import AskTemplate, Problem, SearchDescription, load_description
from hpo.run.initial_evaluations import (
    WarmStart,
    parse_warm_start_values,
    read_enqueued,
    read_warm_start,
)
from hpo.space import Categorical, ConstraintSet, Float, SearchSpace
from hpo.store.manifest import Manifest
from hpo.store.run_dir import RunDir
from hpo.store.storage_url import resolve_url


@dataclass(frozen=True)
class RunRequest:
    """A run to start or to resume, with all that its options name, on the first rank."""

    options: Options
    layout: Layout
    problem: Problem
    previous: Manifest | None
    """The manifest of the run to resume; None for a new run."""
    storage: str | None
    """The URL of the storage; None if the study is in the run directory."""
    setting_texts: Mapping[str, str]
    """The settings that were given in this or an earlier session, by name."""
    prior_params: dict[str, Any]
    """The hyperparameters that the priors expect to be good; empty without priors."""
    enqueued: list[dict[str, Any]]
    """The sets of hyperparameters in the file of --enqueue."""
    warm_start: WarmStart | None
    """The evaluations to import; None without --warm-start."""
    hazards: Mapping[str, str]
    """Why trainers must import a package of the search file themselves; "it" is the file itself."""


def make_request(
    options: Options, layout: Layout, ask: AskTemplate, constraints: ConstraintSet
) -> RunRequest:
    """Load the search file, and check that the options fit it.

    Args:
        ask: Sends requests to the template: "load", "check_setting" for each setting, and "bind"
            once, with all settings.
        constraints: Checks the constraints of the space. It can be used only after the request
            "bind".

    Raises:
        UsageError: An option, a setting or the search file is not valid.
    """
    file = load_description(options.search_space, ask, constraints, options.source)
    check_script(options, file)
    before = _read_previous_manifest(options, file, ask)
    for assignment in options.settings:
        ask("check_setting", assignment=assignment)
    texts = dict(before.set) if before else {}
    for assignment in options.settings:
        name, _, text = assignment.partition("=")
        texts[name] = text
    assignments = [f"{name}={text}" for name, text in texts.items()]
    bound = ask("bind", assignments=assignments)
    problem = Problem(file, bound["values"], tuple(assignments))
    check_space(options.propagators, file.space)
    check_objectives(options.propagators, file.objectives)
    if options.pbt:
        check_pbt(file, options.propagators, options.checkpoint_every)
        check_with_heirs(options.pruner, options.confirm_seeds, "--pbt")
    enqueued = []
    if options.enqueue is not None:
        enqueued = read_enqueued(options.enqueue, file.space, options.seed)
    warm_start = None
    if options.warm_start is not None:
        values = parse_warm_start_values(options.warm_start_values, file.space)
        warm_start = read_warm_start(options.warm_start, file.space, file.objectives, values)
    storage = options.storage or (before.storage if before else None)
    priors = {}
    if file.space.priors:
        try:
            priors = file.space.draw_priors(random.Random(f"{options.seed}/priors"))
        except ValueError as error:
            raise UsageError(f"{file.path}: the priors: {error}") from error
    return RunRequest(
        options=options,
        layout=layout,
        problem=problem,
        previous=before,
        storage=resolve_url(storage) if storage is not None else None,
        setting_texts=texts,
        prior_params=priors,
        enqueued=enqueued,
        warm_start=warm_start,
        hazards={**({"it": bound["unsafe"]} if bound["unsafe"] else {}), **bound["skipped"]},
    )


def _read_previous_manifest(
    options: Options, file: SearchDescription, ask: AskTemplate
) -> Manifest | None:
    """Return the manifest of the run to resume; UsageError if it does not fit the file."""
    if not options.resume or options.run_dir is None:
        return None
    run_dir = RunDir(options.run_dir)
    if not run_dir.run_json.exists():
        return None
    manifest = run_dir.read_manifest()
    if difference := manifest.find_difference(file.space.describe()):
        raise UsageError(
            f"--resume: the run in {run_dir.path} has another search space: {difference} in "
            f"{file.path}"
        )
    _check_settings(manifest, options, file, run_dir, ask)
    if manifest.objectives != file.objectives:
        names_before = ", ".join(manifest.objectives.describe())
        names_now = ", ".join(file.objectives.describe())
        raise UsageError(
            f"--resume: the run in {run_dir.path} has other objectives: they were {names_before}, "
            f"and are {names_now} in {file.path}. To use its evaluations, start another run with "
            f"--warm-start {run_dir.path}"
        )
    return manifest


def _check_settings(
    manifest: Manifest,
    options: Options,
    file: SearchDescription,
    run_dir: RunDir,
    ask: AskTemplate,
) -> None:
    """Raise a UsageError if the search file no longer accepts a setting of an earlier session."""
    given_again = {assignment.split("=", 1)[0] for assignment in options.settings}
    try:
        for name, text in manifest.set.items():
            if name not in given_again:
                ask("check_setting", assignment=f"{name}={text}")
    except UsageError as error:
        raise UsageError(
            f"--resume: {error}. The setting was given in an earlier session: change it in 'set' "
            f"of {run_dir.run_json}, or change {file.path} to accept it"
        ) from error


def check_script(options: Options, file: SearchDescription) -> None:
    """Raise a UsageError for options that a program as objective cannot support."""
    if file.script is None:
        return
    if options.pbt:
        raise UsageError(
            f"--pbt must not be given for a program, got {file.script.name}. Only objective "
            "functions save checkpoints that other individuals can use"
        )
    if options.confirm_seeds and not file.script.has_placeholder("seed"):
        raise UsageError(
            f"--confirm-seeds {options.confirm_seeds}: the command of {file.script.name} must have "
            "a placeholder for the seed, such as --seed {seed}"
        )


def check_pbt(
    file: SearchDescription, propagators: Sequence[str], checkpoint_every: float | None
) -> None:
    """Raise a UsageError if this search does not support population based training (--pbt)."""
    space = file.space
    if file.objectives.is_multi_objective:
        raise UsageError(
            "--pbt must be used with the loss as the only objective, since the parents are the "
            f"individuals with the lowest losses. {file.path} has the objectives "
            f"{', '.join(file.objectives.describe())}"
        )
    if len(space.immutable_names) == len(space.parameters):
        numbers = [name for name, each in space.parameters.items() if isinstance(each, Float)]
        name = next(iter(numbers or space.parameters))
        raise UsageError(
            "--pbt must be used with at least one mutable parameter, such as a learning rate, "
            "which can change while a network trains. Write for example "
            f"{name}={str(space.parameters[name])[:-1]}, mutable=True)"
        )
    for propagator in propagators:
        if propagator not in PBT_PROPAGATORS:
            raise UsageError(
                f"--propagators must be among {', '.join(PBT_PROPAGATORS)} with --pbt, got "
                f"{propagator}. It would explain a loss by the hyperparameters alone, without the "
                "inherited weights."
            )
    if checkpoint_every == math.inf:
        raise UsageError(
            "--pbt and --checkpoint-every off exclude each other: only checkpoints can be "
            "inherited. Give one of them"
        )


def check_with_heirs(pruner: str, confirm_seeds: int, reason: str, remedy: str = "") -> None:
    """Raise a UsageError if an option cannot be used with evaluations that inherit weights.

    `reason` begins the message, such as "--pbt". `remedy` is an alternative to a changed option.
    """
    if pruner != "none":
        raise UsageError(
            f"{reason} and --pruner {pruner} exclude each other: after the same number of epochs, "
            "an individual with inherited weights is ahead of others. "
            f"{f'Give --pruner none, or {remedy}' if remedy else 'Give one of them'}"
        )
    if confirm_seeds:
        raise UsageError(
            f"{reason} and --confirm-seeds {confirm_seeds} exclude each other: inherited weights "
            "are not trained again with other seeds. "
            f"{f'Give --confirm-seeds 0, or {remedy}' if remedy else 'Give one of them'}"
        )


def check_objectives(propagators: Sequence[str], objectives: Objectives) -> None:
    """Raise a UsageError if there are several objectives and a propagator supports only one."""
    for propagator in propagators if objectives.is_multi_objective else ():
        if propagator not in MULTI_OBJECTIVE_PROPAGATORS:
            raise UsageError(
                f"--propagators must be among {', '.join(MULTI_OBJECTIVE_PROPAGATORS)} for several "
                f"objectives, got {propagator} for {', '.join(objectives.describe())}"
            )


def check_space(propagators: Sequence[str], space: SearchSpace) -> None:
    """Raise a UsageError if the constraints cannot be used, or a propagator does not fit."""
    try:
        space.check_constraints()
    # They are unsound, or crash the process in which they run.
    except (ValueError, RunError) as error:
        raise UsageError(str(error)) from error
    for propagator in propagators:
        for name, parameter in space.parameters.items():
            if propagator in NUMERIC_PROPAGATORS and isinstance(parameter, Categorical):
                raise UsageError(
                    f"--propagators {propagator} must be used with numbers and ordinals only, got "
                    f"{name!r}, which is {parameter!r}. Use ga or tpe, which support any space"
                )
