"""Sizes at which transfers take long enough to be overtaken; only GPUs do that, so only they run this.

Operands are -1, 0 and 1, so that every sum is exact and a single stale or early element shows as an inequality. Ranks
start each call at their own time, and what the ranks receive into is filled with NaN in between.
"""

import dataclasses

import pytest
import torch
import torch.distributed as dist

import tdkernels
from tdkernels.ops.collectives.config import default_config
from tdkernels.ops.common.torch_collectives import all_gather_rows
from tdkernels.symm import resolve_group
from tdkernels.symm.group import group_state
from tests.support.ranks import DEVICE, device, on_ranks

pytestmark = pytest.mark.skipif(DEVICE == "cpu" or not torch.cuda.is_available(), reason="needs GPUs")

REPEATS = 12
BF16 = torch.bfloat16


def ternary(*shape):
    return torch.randint(-1, 2, shape, device=device()).to(BF16)


def exact_product(a, b):
    """a @ b.T of small integers, rounded once."""
    return (a.float() @ b.float().t()).to(BF16)


def poison_and_skew(seed):
    """Fill what peers write to with NaN while nobody uses it; then let each rank begin at its own time."""
    torch.cuda.synchronize()
    dist.barrier()
    for workspace in group_state(resolve_group()).workspaces.values():
        if workspace.buffer is not None:
            workspace.buffer.tensor(workspace.rank)[workspace.data_offset :].fill_(0xFF)
    torch.cuda.synchronize()
    dist.barrier()
    late = torch.Generator().manual_seed(seed * dist.get_world_size() + dist.get_rank())
    torch.cuda._sleep(int(torch.randint(0, 2_000_000, (), generator=late)))


def check(name, got, expected):
    wrong = (got != expected).sum().item() + got.isnan().sum().item()
    assert wrong == 0, f"{name}: {wrong} of {got.numel()} elements are wrong"


def ag_gemm_is_exact(rows, n, k, transport):
    torch.manual_seed(dist.get_rank())
    for repeat in range(REPEATS):
        x, weight = ternary(rows, k).requires_grad_(), ternary(n, k).requires_grad_()
        dy = ternary(dist.get_world_size() * rows, n)
        number = 1 + repeat % 3
        if transport == "parts":
            config = tdkernels.AgGemmConfig(method="parts", pieces=number)
        else:
            more = {"split_k" if transport == "one_shot" else "chunk_tiles": number}
            config = tdkernels.AgGemmConfig(transport=transport, **more)
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
        number = 1 + repeat % 3
        if transport == "parts":
            config = tdkernels.GemmRsConfig(method="parts", pieces=number)
        else:
            config = tdkernels.GemmRsConfig(transport=transport, split_k=number if transport == "one_shot" else 1)
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
    of_all = torch.Generator(device()).manual_seed(0)
    for repeat in range(REPEATS):
        x, weight = ternary(rows, k).requires_grad_(), ternary(n, k).requires_grad_()
        dz = torch.randint(-1, 2, (rows, n), device=device(), generator=of_all).to(BF16)
        if exchange == "one_shot":
            config = tdkernels.GemmArConfig(exchange=exchange, split_k=1 + repeat % 3)
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


def of_collectives(operator, x):
    """What the operator has to give for x, by plain torch, in numbers that add up exactly."""
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
        check(operator, output, of_collectives(operator, x))


def many_calls_are_exact(operator, exchange, elements):
    """Nothing between the calls, so that ranks run ahead of each other by as much as they can."""
    torch.manual_seed(dist.get_rank())
    rows = elements // (dist.get_world_size() if operator == "all_gather" else 1)
    config = default_config(operator, elements * 2, dist.get_world_size(), device(), exchange)
    xs = [ternary(rows) for _ in range(16)]
    expected = [of_collectives(operator, x) for x in xs]
    for repeat in range(REPEATS):
        poison_and_skew(repeat)
        outputs = [getattr(tdkernels, operator)(x, config=config) for _ in range(4) for x in xs]
        tdkernels.synchronize()
        for output, wanted in zip(outputs, expected * 4, strict=True):
            check(operator, output, wanted)


COLLECTIVES = [
    ("all_gather", "one_shot"), ("all_gather", "copy_engine"), ("reduce_scatter", "one_shot"),
    ("all_reduce", "one_shot"), ("all_reduce", "two_shot"),
]


# 1 KiB to 96 MiB; all of them divisible by 2, 3 and 4 ranks, but the shares of the second are not aligned.
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("elements", [768, 12 * 4097, 3 << 18, 3 << 24])
@pytest.mark.parametrize("operator, exchange", COLLECTIVES)
def test_collective(world_size, operator, exchange, elements):
    on_ranks(world_size, collective_is_exact, operator, exchange, elements)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("elements", [768, 3 << 18])
@pytest.mark.parametrize("operator, exchange", COLLECTIVES)
def test_many_calls_of_a_collective(world_size, operator, exchange, elements):
    on_ranks(world_size, many_calls_are_exact, operator, exchange, elements)


# Partials of gemm_rs and gemm_ar travel in bf16, which holds integers up to 256: K / W of 2048 keeps within 5.6
# standard deviations of that, and a sum that does not would fail for every rank, every time.
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("transport", ["push", "copy_engine", "parts"])
@pytest.mark.parametrize("shape", [(1024, 1024, 4096), (2048, 512, 16384), (777, 520, 1032)], ids=str)
def test_ag_gemm(world_size, transport, shape):
    on_ranks(world_size, ag_gemm_is_exact, *shape, transport)


# Few rows of a wide product, one of them or so many that they take several tiles.
FEW_ROWS = pytest.mark.parametrize("rows, n, k", [(1, 16384, 2048), (32, 8192, 1024), (97, 520, 1032)], ids=str)


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("exact", [ag_gemm_is_exact, gemm_rs_is_exact])
@FEW_ROWS
def test_few_rows(world_size, exact, rows, n, k):
    # Of ag_gemm the partials of dx travel, sums over N.
    on_ranks(world_size, exact, rows, *((k, n) if exact is ag_gemm_is_exact else (n, k)), "one_shot")


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("transport", ["forward", "direct", "parts"])
@pytest.mark.parametrize("shape", [(1024, 4096, 1024), (2048, 16384, 512), (777, 520, 1032)], ids=str)
def test_gemm_rs(world_size, transport, shape):
    on_ranks(world_size, gemm_rs_is_exact, *shape, transport)


# 777 rows are divided by 3 ranks only; few rows of a wide product are what one_shot is for.
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize(
    "exchange, shape",
    [
        ("two_shot", (1024, 4096, 1024)),
        ("two_shot", (2048, 16384, 512)),
        ("two_shot", (777, 520, 1032)),
        ("one_shot", (1, 16384, 2048)),
        ("one_shot", (64, 8192, 1024)),
        ("one_shot", (777, 520, 1032)),
    ],
    ids=str,
)
def test_gemm_ar(world_size, exchange, shape):
    on_ranks(world_size, gemm_ar_is_exact, *shape, exchange)
