"""Count the bytes that a process sent, by its kernel."""

from __future__ import annotations

import os
import socket
import stat
import struct
import sys
from contextlib import suppress

SENT, RESENT, WAITING = 200, 208, 144
"""Offsets of `tcpi_bytes_sent`, `tcpi_bytes_retrans` (64 bits) and `tcpi_notsent_bytes` (32) in `struct tcp_info`."""


def bytes_sent() -> int:
    """Return the bytes that this process sent through its open TCP connections, which are those of Gloo."""
    return sum(_sent(int(number)) for number in os.listdir("/proc/self/fd"))


def can_count_bytes() -> bool:
    """Return True if this kernel counts sent bytes."""
    if sys.platform != "linux":
        return False
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as one:
        before = bytes_sent()
        one.sendall(bytes(1000))
        return bytes_sent() - before == 1000


def _sent(number: int) -> int:
    """Return the bytes sent through a file descriptor, 0 if it is no TCP socket."""
    with suppress(OSError):  # it was closed just now, or is a socket of another kind
        if stat.S_ISSOCK(os.fstat(number).st_mode):
            with socket.socket(fileno=os.dup(number)) as one:
                info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, RESENT + 8)
            (sent, resent), (waiting,) = struct.unpack_from("QQ", info, SENT), struct.unpack_from("I", info, WAITING)
            return sent - resent + waiting
    return 0
