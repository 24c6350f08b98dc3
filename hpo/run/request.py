"""What a person asks of a run, resolved once: options that are not given are as in earlier sessions, or defaults."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from hpo.breeding.propagator_names import (
    DEFAULT_PROPAGATORS,
    MULTI_OBJECTIVE_PROPAGATORS,
    NUMERIC_PROPAGATORS,
    PBT_PROPAGATORS,
    PROPAGATORS,
)
from hpo.constraint_set import ConstraintSet
from hpo.errors import RunError, UsageError
from hpo.layout import Layout
from hpo.objectives import Objectives
from hpo.parameters import Categorical
from hpo.problem import AskTemplate, Problem, SearchDescription, load_description
from hpo.run.enqueue import read_enqueued
from hpo.run.options import DEFAULT_EVALUATIONS, DEFAULT_PRUNER, Options
from hpo.run.warm_start import WarmStart, read_warm_start
from hpo.space import SearchSpace
from hpo.store.manifest import Manifest
from hpo.store.run_dir import RunDir
from hpo.store.storage_url import resolve_url
from hpo.text_format import format_repr

T = TypeVar("T")


@dataclass(frozen=True)
class RunRequest:
    """A run as it is to be, on the first rank; `before` is the run.json of the run to resume, if there is one.

    `storage` is None where the study is in the run directory; `set` has all settings that were given as texts, now or
    in earlier sessions. `given` are hyperparameters to start with, `takeover` is what is taken over.
    """

    options: Options
    layout: Layout
    problem: Problem
    previous: Manifest | None
    budget: int
    seed: int
    propagators: tuple[str, ...]
    pruner: str
    confirm_seeds: int
    pbt: bool
    storage: str | None
    setting_texts: Mapping[str, str]
    enqueued: list[dict[str, Any]]
    warm_start: WarmStart | None

    @property
    def setting_assignments(self) -> list[str]:
        """NAME=VALUE for all settings that were given."""
        return _format_assignments(self.setting_texts)


def resolve_request(options: Options, layout: Layout, ask: AskTemplate, constraints: ConstraintSet) -> RunRequest:
    """Return what a run is started with, read and checked; ``resolve(options, layout, ask, constraints)``.

    `ask` sends requests to the template: "load", "check_setting" for each setting, then "bind", once. After that,
    `constraints` is asked about the rules of the space, unless it has none. The problem that is returned keeps both.

    Raises UsageError if the user has to correct something first.
    """
    from hpo.store.pruning import make_pruner  # Optuna, which takes 0.3 s

    file = load_description(options.search_space, ask, constraints, options.source)
    check_script(options, file)
    before = _read_previous_manifest(options, file)
    for assignment in options.settings:
        file.check_setting(assignment)
    texts = {**(before.set if before else {}), **dict(text.split("=", 1) for text in options.settings)}
    problem = file.bind_settings(_format_assignments(texts))
    seed = _choose_value(options.seed, before.seed if before else None, 0)
    propagators = options.propagators or (before.propagators if before else DEFAULT_PROPAGATORS)
    check_space(propagators, file.space)
    check_objectives(propagators, file.objectives)
    pruner = _choose_value(options.pruner, before.pruner if before else None, DEFAULT_PRUNER)
    budget = _choose_value(
        options.compute_budget(layout.workers), before.budget if before else None, DEFAULT_EVALUATIONS
    )
    make_pruner(pruner, budget)
    storage = _choose_value(options.storage, before.storage if before else None, None)
    confirm = _choose_value(options.confirm_seeds, before.confirm_seeds if before else None, 0)
    inherit = _choose_value(options.pbt, before.pbt if before else None, False)
    if inherit:
        check_pbt(file, propagators, options.checkpoint_every)
        check_with_heirs(pruner, confirm, "--pbt")
    return RunRequest(
        options=options,
        layout=layout,
        problem=problem,
        previous=before,
        budget=budget,
        seed=seed,
        propagators=propagators,
        pruner=pruner,
        confirm_seeds=confirm,
        pbt=inherit,
        storage=resolve_url(storage) if storage is not None else None,
        setting_texts=texts,
        enqueued=read_enqueued(options.enqueue, file.space, seed) if options.enqueue is not None else [],
        warm_start=read_warm_start(options.warm_start, file.space, file.objectives)
        if options.warm_start is not None
        else None,
    )


def _format_assignments(texts: Mapping[str, str]) -> list[str]:
    return [f"{name}={text}" for name, text in texts.items()]


def _choose_value(now: T | None, before: T | None, default: T) -> T:
    return now if now is not None else before if before is not None else default


def _read_previous_manifest(options: Options, file: SearchDescription) -> Manifest | None:
    """Return the run.json of the run to resume; None without one. Raises UsageError if its search space is another."""
    if not options.resume or options.run_dir is None or not RunDir(options.run_dir).run_json.exists():
        return None
    run_dir = RunDir(options.run_dir)
    manifest = run_dir.read_manifest()
    for name in manifest.propagators:
        if name not in PROPAGATORS:
            raise UsageError(
                f"{run_dir.run_json} is not as a run has written it: 'propagators' has {format_repr(name)}, and "
                f"there are "
                f"{', '.join(PROPAGATORS)}"
            )
    _check_settings(manifest, options, file, run_dir)
    before, now = manifest.space, file.space.describe()
    for name in [*before, *now]:
        if before.get(name) != now.get(name):
            raise UsageError(
                f"--resume: the run in {run_dir.path} has another search space: parameter {name!r} was "
                f"{before.get(name, 'not in it')}, and is {now.get(name, 'not in it')} in {file.path}"
            )
    if manifest.objectives != file.objectives:
        then, here = (", ".join(one.describe()) for one in (manifest.objectives, file.objectives))
        raise UsageError(
            f"--resume: the run in {run_dir.path} has other objectives: they were {then}, and are {here} in "
            f"{file.path}; another run takes its evaluations over with --warm-start {run_dir.path}"
        )
    return manifest


def _check_settings(manifest: Manifest, options: Options, file: SearchDescription, run_dir: RunDir) -> None:
    """Raise a UsageError where the search space file no longer takes a setting of an earlier session."""
    here = {assignment.split("=", 1)[0] for assignment in options.settings}
    try:
        for name, text in manifest.set.items():
            if name not in here:
                file.check_setting(f"{name}={text}")
    except UsageError as error:
        raise UsageError(
            f"--resume: {error}; an earlier session was given it: change it in 'set' of {run_dir.run_json}, or what "
            f"{file.path} takes"
        ) from error


def check_script(options: Options, file: SearchDescription) -> None:
    """Raise a UsageError for options that a program cannot follow: it keeps its weights and states itself."""
    for option, is_given in (("--elastic", options.elastic), ("--pbt", options.pbt)):
        if file.script is not None and is_given:
            raise UsageError(f"{option}: {file.script.name} is a program, which does not save what others go on from")
    if file.script is not None and options.confirm_seeds and not file.script.has_placeholder("seed"):
        raise UsageError(
            f"--confirm-seeds {options.confirm_seeds}: {file.script.name} is to be trained with other seeds; give "
            f"them a place in "
            "its command, such as --seed {seed}"
        )


def check_pbt(file: SearchDescription, propagators: Sequence[str], checkpoint_every: float | None) -> None:
    """Raise a UsageError where individuals cannot inherit."""
    space = file.space
    if file.objectives.is_multi_objective:
        raise UsageError(
            f"--pbt: it keeps what the individuals with the lowest losses have learned, and {file.path} has the "
            f"objectives {', '.join(file.objectives.describe())}"
        )
    if len(space.immutable_names) == len(space.parameters):
        name = next(iter(space.parameters))
        raise UsageError(
            "--pbt: no parameter is mutable; mark those that can change while a network trains, such as a learning "
            f"rate: {name}={str(space.parameters[name])[:-1]}, mutable=True)"
        )
    for propagator in propagators:
        if propagator not in PBT_PROPAGATORS:
            raise UsageError(
                f"--propagators must be among {', '.join(PBT_PROPAGATORS)} with --pbt, got {propagator}. It takes "
                f"a loss "
                "that was inherited for the merit of hyperparameters."
            )
    if checkpoint_every == math.inf:
        raise UsageError("--pbt and --checkpoint-every off: only what is saved can be inherited")


def check_with_heirs(pruner: str, confirm: int, inherits: str, instead: str = "") -> None:
    """Raise a UsageError for options that make no sense if evaluations inherit.

    `inherits` says why they do, and `instead` what would work in place of the option.
    """
    if pruner != "none":
        raise UsageError(
            f"{inherits} and --pruner {pruner}: who inherits is ahead of who begins anew after as many epochs, so that "
            f"they do not compare: {f'give --pruner none, or {instead}' if instead else 'choose one of the two'}"
        )
    if confirm:
        raise UsageError(
            f"{inherits} and --confirm-seeds {confirm}: what an individual has inherited is not trained again with "
            f"other "
            f"seeds{f': give --confirm-seeds 0, or {instead}' if instead else ''}"
        )


def check_objectives(propagators: Sequence[str], objectives: Objectives) -> None:
    """Raise a UsageError where one of the propagators cannot search for several objectives."""
    for propagator in propagators if objectives.is_multi_objective else ():
        if propagator not in MULTI_OBJECTIVE_PROPAGATORS:
            raise UsageError(
                f"--propagators {propagator}: it minimises one loss, and this search has the objectives "
                f"{', '.join(objectives.describe())}; {', '.join(MULTI_OBJECTIVE_PROPAGATORS)} take several"
            )


def check_space(propagators: Sequence[str], space: SearchSpace) -> None:
    """Raise a UsageError where rules leave nothing of the space, or one of the propagators cannot search it."""
    try:
        space.check_constraints()
    except (ValueError, RunError) as error:  # They are unsound, or crash the process that they run in.
        raise UsageError(str(error)) from error
    for propagator in propagators:
        for name, parameter in space.parameters.items():
            if propagator in NUMERIC_PROPAGATORS and isinstance(parameter, Categorical):
                raise UsageError(
                    f"--propagators {propagator}: it searches numbers, and parameter {name!r} is {parameter!r}; "
                    "ga and tpe search any space"
                )
