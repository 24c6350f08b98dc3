"""Test messages about missing packages. tests/entry.py tests the built packages."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from hpo.cli import entry
from hpo.cli.entry import check_packages
from hpo.errors import UsageError
from hpo.process.launcher import is_first_rank
from tests.support.launch import ROOT, run_hpo
from tests.support.run_output import remove_loading_lines


def test_check_packages_if_all_are_installed_passes() -> None:
    check_packages("hpo search")


@pytest.mark.parametrize(
    ("missing", "python", "command"),
    [
        (["torch"], (3, 13), "pip install 'hpo-islands[search]'"),
        (["mpi4py", "propulate", "torch"], (3, 12), "pip install 'hpo-islands[search]'"),
        (["propulate"], (3, 14), "pip install --no-deps 'propulate>=1.2.2,<1.3'"),
        (
            ["mpi4py", "propulate", "torch"],
            (3, 13),
            "pip install 'hpo-islands[search]' && pip install --no-deps 'propulate>=1.2.2,<1.3'",
        ),
    ],
)
def test_check_packages_if_some_are_missing_raises(
    monkeypatch: pytest.MonkeyPatch, missing: list[str], python: tuple[int, int], command: str
) -> None:
    for name in missing:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(sys, "version_info", python)
    with pytest.raises(UsageError) as raised:
        check_packages("hpo search")
    assert (
        str(raised.value)
        == f"hpo search needs {', '.join(missing)}, not installed here. Run: {command}"
    )


def test_advised_propulate_version_is_the_required_one() -> None:
    required = re.findall(r'"(propulate>\S+?)[";]', (ROOT / "pyproject.toml").read_text())
    assert len(required) == 2, "one for pip, and one for uv"
    assert set(required) == {entry.PROPULATE_REQUIREMENT}


@pytest.mark.parametrize(
    ("environment", "first"),
    [
        ({}, True),
        ({"PMI_RANK": "0"}, True),
        ({"PMI_RANK": "3"}, False),
        ({"OMPI_COMM_WORLD_RANK": "1"}, False),
    ],
)
def test_is_first_rank_reads_launcher_variables(environment: dict[str, str], first: bool) -> None:
    assert is_first_rank(environment) is first


@pytest.mark.slow
@pytest.mark.parametrize("command", ["search", "check"])
def test_command_without_mpi_prints_one_message(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str
) -> None:
    monkeypatch.setenv("MPI4PY_LIBMPI", str(tmp_path / "libmpi.so"))
    job = run_hpo(command, "digits_cnn", cwd=tmp_path)
    assert (job.returncode, remove_loading_lines(job.stdout)) == (2, "")
    advice = "Load the MPI module of the cluster, or run: pip install 'hpo-islands[mpich]'"
    assert job.stderr == f"error: mpi4py finds no MPI (cannot load MPI library). {advice}\n"
    assert "MPI: not found (cannot load MPI library)" in run_hpo("--version", cwd=tmp_path).stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "printed"),
    [
        (
            "from hpo.cli.mpi_library import import_mpi; import_mpi(); from mpi4py import MPI; "
            "print(MPI.Get_library_version().split()[0])",
            r"MPICH\n",
        ),
        (
            "from hpo.cli import main; sys.argv[1:] = ['--version']; main()",
            r"(?s).*\nMPI: MPICH .*",
        ),
    ],
)
def test_package_mpich_is_found_outside_of_the_prefix(
    code: str, printed: str, tmp_path: Path
) -> None:
    """`uv run --with` installs packages elsewhere."""
    code = f"import sys; sys.prefix = sys.exec_prefix = sys.argv[1]; {code}"
    job = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert job.returncode == 0, job.stderr
    assert re.fullmatch(printed, job.stdout), job.stdout
