"""Compare a model compiled for sequence parallelism with the same model in eager mode on a single device."""

import copy
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from support.ranks import as_users_run
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import sp_compile

VOCAB = 31


class Block(nn.Module):
    """Pre-norm attention and MLP with rotary positions; 4 heads."""

    def __init__(self, dim: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.dropout = heads, nn.Dropout(dropout)
        self.norm1, self.norm2 = nn.RMSNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim, bias=False)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, seq, dim) -> (batch, seq, dim)."""
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(self.norm1(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        x = x + self.dropout(self.out(y.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.mlp(self.norm2(x)))


def rotate(x: Tensor) -> Tensor:
    """Rotary positions on (batch, heads, seq, head_dim)."""
    half = x.shape[-1] // 2
    position = torch.arange(x.shape[-2], device=x.device, dtype=torch.float64)
    angles = position[:, None] * 0.1 ** torch.arange(half, device=x.device)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class Decoder(nn.Module):
    """Tokens and labels in, next-token loss out; a label of -100 is skipped."""

    def __init__(self, dim: int = 16, heads: int = 4, layers: int = 2, tie: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.blocks = nn.ModuleList(Block(dim, heads, dropout) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(dim), nn.Linear(dim, VOCAB, bias=False)
        if tie:
            self.head.weight = self.embed.weight

    def hidden(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        """(batch, seq) int64 twice -> 0-d loss."""
        logits = self.head(self.hidden(ids))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class Checkpointed(Decoder):
    """A decoder with checkpointed blocks. given: further arguments of the checkpoint."""

    given: Mapping[str, Any] = {}

    def hidden(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False, **self.given)
        return self.norm(x)


def text(seq: int, batch: int = 2, prompt: float = 0.3, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return random tokens and labels; the first share of labels (`prompt`) is -100."""
    generator = torch.Generator().manual_seed(1000 * seed + seq)
    ids = torch.randint(0, VOCAB, (batch, seq), generator=generator)
    labels = ids.clone()
    labels[:, : int(seq * prompt)] = -100
    return ids, labels


class Sums(nn.Module):
    """(..., S, width) to a scalar: a linear layer and a cumulative sum over the tokens."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).cumsum(1).sin().sum()


def build(model: Callable[..., nn.Module] = Decoder, **kwargs: Any) -> nn.Module:
    """Return a model in float64 with equal random weights on every rank."""
    torch.manual_seed(0)
    return model(**kwargs).double()


def compile_options() -> dict[str, Any]:
    """Return the default options of tests: none in a test marked `as_users_run` (`conftest.py`).

    Otherwise aot_eager, for speed, and cost={}, the device's constants: measured ones vary, and with them the choices of
    "auto".
    """
    return {} if as_users_run() else {"compiler": "aot_eager", "cost": {}}


def sp(model: Any, dynamic: bool | None = None, **options: Any) -> Any:
    """Compile a model with backend="sp"; options override `compile_options`."""
    given = {**compile_options(), **options}
    return torch.compile(model, backend="sp", dynamic=dynamic, options=given)


@dataclass
class Outcome:
    """One rank's comparison: the largest relative error, and a digest of the bits of loss and gradients."""

    error: float
    bits: str
    where: str = ""


def outcome(loss: Tensor, grads: Iterable[Tensor | None], expected: Tensor, wanted: Iterable[Tensor | None]) -> Outcome:
    """Compare results and gradients with those of a single device."""
    found, right = [loss.detach(), *grads], [expected.detach(), *wanted]
    largest = max(r.abs().max().item() for r in right if r is not None)
    errors = [difference(a, b, floor=1e-6 * largest) for a, b in zip(found, right, strict=True)]
    worst = max(range(len(errors)), key=errors.__getitem__)
    return Outcome(errors[worst], digest(found), f"entry {worst} (0 is the loss) of {len(errors)}")


def difference(found: Tensor | None, right: Tensor | None, floor: float = 0.0) -> float:
    """Return the largest difference relative to the largest entry; None equals only None.

    floor: entries below it are rounding errors around a true zero (the gradient of a bias of attention's keys).
    """
    if found is None or right is None:
        return 0.0 if found is right else float("inf")
    if found.shape != right.shape or found.dtype != right.dtype or not bool(found.isfinite().all()):
        return float("inf")
    scale = max(right.abs().max().double().item(), floor) or 1.0
    return (found.double() - right.double()).abs().max().item() / scale


def digest(tensors: Iterable[Tensor | None]) -> str:
    raw = [None if t is None else t.contiguous().view(-1).view(torch.uint8) for t in tensors]
    return hashlib.sha256(b"".join(b"-" if t is None else t.numpy().tobytes() for t in raw)).hexdigest()


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [p.grad for p in model.parameters()]


def train_step(run: Callable[..., Any], model: nn.Module, args: Sequence[Any], **kwargs: Any) -> tuple[Tensor, list]:
    """Return the loss and the gradients of one forward and backward."""
    model.zero_grad()
    loss = run(*args, **kwargs)
    loss = getattr(loss, "loss", loss)
    loss.backward()
    return loss.detach(), [None if g is None else g.clone() for g in gradients(model)]


def against_eager(model: nn.Module, *args: Any, run: Any = None, kwargs: dict | None = None, **how: Any) -> Outcome:
    """Compare a training step of `model` under backend="sp" (or of `run`) with a copy in eager mode."""
    expected = train_step(alone := copy.deepcopy(model), alone, args, **(kwargs or {}))
    found = train_step(sp(model, **how) if run is None else run, model, args, **(kwargs or {}))
    return outcome(*found, *expected)


def check(outcomes: Sequence[Outcome], tolerance: float = 1e-9) -> None:
    """Check that every rank is right, and that the bits of all are equal."""
    for rank, one in enumerate(outcomes):
        assert one.error <= tolerance, f"rank {rank}: relative error {one.error:.2e} in {one.where}"
    assert len({one.bits for one in outcomes}) == 1, "the ranks differ from each other"


def worst_gradient(model: nn.Module, single: nn.Module) -> float:
    """Return the largest error of a gradient of a model that FSDP has sharded; `single` has the right ones."""
    errors = []
    for p, q in zip(model.parameters(), single.parameters(), strict=True):
        assert q.grad is None or p.grad is not None
        if p.grad is not None:
            errors.append(float((p.grad.full_tensor() - (0 if q.grad is None else q.grad)).abs().max()))
    return max(errors)


def step_errors(model: nn.Module, single: nn.Module, batch: Mapping[str, Tensor]) -> tuple[float, float]:
    """Return the errors of the loss and of the worst gradient of a sharded model of transformers in one step."""
    losses = []
    for one in (single, model):
        one.zero_grad()
        losses.append(one(**batch)["loss"])
        losses[-1].backward()
    expected, loss = losses
    return float((loss - expected).detach().abs()), worst_gradient(model, single)


def error_text(call: Callable[[], Any]) -> str:
    """Return the message of the SpError that `call` raises."""
    try:
        call()
    except sp_compile.SpError as error:
        return str(error)
    raise AssertionError("no SpError was raised")
