"""The winner of a run: its weights, what its network does on test data, and how it is handed over."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from optuna.trial import TrialState

from hpo.errors import UsageError
from hpo.reader import RunReader
from hpo.record import Assignment, Record
from hpo.search_file import load_search_file
from hpo.training import Net, load_data, load_test, test_net
from hpo.trials import rank
from hpo.weights import WeightsKeeper, read_weights
from hpo.winner import examine, examined, winner_of
from tests.conftest import ROOT, SEARCHES, Mpi
from tests.studies import SPACE, add, make_run

PROGRAM = ROOT / "run_islands.py"
WEIGHING = SEARCHES / "weighing.py"


def begin(record: Record, lr: float) -> Assignment:
    params = {"layers": 1, "activation": "relu", "lr": lr, "gamma": 0.9}
    assignment = record.start(params, SPACE.distributions(), 99, island=0, worker=0, generation=0)
    assert assignment is not None
    return assignment


def keeper_of(folder: Path, name: str) -> tuple[WeightsKeeper, Record]:
    """Make what one leader has: a record of its own, and a keeper whose drafts are its own."""
    record = Record(folder / "study.log", folder.name, folder / "claims")
    keeper = WeightsKeeper(folder / "best.safetensors", record)
    keeper._draft = folder / f".draft-{name}"  # leaders are processes of their own otherwise
    return keeper, record


def kept(folder: Path) -> tuple[int, float]:
    weights = read_weights(folder / "best.safetensors")
    assert weights is not None
    return weights.trial, weights.state["w"].item()


def test_only_the_weights_of_the_best_of_all_leaders_are_kept(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    make_run(folder)
    (one, record), (other, its_record) = keeper_of(folder, "one"), keeper_of(folder, "other")
    first, second, third = begin(record, 0.1), begin(its_record, 0.2), begin(record, 0.3)
    assert read_weights(folder / "best.safetensors") is None
    weights = torch.ones(1)
    copied = one.copy({"w": weights}, 0.5)
    weights += 1  # the network trains on
    with one.kept(first, copied):
        record.complete(first, 0.5, 1.0, {})
    assert kept(folder) == (0, 1.0)
    # Both are better than what there is; the second one completes while the first one is about to.
    better, best = one.copy({"w": torch.tensor([3.0])}, 0.4), other.copy({"w": torch.tensor([4.0])}, 0.3)
    with one.kept(third, better):
        with other.kept(second, best):
            its_record.complete(second, 0.3, 1.0, {})
        record.complete(third, 0.4, 1.0, {})
    assert kept(folder) == (1, 4.0)
    assert one.copy({"w": weights}, 0.3) is None, "what is no better is not even copied"
    assert sorted(path.name for path in folder.iterdir()) == ["best.safetensors", "run.json", "study.log"]


def test_weights_that_cannot_be_kept_cost_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    make_run(folder)
    keeper, record = keeper_of(folder, "one")
    keeper._draft = folder / "nowhere" / "draft"
    assignment = begin(record, 0.1)
    with keeper.kept(assignment, {"w": torch.ones(1)}):
        record.complete(assignment, 0.5, 1.0, {})
    assert "warning: the weights of the best so far cannot be kept" in capsys.readouterr().err
    assert record.best() == (0.5, 0)
    (folder / "best.safetensors").write_bytes(b"\x00" * 9)
    with pytest.raises(UsageError, match=r"best\.safetensors cannot be read"):
        read_weights(folder / "best.safetensors")


def test_a_run_keeps_the_weights_of_its_best_epoch_and_tests_them_once(mpi: Mpi, tmp_path: Path) -> None:
    arguments = [PROGRAM, WEIGHING, "--run-dir", "run", "--evaluations", 12, "--confirm", 1, "--top-n", 1]
    job = mpi.run(4, *arguments, cwd=tmp_path)
    assert (job.returncode, job.stderr) == (0, "")
    run = RunReader(tmp_path / "run")
    (best,) = rank(run.evaluations(), 1)
    weights = read_weights(tmp_path / "run" / "best.safetensors")
    assert weights is not None
    assert weights.trial == best.trial
    assert {name: tensor.item() for name, tensor in weights.state.items()} == dict.fromkeys(
        ("epoch", "dip"), best.params["dip"]
    ), "the weights of the epoch that had the lowest loss"
    said = (
        f"On test data, which the search has not seen, the network of trial {best.trial} has epoch {best.params['dip']}"
    )
    assert said in job.stdout
    page = (tmp_path / "run" / "report.html").read_text()
    assert page.count('src="data:image/png;base64,') == 2
    assert "taken for dog" in page
    assert "&lt;cat&gt;" in page
    again = mpi.run(2, *arguments, "--resume", "--islands", 1, "--set", "tests=badly", cwd=tmp_path)
    assert (again.returncode, again.stderr) == (0, ""), "what was tested is not tested again"
    assert "On test data" not in again.stdout

    handed = hpo("best", tmp_path / "run")
    assert json.loads(handed.stdout) == best.params
    assert f"trial {best.trial}" in handed.stderr
    assert "best.safetensors" in handed.stderr
    assert eval(hpo("best", tmp_path / "run", "--python").stdout) == best.params


def test_what_an_objective_offers_wrong_costs_it_its_evaluation_and_a_test_that_fails_nothing(
    mpi: Mpi, tmp_path: Path
) -> None:
    options = [PROGRAM, WEIGHING, "--islands", 1, "--evaluations", 2]
    wrong = mpi.run(2, *options, "--run-dir", "wrong", "--set", "offers=nonsense", cwd=tmp_path)
    assert wrong.returncode == 3
    assert "TypeError: worker.offer takes a dict of tensors by their names, not 'epoch'" in wrong.stdout
    badly = mpi.run(2, *options, "--run-dir", "badly", "--set", "tests=badly", cwd=tmp_path)
    assert badly.returncode == 0
    place = "weighing.py:32 (test)"
    assert (
        badly.stderr == f"warning: the best network could not be tested (ValueError: no test data today, at {place})\n"
    )
    assert "The report is badly/report.html" in badly.stdout


def test_the_winner_is_the_one_that_was_confirmed(tmp_path: Path) -> None:
    record = make_run(tmp_path / "run")
    for loss in (0.3, 0.1, 0.2):
        add(record, curve={1: loss}, params={"layers": 1, "activation": "relu", "lr": loss, "gamma": 0.9})
    evaluations = record.evaluations()
    assert winner_of(evaluations, []) == evaluations[1]
    assert winner_of(evaluations, [{"trial": 2, "mean": 0.2}, {"trial": 1, "mean": 0.3}]) == evaluations[2]
    assert winner_of(evaluations, [{"trial": 2, "mean": None}]) == evaluations[1], "all of its confirmations failed"
    assert winner_of([], []) is None


@pytest.mark.parametrize(
    "text", ["", "[]", '{"trial": 0}', '{"trial": 0, "metrics": 3, "predictions": []}', '{"trial": 1, "metrics": {}}']
)
def test_results_that_somebody_has_edited_are_as_if_there_were_none(tmp_path: Path, text: str) -> None:
    record = make_run(tmp_path / "run")
    add(record)
    run = RunReader(tmp_path / "run")
    run.run_dir.test_json.write_text(text)
    assert examined(run.run_dir, run.evaluations()[0]) is None


def test_a_test_must_give_numbers(tmp_path: Path) -> None:
    record = make_run(tmp_path / "run")
    keeper, own = keeper_of(tmp_path / "run", "one")
    assignment = begin(own, 0.1)
    with keeper.kept(assignment, {"epoch": torch.tensor([float("nan")])}):
        own.complete(assignment, 0.5, 1.0, {})
    search = load_search_file(WEIGHING)
    run = RunReader(tmp_path / "run")
    with pytest.raises(ValueError, match="the test metric 'epoch' must be a finite number, not nan"):
        examine(run.run_dir, search, search.settings([]), replace(record.evaluations()[0], params={"height": 2}))


def test_a_network_is_judged_by_images_that_no_search_has_seen() -> None:
    data, images = load_data("digits"), load_test("digits")
    torch.manual_seed(0)
    network = Net(data.image_shape, data.classes, 1, "relu")
    metrics, predictions = test_net({"conv_layers": 1, "activation": "relu"}, network.state_dict(), data, images)
    with torch.no_grad():
        inputs = (torch.from_numpy(images.images).float() - torch.tensor(data.mean)) / torch.tensor(data.std)
        output, labels = network(inputs), torch.from_numpy(images.labels)
    assert metrics["loss"] == pytest.approx(torch.nn.functional.nll_loss(output, labels).item(), rel=1e-5)
    assert metrics["accuracy"] == pytest.approx((output.argmax(1) == labels).float().mean().item())
    wrong = [one for one in predictions if not one.is_right]
    assert len(wrong) == len(predictions) - len(wrong) == 20
    assert [one.confidence for one in wrong] == sorted((one.confidence for one in wrong), reverse=True)
    sure = output.exp().max(1)
    assert wrong[0].confidence == pytest.approx(sure.values[sure.indices != labels].max().item(), rel=1e-5)
    assert all(one.image.shape == (8, 8) and one.image.max() == 255 for one in predictions)


def test_there_is_no_winner_before_anything_has_succeeded(tmp_path: Path) -> None:
    record = make_run(tmp_path / "run")
    add(record, TrialState.FAIL, failure="no")
    handed = hpo("best", tmp_path / "run")
    assert (handed.returncode, handed.stdout) == (2, "")
    assert handed.stderr == f"error: {tmp_path / 'run'}: no evaluation has succeeded\n"


def hpo(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from hpo.cli import main; main()", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
