"""Define the content of run.json, which describes a run, and check it when it is read."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from hpo.errors import UsageError
from hpo.layout import Layout
from hpo.objectives import LOSS, ONLY_LOSS, Objectives
from hpo.options import OPTIONS, PROPAGATORS, is_valid_json
from hpo.store.json_values import is_list_of, is_mapping, is_mapping_of, is_text, is_whole_number
from hpo.text_format import format_repr

FORMAT = 3
"""Version of the format of run directories.

Increase it if run.json, trial attributes or file names change.
"""
SEARCH_FILE_PATTERN = re.compile(r"search_space-([1-9][0-9]{0,8})\.py")
"""Pattern of the names of the copies of the search space file.

Each version that a session used has one copy.
"""


@dataclass(frozen=True)
class SessionEntry:
    """Describe one session of a run, which is one start or resume."""

    started: str
    """Start of the session, as text in ISO 8601 format."""
    file: str
    """Name of the copy of the search space file in the run directory."""
    sha256: str
    """Checksum of the search space file."""
    commit: str | None = None
    """Commit of the file's git repository; None without a repository."""
    dirty: bool | None = None
    """Whether the repository had uncommitted changes; None without a repository."""
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Values of the options in `hpo.options.RECORDED_OPTIONS`, as JSON."""
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    layout: str = ""
    """Ranks, workers and islands in words; empty if it is not known."""
    program: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Checksums of the training program and of the modules that it imports, by file name."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Hold the content of run.json, which describes a run.

    Fields with a default may be missing in run.json. A session is one start or resume of the run.
    All fields except `warm_start`, `pbt`, `objectives`, `set` and `sessions` describe the latest
    session.

    Attributes:
        search_space: Path of the search space file.
        space: Description of each parameter of the search space, by name.
        priors: Description of each parameter that has a prior, with its prior, by name.
        started: Start of the latest session, as text in ISO 8601 format.
        settings: Values of all settings, as JSON.
        set: Values given with --set in any session, as text.
        budget: Number of evaluations.
        confirm_seeds: Number of other seeds with which each of the best individuals is trained
            again.
        lacks_seed: Whether the command of the training program lacks the placeholder `{seed}`.
        pbt: Whether individuals start from checkpoints of others (population based training).
        warm_start: Run that was imported; None without one.
        storage: URL of the study's storage without its password, or name of a journal file in the
            run directory.
        study: Name of the study in the storage.
        sessions: Sessions of the run, oldest first.
        command: The program and its arguments, as they were typed.
        launcher: The words that were typed before the program, such as `mpirun -n 8 python`.
    """

    format: int = FORMAT
    search_space: str = ""
    space: Mapping[str, str]
    priors: Mapping[str, str] = dataclasses.field(default_factory=dict)
    layout: Layout
    hosts: tuple[str, ...] = ()
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    started: str = ""
    settings: Mapping[str, Any]
    set: Mapping[str, str]
    budget: int
    seed: int
    propagators: tuple[str, ...]
    pruner: str
    confirm_seeds: int
    lacks_seed: bool = False
    pbt: bool = False
    objectives: Objectives = ONLY_LOSS
    warm_start: str | None = None
    storage: str
    study: str
    sessions: tuple[SessionEntry, ...]
    command: str = ""
    launcher: str = ""

    @property
    def confirmation_study(self) -> str:
        """Name of the study in which the best individuals are trained again with other seeds."""
        return make_confirmation_name(self.study)

    def find_session(self, started: float) -> SessionEntry | None:
        """Return the session in which an evaluation has started; None if it is not known."""
        if len(self.sessions) == 1:
            return self.sessions[0]
        earlier = None
        for session in self.sessions:
            if parse_start(session.started) <= started:
                earlier = session
        return earlier

    def find_difference(self, space: Mapping[str, str]) -> str:
        """Return the first parameter that differs in another search space, in words, or ""."""
        for name in [*self.space, *space]:
            before = self.space.get(name, "not in it")
            now = space.get(name, "not in it")
            if before != now:
                return f"parameter {name!r} was {before}, and is {now}"
        return ""

    def to_json(self) -> dict[str, Any]:
        """Return the content of run.json as JSON values."""
        return dataclasses.asdict(self)


def parse_start(text: str) -> float:
    """Return the start of a session in seconds since the epoch; minus infinity if not known."""
    with suppress(ValueError, OverflowError):  # A user has edited run.json.
        start = datetime.fromisoformat(text)
        if start.tzinfo is not None:
            return start.timestamp()
    return -math.inf


def make_confirmation_name(study: str) -> str:
    """Return the name of the study of confirmations that belongs to `study`."""
    return f"{study}-confirm"


def parse_manifest(content: object, path: Path) -> Manifest:
    """Convert the JSON content of run.json to a manifest.

    Raises UsageError, which names the first invalid field.
    """
    values = content if isinstance(content, dict) else {}
    if values and values.get("format") != FORMAT:
        found = format_repr(values["format"]) if "format" in values else "none"
        raise UsageError(
            f"{path}: 'format' must be {FORMAT}, got {found}. Another version of hpo-islands made "
            "this run: read it with that version, or start a new run"
        )
    read: dict[str, Any] = {}
    for field in dataclasses.fields(Manifest):
        name = field.name
        is_needed = field.default is field.default_factory is dataclasses.MISSING
        if name in values or is_needed:
            read[name] = _parse_field(name, values.get(name), path)
    return Manifest(**read)


def _parse_field(name: str, value: object, path: Path) -> Any:
    kind, is_valid, convert = _FIELDS[name]
    if not is_valid(value):
        found = "nothing" if value is None else format_repr(value)
        raise UsageError(f"{path}: {name!r} must be {kind}, got {found}. Restore the file")
    try:
        return convert(value)
    except UsageError as error:
        raise UsageError(f"{path}: {name!r} is {format_repr(value)}: {error}") from error


def _is_layout(value: object) -> bool:
    return (
        is_mapping_of(is_whole_number)(value)
        and isinstance(value, dict)
        and {*value} == {f.name for f in dataclasses.fields(Layout)}
    )


def _is_whole_from(least: int) -> Callable[[object], bool]:
    return lambda value: type(value) is int and value >= least


def _is_objectives(value: object) -> bool:
    if not isinstance(value, dict):
        return False
    names: Any = value.get("names")
    maximized: Any = value.get("maximized")
    are_lists = is_list_of(is_text)(names) and is_list_of(is_text)(maximized)
    if not are_lists or names[:1] != [LOSS]:
        return False
    return len({*names}) == len(names) and {*maximized} <= {*names[1:]}


def _is_session(entry: object) -> bool:
    if not isinstance(entry, dict):
        return False

    def is_like(key: str, pattern: str) -> bool:
        return is_text(entry.get(key)) and bool(re.fullmatch(pattern, entry[key]))

    options = entry.get("options", {})
    return (
        is_like("file", SEARCH_FILE_PATTERN.pattern)
        and is_like("sha256", "[0-9a-f]{64}")
        and is_mapping(options)
        and all(itertools.starmap(is_valid_json, options.items()))
        and is_mapping(entry.get("settings", {}))
        and is_text(entry.get("layout", ""))
        and is_mapping_of(is_text)(entry.get("program", {}))
        and (entry.get("commit") is None or is_like("commit", "[0-9a-f]{40,64}"))
    )


def _parse_session(entry: Mapping[str, Any]) -> SessionEntry:
    commit = entry.get("commit")
    return SessionEntry(
        str(entry.get("started", "")),
        entry["file"],
        entry["sha256"],
        commit,
        bool(entry.get("dirty")) if commit else None,
        entry.get("options", {}),
        entry.get("settings", {}),
        entry.get("layout", ""),
        entry.get("program", {}),
    )


_FieldRule = tuple[str, Callable[[Any], bool], Callable[[Any], Any]]
_TEXT: _FieldRule = ("a text", is_text, str)
_TRUTH: _FieldRule = ("true or false", lambda value: type(value) is bool, bool)
_TEXTS: _FieldRule = ("an object of texts", is_mapping_of(is_text), dict)
# For each field: the allowed values in words, the check of a value, and its conversion.
_FIELDS: dict[str, _FieldRule] = {
    "format": (str(FORMAT), lambda value: value == FORMAT, int),
    "space": (
        "an object of texts",
        lambda value: bool(value) and is_mapping_of(is_text)(value),
        dict,
    ),
    "priors": _TEXTS,
    "budget": ("a whole number from 1", _is_whole_from(1), int),
    "seed": ("a whole number from 0", _is_whole_from(0), int),
    "propagators": (
        f"a list of some of {', '.join(PROPAGATORS)}",
        partial(is_valid_json, "propagators"),
        tuple,
    ),
    "pruner": (OPTIONS["pruner"].kind.limits, partial(is_valid_json, "pruner"), str),
    "lacks_seed": _TRUTH,
    "pbt": _TRUTH,
    "objectives": (
        "an object with 'names', the first of which is 'loss', and 'maximized', which holds some "
        "of them",
        _is_objectives,
        lambda value: Objectives(tuple(value["names"]), tuple(value["maximized"])),
    ),
    "confirm_seeds": ("a whole number from 0", _is_whole_from(0), int),
    "settings": ("an object", is_mapping, dict),
    "set": _TEXTS,
    "storage": ("a text", lambda value: is_text(value) and value != "", str),
    "study": ("a text", lambda value: is_text(value) and value != "", str),
    "sessions": (
        "a list of sessions with a file and its sha256",
        lambda value: bool(value) and is_list_of(_is_session)(value),
        lambda value: tuple(map(_parse_session, value)),
    ),
    "layout": (
        "an object of ranks, ranks_per_worker and islands",
        _is_layout,
        lambda value: Layout(**value),
    ),
    "warm_start": (
        "a text or null",
        lambda value: value is None or is_text(value),
        lambda value: value,
    ),
    "started": _TEXT,
    "search_space": _TEXT,
    "hosts": ("a list of texts", is_list_of(is_text), tuple),
    "versions": _TEXTS,
    "command": _TEXT,
    "launcher": _TEXT,
}
