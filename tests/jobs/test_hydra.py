"""Test the sweeper for Hydra on a Hydra application."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf

from hpo import Categorical, Float, Int, Ordinal
from hpo.results.reader import RunReader
from hpo.script_objective import _fill_placeholders, escape_placeholders
from hpo.space.parameters import Parameter
from hydra_plugins.hpo_sweeper import HpoSweeper, SweeperConfig, _Space
from tests.support.launch import SCRIPTS, Mpi
from tests.support.limits import scale

_APP = SCRIPTS / "hydra_app.py"
_OUT = "lr=0.1 (ü)"  # Hydra must get it in quotes.


def _sweep(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(_APP), *overrides, f"hydra.sweep.dir='{folder / _OUT}'"]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=scale(120), check=False
    )


def test_sweep_searches_the_overrides_and_is_resumed(mpi: Mpi, tmp_path: Path) -> None:
    arguments = [
        "-m",
        "hydra/sweeper=hpo",
        f"hydra.sweeper.launch='{mpi.mpirun} -n 2'",
        "lr=tag(log,interval(1e-4,1e-1))",
        "optimizer.layers=range(2,9,2)",
        "optimizer=adam,sgd",
        "note=${lr}",
        "hydra.sweeper.evaluations=6",
    ]
    job = _sweep(tmp_path, *arguments)
    assert job.returncode == 0, job.stderr
    more = _sweep(tmp_path, *arguments[:-1], "hydra.sweeper.evaluations=8")
    assert more.returncode == 0, more.stderr
    assert "resumed after 6 evaluations" in more.stdout
    run = RunReader(tmp_path / _OUT)
    evaluations = run.read_evaluations()
    assert len(evaluations) == 8
    assert {each.worker for each in evaluations} == {0, 1}
    for each in evaluations:
        params = each.params
        folder = tmp_path / _OUT / "trials" / str(each.trial)
        lines = OmegaConf.to_container(OmegaConf.load(folder / ".hydra/overrides.yaml"))
        given = dict(str(line).split("=", 1) for line in lines or ())
        assert given == {
            "lr": str(params["lr"]),
            "optimizer.layers": str(params["optimizer_layers"]),
            "optimizer": params["optimizer"],
            "note": "${lr}",
        }
        composed = OmegaConf.load(folder / ".hydra/config.yaml")
        assert composed.note == params["lr"]
        if params["optimizer_layers"] == 8:
            assert each.state == "failed"
            assert "too many layers" in (each.failure or "")
            continue
        loss = abs(params["lr"] - 0.01) + params["optimizer_layers"]
        assert each.loss == pytest.approx(loss + (params["optimizer"] == "sgd"))
        assert each.metrics == {"ranks": 1}
    best = run.find_winner()
    assert best is not None
    results = OmegaConf.load(tmp_path / _OUT / "optimization_results.yaml")
    assert results.best_evaluated_result == best.loss
    assert results.best_evaluated_params == {
        "lr": best.params["lr"],
        "optimizer.layers": best.params["optimizer_layers"],
        "optimizer": best.params["optimizer"],
    }


def test_sweep_of_a_configuration_runs_jobs_of_two_ranks(mpi: Mpi, tmp_path: Path) -> None:
    """The configuration selects the sweeper; a pruner would use the losses of each epoch."""
    launch = f"hydra.sweeper.launch='{mpi.mpirun} -n 2'"
    job = _sweep(tmp_path, "--config-name", "sweep", launch)
    assert job.returncode == 0, job.stderr
    evaluations = RunReader(tmp_path / _OUT).read_evaluations()
    assert len(evaluations) == 3
    for each in evaluations:
        score = abs(each.params["lr"] - 0.01) + 2
        assert each.loss == -score  # `maximize: true`
        assert each.metrics == {"score": score, "ranks": 2}
    results = OmegaConf.load(tmp_path / _OUT / "optimization_results.yaml")
    assert results.best_evaluated_result == max(-each.loss for each in evaluations)


def test_reported_losses_count_and_failures_end_the_sweep(mpi: Mpi, tmp_path: Path) -> None:
    job = _sweep(
        tmp_path,
        *("-m", "hydra/sweeper=hpo", f"hydra.sweeper.launch='{mpi.mpirun} -n 1'", "epochs=3"),
        *("lr=interval(1e-4,1e-1)", "optimizer.layers=choice(6,8)", "hydra.sweeper.evaluations=6"),
        *("hydra.sweeper.max_failure_rate=0.1", "hydra.sweeper.propagators=random"),
    )
    evaluations = RunReader(tmp_path / _OUT).read_evaluations()
    failed = sum(each.state == "failed" for each in evaluations)
    assert 0 < failed < 6
    assert all(len(each.curve) == 3 for each in evaluations if each.state == "complete")
    assert f"{failed} of 6 evaluations have failed" in job.stderr
    assert job.returncode == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["lr=0.1"], "the overrides have nothing to search"),
        (["lr=interval(1e-1,1e-4)"], "parameter 'lr': low must be less than high"),
        (["optimizer=adam,rmsprop"], "Could not find 'optimizer/rmsprop'"),
        (["lr=interval(0,1)", "hydra.sweeper.launch=nompi"], "nompi is not installed"),
    ],
)
def test_wrong_sweep_is_refused_before_it_starts(
    overrides: list[str], message: str, tmp_path: Path
) -> None:
    job = _sweep(tmp_path, "-m", "hydra/sweeper=hpo", *overrides)
    assert message in job.stderr
    assert job.returncode == 1
    assert not (tmp_path / _OUT / "run.json").exists()


def test_sweeps_become_hyperparameters() -> None:
    overrides = {
        "lr=tag(log,interval(1e-4,1e-1))": Float(1e-4, 1e-1, log=True),
        "width=int(interval(1,8))": Int(1, 8),
        "depth=range(1,8)": Int(1, 7),
        "even=range(2,9,2)": Int(2, 8, step=2),
        "down=range(10,1,-3)": Int(4, 10, step=3),
        "share=range(0,1,0.25)": Float(0.0, 0.75, step=0.25),
        "act=relu,tanh": Categorical("relu", "tanh"),
        "size=tag(ordinal,choice(16,32))": Ordinal(16, 32),
        "flag=true,false": Categorical(True, False),
        "+model.kind=null,'a b',[1,2]": Categorical("null", "'a b'", "[1,2]"),
        "trial=1,2": Categorical(1, 2),
        "lambda=1,2": Categorical(1, 2),
        "model_kind=a,b": Categorical("a", "b"),
    }
    space = _Space(OverridesParser.create().parse_overrides([*overrides, "one=choice(3)", "x=4"]))
    found: dict[str, Parameter] = {key: space.parameters[name] for name, key in space.keys.items()}
    assert found == {given.partition("=")[0]: each for given, each in overrides.items()}
    assert space.fixed == ["one=3", "x=4"]
    assert {"value_trial", "model_kind", "model_kind_"} < {*space.keys}


def test_the_last_override_of_a_key_counts() -> None:
    given = ["lr=interval(0,1)", "depth=range(1,8)", "lr=0.5"]
    space = _Space(OverridesParser.create().parse_overrides(given))
    assert (space.fixed, list(space.keys)) == (["lr=0.5"], ["depth"])
    with pytest.raises(HydraException, match="nothing to search"):
        _Space(OverridesParser.create().parse_overrides(["lr=0.5"]))


def test_braces_of_overrides_are_no_placeholders() -> None:
    for override in ("a=${lr}/{b: 1}", "p='a{2}'", "x={lr}"):
        assert _fill_placeholders(escape_placeholders(override), {"lr": 5}) == override


def test_settings_become_options_of_the_search(tmp_path: Path) -> None:
    settings = SweeperConfig(
        maximize=True,
        loss=r"acc=(\S+)",
        trackers=OmegaConf.create(["wandb", "tensorboard"]),
        propagators=OmegaConf.create(["ga", "tpe"]),
        enqueue=OmegaConf.create([{"lr": 0.1}]),
        as_json=False,
        pollination=False,
    )
    sweeper = HpoSweeper(**vars(settings))
    given = ["hydra/sweeper=hpo", "hydra.sweeper.seed=1", "hydra.job.name=x"]
    sweeper._config = OmegaConf.create({"hydra": {"overrides": {"hydra": given}}})
    space = _Space(OverridesParser.create().parse_overrides(["lr=interval(0,1)", "y=2"]))
    words = sweeper._make_search(space, tmp_path)
    options = words[2 : words.index("--")]
    pairs = [
        ("--space", "lr=Float(0.0, 1.0)"),
        ("--maximize", r"acc=(\S+)"),
        ("--enqueue", '[{"lr": 0.1}]'),
        ("--propagators", "ga,tpe"),
        ("--tracker", "wandb"),
        ("--tracker", "tensorboard"),
    ]
    assert set(pairs) <= set(itertools.pairwise(options))
    assert "--migration" in options
    assert not {"", "--json", "--loss"} & {*options}
    job = words[words.index("--") :]
    assert {"hydra.job.name=x", "y=2", "lr={lr}"} <= {*job}
    assert "hydra.sweeper.seed=1" not in job


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("x=range(5,5)", r"x=range\(5,5\) has no value"),
        ("x=tag(log,range(1,100,10))", "step"),
        ("x=tag(log,range(0.1,1,0.1))", "step"),
    ],
)
def test_range_that_cannot_be_searched_is_refused(override: str, message: str) -> None:
    with pytest.raises(HydraException, match=message):
        _Space(OverridesParser.create().parse_overrides([override])).list_examples()
