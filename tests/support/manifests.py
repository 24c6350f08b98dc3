"""run.json as a run has written it, but for what a test changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hpo.store.manifest import Manifest, manifest_of

CONTENT: dict[str, Any] = {
    "space": {"lr": "Float(low=0.0, high=1.0, log=False)"},
    "layout": {"ranks": 8, "ranks_per_worker": 2, "islands": 2},
    "hosts": ["node1"],
    "budget": 64,
    "seed": 0,
    "propagators": ["ga"],
    "pruner": "none",
    "confirm": 0,
    "settings": {"epochs": 4},
    "set": {},
    "storage": "study.log",
    "study": "run",
    "command": "run_islands.py --run-dir run",
    "versions": {"python": "3.11"},
    "sessions": [{"file": "search_space-1.py", "sha256": "0" * 64, "commit": None, "dirty": None}],
}


def manifest(**changes: Any) -> Manifest:
    """Return the manifest of a run."""
    return manifest_of({**CONTENT, **changes}, Path("run.json"))
