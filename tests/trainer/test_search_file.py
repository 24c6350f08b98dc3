from __future__ import annotations

import hashlib
import importlib
import os
import py_compile
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest

from hpo.errors import UsageError
from hpo.objectives import ONLY_LOSS, Objectives
from hpo.problem import Problem, SearchDescription
from hpo.trainer.search_file import load_search_file
from tests.support.in_process_template import (
    InProcessTemplate,
    describe_search_file,
    load_problem,
    send_through_json,
)
from tests.support.launch import ROOT

GOOD = """
from dataclasses import dataclass
from hpo import Float, SearchSpace

space = SearchSpace(x=Float(0.0, 1.0))

@dataclass(frozen=True)
class Settings:
    epochs: int = 3
    rate: float = 0.5
    fast: bool = False
    name: str = "n"
    sizes: tuple = ()

    def __post_init__(self):
        if self.epochs < 1:
            raise ValueError(f"epochs must be at least 1, not {self.epochs}")

def objective(params, worker, settings):
    return params["x"]
"""


def write(folder: Path, text: str, name: str = "search.py") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_settings_are_parsed_as_their_types(tmp_path: Path) -> None:
    search = load_search_file(write(tmp_path, GOOD))
    settings = search.bind_settings(
        ["epochs=5", "rate=1e-3", "fast=Yes", "name=a=b", "epochs=7"]
    ).settings
    assert (settings.epochs, settings.rate, settings.fast, settings.name) == (7, 0.001, True, "a=b")
    assert search.bind_settings([]).settings.epochs == 3


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        (
            "epoch=5",
            "no setting 'epoch'; did you mean epochs? it has epochs, rate, fast, name, sizes",
        ),
        ("epochs=5.5", "epochs takes a whole number, not '5.5'"),
        ("rate=fast", "rate takes a number, not 'fast'"),
        ("fast=maybe", "fast takes true or false, not 'maybe'"),
        ("epochs", "write --set NAME=VALUE, e.g. --set epochs=3"),
        ("sizes=3", "which cannot be given on the command line"),
        ("epochs=0", "epochs must be at least 1, not 0"),
    ],
)
def test_wrong_setting_raises_with_allowed_values(
    tmp_path: Path, assignment: str, message: str
) -> None:
    search = load_search_file(write(tmp_path, GOOD))
    with pytest.raises(UsageError) as raised:
        search.bind_settings([assignment])
    assert message in str(raised.value)
    with pytest.raises(UsageError) as of_rank:
        load_problem(search.path, assignment)
    assert str(of_rank.value) == str(raised.value)


def test_setting_for_a_file_without_settings_raises(tmp_path: Path) -> None:
    text = "from hpo import *\nspace = SearchSpace(x=Int(1, 2))\n"
    text += "def objective(params, worker): return 1.0\n"
    search = load_search_file(write(tmp_path, text))
    assert search.bind_settings([]).settings is None
    bound = search.bind_settings([])
    assert bound.file.objective({}, None, *bound.copy_settings()) == 1.0  # type: ignore[operator]
    assert load_problem(search.path).setting_values == {}
    with pytest.raises(UsageError, match="has no Settings"):
        search.bind_settings(["epochs=3"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no `space`"),
        ("space = 3", "`space` must be a SearchSpace, not 3"),
        ("from hpo import *\nspace = SearchSpace(x=Int(1, 2))", "has no `objective`"),
        (
            "from hpo import *\nspace = SearchSpace(x=Int(1, 2))\nobjective = 3",
            "must be a function or a Script, not 3",
        ),
        (GOOD + "\nSettings = {}", "Settings must be a dataclass"),
        (
            "from hpo import *\nspace = SearchSpace(x=Int(1, 2))\n"
            "async def objective(params, worker):\n    return 1",
            "`objective` must be a function without `async`",
        ),
        (GOOD + "\nprepare = 3", "prepare must be a function"),
        (
            GOOD + "\ndef prepare(): pass",
            "prepare is called as prepare(settings): too many positional arguments",
        ),
        (
            GOOD + "\ndef objective(params): pass",
            "objective is called as objective(params, worker, settings): "
            "too many positional arguments",
        ),
        (
            "from hpo import *\nspace = SearchSpace(lr=Float(1.0, 0.1))",
            "parameter 'lr': low must be less than high",
        ),
    ],
)
def test_load_of_a_file_without_a_search_raises(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(UsageError) as raised:
        load_search_file(path)
    assert str(path) in str(raised.value)
    assert message in str(raised.value)


def test_load_failure_shows_only_the_traceback_of_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "def broken():\n    return 1 / 0\n\nbroken()\n")
    with pytest.raises(UsageError) as raised:
        load_search_file(path)
    lines = str(raised.value).splitlines()
    assert lines[0] == f"{path} could not be imported:"
    assert lines[-1] == "ZeroDivisionError: division by zero"
    assert [line.split(", ")[1:] for line in lines if line.startswith("  File")] == [
        ["line 4", "in <module>"],
        ["line 2", "in broken"],
    ]
    with pytest.raises(UsageError, match="invalid syntax"):
        load_search_file(write(tmp_path, "def broken(:\n", "syntax.py"))


def test_traceback_shows_the_imported_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = GOOD + "\n\ndef prepare(settings):\n    return 1 / 0  # as imported\n"
    write(tmp_path, text, "relative.py")
    monkeypatch.chdir(tmp_path)
    search = load_search_file(Path("relative.py"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    write(tmp_path, "\n\n\n" + text.replace("as imported", "saved since"), "relative.py")
    assert (search.path, search.location) == (Path("relative.py"), tmp_path / "relative.py")
    assert search.source == text.encode()
    assert search.prepare is not None
    with pytest.raises(ZeroDivisionError) as raised:
        search.prepare(None)
    frame = traceback.extract_tb(raised.value.__traceback__)[-1]
    line = text.splitlines().index("    return 1 / 0  # as imported") + 1
    assert (frame.filename, frame.lineno, frame.line) == (
        str(tmp_path / "relative.py"),
        line,
        "return 1 / 0  # as imported",
    )


def test_load_ignores_bytecode_next_to_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    py_compile.compile(str(path), doraise=True)
    times = path.stat().st_atime_ns, path.stat().st_mtime_ns
    saved = GOOD.replace("Float(0.0, 1.0)", "Float(0.0, 2.0)")
    assert len(saved) == len(GOOD), "so that the bytecode seems to be of what was saved"
    os.utime(write(tmp_path, saved), ns=times)
    search = load_search_file(path)
    assert search.space.describe() == {"x": "Float(0.0, 2.0)"}
    assert search.source == saved.encode()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (b"x = '\xe9'\n", "('utf-8' codec can't decode byte 0xe9|Non-UTF-8 code starting with)"),
        (b"x = 1\0\n", "null bytes"),
    ],
    ids=["latin-1", "null"],
)
def test_load_of_a_file_that_is_not_text_raises(
    tmp_path: Path, source: bytes, message: str
) -> None:
    (tmp_path / "search.py").write_bytes(source)
    with pytest.raises(UsageError, match=message) as raised:
        load_search_file(tmp_path / "search.py")
    assert str(raised.value).startswith(f"{tmp_path / 'search.py'} could not be imported:\n")


def test_load_of_a_path_that_is_not_python_raises(tmp_path: Path) -> None:
    for path, message in (
        (tmp_path / "missing.py", "no such file"),
        (tmp_path, "is a folder"),
        (write(tmp_path, GOOD, "search.txt"), "not a Python file"),
    ):
        with pytest.raises(UsageError, match=message):
            load_search_file(path)


def test_search_file_imports_modules_next_to_it(tmp_path: Path) -> None:
    write(tmp_path, "bounds = (0.0, 2.0)\n", "my_bounds.py")
    text = "from hpo import *\nfrom my_bounds import bounds\n"
    text += "space = SearchSpace(x=Float(*bounds))\nobjective = print\n"
    assert load_search_file(write(tmp_path, text)).space.describe() == {"x": "Float(0.0, 2.0)"}


@pytest.mark.parametrize("name", ["digits_cnn", "mnist_cnn"])
def test_shipped_search_spaces_have_reference_hyperparameters(name: str) -> None:
    search = load_search_file(ROOT / "search_spaces" / f"{name}.py")
    assert list(search.space.parameters) == ["conv_layers", "activation", "lr", "gamma"]
    settings: Any = search.bind_settings(["epochs=3"]).settings
    assert settings.epochs == 3


def test_search_file_may_have_the_name_of_a_module_it_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "tabnanny", raising=False)
    write(tmp_path, "width = 3\n", "neighbour_of_tabnanny.py")
    text = f"import tabnanny, neighbour_of_tabnanny\n{GOOD}\nwidth = neighbour_of_tabnanny.width\n"
    search = load_search_file(write(tmp_path, text, "tabnanny.py"))
    objective: Any = search.objective
    assert (objective.__globals__["width"], objective({"x": 0.5}, None, None)) == (3, 0.5)
    assert objective.__globals__["tabnanny"].check, "the standard library's"


def test_search_file_is_imported_by_name_without_a_namesake(tmp_path: Path) -> None:
    search = load_search_file(write(tmp_path, GOOD, "a_name_that_no_module_has.py"))
    assert importlib.import_module("a_name_that_no_module_has").__file__ == str(search.location)


@pytest.mark.parametrize(
    ("code", "message"), [("'no data'", "'no data'"), ("", "None"), ("3", "3")]
)
def test_prepare_that_exits_raises_one_message(tmp_path: Path, code: str, message: str) -> None:
    search = load_search_file(
        write(tmp_path, f"{GOOD}\ndef prepare(settings):\n    raise SystemExit({code})\n")
    )
    with pytest.raises(UsageError) as raised:
        search.bind_settings([]).call_prepare()
    assert str(raised.value) == f"{search.path}: prepare called sys.exit({message})"


def test_description_has_all_that_a_rank_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f"{GOOD}\nfrom hpo import maximize\n"
    text += "objectives = ('loss', 'size', maximize('speed'))\ntest = print\n"
    text += "def prepare(settings): ...\n# \N{PILE OF POO}\n"
    (tmp_path / "a\udcff.py").write_text(text, "utf-8")
    monkeypatch.chdir(tmp_path)
    here = InProcessTemplate()
    file = here.load(Path("a\udcff.py"))
    assert (file.path, file.location) == (Path("a\udcff.py"), tmp_path / "a\udcff.py")
    assert (file.source, file.sha256) == (text.encode(), hashlib.sha256(text.encode()).hexdigest())
    assert file.space.describe() == {"x": "Float(0.0, 1.0)"}
    assert file.objectives == Objectives(("loss", "size", "speed"), ("speed",))
    assert (file.has_settings, file.has_prepare, file.has_test) == (True, True, True)
    here.ask("check_setting", assignment="epochs=5")
    with pytest.raises(UsageError, match="no setting 'epoch'"):
        here.ask("check_setting", assignment="epoch=5")
    assert here.ask("bind", assignments=["epochs=5", "fast=yes"])["values"] == {
        "epochs": 5,
        "rate": 0.5,
        "fast": True,
        "name": "n",
        "sizes": "()",
    }
    assert here.requests == ["load", "check_setting", "check_setting", "bind"]


def test_description_and_problem_survive_their_data(tmp_path: Path) -> None:
    file = describe_search_file(write(tmp_path, GOOD))
    assert (file.objectives, file.has_settings, file.has_prepare, file.has_test) == (
        ONLY_LOSS,
        True,
        False,
        False,
    )
    again = SearchDescription.from_data(send_through_json(file.data))
    assert again.data == file.data
    assert again.space.describe() == file.space.describe()
    assert repr(again) == repr(file)
    problem = load_problem(file.path, "rate=2")
    copied = Problem.from_data(send_through_json(problem.data))
    assert (copied.data, copied.space.describe()) == (problem.data, problem.space.describe())
    assert (copied.setting_values, copied.assignments) == (problem.setting_values, ("rate=2",))


@pytest.mark.parametrize("name", ["digits_cnn", "mnist_cnn", "cifar10_resnet", "text_transformer"])
def test_description_of_a_shipped_search_space_matches_the_file(name: str) -> None:
    path = ROOT / "search_spaces" / f"{name}.py"
    search, problem = load_search_file(path), load_problem(path)
    assert problem.space.describe() == search.space.describe()
    assert problem.space.immutable_names == search.space.immutable_names
    assert problem.space.constraint_texts == search.space.constraint_texts
    assert problem.file.has_test == (search.test is not None)
    assert problem.setting_values == search.bind_settings([]).values


def test_load_if_the_file_fails_gives_the_rank_its_traceback(tmp_path: Path) -> None:
    path = write(tmp_path, "def broken():\n    return 1 / 0\n\nbroken()\n")
    with pytest.raises(UsageError, match="ZeroDivisionError: division by zero") as raised:
        describe_search_file(path)
    assert str(raised.value).startswith(
        f"{path} could not be imported:\nTraceback (most recent call last):\n"
    )


@pytest.mark.slow
@pytest.mark.parametrize("is_early", [True, False])
def test_processes_of_joblib_use_classes_of_a_search_file(tmp_path: Path, is_early: bool) -> None:
    joblib = "from joblib import Parallel, delayed"
    (tmp_path / "beside.py").write_text("def triple(x):\n    return 3 * x\n")
    (tmp_path / "my_search.py").write_text(
        f"""{joblib if is_early else ""}
from dataclasses import dataclass
from beside import triple
from hpo import Int, SearchSpace

space = SearchSpace(k=Int(0, 9))

@dataclass
class Point:
    x: int

def double(point):
    return Point(2 * triple(point.x))

def objective(params, worker):
    {"pass" if is_early else joblib}
    return sum(point.x for point in Parallel(n_jobs=2)(delayed(double)(Point(x)) for x in range(4)))
"""
    )
    code = "from pathlib import Path; from hpo.trainer.search_file import load_search_file; "
    code += "print(load_search_file(Path('my_search.py')).objective({}, None))"
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (found.returncode, found.stdout) == (0, "36\n"), found.stderr
