"""Large operands on GPUs, with transfers long enough for races between communication and compute.

Operands are -1, 0 and 1, so every sum is exact and a single stale or premature element is detected. Ranks start each
call with a random delay, and the receive buffers are filled with NaN in between.
"""

import dataclasses

import pytest
import torch
import torch.distributed as dist

import tdkernels
from tdkernels.ops.collectives.config import default_config
from tdkernels.ops.collectives.norm.config import default_config as default_norm_config
from tdkernels.ops.collectives.norm.reference import norm_ref
from tdkernels.ops.common.tile_config import LARGE
from tdkernels.ops.common.torch_collectives import all_gather_rows
from tdkernels.ops.dense.launch_direct import DIRECT_LARGE
from tdkernels.symm import resolve_group
from tdkernels.symm.group import group_state
from tests.support.ranks import ASKED, DEVICE, device, on_ranks

pytestmark = pytest.mark.skipif(DEVICE == "cpu" or not torch.cuda.is_available(), reason="needs GPUs")

REPEATS = 12
RANKS = [2, 3, 4, 8]
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def enough_gpus(world_size):
    """Skip the test if ranks would run on the CPU, which is too slow for these operands."""
    if ASKED != "shared" and world_size > torch.cuda.device_count():
        pytest.skip(f"needs {world_size} GPUs")


def ternary(*shape):
    return torch.randint(-1, 2, shape, device=device()).to(BF16)


def exact_product(a, b):
    """Return a @ b.T for small integers, rounded once."""
    return (a.float() @ b.float().t()).to(BF16)


def poison_and_skew(seed):
    """Fill the receive buffers with NaN while they are unused; then delay each rank randomly."""
    torch.cuda.synchronize()
    dist.barrier()
    for workspace in group_state(resolve_group()).workspaces.values():
        if workspace.buffer is not None:
            workspace.buffer.tensor(workspace.rank)[workspace.data_offset :].fill_(0xFF)
    torch.cuda.synchronize()
    dist.barrier()
    delay = torch.Generator().manual_seed(seed * dist.get_world_size() + dist.get_rank())
    torch.cuda._sleep(int(torch.randint(0, 2_000_000, (), generator=delay)))


def check(name, got, expected):
    wrong = (got != expected).sum().item() + got.isnan().sum().item()
    assert wrong == 0, f"{name}: {wrong} of {got.numel()} elements are wrong"


def ag_gemm_is_exact(rows, n, k, transport):
    torch.manual_seed(dist.get_rank())
    for repeat in range(REPEATS):
        x, weight = ternary(rows, k).requires_grad_(), ternary(n, k).requires_grad_()
        dy = ternary(dist.get_world_size() * rows, n)
        count = 1 + repeat % 3
        if transport == "parts":
            config = tdkernels.AgGemmConfig(method="parts", pieces=count)
        elif transport == "specialized":
            pushing = (16, 64, 128)[repeat % 3]
            config = tdkernels.AgGemmConfig(
                tiles=LARGE, num_comm_sms=pushing, chunk_tiles=1 + repeat % 2, warp_specialize=True
            )
        else:
            options = {"split_k" if transport == "one_shot" else "chunk_tiles": count}
            config = tdkernels.AgGemmConfig(transport=transport, **options)
        poison_and_skew(repeat)
        y = tdkernels.ag_gemm(x, weight, config=config)
        y.backward(dy)
        tdkernels.synchronize()
        full = all_gather_rows(x.detach())
        check("y", y, exact_product(full, weight))
        check("dweight", weight.grad, exact_product(dy.t(), full.t()))
        dx = dy.float() @ weight.detach().float()
        dist.all_reduce(dx)
        check("dx", x.grad, dx.to(BF16).chunk(dist.get_world_size())[dist.get_rank()])


def gemm_rs_is_exact(rows, n, k, transport):
    torch.manual_seed(dist.get_rank())
    for repeat in range(REPEATS):
        count = 1 + repeat % 3
        if transport == "parts":
            config = tdkernels.GemmRsConfig(method="parts", pieces=count)
        elif transport == "specialized":
            config = tdkernels.GemmRsConfig(tiles=DIRECT_LARGE, transport="direct", warp_specialize=True)
        else:
            config = tdkernels.GemmRsConfig(transport=transport, split_k=count if transport == "one_shot" else 1)
        x, weight = ternary(dist.get_world_size() * rows, k).requires_grad_(), ternary(n, k).requires_grad_()
        dz = ternary(rows, n)
        poison_and_skew(repeat)
        z = tdkernels.gemm_rs(x, weight, config=config)
        z.backward(dz)
        tdkernels.synchronize()
        full = all_gather_rows(dz)
        check("dx", x.grad, exact_product(full, weight.detach().t()))
        check("dweight", weight.grad, exact_product(full.t(), x.detach().t()))
        sum_of_all = x.detach().float() @ weight.detach().float().t()
        dist.all_reduce(sum_of_all)
        check("z", z, sum_of_all.to(BF16).chunk(dist.get_world_size())[dist.get_rank()])


def gemm_ar_is_exact(rows, n, k, exchange):
    torch.manual_seed(dist.get_rank())
    shared_rng = torch.Generator(device()).manual_seed(0)
    for repeat in range(REPEATS):
        x, weight = ternary(rows, k).requires_grad_(), ternary(n, k).requires_grad_()
        dz = torch.randint(-1, 2, (rows, n), device=device(), generator=shared_rng).to(BF16)
        if exchange == "one_shot":
            config = tdkernels.GemmArConfig(exchange=exchange, split_k=1 + repeat % 3)
        elif exchange == "direct":
            config = tdkernels.GemmArConfig(transport="direct", num_comm_sms=8 * (repeat % 3))
        else:
            config = tdkernels.GemmArConfig(exchange=exchange, item_tiles=1 + repeat % 3)
        poison_and_skew(repeat)
        z = tdkernels.gemm_ar(x, weight, config=config)
        z.backward(dz)
        tdkernels.synchronize()
        check("dx", x.grad, exact_product(dz, weight.detach().t()))
        check("dweight", weight.grad, exact_product(dz.t(), x.detach().t()))
        sum_of_all = x.detach().float() @ weight.detach().float().t()
        dist.all_reduce(sum_of_all)
        check("z", z, sum_of_all.to(BF16))


def expected_output(operator, x):
    """Compute the expected output in plain torch; sums of these numbers are exact."""
    if operator == "all_gather":
        return all_gather_rows(x)
    total = x.float()
    dist.all_reduce(total)
    total = total.to(BF16)
    return total if operator == "all_reduce" else total.chunk(dist.get_world_size())[dist.get_rank()]


def collective_is_exact(operator, exchange, elements):
    torch.manual_seed(dist.get_rank())
    rows = elements // (dist.get_world_size() if operator == "all_gather" else 1)
    default = default_config(operator, elements * 2, dist.get_world_size(), device(), exchange)
    others = [{"piece_blocks": 3, "num_programs": 5}, {"block_bytes": 4096, "num_warps": 4, "num_programs": 600}]
    for repeat in range(REPEATS):
        config = dataclasses.replace(default, **[{}, *others][repeat % 3])
        x = ternary(rows)
        poison_and_skew(repeat)
        output = getattr(tdkernels, operator)(x, config=config)
        tdkernels.synchronize()
        check(operator, output, expected_output(operator, x))


def back_to_back_calls_are_exact(operator, exchange, elements):
    """Check back-to-back calls, so that ranks run ahead of each other as far as possible."""
    torch.manual_seed(dist.get_rank())
    rows = elements // (dist.get_world_size() if operator == "all_gather" else 1)
    config = default_config(operator, elements * 2, dist.get_world_size(), device(), exchange)
    xs = [ternary(rows) for _ in range(16)]
    expected = [expected_output(operator, x) for x in xs]
    for repeat in range(REPEATS):
        poison_and_skew(repeat)
        outputs = [getattr(tdkernels, operator)(x, config=config) for _ in range(4) for x in xs]
        tdkernels.synchronize()
        for output, reference in zip(outputs, expected * 4, strict=True):
            check(operator, output, reference)


COLLECTIVES = [
    ("all_gather", "one_shot"), ("all_gather", "copy_engine"), ("reduce_scatter", "one_shot"),
    ("all_reduce", "one_shot"), ("all_reduce", "two_shot"),
]


# 1 KiB to 96 MiB, all divisible by 2, 3 and 4 ranks. The shards of the second size are not aligned. It is doubled for 8
# ranks.
@pytest.mark.parametrize("world_size", RANKS)
@pytest.mark.parametrize("elements", [768, 12 * 4097, 3 << 18, 3 << 24])
@pytest.mark.parametrize("operator, exchange", COLLECTIVES)
def test_collective(world_size, operator, exchange, elements):
    on_ranks(world_size, collective_is_exact, operator, exchange, elements * (1 + (elements % world_size > 0)))


@pytest.mark.parametrize("world_size", [2, 4, 8])
@pytest.mark.parametrize("elements", [768, 3 << 18])
@pytest.mark.parametrize("operator, exchange", COLLECTIVES)
def test_back_to_back_collectives(world_size, operator, exchange, elements):
    on_ranks(world_size, back_to_back_calls_are_exact, operator, exchange, elements)


def norm_is_exact(operator, exchange, rows, hidden):
    """Check r exactly and y within its rounding, with several programs per row and with several rows per signal."""
    torch.manual_seed(dist.get_rank())
    shared_rng = torch.Generator(device()).manual_seed(0)
    default = default_norm_config(rows, hidden, BF16, dist.get_world_size(), device(), exchange)
    others = [{"row_programs": 4, "piece_rows": 3, "num_programs": 9}, {"num_warps": 4, "num_programs": 600}]
    for repeat in range(REPEATS):
        config = dataclasses.replace(default, **[{}, *others][repeat % 3])
        x = ternary(rows, hidden)
        residual, weight = (
            torch.randint(-1, 2, size, device=device(), generator=shared_rng).to(BF16) for size in (x.shape, (hidden,))
        )
        poison_and_skew(repeat)
        y, r = getattr(tdkernels, operator)(x, residual, weight, eps=1e-5, config=config)
        tdkernels.synchronize()
        check("r", r, (expected_output("all_reduce", x).float() + residual.float()).to(BF16))
        exact = norm_ref(r.float(), weight.float(), None, 1e-5, operator == "all_reduce_layer_norm")
        torch.testing.assert_close(y.float(), exact, rtol=2.0**-8, atol=2.0**-16)


@pytest.mark.parametrize("world_size", RANKS)
@pytest.mark.parametrize("rows, hidden", [(1, 8192), (64, 16384), (301, 1001), (2048, 4096)])
@pytest.mark.parametrize("exchange", ["one_shot", "two_shot"])
@pytest.mark.parametrize("operator", ["all_reduce_rms_norm", "all_reduce_layer_norm"])
def test_norm(world_size, operator, exchange, rows, hidden):
    on_ranks(world_size, norm_is_exact, operator, exchange, rows, hidden)


# Partials of gemm_rs and gemm_ar are sent in bf16, which represents integers up to 256 exactly. With K / W of 2048 this
# is 5.6 standard deviations; a larger partial would fail on every rank in every run.
@pytest.mark.parametrize("world_size", RANKS)
@pytest.mark.parametrize("transport", ["push", "copy_engine", "parts"])
@pytest.mark.parametrize("shape", [(1024, 1024, 4096), (2048, 512, 16384), (777, 520, 1032)], ids=str)
def test_ag_gemm(world_size, transport, shape):
    on_ranks(world_size, ag_gemm_is_exact, *shape, transport)


# Small M and large N or K: a single row, and up to several tiles of rows.
SMALL_M = pytest.mark.parametrize("rows, n, k", [(1, 16384, 2048), (32, 8192, 1024), (97, 520, 1032)], ids=str)


@pytest.mark.parametrize("world_size", RANKS)
@pytest.mark.parametrize("exact", [ag_gemm_is_exact, gemm_rs_is_exact])
@SMALL_M
def test_small_m(world_size, exact, rows, n, k):
    # ag_gemm sends partials of dx, which are sums over N.
    on_ranks(world_size, exact, rows, *((k, n) if exact is ag_gemm_is_exact else (n, k)), "one_shot")


@pytest.mark.parametrize("world_size", RANKS)
@pytest.mark.parametrize("transport", ["forward", "direct", "parts"])
@pytest.mark.parametrize("shape", [(1024, 4096, 1024), (2048, 16384, 512), (777, 520, 1032)], ids=str)
def test_gemm_rs(world_size, transport, shape):
    on_ranks(world_size, gemm_rs_is_exact, *shape, transport)


# On GPUs other than Hopper, these configs run other kernels. TMA needs N, or N / W, to be a multiple of 16.
@pytest.mark.parametrize("world_size", RANKS)
@pytest.mark.parametrize(
    "exact, shape",
    [
        (ag_gemm_is_exact, (1024, 1024, 4096)),
        (ag_gemm_is_exact, (2048, 512, 16384)),
        (ag_gemm_is_exact, (777, 528, 1032)),
        (gemm_rs_is_exact, (1024, 4096, 1024)),
        (gemm_rs_is_exact, (2048, 16384, 512)),
        (gemm_rs_is_exact, (777, 528, 1032)),
    ],
)
def test_specialized(world_size, exact, shape):
    on_ranks(world_size, exact, *shape, "specialized")


# 777 rows are divisible by 3 ranks only. one_shot is meant for small M and large N.
@pytest.mark.parametrize("world_size", RANKS)
@pytest.mark.parametrize(
    "exchange, shape",
    [
        ("two_shot", (1024, 4096, 1024)),
        ("two_shot", (2048, 16384, 512)),
        ("two_shot", (777, 520, 1032)),
        ("direct", (1024, 4096, 1024)),
        ("direct", (2048, 16384, 512)),
        ("direct", (777, 520, 1032)),
        ("one_shot", (1, 16384, 2048)),
        ("one_shot", (64, 8192, 1024)),
        ("one_shot", (777, 520, 1032)),
    ],
    ids=str,
)
def test_gemm_ar(world_size, exchange, shape):
    on_ranks(world_size, gemm_ar_is_exact, *shape, exchange)
