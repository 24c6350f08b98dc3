"""Tests of the built packages, outside the checkout. `make test-install` builds and installs them.

The Python of these tests has the wheel with all dependencies of a search. Another environment,
which is created here, has only the dependencies of commands that read runs.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from tests.support.launch import ROOT

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(600)]

READER_MEGABYTES = 400


def run_command(
    folder: Path, *command: object, seconds: float = 300
) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder, without the checkout in the module search path."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    words = [str(word) for word in command]
    return subprocess.run(
        words, cwd=folder, env=environment, capture_output=True, text=True, timeout=seconds
    )


def find_package(kind: str) -> Path:
    (package,) = (ROOT / "dist").glob(kind)
    return package


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run a search of the installed package, and return its run directory."""
    folder = tmp_path_factory.mktemp("search")
    options = ("--evaluations", 4, "--set", "epochs=1", "--run-dir", "run")
    job = run_command(folder, "mpirun", "-n", 4, "hpo", "search", "digits_cnn", *options)
    assert job.returncode == 0, job.stderr
    assert "4 complete, of 4" in job.stdout
    return folder / "run"


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create an environment with the wheel and without its extras, and return its folder."""
    folder = tmp_path_factory.mktemp("reader") / "venv"
    venv.create(folder, with_pip=True)
    constraints = ROOT / "dist" / "constraints.txt"
    install = (
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--constraint",
        constraints,
    )
    installed = run_command(folder, folder / "bin/python", "-m", *install, find_package("*.whl"))
    assert installed.returncode == 0, installed.stderr
    return folder


def test_packages_hold_the_search_spaces_and_no_tests() -> None:
    wheel = set(zipfile.ZipFile(find_package("*.whl")).namelist())
    search_spaces = {
        f"hpo/search_spaces/{path.name}" for path in (ROOT / "search_spaces").glob("*.py")
    }
    assert len(search_spaces) == 4
    assert search_spaces < wheel
    assert "hpo/py.typed" in wheel
    others = [name for name in wheel if not name.startswith(("hpo/", "hpo_islands-"))]
    assert others == ["hydra_plugins/hpo_sweeper.py"]
    with tarfile.open(find_package("*.tar.gz")) as archive:
        source = {name.partition("/")[2] for name in archive.getnames()}
    assert {
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "run_islands.py",
        "Makefile",
        "constraints.txt",
    } < source
    assert not [name for name in source if name.startswith((".ci", ".git/"))]


def test_installed_package_is_the_wheel(tmp_path: Path) -> None:
    found = run_command(tmp_path, sys.executable, "-c", "import hpo; print(hpo.__file__)").stdout
    assert "site-packages" in found
    assert not Path(found.strip()).is_relative_to(ROOT / "hpo")


def test_search_space_is_checked_by_its_name(tmp_path: Path) -> None:
    check = run_command(
        tmp_path, "mpirun", "-n", 2, "hpo", "check", "digits_cnn", "--set", "epochs=1"
    )
    assert (check.returncode, check.stderr) == (0, ""), check.stdout


def test_own_search_file_runs(tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (tmp_path / "my_search.py").write_text(example)
    options = ("--evaluations", 4, "--set", "epochs=1", "--run-dir", "run")
    job = run_command(tmp_path, "mpirun", "-n", 4, "hpo", "search", "my_search.py", *options)
    assert job.returncode == 0, job.stderr
    assert "4 complete, of 4" in job.stdout


def test_reader_is_small(reader: Path) -> None:
    paths = [path for path in reader.rglob("*") if path.is_file() and not path.is_symlink()]
    assert sum(path.stat().st_size for path in paths) < READER_MEGABYTES * 1e6
    (packages,) = reader.glob("lib/python*/site-packages")
    assert not [name for name in ("torch", "mpi4py", "propulate") if (packages / name).exists()]


def test_reader_reads_a_run(reader: Path, run_dir: Path, tmp_path: Path) -> None:
    hpo = reader / "bin" / "hpo"
    best = run_command(tmp_path, hpo, "best", run_dir)
    assert set(json.loads(best.stdout)) == {"conv_layers", "activation", "lr", "gamma"}, best.stderr
    for command, shown in (
        (("top", run_dir), "4 complete, of 4"),
        (("show", run_dir, 0), "conv_layers"),
        (("watch", run_dir), "finished"),
        (("report", run_dir), "report.html"),
        (("export", run_dir, "--to", "csv"), "conv_layers"),
        (("--version",), "torch not installed"),
    ):
        done = run_command(tmp_path, hpo, *command)
        assert (done.returncode, done.stderr) == (0, ""), done.stdout
        assert shown in done.stdout


def test_reader_says_what_a_search_needs(reader: Path, tmp_path: Path) -> None:
    search = run_command(tmp_path, reader / "bin" / "hpo", "search", "digits_cnn")
    assert search.returncode == 2
    assert search.stderr.startswith(
        "error: hpo search needs mpi4py, propulate, torch, not installed here. Run: pip install "
    )
    assert search.stderr.count("\n") == 1
