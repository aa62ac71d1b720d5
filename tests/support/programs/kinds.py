"""Small programs of every kind that a capture must get right: PROGRAMS[name](model, x) returns the loss first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch._higher_order_ops import while_loop
from torch._higher_order_ops.associative_scan import associative_scan
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

D = 16
PROGRAMS: dict[str, Callable[..., Any]] = {}


class Model(nn.Module):
    def __init__(self, program: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.program = program
        self.lin = nn.Linear(D, D)
        self.bn = nn.BatchNorm1d(D)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.ones(D))
        self.register_buffer("cache", torch.zeros(2, 8, D))

    def forward(self, *args: Any) -> Any:
        return self.program(self, *args)


def program(f: Callable[..., Any]) -> Callable[..., Any]:
    PROGRAMS[f.__name__] = f
    return f


# ---- mutation


@program
def buffers(m, x):
    m.count.add_(1)
    m.mean.mul_(0.9).add_(x.detach().mean((0, 1)), alpha=0.1)
    view = m.mean.view(4, 4)
    m.mean[:4].zero_()
    return (m.lin(x) * m.count * view.flatten()).sum()


@program
def buffer_read_by_the_gradient(m, x):
    m.count.add_(1)
    return (m.lin(x) * x * m.count).sum()


@program
def batch_norm(m, x):
    return m.bn(m.lin(x).flatten(0, 1)).pow(2).sum()


@program
def cache_write(m, x):
    i = torch.arange(x.shape[1])
    m.cache.index_copy_(1, i, m.lin(x).detach())
    m.cache[:, i[:2]] = x.detach()[:, :2]
    return (m.lin(x) * m.cache).sum()


@program
def returned_buffer(m, x):
    m.cache.add_(x.detach())
    return (m.lin(x) * m.cache).sum(), m.cache, m.cache.view(-1), m.cache[0]


@program
def copy_under_no_grad(m, x):
    y = m.lin(x)
    with torch.no_grad():
        m.mean.copy_(y[0, 0])
    return (y * m.mean).sum()


@program
def views_of_one_value(m, x):
    y = m.lin(x)
    y.mul_(2)
    y[:, :3] = 0
    y.masked_fill_(y > 1, 0.5)
    z = y.view(2, -1)
    z.add_(1)
    y.diagonal(dim1=-2, dim2=-1).fill_(0)
    y[0, :, None].squeeze(1).transpose(0, 1).mul_(2)
    F.relu_(y)
    return y.sum() + z.pow(2).sum()


@program
def pieces_of_one_value(m, x):
    y = m.lin(x).detach().clone()
    a, b = y.chunk(2, -1)
    a.mul_(2)
    y.unbind(1)[-1].add_(3)
    c, d, e = y.split([4, 4, 8], -1)
    e.zero_()
    d.copy_(c)
    return (m.lin(x) * y).sum() + (b * m.lin(x)[..., :8]).sum()


@program
def shape_in_place(m, x):
    y = m.lin(x)
    first = y[0]
    y.unsqueeze_(1)
    y.transpose_(0, 1)
    y.mul_(3)
    z = y + 1
    y.squeeze_(0)
    y.add_(1)
    return (y * 2).sum() + z.pow(2).sum() + first.sum()


@program
def view_read_with_and_without_grad(m, x):
    y = m.lin(x)
    z = y.view(-1)
    y.mul_(2)
    with torch.no_grad():
        t = z * 2
    return (z * t).sum()


@program
def scatter(m, x):
    y = m.lin(x)
    out = torch.zeros_like(y)
    i = torch.arange(y.shape[1]).flip(0)
    out[:, i] += y
    out.index_add_(1, i, y)
    out.scatter_add_(1, i[None, :, None].expand_as(y), y)
    return out.pow(2).sum()


@program
def dtypes_in_place(m, x):
    low = torch.zeros(2, 8, D, dtype=torch.bfloat16)
    low.copy_(x.detach())
    low.add_(x.detach())
    whole = torch.arange(8)
    whole //= 2
    whole <<= 1
    y = m.lin(x).clone()
    y.add_(low)
    y[..., 0].copy_(whole)
    return (y * y).sum()


@program
def draws_in_place(m, x):
    u = torch.empty(2, 8, D).uniform_(-1, 1)
    n = torch.empty(D).normal_(0, 2)
    b = torch.empty(2, 8, D).bernoulli_(0.3)
    r = torch.empty(D).random_(0, 5)
    return (m.lin(x) * u * n * b * r).sum()


@program
def literal_changed(m, x):
    t = torch.tensor([1.0, 2.0])
    t.add_(1)
    t[0] = 7
    return (m.lin(x) * t.sum()).sum()


@program
def no_functional_form(m, x):
    z = torch.empty_like(x.detach())
    torch.add(x.detach(), 1, out=z)
    first = z[0]
    torch._foreach_add_([z], 1.0)
    return (m.lin(x) * z).sum() + first.sum()


# ---- grad mode, autocast, random draws


@program
def no_grad(m, x):
    with torch.no_grad():
        t = m.lin(x).pow(2)
    return (m.lin(x) * t * m.lin.weight.data.sum()).sum()


@program
def autocast(m, x):
    with torch.autocast("cpu", torch.bfloat16):
        y = m.lin(x)
        z = torch.zeros(2, 8, 8)
        z.baddbmm_(x, x.transpose(1, 2))
        y.pow_(2).add_(1)
        with torch.autocast("cpu", enabled=False):
            w = m.lin(x)
    return z.sum() + y.float().sum() + w.sum()


@program
def draws(m, x):
    noise = torch.randn_like(x) * torch.rand(x.shape[0], 1, 1)
    return F.dropout(m.lin(x) + noise, 0.5).pow(2).sum()


@program
def kernel_choice(m, x):
    q = m.lin(x).view(2, -1, 2, 8).transpose(1, 2)
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, q, q, is_causal=True).pow(2).sum()


# ---- regions


@program
def checkpointed(m, x):
    def block(y, scale):
        inner = checkpoint(lambda z: F.dropout(m.lin(z), 0.5), y.sin(), use_reentrant=False)
        return Clip.apply(inner, 0.5) * scale

    x = checkpoint(block, x, scale=3.0, use_reentrant=False)
    return checkpoint(block, x, 2.0, use_reentrant=False).sum()


@program
def nested_compile(m, x):
    return REGION(m.lin, REGION(m.lin, x)).sum()


REGION = torch.compiler.nested_compile_region(lambda lin, x: F.gelu(lin(x)))


class Clip(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, limit):
        ctx.limit = limit
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return (grad * x.cos()).clamp(-ctx.limit, ctx.limit) * 3.0, None


@program
def custom_function_before_residual(m, x):
    return (x + Clip.apply(m.lin(x), 0.5)).pow(2).sum()


@program
def tensor_hook(m, x):
    y = m.lin(x)
    y.register_hook(lambda g: g * 2)
    return y.pow(2).sum()


@program
def vmap(m, x):
    return torch.vmap(lambda y: m.lin(y).sin())(x).sum()


@program
def functional_grad(m, x):
    return torch.func.grad(lambda y: y.pow(3).sum())(m.lin(x)).sum()


@program
def cond(m, x):
    return torch.cond(x.sum() > 0, lambda y: (y.sin(),), lambda y: (y.cos(),), (m.lin(x),))[0].sum()


@program
def loop(m, x):
    _, z = while_loop(lambda i, z: i < 3, lambda i, z: (i + 1, z * 0.9), (torch.tensor(0), m.lin(x).detach()))
    return (m.lin(x) * z).sum()


@program
def scan(m, x):
    return associative_scan(lambda a, b: a * 0.5 + b, m.lin(x), dim=1, combine_mode="generic").pow(2).sum()


# ---- results


@program
def results(m, x):
    y = m.lin(x)
    return y.sum(), {"aliases": [y[:, 1:], x.view(-1)], "plain": (None, 3, y.detach())}
