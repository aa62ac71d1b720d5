"""Rewrite a captured graph to its canonical form; values and gradients are unchanged.

    explicit           ops that read only an operand's dtype or device  ->  ops with explicit arguments
    picked_elements    x[arange(N), y]                ->  gather
    written_lists      tensors that a loop writes row by row  ->  lists of rows
    reroll             loops over time, unrolled      ->  scans, and one body for all steps
    unrolled_scans     trees of associative_scan      ->  sp.scan, sp.linear_scan
    eager_attention    matmul, softmax, matmul        ->  scaled_dot_product_attention
    flex_attention     torch's, with its mask_mod     ->  the same, or sp.masked_attention with a predicate
    flash_functions    of the flash_attn package      ->  the same, or sp.masked_attention with a predicate
    varlen_attention   torch's, of packed documents   ->  sp.masked_attention, a document of each token
    masks              masks computed from positions  ->  is_causal, no mask, or sp.masked_attention with a predicate
    group_heads        repeated key and value heads   ->  enable_gqa
    repeats            repeat_interleave              ->  unsqueeze, expand, reshape
    associative_scans  torch.associative_scan         ->  sp.scan, sp.linear_scan
    scan_idioms        cumsum(x) - x, flip-cumsum-flip   ->  sp.scan, exclusive, reverse
    scan_trees         remaining scans                ->  marked as one region
    masked_writes      x[mask] = rows             ->  where, with the row of each position
    reduce_pairs       Functions that only reduce     ->  sp.reduce_pair
    sorted_rows        sort, process rows, unsort     ->  sp.to_sorted, sp.grouped_mm, sp.from_sorted
    paddings           pad and conv1d, pad and slice  ->  sp.conv1d, sp.shift: nothing longer than its sequence

Each is a registered pass in a module of this folder or its subfolders, whose docstring lists what it leaves unchanged.
`requires` and `provides` order the passes, and new files are discovered automatically. Bytes moved: none.
"""

from __future__ import annotations

from sp_compile.passes.base import CanonicalPass, Passes, import_submodules, registered_passes

from . import __path__ as folder

import_submodules(str(__package__), folder)


class Canonicalize(Passes):
    """Pipeline of all registered canonical passes."""

    provides = frozenset({"canonical"})

    @classmethod
    def parts(cls) -> list[type[CanonicalPass]]:
        """Return the registered canonical passes."""
        return registered_passes(CanonicalPass)
