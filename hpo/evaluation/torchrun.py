"""The environment variables that torchrun sets, for the trainers of a worker.

They are documented at https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables.
"""

from __future__ import annotations

from collections.abc import Sequence


def make_torchrun_variables(rank: int, hosts: Sequence[int], address: tuple[str, int]) -> dict[str, str]:
    """Return the variables of a rank, given the host of each rank of its worker, and the address of torch's store."""
    nodes = list(dict.fromkeys(hosts))
    here = hosts[rank]
    values = {
        "RANK": rank,
        "WORLD_SIZE": len(hosts),
        "LOCAL_RANK": list(hosts[:rank]).count(here),
        "LOCAL_WORLD_SIZE": list(hosts).count(here),
        "GROUP_RANK": nodes.index(here),
        "GROUP_WORLD_SIZE": len(nodes),
        "ROLE_NAME": "default",
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": len(hosts),
        "MASTER_ADDR": address[0],
        "MASTER_PORT": address[1],
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 0,
        "TORCHELASTIC_RUN_ID": "hpo",
        "TORCHELASTIC_USE_AGENT_STORE": True,
    }
    return {name: str(value) for name, value in values.items()}
