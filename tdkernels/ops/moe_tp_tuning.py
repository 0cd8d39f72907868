"""tp_moe and its halves for the tuner: problems, the space of their configs, and about how long each takes.

Each is tuned by its own name, and what has been tuned is what runs: a call of tp_moe takes one config for both halves,
a half that is called alone takes that of its own table. Ids are drawn evenly, of different experts for a token.
"""


from tdkernels.autotune.operator import register
from tdkernels.ops import moe_ag_gemm_kernel as ag
from tdkernels.ops import moe_gemm_rs_kernel as rs
from tdkernels.ops import moe_tp as op
from tdkernels.ops._expert_tuning import activation_of
from tdkernels.ops._moe_tuning import MoeTunable
from tdkernels.ops.moe_tp_halves import routing_of

_ROUTE_S = 30e-6  # to gather ids and sort them


class MoeAgGemmTunable(MoeTunable):
    name = "moe_ag_gemm"
    sizes = ("m", "n", "k", "experts", "choices")
    layouts = ("none", "swiglu", "swiglu_interleaved")
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

    def estimate_ms(self, config, problem, hardware):
        return 1e3 * (_ROUTE_S + self._first_s(config, self.weights(problem)[0], problem, hardware))

    def reference(self, operands, problem, group):
        x, ids, _, w = operands
        return op.moe_ag_gemm_ref(x, ids, w, activation=activation_of(problem), group=group)

    def run(self, operands, problem, group, config):
        x, ids, _, w = operands
        return op.moe_ag_gemm(x, ids, w, activation=activation_of(problem), group=group, config=config)

    def comparable(self, output, problem):
        h, routing = output
        return h[routing.rows.flatten()]  # by choice: none of ours is dropped

    def compile(self, operands, problem, config):
        x, *_, w = operands
        ag.compile(x, w, self._unrouted(problem, config, x.device), config, activation_of(problem))


class MoeGemmRsTunable(MoeTunable):
    """Chunks and stages are those of the routing, which another half has made: only tiles are to be found."""

    name = "moe_gemm_rs"
    sizes = ("m", "n", "k", "experts", "choices")
    layouts = ("nk",)
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
        return op.moe_gemm_rs_ref(*operands, group=group)

    def prepared(self, operands, problem, group, config):
        """With a routing, as a first half would have made it, and rows in its order."""
        h, ids, weights, w = operands
        routing = routing_of(self.name, ids, w, group, config)
        return h[routing.choices], routing, weights, w

    def run(self, operands, problem, group, config):
        return op.moe_gemm_rs(*operands, group=group, config=config)

    def compile(self, operands, problem, config):
        h, _, weights, w = operands
        rs.compile(h, w, self._unrouted(problem, config, h.device), weights.new_empty(1), config)


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
        ag.compile(x, gate_up, routing, config, activation_of(problem))
        rs.compile(x.new_empty(1, down.shape[2]), down, routing, weights.new_empty(1), config)


for _tunable in (MoeAgGemmTunable(), MoeGemmRsTunable(), TpMoeTunable()):
    register(_tunable)
