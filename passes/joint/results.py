"""Equal results stay two tensors, each with its own memory.

    wait_tensor(all_gather(x)), wait_tensor(all_gather(x))      two results

A wait returns the memory of what it waits for, which its fake value does not show. The partitioner's elimination of
common subexpressions leaves whatever shares memory with a result, and would make one exchange of the two: a write to
one result would change the other.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule

from sp_compile._compat import storage_of
from sp_compile.graph.call import WAIT, is_tensor
from sp_compile.passes.base import Pass
from sp_compile.passes.job import Job


class KeepResultsApart(Pass):
    """The fake value of an exchange whose wait shares memory with a result shares it, too."""

    provides = frozenset({"results are apart"})

    def apply(self, gm: GraphModule, job: Job) -> int:
        results = [node.meta["val"] for node in gm.graph.output_node().all_input_nodes if is_tensor(node)]
        returned = {storage_of(x) for x in results if x.layout == torch.strided}
        waits = gm.graph.find_nodes(op="call_function", target=WAIT)
        waits = [wait for wait in waits if storage_of(wait.meta["val"]) in returned]
        for wait in waits:
            wait.args[0].meta["val"] = wait.meta["val"]
        return len(waits)
