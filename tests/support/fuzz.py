"""Damage run directories as failing disks and users do, and check how they are read.

Each reader must either work or raise an error with a clear message. `make soak` checks this 1,000
times.
"""

from __future__ import annotations

import functools
import io
import json
import random
import re
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import typer

from hpo import SearchSpace
from hpo.errors import UsageError
from hpo.objectives import ONLY_LOSS
from hpo.results.reader import RunReader
from hpo.results.summary import SessionOutcome, write_summary
from hpo.run.initial_evaluations import read_enqueued, read_warm_start
from hpo.store.evaluations import Evaluation
from hpo.store.weights import read_weights
from hpo.trackers.tracker_updater import ShownEvaluations, TrackerUpdater
from hpo.trainer.search_file import load_search_file
from hpo.views.live.run_status import compute_run_status, format_header
from hpo.views.live.table_rows import (
    RowOrder,
    make_columns,
    make_failure_rows,
    make_island_rows,
    make_rung_rows,
    make_worker_rows,
)
from hpo.views.page import html_report
from tests.support.launch import call_hpo
from tests.support.runs import (
    QUICK,
    claim_evaluation,
    complete_evaluations,
    make_run_of_everything,
    start_evaluation,
    start_session,
)

DEEP = "[" * 100_000 + "]" * 100_000
VALUES: list[Any] = [
    *(
        None,
        True,
        -1,
        0,
        1,
        10**30,
        1e308,
        -0.5,
        float("nan"),
        float("inf"),
        "",
        "0",
        "\x1b[31m\x00\u202e",
    ),
    *("\ud800", "x" * 100_000, [], {}, [1], {"a": {}}, [[["a"]]], {"\x1b\ud800": [None]}),
]
COMMANDS = [
    *(
        "top",
        "top --json",
        "top --failed",
        "top --failed --json",
        "show",
        "show 3",
        "show 7 --json",
        "show confirm-0",
    ),
    *(
        "best",
        "best --python",
        "export --to csv",
        "export --to json",
        "export --to parquet -o {out}/table --overwrite",
    ),
    "report -o {out}/report.html --overwrite",
]
JOURNAL = "study.log"
_COMMANDS_AT_ONCE = 6


def make_whole_runs(folder: Path) -> list[Path]:
    """Make two undamaged runs: one with evaluations in every state, and a finished one."""
    everything = make_run_of_everything(folder)
    session = start_session(folder / "finished", evaluations=7, pruner="asha")
    record = session.open_record()
    complete_evaluations(record, 1, 2, 3)
    record.fail(start_evaluation(record, 4), "rank 0: ValueError: no", "Traceback ...", 0.1)
    record.prune(start_evaluation(record, 5), 5.3, 0.1, {}, paused_after=3)
    record.prune(start_evaluation(record, 6), 6.3, 0.1, {}, paused_after=3)
    attributes = {"island": 1, "worker": 0, "generation": 7}
    promoted = record.promote(record.read_evaluations()[-1], attributes)
    record.record_resume(promoted, [7.0, 6.5, 6.3], 0.1)
    record.complete(promoted, 6.3, 0.2, {})
    heir = start_evaluation(record, 7)
    record._storage.set_trial_user_attr(heir.trial_id, "inherits", 0)
    record.complete(heir, 0.9, 0.2, {})
    for run_dir in (everything, folder / "finished"):
        _write_other_files(run_dir)
    return [everything, folder / "finished"]


def _write_other_files(run_dir: Path) -> None:
    import torch
    from safetensors.torch import save_file

    run = RunReader(run_dir)
    winner = run.find_winner()
    assert winner is not None
    metadata = {
        "trial": winner.trial,
        "params": winner.params,
        "settings": dict(run.manifest.settings),
    }
    save_file(
        {"weight": torch.ones(3)},
        run_dir / "best.safetensors",
        {name: json.dumps(it) for name, it in metadata.items()},
    )
    prediction = {
        "image": "data:image/png;base64,",
        "label": "a",
        "predicted": "b",
        "confidence": 0.5,
        "wrong": True,
    }
    test = {
        "trial": winner.trial,
        "times": 1,
        "metrics": {"accuracy": 0.5},
        "predictions": [prediction],
    }
    test["texts"] = [{"prompt": "def ", "text": "f(x):\n\treturn x\n"}]
    (run_dir / "test.json").write_text(json.dumps(test, indent=2))
    session = SessionOutcome("--time-limit 1 s", wall_seconds=1.0)
    write_summary(run_dir / "summary.json", replace(run.make_summary(3), session=session))
    (run_dir / "given.json").write_text(json.dumps([{"depth": 3}, {"act": "relu", "lr": 0.5}]))
    (run_dir / "logs").mkdir()
    for name in ("3", "7", "confirm-0"):
        (run_dir / "logs" / f"{name}.txt").write_text("rank 0 | hello\nrank 1 | hello\n")


def damage_run(run_dir: Path, rng: random.Random) -> str:
    """Damage a file of a run, most often the journal, and return a description."""
    others = [
        "run.json",
        "summary.json",
        "test.json",
        "best.safetensors",
        "lock",
        "search_space-1.py",
        "given.json",
    ]
    name = (
        JOURNAL if rng.random() < 0.5 else rng.choice([*others, *others[:2], "logs/3.txt", "logs"])
    )
    path, description = run_dir / name, ""
    if name == JOURNAL and rng.random() < 0.4:
        path.write_bytes(_remove_checksums(path.read_bytes()))
        description = ", written by another program"
    damages: list[Callable[[Path, random.Random], str | None]] = [
        _remove,
        _replace_by_folder,
        _forbid_access,
        _replace_by_link,
    ]
    if path.is_file():
        damages = [
            *damages,
            _make_empty,
            _write_garbage,
            *[_flip_bits, _cut_off, _change_lines, _insert_filling] * 2,
        ]
        damages += [_change_metadata] * 8 if name == "best.safetensors" else []
        damages += (
            [_change_json] * (16 if name == JOURNAL else 10)
            if name.endswith((".json", ".log"))
            else []
        )
    damage = rng.choice(damages)
    return f"{name}{description}: {damage.__name__.removeprefix('_')} {damage(path, rng) or ''}"


def _remove_checksums(journal: bytes) -> bytes:
    """Return the journal without checksums, as other programs would write it."""
    entries = map(json.loads, journal.splitlines())
    return b"".join(
        _format_line({name: item for name, item in entry.items() if name != "crc"})
        for entry in entries
    )


def _format_line(entry: Any) -> bytes:
    return json.dumps(entry, separators=(",", ":")).encode() + b"\n"


def _remove(path: Path, _: random.Random) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def _replace_by_folder(path: Path, rng: random.Random) -> None:
    _remove(path, rng)
    path.mkdir()


def _forbid_access(path: Path, _: random.Random) -> None:
    path.chmod(0)


def _replace_by_link(path: Path, rng: random.Random) -> None:
    _remove(path, rng)
    path.symlink_to(rng.choice([path.with_name("nothing"), path]))


def _make_empty(path: Path, _: random.Random) -> None:
    path.write_bytes(b"")


def _write_garbage(path: Path, rng: random.Random) -> None:
    path.write_bytes(rng.randbytes(rng.choice([10, 1000, 100_000])))


def _flip_bits(path: Path, rng: random.Random) -> str:
    content = bytearray(path.read_bytes())
    positions = (
        [rng.randrange(len(content)) for _ in range(rng.choice([1, 1, 1, 5]))] if content else []
    )
    for position in positions:
        content[position] ^= 1 << rng.randrange(8)
    path.write_bytes(content)
    return str(positions)


def _cut_off(path: Path, rng: random.Random) -> str:
    content = path.read_bytes()
    position = rng.randrange(len(content) + 1)
    path.write_bytes(content[:position] if rng.random() < 0.7 else content[position:])
    return str(position)


def _insert_filling(path: Path, rng: random.Random) -> str:
    """Insert a text or zeros, as a full disk writes them, or overwrite a part of a file."""
    content, filling = (
        path.read_bytes(),
        rng.choice([b"\0" * 50, b"\n", b"{}\n", b"garbage", DEEP.encode()]),
    )
    position = rng.choice([0, len(content), rng.randrange(len(content) + 1)])
    path.write_bytes(
        content[:position] + filling + content[position + rng.choice([0, len(filling)]) :]
    )
    return f"{position} {filling[:10]!r}"


def _change_lines(path: Path, rng: random.Random) -> str:
    """Remove or repeat a line of a file, or swap two lines."""
    lines = path.read_bytes().splitlines(keepends=True)
    if not lines:
        return ""
    first, second, damage = (
        rng.randrange(len(lines)),
        rng.randrange(len(lines)),
        rng.choice(["lost", "twice", "swap"]),
    )
    if damage == "swap":
        lines[first], lines[second] = lines[second], lines[first]
    else:
        lines[first : first + 1] = [lines[first]] * (0 if damage == "lost" else 2)
    path.write_bytes(b"".join(lines))
    return f"{damage} {first + 1} {second + 1}"


def _change_json(path: Path, rng: random.Random) -> str:
    """Replace or remove a value in a JSON file, or in a line of the journal."""
    lines = path.read_bytes().splitlines() if path.name == JOURNAL else [path.read_bytes()]
    number = rng.randrange(len(lines))
    entry = json.loads(lines[number])
    *parents, last = rng.choice([keys for keys in _iterate_paths(entry) if keys])
    inner = entry
    for step in parents:
        inner = inner[step]
    deep = rng.choice([5, 300, 900, 990, 100_000])
    value = rng.choice([*VALUES, "DEEP", "HUGE"])
    if isinstance(inner, dict) and rng.random() < 0.2:
        del inner[last]
        value = "(nothing)"
    else:
        inner[last] = value
    text = (
        json.dumps(entry)
        .replace('"DEEP"', "[" * deep + "]" * deep)
        .replace('"HUGE"', "1" + "0" * 5000)
    )
    lines[number] = text.encode()
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return (
        f"line {number + 1}: {[*parents, last]} = {value!r:.40} {deep if value == 'DEEP' else ''}"
    )


def _change_metadata(path: Path, rng: random.Random) -> str:
    """Replace a text in the header of a file with weights."""
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    name, value = (
        rng.choice([*header["__metadata__"]]),
        rng.choice([*map(json.dumps, VALUES), DEEP, "", "{"]),
    )
    header["__metadata__"][name] = value
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[end:])
    return f"{name} = {value:.40}"


def _iterate_paths(value: Any) -> Iterator[list[Any]]:
    yield []
    items: Sequence[tuple[Any, Any]] = ()
    if isinstance(value, (dict, list)):
        items = list(value.items()) if isinstance(value, dict) else list(enumerate(value))
    for name, item in items:
        yield from ([name, *keys] for keys in _iterate_paths(item))


class _NullTracker:
    """A tracker that discards all evaluations."""

    destination = "nowhere"

    def show_individual(self, _: Evaluation, losses: Any, from_start: bool) -> None:  # noqa: ARG002
        assert all(epoch >= 0 for epoch in losses)

    def close(self, is_budget_spent: bool) -> None:
        """Do nothing."""


def _read_as_watch(run_dir: Path, _: Path) -> None:
    """Read a run as hpo watch does at each refresh."""
    look = RunReader(run_dir).take_snapshot()
    run, evaluations = compute_run_status(look), [*look.evaluations, *look.confirmations]
    columns = make_columns(evaluations, look.manifest.objectives, run.at)
    tables = [
        RowOrder().make_rows(evaluations, columns),
        make_failure_rows(evaluations),
        make_island_rows(run),
        make_rung_rows(run),
    ]
    tables.append(make_worker_rows(run, evaluations))
    cells = [cell for rows in tables for row in range(len(rows.keys)) for cell in rows.cells(row)]
    for text in map(str, [*format_header(run, run_dir), *cells]):
        assert text.isprintable(), text


def _read_as_tracker(run_dir: Path, out: Path) -> None:
    """Read a run as `hpo track` does."""
    run = RunReader(run_dir)
    with ShownEvaluations(out / "written" / "written.jsonl") as written:
        follower = TrackerUpdater(_NullTracker(), written)
        located = run.run_dir.locate_storage(run.manifest.storage)
        follower.add_study(located, run.manifest.study)
        if run.read_confirmations():
            follower.add_study(located, run.manifest.confirmation_study)
        follower.show_changes(running=False)
        follower.is_over(run.manifest.study, 1, run.manifest.pruner)
    shutil.rmtree(out / "written")


def _load_space() -> SearchSpace:
    return load_search_file(QUICK).space


READERS: list[Callable[[Path, Path], object]] = [
    _read_as_watch,
    _read_as_tracker,
    lambda run_dir, _: read_warm_start(str(run_dir), _load_space(), ONLY_LOSS),
    lambda run_dir, _: read_warm_start(
        f"{run_dir / JOURNAL}#{run_dir.name}", _load_space(), ONLY_LOSS
    ),
    lambda run_dir, _: read_weights(run_dir / "best.safetensors"),
    lambda run_dir, _: read_enqueued(str(run_dir / "given.json"), _load_space(), 0),
]


def find_error(step: Callable[[], object]) -> str | None:
    """Call `step`, and return the message of the UsageError that it raises.

    None if it raises none.
    """
    try:
        step()
    except UsageError as error:
        return str(error)
    return None


def run_command(line: str, run_dir: Path, out: Path) -> str | None:
    """Run a subcommand of hpo in this process, and return its error message.

    None if it succeeds.
    """
    name, *arguments = line.format(out=out).split()
    streams = [io.TextIOWrapper(io.BytesIO(), "utf-8", "backslashreplace") for _ in range(2)]
    with redirect_stdout(streams[0]), redirect_stderr(streams[1]):
        status = call_hpo(name, run_dir, *arguments)
        sys.stdout.flush()
        sys.stderr.flush()
    texts = [stream.buffer.getvalue().decode() for stream in streams]
    for text in texts:
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f]", text), f"{line}: {text!r}"
    assert status in (0, 2), (status, texts)
    if status == 0:
        return None
    assert re.fullmatch(r"error: .*\n", texts[1]), texts[1]
    return texts[1].removeprefix("error: ").removesuffix("\n")


def read_tree(folder: Path) -> dict[str, Any]:
    """Return the content of each file in a folder by its path, except for lock files."""
    return {
        str(path): path.read_bytes() if path.is_file() else path.is_dir()
        for path in sorted(folder.rglob("*"))
        if path.name != "lock"  # Every session changes it.
    }


def check_run(run_dir: Path, whole: Path, out: Path, rng: random.Random) -> Counter[str]:
    """Read a damaged run with all readers, resume it, and count successes and refusals."""
    before, outcome = read_tree(run_dir), Counter[str]()
    steps = [
        partial(run_command, line, run_dir, out) for line in rng.sample(COMMANDS, _COMMANDS_AT_ONCE)
    ]
    for step in [
        *steps,
        *(partial(find_error, partial(reader, run_dir, out)) for reader in READERS),
    ]:
        error = step()
        assert read_tree(run_dir) == before, "readers must not change a run"
        outcome["refused" if error else "read"] += 1
        assert error is None or _is_clear_message(error, run_dir), error
    shown = _read_evaluations(run_dir)
    assert shown is None or not _find_lost(run_dir, whole, shown), (
        f"not shown: {_find_lost(run_dir, whole, shown)}"
    )
    error = find_error(lambda: _resume_run(run_dir))
    assert error is None or (_is_clear_message(error, run_dir) and read_tree(run_dir) == before), (
        error
    )
    again = _read_evaluations(run_dir)
    assert error or (
        shown is not None
        and again
        and all(evaluation in again for evaluation in shown if evaluation.is_finished)
    ), "a resume must not lose evaluations"
    return outcome + Counter(["resume refused" if error else "resumed"])


def _is_clear_message(error: str, run_dir: Path) -> bool:
    return error.isprintable() and len(error) < 2000 and str(run_dir) in error


def _resume_run(run_dir: Path) -> None:
    session, space = start_session(run_dir, resume=True), _load_space()
    record = session.open_record()
    claim_evaluation(
        record, space.draw(random.Random(7)), space.make_distributions(), 10**6, island=0, worker=0
    )
    if session.confirmation_plan.count:
        session.create_confirmations(space)
        session.confirmation_plan.enqueue_planned(session.open_confirmations(), [], space)


def _read_evaluations(run_dir: Path) -> list[Evaluation] | None:
    try:
        return RunReader(run_dir).read_evaluations()
    except UsageError:
        return None


def _find_lost(run_dir: Path, whole: Path, shown: Sequence[Evaluation]) -> list[int]:
    """Return trials with undamaged lines that are not read as before the damage.

    The list is empty for a journal without checksums, in which damage cannot always be detected.
    """
    journal, original = (run_dir / JOURNAL).read_bytes(), (whole / JOURNAL).read_bytes()
    if b'"crc"' not in journal:
        return []
    existing, own = set(journal.splitlines()), _group_lines_by_trial(original)
    undamaged = [
        evaluation
        for evaluation in RunReader(whole).read_evaluations()
        if own[evaluation.trial] <= existing
    ]
    undamaged = [
        evaluation for evaluation in undamaged if evaluation.state != "promoted"
    ]  # Another trial's lines make it so.
    return [evaluation.trial for evaluation in undamaged if evaluation not in shown]


def _group_lines_by_trial(journal: bytes) -> dict[int, set[bytes]]:
    """Return the lines of a journal by trial of the search.

    The study of the search is the first in the journal.
    """
    numbers: dict[int, int] = {}
    lines: dict[int, set[bytes]] = {}
    created = 0
    for line in journal.splitlines():
        entry = json.loads(line)
        if entry["op_code"] == 4:
            if entry["study_id"] == 0:
                numbers[created] = len(numbers)
                lines[numbers[created]] = {line}
            created += 1
        elif entry.get("trial_id") in numbers:
            lines[numbers[entry["trial_id"]]].add(line)
    return lines


@contextmanager
def _cache_commands() -> Iterator[None]:
    """Make checks faster: cache parsers of commands, and leave out Plotly in reports."""
    cached = functools.cache(typer.main.get_command)
    with (
        mock.patch.object(html_report, "_compress_plotly", return_value=b""),
        mock.patch.object(typer.main, "get_command", cached),
    ):
        yield


def damage_and_check(whole: Path, folder: Path, seed: str) -> Counter[str]:
    """Copy a run to a new folder, damage the copy at random, and check it.

    `seed` determines the damage.
    """
    run_dir, rng = folder / whole.name, random.Random(seed)
    shutil.copytree(whole, run_dir)
    (folder / "out").mkdir()
    description = damage_run(run_dir, rng)
    try:
        with _cache_commands():
            return check_run(run_dir, whole, folder / "out", rng)
    except Exception as error:
        raise AssertionError(
            f"seed {seed}: {description}: {type(error).__name__}: {error}"[:2000]
        ) from error
    finally:
        shutil.rmtree(folder)


def fuzz_runs(folder: Path, seed: int, count: int) -> Counter[str]:
    """Damage and check `count` copies of runs, and count reads, resumes and refusals."""
    runs = make_whole_runs(folder / "whole")
    outcomes = (
        damage_and_check(runs[number % len(runs)], folder / f"damaged{number}", f"{seed}/{number}")
        for number in range(count)
    )
    return sum(outcomes, Counter())
