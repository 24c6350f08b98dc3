"""Test the repository: import contracts, imports of tests, and markers of tests."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.chaos import Victim
from tests.support.launch import PROGRAM, ROOT, Mpi, make_hpo_command
from tests.support.limits import scale

LAYERS, CYCLES, ONE = (
    "packages import only packages below them",
    "no import cycles",
    "one module imports Propulate",
)
RANKS, TRAINERS = "ranks import no torch", "trainers import no MPI"
OTHERS = "ranks that lead no worker import neither numpy nor Optuna nor Propulate"
READERS, BASE = (
    "readers of runs, and ask and tell, import neither MPI nor torch",
    "base modules import no framework",
)
WORKER = "training imports only Worker"
PROPAGATORS = "propagators import no MPI"
WRONG = [
    ("store/run_dir.py", "from hpo.run import session", LAYERS),
    ("evaluation/rank_group.py", "from hpo.trainer import trainer_group", LAYERS),
    ("trainer/trainer_server.py", "from hpo.training import load_data", LAYERS),
    ("store/storage_url.py", "from hpo.store import storage", CYCLES),
    ("trainer/offers.py", "from hpo.trainer import objective_runner", CYCLES),
    ("evaluation/trainer_client.py", "import torch", RANKS),
    ("run/run_search.py", "def late():\n    import torch.distributed", RANKS),
    ("ranks/rank_watch.py", "import torch", RANKS),
    ("cli/entry.py", "from hpo.trainer import template_server", RANKS),
    ("evaluation/supervision.py", "import numpy", OTHERS),
    ("run/run_search.py", "from hpo.store import study_writer", OTHERS),
    ("check/run_check.py", "from hpo.training import load_data", RANKS),
    ("breeding/tpe.py", "import torchvision", RANKS),
    ("trainer/offers.py", "import mpi4py", TRAINERS),
    ("store/weights.py", "from hpo.ranks import communicator", TRAINERS),
    ("trainer/worker.py", "from hpo.evaluation import rank_group", TRAINERS),
    ("results/summary.py", "import torch", READERS),
    ("views/progress.py", "import mpi4py", READERS),
    ("run/ask_tell.py", "from hpo.ranks import communicator", READERS),
    ("space/search_space.py", "import mpi4py", BASE),
    ("problem.py", "import torch", BASE),
    ("run/run_search.py", "import propulate", ONE),
    ("breeding/genetic.py", "import mpi4py", PROPAGATORS),
    ("training/loop.py", "from hpo.evaluation import rank_group", WORKER),
    ("training/loop.py", "from hpo.trainer import state_files", WORKER),
]


def check_contracts(folder: Path) -> subprocess.CompletedProcess[str]:
    """Check the import contracts of the package in a folder, and return the ended process."""
    program = Path(sys.executable).with_name("lint-imports")
    return subprocess.run(
        [program, "--no-cache"], cwd=folder, capture_output=True, text=True, timeout=scale(60)
    )


@pytest.mark.parametrize(("module", "line", "contract"), WRONG)
def test_contract_with_wrong_import_fails(
    tmp_path: Path, module: str, line: str, contract: str
) -> None:
    shutil.copytree(ROOT / "hpo", tmp_path / "hpo", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    path = tmp_path / "hpo" / module
    path.write_text(f"{path.read_text()}\n{line}\n")
    checked = check_contracts(tmp_path)
    assert checked.returncode == 1, checked.stdout
    assert f"{contract} BROKEN" in checked.stdout


def test_contracts_all_have_a_wrong_import_here() -> None:
    contracts = re.findall(
        r'^name = "(.*)"\ntype = ', (ROOT / "pyproject.toml").read_text(), re.MULTILINE
    )
    assert sorted(contracts) == sorted({contract for *_, contract in WRONG})


def test_package_satisfies_all_contracts() -> None:
    checked = check_contracts(ROOT)
    assert checked.returncode == 0, checked.stdout


@pytest.mark.slow
def test_import_of_hpo_does_not_import_torch() -> None:
    program = (
        "import sys, hpo\n"
        "assert not {'torch', 'mpi4py', 'optuna'} & set(sys.modules)\n"
        "assert hpo.Worker.__name__ == 'Worker' and 'torch' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=scale(60))


@pytest.mark.slow
def test_import_of_rank_modules_does_not_import_torch() -> None:
    program = (
        "import sys, pkgutil, importlib\n"
        "for name in sys.argv[1:]:\n"
        "    package = importlib.import_module(name)\n"
        "    for found in pkgutil.walk_packages(package.__path__, f'{name}.'):\n"
        "        importlib.import_module(found.name)\n"
        "assert 'torch' not in sys.modules\n"
    )
    packages = [
        f"hpo.{name}"
        for name in ("run", "check", "cli", "evaluation", "breeding", "ranks", "store", "process")
    ]
    subprocess.run([sys.executable, "-c", program, *packages], check=True, timeout=scale(60))


LAUNCHES: dict[str, Callable[[Path], object]] = {
    "mpirun": lambda folder: Mpi().start(1, "-c", "", cwd=folder),
    "another launcher": lambda folder: Mpi("taskset", flags=("1", "mpirun")).run(
        1, "-c", "", cwd=folder
    ),
    "to kill it": lambda folder: Victim(Mpi(), 1, ["-c", ""], folder, folder / "log"),
    "supervised": lambda folder: subprocess.run(
        make_hpo_command("supervise", "mpirun", "--run-dir", "run"), cwd=folder, check=True
    ),
    "alone": lambda folder: subprocess.run([sys.executable, PROGRAM], cwd=folder, check=True),
    "by the shell": lambda folder: subprocess.run(
        "mpirun -n 1 true", shell=True, cwd=folder, check=True
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("launch", LAUNCHES)
def test_launch_without_mpi_marker_fails(tmp_path: Path, launch: str) -> None:
    with pytest.raises(
        pytest.fail.Exception, match="a test that launches a job needs the marker mpi"
    ):
        LAUNCHES[launch](tmp_path)


def test_tests_with_mpi_fixture_have_the_marker(
    mpi: Mpi, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    assert request.node.get_closest_marker("mpi")
    assert mpi.run(1, "-c", "", cwd=tmp_path).returncode == 0


def test_no_test_imports_from_another_test_or_from_benchmarks() -> None:
    paths = list((ROOT / "tests").rglob("test_*.py"))
    assert len(paths) > 90
    wrong = re.compile(r"^ *(from|import) (tests\.(\w+\.)?test_|benchmarks)", re.MULTILINE)
    assert [path.name for path in paths if wrong.search(path.read_text())] == []


def test_conda_recipe_has_the_dependencies_of_the_package() -> None:
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    recipe = (ROOT / "packaging" / "recipe.yaml").read_text("utf-8")
    listed = project.partition("\ndependencies = [\n")[2].partition("\n]\n")[0]
    needed = re.findall(r'^  "([\w-]+)>=([\d.]+)"', listed, re.MULTILINE)
    assert len(needed) == len(listed.splitlines())
    shipped = recipe.partition("\n  run:\n")[2].partition("\n  run_constraints:\n")[0]
    python, *others = re.findall(r"^    - ([\w-]+) >=(\S.*)$", shipped, re.MULTILINE)
    assert python == ("python", "${{ python_min }}")
    assert others == needed
    version = project.partition('\nversion = "')[2].partition('"')[0]
    assert f"\n  version: {version}\n" in recipe
