"""What passes over the exchanges of a program are told of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from sp_compile.passes.context import Job
from sp_compile.runtime.session import Session


@dataclass
class CollectiveJob(Job):
    """session: whom the program connects, and what they know of its inputs, which are called input_0, input_1, ...: the
    function's tensor arguments in order.
    """

    session: Session = field(default_factory=Session)
