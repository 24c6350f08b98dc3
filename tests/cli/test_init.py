"""Test `hpo init`: the search file that it proposes from the options of a script."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hpo import Categorical, Float, Int
from tests.support.launch import SCRIPTS, Hpo
from tests.support.limits import scale

OPTIONS = """
import argparse
p = argparse.ArgumentParser()
p.add_argument("--lr", type=float, default=0.01)
p.add_argument("-w", "--weight-decay", type=float, default=0.0)
p.add_argument("--optimizer", choices=["sgd", "adam"], default="sgd")
p.add_argument("--batch-size", default=32, type=int)
p.add_argument("--dropout", type=float, default=0.1)
p.add_argument("--amp", action="store_true")
p.add_argument("--lambda", type=float, default=2.0)
p.add_argument("--data", default="x")
p.add_argument("--seed", type=int, default=42)
p.add_argument("path")
raise SystemExit("it is not run")
print(f"epoch {0} train_loss: {1:.3f} val_loss: {2:.4f}")
"""


def test_init_proposes_eight_of_many_options(tmp_path: Path, hpo: Hpo) -> None:
    names = [*"abcdefg", "lr", "weight-decay", "opt"]
    options = [f"p.add_argument('--{name}', choices=[1, 2])" for name in names]
    options += ["p.add_argument('--out', required=True)", "p.add_argument('rest', nargs='*')"]
    options += ["p.add_argument('--no-accel', action='store_true')"]
    options += ["p.add_argument('--bn', action=argparse.BooleanOptionalAction)"]
    code = "import argparse\np = argparse.ArgumentParser()\n" + "\n".join(options)
    for printed_loss in (
        "'Test loss: %.4f' % x",
        "'Test loss: {:.4f}'.format(x)",
        "'Test loss:', x",
    ):
        (tmp_path / "train.py").write_text(f"{code}\nprint({printed_loss})\n")
        status, printed, errors = hpo("init", tmp_path / "train.py")
        assert (status, errors) == (0, "")
        found: dict[str, Any] = {}
        exec(printed, found)
        assert list(found["space"].parameters) == [*"abcde", "lr", "weight_decay", "opt"]
        assert found["objective"].command[1:3] == ("--out", "OUT")
        assert "# Replace OUT by a value.\n" in printed
        assert "# Add flags=['no-accel', 'bn'] if" in printed
        pattern = found["objective"].loss
        assert re.findall(pattern, "epoch 1 Test loss: 0.5000") == ["0.5000"]


def test_init_proposes_search_file_from_script_options(tmp_path: Path, hpo: Hpo) -> None:
    (tmp_path / "train.py").write_text(OPTIONS)
    status, printed, errors = hpo("init", tmp_path / "train.py")
    assert (status, errors) == (0, "")
    found: dict[str, Any] = {}
    exec(printed, found)
    weight_decay, chosen = Float(1e-4, 1e-2, log=True), Categorical("sgd", "adam")
    assert found["space"].parameters == {
        "lr": Float(1e-3, 0.1, log=True),
        "weight_decay": weight_decay,
        "optimizer": chosen,
        "batch_size": Int(8, 128, log=True),
        "dropout": Float(0.0, 0.5),
    }
    assert found["objective"].command == (
        str(tmp_path / "train.py"),
        "PATH",
        *("--weight-decay", "{weight_decay}", "--batch-size", "{batch_size}", "--seed", "{seed}"),
    )
    assert re.findall(found["objective"].loss, "epoch 0 train_loss: 1.000 val_loss: 2.0000") == [
        "2.0000"
    ]
    for line in (
        "    # amp=Categorical(True, False),\n",
        "    # lambda_=Float(0.5, 8.0, log=True),  # and '--lambda', '{lambda_}' in the Script\n",
        "# Add flags=['amp'] if one of them is searched.\n",
        "# Replace PATH by a value.\n",
    ):
        assert line in printed
    uncommented = re.sub(r"^    # ", "    ", printed, flags=re.MULTILINE)
    exec(uncommented, found)
    assert len(found["space"].parameters) == 7
    for text, message in (
        ("x = 1", "has no options that could be searched"),
        ("x = (", "is not a Python script"),
        ("from hydra import main", "takes its options from hydra, which cannot be read here. "),
        ("import hydra as h", "takes its options from hydra, which cannot be read here. "),
        ("HfArgumentParser(1)", "takes its options from HfArgumentParser, which cannot be read "),
    ):
        (tmp_path / "train.py").write_text(text)
        status, printed, errors = hpo("init", tmp_path / "train.py")
        assert (status, printed) == (2, "")
        assert errors.startswith(f"error: {tmp_path / 'train.py'} {message}")


TYPED = """
@dataclasses.dataclass
class Base:
    seed: int = 0
    parent: Optional[Base] = None

@dataclasses.dataclass
class Optim:
    lr: float = 1e-3
    name: Literal["sgd", "adam"] = "sgd"

@dataclasses.dataclass
class Args(Base):
    data: str
    optim: Optim = dataclasses.field(default_factory=Optim)
    batch_size: Optional[int] = 32
    clip: "float | None" = 1.0
    drop: Annotated[float, tyro.conf.arg(name="x")] = 0.25
    amp: bool = False
    shuffle: bool = True
    folder: Path = Path("out")
    made: int = dataclasses.field(default=3, init=False)
    either: Optim | Base = None
    ema: Optional[Optim] = None

@dataclasses.dataclass
class Needed:
    lr: float
    wd: Union[None, float] = 0.1

def evaluate(n: int = 4): ...

async def nested(o: Needed, data: str): ...

class Trainer:
    def __init__(self, lr: float = 0.1): ...
    def fit(self): ...

def train(data: str, lr: float = 0.1, *, amp: bool = False, dropout: float = 0.2): ...

class Callback(SaveConfigCallback):
    def __init__(self, parser: str): ...

class Model(Base):
    shown: int = 7
    def __init__(self, lr: float = 0.1, width=3, hidden: int = 32): ...

class Data(LightningDataModule):
    def __init__(self, batch_size: int = 8): ...
"""


def propose(folder: Path, hpo: Hpo, code: str) -> tuple[dict[str, Any], tuple[str, ...], str]:
    """Return the proposed parameters, the command after the name of the script, and the file."""
    script = folder / "train.py"
    script.write_text(TYPED + code)
    status, printed, errors = hpo("init", script)
    assert (status, errors) == (0, "")
    found: dict[str, Any] = {}
    exec(printed, found)
    return dict(found["space"].parameters), found["objective"].command[1:], printed


def test_fields_of_dataclasses_are_options(tmp_path: Path, hpo: Hpo) -> None:
    parameters, command, printed = propose(tmp_path, hpo, "tyro.cli(Args)")
    assert parameters == {
        "optim_lr": Float(1e-4, 1e-2, log=True),
        "optim_name": Categorical("sgd", "adam"),
        "batch_size": Int(8, 128, log=True),
        "drop": Float(0.0, 0.5),
    }
    assert command == (
        *("--data", "DATA", "--seed", "{seed}"),
        *("--optim.lr", "{optim_lr}", "--optim.name", "{optim_name}"),
    )
    assert "# amp=Categorical(True, False),\n" in printed
    assert "# Add flags=['amp'] if one of them is searched." in printed
    assert "# clip=Float(0.25, 4.0, log=True),\n" in printed
    assert "shuffle" not in printed, "it is turned off by --no-shuffle"
    assert not {"made", "folder", "either", "ema"} & set(re.findall(r"\w+", printed))


def test_arguments_of_functions_are_options(tmp_path: Path, hpo: Hpo) -> None:
    parameters, command, printed = propose(tmp_path, hpo, "jsonargparse.CLI(train)")
    assert list(parameters) == ["lr", "dropout"]
    assert command == ("DATA",), "jsonargparse takes arguments without a default by position"
    assert "# amp=Categorical(True, False),\n" in printed
    assert "flags" not in printed, "jsonargparse needs --amp true"
    parameters, command, _ = propose(tmp_path, hpo, "import tyro\ntyro.cli(train)")
    assert (list(parameters), command) == (["lr", "dropout"], ("--data", "DATA"))
    parameters, command, _ = propose(tmp_path, hpo, "CLI(nested)")
    assert list(parameters) == ["o_lr", "o_wd"]
    assert command == ("DATA", "--o.lr", "{o_lr}", "--o.wd", "{o_wd}")
    _, command, _ = propose(tmp_path, hpo, "CLI(nested, as_positional=False)")
    assert command[:2] == ("--data", "DATA")
    for call in ("CLI([train, evaluate])", "CLI(Trainer)"):
        (tmp_path / "train.py").write_text(TYPED + call)
        status, printed, errors = hpo("init", tmp_path / "train.py")
        assert (status, printed) == (2, "")
        assert "takes its options from CLI, which cannot be read here" in errors


def test_arguments_of_lightning_classes_are_options(tmp_path: Path, hpo: Hpo) -> None:
    for call in (
        "LightningCLI(Model, Data)",
        "LightningCLI(datamodule_class=Data, model_class=Model, save_config_callback=Callback)",
    ):
        parameters, command, printed = propose(tmp_path, hpo, call)
        assert {*parameters} == {"model_lr", "data_batch_size"}
        folder = ("--trainer.default_root_dir", "{folder}")
        assert command[:5] == ("fit", *folder, "--seed_everything", "{seed}")
        assert {command[index] for index in (5, 7)} == {"--model.lr", "--data.batch_size"}
        assert "shown" not in printed, "only arguments are options"
        assert "# model_hidden=Int(8, 128, log=True),  # and '--model.hidden', " in printed
        assert "width" not in printed, "its type is not known"
    alone = propose(tmp_path, hpo, "LightningCLI(Model, run=False)")[1]
    assert alone[:3] == ("--trainer.default_root_dir", "{folder}", "--seed_everything")


@pytest.mark.slow
def test_proposal_for_trainer_of_transformers_runs(tmp_path: Path, hpo: Hpo) -> None:
    script = tmp_path / "train.py"
    script.write_text((SCRIPTS / "transformers_trainer.py").read_text())
    printed = hpo("init", script)[1]
    found: dict[str, Any] = {}
    exec(printed, found)
    objective = found["objective"]
    parameters = found["space"].parameters
    assert {*parameters} == {"learning_rate", "weight_decay", "per_device_train_batch_size"}
    values = {name: parameter.low for name, parameter in parameters.items()}
    arguments = objective.make_arguments(values, {"seed": 7})
    more = ["--use_cpu", "--num_train_epochs", "1", "--eval_strategy", "epoch"]
    output = subprocess.run(
        [sys.executable, *arguments, *more, "--output_dir", str(tmp_path / "out")],
        capture_output=True,
        text=True,
        check=True,
        timeout=scale(120),
    ).stdout
    assert len(re.findall(objective.loss, output)) == 1, output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "expected"),
    [("lightning_cli.py", {"model_lr"}), ("tyro_script.py", {"lr"})],
)
def test_proposal_for_typed_parsers_runs(
    script: str, expected: set[str], tmp_path: Path, hpo: Hpo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each evaluation has its own folder, in which LightningCLI saves its configuration."""
    monkeypatch.chdir(tmp_path)
    found: dict[str, Any] = {}
    exec(hpo("init", SCRIPTS / script)[1], found)
    objective = found["objective"]
    parameters = found["space"].parameters
    assert {*parameters} == expected
    values = {name: parameter.high for name, parameter in parameters.items()}
    for trial in range(2):
        others = {"seed": 7, "trial": trial, "folder": tmp_path / str(trial)}
        command = [sys.executable, *objective.make_arguments(values, others)]
        job = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=scale(60)
        )
        assert job.returncode == 0, job.stderr
        assert re.findall(objective.loss, job.stdout)
