"""Golden graphs of each pass, run directly on an exported graph. EXPECTTEST_ACCEPT=1 rewrites them."""

import expecttest
import torch
import torch.nn.functional as F
from support.decoders import Decoder, decode
from support.golden import captured, show

import sp_compile
from sp_compile.lowering.base.ranks import Ranks
from sp_compile.lowering.comm.simulate import SIMULATED_GROUP
from sp_compile.passes.canonical.canonicalize import Canonicalize
from sp_compile.passes.context import PassContext
from sp_compile.passes.localize.localize import Localize
from sp_compile.passes.localize.validate_shapes import validate
from sp_compile.passes.strategies.attention.expand_heads import ExpandHeads
from sp_compile.passes.strategies.attention.ulysses_strategy import AttendWithUlysses
from sp_compile.passes.strategies.gather_demands import GatherOperands
from sp_compile.passes.strategies.random_draws import BroadcastDraws
from sp_compile.passes.strategies.reduce_demands import DecomposeMeans, ReducePartials
from sp_compile.passes.strategies.select_row import SelectRow

TWO = Ranks(2, SIMULATED_GROUP)
SEQUENCE = {"seq_dims": {"x": 1}}


class Goldens(expecttest.TestCase):
    def test_canonicalize_pulls_repeated_heads_into_attention(self):
        def attention(x, y):
            repeated = y[:, :, None].expand(1, 2, 2, 8, 4).reshape(1, 4, 8, 4)
            return F.scaled_dot_product_attention(x, repeated, repeated, is_causal=True)

        gm = captured(attention, torch.randn(1, 4, 8, 4), torch.randn(1, 2, 8, 4))
        Canonicalize()(gm)
        self.assertExpectedInline(
            show(gm),
            """\
x: [1, 4, 8, 4] = placeholder
y: [1, 2, 8, 4] = placeholder
scaled_dot_product_attention: [1, 4, 8, 4] = aten.scaled_dot_product_attention(x, y, y, None, 0.0, True, enable_gqa=True)
return (scaled_dot_product_attention,)""",
        )

    def test_canonicalize_expands_implicit_conversions(self):
        def implicit(x, y):
            z = torch.cat([x.new_zeros(1, 2), y.type_as(x)]).squeeze()
            return torch.cat([torch.empty(0), z]) + x.new_full((2,), 3)

        gm = captured(implicit, torch.randn(2, 2), torch.ones(3, 2).long())
        Canonicalize()(gm)
        self.assertExpectedInline(
            show(gm),
            """\
x: [2, 2] = placeholder
y: [3, 2] = placeholder
new_zeros: [1, 2] = aten.zeros([1, 2], dtype=float32, device=cpu)
type_as: [3, 2] = aten.to.dtype(y, float32)
cat: [4, 2] = aten.cat([new_zeros, type_as])
squeeze: [4, 2] = aten.squeeze.dims(cat, [])
cat_1: [4, 2] = aten.clone(squeeze)
new_full: [2] = aten.full([2], 3, dtype=float32, device=cpu)
add: [4, 2] = aten.add.Tensor(cat_1, new_full)
return (add,)""",
        )

    def test_empty_vectors_of_cats(self):
        """Torch ignores them, except their dtype, and they have no dim 1."""
        x = torch.randn(2, 3)
        for dtype in (torch.float32, torch.float64):
            gm = captured(lambda x: torch.cat([x.new_empty(0, dtype=dtype), x, x.exp()], 1), x)  # noqa: B023
            Canonicalize()(gm)
            torch.testing.assert_close(gm(x), torch.cat([x, x.exp()], 1).to(dtype))

    def test_casts_keep_their_copies(self):
        gm = captured(lambda x, y: torch.ops.aten.to.other(x, y, False, True), torch.ones(2), torch.ones(3))
        Canonicalize()(gm)
        self.assertExpectedInline(
            show(gm),
            """\
x: [2] = placeholder
y: [3] = placeholder
to: [2] = aten.to.dtype(x, float32, copy=True)
return (to,)""",
        )

    def test_expand_heads_after_the_exchange(self):
        def attention(x, y, z):
            repeated = (y * 2)[:, :, None].expand(1, 2, 2, 8, 4).reshape(1, 4, 8, 4)
            return F.scaled_dot_product_attention(x * 2, repeated, repeated, z)

        gm = captured(attention, torch.randn(1, 4, 8, 4), torch.randn(1, 2, 8, 4), torch.ones(8, 8).bool())
        for rewrite in (Canonicalize(), AttendWithUlysses(TWO), ExpandHeads(TWO, except_on=()), GatherOperands(TWO)):
            rewrite(gm)
        assert not PassContext.of(TWO).plan(gm).demands
        self.assertExpectedInline(
            show(gm),
            """\
x: [1, 4, 8, 4] = placeholder
y: [1, 2, 8, 4] = placeholder
z: [8, 8] = placeholder
mul: [1, 2, 8, 4] = aten.mul.Tensor(y, 2)
mul_1: [1, 4, 8, 4] = aten.mul.Tensor(x, 2)
all_to_all_default:  = sp.all_to_all([mul_1, mul], 1, [1, 2, 0, 2], 2, [1, 8, 0, 8], 2, sim)
getitem: [1, 4, 8, 4] = getitem(all_to_all_default, 0)
getitem_1: [1, 2, 8, 4] = getitem(all_to_all_default, 1)
unsqueeze_default: [1, 2, 1, 8, 4] = aten.unsqueeze(getitem_1, 2)
expand_default: [1, 2, 2, 8, 4] = aten.expand(unsqueeze_default, [1, 2, 2, 8, 4])
reshape_default_2: [1, 4, 8, 4] = aten.reshape(expand_default, [1, 4, 8, 4])
unsqueeze_default_1: [1, 2, 1, 8, 4] = aten.unsqueeze(getitem_1, 2)
expand_default_1: [1, 2, 2, 8, 4] = aten.expand(unsqueeze_default_1, [1, 2, 2, 8, 4])
reshape_default_3: [1, 4, 8, 4] = aten.reshape(expand_default_1, [1, 4, 8, 4])
scaled_dot_product_attention: [1, 4, 8, 4] = aten.scaled_dot_product_attention(getitem, reshape_default_2, reshape_default_3, z, enable_gqa=False)
all_to_all_default_1:  = sp.all_to_all([scaled_dot_product_attention], 2, [1, 8, 0, 8], 1, [1, 2, 0, 2], 2, sim)
getitem_2: [1, 4, 8, 4] = getitem(all_to_all_default_1, 0)
unshard_default: [1, 4, 8, 4] = sp.unshard(getitem_2, 2, [1, 8, 0, 8], 2, sim)
return (unshard_default,)""",
        )

    def test_ulysses(self):
        gm = captured(decode, torch.randn(1, 8, 16))
        AttendWithUlysses(TWO)(gm)
        self.assertExpectedInline(
            show(gm),
            """\
x: [1, 8, 16] = placeholder
mul: [1, 8, 16] = aten.mul.Tensor(x, 2)
unflatten: [1, 8, 4, 4] = aten.unflatten.int(mul, -1, [4, 4])
transpose: [1, 4, 8, 4] = aten.transpose.int(unflatten, 1, 2)
all_to_all_default:  = sp.all_to_all([transpose], 1, [1, 4, 0, 4], 2, [1, 8, 0, 8], 2, sim)
getitem: [1, 4, 8, 4] = getitem(all_to_all_default, 0)
scaled_dot_product_attention: [1, 4, 8, 4] = aten.scaled_dot_product_attention(getitem, getitem, getitem, None, 0.0, True)
all_to_all_default_1:  = sp.all_to_all([scaled_dot_product_attention], 2, [1, 8, 0, 8], 1, [1, 4, 0, 4], 2, sim)
getitem_1: [1, 4, 8, 4] = getitem(all_to_all_default_1, 0)
transpose_1: [1, 8, 4, 4] = aten.transpose.int(getitem_1, 1, 2)
flatten: [1, 8, 16] = aten.flatten.using_ints(transpose_1, 2)
return (flatten,)""",
        )

    def test_gather_ops_without_a_sharding_rule(self):
        gm = captured(lambda x: (x * 2).cumsum(1) + 1, torch.randn(1, 8, 4))
        GatherOperands(TWO, **SEQUENCE)(gm)
        self.assertExpectedInline(
            show(gm),
            """\
x: [1, 8, 4] = placeholder
mul: [1, 8, 4] = aten.mul.Tensor(x, 2)
unshard_default: [1, 8, 4] = sp.unshard(mul, 1, [1, 8, 0, 8], 2, sim)
cumsum: [1, 8, 4] = aten.cumsum(unshard_default, 1)
add: [1, 8, 4] = aten.add.Tensor(cumsum, 1)
unshard_default_1: [1, 8, 4] = sp.unshard(add, 1, [1, 8, 0, 8], 2, sim)
return (unshard_default_1,)""",
        )

    def test_pick_one_position(self):
        gm = captured(lambda x: (x * 2)[:, -1] + 1, torch.randn(1, 7, 4))
        SelectRow(TWO, **SEQUENCE)(gm)
        self.assertExpectedInline(
            show(gm),
            """\
x: [1, 7, 4] = placeholder
mul: [1, 7, 4] = aten.mul.Tensor(x, 2)
arange_default: [7] = aten.arange(7, device=cpu)
eq_scalar: [7] = aten.eq.Scalar(arange_default, 6)
reshape_default: [1, 7, 1] = aten.reshape(eq_scalar, [1, 7, 1])
where_scalar_other: [1, 7, 4] = aten.where.ScalarOther(reshape_default, mul, 0)
sum_dim_int_list: [1, 4] = aten.sum.dim_IntList(where_scalar_other, [1], dtype=float32)
add: [1, 4] = aten.add.Tensor(sum_dim_int_list, 1)
return (add,)""",
        )

    def test_gathered_twice_when_used_in_two_ways(self):
        """A gathered operand of sharded ops has partial gradients; the same value in replicated ops must not."""
        gm = captured(lambda x: (x * 2).cumsum(1) * (x * 2), torch.randn(1, 8, 4))
        gm.graph.lint()
        product = next(n for n in gm.graph.nodes if n.name == "mul")
        with gm.graph.inserting_after(product):
            args = (product, 1, [1, 8, 0, 8], 2, SIMULATED_GROUP)
            summand = gm.graph.call_function(torch.ops.sp.all_gather.default, args)
            summand.meta["val"] = product.meta["val"]
        next(n for n in gm.graph.nodes if n.name == "cumsum").replace_input_with(product, summand)
        GatherOperands(TWO, **SEQUENCE)(gm)
        gm.graph.eliminate_dead_code()
        self.assertExpectedInline(
            show(gm),
            """\
x: [1, 8, 4] = placeholder
mul: [1, 8, 4] = aten.mul.Tensor(x, 2)
unshard_default: [1, 8, 4] = sp.unshard(mul, 1, [1, 8, 0, 8], 2, sim)
cumsum: [1, 8, 4] = aten.cumsum(unshard_default, 1)
mul_1: [1, 8, 4] = aten.mul.Tensor(x, 2)
mul_2: [1, 8, 4] = aten.mul.Tensor(cumsum, mul_1)
unshard_default_1: [1, 8, 4] = sp.unshard(mul_2, 1, [1, 8, 0, 8], 2, sim)
return (unshard_default_1,)""",
        )

    def test_means_become_sums(self):
        gm = captured(lambda x: (x * 2).mean(1), torch.randn(1, 8, 4))
        DecomposeMeans(TWO, **SEQUENCE)(gm)
        self.assertExpectedInline(
            show(gm),
            """\
x: [1, 8, 4] = placeholder
mul: [1, 8, 4] = aten.mul.Tensor(x, 2)
sum_dim_int_list: [1, 4] = aten.sum.dim_IntList(mul, [1], False)
div_tensor: [1, 4] = aten.div.Tensor(sum_dim_int_list, 8)
return (div_tensor,)""",
        )

    def test_cross_entropy_divides_by_the_count_of_all_ranks(self):
        gm = captured(
            lambda x, y: F.cross_entropy(x.flatten(0, 1) * 2, y.flatten()),
            torch.randn(1, 8, 4),
            torch.zeros(1, 8).long(),
        )
        DecomposeMeans(TWO, **SEQUENCE)(gm)
        self.assertExpectedInline(
            show(gm),
            """\
x: [1, 8, 4] = placeholder
y: [1, 8] = placeholder
flatten: [8, 4] = aten.flatten.using_ints(x, 0, 1)
mul: [8, 4] = aten.mul.Tensor(flatten, 2)
flatten_1: [8] = aten.flatten.using_ints(y)
cross_entropy_loss_default: [] = aten.cross_entropy_loss(mul, flatten_1, reduction=2)
ne_scalar: [8] = aten.ne.Scalar(flatten_1, -100)
sum_default: [] = aten.sum(ne_scalar)
to_dtype: [] = aten.to.dtype(sum_default, float32)
div_tensor: [] = aten.div.Tensor(cross_entropy_loss_default, to_dtype)
return (div_tensor,)""",
        )

    def test_reduce(self):
        gm = captured(lambda x: (x * 2).sum(1) + 1, torch.randn(1, 8, 4))
        ReducePartials(TWO, **SEQUENCE)(gm)
        self.assertExpectedInline(
            show(gm),
            """\
x: [1, 8, 4] = placeholder
mul: [1, 8, 4] = aten.mul.Tensor(x, 2)
sum_1: [1, 4] = aten.sum.dim_IntList(mul, [1])
all_reduce_default: [1, 4] = sp.all_reduce(sum_1, 2, sim)
add: [1, 4] = aten.add.Tensor(all_reduce_default, 1)
return (add,)""",
        )

    def test_draws_on_replicated_values_are_agreed(self):
        gm = captured(lambda x, y: x * F.dropout(y, 0.5), torch.randn(1, 8, 4), torch.randn(4))
        BroadcastDraws(TWO, **SEQUENCE)(gm)
        self.assertExpectedInline(
            show(gm),
            """\
x: [1, 8, 4] = placeholder
y: [4] = placeholder
broadcast_grad_default: [4] = sp.broadcast_grad(y, sim)
dropout: [4] = aten.dropout(broadcast_grad_default, 0.5, True)
broadcast_default: [4] = sp.broadcast(dropout, sim)
mul: [1, 8, 4] = aten.mul.Tensor(x, broadcast_default)
return (mul,)""",
        )

    def test_localize(self):
        gm = captured(lambda x, y: (x @ y).sum(), torch.randn(1, 7, 4), torch.randn(4, 6))
        ReducePartials(TWO, **SEQUENCE)(gm)
        local = Localize(TWO, **SEQUENCE)(gm).graph_module
        validate(local, PassContext.of(TWO, **SEQUENCE).plan(gm), 2)
        self.assertExpectedInline(
            show(local),
            """\
x: [1, 7, 4] = placeholder
y: [4, 6] = placeholder
shard_default: [1, 4, 4] = sp.shard(x, 1, [1, 7, 0, 7], 2, sim)
reduce_grad_default:  = sp.reduce_grad([y], reduce, 2, sim)
getitem: [4, 6] = getitem(reduce_grad_default, 0)
matmul: [1, 4, 6] = aten.matmul(shard_default, getitem)
mask_default: [1, 4, 6] = sp.mask(matmul, 1, [1, 7, 0, 7], 0, 2, sim)
sum_1: [] = aten.sum(mask_default)
all_reduce_default: [] = sp.all_reduce(sum_1, 2, sim)
return (all_reduce_default,)""",
        )

    def test_complete_pipeline(self):
        local = sp_compile.parallelize(torch.export.export(Decoder(), (torch.randn(1, 8, 16),)), sp=2)
        self.assertExpectedInline(
            show(local),
            """\
x: [1, 8, 16] = placeholder
shard_default: [1, 4, 16] = sp.shard(x, 1, [1, 8, 0, 8], 2, sim)
qkv_weight: [48, 16] = get_attr
out_weight: [16, 16] = get_attr
reduce_grad_default:  = sp.reduce_grad([qkv_weight, out_weight], reduce, 2, sim)
getitem: [48, 16] = getitem(reduce_grad_default, 0)
getitem_1: [16, 16] = getitem(reduce_grad_default, 1)
linear: [1, 4, 48] = aten.linear(shard_default, getitem)
chunk:  = aten.chunk(linear, 3, -1)
getitem_2: [1, 4, 16] = getitem(chunk, 0)
getitem_3: [1, 4, 16] = getitem(chunk, 1)
getitem_4: [1, 4, 16] = getitem(chunk, 2)
unflatten: [1, 4, 4, 4] = aten.reshape(getitem_2, [1, 4, 4, 4])
transpose: [1, 4, 4, 4] = aten.transpose.int(unflatten, 1, 2)
unflatten_1: [1, 4, 4, 4] = aten.reshape(getitem_3, [1, 4, 4, 4])
transpose_1: [1, 4, 4, 4] = aten.transpose.int(unflatten_1, 1, 2)
unflatten_2: [1, 4, 4, 4] = aten.reshape(getitem_4, [1, 4, 4, 4])
transpose_2: [1, 4, 4, 4] = aten.transpose.int(unflatten_2, 1, 2)
all_to_all_default:  = sp.all_to_all([transpose, transpose_1, transpose_2], 1, [1, 4, 0, 4], 2, [1, 8, 0, 8], 2, sim)
getitem_5: [1, 2, 8, 4] = getitem(all_to_all_default, 0)
getitem_6: [1, 2, 8, 4] = getitem(all_to_all_default, 1)
getitem_7: [1, 2, 8, 4] = getitem(all_to_all_default, 2)
scaled_dot_product_attention: [1, 2, 8, 4] = aten.scaled_dot_product_attention(getitem_5, getitem_6, getitem_7, None, 0.0, True)
all_to_all_default_1:  = sp.all_to_all([scaled_dot_product_attention], 2, [1, 8, 0, 8], 1, [1, 4, 0, 4], 2, sim)
getitem_8: [1, 4, 4, 4] = getitem(all_to_all_default_1, 0)
transpose_3: [1, 4, 4, 4] = aten.transpose.int(getitem_8, 1, 2)
flatten: [1, 4, 16] = aten.reshape(transpose_3, [1, 4, 16])
linear_1: [1, 4, 16] = aten.linear(flatten, getitem_1)
pow_1: [1, 4, 16] = aten.pow.Tensor_Scalar(linear_1, 2)
sum_dim_int_list: [] = aten.sum.dim_IntList(pow_1, [0, 1, 2], False)
all_reduce_default: [] = sp.all_reduce(sum_dim_int_list, 2, sim)
div_tensor: [] = aten.div.Tensor(all_reduce_default, 128)
return (div_tensor,)""",
        )
