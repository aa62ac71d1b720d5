"""Detection of groups that are axes of a grid, and the collective over all of them."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.parallel.merging import mesh_axis_groups, mesh_groups

from sp_compile.lowering.base.errors import SpError
from sp_compile.passes.cost.known_groups import gather_partitions, label_subsets, reduce_partitions, scatter_partitions


def test_the_table_of_a_mesh() -> None:
    groups = mesh_groups((2, 3), ("a", "b"), ranks_per_node=3)
    assert groups["a"] == ((0, 3), (1, 4), (2, 5))
    assert groups["b"] == ((0, 1, 2), (3, 4, 5))
    assert groups["a+b"] == ((0, 1, 2, 3, 4, 5),)
    assert [groups.size(name) for name in ("a", "b", "a+b")] == [2, 3, 6]
    assert [groups.is_in_one_node(name) for name in ("a", "b", "a+b")] == [False, True, False]
    assert set(mesh_groups((2, 2, 2), "xyz").members) == {"x", "y", "z", "x+y", "x+z", "y+z", "x+y+z"}


def test_unknown_names() -> None:
    with pytest.raises(SpError, match=r"SP611: group 'c' .*'a', 'a\+b', 'b'"):
        mesh_groups((2, 3), ("a", "b"))["c"]


def test_order() -> None:
    a, b = mesh_axis_groups((2, 3), 0), mesh_axis_groups((2, 3), 1)
    assert reduce_partitions([a, b]) == reduce_partitions([b, a]) == ((0, 1, 2, 3, 4, 5),)
    assert gather_partitions([b, a]) == ((0, 1, 2, 3, 4, 5),)
    assert gather_partitions([a, b]) == ((0, 3, 1, 4, 2, 5),)
    assert scatter_partitions([a, b]) == gather_partitions([b, a])
    groups = mesh_groups((2, 3), ("a", "b"))
    assert groups.communicator(gather_partitions([b, a]), ordered=True) == "a+b"
    assert groups.communicator(gather_partitions([a, b]), ordered=True) is None
    assert groups.communicator(gather_partitions([a, b])) == "a+b"


@pytest.mark.parametrize(
    "parts",
    [
        [((0, 1), (2, 3)), ((0, 1), (2, 3))],  # twice the same
        [((0, 1, 2, 3),), ((0, 1), (2, 3))],  # one inside the other
        [((0, 1), (2, 3), (4, 5)), ((1, 2), (3, 4), (5, 0))],  # a ring: ranks end with other sums
        [((0, 1), (2, 3)), ((0, 2),)],  # ranks 1 and 3 do not take part
        [((0, 1, 2), (3, 4)), ((0, 3), (1, 4), (2,))],  # unequal sizes
    ],
)
def test_no_grid(parts: list) -> None:
    assert reduce_partitions(parts) is None
    assert reduce_partitions(parts[::-1]) is None
    assert gather_partitions(parts) is None


def test_more_than_products() -> None:
    """Groups of one rank add nothing; a butterfly is a grid whose axes are not those of a row-major mesh."""
    pairs, ones = ((0, 1), (2, 3)), ((0,), (1,), (2,), (3,))
    assert reduce_partitions([pairs, ones]) == pairs
    assert reduce_partitions([pairs, ((0, 3), (1, 2))]) == ((0, 1, 2, 3),)
    assert gather_partitions([pairs, ((0, 3), (2, 1))]) is None  # the ranks gather in different orders


partitions = st.permutations(range(6)).flatmap(
    lambda ranks: st.sampled_from([1, 2, 3, 6]).map(
        lambda size: tuple(tuple(ranks[i : i + size]) for i in range(0, 6, size))
    )
)


@settings(max_examples=300)
@given(st.lists(partitions, min_size=1, max_size=3))
def test_against_matrices(parts: list) -> None:
    """A reduction is a 0/1 matrix of ranks x ranks; a chain of them is their product."""

    def matrix(part: tuple) -> torch.Tensor:
        m = torch.zeros(6, 6, dtype=torch.long)
        for group in part:
            for i, j in itertools.product(group, group):
                m[i, j] = 1
        return m

    product = torch.eye(6, dtype=torch.long)
    for part in parts:
        product = matrix(part) @ product
    found = reduce_partitions(parts)
    one = bool((product <= 1).all()) and bool((product == product.T).all())
    blocks = one and bool((product @ product == product * product.sum(1, keepdim=True)).all())
    assert (found is not None) == blocks
    if found is not None:
        assert torch.equal(matrix(found), product)
    ordered = gather_partitions(parts)
    assert ordered is None or reduce_partitions(parts) == tuple(sorted(tuple(sorted(g)) for g in ordered))


def test_large_meshes_are_quick() -> None:
    shape = (16, 16, 8)
    axes = [mesh_axis_groups(shape, dim) for dim in range(3)]
    assert reduce_partitions(axes) == (tuple(range(2048)),)
    assert gather_partitions(axes[::-1]) == (tuple(range(2048)),)
    assert len(label_subsets("abcd")) == 11
