"""Calls of the dense operators with scaled fp8 operands: options, layouts, the call cache, and errors.

Codes are -1, 0 and 1 and scales are powers of two, so that all products and sums are exact.
"""

import pytest
import torch
import torch.distributed as dist

import tdkernels
from tdkernels import AgGemmConfig, GemmArConfig, GemmRsConfig, Tiles
from tests.ops.dense.cases import LAYOUTS
from tests.ops.dense.scaled_cases import CONFIG_CLASSES, ScaledCase, computes
from tests.support.dense_oracle import OPERATORS
from tests.support.ranks import device, on_ranks
from tests.support.simulated_nodes import needs_gpus, on_nodes
from tests.support.subset import turns

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
each_operator = pytest.mark.parametrize("operator", OPERATORS)


def codes(*shape, seed, dtype=E4M3):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-1, 2, shape, generator=generator).float().to(device(), dtype)


def scale(*shape, seed):
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.exp2(torch.randint(-3, 4, shape, generator=generator).float()).to(device())


def scale_shapes(kind, rows, n, k):
    """Return the shapes of scale_x and scale_w."""
    blocks = -(-k // 128)
    return {
        "tensor": ((1,), ()), "row": ((rows, 1), (n, 1)), "block": ((rows, blocks), (-(-n // 128), blocks)),
    }[kind]


def wide(codes, scale):
    """Return codes times their scale in fp64."""
    if scale.dim() == 2 and scale.shape[1] > 1:
        height = 1 if scale.shape[0] == codes.shape[0] else 128
        scale = scale.repeat_interleave(height, 0).repeat_interleave(128, 1)[: codes.shape[0], : codes.shape[1]]
    return codes.double() * scale


# ---- several weights, the gathered x and other dimensions ----


def gathers(lead, dim, sizes, k, kind, method=None, as_list=True, return_gathered=True, bias=True):
    """Compare ag_gemm of a shard [*lead, K] with the products of the whole x; only some weights have a bias."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    rows = torch.Size(lead).numel()
    xs = [codes(*lead, k, seed=r) for r in range(ranks)]
    shapes = [scale_shapes(kind, rows, n, k) for n in sizes]
    scales_x = [scale(*shapes[0][0], seed=10 + r) for r in range(ranks)]
    own = [(codes(n, k, seed=20 + rank + i), scale(*shapes[i][1], seed=30 + rank + i)) for i, n in enumerate(sizes)]
    weights, scales_w = map(list, zip(*own, strict=True))
    biases = [codes(n, seed=40 + i, dtype=FP32) if bias and i != 1 else None for i, n in enumerate(sizes)]
    config = None if method is None else AgGemmConfig(method=method)
    given = (weights, biases, scales_w) if as_list else (weights[0], biases[0], scales_w[0])
    result = tdkernels.ag_gemm(
        xs[rank], given[0], given[1], dim=dim, return_gathered=return_gathered, scale_x=scales_x[rank],
        scale_w=given[2], out_dtype=FP32, config=config,
    )
    ys = result[0] if return_gathered else result
    ys = ys if as_list else [ys]
    of_rows = zip(xs, scales_x, strict=True)
    whole = torch.cat([wide(x.flatten(0, -2), scale_x).view(x.shape) for x, scale_x in of_rows], dim)
    assert len(ys) == len(sizes)
    for y, weight, scale_w, its_bias in zip(ys, weights, scales_w, biases, strict=True):
        expected = whole @ wide(weight, scale_w).t()
        expected = expected if its_bias is None else expected + its_bias
        assert y.dtype == FP32 and y.is_contiguous() and torch.equal(y.double(), expected)
    if return_gathered:
        gathered = result[1]
        assert gathered.dtype == E4M3 and gathered.is_contiguous()
        assert torch.equal(gathered.float(), torch.cat([x.float() for x in xs], dim))


def gathers_all(cases):
    for case in cases:
        gathers(*case)


GATHERS = [  # shape of x without K, dim, sizes of the weights, K, scaling, method
    ((5,), 0, (3, 130, 16), 272, "row"), ((37,), 0, (29,), 64, "tensor", "torch"), ((5,), 0, (16, 140), 144, "block"),
    ((2, 3), 1, (4, 5), 48, "row", "parts"), ((3, 17), 1, (16,), 272, "block", "torch"),
    ((1, 4), 1, (8,), 16, "tensor"), ((2, 3, 2), 0, (8, 8), 32, "row"),
    ((2, 3, 2), 1, (8, 24), 32, "row", None, True, False), ((6,), 0, (8,), 32, "row", None, False),
    ((2, 6), 1, (8,), 32, "row", None, False, False), ((4, 3), 0, (24,), 32, "row", None, False, False),
    ((1,), 0, (8, 8), 32, "row"),
]


@pytest.mark.parametrize("world_size, cases", [(1, GATHERS[:9:2]), (2, GATHERS), (4, GATHERS[:4:3])])
def test_ag_gemm_with_several_weights_and_other_dimensions(world_size, cases):
    on_ranks(world_size, gathers_all, cases)


def scatters(lead, dim, n, k, kind, method=None):
    """Compare gemm_rs of a shard [*lead, K / W] with this rank's part of the sum of the products."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    shapes = scale_shapes(kind, torch.Size(lead).numel(), n, k)
    operands = [(codes(*lead, k, seed=r), codes(n, k, seed=10 + r)) for r in range(ranks)]
    of_operands = [(scale(*shapes[0], seed=20 + r), scale(*shapes[1], seed=30 + r)) for r in range(ranks)]
    each = [(*pair, *scales) for pair, scales in zip(operands, of_operands, strict=True)]
    x, weight, scale_x, scale_w = each[rank]
    bias = codes(n, seed=40, dtype=FP32)
    config = None if method is None else GemmRsConfig(method=method)
    z = tdkernels.gemm_rs(x, weight, bias, dim=dim, scale_x=scale_x, scale_w=scale_w, out_dtype=FP32, config=config)
    products = [wide(x.flatten(0, -2), scale_x) @ wide(weight, scale_w).t() for x, weight, scale_x, scale_w in each]
    expected = sum(products).view(*lead, n).chunk(ranks, dim)[rank] + bias
    assert z.dtype == FP32 and z.is_contiguous()
    assert torch.equal(z.double(), expected), f"{lead} {dim} {n} {k} {kind} {method}: {(z - expected).abs()}"


def scatters_all(cases):
    for case in cases:
        scatters(*case)


SCATTERS = [
    ((2, 12), 1, 16, 48, "row"), ((3, 8), 1, 29, 272, "block"), ((2, 4), 1, 5, 16, "tensor", "torch"),
    ((1, 12), 1, 8, 32, "row"), ((4, 3, 2), 0, 16, 32, "row", "parts"), ((12, 2), 0, 140, 144, "block"),
]


@pytest.mark.parametrize("world_size, cases", [(1, SCATTERS[:5:2]), (2, SCATTERS), (4, SCATTERS[1:2])])
def test_gemm_rs_of_other_dimensions(world_size, cases):
    on_ranks(world_size, scatters_all, cases)


def test_gemm_rs_of_the_second_of_four_dimensions():
    on_ranks(2, scatters, (2, 4, 3), 1, 8, 32, "row")


def reduces_leading_dims():
    ranks = dist.get_world_size()
    each = [
        (codes(2, 3, 32, seed=r), codes(8, 32, seed=10 + r), scale(2, 3, 1, seed=r), scale(8, 1, seed=10 + r))
        for r in range(ranks)
    ]
    x, weight, scale_x, scale_w = each[dist.get_rank()]
    z = tdkernels.gemm_ar(x, weight, scale_x=scale_x, scale_w=scale_w, out_dtype=FP32)
    expected = sum((x.double() * scale_x) @ (w.double() * scale_w).t() for x, w, scale_x, scale_w in each)
    assert torch.equal(z.double(), expected)


def test_gemm_ar_of_leading_dimensions():
    on_ranks(2, reduces_leading_dims)


def computes_no_rows(operator):
    x, weight = codes(0, 32, seed=0), codes(8, 32, seed=1)
    one = torch.ones(1, device=device())
    for scale_x in (one, torch.ones(0, 1, device=device())):
        z = getattr(tdkernels, operator)(x, weight, scale_x=scale_x, scale_w=one, out_dtype=FP16)
        assert z.shape == (0, 8) and z.dtype == FP16
    if operator == "ag_gemm":
        (y,), gathered = tdkernels.ag_gemm(x, [weight], return_gathered=True, scale_x=one, scale_w=[one])
        assert y.shape == (0, 8) and gathered.shape == (0, 32) and gathered.dtype == E4M3
    case = ScaledCase(operator, 4 * dist.get_world_size(), 8, 16)
    case.check(case.run())


@pytest.mark.parametrize("world_size", [1, 2])
def test_no_rows(world_size):
    for operator in OPERATORS:
        on_ranks(world_size, computes_no_rows, operator)


# ---- memory layouts and the call cache ----


def computes_with_layouts(operator):
    """Check operands and scales that are not contiguous, and a weight in the layout [K, N]."""
    shape = (24, 29, 48) if operator == "gemm_rs" else (37, 29, 48)
    case = ScaledCase(operator, *shape)
    layouts = list(LAYOUTS.values())
    for name, chosen in (("x", layouts), ("weight", layouts), ("scale_x", layouts[2:]), ("scale_w", layouts[2:])):
        original = getattr(case, name)
        for layout in chosen:
            bits = original.view(torch.uint8) if original.element_size() == 1 else original
            changed = layout(bits, 127 if bits is not original else torch.nan).view(original.dtype)
            setattr(case, name, changed)
            case.check(case.run())
        setattr(case, name, original)


@each_operator
def test_layouts(operator):
    on_ranks(2, computes_with_layouts, operator)


def uses_the_operands_of_each_call(operator, scaling):
    """Check calls that find an entry of the call cache with other tensors, and other scales of the same tensors."""
    shape = (24, 40, 144)
    two = [ScaledCase(operator, *shape, (scaling, scaling), seed=seed) for seed in range(2)]
    for case in (*two, *two):
        case.check(case.run())
    first, second = two
    plain = first.run()
    factor = 4.0
    first.scale_x, first.bias = first.scale_x * factor, None
    without_bias = ScaledCase(operator, *shape, (scaling, scaling), bias=False).run()
    for _ in range(3):
        assert torch.equal(first.run(), without_bias * factor)
    assert not torch.equal(plain, without_bias)
    second.scale_w.mul_(factor)  # in place: the tensors of the call are the same
    second.bias = None
    expected = ScaledCase(operator, *shape, (scaling, scaling), seed=1, bias=False).run() * factor
    for _ in range(2):
        assert torch.equal(second.run(), expected)


@pytest.mark.parametrize("operator, scaling", turns(
    [(operator,) for operator in OPERATORS], [("tensor",), ("row",), ("block",)],
))
def test_calls_with_other_tensors(operator, scaling):
    on_ranks(2, uses_the_operands_of_each_call, operator, scaling)


def accepts_one_tensor_as_both_scales(operator):
    """Check that the entry of a call with one tensor as both scales does not serve a call with two, and vice versa."""
    ranks = dist.get_world_size()
    rows, n, k = 24, 40, 48
    call = getattr(tdkernels, operator)
    each = [(codes(rows, k, seed=r), codes(n, k, seed=10 + r)) for r in range(ranks)]
    x, weight = each[dist.get_rank()]
    full = torch.cat([x.float() for x, _ in each]) @ weight.float().t() if operator == "ag_gemm" else sum(
        x.float() @ weight.float().t() for x, weight in each
    )
    own = full.chunk(ranks)[dist.get_rank()] if operator == "gemm_rs" else full
    two, eight = (torch.full((1,), value, device=device()) for value in (2.0, 8.0))
    for scale_x, scale_w, factor in ((two, two, 4), (two, two, 4), (two, eight, 16), (eight, eight, 64), (two, two, 4)):
        assert torch.equal(call(x, weight, scale_x=scale_x, scale_w=scale_w, out_dtype=FP32), own * factor)


@each_operator
def test_one_tensor_as_both_scales(operator):
    on_ranks(2, accepts_one_tensor_as_both_scales, operator)


def has_other_scales_on_each_rank(transport):
    ranks = dist.get_world_size()
    x, weight = torch.ones(20, 32, device=device()).to(E4M3), torch.ones(16, 32, device=device()).to(E4M3)
    config = None if transport is None else AgGemmConfig(transport=transport, tiles=Tiles(16, 16, 32, 1, 4, 1))
    for shape in ((), (1,), (1, 1)):
        own = torch.full(shape, 2.0 ** dist.get_rank(), device=device())
        y = tdkernels.ag_gemm(x, weight, scale_x=own, scale_w=torch.ones(1, device=device()), config=config)
        assert torch.equal(y[:, 0].float(), 32 * torch.exp2(torch.arange(ranks, device=device())).repeat_interleave(20))


@pytest.mark.parametrize("transport", [None, "push", "copy_engine", "one_shot"])
def test_ranks_may_have_different_tensor_wise_scales(transport):
    on_ranks(2, has_other_scales_on_each_rank, transport)


# ---- several nodes ----


def computes_on_nodes(operator, shape, scaling):
    on_nodes(1, computes, operator, [shape], scaling)
    if operator == "ag_gemm":
        on_nodes(1, gathers, (2, 3), 1, (4, 5), 48, scaling[0])


@needs_gpus
@pytest.mark.parametrize("operator, scaling", [("ag_gemm", "row"), ("gemm_rs", "block"), ("gemm_ar", "tensor")])
def test_several_nodes_use_torch(operator, scaling):
    on_ranks(2, computes_on_nodes, operator, (24, 40, 144), (scaling, scaling))


# ---- errors ----


def errors(operator):
    """Return (exception, pattern, case -> changed arguments) of invalid calls with x [16, 272] and weight [32, 272]."""
    blocks = torch.ones(16, 3, device=device())
    weight_blocks = torch.ones(1, 3, device=device())
    config_class = CONFIG_CLASSES[operator]
    deep = config_class(tiles=Tiles(16, 16, 256, 1, 4, 1))
    fnuz = torch.float8_e4m3fnuz
    found = [
        (ValueError, r"scale_x \[15, 1\] must have one element, the shape \[16, 1\] \(row-wise\) or \[16, 3\] "
         r"\(block-wise\) for x \[16, 272\]", lambda c: {"scale_x": c.scale_x[1:]}),
        (ValueError, r"scale_w \[1, 32\] must have one element, the shape \[32, 1\] \(row-wise\) or \[1, 3\] "
         r"\(block-wise\) for weight \[32, 272\]", lambda c: {"scale_w": c.scale_w.t()}),
        (ValueError, r"scale_x \[16, 3\] and scale_w \[32, 1\] must both be block-wise, or neither",
         lambda c: {"scale_x": blocks}),
        (ValueError, r"scale_x \[16, 1\] and scale_w \[1, 3\] must both be", lambda c: {"scale_w": weight_blocks}),
        (TypeError, "scale_x .*float64", lambda c: {"scale_x": c.scale_x.double()}),
        (TypeError, "scale_w .*bfloat16", lambda c: {"scale_w": c.scale_w.to(BF16)}),
        (TypeError, "scale_w .*list|scale_w must be a", lambda c: {"scale_w": [c.scale_w]}),
        (TypeError, "scale_x", lambda c: {"scale_x": 1.0}),
        (TypeError, "scale_x needs scale_w", lambda c: {"scale_w": None}),
        (TypeError, "scale_w needs scale_x", lambda c: {"scale_x": None}),
        (TypeError, "out_dtype is for float8 operands", lambda c: {"scale_x": None, "scale_w": None}),
        (TypeError, "use_fast_accum is for float8 operands",
         lambda c: {"scale_x": None, "scale_w": None, "out_dtype": None, "use_fast_accum": True}),
        (TypeError, r"x \[16, 272\] is torch.float8_e4m3fn; pass scale_x and scale_w",
         lambda c: {"scale_x": None, "scale_w": None, "out_dtype": None}),
        (TypeError, "x is torch.bfloat16; with scales float8_e4m3fn", lambda c: {"x": c.x.to(BF16)}),
        (TypeError, "weight is torch.float16; with scales float8_e4m3fn", lambda c: {"weight": c.weight.to(FP16)}),
        (TypeError, "out_dtype is torch.float8_e4m3fn; bfloat16", lambda c: {"out_dtype": E4M3}),
        (TypeError, "use_fast_accum must be True or False, not 1", lambda c: {"use_fast_accum": 1}),
        (TypeError, "bias is torch.float16 but out_dtype is torch.bfloat16", lambda c: {"bias": c.bias.to(FP16)}),
        (ValueError, r"K, the last dimension of x \[16, 264\], must be a multiple of 16 for float8",
         lambda c: {"x": c.x[:, :264], "weight": c.weight[:, :264]}),
        (ValueError, r"x \[16, 256\] and of weight \[32, 272\] must be the same K", lambda c: {"x": c.x[:, :256]}),
        (ValueError, r"bias \[31\]", lambda c: {"bias": c.bias[1:]}),
        (ValueError, "config cannot run: block_k must be at most 128 with block-wise scales, not 256",
         lambda c: {"scale_x": blocks, "scale_w": weight_blocks, "config": deep}),
        (RuntimeError, "operands with scales have no gradient", lambda c: {"scale_x": c.scale_x.requires_grad_()}),
        (RuntimeError, "operands with scales have no gradient", lambda c: {"bias": c.bias.clone().requires_grad_()}),
    ]
    if device().type == "cpu":
        found.append((TypeError, "x is torch.float8_e4m3fnuz; float8_e4m3fn and float8_e5m2 are supported on cpu",
                      lambda c: {"x": c.x.float().to(fnuz)}))
    if operator != "gemm_ar":
        found.append((TypeError, "operands with scales have no gradient, so main_grad must be None",
                      lambda c: {"main_grad": torch.zeros(32, 272, device=device())}))
        found.append((ValueError, r"dim must be 0", lambda c: {"dim": 2}))
    if operator == "gemm_rs":
        found.append((ValueError, r"dimension 0 of x \[15, 272\] must be divisible by the group's 2 ranks",
                      lambda c: {"x": c.x[1:], "scale_x": c.scale_x[1:]}))
    return [(error, f"{operator}: .*({pattern})", change) for error, pattern, change in found]


def rejects_invalid_arguments(operator):
    """Every rank raises the error before anything is launched, so the next call works."""
    case = ScaledCase(operator, 16, 32, 272)
    call = getattr(tdkernels, operator)
    for error, pattern, change in errors(operator):
        case = ScaledCase(operator, 16, 32, 272)
        arguments = {name: getattr(case, name) for name in ("x", "weight", "bias", "scale_x", "scale_w", "out_dtype")}
        with pytest.raises(error, match=pattern):
            call(**{**arguments, **change(case)})
    case = ScaledCase(operator, 16, 32, 272)
    case.check(case.run())


@each_operator
def test_errors(operator):
    on_ranks(2, rejects_invalid_arguments, operator)


def rejects_invalid_lists():
    x, weight, one = codes(4, 32, seed=0), codes(8, 32, seed=1), torch.ones(1, device=device())
    seven = torch.ones(7, 1, device=device())
    for error, pattern, weights, scales_w, options in (
        (TypeError, "ag_gemm: scale_w must be a list if weight is a list, and only then", [weight], one, {}),
        (TypeError, "ag_gemm: scale_w must be a list if weight is a list", weight, [one], {"return_gathered": True}),
        (ValueError, "ag_gemm: there are 2 weights but 1 tensors in scale_w", [weight] * 2, [one], {}),
        (ValueError, r"ag_gemm: scale_w \[7, 1\] must have one", [weight] * 2, [one, seven], {}),
        (TypeError, "ag_gemm: operands with scales have no gradient", [weight], [one], {"main_grad": [weight.float()]}),
        (TypeError, "ag_gemm: config", [weight], [one], {"config": GemmArConfig()}),
    ):
        with pytest.raises(error, match=pattern):
            tdkernels.ag_gemm(x, weights, scale_x=one, scale_w=scales_w, **options)


def test_errors_of_lists():
    on_ranks(2, rejects_invalid_lists)


def rejects_disagreement(operator):
    """Ranks that disagree on the scaling or the output dtype all raise an error, and the next call works."""
    case = ScaledCase(operator, 16, 32, 144)
    first = dist.get_rank() == 0
    call = getattr(tdkernels, operator)
    options = {"scale_x": case.scale_x, "scale_w": case.scale_w}
    with pytest.raises(ValueError, match=f"{operator}.*out_dtype"):
        call(case.x, case.weight, out_dtype=FP32 if first else FP16, **options)
    if first:
        options = {"scale_x": torch.ones(16, 2, device=device()), "scale_w": torch.ones(1, 2, device=device())}
    with pytest.raises(ValueError, match=f"{operator}.*scal"):
        call(case.x, case.weight, **options)
    case.check(case.run())


@each_operator
def test_ranks_that_disagree(operator):
    on_ranks(2, rejects_disagreement, operator)
