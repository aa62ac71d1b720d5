"""Exchanges of the checks between ranks, with the ranks as threads of this process and real sockets."""

from __future__ import annotations

import re
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from measuring.exchange_model import (
    DelayModel,
    StepModel,
    exposed_microseconds,
    exposed_step_microseconds,
    ring_distances,
    round_distances,
)

from sp_compile import SpError
from sp_compile.lowering.torch_compat import store_host
from sp_compile.runtime.control import addresses, channel, peers
from sp_compile.runtime.control.message import CALL_VERB, Message
from sp_compile.runtime.control.peers import PeerLinks, PeerListener

LIMIT = timedelta(seconds=30)


def keep_waiting() -> None:
    """A wait without a limit."""


def run_ranks(n: int, act: Callable[[PeerLinks], Any]) -> list[Any]:
    """Connect n ranks, run `act` on the connections of each in a thread, and return the results."""
    listeners = [PeerListener("localhost") for _ in range(n)]
    found = [one.address for one in listeners]

    def live(rank: int) -> Any:
        links = listeners[rank].connect(rank, n, found.__getitem__, LIMIT, keep_waiting)
        listeners[rank].socket.close()
        try:
            return act(links)
        finally:
            for sock in (*links.sending, *links.receiving):
                sock.close()

    with ThreadPoolExecutor(n) as pool:
        return list(pool.map(live, range(n)))


@pytest.mark.parametrize("n", range(1, 10))
def test_a_rank_that_differs_is_known_to_all(n: int) -> None:
    def act(links: PeerLinks) -> list[bool]:
        found = [links.are_all_equal(-7, False, keep_waiting)]
        for odd in range(n):
            found.append(links.are_all_equal(5 + (links.rank == odd), False, keep_waiting))
            found.append(links.are_all_equal(-(2**63), links.rank == odd, keep_waiting))
            found.append(links.are_all_equal(2**63 - 1, False, keep_waiting))
        return found

    assert run_ranks(n, act) == [[True, *(n * [n == 1, False, True])]] * n


@pytest.mark.parametrize("n", range(1, 10))
def test_every_rank_gets_the_bytes_of_all(n: int) -> None:
    """Of different lengths, also none, and larger than the buffers of a connection."""
    bodies = [bytes([rank]) * length for rank, length in zip(range(n), [0, 70_000, 3, 5_000_000, 1, 16_384, 9, 0, 100])]

    def act(links: PeerLinks) -> list[list[bytes]]:
        return [links.all_gather(bodies[links.rank], keep_waiting) for _ in range(2)]

    assert run_ranks(n, act) == [[bodies, bodies]] * n


def test_connections_grow_with_the_logarithm() -> None:
    assert run_ranks(9, lambda links: (len(links.sending), len(links.receiving))) == [(4, 4)] * 9


@pytest.mark.parametrize("n", [2, 3, 5])
def test_a_rank_that_is_gone(n: int) -> None:
    """The ranks that receive from it raise, with its number; the others wait until a notice ends that."""
    ended = threading.Event()

    def stop() -> None:
        if ended.is_set():
            raise TimeoutError("a notice")

    def act(links: PeerLinks) -> str:
        if links.rank == n - 1:
            ended.set()
            return ""
        try:
            links.are_all_equal(1, False, stop)
        except (ConnectionError, TimeoutError) as error:
            return str(error)
        return "no error"

    errors = run_ranks(n, act)
    assert any(re.search(rf"\bclosed by rank {n - 1}\b", error) for error in errors), errors
    assert "no error" not in errors


def test_a_late_rank_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "WAIT_SECONDS", 0.05)
    waits: list[int] = []

    def act(links: PeerLinks) -> bool:
        if links.rank == 1:
            time.sleep(0.3)
        return links.are_all_equal(1, False, lambda: waits.append(links.rank))

    assert run_ranks(3, act) == [True] * 3
    assert {0, 2} <= {*waits}


def test_ranks_in_different_exchanges_raise() -> None:
    def act(links: PeerLinks) -> str:
        links.number += links.rank
        try:
            links.are_all_equal(1, False, keep_waiting)
        except ConnectionError as error:
            return str(error)
        return ""

    assert re.search(r"\brank 1 .* exchange 2 .*\b1$", run_ranks(2, act)[0])


def test_a_stranger_is_not_a_rank() -> None:
    """Who does not know the token from the store, or sends nothing, is disconnected."""
    listeners = [PeerListener("localhost") for _ in range(2)]
    strangers = [socket.create_connection(listeners[0].socket.getsockname()[:2]) for _ in range(2)]
    strangers[0].sendall(peers.INTRODUCTION.pack(b"\0" * peers.TOKEN_BYTES, 1, 0))
    strangers[1].close()
    found = [one.address for one in listeners]

    def live(rank: int) -> bool:
        links = listeners[rank].connect(rank, 2, found.__getitem__, LIMIT, keep_waiting)
        return links.are_all_equal(3, False, keep_waiting)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(live, range(2))) == [True, True]
    assert strangers[0].recv(1) == b""


def test_a_rank_that_cannot_be_reached_names_the_interface() -> None:
    listeners = [PeerListener("localhost") for _ in range(2)]
    found = [one.address for one in listeners]
    listeners[1].socket.close()
    with pytest.raises(ConnectionError, match=r"\brank 1 .*127\.0\.0\.1 port \d+ .*GLOO_SOCKET_IFNAME"):
        listeners[0].connect(0, 2, found.__getitem__, LIMIT, keep_waiting)
    waiting = PeerListener("localhost")
    with pytest.raises(ConnectionError, match=r"\brank 1 (?!.* port \d).*GLOO_SOCKET_IFNAME"):
        waiting.connect(0, 2, lambda rank: waiting.address, timedelta(0), keep_waiting)


@pytest.mark.skipif(sys.platform != "linux", reason="reads the interfaces of Linux")
def test_the_address_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert addresses.own_address("192.0.2.7") == "127.0.0.1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nothing0")
    with pytest.raises(OSError, match=r"^GLOO_SOCKET_IFNAME: .*\blo\b.*'nothing0'"):
        addresses.own_address("")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    routes = {"head": "10.0.0.4", "localhost": "127.0.0.1", "myself": "127.0.1.1", addresses.OUTSIDE: "10.0.0.5"}
    monkeypatch.setattr(addresses, "_source_address", lambda host: routes.get(host, ""))
    monkeypatch.setattr(addresses, "_hostname_address", lambda: "10.0.0.6")
    expected = {"head": "10.0.0.4", "localhost": "127.0.0.1", "myself": "10.0.0.5", "": "10.0.0.6"}
    assert {host: addresses.own_address(host) for host in expected} == expected


def test_the_host_of_a_store() -> None:
    server = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    assert store_host(dist.PrefixStore("a", dist.PrefixStore("b", server))) == "localhost"
    assert store_host(dist.PrefixStore("a", dist.HashStore())) == ""


def test_a_wrong_interface_is_an_error_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    notices: list[str] = []
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nothing0")
    monkeypatch.setattr(channel.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(channel, "publish_stop", lambda text, **_: notices.append(text))
    one = channel.ControlChannel("one", [0, 1], dist.HashStore(), LIMIT, ["joined the group"] * 2)
    with pytest.raises(SpError, match=r"^SP625: GLOO_SOCKET_IFNAME: .*'nothing0'\."):
        one.are_all_equal(Message(CALL_VERB, "Floats", 1))
    assert len(notices) == 1
    with pytest.raises(SpError, match=r"SP623.*(\n.*)*'nothing0'"):
        one.are_all_equal(Message(CALL_VERB, "Floats", 1))


@pytest.mark.parametrize("n", [1, 2, 3, 8, 9, 512])
def test_the_simulated_exchanges_without_random_delays(n: int) -> None:
    """Each step costs sending, the latency and receiving, and after all steps a rank knows the values of all."""
    model = DelayModel(latency=20.0, cpu=5.0, jitter=0.0, skew=0.0)
    for distances in (ring_distances(n), round_distances(n)):
        median, _ = exposed_microseconds(n, distances, model, trials=3)
        assert median == pytest.approx(30.0 * len(distances))
        known = {0}
        for distance in distances:
            known |= {rank + distance for rank in known}
        assert len({rank % n for rank in known}) == n


def test_512_simulated_ranks_agree_in_less_than_a_millisecond() -> None:
    model = DelayModel(latency=25.0, cpu=10.0)
    _, high = exposed_microseconds(512, round_distances(512), model)
    low, _ = exposed_microseconds(512, ring_distances(512), model)
    assert high < 1000 < low


def test_a_device_that_takes_longer_than_the_host_hides_exchanges() -> None:
    """Without variation a check of two ranks takes 100 us, 70 us of it to prepare the exchange; the first is exposed."""
    model = DelayModel(latency=10.0, cpu=10.0, jitter=0.0)

    def exposed(device: float) -> float:
        step = StepModel(device, graphs=5, launch=300.0, check=70.0, variation=0.0)
        return exposed_step_microseconds(2, round_distances(2), model, step)

    assert exposed(0.0) == pytest.approx(5 * 100.0)
    assert exposed(500.0) == pytest.approx(100.0)
