"""Test searches over a training script: placeholders, reports, and proposed search files."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from hpo import Categorical, Float
from hpo.cli.search_source import make_script, parse_space, split_command
from hpo.errors import UsageError
from hpo.evaluation.program_supervision import ReportMerger
from hpo.evaluation.rank_group import reserve_port
from hpo.evaluation.report_reader import ReportReader
from hpo.evaluation.trainer_client import OutputPipe, TrainerOutput
from hpo.options import ProgramOptions
from hpo.process.messages import Report
from hpo.script_objective import Script, find_epochs, find_program, propose_loss_pattern
from tests.support.limits import scale


def test_reserved_port_is_free_for_torch_store_only() -> None:
    with reserve_port() as reserved:
        port = reserved.getsockname()[1]
        for address in ("127.0.0.1", "127.0.0.2", ""):
            with (
                socket.socket() as other,
                pytest.raises(OSError, match="Address already in use"),
            ):
                other.bind((address, port))
        store = TCPStore("127.0.0.1", port, 1, is_master=True)
        store.set("key", "value")
        assert store.get("key") == b"value"


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ([], "a search over a program must have hyperparameters. "),
        (["lr"], "--space must be NAME=..., got 'lr'. "),
        (["lr=Float(1"], "--space lr=Float(1: 'Float(1' is not a parameter. "),
        (
            ["lr=Foo(1, 2)"],
            "--space lr=Foo(1, 2): a parameter must be a Categorical, Float, Int, Ordinal, got "
            "'Foo",
        ),
        (
            ["lr=Float(__import__('os').getpid(), 2)"],
            "its arguments must be numbers, strings, True or False. ",
        ),
        (["lr=Float(1, 2, **{})"], "its arguments must be numbers, strings, True or False. "),
        (["lr=Float(2, 1)"], "--space: parameter 'lr': low must be less than high"),
        (["lr=Float(1, 2, three=4)"], "three"),
        (["a=Int(1, 2)", "a=Int(1, 3)"], "--space a=Int(1, 3): a must not be given twice"),
    ],
)
def test_parse_space_with_wrong_text_raises(texts: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        parse_space(texts)


def test_parse_space_matches_search_file(tmp_path: Path) -> None:
    texts = [
        "opt=Categorical('sgd', 'adam')",
        "momentum=Float(0.0, 0.9, when={'opt': 'sgd'})",
        "k=Ordinal(8, 16)",
    ]
    assert parse_space(texts) == dict(text.split("=", 1) for text in texts)
    assert split_command(["--seed", "1", "--", "train.py", "--", "x"]) == (
        ["--seed", "1"],
        ["train.py", "--", "x"],
    )
    assert split_command(["a.py"]) == (["a.py"], None)
    (tmp_path / "train.py").write_text("")
    path = str(tmp_path / "train.py")
    options = ProgramOptions(
        loss="l=(.*)",
        metrics=("acc=acc (.*)",),
        flags=("amp",),
        resume_args="--from '{folder}/a b'",
        first_report=2,
    )
    script = make_script(["python3", path], options)
    expected: dict[str, Any] = {
        "metrics": {"acc": "acc (.*)"},
        "flags": ["amp"],
        "resume": ["--from", "{folder}/a b"],
    }
    assert script == Script(path, loss="l=(.*)", first_report=2, **expected)
    found: dict[str, Any] = {}
    exec(script.format_search_file(parse_space(texts)), found)
    assert (found["objective"], list(found["space"].parameters)) == (
        script,
        ["opt", "momentum", "k"],
    )
    assert Script.from_data(json.loads(json.dumps(script.data))) == script


def test_script_fills_placeholders_or_appends_options() -> None:
    script = Script(
        "train.py",
        "--lr",
        "{lr}",
        "c-{trial}.yaml",
        '{"a": {"b": 1}}',
        "{{lr}}",
        "--m",
        "{m}",
        flags=["amp"],
    )
    number, switch = Float(0.0, 1.0), Categorical(True, False)
    script.check({"lr": number, "m": number, "amp": switch, "w": number, "big": switch}, [])
    known = {"trial": 7, "folder": "f", "seed": 3}
    params = {"lr": 0.1, "m": 0.9, "amp": True, "w": 3, "big": False}
    start = ["train.py", "--lr", "0.1", "c-7.yaml", '{"a": {"b": 1}}', "{lr}"]
    assert script.make_arguments(params, known) == [
        *start,
        "--m",
        "0.9",
        "--amp",
        "--w",
        "3",
        "--big",
        "false",
    ]
    del params["m"]
    assert script.make_arguments({**params, "amp": False}, known, ["m"]) == [
        *start,
        "--w",
        "3",
        "--big",
        "false",
    ]
    params = {"lr": -1e-4, "m": 0.9, "amp": False, "w": -2, "big": False}
    assert script.make_arguments(params, known)[1:] == [
        *(
            "--lr=-0.0001",
            "c-7.yaml",
            '{"a": {"b": 1}}',
            "{lr}",
            "--m",
            "0.9",
            "--w=-2",
            "--big",
            "false",
        )
    ]
    for wrong, message in (
        ({"amp": number}, "the flag 'amp' must be"),
        ({"trial": number, "amp": switch}, "named 'trial'"),
    ):
        with pytest.raises(ValueError, match=message):
            Script("train.py", flags=["amp"]).check(wrong, [])
    for command, options in (
        ([], {}),
        (["-m"], {}),
        (["train.py"], {"loss": "a("}),
        (["train.py"], {"loss": "abc"}),
        (["train.py"], {"metrics": {"a": "(x)(y)"}}),
        (["train.py"], {"first_report": 0}),
        (["train.py"], {"metrics": {"loss": "(x)"}}),
        (["train.py"], {"flags": "amp"}),
    ):
        with pytest.raises(ValueError, match=r"Script|pattern|first_report|flags"):
            Script(*command, **options)


@pytest.mark.parametrize(
    ("lines", "loss"),
    [
        (["epoch 1 eval_loss 0.31"], "0.31"),
        (["{'eval_loss': 0.5, 'lr': 1e-3}"], "0.5"),
        (["{'eval_loss': '0.5', 'epoch': '1'}"], "0.5"),
        (["{'eval_loss': '-2.5'}", "{'eval_loss': -12.5}"], "-2.5 -12.5"),
        (["Epoch 0: val loss: 1e-3, acc 3"], "1e-3"),
        (["train_loss=1.0", "val_loss=2.0"], "2.0"),
        (["step 0: train loss 10.9, val loss 10.8"], "10.8"),
        (["loss: 3"], "3"),
        (["Valid: 100%|##| 5/5 [00:00, 2981.03it/s, valid_loss=1.3960]"], "1.3960"),
        (["val_loss 0.5123|acc 0.9"], "0.5123"),
        (["val_loss: 0.5."], "0.5"),
        (["nothing", "loss is low"], None),
    ],
)
def test_propose_loss_pattern_reads_loss(lines: list[str], loss: str | None) -> None:
    pattern = propose_loss_pattern(lines)
    found = [match[1] for line in lines if (match := re.search(pattern, line))] if pattern else []
    assert found == (loss.split() if loss is not None else [])


def test_report_reader_uses_lines_or_file() -> None:
    script = Script("train.py", loss=r"loss=(\S+)", metrics={"acc": r"acc=(\S+)"})
    reports = ReportReader(script)
    for line in ("acc=0.5", "loss=value", "loss=2.0 acc=0.6", "acc=bad loss=1.0", "loss=nan"):
        reports.take_line(line)
    taken = reports.take_new_reports()
    assert taken[:2] == [Report(2.0, {"acc": 0.6}), Report(1.0, {})]
    assert taken[2].mistake == "the validation loss is nan"
    Path(reports.path).write_text('{"loss": 9}\n')
    assert reports.take_new_reports() == [], "the reader already uses lines"
    reports.close()
    reports = ReportReader(Script("train.py", loss=r"(?:\w+\s?)*val_loss: (\S+)"))
    reports.take_line(f"{'a' * 60} loss: 3")
    (report,) = reports.take_new_reports()
    assert report.mistake.startswith("the search for --loss or --metric took more than 1 s in 'aaa")
    reports.close()
    reports = ReportReader(script)
    with Path(reports.path).open("a") as file:
        file.write('{"loss": 3, "acc": 1}\n{"lo')
        file.flush()
        assert reports.take_new_reports() == [Report(3.0, {"acc": 1.0})]
        file.write('ss": 2}\n[1]\n{"loss": true}\n')
    rest = reports.take_new_reports()
    assert rest[0] == Report(2.0, {})
    assert [report.mistake for report in rest[1:]] == [
        f"a report must be a JSON object with a loss and metrics, got {text}"
        for text in ("[1]", '{"loss": true}')
    ]
    reports.take_line("loss=5")
    assert reports.take_new_reports() == []
    reports.close()


def test_last_loss_of_each_step_is_reported() -> None:
    script = Script(
        "t.py", loss=r"loss=(\S+)", step=r"epoch (\d+)|start", metrics={"acc": r"acc=(\S+)"}
    )
    reports = ReportReader(script)
    for line in ("start", "epoch 0", "loss=1 acc=0.1", "loss=3"):
        reports.take_line(line)
    assert reports.take_new_reports() == []
    reports.take_note("weights", "7-1", "stdout")
    for line in ("epoch 0 loss=2", "start", "acc=0.5"):
        reports.take_line(line)
    reports.take_line("epoch 1 loss=5")
    assert reports.take_new_reports() == [
        Report(2.0, {"acc": 0.1}, offers_weights=True, weights="7-1", epoch=0)
    ]
    reports.take_line("loss=4")
    assert reports.take_last_reports(is_whole=False) == [], "the program was cut off in epoch 1"
    assert reports.take_last_reports() == [Report(4.0, {"acc": 0.5}, epoch=1)]
    reports.close()


@pytest.mark.parametrize(
    ("lines", "epochs", "warning"),
    [
        (
            ["Test: [0/3] loss=1", "Test: [1/3] loss=2"],
            None,
            "--loss has matched 'Test: [0/3] loss=1' and 'Test: [1/3] loss=2'. If this is one",
        ),
        (["val 1/2, loss=1", "val 2/2, loss=2"], None, "'val 1/2, loss=1' and 'val 2/2, loss=2'."),
        (["[1/2] loss=1", "[2/2] loss=2"], 2, ""),
        (
            ["Epoch 0: 9/9 loss=9", "Epoch 0 batch loss=1", "Epoch 1 loss=2"],
            None,
            "'Epoch 0: 9/9 loss=9' and 'Epoch 0 batch loss=1'. If",
        ),
        (["Epoch 0 loss=1", "Epoch 1 loss=2", "loss=2", "loss=2"], None, ""),
        (["loss=1"] * 4, 2, "more than 3 losses, and its arguments name 2 epochs. If"),
        (["loss=1"] * 3, 2, ""),
        (["Epoch [1/3] loss=1", "Epoch [2/3] loss=2"], None, ""),
        (["at 1/2/2026 loss=1", "at 2/2/2026 loss=2"], None, ""),
        (["[1/3] train loss", "[2/3] loss=2", "[2/4] loss=1"], None, ""),
    ],
)
def test_several_losses_of_an_epoch_are_noticed(
    lines: list[str], epochs: int | None, warning: str
) -> None:
    late = "--step has matched no line, so only the last loss of the program counts"
    for step, first, expected in (
        (None, "", warning),
        (r"epoch (\d+)", "epoch 1", ""),
        (r"epoch (\d+)", "", late),
    ):
        reports = ReportReader(Script("train.py", loss=r"loss=(\S+)", step=step))
        reports.epochs = epochs
        for line in (first, *lines):
            reports.take_line(line)
        found = reports.find_warning(len(reports.take_last_reports()), is_whole=False)
        assert expected in found
        assert bool(found) == bool(expected)
        reports.close()


@pytest.mark.parametrize(
    ("arguments", "epochs"),
    [
        ("--epochs 3", 3),
        ("--num-epochs=12 --lr 1", 12),
        ("--max_epochs 4", 4),
        ("-n_epoch 5", 5),
        ("--epochs 3.5", None),
        ("--warmup-epochs 3", None),
        ("", None),
    ],
)
def test_number_of_epochs_is_found_in_arguments(arguments: str, epochs: int | None) -> None:
    assert find_epochs(["train.py", *arguments.split()]) == epochs


@pytest.mark.parametrize(
    ("command", "launcher"),
    [
        ("-m torch.distributed.run --nproc_per_node=2 train.py", "torch.distributed.run"),
        ("python -u -m torch.distributed.launch train.py", "torch.distributed.launch"),
        ("accelerate launch --cpu --num_processes 2 train.py", "accelerate launch"),
        ("/opt/bin/fabric run --devices 2 train.py", "fabric run"),
        ("env A=1 deepspeed --num_gpus 2 train.py --lr 1", "deepspeed"),
        ("bash -c 'srun train.py'", "srun"),
    ],
)
def test_launcher_before_the_script_is_refused(command: str, launcher: str) -> None:
    remedy = "the search starts the ranks. Name the script: -- train.py"
    with pytest.raises(ValueError, match=f"^{launcher} must not be in the command.*{remedy}$"):
        find_program(Script(*shlex.split(command)))


@pytest.mark.parametrize(
    ("command", "program", "without"),
    [
        ("torchrun --nproc_per_node=2 train.py --lr 1", "train.py --lr 1", ""),
        ("torchrun --standalone -m pack.train a.py", "-m pack.train a.py", ""),
        ("python -u -m torch.distributed.run --nnodes 2 train.py", "train.py", ""),
        (
            "python3 -m torch.distributed.launch --use_env train.py -m x",
            "train.py -m x",
            "without the option --local_rank",
        ),
        ("deepspeed --module pack.train", "-m pack.train", "without the option --local_rank"),
        ("/venv/bin/python3.12 -m torch.distributed.run train.py", "train.py", ""),
        (
            "accelerate-launch --quiet -- train.py",
            "train.py",
            "without accelerate's configuration",
        ),
        (
            "/opt/bin/accelerate launch --num_processes 4 --main-process-port=1 train.py --cpu",
            "train.py --cpu",
            "without accelerate's configuration",
        ),
    ],
)
def test_launcher_of_ranks_is_left_out(
    command: str,
    program: str,
    without: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    Path("pack").mkdir()
    Path("pack/train.py").touch()
    script = make_script(shlex.split(command), ProgramOptions())
    assert list(script.command) == shlex.split(program)
    printed = capsys.readouterr().out
    assert re.fullmatch(
        r".+ is left out: each rank of a worker runs (pack\.train|train\.py).*\n", printed
    )
    assert printed.endswith(f", {without}\n" if without else f"{script.name}\n")


@pytest.mark.parametrize(
    "command",
    [
        "torchrun --no-python bash train.py",
        "srun -n 2 train.py",
        "fabric run --devices 2 train.py",
        "torchrun --nproc_per_node 2",
        "torchrun --nproc_per_node 2 /usr/bin/lightning fit --config train.py",
        "torchrun -m",
        "deepspeed --module",
    ],
)
def test_launcher_that_may_do_more_is_refused(command: str) -> None:
    with pytest.raises(UsageError, match="must not be in the command"):
        make_script(shlex.split(command), ProgramOptions())


@pytest.mark.parametrize(
    "command",
    ["train.py --launcher srun", "env train.py accelerate launch", "env --argv0 mpirun a"],
)
def test_name_of_a_launcher_elsewhere_is_accepted(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    assert find_program(Script(*shlex.split(command))) is not None


@pytest.mark.parametrize("length", [3998, 5000, 65_530, 65_536, 65_537, 200_000])
def test_loss_of_a_long_line_is_read_whole_or_not_at_all(length: int) -> None:
    reports = ReportReader(Script("train.py", loss=r"loss=([\d.]+)"))
    output = TrainerOutput(listener=reports)
    pipe = OutputPipe(output, "stdout")
    for _ in range(2):
        text = f"{'x' * (length - 7)} loss=12.75\nloss=3\n".encode()
        for part in (text[:length], text[length:]):  # The first ends within the number.
            while part:
                part = part[os.write(pipe.write_end, part[:60_000]) :]
                pipe.read()
    os.close(pipe.write_end)
    pipe.close()
    is_read = length < 65_537
    losses = [report.loss for report in reports.take_new_reports()]
    assert losses == ([12.75, 3, 12.75, 3] if is_read else [3, 3])
    warning = reports.find_warning(len(losses), is_whole=False)
    assert ("more than 64 KiB" in warning) == (not is_read)
    reports.close()


def test_maximized_score_is_a_negative_loss_and_a_metric() -> None:
    reports = ReportReader(Script("train.py", maximize=r"acc (\S+)", metrics={"f1": r"f1 (\S+)"}))
    for line in ("acc 0.5 f1 0.4", "acc nan", "acc 0.75"):
        reports.take_line(line)
    first, second, third = reports.take_new_reports()
    assert first == Report(-0.5, {"score": 0.5, "f1": 0.4})
    assert second.mistake == "the validation loss is nan"
    assert third == Report(-0.75, {"score": 0.75})
    assert reports.find_warning(3, is_whole=False) == ""
    reports.close()


def test_metric_without_a_number_is_noticed() -> None:
    patterns = {"f1": r"f1 (\S+)", "acc": r"acc (\S+)", "auc": r"auc (\S+)"}
    reports = ReportReader(Script("train.py", loss=r"loss (\S+)", metrics=patterns))
    for line in ("f1 0.5", "loss 1", "acc 50%", "loss 2"):
        reports.take_line(line)
    assert "--metric acc and auc has read no number" in reports.find_warning(2, is_whole=True)
    assert reports.find_warning(2, is_whole=False) == "", "it may print them at its end"
    reports.close()


@pytest.mark.parametrize(
    ("line", "score"),
    [
        (" * Acc@1 89.656 Acc@5 100", "Acc@1 89.656"),
        ("eval_accuracy: 89.656", "accuracy: 89.656"),
        ("'roc_auc': 89.656", "roc_auc': 89.656"),
        ("Accuracy of the network: 89.656", "Accuracy of the network: 89.656"),
        ("r2=89.656", "r2=89.656"),
        ("accuracy 0.5, loss 89.656", ""),
        ("accumulated 89.656", ""),
        ("surface: 89.656", ""),
        ("val_loss=89.656", ""),
    ],
)
def test_loss_that_seems_to_be_a_score_is_warned_about(line: str, score: str) -> None:
    reports = ReportReader(Script("train.py", loss=r"(89\.656)"))
    reports.take_line(line)
    assert [report.loss for report in reports.take_new_reports()] == [89.656]
    warning = reports.find_warning(1, is_whole=False)
    told = f"--loss has matched {score!r}, and the lowest is the best. "
    assert warning.startswith(told) if score else warning == ""
    reports.close()


def test_report_merger_compares_ranks() -> None:
    merger = ReportMerger(2)
    first, second = [Report(1.0), Report(0.5)], [Report(1.0000001), Report(0.6)]
    assert merger.add_reports(0, first[:1], 0) == [Report(1.0)]
    assert merger.add_reports(1, second[:1], 0) == [], "the same loss"
    assert merger.add_reports(1, second[1:], 1) == [], "the leader may report it, too"
    loss, mistake = merger.add_reports(0, first, 0)
    assert loss == Report(0.5)
    assert mistake.mistake.startswith(
        "ranks 0 and 1 reported different losses, 0.5 and 0.6, as loss 2: "
    )
    assert merger.add_reports(0, first, 0) == []


def test_report_merger_without_leader_reports_uses_ranks() -> None:
    merger, reports = ReportMerger(3), [Report(1.0), Report(0.5), Report(0.2)]
    assert merger.add_reports(1, reports[:1], 0) == []
    assert merger.add_reports(2, reports[:1], 0) == []
    assert merger.add_reports(0, [], 0) == []
    assert merger.add_reports(1, reports[1:2], 1) == reports[:2], (
        "rank 1 has reported its next loss"
    )
    assert merger.add_reports(2, reports, 0) == reports[2:]
    assert merger.add_reports(1, reports, 0) == []


def test_report_outside_search_does_nothing() -> None:
    code = (
        "import sys, hpo\nassert hpo.report(0.5, accuracy=1) is None\nassert hpo.trial is None and "
        "hpo.folder is None\nassert not {'torch', 'numpy', 'optuna', 'mpi4py'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=scale(60))


def test_flag_may_have_dashes() -> None:
    script = Script("train.py", flags=["optim.amp"])
    script.check({"optim_amp": Categorical(True, False)}, [])
    assert script.make_arguments({"optim_amp": True}, {}) == ["train.py", "--optim.amp"]
    script = Script("train.py", flags=["no-accel"])
    script.check({"no_accel": Categorical(True, False)}, [])
    assert script.make_arguments({"no_accel": True}, {}) == ["train.py", "--no-accel"]
    assert script.make_arguments({"no_accel": False}, {}) == ["train.py"]
    with pytest.raises(ValueError, match="the flag 'no-accel' must be a Categorical"):
        script.check({"no_accel": Float(0.0, 1.0)}, [])
