"""Tunables of tp_moe, moe_ag_gemm and moe_gemm_rs: problems, search space and cost model.

Each operator is tuned under its own name. A call of tp_moe uses one config for both stages. A call of moe_ag_gemm or
moe_gemm_rs uses the table of that operator. Expert ids are drawn uniformly, distinct for each token.

Gradients use the configs of the layout "kn" of the other operator, also in tp_moe. The weight is [K, N] there,
whatever the strides of the forward's weight are. The sizes are the sizes of the gradient's own GEMM: M x N x K of an
operator is M x K x N of its gradient.

    moe_gemm_rs  "kn"   dx of moe_ag_gemm: sums by token without routing weights
    moe_ag_gemm  "kn"   the product of dy and the weight of moe_gemm_rs, with the gathered rows of dy

Chunks and stages of a gradient are given by the routing of the forward, so only tiles are tuned. Tiles with another
height than in the forward need two more small launches to list them. These are not timed.
"""

from typing import TYPE_CHECKING, Any

import torch

from tdkernels.autotune.tunable import register
from tdkernels.ops.experts.grouped_gemm.synthetic import activation_of
from tdkernels.ops.experts.tp_moe import launch_ag_gemm, launch_gemm_rs, op
from tdkernels.ops.experts.tp_moe.cost import MoeTunable
from tdkernels.ops.experts.tp_moe.steps import product_of_gradients, routing_of, sums_by_token

if TYPE_CHECKING:
    import torch.distributed as dist

    from tdkernels.autotune.hardware import Hardware
    from tdkernels.autotune.problem import Problem

_ROUTE_S = 30e-6  # to gather and sort the ids


class MoeAgGemmTunable(MoeTunable):
    """Tunable of ``moe_ag_gemm``. Shapes are (M, N, K, experts, experts per token).

    In the layout "kn" x is the gradient of the tokens.
    """

    name = "moe_ag_gemm"
    sizes = ("m", "n", "k", "experts", "choices")
    layouts = ("none", "swiglu", "swiglu_interleaved", "kn")
    divided = (0, 1)

    def sizes_of(self, *shapes, world_size: int) -> tuple[int, ...]:
        x, ids, w = self._operands(("x", "topk_ids", "w"), shapes)
        self._require(x[0] == ids[0] and x[1] == w[2], shapes)
        return world_size * x[0], world_size * w[1], w[2], w[0], ids[1]

    def weights(self, problem: "Problem") -> list[tuple[int, int, int]]:
        _, n, k, experts, _ = problem.shape
        return [(experts, n // problem.world_size, k)]

    def _rows_on_the_wire(self, problem):
        return (problem.world_size - 1) * problem.shape[0] // problem.world_size * problem.shape[2]

    def plans(self, problem: "Problem", device: torch.device) -> list[tuple[int, int, int]]:
        plans = super().plans(problem, device)
        if problem.layout != "kn":
            return plans
        default = self.default(problem, device)
        numbers = dict.fromkeys(num_comm for num_comm, *_ in plans)
        return [(num_comm, default.chunk_rows, default.stages) for num_comm in numbers]

    def estimate_ms(self, config: Any, problem: "Problem", hardware: "Hardware") -> float:
        product = self._gate_up_s(config, self.weights(problem)[0], problem, hardware)
        if problem.layout != "kn":
            return 1e3 * (_ROUTE_S + product)
        tokens, _, k, _, choices = problem.shape
        nbytes = 2 * tokens * choices * k * problem.torch_dtype.itemsize if config.warp_specialize else 0
        return 1e3 * (product + nbytes / hardware.memory)  # the other kernels copy dy to its rows before they multiply

    def reference(self, operands: Any, problem: "Problem", group: "dist.ProcessGroup") -> torch.Tensor:
        x, ids, _, w = operands
        return op.moe_ag_gemm_ref(x, ids, w, activation=activation_of(problem), group=group)

    def prepared(
        self, operands: tuple[torch.Tensor, ...], problem: "Problem", group: "dist.ProcessGroup", config: Any,
    ) -> Any:
        """Return the input of ``run``. For "kn" compute the routing, which a gradient has from the forward."""
        if problem.layout != "kn":
            return operands
        x, ids, _, w = operands
        return x, w, routing_of(self.name, ids, w, group, config)

    def run(self, operands: Any, problem: "Problem", group: "dist.ProcessGroup", config: Any) -> Any:
        if problem.layout == "kn":
            x, w, routing = operands
            return product_of_gradients(x, w, routing, config)[0], routing
        x, ids, _, w = operands
        return op.moe_ag_gemm(x, ids, w, activation=activation_of(problem), group=group, config=config)

    def comparable(self, output: Any, problem: "Problem") -> torch.Tensor:
        h, routing = output
        return h[routing.rows.flatten()]  # in the order of assignments, of which none is dropped

    def compile(self, operands: Any, problem: "Problem", config: Any) -> None:
        x, _, _, w = operands
        launch_ag_gemm.compile(x, w, self._unrouted(problem, config, x.device), config, activation_of(problem))


class MoeGemmRsTunable(MoeTunable):
    """Tunable of ``moe_gemm_rs``. Shapes are (M, N, K, experts, experts per token).

    Only tiles are tuned, because chunks and stages are given by the routing of a moe_ag_gemm. In the layout "kn" there
    are no routing weights: only the shape of that operand is used.
    """

    name = "moe_gemm_rs"
    sizes = ("m", "n", "k", "experts", "choices")
    layouts = ("nk", "kn")
    divided = (0, 2)

    def sizes_of(self, *shapes, world_size: int) -> tuple[int, ...]:
        h, weights, w = self._operands(("h", "topk_weights", "w"), shapes)
        self._require(h[0] == world_size * weights[0] * weights[1] and h[1] == w[2], shapes)
        return world_size * weights[0], w[1], world_size * w[2], w[0], weights[1]

    def weights(self, problem: "Problem") -> list[tuple[int, int, int]]:
        _, n, k, experts, _ = problem.shape
        return [(experts, n, k // problem.world_size)]

    def plans(self, problem: "Problem", device: torch.device) -> list[tuple[int, int, int]]:
        default = self.default(problem, device)
        return [(default.num_comm_sms, default.chunk_rows, default.stages)]

    def _rows(self, problem):
        """Return the shape of h, with a row for each assignment of all tokens."""
        return problem.shape[0] * problem.shape[-1], self.weights(problem)[0][2]

    def _rows_on_the_wire(self, problem):
        return (problem.world_size - 1) * problem.shape[0] // problem.world_size * problem.shape[1]

    def estimate_ms(self, config: Any, problem: "Problem", hardware: "Hardware") -> float:
        return 1e3 * self._down_s(config, self.weights(problem)[0], problem, hardware)

    def reference(self, operands: Any, problem: "Problem", group: "dist.ProcessGroup") -> torch.Tensor:
        h, ids, weights, w = operands
        weights = torch.ones_like(weights) if problem.layout == "kn" else weights
        return op.moe_gemm_rs_ref(h, ids, weights, w, group=group)

    def prepared(
        self, operands: tuple[torch.Tensor, ...], problem: "Problem", group: "dist.ProcessGroup", config: Any,
    ) -> Any:
        """Compute the routing as moe_ag_gemm would, and return the input of ``run`` with rows in its order."""
        h, ids, weights, w = operands
        # The routing of a gradient was computed in the forward, for the transposed weight.
        of_forward = w.transpose(1, 2) if problem.layout == "kn" else w
        routing = routing_of(self.name, ids, of_forward, group, config)
        return h[routing.choices], routing, weights, w

    def run(self, operands: Any, problem: "Problem", group: "dist.ProcessGroup", config: Any) -> Any:
        if problem.layout == "kn":
            h, routing, _, w = operands
            return sums_by_token(h, w, routing, None, config)
        return op.moe_gemm_rs(*operands, group=group, config=config)

    def compile(self, operands: Any, problem: "Problem", config: Any) -> None:
        h, _, weights, w = operands
        weights = None if problem.layout == "kn" else weights.new_empty(1)
        launch_gemm_rs.compile(h, w, self._unrouted(problem, config, h.device), weights, config)


class TpMoeTunable(MoeTunable):
    """Tunable of ``tp_moe``. Shapes are (M, hidden size, intermediate size, experts, experts per token)."""

    name = "tp_moe"
    sizes = ("m", "hidden", "intermediate", "experts", "choices")
    layouts = ("swiglu", "swiglu_interleaved", "none")
    divided = (0, 2)

    def sizes_of(self, *shapes, world_size: int) -> tuple[int, ...]:
        names = "x", "topk_ids", "topk_weights", "w_gate_up", "w_down"
        x, ids, weights, gate_up, down = self._operands(names, shapes)
        self._require(x[0] == ids[0] and ids == weights, shapes)
        halves = 1 if self.layout_of(*shapes) == "none" else 2
        self._require(gate_up == (down[0], halves * down[2], x[1]) and down[1] == x[1], shapes)
        return world_size * x[0], x[1], world_size * down[2], down[0], ids[1]

    def layout_of(self, *operands) -> str:
        if len(operands) != 5 or any(operand is None for operand in operands):
            return self.layouts[0]  # the operands are invalid, and ``sizes_of`` raises the error
        gate_up, down = (tuple(getattr(operand, "shape", operand)) for operand in operands[3:])
        return "none" if gate_up[1:2] == down[2:] else self.layouts[0]

    def weights(self, problem: "Problem") -> list[tuple[int, int, int]]:
        _, hidden, intermediate, experts, _ = problem.shape
        mine = intermediate // problem.world_size
        return [(experts, mine if problem.layout == "none" else 2 * mine, hidden), (experts, hidden, mine)]

    def _rows_on_the_wire(self, problem):
        return 2 * (problem.world_size - 1) * problem.shape[0] // problem.world_size * problem.shape[1]

    def estimate_ms(self, config: Any, problem: "Problem", hardware: "Hardware") -> float:
        gate_up, down = self.weights(problem)
        first = self._gate_up_s(config, gate_up, problem, hardware)
        return 1e3 * (_ROUTE_S + first + self._down_s(config, down, problem, hardware))

    def reference(self, operands: Any, problem: "Problem", group: "dist.ProcessGroup") -> torch.Tensor:
        return op.tp_moe_ref(*operands, activation=activation_of(problem), group=group)

    def run(self, operands: Any, problem: "Problem", group: "dist.ProcessGroup", config: Any) -> Any:
        return op.tp_moe(*operands, activation=activation_of(problem), group=group, config=config)

    def compile(self, operands: Any, problem: "Problem", config: Any) -> None:
        x, _, weights, gate_up, down = operands
        routing = self._unrouted(problem, config, x.device)
        launch_ag_gemm.compile(x, gate_up, routing, config, activation_of(problem))
        launch_gemm_rs.compile(x.new_empty(1, down.shape[2]), down, routing, weights.new_empty(1), config)


for _tunable in (MoeAgGemmTunable(), MoeGemmRsTunable(), TpMoeTunable()):
    register(_tunable)
