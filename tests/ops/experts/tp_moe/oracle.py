"""Expected results of tensor-parallel experts, computed from the unsharded layer.

    layer = Sliced(20, k=2, experts=5, width=33, hidden=13)      # tokens of each rank; channels of a rank
    layer.check(layer.run())                                     # forward and all gradients, by name

Every rank draws the operands of all ranks from the seed and keeps its shards of them.
"""

import torch
import torch.distributed as dist

import tdkernels
from tests.support import moe_oracle
from tests.support.dense_oracle import assert_close
from tests.support.moe_oracle import NAMES
from tests.support.ranks import device

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class Sliced:
    """Tokens of all ranks and whole experts, and this rank's shards of them.

    Args:     tokens: M / W; k, experts, width: k, E, H; hidden: I / W
              activation: as of tp_moe
              ids: "any", with duplicates and -1; "distinct"; "one" expert for all; "few" experts; "none", all -1
              weights: dtype of topk_weights; the weight of an assignment with id -1 is NaN, since it must not be read
              exact: small integers, so that the sums of one GEMM are exact in every dtype
              group: None: the world group

    ``own`` maps names to this rank's operands, on its device, and ``ids`` are its ids. ``whole`` and ``all_ids`` are
    the unsharded ones. A test may replace ``own`` and ``ids`` by tensors of the same values.
    """

    def __init__(
        self, tokens, k, experts, width, hidden, dtype=BF16, *, activation="swiglu", ids="any", weights=FP32,
        exact=False, seed=0, group=None,
    ):
        self.group, self.rank, self.world_size = group, dist.get_rank(group), dist.get_world_size(group)
        self.tokens, self.experts, self.dtype, self.activation = tokens, experts, dtype, activation
        self.title = f"M/W={tokens} k={k} E={experts} H={width} I/W={hidden} {dtype} {activation} ids={ids} seed={seed}"
        generator = torch.Generator().manual_seed(seed)
        total, channels = self.world_size * tokens, self.world_size * hidden

        def draw(*shape, scale=1.0):
            if exact:
                return torch.randint(-1, 2, shape, generator=generator).to(dtype)
            return (torch.randn(shape, generator=generator) * scale).to(dtype)

        all_ids = _draw_ids(ids, total, k, experts, generator)
        all_weights = torch.rand(total, k, generator=generator).to(weights)
        projections = 2 if activation else 1
        self.all_ids = all_ids.to(device())
        self.whole = {
            "x": draw(total, width), "topk_weights": all_weights.where(all_ids >= 0, torch.nan),
            "w_gate_up": draw(experts, projections * channels, width, scale=width**-0.5),
            "w_down": draw(experts, width, channels, scale=channels**-0.5),
        }
        self.all_dy = draw(total, width).to(device())
        self.whole = {name: operand.to(device()) for name, operand in self.whole.items()}
        self.mine = slice(self.rank * tokens, (self.rank + 1) * tokens)
        self.own = {name: self.part(name, operand, self.rank).clone() for name, operand in self.whole.items()}
        self.ids, self.dy = self.all_ids[self.mine].clone(), self.all_dy[self.mine].clone()
        self._expected = {}

    def part(self, name, whole, rank):
        """Return a rank's shard of a whole operand, of its gradient, or of y."""
        if name == "w_down":
            return whole.tensor_split(self.world_size, 2)[rank]
        if name != "w_gate_up":
            return whole[rank * self.tokens : (rank + 1) * self.tokens]
        if self.activation is None:
            return whole.tensor_split(self.world_size, 1)[rank]
        gate, up = (matrix.tensor_split(self.world_size, 1)[rank] for matrix in whole.chunk(2, dim=1))
        if self.activation == "swiglu":
            return torch.cat([gate, up], dim=1)
        return torch.stack([gate, up], dim=2).flatten(1, 2)

    # ---- calls ----

    def operands(self):
        return self.own["x"], self.ids, *(self.own[name] for name in NAMES[1:])

    def call(self, function=tdkernels.tp_moe, **options):
        return function(*self.operands(), activation=self.activation, group=self.group, **options)

    def run(self, wanted=NAMES, **options):
        """Run forward and backward; return y and the gradients of the wanted operands, by name."""
        self.require(wanted)
        y = self.call(**options)
        y.backward(self.dy)
        return {"y": y.detach(), **self.gradients()}

    def require(self, wanted=NAMES):
        """Set requires_grad for the named operands only, and clear all gradients."""
        self.own = {name: operand.detach().requires_grad_(name in wanted) for name, operand in self.own.items()}

    def gradients(self):
        """Return the gradients of the operands, by name."""
        return {f"d{name}": operand.grad for name, operand in self.own.items() if operand.grad is not None}

    # ---- checks ----

    def check(self, results):
        """Check that the error of each named result is at most twice the error of plain torch. Collective.

        The results of all ranks are checked together, since plain torch may be exact by chance on a few elements.
        """
        tdkernels.synchronize()
        ranks = [None] * self.world_size
        dist.all_gather_object(ranks, {name: got.cpu() for name, got in results.items()}, self.group)
        exact, low = self.expected(torch.double), self.expected(self.dtype)
        for name in results:
            expected = [[self.part(name.removeprefix("d"), of[name], rank) for rank in range(self.world_size)]
                        for of in (exact, low)]
            for got, of_rank in zip((of[name] for of in ranks), expected[0], strict=True):
                assert got.shape == of_rank.shape, f"{name} of {self.title}: {list(got.shape)}"
            parts = [torch.cat([part.flatten() for part in parts])
                     for parts in ([of[name] for of in ranks], *expected)]
            assert_close(f"{name} of {self.title}", *parts)

    def expected(self, dtype):
        """Return y and the gradients of the unsharded layer, on the CPU."""
        if dtype not in self._expected:
            operands = {name: operand.to(dtype) for name, operand in self.whole.items()}
            operands["topk_weights"] = self.whole["topk_weights"]
            if dtype == torch.double:
                operands["topk_weights"] = operands["topk_weights"].double()
            results = moe_oracle.results_of(operands, self.all_ids, self.all_dy.to(dtype), self.activation is not None)
            self._expected[dtype] = {name: result.cpu() for name, result in results.items()}
        return self._expected[dtype]


def _draw_ids(ids, total, k, experts, generator):
    if ids == "any":
        return torch.randint(-1, experts, (total, k), generator=generator)
    if ids == "distinct":
        return torch.rand(total, experts, generator=generator).argsort(1)[:, :k]
    if ids == "few":  # the last and the middle one
        return torch.tensor([experts - 1, experts // 2])[torch.randint(2, (total, k), generator=generator)]
    return torch.full((total, k), {"one": experts // 2, "none": -1}[ids])
