"""What a rank says before it does something that takes every rank of a group, and how that is written.

First go 24 bytes a rank: a digest. Only where these differ, or somebody asks or has failed, does the message itself
follow, as JSON: it cannot execute anything.
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
    """Fields that are the same in many messages, and hashed once. Not to be written to."""

    @cached_property
    def digest(self) -> int:
        return hash_text(json.dumps([*self.items()]))


@dataclass(frozen=True)
class Message:
    """doing: a verb; with subject, model and number of what: the program, whose of several models it is, and its
    call. All of it has to be the same on every rank, and so have the fields that ranks have in common; the field ""
    is all that there is to say of a call.
    fields: by names, or by a Field each. standing: more fields, which other ranks receive among the `fields`.
    error: why this rank stops. raised: its rank, and what it has raised in a program since the last exchange.
    asks: does every rank want to know every other's `answer`?
    """

    verb: str
    subject: str = ""
    number: int = 0
    fields: Mapping[Any, str] = field(default_factory=dict)
    static_fields: HashedFields = field(default_factory=HashedFields)
    error: SpError | None = None
    expects_answer: bool = False
    answer: Any = None
    model: int = 0
    raised: tuple[int, str] | None = None

    def __str__(self) -> str:
        number = f" (number {self.number})" if self.number else ""
        model = f" of model {self.model}" if self.model > 1 else ""
        return f"{self.verb} {self.subject}{model}{number}".strip()

    @property
    def header(self) -> list[int]:
        """Equal on all ranks where nobody has to read the bodies."""
        told = [self.verb, self.subject, self.model, self.number, self.static_fields.digest, *self.fields.items()]
        compared = hash_text(json.dumps(told, default=str))
        return [compared, self.error is not None, self.expects_answer]

    @property
    def body(self) -> bytes:
        """All of it."""
        whole = replace(self, fields={**self.static_fields, **self.fields}, static_fields=HashedFields())
        return json.dumps([_encode_value(getattr(whole, f.name)) for f in fields(self)]).encode()

    @classmethod
    def read(cls, body: bytes) -> Message:
        """The message of a body."""
        return cls(*map(_decode_value, json.loads(body)))


CALL_VERB = "calls"
COMPILE_VERB = "compiles"
READ_VERB = "reads"  # a value that lies in shards
LIKELY_CAUSE = (
    "Likely causes: a rank that has skipped a batch or a backward, has ended (killed, a shorter loop) or has destroyed "
    "its process group, runs this part of the model eagerly (the recompile limit, torch.compiler.disable, another "
    "backend, a mode as FlopCounterMode is, after which torch compiles this code no more), has caught an exception of "
    "this step and gone on, or has begun a collective of its own over the group (a barrier or all_reduce under "
    "`if rank == 0`)."
)
GROUP_ENDED = "The process group cannot be used any more, as exchanges were under way."
BACKWARD = "runs the backward of"  # by a thread of the device's, where it has one
STOP_VERB = Message("stops")
MEASURE_VERB = Message("measures", "how fast the ranks are")


@dataclass(frozen=True)
class StopNotice:
    """Why a rank stopped. goes_on: with the next call, perhaps. talks: how many exchanges it had over each group that
    there was; what is said of one does not hold for groups that are made later.

    subject: the program that it cannot call; "": whichever. within: the group in whose next exchange it was, which the
    others may have finished, and which is broken there for good; "": none. raised: while its program ran, so that
    others may wait inside of theirs; `rank` is then the one that raised first, whichever rank has written it.
    """

    rank: int
    text: str
    continues: bool
    exchanges: dict[str, int]
    subject: str = ""
    within: str = ""
    raised: bool = False


NO_RANK = StopNotice(-1, "", True, {})


def hash_text(text: str) -> int:
    """63 bits of a text."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


# What answers are made of, beside JSON's own: tuples, frozen sets, and dataclasses of ours.

_sendable: dict[str, type] = {}


def register_sendable(one: type) -> type:
    """Let a dataclass be part of an answer; a decorator."""
    _sendable[one.__name__] = one
    return one


class FieldKind(StrEnum):
    """The kinds of fields of a message that state something of one value. Values are what errors show."""

    INPUT = "input"
    """The size of an input. Every call states it."""
    WEIGHT = "weight"
    """The size of an input that is a parameter. Most calls do not state it."""
    CHECKSUM = "checksum of"
    """The checksum of an input."""
    PART = "part of"
    """The checksum of some values of an input."""
    EARLIER = "value of"
    """The checksum of a value of an earlier call."""


@register_sendable
@dataclass(frozen=True)
class Field:
    """The name of a field that states something of one value."""

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
