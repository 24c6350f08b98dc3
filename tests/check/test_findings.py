"""Test the observations and the comparisons of `hpo check`, without a job."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module
from torch.optim import optimizer

from hpo import Categorical, Float, Int, SearchSpace
from hpo.check.check_evaluator import CheckOutcome, WeightsTest, find_mismatch
from hpo.check.evaluation_findings import CheckOutcomes, inspect_outcomes
from hpo.check.finding import Finding, print_findings
from hpo.check.run_check import draw_other_branches, make_middle_params
from hpo.process.trace import Fingerprint, Trace
from hpo.script_objective import Script
from hpo.trainer.probe import Probe
from tests.support.evaluations import make_evaluation
from tests.support.in_process_template import send_through_json


def mismatch(rank: int, called: str, peer: int) -> str:
    """Return a message of torch's check of collectives. Its statement about the peer is wrong."""
    return (
        f"Detected mismatch between collectives on ranks. Rank {rank} is running collective: "
        f"CollectiveFingerPrint(SequenceNumber=7{called}), but Rank {peer} is running collective: "
        "CollectiveFingerPrint(SequenceNumber=0OpType=SCATTER).Collectives differ in the following "
        "aspects: Op type: ALLREDUCEvs SCATTER"
    )


def reduced(shape: str) -> str:
    return f", OpType=ALLREDUCE, TensorShape=[{shape}], TensorDtypes=Float, TensorDeviceTypes=..."


def test_find_mismatch_names_the_collective_of_each_rank() -> None:
    barrier, reduce = mismatch(0, "OpType=BARRIER", 1), mismatch(1, reduced("2, 3"), 0)
    seen = [
        Trace(failures=[barrier], place="a.py:3"),
        Trace(failures=["no message", reduce]),  # cancelled while it raised
        Trace(place="a.py:9"),
    ]
    text = (
        "the ranks are in different collectives: rank 0 barrier at a.py:3, rank 1 allreduce of "
        "float [2, 3]"
    )
    assert find_mismatch(f"rank 0, a.py:3: RuntimeError: {barrier}", seen) == (text, False)
    assert find_mismatch("timeout: rank 0 waited", seen) == ("", False)


def test_find_mismatch_of_equal_sizes_is_right() -> None:
    seen = [
        Trace(failures=[mismatch(rank, reduced(shape), 1 - rank)])
        for rank, shape in enumerate(["6", "2, 3"])
    ]
    _, is_false_alarm = find_mismatch(seen[0].failures[0], seen)
    assert is_false_alarm


def test_middle_params_are_on_the_scale_of_each_range() -> None:
    space = SearchSpace(
        layers=Int(1, 5),
        lr=Float(1e-4, 1.0, log=True),
        gamma=Float(0.5, 0.75),
        act=Categorical("tanh", "relu", "elu"),
    )
    assert make_middle_params(space) == {"layers": 3, "lr": 0.01, "gamma": 0.625, "act": "tanh"}


def test_probe_traces_a_training_without_changing_it() -> None:
    def train() -> torch.Tensor:
        torch.manual_seed(0)
        network = nn.Sequential(
            nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1)
        )
        network.register_parameter("idle", nn.Parameter(torch.zeros(3)))
        steps = torch.optim.Adam(network.parameters())
        for batch in torch.randn(5, 6, 4):
            steps.zero_grad()
            network(batch).square().mean().backward()
            steps.step()
        return torch.as_tensor(network(torch.ones(2, 4)))

    before = len(module._global_forward_pre_hooks), len(optimizer._global_optimizer_post_hooks)
    alone = train()
    with Probe() as probe:
        watched = train()
    assert watched.equal(alone)
    assert (
        len(module._global_forward_pre_hooks),
        len(optimizer._global_optimizer_post_hooks),
    ) == before
    seen = probe.trace
    assert (seen.steps, seen.without_gradient, len(seen.shapes)) == (5, ["idle"], 7)
    assert (dict(seen.normalization_layers), dict(seen.random_layers)) == (
        {"BatchNorm1d": 1},
        {"Dropout": 1},
    )
    assert len(seen.weights) == 1
    assert sorted(moment[:3] for moment in seen.networks) == [
        [0, steps, True] for steps in (0, 1, 2, 4)
    ]
    assert seen.network_shapes == seen.shapes
    assert [len(hashes) for _, hashes in seen.samples] == [6, 6, 6, 6, 6, 2]
    assert len({one for _, hashes in seen.samples for one in hashes}) == 31, (
        "the last two samples are alike"
    )
    assert seen.memory > 1 << 20
    assert Trace(**send_through_json(vars(seen))) == seen


def test_trace_is_json_data() -> None:
    seen = Trace(
        steps=3,
        steps_at_losses=[2, 3],
        weights=[[[1.0, math.inf]], []],
        networks=[[0, 0, True, [[1.0, math.inf]]], [1, 2, False, []]],
        network_shapes=[[3, 2], []],
        at_loss=[[[0.5, -0.25], [1e-300, 2.0]]],
        gradients=[[[1.0, 2.0]], []],
        shapes=[[2, 3], []],
        sharded=True,
        without_gradient=["idle"],
        random_layers={"Dropout": 2},
        normalization_layers={"BatchNorm1d": 1},
        synchronized_layers={"SyncBatchNorm": 1},
        samples=[[0, ["0123456789abcdef", "00ff000000000000"]], [1, []]],
        seconds=1.5,
        memory=1 << 40,
        failures=["it failed"],
        place="search.py:3",
        variables=["RANK"],
        has_children=True,
        was_cut=True,
    )
    assert vars(seen).keys() == vars(Trace()).keys()
    assert all(value != vars(Trace())[name] for name, value in vars(seen).items()), (
        "each field has a value to lose"
    )
    assert Trace(**send_through_json(vars(seen))) == seen
    assert Trace(**send_through_json(vars(Trace()))) == Trace()


def make_outcome(ranks: int, *losses: float, failure: str = "", **changes: Any) -> CheckOutcome:
    """Return the outcome of an evaluation with equal networks on all ranks."""
    curve = dict(enumerate(losses, start=1))
    evaluation = make_evaluation(0, curve=curve, failure=failure or None)
    fingerprints: list[Fingerprint] = [[[1.0, 2.0]]]
    traces = [
        Trace(steps=2, shapes=[[1]], weights=fingerprints, gradients=fingerprints)
        for _ in range(ranks)
    ]
    given: dict[str, Any] = {"has_offered_weights": False, "is_false_alarm": False}
    given |= {"rejection": "", "reports": 0, "remarks": (), **changes}
    return CheckOutcome(evaluation, traces, **given)


def judge(outcomes: CheckOutcomes) -> list[str]:
    """Return the findings that are not "ok"."""
    found = inspect_outcomes(replace(outcomes, weights_test=WeightsTest(has_test=True)))
    return [f"{finding.level}: {finding.text}" for finding in found if finding.level != "ok"]


def test_ranks_with_different_losses_are_wrong() -> None:
    remarks = ["ranks 0 and 1 reported different losses, 7 and 9", "it saves nothing"]
    whole = make_outcome(2, 4.0, 2.0, remarks=remarks)
    found = judge(CheckOutcomes(whole, whole, None, make_outcome(1, 4.0, 2.0)))
    assert "wrong: Ranks 0 and 1 reported different losses, 7 and 9" in found
    assert "look: It saves nothing" in found


def test_inspect_outcomes_compares_all_evaluations() -> None:
    whole = make_outcome(2, 4.0, 2.0)
    alone = make_outcome(1, 2.0, 1.0)
    offer = (
        "wrong: No weights are offered, so the run cannot keep those of the best network, "
        "and `test` will not be "
    )
    different = "The losses of 2 ranks and of 1 rank differ by 50.0%"
    assert judge(CheckOutcomes(whole, whole, None, make_outcome(1, 4.0, 2.0))) == [f"{offer}called"]
    assert judge(CheckOutcomes(whole, whole, None, alone))[:2] == [
        f"look: {different}",
        "wrong: The losses are 2 times those of 1 rank",
    ]
    again = make_outcome(2, 4.0, 3.0)
    assert judge(CheckOutcomes(whole, again, None, alone))[0] == (
        "look: The same seed on 2 ranks has different losses the second time, by 33.3%, from the "
        "same initial weights"
    )


def test_inspect_outcomes_names_failures() -> None:
    failed = make_outcome(2, failure="RuntimeError: it fails")
    alone = make_outcome(1, 1.0)
    assert judge(CheckOutcomes(failed, None, None, alone)) == [
        "wrong: The evaluation fails on 2 ranks, but not on 1: RuntimeError: it fails"
    ]
    whole = make_outcome(2, 1.0, 0.5, has_offered_weights=True)
    rejected = make_outcome(2, 1.0, rejection="it does not fit")
    assert "wrong: The evaluation cannot resume from its checkpoint: it does not fit" in judge(
        CheckOutcomes(whole, whole, rejected, alone)
    )


@pytest.mark.parametrize(("step", "level"), [(None, "wrong"), (r"epoch (\d+)", "look")])
def test_late_reports_of_epochs_are_not_wrong(step: str | None, level: str) -> None:
    script = Script("train.py", loss=r"loss (\S+)", step=step, resume=("{folder}/last.pt",))
    again = make_outcome(1, 3.0, 2.0, 1.0)
    paused = make_outcome(1, 3.0)
    resumed = make_outcome(1, 3.0, 1.0, 0.5)
    resumed = replace(resumed, evaluation=replace(resumed.evaluation, resumed_from_step=1))
    outcomes = CheckOutcomes(again, again, resumed, None, paused, script=script)
    assert f"{level}: After a resume from the first checkpoint, the losses differ by " in (
        finding.rpartition("by ")[0] + "by " for finding in judge(outcomes)
    )


def test_losses_after_a_resume_are_compared_by_epoch() -> None:
    script = Script("train.py", loss=r"loss (\S+)", step=r"epoch (\d+)", resume=("{folder}/a.pt",))
    again = make_outcome(1, 3.0, 2.0, 1.0)
    resumed = make_outcome(1)
    evaluation = replace(resumed.evaluation, curve={1: 3.0, 3: 1.0}, epoch=3, resumed_from_step=1)
    resumed = replace(resumed, evaluation=evaluation)
    outcomes = CheckOutcomes(again, again, resumed, None, make_outcome(1, 3.0), script=script)
    assert not any("After a resume" in finding for finding in judge(outcomes))
    worse = replace(resumed, evaluation=replace(evaluation, curve={1: 3.0, 3: 1.5}))
    outcomes = replace(outcomes, resumed=worse)
    assert "wrong: After a resume from the first checkpoint, the losses differ by 33.3%" in judge(
        outcomes
    )


def test_ranks_that_train_alone_are_the_only_cause() -> None:
    whole = make_outcome(2, 1.0)
    traces = [
        replace(trace, variables=[], weights=[[[float(rank), 2.0]]])
        for rank, trace in enumerate(whole.traces)
    ]
    outcomes = CheckOutcomes(
        replace(whole, traces=traces), None, None, None, script=Script("t.py", loss=r"loss (\S+)")
    )
    (finding,) = [each for each in judge(outcomes) if each.startswith("wrong")]
    assert "each rank trains alone" in finding


def test_branches_have_all_choices_on_which_others_depend() -> None:
    space = SearchSpace(
        optimizer=Categorical("sgd", "adam", "lion"),
        momentum=Float(0.0, 0.9, when={"optimizer": "sgd"}),
        activation=Categorical("relu", "tanh"),
    )
    branches = draw_other_branches(space, {"optimizer": "sgd", "momentum": 0.5})
    assert sorted(str(branch["optimizer"]) for branch in branches) == ["adam", "lion"]
    assert draw_other_branches(SearchSpace(x=Int(1, 9)), {"x": 1}) == []


def test_print_findings_returns_status_of_linters(capsys: pytest.CaptureFixture[str]) -> None:
    findings = [
        Finding("wrong", "It fails", "Mend it"),
        Finding("look", "It is odd"),
        Finding("ok", "It is fast"),
    ]
    assert print_findings(findings) == 1
    assert capsys.readouterr().out == (
        "wrong  It fails\n       Mend it\nlook   It is odd\nok     It is fast\n\n1 problem, 1 "
        "finding to look at\n"
    )
    assert print_findings(findings[2:]) == 0
    assert capsys.readouterr().out == "ok     It is fast\n\nNothing is wrong\n"
