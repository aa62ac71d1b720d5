"""Golden graphs of windows before they are split: nothing is longer than its sequence. EXPECTTEST_ACCEPT=1 rewrites."""

import expecttest
import torch
import torch.nn.functional as F
from support.golden import captured, show

from sp_compile.passes.canonical.canonicalize import Canonicalize

KERNEL = torch.ones(4, 1, 3)


def canonical(fn, *args):
    gm = captured(fn, *args)
    Canonicalize()(gm)
    return show(gm)


class Canonical(expecttest.TestCase):
    """Nothing is longer than its sequence any more."""

    def test_a_convolution_that_is_cut(self):
        found = canonical(lambda x: F.conv1d(x, KERNEL, padding=2, groups=4)[..., : x.shape[-1]], torch.randn(1, 4, 8))
        self.assertExpectedInline(
            found,
            """\
lifted_tensor_0: [4, 1, 3] = get_attr
x: [1, 4, 8] = placeholder
conv_along_default: [1, 4, 8] = sp.conv_along(x, lifted_tensor_0, None, 2, 2, 0, [1], [2], [1], 4)
return (conv_along_default,)""",
        )

    def test_a_padding_that_is_convolved_and_cut(self):
        found = canonical(lambda x: F.conv1d(F.pad(x, (2, 1)), KERNEL, groups=4)[..., :-1], torch.randn(1, 4, 8))
        self.assertExpectedInline(
            found,
            """\
lifted_tensor_0: [4, 1, 3] = get_attr
x: [1, 4, 8] = placeholder
conv_along_default_1: [1, 4, 8] = sp.conv_along(x, lifted_tensor_0, None, 2, 2, 0, [1], [0], [1], 4)
return (conv_along_default_1,)""",
        )

    def test_a_padding_with_several_readers(self):
        def fn(x):
            y = F.pad(x, (2, 0))
            return y[..., :-2] + F.avg_pool1d(y, 3, 1) + y.unfold(-1, 3, 1).amax(-1)

        self.assertExpectedInline(
            canonical(fn, torch.randn(1, 4, 8)),
            """\
x: [1, 4, 8] = placeholder
shift_default: [1, 4, 8] = sp.shift(x, 2, 2, -2, 0)
avg_pool1d_default: [1, 4, 8] = sp.avg_pool1d(x, 2, 0, 3, 1)
add: [1, 4, 8] = aten.add.Tensor(shift_default, avg_pool1d_default)
unfold_default: [1, 4, 8, 3] = sp.unfold(x, 2, 2, 0, 0, 3, 1)
amax: [1, 4, 8] = aten.amax(unfold_default, [-1])
add_1: [1, 4, 8] = aten.add.Tensor(add, amax)
return (add_1,)""",
        )

    def test_a_padding_that_something_else_reads_stays(self):
        def fn(x):
            y = F.pad(x, (2, 0))
            return y[..., :-2] + y.sum()

        self.assertExpectedInline(
            canonical(fn, torch.randn(1, 4, 8)),
            """\
x: [1, 4, 8] = placeholder
pad: [1, 4, 10] = aten.pad(x, [2, 0])
slice_1: [1, 4, 8] = aten.slice.Tensor(pad, 2, 0, -2)
sum_1: [] = aten.sum(pad)
add: [1, 4, 8] = aten.add.Tensor(slice_1, sum_1)
return (add,)""",
        )

    def test_a_pool_takes_the_padding_value(self):
        found = canonical(lambda x: F.max_pool1d(F.pad(x, (2, 0), value=-1.0), 3, 1), torch.randn(1, 4, 8))
        self.assertExpectedInline(
            found,
            """\
x: [1, 4, 8] = placeholder
max_pool1d_default: [1, 4, 8] = sp.max_pool1d(x, 2, 0, -1.0, 3, 1, 1)
return (max_pool1d_default,)""",
        )

    def test_other_constants_than_its_own_stay(self):
        found = canonical(lambda x: F.conv1d(F.pad(x, (2, 0), value=1.0), KERNEL, groups=4), torch.randn(1, 4, 8))
        self.assertExpectedInline(
            found,
            """\
lifted_tensor_0: [4, 1, 3] = get_attr
x: [1, 4, 8] = placeholder
pad: [1, 4, 10] = aten.pad(x, [2, 0], constant, 1.0)
conv1d: [1, 4, 8] = aten.conv1d(pad, lifted_tensor_0, None, [1], [0], [1], 4)
return (conv1d,)""",
        )

    def test_constants_joined_to_a_slice(self):
        found = canonical(lambda x: torch.cat([torch.zeros_like(x[:, :2]), x[:, :-2]], 1), torch.randn(1, 8, 4))
        self.assertExpectedInline(
            found,
            """\
x: [1, 8, 4] = placeholder
shift_default: [1, 8, 4] = sp.shift(x, 1, 2, -2, 0)
return (shift_default,)""",
        )

    def test_constants_joined_and_convolved(self):
        found = canonical(
            lambda x: F.conv1d(torch.cat([x.new_zeros(1, 4, 2), x], -1), KERNEL, groups=4), torch.randn(1, 4, 8)
        )
        self.assertExpectedInline(
            found,
            """\
lifted_tensor_0: [4, 1, 3] = get_attr
x: [1, 4, 8] = placeholder
conv_along_default: [1, 4, 8] = sp.conv_along(x, lifted_tensor_0, None, 2, 2, 0, [1], [0], [1], 4)
return (conv_along_default,)""",
        )
