"""ColumnParallelLinear, RowParallelLinear and SwiGLU in float8, against their recipes in plain torch on one process."""

import copy
import itertools
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import tdkernels
from tdkernels.nn import ColumnParallelLinear, RowParallelLinear, SwiGLU, full_state_dict
from tests.nn.float8_recipe import close, draw, expect, relative_error, rows_of
from tests.support.ranks import device, on_ranks
from tests.support.subset import THOROUGH, pairs

S, B, H, I = 12, 3, 64, 128  # 36 rows, no multiple of 16; H / 4 and I / 4 are
SEQUENCES = [(False, 0), (True, 0), (True, 1)]  # (sequence_parallel, seq_dim)
RECIPES = ("rowwise", "tensorwise")
CLASSES = {"column": ColumnParallelLinear, "row": RowParallelLinear}


# ---- forward and gradients ----


def case_of(layer, recipe, dweight, parallel, seq_dim, dtype, weight_dtype, main_grad=False, config=None):
    """Compare y and all gradients of a layer with its recipe."""
    case = f"{layer} {recipe} {dweight=} {parallel=} {seq_dim=} {dtype} {weight_dtype} {main_grad=} {config}"
    rank, ranks = dist.get_rank(), dist.get_world_size()
    k, n = (H, I) if layer == "column" else (I, H)
    lead = (B, S) if seq_dim else (S, B)
    x, dy = draw(*lead, k, seed=1, dtype=dtype), draw(*lead, n, seed=2, dtype=dtype)
    whole = nn.Linear(k, n, device=device(), dtype=weight_dtype)
    with torch.no_grad():
        whole.weight.copy_(draw(n, k, seed=3, dtype=weight_dtype))
        whole.bias.copy_(draw(n, seed=4, dtype=torch.float32))
    module = CLASSES[layer].from_linear(
        whole, sequence_parallel=parallel, seq_dim=seq_dim, float8=recipe, float8_dweight=dweight, config=config
    )
    sequence = lambda one: one.chunk(ranks, seq_dim)[rank] if parallel else one  # noqa: E731
    channels = lambda one: one.chunk(ranks, -1)[rank]  # noqa: E731
    of_rows = lambda rows: rows_of(sequence(rows.view(*lead, -1)))  # noqa: E731
    own_x, own_dy = (sequence(x), channels(dy)) if layer == "column" else (channels(x), sequence(dy))
    own_x = own_x.clone().requires_grad_()
    if main_grad:
        module.weight.main_grad = torch.ones_like(module.weight, dtype=torch.float32)
    y = module(own_x)
    y.backward(own_dy)
    tdkernels.synchronize()
    dweight_recipe = recipe if dweight else None
    operands = rows_of(x), whole.weight.detach().cpu(), whole.bias.detach().cpu().to(dtype), rows_of(dy)
    expected_y, dx, weights_grad, dbias = expect(layer, *operands, recipe, dweight_recipe, rank, ranks, of_rows)
    assert y.dtype == own_x.grad.dtype == dtype and y.is_contiguous() and own_x.grad.shape == own_x.shape
    close("y", y.detach(), expected_y, case)
    close("dx", own_x.grad, dx, case)
    if main_grad:
        assert module.weight.grad is None
        weights_grad.value = weights_grad.value + 1
        close("main_grad", module.weight.main_grad, weights_grad, case)
    else:
        assert module.weight.grad.dtype == weight_dtype
        if weight_dtype == torch.float32 and dtype != weight_dtype:  # computed in the dtype of x, or in fp32
            close("dweight", module.weight.grad.to(dtype), weights_grad, case)
        else:
            close("dweight", module.weight.grad, weights_grad, case)
    assert module.bias.grad.dtype == weight_dtype
    close("dbias", module.bias.grad.to(dtype), (dbias.double().sum(0), dbias.double().abs().sum(0)), case)


def layers_match(layers, recipes, dweights, dtypes, sequences=SEQUENCES):
    for layer, recipe, dweight, (parallel, seq_dim) in itertools.product(layers, recipes, dweights, sequences):
        for dtype, weight_dtype in dtypes:
            case_of(layer, recipe, dweight, parallel, seq_dim, dtype, weight_dtype)


FP32, BF16, MIXED = (torch.float32,) * 2, (torch.bfloat16,) * 2, (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("layer", CLASSES)
def test_layers_equal_their_recipe(layer, recipe):
    on_ranks(2, layers_match, [layer], [recipe], [False, True], [FP32, BF16])


def test_on_other_numbers_of_ranks():
    on_ranks(1, layers_match, CLASSES, RECIPES, [False, True] if THOROUGH else [True], [BF16], SEQUENCES[:2])
    on_ranks(4, layers_match, CLASSES, ["tensorwise"], [True], [FP32], SEQUENCES[2:])


def dweight_is_added_to_main_grad():
    for layer, recipe, dweight, parallel in itertools.product(CLASSES, RECIPES, (False, True), (False, True)):
        case_of(layer, recipe, dweight, parallel, 0, *MIXED, main_grad=True)
    layers_match(CLASSES, ["rowwise"], [False, True], [MIXED], SEQUENCES[1:])


def test_main_grad_and_fp32_weights():
    on_ranks(2, dweight_is_added_to_main_grad)


def uses_given_configs():
    by_torch = {
        ("column", True): tdkernels.AgGemmConfig(method="torch"),
        ("row", True): tdkernels.GemmRsConfig(method="torch"),
        ("column", False): tdkernels.GemmArConfig(method="torch"),
        ("row", False): tdkernels.GemmArConfig(method="torch"),
    }
    fused = {
        ("column", False): tdkernels.GemmArConfig(exchange="one_shot", split_k=2),
        ("row", False): tdkernels.GemmArConfig(exchange="one_shot", split_k=2),
        ("column", True): tdkernels.AgGemmConfig(method="parts", pieces=2),
        ("row", True): tdkernels.GemmRsConfig(method="parts", pieces=2),
    }
    for configs, (layer, parallel), dweight in itertools.product((by_torch, fused), by_torch, (False, True)):
        case_of(layer, "rowwise", dweight, parallel, int(parallel), *BF16, config=configs[layer, parallel])
        case_of(layer, "tensorwise", dweight, parallel, 0, *FP32, config=configs[layer, parallel])


def test_given_configs():
    on_ranks(2, uses_given_configs)


# ---- compared with GEMMs that are not quantized ----


def is_near_unquantized():
    """Each GEMM differs by the rounding errors of float8, about 2.6 % per e4m3 operand and 5 % per e5m2 operand."""
    for parallel, recipe, dweight in itertools.product((False, True), RECIPES, (False, True)):
        torch.manual_seed(0)
        options = {"sequence_parallel": parallel, "device": device(), "dtype": torch.bfloat16}
        plain = ColumnParallelLinear(H, I, **options), RowParallelLinear(I, H, **options)
        for layer in plain:
            k, n = layer.weight.shape[1], layer.weight.shape[0]
            other = type(layer)(
                layer.in_features, layer.out_features, float8=recipe, float8_dweight=dweight, **options
            )
            other.load_state_dict(layer.state_dict())
            x, lead = torch.randn(S, B, k, device=device()).bfloat16(), S
            if parallel:
                ranks = dist.get_world_size()
                lead = S * ranks if isinstance(layer, ColumnParallelLinear) else S // ranks
            dy = torch.randn(lead, B, n, device=device()).bfloat16()
            found = []
            for one in (other, layer):
                own_x = x.clone().requires_grad_()
                y = one(own_x)
                y.backward(dy)
                found.append({"y": y.detach(), "dx": own_x.grad, "dweight": one.weight.grad})
                assert torch.equal(one.bias.grad, found[0].setdefault("dbias", one.bias.grad))
            del found[0]["dbias"]
            for name, value in found[1].items():
                error = relative_error(found[0][name], value)
                least = 0.0 if name == "dweight" and not dweight else 0.02
                most = 1e-6 if not least else 0.075 if recipe == "tensorwise" and name != "y" else 0.05
                assert least <= error <= most, f"{name}: {error}, {recipe} {parallel=} {dweight=} {layer}"


def test_near_unquantized():
    on_ranks(2, is_near_unquantized)


# ---- training ----


def mlp(recipe, dweight=False, cls=None, **options):
    torch.manual_seed(0)  # equal replicated biases, and the same parameters for all recipes
    options |= {"device": device(), "dtype": torch.float32, "float8": recipe, "float8_dweight": dweight}
    if cls is not None:
        return cls(H, I, **options)
    return nn.Sequential(ColumnParallelLinear(H, I, **options), nn.GELU(), RowParallelLinear(I, H, **options))


def losses_of(model, parallel):
    """Return the losses of 8 steps under autocast on targets of a fixed random MLP."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(48, H, generator=generator)
    target = torch.tanh(x @ torch.randn(H, H, generator=generator) / 8)
    x, target = ((one.chunk(ranks)[rank] if parallel else one).to(device()) for one in (x, target))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    losses = []
    for _ in range(8):
        with torch.autocast(device().type, torch.bfloat16):
            y = model(x)
        loss = (y.float() - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        whole = loss.detach().clone()
        if parallel:
            dist.all_reduce(whole)
            whole /= ranks
        losses.append(whole.item())
    tdkernels.synchronize()
    return losses


def trains(parallel, settings, cls=None):
    """The loss falls to a third, and stays within 5 % of the initial loss of the one in bf16."""
    plain = losses_of(mlp(None, cls=cls, sequence_parallel=parallel), parallel)
    assert plain[-1] < plain[0] / 3, plain
    for recipe, dweight in settings:
        losses = losses_of(mlp(recipe, dweight, cls, sequence_parallel=parallel), parallel)
        assert losses[-1] < losses[0] / 3, f"{recipe} {dweight=}: {losses}"
        distance = max(abs(one - other) for one, other in zip(losses, plain, strict=True))
        assert 0 < distance < 0.05 * plain[0], f"{recipe} {dweight=}: {distance} of {plain[0]}"


def test_training():
    on_ranks(2, trains, True, [("tensorwise", True), ("rowwise", False)][: 1 + THOROUGH])
    on_ranks(2, trains, False, [("rowwise", True), ("tensorwise", False)][: 1 + THOROUGH], SwiGLU)


# ---- torch.compile, checkpointing, autocast, frozen parameters ----


def results_of(module, x, dy, run=None):
    x = x.detach().clone().requires_grad_()
    module.zero_grad()
    y = (module if run is None else run)(x)
    y.backward(dy)
    tdkernels.synchronize()
    return {"y": y.detach(), "x": x.grad, **{name: one.grad for name, one in module.named_parameters()}}


def equal(got, expected, case):
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(got[name], value), f"{name} with {case}"


def runs_under_transforms(recipe, dweight, parallel):
    torch._dynamo.reset()
    torch.manual_seed(0)
    options = {"sequence_parallel": parallel, "seq_dim": 1, "float8": recipe, "float8_dweight": dweight}
    options |= {"device": device(), "dtype": torch.bfloat16}
    up, down = ColumnParallelLinear(H, I, **options), RowParallelLinear(I, H, **options)
    block = nn.Sequential(up, nn.ReLU(), down, SwiGLU(H, I, bias=True, **options))
    x, dy = (draw(B, 4, H, seed=seed, dtype=torch.bfloat16) / 8 for seed in (1, 2))
    plain = results_of(block, x, dy)
    equal(results_of(block, x, dy, lambda x: checkpoint(block, x, use_reentrant=False)), plain, "checkpoint")
    equal(results_of(block, x, dy, torch.compile(block, fullgraph=True, backend="aot_eager")), plain, "compile")
    with torch.no_grad():
        assert torch.equal(block(x), plain["y"])
    assert f"float8='{recipe}'" in repr(block) and ("float8_dweight=True" in repr(block)) == dweight

    # A SwiGLU is its two layers, and checkpoints are those of layers without float8.
    gate, up = block[3].gate_up(x).chunk(2, -1)
    assert torch.equal(block[3](x), block[3].down(nn.functional.silu(gate) * up))
    unquantized = SwiGLU(H, I, bias=True, **options | {"float8": None, "float8_dweight": False})
    unquantized.load_state_dict(full_state_dict(block[3]))
    equal(unquantized.state_dict(), block[3].state_dict(), "state dict")

    # Gradients that are not needed.
    for frozen in ("weight", "bias", "x"):
        layer = copy.deepcopy(block[0])
        given = x.clone().requires_grad_(frozen != "x")
        if frozen != "x":
            getattr(layer, frozen).requires_grad_(False)
        y = layer(given)
        y.backward(torch.ones_like(y))
        found = {"x": given.grad, "weight": layer.weight.grad, "bias": layer.bias.grad}
        assert [name for name, grad in found.items() if grad is None] == [frozen]


@pytest.mark.parametrize("recipe, dweight, parallel", [("rowwise", False, True), ("tensorwise", True, False)])
def test_transforms(recipe, dweight, parallel):
    on_ranks(2, runs_under_transforms, recipe, dweight, parallel)


def converts_under_autocast():
    """fp32 parameters are quantized directly; x and the bias are rounded to bf16 first."""
    for parallel, dweight, recipe in pairs((False, True), (False, True), RECIPES, everything=THOROUGH):
        layers = mlp(recipe, dweight, sequence_parallel=parallel)
        x, dy = (draw(8, H, seed=seed, dtype=torch.bfloat16) for seed in (1, 2))
        expected = results_of(layers, x, dy)
        with torch.autocast(device().type, torch.bfloat16):
            got = results_of(layers, x.float(), dy)
        assert got["x"].dtype == torch.float32 and got["y"].dtype == torch.bfloat16
        got["x"] = got["x"].bfloat16()
        equal(got, expected, f"{parallel=} {recipe} {dweight=}")


def test_autocast():
    on_ranks(2, converts_under_autocast)


def accepts_empty_and_special_values():
    for layer, recipe, dweight, parallel in pairs([*CLASSES], RECIPES, *[(False, True)] * 2, everything=THOROUGH):
        k, n = (H, I) if layer == "column" else (I, H)
        module = CLASSES[layer](
            k, n, float8=recipe, float8_dweight=dweight, sequence_parallel=parallel, device=device(),
            dtype=torch.bfloat16,
        )
        size = module.weight.shape[1]
        for rows in (0, 8):
            x = torch.zeros(rows, size, device=device(), dtype=torch.bfloat16, requires_grad=True)
            y = module(x)
            y.sum().backward()
            assert x.grad.shape == x.shape and module.weight.grad.isfinite().all()
            assert not module.weight.grad.any()
            assert rows == 0 or torch.equal(y, module.bias.expand_as(y))
        x = torch.ones(8, size, device=device(), dtype=torch.bfloat16)
        x[0, 0] = torch.nan
        assert module(x).isnan().any() or parallel and dist.get_rank() > 0


def test_special_values():
    on_ranks(2, accepts_empty_and_special_values)


SAVED = ("rowwise", False), ("tensorwise", False), ("tensorwise", True)  # recipe, and whether codes are saved


def opchecks():
    group = dist.group.WORLD.group_name
    tests = ("test_schema", "test_faketensor")
    for layer, (recipe, codes), dim in itertools.product(CLASSES, SAVED, (-1, 0, 1)):
        op = getattr(torch.ops.tdkernels, f"float8_{layer}_linear").default
        back = getattr(torch.ops.tdkernels, f"float8_{layer}_linear_backward").default
        x, weight, bias = draw(2, 4, 32, seed=1, dtype=torch.bfloat16), *map(torch.Tensor.bfloat16, (
            draw(48, 32, seed=2, dtype=torch.float32), draw(48, seed=3, dtype=torch.float32)))
        call = x, weight, bias, recipe, dim, codes, group, ""
        torch.library.opcheck(op, call, test_utils=tests)
        y, kept, *scales = op(*call)
        for main_grads in ([], [torch.ones_like(weight, dtype=torch.float32)]):
            saved = kept if codes else x
            needs = True, True, True
            arguments = y, saved, weight, *scales, main_grads, *needs, recipe, dim, codes, group, ""
            torch.library.opcheck(back, arguments, test_utils=tests[codes:])  # test_schema multiplies the operands


def test_opcheck():
    on_ranks(2, opchecks)


# ---- docs/guides/fp8.md ----


def runs_page(blocks):
    x, weight = draw(16, H, seed=1, dtype=torch.bfloat16), draw(32, H, seed=2, dtype=torch.bfloat16)
    names = {"torch": torch, "tdkernels": tdkernels, "device": device(), "x": x, "weight": weight}
    for block in blocks:
        exec(block, names)
    ranks = dist.get_world_size()
    assert names["y"].shape == (16 * ranks, 32) and names["y"].dtype == torch.bfloat16
    assert relative_error(names["y"], tdkernels.ag_gemm(x, weight)) < 0.05
    assert all(layer.weight.grad.isfinite().all() for layer in (names["mlp"][0], names["mlp"][2]))


def test_page():
    page = Path(__file__).parents[2].joinpath("docs/guides/fp8.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) >= 3
    on_ranks(2, runs_page, [block.replace("4096", "64").replace("1024", "128") for block in blocks[:3]])


# ---- errors ----


def rejects():
    for call, error, message in (
        (lambda: ColumnParallelLinear(H, I, float8="row"), ValueError, "ColumnParallelLinear: float8 must be None, "),
        (lambda: RowParallelLinear(H, I, float8_dweight=True), ValueError, "float8_dweight=True needs float8"),
        (lambda: RowParallelLinear(H, I, float8="rowwise", float8_dweight=1), TypeError, "must be True or False"),
        (
            lambda: ColumnParallelLinear(H, 40, float8="rowwise"), ValueError,
            "ColumnParallelLinear: this rank's number of output features 20 must be a multiple of 16 with float8=",
        ),
        (lambda: RowParallelLinear(16, 32, float8="rowwise"), ValueError, "number of input features 8 must be a"),
        (lambda: SwiGLU(H, 16, float8="tensorwise"), ValueError, "RowParallelLinear: this rank's number of input"),
    ):
        with pytest.raises(error, match=message):
            call()
    options = {"float8": "rowwise", "device": device()}
    x = draw(8, H, seed=1, dtype=torch.float32)
    module = ColumnParallelLinear(H, I, sequence_parallel=True, config=tdkernels.GemmArConfig(), **options)
    with pytest.raises(TypeError, match="ColumnParallelLinear: config must be AgGemmConfig or None, not GemmArConfig"):
        module(x)
    module = RowParallelLinear(H, I, **options)
    with pytest.raises(ValueError, match=r"last dimension of x \[8, 64\] and of weight \[128, 32\] must be the same K"):
        module(x)
    module.weight.main_grad = torch.ones_like(module.weight, dtype=torch.float32)
    module(x[:, :32].contiguous())
    module.weight.main_grad = torch.ones(4, 4, device=device())
    with pytest.raises(ValueError, match=r"RowParallelLinear: main_grad \[4, 4\] must have the shape of weight"):
        module(x[:, :32].contiguous())
    module = module.bfloat16()
    module.weight.main_grad = torch.ones_like(module.weight)
    with pytest.raises(TypeError, match="main_grad is torch.bfloat16; with float8 it must be float32 or as x"):
        module(x[:, :32].contiguous())
    y = ColumnParallelLinear(H, I, **options)(x.requires_grad_())
    with pytest.raises(RuntimeError, match="ColumnParallelLinear: second derivatives"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


def test_errors():
    on_ranks(2, rejects)
