"""Check the constraints of a search space in a trainer, on request of ranks, which do not import the user's code.

A trainer is a process that imports the search file for one rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpo.trainer.search_file import SearchFile


def answer_constraint_request(file: SearchFile, content: Mapping[str, Any]) -> dict[str, Any]:
    """Answer a request of a rank about the constraints of a search file.

    A request ``{"params": [...]}`` has the hyperparameters of several candidates. The answer is ``{"violated":
    [...]}``. For each candidate, it has the index of the first constraint that the candidate violates, or None.

    A request ``{"check": True}`` asks whether the constraints are valid. The answer is ``{"problem": text}``. The text
    describes an invalid constraint, and is empty if all constraints are valid.
    """
    if content.get("check"):
        try:
            file.space.check_constraints()
        except ValueError as error:
            return {"problem": str(error)}
        return {"problem": ""}
    return {"violated": file.space.find_violated(content["params"])}
