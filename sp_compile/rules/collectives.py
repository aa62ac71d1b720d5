"""Collectives of the user's program over other ranks than those that share the sequence: each row by itself.

Those over the very ranks of the pass are no business of a rule; see `tensor_parallel.spell`.
"""

from __future__ import annotations

import torch

from ..rule import rule

c10d = torch.ops._c10d_functional

rule([c10d.all_reduce.default, c10d.broadcast.default, c10d.wait_tensor.default], "... -> ...", lazy=True)
rule([c10d.all_gather_into_tensor.default, c10d.reduce_scatter_tensor.default], "a ... -> c ...", whole="a")
rule(c10d.all_to_all_single.default, "a ... -> c ...", whole="a")
