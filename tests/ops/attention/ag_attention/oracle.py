"""Attention over a sequence that is sharded between the ranks, and what comes of it, from the whole sequence.

    case = Sharded(37, heads=4, kv_heads=2, d=24, dv=40, sharding="zigzag")   # positions of each rank
    case.check(case.run())                                                    # forward and every gradient, by name

Every rank makes the same operands of all ranks from the seed and keeps its own part of them.
"""

import torch
import torch.distributed as dist

import tdkernels
from tests.support.dense_oracle import assert_close
from tests.support.ranks import device
from tests.support.subset import EVERYTHING

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NAMES = ("q", "k", "v")


def many(spec):
    """The spec; on GPUs, which are asked much, so large that its error is a statistic and not plain torch's luck."""
    return dict(spec, batch=7 * spec.get("batch", 1)) if EVERYTHING else spec


def positions(rows, ranks, sharding):
    """Which positions of the sequence each rank has, [W, S / W]."""
    every = torch.arange(ranks * rows)
    if sharding == "contiguous":
        return every.view(ranks, rows)
    first = (rows + 1) // 2
    pieces = every.split([first] * ranks + [rows - first] * ranks)
    return torch.stack([torch.cat([pieces[rank], pieces[2 * ranks - 1 - rank]]) for rank in range(ranks)])


def attention(q, k, v, causal, scale):
    """(o, lse) of a whole sequence, in the dtype of q, by plain torch."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scores = q @ k.repeat_interleave(group, 1).transpose(2, 3) * scale
    if causal:
        later = torch.ones(scores.shape[2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
    o = scores.softmax(3) @ v.repeat_interleave(group, 1)
    lse = scores.to(torch.promote_types(scores.dtype, FP32)).logsumexp(3)
    return o.transpose(1, 2), lse.transpose(1, 2)


class Sharded:
    """All ranks' sequence, and this rank's part of it.

    Args:     rows: S / W; heads, kv_heads, d, dv: Hq, Hkv, D, Dv; lse: whether it has a gradient too
              group: None for the world

    ``own`` has this rank's operands by name, on its device; ``do, dlse`` the gradients that come in.
    """

    def __init__(
        self, rows, heads=2, kv_heads=1, d=16, dv=16, batch=1, dtype=BF16, *, causal=True, sharding="contiguous",
        scale=None, lse=True, seed=0, group=None,
    ):
        self.group, self.rank, self.world_size = group, dist.get_rank(group), dist.get_world_size(group)
        self.rows, self.dtype, self.causal, self.sharding, self.scale, self.lse = (
            rows, dtype, causal, sharding, scale, lse
        )
        self.title = (
            f"B={batch} S/W={rows} H={heads}/{kv_heads} D={d}/{dv} {dtype} causal={causal} {sharding} seed={seed}"
        )
        generator = torch.Generator().manual_seed(seed)

        def draw(heads, *width, dtype=dtype):
            return torch.randn(batch, self.world_size * rows, heads, *width, generator=generator).to(dtype)

        self.whole = {"q": draw(heads, d), "k": draw(kv_heads, d), "v": draw(kv_heads, dv)}
        self.all_do, self.all_dlse = draw(heads, dv), draw(heads, dtype=FP32)
        self.positions = positions(rows, self.world_size, sharding)
        self.own = {name: self.part(operand).to(device()) for name, operand in self.whole.items()}
        self.do, self.dlse = self.part(self.all_do).to(device()), self.part(self.all_dlse).to(device())
        self._expected = {}

    def part(self, whole, rank=None):
        """A rank's part of anything [B, S, ·, …]; by default this rank's."""
        return whole[:, self.positions[self.rank if rank is None else rank]].contiguous()

    # ---- calls ----

    def call(self, function=tdkernels.ag_attention, **options):
        """(o, lse)"""
        options = {"causal": self.causal, "sharding": self.sharding, "scale": self.scale, **options}
        return function(*(self.own[name] for name in NAMES), return_lse=True, group=self.group, **options)

    def run(self, wanted=NAMES, **options):
        """Forward and backward: o, lse and the gradients of the operands that are wanted, by name."""
        self.require(wanted)
        o, lse = self.call(**options)
        self.backward(o, lse)
        return {"o": o.detach(), "lse": lse.detach(), **self.gradients()}

    def backward(self, o, lse):
        if self.lse:
            torch.autograd.backward([o, lse], [self.do, self.dlse])
        else:
            o.backward(self.do)

    def require(self, wanted=NAMES):
        """Let the named operands, and no others, want a gradient, of which they have none yet."""
        self.own = {name: operand.detach().requires_grad_(name in wanted) for name, operand in self.own.items()}

    def gradients(self):
        """The gradients that the operands have, by name."""
        return {f"d{name}": operand.grad for name, operand in self.own.items() if operand.grad is not None}

    # ---- checks ----

    def check(self, results):
        """Each of the named results of all ranks, no further from fp64 than twice what plain torch is; collective.

        Of all ranks together: a rank may have so few numbers that plain torch has them right by luck.
        """
        tdkernels.synchronize()
        ranks = [None] * self.world_size
        dist.all_gather_object(ranks, {name: got.cpu() for name, got in results.items()}, self.group)
        exact, low = self.expected(torch.double), self.expected(self.dtype)
        for name in results:
            parts = [[self.part(of[name], rank) for rank in range(self.world_size)] for of in (exact, low)]
            for got, part in zip((of[name] for of in ranks), parts[0], strict=True):
                assert got.shape == part.shape, f"{name} of {self.title}: {list(got.shape)}"
            flat = [torch.cat([part.flatten() for part in of]) for of in ([of[name] for of in ranks], *parts)]
            assert_close(f"{name} of {self.title}", *flat)

    @torch.enable_grad()
    def expected(self, dtype):
        """o, lse and gradients of the whole sequence, on the CPU."""
        if dtype not in self._expected:
            operands = [operand.to(dtype).requires_grad_() for operand in self.whole.values()]
            scale = operands[0].shape[3] ** -0.5 if self.scale is None else self.scale
            o, lse = attention(*operands, self.causal, scale)
            outputs = [(o, self.all_do)] + [(lse, self.all_dlse)] * self.lse
            torch.autograd.backward([out for out, _ in outputs], [d.to(out.dtype) for out, d in outputs])
            gradients = {f"d{name}": operand.grad for name, operand in zip(NAMES, operands, strict=True)}
            self._expected[dtype] = {"o": o.detach(), "lse": lse.detach(), **gradients}
        return self._expected[dtype]
