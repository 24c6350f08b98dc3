"""What a worker needs to know of its host's network: addresses, interfaces, and the connections of a process group."""

from __future__ import annotations

import os
import socket
import stat
import struct
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from hpo.process import clock

_SIOCGIFADDR = 0x8915
_QUIET_MILLISECONDS = 30
_SECONDS_UNTIL_QUIET = 3.0


def address_towards(peer: str) -> str:
    """Return this host's address as a peer reaches it: a host's own name often resolves to a loopback address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route, suppress(OSError):
        route.connect((peer, 9))  # connecting a datagram socket sends nothing
        return str(route.getsockname()[0])
    return socket.gethostname()


def interface_towards(address: str) -> str | None:
    """Return the name of the network interface on the way to an address; None where the system does not say."""
    try:
        import fcntl

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:
            route.connect((address, 9))
            own = route.getsockname()[0]
            for _, name in socket.if_nameindex():
                with suppress(OSError):
                    request = fcntl.ioctl(route, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                    if socket.inet_ntoa(request[20:24]) == own:
                        return name
    except (ImportError, OSError):
        pass
    return None


def open_sockets() -> dict[int, int]:
    """Return the inodes of this process's open sockets by their descriptors; a reused descriptor has another inode."""
    sockets = {}
    for path in Path("/dev/fd").iterdir():
        with suppress(OSError):
            descriptor = int(path.name)
            status = os.fstat(descriptor)
            if stat.S_ISSOCK(status.st_mode):
                sockets[descriptor] = status.st_ino
    return sockets


def is_open(descriptor: int, inode: int) -> bool:
    """Tell whether a descriptor still belongs to the socket with this inode."""
    try:
        status = os.fstat(descriptor)
    except OSError:
        return False
    return stat.S_ISSOCK(status.st_mode) and status.st_ino == inode


def stop_receiving(sockets: Mapping[int, int]) -> list[socket.socket]:
    """Let these connections, as far as they are still open, receive nothing more, and return duplicates of them.

    gloo then fails all waits for them on this rank, and closes them. The peers notice nothing until the caller closes
    the duplicates. They must not: gloo fails only transfers that have not begun, and forgets a transfer whose
    connection breaks while it goes on, so that a rank waits for it until its timeout (Pair::signalException in
    gloo/transport/tcp/pair.cc; with connections shut down both ways, every second stop of 4 workers that trained met
    it). For the same reason, this function waits until transfers that have begun have ended. Sockets that listen are
    left alone: gloo's listener ends the process when its socket fails.
    """
    give_up_at = clock.now() + _SECONDS_UNTIL_QUIET
    held = []
    for descriptor, inode in sockets.items():
        if is_open(descriptor, inode):
            with suppress(OSError):
                connection = socket.socket(fileno=os.dup(descriptor))
                held.append(connection)
                connection.getpeername()  # raises if it listens
                while not _is_quiet(connection) and clock.now() < give_up_at:
                    time.sleep(0.005)
                connection.shutdown(socket.SHUT_RD)
    return held


def _is_quiet(connection: socket.socket) -> bool:
    """Tell whether nothing has been sent or received for a while; true where the system does not say."""
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 56)
        last_sent, _, last_received = struct.unpack_from("3I", info, 44)  # in ms; linux/tcp.h
    except (OSError, AttributeError, struct.error):
        return True
    return bool(min(last_sent, last_received) >= _QUIET_MILLISECONDS)
