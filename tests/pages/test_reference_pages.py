"""Test that docs/reference/ agrees with the code, and that its listings run as written."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path
from pydoc import locate

import pytest
from typer.main import get_command

import hpo
from hpo.cli.mpi_commands import make_command_app, make_search
from hpo.errors import ExitStatus
from hpo.evaluation.rank_group import make_torchrun_variables
from hpo.options import RECORDED_OPTIONS
from hpo.store.manifest import SessionEntry
from hpo.store.run_dir import RunDir
from hpo.store.trials import _VALIDATORS
from tests.support.docs import blocks, example
from tests.support.launch import PROGRAM, ROOT, Mpi
from tests.support.limits import scale
from tests.support.run_output import find_complete_losses, load_trials

REFERENCE = "docs/reference"


def read_page(name: str) -> str:
    return (ROOT / REFERENCE / name).read_text("utf-8")


def read_first_column(text: str) -> list[str]:
    """Return the names in backticks in the first column of all tables of a text."""
    cells = re.findall(r"^\| (`[^|]*) \|", text, re.MULTILINE)
    return [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]


def read_section(text: str, start: str, end: str = "\n## ") -> str:
    """Return the part of a page from the line `start` to the next heading."""
    return text.partition(start)[2].partition(end)[0]


def test_search_file_of_reference_runs_as_written(mpi: Mpi, tmp_path: Path) -> None:
    (listing,) = blocks(f"{REFERENCE}/search-space-file.md", "python")
    (tmp_path / "my_search.py").write_text(listing, "utf-8")
    command = [PROGRAM, "my_search.py", "--set", "epochs=2", "--evaluations", 3, "--run-dir", "run"]
    job = mpi.run(2, *command, cwd=tmp_path)
    assert (job.returncode, job.stderr) == (0, "")
    assert len(find_complete_losses(load_trials(tmp_path / "run"))) == 3


def test_listings_that_read_a_run_print_its_content(mpi: Mpi, tmp_path: Path) -> None:
    options = ["--set", "epochs=1", "--evaluations", 4, "--run-dir", "runs/first"]
    job = mpi.run(2, PROGRAM, *options, cwd=tmp_path)
    assert (job.returncode, job.stderr) == (0, "")
    losses = find_complete_losses(load_trials(tmp_path / "runs" / "first"))
    best = min(losses, key=lambda trial: losses[trial])
    read_weights = blocks("docs/training/checkpoints.md", "python")[1].replace(
        "runs/long", "runs/first"
    )
    assert run_listing(read_weights, tmp_path).startswith(f"{best} {{'conv_layers': ")
    open_study = example("docs/tutorial.md", "look.py")
    assert run_listing(open_study, tmp_path).startswith(f"{losses[best]} {{'conv_layers': ")
    assert {"history.html", "importances.html"} < {path.name for path in tmp_path.iterdir()}
    summary = json.loads((tmp_path / "runs" / "first" / "summary.json").read_text())
    assert set(read_first_column(read_page("summary-json.md"))) == summary.keys()


def run_listing(listing: str, folder: Path) -> str:
    command = [sys.executable, "-W", "ignore", "-c", listing]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=True, timeout=scale(120)
    ).stdout


def test_attributes_of_trials_are_those_of_the_code() -> None:
    section = read_section(read_page("run-directory.md"), "User attributes of a trial:")
    assert sorted(read_first_column(section)) == sorted(_VALIDATORS)


def test_files_of_a_run_directory_are_those_of_the_code() -> None:
    run_dir = RunDir(Path())
    paths = {
        value.parts[0]
        for value in vars(run_dir).values()
        if isinstance(value, Path) and value.parts
    }
    documented = {
        Path(name).parts[0]
        for name in read_first_column(read_page("run-directory.md").partition("##")[0])
    }
    assert paths <= documented
    assert run_dir.get_log_path(7).parts[0] in documented


def test_keys_of_sessions_are_those_of_the_code() -> None:
    keys = read_first_column(read_section(read_page("run-directory.md"), "## run.json"))
    assert sorted(keys) == sorted(SessionEntry.__dataclass_fields__)


def test_exit_statuses_are_those_of_the_code() -> None:
    section = read_section(read_page("exit-statuses.md"), "## `run_islands.py`")
    documented = {int(status) for status in re.findall(r"^\| (\d+) \|", section, re.MULTILINE)}
    assert documented == set(ExitStatus) - {ExitStatus.CRASHED}, (
        "a launcher may replace the status of a crash"
    )


def test_variables_of_torchrun_are_those_of_the_code() -> None:
    section = read_section(read_page("environment-variables.md"), "## Set for")
    assert sorted(read_first_column(section)) == sorted(make_torchrun_variables(0, [0], ("", 0)))


def test_life_cycle_in_source_names_files_and_functions() -> None:
    page = (ROOT / "docs/explanation/architecture.md").read_text("utf-8")
    section = page.partition("## Life cycle in the source")[2].partition("\n## ")[0]
    files = set()
    for row in re.findall(r"^\| (`.*)", section, re.MULTILINE):
        paths, functions = (re.findall(r"`([^`]+)`", cell) for cell in row.split("|")[:2])
        source = "".join((ROOT / "hpo" / path).read_text("utf-8") for path in paths)
        assert all(f"def {function.rpartition('.')[2]}(" in source for function in functions), row
        files.update(paths)
    assert f"Hyperparameters and losses pass {len(files)} files" in section
    assert [table.count("| → ") for table in section.split("A loss takes this way back")] == [3, 3]


def test_limits_of_waits_name_definitions_of_the_code() -> None:
    page = (ROOT / "docs/explanation/architecture.md").read_text("utf-8")
    section = page.partition("## What a rank waits for")[2].partition("\n## ")[0]
    source = "".join(path.read_text("utf-8") for path in (ROOT / "hpo").rglob("*.py"))
    rows = re.findall(r"^\| (?!wait|---)(.*) \|$", section, re.MULTILINE)
    assert len(rows) > 10
    for row in rows:
        for name in re.findall(r"`([^`]+)`", row.split(" | ")[2]):
            if name.endswith(".py"):
                assert list((ROOT / "hpo").rglob(name)), row
            else:
                last = name.rpartition(".")[2]
                assert re.search(rf"\b(def|class) {last}\b|^{last} = ", source, re.MULTILINE), row


@pytest.mark.parametrize("page", ["commands.md", "search-command.md"])
def test_pages_have_the_options_of_the_commands(page: str) -> None:
    script = runpy.run_path(str(ROOT / "docs" / "write_reference.py"))
    assert read_page(page) == script["fill_page"](page), "run python docs/write_reference.py"


@pytest.mark.slow  # It imports Lightning.
def test_page_of_the_api_has_the_purpose_of_each_name() -> None:
    script = runpy.run_path(str(ROOT / "docs" / "write_reference.py"))
    page = script["fill_api_page"]()
    assert read_page("api.md") == page, "run python docs/write_reference.py"
    names = re.findall(r"^\| `(\w+)(?:\(\))?` \| [A-Z\d].+ \|$", page, re.MULTILINE)
    assert set(hpo.__all__) - {"checkpoint", "folder", "trial"} <= set(names)


def test_options_of_resumed_runs_are_those_of_the_code() -> None:
    rows = read_section(read_page("search-command.md"), "## Options of a resumed run").splitlines()
    kept = {
        name
        for row in rows
        if row.endswith("| kept |")
        for name in re.findall(r"`(--[a-z-]+)`", row)
    }
    lost = {name for row in rows if "not kept" in row for name in re.findall(r"`(--[a-z-]+)`", row)}
    for option in RECORDED_OPTIONS.values():
        assert option.flags.split("/")[0] in (kept if option.is_kept else lost)


@pytest.mark.parametrize("name", ["mpi4py", "optuna", "python", "torch"])
def test_inventory_lists_objects_that_exist(name: str) -> None:
    lines = (ROOT / "docs" / "inventories" / f"{name}.txt").read_text("utf-8").splitlines()
    assert lines[0] == "# Sphinx inventory version 1"
    objects = [line.split()[0] for line in lines[3:]]
    assert objects == sorted(set(objects))
    assert [name for name in objects if locate(name) is None] == []


def test_spaces_of_tutorial_are_the_shipped_one_and_valid() -> None:
    shipped, narrowed = (
        block for block in blocks("docs/tutorial.md", "python") if block.startswith("space = ")
    )
    assert shipped in (ROOT / "search_spaces" / "digits_cnn.py").read_text("utf-8")
    space = eval(narrowed.removeprefix("space = "), vars(hpo))
    assert space.parameters.keys() == {"conv_layers", "activation", "lr", "gamma"}


@pytest.mark.parametrize("page", ["README.md", "docs/tutorial.md"])
def test_commands_of_page_have_options_that_exist(page: str) -> None:
    parameters = get_command(
        make_command_app(make_search(Path("search_spaces/digits_cnn.py")))
    ).params
    known = {
        option
        for parameter in parameters
        for option in (*parameter.opts, *parameter.secondary_opts)
    }
    text = (ROOT / page).read_text("utf-8").replace("\\\n", " ")
    commands = re.findall(
        r"^[ $]*mpirun -n \d+ (?:python run_islands.py|hpo search)(.*?)(?: -- .*)?$",
        text,
        re.MULTILINE,
    )
    options = {option for command in commands for option in re.findall(r" (--[a-z-]+)", command)}
    assert options
    assert options <= known
