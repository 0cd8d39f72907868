"""Properties of a call that must be equal on all ranks and that the shapes of its operands do not show."""

from functools import partial

import pytest
import torch
import torch.distributed as dist

import tdkernels
from tdkernels import EpConfig, GemmArConfig, GemmRsConfig, Tiles
from tests.support.ranks import a_group, device, on_ranks
from tests.test_protocol import failure_of

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
SMALL = Tiles(16, 16, 32, num_warps=4, num_stages=2)


def check(call, odd_call, operator, field):
    """Check that both ranks raise an error if rank 1 makes another call, and that the group stays usable."""
    error = failure_of(odd_call if dist.get_rank() == 1 else call)
    assert type(error) is ValueError, repr(error)
    assert f"{operator}: the ranks disagree" in str(error) and f"{field} is " in str(error), str(error)
    return call(), odd_call()


def random(*shape):
    """Return small integers, so that sums are exact."""
    return torch.randint(-2, 3, shape, device=device()).to(BF16)


def in_fp8(x, weight, options):
    """Return the operands in fp8, and ``options`` with their scales."""
    scale = torch.ones((), device=device())
    return x.to(E4M3), weight.to(E4M3), dict(scale_x=scale, scale_w=scale, out_dtype=BF16, **options)


# ---- gemm_rs: the order of the rows ----

ORDERS = {
    "selected": {}, "forward": {"config": GemmRsConfig(tiles=SMALL)},
    "direct": {"config": GemmRsConfig(tiles=SMALL, transport="direct")},
    "one_shot": {"config": GemmRsConfig(tiles=SMALL, transport="one_shot")},
    "parts": {"config": GemmRsConfig(method="parts")}, "torch": {"config": GemmRsConfig(method="torch")},
    "wire": {"wire": "fp8"},
}


def orders_rows(options, scaled):
    """Rank 1 scatters dimension 1 of [B, S, K / W], and rank 0 dimension 0."""
    torch.manual_seed(dist.get_rank())
    x, weight = random(2, 4, 16), random(16, 16)
    if scaled:
        x, weight, options = in_fp8(x, weight, options)
    with a_group() as group:
        calls = [partial(tdkernels.gemm_rs, x, weight, dim=dim, group=group, **options) for dim in (0, 1)]
        results = check(*calls, "gemm_rs", "rows of a segment")
        for dim, z in enumerate(results):
            expected = tdkernels.gemm_rs_ref(x.to(BF16), weight.to(BF16), dim=dim, group=group)
            torch.testing.assert_close(z, expected, rtol=0.1, atol=2.0 if "wire" in options else 0.0)
        del group, calls


@pytest.mark.parametrize("name", ORDERS)
def test_rows_of_gemm_rs(name):
    on_ranks(2, orders_rows, ORDERS[name], False)


@pytest.mark.parametrize("name", ["forward", "parts", "torch"])
def test_rows_of_gemm_rs_in_fp8(name):
    on_ranks(2, orders_rows, ORDERS[name], True)


# ---- a bias that another rank adds ----


def adds_bias(config, scaled):
    torch.manual_seed(dist.get_rank())
    x, weight = random(4, 16), random(16, 16)
    bias, options = torch.ones(16, dtype=BF16, device=device()), {"config": config}
    if scaled:
        x, weight, options = in_fp8(x, weight, options)
    with a_group() as group:
        calls = [partial(tdkernels.gemm_ar, x, weight, each, group=group, **options) for each in (bias, None)]
        with_bias, without = check(*calls, "gemm_ar", "has_bias")
        assert torch.equal(with_bias, without + 1)
        del group, calls


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("config", [
    GemmArConfig(tiles=SMALL, exchange="two_shot"), GemmArConfig(tiles=SMALL, exchange="two_shot", transport="direct"),
    GemmArConfig(method="torch"),
], ids=["forward", "direct", "torch"])
def test_bias_of_gemm_ar(config, scaled):
    on_ranks(2, adds_bias, config, scaled)


def adds_bias_of_heads():
    torch.manual_seed(0)
    x, weight, bias = random(1, 3, 8), random(4, 8), torch.ones(4, dtype=BF16, device=device())
    with a_group() as group:
        calls = [partial(tdkernels.ulysses_qkv, x, weight, each, group=group) for each in (bias, None)]
        with_bias, without = check(*calls, "ulysses_qkv", "has_bias")
        assert torch.equal(with_bias, without + 1)
        del group, calls


def test_bias_of_ulysses_qkv():
    on_ranks(2, adds_bias_of_heads)


# ---- the chunks of a routing ----


def combines_chunks():
    """Rank 1 combines the tokens of another dispatch, whose chunks have other sizes."""
    x = random(20, 16)
    ids, weights = torch.arange(20, device=device()).unsqueeze(1) % 2, torch.ones(20, 1, device=device())
    with a_group() as group:
        calls = []
        for config in (EpConfig(direct_tokens=256), EpConfig(direct_tokens=0, chunk_tokens=8)):
            recv, handle = tdkernels.ep_dispatch(
                x, ids, weights, num_experts=2, max_tokens_per_rank=64, group=group, config=config
            )
            calls.append(partial(tdkernels.ep_combine, recv.x.clone(), handle, group=group, config=EpConfig()))
        for y in check(*calls, "ep_dispatch", "chunk_tokens"):
            assert torch.equal(y, x)
        del group, calls, recv, handle


def test_chunks_of_ep_combine():
    on_ranks(2, combines_chunks)
