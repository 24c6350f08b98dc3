"""The lines of a journal file: each is an operation of Optuna's, with a checksum of the file up to it."""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Callable, Mapping
from typing import Any

from hpo.store.json_values import is_mapping, is_mapping_of, is_number, is_text, is_whole_number
from hpo.text_format import format_repr

# Other programs, such as Optuna's dashboard, write no checksum: the checksum of the next line that has one covers both.
_CRC = re.compile(rb',"crc":(\d{1,10})\}\n')


class RunningChecksum:
    """The checksum of a journal's first `offset` bytes."""

    def __init__(self) -> None:
        self.offset = 0
        self._crc = 0

    def add(self, content: bytes) -> None:
        """Extend the checksum by the bytes that follow."""
        self.offset += len(content)
        self._crc = zlib.crc32(content, self._crc)

    def format_line(self, entry: Mapping[str, Any]) -> bytes:
        """Return an entry as the next line, with its checksum."""
        text = json.dumps(entry, separators=(",", ":")).encode()
        return text[:-1] + b',"crc":%d}\n' % zlib.crc32(text, self._crc)

    def matches(self, line: bytes) -> bool:
        """Tell whether the next line and all before it are as they were written; true if the line has no checksum."""
        place = line.rfind(b',"crc":')
        said = _CRC.fullmatch(line, place) if place >= 0 else None
        return said is None or int(said[1]) == zlib.crc32(line[:place] + b"}", self._crc)


def parse_entry(line: bytes) -> dict[str, Any]:
    """Return the entry of a line; raises ValueError, saying why, where Optuna cannot have written it."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        raise ValueError(f"is not JSON: {line[:40]!r}") from None
    operation = entry.get("op_code") if isinstance(entry, dict) else None
    if not isinstance(entry, dict) or type(operation) is not int or not 0 <= operation < len(_REQUIRED_FIELDS):
        raise ValueError(f"is not an entry of a journal: {line[:40]!r}")
    for name, fits in _REQUIRED_FIELDS[operation].items():
        if name not in entry or not fits(entry[name]):
            raise ValueError(f"is not an entry of a journal: {name!r} is {_describe_field(entry, name)}")
    for name, fits in _OPTIONAL_FIELDS.items():
        if name in entry and not fits(entry[name]):
            raise ValueError(f"is not an entry of a journal: {name!r} is {_describe_field(entry, name)}")
    return entry


def _describe_field(entry: Mapping[str, Any], name: str) -> str:
    return format_repr(entry[name])[:40] if name in entry else "missing"


def _is_single_item(value: object) -> bool:
    return type(value) is dict and len(value) == 1


def _is_finite(value: Any) -> bool:
    return is_number(value) and math.isfinite(value)


def _allow_null(fits: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: value is None or fits(value)


_Fields = dict[str, Callable[[object], bool]]
_STUDY: _Fields = {"study_id": is_whole_number}
_TRIAL: _Fields = {"trial_id": is_whole_number}
# By op_code: the fields that an entry must have, and the check of each; _MAYBE has those that it may have.
_REQUIRED_FIELDS: tuple[_Fields, ...] = (
    {"study_name": is_text, "directions": lambda value: type(value) is list},
    _STUDY,
    {**_STUDY, "user_attr": _is_single_item},
    {**_STUDY, "system_attr": _is_single_item},
    {**_STUDY, "datetime_start": _allow_null(is_text)},
    {**_TRIAL, "param_name": is_text, "param_value_internal": _is_finite, "distribution": is_text},
    {**_TRIAL, "state": is_whole_number, "values": lambda _: True},
    {**_TRIAL, "step": is_whole_number, "intermediate_value": is_number},
    {**_TRIAL, "user_attr": _is_single_item},
    {**_TRIAL, "system_attr": _is_single_item},
    {},
)
_OPTIONAL_FIELDS: _Fields = {
    "worker_id": is_text,
    "state": is_whole_number,
    "value": _allow_null(is_number),
    "values": _allow_null(lambda value: type(value) is list and bool(value) and all(map(is_number, value))),
    "params": is_mapping_of(_is_finite),
    "intermediate_values": is_mapping_of(is_number),
    "distributions": is_mapping_of(is_text),
    "user_attrs": is_mapping,
    "system_attrs": is_mapping,
}
