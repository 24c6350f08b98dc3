"""The process groups that objectives, or device meshes in them, make of their worker's ranks."""

from __future__ import annotations

import gc
import sys
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from hpo.evaluation.connections import Connections


class Subgroups:
    """Knows all process groups that are made in this process beside the default one, while inside ``with``.

    In each, a rank waits for its peers for `patience` at most, and not for torch's 30 minutes.
    """

    def __init__(self, patience: timedelta) -> None:
        self.connections = Connections()
        self._patience = patience
        self._make = distributed_c10d._new_process_group_helper

    def __enter__(self) -> Subgroups:
        # All ways to make a group, new_group and device meshes among them, call this function (torch 2.11 to 2.15).
        distributed_c10d._new_process_group_helper = self._made
        return self

    def __exit__(self, *_: object) -> None:
        distributed_c10d._new_process_group_helper = self._make

    def abort(self) -> None:
        """Let what waits in any process group fail; may be called from any thread."""
        for group in list(distributed_c10d._world.pg_map):
            with suppress(Exception):  # it cannot be aborted
                group.abort()  # for nccl; gloo's does nothing
        self.connections.cut()

    def destroy(self) -> None:
        """Destroy the groups that an evaluation has made, and free what it has sharded; the default group stays.

        The threads of a group that an objective still refers to stay, but its connections do not.
        """
        made = [group for group in distributed_c10d._world.pg_map if group is not dist.group.WORLD]
        # FSDP's hooks and modules refer to each other: without a collection, networks of many evaluations pile up. (One
        # that has failed is collected with its default group.)
        if made or ("torch.distributed.fsdp" in sys.modules and dist.is_initialized()):
            while made:
                dist.destroy_process_group(made.pop())
            gc.collect()
        self.connections.cut()
        self.connections.close()

    def _made(self, *arguments: Any, **options: Any) -> Any:
        if not arguments[2]:  # the group's ranks; none for the default group, which Group itself looks after
            return self._make(*arguments, **options)
        options["timeout"] = min(options["timeout"], self._patience)
        with self.connections.opening():
            return self._make(*arguments, **options)
