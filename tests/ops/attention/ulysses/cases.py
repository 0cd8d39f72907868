"""Test bodies for the Ulysses projections. Every rank runs them; see test_ulysses.py.

    case = Projection("ulysses_qkv", BF16, batch=2, positions=37, k=51, n=29)
    case.check(case.run())                # forward and every gradient, by name

Every rank draws the same full operands from the seed and keeps its shard: its positions, or its heads.
"""

import itertools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import tdkernels
from tdkernels import Tiles, UlyssesConfig
from tests.ops.experts.tp_moe.cases import poisoned_outputs
from tests.support.dense_oracle import assert_close
from tests.support.ranks import device

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
OPERATORS = ["ulysses_qkv", "ulysses_out"]
NAMES = ["x", "weight", "bias"]
SMALL, FLAT = Tiles(16, 16, 16, 1, 1, 1), Tiles(16, 32, 16, 2, 1, 1)
CONFIGS = {
    "default": None,
    "torch": UlyssesConfig("torch"),
    "pulled late": UlyssesConfig(tiles=FLAT, lag_tiles=1000, num_comm_sms=1, chunk_parts=1),
    "pulled at once": UlyssesConfig(tiles=SMALL, lag_tiles=1, num_comm_sms=3, chunk_parts=3, sources_at_once=1),
    "pushed": UlyssesConfig(tiles=FLAT, transport="push", num_comm_sms=5, chunk_tiles=2, sources_at_once=3),
    "chunks longer than a shard": UlyssesConfig(tiles=SMALL, transport="push", lag_tiles=5, chunk_tiles=9),
    "tall tiles": UlyssesConfig(tiles=Tiles(64, 16, 32, 2, 1, 1), chunk_parts=40),
}


class Projection:
    """A rank's shard of one projection, on its device.

    Args:
        positions: S / W.
        k: K, or K / W for ulysses_out.
        n: N, or N / W for ulysses_qkv.
        batch: leading dimensions.
        exact: draw from -1, 0 and 1, so that ``check`` requires equality.
    """

    def __init__(
        self, operator, dtype, positions, k, n, batch=(2,), *, bias=True, exact=False, seed=0, group=None
    ):
        batch = (batch,) if isinstance(batch, int) else batch
        self.operator, self.dtype, self.group, self.exact = operator, dtype, group, exact
        self.rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        self.title = f"{operator} {dtype} S/W={positions} k={k} n={n} {batch} rank {self.rank} of {ranks}"
        to_heads = operator == "ulysses_qkv"
        k, n = (k, n * ranks) if to_heads else (k * ranks, n)
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape, scale=1.0):
            if exact:
                return torch.randint(-1, 2, shape, generator=generator).to(dtype)
            return (torch.randn(shape, generator=generator) * scale).to(dtype)

        x, dy = draw(*batch, positions * ranks, k), draw(*batch, positions * ranks, n)
        weight, bias = draw(n, k, scale=k**-0.5), draw(n) if bias else None

        def shard_positions(t):
            return t.narrow(-2, self.rank * positions, positions)

        def shard_heads(t):
            return t.narrow(-1, self.rank * (t.shape[-1] // ranks), t.shape[-1] // ranks)

        shard_x, shard_y = (shard_positions, shard_heads) if to_heads else (shard_heads, shard_positions)

        def results(kind, target):
            x_, dy_, weight_ = (t.to(target, kind) for t in (x, dy, weight))
            y = F.linear(x_, weight_, None if bias is None else bias.to(target, kind))
            rows, grads = (shard_positions(t).flatten(0, -2) for t in (x_, dy_))
            tensors = {"output": shard_y(y), "dx": shard_x(dy_ @ weight_), "dweight": grads.t() @ rows}
            return tensors if bias is None else {**tensors, "dbias": grads.sum(0)}

        self.expected, self.low = results(torch.double, "cpu"), results(dtype, device())
        own = {"x": shard_x(x), "weight": weight, "bias": bias}
        own = {name: None if t is None else t.to(device()).clone().contiguous() for name, t in own.items()}
        self.x, self.weight, self.bias = (own[name] for name in NAMES)
        self.dy = shard_y(dy).to(device()).clone().contiguous()
        self.require()

    def require(self, inputs=NAMES):
        """Set requires_grad for the named operands only, and clear all gradients."""
        for name in NAMES:
            operand = getattr(self, name)
            if operand is not None:
                setattr(self, name, operand.detach().requires_grad_(name in inputs))

    def call(self, **options):
        return getattr(tdkernels, self.operator)(self.x, self.weight, self.bias, group=self.group, **options)

    def run(self, inputs=NAMES, **options):
        """Run forward and backward; return "output" and the gradients of the operands in ``inputs``, by name."""
        self.require(inputs)
        output = self.call(**options)
        if output.requires_grad:
            output.backward(self.dy)
        return {"output": output.detach(), **self.gradients()}

    def gradients(self):
        operands = {name: getattr(self, name) for name in NAMES}
        return {f"d{name}": t.grad for name, t in operands.items() if t is not None and t.grad is not None}

    def check(self, results):
        """Check each of the named results."""
        tdkernels.synchronize()
        for name, got in results.items():
            title = f"{name} of {self.title}"
            assert got.shape == self.expected[name].shape, f"{title}: {list(got.shape)}"
            if self.exact:
                wrong = (got.cpu().double() != self.expected[name]).sum().item()
                assert wrong == 0 and got.dtype == self.dtype, f"{title}: {wrong} of {got.numel()} are wrong"
            else:
                assert_close(title, got, self.expected[name], self.low[name])


# ---- results ----


def computes(spec, config):
    """Check both projections with all gradients, and the forward of their references."""
    for operator in OPERATORS:
        case = Projection(operator, **spec)
        with poisoned_outputs():
            results = case.run(config=CONFIGS[config])
        assert set(results) == {"output", "dx", "dweight", *["dbias"] * (case.bias is not None)}
        case.check(results)
        reference = getattr(tdkernels, f"{operator}_ref")
        case.check({"output": reference(case.x, case.weight, case.bias).detach()})


def transposed(t):
    return t.transpose(-1, -2).contiguous().transpose(-1, -2)


def strided(t):
    wide = t.new_full((*t.shape[:-1], t.shape[-1] + 3), torch.nan)
    wide[..., 1:-2] = t
    return wide[..., 1:-2]


def misaligned(t):
    flat = t.new_full((t.numel() + 1,), torch.nan)
    flat[1:] = t.flatten()
    return flat[1:].view(t.shape)


def supports_any_layout():
    for operator, change in itertools.product(OPERATORS, (transposed, strided, misaligned)):
        for name in ("x", "weight", "dy") if change is transposed else ("x", "weight"):
            case = Projection(operator, FP32, 9, 8, 16, exact=True)
            setattr(case, name, change(getattr(case, name).detach()))
            case.check(case.run())
    expanded = Projection("ulysses_out", FP32, 9, 8, 16, exact=True)
    expanded.dy = torch.ones_like(expanded.dy)
    expected = expanded.run()
    expanded.dy = torch.ones((), device=device()).expand(expanded.dy.shape)
    for name, result in expanded.run().items():
        assert torch.equal(result, expected[name]), name


def computes_subsets_of_gradients():
    subsets = [subset for size in range(4) for subset in itertools.combinations(NAMES, size)]
    for operator, subset in itertools.product(OPERATORS, subsets):
        case = Projection(operator, FP32, 5, 7, 3, exact=True)
        results = case.run(subset)
        assert set(results) == {"output", *(f"d{name}" for name in subset)}, f"{subset}: got {set(results)}"
        case.check(results)


def supports_autograd():
    """Check no_grad, repeated backward, checkpoints and autocast, and that second derivatives are rejected."""
    for operator in OPERATORS:
        case = Projection(operator, FP32, 5, 7, 3, exact=True)
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                output = case.call()
            assert not output.requires_grad
            case.check({"output": output})
        output = case.call()
        output.backward(case.dy, retain_graph=True)
        output.backward(case.dy)
        case.check({name: gradient / 2 for name, gradient in case.gradients().items()})
        output = case.call()
        with pytest.raises(RuntimeError, match=f"{operator}: second derivative"):
            torch.autograd.grad(output, case.x, case.dy, create_graph=True)
        case.require()
        checkpoint(case.call, use_reentrant=False).backward(case.dy)
        case.check(case.gradients())
        low = Projection(operator, BF16, 9, 7, 3, exact=True)
        for name in NAMES:
            setattr(low, name, getattr(low, name).detach().float().requires_grad_())
        with torch.autocast(device().type, BF16):
            output = low.call()
        output.backward(low.dy)
        low.check({"output": output, **{name: gradient.bfloat16() for name, gradient in low.gradients().items()}})


def supports_compile():
    """Check that torch.compile traces both projections into one graph, with the results of eager calls."""
    torch._dynamo.reset()
    ranks = dist.get_world_size()

    def block(x, w_in, w_out):
        return tdkernels.ulysses_out(tdkernels.ulysses_qkv(x, w_in, config=CONFIGS["pushed"]).sin(), w_out)

    backend = "inductor" if device().type == "cuda" else "aot_eager"
    compiled = torch.compile(block, fullgraph=True, backend=backend)
    weights = [torch.randn(6 * ranks, 8), torch.randn(5, 6 * ranks)]
    for positions in (3, 3, 4):  # the third call has a shape that was not traced
        leaves = [t.to(device()).requires_grad_() for t in (torch.randn(2, positions, 8), *weights)]
        outputs = []
        for function in (compiled, block):
            y = function(*leaves)
            outputs.append([y.detach(), *torch.autograd.grad(y.square().sum(), leaves)])
        for got, expected in zip(*outputs, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    tdkernels.synchronize()


# ---- attention block ----


def matches_unsharded_attention_block(dtype, positions, heads, size, hidden):
    """Check qkv -> attention over a rank's heads -> out, with gradients, against the unsharded block."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(3)
    total = ranks * heads
    x, dz = (torch.randn(2, ranks * positions, hidden, generator=generator).to(dtype) for _ in range(2))
    w_qkv = (torch.randn(total * 3 * size, hidden, generator=generator) * hidden**-0.5).to(dtype)
    w_out = (torch.randn(hidden, total * size, generator=generator) * (total * size) ** -0.5).to(dtype)

    def attention(qkv):  # weight rows are ordered by head, within a head by q, k, v
        q, k, v = qkv.unflatten(-1, (-1, 3, size)).transpose(1, 2).unbind(3)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)

    def unsharded(kind, target):
        leaves = [t.detach().to(target, kind).requires_grad_() for t in (x, w_qkv, w_out)]
        z = F.linear(attention(F.linear(leaves[0], leaves[1])), leaves[2])
        return [z.detach(), *torch.autograd.grad(z, leaves, dz.to(target, kind))]

    own_positions = slice(rank * positions, (rank + 1) * positions)
    leaves = [t.detach().to(device()).requires_grad_() for t in (x[:, own_positions], w_qkv, w_out)]
    z = tdkernels.ulysses_out(attention(tdkernels.ulysses_qkv(*leaves[:2])), leaves[2])
    got = [z.detach(), *torch.autograd.grad(z, leaves, dz[:, own_positions].to(device()))]
    tdkernels.synchronize()
    for total_gradient in got[2:]:  # the caller sums weight gradients over the ranks
        dist.all_reduce(total_gradient)
    exact, low = unsharded(torch.double, "cpu"), unsharded(dtype, device())
    for name, value, *references in zip(("z", "dx", "dw_qkv", "dw_out"), got, exact, low, strict=True):
        assert_close(name, value, *(t[:, own_positions] if t.dim() == 3 else t for t in references))


# ---- validation errors ----


def rejects_invalid_arguments():
    """Check validation errors. They are raised before any launch, so later calls work."""
    ranks = dist.get_world_size()
    for operator in OPERATORS:
        case = Projection(operator, BF16, 3, 8, 4, batch=())
        name = "x" if operator == "ulysses_qkv" else "o"
        x, weight, bias = (getattr(case, each).detach() for each in NAMES)
        k, n = weight.shape[1], weight.shape[0]
        wrong = [
            (dict(x=[1.0]), TypeError, f"{name} must be a torch.Tensor, not list"),
            (dict(x=x.double()), TypeError, f"{name} is torch.float64; bfloat16, float16 and float32"),
            (dict(x=x.float()), TypeError, f"{name} is torch.float32 but weight is torch.bfloat16"),
            (dict(x=x[0]), ValueError, rf"{name} must have at least 2 dimensions .* its shape is \[8\]"),
            (dict(x=x[:, :5]), ValueError, rf"the last dimension of {name} \[{len(x)}, 5\].* weight \[{n}, {k}\]"),
            (dict(x=x.to("meta")), ValueError, f"{name} is on meta but weight is on"),
            (dict(weight=None), TypeError, "weight must be a torch.Tensor, not NoneType"),
            (dict(weight=weight[0]), ValueError, rf"weight must have 2 dimensions \[N, K\], its shape is \[{k}\]"),
            (dict(weight=weight[:0]), ValueError, rf"weight \[0, {k}\] has an empty dimension"),
            (dict(bias=bias[1:]), ValueError, rf"bias \[{n - 1}\] must have one element for each row of weight"),
            (dict(bias=bias.float()), TypeError, f"{name} is torch.bfloat16 but bias is torch.float32"),
            (dict(config="best"), TypeError, "config must be a UlyssesConfig or None, not str"),
            (dict(config=UlyssesConfig("best")), ValueError, "config cannot run: method must be"),
            (dict(config=UlyssesConfig(transport="mail")), ValueError, 'transport must be "pull" or "push"'),
            (dict(config=UlyssesConfig(lag_tiles=-1)), ValueError, "lag_tiles must be at least 0, not -1"),
            (dict(config=UlyssesConfig(num_comm_sms=0)), ValueError, "num_comm_sms must be at least 1, not 0"),
            (dict(config=UlyssesConfig(chunk_tiles=0)), ValueError, "chunk_tiles must be at least 1, not 0"),
            (dict(config=UlyssesConfig(tiles=Tiles(block_m=24))), ValueError, "block_m must be a power of two"),
            (dict(group="world"), TypeError, "group"),
        ]
        if ranks > 1 and name == "x":
            message = rf"N = {n - 1} of weight \[{n - 1}, {k}\] must be divisible by the group's {ranks} ranks"
            wrong.append((dict(weight=weight[1:], bias=None), ValueError, message))
        elif ranks > 1:
            message = rf"S = {3 * ranks - 1} of o \[{3 * ranks - 1}, 8\] must be divisible by the group's {ranks} ranks"
            wrong.append((dict(x=x[1:]), ValueError, message))
        for changes, kind, message in wrong:
            call = {"x": x, "weight": weight, "bias": bias, **changes}
            with pytest.raises(kind, match=message) as caught:
                getattr(tdkernels, operator)(call.pop("x"), call.pop("weight"), call.pop("bias"), **call)
            assert "group" in changes or str(caught.value).startswith(f"{operator}: "), str(caught.value)
        case.check({"output": case.call().detach()})


# ---- CUDA graphs ----


def replays_with_new_data(operator, config):
    """Check forward and backward captured once and replayed with new data between eager calls."""
    kind, config = (operator, BF16, 64, 64, 128), CONFIGS[config]

    def step(case):
        output = case.call(config=config)
        gradients = torch.autograd.grad(output, [case.x, case.weight, case.bias], case.dy)
        return dict(zip(("output", "dx", "dweight", "dbias"), (output.detach(), *gradients), strict=True))

    static = Projection(*kind)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step(static)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step(static)
    for seed in range(1, 9):
        fresh = Projection(*kind, seed=seed)
        with torch.no_grad():
            for name in (*NAMES, "dy"):
                getattr(static, name).copy_(getattr(fresh, name))
        for result in results.values():
            result.fill_(torch.nan)
        graph.replay()
        fresh.check(results)
        if seed % 3 == 0:
            eager = Projection(*kind, seed=seed)
            eager.check(step(eager))
            other = Projection(operator, FP16, 33, 40, 48, seed=seed)
            other.check(other.run())
