"""Exchange control messages on the CPU, separately from the collectives of the group.

Messages use a Gloo communicator over the group's store, for every backend of the group. No exchange therefore waits
for a device. Collectives of the group itself, such as a barrier of the user or half a step that a rank has skipped,
cannot be matched with messages, whose size differs and would abort the process.

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
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from sp_compile.lowering.base.error_codes import ERRORS
from sp_compile.lowering.base.errors import SpError
from sp_compile.lowering.base.ranks import Ranks
from sp_compile.lowering.collectives.checksums import PendingChecksums
from sp_compile.lowering.comm.communicator import FunctionalCommunicator, current_communicator
from sp_compile.lowering.torch_compat import (
    gloo_group,
    group_store,
    group_timeout,
    is_in_backward,
    is_lost_connection,
    leak,
    process_groups,
    use_real_tensors,
)

from .message import CALL_VERB, GROUP_ENDED, LIKELY_CAUSE, NO_RANK, READ_VERB, Message, StopNotice
from .store import package_store, query_store

WAIT_SLICE = timedelta(seconds=1)  # of a wait, during which Python handles no signal
READ_SECONDS = 10.0  # seconds within which all ranks should read a value
HEARTBEAT_PATIENCE = 2.0  # seconds of a wait before the store is read
RETRY_HINT = 5.0  # seconds within which a rank that has raised in a call makes the next one
CONNECT_CAUSE = timedelta(seconds=60)  # timeout of connecting after all ranks have arrived
FEW_INTEGERS = 8  # largest exchange whose buffers are reused, in integers
POLL_INTERVAL = 0.005  # seconds between checks for ranks that have not connected
STOPPED_CAUSE = 1000  # characters of the published reason of a stop
HEARTBEAT_INTERVAL = 2.0  # seconds between heartbeats of a rank that compiles
TWO_THREADS = "two threads of this process call programs over one process group, so their exchanges have no order."

log = logging.getLogger(__name__)


class GatherBuffers(NamedTuple):
    """Buffers of an all-gather: integers of this rank, (n,), and of all ranks, (ranks, n)."""

    mine: Any  # numpy array of this rank's integers, (n,)
    out: Any  # numpy array of all ranks' integers, (ranks, n)
    mine_given: list[torch.Tensor]  # [tensor of `mine`], the input of Gloo's allgather
    out_given: list[list[torch.Tensor]]  # [rows of `out`], the output of Gloo's allgather
    options: Any  # AllgatherOptions, without a timeout

    @classmethod
    def of(cls, form: tuple[int, torch.dtype], ranks: int) -> GatherBuffers:
        """Return new buffers for a number of integers, a dtype and a number of ranks."""
        with torch.inference_mode(False), torch.device("cpu"):  # so that the buffers stay writable
            mine, out = torch.empty(form[0], dtype=form[1]), torch.empty(ranks, form[0], dtype=form[1])
        options = _without_timeout(dist.distributed_c10d.AllgatherOptions())
        return cls(mine.numpy(), out.numpy(), [mine], [[*out.unbind()]], options)

    def start(self, gloo: Any) -> Any:
        """Start the all-gather and return its work handle."""
        return gloo.allgather(self.out_given, self.mine_given, self.options)


@dataclass(eq=False)
class ControlChannel:
    """Control channel of one process group."""

    name: str  # name of the group in torch
    ranks: list[int]  # global ranks of the group
    store: Any  # the group's store, with a prefix of this channel
    timeout: timedelta  # the group's timeout, which limits each wait
    last_fields: list[str]  # last operation of each rank
    gloo: Any = None  # None until all ranks have connected
    broken: str = ""  # why the group cannot be used any more
    ended: StopNotice | None = None  # the rank whose exception has ended the group
    raised: tuple[int, str] | None = None  # this rank and its exception since the last exchange
    thread: int = 0  # the thread that calls programs
    calls: Counter[tuple[str, int]] = field(default_factory=Counter)  # calls of each program and model
    # checksums by name that are compared at the next call
    later: list[tuple[list[str], PendingChecksums]] = field(default_factory=list)
    known: int = 0  # number of models so far
    exchanges: int = 0  # number of exchanges so far
    heartbeats: tuple[float, int, float] = (0.0, 0, 0.0)  # start of the last wait, heartbeats, time of the last one
    announced: int = -1  # number of exchanges before the last one whose wait was announced in the store
    warned: float = 0.0  # start of the read whose wait was logged
    process: int = field(default_factory=os.getpid)  # PID of the process that created the channel; see `_channels`
    # live models by the identities of their parameters
    models: dict[tuple[int, ...], tuple[int, list[Any]]] = field(default_factory=dict)
    # buffers of small exchanges that are not in use
    memory: dict[tuple[int, torch.dtype], GatherBuffers] = field(default_factory=dict)

    def gather(self, mine: Sequence[int], dtype: torch.dtype, message: Message) -> list[list[int]]:
        """Return the integers of every rank; each rank passes the same number of them.

        Args:
            mine: Integers of this rank.
            dtype: dtype of the integers.
            message: The operation of this rank, for the error of a wait.

        Raises:
            SpError: If a rank does not arrive within the group's timeout or is lost, or the channel is already broken.
        """
        form = len(mine), dtype
        memory = self.memory.pop(form, None)
        memory = memory or GatherBuffers.of(form, len(self.last_fields))  # a second thread allocates its own buffers
        memory.mine[:] = mine
        self._exchange(memory.start, (memory,), message)
        found: list[list[int]] = memory.out.tolist()
        if len(mine) <= FEW_INTEGERS:
            self.memory[form] = memory
        return found

    def _exchange(self, start: Callable[[Any], Any], tensors: tuple[Any, ...], message: Message) -> None:
        """Start an exchange of the communicator and wait for it.

        Args:
            start: Function that starts the exchange.
            tensors: Buffers that it reads and writes.
            message: The operation of this rank.
        """
        if os.getpid() != self.process:  # its bytes would be mixed with those of the rank
            raise SpError("SP682", "a process that was forked from a rank calls a program of the rank's process group.")
        self.check_broken()
        start_time, finished = time.monotonic(), False
        _waiting_channels.set()
        try:
            if self.gloo is None:
                self._connect(message, start_time)
            work = start(self.gloo)
            while not _is_done(work):
                self._check_progress(message, start_time)
            finished = True
            self.exchanges += 1
        except SpError:
            raise
        except RuntimeError as error:
            if not is_lost_connection(error):
                raise
            raise self.fail_timeout(message, time.monotonic() - start_time, error) from error
        finally:
            _waiting_channels.clear()
            if not finished:  # after an interrupt, messages of the others remain in transit
                if not self.broken:
                    self.broken = f"rank {dist.get_rank()} {message} and was interrupted"
                    publish_stop(f"it {message} and was interrupted", continues=True, within=self.name)
                # Its destructor would wait for missing ranks, and its threads free tensors after Python's exit.
                leak((self.gloo, *tensors))

    def _connect(self, message: Message, start_time: float) -> None:
        """Connect all ranks after all have arrived, since connecting cannot be interrupted.

        A rank that stops waiting is removed from the count of arrived ranks.
        """
        counted: list[bool] = []

        def arrived() -> int:
            """Count this rank once, and return the number of ranks that arrived."""
            count: int = self.store.add("here", 0 if counted else 1)
            counted.append(True)
            return count

        try:
            while query_store(arrived, 0) < len(self.last_fields):
                time.sleep(POLL_INTERVAL)
                self._check_progress(message, start_time)
            me = self.ranks.index(dist.get_rank())
            self.gloo = gloo_group(self.store, me, len(self.last_fields), min(self.timeout, CONNECT_CAUSE))
        except RuntimeError as error:
            raise self.fail_timeout(message, time.monotonic() - start_time, error) from error
        finally:
            if self.gloo is None and counted:
                query_store(lambda: self.store.add("here", -1), 0)

    def _check_progress(self, message: Message, start_time: float) -> None:
        """Raise SpError if the wait exceeds the timeout, or another rank has stopped."""
        waited, alive = time.monotonic() - start_time, self._has_compiling_rank(start_time)
        if message.verb == READ_VERB and waited > READ_SECONDS and self.warned != start_time:
            self.warned, advice = start_time, ERRORS["SP604"].fix
            log.warning(
                "rank %d %s %s and waits for the other ranks. %s", dist.get_rank(), *_read_line(message), advice
            )
        is_late = waited > self.timeout.total_seconds() and not alive
        stopped = self._find_stop(message) if waited > HEARTBEAT_PATIENCE else NO_RANK
        if waited > HEARTBEAT_PATIENCE and self.announced != self.exchanges and len(self.ranks) > 2:
            self.announced = self.exchanges
            with suppress(RuntimeError):
                query_store(self._announce_wait, None)
        is_lost = not stopped.continues or (stopped.raised and (message.verb != CALL_VERB or waited > RETRY_HINT))
        if is_late or is_lost:
            raise self.fail_timeout(message, waited)

    @property
    def last(self) -> str:
        """Return the last operation of this rank."""
        return self.last_fields[self.ranks.index(dist.get_rank())]

    def check_thread(self) -> None:
        """Raise SpError in a second thread that calls programs, since exchanges would have no order.

        A backward has its own threads. They call checkpointed programs again, in the same order on all ranks.
        """
        if is_in_backward():
            return
        me = threading.get_ident()
        if self.thread not in (0, me) and any(thread.ident == self.thread for thread in threading.enumerate()):
            publish_stop(TWO_THREADS, continues=True)
            raise SpError("SP624", TWO_THREADS)
        self.thread = me

    def fail_timeout(
        self, message: Message, waited: float, error: BaseException | None = None, place: str = ""
    ) -> SpError:
        """Mark the channel as broken and return the error of a failed wait.

        Args:
            message: The operation of this rank.
            waited: Duration of the wait in seconds.
            error: The cause, if any.
            place: Description of the collective.
        """
        stopped = self._find_stop(message)
        if stopped.raised:
            return self.break_group(stopped, str(message))
        last_calls = []  # lines with the ranks of each last call
        for last_call in dict.fromkeys(self.last_fields):
            ranks = [str(rank) for rank, fields in zip(self.ranks, self.last_fields) if fields == last_call]
            last_calls.append(f"  last operation of rank {', '.join(ranks)}: {last_call}")
        cause = f"\n{str(error).splitlines()[0][:200]}" if str(error or "") else ""
        details = (f", in {place}" if place else "") + cause
        operation = " ".join(_read_line(message)).strip()
        absent = self._absent_ranks(0.0 if place else waited)
        who = f"rank {', '.join(map(str, absent))}" if absent else "other ranks"
        wait = f"{operation} and timed out after {waited:.0f} s, because {who} did not arrive{details}"
        first = f"{who} did not arrive: rank {dist.get_rank()} {operation} and timed out after {waited:.0f} s{details}"
        stop = [f"rank {stopped.rank} stopped: {stopped.text}"] if stopped.text else []
        self.broken = "\n".join([first, *last_calls, f"  {stop[0]}" if stop else LIKELY_CAUSE])
        text = "; ".join([f"it {wait}", *stop]).replace("\n", " ")
        # It may take part in exchanges of other groups.
        publish_stop(text, of={self.name: self.exchanges}, within=self.name)
        return SpError("SP622", self.broken) if message.verb == READ_VERB else SpError("SP621", self.broken)

    def _absent_ranks(self, waited: float) -> list[int]:
        """Return the ranks that do not wait in this exchange; [] if that is not known, as after a short wait."""
        others = [rank for rank in self.ranks if rank != dist.get_rank()]
        if len(others) == 1 or waited < 2 * HEARTBEAT_PATIENCE:
            return others if len(others) == 1 else []
        with suppress(RuntimeError):  # the rank that hosts the store is lost
            return [rank for rank in others if query_store(partial(self._waiting_at, rank), -1) != self.exchanges]
        return []

    def _waiting_at(self, rank: int) -> int:
        """Return the number of exchanges before the last one in which a rank had to wait, or -1."""
        key = f"waits/{rank}"
        return int(self.store.get(key)) if self.store.check([key]) else -1

    def _announce_wait(self) -> None:
        """Write to the store that this rank waits in its next exchange, for the errors of the others."""
        self.store.set(f"waits/{dist.get_rank()}", str(self.exchanges))

    def break_group(self, found: StopNotice, operation: str) -> SpError:
        """Mark the channel as broken by a rank that has raised, and return the error.

        The notice is published for the ranks that wait for this one.

        Args:
            found: The notice of the rank that has raised.
            operation: The operation of this rank.
        """
        me = dist.get_rank()
        here = "" if found.rank == me else f"\n  rank {me} waited for it: this rank {operation}"
        self.broken = f"rank {found.rank} raised {found.text}{here}\n  {GROUP_ENDED}"
        self.ended = replace(found, exchanges={self.name: self.exchanges}, within=self.name, continues=False)
        _store_notice(self.ended)
        return SpError("SP661", self.broken)

    def check_broken(self) -> None:
        """Raise SpError if the channel is broken."""
        if self.broken:
            raise SpError("SP623", f"process group {self.name} is unusable after an earlier error:\n{self.broken}")

    def find_raised(self) -> StopNotice | None:
        """Return the notice of a rank that has raised since the last exchange, or None."""
        last = _read_last_stop(self.name)
        others = last.rank != dist.get_rank() or last.within == self.name
        known = any(map(self._is_since, _own_stop))  # this rank has raised as well, and continues
        return last if last.raised and others and self._is_since(last) and not known else None

    def count_call(self, program: str, parameters: Sequence[torch.nn.Parameter]) -> tuple[int, int]:
        """Count a call of a program, and return the number of its model and of the call."""
        self.check_thread()  # before the call counts
        key = program, self.model(parameters)
        self.calls[key] += 1
        return key[1], self.calls[key]

    def model(self, parameters: Sequence[torch.nn.Parameter]) -> int:
        """Return the number of the model with these parameters, by first call; 0 without parameters."""
        if not parameters:
            return 0
        key = tuple(map(id, parameters))
        if key not in self.models:
            self.known += 1
            forget = partial(_forget_model, self.models, key)  # before an address is reused by another parameter
            self.models[key] = self.known, [weakref.ref(one, forget) for one in parameters]
        return self.models[key][0]

    def reset_counters(self, everyone: Sequence[Message]) -> None:
        """Restart the counts of calls and models after the ranks have detected a mismatch."""
        for counted in (self.calls, self.later, self.models):
            counted.clear()
        self.known = max(self.known, *(one.model for one in everyone))

    def take_earlier(self) -> dict[str, str]:
        """Return the checksums of earlier calls that are not yet compared, by name."""
        waiting, self.later = self.later, []
        return {name: value for names, one in waiting for name, value in zip(names, one.read(), strict=True)}

    def _find_stop(self, message: Message) -> StopNotice:
        """Return the notice of another rank that stopped since the last exchange, or NO_RANK.

        A rank that cannot compile one program still takes part in calls of others, over groups that are not broken.
        """
        last = _read_last_stop(self.name)
        mine = last.rank == dist.get_rank() and last.within != self.name
        if mine or (last.rank not in self.ranks and not last.raised) or not self._is_since(last):
            return NO_RANK
        will_join = message.verb == CALL_VERB and last.subject not in ("", message.subject)
        is_missing = last.within == self.name or not (will_join or any(map(self._is_since, _own_stop)))
        return last if is_missing else NO_RANK

    def _is_since(self, one: StopNotice) -> bool:
        known = one.exchanges.get(self.name)
        return known == self.exchanges or (one.within == self.name and known == self.exchanges - 1)

    def _has_compiling_rank(self, start_time: float) -> bool:
        """Return True if a compiling rank has sent a recent heartbeat during the wait."""
        wait, seen, _ = self.heartbeats
        count, now = query_store(lambda: self.store.add("compiles", 0), seen), time.monotonic()
        if wait != start_time:
            self.heartbeats = start_time, count, start_time - 4 * HEARTBEAT_INTERVAL
        elif count != seen:
            self.heartbeats = start_time, count, now
        return now - self.heartbeats[2] < 4 * HEARTBEAT_INTERVAL

    def send_heartbeat(self) -> None:
        """Send a heartbeat to the other ranks, unless this rank waits for ranks itself."""
        if not _waiting_channels.is_set():
            with suppress(RuntimeError):  # the rank that hosts the store is lost
                self.store.add("compiles", 1)


_waiting_channels = threading.Event()  # set while this process waits for other ranks


def _forget_model(models: dict[tuple[int, ...], Any], key: tuple[int, ...], _reference: Any) -> None:
    models.pop(key, None)


def _read_line(message: Message) -> tuple[str, str]:
    """Return the operation of a rank, and the line of a read."""
    return str(message), message.note if message.verb == READ_VERB else ""


def _is_done(work: Any) -> bool:
    """Return True if the work is done, after waiting for one time slice."""
    try:
        work.wait(WAIT_SLICE)
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait()  # raises the error, if it has failed
    return True


_own_stop: list[StopNotice] = []  # last notice of this rank


def publish_stop(
    text: str,
    continues: bool = False,
    subject: str = "",
    of: dict[str, int] | None = None,
    within: str = "",
    raised: bool = False,
) -> None:
    """Publish in the store why this rank stops, for the ranks that wait for it.

    Args:
        text: The reason.
        continues: True if the rank may take part in the next call.
        subject: The program that it cannot call; "" for all.
        of: Number of exchanges of each group; None for all groups.
        within: The group whose exchange is broken; "" for none.
        raised: True if the program raised while it ran.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return
    counts = {name: 0 for name, *_ in process_groups()} | {one.name: one.exchanges for one in _channels.values()}
    exchanges = counts if of is None else of
    _store_notice(StopNotice(dist.get_rank(), text[:STOPPED_CAUSE], continues, exchanges, subject, within, raised))


def _store_notice(notice: StopNotice) -> None:
    """Write a notice to the store for each of its groups."""
    _own_stop[:] = [notice]
    with suppress(RuntimeError):  # the rank that hosts the store is lost
        store, written = package_store(), json.dumps(astuple(notice))
        query_store(lambda: [store.set(f"stopped/{name}", written) for name in notice.exchanges], None)


def broken_context() -> str:
    """Return `within` of the last notice of this rank, for the next notice."""
    return _own_stop[0].within if _own_stop else ""


def _read_last_stop(group: str) -> StopNotice:
    """Return the last stop notice of a group."""
    store, key = package_store(), f"stopped/{group}"
    try:
        payload = query_store(lambda: store.get(key) if store.check([key]) else b"", b"")
    except RuntimeError:  # the rank that hosts the store is lost
        return NO_RANK
    return StopNotice(*json.loads(payload)) if payload else NO_RANK


_channels: weakref.WeakKeyDictionary[Any, ControlChannel] = weakref.WeakKeyDictionary()
# number of channels created for each name since initialization; each uses separate keys
_created_channels: weakref.WeakKeyDictionary[Any, Counter[str]] = weakref.WeakKeyDictionary()


def channel_of(ranks: Ranks) -> ControlChannel | None:
    """Return the channel of a process group, or None without processes."""
    group = ranks.process_group
    if group is None or not isinstance(current_communicator(), FunctionalCommunicator):
        return None
    found = _channels.get(group)  # as on every call
    if found is not None or not ranks.has_other_processes:
        return found
    made = _created_channels.setdefault(dist.group.WORLD, Counter())
    made[ranks.group] += 1
    store = dist.PrefixStore(f"sp_compile/{ranks.group}/{made[ranks.group]}", group_store(group))
    members = dist.get_process_group_ranks(group)  # holds no reference to the group, which may be destroyed
    _channels[group] = ControlChannel(ranks.group, members, store, group_timeout(group), ["joined the group"] * ranks.n)
    return _channels[group]


def gather_integers(mine: Sequence[int], ranks: Ranks, dtype: torch.dtype, message: Message) -> list[list[int]]:
    """Return the integers of every rank; simulated ranks use their communicator.

    Raises:
        SpError: As `ControlChannel.gather`.
    """
    with use_real_tensors():
        channel = channel_of(ranks)
        if channel is not None:
            return channel.gather(mine, dtype, message)
        if isinstance(current_communicator(), FunctionalCommunicator):
            return [list(mine)] * ranks.n
        sent = torch.tensor(mine, dtype=dtype, device="cpu")
        return current_communicator().all_gather(sent, ranks.n, ranks.group).view(ranks.n, len(mine)).tolist()


def _without_timeout(options: Any) -> Any:
    """Return exchange options with a long timeout, so that the caller can check progress and wait again."""
    options.timeout = timedelta(days=7)
    return options
