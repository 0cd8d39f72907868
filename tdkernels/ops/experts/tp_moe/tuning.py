"""tp_moe and its halves for the tuner: problems, the space of their configs, and about how long each takes.

Each is tuned by its own name, and what has been tuned is what runs: a call of tp_moe takes one config for both halves,
a half that is called alone takes that of its own table. Ids are drawn evenly, of different experts for a token.

The gradients take the configs of the layout "kn" of the other half, be it called alone or not, with the weight as
[K, N] (whatever the strides of the forward's are). Their sizes are in the words of that product: what is M x N x K of a
half is M x K x N of its gradient.

    moe_gemm_rs  "kn"   dx of moe_ag_gemm: sums by token without weights
    moe_ag_gemm  "kn"   dh of moe_gemm_rs, with what its other gradients are made of

The forward has made their routing, whose chunks and stages they keep. Tiles are free: one of other rows than the
forward's costs two small launches more, to list them, which are not timed.
"""

import torch

from tdkernels.autotune.tunable import register
from tdkernels.ops.common.torch_collectives import all_gather_rows
from tdkernels.ops.experts.grouped_gemm.synthetic import activation_of
from tdkernels.ops.experts.tp_moe import launch_ag_gemm, launch_gemm_rs, op
from tdkernels.ops.experts.tp_moe.cost import MoeTunable
from tdkernels.ops.experts.tp_moe.steps import gradients_of_rows, routing_of, sums_by_token

_ROUTE_S = 30e-6  # to gather ids and sort them
# Times h: what is moved beside the product for the gradient of its rows, to read it and store it weighted; and by
# torch, which goes through both in fp32.
_GRADIENT_BYTES, _TORCH_GRADIENT_BYTES = 2, 30


class MoeAgGemmTunable(MoeTunable):
    """In the layout "kn" x are the gradients of tokens, and operands have another one, h [M * k, N / W] by choice."""

    name = "moe_ag_gemm"
    sizes = ("m", "n", "k", "experts", "choices")
    layouts = ("none", "swiglu", "swiglu_interleaved", "kn")
    divided = (0, 1)

    def sizes_of(self, *shapes, world_size):
        x, ids, w = self._operands(("x", "topk_ids", "w"), shapes)
        self._unless(x[0] == ids[0] and x[1] == w[2], shapes)
        return world_size * x[0], world_size * w[1], w[2], w[0], ids[1]

    def weights(self, problem):
        _, n, k, experts, _ = problem.shape
        return [(experts, n // problem.world_size, k)]

    def _rows_on_the_wire(self, problem):
        return (problem.world_size - 1) * problem.shape[0] // problem.world_size * problem.shape[2]

    def plans(self, problem, device):
        plans = super().plans(problem, device)
        if problem.layout != "kn":
            return plans
        default = self.default(problem, device)
        numbers = dict.fromkeys(num_comm for num_comm, *_ in plans)
        return [(num_comm, default.chunk_rows, default.stages) for num_comm in numbers]

    def operands(self, problem, device, generator):
        x, *others = super().operands(problem, device, generator)
        if problem.layout != "kn":
            return x, *others
        shape = self._rows_of_h(problem)
        return x, torch.randn(shape, generator=generator, dtype=x.dtype, device=device), *others

    def _rows_of_h(self, problem):
        return problem.shape[0] * problem.shape[-1], self.weights(problem)[0][1]

    def reference_bytes(self, problem):
        nbytes = super().reference_bytes(problem)
        if problem.layout != "kn":
            return nbytes
        rows, width = self._rows_of_h(problem)
        return nbytes + 2 * max(problem.torch_dtype.itemsize, 4) * 8 * rows * width

    def estimate_ms(self, config, problem, hardware):
        product = self._first_s(config, self.weights(problem)[0], problem, hardware)
        if problem.layout != "kn":
            return 1e3 * (_ROUTE_S + product)
        rows, width = self._rows_of_h(problem)
        times = _TORCH_GRADIENT_BYTES if config.method == "torch" else _GRADIENT_BYTES
        return 1e3 * (product + times * rows * width * problem.torch_dtype.itemsize / hardware.memory)

    def reference(self, operands, problem, group):
        if problem.layout == "kn":
            return _gradients_ref(*operands, group)
        x, ids, _, w = operands
        return op.moe_ag_gemm_ref(x, ids, w, activation=activation_of(problem), group=group)

    def prepared(self, operands, problem, group, config):
        """Of a gradient with a routing, as the forward would have made it, h in its order, and all ranks' weights."""
        if problem.layout != "kn":
            return operands
        x, h, ids, weights, w = operands
        routing = routing_of(self.name, ids, w, group, config)
        return x, h[routing.choices], w, all_gather_rows(weights, group), routing

    def run(self, operands, problem, group, config):
        if problem.layout == "kn":
            made = gradients_of_rows(*operands, config)
            return made.dh, made.weighted, made.dots, operands[-1]
        x, ids, _, w = operands
        return op.moe_ag_gemm(x, ids, w, activation=activation_of(problem), group=group, config=config)

    def comparable(self, output, problem):
        h, *others, routing = output
        if problem.layout == "kn":
            weighted, dots = others
            h = torch.cat([h, weighted, dots.sum(0).unsqueeze(1).to(h.dtype)], 1)
        return h[routing.rows.flatten()]  # by choice: none of ours is dropped

    def compile(self, operands, problem, config):
        x, *_, weights, w = operands
        gradients = launch_ag_gemm.Gradients(operands[1], weights) if problem.layout == "kn" else None
        routing = self._unrouted(problem, config, x.device)
        launch_ag_gemm.compile(x, w, routing, config, activation_of(problem), gradients)


def _gradients_ref(dy, h, topk_ids, topk_weights, w, group):
    """By choice, of all tokens, beside each other: the gradient of h, h weighted, and h times its gradient unweighted.

    [M * k, 2 * N / W + 1], of tokens' gradients dy [M / W, K] and h [M * k, N / W] by choice.
    """
    unweighted = op.moe_ag_gemm_ref(dy, topk_ids, w, group=group)
    wide = torch.promote_types(dy.dtype, torch.float32)
    weights = all_gather_rows(topk_weights, group).view(-1, 1).to(wide)
    unweighted, h = unweighted.to(wide), h.to(wide)
    parts = unweighted * weights, h * weights, (unweighted * h).sum(1, keepdim=True)
    return torch.cat(parts, 1).to(dy.dtype)


class MoeGemmRsTunable(MoeTunable):
    """Chunks and stages are those of the routing, which another half has made: only tiles are to be found.

    In the layout "kn" there are no weights of choices: of the operands their shape counts.
    """

    name = "moe_gemm_rs"
    sizes = ("m", "n", "k", "experts", "choices")
    layouts = ("nk", "kn")
    divided = (0, 2)

    def sizes_of(self, *shapes, world_size):
        h, weights, w = self._operands(("h", "topk_weights", "w"), shapes)
        self._unless(h[0] == world_size * weights[0] * weights[1] and h[1] == w[2], shapes)
        return world_size * weights[0], w[1], world_size * w[2], w[0], weights[1]

    def weights(self, problem):
        _, n, k, experts, _ = problem.shape
        return [(experts, n, k // problem.world_size)]

    def plans(self, problem, device):
        default = self.default(problem, device)
        return [(default.num_comm_sms, default.chunk_rows, default.stages)]

    def _rows(self, problem):
        """h by choice, of all tokens."""
        return problem.shape[0] * problem.shape[-1], self.weights(problem)[0][2]

    def _rows_on_the_wire(self, problem):
        return (problem.world_size - 1) * problem.shape[0] // problem.world_size * problem.shape[1]

    def estimate_ms(self, config, problem, hardware):
        return 1e3 * self._second_s(config, self.weights(problem)[0], problem, hardware)

    def reference(self, operands, problem, group):
        h, ids, weights, w = operands
        weights = torch.ones_like(weights) if problem.layout == "kn" else weights
        return op.moe_gemm_rs_ref(h, ids, weights, w, group=group)

    def prepared(self, operands, problem, group, config):
        """With a routing, as a first half would have made it, and rows in its order."""
        h, ids, weights, w = operands
        # That of a gradient was made for the weight that this one is the transpose of.
        of_forward = w.transpose(1, 2) if problem.layout == "kn" else w
        routing = routing_of(self.name, ids, of_forward, group, config)
        return h[routing.choices], routing, weights, w

    def run(self, operands, problem, group, config):
        if problem.layout == "kn":
            h, routing, _, w = operands
            return sums_by_token(h, w, routing, None, config)
        return op.moe_gemm_rs(*operands, group=group, config=config)

    def compile(self, operands, problem, config):
        h, _, weights, w = operands
        weights = None if problem.layout == "kn" else weights.new_empty(1)
        launch_gemm_rs.compile(h, w, self._unrouted(problem, config, h.device), weights, config)


class TpMoeTunable(MoeTunable):
    name = "tp_moe"
    sizes = ("m", "hidden", "intermediate", "experts", "choices")
    layouts = ("swiglu", "swiglu_interleaved", "none")
    divided = (0, 2)

    def sizes_of(self, *shapes, world_size):
        names = "x", "topk_ids", "topk_weights", "w_gate_up", "w_down"
        x, ids, weights, gate_up, down = self._operands(names, shapes)
        self._unless(x[0] == ids[0] and ids == weights, shapes)
        halves = 1 if self.layout_of(*shapes) == "none" else 2
        self._unless(gate_up == (down[0], halves * down[2], x[1]) and down[1] == x[1], shapes)
        return world_size * x[0], x[1], world_size * down[2], down[0], ids[1]

    def layout_of(self, *operands):
        if len(operands) != 5 or any(operand is None for operand in operands):
            return self.layouts[0]  # what is wrong with them ``sizes_of`` says
        gate_up, down = (tuple(getattr(operand, "shape", operand)) for operand in operands[3:])
        return "none" if gate_up[1:2] == down[2:] else self.layouts[0]

    def weights(self, problem):
        _, hidden, intermediate, experts, _ = problem.shape
        mine = intermediate // problem.world_size
        return [(experts, mine if problem.layout == "none" else 2 * mine, hidden), (experts, hidden, mine)]

    def _rows_on_the_wire(self, problem):
        return 2 * (problem.world_size - 1) * problem.shape[0] // problem.world_size * problem.shape[1]

    def estimate_ms(self, config, problem, hardware):
        gate_up, down = self.weights(problem)
        first = self._first_s(config, gate_up, problem, hardware)
        return 1e3 * (_ROUTE_S + first + self._second_s(config, down, problem, hardware))

    def reference(self, operands, problem, group):
        return op.tp_moe_ref(*operands, activation=activation_of(problem), group=group)

    def run(self, operands, problem, group, config):
        return op.tp_moe(*operands, activation=activation_of(problem), group=group, config=config)

    def compile(self, operands, problem, config):
        x, _, weights, gate_up, down = operands
        routing = self._unrouted(problem, config, x.device)
        launch_ag_gemm.compile(x, gate_up, routing, config, activation_of(problem))
        launch_gemm_rs.compile(x.new_empty(1, down.shape[2]), down, routing, weights.new_empty(1), config)


for _tunable in (MoeAgGemmTunable(), MoeGemmRsTunable(), TpMoeTunable()):
    register(_tunable)
