"""Rewrite a captured graph to its canonical form; values and gradients are unchanged.

    normalize_ops      ops that read only an operand's dtype or device  ->  ops with explicit arguments;
                       repeat_interleave              ->  unsqueeze, expand, reshape
    indexing           x[arange(N), y]                ->  gather; x[:, arange(2, 5)]  ->  slice
    loops/lists        tensors that a loop writes row by row  ->  lists of rows
    loops/reroll       loops over time, unrolled      ->  scans, and one body for all steps
    unrolled_scans     trees of associative_scan      ->  sp.scan, sp.linear_scan
    associative_scan   torch.associative_scan         ->  sp.scan, sp.linear_scan
    scan_idioms        cumsum(x) - x, flip-cumsum-flip   ->  sp.scan, exclusive, reverse
    scan_trees         remaining scans                ->  marked as one region
    masked_writes      x[mask] = rows                 ->  where, with the row of each position
    reduce_pairs       Functions that only reduce     ->  sp.reduce_pair
    elementwise_functions   Functions of elementwise ops  ->  sp.token_function
    strided_slices     x[:, 1::2]                     ->  select(reshape(x, ...), 2, 1)
    expert_loops       sort, process rows, unsort     ->  sp.to_sorted, sp.grouped_mm, sp.from_sorted
    pad_inputs         pad and conv1d, pad and slice  ->  sp.conv_along, sp.shift: nothing longer than its sequence
    patch_convolutions conv2d over disjoint patches   ->  a linear layer over patches
    split_attention    attentions over parts, joined  ->  sp.masked_attention, a part of each token

and in attention/

    eager_attention    matmul, softmax, matmul        ->  scaled_dot_product_attention
    flex_attention     torch's, with its mask_mod     ->  the same, or sp.masked_attention with a predicate
    flash_attention    of the flash_attn package      ->  the same, or sp.masked_attention with a predicate
    varlen             torch's, of packed documents   ->  sp.masked_attention, a document of each token
    parse_masks        masks computed from positions  ->  is_causal, no mask, or sp.masked_attention with a predicate
    heads              repeated key and value heads   ->  enable_gqa

Each is a module of this folder with a registered pass; its docstring lists what it leaves unchanged. After all of them,
the pipeline runs `merge_repeats`, which replaces equal calls by one. `requires` and `provides` order the passes, and
new files are discovered automatically; add a line to this list. A form that others match, such as a product in a mask,
changes after them: require the properties that their passes provide. Bytes moved: none.
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
        """Return the registered canonical passes, ordered so that each runs after the passes that it requires."""
        return registered_passes(CanonicalPass)
