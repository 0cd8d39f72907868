"""Expected results of group_gemm, computed group by group in fp64, and the error bound.

    problem = Grouped(torch.bfloat16, [5, 0, 7], n=48, k=29, activation="swiglu", spare=3)
    problem.check(problem.run())          # forward and all gradients, by name
"""

import torch
import torch.nn.functional as F

import tdkernels
from tests.support.dense_oracle import assert_close
from tests.support.ranks import device


def counts_within(splits, rows):
    """Return the rows of each group: splits clamped to be non-negative and to end within ``rows``."""
    remaining, counts = rows, []
    for split in splits:
        counts.append(min(max(split, 0), remaining))
        remaining -= counts[-1]
    return counts


class Grouped:
    """One problem on the rank's device.

    Args:     splits: the splits of the call, valid or not
              n, k: the weight is [E, n, k]
              activation: as for group_gemm
              spare: rows of x and of the output's gradient that belong to no group; they hold NaN
              rows: total rows of x; default: the sum of splits plus ``spare``
              exact: draw from -1, 0 and 1, so that every sum is exact and `check` compares for equality

    A test may replace x, w, dy and splits by tensors of the same values. ``expected`` and ``low`` hold the results by
    name: in fp64, and as computed by plain torch in the dtype on the device.
    """

    def __init__(self, dtype, splits, n, k, activation=None, *, spare=0, rows=None, exact=False, seed=0):
        self.activation, self.exact = activation, exact
        self.rows = sum(splits) + spare if rows is None else rows
        self.title = f"{dtype} {activation} splits={splits} rows={self.rows} n={n} k={k}"
        self.counts = counts_within(splits, self.rows)
        self.used = sum(self.counts)
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape, scale=1.0):
            if exact:
                return torch.randint(-1, 2, shape, generator=generator).to(dtype)
            return (torch.randn(shape, generator=generator) * scale).to(dtype)

        x, w = draw(self.rows, k), draw(len(splits), n, k, scale=k**-0.5)
        dy = draw(self.rows, n // 2 if activation else n)
        self.expected = self._by_group(x.double(), w.double(), dy.double())
        x[self.used :] = dy[self.used :] = torch.nan
        self.x, self.w = x.to(device()).requires_grad_(), w.to(device()).requires_grad_()
        self.dy, self.splits = dy.to(device()), torch.tensor(splits, dtype=torch.int32, device=device())
        self.low = self._by_group(self.x.detach(), self.w.detach(), self.dy)

    def _by_group(self, x, w, dy):
        x, w = x[: self.used].clone().requires_grad_(), w.clone().requires_grad_()
        pre = torch.cat([F.linear(part, weight) for part, weight in zip(x.split(self.counts), w, strict=True)])
        output = pre
        if self.activation:
            concatenated = self.activation == "swiglu"
            gate, up = pre.chunk(2, 1) if concatenated else pre.unflatten(1, (-1, 2)).unbind(2)
            output = F.silu(gate) * up
        output.backward(dy[: self.used])
        return {"output": output.detach(), "dx": x.grad, "dw": w.grad}

    def call(self, **options):
        return tdkernels.group_gemm(self.x, self.w, self.splits, activation=self.activation, **options)

    def run(self, **options):
        """Run forward and backward; return "output" and the gradients of operands that require one, by name."""
        self.x.grad = self.w.grad = None
        output = self.call(**options)
        if output.requires_grad:
            output.backward(self.dy)
        return {"output": output.detach(), **self.gradients()}

    def gradients(self):
        """Return the gradients of the operands, by name."""
        return {name: t.grad for name, t in (("dx", self.x), ("dw", self.w)) if t.grad is not None}

    def check(self, results):
        """Check the error of each named result, in the rows that belong to a group."""
        for name, got in results.items():
            title = f"{name} of {self.title}"
            if name != "dw":
                assert len(got) == self.rows, f"{title}: {len(got)} rows"
                got = got[: self.used]
            if self.exact:
                assert got.dtype == self.x.dtype, f"{title}: {got.dtype}"
                wrong = (got.cpu().double() != self.expected[name]).sum().item()  # a NaN is unequal too
                assert wrong == 0, f"{title}: {wrong} of {got.numel()} elements are wrong"
            else:
                assert_close(title, got, self.expected[name], self.low[name])
