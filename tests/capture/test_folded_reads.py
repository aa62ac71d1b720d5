"""Values of small integer inputs that a program reads on the host are constants of one graph, with a guard on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.parity import Outcome, check, outcome, sp, train_step
from support.ranks import Ranks, mesh
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import sp_compile
from sp_compile.lowering.torch_compat import MAX_VALUES
from sp_compile.passes.context import FALLBACKS, NoteKind

WIDTH = 8
TWO, THREE = [[1, 4, 6], [2, 2, 5]], [[1, 2, 3], [3, 2, 4], [1, 5, 1]]
Read = Callable[[Tensor], tuple[list[int], Tensor]]


def areas(grid: Tensor) -> tuple[list[int], Tensor]:
    """Return the rows of each frame, as numbers, and the row of each patch in its image."""
    lengths = torch.repeat_interleave(grid[:, 1] * grid[:, 2], grid[:, 0])
    ends = F.pad(lengths.cumsum(0), (1, 0))
    rows = [torch.arange(h).repeat_interleave(w).repeat(t) for t, h, w in grid.tolist()]
    count = torch.arange(ends[-1]).numel() - sum(x.numel() for x in rows)
    return (ends[1:] - ends[:-1]).tolist(), torch.cat(rows) + count


def nonzeros(grid: Tensor) -> tuple[list[int], Tensor]:
    """As `areas`, from a mask of the patches of the largest image, whose rows and columns are found."""
    sides = grid[:, 1:].amax(0)
    sizes = grid[:, 1:].repeat_interleave(grid[:, 0], 0)
    rows, columns = torch.arange(sides[0].item()), torch.arange(sides[1].item())
    mask = (rows[:, None] < sizes[:, 0, None, None]) & (columns < sizes[:, 1, None, None])
    return torch.unique_consecutive(torch.where(mask)[0], return_counts=True)[1].tolist(), mask.nonzero()[:, 1]


class Images(nn.Module):
    """Attention of patches (S, WIDTH) within each frame of a grid, as in vision towers of Qwen-VL."""

    def __init__(self, read: Read = areas, checkpoints: bool = False) -> None:
        super().__init__()
        self.rows, self.checkpoints, self.read = nn.Embedding(9, WIDTH), checkpoints, read
        self.blocks = nn.ModuleList(nn.ModuleList([nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)]) for _ in "ab")

    def attend(self, block: Any, x: Tensor, lengths: Tensor) -> Tensor:
        q, k, v = (
            y.split(lengths.tolist(), 2) for y in block[0](x).unflatten(-1, (3, 2, -1)).permute(1, 2, 0, 3)[:, None]
        )
        parts = [F.scaled_dot_product_attention(*part).transpose(1, 2) for part in zip(q, k, v)]
        return x + block[1](torch.cat(parts, 1).flatten(2)[0])

    def forward(self, x: Tensor, grid: Tensor) -> Tensor:
        lengths, rows = self.read(grid)
        x = x + self.rows(rows)
        for block in self.blocks:
            args = block, x, torch.tensor(lengths)
            x = checkpoint(self.attend, *args, use_reentrant=False) if self.checkpoints else self.attend(*args)
        return x.square().sum()


def images(grid: list[list[int]], seed: int = 0) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    sizes = torch.tensor(grid)
    return torch.randn(int(sizes.prod(1).sum()), WIDTH, dtype=torch.float64), sizes


@pytest.mark.parametrize(("read", "checkpoints"), [(areas, False), (nonzeros, True)])
def test_one_graph_on_shards(read: Read, checkpoints: bool) -> None:
    """Sizes, splits and indices from a grid of two images, one of two frames."""
    model = Images(read, checkpoints).double()
    report = sp_compile.verify(model, *images(TWO), sp=3)
    assert not report.find_notes(NoteKind.GRAPH_BREAK)
    assert not report.find_notes(*FALLBACKS)
    assert report.work.flops_share > 0.95


def train_on_grids(grids: list[list[list[int]]], how: dict[str, Any]) -> tuple[list[Outcome], int]:
    torch.manual_seed(0)
    model = Images(checkpoints=True).double()  # a checkpoint is a graph of its own in the graph
    run, before = sp(model, mesh=mesh(), **how), torch._dynamo.utils.counters["stats"]["unique_graphs"]
    outcomes = []
    for seed, grid in enumerate(grids):
        args = images(grid, seed)
        outcomes.append(outcome(*train_step(run, model, args), *train_step(model, model, args)))
    return outcomes, torch._dynamo.utils.counters["stats"]["unique_graphs"] - before


OTHERS = [[[1, 2, n], [1, 3, n]] for n in range(2, 4 + MAX_VALUES)]


@pytest.mark.parametrize(
    ("grids", "how", "graphs"),
    [
        ([TWO, THREE, TWO], {}, 2),
        pytest.param(OTHERS, {}, None, marks=pytest.mark.slow),  # more values than are folded
        pytest.param([TWO, THREE], {"dynamic": True}, None, marks=pytest.mark.slow),
    ],
)
def test_later_calls_with_other_values(
    ranks: Ranks, grids: list[list[list[int]]], how: dict[str, Any], graphs: int | None
) -> None:
    """The program is compiled again for other values, and not for earlier ones."""
    answers = ranks.run(2, train_on_grids, grids, how)
    for outcomes in zip(*(steps for steps, _ in answers)):
        check(outcomes)
    assert graphs is None or [compiled for _, compiled in answers] == [graphs, graphs]


def written(x: Tensor, sizes: Tensor) -> Tensor:
    sizes += 1
    return x.split(sizes.tolist(), 1)[0].cumsum(1) * sizes[0]


def read_twice(x: Tensor, sizes: Tensor) -> Tensor:
    copied = sizes.clone()
    first = copied.tolist()
    copied += 1
    return x.cumsum(1)[:, : first[0] + copied.tolist()[0]]


def written_as_data(x: Tensor, sizes: Tensor) -> Tensor:
    copied = sizes.clone()
    first = copied[0].item()
    copied.data.add_(1)
    return x.cumsum(1)[:, : first + copied.tolist()[0]]


def drawn(x: Tensor, sizes: Tensor) -> Tensor:
    return x.split((torch.randint(1, 2, (2,)) * sizes).tolist(), 1)[0].cumsum(1)


def from_features(x: Tensor, sizes: Tensor) -> Tensor:
    return x[:, : int((x[0, :, 0] > 9).sum()) + sizes[0]].cumsum(1)


@torch.library.custom_op("sp_tests_folded::counted", mutates_args=())
def counted(sizes: Tensor) -> Tensor:
    """An op whose result may depend on the state of the program."""
    return sizes.clone()


@counted.register_fake
def _(sizes: Tensor) -> Tensor:
    return torch.empty_like(sizes)


def from_other_ops(x: Tensor, sizes: Tensor) -> Tensor:
    return x.cumsum(1)[:, : counted(sizes).tolist()[0]]


def from_arrays(x: Tensor, sizes: Tensor) -> Tensor:
    return x.cumsum(1)[:, : int(sizes.numpy().sum())]


def from_dynamic_sizes(x: Tensor, sizes: Tensor) -> Tensor:
    return x.cumsum(1)[:, : (x.shape[1] * sizes).tolist()[0] // 7]


@pytest.mark.parametrize(
    "program",
    [written, read_twice, written_as_data, drawn, from_features, from_other_ops, from_arrays, from_dynamic_sizes],
)
def test_other_values_are_read_by_eager_code(program: Callable[..., Tensor]) -> None:
    """Values that the program writes, draws or computes from other values are no constants."""
    x, sizes = torch.randn(2, 7, 3), torch.tensor([2, 3]) if program is written else torch.tensor([3, 4])
    if program is from_dynamic_sizes:
        torch._dynamo.mark_dynamic(x, 1)
    report = sp_compile.verify(program, x, sizes.clone(), sp=2)
    assert report.find_notes(NoteKind.GRAPH_BREAK)


class Padded(nn.Module):
    """A module with a buffer that is one number."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("most", torch.tensor(2))

    def forward(self, x: Tensor, more: Tensor | None = None) -> Tensor:
        padded = F.pad(x, (0, 0, self.most - 1, 0)).cumsum(1)
        return padded if more is None else padded[:, : more.item()]


def test_numbers_of_a_module() -> None:
    """A buffer that is one number, as the stride of a convolution, is a constant; an argument that is one is not."""
    x = torch.randn(2, 7, 3)
    assert not sp_compile.verify(Padded(), x, None, sp=2).find_notes(NoteKind.GRAPH_BREAK)
    assert sp_compile.verify(Padded(), x, torch.tensor(5), sp=2).find_notes(NoteKind.GRAPH_BREAK)


@pytest.mark.parametrize("skips", [False, True])
def test_buffers_that_are_changed_in_place(skips: bool) -> None:
    """Also where Dynamo skips the guards of modules whose dicts are the same."""
    model, x = Padded(), torch.randn(2, 7, 3)
    run = torch.compile(model, backend="sp")
    with torch._dynamo.config.patch(use_recursive_dict_tags_for_guards=skips):
        for most in (2, 2, 4, 2):
            model.most.fill_(most)
            assert run(x).shape[1] == 7 + most - 1


def test_masks_of_features() -> None:
    """Features are read at the True entries of a mask of prompts, whose rows follow each other, or do not."""
    mask = torch.tensor([[True] * 4 + [False] * 2, [True, False] * 3])

    def program(x: Tensor, mask: Tensor) -> Tensor:
        valid = [x.cumsum(1)[i, row.nonzero().flatten()] for i, row in enumerate(mask)]
        return torch.cat([*valid, x[mask], x[:, mask[1]].flatten(0, 1)])

    report = sp_compile.verify(program, torch.randn(2, 6, 3), mask, sp=2)
    assert not report.find_notes(NoteKind.GRAPH_BREAK)
