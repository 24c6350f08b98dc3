"""Test the installed command `hpo`: search spaces of the package, and versions."""

from __future__ import annotations

import platform
from importlib.metadata import version
from pathlib import Path

import pytest

from hpo.cli.search_source import find_search_space, list_search_spaces
from hpo.errors import UsageError
from tests.support.launch import ROOT, run_hpo

NAMES = ["cifar10_resnet", "digits_cnn", "mnist_cnn", "text_transformer"]


def test_find_search_space_prefers_files_over_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert list(list_search_spaces()) == NAMES
    assert find_search_space(Path("digits_cnn")) == ROOT / "search_spaces" / "digits_cnn.py"
    Path("digits_cnn").mkdir()
    assert find_search_space(Path("digits_cnn")).is_file()
    Path("mnist_cnn").touch()
    assert find_search_space(Path("mnist_cnn")) == Path("mnist_cnn"), (
        "A file of the user has priority."
    )


def test_find_search_space_with_unknown_name_raises(tmp_path: Path) -> None:
    message = (
        rf"^SEARCH_SPACE must be the path of a file, or one of {', '.join(NAMES)}, got my\.py$"
    )
    with pytest.raises(UsageError, match=message):
        find_search_space(Path("my.py"))
    assert find_search_space(tmp_path) == tmp_path, "A folder is reported later."


def test_version_prints_versions_of_packages_and_mpi() -> None:
    job = run_hpo("--version")
    assert (job.returncode, job.stderr) == (0, "")
    lines = dict(line.split(" ", 1) for line in job.stdout.splitlines() if " " in line)
    assert lines["python"] == platform.python_version()
    for package in ("hpo-islands", "torch", "propulate", "optuna", "mpi4py"):
        assert lines[package] == version(package)
    assert "MPICH" in lines["MPI:"] or "Open MPI" in lines["MPI:"]
