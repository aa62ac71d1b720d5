"""Exchange bytes between the ranks of a group in ceil(log2 n) rounds, over TCP connections of this package.

In round k each rank sends to the rank 2**k places after it, and receives from the rank 2**k places before it (Bruck et
al., 1997). After the last round it has received from every rank, directly or through others, for any n. The time grows
with log n; a ring takes n - 1 steps, and 20 ms for 512 ranks. A rank has at most 2 log2 n connections, and no threads.

Waits are slices of a second, between which the caller checks whether the other ranks still come.
"""

from __future__ import annotations

import json
import secrets
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from .addresses import INTERFACE_VARIABLE, open_listener, own_address

WAIT_SECONDS = 1.0  # longest part of a wait before the caller checks its progress
CHUNK_BYTES = 1 << 14  # ranks send and receive in turns of this size, so that full buffers never block all of them
IDENTIFY_SECONDS = 10.0  # time in which a rank that has connected introduces itself
TOKEN_BYTES = 16  # a random number, known from the store, with which a rank introduces itself
VOTE = struct.Struct("<QqB")  # number of the exchange, value of a rank, and whether a rank differs
LENGTH = struct.Struct("<QQ")  # number of the exchange, and bytes that follow
BLOCK = struct.Struct("<Q")  # bytes of one rank's value
INTRODUCTION = struct.Struct(f"<{TOKEN_BYTES}sII")  # token of the listening rank, connecting rank, and round

Wait = Callable[[], None]  # called about once a second while a rank waits; it raises to end the wait


@dataclass(eq=False)
class PeerLinks:
    """Connections of one rank, by which the ranks of a group exchange values; all call the same methods in order.

    Raises:
        ConnectionError: A rank has closed its connection.
    """

    rank: int  # this rank in the group
    size: int  # number of ranks
    sending: Sequence[socket.socket]  # to the rank 2**k places after this one, for each round k
    receiving: Sequence[socket.socket]  # from the rank 2**k places before this one
    number: int = 0  # number of exchanges so far

    def are_all_equal(self, value: int, differs: bool, on_wait: Wait) -> bool:
        """Return True, on every rank, if all ranks pass the same value and none passes `differs`.

        Args:
            value: A signed integer of 64 bits.
            differs: True if this rank has found a difference already; the result is then False on every rank.
            on_wait: Called while the rank waits.
        """
        self.number += 1
        # After round k, `differs` is True if one of the last 2**(k+1) ranks, up to this one, has passed True or another
        # value. Otherwise all of them have passed `value`, so the next round sends `value` and `differs` for all.
        for k, after in enumerate(self.sending):
            _send(after, VOTE.pack(self.number, value, differs), on_wait)
            number, other, others_differ = VOTE.unpack(self._receive(k, VOTE.size, on_wait))
            self._check_number(k, number)
            differs = differs or bool(others_differ) or other != value
        return not differs

    def all_gather(self, mine: bytes, on_wait: Wait) -> list[bytes]:
        """Return the bytes of every rank, which may differ in length, in the order of the ranks.

        Args:
            mine: The bytes of this rank.
            on_wait: Called while the rank waits.
        """
        self.number += 1
        blocks = [mine]  # of this rank, and of the ranks before it in descending order
        for k in range(len(self.sending)):
            sent = blocks[: self.size - len(blocks)]  # those that the receiver does not have
            payload = b"".join(BLOCK.pack(len(block)) + block for block in sent)
            blocks += _split_blocks(self._swap(k, payload, on_wait))
        return [blocks[(self.rank - rank) % self.size] for rank in range(self.size)]

    def _swap(self, k: int, payload: bytes, on_wait: Wait) -> bytes:
        """Send a payload to the rank after this one in round k, and return that of the rank before this one."""
        after = self.sending[k]
        _send(after, LENGTH.pack(self.number, len(payload)), on_wait)
        number, length = LENGTH.unpack(self._receive(k, LENGTH.size, on_wait))
        self._check_number(k, number)
        received = bytearray()
        # In chunks that sockets buffer: if both sides first sent all of a long payload, both sends could wait forever.
        for start in range(0, max(length, len(payload)), CHUNK_BYTES):
            _send(after, payload[start : start + CHUNK_BYTES], on_wait)
            received += self._receive(k, max(0, min(CHUNK_BYTES, length - start)), on_wait)
        return bytes(received)

    def _receive(self, k: int, size: int, on_wait: Wait) -> bytes:
        """Return `size` bytes from the rank before this one in a round."""
        try:
            return _receive(self.receiving[k], size, on_wait)
        except EOFError:
            raise ConnectionResetError(f"Connection closed by rank {self._source(k)} of the group") from None

    def _check_number(self, k: int, number: int) -> None:
        """Raise ConnectionError if the rank before this one in a round sends a value of another exchange."""
        if number != self.number:
            text = f"rank {self._source(k)} of the group is in exchange {number} and not in {self.number}"
            raise ConnectionError(text)

    def _source(self, k: int) -> int:
        """Return the rank in the group from which this rank receives in a round."""
        return (self.rank - (1 << k)) % self.size


def _split_blocks(payload: bytes) -> Iterator[bytes]:
    """Yield the values of ranks in a payload, each of which has its length before it."""
    start = 0
    while start < len(payload):
        (length,) = BLOCK.unpack_from(payload, start)
        start += BLOCK.size + length
        yield payload[start - length : start]


def _send(sock: socket.socket, data: bytes, on_wait: Wait) -> None:
    """Send all bytes; call `on_wait` about once a second while the socket accepts none."""
    view = memoryview(data)
    while view:
        try:
            view = view[sock.send(view) :]
        except TimeoutError:
            on_wait()


def _receive(sock: socket.socket, size: int, on_wait: Wait) -> bytes:
    """Return the next `size` bytes; raise EOFError if the other side has closed the connection."""
    received = b""
    while len(received) < size:
        try:
            part = sock.recv(size - len(received))
        except TimeoutError:
            on_wait()
            continue
        if not part:
            raise EOFError
        received += part
    return received


class PeerListener:
    """Socket at which a rank listens until the ranks before it have connected."""

    def __init__(self, store_host: str) -> None:
        """Listen at a free port.

        Args:
            store_host: The host of the group's store, whose route selects the network interface; "" without one.

        Raises:
            OSError: GLOO_SOCKET_IFNAME is no interface with an address, or the address is not one of this host.
        """
        self.socket = open_listener(own_address(store_host))
        self.token = secrets.token_bytes(TOKEN_BYTES)  # ranks that connect send it first: it identifies them

    @property
    def address(self) -> str:
        """Return the address at which the rank listens as text, for the other ranks.

        It has the IP address, the TCP port, the token that a connecting rank sends, in hexadecimal digits, and the name
        of the host for errors.
        """
        host, port = self.socket.getsockname()[:2]
        return json.dumps([host, port, self.token.hex(), socket.gethostname()])

    def connect(
        self, rank: int, size: int, find: Callable[[int], str | bytes], timeout: timedelta, on_wait: Wait
    ) -> PeerLinks:
        """Connect to the other ranks, which all listen, and return the connections.

        Args:
            rank: This rank in the group.
            size: Number of ranks.
            find: Returns the address of a rank.
            timeout: Time limit for each connection.
            on_wait: Called while the rank waits.

        Raises:
            OSError: A rank cannot be reached, or does not connect in time (ConnectionError).
        """
        rounds = range((size - 1).bit_length())
        sending = [_connect_to((rank + (1 << k)) % size, rank, k, find, timeout, on_wait) for k in rounds]
        accepted: dict[int, socket.socket] = {}  # connection by round
        deadline = time.monotonic() + timeout.total_seconds()
        self.socket.settimeout(WAIT_SECONDS)
        while len(accepted) < len(rounds):
            try:
                sock, _ = self.socket.accept()
            except TimeoutError:
                missing = [(rank - (1 << k)) % size for k in rounds if k not in accepted]
                if time.monotonic() > deadline:
                    raise ConnectionError(_describe_failure(missing[0], "it has not connected to this rank")) from None
                on_wait()
                continue
            k = self._identify(sock, rank, size)  # the round, or None for a connection of another program
            if k is not None:
                accepted[k] = _set_options(sock)
        return PeerLinks(rank, size, sending, [accepted[k] for k in rounds])

    def _identify(self, sock: socket.socket, rank: int, size: int) -> int | None:
        """Return the round for which a rank has connected; close the connection of anyone else and return None."""
        sock.settimeout(IDENTIFY_SECONDS)
        try:
            token, source, k = INTRODUCTION.unpack(_receive(sock, INTRODUCTION.size, _stop_waiting))
            if secrets.compare_digest(token, self.token) and source == (rank - (1 << k)) % size:
                return int(k)
        except (OSError, EOFError):
            pass
        sock.close()
        return None


def _stop_waiting() -> None:
    """Raise EOFError: passed as `on_wait`, it ends a wait for bytes at its first timeout."""
    raise EOFError


def _connect_to(
    peer: int, rank: int, k: int, find: Callable[[int], str | bytes], timeout: timedelta, on_wait: Wait
) -> socket.socket:
    """Return a connection to the rank `peer`, for round k; the other arguments are those of `PeerListener.connect`."""
    deadline = time.monotonic() + timeout.total_seconds()
    host, port, token, node = json.loads(find(peer))  # from `PeerListener.address`
    while True:
        try:
            sock = socket.create_connection((host, port), timeout=5 * WAIT_SECONDS)
            break
        except OSError as error:  # refused, without a route, or no answer
            if not isinstance(error, TimeoutError) or time.monotonic() > deadline:
                where = f"{host} port {port} of host {node}"
                raise ConnectionError(_describe_failure(peer, f"{where}: {error}")) from error
            on_wait()
    _send(_set_options(sock), INTRODUCTION.pack(bytes.fromhex(token), rank, k), on_wait)
    return sock


def _describe_failure(peer: int, reason: Any) -> str:
    """Return the text of an error for a rank that cannot be reached."""
    return (
        f"no connection with rank {peer} of the group, {reason}. On several hosts, set {INTERFACE_VARIABLE} to the "
        "network interface that connects them"
    )


def _set_options(sock: socket.socket) -> socket.socket:
    """Configure a connection to send small values without delay and to wait in slices, and return it."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.settimeout(WAIT_SECONDS)
    return sock
