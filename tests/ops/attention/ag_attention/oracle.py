"""Reference for attention over a sequence that is sharded across ranks: attention over the whole sequence.

    case = Sharded(37, heads=4, kv_heads=2, d=24, dv=40, sharding="zigzag")   # 37 positions per rank
    case.check(case.run())                                                    # forward and every gradient, by name

Every rank draws the operands of all ranks from the seed and keeps its own shard.
"""

import torch
import torch.distributed as dist

import tdkernels
from tests.support.dense_oracle import assert_close
from tests.support.ranks import device
from tests.support.subset import EVERYTHING

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NAMES = ("q", "k", "v")


def enlarge(spec):
    """Return the spec, on GPUs with a larger batch, so that its error is statistically stable.

    With few numbers, plain torch, which sets the tolerance, may be exact by chance.
    """
    return dict(spec, batch=7 * spec.get("batch", 1)) if EVERYTHING else spec


def positions(rows, ranks, sharding):
    """Return the positions of the sequence on each rank, [W, S / W]."""
    every = torch.arange(ranks * rows)
    if sharding == "contiguous":
        return every.view(ranks, rows)
    first = (rows + 1) // 2
    chunks = every.split([first] * ranks + [rows - first] * ranks)
    return torch.stack([torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]]) for rank in range(ranks)])


def attention(q, k, v, causal, scale):
    """Compute (o, lse) of a whole sequence in plain torch, in the dtype of q."""
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
    """The whole sequence and this rank's shard of it.

    ``own`` holds this rank's operands by name, on its device; ``do`` and ``dlse`` are the output gradients.

    Args:
        rows: S / W. heads, kv_heads, d, dv are Hq, Hkv, D, Dv.
        lse: whether lse has a gradient, too.
        group: None for the world.
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
        """Return the shard of a tensor [B, S, ...] on a rank, by default this rank."""
        return whole[:, self.positions[self.rank if rank is None else rank]].contiguous()

    # ---- calls ----

    def call(self, function=tdkernels.ag_attention, **options):
        """Call the operator and return (o, lse)."""
        options = {"causal": self.causal, "sharding": self.sharding, "scale": self.scale, **options}
        return function(*(self.own[name] for name in NAMES), return_lse=True, group=self.group, **options)

    def run(self, inputs=NAMES, **options):
        """Run forward and backward; return o, lse and the gradients of the operands in ``inputs``, by name."""
        self.require(inputs)
        o, lse = self.call(**options)
        self.backward(o, lse)
        return {"o": o.detach(), "lse": lse.detach(), **self.gradients()}

    def backward(self, o, lse):
        if self.lse:
            torch.autograd.backward([o, lse], [self.do, self.dlse])
        else:
            o.backward(self.do)

    def require(self, inputs=NAMES):
        """Set requires_grad for the named operands only, and clear all gradients."""
        self.own = {name: operand.detach().requires_grad_(name in inputs) for name, operand in self.own.items()}

    def gradients(self):
        """Return the gradients of the operands that have one, by name."""
        return {f"d{name}": operand.grad for name, operand in self.own.items() if operand.grad is not None}

    # ---- checks ----

    def check(self, results):
        """Check that the error of each result to fp64 is at most twice the error of plain torch. Collective.

        All ranks' results are compared together: one rank may have so few numbers that plain torch is exact by chance.
        """
        tdkernels.synchronize()
        ranks = [None] * self.world_size
        dist.all_gather_object(ranks, {name: result.cpu() for name, result in results.items()}, self.group)
        exact, baseline = self.expected(torch.double), self.expected(self.dtype)
        for name in results:
            parts = [[self.part(item[name], rank) for rank in range(self.world_size)] for item in (exact, baseline)]
            for result, part in zip((item[name] for item in ranks), parts[0], strict=True):
                assert result.shape == part.shape, f"{name} of {self.title}: {list(result.shape)}"
            flat = [torch.cat([part.flatten() for part in item]) for item in ([item[name] for item in ranks], *parts)]
            assert_close(f"{name} of {self.title}", *flat)

    @torch.enable_grad()
    def expected(self, dtype):
        """Return o, lse and the gradients of the whole sequence, computed on the CPU in ``dtype``."""
        if dtype not in self._expected:
            operands = [operand.to(dtype).requires_grad_() for operand in self.whole.values()]
            scale = operands[0].shape[3] ** -0.5 if self.scale is None else self.scale
            o, lse = attention(*operands, self.causal, scale)
            outputs = [(o, self.all_do)] + [(lse, self.all_dlse)] * self.lse
            torch.autograd.backward([out for out, _ in outputs], [d.to(out.dtype) for out, d in outputs])
            gradients = {f"d{name}": operand.grad for name, operand in zip(NAMES, operands, strict=True)}
            self._expected[dtype] = {"o": o.detach(), "lse": lse.detach(), **gradients}
        return self._expected[dtype]
