"""Programs that users have reported, each as a small test; a table names the test of those that other files cover."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models.docs.test_recipes import launch
from support.parity import Outcome, against_eager, check
from support.ranks import Ranks, mesh
from torch import Tensor, nn
from torch._higher_order_ops import map as mapped
from torch._higher_order_ops import while_loop
from torch.func import grad, vmap
from torch.utils.checkpoint import checkpoint

TESTS = Path(__file__).parents[1]
WIDTH = 8

# Each reported program, the test that contains its kind, and a part of that test's source. Those of this file are below.
COVERED = {
    "01_qwen3vl_images": ("models/test_reported_programs.py::test_shifted_labels_beside_images", "qwen3_vl"),
    "01_ttt_func_grad": ("models/test_reported_programs.py::test_models_after_an_inner_gradient", "inner = grad("),
    "01b_bool_mask_put": ("capture/test_unsplit_graphs.py::test_split_programs", "x[mask] = rows"),
    "01c_bool_put_zero": ("capture/test_unsplit_graphs.py::test_split_programs", "x[~mask] = 0"),
    "02_ngpt_justnorm": ("windows/test_singular_rows.py::ROWS", "x / norm(x)"),
    "02_qwen35_gdn": (
        "models/test_reported_programs.py::test_padded_rows_with_positions_of_three_axes",
        "Qwen3_5ForCausalLM",
    ),
    "04_switch_slots": ("windows/test_singular_rows.py::ROWS", "F.one_hot(place"),
    "06_qwenimage_dit": ("models/hf/test_families.py::test_a_family_trains_as_a_single_device", "QwenImage"),
    "06_written_result_view": ("collectives/test_shared_results.py::test_in_shards", "view"),
    "07_result_and_its_view_trained": ("collectives/test_shared_results.py::test_large_ones", "flatten"),
    "08_aliased_on_second_call": (
        "collectives/test_shared_results.py::test_inputs_that_share_memory_at_a_later_call",
        "SP221",
    ),
    "09_wan_video": ("models/hf/test_families.py::test_a_family_trains_as_a_single_device", "Wan"),
    "11_associative_scan_leaves": (
        "canonical/test_scan_trees.py::test_ranks_agree_with_one_device",
        "= associative_scan(",
    ),
    "12_scan_hop": ("canonical/test_scan_trees.py::test_ranks_agree_with_one_device", "= scan("),
    "17_only_the_view_is_trained": ("collectives/test_shared_results.py::test_large_ones", "view"),
    "18_fp8_torchao": ("models/test_low_precision.py::test_real_ranks", "tensorwise"),
    "19_t5_generate": ("models/test_reported_programs.py::test_replicas_that_generate", "seq2seq.py"),
    "24_trl_grpo": ("models/generation/test_trl_trainers.py::test_each_step_of_changing_lengths", "grpo"),
}


@pytest.mark.parametrize("program", COVERED)
def test_a_test_covers_the_program(program: str) -> None:
    place, words = COVERED[program]
    assert words in source_of(*place.split("::"))


def source_of(file: str, name: str) -> str:
    """Return the source of a definition of a file, of the definitions that it names, and of modules of tests that it imports."""
    text = (TESTS / file).read_text()
    defined, imported = {}, {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            lines = text.splitlines()[
                min([node.lineno, *(x.lineno for x in node.decorator_list)]) - 1 : node.end_lineno
            ]
            defined[node.name] = node, "\n".join(lines)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            defined |= {x.id: (node, ast.get_source_segment(text, node)) for x in targets if isinstance(x, ast.Name)}
        elif isinstance(node, ast.ImportFrom):
            imported |= {x.asname or x.name: TESTS / f"{(node.module or '').replace('.', '/')}.py" for x in node.names}
    found, names = {}, [name]
    while names:
        name = names.pop()
        if name in defined and name not in found:
            node, found[name] = defined[name]
            names += [x.id for x in ast.walk(node) if isinstance(x, ast.Name)]
        elif name in imported and imported[name].exists():
            found[name] = imported[name].read_text()
    return "\n".join(found.values())


class Reported(nn.Module):
    """A function of x and of three weights, to a loss."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function
        self.q, self.k, self.v = (nn.Parameter(0.3 * torch.randn(WIDTH, WIDTH)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x).sin().square().mean()


def attend(x: Tensor) -> Tensor:
    q = x.unflatten(-1, (2, -1)).transpose(1, 2)
    return nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).flatten(2)


def learned(m: Reported, x: Tensor) -> Tensor:
    """One inner gradient step on prefix sums, then the outer result."""
    inner = grad(lambda w: (((x @ w).cumsum(1) @ m.v) - x).square().mean())
    return (x @ (m.q - 0.1 * inner(m.q))).cumsum(1) @ m.v


def learned_by_each(m: Reported, x: Tensor) -> Tensor:
    """A weight of its own for every sequence."""
    steps = vmap(grad(lambda w, t: ((t @ w).cumsum(0) - t).square().mean()), (None, 0))(m.q, x)
    return torch.einsum("bsd,bde->bse", x, m.q - 0.1 * steps).cumsum(1) @ m.v


def plain(m: Reported, x: Tensor) -> Tensor:
    return (x @ m.q).cumsum(1) @ m.v


def recomputed(m: Reported, x: Tensor) -> Tensor:
    return checkpoint(plain, m, x, use_reentrant=False)


def chosen(m: Reported, x: Tensor) -> Tensor:
    return torch.cond(attend(x @ m.q).sum() > 0, lambda h: h @ m.k, lambda h: h.cumsum(1) @ m.v, (attend(x @ m.q),))


def chosen_by_a_mask(m: Reported, x: Tensor) -> Tensor:
    mask = x[..., 0].detach() > 0
    hide = lambda h: h.masked_fill(~mask[..., None], 0.0)  # noqa: E731
    return torch.cond(mask.all(), lambda h: h * 2, hide, (attend(x @ m.q),))


def repeated(m: Reported, x: Tensor) -> Tensor:
    start = torch.tensor(0), attend(x @ m.q).detach()
    proceeds = lambda i, y: (i < 3) & (y.norm() < 100)  # noqa: E731
    return while_loop(proceeds, lambda i, y: (i + 1, y * 1.5 + y.mean()), start)[1] @ m.v


def by_row(m: Reported, x: Tensor) -> Tensor:
    rows = attend(x @ m.q).transpose(0, 1)
    return mapped(lambda t: t @ m.k + t.sum(0, keepdim=True), rows).transpose(0, 1)


def step(function: Callable[..., Tensor]) -> Outcome:
    torch.manual_seed(0)
    return against_eager(Reported(function).double(), torch.randn(2, 7, WIDTH, dtype=torch.float64), mesh=mesh())


def steps_of(*functions: Callable[..., Tensor]) -> list[Outcome]:
    """Steps of several models in one process; the state that a compilation leaves would spoil later ones."""
    return [step(function) for function in functions]


def check_each(outcomes: list[list[Outcome]]) -> None:
    for one in zip(*outcomes, strict=True):
        check(one)


@pytest.mark.as_users_run("slow")
def test_models_after_an_inner_gradient(ranks: Ranks, as_users_run: bool) -> None:
    others = (recomputed, learned_by_each) if as_users_run else ()  # that variant is slow
    check_each(ranks.run(2, steps_of, learned, *others, plain))


def test_control_flow_on_hidden_values(ranks: Ranks) -> None:
    check_each(ranks.run(2, steps_of, chosen, chosen_by_a_mask, repeated, by_row))


def shifted() -> Outcome:
    """Qwen3-VL with images, whose labels the caller has shifted."""
    from models.hf import test_multimodal

    model, batch = test_multimodal.made(test_multimodal.qwen3_vl, True)
    last = nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    return against_eager(model, kwargs={**batch, "shift_labels": last}, mesh=mesh())


@pytest.mark.slow
def test_shifted_labels_beside_images(ranks: Ranks) -> None:
    pytest.importorskip("transformers")
    check(ranks.run(2, shifted, timeout=300), 1e-6)  # rotary positions, norms and the loss are float32


def padded() -> Outcome:
    """Qwen3.5 with a padded row, and positions of text, height and width."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 0], "mrope_interleaved": True}
    config = Qwen3_5TextConfig(
        **{"vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 16},
        **{"num_attention_heads": 2, "num_key_value_heads": 1, "linear_num_key_heads": 2, "linear_num_value_heads": 2},
        **{"linear_key_head_dim": 8, "linear_value_head_dim": 8, "use_cache": False},
        layer_types=["linear_attention", "full_attention"],
        rope_parameters={**rope, "partial_rotary_factor": 0.25},
    )
    length = 21
    ids, mask = torch.randint(50, (2, length)), torch.ones(2, length, dtype=torch.int64)
    mask[1, 15:] = 0
    positions = torch.arange(length).expand(3, 2, length).clone()
    positions[1:, :, 5:9] = 5
    batch: dict[str, Any] = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
    model = Qwen3_5ForCausalLM(config).double()
    return against_eager(model, kwargs={**batch, "labels": ids.masked_fill(mask == 0, -100)}, mesh=mesh())


@pytest.mark.slow
def test_padded_rows_with_positions_of_three_axes(ranks: Ranks) -> None:
    pytest.importorskip("transformers")
    check(ranks.run(2, padded, timeout=300), 2.3e-4)  # the delta rule is float32 with sums that cancel


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "share"), [(2, 2), (4, 2)], ids=["", "replicas"])
def test_replicas_that_generate(tmp_path: Path, processes: int, share: int) -> None:
    """Predictions while T5 trains, of sources and labels of changing lengths; metrics count each row once."""
    for package in ("transformers", "accelerate"):
        pytest.importorskip(package)
    words = "eval_rows", "eval_sum", "test_rows", "test_sum"
    said = []
    for n in (1, processes):
        environment = {"SEQ2SEQ_SHARE": str(min(n, share)), "SEQ2SEQ_LENGTHS": "changing"}
        launch(tmp_path, n, "seq2seq.py", str(tmp_path / f"{n}.pt"), **environment)
        found = torch.load(tmp_path / f"{n}.pt")
        said.append(
            [[line[word] for word in words if word in line] for line in found["log"]] + [found["predictions"].tolist()]
        )
    assert said[0] == said[1]
    assert said[0][0][0] == 5
