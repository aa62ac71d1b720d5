"""How the ranks of a group reach each other with words: on the CPU, beside the group and never in its way.

Words have a Gloo communicator of their own over the group's store. It is there whatever the group's backend is, so no
device is waited for; and what a rank sends over the group itself, a barrier of the user's or half a step that another
rank has skipped, never meets words, which would be of another size and abort the process.

A wait ends within the group's timeout with an SpError, which has what every rank was last seen doing and what a rank
that stopped has left in the store. A rank that compiles leaves signs of life there, because a compilation may take
longer than any timeout. A group has one key for either, whatever the number of ranks and steps.
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

from .message import CALL_VERB, GROUP_ENDED, LIKELY_CAUSE, NO_RANK, READ_VERB, Field, Message, StopNotice
from .store import package_store, query_store

WAIT_SLICE = timedelta(seconds=1)  # of a wait, in which Python sees no signal
READ_SECONDS = 10.0  # seconds of a wait in which all should have come that read one value
HEARTBEAT_PATIENCE = 2.0  # seconds of a wait before a rank that has stopped is looked for
RETRY_HINT = 5.0  # seconds within which a rank that has raised in a call makes the next one
CONNECT_CAUSE = timedelta(seconds=60)  # of ranks that are all there
FEW_INTEGERS = 8  # integers of an exchange whose memory is kept for the next one
POLL_INTERVAL = 0.005  # seconds between looks for ranks that have not connected
STOPPED_CAUSE = 1000  # characters of why a rank stopped, which may have heard it of another
HEARTBEAT_INTERVAL = 2.0  # seconds between the signs of life of a rank that compiles
TWO_THREADS = "two threads of this process call programs over one process group, so their exchanges have no order."

log = logging.getLogger(__name__)


class GatherBuffers(NamedTuple):
    """What an all-gather takes: this rank's integers, (n,), and all ranks', (ranks, n); as arrays and as tensors."""

    mine: Any
    out: Any
    mine_given: list[torch.Tensor]
    out_given: list[list[torch.Tensor]]
    options: Any

    @classmethod
    def of(cls, form: tuple[int, torch.dtype], ranks: int) -> GatherBuffers:
        with torch.inference_mode(False), torch.device("cpu"):  # or nobody could write to it later, or from here
            mine, out = torch.empty(form[0], dtype=form[1]), torch.empty(ranks, form[0], dtype=form[1])
        options = _without_timeout(dist.distributed_c10d.AllgatherOptions())
        return cls(mine.numpy(), out.numpy(), [mine], [[*out.unbind()]], options)

    def start(self, gloo: Any) -> Any:
        return gloo.allgather(self.out_given, self.mine_given, self.options)


@dataclass(eq=False)
class ControlChannel:
    """One group's words. name, ranks: as torch knows the group. seen: what each rank said last. broken: why the group
    cannot be used any more.

    talks: how many exchanges there were. calls: how often this rank has called each program, by its name and model.
    later: what of a call is said at the next, as the names of fields and their checksums. models: by the identities
    of its parameters each model that was called and is alive, two of one class too; known: how many there were.
    beats: of the last wait when it began, and how many signs of life were seen, the last of them when.
    warned: the wait for a read that was warned of, by when it began. gloo: None
    until all ranks have met. memory: of exchanges of a few integers, by how many, as long as none of these is on its
    way. ended: who raised in a program, if that has ended the group; raised: this rank,
    and what it has raised there since the last exchange.
    """

    name: str
    ranks: list[int]
    store: Any
    timeout: timedelta
    last_fields: list[str]
    gloo: Any = None
    broken: str = ""
    ended: StopNotice | None = None
    raised: tuple[int, str] | None = None
    thread: int = 0
    calls: Counter[tuple[str, int]] = field(default_factory=Counter)
    later: list[tuple[list[Field], PendingChecksums]] = field(default_factory=list)
    known: int = 0
    exchanges: int = 0
    heartbeats: tuple[float, int, float] = (0.0, 0, 0.0)
    warned: float = 0.0
    process: int = field(default_factory=os.getpid)
    models: dict[tuple[int, ...], tuple[int, list[Any]]] = field(default_factory=dict)
    memory: dict[tuple[int, torch.dtype], GatherBuffers] = field(default_factory=dict)

    def gather(self, mine: Sequence[int], dtype: torch.dtype, saying: Message) -> list[list[int]]:
        """Every rank's integers, as many from each. saying: what this rank is about to do, for the error of a wait.

        Raises SpError: a rank did not come within the group's timeout or is gone, and at once where that has happened
        before.
        """
        form = len(mine), dtype
        memory = self.memory.pop(form, None)
        memory = memory or GatherBuffers.of(form, len(self.last_fields))  # of two threads one makes its own
        memory.mine[:] = mine
        self._exchange(memory.start, (memory,), saying)
        found: list[list[int]] = memory.out.tolist()
        if len(mine) <= FEW_INTEGERS:
            self.memory[form] = memory
        return found

    def broadcast(self, values: torch.Tensor, root: int, saying: Message) -> None:
        """Fill every rank's `values` (contiguous bytes on the CPU, as many on each) with those of the group's `root`.

        Raises what `gather_integers` does.
        """
        options = _without_timeout(dist.BroadcastOptions())
        options.rootRank = root
        self._exchange(lambda gloo: gloo.broadcast([values], options), (values,), saying)

    def _exchange(self, start: Callable[[Any], Any], tensors: tuple[Any, ...], saying: Message) -> None:
        """Start an exchange of the communicator, and wait for it. tensors: what it reads and writes."""
        if os.getpid() != self.process:  # whose bytes would be taken for those of the rank
            raise SpError("SP682", "a process that was forked from a rank calls a program of the rank's process group.")
        self.check_broken()
        begun, finished = time.monotonic(), False
        _waiting_channels.set()
        try:
            if self.gloo is None:
                self._connect(saying, begun)
            work = start(self.gloo)
            while not _is_done(work):
                self._check_progress(saying, begun)
            finished = True
            self.exchanges += 1
        except SpError:
            raise
        except RuntimeError as error:
            if not is_lost_connection(error):
                raise
            raise self.fail_timeout(saying, time.monotonic() - begun, error) from error
        finally:
            _waiting_channels.clear()
            if not finished:  # an interrupt, too, leaves the others' words on the way
                if not self.broken:
                    self.broken = f"rank {dist.get_rank()} {saying} and was interrupted"
                    publish_stop(f"it was interrupted when it {saying}", goes_on=True, within=self.name)
                # Its end would wait for ranks that did not come, and its threads drop tensors when Python has ended.
                leak((self.gloo, *tensors))

    def _connect(self, saying: Message, begun: float) -> None:
        """Connect all ranks, once all are here: connecting cannot be interrupted. A rank that gives up is not here."""
        came: list[bool] = []

        def arrived() -> int:
            count: int = self.store.add("here", 0 if came else 1)
            came.append(True)
            return count

        try:
            while query_store(arrived, 0) < len(self.last_fields):
                time.sleep(POLL_INTERVAL)
                self._check_progress(saying, begun)
            me = self.ranks.index(dist.get_rank())
            self.gloo = gloo_group(self.store, me, len(self.last_fields), min(self.timeout, CONNECT_CAUSE))
        except RuntimeError as error:
            raise self.fail_timeout(saying, time.monotonic() - begun, error) from error
        finally:
            if self.gloo is None and came:
                query_store(lambda: self.store.add("here", -1), 0)

    def _check_progress(self, saying: Message, begun: float) -> None:
        """Raise SpError if the others are waited for too long, or one of them has said that it does not come."""
        waited, alive = time.monotonic() - begun, self._has_compiling_rank(begun)
        if saying.verb == READ_VERB and waited > READ_SECONDS and self.warned != begun:
            self.warned, advice = begun, ERRORS["SP604"].fix
            log.warning("rank %d %s %s: it waits for the others. %s", dist.get_rank(), *_read_line(saying), advice)
        too_long = waited > self.timeout.total_seconds() and not alive
        stopped = self._find_stop(saying) if waited > HEARTBEAT_PATIENCE else NO_RANK
        gone = not stopped.continues or (stopped.raised and (saying.verb != CALL_VERB or waited > RETRY_HINT))
        if too_long or gone:
            raise self.fail_timeout(saying, waited)

    @property
    def last(self) -> str:
        """What this rank said last."""
        return self.last_fields[self.ranks.index(dist.get_rank())]

    def check_thread(self) -> None:
        """Raise SpError in a second thread that calls programs: the words of two would meet in any order.

        A backward has threads of its own, which call programs again where they were checkpointed, in the order of all.
        """
        if is_in_backward():
            return
        me = threading.get_ident()
        if self.thread not in (0, me) and any(thread.ident == self.thread for thread in threading.enumerate()):
            publish_stop(TWO_THREADS, goes_on=True)
            raise SpError("SP624", TWO_THREADS)
        self.thread = me

    def fail_timeout(
        self, saying: Message, waited: float, error: BaseException | None = None, place: str = ""
    ) -> SpError:
        """Return the error of a wait that was in vain, since which the group is broken. place: the exchange."""
        stopped = self._find_stop(saying)
        if stopped.raised:
            return self.break_group(stopped, str(saying))
        me, others = dist.get_rank(), []
        for seen in dict.fromkeys(self.last_fields):
            ranks = [str(rank) for rank, one in zip(self.ranks, self.last_fields) if one == seen]
            others.append(f"  rank {', '.join(ranks)} was last seen when it {seen}")
        heard = f"\n{str(error).splitlines()[0][:200]}" if str(error or "") else ""
        found = (f", in {place}" if place else "") + heard
        what = f"{' '.join(_read_line(saying)).strip()} and waited {waited:.0f} s for ranks that did not come{found}"
        why = [f"rank {stopped.rank} stopped: {stopped.text}"] if stopped.text else []
        self.broken = "\n".join([f"rank {me} {what}", *others, f"  {why[0]}" if why else LIKELY_CAUSE])
        told = "; ".join([f"it {what}", *why]).replace("\n", " ")
        publish_stop(
            told[:STOPPED_CAUSE], of={self.name: self.exchanges}, within=self.name
        )  # to other groups it may come
        return SpError("SP622", self.broken) if saying.verb == READ_VERB else SpError("SP621", self.broken)

    def break_group(self, found: StopNotice, saying: str) -> SpError:
        """Return the error of a group that is broken as a rank has raised in a program. saying: what this rank did.

        It is left in the store for those that wait for this rank.
        """
        here = "" if found.rank == dist.get_rank() else f"\n  rank {dist.get_rank()} waited for it: it {saying}"
        self.broken = f"rank {found.rank} raised {found.text}{here}\n  {GROUP_ENDED}"
        self.ended = replace(found, exchanges={self.name: self.exchanges}, within=self.name, continues=False)
        _store_notice(self.ended)
        return SpError("SP661", self.broken)

    def check_broken(self) -> None:
        """Raise SpError if the group cannot be used any more."""
        if self.broken:
            raise SpError("SP623", f"this group of ranks is broken since\n{self.broken}")

    def find_raised(self) -> StopNotice | None:
        """Who has raised in a program since the last exchange, as far as others have left it in the store."""
        last = _read_last_stop(self.name)
        others = last.rank != dist.get_rank() or last.within == self.name
        known = any(map(self._is_since, _own_stop))  # this rank has raised as well, and goes on
        return last if last.raised and others and self._is_since(last) and not known else None

    def model(self, parameters: Sequence[torch.nn.Parameter]) -> int:
        """Which of the models it is that has these, in the order of their first calls; 0: that have none."""
        if not parameters:
            return 0
        key = tuple(map(id, parameters))
        if key not in self.models:
            self.known += 1
            gone = partial(_forget_model, self.models, key)  # before another parameter is found at such an address
            self.models[key] = self.known, [weakref.ref(one, gone) for one in parameters]
        return self.models[key][0]

    def reset_counters(self, everyone: Sequence[Message]) -> None:
        """Count calls and models from here: ranks were about to do different things, and know it."""
        for counted in (self.calls, self.later, self.models):
            counted.clear()
        self.known = max(self.known, *(one.model for one in everyone))

    def earlier_fields(self) -> dict[Any, str]:
        """The checksums that earlier calls left to be read."""
        waiting, self.later = self.later, []
        return {name: value for names, one in waiting for name, value in zip(names, one.read(), strict=True)}

    def _find_stop(self, saying: Message) -> StopNotice:
        """What another rank of this group said, if it has stopped since the last exchange, and this one has not.

        A rank that cannot compile one program comes to the others, over whichever group that is not broken there.
        """
        last = _read_last_stop(self.name)
        mine = last.rank == dist.get_rank() and last.within != self.name
        if mine or (last.rank not in self.ranks and not last.raised) or not self._is_since(last):
            return NO_RANK
        comes = saying.verb == CALL_VERB and last.subject not in ("", saying.subject)
        goes = last.within == self.name or not (comes or any(map(self._is_since, _own_stop)))
        return last if goes else NO_RANK

    def _is_since(self, one: StopNotice) -> bool:
        known = one.exchanges.get(self.name)
        return known == self.exchanges or (one.within == self.name and known == self.exchanges - 1)

    def _has_compiling_rank(self, begun: float) -> bool:
        """Has a rank that compiles shown a sign of life of late, during the wait that began then?"""
        wait, seen, _ = self.heartbeats
        count, now = query_store(lambda: self.store.add("compiles", 0), seen), time.monotonic()
        if wait != begun:
            self.heartbeats = begun, count, begun - 4 * HEARTBEAT_INTERVAL
        elif count != seen:
            self.heartbeats = begun, count, now
        return now - self.heartbeats[2] < 4 * HEARTBEAT_INTERVAL

    def send_heartbeat(self) -> None:
        """Show the other ranks that this one compiles, unless it waits for ranks itself."""
        if not _waiting_channels.is_set():
            with suppress(RuntimeError):  # the rank that keeps the store is gone
                self.store.add("compiles", 1)


_waiting_channels = threading.Event()  # for other ranks


def _forget_model(models: dict[tuple[int, ...], Any], key: tuple[int, ...], gone: Any) -> None:
    models.pop(key, None)


def _read_line(saying: Message) -> tuple[str, str]:
    """What a rank is about to do, and of a read at which line."""
    return str(saying), saying.fields.get("", "") if saying.verb == READ_VERB else ""


def _is_done(work: Any) -> bool:
    """Is it done? Waits for a slice of time."""
    try:
        work.wait(WAIT_SLICE)
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait()  # raises what it ended with, if it did not end well just now
    return True


_own_stop: list[StopNotice] = []  # what this rank said last


def publish_stop(
    words: str,
    goes_on: bool = False,
    subject: str = "",
    of: dict[str, int] | None = None,
    within: str = "",
    raised: bool = False,
) -> None:
    """Leave in the store why this rank stops, for the ranks that wait for it.

    of: `talks`, if not those of all groups.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return
    talks = {name: 0 for name, *_ in process_groups()} | {wire.name: wire.exchanges for wire in _channels.values()}
    _store_notice(StopNotice(dist.get_rank(), words, goes_on, talks if of is None else of, subject, within, raised))


def _store_notice(said: StopNotice) -> None:
    """Leave it in the store, for the groups of its `talks`."""
    _own_stop[:] = [said]
    with suppress(RuntimeError):  # the rank that keeps the store is gone
        store, written = package_store(), json.dumps(astuple(said))
        query_store(lambda: [store.set(f"stopped/{name}", written) for name in said.exchanges], None)


def broken_context() -> str:
    """`within` of what this rank said last, for what it says next."""
    return _own_stop[0].within if _own_stop else ""


def _read_last_stop(group: str) -> StopNotice:
    """Which rank of a group stopped last, and why."""
    store, key = package_store(), f"stopped/{group}"
    try:
        words = query_store(lambda: store.get(key) if store.check([key]) else b"", b"")
    except RuntimeError:  # the rank that keeps the store is gone
        return NO_RANK
    return StopNotice(*json.loads(words)) if words else NO_RANK


_channels: weakref.WeakKeyDictionary[Any, ControlChannel] = weakref.WeakKeyDictionary()
_created_channels: weakref.WeakKeyDictionary[Any, Counter[str]] = weakref.WeakKeyDictionary()
"""How many wires of one name there were since the processes were connected: each has keys of its own."""


def channel_of(ranks: Ranks) -> ControlChannel | None:
    """The wire of a group of processes; None without processes."""
    group = ranks.process_group
    if group is None or not isinstance(current_communicator(), FunctionalCommunicator):
        return None
    found = _channels.get(group)  # as on every call
    if found is not None or not ranks.exchanges:
        return found
    made = _created_channels.setdefault(dist.group.WORLD, Counter())
    made[ranks.group] += 1
    store = dist.PrefixStore(f"sp_compile/{ranks.group}/{made[ranks.group]}", group_store(group))
    members = dist.get_process_group_ranks(group)  # of the group itself nothing is kept: it may be destroyed
    _channels[group] = ControlChannel(ranks.group, members, store, group_timeout(group), ["joined the group"] * ranks.n)
    return _channels[group]


def gather_integers(mine: Sequence[int], ranks: Ranks, dtype: torch.dtype, saying: Message) -> list[list[int]]:
    """Every rank's integers, as many from each; of simulated ranks by their communicator.

    Raises what `ControlChannel.gather` does.
    """
    with use_real_tensors():
        wire = channel_of(ranks)
        if wire is not None:
            return wire.gather(mine, dtype, saying)
        if isinstance(current_communicator(), FunctionalCommunicator):
            return [list(mine)] * ranks.n
        sent = torch.tensor(mine, dtype=dtype, device="cpu")
        return current_communicator().all_gather(sent, ranks.n, ranks.group).view(ranks.n, len(mine)).tolist()


def _without_timeout(options: Any) -> Any:
    """Options of an exchange that never gives up by itself, so that whoever waits can look around and wait on."""
    options.timeout = timedelta(days=7)
    return options
