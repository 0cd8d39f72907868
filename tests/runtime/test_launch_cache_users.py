"""Users of the launch cache, ``launch_cached`` and ``AsyncCollective``: a cached launch is used only for equal calls.

Calls of the same sizes alternate and differ in everything else, so a wrongly shared launch would give a wrong result.
The number of cached launches shows that equal calls share one, and that no other two calls do.
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


def in_a_group(body, *args, local=None):
    """In a rank: call a function with a group for this test, on nodes of ``local`` ranks if given."""
    with a_group() if local is None else a_group_on_nodes(local) as group:
        body(resolve_group(group), *args)
        del group


def cached_launches(group):
    """Return the number of cached launches of each workspace of a group, by name."""
    return {name: len(workspace.launches) for (name, _), workspace in group_state(group).workspaces.items()}


def cached_local_launches(name):
    """Return the number of cached launches in the local workspace of this rank."""
    return sum(key[0] == name for key in local_workspace_of(device()).launches)


def cached_collective_launches(group, name, kernel):
    """Return the number of cached launches of a kernel of an asynchronous collective."""
    keys = get_workspace(group, device(), name, halves=1, across_nodes=True).launches
    return sum(isinstance(key, tuple) and isinstance(key[0], Kernel) and key[0].__name__ == kernel for key in keys)


def with_layout(layout, *names):
    """Return a function that changes the layout of the named tensors of a case, but not their values."""
    return lambda case: vars(case).update({name: layout(getattr(case, name).detach()) for name in names})


# ---- the projections of Ulysses ----

ULYSSES = UlyssesConfig(tiles=Tiles(16, 16, 16, 1, 1, 1), num_comm_sms=2, chunk_parts=2)
PUSHED = replace(ULYSSES, transport="push", num_comm_sms=3)


def call_projection(group, operator):
    """Each operator is the gradient of the other and uses its workspace."""
    dual = OPERATORS[operator == "ulysses_qkv"]
    to_heads = int(operator == "ulysses_qkv")
    seeds, now = iter(range(100)), [0, 0]

    def check(forward, backward, change=None, config=ULYSSES, gradients=("x", "weight", "bias"), **changes):
        """Make a call; check that it adds ``forward`` and ``backward`` cached launches."""
        sizes = dict(dtype=FP32, positions=6, k=16, n=8, batch=1, exact=True)
        case = Projection(operator, **sizes | changes, seed=next(seeds), group=group)
        if change is not None:
            change(case)
        case.check(case.run(gradients, config=config))
        now[:] = now[0] + forward, now[1] + backward
        assert cached_launches(group) == {operator: now[0], dual: now[1]}, (change, changes)

    check(1, 1)
    check(0, 0)
    check(0, 0, with_layout(strided, "x", "dy"))  # copied first
    check(0, 0, with_layout(misaligned, "x", "dy"))
    check(1, 1, with_layout(transposed, "weight"))
    check(1, 1, with_layout(misaligned, "weight"))
    check(1, 1, with_layout(strided, "weight"))
    check(1, 0, with_layout(misaligned, "bias"))
    check(1, 0, bias=False)
    check(1, 1, batch=2, positions=3)  # the same number of rows
    check(1, 1, config=PUSHED)
    check(1, 1, dtype=BF16)
    check(1 - to_heads, to_heads, gradients=("x",))  # the gathered input need not be saved
    recorder = runtime_recorder.Recorder()
    with runtime_recorder.record(recorder):
        check(0, 0)
    assert recorder.events is not None
    recorder.clear()
    check(0, 0)
    assert not recorder.events.any(), "a launch with a trace was cached"
    now[:] = 0, 0
    check(1, 1, positions=60)  # the buffers have grown, which drops all cached launches
    check(1, 1)


@pytest.mark.parametrize("operator", OPERATORS)
def test_projections(operator):
    on_ranks(2, in_a_group, call_projection, operator)


# ---- gemm_rs across nodes ----


def call_gemm_rs_across_nodes(group):
    seeds = iter(range(0, 1000, 10))

    def check(layout=lambda t: t, has_bias=True, recorder=None):
        seed = next(seeds)
        x, weight = draw(seed + dist.get_rank(), 4 * group.size(), 16), layout(draw(seed + 8, 6, 16))
        bias = draw(seed + 9, 6) if has_bias else None
        with nullcontext() if recorder is None else runtime_recorder.record(recorder):
            z = tdkernels.gemm_rs(x, weight, bias, group=group)
        torch.testing.assert_close(z, tdkernels.gemm_rs_ref(x, weight, bias, group=group), rtol=1e-5, atol=1e-5)
        return cached_launches(group)["gemm_rs"]

    with tdkernels.autotune.mode("off"):
        assert [check() for _ in range(5)] == [1] * 5  # the last calls launch directly
        assert [check(transposed), check(misaligned), check(has_bias=False), check()] == [2, 3, 4, 4]
        recorder = runtime_recorder.Recorder()
        assert check(recorder=recorder) == 4 and recorder.events.any()
        recorder.clear()
        assert check() == 4 and not recorder.events.any()


@needs_gpus
def test_gemm_rs_across_nodes():
    on_ranks(3, in_a_group, call_gemm_rs_across_nodes, local=1)


# ---- ag_attention and its gradients ----

ATTENTION = AgAttentionConfig(backward="fused")
SMALL = AgAttentionConfig(backward="fused", block_q=16, block_k=16, dq_block_q=16, dkv_block_k=16, chunk_rows=16)


def call_attention(group):
    local_workspace_of(device()).launches.clear()
    seeds, now = iter(range(100)), [0, 0]

    def check(forward, statistics=0, change=None, config=ATTENTION, **changes):
        """Make a call; check that it adds ``forward`` launches, two per direction, and ``statistics`` local ones."""
        sizes = dict(rows=20, heads=2, kv_heads=1)
        case = Sharded(**sizes | changes, seed=next(seeds), group=group)
        if change is not None:
            case.own = {name: change(operand) for name, operand in case.own.items()}
        case.check(case.run(config=config))
        now[:] = now[0] + forward, now[1] + statistics
        assert cached_launches(group) == {"ag_attention": 2 * now[0], "ag_attention_dkv": now[0]}, changes
        assert cached_local_launches("ag_attention statistics") == now[1], changes

    check(1, 1)
    check(0)
    check(0, change=strided)  # copied first
    check(0, change=misaligned)
    check(1, causal=False)
    check(1, sharding="zigzag")
    check(1, scale=0.5)
    check(0, 1, lse=False)
    check(1, config=SMALL)
    check(1, 1, dtype=FP16)
    recorder = runtime_recorder.Recorder()
    with runtime_recorder.record(recorder):
        check(0)
    recorder.clear()
    check(0)
    assert not recorder.events.any(), "a launch with a trace was cached"
    now[0] = 0
    check(1, 1, rows=50)


def test_attention():
    on_ranks(2, in_a_group, call_attention)


def test_statistics_with_and_without_a_gradient_of_lse():
    """Test both orders; ``call_attention`` tests one."""
    on_ranks(2, call_attention_without_lse_gradient_first)


def call_attention_without_lse_gradient_first():
    local_workspace_of(device()).launches.clear()
    for seed, lse in enumerate((False, True, False)):
        case = Sharded(rows=20, lse=lse, seed=seed)
        case.check(case.run(config=ATTENTION))


def call_merge():
    local_workspace_of(device()).launches.clear()

    def check(seed, first, dtype=FP32, layout=lambda t: t, parts=FP32):
        o, part = draw(seed, 2, 6, 2, 5, dtype=parts), layout(draw(seed + 1, 2, 6 - first, 2, 5, dtype=parts))
        lse, part_lse = draw(seed + 2, 2, 6, 2), draw(seed + 3, 2, 6 - first, 2)
        got, got_lse = merge(o, lse, part, part_lse, first, dtype)
        part_lse = torch.cat([torch.full_like(lse[:, :first], float("-inf")), part_lse], 1)
        part = torch.cat([torch.zeros_like(o[:, :first]), part], 1)
        expected_lse = torch.logaddexp(lse, part_lse)
        expected = o * (lse - expected_lse).exp()[..., None] + part * (part_lse - expected_lse).exp()[..., None]
        torch.testing.assert_close(got, expected.to(dtype), rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(got_lse, expected_lse)
        return cached_local_launches("attention merged")

    assert [check(0, 0), check(10, 0), check(20, 3), check(30, 0, BF16), check(40, 0, parts=BF16)] == [1, 1, 2, 3, 4]
    assert [check(50, 0, layout=misaligned), check(60, 0), check(70, 3)] == [5, 5, 5]


def test_attention_merge():
    on_ranks(1, call_merge)


# ---- gradients that need no peers ----


def call_decode_backward():
    local_workspace_of(device()).launches.clear()
    seeds = iter(range(100))

    def check(change=None, **changes):
        sizes = dict(batch=2, heads=4, kv_heads=2, dim=16, keys=24, tokens=2, lens="full")
        case = Decode(**sizes | changes, seed=next(seeds))
        if change is not None:
            change(case)
        case.check(case.run())
        return cached_local_launches("flash_decode backward")

    assert [check(), check(), check(scale=0.5), check(soft_cap=2.0)] == [1, 1, 2, 3]
    assert [check(window=5), check(dtype=FP16)] == [4, 5]
    assert [check(with_layout(strided, "k_cache")), check(with_layout(strided, "v_cache"))] == [6, 7]
    assert [check(with_layout(misaligned, "q")), check(page=8), check(lens="ragged"), check()] == [8, 9, 9, 9]


def test_decode_backward():
    on_ranks(2, call_decode_backward)


def call_swiglu_backward():
    local_workspace_of(device()).launches.clear()
    seeds = iter(range(0, 100, 10))

    def check(activation="swiglu", splits=(2, 3), index=torch.int32, dtype=FP32, layout=lambda t: t):
        seed = next(seeds)
        dh, pre = draw(seed, 7, 6, dtype=dtype), draw(seed + 1, 7, 12, dtype=dtype).requires_grad_()
        (expected,) = torch.autograd.grad(swiglu_ref(pre.float(), activation), pre, dh.float())
        group_sizes = torch.tensor(splits, dtype=index, device=device())
        got = swiglu_backward(layout(dh), layout(pre.detach()), group_sizes, activation)
        rows = sum(splits)
        torch.testing.assert_close(got[:rows], expected[:rows], rtol=1e-2, atol=1e-2)
        return cached_local_launches("swiglu backward")

    assert [check(), check(splits=(4, 1)), check("swiglu_interleaved"), check(index=torch.int64)] == [1, 1, 2, 3]
    assert [check(layout=strided), check(layout=misaligned), check(dtype=BF16), check(splits=(1, 2, 3))] == [3, 4, 5, 6]
    assert [check(), check("swiglu_interleaved")] == [6, 6]


def test_swiglu_backward():
    on_ranks(1, call_swiglu_backward)


# ---- asynchronous collectives ----


def call_all_gather(group):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    seeds = iter(range(0, 1000, 10))

    def check(rows=6, width=16, dtype=FP32, chunk_rows=4, programs=2):
        seed = next(seeds)
        shards = [draw(seed + source, rows, width, dtype=dtype) for source in range(ranks)]
        fields = {"rows": rows, "width": width, "dtype": str(dtype), "chunk_rows": chunk_rows}
        with AsyncAllGather("test of kept launches", fields, shards[rank], group, chunk_rows) as gather:
            gather.push(programs)
            gather.finish()
            assert torch.equal(gather.gathered, torch.stack(shards))
        return cached_collective_launches(group, "gather", "push_kernel")

    check(rows=48)  # later calls fit into its buffer
    assert [check(), check(), check(chunk_rows=2), check(programs=3), check(width=8, rows=12)] == [2, 2, 3, 4, 5]
    assert [check(width=32, dtype=BF16), check(), check(chunk_rows=2)] == [6, 6, 6]
    assert check(rows=100) == 1, "launches for the previous buffer must be dropped"
    assert check() == 2


def test_async_all_gather():
    on_ranks(2, in_a_group, call_all_gather)


def call_reduce_scatter(group):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    seeds = iter(range(0, 1000, 10))

    def check(rows=5, width=8, dtype=FP32, has_bias=False, layout=lambda t: t):
        seed = next(seeds)
        parts = [draw(seed + source, ranks, rows, width, dtype=dtype) for source in range(ranks)]
        bias = draw(seed + 9, width, dtype=dtype) if has_bias else None
        fields = {"rows": rows, "width": width, "dtype": str(dtype)}
        with AsyncReduceScatter("test of kept launches", fields, parts[0][0].nbytes, group, device()) as scatter:
            for owner in (owner for owner in range(ranks) if owner != rank):
                scatter.send(owner, parts[rank][owner])
            got = scatter.add_to(layout(parts[rank][rank].clone()), bias)
        expected = sum(part[rank].float() for part in parts) + (bias.float() if has_bias else 0)
        torch.testing.assert_close(got, expected.to(dtype))
        return cached_collective_launches(group, "scatter", "add_parts_kernel")

    check(rows=40)
    assert [check(), check(), check(has_bias=True), check(has_bias=True), check(layout=misaligned)] == [2, 2, 3, 3, 4]
    assert [check(dtype=BF16), check(rows=4, width=10), check(rows=8, width=5), check()] == [5, 6, 7, 7]
    assert check(rows=100) == 1


def test_async_reduce_scatter():
    on_ranks(3, in_a_group, call_reduce_scatter)


class _RecordingKernel(list):
    """Stand-in for a kernel that records its launches."""

    def launch_bound(self, bound_launch, values):
        self.append((bound_launch, bound_launch.grid, bound_launch.filled(values), bound_launch.constants))

    def __hash__(self):
        return id(self)

    def __eq__(self, other):
        return self is other


def test_key_of_async_collective_launches():
    exchange, kernels = object.__new__(AsyncCollective), (_RecordingKernel(), _RecordingKernel())
    exchange.workspace = SimpleNamespace(ctx=torch.zeros(1), launches=RecentCache(64))
    x, y = torch.zeros(4), torch.ones(4)
    calls = [
        (kernels[0], (x, y), 2, (3, 7), {"A": 1}), (kernels[1], (x, y), 2, (3, 7), {"A": 1}),
        (kernels[0], (x, y), 3, (3, 7), {"A": 1}), (kernels[0], (x, y), 2, (3 + (1 << 32), 7), {"A": 1}),
        (kernels[0], (x, y), 2, (3, 8), {"A": 1}), (kernels[0], (x, y), 2, (3, 7), {"A": 2}),
        (kernels[0], (x, None), 2, (3, 7), {"A": 1}), (kernels[0], (x, y.double()), 2, (3, 7), {"A": 1}),
        (kernels[0], (x, misaligned(y)), 2, (3, 7), {"A": 1}), (kernels[0], (x,), 2, (7, 3), {"A": 1}),
    ]
    for repetition in range(3):
        for kernel, tensors, programs, numbers, constants in calls:
            tensors = tuple(t if t is None or repetition == 0 else other_like(t) for t in tensors)
            exchange._launch_on(tensors, kernel, programs, *numbers, **constants)
            _, grid, args, given = kernel[-1]
            assert grid == (programs, 1, 1) and given == constants
            expected = (exchange.workspace.ctx, *tensors, *numbers)
            assert all(one is other or one == other for one, other in zip(args, expected, strict=True))
    assert len(exchange.workspace.launches) == len(calls)
    assert len({id(bound_launch) for kernel in kernels for bound_launch, *_ in kernel}) == len(calls)


def other_like(tensor):
    """Return a tensor in other memory, which is aligned to 16 bytes if ``tensor`` is."""
    return misaligned(tensor) if tensor.data_ptr() % 16 else tensor.clone()


# ---- cached launches keep no memory alive ----


def storages(tensors):
    return [weakref.ref(tensor.untyped_storage()) for tensor in tensors if tensor is not None]


def projection_tensors(operator, group):
    case = Projection(operator, FP32, 6, 16, 8, batch=1, group=group)
    return [case.x, case.weight, case.bias, case.dy, *case.run(config=ULYSSES).values()]


def attention_tensors(group):
    case = Sharded(20, group=group)
    return [*case.own.values(), case.do, case.dlse, *case.run(config=ATTENTION).values()]


def decode_tensors(group):
    case = Decode(2, 4, 2, 16, 24, tokens=2, group=group)
    return [case.q, case.k_cache, case.v_cache, case.lens, case.do, case.dlse, *case.run().values()]


def swiglu_tensors(_):
    tensors = draw(0, 7, 6), draw(1, 7, 12), torch.tensor([2, 3], device=device())
    return [*tensors, swiglu_backward(*tensors, "swiglu")]


def async_collective_tensors(group):
    x, own, bias = draw(0, 6, 16), draw(1, 6, 16), draw(2, 16)
    with AsyncAllGather("test of memory", {}, x, group, 4) as gather:
        gather.push(2)
        gather.finish()
    with AsyncReduceScatter("test of memory", {}, own.nbytes, group, device()) as scatter:
        scatter.send(1 - dist.get_rank(), x)
        scatter.add_to(own, bias)
    return [x, own, bias]


def check_tensors_are_freed(group):
    calls = [lambda group, operator=operator: projection_tensors(operator, group) for operator in OPERATORS]
    calls += [attention_tensors, decode_tensors, swiglu_tensors, async_collective_tensors]
    for number, call in enumerate(calls):
        for _ in range(2):
            alive = storages(call(group))
            tdkernels.synchronize()
            gc.collect()
            assert not any(storage() is not None for storage in alive), f"call {number}"


def test_launches_keep_no_tensor_alive():
    on_ranks(2, in_a_group, check_tensors_are_freed)
