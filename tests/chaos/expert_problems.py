"""Problems of a fault campaign: operators of experts."""

import random

import torch
import torch.distributed as dist

import tdkernels
from tdkernels import EpConfig
from tests.chaos.base import FP32, NamedResults, Problem
from tests.ops.collectives import cases as collective
from tests.ops.experts.dispatch.all_to_all_cases import AllToAllCase
from tests.ops.experts.dispatch.cases import expected_gradients_of_combine
from tests.ops.experts.dispatch.oracle import Routed
from tests.ops.experts.dispatch.rank_cases import padded
from tests.ops.experts.ep_moe.cases import Layer
from tests.ops.experts.tp_moe.oracle import Sliced
from tests.support.ranks import device

MAX_TOKENS, CAPACITY = 6, 64  # tokens per rank of an expert operator; capacity in rows of any rank


class AllToAll(Problem):
    SHAPES = [8, 12, 7, 24]

    def __init__(self, operator, changes, shape, seed, group):
        world_size = dist.get_world_size()
        rng = random.Random(seed)
        splits = [[rng.randrange(4) for _ in range(2 * world_size)] for _ in range(world_size)]
        self.case = case = AllToAllCase(splits, self.SHAPES[shape], FP32, values="exact", seed=seed)
        all_d = [case.draw(len(x), self.SHAPES[shape], FP32) for x in case.all_x]
        self.d_out, self.d_x = case.received(all_d).to(device()), all_d[case.rank]
        case.x.requires_grad_()
        self.options, self.group, self.results = dict(changes), group, {}
        self.bounded = "max_tokens" in changes

    def steps(self, backward):
        out, splits, _ = self.case.call(group=self.group, **self.options)
        self.results = {"out": out.detach(), "splits": splits}
        yield
        if backward:
            out.backward(padded(self.d_out, self.options.get("max_tokens")))
            self.results["dx"] = self.case.x.grad
            yield

    def check(self):
        self.case.check(self.results["out"], self.results["splits"], self.options.get("max_tokens"))
        if "dx" in self.results:
            assert collective.same(self.results["dx"], self.d_x), "dx of all_to_all"

    def corrupt_ids(self):
        self.case.own_splits = self.case.own_splits.clone()
        self.case.own_splits[0] = -3


class Experts(Problem):
    """A dispatch and the combine with its handle; ``halves``: split into send and receive, without gradients."""

    SHAPES = [8, 12, 7, 24]

    def __init__(self, operator, changes, shape, seed, group):
        changes, world_size = dict(changes), dist.get_world_size()
        self.halves, self.combine = changes.pop("halves", False), changes.pop("combine", "per_rank")
        rng = random.Random(seed)
        tokens = [rng.randrange(MAX_TOKENS + 1) for _ in range(world_size)]
        width = self.SHAPES[shape]
        self.case = case = Routed(tokens, 2, 2 * world_size, width, FP32, seed=seed)
        changes["config"] = EpConfig(combine=self.combine, num_senders=2, num_receivers=2, num_warps=1)
        self.options, self.group, self.results = changes, group, {}
        self.bounded = "max_tokens" in changes or "max_tokens_per_rank" in changes
        self.expert_out = case.expert_out()
        if not self.halves:
            case.x.requires_grad_()
            case.weights.requires_grad_()
        self.all_dy = case.draw(sum(tokens), width, FP32)
        self.d_rows = case.draw(case.all_ids.numel(), width, FP32)
        self.d_weights = case.draw(case.all_ids.numel(), 1, FP32)

    def steps(self, backward):
        case, group = self.case, self.group
        if self.halves:
            yield from self._send_and_receive()
            return
        recv, handle = case.dispatch(group=group, **self.options)
        self.recv = recv
        yield
        rows = recv.x.shape[0]
        expert_out = padded(self.expert_out, rows if rows != case.num_rows else None).detach().requires_grad_()
        self.y = y = tdkernels.ep_combine(expert_out, handle, group=group)
        yield
        if backward:
            dy = self.all_dy[case.mine].to(device())
            self.results["d_out"], self.results["dw"] = torch.autograd.grad(y, [expert_out, case.weights], dy)
            yield
            d_recv = padded(self.d_rows[case.order].to(device()), rows)
            d_row_weights = padded(self.d_weights.flatten()[case.order].to(device()), rows)
            self.results["dx"], self.results["dw of dispatch"] = torch.autograd.grad(
                [recv.x, recv.topk_weights], [case.x, case.weights], [d_recv, d_row_weights]
            )
            yield

    def _send_and_receive(self):
        case, group = self.case, self.group
        with torch.no_grad():
            sent = tdkernels.ep_dispatch_send(
                case.x, case.ids, case.weights, num_experts=case.experts, group=group, **self.options
            )
            self.recv, handle = sent.receive()
            yield
            rows = self.recv.x.shape[0]
            expert_out = padded(self.expert_out, rows if rows != case.num_rows else None)
            self.y = tdkernels.ep_combine_send(expert_out, handle, group=group).receive()
            yield

    def check(self):
        case, results = self.case, self.results
        case.check_received(self.recv, capacity=self.recv.x.shape[0] if self.bounded else None)
        case.check_combined(self.y, combine=self.combine)
        if not results:
            return
        d_rows, exact, low = expected_gradients_of_combine(case, self.all_dy, case.all_weights)
        assert collective.same(results["d_out"][: case.num_rows], d_rows), "dexpert_out"
        case.check_numbers("dtopk_weights of combine", results["dw"], exact, low)
        case.check_numbers("dx of dispatch", results["dx"], *case.combined(self.d_rows, None, self.combine))
        d_weights = self.d_weights.view(case.valid.shape).where(case.valid, 0.0)[case.mine]
        assert collective.same(results["dw of dispatch"], d_weights), "dtopk_weights of dispatch"

    def corrupt_ids(self):
        self.case.ids = _with_wrong_id(self.case.ids, self.case.experts)


def _with_wrong_id(ids, experts):
    if ids.numel():
        ids = ids.clone()
        ids.view(-1)[-1] = experts + 71
    return ids


class ExpertParallelLayer(NamedResults):
    SHAPES = [(16, 8), (24, 8), (20, 12), (32, 16)]  # (width, hidden); all ranks must pass the same width

    def __init__(self, operator, changes, shape, seed, group):
        rng, world_size = random.Random(seed), dist.get_world_size()
        tokens = [rng.randrange(MAX_TOKENS + 1) for _ in range(world_size)]
        self.case = case = Layer(tokens, 2, 2, *self.SHAPES[shape], FP32, seed=seed, ids="distinct")
        case.own = {name: operand.detach().requires_grad_() for name, operand in case.own.items()}
        self.options, self.group, self.results = dict(changes), group, {}
        self.bounded = "max_tokens" in changes

    def _call(self):
        y = self.case.call(group=self.group, **self.options)
        return {"y": y}, [self.case.all_dy[self.case.case.mine].to(device())]

    def _gradients(self):
        return {f"d{name}": operand.grad for name, operand in self.case.own.items()}

    def _expected(self):
        layer, rank = self.case, self.case.case.rank
        each = layer.experts // layer.case.world_size
        whole = layer.expected(torch.double)
        mine = {name: slice(rank * each, (rank + 1) * each) if "_" in name and "topk" not in name else layer.case.mine
                for name in whole}
        return {name: of_all[mine[name]] for name, of_all in whole.items()}

    def corrupt_ids(self):
        self.case.case.ids = _with_wrong_id(self.case.case.ids, self.case.experts)


class TensorParallelExperts(NamedResults):
    SHAPES, DTYPE = [(6, 10, 3), (7, 10, 3), (6, 12, 5), (20, 16, 8)], FP32  # tokens, width, hidden

    def __init__(self, operator, changes, shape, seed, group):
        tokens, width, hidden = self.SHAPES[shape]
        self.case = Sliced(tokens, 2, 3, width, hidden, self.DTYPE, seed=seed)
        self.case.require()
        self.options = {"config": changes}
        self.group, self.results = group, {}

    def _call(self):
        return {"y": self.case.call(**self.options)}, [self.case.dy]

    def _gradients(self):
        return self.case.gradients()

    def _expected(self):
        whole, rank = self.case.expected(torch.double), self.case.rank
        return {name: self.case.part(name.removeprefix("d"), of_all, rank) for name, of_all in whole.items()}

    def corrupt_ids(self):
        self.case.ids = _with_wrong_id(self.case.ids, 3)
