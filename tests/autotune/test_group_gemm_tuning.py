"""Tuning group_gemm and its gradients on one rank, and calls that use the tuned configs."""

import pytest
import torch

import tdkernels
from tdkernels import GroupGemmConfig, Tiles, autotune, explain
from tdkernels.autotune.selection import forget
from tdkernels.autotune.tunable import tunable
from tdkernels.ops.experts.grouped_gemm import launch as grouped_gemm_launch
from tdkernels.ops.experts.grouped_gemm import launch_weights
from tdkernels.ops.experts.grouped_gemm.dispatch import forget_choices
from tdkernels.ops.experts.grouped_gemm.op import group_gemm_ref
from tdkernels.symm.group import alone
from tests.autotune import expert_support
from tests.autotune.entries import cache_in
from tests.autotune.expert_support import entry_of
from tests.autotune.selection_support import store_entries, tables_in
from tests.autotune.test_ep_tuning import check_compiled_ahead
from tests.ops.experts.dispatch.oracle import BF16, FP32
from tests.ops.experts.grouped_gemm.oracle import Grouped
from tests.support.ranks import DEVICE, device, on_ranks

SMALL = GroupGemmConfig(tiles=Tiles(32, 64, 32, num_warps=4, num_stages=2))
TILED = GroupGemmConfig(tiles=Tiles(64, 64, 64))
TORCH = GroupGemmConfig(method="torch")


def check_forward(folder):
    """Check that a call uses the tuned config; mode "off" and entries of other layouts do not apply."""
    with tables_in(folder):
        x, w = torch.randn(13, 16), torch.randn(3, 8, 16)
        x, w, splits = x.to(device()), w.to(device()), torch.tensor([5, 0, 8], device=device())
        launches = (grouped_gemm_launch, "product", lambda args, options: args[5])
        with expert_support.record_configs(launches) as ran:
            tdkernels.group_gemm(x, w, splits)
            expert_support.check_tune("group_gemm", (16, 8, 16, 3), "swiglu", SMALL, FP32)
            store_entries(entry_of(SMALL, "group_gemm", (16, 8, 16, 3), "none", world_size=1))
            ran.clear()
            y = tdkernels.group_gemm(x, w, splits)
            assert torch.allclose(y, group_gemm_ref(x, w, splits), rtol=1e-4, atol=1e-4)
            assert ran == [("product", SMALL)]
            with autotune.mode("off"):
                tdkernels.group_gemm(x, w, splits)
            tdkernels.group_gemm(x, w, splits, config=GroupGemmConfig())
        assert [config for _, config in ran[1:]] == [None, GroupGemmConfig()]
        result = explain("group_gemm", x, w, splits, world_size=1)
        assert (result.problem.shape, result.problem.world_size) == ((13, 8, 16, 3), 1)


def test_forward_uses_tuned_config(tmp_path):
    on_ranks(1, check_forward, tmp_path)


def check_gradients(folder):
    """Check that each gradient uses its own entry, independently of the forward's config; "off" ignores both."""
    problem = Grouped(FP32, [5, 0, 8], 8, 16)
    dx, dw = (16, 16, 8, 3), (16, 8, 16, 3)  # 13 rows, rounded up to a power of two
    launches = [(grouped_gemm_launch, "product", lambda args, options: args[5]),
                (grouped_gemm_launch, "weight_gradient", lambda args, options: args[4])]

    def gradients(**options):
        with expert_support.record_configs(*launches) as ran:
            problem.check(problem.run(**options))
        return ran[1:]

    with tables_in(folder):
        default = [("product", None), ("weight_gradient", None)]
        assert gradients() == default
        store_entries(entry_of(SMALL, "group_gemm", dx, "kn", world_size=1),
                     entry_of(SMALL, "group_gemm", dw, "dw", world_size=1))
        assert gradients() == default  # repeated calls keep their cached selection
        entry = entry_of(SMALL, "group_gemm", dx, "kn", world_size=1)
        forget(tunable("group_gemm"), entry.problem, alone.choices)  # the tuner does this after tuning
        assert gradients() == gradients(config=GroupGemmConfig()) == [("product", SMALL), ("weight_gradient", SMALL)]
        with autotune.mode("off"):
            assert gradients() == default
        store_entries(entry_of(TORCH, "group_gemm", dx, "kn", world_size=1),
                     entry_of(TORCH, "group_gemm", dw, "dw", world_size=1))
        forget_choices()
        assert gradients() == []
    forget_choices()


@pytest.mark.skipif(DEVICE != "cpu", reason="torch has no fp32 grouped GEMM on a GPU")
def test_gradients_use_tuned_configs(tmp_path):
    on_ranks(1, check_gradients, tmp_path)


def check_tuning_of_gradients(folder):
    with cache_in(folder):
        for layout in ("kn", "dw"):
            for dtype in (BF16, FP32):
                expert_support.check_tune("group_gemm", (64, 24, 16, 3), layout, SMALL, dtype)


def test_gradients_are_tuned(tmp_path):
    on_ranks(1, check_tuning_of_gradients, tmp_path)


def check_layouts():
    x, w, splits = torch.randn(13, 16), torch.randn(3, 16, 8), torch.tensor([5, 0, 8])
    assert explain("group_gemm", x, w.transpose(1, 2), splits, world_size=1).problem.layout == "kn"
    assert explain("group_gemm", x, torch.randn(3, 8, 16), splits, world_size=1).problem.layout == "none"
    for operands in ((x,), (x, w), (x, w[0], splits), (x, None, splits)):
        with pytest.raises(ValueError, match="group_gemm: the operands are x, w and splits, not of shapes"):
            explain("group_gemm", *operands, world_size=1)


def test_transposed_weight_is_a_separate_problem():
    on_ranks(1, check_layouts)


# ---- without ranks ----


def test_estimates_of_group_gemm():
    with expert_support.fake_h200():
        sizes = [(1, "swiglu", 64, 4096, 4096, 8), (1, "none", 65536, 2048, 7168, 32)]
        sizes += [(1, "kn", 4096, 7168, 4096, 8), (1, "dw", 4096, 3584, 4096, 8)]
        expert_support.check_estimates("group_gemm", sizes)


def test_weight_gradient_is_compiled_ahead():
    def launch(problem, dy, x, splits):
        launch_weights.weight_gradient(dy, x, splits, problem.shape[3], TILED)

    check_compiled_ahead("group_gemm", "dw", launch, launch_weights, config=TILED)


@pytest.mark.parametrize("layout", ["none", "swiglu", "kn"])
def test_product_is_compiled_ahead(layout):
    def launch(problem, x, w, splits):
        grouped_gemm_launch.product(x, w, splits, "swiglu" if layout == "swiglu" else None, config=TILED)

    check_compiled_ahead("group_gemm", layout, launch, grouped_gemm_launch, config=TILED)
