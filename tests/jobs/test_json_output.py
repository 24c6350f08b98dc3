"""Run the commands of SKILL.md, and compare what they print with docs/reference/json-output.md."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

from tests.support.launch import HPO, ROOT, Hpo, Mpi

_SCRIPT = """
import argparse

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, required=True)
lr = parser.parse_args().lr
for epoch in range(2):
    print(f"val_loss={abs(lr - 0.01) + 1 / (epoch + 1):.6f}")
"""


def _list_commands() -> list[list[str]]:
    text = (ROOT / "SKILL.md").read_text("utf-8").replace("\\\n", " ")
    return [
        shlex.split(line) for line in re.findall(r"^ {7}((?:mpirun|hpo) .*)", text, re.MULTILINE)
    ]


def _list_keys(page: str, heading: str) -> set[str]:
    """Return the keys in the table after a heading of the page about JSON output."""
    text = (ROOT / "docs/reference" / page).read_text("utf-8")
    table = text.split(heading, 1)[1].split("\n\n| key", 1)[1].split("\n\n", 1)[0]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    return {key for cell in cells for key in re.findall(r"`(\w+)`", cell)}


def test_commands_of_the_skill_print_json(mpi: Mpi, hpo: Hpo, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_SCRIPT)

    def run(words: list[str]) -> Any:
        if words[0] == "mpirun":
            job = mpi.run(int(words[2]), *HPO, *words[4:], cwd=tmp_path)
            assert job.returncode == 0, job.stderr
            return json.loads(job.stdout)
        status, output, _ = hpo(*(tmp_path / word if "/" in word else word for word in words[1:]))
        assert status == 0
        return json.loads(output)

    check, search, watch, top, show, resume = _list_commands()
    checked = run(check)
    assert checked["problems"] == 0
    assert {*checked} == _list_keys("json-output.md", "`hpo check --json` and")
    assert {*checked["findings"][0]} == {"level", "text", "advice"}

    searched = run(search)
    assert searched["run_dir"] == "runs/first"
    assert searched["evaluations"]["complete"] == 8
    status = run(watch)
    assert {*status} == _list_keys("json-output.md", "`hpo watch RUN_DIR --json`:")
    assert (status["phase"], status["done"], status["total"]) == ("finished", 8, 8)
    assert status["best"] == run(top)["best"] == searched["best"]
    assert run(show)["params"].keys() == {"lr"}

    assert run(resume)["evaluations"]["complete"] == 10
    other = [word.replace("runs/first", "runs/second") for word in search]
    assert run(other)["run_dir"] == "runs/second"
    compared = run(["hpo", "compare", "runs/first", "runs/second", "--json"])
    assert {*compared[0]} == _list_keys("json-output.md", "`hpo compare RUN_DIR RUN_DIR --json`")
    assert [each["complete"] for each in compared] == [10, 8]
    assert "train the best of" in compared[1]["comparison"]


def test_errors_leave_standard_output_empty(mpi: Mpi, tmp_path: Path) -> None:
    job = mpi.run(2, *HPO, "search", "--json", "missing.py", cwd=tmp_path)
    assert (job.returncode, job.stdout) == (2, "")
    assert "missing.py" in job.stderr


def test_pages_in_llms_txt_exist() -> None:
    text = (ROOT / "docs/llms.txt").read_text("utf-8")
    pages = re.findall(r"\]\(([\w/-]+)\.html\)", text)
    assert len(pages) > 10
    for page in pages:
        assert (ROOT / "docs" / f"{page}.md").is_file(), page
