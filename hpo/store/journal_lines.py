"""Format and check the lines of a journal file. Each line contains a checksum of the file up to this line."""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Callable, Mapping
from typing import Any

from hpo.store.json_values import is_mapping, is_mapping_of, is_number, is_text, is_whole_number
from hpo.text_format import format_repr

# Other programs, such as Optuna's dashboard, write lines without a checksum. The next checksum covers such lines, too.
_CRC = re.compile(rb',"crc":(\d{1,10})\}\n')


class RunningChecksum:
    """Hold the checksum of the first `offset` bytes of a journal, and extend it line by line."""

    def __init__(self) -> None:
        self.offset = 0
        self._crc = 0

    def add(self, content: bytes) -> None:
        """Extend the checksum by the bytes after `offset`."""
        self.offset += len(content)
        self._crc = zlib.crc32(content, self._crc)

    def format_line(self, entry: Mapping[str, Any]) -> bytes:
        """Return an entry as the next line of the journal, with its checksum."""
        text = json.dumps(entry, separators=(",", ":")).encode()
        return text[:-1] + b',"crc":%d}\n' % zlib.crc32(text, self._crc)

    def matches(self, line: bytes) -> bool:
        """Return whether the checksum in the next line is correct. A line without a checksum is accepted."""
        position = line.rfind(b',"crc":')
        found = _CRC.fullmatch(line, position) if position >= 0 else None
        return found is None or int(found[1]) == zlib.crc32(line[:position] + b"}", self._crc)


def parse_entry(line: bytes) -> dict[str, Any]:
    """Return the entry in a line. Raises ValueError with a reason if Optuna cannot have written the line."""
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
# Fields that an entry must have, with a check of each value; the index is the op_code.
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
# Fields that an entry of any op_code may have.
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
