"""Evaluation of the constraints of a search space for ranks, which do not import the user's code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpo.trainer.search_file import SearchFile


def answer_constraint_request(file: SearchFile, content: Mapping[str, Any]) -> dict[str, Any]:
    """Answer a request about the constraints of a search file.

    A request ``{"params": [...]}`` has the hyperparameters of several candidates. The answer ``{"violated": [...]}``
    has the index of the first constraint that each candidate violates, or None. A request ``{"check": True}`` gets the
    answer ``{"problem": text}``, which describes an invalid constraint, or is empty.
    """
    if content.get("check"):
        try:
            file.space.check_constraints()
        except ValueError as error:
            return {"problem": str(error)}
        return {"problem": ""}
    return {"violated": file.space.find_violated(content["params"])}
