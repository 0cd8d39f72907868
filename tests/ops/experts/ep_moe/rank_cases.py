"""Test bodies for the synchronization between ranks in fused ep_moe. Every rank runs them.

test_ep_moe_ranks.py starts them: memory reuse, disagreement, and late or missing peers.
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
# Few kinds, since each is compiled on a GPU. Calls of a kind differ in the routing and the number of tokens.
KINDS = [
    dict(k=2, experts_each=2, width=24, hidden=16, dtype=BF16),
    dict(k=3, experts_each=5, width=16, hidden=8, dtype=FP16),
    dict(k=1, experts_each=1, width=7, hidden=3, dtype=BF16),
]


def stress(calls, most_tokens, seed):
    """Make random calls, with random delays on each rank, and fill all memory with NaN in between."""
    rng, rank_rng = random.Random(seed), random.Random(seed * 100 + dist.get_rank())
    for _ in range(calls):
        tokens = [rng.choice([0, 1, rng.randrange(most_tokens + 1)]) for _ in range(dist.get_world_size())]
        ids = rng.choice(["any", "any", "distinct", "one", "last", "none"])
        layer = Layer(tokens, **rng.choice(KINDS), ids=ids, seed=rng.randrange(1 << 30))
        if rng.random() < 0.3:
            poison()
        time.sleep(rank_rng.choice([0.0, rank_rng.uniform(0.0, 0.01)]))
        bounds = rng.choice([{}, {"max_tokens_per_rank": most_tokens}])
        results = layer.run(config=FUSED, **bounds)
        if rng.random() < 0.3:
            poison()  # results must not alias the workspace
        # For very few tokens plain torch's gradients may be exact by chance.
        layer.check(results if sum(tokens) >= 8 else {"y": results["y"]})


def waits_for_a_slow_rank():
    for slow in range(dist.get_world_size()):
        layer = Layer([3, 5, 2], 2, 2, 16, 8, seed=slow)
        for _ in range(2):
            time.sleep(0.15 if dist.get_rank() == slow else 0.0)
            layer.check(layer.run(config=FUSED))


def grows_workspace(widths):
    """Make calls that need larger and smaller workspaces than the call before."""
    for seed, (tokens, width) in enumerate(widths):
        layer = Layer(tokens, 2, 2, width, 8, seed=seed)
        layer.check(layer.run(config=FUSED))


def reports_unnoticed_overflow(tokens):
    """The capacity is too small, and no host notices before the whole call is launched, as is usual on a GPU.

    Every rank reports the error, no rank hangs, and the next call is correct.
    """
    with a_group() as group:
        layer = Layer(tokens, 2, 2, 16, 8, ids="one", group=group)
        with mock.patch.object(Workspace, "_raise_note"), timeout(5.0):
            for _ in range(2):
                layer.call(group=group, max_tokens=1, config=FUSED)
            if device().type == "cuda":  # both calls have recorded the error by now; one is reported
                torch.cuda.synchronize()
        error = failure_of(tdkernels.synchronize)
        assert type(error) is ValueError and "max_tokens=1 is too small" in str(error), repr(error)
        layer.check({"y": layer.call(group=group, config=FUSED).detach()})
        del group, layer


def early_overflow_error_keeps_ranks_in_step(tokens):
    """Rank 0 raises the overflow error at once and stops; the other ranks continue to the backward.

    They do not hang, and the next call is correct.
    """
    with a_group() as group:
        layer = Layer(tokens, 2, 2, 16, 8, ids="one", group=group)
        overflow_options = {"group": group, "max_tokens": 1, "config": FUSED}
        with mock.patch.object(Workspace, "_raise_note"):
            layer.run(**overflow_options)  # the consensus check of the first call involves all hosts
        failure_of(tdkernels.synchronize)
        if dist.get_rank() == 0:
            error = failure_of(layer.call, **overflow_options)
        else:
            with mock.patch.object(Workspace, "_raise_note"), timeout(5.0):
                results = layer.run(**overflow_options)
                if device().type == "cuda":
                    torch.cuda.synchronize()
            assert not any(result.any() for result in results.values()), "results of rows that were not sent"
            error = failure_of(tdkernels.synchronize)
        assert type(error) is ValueError and "max_tokens=1 is too small" in str(error), repr(error)
        layer.check(layer.run(group=group, config=FUSED))
        del group, layer


def early_token_limit_error_keeps_ranks_in_step():
    """The last rank has too many tokens, raises at once and stops; the other ranks continue to the backward.

    They do not hang, not even in calls that still need a consensus check, and the next call is correct.
    """
    tokens = [2, 3, 5][-dist.get_world_size() :]
    bound, exceeds = tokens[-1] - 1, dist.get_rank() == len(tokens) - 1
    with a_group() as group:
        layer, valid_layer = (
            Layer([min(n, limit) for n in tokens], 2, 2, 16, 8, group=group) for limit in (bound + 1, bound)
        )
        bounds = {"group": group, "max_tokens_per_rank": bound, "config": FUSED}
        for call in (layer.call, layer.run):
            with mock.patch.object(Workspace, "_raise_note"), timeout(5.0):
                if exceeds:
                    error = failure_of(call, **bounds)
                    message = f"ep_moe: x [{bound + 1}, 16] has more tokens than max_tokens_per_rank = {bound}"
                    assert type(error) is ValueError and str(error) == message, repr(error)
                else:
                    output = call(**bounds)
                    if device().type == "cuda":
                        torch.cuda.synchronize()
                    results = output if isinstance(output, dict) else {"y": output}
                    assert not any(result.any() for result in results.values()), "results of rows that were not sent"
            error = failure_of(tdkernels.synchronize)
            message = f"ep_moe: rank {len(tokens) - 1} has {bound + 1} tokens, more than max_tokens_per_rank"
            if exceeds:
                assert error is None, f"the rank has raised it already: {error!r}"
            else:
                assert type(error) is ValueError and str(error) == message, repr(error)
            valid_layer.check(valid_layer.run(**bounds))
        del group, layer, valid_layer


# ---- ranks that disagree ----

BASE_SPEC = dict(tokens=[3] * 4, k=2, experts_each=2, width=16, hidden=8)
DISAGREEMENTS = {
    "method": ({}, {"config": EpMoeConfig(method="sequence")}, "whole is "),
    "bound": ({}, {"max_tokens_per_rank": 4}, "max_tokens_per_rank is "),
    "width": (dict(width=24), {}, "width is "),
    "dtype": (dict(dtype=FP32), {}, "dtype is "),
    "k": (dict(k=1), {}, "k is "),
}


def reports_disagreement(what):
    """Every rank reports the disagreement, and the group stays usable."""
    changes, options, message = DISAGREEMENTS[what]
    differs = dist.get_rank() == 1
    with a_group() as group:
        layer = Layer(**BASE_SPEC | (changes if differs else {}), group=group)
        options = {"config": FUSED, "max_tokens": 100, **(options if differs else {})}
        error = failure_of(layer.call, group=group, **options)
        assert type(error) is ValueError and ": the ranks disagree: " in str(error), repr(error)
        assert message in str(error) and "on rank 1" in str(error), str(error)
        layer = Layer(**BASE_SPEC, group=group)
        layer.check(layer.run(group=group, config=FUSED))
        del group, layer


def detects_mismatch_of_cached_plans():
    """If ranks mix two cached calls, the consensus check is skipped, and the plan ids in the signals reveal it."""
    with a_group() as group:
        layers = [Layer(**BASE_SPEC | {"width": width}, group=group) for width in (16, 24)]
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


# ---- late and missing ranks ----

STEPS = {"rows": ep_moe_launch_dispatch_gemm, "sums": ep_moe_launch_gemm_combine}


def loses_rank_1(leave, when, timeout_s):
    """Rank 1 dies before it sends the counts, the rows or the sums; the others time out, in later calls as well."""
    layer = Layer(**BASE_SPEC)
    for _ in range(2):
        layer.check(layer.run(config=FUSED))
    tdkernels.set_timeout(timeout_s)
    dist.barrier()
    if dist.get_rank() == 1:
        if when in STEPS:  # the other ranks have all counts and wait for the next step
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


def times_out_on_rank_0():
    """Rank 1 is late, and rank 0 times out first. Ranks that need data from rank 0 must not get a result."""
    rank = dist.get_rank()
    with a_group() as group:
        layer = Layer(**BASE_SPEC, group=group)
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
