"""Convolutions over the rows of images, with tokens that are a sequence, and before or after these tokens."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from support.models import check
from support.parity import against_eager
from support.parity import check as check_ranks
from support.ranks import Ranks, mesh
from torch import Tensor, nn

import sp_compile
from sp_compile.passes.context import NoteKind
from sp_compile.passes.report import Report

WIDTH, CHANNELS = 8, 32


class ConvFeedForward(nn.Module):
    """Attention over H * W tokens, then convolutions over the image of the tokens."""

    def __init__(self, columns: int, *middle: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.columns, self.qkv = columns, nn.Linear(WIDTH, 3 * WIDTH)
        inner = middle or (nn.Conv2d(2 * WIDTH, 2 * WIDTH, 3, padding=1, groups=2 * WIDTH),)
        self.ff = nn.Sequential(nn.Conv2d(WIDTH, 2 * WIDTH, 1), nn.SiLU(), *inner, nn.Conv2d(2 * WIDTH, WIDTH, 1))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            q, k, v = (y.unsqueeze(1) for y in self.qkv(x).chunk(3, -1))
            x = x + F.scaled_dot_product_attention(q, k, v).squeeze(1)
            image = x.unflatten(1, (-1, self.columns)).permute(0, 3, 1, 2)
            x = x + self.ff(image).flatten(2).transpose(1, 2)
        return x


def conv(kernel: int | tuple[int, int], **given: int | tuple[int, int] | str) -> nn.Module:
    return nn.Conv2d(2 * WIDTH, 2 * WIDTH, kernel, **given)


MIDDLES: dict[str, Callable[[], nn.Module]] = {
    "full": lambda: conv(3, padding=1),
    "rows only": lambda: conv((3, 1), padding=(1, 0)),
    "columns only": lambda: conv((1, 5), padding=(0, 2)),
    "dilated": lambda: conv(3, padding=2, dilation=2),
    "same": lambda: conv((5, 3), padding="same"),
    "groups": lambda: conv(3, padding=1, groups=4),
}


def image_tokens(rows: int, columns: int) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(2, rows * columns, WIDTH, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize(("rows", "columns"), [(8, 4), (7, 5), (9, 3)])
@pytest.mark.sampled(every=4)
def test_each_rank_has_complete_rows(rows: int, columns: int, n: int) -> None:
    report = check(ConvFeedForward(columns).double(), image_tokens(rows, columns), sp=n)
    assert not report.fallbacks, report
    assert report.work.flops_share == 1.0
    assert report.count("conv_along") == 2, "only the middle convolutions need rows of other ranks"


def test_autocast() -> None:
    """Autocast casts the convolution on shards as the one on a single device."""

    class Cast(ConvFeedForward):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(x)

    report = sp_compile.verify(Cast(4), image_tokens(8, 4).detach().float(), sp=2)
    assert report.count("conv_along") == 2
    assert report.worst < 0.05


@pytest.mark.parametrize("name", list(MIDDLES))
@pytest.mark.sampled(every=2)
def test_kinds_of_convolutions(name: str) -> None:
    report = check(ConvFeedForward(5, MIDDLES[name]()).double(), image_tokens(12, 5), sp=3)
    assert not report.fallbacks, report


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("norm", [nn.GroupNorm(4, 2 * WIDTH), nn.InstanceNorm2d(2 * WIDTH, affine=True)], ids=str)
def test_norms_over_rows_have_the_mean_and_variance_of_all_ranks(norm: nn.Module, n: int) -> None:
    report = check(ConvFeedForward(5, conv(1), norm).double(), image_tokens(7, 5), sp=n)
    assert not report.fallbacks, report
    assert report.work.flops_share == 1.0


def test_a_demand_that_arises_in_a_round_is_not_gathered_there() -> None:
    """The second norm is on shards only after the first one is decomposed."""
    middle = [nn.GroupNorm(4, 2 * WIDTH), conv(3, padding=1), nn.GroupNorm(2, 2 * WIDTH), nn.SiLU()]
    report = check(ConvFeedForward(5, *middle).double(), image_tokens(8, 5), sp=2)
    assert not report.fallbacks, report
    assert report.count("conv_along") == 2


def test_frames_of_all_videos_are_no_sequence() -> None:
    """The first dim, of batch * frames, is split before any product; attention reads the 7 frames of each pixel."""

    class Frames(ConvFeedForward):
        def forward(self, x: Tensor) -> Tensor:
            frames = x.unflatten(0, (-1, 7)).permute(0, 2, 1, 3).flatten(0, 1)
            q, k, v = (y.unsqueeze(1) for y in self.qkv(frames).chunk(3, -1))
            y = F.scaled_dot_product_attention(q, k, v).squeeze(1)
            return x + y.unflatten(0, (-1, x.shape[1])).permute(0, 2, 1, 3).flatten(0, 1)

    x = torch.randn(2 * 7, 5, WIDTH, dtype=torch.float64, requires_grad=True)
    report = check(Frames(5).double(), x, sp=2)
    assert report.work.flops_share == 1.0, report
    assert report.constraints[0].startswith("sequence of 7"), report


@pytest.mark.sampled(every=1)
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_fewer_rows_than_ranks(rows: int) -> None:
    check(ConvFeedForward(5).double(), image_tokens(rows, 5), sp=4)


def test_a_stride_is_gathered() -> None:
    middle = nn.Sequential(conv(3, padding=1, stride=2), nn.Upsample(scale_factor=2))
    report = check(ConvFeedForward(4, middle).double(), image_tokens(6, 4), sp=2)
    assert len([note for note in report.fallbacks if "self.ff(image)" in note.where]) == 2, report
    assert report.count("conv_along") == 0


@pytest.mark.parametrize("n", [2, 3])
def test_volumes_have_complete_frames(n: int) -> None:
    class Video(ConvFeedForward):
        def __init__(self) -> None:
            super().__init__(12)
            self.ff = nn.Sequential(nn.Conv3d(WIDTH, WIDTH, 1), nn.Conv3d(WIDTH, WIDTH, 3, padding=1, groups=2))

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (y.unsqueeze(1) for y in self.qkv(x).chunk(3, -1))
            x = x + F.scaled_dot_product_attention(q, k, v).squeeze(1)
            volume = x.unflatten(1, (-1, 4, 3)).permute(0, 4, 1, 2, 3)
            return x + self.ff(volume).flatten(2).transpose(1, 2)

    report = check(Video().double(), image_tokens(5, 12), sp=n)
    assert not report.fallbacks, report


def test_a_cheap_convolution_does_not_make_shards_unequal() -> None:
    """The prediction of pixels from 35 tokens is little work, so a rank has 18 tokens and not 4 rows of 7."""

    class Pixels(ConvFeedForward):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (y.unsqueeze(1) for y in self.qkv(x).chunk(3, -1))
            x = x + F.scaled_dot_product_attention(q, k, v).squeeze(1)
            pixels = x[..., :1].unflatten(1, (-1, self.columns)).permute(0, 3, 1, 2)
            return F.conv2d(pixels, pixels.new_ones(1, 1, 3, 3), padding=1)

    report = sp_compile.explain(Pixels(7), torch.randn(2, 35, WIDTH), sp=2)
    assert report.constraints[0].startswith("sequence of 35"), report.constraints


class Detector(nn.Module):
    """A backbone of convolutions, attention over the H * W positions of its result, and a head of convolutions."""

    def __init__(self, has_token: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        inner, outer = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1), nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)
        self.stem = nn.Sequential(nn.Conv2d(3, CHANNELS, 3, 2, 1), nn.ReLU(), inner, nn.ReLU(), outer)
        self.qkv = nn.Linear(CHANNELS, 3 * CHANNELS)
        self.head = nn.Sequential(
            nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1), nn.GELU(), nn.Conv2d(CHANNELS, 2, 3, padding=1)
        )
        self.token = nn.Parameter(torch.randn(1, 1, CHANNELS)) if has_token else None

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        features = self.stem(image)
        x = features.flatten(2).transpose(1, 2)
        if self.token is not None:
            x = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        q, k, v = (y.unsqueeze(1) for y in self.qkv(x).chunk(3, -1))
        x = x + F.scaled_dot_product_attention(q, k, v).squeeze(1)
        x = x[:, 1:] if self.token is not None else x
        return self.head(x.transpose(1, 2).unflatten(2, features.shape[2:])), features


def image_of(rows: int, columns: int, batch: int = 1) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(batch, 3, rows, columns, dtype=torch.float64, requires_grad=True)


def side_regions(report: Report) -> int:
    return len(report.find_notes(NoteKind.REWRITTEN, subject="shard_side_regions"))


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("has_token", [False, True], ids=["tokens", "class token"])
@pytest.mark.parametrize(("rows", "batch"), [(26, 1), (23, 1), (24, 3)])
@pytest.mark.sampled(every=4)
def test_convolutions_that_no_sequence_reaches(rows: int, batch: int, has_token: bool, n: int) -> None:
    report = check(Detector(has_token).double(), image_of(rows, 10, batch), sp=n)
    assert side_regions(report)
    assert report.work.flops_share > 0.95, report


def test_rows_that_a_rank_has_of_both_are_not_moved() -> None:
    """A rank has 8 of 16 rows of 5 positions, which are 40 of the 80 tokens."""
    report = check(Detector().double(), image_of(32, 10), sp=2)
    assert report.work.flops_share > 0.95
    assert not report.fallbacks, report


@pytest.mark.parametrize("n", [2, 3])
def test_rows_of_a_region_are_added_to_those_of_the_tokens(n: int) -> None:
    """A rank slices the gathered features by its tokens, so that it has all of their gradient."""

    class Added(Detector):
        def forward(self, image: Tensor) -> Tensor:
            results, features = super().forward(image)
            return results + features[:, :2]

    report = check(Added().double(), image_of(23, 20), sp=n)
    assert side_regions(report)


def test_the_batch_of_a_region_is_divided_if_its_rows_are_gathered() -> None:
    """A rank resizes 2 of 4 images, because a resized row is no window of rows."""

    class Resized(Detector):
        def forward(self, image: Tensor) -> Tensor:
            return self.head(F.interpolate(super().forward(image)[1], scale_factor=3.0, mode="bilinear"))

    report = check(Resized().double(), image_of(20, 10, batch=4), sp=2)
    assert side_regions(report)
    assert report.work.flops_share > 0.95, report


def test_results_of_a_region_are_returned_in_full() -> None:
    report = sp_compile.explain(Detector(has_token=True), image_of(26, 10).float(), sp=2, outputs="lazy")
    assert side_regions(report)
    assert report.sharded_outputs == []


def test_no_region_is_gathered_with_fallback_error() -> None:
    report = check(Detector().double(), image_of(26, 10), sp=2, fallback="error")
    assert not side_regions(report)


def test_the_balanced_layout_has_no_regions() -> None:
    """Its order is that of the tokens of a text; the image is computed on every rank."""

    class Captioned(Detector):
        def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
            q, k, v = (y.unsqueeze(1) for y in self.qkv(text).chunk(3, -1))
            return F.scaled_dot_product_attention(q, k, v, is_causal=True), self.stem(image)

    text = torch.randn(1, 12, CHANNELS, dtype=torch.float64)
    assert side_regions(check(Captioned().double(), image_of(26, 10), text, sp=2))
    assert not side_regions(check(Captioned().double(), image_of(26, 10), text, sp=2, layout="balanced"))


class Loss(nn.Module):
    """The mean square of the results."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model.double()

    def forward(self, x: Tensor) -> Tensor:
        results = self.model(x)
        return sum(y.pow(2).mean() for y in ([results] if isinstance(results, Tensor) else results))


def _train_on_rows() -> object:
    return against_eager(
        Loss(ConvFeedForward(5, conv(3, padding=1), nn.GroupNorm(4, 2 * WIDTH))),
        image_tokens(7, 5).detach(),
        mesh=mesh(),
    )


def _train_a_detector() -> object:
    return against_eager(Loss(Detector(has_token=True)), image_of(26, 10).detach(), mesh=mesh())


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.sampled(every=2)
def test_rows_on_real_ranks(ranks: Ranks, n: int) -> None:
    check_ranks(ranks.run(n, _train_on_rows))


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.sampled(every=3)
def test_side_regions_on_real_ranks(ranks: Ranks, n: int) -> None:
    check_ranks(ranks.run(n, _train_a_detector))
