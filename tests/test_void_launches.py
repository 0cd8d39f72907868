"""A void launch, i.e. one after a failure of its rank, changes nothing that a peer can read.

A peer that is one call behind may still read data that an earlier launch of this rank has stored. If a void launch
overwrote it, the peer would return a wrong result without an error. So the launches of every operator are made void on
rank 0, and the buffers of all ranks are compared before and after. This test does not depend on timing. A second test
delays a peer and compares the results of a third rank.
"""

import contextlib
import functools
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import tdkernels
from tdkernels import (
    AgAttentionConfig,
    CollectiveConfig,
    EpConfig,
    EpMoeConfig,
    FlashDecodeConfig,
    MoeTpConfig,
    PeerTimeoutError,
)
from tdkernels.lang import context
from tdkernels.ops.experts.dispatch.counting import count
from tdkernels.ops.experts.ep_moe import fused
from tdkernels.symm.backends.emulated_network import EmulatedNetwork
from tdkernels.symm.group import group_state
from tdkernels.symm.workspace import Workspace
from tests.ops.attention.ag_attention.oracle import Sharded
from tests.ops.attention.ag_attention.oracle import attention as sharded_attention
from tests.ops.attention.flash_decode.oracle import Decode
from tests.ops.attention.ulysses import cases as sequence_parallel
from tests.ops.attention.ulysses.cases import Projection
from tests.ops.collectives.cases import draw_operands, expected_of
from tests.ops.collectives.norm_oracle import NormCase
from tests.ops.dense.cases import config_for
from tests.ops.dense.gemm_ar_norm_cases import CONFIGS as GEMM_NORM_CONFIGS
from tests.ops.dense.gemm_ar_norm_oracle import NormCase as GemmNormCase
from tests.ops.dense.multinode_cases import adding_once
from tests.ops.experts.dispatch.oracle import Routed
from tests.ops.experts.dispatch.rank_cases import padded
from tests.ops.experts.ep_moe.cases import Layer
from tests.ops.experts.tp_moe import cases as tensor_experts
from tests.ops.experts.tp_moe.oracle import Sliced
from tests.support.dense_oracle import Case
from tests.support.ranks import a_group, device, on_ranks
from tests.support.simulated_nodes import a_group_on_nodes, needs_gpus
from tests.support.subset import THOROUGH
from tests.test_protocol import COPY_ENGINE, PIPELINED, VARIANTS, failure_of, synchronize, timeout

FP32 = torch.float32
PATTERN = 0xA5  # differs from every operand; as a number of rows or an address it is out of bounds
TIMEOUT_S, MAX_VOID_S = 20.0, 15.0  # a void launch waits for nothing


# ---- void launches ----


def workspaces(group):
    """Return the workspaces of a group that have a buffer, by name."""
    found = group_state(group).workspaces.values()
    return {workspace.name: workspace for workspace in found if workspace.buffer is not None}


def memory(workspace):
    """Return this rank's data in a symmetric buffer, without the signals, as bytes."""
    return workspace.buffer.tensor(workspace.rank)[workspace.data_offset :]


def forget_failures(workspace):
    """Clear the status words in which peers have reported a failure."""
    ranks = context.MAX_RANKS.value
    workspace.buffer.tensor(workspace.rank)[: 2 * 8 * ranks].view(torch.int64)[ranks:].zero_()


def quiesce(group):
    """Return once no rank has messages in flight."""
    synchronize()
    for workspace in workspaces(group).values():
        if isinstance(workspace.buffer.network, EmulatedNetwork):
            workspace.buffer.network.quiet()
    dist.barrier(group)


@contextlib.contextmanager
def void_launches(group):
    """Make all launches of this rank void, while the host continues as if it had launched them before the failure.

    On exit the group is as if it had made no call. Yields a list, which is filled on exit with forbidden effects of the
    launches: messages to other nodes, waits, and changed private words that the next launch relies on.
    """
    failure, sent, wrong = group_state(group).failure(device()), [], []
    states = {name: workspace.state.clone() for name, workspace in workspaces(group).items()}
    failure.flags[:2] = 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Workspace, "check", lambda self, in_call=True: None)
        patch.setattr(EmulatedNetwork, "_add", lambda self, peer, message: sent.append((peer, message)))
        try:
            start = time.monotonic()
            yield wrong
            synchronize()
        finally:
            failure.flags[:2] = 0
            failure.device.flag.zero_()
    if sent:
        wrong.append(f"{len(sent)} messages to other nodes")
    if time.monotonic() - start > MAX_VOID_S:
        wrong.append(f"took {time.monotonic() - start:.1f} s")
    for name, state in states.items():
        workspace = workspaces(group)[name]
        for word in (context.STATE_FINISHED, context.STATE_TICKETS, context.STATE_STARTED):
            if workspace.state[word.value]:
                wrong.append(f"word {word.value} of the state of {name} is not 0")
        flags = slice(context.STATE_FLAGS.value, None)
        if not torch.equal(workspace.state[flags], state[flags]):
            wrong.append(f"flags of {name} have changed")
        workspace.state.copy_(state)
        workspace._note_words[0] = 0


def check_no_changes(group, calls):
    """``calls``: {name: function} or {name: (prepare, function of the prepared value)}; ``prepare`` is never void."""
    calls = {
        name: call if isinstance(call, tuple) else (lambda: None, lambda _, call=call: call())
        for name, call in calls.items()
    }
    wrong = []
    with timeout(TIMEOUT_S):
        for before, call in calls.values():
            call(before())  # afterwards the call is cached and needs no consensus check
        for name, (before, call) in calls.items():
            given = before()
            quiesce(group)
            for workspace in workspaces(group).values():
                memory(workspace).fill_(PATTERN)
            quiesce(group)
            if dist.get_rank(group) == 0:
                with void_launches(group) as found:
                    call(given)
                wrong += [f"{name}: {what}" for what in found]
            quiesce(group)
            for workspace in workspaces(group).values():
                if workspace._copies:  # the host always makes its copies; close() finds the failure
                    continue
                changed = (memory(workspace) != PATTERN).sum().item()
                if changed:
                    wrong.append(f"{name}: {changed} bytes of {workspace.name}")
            for workspace in workspaces(group).values():
                forget_failures(workspace)
            quiesce(group)  # all ranks have compared
    assert not wrong, f"on rank {dist.get_rank(group)}: {wrong}"


# ---- calls of each family ----


# The host always makes its copies; ``close`` on the peers finds the failure.
IN_KERNELS = [(operator, changes) for operator, changes in VARIANTS if changes not in (COPY_ENGINE, PIPELINED)]


def dense(group, variants=IN_KERNELS):
    """Return a call of each variant, and a backward of each operator."""
    calls, differentiated = {}, set()
    for operator, changes in variants:
        case = Case(operator, FP32, 20, 9, 7, rank=dist.get_rank(group), world_size=group.size())
        forward = functools.partial(case.call, group=group, config=config_for(case, **changes))
        calls[f"{operator} {changes}"] = forward
        if operator not in differentiated:
            calls[f"{operator} {changes} backward"] = forward, lambda y, case=case: y.backward(case.dy)
        differentiated.add(operator)
    return calls


def collectives(group):
    x = torch.ones(group.size() * 150, device=device())
    variants = [("all_gather", {}), ("reduce_scatter", {})]
    variants += [("all_reduce", {"exchange": exchange}) for exchange in ("one_shot", "two_shot")]
    calls = {}
    for operator, changes in variants:
        config = CollectiveConfig(block_bytes=256, num_warps=1, **changes)
        calls[f"{operator} {changes}"] = functools.partial(getattr(tdkernels, operator), x, config=config, group=group)
    return calls


def norms(group):
    case = NormCase("all_reduce_rms_norm", (7, 70), FP32, group=group)
    variants = {"send_columns": 16, "num_programs": 2}, {"exchange": "two_shot", "num_programs": 2}
    return {f"all_reduce_rms_norm {changes}": functools.partial(case.call, changes) for changes in variants}


def norms_of_products(group):
    case = GemmNormCase("gemm_ar_rms_norm", FP32, 18, 70, 9, group=group)
    configs = {name: GEMM_NORM_CONFIGS[name] for name in ("fused", "fused, split K")}
    return {f"gemm_ar_rms_norm {name}": functools.partial(case.call, config=one) for name, one in configs.items()}


DECODE_IN_TWO_LAUNCHES = FlashDecodeConfig(method="split", block_n=16, num_warps=1, num_stages=1, num_programs=3)


def decode(group):
    few = FlashDecodeConfig(block_n=16, num_warps=1, num_stages=1, num_programs=3)
    calls = {}
    for name, spec in {"one token": {}, "a window": dict(tokens=2, window=9)}.items():
        case = Decode(2, heads=2, kv_heads=1, dim=16, keys=20, **spec, group=group)
        calls[f"flash_decode {name}"] = lambda case=case: case.call(config=few)
    case = Decode(2, heads=2, kv_heads=1, dim=16, keys=20, group=group)
    calls["flash_decode in two launches"] = lambda: case.call(config=DECODE_IN_TWO_LAUNCHES)
    return calls


def attention(group):
    case = Sharded(21, heads=2, kv_heads=1, d=16, dv=24, group=group)
    case.require()
    config = AgAttentionConfig(
        block_q=16, block_k=32, num_warps=4, num_stages=2, dq_block_q=32, dq_block_k=16, dq_num_warps=4,
        dkv_block_q=16, dkv_block_k=32, dkv_num_warps=4, num_comm_sms=1, chunk_rows=16,
    )

    def forward():
        return case.call(config=config)

    return {"ag_attention": forward, "ag_attention backward": (forward, lambda out: case.backward(*out))}


def projections(group):
    calls = {}
    for operator in sequence_parallel.OPERATORS:
        for name in ("pulled at once", "pushed"):
            case = Projection(operator, FP32, positions=9, k=7, n=6, group=group)

            def forward(case=case, config=sequence_parallel.CONFIGS[name]):
                return case.call(config=config)

            calls[f"{operator} {name}"] = forward
            calls[f"{operator} {name} backward"] = forward, lambda y, case=case: y.backward(case.dy)
    return calls


def tp_moe(group):
    layer = Sliced(**tensor_experts.SMALL, group=group)
    layer.require()
    config = MoeTpConfig(num_comm_sms=2, chunk_rows=16, stages=2)

    def forward():
        return layer.call(config=config)

    return {"tp_moe": forward, "tp_moe backward": (forward, lambda y: y.backward(layer.dy))}


EP = {"num_senders": 2, "num_receivers": 2, "chunk_tokens": 2, "block_bytes": 256, "num_warps": 1}


def dispatch_combine(group, low_latency=True):
    rank, ranks = dist.get_rank(group), group.size()
    tokens = [5, 0, 4, 3][:ranks]
    local = group_state(group).local_world_size
    case = Routed(tokens, 2, 2 * ranks, 24, FP32, rank=rank, local_world_size=local)
    rows, staged = case.capacity()
    bounds = {"two_phase": dict(max_tokens=max(rows, staged) + 3)}
    if low_latency:
        bounds["low_latency"] = dict(max_tokens_per_rank=max(tokens), max_tokens=rows + 3)
    case.x.requires_grad_()
    case.weights.requires_grad_()
    calls = {}
    for combine in ("per_rank", "per_expert"):
        for name, bound in bounds.items():
            config = EpConfig(**EP, combine=combine)
            out = padded(case.expert_out(), bound["max_tokens"]).requires_grad_()

            def dispatch(bound=bound, config=config):
                return case.dispatch(**bound, config=config, group=group)

            def combine_rows(sent, out=out):
                return tdkernels.ep_combine(out, sent[1], group=group)

            def dispatch_and_combine(dispatch=dispatch, combine_rows=combine_rows):
                sent = dispatch()
                return sent[0], combine_rows(sent)

            def dispatch_by_handle(sent):
                return tdkernels.ep_dispatch(case.x.detach(), sent[1], case.weights.detach(), group=group)

            def backward(both, out=out):
                recv, y = both
                grad_outputs = [torch.ones_like(recv.x), torch.ones_like(recv.topk_weights), torch.ones_like(y)]
                inputs = [case.x, case.weights, out]
                return torch.autograd.grad([recv.x, recv.topk_weights, y], inputs, grad_outputs, retain_graph=True)

            title = f"{name} {combine}"
            calls[f"ep_combine {title}"] = dispatch, combine_rows
            if combine == "per_rank":
                calls[f"ep_dispatch, then ep_combine, {title}"] = dispatch_and_combine
                calls[f"ep_dispatch by a handle {title}"] = dispatch, dispatch_by_handle
            if combine == "per_rank" and name == "two_phase":
                calls[f"backward of both {title}"] = dispatch_and_combine, backward
    return calls


def fused_ep_moe(group):
    layer = Layer([5, 0, 4][: group.size()], 2, 2, 24, 8, FP32, group=group)
    layer.own = {name: operand.detach().requires_grad_() for name, operand in layer.own.items()}
    config = EpMoeConfig(method="fused")
    routings = []

    def forward(**options):
        return layer.call(config=config, group=group, **options)

    def forward_keeping_routing():
        def count_and_keep(*args, **kwargs):
            routings[:] = [count(*args, **kwargs)]
            return routings[0]

        with mock.patch.object(fused, "count", count_and_keep):
            return forward()

    def forward_with_kept_routing(_):
        with mock.patch.object(fused, "count", lambda *args, **kwargs: routings[0]):
            return forward()

    dy = layer.all_dy[layer.case.mine].to(device())
    return {
        "ep_moe": lambda: forward(max_tokens=40),
        "ep_moe with the correct routing": (forward_keeping_routing, forward_with_kept_routing),
        "ep_moe backward": (forward, lambda y: y.backward(dy)),
    }


# ---- no changes ----

FAMILIES = [
    dense, collectives, norms, norms_of_products, decode, attention, projections, tp_moe, dispatch_combine,
    fused_ep_moe,
]


def make_void_calls(family):
    with a_group() as group:
        check_no_changes(group, family(group))
        del group


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__)
def test_void_launch_changes_nothing(family):
    on_ranks(3, make_void_calls, family)


def dense_across_nodes(group):
    return dense(group, [("ag_gemm", {}), ("gemm_rs", {}), ("gemm_ar", {})])


def dispatch_combine_across_nodes(group):
    return dispatch_combine(group, low_latency=False)


def make_void_calls_across_nodes(families, local):
    with a_group_on_nodes(local) as group:
        for family in families:
            check_no_changes(group, family(group))
        del group


@needs_gpus
@pytest.mark.parametrize("world_size, local, families", [
    (4, 2, [dense_across_nodes]), (4, 2, [decode]), (4, 2, [dispatch_combine_across_nodes]), (2, 1, [decode]),
], ids=str)
def test_void_launch_changes_nothing_across_nodes(world_size, local, families):
    on_ranks(world_size, make_void_calls_across_nodes, families, local)


def make_void_single_owner_calls(local):
    with a_group_on_nodes(local) as group:
        adding_once(check_no_changes, group, dense(group, [("gemm_ar", {})]))
        del group


@needs_gpus
def test_void_launch_with_single_owner_reduction():
    on_ranks(4, make_void_single_owner_calls, 2)


# ---- a late rank ----

LATE_S, GIVES_UP_S, WAITS_S = 0.5, 0.3, 1.0


class Late:
    """A call in which rank 1 waits for rank 2, while rank 0 has timed out and makes two more, void calls.

    Args:
        call: Makes the call and returns its result.
        check: Raises AssertionError if a result is wrong.
        operand: Rank 0 changes it before its void calls, so that their data would be detected.
    """

    def __init__(self, call, check, operand):
        self.call, self.check, self.operand = call, check, operand


def late_dense(group, operator, changes):
    case = Case(operator, FP32, 6, 4, 8, exact=True, rank=dist.get_rank(group), world_size=group.size())
    case.x.requires_grad_(False)
    case.weight.requires_grad_(False)
    case.bias.requires_grad_(False)
    config = config_for(case, **changes)
    return Late(lambda: case.call(group=group, config=config), lambda y: case.check({"output": y}), case.x)


def late_collective(group, operator, changes):
    full = draw_operands(operator, (150,), FP32, world_size=group.size())
    x = full[dist.get_rank(group)].to(device())
    expected = expected_of(operator, full, dist.get_rank(group)).to(device())

    def check(y):
        assert torch.equal(y, expected), operator

    return Late(lambda: getattr(tdkernels, operator)(x, config=CollectiveConfig(**changes), group=group), check, x)


def late_norm(group, changes):
    case = NormCase("all_reduce_rms_norm", (6, 40), FP32, group=group)
    operands = case.operands()
    return Late(lambda: case.call(changes, operands=operands), case.check, operands[0])


def late_norm_of_product(group):
    case = GemmNormCase("gemm_ar_rms_norm", FP32, 6, 40, 9, group=group)
    for operand in case.operands().values():
        operand.requires_grad_(False)

    def check(results):
        case.check(*results, in_rank_order=True)

    return Late(lambda: case.call(config=GEMM_NORM_CONFIGS["fused"]), check, case.x)


def late_decode(group, spec, config=None):
    case = Decode(2, heads=2, kv_heads=1, dim=16, keys=20, **spec, group=group)
    exact = case.expected(torch.double, False)["o"]

    def check(o):
        assert (o.cpu().double() - exact).abs().max() < 0.1  # a void call uses another q

    return Late(lambda: case.call(config=config), check, case.q)


def late_attention(group):
    case = Sharded(21, heads=2, kv_heads=1, d=16, dv=24, group=group)
    exact = case.part(sharded_attention(*(case.whole[name].double() for name in "qkv"), True, 16**-0.5)[0])

    def check(result):
        assert (result[0].cpu().double() - exact).abs().max() < 0.1

    return Late(lambda: case.call(), check, case.own["k"])


def late_projection(group, operator, config_name):
    case = Projection(operator, FP32, positions=9, k=7, n=6, exact=True, group=group)
    case.require(())
    config = sequence_parallel.CONFIGS[config_name]
    return Late(lambda: case.call(config=config), lambda y: case.check({"output": y}), case.x)


def late_dispatch(group, low_latency):
    case = Routed([5, 2, 4], 2, 6, 24, FP32, rank=dist.get_rank(group))
    rows, staged = case.capacity()
    capacity = max(rows, staged) + 3
    bound = {"max_tokens": capacity, **({"max_tokens_per_rank": 5} if low_latency else {})}
    out = padded(case.expert_out(), capacity)

    def call():
        recv, handle = case.dispatch(**bound, config=EpConfig(**EP), group=group)
        return recv, tdkernels.ep_combine(out, handle, group=group)

    def check(result):
        recv, y = result
        assert torch.equal(recv.splits.cpu(), case.splits), recv.splits
        assert torch.equal(recv.x[: case.num_rows].cpu(), case.received(case.all_x))
        case.check_combined(y)

    return Late(call, check, case.x)


LATE = {
    **{f"{operator} {changes}": (late_dense, operator, changes) for operator, changes in IN_KERNELS},
    "all_reduce": (late_collective, "all_reduce", {}),
    "all_reduce two-shot": (late_collective, "all_reduce", {"exchange": "two_shot"}),
    "all_reduce_rms_norm": (late_norm, {"send_columns": 16}),
    "all_reduce_rms_norm two-shot": (late_norm, {"exchange": "two_shot"}),
    "gemm_ar_rms_norm": (late_norm_of_product,),
    "flash_decode": (late_decode, {}),
    "ep_dispatch": (late_dispatch, False),
    "ep_dispatch low-latency": (late_dispatch, True),
}
if THOROUGH:
    LATE |= {
        **{f"{operator} {changes}": (late_dense, operator, changes) for operator, changes in VARIANTS},
        "all_gather": (late_collective, "all_gather", {}),
        "reduce_scatter": (late_collective, "reduce_scatter", {}),
        "flash_decode with a window": (late_decode, dict(tokens=2, window=9)),
        "flash_decode in two launches": (late_decode, {}, DECODE_IN_TWO_LAUNCHES),
        "ag_attention": (late_attention,),
        "ulysses_qkv": (late_projection, "ulysses_qkv", "pulled at once"),
        "ulysses_qkv pushed": (late_projection, "ulysses_qkv", "pushed"),
        "ulysses_out": (late_projection, "ulysses_out", "pushed"),
    }


def outcome_of(name):
    """Return this rank's outcome of a call to which rank 2 is late: "right", or the type of the error."""
    rank = dist.get_rank()
    make, *options = LATE[name]
    with a_group() as group:
        late = make(group, *options)
        for _ in range(2):
            late.check(late.call())
        dist.barrier()
        with timeout(GIVES_UP_S if rank == 0 else WAITS_S), pytest.MonkeyPatch.context() as patch:
            if rank == 0:
                patch.setattr(Workspace, "check", lambda self, in_call=True: None)
                late.call()
                late.operand.fill_(100)
                late.call()
                late.call()
                patch.undo()
                error = failure_of(late.call)
                assert isinstance(error, PeerTimeoutError), repr(error)
                outcome = "gave up"
            else:
                time.sleep(LATE_S if rank == 2 else 0.0)
                try:
                    result = late.call()
                    tdkernels.synchronize()  # raises an error recorded by the kernel
                    late.check(result)
                    outcome = "right"
                except PeerTimeoutError as error:
                    error.__traceback__ = None
                    outcome = f"{type(error).__name__}"
        dist.barrier()
        del group, late
    return outcome


def outcomes_of(names):
    return {name: outcome_of(name) for name in names}


def test_peer_one_call_behind_gets_the_correct_result_or_an_error():
    rank_0, *others = on_ranks(3, outcomes_of, list(LATE))
    assert set(rank_0.values()) == {"gave up"}
    assert all(set(outcome.values()) <= {"right", "PeerTimeoutError", "PeerFailedError"} for outcome in others)
    # Without any correct result the test would prove nothing.
    assert "right" in others[0].values()
