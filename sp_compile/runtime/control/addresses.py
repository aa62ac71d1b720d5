"""Find the network address at which the other ranks of a group reach this one.

It is the address of the interface `GLOO_SOCKET_IFNAME`, as for Gloo, if that is set. Otherwise it is the address from
which this host reaches the host of the process groups' store, which all ranks have reached.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
from contextlib import suppress

INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
LOOPBACK = "127.0.0.1"
GET_ADDRESS = 0x8915  # Linux's ioctl SIOCGIFADDR, of an interface's IPv4 address
OUTSIDE = "192.0.2.1"  # reserved for documentation (RFC 5737): its route is the default route, and nothing is sent


def own_address(store_host: str) -> str:
    """Return the IP address at which this rank listens for the other ranks of a group.

    Args:
        store_host: The host of the store, a name or an address; "" if the store has none, such as a file.

    Raises:
        OSError: GLOO_SOCKET_IFNAME is no interface with an address.
    """
    interface = os.environ.get(INTERFACE_VARIABLE, "").split(",")[0].strip()
    if interface and sys.platform == "linux":  # `_interface_address` uses a system call of Linux
        return _interface_address(interface)
    if store_host:
        source = _source_address(store_host)
        # The name of a host may resolve to a loopback address on the host itself, which other hosts cannot reach. It is
        # returned only if the store's host is a loopback address itself: all ranks are on this host then.
        if source and (not _is_loopback(source) or store_host == "localhost" or _is_loopback(store_host)):
            return source
        # The address from which this host reaches addresses outside of its network (OUTSIDE is one), if it can.
        return _source_address(OUTSIDE) or source or LOOPBACK
    return _hostname_address() or LOOPBACK  # ranks that share a file are usually on one host, whose name they resolve


def _interface_address(name: str) -> str:
    """Return the IPv4 address of a network interface, or its IPv6 address if it has no other."""
    import fcntl  # not on Windows

    request = struct.pack("256s", name.encode()[:15])  # names of interfaces have 15 bytes at most
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        # The result is a struct ifreq: 16 bytes for the name, then a sockaddr_in, with the address at its byte 4.
        return socket.inet_ntoa(fcntl.ioctl(sock.fileno(), GET_ADDRESS, request)[20:24])
    with suppress(OSError), open("/proc/net/if_inet6") as lines:
        for address, _, _, scope, _, interface in map(str.split, lines):
            if interface == name and scope == "00":  # an address that other hosts can use without the interface's name
                return socket.inet_ntop(socket.AF_INET6, bytes.fromhex(address))
    known = ", ".join(name for _, name in socket.if_nameindex())
    raise OSError(f"{INTERFACE_VARIABLE}: expected a network interface with an address, one of {known}, got {name!r}.")


def _source_address(host: str) -> str:
    """Return the address of this host from which it reaches another host, or ""; nothing is sent."""
    with suppress(OSError):
        # To connect a UDP socket only selects a route. The port, 9, has no meaning.
        for family, kind, protocol, _, address in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(family, kind, protocol) as sock:
                sock.connect(address)
                return str(sock.getsockname()[0])
    return ""


def _hostname_address() -> str:
    """Return the address to which this host's name resolves, or "" if it is not one of this host."""
    with suppress(OSError):
        _, _, _, _, socket_address = socket.getaddrinfo(socket.gethostname(), 0, type=socket.SOCK_STREAM)[0]
        address = str(socket_address[0])
        open_listener(address).close()  # raises OSError if the address is not one of this host
        return address
    return ""


def _is_loopback(address: str) -> bool:
    """Return True for an address that only processes of the same host reach."""
    return address.startswith("127.") or address == "::1"


def open_listener(address: str) -> socket.socket:
    """Return a socket that listens on a free port of an address of this host."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family, backlog=128)
