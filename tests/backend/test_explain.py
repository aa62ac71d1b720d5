"""explain and verify: no processes, golden text, errors that can be seen."""

import expecttest
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

import sp_compile


class Decoder(nn.Module):
    def __init__(self, heads=4):
        super().__init__()
        torch.manual_seed(0)
        self.heads = heads
        self.embed, self.head = nn.Embedding(32, 16), nn.Linear(16, 32)
        self.qkv = nn.Linear(16, 48, bias=False)

    def forward(self, ids, labels):
        x = self.embed(ids)
        for _ in range(2):
            q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
            x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def text(length):
    torch.manual_seed(0)
    return torch.randint(0, 32, (1, length)), torch.randint(0, 32, (1, length))


class Goldens(expecttest.TestCase):
    def test_explain(self):
        self.assertExpectedInline(
            str(sp_compile.explain(Decoder(), *text(64), sp=4)),
            """\
100% of the FLOPs and 100% of the activations (results that need a gradient) are on shards; a rank computes 25% of the FLOPs
4 ranks; the sequence is ids dim 1, labels dim 1

Sequences
  64 positions of ids dim 1, labels dim 1, with attention in 2 ops, 100% of the FLOPs

Constraints
  sequence of 64: 16 positions a rank
  4 ranks divide the 4 heads (dim 1)

Rewrites
  nodes  pass             at                                                        rewrite and reason
-------  ---------------  --------------------------------------------------------  --------------------------------------------------------
      1  mean             backend/test_explain.py:26: return F.cross_entropy(se...  the sum over all ranks, divided by the count of the full
                                                                                    sequence
      2  ulysses          backend/test_explain.py:25: x = x + F.scaled_dot_prod...  3 operands in 1 all-to-all, the result in 1
      1  reduce_partials  backend/test_explain.py:26: return F.cross_entropy(se...  adds the partial sums of the ranks

Attention, predicted
2 x batch 1, 4 heads x 4, 64 positions, causal
attention    U x R    layout           forward ms    backward ms    total ms    memory MiB  why
-----------  -------  -------------  ------------  -------------  ----------  ------------  ---------------
ulysses      4 x 1    contiguous            0.707          0.710       1.417         0.008  chosen: fastest
gather       1 x 4    contiguous            0.616          0.934       1.550         0.017  +9.4%
hybrid       2 x 2    contiguous            1.211          1.523       2.734         0.027  +93.0%
ring         1 x 4    contiguous            1.619          1.946       3.565         0.027  +151.6%
gather       1 x 4    zigzag, moved         1.819          2.434       4.253         0.017  +200.1%
hybrid       2 x 2    zigzag, moved         2.019          2.331       4.351         0.027  +207.1%
ring         1 x 4    zigzag, moved         2.627          2.954       5.581         0.027  +293.9%

Collectives, bytes that one rank sends
  times  exchange     local shape                                     sent forward    sent backward    at
-------  -----------  ----------------------------------------------  --------------  ---------------  --------------------------------------------------------
      1  shard        1 x 16                                          0 B             0 B              backend/test_explain.py:22: x = self.embed(ids)
      1  reduce_grad  32 x 16, 48 x 16, 32 x 16, ... (4 tensors)      0 B             10.7 KiB         the parameters
      2  all_to_all   1 x 4 x 16 x 4, 1 x 4 x 16 x 4, 1 x 4 x 16 x 4  2.2 KiB         2.2 KiB          backend/test_explain.py:25: x = x + F.scaled_dot_prod...
      2  all_to_all   1 x 1 x 64 x 4                                  768 B           768 B            backend/test_explain.py:25: x = x + F.scaled_dot_prod...
      1  shard        16                                              0 B             0 B              backend/test_explain.py:26: return F.cross_entropy(se...
      1  all_reduce                                                   6 B             0 B              backend/test_explain.py:26: return F.cross_entropy(se...
         total                                                        6.0 KiB         16.7 KiB""",
        )

    def test_explain_a_ring(self):
        report = sp_compile.explain(Decoder(heads=2), *text(10), sp=4, attention="ring")
        self.assertExpectedInline(
            str(report),
            """\
100% of the FLOPs and 100% of the activations (results that need a gradient) are on shards; a rank computes 30% of the FLOPs
4 ranks; the sequence is ids dim 1, labels dim 1
Warning: 17% of the FLOPs of a rank are for padding. Use fewer ranks, or lengths that 4 ranks divide.

Sequences
  10 positions of ids dim 1, labels dim 1, with attention in 2 ops, 100% of the FLOPs

Constraints
  sequence of 10: 3 positions a rank, padded to 4 * 3

Rewrites
  nodes  pass             at                                                        rewrite and reason
-------  ---------------  --------------------------------------------------------  --------------------------------------------------------
      1  mean             backend/test_explain.py:26: return F.cross_entropy(se...  the sum over all ranks, divided by the count of the full
                                                                                    sequence
      2  ring             backend/test_explain.py:25: x = x + F.scaled_dot_prod...  3 shifts of keys and values forward, at most 7 backward
      1  reduce_partials  backend/test_explain.py:26: return F.cross_entropy(se...  adds the partial sums of the ranks

Attention, predicted
2 x batch 1, 2 heads x 8, 10 positions, causal
attention    U x R    layout           forward ms    backward ms    total ms    memory MiB  why
-----------  -------  -------------  ------------  -------------  ----------  ------------  -----------------------------------
ring         1 x 4    contiguous            1.603          1.907       3.510         0.005  chosen: requested
gather       1 x 4    contiguous            0.603          0.906       1.509         0.003  -57.0%
hybrid       2 x 2    contiguous            1.202          1.503       2.705         0.005  -22.9%
gather       1 x 4    zigzag, moved         1.803          2.406       4.209         0.003  +19.9%
hybrid       2 x 2    zigzag, moved         2.003          2.305       4.308         0.005  +22.7%
ring         1 x 4    zigzag, moved         2.604          2.909       5.513         0.005  +57.1%
ulysses      4 x 1    contiguous                                                            4 ranks do not divide 2 query heads

Collectives, bytes that one rank sends
  times  exchange        local shape                                  sent forward    sent backward    at
-------  --------------  -------------------------------------------  --------------  ---------------  --------------------------------------------------------
      1  shard           1 x 3                                        0 B             0 B              backend/test_explain.py:22: x = self.embed(ids)
      1  reduce_grad     32 x 16, 48 x 16, 32 x 16, ... (4 tensors)   0 B             10.7 KiB         the parameters
      2  ring_attention  1 x 2 x 3 x 8, 1 x 2 x 3 x 8, 1 x 2 x 3 x 8  1.1 KiB         2.2 KiB          backend/test_explain.py:25: x = x + F.scaled_dot_prod...
      1  shard           3                                            0 B             0 B              backend/test_explain.py:26: return F.cross_entropy(se...
      1  all_reduce                                                   6 B             0 B              backend/test_explain.py:26: return F.cross_entropy(se...
         total                                                        2.3 KiB         15.2 KiB""",
        )


def test_explain_needs_no_processes_for_64_ranks():
    report = sp_compile.explain(Decoder(heads=16), *text(64), sp=64)
    assert not torch.distributed.is_initialized()
    assert report.n == 64
    assert not report.fallbacks, "64 ranks do not divide 16 heads, which hybrid attention does not need"
    assert report.attention[0].chosen.kind in ("hybrid", "ring", "gather")


def test_bytes_of_ulysses_are_those_of_the_formula():
    """(n-1)/n of q, k, v and of the output: 2 Hq + 2 Hkv heads of S/n x D."""
    n, length, width, size = 4, 64, 16, 4
    report = sp_compile.explain(Decoder(), *text(length), sp=n)
    sent = sum(e.forward for e in report.exchanges if e.op == "all_to_all")
    layers, tensors = 2, 4
    assert sent == layers * tensors * (n - 1) * (length // n) * width * size // n
    assert report.count("all_to_all") == 2 * layers


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize(("n", "length"), [(1, 8), (2, 9), (3, 8), (4, 3)])
def test_verify(n, length):
    report = sp_compile.verify(Decoder().double(), *text(length), sp=n)
    assert report.worst < 1e-12
    assert len(report.errors) == 1 + len(list(Decoder().parameters()))


def test_verify_sees_a_wrong_program(monkeypatch):
    """A helper that cannot fail proves nothing: break an exchange and look."""
    from sp_compile.lowering.comm.communicator import Communicator

    monkeypatch.setattr(Communicator, "all_to_all", lambda self, x, n, group: x)
    assert sp_compile.verify(Decoder().double(), *text(8), sp=2).worst > 1e-3


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize(("attention", "ulysses"), [("ring", 1), ("hybrid", 2), ("gather", 1)])
def test_bytes_of_the_other_strategies(attention, ulysses):
    """Keys and values: (R-1) shards in a ring or a gather of R; hybrid: also (U-1)/U of q, k, v and of the output."""
    n, length, size, heads, width = 4, 64, 4, 4, 4
    report = sp_compile.explain(Decoder(), *text(length), sp=n, attention=attention, layout="contiguous")
    head = length // n * width * size
    ring = n // ulysses
    keys = 2 * heads * head
    others = (ulysses - 1) * 4 * heads * head // ulysses
    sent = [e for e in report.exchanges if e.op.endswith("_attention")]
    assert [e.forward for e in sent] == [others + (ring - 1) * keys] * 2
    home = {"ring": ring, "hybrid": ring, "gather": n - 1}[attention]
    if any("scatter" in str(d.chosen.ring_grads) for d in report.attention):
        home = ring - 1
    assert [e.backward for e in sent] == [others + (ring - 1) * keys + home * keys] * 2


class Flexible(nn.Module):
    """Attention by torch's `flex_attention`, of scores with a slope."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 48)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (2, 8)).transpose(1, 2) for y in self.inner(x).chunk(3, -1))
        y = flex_attention(q, k, v, score_mod=lambda score, b, h, i, j: score + 0.1 * (j - i))
        return (y.transpose(1, 2).flatten(2) + x).pow(2).mean()


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_flex_attention_that_trains_is_looked_at_without_a_gpu(device: str) -> None:
    """torch refuses it on both; on a CPU its numbers are compared as well."""
    with torch.device(device):
        model, x = Flexible().double(), torch.randn(2, 12, 16, dtype=torch.float64)
    report = sp_compile.explain(model, x, sp=2, attention="ring", memory=True)
    assert "ring_attention" in str(report)
    assert not report.fallbacks
    assert report.step is not None
    if device == "cpu":
        assert not sp_compile.verify(model, x, sp=3, attention="ring").fallbacks
    with pytest.raises((NotImplementedError, ValueError), match=r"(?i)flexattention"):
        model(x)


class Tempered(Decoder):
    """Logits that an operator which autocast knows changes in place."""

    def forward(self, ids, labels):
        with torch.autocast("cpu", torch.bfloat16):
            q = self.qkv(self.embed(ids))[..., :16].unflatten(-1, (4, 4)).transpose(1, 2)
            z = self.head(F.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2))
            z.exp_()
            return F.cross_entropy(z[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def test_a_device_that_knows_no_autocast():
    """A model on "meta" is looked at within autocast, too, in tiles and without."""
    with torch.device("meta"):
        model, given = Tempered(), [torch.zeros(1, 64, dtype=torch.int64) for _ in range(2)]
    for tiles in ("never", 4):
        found = sp_compile.explain(model, *given, sp=2, tiles=tiles)
        assert bool(found.tiled) == (tiles == 4)
