"""Test bodies for the stand-alone collectives. Every rank runs them; see test_collectives.py.

Every rank draws the operands of all ranks from a seed, so it can compute the expected output locally.
"""

import math
import random
import time

import pytest
import torch
import torch.distributed as dist
from torch.autograd import forward_ad

import tdkernels
from tdkernels import CollectiveConfig, PeerTimeoutError, PlanMismatchError
from tests.support.ranks import a_group, device
from tests.test_protocol import failure_of, in_any_order, poison, timeout

OPERATORS = ["all_gather", "reduce_scatter", "all_reduce"]
SMALL = {"block_bytes": 256, "num_warps": 1}  # small chunks, so that small tensors have several
# Per rank: one element, odd sizes, a chunk of SMALL in bf16 and fp32, and one element more and less.
SHAPES = [(1,), (3, 1, 5), (64,), (128,), (127,), (129,), (2, 8, 16), (37, 11)]


def config_of(changes):
    return None if changes is None else CollectiveConfig(**changes)


def draw_operands(operator, shape, dtype, seed=0, world_size=None):
    """Draw all ranks' x, [W, ...], on the CPU: small integers, or random bits if they are only moved."""
    world_size = world_size or dist.get_world_size()
    rows = world_size * shape[0] if operator == "reduce_scatter" else shape[0]
    size = (world_size, rows, *shape[1:])
    generator = torch.Generator().manual_seed(seed)
    if operator != "all_gather" or dtype in (torch.bool, torch.float32):
        return torch.randint(0 if dtype == torch.bool else -4, 5, size, generator=generator).to(dtype)
    bits = torch.randint(256, (math.prod(size) * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return bits.view(dtype).view(size)


def expected_of(operator, full, rank=None):
    """Return the expected output on a rank for all ranks' x, summed in fp32 in rank order."""
    rank = dist.get_rank() if rank is None else rank
    if operator == "all_gather":
        return full.flatten(0, 1)
    total = torch.zeros(full.shape[1:])
    for x in full:
        total += x.float()
    total = total.to(full.dtype)
    return total if operator == "all_reduce" else total.tensor_split(full.shape[0])[rank]


def same(got, expected):
    """Return whether shape, dtype and all bits are equal."""
    got, expected = got.cpu().contiguous(), expected.contiguous()
    same_type = got.shape == expected.shape and got.dtype == expected.dtype
    return same_type and torch.equal(got.view(-1).view(torch.uint8), expected.view(-1).view(torch.uint8))


def call(operator, x, changes=None, **options):
    return getattr(tdkernels, operator)(x, config=config_of(changes), **options)


def computes(operator, dtype, shapes, changes):
    rank = dist.get_rank()
    for seed, shape in enumerate(shapes):
        full = draw_operands(operator, shape, dtype, seed)
        x = full[rank].to(device())
        output = call(operator, x, changes)
        tdkernels.synchronize()
        assert same(output, expected_of(operator, full)), f"{operator} {dtype} {shape} {changes}"
        assert same(x, full[rank]) and output.is_contiguous() and output.device == x.device
        assert output.data_ptr() != x.data_ptr()


def reduces_in_rank_order(operator, dtype, changes):
    """Check sums that depend on the order of summation and on rounding only once."""
    full = torch.randn(
        draw_operands(operator, (150,), dtype).shape, generator=torch.Generator().manual_seed(7)
    ).to(dtype)
    for _ in range(2):
        time.sleep(random.Random(dist.get_rank()).uniform(0, 0.02))
        output = call(operator, full[dist.get_rank()].to(device()), changes)
        assert same(output, expected_of(operator, full))


def supports_any_layout(operator):
    rank = dist.get_rank()
    full = draw_operands(operator, (6, 4), torch.float32)
    layouts = {
        "transposed": lambda t: t.t().contiguous().t(),
        "misaligned": lambda t: torch.cat([t.new_full((1,), torch.nan), t.flatten()])[1:].view(t.shape),
        "every second": lambda t: t.repeat_interleave(2, 0)[::2],
    }
    for name, layout in layouts.items():
        x = layout(full[rank].to(device()))
        assert same(call(operator, x), expected_of(operator, full)), name
    ones = torch.ones((), device=device()).expand(full.shape[1:])
    assert same(call(operator, ones), expected_of(operator, torch.ones(full.shape)))


def supports_empty_tensors(operator):
    for shape in ((0,), (0, 3), (4, 0)):
        full = draw_operands(operator, shape, torch.bfloat16)
        for changes in (None, {"method": "torch"}):
            assert same(call(operator, full[dist.get_rank()].to(device()), changes), expected_of(operator, full))
    computes(operator, torch.bfloat16, [(5,)], None)  # the ranks are still synchronized


def supports_scalars():
    x = torch.tensor(dist.get_rank() + 1.0, device=device())
    total = dist.get_world_size() * (dist.get_world_size() + 1) / 2
    assert same(tdkernels.all_reduce(x), torch.tensor(total))
    for operator in ("all_gather", "reduce_scatter"):
        with pytest.raises(ValueError, match="at least one dimension"):
            call(operator, x)


def rejects_invalid_arguments(operator):
    """Check validation errors, which are raised before any launch."""
    x = torch.ones(dist.get_world_size() * 2, device=device())
    with pytest.raises(TypeError, match="x must be a torch.Tensor"):
        call(operator, [1.0])
    with pytest.raises(TypeError, match="plain dense tensor"):
        call(operator, torch.ones(2, 2).to_sparse())
    with pytest.raises(ValueError, match="x is on meta"):
        call(operator, x.to("meta"))
    with pytest.raises(TypeError, match="must be a CollectiveConfig"):
        getattr(tdkernels, operator)(x, config=tdkernels.GemmArConfig())
    for changes, message in (
        ({"method": "nccl"}, "method must be"), ({"exchange": "three_shot"}, "exchange must be"),
        ({"num_programs": 0}, "num_programs must be at least 1"), ({"piece_blocks": 0}, "piece_blocks must be"),
        ({"block_bytes": 1000}, "block_bytes must be a power of two"), ({"num_warps": 3}, "num_warps must be"),
    ):
        with pytest.raises(ValueError, match=message):
            call(operator, x, changes)
    foreign = {"all_gather": "two_shot", "reduce_scatter": "two_shot", "all_reduce": "copy_engine"}[operator]
    with pytest.raises(ValueError, match="exchange must be"):
        call(operator, x, {"exchange": foreign})
    if operator != "all_gather":
        with pytest.raises(TypeError, match="bfloat16, float16 and float32 are supported"):
            call(operator, x.int())
    if operator == "reduce_scatter" and dist.get_world_size() > 1:
        with pytest.raises(ValueError, match="must be divisible"):
            call(operator, x[1:])


# ---- gradients ----

_DUAL = {"all_gather": "reduce_scatter", "reduce_scatter": "all_gather"}


def computes_gradient(operator, dtype, changes):
    """Check the gradient of x, which depends on all ranks' output gradients."""
    rank, shape = dist.get_rank(), (5, 3)
    full = draw_operands(operator, shape, torch.float32).to(dtype)
    if operator == "all_reduce":  # the same on all ranks
        dy = expected = draw_operands(operator, shape, dtype, seed=1)[0]
    else:
        dual = _DUAL[operator]
        dys = draw_operands(dual, shape, torch.float32, seed=1).to(dtype)
        dy, expected = dys[rank], expected_of(dual, dys)
    x = full[rank].to(device()).requires_grad_()
    output = call(operator, x, changes)
    output.backward(dy.to(device()))
    assert same(output.detach(), expected_of(operator, full)) and same(x.grad, expected)
    x.grad = None
    (2 * call(operator, x, changes)).sum().backward()  # a gradient with strides of zero
    assert same(x.grad, torch.full(x.shape, 2.0 * (dist.get_world_size() if operator == "all_gather" else 1)).to(dtype))
    with torch.no_grad():
        assert not call(operator, x, changes).requires_grad


def rejects_second_derivatives(operator):
    x = torch.ones(dist.get_world_size(), device=device(), requires_grad=True)
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.autograd.grad(call(operator, x).sum(), x, create_graph=True)


def rejects_forward_mode(operator):
    x = torch.ones(dist.get_world_size(), device=device())
    with forward_ad.dual_level():
        with pytest.raises(NotImplementedError, match="jvp"):
            call(operator, forward_ad.make_dual(x, torch.ones_like(x)))


# ---- workspace reuse ----


def reuses_poisoned_memory(variants):
    """Check messages of changing size with every variant in turn, on a workspace that is filled with NaN in between."""
    for turn in range(2):
        for seed, (operator, changes) in enumerate(variants):
            dtype = [torch.float32, torch.bfloat16, torch.float16][(turn + seed) % 3]
            shape = SHAPES[(3 * turn + 2 * seed) % len(SHAPES)]
            full = draw_operands(operator, shape, dtype, seed)
            outputs = [call(operator, full[dist.get_rank()].to(device()), changes) for _ in range(3)]
            poison()  # outputs must not alias the workspace
            tdkernels.synchronize()
            assert all(same(output, expected_of(operator, full)) for output in outputs), (operator, changes, shape)


def runs_ahead_of_peers(operator, changes, shape, calls):
    """Check back-to-back calls with fresh data while ranks run ahead of each other."""
    fulls = [draw_operands(operator, shape, torch.float32, seed) for seed in range(calls)]
    xs = [full[dist.get_rank()].to(device()) for full in fulls]
    call(operator, xs[0], changes)
    with in_any_order(seed=calls):
        outputs = [call(operator, x, changes) for x in xs]
    tdkernels.synchronize()
    for output, full in zip(outputs, fulls, strict=True):
        assert same(output, expected_of(operator, full))


def waits_for_a_slow_rank(operator, changes):
    for slow in range(dist.get_world_size()):
        full = draw_operands(operator, (150,), torch.float32, slow)
        if dist.get_rank() == slow:
            time.sleep(0.2)
        output = call(operator, full[dist.get_rank()].to(device()), changes)
        assert same(output, expected_of(operator, full))


# ---- groups ----


def computes_in_subgroups(variants):
    rank = dist.get_rank()
    with a_group([0, 1]) as first_two, a_group([2, 3]) as last_two, a_group([1, 2, 3]) as last_three:
        for _ in range(2):
            for group, members in ((first_two, [0, 1]), (last_two, [2, 3]), (last_three, [1, 2, 3])):
                if rank in members:
                    for operator, changes in variants:
                        full = draw_operands(operator, (40 + members[0], 3), torch.bfloat16, members[0], len(members))
                        own = members.index(rank)
                        output = call(operator, full[own].to(device()), changes, group=group)
                        tdkernels.synchronize()
                        assert same(output, expected_of(operator, full, own)), (operator, changes, members)
        del first_two, last_two, last_three, group


# ---- disagreeing and missing ranks ----


def reports_disagreement(operator, field):
    """Check that every rank raises if rank 1 of three makes a different call, and that the group stays usable."""
    odd = dist.get_rank() == 1
    shape, dtype, changes = (6, 4), torch.float32, None
    if odd and field == "shape":
        shape = (4, 6)
    elif odd and field == "rows":
        shape = (9, 4)
    elif odd and field == "no rows":
        shape = (0, 4)
    elif odd and field == "dtype":
        dtype = torch.float16
    if field == "config":
        changes = SMALL | {"num_programs": 1 + odd}
    elif field == "method" and odd:
        changes = {"method": "torch"}
    with a_group() as group:
        rows = 1 if operator != "reduce_scatter" else dist.get_world_size()
        x = torch.ones(rows * shape[0], *shape[1:], dtype=dtype, device=device())
        other = OPERATORS[OPERATORS.index(operator) - 1] if odd and field == "operator" else operator
        error = failure_of(call, other, x, changes, group=group)
        assert type(error) is ValueError and "the ranks disagree" in str(error), repr(error)
        name = {"method": "config", "rows": "shape", "no rows": "shape"}.get(field, field)
        assert f"{name} is " in str(error) and "on rank 1" in str(error), str(error)
        full = draw_operands(operator, (6, 4), torch.float32)
        output = call(operator, full[dist.get_rank()].to(device()), group=group)
        assert same(output, expected_of(operator, full))
        del group


def detects_mismatch_of_cached_plans(operator, changes, other_shape, other_changes):
    """Check that different cached calls fail. No consensus check runs for them; only the signals can detect it."""
    with a_group() as group:
        variants = [((150,), changes), (other_shape, other_changes)]
        calls = [(draw_operands(operator, shape, torch.float32), changes) for shape, changes in variants]
        for full, config in calls * 2:
            output = call(operator, full[dist.get_rank()].to(device()), config, group=group)
            tdkernels.synchronize()
            assert same(output, expected_of(operator, full))
        dist.barrier()
        full, config = calls[dist.get_rank() == 1]
        with timeout(1.0):
            error = failure_of(call, operator, full[dist.get_rank()].to(device()), config, group=group)
        assert isinstance(error, PlanMismatchError | PeerTimeoutError) and operator in str(error), repr(error)
        second_error = failure_of(call, operator, full[dist.get_rank()].to(device()), config, group=group)
        assert type(second_error) is type(error) and str(second_error) == str(error), repr(second_error)
        del group


def loses_rank_1(variants, leave, timeout_s):
    """Let rank 1 exit after two calls of each variant; check that the others raise, also in later calls."""
    rank, groups, fulls = dist.get_rank(), [], []
    for operator, changes in variants:
        groups.append(dist.new_group())  # one per variant: after a timeout a rank does not wait in that group
        fulls.append(draw_operands(operator, (150,), torch.float32))
        x = fulls[-1][rank].to(device())
        for _ in range(2):
            assert same(call(operator, x, changes, group=groups[-1]), expected_of(operator, fulls[-1]))
    tdkernels.set_timeout(timeout_s)
    dist.barrier()
    if rank == 1:
        leave()
    errors = []
    for (operator, changes), group, full in zip(variants, groups, fulls, strict=True):
        x = full[rank].to(device())
        start = time.monotonic()
        errors.append(failure_of(call, operator, x, changes, group=group))
        assert time.monotonic() - start < timeout_s + 5.0
        assert str(failure_of(call, operator, x, changes, group=group)) == str(errors[-1])
    return errors


def times_out_before_peers(changes):
    """Let rank 1 arrive after rank 0 has timed out; ranks that need a sum of rank 0 must fail, too."""
    rank = dist.get_rank()
    with a_group() as group:
        full = draw_operands("all_reduce", (600,), torch.float32)
        x = full[rank].to(device())
        for _ in range(2):
            assert same(call("all_reduce", x, changes, group=group), expected_of("all_reduce", full))
        dist.barrier()
        if rank == 1:
            time.sleep(1.5)
        with timeout(0.5 if rank == 0 else 4.0):
            try:
                output = call("all_reduce", x, changes, group=group)
                tdkernels.synchronize()
                outcome = "right" if same(output, expected_of("all_reduce", full)) else "wrong"
            except PeerTimeoutError as error:
                outcome = f"missed {error.peer}"
        del group
    return outcome


def uses_tuned_config(operator):
    """Tune a message size, check a call without a config, and return what explain() reports for it."""
    full = draw_operands(operator, (600,), torch.float32)
    x = full[dist.get_rank()].to(device())
    elements = full[0].numel() * (dist.get_world_size() if operator == "all_gather" else 1)
    tdkernels.autotune.tune(operator, elements, dtype=torch.float32, device=device(), budget_s=5.0)
    with tdkernels.autotune.mode("cached"):
        assert same(call(operator, x), expected_of(operator, full))
        explanation = tdkernels.explain(operator, x)
    with tdkernels.autotune.mode("on"):  # int32 is not tunable
        if operator == "all_gather":
            assert same(call(operator, x.int()), expected_of(operator, full.int()))
    return explanation.method, explanation.source, str(explanation)
