"""What holds between the ranks of an ep_moe whose products overlap the ways, as functions that every rank runs.

test_ep_moe_ranks.py asks: reuse of memory, disagreement, and peers that come late or never.
"""

import random
import time
from unittest import mock

import torch
import torch.distributed as dist

import tdkernels
from tdkernels import EpMoeConfig, PeerTimeoutError, PlanMismatchError
from tdkernels.ops.experts.ep_moe import launch_dispatch_gemm as ep_moe_launch_dispatch_gemm
from tdkernels.ops.experts.ep_moe import launch_gemm_combine as ep_moe_launch_gemm_combine
from tdkernels.symm.workspace import Workspace
from tests.ops.experts.dispatch.oracle import BF16, FP16, FP32
from tests.ops.experts.ep_moe.cases import CONFIGS, Layer
from tests.support.ranks import a_group, device
from tests.test_protocol import failure_of, poison, timeout

FUSED = CONFIGS["fused"]
# Few kinds of layers, since a GPU compiles each; what differs from call to call is where tokens go and how many.
KINDS = [
    dict(k=2, experts_each=2, width=24, hidden=16, dtype=BF16),
    dict(k=3, experts_each=5, width=16, hidden=8, dtype=FP16),
    dict(k=1, experts_each=1, width=7, hidden=3, dtype=BF16),
]


def endures(calls, most_tokens, seed):
    """Random tokens on random ways, between which ranks wait at random and all memory is filled with NaNs."""
    of_all, own = random.Random(seed), random.Random(seed * 100 + dist.get_rank())
    for _ in range(calls):
        tokens = [of_all.choice([0, 1, of_all.randrange(most_tokens + 1)]) for _ in range(dist.get_world_size())]
        ids = of_all.choice(["any", "any", "distinct", "one", "last", "none"])
        layer = Layer(tokens, **of_all.choice(KINDS), ids=ids, seed=of_all.randrange(1 << 30))
        if of_all.random() < 0.3:
            poison()
        time.sleep(own.choice([0.0, own.uniform(0.0, 0.01)]))
        bounds = of_all.choice([{}, {"max_tokens_per_rank": most_tokens}])
        results = layer.run(config=FUSED, **bounds)
        if of_all.random() < 0.3:
            poison()  # what we got is ours and does not change with the workspace
        # Of a handful of tokens plain torch's gradients are right by luck.
        layer.check(results if sum(tokens) >= 8 else {"y": results["y"]})


def waits_for_a_slow_rank():
    for slow in range(dist.get_world_size()):
        layer = Layer([3, 5, 2], 2, 2, 16, 8, seed=slow)
        for _ in range(2):
            time.sleep(0.15 if dist.get_rank() == slow else 0.0)
            layer.check(layer.run(config=FUSED))


def grows(widths):
    """Each call wants more room than the one before, or less."""
    for seed, (tokens, width) in enumerate(widths):
        layer = Layer(tokens, 2, 2, width, 8, seed=seed)
        layer.check(layer.run(config=FUSED))


def overflows_unseen(tokens):
    """More rows than there is room for, and no host that looks before the whole call is launched, as with a GPU.

    Every rank is told, none waits for what nobody sends, and the next call is right.
    """
    with a_group() as group:
        layer = Layer(tokens, 2, 2, 16, 8, ids="one", group=group)
        with mock.patch.object(Workspace, "_raise_note"), timeout(5.0):
            for _ in range(2):
                layer.call(group=group, max_tokens=1, config=FUSED)
            if device().type == "cuda":  # both have found out by now, of which one is told
                torch.cuda.synchronize()
        error = failure_of(tdkernels.synchronize)
        assert type(error) is ValueError and "max_tokens=1 is too small" in str(error), repr(error)
        layer.check({"y": layer.call(group=group, config=FUSED).detach()})
        del group, layer


def one_is_told_of_an_overflow(tokens):
    """Rank 0 hears of it at once and makes no more of that call; the others, who have not looked, go on to its
    backward. They wait for nobody, and the next call is right."""
    with a_group() as group:
        layer = Layer(tokens, 2, 2, 16, 8, ids="one", group=group)
        too_few = {"group": group, "max_tokens": 1, "config": FUSED}
        with mock.patch.object(Workspace, "_raise_note"):
            layer.run(**too_few)  # what is new is agreed on by all hosts
        failure_of(tdkernels.synchronize)
        if dist.get_rank() == 0:
            error = failure_of(layer.call, **too_few)
        else:
            with mock.patch.object(Workspace, "_raise_note"), timeout(5.0):
                results = layer.run(**too_few)
                if device().type == "cuda":
                    torch.cuda.synchronize()
            assert not any(result.any() for result in results.values()), "a sum or a gradient of nothing"
            error = failure_of(tdkernels.synchronize)
        assert type(error) is ValueError and "max_tokens=1 is too small" in str(error), repr(error)
        layer.check(layer.run(group=group, config=FUSED))
        del group, layer


def one_has_too_many_tokens():
    """Its host raises at once and makes no more of that call; the others, who have not looked, go on to its backward.
    They wait for nobody, also where hosts have yet to agree on what is launched, and the next call is right."""
    tokens = [2, 3, 5][-dist.get_world_size() :]
    most, odd = tokens[-1] - 1, dist.get_rank() == len(tokens) - 1
    with a_group() as group:
        layer, fewer = (
            Layer([min(n, limit) for n in tokens], 2, 2, 16, 8, group=group) for limit in (most + 1, most)
        )
        bounds = {"group": group, "max_tokens_per_rank": most, "config": FUSED}
        for call in (layer.call, layer.run):
            with mock.patch.object(Workspace, "_raise_note"), timeout(5.0):
                if odd:
                    error = failure_of(call, **bounds)
                    words = f"ep_moe: x [{most + 1}, 16] has more tokens than max_tokens_per_rank = {most}"
                    assert type(error) is ValueError and str(error) == words, repr(error)
                else:
                    made = call(**bounds)
                    if device().type == "cuda":
                        torch.cuda.synchronize()
                    results = made if isinstance(made, dict) else {"y": made}
                    assert not any(result.any() for result in results.values()), "a sum or a gradient of nothing"
            error = failure_of(tdkernels.synchronize)
            words = f"ep_moe: rank {len(tokens) - 1} has {most + 1} tokens, more than max_tokens_per_rank"
            assert type(error) is ValueError and str(error) == words, repr(error)
            fewer.check(fewer.run(**bounds))
        del group, layer, fewer


# ---- ranks that call for different things ----

USUAL = dict(tokens=[3] * 4, k=2, experts_each=2, width=16, hidden=8)
DISAGREEMENTS = {
    "method": ({}, {"config": EpMoeConfig(method="sequence")}, "whole is "),
    "bound": ({}, {"max_tokens_per_rank": 4}, "max_tokens_per_rank is "),
    "width": (dict(width=24), {}, "width is "),
    "dtype": (dict(dtype=FP32), {}, "dtype is "),
    "choices": (dict(k=1), {}, "k is "),
}


def disagrees(what):
    """Everybody is told, and the group is as good as before."""
    changes, options, words = DISAGREEMENTS[what]
    odd = dist.get_rank() == 1
    with a_group() as group:
        layer = Layer(**USUAL | (changes if odd else {}), group=group)
        options = {"config": FUSED, "max_tokens": 100, **(options if odd else {})}
        error = failure_of(layer.call, group=group, **options)
        assert type(error) is ValueError and ": the ranks disagree: " in str(error), repr(error)
        assert words in str(error) and "on rank 1" in str(error), str(error)
        layer = Layer(**USUAL, group=group)
        layer.check(layer.run(group=group, config=FUSED))
        del group, layer


def is_not_fooled_by_a_known_plan():
    """Calls of two widths have been made before, so nobody asks the others; only the signals can tell."""
    with a_group() as group:
        layers = [Layer(**USUAL | {"width": width}, group=group) for width in (16, 24)]
        for layer in layers * 2:
            layer.check({"y": layer.call(group=group, config=FUSED).detach()})
        dist.barrier()
        layer = layers[dist.get_rank() == 1]
        with timeout(1.0):
            error = failure_of(layer.call, group=group, config=FUSED)
        assert isinstance(error, PlanMismatchError | PeerTimeoutError) and "ep_moe" in str(error), repr(error)
        again = failure_of(layer.call, group=group, config=FUSED)
        assert type(again) is type(error) and str(again) == str(error), f"{again!r} after {error!r}"
        del group, layer, layers


# ---- ranks that do not come ----

STEPS = {"rows": ep_moe_launch_dispatch_gemm, "sums": ep_moe_launch_gemm_combine}


def loses_rank_1(leave, when, timeout_s):
    """Rank 1 is gone before the counts, the rows or the sums; the others say so, now and whenever asked again."""
    layer = Layer(**USUAL)
    for _ in range(2):
        layer.check(layer.run(config=FUSED))
    tdkernels.set_timeout(timeout_s)
    dist.barrier()
    if dist.get_rank() == 1:
        if when in STEPS:  # the others know of all counts, and wait for what comes after them
            STEPS[when].launch = lambda *args, **kwargs: leave()
            layer.call(config=FUSED)
        leave()

    def call():
        layer.call(config=FUSED)
        tdkernels.synchronize()

    start = time.monotonic()
    error = failure_of(call)
    assert time.monotonic() - start < timeout_s + 5.0
    again = failure_of(call)
    assert type(again) is type(error) and again.peer == error.peer, f"{again!r} after {error!r}"
    raise error


def comes_when_rank_0_has_given_up():
    """Rank 1 is late. Whoever needs what rank 0 would have made of what it had not, must not get anything."""
    rank = dist.get_rank()
    with a_group() as group:
        layer = Layer(**USUAL, group=group)
        for _ in range(2):
            layer.check(layer.run(group=group, config=FUSED))
        dist.barrier()
        if rank == 1:
            time.sleep(0.9)
        with timeout(0.3 if rank == 0 else 2.0):
            try:
                y = layer.call(group=group, config=FUSED)
                tdkernels.synchronize()
                answer = "right"
            except PeerTimeoutError as error:
                answer = f"missed {error.peer}"
                error.__traceback__ = None
        y = None
        del group, layer, y
    return answer
