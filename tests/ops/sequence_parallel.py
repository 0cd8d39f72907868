"""What the Ulysses projections are asked, as functions that every rank runs. test_ulysses.py asks.

    case = Projection("ulysses_qkv", BF16, batch=2, positions=37, k=51, n=29)
    case.check(case.run())                # forward and every gradient, by name

Every rank makes the same full operands from the seed and keeps its own part of them: its positions, or its heads.
"""

import itertools
import os
import random
import signal
import time

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import tdkernels
from tdkernels import PeerTimeoutError, PlanMismatchError, Tiles, UlyssesConfig
from tests.ops.tensor_experts import poisoned_outputs
from tests.ranks import a_group, device
from tests.reference import assert_close
from tests.test_protocol import failure_of, poison, stalls, timeout

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
    """A rank's part of one projection, on its device.

    Args:     positions: S / W; k: K, or K / W of ulysses_out; n: N, or N / W of ulysses_qkv
              batch: leading dimensions; exact: draw from -1, 0 and 1, so that ``check`` asks for equality
    """

    def __init__(
        self, operator, dtype, positions, k, n, batch=(2,), *, bias=True, exact=False, seed=0, group=None
    ):  # fmt: skip
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

        def of_positions(t):
            return t.narrow(-2, self.rank * positions, positions)

        def of_heads(t):
            return t.narrow(-1, self.rank * (t.shape[-1] // ranks), t.shape[-1] // ranks)

        of_x, of_y = (of_positions, of_heads) if to_heads else (of_heads, of_positions)

        def results(kind, where):
            x_, dy_, weight_ = (t.to(where, kind) for t in (x, dy, weight))
            y = F.linear(x_, weight_, None if bias is None else bias.to(where, kind))
            rows, grads = (of_positions(t).flatten(0, -2) for t in (x_, dy_))
            found = {"output": of_y(y), "dx": of_x(dy_ @ weight_), "dweight": grads.t() @ rows}
            return found if bias is None else {**found, "dbias": grads.sum(0)}

        self.expected, self.low = results(torch.double, "cpu"), results(dtype, device())
        own = {"x": of_x(x), "weight": weight, "bias": bias}
        own = {name: None if t is None else t.to(device()).clone().contiguous() for name, t in own.items()}
        self.x, self.weight, self.bias = (own[name] for name in NAMES)
        self.dy = of_y(dy).to(device()).clone().contiguous()
        self.require()

    def require(self, wanted=NAMES):
        """Let the named operands, and no others, want a gradient, of which they have none yet."""
        for name in NAMES:
            operand = getattr(self, name)
            if operand is not None:
                setattr(self, name, operand.detach().requires_grad_(name in wanted))

    def call(self, **options):
        return getattr(tdkernels, self.operator)(self.x, self.weight, self.bias, group=self.group, **options)

    def run(self, wanted=NAMES, **options):
        """Forward and backward: "output" and the gradients of what wants one, by name."""
        self.require(wanted)
        output = self.call(**options)
        if output.requires_grad:
            output.backward(self.dy)
        return {"output": output.detach(), **self.gradients()}

    def gradients(self):
        operands = {name: getattr(self, name) for name in NAMES}
        return {f"d{name}": t.grad for name, t in operands.items() if t is not None and t.grad is not None}

    def check(self, results):
        """Raise AssertionError unless each of the named results is near enough to what is expected."""
        tdkernels.synchronize()
        for name, got in results.items():
            title = f"{name} of {self.title}"
            assert got.shape == self.expected[name].shape, f"{title}: {list(got.shape)}"
            if self.exact:
                wrong = (got.cpu().double() != self.expected[name]).sum().item()
                assert wrong == 0 and got.dtype == self.dtype, f"{title}: {wrong} of {got.numel()} are wrong"
            else:
                assert_close(title, got, self.expected[name], self.low[name])


# ---- what they compute ----


def computes(spec, config):
    """Both projections of a spec, and the specification's forward."""
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


def takes_any_layout():
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


def computes_only_the_gradients_asked_for():
    subsets = [subset for size in range(4) for subset in itertools.combinations(NAMES, size)]
    for operator, subset in itertools.product(OPERATORS, subsets):
        case = Projection(operator, FP32, 5, 7, 3)
        results = case.run(subset)
        assert set(results) == {"output", *(f"d{name}" for name in subset)}, f"asked for {subset}: {set(results)}"
        case.check(results)


def obeys_autograd():
    """No gradient asked for, autocast, checkpoints, an output used twice; second derivatives are refused."""
    for operator in OPERATORS:
        case = Projection(operator, FP32, 5, 7, 3)
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
        low = Projection(operator, BF16, 9, 7, 3)
        for name in NAMES:
            setattr(low, name, getattr(low, name).detach().float().requires_grad_())
        with torch.autocast(device().type, BF16):
            output = low.call()
        output.backward(low.dy)
        low.check({"output": output, **{name: gradient.bfloat16() for name, gradient in low.gradients().items()}})


def traces():
    """torch.compile has both in one graph with what is between them, and gets what an eager call gets."""
    torch._dynamo.reset()
    ranks = dist.get_world_size()

    def block(x, w_in, w_out):
        return tdkernels.ulysses_out(tdkernels.ulysses_qkv(x, w_in, config=CONFIGS["pushed"]).sin(), w_out)

    backend = "inductor" if device().type == "cuda" else "aot_eager"
    compiled = torch.compile(block, fullgraph=True, backend=backend)
    weights = [torch.randn(6 * ranks, 8), torch.randn(5, 6 * ranks)]
    for positions in (3, 3, 4):  # the third call meets a shape that was not traced
        leaves = [t.to(device()).requires_grad_() for t in (torch.randn(2, positions, 8), *weights)]
        both = []
        for function in (compiled, block):
            y = function(*leaves)
            both.append([y.detach(), *torch.autograd.grad(y.square().sum(), leaves)])
        for got, expected in zip(*both, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    tdkernels.synchronize()


# ---- a block of attention ----


def is_the_block_that_is_not_divided(dtype, positions, heads, size, hidden):
    """qkv -> attention of a rank's heads -> out, forward and every gradient, against the block on one device."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(3)
    total = ranks * heads
    x, dz = (torch.randn(2, ranks * positions, hidden, generator=generator).to(dtype) for _ in range(2))
    w_qkv = (torch.randn(total * 3 * size, hidden, generator=generator) * hidden**-0.5).to(dtype)
    w_out = (torch.randn(hidden, total * size, generator=generator) * (total * size) ** -0.5).to(dtype)

    def attention(qkv):  # rows of the weight are head by head, and of each head those of q, k and v
        q, k, v = qkv.unflatten(-1, (-1, 3, size)).transpose(1, 2).unbind(3)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)

    def whole(kind, where):
        leaves = [t.detach().to(where, kind).requires_grad_() for t in (x, w_qkv, w_out)]
        z = F.linear(attention(F.linear(leaves[0], leaves[1])), leaves[2])
        return [z.detach(), *torch.autograd.grad(z, leaves, dz.to(where, kind))]

    mine = slice(rank * positions, (rank + 1) * positions)
    leaves = [t.detach().to(device()).requires_grad_() for t in (x[:, mine], w_qkv, w_out)]
    z = tdkernels.ulysses_out(attention(tdkernels.ulysses_qkv(*leaves[:2])), leaves[2])
    got = [z.detach(), *torch.autograd.grad(z, leaves, dz[:, mine].to(device()))]
    tdkernels.synchronize()
    for total_gradient in got[2:]:  # the sum over the ranks' positions is ours to make
        dist.all_reduce(total_gradient)
    exact, low = whole(torch.double, "cpu"), whole(dtype, device())
    for name, value, *both in zip(("z", "dx", "dw_qkv", "dw_out"), got, exact, low, strict=True):
        assert_close(name, value, *(t[:, mine] if t.dim() == 3 else t for t in both))


# ---- between the ranks ----

# Few kinds of calls, since a GPU compiles each.
KINDS = [
    (("ulysses_qkv", BF16, 20, 24, 40, 1), "pulled at once"),
    (("ulysses_out", BF16, 20, 32, 24, 2), "pulled at once"),
    (("ulysses_qkv", FP32, 19, 9, 7, 2), "pushed"),
    (("ulysses_out", FP32, 19, 9, 7, 1), "pushed"),
]


def repeats(kinds, calls, seed):
    """The same bits in every call, of data that changes, while ranks wait at random and all memory is poisoned."""
    of_all, own = random.Random(seed), random.Random(seed * 100 + dist.get_rank())
    known = []
    for number, (kind, config) in enumerate(kinds * 2):
        case = Projection(*kind, seed=number)
        known.append((case, CONFIGS[config], case.run(config=CONFIGS[config])))
        case.check(known[-1][2])
    with poisoned_outputs():
        for _ in range(calls):
            case, config, expected = of_all.choice(known)
            if of_all.random() < 0.3:
                poison()
            time.sleep(own.choice([0.0, own.uniform(0.0, 0.02)]))
            case.require()
            output = case.call(config=config)
            time.sleep(own.choice([0.0, own.uniform(0.0, 0.02)]))
            output.backward(case.dy)
            if of_all.random() < 0.3:
                poison()  # what we got is ours and does not change with the workspace
            tdkernels.synchronize()
            for name, result in {"output": output.detach(), **case.gradients()}.items():
                assert torch.equal(result, expected[name]), f"{name} of {case.title}"


def outruns_its_peers(operator, config, calls):
    """Calls with fresh data and nothing between them, while the ranks run ahead of each other."""
    cases = [Projection(operator, FP32, 20, 9, 7, exact=True, seed=seed) for seed in range(calls)]
    config = CONFIGS[config]
    Projection(operator, FP32, 20, 9, 7).run(config=config)
    with stalls(seed=dist.get_rank()):
        outputs = [case.call(config=config) for case in cases]
        for case, output in zip(cases, outputs, strict=True):
            output.backward(case.dy)
    for case, output in zip(cases, outputs, strict=True):
        case.check({"output": output.detach(), **case.gradients()})


def waits_for_a_slow_rank(config):
    for operator, slow in itertools.product(OPERATORS, range(dist.get_world_size())):
        case = Projection(operator, FP32, 9, 7, 5, exact=True, seed=slow)
        time.sleep(0.15 if dist.get_rank() == slow else 0.0)
        output = case.call(config=CONFIGS[config])
        time.sleep(0.15 if dist.get_rank() == slow else 0.0)
        output.backward(case.dy)
        case.check({"output": output.detach(), **case.gradients()})


def computes_in_a_subgroup():
    """Of the last two ranks; the first does something else."""
    with a_group([1, 2]) as group:
        if dist.get_rank() == 0:
            return
        for operator in OPERATORS:
            case = Projection(operator, FP32, 9, 7, 5, group=group)
            case.check(case.run())
        del case, group


USUAL = dict(dtype=FP32, positions=6, k=8, n=4)
# What rank 1 of three does otherwise; the field that says so, by operator; its values there and elsewhere.
DISAGREEMENTS = {
    "sequences": (dict(batch=1), ("B", "B"), 1, 2),
    "positions": (dict(positions=7), ("S/W", "S"), (7, 21), (6, 18)),
    "no positions": (dict(positions=0), ("S/W", "S"), 0, (6, 18)),
    "k": (dict(k=7), ("K", "K/W"), 7, 8),
    "n": (dict(n=5), ("N", "N"), (15, 5), (12, 4)),
    "dtype": (dict(dtype=FP16), ("dtype", "dtype"), '"torch.float16"', '"torch.float32"'),
    "method": (dict(config="torch"), ("config", "config"), "method=torch", "method=fused"),
    "chunks": (dict(config="pushed"), ("config", "config"), "chunk_tiles=2", "chunk_tiles=1"),
}


def disagrees(what):
    """Everybody is told, and the group is as good as before."""
    changes, fields, there, elsewhere = DISAGREEMENTS[what]
    changes = dict(changes)
    config = CONFIGS[changes.pop("config", "default")]
    odd = dist.get_rank() == 1
    with a_group() as group:
        for number, operator in enumerate(OPERATORS):
            words = [value[number] if isinstance(value, tuple) else value for value in (there, elsewhere)]
            usual = Projection(operator, **USUAL, exact=True, group=group)
            case = Projection(operator, **USUAL | changes, group=group) if odd else usual
            error = failure_of(case.call, config=config if odd else None)
            assert type(error) is ValueError, repr(error)
            parts = [f"{operator}: the ranks disagree", f"{fields[number]} is ", "on ranks 0, 2", "on rank 1"]
            assert all(f"{part}" in str(error) for part in parts + words), f"{parts + words} in {error}"
            usual.check(usual.run())
        del group, usual, case


# Another way to call than the usual one, which rank 1 takes; both are known.
KNOWN = {
    "positions": dict(positions=40),
    "sequences": dict(batch=1),
    "n": dict(n=5),
    "transport": dict(config=UlyssesConfig(tiles=FLAT, transport="push")),
}


def is_not_fooled_by_a_known_plan(operator, what):
    """Both calls have been made before, so nobody asks the others; only the signals can tell."""
    changes = dict(KNOWN[what])
    configs = [UlyssesConfig(tiles=FLAT), changes.pop("config", UlyssesConfig(tiles=FLAT))]
    with a_group() as group:
        cases = [Projection(operator, **USUAL | change, exact=True, group=group) for change in ({}, changes)]
        for case, config in [*zip(cases, configs)] * 2:
            case.check({"output": case.call(config=config).detach()})
        dist.barrier()
        number = int(dist.get_rank() == 1)
        with timeout(1.0):
            error = failure_of(cases[number].call, config=configs[number])
        assert isinstance(error, PlanMismatchError | PeerTimeoutError), repr(error)
        again = failure_of(cases[number].call, config=configs[number])
        assert type(again) is type(error), repr(again)
        del group, cases, case


def loses_rank_1(timeout_s):
    """The others say so: of each call, on groups of their own, and whenever asked again."""
    calls = []
    for operator in OPERATORS:
        case = Projection(operator, **USUAL, exact=True, group=dist.new_group())
        for _ in range(2):
            case.check(case.run())
        calls.append(case.call)
    late = Projection("ulysses_qkv", **USUAL, exact=True, group=dist.new_group())
    output = late.call()
    late.run()
    tdkernels.set_timeout(timeout_s)
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    errors = []
    for call in [*calls, lambda: output.backward(late.dy)]:
        start = time.monotonic()
        errors.append(failure_of(call))
        assert time.monotonic() - start < timeout_s + 5.0
    again = failure_of(calls[0])
    assert str(again) == str(errors[0])
    return errors


# ---- what cannot be ----


def refuses():
    """Before anything is launched, so each rank by itself; then everything is as before."""
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
            (dict(config=UlyssesConfig(lag_tiles=-1)), ValueError, "lag_tiles must not be negative, as -1 is"),
            (dict(config=UlyssesConfig(num_comm_sms=0)), ValueError, "num_comm_sms must be at least 1, not 0"),
            (dict(config=UlyssesConfig(chunk_tiles=0)), ValueError, "chunk_tiles must be at least 1, not 0"),
            (dict(config=UlyssesConfig(tiles=Tiles(block_m=24))), ValueError, "block_m must be a power of two"),
            (dict(group="world"), TypeError, "group"),
        ]
        if ranks > 1 and name == "x":
            words = rf"N = {n - 1} of weight \[{n - 1}, {k}\] must be divisible by the group's {ranks} ranks"
            wrong.append((dict(weight=weight[1:], bias=None), ValueError, words))
        elif ranks > 1:
            words = rf"S = {3 * ranks - 1} of o \[{3 * ranks - 1}, 8\] must be divisible by the group's {ranks} ranks"
            wrong.append((dict(x=x[1:]), ValueError, words))
        for changes, kind, words in wrong:
            call = {"x": x, "weight": weight, "bias": bias, **changes}
            with pytest.raises(kind, match=words) as caught:
                getattr(tdkernels, operator)(call.pop("x"), call.pop("weight"), call.pop("bias"), **call)
            assert "group" in changes or str(caught.value).startswith(f"{operator}: "), str(caught.value)
        case.check({"output": case.call().detach()})


# ---- CUDA graphs ----


def replays_with_new_data(operator, config):
    """Forward and backward, captured once, between eager calls of the same and of another shape."""
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
