"""Test the sweeper for Hydra on a Hydra application."""

from __future__ import annotations

import itertools
import re
import shlex
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
        "hydra.sweeper.evaluations=4",
    ]
    job = _sweep(tmp_path, *arguments)
    assert job.returncode == 0, job.stderr
    more = _sweep(tmp_path, *arguments[:-1], "hydra.sweeper.evaluations=5")
    assert more.returncode == 0, more.stderr
    assert "resumed after 4 evaluations" in more.stdout
    run = RunReader(tmp_path / _OUT)
    evaluations = run.read_evaluations()
    assert len(evaluations) == 5
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
            failure = each.failure or ""
            assert re.search(r"hydra_app\.py:\d+: ValueError: too many layers$", failure), failure
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
        *("lr=interval(1e-4,1e-1)", "optimizer.layers=choice(6,8)", "hydra.sweeper.evaluations=4"),
        *("hydra.sweeper.max_failure_rate=0.1", "hydra.sweeper.propagators=random"),
    )
    evaluations = RunReader(tmp_path / _OUT).read_evaluations()
    failed = sum(each.state == "failed" for each in evaluations)
    assert 0 < failed < 4
    assert all(len(each.curve) == 3 for each in evaluations if each.state == "complete")
    assert f"{failed} of 4 evaluations have failed" in job.stderr
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


def _propose(app: Path, *overrides: str) -> list[str]:
    """Return what a sweep without anything to search proposes."""
    command = [sys.executable, str(app), "--multirun", "hydra/sweeper=hpo", *overrides]
    job = subprocess.run(
        command, cwd=app.parent, capture_output=True, text=True, timeout=scale(60), check=False
    )
    assert (job.returncode, job.stdout) == (1, ""), job.stderr
    message, _, _ = job.stderr.partition("\n\n")
    return message.splitlines()


@pytest.mark.slow
def test_sweep_of_nothing_proposes_what_to_search() -> None:
    message, proposed, possible, other = _propose(_APP)
    assert message.startswith("the overrides have nothing to search. From the configuration, ")
    assert shlex.split(proposed) == ["lr=tag(log,interval(0.01,1.0))", "optimizer=adam,sgd"]
    assert possible == "And these are possible:"
    space = _Space(OverridesParser.create().parse_overrides(shlex.split(f"{proposed} {other}")))
    assert space.parameters == {
        "lr": Float(0.01, 1.0, log=True),
        "optimizer": Categorical("adam", "sgd"),
        "optimizer_layers": Int(1, 8, log=True),
    }
    _, proposed, *_ = _propose(_APP, "optimizer=sgd", "++epochs=3")
    assert shlex.split(proposed) == ["lr=tag(log,interval(0.01,1.0))"]


@pytest.mark.slow
def test_proposed_overrides_exist_with_each_choice(tmp_path: Path) -> None:
    """Only one optimizer has a momentum, only one model a group, and some cannot be composed."""
    files = {
        "config": "defaults: [optimizer: sgd, model: mlp, logger: null, _self_]\n"
        "it's: 0.1\nclip: .inf\nsteps: 30000000000000000\ntrainer: {seed: 5, _partial_: true}",
        "optimizer/sgd": "# @package _global_\nlr: 0.1\nmomentum: 0.9",
        "optimizer/adam": "# @package _global_\nlr: 0.1",
        "optimizer/broken": "lr: [1",
        "optimizer/50": "# @package _global_\nlr: 0.1",
        "model/mlp": "width: 8",
        "model/resnet": "defaults: [block: basic, _self_]\nwidth: 8",
        "model/block/basic": "size: 3",
        "model/block/wide": "size: 4",
        "logger/csv": "each: 10",
        "logger/wandb": "each: 10",
    }
    for name, text in files.items():
        path = tmp_path / "conf" / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    app = tmp_path / "app.py"
    app.write_text(
        "from hydra import main as decorate\n"
        "@decorate(version_base=None, config_path='conf', config_name='config')\n"
        "def main(cfg): ...\n"
        "if __name__ == '__main__':\n    main()\n    print('it goes on')\n"
    )
    _, proposed, _, possible = _propose(app)
    assert shlex.split(f"{proposed} {possible}") == [
        "lr=tag(log,interval(0.01,1.0))",
        "optimizer=adam,sgd",
        "model=mlp,resnet",
        "model.width=tag(log,int(interval(2,32)))",
    ]


@pytest.mark.slow
def test_sweep_of_a_configuration_without_numbers_has_an_example(tmp_path: Path) -> None:
    app = tmp_path / "app.py"
    app.write_text("import hydra\n@hydra.main(version_base=None)\ndef main(cfg): ...\nmain()\n")
    (message,) = _propose(app)
    assert message.endswith(
        "Give an interval, a range or choices, such as 'lr=tag(log,interval(1e-4,1e-1))'"
    )
