"""The contract between the rooms of the house, which `make lint` checks, catches what breaks it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launch import ROOT

WRONG = {
    "hpo/store/run_dir.py": ("from hpo.run import options", "rooms import only what stands below them"),
    "hpo/results/summary.py": ("import torch", "what reads and shows runs needs neither MPI nor torch"),
    "hpo/run/stages.py": ("import propulate", "one module imports Propulate"),
    "hpo/space.py": ("import mpi4py", "the ground needs nobody"),
    "hpo/store/lock.py": ("from hpo.store import journal", "no circles"),
    "hpo/training/fit.py": (
        "from hpo.evaluation import group",
        "training knows Worker alone",
    ),
}


def check(folder: Path) -> subprocess.CompletedProcess[str]:
    """Check the contract on a copy of the package."""
    program = Path(sys.executable).with_name("lint-imports")
    return subprocess.run([program, "--no-cache"], cwd=folder, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("module", WRONG)
def test_a_wrong_import_fails_the_contract(tmp_path: Path, module: str) -> None:
    shutil.copytree(ROOT / "hpo", tmp_path / "hpo", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    line, rule = WRONG[module]
    path = tmp_path / module
    path.write_text(f"{path.read_text()}\n{line}\n")
    checked = check(tmp_path)
    assert checked.returncode == 1, checked.stdout
    assert f"{rule} BROKEN" in checked.stdout


def test_the_package_keeps_the_contract() -> None:
    checked = check(ROOT)
    assert checked.returncode == 0, checked.stdout


def test_a_search_space_alone_needs_no_torch() -> None:
    program = (
        "import sys, hpo\n"
        "assert not {'torch', 'mpi4py', 'optuna'} & set(sys.modules)\n"
        "assert hpo.Worker.__name__ == 'Worker' and 'torch' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_no_module_has_more_than_300_lines() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in (ROOT / "hpo").rglob("*.py")}
    assert len(lengths) > 100
    assert {path: length for path, length in lengths.items() if length > 300} == {}
