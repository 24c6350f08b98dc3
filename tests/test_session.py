from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import pytest

from hpo.errors import UsageError
from hpo.layout import Layout
from hpo.options import Options
from hpo.search_file import load_search_file
from hpo.session import Session, begin, enter, look, previous
from tests.conftest import SEARCHES

QUICK = SEARCHES / "quick.py"


def start(
    run_dir: Path, *, resume: bool = False, storage: str | None = None, settings: tuple[str, ...] = ()
) -> Session:
    search = load_search_file(QUICK)
    options = Options(QUICK, run_dir=run_dir, resume=resume, storage=storage, settings=settings)
    before = previous(options, search)
    with ExitStack() as held:
        place = enter(options, search, held)
        return begin(place, options, Layout(4, 2, 2), search, search.settings(options.assignments(before)), before, 1)


@pytest.mark.parametrize("url", [None, "sqlite:///{}/study.db"])
def test_a_run_that_was_killed_while_it_began_can_begin(tmp_path: Path, url: str | None) -> None:
    run_dir, storage = tmp_path / "run", url and url.format(tmp_path)
    start(run_dir, storage=storage)
    (run_dir / "run.json").unlink()
    session = start(run_dir, resume=True, storage=storage)
    record = session.open_record()
    space = load_search_file(QUICK).space
    params = {"depth": 1, "act": "relu", "flag": True, "lr": 0.1}
    assert record.start(params, space.distributions(), session.budget) is not None
    (run_dir / "run.json").unlink()
    with pytest.raises(UsageError, match="already holds a study named 'run'"):
        start(run_dir, resume=True, storage=storage)


def test_settings_are_those_that_were_set_last(tmp_path: Path) -> None:
    for settings, epochs in ((("epochs=3", "seconds=0.5"), 3), (("epochs=4",), 4), ((), 4)):
        session = start(tmp_path / "run", resume=True, settings=settings)
        content = json.loads((tmp_path / "run" / "run.json").read_text())
        assert content["set"] == {"epochs": str(epochs), "seconds": "0.5"}
        assert content["settings"] == {"epochs": epochs, "seconds": 0.5}
    assert "was" not in session.headline


def test_no_password_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = (
        f"sqlite://me:secret@/{tmp_path}/study.db"  # not one that SQLite takes, but the message is written all the same
    )
    monkeypatch.setattr("sys.argv", ["run_islands.py", "--storage", url])
    with pytest.raises(UsageError, match=r"the storage sqlite://me:\*\*\*@/") as raised:
        start(tmp_path / "run", storage=url)
    assert "secret" not in str(raised.value)
    assert not (tmp_path / "run").exists()
    start(tmp_path / "other")
    run_json = tmp_path / "other" / "run.json"
    content = json.loads(run_json.read_text())
    run_json.write_text(json.dumps({**content, "storage": "postgresql://me:***@host/db"}))
    with pytest.raises(UsageError, match="give --storage URL again, with the password"):
        start(tmp_path / "other", resume=True)


def test_looking_at_a_run_needs_its_study(tmp_path: Path) -> None:
    session = start(tmp_path / "run")
    assert look(tmp_path / "run", 3)["evaluations"]["budget"] == session.budget
    (tmp_path / "run" / "study.log").unlink()
    with pytest.raises(UsageError, match=r"study.log, the study of this run, is missing: restore it"):
        look(tmp_path / "run", 3)
    with pytest.raises(UsageError, match="holds no run"):
        look(tmp_path / "nowhere", 3)
