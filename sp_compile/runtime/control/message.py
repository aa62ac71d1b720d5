"""Define the messages that ranks exchange before an operation of a group, and their encoding.

The ranks first compare digests of 8 bytes. The message itself, its body, follows only if digests differ, an answer is
expected or a rank has failed. It is JSON, so that decoding executes no code. An answer is a value of the
rank that all ranks receive. A stop notice is the reason why a rank does not come to an exchange; it is in the store.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from sp_compile.lowering.base.errors import SpError
from sp_compile.lowering.collectives.checksums import Summary

FieldValue = str | Summary  # text that must be equal on all ranks, or a summary that may differ by rounding


class EarlierValue(NamedTuple):
    """Key of a value of an earlier operation, which ranks compare at their next call."""

    kind: str  # a key of `EARLIER_TEXTS`
    name: str  # name of the input or result
    operation: str  # the operation that had the value, as text of its message
    number: int = 0  # number of the gradient, of several ones of a result

    def __str__(self) -> str:
        return f"{EARLIER_TEXTS[self.kind].format(**self._asdict())} when it {self.operation}"


EARLIER_TEXTS = {
    "input": "value of {name}",
    "sample": "value of part of {name}",  # some elements of an input
    "gradient": "value of the gradient of {name}",
    "shared gradient": "value of gradient {number}, of the result {name},",  # of a result of sp::shared
}


class InputRecord(NamedTuple):
    """Description of one input of a call on a rank."""

    size: str  # shape and sharding of a tensor, or the value of a Python scalar
    checksum: str = ""  # of all elements; "" if they are not compared
    sample: str = ""  # checksum of some elements
    weight: bool = False  # a parameter, which only some calls describe
    is_scalar: bool = False  # a Python scalar: `size` is its value

    def __str__(self) -> str:
        return f"{self.size} with checksum {self.checksum}" if self.checksum else self.size


@dataclass(frozen=True)
class ProgramRecord:
    """Description of a program on a rank, the same in all its calls and hashed once."""

    options: Mapping[str, str] = field(default_factory=dict)  # from `settings_fields`
    digest: int = 0  # of the graph
    is_split: bool = True  # False if every rank runs the program as it was written
    trained: tuple[str, ...] = ()  # inputs that require grad
    unsplit_reason: str = ""  # why the program runs unsplit, for messages
    dtypes: Mapping[str, str] = field(default_factory=dict)  # of the inputs, for messages
    training: str = ""  # the modes of the model, for messages, as in "is in train()"

    @cached_property
    def hash(self) -> int:
        """Return the hash of the record."""
        return hash_text(json.dumps([*self.options.items(), self.digest, self.is_split, self.trained]))


@dataclass(frozen=True)
class Message:
    """Announcement of an operation that all ranks of a group run.

    The verb, subject, model and number must be equal on every rank, and so must the values that the ranks have in
    common.
    """

    verb: str  # the operation
    subject: str = ""  # the program
    number: int = 0  # number of the call
    fields: Mapping[str, FieldValue] = field(default_factory=dict)  # values by name
    note: str = ""  # description of the operation for errors
    model: int = 0  # number of the set of weight tensors, from `ControlChannel.count_call`; 0 without weights
    mode: str = ""  # state of torch, from `mode_text`
    program: ProgramRecord = field(default_factory=ProgramRecord)  # the program of a call
    inputs: Mapping[str, InputRecord] = field(default_factory=dict)  # inputs of a call
    earlier: Mapping[EarlierValue, FieldValue] = field(default_factory=dict)  # checksums of values of earlier calls
    error: SpError | None = None  # why this rank stops
    raised: tuple[int, str] | None = None  # rank and text of an exception since the last exchange
    expects_answer: bool = False  # gather the answers of all ranks
    answer: Any = None  # value of this rank

    def __str__(self) -> str:
        number = f" (number {self.number})" if self.number else ""
        model = f" of model {self.model}" if self.model > 1 else ""
        return f"{self.verb} {self.subject}{model}{number}".strip()

    @property
    def digest(self) -> int:
        """Return the hash of what the ranks compare.

        If digests differ, the ranks exchange the messages. Some differences are allowed: reads may have any `note`.
        """
        values = [*self.fields.items(), *self.inputs.items(), *self.earlier.items()]
        contents = [self.verb, self.subject, self.model, self.number, self.note, self.mode, self.program.hash, values]
        return hash_text(json.dumps(contents))

    @property
    def needs_body(self) -> bool:
        """Return True if the ranks exchange the complete messages even if the digests are equal."""
        return self.error is not None or self.expects_answer

    @property
    def body(self) -> bytes:
        """Return the message as JSON, which `read` decodes on the other ranks."""
        return json.dumps([_encode_value(getattr(self, f.name)) for f in fields(self)]).encode()

    @classmethod
    def read(cls, body: bytes) -> Message:
        """Return the message that a body encodes."""
        message = cls(*map(_decode_value, json.loads(body)))
        # Named tuples are decoded as tuples.
        inputs = {name: InputRecord(*record) for name, record in message.inputs.items()}
        return replace(message, inputs=inputs, earlier={EarlierValue(*key): x for key, x in message.earlier.items()})


CALL_VERB = "calls"
COMPILE_VERB = "compiles"
READ_VERB = "reads"  # a sharded value
UNIT_VERB = "gathers the weights of"  # layers of a model, over all ranks with shards of it
LIKELY_CAUSE = (
    "Likely causes: another rank has skipped a batch or a backward, left the loop early, was killed, or destroyed its "
    "process group; it runs this part of the model eagerly (torch.compiler.disable, another backend, the recompile "
    "limit, a dispatch mode such as FlopCounterMode); it has caught an exception of this step and continued; a second "
    "thread of it calls programs (SP624); or it has started another collective of the group (a barrier or all_reduce "
    "under `if rank == 0`)."
)
VERB_CAUSES = {UNIT_VERB: "; likely, some ranks only call generate(), evaluate, or have images for an encoder"}
BACKWARD_VERB = "runs the backward of"  # in the device's autograd thread, if it has one
STOP_MESSAGE = Message("stops")  # in place of the message of an operation that this rank does not run
MEASURE_MESSAGE = Message("measures", "how fast the ranks are")


@dataclass(frozen=True)
class StopNotice:
    """Reason why a rank stopped, which it writes to the store for ranks that wait for it.

    It concerns the next exchange of each of its groups: a notice with another number of exchanges is out of date, and
    groups that are created later are not in it.
    """

    rank: int  # the rank that stopped, or that raised first
    text: str  # the reason
    continues: bool  # True if it may take part in the next call
    exchanges: dict[str, int]  # number of exchanges of each group until the rank stopped
    subject: str = ""  # the program that it cannot call; "" for all
    within: str = ""  # the group whose next exchange is broken permanently; "" for none
    raised: bool = False  # raised while its program ran, so that others may wait inside of theirs


NO_RANK = StopNotice(rank=-1, text="", continues=True, exchanges={})  # in place of a notice if no rank has stopped


def hash_text(text: str) -> int:
    """Return a 63-bit hash of a text."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


# Answers contain JSON values, tuples, frozen sets and registered dataclasses. The table creates one from its parts.

_sendable: dict[str, Callable[[Any], Any]] = {
    "dict": dict,
    "tuple": tuple,
    "frozenset": frozenset,
    "SpError": lambda parts: SpError(*parts),
}


def register_sendable(sent_class: type) -> type:
    """Register a dataclass that answers may contain, so that other ranks decode it. Used as a decorator."""
    _sendable[sent_class.__name__] = lambda parts: sent_class(**dict(parts))
    return sent_class


register_sendable(ProgramRecord)


def _encode_value(value: Any) -> Any:
    """Return a value as JSON values. Types that JSON lacks become objects: {"of": "tuple", "is": [1, 2]} for (1, 2)."""
    if isinstance(value, list):
        return [_encode_value(item) for item in value]
    parts: Any = None  # the parts from which `_sendable[kind]` creates the value; None for a JSON value
    kind = type(value).__name__
    if is_dataclass(value) and kind in _sendable:
        parts = [(f.name, getattr(value, f.name)) for f in fields(value)]
    elif isinstance(value, SpError):
        kind, parts = "SpError", [value.code, value.cause, value.fix]
    elif isinstance(value, Mapping):
        kind, parts = "dict", [*value.items()]
    elif isinstance(value, tuple):
        kind, parts = "tuple", [*value]
    elif isinstance(value, frozenset):
        parts = sorted(value)
    return value if parts is None else {"of": kind, "is": _encode_value(parts)}


def _decode_value(value: Any) -> Any:
    """Return the value that `_encode_value` has encoded: (1, 2) for {"of": "tuple", "is": [1, 2]}."""
    if isinstance(value, list):
        return [_decode_value(item) for item in value]
    if not isinstance(value, dict):
        return value
    create = _sendable[value["of"]]  # by the name of a type: creates a value from its parts
    return create(_decode_value(value["is"]))
