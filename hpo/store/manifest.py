"""What run.json says of a run: what it searches, how, and which sessions it has had; checked when it is read."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpo.errors import UsageError
from hpo.layout import Layout
from hpo.objectives import LOSS, ONLY_LOSS, Objectives
from hpo.store.json_values import is_mapping, is_mapping_of, is_text, is_whole_number
from hpo.store.recorded_options import is_valid_value
from hpo.text_format import format_repr

FORMAT = 1
"""The format of a run directory: run.json, the attributes of trials, the names of files. Count up when one changes."""
SEARCH_FILE_PATTERN = re.compile(
    r"search_space-([1-9][0-9]{0,8})\.py"
)  # the copy of a search space file that a session has run


@dataclass(frozen=True)
class SessionEntry:
    """One session of a run: when it started, the version of the search space file that it ran, and what it was asked.

    `file` is the name of the copy in the run directory, `commit` that of the file's git repository, None without one.
    `options` has the values of `hpo.store.recorded_options.OPTIONS`, and `settings` those of all settings, as JSON
    holds them.
    """

    started: str
    file: str
    sha256: str
    commit: str | None = None
    dirty: bool | None = None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The content of run.json.

    `space` has a text per parameter; `objectives` are those of the search space file; `settings` has the values of all
    settings, as JSON has them, and `set` the texts that were given with --set in any session. `storage` is a URL
    without its password, or the name of a file in the run directory; `warm_start` is the run that was taken over.
    Fields with a default may be missing in run.json; but for `warm_start`, `inherit` and `objectives`, they describe
    the last session.
    """

    format: int = FORMAT
    search_space: str = ""
    space: Mapping[str, str]
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
    pbt: bool = False
    objectives: Objectives = ONLY_LOSS
    warm_start: str | None = None
    storage: str
    study: str
    sessions: tuple[SessionEntry, ...]
    command: str = ""

    @property
    def confirmation_study(self) -> str:
        """The name of the study whose evaluations confirm the best."""
        return make_confirmation_name(self.study)

    def to_json(self) -> dict[str, Any]:
        """Return the content of run.json, as JSON can hold it."""
        return dataclasses.asdict(self)


def make_confirmation_name(study: str) -> str:
    """Return the name of the study whose evaluations confirm the best of a study."""
    return f"{study}-confirm"


def parse_manifest(content: object, path: Path) -> Manifest:
    """Return the manifest that run.json holds; raises UsageError, naming the first field that is wrong."""
    values = content if isinstance(content, dict) else {}
    if values and values.get("format") != FORMAT:
        found = format_repr(values["format"]) if "format" in values else "none"
        raise UsageError(
            f"{path}: 'format' must be {FORMAT}, got {found}. Another version of hpo-islands made this run: read "
            f"it with "
            "that version, or start a new run"
        )
    read: dict[str, Any] = {}
    for field in dataclasses.fields(Manifest):
        name, is_needed = field.name, field.default is field.default_factory is dataclasses.MISSING
        if name in values or is_needed:
            read[name] = _parse_field(name, values.get(name), path)
    return Manifest(**read)


def _parse_field(name: str, value: object, path: Path) -> Any:
    kind, fits, make = _FIELDS[name]
    try:
        if not fits(value):
            raise UsageError(f"must be {kind}")
        return make(value)
    except UsageError as error:
        shown = "is missing" if value is None else f"is {format_repr(value)}"
        raise UsageError(f"{path} is not as a run has written it: {name!r} {shown}, and {error}") from error


def _is_layout(value: object) -> bool:
    return (
        is_mapping_of(is_whole_number)(value)
        and isinstance(value, dict)
        and {*value} == {f.name for f in dataclasses.fields(Layout)}
    )


def _is_whole_from(least: int) -> Callable[[object], bool]:
    return lambda value: type(value) is int and value >= least


def _is_list_of(fits: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: type(value) is list and all(map(fits, value))


def _is_objectives(value: object) -> bool:
    if not isinstance(value, dict) or not all(_is_list_of(is_text)(value.get(key)) for key in ("names", "maximized")):
        return False
    names = value["names"]
    return names[:1] == [LOSS] and len({*names}) == len(names) and {*value["maximized"]} <= {*names[1:]}


def _is_session(entry: object) -> bool:
    """Return whether an entry describes a session: its search space file, its options and its settings."""

    def is_like(key: str, pattern: str) -> bool:
        return isinstance(entry, dict) and is_text(entry.get(key)) and bool(re.fullmatch(pattern, entry[key]))

    if not (
        isinstance(entry, dict) and is_like("file", SEARCH_FILE_PATTERN.pattern) and is_like("sha256", "[0-9a-f]{64}")
    ):
        return False
    options, settings = entry.get("options", {}), entry.get("settings", {})
    if not (is_mapping(options) and all(itertools.starmap(is_valid_value, options.items())) and is_mapping(settings)):
        return False
    return entry.get("commit") is None or is_like("commit", "[0-9a-f]{40,64}")


def _parse_session(entry: Mapping[str, Any]) -> SessionEntry:
    commit = entry.get("commit")
    dirty = bool(entry.get("dirty")) if commit else None
    asked = {key: entry.get(key, {}) for key in ("options", "settings")}
    return SessionEntry(str(entry.get("started", "")), entry["file"], entry["sha256"], commit, dirty, **asked)


_FieldRule = tuple[str, Callable[[Any], bool], Callable[[Any], Any]]
_TEXT: _FieldRule = ("a text", is_text, str)
_TEXTS: _FieldRule = ("an object of texts", is_mapping_of(is_text), dict)
# By name: what a value must be, in words, the check of it, and how it is read.
_FIELDS: dict[str, _FieldRule] = {
    "format": (str(FORMAT), lambda value: value == FORMAT, int),
    "space": ("an object of texts", lambda value: bool(value) and is_mapping_of(is_text)(value), dict),
    "budget": ("a whole number from 1", _is_whole_from(1), int),
    "seed": ("a whole number from 0", _is_whole_from(0), int),
    "propagators": ("a list of propagators", lambda value: bool(value) and _is_list_of(is_text)(value), tuple),
    "pruner": ("the name of a pruner", lambda value: is_text(value) and value != "", str),
    "pbt": ("true or false", lambda value: type(value) is bool, bool),
    "objectives": (
        "an object of names, of which the first is 'loss', and of those that are maximized",
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
        lambda value: bool(value) and _is_list_of(_is_session)(value),
        lambda value: tuple(map(_parse_session, value)),
    ),
    "layout": ("an object of ranks, ranks_per_worker and islands", _is_layout, lambda value: Layout(**value)),
    "warm_start": ("a text or null", lambda value: value is None or is_text(value), lambda value: value),
    "started": _TEXT,
    "search_space": _TEXT,
    "hosts": ("a list of texts", _is_list_of(is_text), tuple),
    "versions": _TEXTS,
    "command": _TEXT,
}
