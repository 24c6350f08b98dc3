"""The ranks of a worker: their communicator, and how their trainers connect."""

from __future__ import annotations

import fcntl
import os
import select
import socket
import struct
import uuid
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from hpo.evaluation.host import RankPlace, choose_backend, make_gpu_variables, see_same_gpus
from hpo.evaluation.trainer_client import TrainerClient, TrainerSlot
from hpo.process.linux import identify_pid_namespace
from hpo.process.messages import GroupTicket
from hpo.ranks.communicator import SleepingComm

_LOOPBACK = "127.0.0.1"
_SIOCGIFADDR = 0x8915
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


class RankGroup:
    """The ranks of a worker. Collective: create it on all of them.

    Args:
        place: The host and the GPUs of this rank.
        index: Number of the worker in the run.
        patience: Maximum seconds for which a rank waits for its peers.

    Attributes:
        backend: Backend of the trainers' process group: "gloo", or that of their GPUs.
        has_own_gpu: Whether this rank computes on a GPU that no other rank uses.
        compares_collectives: Whether trainers compare the collectives of all ranks before each one
            begins. Set it to the same value on all ranks.
        trainer: This rank's trainer in an evaluation, set by `connect`.
    """

    def __init__(
        self, comm: SleepingComm, place: RankPlace, index: int, patience: float, slot: TrainerSlot
    ) -> None:
        self.comm = comm
        self.rank: int = comm.rank
        self.size: int = comm.size
        self.index = index
        self.patience = patience
        self.slot = slot
        self.compares_collectives = False
        self._group_name = ""  # name of the trainers' process group
        self._places: list[RankPlace] = comm.allgather(place)
        hosts = [peer.host for peer in self._places]
        self._is_on_one_host = len(set(hosts)) == 1
        namespaces = comm.allgather(identify_pid_namespace())
        self._has_shared_files = self._is_on_one_host and len(set(namespaces)) == 1
        self.backend = choose_backend([peer.gpus for peer in self._places])
        peer_gpus = [peer.gpus for peer in self._places if peer.host == place.host]
        local_rank = hosts[: self.rank].count(place.host)
        self._gpu_variables, self._devices = make_gpu_variables(peer_gpus, local_rank, os.environ)
        self.has_own_gpu = bool(self._devices) and not place.gpus.is_shared
        # Through which the trainers of one host connect; open on the leader.
        self._rendezvous_file = -1
        self._listener: socket.socket | None = None  # at the port of torch's store, on the leader
        self._store_server: TrainerClient | None = None  # the process that runs the store
        self._address = self._open_store_port()
        self._variables = make_torchrun_variables(self.rank, hosts, self._address)
        if self._devices and not see_same_gpus(peer_gpus):
            # As with torchrun on hosts of one GPU: then cuda:LOCAL_RANK is the GPU of the rank.
            self._variables |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}

    trainer: TrainerClient

    def __enter__(self) -> RankGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.slot.end_trainer()
        self.close_store()
        if self._listener is not None:
            self._listener.close()
        self._close_rendezvous()

    def describe_places(self) -> dict[str, Any]:
        """Return attributes for a trial: the number of ranks by host, and the GPUs, if any."""
        gpus: dict[str, list[str]] = {}
        for place in self._places:
            gpus.setdefault(place.host_name, []).extend(place.gpus.own_ids)
        hosts = Counter(place.host_name for place in self._places)
        attributes: dict[str, Any] = {"hosts": dict(hosts)}
        if any(gpus.values()):
            attributes["gpus"] = {host: list(dict.fromkeys(ids)) for host, ids in gpus.items()}
        return attributes

    def fork_ahead(self) -> None:
        """Fork this rank's trainer now, so that the first evaluation need not wait for it."""
        self.slot.provide_trainer(self._gpu_variables)

    def connect(self, note: Any = None) -> tuple[GroupTicket | None, Any]:
        """Prepare the trainers' process group for an evaluation. Collective: call on all ranks.

        Returns:
            The ticket with which this rank's trainer joins the process group, and the leader's
            `note`. The ticket is None if the trainers of all ranks still have the group of the
            previous evaluation.
        """
        member = self.slot.find_member(self._group_name)
        states = self.comm.allgather((member is not None, note))
        note = states[0][1]
        if member is not None and all(is_member for is_member, _ in states):
            # It may have ended since. Then the evaluation fails to begin, and is repeated: a new
            # trainer would not be in the group.
            self.trainer = member
            return None, note
        # nccl must not end a group on some ranks only, so all ranks replace trainers that have
        # joined a group.
        if self.slot.group_name:
            self.slot.discard_trainer()
        self.close_store()
        name = ""
        file = ""
        if self.rank == 0:
            name = uuid.uuid4().hex
            self._close_rendezvous()
            if self._has_shared_files:
                # It has no name on disk, so it needs no removal.
                self._rendezvous_file = os.memfd_create("hpo-store")
                file = f"/proc/{os.getpid()}/fd/{self._rendezvous_file}"
        self._group_name, file = self.comm.bcast((name, file))
        self.slot.output.label = f"worker {self.index} rank {self.rank}"
        self.slot.output.rank = self.rank
        self.trainer = self.slot.provide_trainer(self._gpu_variables)
        self.slot.group_name = self._group_name
        # gloo and NCCL use the network interface to the other ranks, unless the user has set one.
        # On one host, NCCL chooses an interface itself.
        names = _INTERFACES[:1] if self._is_on_one_host else _INTERFACES
        interfaces = {
            name: self._interface for name in names if self._interface and not os.environ.get(name)
        }
        ticket = GroupTicket(
            self._group_name,
            self.rank,
            self.size,
            self.index,
            self.backend,
            self._devices,
            file,
            self._address,
            self.patience,
            {**self._variables, **interfaces},
        )
        return ticket, note

    @property
    def store_listeners(self) -> list[socket.socket]:
        """The socket at the port of torch's store, which the user's code may connect to.

        There is none while the store is running, and on all ranks except the leader.
        """
        return [self._listener] if self._listener is not None and self._store_server is None else []

    def serve_store(self) -> None:
        """Start torch's store if a process has connected to its port.

        Scripts that read MASTER_ADDR and MASTER_PORT connect to this port.
        """
        if self.store_listeners and select.select(self.store_listeners, [], [], 0)[0]:
            assert self._listener is not None
            address, port = self._address
            self._store_server = self.slot.fork_other(self.slot.output)
            self._store_server.send("store", [self._listener.fileno()], address=address, port=port)

    def close_store(self) -> None:
        """Stop torch's store, if it is running. A store that is started later is empty."""
        if self._store_server is not None:
            self._store_server.discard()
            self._store_server = None

    def _close_rendezvous(self) -> None:
        if self._rendezvous_file >= 0:
            os.close(self._rendezvous_file)
            self._rendezvous_file = -1

    def _open_store_port(self) -> tuple[str, int]:
        """Return the leader's address, as its peers reach it, and the port for torch's store."""
        address = _LOOPBACK
        if not self._is_on_one_host:
            first = self._places[0].host
            peer = next(place.host_name for place in self._places if place.host != first)
            if self.rank == 0:
                # The name of this host often resolves to a loopback address, which other hosts
                # cannot use.
                address = _find_source_address(peer) or socket.gethostname()
            address = self.comm.bcast(address)
        self._interface = find_interface(address)
        port = 0
        if self.rank == 0:
            with suppress(OSError):
                self._listener = socket.create_server((address, 0), backlog=1024)
                port = self._listener.getsockname()[1]
        return address, int(self.comm.bcast(port))


def make_torchrun_variables(
    rank: int, hosts: Sequence[int], address: tuple[str, int]
) -> dict[str, str]:
    """Return the environment variables that torchrun would set for a rank of a worker.

    Args:
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


def _find_source_address(peer: str) -> str:
    """Return the address from which this host sends to `peer`; empty if it cannot be reached."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route, suppress(OSError):
        route.connect((peer, 9))  # To connect a datagram socket sends no packet.
        return str(route.getsockname()[0])
    return ""


def find_interface(address: str) -> str:
    """Return the name of the network interface that leads to an address; empty if not known."""
    own = _find_source_address(address)
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                request = struct.pack("256s", name.encode()[:15])
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, request)
                if socket.inet_ntoa(answer[20:24]) == own:
                    return name
    return ""


def reserve_port() -> socket.socket:
    """Return a socket that reserves its port on all addresses until it is closed.

    It does not listen. So a server that sets SO_REUSEADDR, as torch's store does, can use the port.
    Linux gives the port to no other process that asks for any free port, neither to listen nor to
    connect.
    """
    # torch's store listens on all addresses of both families, so none may be in use.
    is_dual = socket.has_dualstack_ipv6()
    reserved = socket.socket(socket.AF_INET6 if is_dual else socket.AF_INET, socket.SOCK_STREAM)
    if is_dual:
        reserved.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("", 0))
    return reserved
