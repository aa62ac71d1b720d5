"""Slices of a sharded sequence: free where that is safe, and never a NaN that one device does not have."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sp_compile


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 8)

    def attend(self, x: Tensor) -> Tensor:
        q = self.linear(x).unflatten(-1, (4, 2)).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).flatten(2)


class InfiniteDerivative(Attention):
    """Row 0 is zero, where the square root has no finite derivative; one device never takes the root of it."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.attend(x) * torch.arange(x.shape[1])[None, :, None]
        return y[:, 1:].pow(2).sum(-1).sqrt().sum() + self.linear(y[:, 1:]).abs().log().mean()


class LabelShift(Attention):
    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.attend(x)[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())


class Axial(Attention):
    """Attention along the columns, then along the rows of (B, H, W, D): one of the two axes can be sharded."""

    def forward(self, x: Tensor) -> Tensor:
        q = self.linear(x)
        x = x + F.scaled_dot_product_attention(q, q, q)
        q = self.linear(x).transpose(1, 2)
        return (x + F.scaled_dot_product_attention(q, q, q).transpose(1, 2)).pow(2).mean()


@pytest.mark.sampled(every=22)
@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("length", [3, 8, 9])
def test_rows_cut_off_spoil_no_gradient(n: int, length: int) -> None:
    x = torch.randn(2, length, 8, dtype=torch.float64)
    assert sp_compile.verify(InfiniteDerivative().double(), x, sp=n).worst < 1e-12


def test_label_shift_stays_free() -> None:
    """No window op, no collective: the shift is the same local value."""
    args = torch.randn(2, 8, 8), torch.randint(0, 8, (2, 8))
    local = sp_compile.parallelize(torch.export.export(LabelShift(), args), sp=2)
    targets = [n.target for n in local.graph.nodes]
    assert torch.ops.sp.window.default not in targets
    assert targets.count(torch.ops.sp.unshard.default) == 0


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("n", [3, 2])
def test_one_of_two_attended_axes_is_sharded(n: int) -> None:
    report = sp_compile.verify(
        Axial().double(), torch.randn(2, 6, 12, 8, dtype=torch.float64), sp=n, attention="ulysses"
    )
    assert report.worst < 1e-12
    assert report.count("all_to_all") == 2
    assert not report.fallbacks


def test_nothing_to_shard_is_reported_and_can_be_refused() -> None:
    one = torch.randn(2, 1, 8)
    assert [note.label for note in sp_compile.verify(LabelShift(), one, torch.zeros(2, 1).long(), sp=2).notes] == [
        "replicated"
    ]
    with pytest.raises(sp_compile.SpError, match="SP304"):
        sp_compile.explain(LabelShift(), one, torch.zeros(2, 1).long(), sp=2, fallback="error")


class CutOff(Attention):
    """The last row is infinite or has no number, and one device never computes on it: the program cuts it off."""

    def __init__(self, case: str) -> None:
        super().__init__()
        self.case, self.head = case, nn.Linear(8, 8)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        rows = torch.arange(x.shape[1])
        shown = (rows < x.shape[1] - 1).to(x.dtype).log()[:, None]  # -inf in the last row
        if self.case == "reciprocals":
            return self.attend((1 / (x * shown.exp()))[:, :-1]).sin().mean()
        if self.case == "logits":
            logits = self.head(self.attend(x)) + shown
            return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        if self.case == "a product":
            return (self.attend(x)[:, :-1] * self.head(x + shown)[:, :-1]).mean()
        large = (x / shown.exp().clamp(min=1e-200))[:, :-1]
        return self.head(large * large).sin().mean() + self.attend(x).mean()


@pytest.mark.sampled(every=7)
@pytest.mark.parametrize("case", ["reciprocals", "logits", "a product", "an overflow"])
@pytest.mark.parametrize(("n", "length"), [(2, 8), (2, 7), (3, 7), (4, 9)])
def test_rows_cut_off_need_not_be_finite(n: int, length: int, case: str) -> None:
    x, labels = torch.randn(2, length, 8, dtype=torch.float64), torch.randint(0, 8, (2, length))
    assert sp_compile.verify(CutOff(case).double(), x, labels, sp=n).worst < 1e-9
