"""Run the listings and commands of docs/search. Only parse commands whose run would take long."""

from __future__ import annotations

import concurrent.futures as futures
import json
import random
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer.main
from optuna.study import StudyDirection

import hpo
from hpo import SearchSpace
from hpo.cli.commands import app
from hpo.cli.mpi_commands import make_command_app, make_search
from hpo.results.reader import RunReader
from hpo.run.resolve_options import resolve_options
from tests.support.docs import blocks, example
from tests.support.launch import PROGRAM, ROOT, Mpi, call_hpo
from tests.support.run_output import find_complete_losses, load_trials
from tests.support.runs import add_evaluation, make_run

PAGES = [*sorted((ROOT / "docs" / "search").glob("*.md")), ROOT / "docs" / "faq.md"]


def find_commands() -> list[tuple[str, list[str]]]:
    """Return each command of this project in docs/search: the name of the page, and its words."""
    found = []
    for page in PAGES:
        for block in blocks(str(page.relative_to(ROOT)), "bash"):
            for line in block.replace("\\\n", " ").splitlines():
                words = shlex.split(line.partition(" | ")[0])
                if words[:2] == ["mpirun", "-n"]:
                    words = words[3:]
                if words[0] == "hpo" or words[:2] == ["python", "run_islands.py"]:
                    found.append((page.name, words))
    return found


def load_space(page: str) -> SearchSpace:
    """Return the search space that the first listing of a page defines."""
    namespace: dict[str, Any] = {}
    exec(blocks(page, "python")[0], namespace)
    space: SearchSpace = namespace["space"]
    return space


@pytest.mark.parametrize(("page", "words"), find_commands())
def test_command_of_page_is_accepted(
    page: str, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("my_search.py", "my_long_search.py", "my_front.py", "my_pbt.py", "train.py"):
        Path(name).write_text("space = SearchSpace()\n")
    if words[0] == "python" or words[1] == "search":
        end = words.index("--") if "--" in words else len(words)
        default = ROOT / "search_spaces" / "digits_cnn.py" if words[0] == "python" else None
        command = typer.main.get_command(
            make_command_app(make_search(default, words[end + 1 :] or None))
        )
        resolve_options(command(words[2:end], standalone_mode=False), ranks=16)
        return
    commands: Any = typer.main.get_command(app)
    context = commands.commands[words[1]].make_context(words[1], words[2:])
    assert context.params, page


def test_every_page_has_a_command_that_is_accepted() -> None:
    assert {page for page, _ in find_commands()} == {page.name for page in PAGES}


def test_defined_space_has_the_values_of_the_page() -> None:
    space = load_space("docs/search/define-a-space.md")
    rng = random.Random(0)
    for params in (space.draw(rng) for _ in range(50)):
        assert list(params) == ["lr", "dropout", "layers", "width", "batch_size", "activation"]
        assert params["width"] in range(64, 513, 64)
        assert params["batch_size"] in (16, 32, 64, 128)
    (shown,) = blocks("docs/search/define-a-space.md", "text")
    space.check(json.loads(shown.replace("'", '"')))


def test_the_space_of_the_docs_is_as_it_says() -> None:
    space = load_space("docs/search/conditional-parameters.md")
    space.check_constraints()
    rng = random.Random(0)
    for params in (space.draw(rng) for _ in range(50)):
        assert ("momentum" in params, "nesterov" in params) == (params["optimizer"] == "sgd",) * 2
        assert len([name for name in params if name.startswith("dropout_")]) == params["layers"]
        assert int(params["width"]) % int(params["heads"]) == 0


def test_front_of_the_page_has_two_objectives_and_weights(mpi: Mpi, tmp_path: Path) -> None:
    (tmp_path / "my_front.py").write_text(
        example("docs/search/several-objectives.md", "my_front.py"), "utf-8"
    )
    job = mpi.run(2, PROGRAM, "my_front.py", "--evaluations", 4, "--run-dir", "run", cwd=tmp_path)
    assert (job.returncode, job.stderr) == (0, "")
    trials = load_trials(tmp_path / "run")
    sizes = {trial.number: 75 * trial.params["width"] + 10 for trial in trials}
    assert {trial.number: trial.values[1] for trial in trials} == sizes
    front = json.loads((tmp_path / "run" / "summary.json").read_text())["front"]
    kept = {f"{individual['trial']}.safetensors" for individual in front}
    assert {path.name for path in (tmp_path / "run" / "front").iterdir()} == kept
    assert min(sizes.values()) in {sizes[individual["trial"]] for individual in front}
    assert call_hpo("best", tmp_path / "run", "--by", "parameters") == 0


def test_children_of_the_page_continue_their_parents_training(mpi: Mpi, tmp_path: Path) -> None:
    (tmp_path / "my_pbt.py").write_text(
        example("docs/search/population-based-training.md", "my_pbt.py"), "utf-8"
    )
    options = ["--pbt", "--evaluations", 12, "--islands", 1, "--run-dir", "run"]
    job = mpi.run(2, PROGRAM, "my_pbt.py", *options, cwd=tmp_path)
    assert (job.returncode, job.stderr) == (0, "")
    losses = find_complete_losses(load_trials(tmp_path / "run"))
    children = [trial for trial in load_trials(tmp_path / "run") if "inherits" in trial.user_attrs]
    assert len(children) >= 3
    assert all(
        child.params["width"] == losses_width(tmp_path, child.user_attrs["inherits"])
        for child in children
    )
    assert min(losses[child.number] for child in children) < min(
        loss
        for number, loss in losses.items()
        if number not in {child.number for child in children}
    ), "a child is better than each individual that has started from scratch"


def losses_width(folder: Path, number: int) -> int:
    """Return the hyperparameter `width` of trial `number`."""
    width: int = load_trials(folder / "run")[number].params["width"]
    return width


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
@pytest.mark.filterwarnings("ignore:Target and region quantiles:UserWarning")
# Optuna imports matplotlib if it is installed.
@pytest.mark.filterwarnings("ignore::DeprecationWarning:matplotlib")
def test_plots_of_the_page_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = make_run(tmp_path / "runs" / "mine")
    for _ in range(3):
        add_evaluation(record)
    monkeypatch.chdir(tmp_path)
    load, cost = blocks("docs/operation/viewers.md", "python")
    namespace: dict[str, Any] = {}
    exec(load, namespace)
    exec(cost, namespace)
    assert namespace["study"].directions == [StudyDirection.MINIMIZE]
    assert {path.name for path in tmp_path.glob("*.html")} == {"importances.html", "cost.html"}


def test_columns_of_the_page_are_those_of_an_export(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    add_evaluation(make_run(tmp_path / "run"))
    capfdbinary.readouterr()
    assert call_hpo("export", tmp_path / "run", "--to", "json") == 0
    (row,) = json.loads(capfdbinary.readouterr().out)
    text = (ROOT / "docs" / "search" / "warm-start.md").read_text("utf-8")
    (table,) = re.findall(
        r"^\| column \| meaning \|\n\|---\|---\|\n((?:\|.*\n)+)", text, re.MULTILINE
    )
    described = {
        name for line in table.splitlines() for name in re.findall(r"`(\w+)`", line.split("|")[1])
    }
    exported = {re.sub(r"^(param|metric)_.*", r"\1_NAME", column) for column in row}
    assert described - {"front", "metric_NAME"} == exported - {"metric_NAME"}


def test_listings_of_ask_and_tell_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    values: dict[str, Any] = {}
    exec(example("docs/search/ask-and-tell.md", "my_asking.py"), values)
    values["search"] = hpo.Search(values["space"], "runs/asking", evaluations=30)
    _, listing, optuna_listing = blocks("docs/search/ask-and-tell.md", "python")
    with futures.ThreadPoolExecutor(8) as executor:
        listing = listing.replace("executor = ...", "").replace("time.sleep(1)", "")
        exec(listing, {**values, "executor": executor})
    evaluations = RunReader(Path("runs/asking")).read_evaluations()
    assert [each.state for each in evaluations] == ["complete"] * 30
    assert {each.worker for each in evaluations[:20]} == {0}
    assert {each.worker for each in evaluations[20:]} == set(range(8))
    for each in evaluations:
        assert each.loss == abs(each.params["lr"] - 0.01) + 0.1 * each.params["layers"]
        assert each.metrics == {"accuracy": 0.9}
    exec(optuna_listing, values)
    assert len(values["study"].trials) == 50
    assert values["study"].best_value < 0.01
