"""The first rank hands on a state to the others; prints for each rank whether it has come as it was."""

from typing import Any

import torch

from hpo.evaluation.state import broadcast, copied, parts_of, put_together
from hpo.ranks.communicator import world
from hpo.store.states import About, State
from tests.programs.tell import tell

NAMES = ["float8_e8m0fnu", "float8_e4m3fn", "bfloat16", "float64", "uint16", "int8", "bool", "complex64"]
saved: dict[str, Any] = {
    "all": [torch.arange(6).reshape(2, 3).to(getattr(torch, name)) for name in NAMES],
    "empty": torch.zeros(0, 4),
    "single": torch.tensor(2.5),
    "views": [
        torch.arange(6.0).reshape(2, 3).t(),
        torch.zeros(1).expand(4),
        torch.ones(2, dtype=torch.complex64).conj(),
    ],
}
comm = world()
parts = copied(parts_of(saved))
state = State(About({"x": 1.0}, [3.0, 2.0], {}, 1.5, parts.tree), parts.leaves, {"w": torch.ones(3)})
found = broadcast(comm, state if comm.rank == 0 else None)
assert found.about == state.about
assert found.weights is not None
assert torch.equal(found.weights["w"], torch.ones(3))
again = put_together(found.about.tree, found.tensors)
pairs = [*zip(saved["all"], again["all"], strict=True), *zip(saved["views"], again["views"], strict=True)]
pairs += [(saved[name], again[name]) for name in ("empty", "single")]
same = [a.dtype == b.dtype and torch.equal(a.to(torch.complex64), b.to(torch.complex64)) for a, b in pairs]
without = broadcast(comm, State(found.about, {}) if comm.rank == 0 else None)
tell(same=same, without=without.weights is None and not without.tensors)
