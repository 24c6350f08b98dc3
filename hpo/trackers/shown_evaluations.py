"""Record which evaluations a tracker has received completely, so that no evaluation is sent twice."""

from __future__ import annotations

import json
import time
import uuid
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from hpo.errors import UsageError
from hpo.store.evaluations import Evaluation
from hpo.store.run_dir import try_system_lock

_MAX_LOCK_SECONDS = 20.0  # The tracker process of an earlier job may take this long to end.
_POLL_SECONDS = 0.2


class ShownEvaluations:
    """Record of the evaluations that one tracker has received. It is a file, which ``with`` locks and closes.

    A destination is a store or server to which the tracker sends evaluations. The file has one JSON object per line. An
    incomplete final line, left by a killed process, is ignored.

    Attributes:
        id: Random identifier of the run. MLflow and Weights & Biases store it, so that a resumed run finds its earlier
            data there.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._file = path.open("a+", errors="replace")
        self.id = ""
        self._shown: set[tuple[str, str, int]] = set()

    def __enter__(self) -> ShownEvaluations:
        self._wait_for_lock()
        self._file.seek(0)
        for line in self._file:
            with suppress(ValueError, KeyError, TypeError, RecursionError):
                self._read_entry(json.loads(line))
        if not self.id:
            self.id = uuid.uuid4().hex[:12]
            self._append_entry({"id": self.id})
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._file.close()

    def contains(self, destination: str, study: str, evaluation: Evaluation) -> bool:
        """Return whether a destination (a store or server of the tracker) has received an evaluation completely."""
        return (destination, study, evaluation.trial) in self._shown

    def add(self, destination: str, study: str, evaluation: Evaluation) -> None:
        """Record that a destination (a store or server of the tracker) has received an evaluation completely."""
        self._shown.add((destination, study, evaluation.trial))
        self._append_entry({"place": destination, "study": study, "trial": evaluation.trial})

    def _read_entry(self, entry: dict[str, Any]) -> None:
        if "id" in entry:
            self.id = str(entry["id"])
        else:
            self._shown.add((entry["place"], entry["study"], entry["trial"]))

    def _append_entry(self, entry: dict[str, Any]) -> None:
        self._file.write("\n" + json.dumps(entry))
        self._file.flush()

    def _wait_for_lock(self) -> None:
        end = time.monotonic() + _MAX_LOCK_SECONDS
        while try_system_lock(self._file) is False:
            if time.monotonic() > end:
                raise UsageError(f"another process has locked {self._path}")
            time.sleep(_POLL_SECONDS)
