"""Sequences of several parts, such as text and image tokens: each part on shards, and equal to one device."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from support.golden import captured
from support.models import check
from support.parity import against_eager
from support.parity import check as check_ranks
from support.ranks import Ranks, mesh
from torch import Tensor, nn

import sp_compile
from sp_compile.lowering.base.errors import SpError
from sp_compile.passes.context import NoteKind
from sp_compile.passes.report import Report
from sp_compile.passes.sharding.sharded_work import JOINT_PADDING
from sp_compile.passes.strategies.join_sequences import JoinSequences

HEADS, WIDTH, TEXT, IMAGE = 4, 16, 5, 19
Rotary = Callable[[Tensor, Tensor, int], Tensor]


def split_heads(x: Tensor) -> Tensor:
    """(B, S, WIDTH) -> (B, HEADS, S, WIDTH / HEADS)."""
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Rotate the pairs of x (B, H, S, D) by the angles of a table (S, D / 2)."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * table.cos() - b * table.sin(), a * table.sin() + b * table.cos()], -1)


def rotate_by_cat(x: Tensor, table: Tensor, start: int) -> Tensor:
    return torch.cat([x[:, :, :start], rotate(x[:, :, start:], table)], 2)


def rotate_in_place(x: Tensor, table: Tensor, start: int) -> Tensor:
    x = x.clone()
    x[:, :, start:] = rotate(x[:, :, start:], table)
    return x


def rotate_before(x: Tensor, table: Tensor, start: int) -> Tensor:
    """Rotate the first part, which is longer."""
    rows = table.shape[0]
    return torch.cat([rotate(x[:, :, :rows], table), x[:, :, rows:]], 2)


class Stream(nn.Module):
    """Projections and MLP of one kind of tokens."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.read, self.qkv, self.out = nn.Linear(inputs, WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))

    def project(self, x: Tensor) -> list[Tensor]:
        return [split_heads(y) for y in self.qkv(x).chunk(3, -1)]

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        x = x + self.out(y)
        return x + self.mlp(x)


class TwoStreams(nn.Module):
    """Two layers of joint attention over text and image tokens. refines: the text attends to itself first."""

    def __init__(self, text_first: bool = True, refines: bool = False, is_causal: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.text_first, self.refines, self.is_causal = text_first, refines, is_causal
        self.streams = nn.ModuleDict({"text": Stream(3), "image": Stream(6)})
        self.refiner = Stream(3)

    def join(self, text: Tensor, image: Tensor, dim: int) -> Tensor:
        return torch.cat([text, image] if self.text_first else [image, text], dim)

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        text_stream, image_stream = self.streams["text"], self.streams["image"]
        if self.refines:
            x = self.refiner.read(text)
            y = F.scaled_dot_product_attention(*self.refiner.project(x)).transpose(1, 2).flatten(2)
            text = self.refiner.add(x, y)[..., :3]
        a, b = text_stream.read(text), image_stream.read(image)
        for _ in range(2):
            parts = zip(text_stream.project(a), image_stream.project(b))
            q, k, v = (self.join(t, i, 2) for t, i in parts)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal).transpose(1, 2).flatten(2)
            rows = a.shape[1]
            first, second = (y[:, :rows], y[:, rows:]) if self.text_first else (y[:, -rows:], y[:, :-rows])
            a, b = text_stream.add(a, first), image_stream.add(b, second)
        return a, b


class OneStream(nn.Module):
    """Joint tokens, of which a rotary embedding turns only the image."""

    def __init__(self, rotary: Rotary, text_first: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rotary, self.text_first, self.stream = rotary, text_first, Stream(6)

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        x = self.stream.read(torch.cat([text, image] if self.text_first else [image, text], 1))
        table = torch.arange(image.shape[1], dtype=x.dtype)[:, None] / torch.arange(1, 3, dtype=x.dtype)
        q, k, v = self.stream.project(x)
        q, k = (self.rotary(y, table, text.shape[1]) for y in (q, k))
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.stream.add(x, y)


class ImageQueries(nn.Module):
    """Image tokens that attend to text and image tokens."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.text, self.image = Stream(3), Stream(6)

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        x = self.image.read(image)
        q, k, v = self.image.project(x)
        _, text_k, text_v = self.text.project(self.text.read(text))
        y = F.scaled_dot_product_attention(q, torch.cat([k, text_k], 2), torch.cat([v, text_v], 2))
        return self.image.add(x, y.transpose(1, 2).flatten(2))


class WrittenRows(nn.Module):
    """Text and image tokens written into a buffer of zeros, sample by sample."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.text, self.image, self.stream = Stream(3), Stream(6), Stream(6)

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        a, b = self.text.read(text), self.image.read(image)
        rows = a.shape[1]
        x = b.new_zeros(len(b), rows + b.shape[1], WIDTH)
        for i in range(len(b)):
            x[i, :rows] = a[i]
            x[i, rows:] = b[i]
        y = F.scaled_dot_product_attention(*self.stream.project(x)).transpose(1, 2).flatten(2)
        return self.stream.add(x, y)[:, rows:]


def tokens(text_width: int = 3, text: int = TEXT, image: int = IMAGE) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    x, y = torch.randn(2, image, 6, dtype=torch.float64), torch.randn(2, text, text_width, dtype=torch.float64)
    return x.requires_grad_(), y.requires_grad_()


def assert_on_shards(report: Report) -> None:
    assert report.work.flops_share == 1.0, report
    assert not report.fallbacks, report


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("attention", ["auto", "ulysses", "ring", "gather"])
@pytest.mark.parametrize("text_first", [False, True])
@pytest.mark.sampled(every=11)
def test_each_part_is_on_shards(text_first: bool, attention: str, n: int) -> None:
    if attention == "ulysses" and n == 3:
        pytest.skip("3 ranks do not divide the heads")
    report = check(TwoStreams(text_first).double(), *tokens(), sp=n, attention=attention)
    assert_on_shards(report)
    assert report.count("all_gather") == 6, "q, k and v of the text in two layers"
    assert report.count("unshard") == 2, "the results of the model"


@pytest.mark.parametrize(("text", "image"), [(3, 19), (19, 19), (20, 19), (2, 3)])
@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.sampled(every=8)
def test_lengths_of_parts(text: int, image: int, n: int) -> None:
    """Parts of equal lengths, shorter than the number of ranks, or of which the text is longer."""
    assert_on_shards(check(TwoStreams().double(), *tokens(text=text, image=image), sp=n))


def test_rows_of_other_parts_are_padding() -> None:
    """Each of 2 ranks has 12 of 24 joint rows, in layers of the 19 image tokens as well."""
    report = sp_compile.explain(TwoStreams(), *(x.float() for x in tokens()), sp=2)
    layer = 3 * WIDTH * WIDTH + WIDTH * WIDTH + 2 * WIDTH * 32
    image_flops = 2 * 2 * IMAGE * (6 * WIDTH + 2 * layer)  # for a batch of 2
    assert report.work.window_flops == pytest.approx(image_flops * (12 / IMAGE - 12 / 24))
    (warning,) = (text for text in report.warnings if "padding" in text)
    assert warning.endswith(JOINT_PADDING)


def test_a_part_of_one_row() -> None:
    check(TwoStreams().double(), *tokens(text=1), sp=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", ["balanced", *(pytest.param(x, marks=pytest.mark.slow) for x in ("contiguous", "zigzag"))]
)
def test_layouts_of_causal_parts(layout: str) -> None:
    check(TwoStreams(is_causal=True).double(), *tokens(), sp=2, layout=layout)


@pytest.mark.slow
def test_a_part_attends_to_itself() -> None:
    assert_on_shards(check(TwoStreams(refines=True).double(), *tokens(), sp=2))


def test_only_keys_have_two_parts() -> None:
    assert_on_shards(check(ImageQueries().double(), *tokens(), sp=3))


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize(
    ("rotary", "text_first"), [(rotate_by_cat, True), (rotate_in_place, True), (rotate_before, False)]
)
@pytest.mark.sampled(every=3)
def test_a_rotary_embedding_of_one_part_moves_no_rows(rotary: Rotary, text_first: bool, n: int) -> None:
    report = check(OneStream(rotary, text_first).double(), *tokens(6), sp=n)
    assert_on_shards(report)
    assert not report.find_notes(NoteKind.REWRITTEN, subject="select_rows")


def test_parts_are_written_into_zeros() -> None:
    report = check(WrittenRows().double(), *tokens(), sp=2)
    assert not report.fallbacks, report
    assert report.work.flops_share > 0.99, "every rank reads the text, which is little work"


def test_a_part_with_little_work_is_replicated() -> None:
    class Registers(OneStream):
        def forward(self, image: Tensor, text: Tensor) -> Tensor:
            return super().forward(image, text.sin())

    report = check(Registers(rotate_by_cat).double(), *tokens(6), sp=2)
    assert not report.count("all_gather")
    assert not report.fallbacks


class Steps(nn.Module):
    """Attention, and a loop over pieces of its first rows with a state that no scan computes."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows, self.width, self.stream, self.step = rows, width, Stream(6), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stream.read(x)
        x = self.stream.add(x, F.scaled_dot_product_attention(*self.stream.project(x)).transpose(1, 2).flatten(2))
        state = x.new_zeros(len(x), WIDTH)
        for start in range(0, self.rows, self.width):
            piece = x.transpose(1, 2)[..., start : min(start + self.width, self.rows)].transpose(1, 2)
            state = torch.tanh(state + self.step(piece).sum(1))
        return x * state[:, None]


@pytest.mark.parametrize(
    ("rows", "width", "gathers"), [(IMAGE, 4, 5), (IMAGE, 1, IMAGE), (IMAGE // 2 + 1, 3, 4), (IMAGE // 2, 3, 0)]
)
def test_rows_that_are_sent_piece_by_piece_are_a_gather(rows: int, width: int, gathers: int) -> None:
    """More than half of the rows of one value are sent to all ranks, in several selections of few rows."""
    model, x = Steps(rows, width).double(), tokens()[0]
    report = check(model, x, sp=2)
    notes = [note for note in report.fallbacks if note.subject.startswith("select_row")]
    assert {note.kind for note in notes} == ({NoteKind.GATHERED} if gathers else set())
    assert len(notes) == gathers, report
    numbers = [str(gathers), str(rows), str(IMAGE)]
    assert all(re.findall(r"\d+", note.text) == numbers for note in notes)
    if gathers:
        is_sharded = bool(report.find_notes(NoteKind.REWRITTEN, subject="shard_side_regions"))  # along the batch
        assert is_sharded or any("self.step(piece)" in text for text in report.warnings)
        with pytest.raises(SpError, match=f"SP305.*{'.*'.join(numbers)}"):
            sp_compile.explain(model, x, sp=2, fallback="error")


def test_rows_of_single_samples_are_no_gather() -> None:
    """The 18 rows of four samples, of 19 rows each, are less than half of the value."""

    class Samples(Steps):
        def forward(self, x: Tensor) -> Tensor:
            x = self.stream.read(x)
            x = self.stream.add(x, F.scaled_dot_product_attention(*self.stream.project(x)).transpose(1, 2).flatten(2))
            return torch.stack([self.step(x[i, :rows]).sum(0) for i, rows in enumerate((3, 4, 5, 6))])

    x = tokens()[0].detach()[:1].repeat(4, 1, 1)
    report = check(Samples(0, 0).double(), x, sp=2, fallback="error")
    assert len(report.find_notes(NoteKind.REWRITTEN, subject="select_rows")) == 4


def test_all_pieces_of_a_value_are_the_value() -> None:
    class Pieces(OneStream):
        def forward(self, image: Tensor, text: Tensor) -> Tensor:
            x = super().forward(image, text)
            a, b = x[:, : text.shape[1]], x[:, text.shape[1] :]
            return self.stream.mlp(torch.cat([a, b], 1))

    report = check(Pieces(rotate_by_cat).double(), *tokens(6), sp=2)
    assert not report.find_notes(NoteKind.REWRITTEN, subject="select_rows")
    assert_on_shards(report)


@pytest.mark.parametrize("text_first", [False, True])
def test_parts_that_are_joined_again_are_on_shards(text_first: bool) -> None:
    """The last concatenation is of the parts of the attended one, but no attention reads it."""

    class Again(TwoStreams):
        def forward(self, image: Tensor, text: Tensor) -> Tensor:
            a, b = super().forward(image, text)
            x = self.streams["image"].mlp(self.join(a, b, 1))
            return x[:, a.shape[1] :] if self.text_first else x[:, : b.shape[1]]

    assert_on_shards(check(Again(text_first).double(), *tokens(), sp=2))


def test_complex_angles_are_joined() -> None:
    """The angles of the image are read by attention of the image alone, too, in a frame of its own."""

    class Angles(OneStream):
        def attend(self, x: Tensor, angles: Tensor) -> Tensor:
            q, k, v = self.stream.project(x)
            q, k = (torch.view_as_complex(y.unflatten(-1, (-1, 2))) * angles for y in (q, k))
            y = F.scaled_dot_product_attention(*(torch.view_as_real(x).flatten(-2) for x in (q, k)), v)
            return self.stream.add(x, y.transpose(1, 2).flatten(2))

        def forward(self, image: Tensor, text: Tensor) -> Tensor:
            tables = [torch.arange(x.shape[1], dtype=x.dtype)[:, None] / torch.arange(1, 3) for x in (text, image)]
            angles = [torch.polar(torch.ones_like(table), table) for table in tables]
            x = self.attend(self.stream.read(image), angles[1])
            x = torch.cat([self.stream.read(text), x], 1)
            return self.attend(x, torch.cat(angles))[:, text.shape[1] :]

    report = check(Angles(rotate_by_cat).double(), *tokens(6), sp=2)
    assert not report.fallbacks, report
    assert report.work.flops_share > 0.99, "every rank reads the text, which is little work"


def test_a_value_of_pieces_is_no_alias_of_their_source() -> None:
    gm = captured(lambda x: torch.cat([x[:, :2], x[:, 2:]], 1), torch.randn(1, 5, 4))
    assert JoinSequences(2)(gm).modified
    assert [n.target for n in gm.graph.nodes if n.op == "call_function"] == [torch.ops.aten.clone.default]


def test_a_cache_that_is_an_input_is_written_as_before() -> None:
    """Rows are written into a longer input, which is replicated; joined, all of its rows would be gathered."""

    class Cached(OneStream):
        def forward(self, image: Tensor, text: Tensor, cache: Tensor) -> Tensor:
            x = self.stream.read(image)
            q, k, v = self.stream.project(x)
            cache = torch.slice_scatter(cache, k, 2, 0, k.shape[2])
            y = F.scaled_dot_product_attention(q, cache, F.pad(v, (0, 0, 0, cache.shape[2] - v.shape[2])))
            return self.stream.add(x, y.transpose(1, 2).flatten(2))

    cache = torch.zeros(2, HEADS, 2 * IMAGE, WIDTH // HEADS, dtype=torch.float64)
    report = check(Cached(rotate_by_cat).double(), *tokens(6), cache, sp=2)
    assert not report.find_notes(NoteKind.REWRITTEN, subject="join_sequences")


def test_samples_of_one_length_are_stacked() -> None:
    class Samples(ImageQueries):
        def forward(self, image: Tensor, text: Tensor) -> Tensor:
            padded = nn.utils.rnn.pad_sequence([x * 2 for x in image], batch_first=True)
            return super().forward(padded.squeeze(1), text.squeeze(1))

    assert_on_shards(check(Samples().double(), *tokens(), sp=2))


class Loss(nn.Module):
    """The mean square of all results."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model.double()

    def forward(self, *args: Tensor) -> Tensor:
        results = self.model(*args)
        return sum(x.pow(2).mean() for x in (results if isinstance(results, tuple) else (results,)))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "own frame": TwoStreams,
    "written": WrittenRows,
    "rotated": lambda: OneStream(rotate_in_place),
}


def _train(name: str) -> object:
    return against_eager(Loss(MODELS[name]()), *tokens(6 if name == "rotated" else 3), mesh=mesh())


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.sampled(every=3)
def test_parts_on_real_ranks(ranks: Ranks, name: str, n: int) -> None:
    check_ranks(ranks.run(n, _train, name))
