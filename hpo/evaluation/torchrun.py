"""The environment variables of torchrun, for the trainers of a worker.

See https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables.
"""

from __future__ import annotations

from collections.abc import Sequence


def make_torchrun_variables(rank: int, hosts: Sequence[int], address: tuple[str, int]) -> dict[str, str]:
    """Return the environment variables that torchrun would set for a rank.

    Args:
        rank: Index of the rank in its worker.
        hosts: Number of the host of each rank of the worker.
        address: Host and port of torch's store.
    """
    nodes = list(dict.fromkeys(hosts))
    host = hosts[rank]
    values = {
        "RANK": rank,
        "WORLD_SIZE": len(hosts),
        "LOCAL_RANK": list(hosts[:rank]).count(host),
        "LOCAL_WORLD_SIZE": list(hosts).count(host),
        "GROUP_RANK": nodes.index(host),
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
