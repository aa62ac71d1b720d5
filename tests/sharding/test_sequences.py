"""Sequences that are products of dims, concatenations, or split into chunks: found, split, and equal to one device."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.golden import captured
from support.models import check
from support.parity import against_eager, sp
from support.parity import check as check_ranks
from support.ranks import Ranks, mesh
from torch import Tensor, nn

import sp_compile
from sp_compile.passes.context import NoteKind
from sp_compile.passes.report import NAME_ATTENDED, NO_INPUT_WARNING
from sp_compile.passes.sharding.sharded_work import contraction_flops

HEADS, WIDTH = 4, 16


def split_heads(x: Tensor) -> Tensor:
    """(B, S, WIDTH) -> (B, HEADS, S, WIDTH / HEADS)."""
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Rotate the pairs of x (B, H, S, D) by the angles of a table (S, D / 2)."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * table.cos() - b * table.sin(), a * table.sin() + b * table.cos()], -1)


class Block(nn.Module):
    """Attention and MLP on tokens (B, S, WIDTH), with rotary angles for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        q, k, v = (split_heads(y) for y in self.qkv(self.norm(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(rotate(q, table), rotate(k, table), v)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class Video(nn.Module):
    """Patches of a video (B, 3, T, H, W), attention over T * H * W tokens, and the video that they predict."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.patch = nn.Conv3d(3, WIDTH, (1, 2, 2), (1, 2, 2))
        self.blocks, self.head = nn.ModuleList([Block(), Block()]), nn.Linear(WIDTH, 12)
        self.register_buffer("angles", torch.randn(16, WIDTH // HEADS // 2))

    def forward(self, video: Tensor) -> Tensor:
        x = self.patch(video)
        _, _, t, h, w = x.shape
        grid = (self.angles[:t, None, None], self.angles[None, :h, None], self.angles[None, None, :w])  # one table
        table = sum(part.expand(t, h, w, -1) for part in grid).flatten(0, 2)
        x = x.flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x, table)
        y = self.head(x).view(-1, t, h, w, 2, 2, 3).permute(0, 6, 1, 2, 4, 3, 5)
        return y.reshape(-1, 3, t, 2 * h, 2 * w).pow(2).mean()


class Image(nn.Module):
    """An image classifier without a class token: the mean over H * W patches."""

    def __init__(self, size: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.patch, self.block, self.head = nn.Conv2d(3, WIDTH, 4, 4), Block(), nn.Linear(WIDTH, 5)
        self.position = nn.Parameter(torch.randn(1, size, WIDTH))

    def forward(self, image: Tensor) -> Tensor:
        x = self.patch(image).flatten(2).transpose(1, 2) + self.position
        return self.head(self.block(x, x.new_zeros(x.shape[1], WIDTH // HEADS // 2)).mean(1))


class Joint(nn.Module):
    """Text and image tokens with their own weights, joined for attention, then one stream of both."""

    def __init__(self, text_first: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.text_first = text_first
        self.read = nn.ModuleDict({"text": nn.Linear(5, WIDTH), "image": nn.Linear(6, WIDTH)})
        self.qkv = nn.ModuleDict({name: nn.Linear(WIDTH, 3 * WIDTH) for name in self.read})
        self.out = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in self.read})
        self.block, self.head = Block(), nn.Linear(WIDTH, 6)

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        streams = {"text": self.read["text"](text), "image": self.read["image"](image)}
        names = ["text", "image"] if self.text_first else ["image", "text"]
        lengths = [streams[name].shape[1] for name in names]
        parts = [[split_heads(y) for y in self.qkv[name](streams[name]).chunk(3, -1)] for name in names]
        q, k, v = (torch.cat(pair, 2) for pair in zip(*parts))
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        for name, own in zip(names, y.split(lengths, 1)):
            streams[name] = streams[name] + self.out[name](own)
        x = torch.cat([streams[name] for name in names], 1)
        table = torch.arange(x.shape[1], dtype=x.dtype)[:, None] / torch.arange(1, 3, dtype=x.dtype)
        x = self.block(x, table)
        return self.head(x[:, lengths[0] :] if self.text_first else x[:, : lengths[0]])


class Chunks(nn.Module):
    """Attention inside of chunks of 4 tokens and a running mean over the chunks, as of linear attention."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def split_chunks(self, x: Tensor) -> list[Tensor]:
        """Return q, k and v, (B, chunks, 4, WIDTH), padded to complete chunks."""
        return [F.pad(y, (0, 0, 0, -x.shape[1] % 4)).unflatten(1, (-1, 4)) for y in self.qkv(x).chunk(3, -1)]

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        q, k, v = self.split_chunks(x)
        inside = (q @ k.transpose(-1, -2)).tril() @ v
        state = (k.transpose(-1, -2) @ v).cumsum(1)
        y = inside + q @ (state - k.transpose(-1, -2) @ v)
        return x + self.out(y.flatten(1, 2)[:, :length])


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("attention", ["auto", "ulysses", "ring", "gather"])
@pytest.mark.sampled(every=7)
def test_video_tokens_are_one_sequence(attention: str, n: int) -> None:
    """T, H and W share a class because they read one table; their product is the sequence."""
    if attention == "ulysses" and n == 3:
        pytest.skip("3 ranks do not divide the heads")
    video = torch.randn(2, 3, 5, 6, 14, dtype=torch.float64, requires_grad=True)
    report = check(Video().double(), video, sp=n, attention=attention)
    if n > 1:
        assert report.work.flops_share == 1.0
        assert report.constraints[0].startswith("sequence of 105")
        (note,) = report.fallbacks  # the result is not split along one dim
        assert (note.kind, note.subject, note.node) == (NoteKind.GATHERED, "gather_operands", "view")


@pytest.mark.parametrize("n", [2, 3])
def test_scales_of_frames_leave_the_product_of_dims_one_sequence(n: int) -> None:
    """The scales have the factors (T, H * W), fewer than the tokens (T, H, W), which attention reads as one dim."""

    class Scaled(Block):
        def forward(self, x: Tensor, table: Tensor) -> Tensor:
            return super().forward(x * torch.randn(1, 3, WIDTH, dtype=x.dtype).repeat_interleave(35, 1), table)

    model = Video()
    model.blocks = nn.ModuleList([Scaled()])
    report = sp_compile.explain(model.double(), torch.randn(2, 3, 3, 10, 14, dtype=torch.float64), sp=n)
    assert report.constraints[0].startswith("sequence of 105"), report
    assert [x.chosen.kind for x in report.attention] == ["gather"]


@pytest.mark.parametrize("length", [33, 34])
def test_patches_along_one_dim_are_the_sequence(length: int) -> None:
    """A rank has some of 17 patches of 2 samples: no work is done on samples."""

    class Audio(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patch, self.block, self.head = nn.Conv1d(3, WIDTH, 2, 2), Block(), nn.Linear(WIDTH, 6)

        def forward(self, x: Tensor) -> Tensor:
            y = self.patch(F.pad(x, (0, 0, 0, x.shape[1] % 2)).mT).mT
            return self.head(self.block(y, y.new_ones(17, 2))).unflatten(-1, (2, 3)).flatten(1, 2)[:, : x.shape[1]]

    report = check(Audio().double(), torch.randn(2, length, 3, dtype=torch.float64, requires_grad=True), sp=2)
    assert report.work.flops_share == 1.0, report
    assert report.constraints[0].startswith("sequence of 17"), report


@pytest.mark.sampled(every=1)
@pytest.mark.parametrize("n", [2, 3, 4])
def test_patches_are_computed_on_shards(n: int) -> None:
    report = check(Image(35).double(), torch.randn(2, 3, 28, 20, dtype=torch.float64), sp=n)
    assert report.work.flops_share > 0.99
    assert not report.fallbacks


@pytest.mark.parametrize("n", [2, 3])
def test_patches_before_a_class_token_are_computed_on_shards(n: int) -> None:
    class ClassToken(Image):
        def __init__(self) -> None:
            super().__init__(36)
            self.token = nn.Parameter(torch.randn(1, 1, WIDTH))

        def forward(self, image: Tensor) -> Tensor:
            x = self.patch(image).flatten(2).transpose(1, 2)
            x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.position
            return self.head(self.block(x, x.new_zeros(x.shape[1], WIDTH // HEADS // 2))[:, 0])

    report = check(ClassToken().double(), torch.randn(2, 3, 28, 20, dtype=torch.float64), sp=n)
    assert report.work.flops_share > 0.99
    assert not report.fallbacks


@pytest.mark.parametrize("size", [(28, 21), (29, 20)], ids=["columns", "rows"])
def test_a_patch_that_does_not_fill_the_image_is_dropped(size: tuple[int, int]) -> None:
    report = check(Image(35).double(), torch.randn(2, 3, *size, dtype=torch.float64), sp=2)
    assert report.work.flops_share > 0.99, report


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize(
    ("kernel", "stride", "padding"), [(3, 2, 1), (7, 4, 3), (4, 4, 2), ((5, 4), (4, 2), (1, 0))], ids=str
)
@pytest.mark.sampled(every=3)
def test_overlapping_and_padded_patches_are_computed_on_shards(kernel: Any, stride: Any, padding: Any, n: int) -> None:
    patch = nn.Conv2d(3, WIDTH, kernel, stride, padding)
    model = Image(patch(torch.zeros(1, 3, 28, 21)).shape[2:].numel())
    model.patch = patch
    report = check(model.double(), torch.randn(2, 3, 28, 21, dtype=torch.float64, requires_grad=True), sp=n)
    assert report.work.flops_share > 0.99, report
    assert not report.fallbacks


def test_patches_with_many_copies_of_an_image_remain_a_convolution() -> None:
    patch = nn.Conv2d(3, WIDTH, 5, 2, 2)
    model = Image(14 * 10)
    model.patch = patch
    report = check(model.double(), torch.randn(2, 3, 28, 20, dtype=torch.float64), sp=2)
    assert not report.find_notes(NoteKind.REWRITTEN, subject="rewrite_patch_convolutions")
    assert report.work.flops_share > 0.99, report


@pytest.mark.parametrize("n", [2, 3])
def test_attention_that_is_written_out_over_patches(n: int) -> None:
    """A bias may contain fills, so that attention remains a softmax and two products; H * W is its sequence."""

    class Written(Image):
        def forward(self, image: Tensor, bias: Tensor) -> Tensor:
            x = self.patch(image).flatten(2).transpose(1, 2) + self.position
            q, k, v = (split_heads(y) for y in self.block.qkv(x).chunk(3, -1))
            x = x + ((q @ k.transpose(-1, -2) + bias).softmax(-1) @ v).transpose(1, 2).flatten(2)
            return self.head(self.block.mlp(x).mean(1))

    bias = torch.randn(HEADS, 35, 35, dtype=torch.float64)
    report = check(Written(35).double(), torch.randn(2, 3, 28, 20, dtype=torch.float64), bias, sp=n)
    assert report.work.flops_share > 0.99, report
    assert report.constraints[0].startswith("sequence of 35")


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("lengths", [(35, 5), (40, 8), (33, 20)])
@pytest.mark.parametrize("text_first", [False, True])
@pytest.mark.sampled(every=11)
def test_joint_streams_need_no_gather(text_first: bool, lengths: tuple[int, int], n: int) -> None:
    image = torch.randn(2, lengths[0], 6, dtype=torch.float64, requires_grad=True)
    text = torch.randn(2, lengths[1], 5, dtype=torch.float64, requires_grad=True)
    report = check(Joint(text_first).double(), image, text, sp=n)
    assert not report.fallbacks
    assert report.find_notes(NoteKind.REWRITTEN, subject="join_sequences")
    assert report.count("unshard") == 1, "only the result of the model is gathered"


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("length", [13, 16, 31])
@pytest.mark.sampled(every=3)
def test_each_rank_has_complete_chunks(length: int, n: int) -> None:
    x = torch.randn(2, length, WIDTH, dtype=torch.float64, requires_grad=True)
    report = check(Chunks().double(), x, sp=n, seq_dims={"x": 1})
    if n > 1:
        assert not report.fallbacks
        assert report.work.flops_share == 1.0


class NeighborChunks(Chunks):
    """Attention of each chunk of 4 tokens over the chunk before it, itself, and the chunk after it."""

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        q, k, v = self.split_chunks(x)
        positions = torch.arange(q.shape[1] * 4).view(-1, 4)
        positions = torch.cat([positions - 4, positions, positions + 4], 1)
        is_token = ((positions >= 0) & (positions < length))[None, :, None]
        return x + self.out(self.attend(q, k, v, is_token).flatten(1, 2)[:, :length])

    def attend(self, q: Tensor, k: Tensor, v: Tensor, is_token: Tensor) -> Tensor:
        k, v = (
            torch.cat([F.pad(y, (0, 0, 0, 0, 1, 0))[:, :-1], y, F.pad(y, (0, 0, 0, 0, 0, 1))[:, 1:]], 2) for y in (k, v)
        )
        return F.scaled_dot_product_attention(q, k, v, is_token)


class InputWindows(NeighborChunks):
    """Attention in windows of 4 tokens, into which the input is split before any other op."""

    def __init__(self, folds_batch: bool) -> None:
        super().__init__()
        self.folds_batch = folds_batch
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        y = F.pad(x, (0, 0, 0, -length % 4)).unflatten(1, (-1, 4))
        y = y.flatten(0, 1) if self.folds_batch else y
        q, k, v = (z.unflatten(-1, (HEADS, -1)).transpose(-3, -2) for z in self.qkv(y).chunk(3, -1))
        y = self.out(F.scaled_dot_product_attention(q, k, v).transpose(-3, -2).flatten(-2))
        x = x + y.reshape(len(x), -1, WIDTH)[:, :length]
        return x + self.mlp(x)


@pytest.mark.parametrize(("folds_batch", "n"), [(True, 2), (False, 3)])
def test_an_input_is_split_into_windows_before_other_ops(folds_batch: bool, n: int) -> None:
    """A rank has complete windows, 13 of 25 on 2 ranks, although 2 of the 4 rows of each would be less."""
    x = torch.randn(2, 97, WIDTH, dtype=torch.float64, requires_grad=True)
    report = check(InputWindows(folds_batch).double(), x, sp=n)
    assert report.work.flops_share == 1.0
    assert not report.fallbacks
    assert {e.op for e in report.exchanges} == {"shard", "reduce_grad", "unshard"}, report
    assert report.count("unshard") == 1, "only the result of the model is gathered"


class WindowsBesideText(InputWindows):
    """Attention in windows of audio, and over a text that reads the audio, its mean, or a token of each window."""

    def __init__(self, reads: str) -> None:
        super().__init__(True)
        self.reads = reads

    def attention(self, x: Tensor) -> Tensor:
        q, k, v = (split_heads(y) for y in self.qkv(x).chunk(3, -1))
        return x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    def forward(self, audio: Tensor, text: Tensor) -> Tensor:
        audio, text = super().forward(audio), self.attention(text)
        if self.reads == "mean":
            return (audio.mean(1) * text.mean(1)).sum()
        if self.reads == "keys":
            return F.scaled_dot_product_attention(text, audio, audio).square().mean()
        tokens = audio[:, : audio.shape[1] // 4 * 4].unflatten(1, (-1, 4)).mean(2)
        return self.attention(torch.cat([tokens, text], 1)).square().mean()


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("reads", ["mean", "keys"])
@pytest.mark.sampled(every=1)
def test_windows_beside_another_sequence_are_complete(reads: str, n: int) -> None:
    audio, text = (torch.randn(2, s, WIDTH, dtype=torch.float64, requires_grad=True) for s in (97, 60))
    report = check(WindowsBesideText(reads).double(), audio, text, sp=n)
    assert [(c.size, c.is_chosen) for c in report.candidates] == [(100, True), (60, True), (4, False)]
    assert not report.fallbacks


def test_tokens_of_windows_that_are_joined_with_a_text() -> None:
    """The joined tokens are longer than the audio has windows, so that they are no windows of it."""
    audio, text = (torch.randn(1, s, WIDTH, dtype=torch.float64, requires_grad=True) for s in (97, 120))
    report = check(WindowsBesideText("tokens").double(), audio, text, sp=2)
    assert report.work.flops_share == 1.0


class ChunksAfterAttention(nn.Module):
    """Causal attention, then a recurrence over chunks of 8."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.scaled_dot_product_attention(*self.qkv(x).chunk(3, -1), is_causal=True)
        chunks, h, results = self.out(x).unflatten(1, (-1, 8)), x.new_zeros(len(x), WIDTH, WIDTH), []
        for i in range(chunks.shape[1]):
            results.append(chunks[:, i] @ h)
            h = h / 2 + chunks[:, i].mT @ chunks[:, i]
        return torch.cat(results, 1)


def test_rows_that_complete_chunks_are_no_rows_of_other_parts() -> None:
    x = torch.randn(2, 40, WIDTH)
    report = sp_compile.explain(ChunksAfterAttention(), x, sp=2, attention="ring", layout="zigzag")
    padding = next(text for text in report.work.describe_excess(2) if "for padding" in text)
    assert "lengths that 2 ranks divide" in padding


class StridedWindows(nn.Module):
    """A convolution with a stride before attention in windows of 16, as in encoders of audio."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.block, self.out = nn.Conv1d(WIDTH, WIDTH, 3, 2, 1), Block(), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("angles", torch.randn(16, WIDTH // HEADS // 2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x.mT).mT
        x = F.pad(x, (0, 0, 0, -x.shape[1] % 16))
        return self.out(x + self.block(x.reshape(-1, 16, WIDTH), self.angles).reshape(x.shape))


@pytest.mark.parametrize("n", [2, 3])
def test_a_region_of_the_batch_starts_no_window(n: int) -> None:
    report = check(StridedWindows().double(), torch.randn(2, 333, WIDTH, dtype=torch.float64, requires_grad=True), sp=n)
    assert report.work.flops_share > 0.6


@pytest.mark.parametrize("n", [2, 3])
def test_chunks_read_their_neighbors(n: int) -> None:
    """The sequence is the dim that is split into chunks, not the keys or the queries of a chunk."""
    report = check(NeighborChunks().double(), torch.randn(2, 27, WIDTH, dtype=torch.float64), sp=n)
    assert [(c.size, c.is_chosen) for c in report.candidates] == [(28, True), (12, False)]
    assert report.work.flops_share == 1.0
    assert not report.fallbacks


def test_the_sequence_is_never_a_dim_inside_of_a_chunk() -> None:
    """The only evidence is the scan over the chunks; the sequence is the dim that is split into them."""
    report = sp_compile.explain(Chunks(), torch.randn(2, 31, WIDTH), sp=2)
    assert report.inputs == {"x": [1]}
    assert report.constraints[0].startswith("sequence of 32")


def test_the_report_lists_the_sequences_and_their_evidence() -> None:
    report = sp_compile.explain(Video(), torch.randn(1, 3, 5, 6, 14), sp=2)
    (chosen,) = report.candidates
    assert (chosen.size, chosen.evidence, chosen.ops, chosen.is_input, chosen.is_chosen) == (
        105,
        "attention",
        2,
        False,
        True,
    )
    assert f"Sequences\n  {chosen}" in str(report)


def test_an_axis_that_is_not_split_is_second() -> None:
    def axial(x: Tensor) -> Tensor:
        x = x + F.scaled_dot_product_attention(x, x, x)
        y = x.transpose(1, 2)
        y = y + F.scaled_dot_product_attention(y, y, y)
        return F.scaled_dot_product_attention(y, y, y)

    report = sp_compile.explain(axial, torch.randn(2, 6, 10, 8), sp=2)
    assert [c.is_chosen for c in report.candidates] == [True, False]
    assert {c.size for c in report.candidates} == {6, 10}


class Axial(nn.Module):
    """One attention over the tokens of dim 2, and two over the few channels of dim 1."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.scaled_dot_product_attention(x, x, x)
        for _ in range(2):
            y = self.linear(x).transpose(1, 2).sin()
            x = x + F.scaled_dot_product_attention(y, y, y).cos().transpose(1, 2)
        return x


class Variates(nn.Module):
    """A scan over the time of dim 1, and attention over the few variates of dim 2."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q = self.linear(self.linear(x).cumsum(1).tanh())
        return self.linear(F.scaled_dot_product_attention(q, q, q))


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize(("model", "shape", "few"), [(Axial, (2, 3, 29), 3), (Variates, (2, 29, 5), 5)])
def test_the_sequence_has_the_least_work_of_a_rank(
    model: type[nn.Module], shape: tuple[int, ...], few: int, n: int
) -> None:
    report = check(model().double(), torch.randn(*shape, WIDTH, dtype=torch.float64, requires_grad=True), sp=n)
    chosen, other = report.candidates
    assert (chosen.size, chosen.is_chosen, other.size, other.is_chosen) == (29, True, few, False)
    assert re.search(rf"\b{n} ranks .*\b29\b", other.why), other.why
    assert re.search(r"\bleast\b.*\d\d%", chosen.why), chosen.why
    assert f"{chosen.why}\n" in str(report)
    assert other.why in str(report)
    assert not report.fallbacks


def test_a_rank_computes_padding() -> None:
    """The sequence of 3 that is named has one row on 3 of 8 ranks, so that the ranks save 2/3 of the work."""
    report = sp_compile.explain(Axial(), torch.randn(2, 3, 29, WIDTH), sp=8, seq_dims={"x": 1})
    assert report.work.flops_share == 1.0
    assert report.work.rank_share == pytest.approx(1 / 3)
    assert re.search(r"\brank .*\b33% .*FLOPs", str(report))
    (warning,) = (text for text in report.warnings if "padding" in text)
    assert re.match("62% .*FLOPs ", warning)


def test_a_warning_names_the_attended_dim_that_is_not_split() -> None:
    report = sp_compile.explain(Axial(), torch.randn(2, 3, 29, WIDTH), sp=2, seq_dims={"x": 1})
    assert any(re.search(r"\battended .*\b29\b", text) and NAME_ATTENDED in text for text in report.warnings)
    assert report.warnings[0] in str(report).split("\n\n")[0]
    assert sp_compile.explain(Axial(), torch.randn(2, 3, 30, WIDTH), sp=2).warnings == []


def test_a_warning_says_that_the_sequence_is_no_input() -> None:
    report = sp_compile.explain(Image(35), torch.randn(2, 3, 28, 20), sp=2)
    assert NO_INPUT_WARNING.format(35) in report.warnings


def test_a_report_without_a_sequence_says_so() -> None:
    report = sp_compile.explain(nn.Linear(WIDTH, WIDTH), torch.randn(2, 6, WIDTH), sp=1)
    assert "input dim" not in str(report).splitlines()[0]


def test_the_sequence_with_the_most_flops_is_first() -> None:
    class Captioned(Image):
        """Patches that attend to a text, of which an input has the tokens."""

        def forward(self, image: Tensor, text: Tensor) -> Tensor:
            x = self.patch(image).flatten(2).transpose(1, 2)
            x = x + F.scaled_dot_product_attention(x, text, text)
            return self.head(self.block(x, x.new_zeros(x.shape[1], WIDTH // HEADS // 2)).mean(1))

    report = sp_compile.explain(Captioned(35), torch.randn(2, 3, 28, 20), torch.randn(2, 11, WIDTH), sp=2)
    assert report.inputs == {"text": [1]}
    shares, sequence, warning, *_ = str(report).splitlines()
    assert re.match(r"\d+% .*FLOPs .*\d+% .*activations\b", shares)
    assert re.search(r"\b35 positions\b.*\btext dim 1$", sequence)
    assert warning == f"Warning: {NO_INPUT_WARNING.format(35)}"


def test_a_frozen_model_has_no_activations() -> None:
    frozen = Image(35).requires_grad_(False)
    first, *_ = str(sp_compile.explain(frozen, torch.randn(2, 3, 28, 20), sp=2)).splitlines()
    assert "FLOPs" in first
    assert "activations" not in first


def test_the_first_line_has_the_saved_bytes_on_shards() -> None:
    """A gate that no sequence reaches is saved on every rank: its 4 x 64 numbers, and the shards of all others."""

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.gate = nn.Linear(WIDTH, 3 * WIDTH), nn.Parameter(torch.randn(4, 64))

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (split_heads(y) for y in self.qkv(x).chunk(3, -1))
            return F.scaled_dot_product_attention(q, k, v).mean() * self.gate.sigmoid().cumsum(1).exp().mean()

    report = sp_compile.explain(Gated(), torch.randn(2, 30, WIDTH), sp=2, memory=True)
    assert report.step is not None
    (graph,) = report.step.graphs
    full = graph.saved - graph.sharded
    assert 2 * 4 * 64 * 4 <= full < 2.2 * 4 * 64 * 4, "the results of sigmoid and exp"
    share = report.step.saved_share(2)
    assert share == pytest.approx(2 * graph.sharded / (2 * graph.sharded + full))
    assert report.work.describe(share) == str(report).splitlines()[0]
    assert report.work.describe(share) != report.work.describe()


def test_the_report_names_the_inputs_and_the_reason() -> None:
    named = sp_compile.explain(Axial(), torch.randn(2, 3, 29, WIDTH), sp=2, seq_dims={"x": 1})
    first, second = named.candidates
    assert (str(first).partition(",")[0], first.inputs, second.inputs) == (
        "3 positions of x dim 1",
        *[(f"x dim {d}",) for d in (1, 2)],
    )
    assert "{'x': 1}" in second.why

    def apart(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return F.scaled_dot_product_attention(x, x, x), y.cumsum(1)

    found = sp_compile.explain(apart, torch.randn(2, 9, WIDTH), torch.randn(2, 30, WIDTH), sp=2)
    assert [c.inputs for c in found.candidates] == [("x dim 1",), ("y dim 1",)]
    assert re.search(r"\b5% .*FLOPs\b", found.candidates[1].why), (
        "a sum without products is no sequence beside attention"
    )


class TwoStreams(nn.Module):
    """Attention over a short text, and a recurrence over audio that meets the text in their means only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gates, self.qkv, self.out = (nn.Linear(WIDTH, k * WIDTH) for k in (2, 3, 1))

    def forward(self, text: Tensor, audio: Tensor) -> Tensor:
        gate, x = self.gates(audio).chunk(2, -1)
        h = self.out(sp_compile.linear_scan(gate.sigmoid(), x, 1))
        q, k, v = (split_heads(y) for y in self.qkv(text).chunk(3, -1))
        return (h.mean(1) * F.scaled_dot_product_attention(q, k, v).mean(2).flatten(1)).sum()


@pytest.mark.parametrize(("batch", "n"), [(1, 2), (2, 3)])
def test_both_of_two_sequences_without_a_common_value_are_split(batch: int, n: int) -> None:
    text, audio = (torch.randn(batch, s, WIDTH, dtype=torch.float64, requires_grad=True) for s in (8, 97))
    report = check(TwoStreams().double(), text, audio, sp=n)
    assert [(c.size, c.is_chosen, c.is_split) for c in report.candidates] == [(97, True, True), (8, True, True)]
    assert not report.find_notes(NoteKind.REWRITTEN, subject="shard_side_regions")
    line = str(report).splitlines()[1]
    assert 0 < line.find("audio dim") < line.find("text dim"), "the one with the most FLOPs is first"


def test_a_dim_that_is_split_is_not_called_unsplit() -> None:
    """The names of the user are the only sequence; the audio is a side region."""
    report = sp_compile.explain(
        TwoStreams(), torch.randn(1, 8, WIDTH), torch.randn(1, 97, WIDTH), sp=2, seq_dims={"text": 1}
    )
    text, audio = report.candidates
    assert (text.is_chosen, audio.is_chosen, audio.is_split) == (True, False, True)
    assert "{'text': 1}" in text.why
    assert "not chosen" not in str(report)


def test_windows_of_a_region_are_complete() -> None:
    """Beside the named text, the audio is no sequence: of about equal work, a rank has windows and not their rows."""

    class Windows(InputWindows):
        def forward(self, audio: Tensor, text: Tensor) -> Tensor:
            q, k, v = (split_heads(y) for y in self.qkv(text).chunk(3, -1))
            y = F.scaled_dot_product_attention(q, k, v).mean(2).flatten(1)
            return (super().forward(audio).mean(1) * y).sum()

    audio, text = (torch.randn(1, s, WIDTH, dtype=torch.float64, requires_grad=True) for s in (403, 11))
    report = check(Windows(True).double(), audio, text, sp=2, seq_dims={"text": 1})
    assert not any(c.startswith("4 rows") for c in report.constraints), report.constraints
    assert any(re.match(r"101 .*\b51\b", c) for c in report.constraints), report.constraints


def test_a_warning_names_embeddings_of_every_rank() -> None:
    class Merged(nn.Module):
        """Rows of an embedding that others replace, by an op without a rule."""

        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(10, WIDTH)

        def forward(self, ids: Tensor, image: Tensor) -> Tensor:
            x = self.embedding(ids)
            x = x.put(torch.arange(image.numel()), image)[:, None]
            return F.scaled_dot_product_attention(x, x, x)

    report = sp_compile.explain(Merged(), torch.tensor([[1, 9, 2, 9, 3, 4]]), torch.randn(2, WIDTH), sp=2)
    (warning,) = (text for text in report.warnings if "activations" in text)
    assert "self.embedding(ids)" in warning


def test_recurrences_and_solves_have_flops() -> None:
    def recurrence(m: Tensor, b: Tensor) -> Tensor:
        return sp_compile.affine_scan(m, b)

    def solve(x: Tensor) -> Tensor:
        q = torch.linalg.solve_triangular(torch.eye(8).expand(2, 6, 8, 8), x, upper=False)
        return q.cumsum(1)

    report = sp_compile.explain(recurrence, torch.randn(2, 6, 4, 4), torch.randn(2, 6, 4, 5), sp=2)
    assert (report.work.flops, report.work.flops_share) == (2 * 2 * 6 * 4 * 4 * 5, 1.0)
    report = sp_compile.explain(solve, torch.randn(2, 6, 8, 3), sp=2)
    assert (report.work.flops, report.work.flops_share) == (2 * 6 * 8 * 8 * 3, 1.0)
    write = lambda x, i: x.cumsum(1).index_copy(1, i, x[:, :3])  # noqa: E731
    report = sp_compile.explain(write, torch.randn(2, 6, 8), torch.tensor([1, 2, 4]), sp=2)
    assert report.work.flops == 0, "an index is not multiplied"


def test_a_row_is_multiplied_by_the_matrix_of_one_expert() -> None:
    pytest.importorskip("transformers.integrations.moe")  # has the op

    def experts(x: Tensor, w: Tensor, keys: Tensor) -> Tensor:
        return torch.ops.sp.grouped_mm(x, w, keys, "transformers::grouped_mm_fallback")

    gm = captured(experts, torch.randn(12, 6), torch.randn(3, 6, 10), torch.arange(12) // 5)
    (node,) = gm.graph.find_nodes(op="call_function", target=torch.ops.sp.grouped_mm.default)
    assert contraction_flops(node) == 2 * 12 * 6 * 10


def test_the_report_names_work_of_every_rank() -> None:
    class Convolution(Image):
        def forward(self, image: Tensor) -> Tensor:
            return super().forward(F.conv2d(image, torch.ones(3, 3, 3, 3), padding=1))

    report = sp_compile.explain(Convolution(35), torch.randn(2, 3, 28, 20), sp=2)
    (note,) = report.find_notes(NoteKind.REPLICATED_WORK)
    assert "F.conv2d" in note.where
    assert 0.05 < 1 - report.work.flops_share < 0.95
    assert report.work.describe() in str(report)


class Loss(nn.Module):
    """The mean square of the result of a model with joint, chunked, windowed or separate sequences."""

    def __init__(self, name: str) -> None:
        super().__init__()
        models = {"joint": lambda: Joint(True), "windows": lambda: WindowsBesideText("mean"), "streams": TwoStreams}
        self.model = models.get(name, Chunks)().double()

    def forward(self, *args: Tensor) -> Tensor:
        return self.model(*args).pow(2).mean()


def tokens(name: str, length: int) -> list[Tensor]:
    """Return the inputs of the model: the rows, and a text in most of them."""
    rows = torch.randn(2, length, 6 if name == "joint" else WIDTH, dtype=torch.float64)
    text = torch.randn(2, 5, 5 if name == "joint" else WIDTH, dtype=torch.float64)
    return {"chunks": [rows], "streams": [text, rows]}.get(name, [rows, text])


def _train(name: str) -> object:
    torch.manual_seed(1)
    if name == "video":
        return against_eager(Video().double(), torch.randn(1, 3, 3, 6, 10, dtype=torch.float64), mesh=mesh())

    return against_eager(Loss(name), *tokens(name, 21), mesh=mesh())


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("name", ["video", "joint", "chunks", "windows", "streams"])
@pytest.mark.sampled(every=5)
def test_on_real_ranks(ranks: Ranks, name: str, n: int) -> None:
    check_ranks(ranks.run(n, _train, name))


def _train_lengths(name: str) -> list[object]:
    """Train on lengths of which the second one makes the graph dynamic."""

    model, outcomes = Loss(name), []
    run = sp(model, mesh=mesh())
    for length in (33, 41, 20):
        torch.manual_seed(length)
        outcomes.append(against_eager(model, *tokens(name, length), run=run))
    return outcomes


@pytest.mark.parametrize("name", ["joint", "chunks", "windows", "streams"])
@pytest.mark.slow
def test_other_lengths(ranks: Ranks, name: str) -> None:
    """A symbolic length is gathered where a number of rows must be known, and never an error."""
    for outcomes in zip(*ranks.run(2, _train_lengths, name), strict=True):
        check_ranks(outcomes)


def test_symbolic_positions_from_the_end() -> None:
    """Positions that are negative sizes, -k of a tensor of k rows, count from the end, in reads and writes."""

    def read_and_write(x: Tensor, other: Tensor) -> tuple[Tensor, ...]:
        h, k, rows = x.cumsum(1), other.shape[1], x.shape[1]
        written = h.clone()
        written.narrow(1, -k, k).mul_(2)
        return h.narrow(1, -k, k), h[:, -2 * k : -k], h[:, 2 - rows : 5 - rows], h.select(1, k - rows), written

    x, other = torch.randn(2, 9, 4).double(), torch.randn(2, 3, 4)
    for value in (x, other):
        torch._dynamo.mark_dynamic(value, 1)
    for n in (2, 3):
        report = sp_compile.verify(read_and_write, x, other, sp=n)
        assert report.worst < 1e-12, str(report)
