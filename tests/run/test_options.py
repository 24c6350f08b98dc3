"""Test options, --enqueue files, run directories and durations."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from hpo import Float, Int, SearchSpace
from hpo.errors import UsageError
from hpo.options import Options
from hpo.run.initial_evaluations import read_enqueued
from hpo.run.resolve_options import resolve_options
from hpo.store.manifest import FORMAT
from hpo.store.pruning import make_pruner
from hpo.store.run_dir import RunDir, write_json
from hpo.text_format import format_duration


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"evaluations": 3, "generations": 2},
            "--evaluations and --generations exclude each other, got 3 and 2",
        ),
        ({"evaluations": 0}, "--evaluations must be at least 1 and less than 2**63, got 0"),
        ({"generations": -1}, "--generations must be at least 1 and less than 2**63, got -1"),
        ({"top_n": 0}, "--top-n must be at least 1 and less than 2**63, got 0"),
        ({"seed": -1}, "--seed must be at least 0 and less than 2**63, got -1"),
        ({"migration_probability": 1.5}, "--migration-probability must be from 0 to 1, got 1.5"),
        (
            {"migration_probability": float("nan")},
            "--migration-probability must be from 0 to 1, got nan",
        ),
        ({"resume": True}, "--resume must be used with --run-dir"),
        ({"seed": 2**63}, "--seed must be at least 0 and less than 2**63, got 9223372036854775808"),
        (
            {"storage": "study.db"},
            "--storage must be the URL of an Optuna storage, such as sqlite:///study.db",
        ),
        ({"target_loss": float("inf")}, "--target-loss must be a finite number, got inf"),
        ({"propagators": ("ga", "gaa")}, "--propagators must be among ga, tpe, cmaes"),
        ({"propagators": ("ga", ""), "islands": 2}, ", got ''"),
        (
            {"propagators": ("ga", "tpe"), "islands": 1},
            "--propagators ga,tpe: each propagator needs its own island, and --islands is 1",
        ),
        (
            {"propagators": ("ga", "tpe", "pso"), "islands": 2},
            "--propagators ga,tpe,pso: each propagator needs its own island, and --islands is 2",
        ),
        (
            {"log_level": "loud"},
            "--log-level must be one of debug, info, warning, error, got 'loud'",
        ),
    ],
)
def test_options_with_invalid_value_raise(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as raised:
        resolve_options({"search_space": Path("search.py"), **options}, ranks=4)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    "name", ["", "medium", "percentile", "percentile:0", "percentile:100", "percentile:x", "Median"]
)
def test_options_with_unknown_pruner_raise(name: str) -> None:
    with pytest.raises(UsageError, match=f"asha, hyperband or one-epoch, got '{name}'"):
        Options(Path("s.py"), pruner=name)


@pytest.mark.parametrize(
    "name", ["none", "median", "asha", "hyperband", "one-epoch", "percentile:0.5", "percentile:99"]
)
def test_known_pruner_is_made(name: str) -> None:
    options = Options(Path("s.py"), pruner=name)
    assert (make_pruner(options.pruner, budget=8) is None) == (name == "none")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[", "cannot be read: Expecting value"),
        ("[" * 100_000, "cannot be read: (maximum recursion depth exceeded|Stack overflow)"),
        (f'["{"x" * 100_000}"]', r"entry 1: must be an object, got 'x{200,300}\.\.\.$"),
        ("{}", r'must have a list of objects, such as \[{"layers": \d, "lr": 0\.\d+}\]'),
        ("[]", "must have a list of objects"),
        ("[3]", "entry 1: must be an object, got 3"),
        ('[{}, {"lr": 2}]', r"entry 2: parameter 'lr' must be in Float\(0.0, 1.0\), got 2"),
        ('[{"layers": "3"}]', "entry 1: parameter 'layers' must be in Int"),
        ('[{"layer": 3}]', "entry 1: unknown parameter 'layer'; this space has layers, lr"),
    ],
)
def test_read_enqueued_invalid_file_raises(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "enqueue.json"
    path.write_text(content)
    with pytest.raises(UsageError, match=message):
        read_enqueued(str(path), SearchSpace(layers=Int(1, 5), lr=Float(0.0, 1.0)), seed=0)


def test_read_enqueued_draws_the_same_missing_values(tmp_path: Path) -> None:
    path, space = str(tmp_path / "enqueue.json"), SearchSpace(layers=Int(1, 5), lr=Float(0.0, 1.0))
    content = (
        '[{"layers": 2}, {"lr": 1}, {"layers": 3, "lr": 0.12345678901234567}, '
        '{"layers": 2, "lr": 1.0}]'
    )
    Path(path).write_text(content)
    first, second, third, _ = enqueued = read_enqueued(path, space, seed=0)
    assert enqueued == read_enqueued(path, space, seed=0) != read_enqueued(path, space, seed=1)
    assert enqueued == read_enqueued(f" {content}", space, seed=0)
    assert (first["layers"], second["lr"], third) == (2, 1.0, {"layers": 3, "lr": 0.123456789012})
    for params in enqueued:
        space.check(params)


def test_options_without_islands_leave_them_open() -> None:
    assert Options(Path("s.py"), propagators=("ga", "tpe", "pso")).islands is None


def test_generations_are_evaluations_per_worker() -> None:
    def count(**given: int) -> int:
        options, layout = resolve_options({"search_space": Path("s.py"), **given}, ranks=8)
        assert layout.workers == 4
        return options.evaluations

    assert [count(generations=3), count(evaluations=10), count()] == [12, 10, 64]


def test_check_usable_refuses_unusable_run_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"must be a directory, got .*is a file"):
        RunDir(tmp_path / "file").check_usable(resume=False)
    with pytest.raises(UsageError, match="is a file"):
        RunDir(tmp_path / "file" / "run").check_usable(resume=False)
    with pytest.raises(UsageError, match="File name too long"):
        RunDir(tmp_path / ("x" * 300)).check_usable(resume=False)
    used = RunDir(tmp_path / "used")
    used.check_usable(resume=False)
    used.check_usable(resume=True)
    used.path.mkdir()
    write_json(used.run_json, {"format": FORMAT, "space": {}})
    used.check_usable(resume=True)
    with pytest.raises(
        UsageError, match=r"already holds a run: add --resume .*, or name another directory"
    ):
        used.check_usable(resume=False)
    with pytest.raises(UsageError, match=r"run.json: 'space' must be an object of texts, got {}"):
        used.read_manifest()
    for earlier, shown in (
        ({"space": {"x": "Int(1, 9)"}}, "none"),
        ({"format": FORMAT - 1}, f"{FORMAT - 1}"),
        ({"format": "2"}, "'2'"),
    ):
        write_json(used.run_json, earlier)
        with pytest.raises(
            UsageError,
            match=f"'format' must be {FORMAT}, got {shown}. Another version .*start a new run",
        ):
            used.read_manifest()
    used.run_json.write_text("{")
    with pytest.raises(UsageError, match=r"run.json cannot be read"):
        used.read_manifest()
    with pytest.raises(UsageError, match="holds no run"):
        RunDir(tmp_path / "none").read_manifest()


def test_write_json_replaces_the_file_atomically(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_text() == '{\n  "a": 1\n}\n'
    assert (path.stat().st_mode & 0o777) == 0o666 & ~_umask()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0 s"),
        (59.4, "59.4 s"),
        (61, "1 min 01 s"),
        (3600, "1 h 00 min"),
        (200_000, "2 d 07 h"),
    ],
)
def test_format_duration_uses_two_units(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
