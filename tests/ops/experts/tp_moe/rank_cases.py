"""What holds between the ranks of tp_moe and its halves, as functions that every rank runs.

test_tp_moe_ranks.py asks: the same bits whenever, memory used again, disagreement, and peers that come late or never.
"""

import random
import time

import torch
import torch.distributed as dist

import tdkernels
from tdkernels import MoeTpConfig, PeerTimeoutError, PlanMismatchError
from tdkernels.ops.experts.tp_moe import launch_ag_gemm as tp_moe_launch_ag_gemm
from tdkernels.ops.experts.tp_moe import launch_gemm_rs as tp_moe_launch_gemm_rs
from tests.ops.experts.tp_moe.cases import CONFIGS, LOW, poisoned_outputs
from tests.ops.experts.tp_moe.oracle import FP16, FP32, Sliced
from tests.support.ranks import a_group
from tests.test_protocol import failure_of, in_any_order, poison, timeout

# Few kinds of calls, since a GPU compiles each.
KINDS = [
    (dict(tokens=18, k=2, experts=3, width=20, hidden=5, seed=1), "three stages"),
    (dict(tokens=5, k=1, experts=2, width=40, hidden=3, dtype=FP16, activation=None, seed=2), "default"),
    (dict(tokens=6, k=2, experts=2, width=9, hidden=8, dtype=FP32, ids="one", seed=3), "tall tiles"),
]


def repeats(kinds, calls, seed):
    """The same bits in every call, between which ranks wait at random and all memory is filled with NaNs."""
    of_all, own = random.Random(seed), random.Random(seed * 100 + dist.get_rank())
    layers = []
    for spec, config in kinds:
        layer = Sliced(**spec)
        layers.append((layer, CONFIGS[config], layer.run(config=CONFIGS[config])))
        layer.check(layers[-1][2])
    with poisoned_outputs():
        for _ in range(calls):
            layer, config, expected = of_all.choice(layers)
            if of_all.random() < 0.3:
                poison()
            time.sleep(own.choice([0.0, own.uniform(0.0, 0.02)]))
            layer.require()
            y = layer.call(config=config)
            time.sleep(own.choice([0.0, own.uniform(0.0, 0.02)]))
            y.backward(layer.dy)
            if of_all.random() < 0.3:
                poison()  # what we got is ours and does not change with the workspace
            tdkernels.synchronize()
            for name, result in {"y": y.detach(), **layer.gradients()}.items():
                assert torch.equal(result, expected[name]), f"{name} of {layer.title}"


def outruns_its_peers(calls):
    """Calls with fresh data and nothing between them, while the ranks run ahead of each other."""
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


# ---- ranks that do not agree ----

USUAL = dict(tokens=3, k=2, experts=3, width=8, hidden=8)
OTHER = MoeTpConfig(tiles=LOW, chunk_rows=32)
# What rank 1 of three does otherwise, and the field that says so, with its value there and elsewhere.
DISAGREEMENTS = {
    "tokens": (dict(tokens=4), {}, "M/W", 4, 3),
    "no tokens": (dict(tokens=0), {}, "M/W", 0, 3),
    "width": (dict(width=16), {}, "H", 16, 8),
    "channels": (dict(hidden=5), {}, "w", "[3, 10, 8]", "[3, 16, 8]"),
    "choices": (dict(k=3), {}, "k", 3, 2),
    "experts": (dict(experts=4), {}, "w", "[4, 16, 8]", "[3, 16, 8]"),
    "dtype": (dict(dtype=FP32), {}, "dtype", '"torch.float32"', '"torch.bfloat16"'),
    "activation": (dict(activation="swiglu_interleaved"), {}, "activation", '"swiglu_interleaved"', '"swiglu"'),
    "chunks": ({}, {"config": OTHER}, "config", "chunk_rows=32", "left to autotune"),
    "method": ({}, {"config": CONFIGS["torch"]}, "config", "method=torch", "left to autotune"),
}


def disagrees(what):
    """Everybody is told, and the group is as good as before."""
    changes, options, field, there, elsewhere = DISAGREEMENTS[what]
    odd = dist.get_rank() == 1
    with a_group() as group:
        layer, usual = Sliced(**USUAL | (changes if odd else {}), group=group), Sliced(**USUAL, group=group)
        error = failure_of(layer.call, **(options if odd else {}))
        check_disagreement(error, "tp_moe", field, there, elsewhere)
        usual.check({"y": usual.call()})
        del group, layer, usual


def check_disagreement(error, operator, field, there, elsewhere):
    assert type(error) is ValueError, repr(error)
    for words in (f"{operator}: the ranks disagree", f"{field} is ", f"{elsewhere}", "on ranks 0, 2", f"{there}"):
        assert words in str(error), f"{words} in {error}"
    assert "on rank 1" in str(error), str(error)


def disagrees_in_the_second_half(what):
    odd = dist.get_rank() == 1
    with a_group() as group:
        layer = Sliced(**USUAL, group=group)
        x, ids, weights, w_gate_up, w_down = layer.operands()
        h, routing = tdkernels.moe_ag_gemm(x, ids, w_gate_up, activation="swiglu", group=group)
        w, config = w_down, None
        if what == "width":
            w = w_down[:, : 8 - 2 * odd]
            expected = "w", "[3, 6, 8]", "[3, 8, 8]"
        else:
            config = CONFIGS["torch"] if odd else None
            expected = "config", "method=torch", "left to autotune"
        error = failure_of(tdkernels.moe_gemm_rs, h, routing, weights, w, group=group, config=config)
        check_disagreement(error, "moe_gemm_rs", *expected)
        layer.check({"y": tdkernels.moe_gemm_rs(h, routing, weights, w_down, group=group)})
        del group, layer, routing


def disagrees_in_the_operator():
    with a_group() as group:
        layer = Sliced(**USUAL, group=group)
        x, ids, _, w, _ = layer.operands()
        if dist.get_rank() == 1:
            error = failure_of(tdkernels.moe_ag_gemm, x, ids, w, activation="swiglu", group=group)
        else:
            error = failure_of(layer.call)
        assert type(error) is ValueError, repr(error)
        assert '"tp_moe" on ranks 0, 2' in str(error) and '"moe_ag_gemm" on rank 1' in str(error), str(error)
        layer.check({"y": layer.call()})
        del group, layer


# Another way to call than the usual one, which rank 1 takes; both are known.
KNOWN = {
    "tokens": dict(tokens=4),
    "choices": dict(k=1),
    "width": dict(width=16),
    "stages": dict(config=MoeTpConfig(tiles=LOW, num_comm_sms=2, chunk_rows=16, stages=3)),
}


def is_not_fooled_by_a_known_plan(what):
    """Both calls have been made before, so nobody asks the others; only the signals can tell."""
    changes = dict(KNOWN[what])
    config = changes.pop("config", CONFIGS["one stage"])
    with a_group() as group:
        ways = [(Sliced(**USUAL, group=group), CONFIGS["one stage"]), (Sliced(**USUAL | changes, group=group), config)]
        for layer, config in ways * 2:
            layer.check({"y": layer.call(config=config)})
        dist.barrier()
        layer, config = ways[dist.get_rank() == 1]
        with timeout(1.0):
            error = failure_of(layer.call, config=config)
        assert isinstance(error, PlanMismatchError | PeerTimeoutError), repr(error)
        again = failure_of(layer.call, config=config)
        assert again is not None
        del group, layer, ways


# ---- ranks that do not come ----

LAUNCHES = {"rows": tp_moe_launch_ag_gemm, "sums": tp_moe_launch_gemm_rs}


def loses_rank_1(leave, when, timeout_s):
    """Rank 1 is gone before its tokens or its sums; the others say so, now and whenever asked again."""
    layer = Sliced(**USUAL)
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


def comes_when_rank_0_has_given_up(when):
    """Rank 1 is late. Whoever needs what rank 0 would have made of what it had not, must not get anything."""
    rank = dist.get_rank()
    with a_group() as group:
        layer = Sliced(**USUAL, group=group)
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
