"""Define the messages that ranks exchange before an operation of a group, and their encoding.

Each rank first sends a header of 24 bytes with a digest. The message itself follows only if digests differ, an answer
is expected or a rank has failed. It is JSON, so that decoding executes no code.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import Any

from sp_compile.lowering.base.errors import SpError


class HashedFields(dict[str, str]):
    """Read-only fields that are the same in many messages, hashed once."""

    @cached_property
    def digest(self) -> int:
        """Return the hash of the fields."""
        return hash_text(json.dumps([*self.items()]))


@dataclass(frozen=True)
class Message:
    """Announcement of an operation that all ranks of a group run.

    The verb, subject, model and number must be equal on every rank, and so must the fields that the ranks have in
    common. The field "" describes a call that has no further fields.
    """

    verb: str  # the operation
    subject: str = ""  # the program
    number: int = 0  # number of the call
    fields: Mapping[Any, str] = field(default_factory=dict)  # by name or Field
    static_fields: HashedFields = field(default_factory=HashedFields)  # received as part of the fields
    error: SpError | None = None  # why this rank stops
    expects_answer: bool = False  # gather the answers of all ranks
    answer: Any = None  # value of this rank
    model: int = 0  # number of the model
    raised: tuple[int, str] | None = None  # rank and text of an exception since the last exchange

    def __str__(self) -> str:
        number = f" (number {self.number})" if self.number else ""
        model = f" of model {self.model}" if self.model > 1 else ""
        return f"{self.verb} {self.subject}{model}{number}".strip()

    @property
    def header(self) -> list[int]:
        """Return the hash and flags, which are equal on all ranks if no message body is needed."""
        told = [self.verb, self.subject, self.model, self.number, self.static_fields.digest, *self.fields.items()]
        compared = hash_text(json.dumps(told, default=str))
        return [compared, self.error is not None, self.expects_answer]

    @property
    def body(self) -> bytes:
        """Return the encoded message."""
        whole = replace(self, fields={**self.static_fields, **self.fields}, static_fields=HashedFields())
        return json.dumps([_encode_value(getattr(whole, f.name)) for f in fields(self)]).encode()

    @classmethod
    def read(cls, body: bytes) -> Message:
        """Return the message that a body encodes."""
        return cls(*map(_decode_value, json.loads(body)))


CALL_VERB = "calls"
COMPILE_VERB = "compiles"
READ_VERB = "reads"  # a sharded value
LIKELY_CAUSE = (
    "Likely causes: a rank that has skipped a batch or a backward, has ended (killed, a shorter loop) or has destroyed "
    "its process group, runs this part of the model eagerly (the recompile limit, torch.compiler.disable, another "
    "backend, a mode as FlopCounterMode is, after which torch compiles this code no more), has caught an exception of "
    "this step and gone on, or has begun a collective of its own over the group (a barrier or all_reduce under "
    "`if rank == 0`)."
)
GROUP_ENDED = "The process group cannot be used any more, as exchanges were under way."
BACKWARD = "runs the backward of"  # in the device's autograd thread, if it has one
STOP_VERB = Message("stops")
MEASURE_VERB = Message("measures", "how fast the ranks are")


@dataclass(frozen=True)
class StopNotice:
    """Reason why a rank stopped, published for ranks that wait for it.

    Groups that are created later are not affected, as their number of exchanges is not in the notice.
    """

    rank: int  # the rank that stopped, or that raised first
    text: str  # the reason
    continues: bool  # True if it may take part in the next call
    exchanges: dict[str, int]  # number of exchanges of each group
    subject: str = ""  # the program that it cannot call; "" for all
    within: str = ""  # the group whose next exchange is broken permanently; "" for none
    raised: bool = False  # raised while its program ran, so that others may wait inside of theirs


NO_RANK = StopNotice(-1, "", True, {})


def hash_text(text: str) -> int:
    """Return a 63-bit hash of a text."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


# Answers contain JSON values, tuples, frozen sets and registered dataclasses.

_sendable: dict[str, type] = {}


def register_sendable(one: type) -> type:
    """Register a dataclass that answers may contain. Used as a decorator."""
    _sendable[one.__name__] = one
    return one


class FieldKind(StrEnum):
    """Kinds of message fields that describe one value. Errors show the enum values."""

    INPUT = "input"
    """The size of an input. Part of every call."""
    WEIGHT = "weight"
    """The size of an input that is a parameter. Not part of most calls."""
    CHECKSUM = "checksum of"
    """The checksum of an input."""
    PART = "part of"
    """The checksum of some values of an input."""
    EARLIER = "value of"
    """The checksum of a value of an earlier call."""


@register_sendable
@dataclass(frozen=True)
class Field:
    """Name of a message field that describes one value."""

    kind: FieldKind
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


def _encode_value(value: Any) -> Any:
    if is_dataclass(value) and type(value).__name__ in _sendable:
        return {
            "of": type(value).__name__,
            "is": [(f.name, _encode_value(getattr(value, f.name))) for f in fields(value)],
        }
    if isinstance(value, SpError):
        return {"of": "SpError", "is": [value.code, value.cause, value.fix]}
    if isinstance(value, Mapping):
        return {"of": "dict", "is": [[_encode_value(k), _encode_value(v)] for k, v in value.items()]}
    if isinstance(value, tuple):
        return {"of": "tuple", "is": [_encode_value(one) for one in value]}
    if isinstance(value, frozenset):
        return {"of": "frozenset", "is": [_encode_value(one) for one in sorted(value)]}
    return [_encode_value(one) for one in value] if isinstance(value, list) else value


def _decode_value(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode_value(one) for one in value]
    if not isinstance(value, dict):
        return value
    parts = [_decode_value(one) for one in value["is"]]
    makers: dict[str, Callable[[Any], Any]] = {
        "dict": dict,
        "tuple": tuple,
        "frozenset": frozenset,
        "SpError": lambda parts: SpError(*parts),
    }
    return makers[value["of"]](parts) if value["of"] in makers else _sendable[value["of"]](**dict(parts))
