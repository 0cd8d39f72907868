"""Launches that are kept by ``launch_cached`` and by ``AsyncCollective``: each is used for what it was made for alone.

Calls of the same sizes take turns that differ in all else, so that a launch used for another one would give a wrong
result; how many are kept says that those which differ in nothing share one, and that no other two do.
"""

import gc
import weakref
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import tdkernels
from tdkernels import AgAttentionConfig, Tiles, UlyssesConfig
from tdkernels.caches import RecentCache
from tdkernels.lang.kernel import Kernel
from tdkernels.ops.attention.ag_attention.launch_merge import merge
from tdkernels.ops.collectives.async_all_gather import AsyncAllGather
from tdkernels.ops.collectives.async_collective import AsyncCollective
from tdkernels.ops.collectives.async_reduce_scatter import AsyncReduceScatter
from tdkernels.ops.experts.grouped_gemm.dispatch import swiglu_ref
from tdkernels.ops.experts.grouped_gemm.launch import swiglu_backward
from tdkernels.runtime import recorder as runtime_recorder
from tdkernels.runtime.kernel_launch import local_workspace_of
from tdkernels.symm import get_workspace, resolve_group
from tdkernels.symm.group import group_state
from tests.ops.attention.ag_attention.oracle import Sharded
from tests.ops.attention.flash_decode.oracle import Decode
from tests.ops.attention.ulysses.cases import OPERATORS, Projection, misaligned, strided, transposed
from tests.support.ranks import a_group, device, on_ranks
from tests.support.simulated_nodes import a_group_on_nodes, needs_gpus

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def draw(seed, *shape, dtype=FP32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device(), dtype)


def in_a_group(asked, *args, local=None):
    """In a rank: a function of a group of its own, on nodes of so many ranks if that is said."""
    with a_group() if local is None else a_group_on_nodes(local) as group:
        asked(resolve_group(group), *args)
        del group


def kept(group):
    """How many launches each workspace of a group keeps, by its name."""
    return {name: len(workspace.launches) for (name, _), workspace in group_state(group).workspaces.items()}


def kept_alone(name):
    """How many this rank keeps that need no peers."""
    return sum(key[0] == name for key in local_workspace_of(device()).launches)


def kept_of(group, name, kernel):
    """How many an exchange keeps of a kernel."""
    keys = get_workspace(group, device(), name, halves=1, across_nodes=True).launches
    return sum(isinstance(key, tuple) and isinstance(key[0], Kernel) and key[0].__name__ == kernel for key in keys)


def laid_out(lie, *names):
    """A change of a case: its tensors of those names lie otherwise and hold the same."""
    return lambda case: vars(case).update({name: lie(getattr(case, name).detach()) for name in names})


# ---- the projections of Ulysses ----

ULYSSES = UlyssesConfig(tiles=Tiles(16, 16, 16, 1, 1, 1), num_comm_sms=2, chunk_parts=2)
PUSHED = replace(ULYSSES, transport="push", num_comm_sms=3)


def projects(group, operator):
    """Each is the other's gradient, and takes its workspace."""
    dual = OPERATORS[operator == "ulysses_qkv"]
    to_heads = int(operator == "ulysses_qkv")
    seeds, now = iter(range(100)), [0, 0]

    def runs(forward, backward, change=None, config=ULYSSES, wanted=("x", "weight", "bias"), **changes):
        """A call for which so many launches more are kept than before."""
        sizes = dict(dtype=FP32, positions=6, k=16, n=8, batch=1, exact=True)
        case = Projection(operator, **sizes | changes, seed=next(seeds), group=group)
        if change is not None:
            change(case)
        case.check(case.run(wanted, config=config))
        now[:] = now[0] + forward, now[1] + backward
        assert kept(group) == {operator: now[0], dual: now[1]}, (change, changes)

    runs(1, 1)
    runs(0, 0)
    runs(0, 0, laid_out(strided, "x", "dy"))  # they are copied first
    runs(0, 0, laid_out(misaligned, "x", "dy"))
    runs(1, 1, laid_out(transposed, "weight"))
    runs(1, 1, laid_out(misaligned, "weight"))
    runs(1, 1, laid_out(strided, "weight"))
    runs(1, 0, laid_out(misaligned, "bias"))
    runs(1, 0, bias=False)
    runs(1, 1, batch=2, positions=3)  # as many rows
    runs(1, 1, config=PUSHED)
    runs(1, 1, dtype=BF16)
    runs(1 - to_heads, to_heads, wanted=("x",))  # what is gathered need not be kept
    recorder = runtime_recorder.Recorder()
    with runtime_recorder.record(recorder):
        runs(0, 0)
    assert recorder.events is not None
    recorder.clear()
    runs(0, 0)
    assert not recorder.events.any(), "a launch with a trace was kept"
    now[:] = 0, 0
    runs(1, 1, positions=60)  # of the buffers that have grown since, nothing is left
    runs(1, 1)


@pytest.mark.parametrize("operator", OPERATORS)
def test_projections(operator):
    on_ranks(2, in_a_group, projects, operator)


# ---- gemm_rs across nodes ----


def scatters_across_nodes(group):
    seeds = iter(range(0, 1000, 10))

    def runs(lie=lambda t: t, has_bias=True, recorder=None):
        seed = next(seeds)
        x, weight = draw(seed + dist.get_rank(), 4 * group.size(), 16), lie(draw(seed + 8, 6, 16))
        bias = draw(seed + 9, 6) if has_bias else None
        with nullcontext() if recorder is None else runtime_recorder.record(recorder):
            z = tdkernels.gemm_rs(x, weight, bias, group=group)
        torch.testing.assert_close(z, tdkernels.gemm_rs_ref(x, weight, bias, group=group), rtol=1e-5, atol=1e-5)
        return kept(group)["gemm_rs"]

    with tdkernels.autotune.mode("off"):
        assert [runs() for _ in range(5)] == [1] * 5  # the last of them without being asked how tensors lie
        assert [runs(transposed), runs(misaligned), runs(has_bias=False), runs()] == [2, 3, 4, 4]
        recorder = runtime_recorder.Recorder()
        assert runs(recorder=recorder) == 4 and recorder.events.any()
        recorder.clear()
        assert runs() == 4 and not recorder.events.any()


@needs_gpus
def test_products_across_nodes():
    on_ranks(3, in_a_group, scatters_across_nodes, local=1)


# ---- ag_attention and its gradients ----

ATTENTION = AgAttentionConfig(backward="fused")
SMALL = AgAttentionConfig(backward="fused", block_q=16, block_k=16, dq_block_q=16, dkv_block_k=16, chunk_rows=16)


def attends(group):
    local_workspace_of(device()).launches.clear()
    seeds, now = iter(range(100)), [0, 0]

    def runs(forward, statistics=0, change=None, config=ATTENTION, **changes):
        """A call for which so many launches more are kept; the gradients of keys take one, where two are needed."""
        sizes = dict(rows=20, heads=2, kv_heads=1)
        case = Sharded(**sizes | changes, seed=next(seeds), group=group)
        if change is not None:
            case.own = {name: change(operand) for name, operand in case.own.items()}
        case.check(case.run(config=config))
        now[:] = now[0] + forward, now[1] + statistics
        assert kept(group) == {"ag_attention": 2 * now[0], "ag_attention_dkv": now[0]}, changes
        assert kept_alone("ag_attention statistics") == now[1], changes

    runs(1, 1)
    runs(0)
    runs(0, change=strided)  # copied first
    runs(0, change=misaligned)
    runs(1, causal=False)
    runs(1, sharding="zigzag")
    runs(1, scale=0.5)
    runs(0, 1, lse=False)
    runs(1, config=SMALL)
    runs(1, 1, dtype=FP16)
    recorder = runtime_recorder.Recorder()
    with runtime_recorder.record(recorder):
        runs(0)
    recorder.clear()
    runs(0)
    assert not recorder.events.any(), "a launch with a trace was kept"
    now[0] = 0
    runs(1, 1, rows=50)


def test_attention():
    on_ranks(2, in_a_group, attends)


def test_statistics_take_a_gradient_of_lse_or_none():
    """In both orders; ``attends`` has one."""
    on_ranks(2, attends_without_a_gradient_of_lse_first)


def attends_without_a_gradient_of_lse_first():
    local_workspace_of(device()).launches.clear()
    for seed, lse in enumerate((False, True, False)):
        case = Sharded(rows=20, lse=lse, seed=seed)
        case.check(case.run(config=ATTENTION))


def merges():
    local_workspace_of(device()).launches.clear()

    def runs(seed, first, dtype=FP32, lie=lambda t: t, parts=FP32):
        o, part = draw(seed, 2, 6, 2, 5, dtype=parts), lie(draw(seed + 1, 2, 6 - first, 2, 5, dtype=parts))
        lse, part_lse = draw(seed + 2, 2, 6, 2), draw(seed + 3, 2, 6 - first, 2)
        got, got_lse = merge(o, lse, part, part_lse, first, dtype)
        part_lse = torch.cat([torch.full_like(lse[:, :first], float("-inf")), part_lse], 1)
        part = torch.cat([torch.zeros_like(o[:, :first]), part], 1)
        expected_lse = torch.logaddexp(lse, part_lse)
        expected = o * (lse - expected_lse).exp()[..., None] + part * (part_lse - expected_lse).exp()[..., None]
        torch.testing.assert_close(got, expected.to(dtype), rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(got_lse, expected_lse)
        return kept_alone("attention merged")

    assert [runs(0, 0), runs(10, 0), runs(20, 3), runs(30, 0, BF16), runs(40, 0, parts=BF16)] == [1, 1, 2, 3, 4]
    assert [runs(50, 0, lie=misaligned), runs(60, 0), runs(70, 3)] == [5, 5, 5]


def test_parts_of_attention():
    on_ranks(1, merges)


# ---- gradients that need no peers ----


def decodes_backward():
    local_workspace_of(device()).launches.clear()
    seeds = iter(range(100))

    def runs(change=None, **changes):
        sizes = dict(batch=2, heads=4, kv_heads=2, dim=16, keys=24, tokens=2, lens="full")
        case = Decode(**sizes | changes, seed=next(seeds))
        if change is not None:
            change(case)
        case.check(case.run())
        return kept_alone("flash_decode backward")

    assert [runs(), runs(), runs(scale=0.5), runs(soft_cap=2.0), runs(window=5), runs(dtype=FP16)] == [1, 1, 2, 3, 4, 5]
    assert [runs(laid_out(strided, "k_cache")), runs(laid_out(strided, "v_cache"))] == [6, 7]
    assert [runs(laid_out(misaligned, "q")), runs(page=8), runs(lens="ragged"), runs()] == [8, 9, 9, 9]


def test_gradients_of_a_decode():
    on_ranks(2, decodes_backward)


def activates_backward():
    local_workspace_of(device()).launches.clear()
    seeds = iter(range(0, 100, 10))

    def runs(activation="swiglu", splits=(2, 3), index=torch.int32, dtype=FP32, lie=lambda t: t):
        seed = next(seeds)
        dh, pre = draw(seed, 7, 6, dtype=dtype), draw(seed + 1, 7, 12, dtype=dtype).requires_grad_()
        (expected,) = torch.autograd.grad(swiglu_ref(pre.float(), activation), pre, dh.float())
        of_groups = torch.tensor(splits, dtype=index, device=device())
        got = swiglu_backward(lie(dh), lie(pre.detach()), of_groups, activation)
        rows = sum(splits)
        torch.testing.assert_close(got[:rows], expected[:rows], rtol=1e-2, atol=1e-2)
        return kept_alone("swiglu backward")

    assert [runs(), runs(splits=(4, 1)), runs("swiglu_interleaved"), runs(index=torch.int64)] == [1, 1, 2, 3]
    assert [runs(lie=strided), runs(lie=misaligned), runs(dtype=BF16), runs(splits=(1, 2, 3))] == [3, 4, 5, 6]
    assert [runs(), runs("swiglu_interleaved")] == [6, 6]


def test_gradient_of_swiglu():
    on_ranks(1, activates_backward)


# ---- what travels beside other work ----


def pushes(group):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    seeds = iter(range(0, 1000, 10))

    def runs(rows=6, width=16, dtype=FP32, chunk_rows=4, programs=2):
        seed = next(seeds)
        shards = [draw(seed + source, rows, width, dtype=dtype) for source in range(ranks)]
        fields = {"rows": rows, "width": width, "dtype": str(dtype), "chunk_rows": chunk_rows}
        with AsyncAllGather("test of kept launches", fields, shards[rank], group, chunk_rows) as gather:
            gather.push(programs)
            gather.finish()
            assert torch.equal(gather.gathered, torch.stack(shards))
        return kept_of(group, "gather", "push_kernel")

    runs(rows=48)  # there is room for all from now on
    assert [runs(), runs(), runs(chunk_rows=2), runs(programs=3), runs(width=8, rows=12)] == [2, 2, 3, 4, 5]
    assert [runs(width=32, dtype=BF16), runs(), runs(chunk_rows=2)] == [6, 6, 6]
    assert runs(rows=100) == 1, "those were for the buffer that was there before"
    assert runs() == 2


def test_pushes():
    on_ranks(2, in_a_group, pushes)


def adds_up(group):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    seeds = iter(range(0, 1000, 10))

    def runs(rows=5, width=8, dtype=FP32, has_bias=False, lie=lambda t: t):
        seed = next(seeds)
        parts = [draw(seed + source, ranks, rows, width, dtype=dtype) for source in range(ranks)]
        bias = draw(seed + 9, width, dtype=dtype) if has_bias else None
        fields = {"rows": rows, "width": width, "dtype": str(dtype)}
        with AsyncReduceScatter("test of kept launches", fields, parts[0][0].nbytes, group, device()) as scatter:
            for owner in (owner for owner in range(ranks) if owner != rank):
                scatter.send(owner, parts[rank][owner])
            got = scatter.add_to(lie(parts[rank][rank].clone()), bias)
        expected = sum(part[rank].float() for part in parts) + (bias.float() if has_bias else 0)
        torch.testing.assert_close(got, expected.to(dtype))
        return kept_of(group, "scatter", "add_parts_kernel")

    runs(rows=40)
    assert [runs(), runs(), runs(has_bias=True), runs(has_bias=True), runs(lie=misaligned)] == [2, 2, 3, 3, 4]
    assert [runs(dtype=BF16), runs(rows=4, width=10), runs(rows=8, width=5), runs()] == [5, 6, 7, 7]
    assert runs(rows=100) == 1


def test_sums_of_parts():
    on_ranks(3, in_a_group, adds_up)


class _Notes(list):
    """In the place of a kernel: what it would have been launched with."""

    def launch_bound(self, bound_launch, values):
        self.append((bound_launch, bound_launch.grid, bound_launch.filled(values), bound_launch.constants))

    def __hash__(self):
        return id(self)

    def __eq__(self, other):
        return self is other


def test_a_launch_beside_other_work_is_kept_for_what_it_depends_on():
    exchange, kernels = object.__new__(AsyncCollective), (_Notes(), _Notes())
    exchange.workspace = SimpleNamespace(ctx=torch.zeros(1), launches=RecentCache(64))
    x, y = torch.zeros(4), torch.ones(4)
    calls = [
        (kernels[0], (x, y), 2, (3, 7), {"A": 1}), (kernels[1], (x, y), 2, (3, 7), {"A": 1}),
        (kernels[0], (x, y), 3, (3, 7), {"A": 1}), (kernels[0], (x, y), 2, (3 + (1 << 32), 7), {"A": 1}),
        (kernels[0], (x, y), 2, (3, 8), {"A": 1}), (kernels[0], (x, y), 2, (3, 7), {"A": 2}),
        (kernels[0], (x, None), 2, (3, 7), {"A": 1}), (kernels[0], (x, y.double()), 2, (3, 7), {"A": 1}),
        (kernels[0], (x, misaligned(y)), 2, (3, 7), {"A": 1}), (kernels[0], (x,), 2, (7, 3), {"A": 1}),
    ]
    for turn in range(3):
        for kernel, tensors, programs, numbers, constants in calls:
            tensors = tuple(t if t is None or turn == 0 else other_like(t) for t in tensors)
            exchange._launch_on(tensors, kernel, programs, *numbers, **constants)
            _, grid, args, given = kernel[-1]
            assert grid == (programs, 1, 1) and given == constants
            expected = (exchange.workspace.ctx, *tensors, *numbers)
            assert all(one is other or one == other for one, other in zip(args, expected, strict=True))
    assert len(exchange.workspace.launches) == len(calls)
    assert len({id(bound_launch) for kernel in kernels for bound_launch, *_ in kernel}) == len(calls)


def other_like(tensor):
    """Other memory that begins at a multiple of 16 bytes where the tensor's does."""
    return misaligned(tensor) if tensor.data_ptr() % 16 else tensor.clone()


# ---- what is kept holds nobody's memory ----


def storages(tensors):
    return [weakref.ref(tensor.untyped_storage()) for tensor in tensors if tensor is not None]


def of_projection(operator, group):
    case = Projection(operator, FP32, 6, 16, 8, batch=1, group=group)
    return [case.x, case.weight, case.bias, case.dy, *case.run(config=ULYSSES).values()]


def of_attention(group):
    case = Sharded(20, group=group)
    return [*case.own.values(), case.do, case.dlse, *case.run(config=ATTENTION).values()]


def of_decode(group):
    case = Decode(2, 4, 2, 16, 24, tokens=2, group=group)
    return [case.q, case.k_cache, case.v_cache, case.lens, case.do, case.dlse, *case.run().values()]


def of_swiglu(_):
    tensors = draw(0, 7, 6), draw(1, 7, 12), torch.tensor([2, 3], device=device())
    return [*tensors, swiglu_backward(*tensors, "swiglu")]


def of_exchanges(group):
    x, own, bias = draw(0, 6, 16), draw(1, 6, 16), draw(2, 16)
    with AsyncAllGather("test of memory", {}, x, group, 4) as gather:
        gather.push(2)
        gather.finish()
    with AsyncReduceScatter("test of memory", {}, own.nbytes, group, device()) as scatter:
        scatter.send(1 - dist.get_rank(), x)
        scatter.add_to(own, bias)
    return [x, own, bias]


def outlives_nothing(group):
    calls = [lambda group, operator=operator: of_projection(operator, group) for operator in OPERATORS]
    for number, call in enumerate([*calls, of_attention, of_decode, of_swiglu, of_exchanges]):
        for _ in range(2):
            alive = storages(call(group))
            tdkernels.synchronize()
            gc.collect()
            assert not any(storage() is not None for storage in alive), f"call {number}"


def test_launches_keep_no_tensor_of_a_call():
    on_ranks(2, in_a_group, outlives_nothing)
