"""What becomes of the halves of a joint graph: exchanges are hidden, then what is kept goes to the host."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch.fx import GraphModule

from sp_compile import passes
from sp_compile.lowering.library import sources_digest

from .offload import Offload
from .overlap import overlap


@dataclass
class Halves:
    """Changes a forward and its backward in place, or a forward that has none.

    offload: what goes to the host's memory meanwhile; None: nothing. key: for caches of compiled code.
    """

    offload: Offload | None = None

    key: str = field(init=False)

    def __post_init__(self) -> None:
        self.key = f"{sources_digest(*passes.__path__)} {self.offload}"

    def __call__(self, forward: GraphModule, backward: GraphModule, results: int) -> None:
        """results: how many of the forward's are its caller's."""
        overlap(forward, backward)
        if self.offload is not None:
            self.offload(forward, backward, results)

    def alone(self, forward: GraphModule) -> None:
        """Of an inference."""
        overlap(forward)
