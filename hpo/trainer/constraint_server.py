"""The rules of a search space, asked by ranks: their functions are code of the user."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpo.trainer.search_file import SearchFile


def answer_constraint_request(file: SearchFile, content: Mapping[str, Any]) -> dict[str, Any]:
    """Answer a request about the rules of a search file.

    ``{"params": [...]}``, the hyperparameters of several candidates, is answered by ``{"violated": [...]}``: the index
    of the first rule that each candidate breaks, or None. ``{"check": True}`` is answered by ``{"problem": text}``: why
    the rules are unsound, empty if they are sound.
    """
    if content.get("check"):
        try:
            file.space.check_constraints()
        except ValueError as error:
            return {"problem": str(error)}
        return {"problem": ""}
    return {"violated": file.space.find_violated(content["params"])}
