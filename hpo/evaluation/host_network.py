"""Find the address and the network interface through which the ranks of a worker reach each other, and free ports."""

from __future__ import annotations

import socket
import struct
from contextlib import suppress

_SIOCGIFADDR = 0x8915


def find_own_address(peer: str) -> str:
    """Return the address at which the host `peer` can reach this host.

    Return this host's name if `peer` cannot be reached. The name often resolves to a loopback address, which other
    hosts cannot use.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route, suppress(OSError):
        route.connect((peer, 9))  # to connect a datagram socket sends no packet
        return str(route.getsockname()[0])
    return socket.gethostname()


def find_interface(address: str) -> str | None:
    """Return the name of the network interface that leads to an address; None if the system does not know it."""
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


def reserve_port() -> socket.socket:
    """Return a socket on the loopback address that reserves its port until it is closed.

    It does not listen. So a server that sets SO_REUSEADDR, as torch's store does, can use the port. Linux gives the
    port to no other process that asks for any free port, neither to listen nor to connect.
    """
    reserved = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("127.0.0.1", 0))
    return reserved
