"""Operands of gemm_ar_rms_norm and gemm_ar_layer_norm, and the exact results of a call."""

import torch
import torch.distributed as dist

import tdkernels
from tests.support.ranks import device

OPERANDS = "x", "weight", "bias", "residual", "norm_weight", "norm_bias"


def same_bits_on_all_ranks(title, *tensors):
    """Raise AssertionError unless each tensor has the same bits on all ranks."""
    for number, tensor in enumerate(tensors):
        own = tensor.detach().contiguous().view(torch.uint8)
        first = own.clone()
        dist.broadcast(first, 0)
        assert torch.equal(own, first), f"output {number} of {title} differs from that of rank 0"


def exact_norm(r, weight, bias, eps, is_layer_norm):
    """Return RMSNorm or LayerNorm of r in fp64, on the CPU."""
    r, weight = r.detach().cpu().double(), weight.detach().cpu().double()
    mean = r.mean(-1, keepdim=True) if is_layer_norm else 0.0
    y = (r - mean) * ((r - mean).square().mean(-1, keepdim=True) + eps).rsqrt() * weight
    return y if bias is None else y + bias.detach().cpu().double()


class NormCase:
    """The operands of a rank, and the exact results.

    Args:     operator: gemm_ar_rms_norm or gemm_ar_layer_norm
              rows, n, k: x of a rank is [rows, k], its weight [n, k]
              kind: "order": the weight has two columns that are not zero, 1 and 1/16, so that each partial is a sum of
              two numbers, whatever the order of a GEMM, and is rounded; "integers": x and weight are -1, 0 and 1, so
              that each sum is exact; "random": normal numbers
              bias, residual, norm_bias: whether there is one
              norm_dtype: of norm_weight and norm_bias; None for dtype
              group: the group of calls, unless they name one; None means the world
    """

    def __init__(
        self, operator, dtype, rows, n, k, *, kind="order", bias=True, residual=True, norm_bias=True, norm_dtype=None,
        eps=1e-5, seed=0, group=None,
    ):
        self.operator, self.dtype, self.kind, self.eps = operator, dtype, kind, eps
        self.is_layer_norm = operator == "gemm_ar_layer_norm"
        self.group, self.rank, self.world_size = group, dist.get_rank(group), dist.get_world_size(group)
        self.title = f"{operator} {dtype} rows={rows} n={n} k={k} {kind} seed={seed}"
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape, dtype=dtype):
            return torch.randn(shape, generator=generator).to(dtype)

        self.all_x, self.all_weights = draw(self.world_size, rows, k), draw(self.world_size, n, k)
        if kind == "integers":
            shapes = self.all_x.shape, self.all_weights.shape
            self.all_x, self.all_weights = (
                torch.randint(-1, 2, shape, generator=generator).to(dtype) for shape in shapes
            )
        elif kind == "order":
            signs = self.all_weights.sign()
            self.all_weights = torch.zeros_like(signs)
            self.all_weights[..., -1] = signs[..., -1] / 16
            self.all_weights[..., 0] = signs[..., 0]
        else:
            self.all_weights = (self.all_weights.float() * k**-0.5).to(dtype)
        norm_dtype = norm_dtype or dtype
        shared = {
            "bias": draw(n) if bias else None,
            "residual": draw(rows, n) if residual else None,
            "norm_weight": (1 + draw(n).float() / 4).to(norm_dtype),
            "norm_bias": draw(n, dtype=norm_dtype) if norm_bias else None,
        }
        own = {"x": self.all_x[self.rank], "weight": self.all_weights[self.rank], **shared}
        for name, operand in own.items():
            on_device = None if operand is None else operand.clone().to(device()).requires_grad_()
            setattr(self, name, on_device)
        self.dy, self.dr = draw(rows, n).to(device()), draw(rows, n).to(device())

    def operands(self):
        """Return the operands that exist, by name."""
        return {name: getattr(self, name) for name in OPERANDS if getattr(self, name) is not None}

    def call(self, **options):
        function = getattr(tdkernels, self.operator)
        defaults = {"bias": self.bias, "norm_bias": self.norm_bias, "eps": self.eps, "group": self.group}
        options = defaults | options
        return function(self.x, self.weight, self.residual, self.norm_weight, **options)

    # ---- forward ----

    def expected_sum(self):
        """Return r: the partials, rounded, added in fp32 in rank order, plus bias and residual, rounded once."""
        total = torch.zeros(self.all_x.shape[1], self.all_weights.shape[1])
        for x, weight in zip(self.all_x, self.all_weights, strict=True):
            if self.kind == "order":
                last = weight[:, -1].float() if weight.shape[1] > 1 else torch.zeros(len(weight))
                partial = x[:, :1].float() * weight[:, 0].float() + x[:, -1:].float() * last
            else:
                partial = x.float() @ weight.float().t()
            total += partial.to(self.dtype).float()
        for added in (self.bias, self.residual):
            total = total if added is None else total + added.detach().cpu().float()
        return total.to(self.dtype)

    def check_sum(self, r, in_rank_order):
        """Check r: bit by bit if ``in_rank_order``, otherwise within the error of its roundings.

        One rank adds bias and residual as torch does, in its own order.
        """
        tdkernels.synchronize()
        expected, r = self.expected_sum(), r.detach().cpu()
        assert r.dtype == self.dtype and r.shape == expected.shape, self.title
        if in_rank_order and self.world_size > 1:
            assert torch.equal(r, expected), f"r of {self.title}: {(r != expected).sum()} of {r.numel()} differ"
            return
        # Sums of the partials, of the bias and of the residual may each be rounded, in any order.
        terms = self.all_x.double().abs() @ self.all_weights.double().abs().transpose(1, 2)
        bound = terms.sum(0) + 1
        for added in (self.bias, self.residual):
            bound = bound if added is None else bound + added.detach().cpu().double().abs()
        bound *= 1.5 * torch.finfo(self.dtype).eps
        assert ((r.double() - expected.double()).abs() <= bound).all(), f"r of {self.title}"

    def check(self, y, r, in_rank_order):
        """Check r, and y against the norm of r in fp64."""
        self.check_sum(r, in_rank_order)
        y, r = y.detach().cpu(), r.detach().cpu()
        assert y.dtype == self.dtype and y.shape == r.shape, self.title
        exact = exact_norm(r, self.norm_weight, self.norm_bias, self.eps, self.is_layer_norm)
        # y is rounded once; the terms of y have errors of a few units in the last place of fp32.
        mean = r.double().mean(-1, keepdim=True) if self.is_layer_norm else 0.0
        rstd = ((r.double() - mean).square().mean(-1, keepdim=True) + self.eps).rsqrt()
        terms = (r.double().abs() + abs(mean)) * rstd * self.norm_weight.detach().cpu().double().abs()
        if self.norm_bias is not None:
            terms = terms + self.norm_bias.detach().cpu().double().abs()
        info = torch.finfo(self.dtype)
        bound = info.eps / 2 * exact.abs() + 32 * torch.finfo(torch.float32).eps * (1 + terms) + info.tiny
        wrong = ~((y.double() - exact).abs() <= bound)  # a NaN is wrong, too
        assert not wrong.any(), f"y of {self.title}: {int(wrong.sum())} of {wrong.numel()} elements are wrong"

    # ---- backward ----

    def run_backward(self, y, r, used="yr"):
        """Run the backward for gradients of the outputs in ``used``."""
        pairs = [(output, grad) for name, output, grad in (("y", y, self.dy), ("r", r, self.dr)) if name in used]
        torch.autograd.backward([pair[0] for pair in pairs], [grad.view(output.shape) for output, grad in pairs])

    def expected_gradients(self, r, used):
        """Return the gradients of all operands in fp64, by name, for the rounded r."""
        r = r.detach().cpu().double().view(self.all_x.shape[1], -1).requires_grad_()
        weight = self.norm_weight.detach().cpu().double().requires_grad_()
        mean = r.mean(-1, keepdim=True) if self.is_layer_norm else 0.0
        normalized = (r - mean) * ((r - mean).square().mean(-1, keepdim=True) + self.eps).rsqrt()
        dy, dr = self.dy.cpu().double(), self.dr.cpu().double()
        dz, dnorm_weight = torch.autograd.grad(normalized * weight, [r, weight], dy)
        dz = (dz if "y" in used else 0) + (dr if "r" in used else 0)
        x, w = self.all_x[self.rank].double(), self.all_weights[self.rank].double()
        gradients = {"x": dz @ w, "weight": dz.t() @ x, "bias": dz.sum(0), "residual": dz}
        if "y" in used:
            gradients |= {"norm_weight": dnorm_weight, "norm_bias": dy.sum(0)}
        return gradients

    def check_gradients(self, r, used="yr", added=None):
        """Check the gradients of the operands that have one; ``added``: accumulators and their value before."""
        tdkernels.synchronize()
        exact = self.expected_gradients(r, used)
        found = {name: (operand.grad, 0.0) for name, operand in self.operands().items() if operand.grad is not None}
        found |= added or {}
        assert found, f"no gradients of {self.title}"
        expected = {name for name, operand in self.operands().items() if operand.requires_grad} & exact.keys()
        assert found.keys() == expected, f"{found.keys()} of {self.title}, not {expected}"
        for name, (gradient, before) in found.items():
            assert gradient.shape == exact[name].shape, f"{name} of {self.title}"
            # dz, the gradient of the norm in it, and the result are rounded to the dtype of the operands.
            bound = 1.5 * torch.finfo(self.dtype).eps if self.dtype != torch.float32 else 3e-6
            got = gradient.detach().cpu().double()
            error = (got - before - exact[name]).norm() / (exact[name].norm() + abs(before) * got.numel() ** 0.5)
            assert error <= bound, f"gradient of {name} of {self.title}: relative error {error:.2e} > {bound:.2e}"
