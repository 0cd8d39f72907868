"""Test bodies for the synchronization between ranks in tp_moe and its stages. Every rank runs them.

test_tp_moe_ranks.py starts them: determinism, memory reuse, disagreement, and late or missing peers.
"""

import random
import time
from functools import partial
from unittest import mock

import torch
import torch.distributed as dist

import tdkernels
from tdkernels import MoeTpConfig, PeerTimeoutError, PlanMismatchError
from tdkernels.ops.experts.tp_moe import launch_ag_gemm as tp_moe_launch_ag_gemm
from tdkernels.ops.experts.tp_moe import launch_gemm_rs as tp_moe_launch_gemm_rs
from tdkernels.symm import get_workspace
from tests.ops.experts.tp_moe.cases import CONFIGS, LOW, poisoned_outputs
from tests.ops.experts.tp_moe.oracle import FP16, FP32, Sliced
from tests.support.ranks import a_group
from tests.test_protocol import failure_of, in_any_order, poison, timeout

# Few kinds, since each is compiled on a GPU.
KINDS = [
    (dict(tokens=18, k=2, experts=3, width=20, hidden=5, seed=1), "three stages"),
    (dict(tokens=5, k=1, experts=2, width=40, hidden=3, dtype=FP16, activation=None, seed=2), "default"),
    (dict(tokens=6, k=2, experts=2, width=9, hidden=8, dtype=FP32, ids="one", seed=3), "tall tiles"),
]


def is_bitwise_deterministic(kinds, calls, seed):
    """Repeated calls give the same bits, with random delays on each rank and all memory filled with NaN in between."""
    rng, rank_rng = random.Random(seed), random.Random(seed * 100 + dist.get_rank())
    layers = []
    for spec, config in kinds:
        layer = Sliced(**spec)
        layers.append((layer, CONFIGS[config], layer.run(config=CONFIGS[config])))
        layer.check(layers[-1][2])
    with poisoned_outputs():
        for _ in range(calls):
            layer, config, expected = rng.choice(layers)
            if rng.random() < 0.3:
                poison()
            time.sleep(rank_rng.choice([0.0, rank_rng.uniform(0.0, 0.02)]))
            layer.require()
            y = layer.call(config=config)
            time.sleep(rank_rng.choice([0.0, rank_rng.uniform(0.0, 0.02)]))
            y.backward(layer.dy)
            if rng.random() < 0.3:
                poison()  # results must not alias the workspace
            tdkernels.synchronize()
            for name, result in {"y": y.detach(), **layer.gradients()}.items():
                assert torch.equal(result, expected[name]), f"{name} of {layer.title}"


def takes_rows_from_the_workspace(kinds, calls):
    """Check gradients if the kernel of moe_ag_gemm returns no rows, as the warp-specialized one."""
    original = tp_moe_launch_ag_gemm.launch_cached

    def without_rows(*args):
        *made, rows = original(*args)
        rows.fill_(torch.nan)
        return made

    with mock.patch.object(tp_moe_launch_ag_gemm, "launch_cached", without_rows):
        is_bitwise_deterministic(kinds, calls, seed=calls)
        runs_ahead_of_peers(calls)


def runs_ahead_of_peers(calls):
    """Make calls with new data back to back, so that ranks run ahead of each other."""
    spec, config = dict(tokens=3, k=1, experts=2, width=12, hidden=4), CONFIGS["one stage"]
    layers = [Sliced(**spec, seed=seed) for seed in range(calls)]
    layers[0].run(config=config)
    for layer in layers:
        layer.require()
    with in_any_order(seed=calls):
        ys = [layer.call(config=config) for layer in layers]
        for layer, y in zip(layers, ys, strict=True):
            y.backward(layer.dy)
    for layer, y in zip(layers, ys, strict=True):
        layer.check({"y": y.detach(), **layer.gradients()})


def waits_for_a_slow_rank():
    for slow in range(dist.get_world_size()):
        layer = Sliced(4, 2, 2, 12, 4, seed=slow)
        layer.require()
        time.sleep(0.15 if dist.get_rank() == slow else 0.0)
        y = layer.call()
        time.sleep(0.15 if dist.get_rank() == slow else 0.0)
        y.backward(layer.dy)
        layer.check({"y": y.detach(), **layer.gradients()})


# ---- ranks that disagree ----

BASE_SPEC = dict(tokens=3, k=2, experts=3, width=8, hidden=8)
OTHER_CONFIG = MoeTpConfig(tiles=LOW, chunk_rows=32)
# Changes of the layer and the options of rank 1 of three; then the reported field, its value on rank 1 and elsewhere.
DISAGREEMENTS = {
    "tokens": (dict(tokens=4), {}, "M/W", 4, 3),
    "no tokens": (dict(tokens=0), {}, "M/W", 0, 3),
    "width": (dict(width=16), {}, "H", 16, 8),
    "channels": (dict(hidden=5), {}, "w", "[3, 10, 8]", "[3, 16, 8]"),
    "k": (dict(k=3), {}, "k", 3, 2),
    "experts": (dict(experts=4), {}, "w", "[4, 16, 8]", "[3, 16, 8]"),
    "dtype": (dict(dtype=FP32), {}, "dtype", '"torch.float32"', '"torch.bfloat16"'),
    "activation": (dict(activation="swiglu_interleaved"), {}, "activation", '"swiglu_interleaved"', '"swiglu"'),
    "chunks": ({}, {"config": OTHER_CONFIG}, "config", "chunk_rows=32", "left to autotune"),
    "method": ({}, {"config": CONFIGS["torch"]}, "config", "method=torch", "left to autotune"),
}


def reports_disagreement(what):
    """Every rank reports the disagreement, and the group stays usable."""
    changes, options, field, odd_value, common_value = DISAGREEMENTS[what]
    differs = dist.get_rank() == 1
    with a_group() as group:
        layer = Sliced(**BASE_SPEC | (changes if differs else {}), group=group)
        base_layer = Sliced(**BASE_SPEC, group=group)
        error = failure_of(layer.call, **(options if differs else {}))
        check_disagreement(error, "tp_moe", field, odd_value, common_value)
        base_layer.check({"y": base_layer.call()})
        del group, layer, base_layer


def check_disagreement(error, operator, field, odd_value, common_value):
    assert type(error) is ValueError, repr(error)
    for part in (f"{operator}: the ranks disagree", f"{field} is ", f"{common_value}", "on ranks 0, 2", f"{odd_value}"):
        assert part in str(error), f"{part} in {error}"
    assert "on rank 1" in str(error), str(error)


def reports_disagreement_in_down_stage(what):
    differs = dist.get_rank() == 1
    with a_group() as group:
        layer = Sliced(**BASE_SPEC, group=group)
        x, ids, weights, w_gate_up, w_down = layer.operands()
        h, routing = tdkernels.moe_ag_gemm(x, ids, w_gate_up, activation="swiglu", group=group)
        w, config = w_down, None
        if what == "width":
            w = w_down[:, : 8 - 2 * differs]
            expected = "w", "[3, 6, 8]", "[3, 8, 8]"
        else:
            config = CONFIGS["torch"] if differs else None
            expected = "config", "method=torch", "left to autotune"
        error = failure_of(tdkernels.moe_gemm_rs, h, routing, weights, w, group=group, config=config)
        check_disagreement(error, "moe_gemm_rs", *expected)
        layer.check({"y": tdkernels.moe_gemm_rs(h, routing, weights, w_down, group=group)})
        del group, layer, routing


def _down_stages(layer, chunks, config):
    """Return a call of ``moe_gemm_rs`` with ``config`` for each routing, one with chunks of each size."""
    x, ids, weights, w_gate_up, w_down = layer.operands()
    calls = []
    for chunk_rows in chunks:
        h, routing = tdkernels.moe_ag_gemm(
            x, ids, w_gate_up, activation=layer.activation, group=layer.group,
            config=MoeTpConfig(tiles=LOW, chunk_rows=chunk_rows),
        )
        calls.append(
            partial(tdkernels.moe_gemm_rs, h, routing, weights, w_down, group=layer.group, config=config)
        )
    return calls


def takes_routings_with_other_chunks():
    """The signals of ``moe_gemm_rs`` are those of the chunks of the routing, not of its own config."""
    with a_group() as group:
        layer = Sliced(**BASE_SPEC | {"tokens": 1024}, group=group)
        workspace = get_workspace(group, layer.operands()[0].device, "moe_gemm_rs")
        # For two ranks 64 chunks with one signal each, or 22 with three. Numbers are rounded up to multiples of 128.
        for signals, call in zip((128, 256), _down_stages(layer, (16, 48), OTHER_CONFIG), strict=True):
            layer.check({"y": call()})
            assert workspace.half_signals == signals
        del group, layer, workspace, call


def reports_routings_with_other_chunks():
    with a_group() as group:
        layer = Sliced(**BASE_SPEC | {"tokens": 40}, group=group)
        calls = _down_stages(layer, (16, 48), OTHER_CONFIG)
        error = failure_of(calls[dist.get_rank() == 1])
        check_disagreement(error, "moe_gemm_rs", "chunk_rows", 48, 16)
        layer.check({"y": calls[0]()})
        del group, layer, calls


def reports_operator_mismatch():
    with a_group() as group:
        layer = Sliced(**BASE_SPEC, group=group)
        x, ids, _, w, _ = layer.operands()
        if dist.get_rank() == 1:
            error = failure_of(tdkernels.moe_ag_gemm, x, ids, w, activation="swiglu", group=group)
        else:
            error = failure_of(layer.call)
        assert type(error) is ValueError, repr(error)
        assert '"tp_moe" on ranks 0, 2' in str(error) and '"moe_ag_gemm" on rank 1' in str(error), str(error)
        layer.check({"y": layer.call()})
        del group, layer


# Changes of a second cached call. Rank 1 makes it, and the other ranks make the base call.
CACHED_CALLS = {
    "tokens": dict(tokens=4),
    "k": dict(k=1),
    "width": dict(width=16),
    "stages": dict(config=MoeTpConfig(tiles=LOW, num_comm_sms=2, chunk_rows=16, stages=3)),
}


def detects_mismatch_of_cached_plans(what):
    """If ranks mix two cached calls, the consensus check is skipped, and the plan ids in the signals reveal it."""
    changes = dict(CACHED_CALLS[what])
    config = changes.pop("config", CONFIGS["one stage"])
    with a_group() as group:
        base_layer, layer = (Sliced(**BASE_SPEC | others, group=group) for others in ({}, changes))
        variants = [(base_layer, CONFIGS["one stage"]), (layer, config)]
        for layer, config in variants * 2:
            layer.check({"y": layer.call(config=config)})
        dist.barrier()
        layer, config = variants[dist.get_rank() == 1]
        with timeout(1.0):
            error = failure_of(layer.call, config=config)
        assert isinstance(error, PlanMismatchError | PeerTimeoutError), repr(error)
        again = failure_of(layer.call, config=config)
        assert again is not None
        del group, base_layer, layer, variants


# ---- late and missing ranks ----

LAUNCHES = {"rows": tp_moe_launch_ag_gemm, "sums": tp_moe_launch_gemm_rs}


def loses_rank_1(leave, when, timeout_s):
    """Rank 1 dies before it sends its tokens or its sums; the others time out, in later calls as well."""
    layer = Sliced(**BASE_SPEC)
    for _ in range(2):
        layer.check({"y": layer.call()})
    tdkernels.set_timeout(timeout_s)
    dist.barrier()
    if dist.get_rank() == 1:
        LAUNCHES[when].launch = lambda *args, **kwargs: leave()
        layer.call()
    start = time.monotonic()
    error = failure_of(layer.call)
    assert time.monotonic() - start < timeout_s + 5.0
    again = failure_of(layer.call)
    assert again is not None
    raise error


def times_out_on_rank_0(when):
    """Rank 1 is late, and rank 0 times out first. Ranks that need data from rank 0 must not get a result."""
    rank = dist.get_rank()
    with a_group() as group:
        layer = Sliced(**BASE_SPEC, group=group)
        for _ in range(2):
            expected = layer.call()
            layer.check({"y": expected})
        dist.barrier()
        module = LAUNCHES[when]
        launch = module.launch

        def launch_late(*args, **kwargs):
            if rank == 1:
                time.sleep(0.9)
            return launch(*args, **kwargs)

        with timeout(0.3 if rank == 0 else 2.0):
            module.launch = launch_late
            try:
                y = layer.call()
                tdkernels.synchronize()
                assert torch.equal(y, expected)
                answer = "right"
            except PeerTimeoutError as error:
                answer = f"missed {error.peer}"
                error.__traceback__ = None
            finally:
                module.launch = launch
        del group, layer
    return answer
