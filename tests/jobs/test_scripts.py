"""Test training scripts for torchrun as objectives, on the command line and in search files."""

from __future__ import annotations

import json
import math
import re
import shlex
import signal
import time
from pathlib import Path
from typing import Any

import optuna
import pytest

from hpo.results.reader import RunReader
from tests.support.chaos import Victim, kill_at_end
from tests.support.launch import HPO, LR, SCRIPTS, SEARCH, Mpi, run_torchrun
from tests.support.limits import scale
from tests.support.run_output import find_complete_losses, load_trials, remove_loading_lines


def test_script_has_the_losses_of_torchrun(mpi: Mpi, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text((SCRIPTS / "ddp.py").read_text())
    options = [
        *LR,
        "--space",
        "hidden=Int(4, 64, log=True)",
        "--loss",
        r"val_loss=(\S+)",
        "--run-dir",
        "run",
    ]
    command = ["torchrun", "--nproc_per_node=2", "train.py", "--epochs", 2]
    job = mpi.run(4, *SEARCH, *options, "--evaluations", 6, "--", *command, cwd=tmp_path)
    assert (job.returncode, job.stderr) == (0, "")
    note = "torchrun --nproc_per_node=2 is left out: each rank of a worker runs train.py\n"
    assert job.stdout.count(note) == 1
    trials = load_trials(tmp_path / "run")
    assert len(find_complete_losses(trials)) == 6
    assert all(sorted(trial.intermediate_values) == [1, 2] for trial in trials)
    printed = run_torchrun(tmp_path, "train.py", params={"epochs": 2, **trials[3].params})
    expected = [float(loss) for loss in re.findall(r"val_loss=(\d+\.\d{6})", printed)]
    assert list(trials[3].intermediate_values.values()) == expected
    assert trials[3].values == [min(expected)]
    printed = (tmp_path / "run" / "logs" / "3.txt").read_text()
    assert printed.count("has seen 128 samples") == 2, "each rank has half of them"
    source = (tmp_path / "run" / "search_space-1.py").read_text()
    assert "lr=Float(0.001, 0.1, log=True),\n    hidden=Int(4, 64, log=True)," in source
    assert "objective = Script('train.py', '--epochs', '2', loss='val_loss=(\\\\S+)')\n" in source


WAITED = (
    r"timeout: rank 0 waited 4 s \(--collective-timeout\) at failing.py:\d+ for rank 1, which was "
    r"at failing.py:\d+"
)
FAILURES = {
    "raise": r"rank 1, failing.py:\d+: ValueError: injected",
    "status": r"rank 1: failing.py ended with status 3",
    "text": r"rank 1: failing.py ended with status 1; its last line on stderr: no luck",
    "hint": r"rank 1: failing.py ended with status 1; "
    r"its last error on stderr: package.SomeError: no luck",
    "early": (
        r"rank 0, failing.py:\d+: RuntimeError: .*Connection (reset|closed) by peer.*; rank 1 had "
        r"ended before"
    ),
    "_exit": (
        r"rank 0, failing.py:\d+: RuntimeError: .*Connection (reset|closed) by peer.*; rank 1 had "
        r"ended before"
    ),
    "_exit3": r"rank 1: the trainer ended with status 3",
    "kill": r"rank 1: the trainer was ended by SIGKILL, perhaps by the kernel for want of memory",
    "segfault": r"rank 1, failing.py:\d+: the trainer was ended by SIGSEGV",
    "hang": WAITED,
    "nan": r"rank 1: the validation loss is nan",
    "forward": WAITED,
    "backward": WAITED,
    "differ": (
        r"ranks 0 and 1 reported different losses, [\d.]+ and 5, as loss 1: report the mean over "
        r"all ranks, or on one rank only. If each rank trains alone, use --ranks-per-worker 1"
    ),
}


def test_program_failure_fails_its_evaluation(mpi: Mpi, tmp_path: Path) -> None:
    given = [way for failing in FAILURES for way in (failing, f"well-{failing}")]
    (tmp_path / "given.json").write_text(json.dumps([{"way": way, "x": 0.5} for way in given]))
    choices = ", ".join(map(repr, given))
    (tmp_path / "my_search.py").write_text(
        "from hpo import Categorical, Float, Script, SearchSpace\n\n"
        f"space = SearchSpace(way=Categorical({choices}), x=Float(0.0, 1.0))\n"
        f"objective = Script({str(SCRIPTS / 'failing.py')!r})\n"
    )
    options = ["--enqueue", "given.json", "--evaluations", len(given), "--collective-timeout", "4s"]
    job = mpi.run(4, *SEARCH, "my_search.py", *options, "--run-dir", "run", cwd=tmp_path)
    assert job.returncode == 0, job.stderr
    trials = {trial.params["way"]: trial for trial in load_trials(tmp_path / "run")}
    for way, pattern in FAILURES.items():
        assert re.fullmatch(pattern, trials[way].user_attrs["failure"]), way
        assert trials[f"well-{way}"].values == [pytest.approx(0.5 + 1 / 3)], way
        assert trials[f"well-{way}"].user_attrs["metrics"] == {"step": 2.0}
    shown = re.findall(r"^worker \d rank 0 \| Traceback", job.stderr, re.MULTILINE)
    assert len(shown) == 2, "ranks whose peer has ended early; other peers are cancelled"


ORDINARY = [
    "types",
    "logging",
    "atexit",
    "thread",
    "file",
    "source",
    "spawn",
    "seeds",
    "call",
    "comma",
    "exit",
    "late",
]


def test_script_runs_as_with_python(mpi: Mpi, tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "train.py").symlink_to(SCRIPTS / "ordinary.py")
    (tmp_path / "given.json").write_text(json.dumps([{"way": way} for way in ORDINARY]))
    options = [
        "--space",
        f"way=Categorical({', '.join(map(repr, ORDINARY))})",
        "--loss",
        r"val_loss=(\S+)",
    ]
    options += ["--enqueue", "given.json", "--evaluations", str(len(ORDINARY)), "--run-dir", "run"]
    job = mpi.run(2, *SEARCH, *options, "--", "scripts/train.py", cwd=tmp_path)
    assert job.returncode == 0, job.stderr
    assert "SyntaxWarning" in job.stderr
    assert all(line.startswith("worker 0 rank ") for line in job.stderr.splitlines()), (
        "only the script itself prints its warnings"
    )
    trials = {trial.params["way"]: trial for trial in load_trials(tmp_path / "run")}
    assert {way: trial.values for way, trial in trials.items()} == {way: [1.0] for way in ORDINARY}
    assert [(tmp_path / f"file-{rank}").read_text() for rank in range(2)] == ["written"] * 2
    printed = (tmp_path / "run" / "logs" / f"{trials['seeds'].number}.txt").read_text()
    assert len(set(re.findall(r"drawn (\S+)", printed))) == 2, (
        "ranks without a seed draw different numbers"
    )


def test_shell_command_runs_on_each_rank(mpi: Mpi, tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text(
        '#!/bin/sh\nenv | grep -E "^(PMI|OMPI|HYDRA|SLURM_PROCID|MASTER_PORT=29500)"\n'
        'echo "rank $RANK of $WORLD_SIZE: $*"\n'
        '[ "$RANK" = 0 ] && echo "{\\"loss\\": 0.$2, \\"places\\": 1}" >> "$HPO_METRICS" '
        '&& touch "$4/here"\n'
        # Otherwise rank 1 would end the evaluation before rank 0 has written.
        '[ "$2" != 3 ] || [ "$RANK" != 0 ]\n'
    )
    script.chmod(0o755)
    options = ["--space", "k=Int(1, 3)", "--evaluations", 3, "--run-dir", "run"]
    job = mpi.run(
        2, *SEARCH, *options, "--", "./train.sh", "--k", "{k}", "--out", "{folder}", cwd=tmp_path
    )
    assert (job.returncode, job.stderr) == (0, "")
    trials = {trial.params["k"]: trial for trial in load_trials(tmp_path / "run")}
    assert [trials[k].values for k in (1, 2)] == [[0.1], [0.2]]
    assert trials[1].user_attrs["metrics"] == {"places": 1.0}
    assert trials[3].user_attrs["failure"].endswith("./train.sh ended with status 1")
    for k, trial in trials.items():
        folder = tmp_path / "run" / "trials" / str(trial.number)
        assert [path.name for path in folder.iterdir()] == ["here"]
        printed = (tmp_path / "run" / "logs" / f"{trial.number}.txt").read_text()
        lines = {f"rank {rank} | rank {rank} of 2: --k {k} --out {folder}\n" for rank in range(2)}
        assert set(printed.splitlines(keepends=True)) == lines


def has_checkpoint(trial: optuna.trial.FrozenTrial) -> bool:
    """Return whether a trial is running and has reported two losses.

    Before it reports a loss, it writes a checkpoint.
    """
    return not trial.state.is_finished() and len(trial.intermediate_values) > 1


def list_ancestors(
    trial: optuna.trial.FrozenTrial, trials: list[optuna.trial.FrozenTrial]
) -> list[optuna.trial.FrozenTrial]:
    """Return the trials that a trial continues."""
    before = trial.user_attrs.get("retry_of")
    return [] if before is None else [*list_ancestors(trials[before], trials), trials[before]]


def is_interrupted(trial: optuna.trial.FrozenTrial) -> bool:
    return trial.user_attrs.get("failure") == "interrupted"


def test_program_resumes_from_its_own_files(mpi: Mpi, tmp_path: Path) -> None:
    options = [
        "--space",
        "speed=Float(0.0, 0.5)",
        "--loss",
        r"validation loss: (\S+)",
        "--run-dir",
        "run",
        "--resume",
    ]
    options += [
        "--resume-args",
        "--resume {folder}/last.json",
        "--pruner",
        "asha",
        "--evaluations",
        "12",
    ]
    # Each individual is worse than the previous, so that the first paused ones are promoted later.
    (tmp_path / "given.json").write_text(
        json.dumps([{"speed": 0.5 - number / 25} for number in range(12)])
    )
    options += ["--enqueue", "given.json"]
    command = [
        "--",
        SCRIPTS / "continuing.py",
        "--out",
        "{folder}",
        "--epochs",
        12,
        "--seconds",
        0.2,
    ]
    with kill_at_end(
        Victim(mpi, 4, [*SEARCH, *options, *command], tmp_path, tmp_path / "log")
    ) as victim:
        assert victim.wait_for("\n 3/12 ")
        # The test has a time limit.
        while not any(map(has_checkpoint, load_trials(tmp_path / "run"))):
            time.sleep(0.02)
        victim.job.send_signal(signal.SIGKILL)
        victim.wait(20)
    job = mpi.run(2, *SEARCH, *options, *command, cwd=tmp_path)
    assert job.returncode == 0, job.stderr
    trials = load_trials(tmp_path / "run")
    later = [trial for trial in trials if "resumed_from_step" in trial.user_attrs]
    assert any(
        trials[trial.user_attrs["retry_of"]].user_attrs.get("failure") == "interrupted"
        for trial in later
    )
    assert any("paused_after" in trials[trial.user_attrs["retry_of"]].user_attrs for trial in later)
    for trial in trials:
        assert all(
            any(
                loss == pytest.approx(8 * (1 - trial.params["speed"]) ** epoch, abs=1e-5)
                for epoch in range(1, 13)
            )
            for loss in trial.intermediate_values.values()
        )
        if not any(map(is_interrupted, list_ancestors(trial, trials))):
            # No pause repeats an epoch. On busy cores, it may finish some before it is stopped.
            losses = list(trial.intermediate_values.values())
            epochs = [
                round(math.log(loss / 8, 1 - trial.params["speed"]))
                for loss in losses
                if trial.params["speed"] > 0.01
            ]
            assert epochs == sorted(set(epochs))
    assert [trial for trial in trials if trial.state.name == "COMPLETE"]


@pytest.mark.parametrize(
    ("command", "file"),
    [
        ("--resume-args '--mode resume' --resume-file state.json", "state.json"),
        ("--resume-args '--load {checkpoint}' --resume-file 'checkpoint-*'", "checkpoint-2"),
        ("--resume-args '--load {folder}/checkpoint-2'", "checkpoint-2"),
        ("--resume-args '--mode resume' --resume-file state.json", ""),
        ("--resume-args '--mode again' --resume-file state.json", "state.json"),
    ],
)
def test_stopped_program_resumes_or_starts_again(
    mpi: Mpi, tmp_path: Path, command: str, file: str
) -> None:
    options = ["--space", "x=Float(0.0, 8.0)", "--loss", r"loss (\S+)", "--evaluations", 1]
    options += [
        "--run-dir",
        "run",
        "--resume",
        *shlex.split(command),
        "--",
        SCRIPTS / "resuming.py",
    ]
    options += ["--out", "{folder}", "--waits", tmp_path / "go", "--saves", 1 if file else 3]
    with kill_at_end(Victim(mpi, 1, [*SEARCH, *options], tmp_path, tmp_path / "log")) as victim:
        assert victim.wait_for("epoch 2: ")
        while not any(map(has_checkpoint, load_trials(tmp_path / "run"))):  # limited by the test
            time.sleep(0.02)
        victim.job.send_signal(signal.SIGTERM)
        victim.wait(30)
    folder = tmp_path / "run" / "trials" / "0"
    assert (folder / file).exists()
    (folder / "kept").touch()
    (tmp_path / "go").touch()
    job = mpi.run(1, *SEARCH, *options, cwd=tmp_path)
    assert job.returncode == 0, job.stderr
    is_refused = "again" in command
    assert job.stderr.count("warning: ") == is_refused, job.stderr
    assert is_refused == (
        "warning: trial 1 restarts, since it cannot resume from its checkpoint: rank 0: "
        "resuming.py ended with status 1; its last line on stderr: --mode: invalid choice again"
        in job.stderr
    )
    (trial,) = [trial for trial in load_trials(tmp_path / "run") if trial.state.name == "COMPLETE"]
    first = 8 + trial.params["x"]
    assert list(trial.intermediate_values.values()) == pytest.approx(
        [first / 2**epoch for epoch in range(1, 5)], abs=1e-5
    )
    resumes = bool(file) and not is_refused
    assert trial.user_attrs.get("resumed_from_step") == (2 if resumes else None)
    # A program that starts again has an empty folder, and the old one is kept.
    kept = folder if resumes else folder.with_name("0.1")
    assert [path.parent for path in folder.parent.glob("*/kept")] == [kept]


def test_program_reads_its_rank_as_under_srun(mpi: Mpi, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import os\nrank, local = os.environ['SLURM_PROCID'], os.environ['SLURM_LOCALID']\n"
        "assert (rank, local) == (os.environ['RANK'], os.environ['LOCAL_RANK'])\n"
        "print('rank', rank, 'loss 1')\n"
    )
    options = ["--space", "x=Float(0.0, 8.0)", "--loss", r"loss (\S+)", "--evaluations", 1]
    slurm: Any = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0"}  # of the batch script
    job = mpi.start(2, *SEARCH, *options, "--", "train.py", cwd=tmp_path, **slurm)
    printed, errors = job.communicate(timeout=scale(60))
    assert job.returncode == 0, f"{printed}{errors}"
    assert "rank 1 | rank 1 loss 1" in printed


def test_failure_of_a_program_says_what_is_wrong_with_it(mpi: Mpi, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import os, hpo\nif hpo.trial:\n    raise RuntimeError('Found no NVIDIA driver')\n"
        "print('the loss: . of', hpo.trial)\n"
    )
    options = ["--space", "x=Float(0.0, 8.0)", "--loss", r"loss: (\S+)", "--evaluations", 2]
    options += ["--run-dir", "run", "--max-failures", 0]
    for _ in range(2):  # It stops after the first evaluation without a loss.
        mpi.run(1, *SEARCH, *options, "--resume", "--", "train.py", cwd=tmp_path)
    first, second = [trial.user_attrs["failure"] for trial in load_trials(tmp_path / "run")]
    assert first == (
        "no loss was found: --loss has matched '.' in 'the loss: . of 0', which is not a number; "
        r"its group must match the number alone, such as ([\w.+-]*\w)"
    )
    assert second == "rank 0, train.py:3: RuntimeError: Found no NVIDIA driver"


def test_edited_program_is_noticed_on_resume(mpi: Mpi, tmp_path: Path) -> None:
    (tmp_path / "code" / "wandb").mkdir(parents=True)  # as the package wandb makes
    (tmp_path / "code" / "train.py").write_text(
        "try:\n    import wandb\nexcept ImportError:\n    wandb = None\n"
        "import helper\nprint(f'loss {helper.loss}')\n"
    )
    options = ["--space", "x=Float(0.0, 8.0)", "--loss", r"loss (\S+)", "--run-dir", "run"]
    printed = []
    for count, loss in enumerate((0.3, 100.5, 100.5), 1):
        (tmp_path / "code" / "helper.py").write_text(f"loss = {loss}\n")
        (tmp_path / "code" / f"new{count}.py").touch()
        (tmp_path / "code" / "other.py").write_text(f"loss = {count}\n")
        more = ["--evaluations", count, "--resume", "--", "code/train.py"]
        job = mpi.run(1, *SEARCH, *options, *more, cwd=tmp_path)
        assert job.returncode == 0, job.stderr
        printed.append(job.stdout)
    changed = "helper.py has changed since the last session: losses may not be comparable\n"
    assert [changed in text for text in printed] == [False, True, False]
    assert "other.py" not in "".join(printed), "the program does not import it"
    (tmp_path / "code" / "train.py").write_text("print('loss 1.5')\n")
    (tmp_path / "code" / "helper.py").unlink()
    more = ["--evaluations", 4, "--resume", "--metric", r"m=loss (\S+)", "--", "code/train.py"]
    job = mpi.run(1, *SEARCH, *options, *more, cwd=tmp_path)
    assert "helper.py and train.py have changed since the last session" in job.stdout
    assert "the search on the command line has changed since the last session: 1 line" in job.stdout


def test_run_without_loss_stops_and_proposes_pattern(mpi: Mpi, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import os\nprint('epoch 0 eval_loss 0.31 lr 1e-3')\nif os.environ['RANK'] == '0':\n    "
        "os._exit(0)\n"
    )
    options = ["--space", "k=Int(1, 30)", "--evaluations", 3, "--run-dir", "run"]
    job = mpi.run(2, *SEARCH, *options, "--", "python", "train.py", cwd=tmp_path)
    assert (job.returncode, job.stderr) == (3, "")
    stopped = (
        r"Stopped: no loss was found in what the program printed; "
        r"--loss 'eval_loss\s+([\w.+-]*\w)' would read it; the "
        "last line is 'epoch 0 eval_loss 0.31 lr 1e-3'. To resume: the same command with "
    )
    (remedy,) = re.findall(rf"{re.escape(stopped)}(.*)\n", job.stdout)
    assert remedy == r"--run-dir run --resume and --loss 'eval_loss\s+([\w.+-]*\w)'"
    assert [trial.state.name for trial in load_trials(tmp_path / "run")] == ["FAIL"]
    look = RunReader(tmp_path / "run").take_snapshot()
    assert look.remedy == r"--loss 'eval_loss\s+([\w.+-]*\w)'"
    added = shlex.split(remedy.replace(" and ", " "))
    job = mpi.run(2, *SEARCH, *options, *added, "--", "python", "train.py", cwd=tmp_path)
    assert job.returncode == 0, job.stderr
    assert list(find_complete_losses(load_trials(tmp_path / "run")).values()) == [0.31, 0.31]


def test_module_and_spawned_ranks_are_run(mpi: Mpi, tmp_path: Path) -> None:
    (tmp_path / "spawning.py").write_text(
        "import os, sys\nimport torch, torch.distributed as dist, torch.multiprocessing as "
        "mp\nimport hpo\n\n\ndef train(rank, x):\n    os.environ['MASTER_PORT'] = sys.argv[-1]\n  "
        "  dist.init_process_group('gloo', rank=rank, world_size=2)\n    value = torch.tensor(x)\n"
        "    dist.all_reduce(value)\n    if rank == 0:\n        hpo.report(value, "
        "trial=hpo.trial)\n    dist.barrier()\n    dist.destroy_process_group()  # otherwise "
        "torch aborts at the exit now and then\n\n\nif __name__ == '__main__':\n    "
        "mp.spawn(train, args=(float(sys.argv[2]),), nprocs=2)\n"
    )
    options = ["--space", "x=Float(0.0, 1.0)", "--evaluations", 2, "--run-dir", "run"]
    port = str(20000 + int(tmp_path.stat().st_ino) % 9000)
    job = mpi.run(1, *SEARCH, *options, "--", "-m", "spawning", "--x", "{x}", port, cwd=tmp_path)
    assert job.returncode == 0, job.stderr
    for trial in load_trials(tmp_path / "run"):
        assert trial.values == [pytest.approx(2 * trial.params["x"])]
        assert trial.user_attrs["metrics"] == {"trial": trial.number}


def test_folder_of_program_stays_when_it_resumes(mpi: Mpi, tmp_path: Path) -> None:
    (tmp_path / "my_search.py").write_text(
        "import time\nfrom hpo import Int, SearchSpace\n\nspace = SearchSpace(k=Int(1, 99))\n\n\n"
        "def objective(params, worker):\n    with (worker.folder / "
        "f'rank{worker.rank}').open('a') as file:\n        file.write(f'{worker.trial} "
        '{params["k"]}\\n\')\n    while (worker.folder / '
        "f'rank{worker.rank}').read_text().count('\\n') < 2 and worker.trial == 1:\n        "
        "time.sleep(0.1)\n    return params['k']\n"
    )
    options = ["my_search.py", "--evaluations", 3, "--run-dir", "run", "--resume"]
    with kill_at_end(Victim(mpi, 2, [*SEARCH, *options], tmp_path, tmp_path / "log")) as victim:
        assert victim.wait_for("\n1/3 ")
        victim.job.send_signal(signal.SIGTERM)
        victim.wait(20)
    assert mpi.run(2, *SEARCH, *options, cwd=tmp_path).returncode == 0
    trials = load_trials(tmp_path / "run")
    assert [trial.user_attrs.get("retry_of") for trial in trials] == [None, None, 1, None]
    folders = {
        path.name: (path / "rank0").read_text() for path in (tmp_path / "run" / "trials").iterdir()
    }
    for number, trial in ((0, trials[0]), (1, trials[1]), (3, trials[3])):
        line = f"{number} {trial.params['k']}\n"
        assert folders[str(number)] == (2 * line if number == 1 else line)


MISTAKES = [
    (["train.py"], "SEARCH_SPACE must be a file with a `space`, got train.py. "),
    (
        [*LR, "--", "srun", "train.py"],
        "srun must not be in the command, since the search starts the ranks. Name the script: "
        "-- train.py\n",
    ),
    (
        [*LR, "--", "accelerate", "launch", "--config_file=a.yaml", "train.py"],
        "accelerate launch --config_file=a.yaml: the search starts the script without accelerate",
    ),
    ([*LR, "--", "broken.py"], "broken.py:1: '(' was never closed\n"),
    (
        [*LR, "--resume-args", "--resume last.pt", "--", "train.py"],
        "train.py: --resume-args must name a file in {folder}",
    ),
    (
        [*LR, "--resume-args", "--mode resume --out {folder}/", "--", "train.py"],
        "train.py: --resume-args must name a file in {folder}",
    ),
    (
        [*LR, "--resume-file", "/tmp/last.pt", "--", "train.py"],
        "train.py: --resume-file must be a path below the folder of the evaluation, ",
    ),
    (
        [*LR, "--step", "epoch", "--loss", "(.)", "--", "train.py"],
        "the pattern of step must have one group, such as step=(\\S+), got 'epoch' with 0",
    ),
    (
        ["--space", "seed=Int(0, 9)", "--", "train.py"],
        "train.py: hyperparameters and settings must not be named 'seed'",
    ),
    (
        ["--space", "weight-decay=Float(0, 1)", "--", "train.py"],
        "--space weight-decay=Float(0, 1): write weight_decay=",
    ),
    ([*LR, "--", "nothere.py"], "nothere.py: there is no such file in "),
    ([*LR, "--", "-m", "package.trian"], "-m package.trian: there is no module 'trian' in "),
    ([*LR, "--", "-m", "package"], "-m package: there is no module '__main__' in "),
    ([*LR, "--", "-m", "nopackage"], "-m nopackage: there is no module 'nopackage' in "),
    (
        [*LR, "--", "-m", "train.py"],
        "-m train.py: -m must be followed by the name of a module, such as package.module. ",
    ),
    ([*LR, "--", "nocommand"], "nocommand: there is no such command, and no such file in "),
    (
        [*LR, "--", "train.py", "{lrr}"],
        "train.py: placeholders must be among lr, trial, folder, seed, ranks, got 'lrr' in '{lrr}'",
    ),
    (
        [*LR, "--flag", "x", "--", "train.py"],
        "train.py: a flag must be one of the hyperparameters lr, got 'x'",
    ),
    ([*LR, "--pbt", "--", "train.py"], "--pbt must not be given for a program, got train.py. "),
    (
        [*LR, "--confirm-seeds", "2", "--", "train.py"],
        "--confirm-seeds 2: the command of train.py must have a placeholder for the seed, such as "
        "--seed {seed}",
    ),
    (["--loss", "(x)", "train.py"], "--loss must be used with a program after --"),
    ([*LR, "train.py", "--", "train.py"], "train.py and a program after -- exclude each other"),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES)
def test_mistake_in_command_is_one_message(
    mpi: Mpi, tmp_path: Path, arguments: list[str], message: str
) -> None:
    (tmp_path / "train.py").write_text("import argparse\n")
    (tmp_path / "broken.py").write_text("print(\n")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("raise SystemExit('it is not imported')\n")
    job = mpi.run(2, *SEARCH, *arguments, cwd=tmp_path)
    assert (job.returncode, remove_loading_lines(job.stdout)) == (2, "")
    assert job.stderr.startswith(f"error: {message}")
    assert job.stderr.count("\n") == 1
    assert {path.name for path in tmp_path.iterdir()} == {"train.py", "broken.py", "package"}


LONELY = """
import subprocess, torch
torch.manual_seed(0)
network = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
inputs = torch.randn(64, 4)
for batch in inputs.split(16):
    optimizer.zero_grad()
    loss = network(batch).pow(2).mean()
    loss.backward()
    optimizer.step()
print(f"val_loss={loss.item():.4f}")
torch.save(network.state_dict(), "model.pt")
subprocess.Popen(["sleep", "60"])
"""


def test_check_finds_mistakes_of_script(mpi: Mpi, tmp_path: Path) -> None:
    check = [*HPO, "check", "--loss", r"val_loss=(\S+)", "--"]
    job = mpi.run(2, *check, SCRIPTS / "ddp.py", "--epochs", 2, cwd=tmp_path)
    assert (job.returncode, job.stderr) == (0, "")
    assert job.stdout.startswith(
        f"{SCRIPTS / 'ddp.py'} --epochs 2\ntwice on 2 ranks, and once on 1 rank; "
    )
    for point in (
        "ok     The same seed on 2 ranks has the same losses twice, to the last digit\n",
        "ok     The program reads LOCAL_RANK, MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE\n",
        "ok     All ranks have the same network after 16 steps, and train on different batches\n",
        "ok     2 reports by --loss 'val_loss=(\\S+)' in the first evaluation\n",
    ):
        assert point in job.stdout
    (tmp_path / "train.py").write_text(LONELY)
    job = mpi.run(2, *check, "train.py", cwd=tmp_path)
    assert (job.returncode, job.stderr) == (1, "")
    for point in (
        "look   Each of 2 ranks trains on the same batches\n",
        "wrong  The program reads neither RANK, LOCAL_RANK nor WORLD_SIZE: each rank trains "
        "alone, on all\n",
        "look   Evaluations write to the same files: model.pt\n",
        "look   Processes are still running when the program ends\n",
        "\n1 problem, 3 findings to look at\n",
    ):
        assert point in job.stdout
