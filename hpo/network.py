"""What a worker needs to know of its host's network: addresses, interfaces, and the connections of a process group."""

from __future__ import annotations

import os
import socket
import stat
import struct
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

_SIOCGIFADDR = 0x8915


def address_towards(peer: str) -> str:
    """Give this host's address as a peer reaches it: a host's own name often resolves to a loopback address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route, suppress(OSError):
        route.connect((peer, 9))  # connecting a datagram socket sends nothing
        return str(route.getsockname()[0])
    return socket.gethostname()


def interface_towards(address: str) -> str | None:
    """Name the network interface on the way to an address; None where the system does not say."""
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
    """Give the sockets that this process has open: file descriptors and inodes, which tell a reused descriptor."""
    sockets = {}
    for path in Path("/dev/fd").iterdir():
        with suppress(OSError):
            descriptor = int(path.name)
            status = os.fstat(descriptor)
            if stat.S_ISSOCK(status.st_mode):
                sockets[descriptor] = status.st_ino
    return sockets


def shut(sockets: Mapping[int, int]) -> None:
    """End these connections, as far as they are still open, under the feet of whoever uses them.

    Both ends notice at once, wherever they wait. Sockets that listen are left alone: gloo's listener ends the process
    when its socket fails.
    """
    still_open = open_sockets()
    for descriptor, inode in sockets.items():
        if still_open.get(descriptor) == inode:
            with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
                connection.getpeername()  # raises if it listens
                connection.shutdown(socket.SHUT_RDWR)
