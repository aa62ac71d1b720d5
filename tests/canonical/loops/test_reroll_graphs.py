"""Golden graphs of loops that have become scans. EXPECTTEST_ACCEPT=1 rewrites them."""

from __future__ import annotations

from expecttest import assert_expected_inline
from support.golden import show
from support.variants.loops import LOOPS, inputs, rolled


def test_golden() -> None:
    assert_expected_inline(
        show(rolled(*(LOOPS["mamba"][0], inputs("mamba")))),
        """\
x: [2, 3, 6, 5] = placeholder
y: [2, 3, 6, 5] = placeholder
z: [2, 6, 5] = placeholder
linear_scan_default: [2, 3, 6, 5] = sp.linear_scan(x, y, None, 2, False)
unsqueeze_default: [2, 6, 5, 1] = aten.unsqueeze(z, 3)
permute_default: [2, 6, 3, 5] = aten.permute(linear_scan_default, [0, 2, 1, 3])
matmul_default: [2, 6, 3, 1] = aten.matmul(permute_default, unsqueeze_default)
select_int: [2, 6, 3] = aten.select.int(matmul_default, 3, 0)
permute_default_1: [2, 3, 6] = aten.permute(select_int, [0, 2, 1])
select_int_1: [2, 3, 5] = aten.select.int(linear_scan_default, 2, 5)
return (permute_default_1, select_int_1)""",
    )


def test_golden_of_a_matrix_state() -> None:
    name = "linear attention by einsum"
    assert_expected_inline(
        show(rolled(LOOPS[name][0], inputs(name))),
        """\
x: [2, 6, 4] = placeholder
y: [2, 6, 4] = placeholder
z: [2, 6, 3] = placeholder
einsum_default: [2, 6, 4, 3] = aten.einsum(bak,bav->bakv, [y, z])
full_default: [2, 6, 4, 3] = aten.full([2, 6, 4, 3], 0.9, dtype=float64, device=cpu)
linear_scan_default: [2, 6, 4, 3] = sp.linear_scan(full_default, einsum_default, None, 1, False)
einsum_default_1: [2, 6, 3] = aten.einsum(bak,bakv->bav, [x, linear_scan_default])
return (einsum_default_1,)""",
    )


def test_golden_of_gates() -> None:
    name = "gates of one product"
    assert_expected_inline(
        show(rolled(LOOPS[name][0], inputs(name))),
        """\
x: [2, 6, 3] = placeholder
y: [9, 3] = placeholder
linear_default: [2, 6, 9] = aten.linear(x, y)
chunk_default:  = aten.chunk(linear_default, 3, 2)
getitem_24: [2, 6, 3] = getitem(chunk_default, 0)
getitem_25: [2, 6, 3] = getitem(chunk_default, 1)
getitem_26: [2, 6, 3] = getitem(chunk_default, 2)
sigmoid_default: [2, 6, 3] = aten.sigmoid(getitem_25)
tanh_default: [2, 6, 3] = aten.tanh(getitem_26)
mul_tensor: [2, 6, 3] = aten.mul.Tensor(sigmoid_default, tanh_default)
sigmoid_default_1: [2, 6, 3] = aten.sigmoid(getitem_24)
linear_scan_default: [2, 6, 3] = sp.linear_scan(sigmoid_default_1, mul_tensor, None, 1, False)
layer_norm_default: [2, 6, 3] = aten.layer_norm(linear_scan_default, [3], None, None, 1e-05, False)
softmax_int: [2, 6, 3] = aten.softmax.int(layer_norm_default, 2)
return (softmax_int,)""",
    )


def test_golden_of_a_first_step() -> None:
    assert_expected_inline(
        show(rolled(LOOPS["min GRU"][0], inputs("min GRU"))),
        """\
x: [2, 6, 3] = placeholder
y: [2, 6, 3] = placeholder
select_int: [2, 3] = aten.select.int(x, 1, 0)
select_int_1: [2, 3] = aten.select.int(y, 1, 0)
sigmoid: [2, 3] = aten.sigmoid(select_int_1)
mul: [2, 3] = aten.mul.Tensor(sigmoid, select_int)
slice_tensor: [2, 5, 3] = aten.slice.Tensor(y, 1, 1, 6)
sigmoid_default: [2, 5, 3] = aten.sigmoid(slice_tensor)
rsub_scalar: [2, 5, 3] = aten.rsub.Scalar(sigmoid_default, 1)
slice_tensor_1: [2, 5, 3] = aten.slice.Tensor(x, 1, 1, 6)
mul_tensor: [2, 5, 3] = aten.mul.Tensor(sigmoid_default, slice_tensor_1)
linear_scan_default: [2, 5, 3] = sp.linear_scan(rsub_scalar, mul_tensor, mul, 1, False)
unsqueeze_default: [2, 1, 3] = aten.unsqueeze(mul, 1)
cat_default: [2, 6, 3] = aten.cat([unsqueeze_default, linear_scan_default], 1)
return (cat_default,)""",
    )


def test_golden_of_a_loop_in_reverse() -> None:
    assert_expected_inline(
        show(rolled(LOOPS["backwards"][0], inputs("backwards"))),
        """\
x: [2, 6, 3] = placeholder
y: [2, 3] = placeholder
pow_tensor_scalar: [2, 6, 3] = aten.pow.Tensor_Scalar(x, 2)
linear_scan_default: [2, 6, 3] = sp.linear_scan(x, pow_tensor_scalar, y, 1, True)
return (linear_scan_default,)""",
    )
