"""Exchange control messages on the CPU, separately from the collectives of the group.

Messages use connections of this package (`peers.py`), for every backend of the group. No exchange therefore waits for a
device, nor can it be matched with collectives of the group itself, such as a barrier of the user or half a step that a
rank has skipped.

A wait ends within the group's timeout with an SpError. It has the last operation of every rank, and the stop notice in
the store. A rank that compiles writes heartbeats to the store, since compilation may exceed any timeout. Heartbeats and
notices use one key each per group, and waits one per rank, independent of the number of steps.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from sp_compile.lowering.base.error_codes import ERRORS
from sp_compile.lowering.base.errors import SpError
from sp_compile.lowering.base.ranks import Ranks
from sp_compile.lowering.collectives.checksums import PendingChecksums
from sp_compile.lowering.comm.communicator import FunctionalCommunicator, current_communicator
from sp_compile.lowering.torch_compat import group_store, group_timeout, is_in_backward, process_groups, store_host

from .message import (
    CALL_VERB,
    LIKELY_CAUSE,
    NO_RANK,
    READ_VERB,
    VERB_CAUSES,
    EarlierValue,
    FieldValue,
    Message,
    StopNotice,
)
from .peers import PeerLinks, PeerListener
from .store import Arrival, package_store, query_store
from .waits import STORE_DELAY, WaitRecord, describe_by_operation

GROUP_ENDED = "The process group cannot be used any more, since some of its collectives did not end."
READ_SECONDS = 10.0  # seconds within which all ranks should read a value
LATE_SECONDS = 30.0  # seconds within which all ranks should arrive in another exchange
RETRY_SECONDS = 5.0  # seconds within which a rank that has raised in a call makes the next one
CONNECT_TIMEOUT = timedelta(seconds=60)  # timeout of connecting after all ranks have arrived
POLL_INTERVAL = 0.005  # seconds between checks for ranks that have not connected
MAX_NOTICE_WIDTH = 1000  # characters of the published reason of a stop
HEARTBEAT_INTERVAL = 2.0  # seconds between heartbeats of a rank that compiles
MAX_HEARTBEAT_AGE = 4 * HEARTBEAT_INTERVAL  # age in seconds of a heartbeat that is recent

T = TypeVar("T")
log = logging.getLogger(__name__)


@dataclass(eq=False)
class ControlChannel:
    """Control channel of one process group."""

    name: str  # name of the group in torch
    ranks: list[int]  # global ranks of the group
    store: Any  # the group's store, with a prefix of this channel
    timeout: timedelta  # the group's timeout, which limits each wait
    last_fields: list[str]  # last operation of each rank
    links: PeerLinks | None = None  # None until all ranks have connected
    lock: threading.Lock = field(default_factory=threading.Lock)  # held during an exchange: any thread may read a value
    broken: str = ""  # why the group cannot be used any more
    ended: StopNotice | None = None  # the rank whose exception has ended the group
    raised: tuple[int, str] | None = None  # this rank and its exception since the last exchange
    thread: int = 0  # the thread that calls programs
    calls: Counter[tuple[str, int]] = field(default_factory=Counter)  # calls of each program and model
    later: list[tuple[list[EarlierValue], PendingChecksums]] = field(default_factory=list)  # compared at the next call
    num_models: int = 0  # number of models so far
    exchanges: int = 0  # number of exchanges so far
    # start of the last wait, number of heartbeats of all ranks, time at which this number was last seen to increase
    heartbeats: tuple[float, int, float] = (0.0, 0, 0.0)
    warned: float = 0.0  # start of the last wait that was logged
    process: int = field(default_factory=os.getpid)  # PID that created the channel; a forked process inherits it
    # live models, each its number and weak references to its parameters, by the identities of the parameters
    models: dict[tuple[int, ...], tuple[int, list[Any]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.waits = WaitRecord(self.name, self.ranks, self.store)

    def are_all_equal(self, message: Message) -> bool:
        """Return True, on every rank, if all ranks announce equal messages and none requires the complete messages.

        Args:
            message: The operation of this rank.

        Raises:
            SpError: If a rank does not arrive within the group's timeout or is lost, or the channel is already broken.
        """
        # A rank that requires the complete messages makes the result False, as if its digest differed.
        value, differs = message.digest, message.needs_body
        return self._exchange(lambda links, on_wait: links.are_all_equal(value, differs, on_wait), message)

    def all_gather(self, mine: bytes, message: Message) -> list[bytes]:
        """Return the bytes of every rank, in the order of the ranks.

        Args:
            mine: Bytes of this rank.
            message: The operation of this rank, for the error of a wait.

        Raises:
            SpError: As `are_all_equal`.
        """
        return self._exchange(lambda links, on_wait: links.all_gather(mine, on_wait), message)

    def _exchange(self, run: Callable[[PeerLinks, Callable[[], None]], T], message: Message) -> T:
        """Run an exchange and return its result; the errors are those of `are_all_equal`.

        `run` runs it on the connections; its second argument is called about once a second of a wait. A forked process
        shares the sockets of the rank and would mix its bytes with the rank's, so it raises.
        """
        if os.getpid() != self.process:
            raise SpError("SP682", "a process that was forked from a rank calls a program of the rank's process group.")
        _waiting_threads.add(threading.get_ident())  # no heartbeats during the wait for the lock and the exchange
        try:
            with self.lock:
                return self._run_locked(run, message)
        finally:
            _waiting_threads.discard(threading.get_ident())

    def _run_locked(self, run: Callable[[PeerLinks, Callable[[], None]], T], message: Message) -> T:
        """Run an exchange with the lock; arguments and errors are those of `_exchange`."""
        self.check_broken()
        start_time, finished = time.monotonic(), False
        try:
            links = self.links or self._connect(message, start_time)
            result = run(links, partial(self._check_progress, message, start_time))
            finished = True
            self.exchanges += 1
            return result
        except OSError as error:
            raise self.fail_timeout(message, time.monotonic() - start_time, error) from error
        finally:
            self.waits.end()
            if not finished and not self.broken:  # after an interrupt, messages of the others remain in transit
                self.broken = f"rank {dist.get_rank()} {message} and was interrupted"
                publish_stop(f"it {message} and was interrupted", continues=True, within=self.name)

    def _connect(self, message: Message, start_time: float) -> PeerLinks:
        """Connect all ranks after all have arrived, and return the connections; arguments are those of `_exchange`.

        Each rank writes its address to the store, which counts the arrived ranks. A rank that gives up (a timeout, or
        another rank has stopped: `_check_progress` raises) leaves the count, so that no other rank connects to it.
        """
        me, size = self.ranks.index(dist.get_rank()), len(self.last_fields)
        try:
            listener = PeerListener(store_host(self.store))
        except OSError as error:
            self.broken = str(error)
            publish_stop(f"it cannot connect: {error}", within=self.name)
            raise SpError("SP625", self.broken) from error

        arrival = Arrival(self.store, f"address/{me}", listener.address)

        def find_address(rank: int) -> bytes:
            """Return the address of a rank of the group."""
            return query_store(lambda: bytes(self.store.get(f"address/{rank}")), b"")

        try:
            while query_store(arrival.count, 0) < size:
                time.sleep(POLL_INTERVAL)
                self._check_progress(message, start_time)
            timeout = min(self.timeout, CONNECT_TIMEOUT)
            on_wait = partial(self._check_progress, message, start_time)
            self.links = listener.connect(me, size, find_address, timeout, on_wait)
        except RuntimeError as error:  # the rank that hosts the store is lost
            raise self.fail_timeout(message, time.monotonic() - start_time, error) from error
        finally:
            listener.socket.close()
            if self.links is None:
                arrival.leave()
        return self.links

    def _check_progress(self, message: Message, start_time: float) -> None:
        """Raise SpError if a wait exceeds the timeout, or another rank has stopped; announce and log a long wait."""
        waited = time.monotonic() - start_time
        is_compiling = self._has_compiling_rank(start_time)  # in every check, to record when heartbeats arrive
        is_late = waited > self.timeout.total_seconds() and not is_compiling
        stopped = self._find_stop(message) if waited > STORE_DELAY else NO_RANK
        if waited > STORE_DELAY:
            self.waits.announce(self.exchanges, str(message))
        # A rank that has raised may catch the exception and make the next call, so a call waits RETRY_SECONDS for it.
        may_come = message.verb == CALL_VERB and waited <= RETRY_SECONDS
        is_lost = not stopped.continues or (stopped.raised and not may_come)
        if is_late or is_lost:
            raise self.fail_timeout(message, waited)
        if waited > (READ_SECONDS if message.verb == READ_VERB else LATE_SECONDS) and not is_compiling:
            self._warn_late(message, start_time, waited)

    def _warn_late(self, message: Message, start_time: float, waited: float) -> None:
        """Log, once a wait, the ranks that have not arrived, what they did last and the operation of this rank."""
        if self.warned == start_time:
            return
        self.warned, absent = start_time, self.waits.absent_ranks(waited, self.exchanges)
        operation = " ".join(_operation_and_line(message)).strip()
        last, seconds = self.waits.describe_late(absent, self.last_fields), self.timeout.total_seconds()
        text = "%s did not arrive within %.0f s: rank %d %s and waits, for at most %.0f s. %s%s"
        fix = f" {ERRORS['SP604'].fix}" if message.verb == READ_VERB else ""
        log.warning(text, _name_ranks(absent), waited, dist.get_rank(), operation, seconds, last, fix)

    @property
    def last(self) -> str:
        """Return the last operation of this rank."""
        return self.last_fields[self.ranks.index(dist.get_rank())]

    def check_thread(self) -> None:
        """Raise SpError if this thread is the second that calls programs.

        The collectives of two threads would have no order, and be matched with others of the same size: a silent wrong
        result. A backward has its own threads. They call checkpointed programs again, in the same order on all ranks.
        """
        if is_in_backward():
            return
        running_threads = {thread.ident for thread in threading.enumerate()}
        if self.thread != threading.get_ident() and self.thread in running_threads:
            raise SpError("SP624", "two threads of this process call programs over one process group.")
        self.thread = threading.get_ident()

    def fail_timeout(
        self, message: Message, waited: float, error: BaseException | None = None, place: str = ""
    ) -> SpError:
        """Mark the channel as broken, publish this, and return the error of a failed wait.

        Args:
            message: The operation of this rank.
            waited: Duration of the wait in seconds.
            error: The error of the communicator, if any.
            place: Description of the collective of the program that failed; "" for an exchange of messages.
        """
        stopped = self._find_stop(message)
        if stopped.raised:
            return self.break_group(stopped, str(message))
        operations = dict(zip(self.ranks, self.last_fields))
        last_calls = [f"  last operation of {line}" for line in describe_by_operation(operations)]
        error_lines = str(error or "").splitlines()
        details = (f", in {place}" if place else "") + (f"\n{error_lines[0][:200]}" if error_lines else "")
        operation = " ".join(_operation_and_line(message)).strip()
        # Ranks do not announce waits in a program's collectives.
        who = _name_ranks(self.waits.absent_ranks(0.0 if place else waited, self.exchanges))
        end = "lost the connection, as if a rank had exited," if isinstance(error, ConnectionError) else "timed out"
        timeout = f"{operation} and {end} after {waited:.0f} s"
        stop = f"rank {stopped.rank} stopped: {stopped.text}" if stopped.text else ""
        heading = f"{who} did not arrive: rank {dist.get_rank()} {timeout}{VERB_CAUSES.get(message.verb, '')}{details}"
        self.broken = "\n".join([heading, *last_calls, f"  {stop}" if stop else LIKELY_CAUSE])
        text = f"it {timeout}, because {who} did not arrive{details}" + (f"; {stop}" if stop else "")
        # The notice is for this group only: this rank may take part in exchanges of others.
        publish_stop(text.replace("\n", " "), counts={self.name: self.exchanges}, within=self.name)
        return SpError("SP622", self.broken) if message.verb == READ_VERB else SpError("SP621", self.broken)

    def break_group(self, notice: StopNotice, operation: str) -> SpError:
        """Mark the channel as broken by a rank that has raised, publish that, and return the error.

        The published notice is that of the rank, but for this group only. It ends waits of other ranks for this one.

        Args:
            notice: The notice of the rank that has raised.
            operation: The operation of this rank.
        """
        this_rank = dist.get_rank()
        own_wait = "" if notice.rank == this_rank else f"\n  rank {this_rank} waited for it: this rank {operation}"
        self.broken = f"rank {notice.rank} raised {notice.text}{own_wait}\n  {GROUP_ENDED}"
        self.ended = replace(notice, exchanges={self.name: self.exchanges}, within=self.name, continues=False)
        _store_notice(self.ended)
        return SpError("SP661", self.broken)

    def check_broken(self) -> None:
        """Raise SpError if the channel is broken."""
        if self.broken:
            raise SpError("SP623", f"process group {self.name} is unusable after an earlier error:\n{self.broken}")

    def find_raised(self) -> StopNotice | None:
        """Return the notice of a rank that has raised since the last exchange, or None."""
        last = _read_last_stop(self.name)
        # If this rank itself has published a stop since the last exchange, it does not wait for the rank that raised.
        has_stopped_too = any(map(self._is_current, _own_stop))
        if not last.raised or self._is_own(last) or has_stopped_too or not self._is_current(last):
            return None
        return last

    def count_call(self, program: str, parameters: Sequence[torch.nn.Parameter]) -> tuple[int, int]:
        """Count a call of a program, and return the number of its model and of the call.

        A model is a set of parameters. Models are numbered from 1 in the order of their first calls; 0 for no
        parameters.
        """
        self.check_thread()  # before the call counts
        key = tuple(map(id, parameters))
        if key and key not in self.models:
            self.num_models += 1
            forget = partial(_forget_model, self.models, key)  # before an address is reused by another parameter
            self.models[key] = self.num_models, [weakref.ref(parameter, forget) for parameter in parameters]
        model, _ = self.models[key] if key else (0, [])
        self.calls[program, model] += 1
        return model, self.calls[program, model]

    def reset_counters(self, messages: Sequence[Message]) -> None:
        """Restart the counts after a mismatch; new models get larger numbers than those in the ranks' messages."""
        for counted in (self.calls, self.later, self.models):
            counted.clear()
        self.num_models = max(self.num_models, *(message.model for message in messages))

    def take_earlier(self) -> dict[EarlierValue, FieldValue]:
        """Return the checksums of `later` by key, waiting for their copies, and clear `later`."""
        pending, self.later = self.later, []
        return {key: value for keys, sums in pending for key, value in zip(keys, sums.read(), strict=True)}

    def _find_stop(self, message: Message) -> StopNotice:
        """Return the last notice if its rank does not come to the exchange of `message`; else NO_RANK, an empty notice.

        Of a rank outside of this group only an exception counts (`raised`), since ranks of this group may wait for it.
        """
        last = _read_last_stop(self.name)
        is_of_other_group = last.rank not in self.ranks and not last.raised
        if self._is_own(last) or is_of_other_group or not self._is_current(last):
            return NO_RANK
        if last.within == self.name:  # this group is broken
            return last
        # A rank that cannot compile one program still calls others. If this rank has stopped, too, since the last
        # exchange (`_own_stop` is current), as when all ranks raise an error, the other one comes to this exchange.
        is_about_other_program = message.verb == CALL_VERB and last.subject not in ("", message.subject)
        return NO_RANK if is_about_other_program or any(map(self._is_current, _own_stop)) else last

    def _is_own(self, notice: StopNotice) -> bool:
        """Return True for a notice of this rank that does not break the group.

        A rank that breaks the group, because this one stopped, publishes the notice of this rank again, with the name
        of the group in `within`. This rank must then raise, too.
        """
        return notice.rank == dist.get_rank() and notice.within != self.name

    def _is_current(self, notice: StopNotice) -> bool:
        """Return True if this group ended no exchange since the notice, or at most one if it breaks the group.

        A rank that breaks the group did not end the exchange in which it waited, which others may have ended.
        """
        known = notice.exchanges.get(self.name)
        return known == self.exchanges or (notice.within == self.name and known == self.exchanges - 1)

    def _has_compiling_rank(self, start_time: float) -> bool:
        """Return True if a compiling rank has sent a recent heartbeat during the wait."""
        last_wait, last_count, last_time = self.heartbeats
        count, now = query_store(lambda: self.store.add("compiles", 0), last_count), time.monotonic()  # reads the count
        if last_wait != start_time:  # the wait has just started: earlier heartbeats are not recent
            last_time = start_time - MAX_HEARTBEAT_AGE
        elif count != last_count:
            last_time = now
        self.heartbeats = start_time, count, last_time
        return now - last_time < MAX_HEARTBEAT_AGE

    def send_heartbeat(self, thread: int) -> None:
        """Count a heartbeat, unless `thread` waits itself: two ranks would extend each other's wait without end."""
        if thread not in _waiting_threads:
            with suppress(RuntimeError):  # the rank that hosts the store is lost
                self.store.add("compiles", 1)


_waiting_threads: set[int] = set()  # threads of this process that wait for other ranks, in any group


def _forget_model(models: dict[tuple[int, ...], Any], key: tuple[int, ...], _reference: Any) -> None:
    """Remove a model; called by the weak reference to one of its parameters when that is deleted."""
    models.pop(key, None)


def _operation_and_line(message: Message) -> tuple[str, str]:
    """Return the operation of a rank and, for a read, the user's line ("at FILE:3: y"); "" for other operations."""
    return str(message), message.note if message.verb == READ_VERB else ""


def _name_ranks(ranks: Sequence[int]) -> str:
    """Return the ranks for a message, such as "rank 1, 3"; "other ranks" for none."""
    return f"rank {', '.join(map(str, ranks))}" if ranks else "other ranks"


_own_stop: list[StopNotice] = []  # last notice of this rank


def publish_stop(
    text: str,
    continues: bool = False,
    subject: str = "",
    counts: dict[str, int] | None = None,
    within: str = "",
    raised: bool = False,
) -> None:
    """Publish in the store why this rank stops, for the ranks that wait for it.

    Args:
        text: The reason.
        continues: True if the rank may take part in the next call.
        subject: The program that it cannot call; "" for all.
        counts: Number of exchanges of each group that the notice is for; None for all groups.
        within: The group whose exchange is broken; "" for none.
        raised: True if the program raised while it ran.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return
    if counts is None:
        counts = {name: 0 for name, *_ in process_groups()}  # groups without a channel have had no exchange
        counts |= {channel.name: channel.exchanges for channel in _channels.values()}
    _store_notice(StopNotice(dist.get_rank(), text[:MAX_NOTICE_WIDTH], continues, counts, subject, within, raised))


def _store_notice(notice: StopNotice) -> None:
    """Keep a notice as the last one of this rank, and write it to the store for each of its groups."""
    _own_stop[:] = [notice]
    with suppress(RuntimeError):  # the rank that hosts the store is lost
        store, payload = package_store(), json.dumps(astuple(notice))
        query_store(lambda: [store.set(f"stopped/{name}", payload) for name in notice.exchanges], None)


def broken_context() -> str:
    """Return the broken group in this rank's last notice, or ""; a new notice replaces the last one and repeats it."""
    return _own_stop[0].within if _own_stop else ""


def _read_last_stop(group: str) -> StopNotice:
    """Return the last stop notice of a group; NO_RANK, an empty one, if there is none or the store does not answer."""
    store, key = package_store(), f"stopped/{group}"
    try:
        payload = query_store(lambda: store.get(key) if store.check([key]) else b"", b"")
    except RuntimeError:  # the rank that hosts the store is lost
        return NO_RANK
    return StopNotice(*json.loads(payload)) if payload else NO_RANK


_channels: weakref.WeakKeyDictionary[Any, ControlChannel] = weakref.WeakKeyDictionary()
# default group (new for each initialization) -> number of channels so far, by group name; each has its own keys
_created_channels: weakref.WeakKeyDictionary[Any, Counter[str]] = weakref.WeakKeyDictionary()


def channel_of(ranks: Ranks) -> ControlChannel | None:
    """Return the channel of a process group; None for simulated ranks, and for a group without other processes.

    The first call creates it. All ranks make their first calls in the same order, so that their keys are the same.
    """
    group = ranks.process_group
    if group is None or not isinstance(current_communicator(), FunctionalCommunicator):
        return None
    channel = _channels.get(group)
    if channel is not None or not ranks.has_other_processes:
        return channel
    # A group that is created again can have the name of an earlier one, so number the channels of a name.
    created = _created_channels.setdefault(dist.group.WORLD, Counter())
    created[ranks.group] += 1
    store = dist.PrefixStore(f"sp_compile/{ranks.group}/{created[ranks.group]}", group_store(group))
    members = dist.get_process_group_ranks(group)  # holds no reference to the group, which may be destroyed
    last = ["joined the group"] * ranks.n  # the last operation of each rank, before its first exchange
    return _channels.setdefault(group, ControlChannel(ranks.group, members, store, group_timeout(group), last))


def open_channels() -> list[ControlChannel]:
    """Return the channels of all groups of this process."""
    return [*_channels.values()]
