"""What the collectives alone are asked, as functions that every rank runs. test_collectives.py asks.

Every rank makes the same operands of all ranks from a seed, so it knows what is to come out.
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
SMALL = {"block_bytes": 256, "num_warps": 1}  # so that few elements are many pieces
# Of one rank: one element, odd numbers, a piece of SMALL in bf16 and in fp32, one more, and one less.
SHAPES = [(1,), (3, 1, 5), (64,), (128,), (127,), (129,), (2, 8, 16), (37, 11)]


def config_of(changes):
    return None if changes is None else CollectiveConfig(**changes)


def whole(operator, shape, dtype, seed=0, world_size=None):
    """All ranks' x, [W, …], on the CPU: small numbers, or any bits where they are only moved."""
    world_size = world_size or dist.get_world_size()
    rows = world_size * shape[0] if operator == "reduce_scatter" else shape[0]
    size = (world_size, rows, *shape[1:])
    generator = torch.Generator().manual_seed(seed)
    if operator != "all_gather" or dtype in (torch.bool, torch.float32):
        return torch.randint(0 if dtype == torch.bool else -4, 5, size, generator=generator).to(dtype)
    bits = torch.randint(256, (math.prod(size) * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return bits.view(dtype).view(size)


def expected_of(operator, full, rank=None):
    """This rank's output for all ranks' x, summed in fp32 in rank order."""
    rank = dist.get_rank() if rank is None else rank
    if operator == "all_gather":
        return full.flatten(0, 1)
    total = torch.zeros(full.shape[1:])
    for x in full:
        total += x.float()
    total = total.to(full.dtype)
    return total if operator == "all_reduce" else total.tensor_split(full.shape[0])[rank]


def same(got, expected):
    """To the bit."""
    got, expected = got.cpu().contiguous(), expected.contiguous()
    is_like = got.shape == expected.shape and got.dtype == expected.dtype
    return is_like and torch.equal(got.view(-1).view(torch.uint8), expected.view(-1).view(torch.uint8))


def call(operator, x, changes=None, **options):
    return getattr(tdkernels, operator)(x, config=config_of(changes), **options)


def computes(operator, dtype, shapes, changes):
    rank = dist.get_rank()
    for seed, shape in enumerate(shapes):
        full = whole(operator, shape, dtype, seed)
        x = full[rank].to(device())
        output = call(operator, x, changes)
        tdkernels.synchronize()
        assert same(output, expected_of(operator, full)), f"{operator} {dtype} {shape} {changes}"
        assert same(x, full[rank]) and output.is_contiguous() and output.device == x.device
        assert output.data_ptr() != x.data_ptr()


def adds_in_rank_order(operator, dtype, changes):
    """Numbers whose sum depends on the order, and on being rounded once."""
    full = torch.randn(whole(operator, (150,), dtype).shape, generator=torch.Generator().manual_seed(7)).to(dtype)
    for _ in range(2):
        time.sleep(random.Random(dist.get_rank()).uniform(0, 0.02))
        output = call(operator, full[dist.get_rank()].to(device()), changes)
        assert same(output, expected_of(operator, full))


def takes_any_layout(operator):
    rank = dist.get_rank()
    full = whole(operator, (6, 4), torch.float32)
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


def takes_what_is_empty(operator):
    for shape in ((0,), (0, 3), (4, 0)):
        full = whole(operator, shape, torch.bfloat16)
        for changes in (None, {"method": "torch"}):
            assert same(call(operator, full[dist.get_rank()].to(device()), changes), expected_of(operator, full))
    computes(operator, torch.bfloat16, [(5,)], None)  # the ranks are still in step


def takes_scalars():
    x = torch.tensor(dist.get_rank() + 1.0, device=device())
    total = dist.get_world_size() * (dist.get_world_size() + 1) / 2
    assert same(tdkernels.all_reduce(x), torch.tensor(total))
    for operator in ("all_gather", "reduce_scatter"):
        with pytest.raises(ValueError, match="at least one dimension"):
            call(operator, x)


def refuses(operator):
    """Before anything is launched, so each rank by itself."""
    x = torch.ones(dist.get_world_size() * 2, device=device())
    with pytest.raises(TypeError, match="x must be a torch.Tensor"):
        call(operator, [1.0])
    with pytest.raises(TypeError, match="plain dense tensor"):
        call(operator, torch.ones(2, 2).to_sparse())
    with pytest.raises(ValueError, match="x is on meta"):
        call(operator, x.to("meta"))
    with pytest.raises(TypeError, match="must be a CollectiveConfig"):
        getattr(tdkernels, operator)(x, config=tdkernels.GemmArConfig())
    for changes, words in (
        ({"method": "nccl"}, "method must be"), ({"exchange": "three_shot"}, "exchange must be"),
        ({"num_programs": 0}, "num_programs must be at least 1"), ({"piece_blocks": 0}, "piece_blocks must be"),
        ({"block_bytes": 1000}, "block_bytes must be a power of two"), ({"num_warps": 3}, "num_warps must be"),
    ):
        with pytest.raises(ValueError, match=words):
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


def has_a_gradient(operator, dtype, changes):
    """That of each rank's x, from all ranks' gradients of the output."""
    rank, shape = dist.get_rank(), (5, 3)
    full = whole(operator, shape, torch.float32).to(dtype)
    if operator == "all_reduce":  # the same on all ranks
        dy = expected = whole(operator, shape, dtype, seed=1)[0]
    else:
        dual = _DUAL[operator]
        dys = whole(dual, shape, torch.float32, seed=1).to(dtype)
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


def refuses_second_derivatives(operator):
    x = torch.ones(dist.get_world_size(), device=device(), requires_grad=True)
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.autograd.grad(call(operator, x).sum(), x, create_graph=True)


def refuses_forward_mode(operator):
    x = torch.ones(dist.get_world_size(), device=device())
    with forward_ad.dual_level():
        with pytest.raises(NotImplementedError, match="jvp"):
            call(operator, forward_ad.make_dual(x, torch.ones_like(x)))


# ---- the same memory for many calls ----


def reuses_poisoned_memory(ways):
    """Growing and shrinking messages by every way in turn, between two of which all buffers are filled with NaNs."""
    for turn in range(2):
        for seed, (operator, changes) in enumerate(ways):
            dtype = [torch.float32, torch.bfloat16, torch.float16][(turn + seed) % 3]
            shape = SHAPES[(3 * turn + 2 * seed) % len(SHAPES)]
            full = whole(operator, shape, dtype, seed)
            outputs = [call(operator, full[dist.get_rank()].to(device()), changes) for _ in range(3)]
            poison()  # what we got is ours and does not change with the workspace
            tdkernels.synchronize()
            assert all(same(output, expected_of(operator, full)) for output in outputs), (operator, changes, shape)


def outruns_its_peers(operator, changes, shape, calls):
    """Calls with fresh data and nothing between them, while the ranks run ahead of each other."""
    fulls = [whole(operator, shape, torch.float32, seed) for seed in range(calls)]
    xs = [full[dist.get_rank()].to(device()) for full in fulls]
    call(operator, xs[0], changes)
    with in_any_order(seed=calls):
        outputs = [call(operator, x, changes) for x in xs]
    tdkernels.synchronize()
    for output, full in zip(outputs, fulls, strict=True):
        assert same(output, expected_of(operator, full))


def waits_for_a_slow_rank(operator, changes):
    for slow in range(dist.get_world_size()):
        full = whole(operator, (150,), torch.float32, slow)
        if dist.get_rank() == slow:
            time.sleep(0.2)
        output = call(operator, full[dist.get_rank()].to(device()), changes)
        assert same(output, expected_of(operator, full))


# ---- groups ----


def uses_subgroups(ways):
    rank = dist.get_rank()
    with a_group([0, 1]) as low, a_group([2, 3]) as high, a_group([1, 2, 3]) as most:
        for _ in range(2):
            for group, members in ((low, [0, 1]), (high, [2, 3]), (most, [1, 2, 3])):
                if rank in members:
                    for operator, changes in ways:
                        full = whole(operator, (40 + members[0], 3), torch.bfloat16, members[0], len(members))
                        own = members.index(rank)
                        output = call(operator, full[own].to(device()), changes, group=group)
                        tdkernels.synchronize()
                        assert same(output, expected_of(operator, full, own)), (operator, changes, members)
        del low, high, most, group


# ---- ranks that do not agree, or do not come ----


def disagrees(operator, what):
    """Rank 1 of three comes with something else; everybody is told, and the group is as good as before."""
    odd = dist.get_rank() == 1
    shape, dtype, changes = (6, 4), torch.float32, None
    if odd and what == "shape":
        shape = (4, 6)
    elif odd and what == "rows":
        shape = (9, 4)
    elif odd and what == "no rows":
        shape = (0, 4)
    elif odd and what == "dtype":
        dtype = torch.float16
    if what == "config":
        changes = SMALL | {"num_programs": 1 + odd}
    elif what == "method" and odd:
        changes = {"method": "torch"}
    with a_group() as group:
        rows = 1 if operator != "reduce_scatter" else dist.get_world_size()
        x = torch.ones(rows * shape[0], *shape[1:], dtype=dtype, device=device())
        other = OPERATORS[OPERATORS.index(operator) - 1] if odd and what == "operator" else operator
        error = failure_of(call, other, x, changes, group=group)
        assert type(error) is ValueError and "the ranks disagree" in str(error), repr(error)
        name = {"method": "config", "rows": "shape", "no rows": "shape"}.get(what, what)
        assert f"{name} is " in str(error) and "on rank 1" in str(error), str(error)
        full = whole(operator, (6, 4), torch.float32)
        output = call(operator, full[dist.get_rank()].to(device()), group=group)
        assert same(output, expected_of(operator, full))
        del group


def is_not_fooled_by_a_known_plan(operator, changes, other_shape, other_changes):
    """Both calls have been made before, so nobody asks the others; only the signals can tell."""
    with a_group() as group:
        ways = [((150,), changes), (other_shape, other_changes)]
        calls = [(whole(operator, shape, torch.float32), changes) for shape, changes in ways]
        for full, config in calls * 2:
            output = call(operator, full[dist.get_rank()].to(device()), config, group=group)
            tdkernels.synchronize()
            assert same(output, expected_of(operator, full))
        dist.barrier()
        full, config = calls[dist.get_rank() == 1]
        with timeout(1.0):
            error = failure_of(call, operator, full[dist.get_rank()].to(device()), config, group=group)
        assert isinstance(error, PlanMismatchError | PeerTimeoutError) and operator in str(error), repr(error)
        again = failure_of(call, operator, full[dist.get_rank()].to(device()), config, group=group)
        assert type(again) is type(error) and str(again) == str(error), repr(again)
        del group


def loses_rank_1(ways, leave, timeout_s):
    """Two calls in each way; then rank 1 is gone, and the others say so, now and whenever they are asked again."""
    rank, groups, fulls = dist.get_rank(), [], []
    for operator, changes in ways:
        groups.append(dist.new_group())  # one each, as who has lost a peer once waits for nobody in that group
        fulls.append(whole(operator, (150,), torch.float32))
        x = fulls[-1][rank].to(device())
        for _ in range(2):
            assert same(call(operator, x, changes, group=groups[-1]), expected_of(operator, fulls[-1]))
    tdkernels.set_timeout(timeout_s)
    dist.barrier()
    if rank == 1:
        leave()
    errors = []
    for (operator, changes), group, full in zip(ways, groups, fulls, strict=True):
        x = full[rank].to(device())
        start = time.monotonic()
        errors.append(failure_of(call, operator, x, changes, group=group))
        assert time.monotonic() - start < timeout_s + 5.0
        assert str(failure_of(call, operator, x, changes, group=group)) == str(errors[-1])
    return errors


def gives_up_before_its_peers(changes):
    """Rank 1 comes when rank 0 has given up. Whoever needs what rank 0 would have made of it must not get anything."""
    rank = dist.get_rank()
    with a_group() as group:
        full = whole("all_reduce", (600,), torch.float32)
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
                answer = "right" if same(output, expected_of("all_reduce", full)) else "wrong"
            except PeerTimeoutError as error:
                answer = f"missed {error.peer}"
        del group
    return answer


def is_tuned(operator):
    """What explain() says of a message that was tuned for; a call without a config takes it."""
    full = whole(operator, (600,), torch.float32)
    x = full[dist.get_rank()].to(device())
    elements = full[0].numel() * (dist.get_world_size() if operator == "all_gather" else 1)
    tdkernels.autotune.tune(operator, elements, dtype=torch.float32, device=device(), budget_s=5.0)
    with tdkernels.autotune.mode("cached"):
        assert same(call(operator, x), expected_of(operator, full))
        found = tdkernels.explain(operator, x)
    with tdkernels.autotune.mode("on"):  # of which nobody tunes anything
        if operator == "all_gather":
            assert same(call(operator, x.int()), expected_of(operator, full.int()))
    return found.method, found.source, str(found)
