"""Batch-invariant mode: a row of a result has the same bits for any number, order and values of the other rows."""

import re

import pytest
import torch
import torch.distributed as dist

import tdkernels
from tdkernels.autotune.invariance import selection_mode
from tdkernels.ops.common import tile_config
from tdkernels.ops.common.config import as_argument
from tdkernels.symm import shared_settings
from tests.ops import invariance_cases as cases
from tests.support.ranks import DEVICE, device, on_ranks
from tests.support.simulated_nodes import thorough

each_dtype_and_number_of_ranks = pytest.mark.parametrize("ranks, dtype", [
    (1, torch.bfloat16), (2, torch.bfloat16), (2, torch.float32), (3, torch.float32),
    pytest.param(1, torch.float32, marks=thorough), pytest.param(3, torch.bfloat16, marks=thorough),
])


@pytest.fixture(autouse=True)
def restored():
    yield
    shared_settings.set_batch_invariant(None)


# ---- the setting ----


def test_blocks_nest_and_restore(monkeypatch):
    monkeypatch.setenv("TDKERNELS_AUTOTUNE", "off")
    enabled = shared_settings.is_batch_invariant
    assert not enabled() and selection_mode() == "off"
    with tdkernels.batch_invariant():
        assert enabled() and selection_mode() == "off, batch-invariant"
        with tdkernels.batch_invariant(False):
            assert not enabled()
            tdkernels.set_batch_invariant(True)
            assert enabled()
        assert enabled()
        with pytest.raises(ZeroDivisionError), tdkernels.batch_invariant(False):
            raise ZeroDivisionError
        assert enabled()
    assert not enabled()
    tdkernels.set_batch_invariant(True)
    with tdkernels.batch_invariant(False):
        pass
    assert enabled()


@pytest.mark.parametrize("value", [1, 0, "on", "1"])
def test_only_booleans_are_settings(value):
    for call in (tdkernels.set_batch_invariant, lambda value: tdkernels.batch_invariant(value).__enter__()):
        with pytest.raises(TypeError, match=re.escape(f"must be True, False or None, not {value!r}")):
            call(value)


def test_environment_variable(monkeypatch):
    for text, expected in (("1", True), ("0", False), ("", False)):
        monkeypatch.setenv("TDKERNELS_BATCH_INVARIANT", text)
        tdkernels.set_batch_invariant(None)
        assert shared_settings.is_batch_invariant() is expected
        tdkernels.set_batch_invariant(not expected)
        assert shared_settings.is_batch_invariant() is not expected
    monkeypatch.setenv("TDKERNELS_BATCH_INVARIANT", "yes")
    tdkernels.set_batch_invariant(None)
    with pytest.raises(ValueError, match="TDKERNELS_BATCH_INVARIANT must be 0, 1, 2, 4 or 8, not 'yes'"):
        shared_settings.is_batch_invariant()
    tdkernels.set_batch_invariant(False)
    assert not shared_settings.is_batch_invariant()


# ---- tiles ----


ON_HOPPER = DEVICE != "cpu" and torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


@pytest.mark.skipif(not ON_HOPPER, reason="only on Hopper does the mode select one of several tiles")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("k", [64, 200, 1001, 4096, 7168])
def test_tiles_of_the_mode_give_the_same_bits(k, dtype):
    """Compare all tiles in GEMMs, and those for a reduction tree. 1001 columns are not loaded by TMA."""
    tiles = tile_config._ALIKE_SMALL, tile_config._ALIKE_MEDIUM, tile_config.LARGE
    configs = [tdkernels.GroupGemmConfig(tiles=one) for one in tiles]
    generator = torch.Generator("cuda").manual_seed(k)

    def draw(*shape):
        most = 6 if dtype == torch.bfloat16 else 3  # so that no sum overflows
        sizes = torch.randint(-most, most + 1, shape, generator=generator, device="cuda")
        return (torch.randn(shape, generator=generator, device="cuda") * 2.0**sizes).to(dtype)

    x, weight = draw(300, k), draw(520, k)
    splits = torch.tensor([300], dtype=torch.int32, device="cuda")
    for w in (weight, weight.t().contiguous().t()):
        found = [tdkernels.group_gemm(x, w.unsqueeze(0), splits, config=config) for config in configs]
        assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
        for leaves in (2, 4, 8) if k % 512 == 0 else ():
            small, medium = (
                torch.ops.tdkernels.linear_by_tree(x, w, None, leaves, as_argument(config)) for config in configs[:2]
            )
            assert torch.equal(small, medium) and not torch.equal(small, found[0])


# ---- bits of rows in many batches ----


def dense_ranks(dtype):
    """Return {check: changed rows} of the GEMMs."""
    found = cases.dense(dtype, cases.DENSE, mode=True)
    found["gemm_rs, dim=1"] = cases.middle_of_a_sequence(dtype)
    return found, cases.configs_by_rows(dtype), cases.dense(dtype, ["gemm_rs"], mode=False)


@each_dtype_and_number_of_ranks
def test_gemms(ranks, dtype):
    for changed, by_rows, default in on_ranks(ranks, dense_ranks, dtype):
        assert not any(changed.values()), changed
        if dtype == torch.float32:  # rounding to bf16 hides most differences of the order of the sum
            assert all(by_rows.values()), by_rows
        elif ranks > 1 and DEVICE != "cuda":  # the default on CPU, "forward", does not round this rank's own partial
            assert default["gemm_rs"] > 0


def other_ranks(dtype):
    """Return {check: changed} of the collectives and of group_gemm."""
    found = {f"group_gemm, {activation}": cases.grouped(dtype, activation) for activation in (None, "swiglu")}
    return {**found, **cases.collectives(dtype), **(cases.grouped_fp8() if dtype == torch.float32 else {})}


@each_dtype_and_number_of_ranks
def test_collectives_and_grouped_gemm(ranks, dtype):
    for changed in on_ranks(ranks, other_ranks, dtype):
        assert not any(changed.values()), changed


def copies():
    """Check that operators that only copy work in the mode and return what they return without it."""
    x, _, _, _, _, ids, weights = cases.operands()
    splits = torch.tensor([1, 3], device=device())
    sent = tdkernels.ep_dispatch_send

    def run():
        recv, handle = sent(x, ids, weights, num_experts=2).receive()
        y = tdkernels.ep_combine_send(recv.x, handle).receive()
        return tdkernels.all_gather(x), tdkernels.all_to_all(x, splits)[0], recv.x, recv.topk_weights, y

    expected = run()
    with tdkernels.batch_invariant():
        got = run()
    for one, other in zip(got[:-1], expected[:-1], strict=True):
        assert torch.equal(one, other)
    torch.testing.assert_close(got[-1], expected[-1])


def test_copies():
    on_ranks(2, copies)


LAYERS = "tp_moe", "ep_dispatch, ep_combine", "ep_moe", "ep_moe, bounded", "ep_moe, fused"


def expert_ranks(dtype):
    """Return {layer: changed} in the mode and without it."""
    return cases.experts(dtype, LAYERS, mode=True), cases.experts(dtype, LAYERS[:3], mode=False)


@pytest.mark.parametrize("ranks, dtype", [(1, torch.bfloat16), (2, torch.bfloat16), (2, torch.float32)])
def test_expert_layers(ranks, dtype):
    for changed, default in on_ranks(ranks, expert_ranks, dtype):
        assert not any(changed.values()), changed
        if ranks > 1 and dtype == torch.bfloat16:  # the sums of other ranks are rounded, those of the token's rank not
            assert all(default.values()), default


def router_and_layers():
    """Return {module: rows whose bits change} of the router and of a float8 layer without sequence parallelism."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(40, 64, generator=generator).to(device())
    router = tdkernels.nn.Router(64, 8, 2).to(device())
    router.weight.data.copy_(torch.randn(8, 64, generator=generator))
    layer = tdkernels.nn.ColumnParallelLinear(64, 32, bias=False, float8="rowwise", device=device())
    layer.weight.data.copy_(torch.randn(layer.weight.shape, generator=generator))
    changed = {}
    with tdkernels.batch_invariant(), torch.no_grad():
        for name, module in (("router", lambda x: router(x)[1]), ("float8", layer)):
            whole = module(x)
            changed[name] = sum(not torch.equal(module(x[first:last]), whole[first:last]) for first, last in PARTS)
    return changed


PARTS = [(0, 1), (3, 4), (5, 22), (17, 40)]


def test_modules():
    for changed in on_ranks(2, router_and_layers):
        assert not any(changed.values()), changed


def float8_gradients(float8, dim):
    """Check that a float8 row-parallel layer has gradients in the mode, equal to those outside of it."""
    layer = tdkernels.nn.RowParallelLinear(
        64, 16, bias=False, sequence_parallel=True, seq_dim=dim, float8=float8, float8_dweight=True, device=device()
    )
    found = []
    for enabled in (False, True):
        x = torch.randn(2, 32, 32, generator=torch.Generator().manual_seed(dist.get_rank())).to(device())
        x.requires_grad_()
        with tdkernels.batch_invariant(enabled):
            y = layer(x)
            y.backward(torch.ones_like(y))
        found.append((y.detach(), x.grad, layer.weight.grad))
        layer.weight.grad = None
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("float8, dim", [("rowwise", 1), ("tensorwise", 0)])
def test_gradients_of_float8_layers(float8, dim):
    on_ranks(2, float8_gradients, float8, dim)


def router_gradients():
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(6, 16, generator=generator).to(device())
    router = tdkernels.nn.Router(16, 4, 2).to(device())
    router.weight.data.copy_(torch.randn(4, 16, generator=generator) / 4)
    gradients = []
    for enabled in (False, True):
        with tdkernels.batch_invariant(enabled):
            # The weights of one choice: the sum over the choices of a token is 1, so its gradient is only rounding.
            router(x)[1][:, 0].mul(torch.arange(6, device=device())).sum().backward()
        gradients.append(router.weight.grad)
        router.weight.grad = None
    assert gradients[0].abs().max() > 0.1
    torch.testing.assert_close(*gradients)


def test_gradients_of_the_router():
    on_ranks(1, router_gradients)


def decode_ranks(dtype, names):
    """Return {problem: changed} of flash_decode, and how many results change if programs share keys equally."""
    found = {name: cases.decode(name, dtype) for name in names}
    found["paged"] = cases.decode("chunks", dtype, paged=True)
    for name in {"chunks", "more keys than 64 chunks"} & set(names):
        found[f"{name}, split"] = cases.decode(name, dtype, method="split")
    default = [cases.decode("chunks", dtype, mode=False)]
    if names != FEW:
        found["paged, split"] = cases.decode("chunks", dtype, paged=True, method="split")
        default.append(cases.decode("chunks", dtype, mode=False, method="split"))
    return found, default


FEW = "chunks", "queries and a window"


@pytest.mark.parametrize("ranks, dtype, names", [
    (1, torch.float32, list(cases.DECODES)), (2, torch.bfloat16, list(cases.DECODES)),
    pytest.param(3, torch.float32, FEW, marks=thorough),
])
def test_flash_decode(ranks, dtype, names):
    for changed, default in on_ranks(ranks, decode_ranks, dtype, names):
        assert not any(changed.values()), changed
        assert all(changes > 0 for changes in default), default


def attention_ranks(dtype):
    """Return {mask: changed} of ag_attention."""
    masks = (True, "contiguous"), (True, "zigzag"), (False, "contiguous")
    return {mask: cases.attention(dtype, *mask) for mask in masks}


@pytest.mark.parametrize("ranks, dtype", [
    (1, torch.bfloat16), (2, torch.float32), pytest.param(3, torch.bfloat16, marks=thorough),
])
def test_ag_attention(ranks, dtype):
    for changed in on_ranks(ranks, attention_ranks, dtype):
        assert not any(changed.values()), changed
