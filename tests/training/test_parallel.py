"""Test strategies by which ranks share a network, against a plain loop, and their parts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import nn

from hpo.training import (
    DropoutMasks,
    ParallelSettings,
    augment_images,
    compute_means,
    replace_dropout,
)
from hpo.training.pipeline import list_blocks, partition_stages
from hpo.training.shared_layers import SharedBatchNorm, convert_to_channels_last
from search_spaces import cifar10_resnet
from tests.support.launch import PROGRAMS
from tests.support.limits import scale

Told = dict[str, list[float]]


def assert_as_by_textbook(told: Told, _: int) -> None:
    """Assert that all losses equal those of a plain loop.

    The cases have batches that the ranks cannot divide equally, with and without batch
    normalisation, dropout, gradient clipping, and gradient accumulation.
    """
    assert len(told) == 33
    wrong = {case: differences for case, differences in told.items() if not max(differences) < 1e-5}
    assert wrong == {}


def assert_exact(told: Told, _: int) -> None:
    assert sorted(told) == ["pipeline", "replicate", "shard"]
    assert max(map(max, told.values())) < 1e-9, told


def assert_close(told: Told, _: int) -> None:
    assert len(told) == 12
    assert all(1e-7 < steps < 0.02 and validated < 0.02 for steps, validated in told.values()), told


def assert_root_is_whole(told: Told, _: int) -> None:
    """Assert that the steps and both moments of all four parameters are gathered."""
    assert sorted(told["sizes"]) == sorted([1, 4, 4, 1, 4, 4, 1, 16, 16, 1, 16, 16])


def assert_plain_values(told: Told, _: int) -> None:
    made, loaded = told["steps"]
    assert made == loaded > 0


def assert_whole_states(told: Told, ranks: int) -> None:
    """Assert that each strategy returns and loads whole states, and each rank holds its part."""
    assert len(told) == 12
    for case, numbers in told.items():
        if case.startswith("size"):
            largest, whole, block = numbers
            part = whole if "replicate" in case else whole / ranks + block
            assert whole / ranks <= largest <= part, case
        else:
            plain, loaded, trained = numbers
            assert plain == pytest.approx(trained, rel=1e-6), case
            assert loaded == pytest.approx(trained, rel=1e-9), case


def assert_stage_on_each_device(told: Told, ranks: int) -> None:
    """Assert that a pipeline stage on two devices has the same losses as a plain loop.

    Both devices are the CPU. Computations and transfers are the same as with GPUs.
    """
    assert told.pop("parts") == [2] * ranks
    given, whole = told.pop("whole")
    assert given == whole
    assert len(told) == 4
    assert max(map(max, told.values())) < 1e-5, told


def assert_same_steps_left_out(told: Told, _: int) -> None:
    """Assert that all ranks skip an optimizer step if the gradients of one of them overflow."""
    assert told == {"after 0": [1.0, 1.0], "after 1": [0.0, 0.0]}


# The functions of tests/programs/parallel.py and what holds for their cases.
CHECKS = {
    "plain": assert_as_by_textbook,
    "exact": assert_exact,
    "mixed": assert_close,
    "state": assert_whole_states,
    "root": assert_root_is_whole,
    "plain_values": assert_plain_values,
    "several": assert_stage_on_each_device,
    "scaler": assert_same_steps_left_out,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        (1, "plain,mixed,several"),
        (2, "plain,exact,state,several,scaler,root,plain_values"),
        (3, "mixed"),
        (4, "plain,state"),
    ],
)
def test_each_strategy_computes_the_losses_of_one_process(ranks: int, cases: str) -> None:
    command = [sys.executable, str(PROGRAMS / "parallel.py"), str(ranks), cases]
    job = subprocess.run(command, capture_output=True, text=True, check=False, timeout=scale(200))
    assert (job.returncode, job.stderr) == (0, "")
    told: dict[str, Told] = json.loads(job.stdout)
    assert sorted(told) == sorted(cases.split(","))
    for case, numbers in told.items():
        CHECKS[case](numbers, ranks)


def test_augment_images_moves_and_mirrors_each_as_drawn() -> None:
    images = torch.rand(64, 3, 16, 12)
    drawn = torch.rand(64, 3)
    got = augment_images(images, drawn, "crop-and-flip")
    padded = nn.functional.pad(images, (1, 1, 2, 2))
    for number, (down, right, mirrored) in enumerate(drawn.tolist()):
        top, left = int(down * 5), int(right * 3)
        expected = padded[number, :, top : top + 16, left : left + 12]
        assert got[number].equal(expected.flip(-1) if mirrored < 0.5 else expected)
    assert augment_images(images, drawn, "crop")[0].equal(
        padded[0, :, int(drawn[0, 0] * 5) :, int(drawn[0, 1] * 3) :][:, :16, :12]
    )
    assert augment_images(images, drawn, "none").equal(images)
    assert augment_images(images[:0], drawn[:0], "crop").shape == (0, 3, 16, 12)


def test_dropout_masks_keep_their_share_and_do_not_repeat() -> None:
    draws, shape = DropoutMasks(seed=1), torch.Size([50, 40, 20])
    draws.begin_forward(0, torch.arange(50), torch.device("cpu"))
    masks = [
        draws.draw_mask(layer, shape, p) for layer, p in ((0, 0.1), (1, 0.1), (0, 0.1), (2, 0.9))
    ]
    assert [mask.float().mean().item() for mask in masks] == pytest.approx(
        [0.9, 0.9, 0.9, 0.1], abs=0.01
    )
    draws.begin_forward(1, torch.arange(50), torch.device("cpu"))
    masks.append(draws.draw_mask(0, shape, 0.1))
    for one in range(3):
        for other in (*range(one + 1, 3), 4):  # independent masks agree on 0.9 ** 2 + 0.1 ** 2
            assert (masks[one] == masks[other]).float().mean().item() == pytest.approx(
                0.82, abs=0.01
            )
    samples = masks[0].flatten(1).float()
    assert (torch.corrcoef(samples) - torch.eye(50)).abs().max() < 6 / 800**0.5
    assert (torch.corrcoef(samples[:, :100].T) - torch.eye(100)).abs().max() < 6 / 50**0.5


def test_dropout_mask_of_a_sample_is_the_same_on_any_rank() -> None:
    draws = DropoutMasks(seed=3)
    shared = replace_dropout(nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.5)), draws)
    inputs = torch.rand(10, 6)
    draws.begin_forward(7, torch.arange(10), inputs.device)
    whole = shared(inputs)
    mine = torch.arange(1, 10, 3)
    draws.begin_forward(7, mine, inputs.device)
    part = shared(inputs[mine])
    assert (part == 0).equal(whole[mine] == 0)
    assert part.allclose(whole[mine])
    assert whole.count_nonzero() < whole.numel()
    shared.eval()
    assert shared(inputs).count_nonzero() == whole.numel()


def test_dropout_of_wrong_shapes_or_recomputed_blocks_raises() -> None:
    draws = DropoutMasks(seed=3)
    shared = replace_dropout(nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.5)), draws)
    draws.begin_forward(0, torch.arange(10), torch.device("cpu"))
    with pytest.raises(
        ValueError, match=r"first dimension .* number of samples, 10, got shape \(7, 10, 4\)"
    ):
        shared(torch.rand(7, 10, 6))
    output = torch.utils.checkpoint.checkpoint(shared, torch.rand(10, 6), use_reentrant=False)
    with pytest.raises(RuntimeError, match=r"blocks that torch\.utils\.checkpoint recomputes"):
        output.sum().backward()


def test_channels_last_keeps_1d_and_3d_convolutions() -> None:
    layers = (nn.Conv3d(2, 3, 2), nn.Conv2d(2, 3, 2), nn.Conv1d(2, 3, 2))
    convert_to_channels_last(nn.Sequential(*layers))
    assert [layer.weight.is_contiguous() for layer in layers] == [True, False, True]


def layers(*sizes: int) -> nn.Sequential:
    """Return a network with a layer for each number of parameters, which may be 0."""
    return nn.Sequential(*(nn.Linear(1, size, bias=False) if size else nn.ReLU() for size in sizes))


@pytest.mark.parametrize(
    ("sizes", "count", "expected"),
    [
        ((1, 1, 1, 1), 2, [2, 2]),
        ((0, 5, 0, 1, 1, 3), 2, [3, 3]),
        ((9, 1, 1, 1), 3, [1, 1, 2]),
        ((1, 2, 3, 4, 5, 6, 7, 8, 9), 3, [5, 2, 2]),
        ((4, 0, 0, 4), 2, [3, 1]),
    ],
)
def test_partition_balances_parameters_of_stages(
    sizes: tuple[int, ...], count: int, expected: list[int]
) -> None:
    stages = partition_stages(list_blocks(layers(*sizes)), count)
    assert [name for stage in stages for name, _ in stage] == list(map(str, range(len(sizes))))
    found = [len(stage) for stage in stages]
    worst = max(
        sum(p.numel() for _, block in stage for p in block.parameters()) for stage in stages
    )
    assert worst == max(
        sum(sizes[sum(expected[:i]) : sum(expected[: i + 1])]) for i in range(count)
    )
    assert all(found)


def test_partition_follows_stage_costs() -> None:
    network = nn.Sequential(
        nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Linear(2, 2), nn.Linear(2, 2)
    )
    stages = partition_stages(list_blocks(network), 2, {"0.0": 9.0, "0.1": 1.0, "1": 1.0, "2": 1.0})
    assert [[name for name, _ in stage] for stage in stages] == [["0.0"], ["0.1", "1", "2"]]


def test_partition_keeps_each_occurrence_of_a_layer() -> None:
    activation, dropout = nn.ReLU(), nn.Dropout(0.5)
    network = nn.Sequential(
        nn.Linear(2, 2), activation, dropout, nn.Linear(2, 2), activation, dropout
    )
    replace_dropout(network, DropoutMasks(seed=1))
    assert not any(type(layer) is nn.Dropout for layer in network)
    assert network[2] is network[5]
    assert [name for name, _ in list_blocks(network)] == list("012345")
    linear = nn.Linear(2, 2)
    with pytest.raises(
        ValueError, match=r"must not share parameters .*, got 1\.(weight|bias) in two stages"
    ):
        partition_stages(list_blocks(nn.Sequential(linear, linear)), 2)


def test_partition_of_unsuitable_networks_raises() -> None:
    with pytest.raises(
        ValueError, match=r"must be an nn.Sequential for parallel=pipeline, got Linear"
    ):
        list_blocks(nn.Linear(1, 1))
    with pytest.raises(
        ValueError, match=r"at least 3 blocks with parameters .*, got 2\. Set .* to at most 2"
    ):
        partition_stages(list_blocks(layers(1, 0, 1)), 3)
    with pytest.raises(ValueError, match="stage_costs must be for the blocks 0, 1, got layer1"):
        partition_stages(list_blocks(layers(1, 1)), 2, {"layer1": 1.0})
    tied = layers(2, 2)
    tied[1].weight = tied[0].weight
    with pytest.raises(
        ValueError, match=r"must not share parameters .*, got 1\.weight in two stages"
    ):
        partition_stages(list_blocks(tied), 2)


def test_means_of_a_loss_that_is_not_per_sample_raise() -> None:
    outputs, targets = torch.zeros(5, 3), torch.zeros(5, dtype=torch.int64)
    worker: Any = SimpleNamespace(rank=0, size=1, device=torch.device("cpu"))
    with pytest.raises(ValueError, match=r"measure must return .*, shape \(5,\), got shape \(\)"):
        compute_means(lambda _: [nn.functional.cross_entropy(outputs, targets)], 5, worker)


def test_shared_batch_norm_without_bias_equals_torch(tmp_path: Path) -> None:
    inputs = torch.randn(6, 3, 4, 4, generator=torch.Generator().manual_seed(1))
    results = []
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        for layer in (nn.BatchNorm2d(3), SharedBatchNorm(3)):
            layer.register_parameter("bias", None)
            outputs = layer(inputs)
            outputs.square().sum().backward()
            results.append([outputs.detach(), layer.weight.grad, layer.running_var])
    finally:
        dist.destroy_process_group()
    torch.testing.assert_close(results[1], results[0])


def test_optimizer_decays_only_weights() -> None:
    network = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Linear(2, 2))
    params = {"optimizer": "adamw", "adamw_lr": 0.1, "adamw_decay": 0.25}
    decays, others = cifar10_resnet.make_optimizer(network, params).param_groups
    assert (decays["weight_decay"], others["weight_decay"]) == (0.25, 0.0)
    assert [p.dim() for p in decays["params"]] == [4, 2]
    assert [p.dim() for p in others["params"]] == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("schedule", "epochs", "expected"),
    [
        ("step", 2, {0: 1.0, 1: 1.0, 2: 0.1, 3: 0.1}),
        ("cosine", 2, {0: 1.0, 1: 0.8536, 2: 0.5, 3: 0.1464}),
        ("cosine", 20, {0: 1 / 3, 1: 2 / 3, 2: 1.0, 21: 0.5}),
        ("one-cycle", 10, {0: 0.04, 5: 1.0, 12: 0.5, 19: 4e-6}),
    ],
)
def test_lr_schedule_has_expected_rates(
    schedule: str, epochs: int, expected: dict[int, float]
) -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    scheduler = cifar10_resnet.make_schedule(optimizer, schedule, epochs, steps_per_epoch=2)
    rates = []
    for _ in range(2 * epochs):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert {step: rates[step] for step in expected} == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"parallel": "ddp"}, "parallel must be one of replicate, shard, pipeline, got ddp"),
        ({"precision": "fp16"}, "precision must be one of float32, bfloat16, float16, got fp16"),
        ({"accumulate": 0}, "accumulate must be at least 1, got 0"),
        ({"microbatches": 4}, "microbatches must be 1 unless parallel=pipeline, got 4"),
    ],
)
def test_parallel_settings_with_wrong_values_raise(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ParallelSettings(**wrong)  # type: ignore[arg-type]
