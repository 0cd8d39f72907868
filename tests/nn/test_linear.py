"""ColumnParallelLinear, RowParallelLinear and SwiGLU against the unsharded layers, and their checkpoints."""

import copy
import functools
import itertools
import re

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import Linear
from torch.utils.checkpoint import checkpoint

import tdkernels
from tdkernels.nn import ColumnParallelLinear, RowParallelLinear, SwiGLU, full_state_dict
from tests.nn.moe_modules import compare
from tests.support.ranks import device, fresh_ranks, on_ranks

S, B, H, I = 6, 2, 6, 12  # S, H and I are divisible by 1, 2 and 3 ranks
SEQUENCES = [(False, 0), (True, 0), (True, 1)]  # (sequence_parallel, seq_dim)
LLAMA, HUGGING_FACE = ("w1", "w3", "w2"), ("gate_proj", "up_proj", "down_proj")


# ---- unsharded layers ----


def draw(*shape, seed=0, scale=1.0):
    """Return integers from -2 to 2 times ``scale``, the same on all ranks, so that sums of products are exact."""
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randint(-2, 3, shape, generator=generator)).to(device())


def own(x, dim=0, group=None):
    return x.chunk(dist.get_world_size(group), dim)[dist.get_rank(group)]


def linear(in_features, out_features, bias=True, seed=0, scale=1.0):
    """Return a torch.nn.Linear, the same on all ranks."""
    layer = Linear(in_features, out_features, bias, device=device())
    with torch.no_grad():
        for number, parameter in enumerate(layer.parameters()):
            parameter.copy_(draw(*parameter.shape, seed=10 * seed + number, scale=scale))
    return layer


class Mlp(torch.nn.Module):
    """The SwiGLU MLP of Hugging Face's Llama, or of torchtitan."""

    def __init__(self, bias=False, names=HUGGING_FACE):
        super().__init__()
        sizes = (H, I), (H, I), (I, H)
        self.names = names
        for seed, (name, (k, n)) in enumerate(zip(names, sizes, strict=True)):
            self.add_module(name, linear(k, n, bias, seed=seed + 1, scale=0.25))

    def forward(self, x):
        gate, up, down = (getattr(self, name) for name in self.names)
        return down(F.silu(gate(x)) * up(x))


def results_of(module, x, dy, run=None):
    """Return y, dx and the gradients of all parameters, by name."""
    x = x.detach().clone().requires_grad_()
    module.zero_grad()
    y = (module if run is None else run)(x)
    y.backward(dy)
    tdkernels.synchronize()
    return {"y": y.detach(), "x": x.grad, **{name: one.grad for name, one in module.named_parameters()}}


def operands(seq_dim, in_features, out_features, scale=1.0):
    lead = (B, S) if seq_dim else (S, B)
    return draw(*lead, in_features, seed=100, scale=scale), draw(*lead, out_features, seed=101, scale=scale)


# ---- forward and gradients ----


def equal(got, expected, case):
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(got[name], value), f"{name} with {case}"


def column_linears_match(biases, gathered=(False, True)):
    for (parallel, seq_dim), gather, bias in itertools.product(SEQUENCES, gathered, biases):
        case = dict(sequence_parallel=parallel, seq_dim=seq_dim, gather_output=gather)
        whole = linear(H, I, bias)
        x, dy = operands(seq_dim, H, I)
        expected = results_of(whole, x, dy)
        module = ColumnParallelLinear.from_linear(whole, **case)
        got = results_of(module, own(x, seq_dim) if parallel else x, dy if gather else own(dy, -1))
        assert got["y"].is_contiguous()
        expected["y"] = expected["y"] if gather else own(expected["y"], -1)
        expected["x"] = own(expected["x"], seq_dim) if parallel else expected["x"]
        for name, _ in whole.named_parameters():
            expected[name] = own(expected[name])
        equal(got, expected, case)


def row_linears_match(biases, inputs=(True, False)):
    for (parallel, seq_dim), divided, bias in itertools.product(SEQUENCES, inputs, biases):
        case = dict(sequence_parallel=parallel, seq_dim=seq_dim, input_is_parallel=divided)
        whole = linear(I, H, bias)
        x, dy = operands(seq_dim, I, H)
        expected = results_of(whole, x, dy)
        module = RowParallelLinear.from_linear(whole, **case)
        got = results_of(module, own(x, -1) if divided else x, own(dy, seq_dim) if parallel else dy)
        expected["y"] = own(expected["y"], seq_dim) if parallel else expected["y"]
        expected["x"] = own(expected["x"], -1) if divided else expected["x"]
        expected["weight"] = own(expected["weight"], 1)
        equal(got, expected, case)


@pytest.mark.parametrize("world_size, biases", [(1, [True]), (2, [True]), (3, [False])])
def test_linear_forward_and_gradients(world_size, biases):
    on_ranks(world_size, column_linears_match, biases)
    on_ranks(world_size, row_linears_match, biases)


def gate_and_up(gate, up):
    return torch.cat([own(gate), own(up)])


def swiglus_match(biases):
    for (parallel, seq_dim), bias in itertools.product(SEQUENCES, biases):
        whole = Mlp(bias)
        x, dy = operands(seq_dim, H, H, scale=0.25)
        low, exact = results_of(whole, x, dy), results_of(copy.deepcopy(whole).double(), x.double(), dy.double())
        module = SwiGLU.from_linears(*whole.children(), sequence_parallel=parallel, seq_dim=seq_dim)
        part = functools.partial(own, dim=seq_dim) if parallel else lambda tensor: tensor
        got = results_of(module, part(x), part(dy))
        kinds = ("weight", "bias") if bias else ("weight",)
        assert got.keys() == {"y", "x", *(f"{layer}.{kind}" for layer in ("gate_up", "down") for kind in kinds)}
        for name, value in got.items():
            expected = [swiglu_part(results, name, part) for results in (exact, low)]
            compare(f"{name} with {parallel=}, {seq_dim=}", value, *expected)


def swiglu_part(whole, name, part):
    """Return this rank's part of a result of ``Mlp``; ``name`` is that of SwiGLU."""
    layer, _, kind = name.partition(".")
    if layer == "gate_up":
        return gate_and_up(whole[f"gate_proj.{kind}"], whole[f"up_proj.{kind}"])
    if layer == "down":
        return own(whole["down_proj.weight"], 1) if kind == "weight" else whole["down_proj.bias"]
    return part(whole[name])


@pytest.mark.parametrize("world_size, biases", [(2, [False, True]), (3, [True])])
def test_swiglu_forward_and_gradients(world_size, biases):
    on_ranks(world_size, swiglus_match, biases)


# ---- checkpoints ----


def model(bias=True, kind="whole", **options):
    """Return a model with all modules; ``kind``: "whole", "parallel", or "empty" with other parameters."""
    whole = torch.nn.ModuleDict(
        {"norm": torch.nn.LayerNorm(H, device=device()), "up": linear(H, I, bias), "down": linear(I, H, bias)}
    )
    whole["mlp"] = Mlp(bias)
    if kind == "whole":
        return whole
    replaced = {
        "norm": copy.deepcopy(whole["norm"]), "up": ColumnParallelLinear.from_linear(whole["up"], **options),
        "down": RowParallelLinear.from_linear(whole["down"], **options),
        "mlp": SwiGLU.from_linears(*whole["mlp"].children(), **options),
    }
    parallel = torch.nn.ModuleDict(replaced)
    if kind == "empty":
        with torch.no_grad():
            for parameter in parallel.parameters():
                parameter.fill_(7.0)
    return parallel


def same_state(got, expected):
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(got[name], value), name


def saves_and_loads(bias):
    whole = model(bias).state_dict()
    parallel = model(bias, "parallel")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    assert f"rank {rank} of {world_size}" in repr(parallel) and "sequence_parallel" not in repr(parallel)
    same_state(full_state_dict(parallel), whole)
    pointers = [tensor.data_ptr() for tensor in full_state_dict(parallel["mlp"]).values()]
    assert len({*pointers}) == len(pointers)

    # Complete parameters, then this rank's parts.
    loaded = model(bias, "empty")
    for state in (whole, parallel.state_dict()):
        before = {**state}
        loaded.load_state_dict(state)
        assert all(state[name] is tensor for name, tensor in before.items())
        same_state(loaded.state_dict(), parallel.state_dict())
        loaded = model(bias, "empty")

    # Other names of the layers of a SwiGLU.
    mlp = Mlp(bias, LLAMA)
    loaded["mlp"].load_state_dict(mlp.state_dict())
    same_state(loaded["mlp"].state_dict(), parallel["mlp"].state_dict())
    same_state(full_state_dict(loaded["mlp"]), Mlp(bias).state_dict())

    # The names of checkpoint_wrapper are not in the state dict.
    wrapped = model(bias, "empty")
    for name in ("up", "mlp"):
        wrapped[name] = checkpoint_wrapper(wrapped[name])
    wrapped.load_state_dict(whole)
    same_state(full_state_dict(wrapped), whole)


def fills_meta_modules():
    expected = model(kind="parallel").state_dict()
    with torch.device("meta"):
        on_meta = torch.nn.ModuleDict(
            {"up": ColumnParallelLinear(H, I), "down": RowParallelLinear(I, H), "mlp": SwiGLU(H, I, bias=True)}
        )
    whole = {name: value for name, value in model().state_dict().items() if not name.startswith("norm")}
    assigned = copy.deepcopy(on_meta)
    assigned.load_state_dict(whole, assign=True)
    on_meta.to_empty(device=device())
    on_meta.load_state_dict(whole)
    for filled in (assigned.state_dict(), on_meta.state_dict()):
        same_state(filled, {name: value for name, value in expected.items() if not name.startswith("norm")})
    # An assigned weight does not keep the memory of the complete one.
    assert assigned["up"].weight.untyped_storage().nbytes() == 4 * H * I // dist.get_world_size()

    layer = Linear(H, I, device="meta", dtype=torch.bfloat16).eval()
    layer.bias.requires_grad_(False)
    module = ColumnParallelLinear.from_linear(layer)
    assert module.weight.is_meta and module.weight.dtype == torch.bfloat16 and not module.training
    assert module.weight.requires_grad and not module.bias.requires_grad


@pytest.mark.parametrize("world_size, bias", [(1, True), (2, True), (3, False)])
def test_checkpoints(world_size, bias):
    on_ranks(world_size, saves_and_loads, bias)
    on_ranks(world_size, fills_meta_modules)


def rejects_invalid_checkpoints():
    parallel, whole = model(kind="parallel"), model().state_dict()
    before = {name: value.clone() for name, value in parallel.state_dict().items()}
    up, gate = "mlp.up_proj.weight", "mlp.gate_proj.weight"
    for state, message in (
        (whole | {"up.weight": whole["up.weight"][:-1]}, r"size mismatch for up.weight: .*\[11, 6\].*\[6, 6\]"),
        (whole | {"down.weight": whole["down.weight"].t()}, r"size mismatch for down.weight: .*\[12, 6\].*\[6, 6\]"),
        (whole | {up: whole[up][:-1]}, rf"size mismatch for {re.escape(up)}: it is \[11, 6\] .*, \[12, 6\] in the"),
        ({name: value for name, value in whole.items() if name != gate}, rf'Missing key.*: "{re.escape(gate)}"\.'),
        ({name: value for name, value in whole.items() if "proj" not in name}, 'Missing key.*"mlp.gate_up.weight", '),
        (whole | {"mlp.w4.weight": whole[up]}, 'Unexpected key.*"mlp.w4.weight"'),
    ):
        with pytest.raises(RuntimeError, match=message):
            parallel.load_state_dict(state)
        same_state({"w": parallel["mlp"].gate_up.weight}, {"w": before["mlp.gate_up.weight"]})
    with pytest.raises(RuntimeError, match='Unexpected key.*"gate_proj.bias"'):
        SwiGLU(H, I, device=device()).load_state_dict(Mlp(bias=True).state_dict())


def rejects_invalid_arguments():
    layer = Linear(H, I)
    for call, error, message in (
        (lambda: ColumnParallelLinear(4, 7), ValueError, "ColumnParallelLinear: out_features 7 .* group's 2 ranks"),
        (lambda: RowParallelLinear(7, 4), ValueError, "RowParallelLinear: in_features 7 must be divisible by"),
        (lambda: SwiGLU(4, 7), ValueError, "SwiGLU: intermediate 7 must be divisible by"),
        (lambda: ColumnParallelLinear(4, 6, seq_dim=2), ValueError, "ColumnParallelLinear: seq_dim must be 0 or 1"),
        (lambda: RowParallelLinear(6, 4, seq_dim=-1), ValueError, "RowParallelLinear: seq_dim must be 0 or 1, not -1"),
        (lambda: SwiGLU(4, 6, seq_dim=2), ValueError, "SwiGLU: seq_dim must be 0 or 1, not 2"),
        (
            lambda: ColumnParallelLinear.from_linear(torch.nn.Identity()), TypeError,
            "ColumnParallelLinear.from_linear: linear must be a torch.nn.Linear, not Identity",
        ),
        (lambda: RowParallelLinear.from_linear(Scaled(6, 6)), TypeError, "linear is a Scaled with another forward"),
        (lambda: SwiGLU.from_linears(layer, layer, layer), ValueError, "from_linears: gate and up must have weights"),
        (lambda: SwiGLU.from_linears(layer, layer, Linear(I, H, False)), ValueError, "must all have a bias, or none"),
        (
            lambda: SwiGLU.from_linears(layer, Linear(H, I).bfloat16(), Linear(I, H)), ValueError,
            "the weight of gate and up must have the same dtype",
        ),
    ):
        with pytest.raises(error, match=message):
            call()
    module = ColumnParallelLinear(H, I, config=tdkernels.GemmArConfig(), sequence_parallel=True, device=device())
    with pytest.raises(TypeError, match="ag_gemm: config must be an AgGemmConfig or None, not GemmArConfig"):
        module(draw(S, H))


class Scaled(Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def test_errors():
    on_ranks(2, rejects_invalid_checkpoints)
    on_ranks(2, rejects_invalid_arguments)


def initializes_parts():
    """Ranks with the same seed get different parts, and equal replicated biases."""
    torch.manual_seed(0)
    modules = ColumnParallelLinear(400, 60), RowParallelLinear(60, 400), SwiGLU(400, 60)
    parameters = [p.detach() for module in modules for p in module.parameters()]
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, parameters)
    for others in parts[1:]:
        same = [torch.equal(*pair) for pair in zip(others, parts[0], strict=True)]
        assert same == [False, False, False, True, False, False]  # the bias of the second module
    for parameter, fan_in in zip(parameters, (400, 400, 60, 60, 400, 60), strict=True):
        assert 0.8 * fan_in**-0.5 < parameter.abs().max() <= fan_in**-0.5


# ---- autocast, checkpointing, torch.compile, copies, FSDP2 ----


class Block(torch.nn.Module):
    """Two linear layers and a SwiGLU, with and without sequence parallelism; input and output are [B, S / W, H]."""

    def __init__(self, whole, group=None):
        super().__init__()
        options = {"sequence_parallel": True, "seq_dim": 1, "group": group}
        self.up = ColumnParallelLinear.from_linear(whole["up"], **options)
        self.down = RowParallelLinear.from_linear(whole["down"], **options)
        self.mlp = SwiGLU.from_linears(*whole["mlp"].children(), **options)

    def forward(self, x):
        return self.mlp(self.down(torch.relu(self.up(x))))


def sequential(whole):
    return torch.nn.Sequential(whole["up"], torch.nn.ReLU(), whole["down"], whole["mlp"])


def runs_under_transforms():
    whole = model()
    x, dy = operands(1, H, H, scale=0.25)
    block, x, dy = Block(whole), own(x, 1), own(dy, 1)
    plain = results_of(block, x, dy)
    equal(results_of(block, x, dy, lambda x: checkpoint(block, x, use_reentrant=False)), plain, "checkpoint")
    equal(results_of(block, x, dy, torch.compile(block, fullgraph=True, backend="aot_eager")), plain, "compile")

    config = tdkernels.AgGemmConfig(), tdkernels.GemmRsConfig()
    mlp = SwiGLU.from_linears(*whole["mlp"].children(), sequence_parallel=True, seq_dim=1, config=config)
    assert (mlp.gate_up.config, mlp.down.config) == config
    torch.testing.assert_close(results_of(mlp, x, dy), results_of(block.mlp, x, dy))

    copied = copy.deepcopy(torch.nn.Sequential(block))[0]
    assert copied.mlp.group is block.mlp.group is copied.mlp.down.group
    copied.load_state_dict(copied.state_dict())
    equal(results_of(copied, x, dy), plain, "deepcopy")
    copied.mlp.load_state_dict({name: 2 * one for name, one in whole["mlp"].state_dict().items()})
    assert torch.equal(copied.mlp.down.weight, 2 * block.mlp.down.weight)

    with torch.autocast(device().type, torch.bfloat16):
        low = results_of(block, x, dy.bfloat16())
    assert low.pop("y").dtype == torch.bfloat16
    for name, value in low.items():
        assert value.dtype == torch.float32
        torch.testing.assert_close(value, plain[name], rtol=0.1, atol=0.1 * plain[name].abs().max().item())


def compiles_other_options():
    """torch.compile without sequence parallelism, with gather_output and a divided input."""
    whole = model()
    up = ColumnParallelLinear.from_linear(whole["up"], gather_output=True)
    down = RowParallelLinear.from_linear(whole["down"], input_is_parallel=False)
    layers = torch.nn.Sequential(up, down)
    x, dy = operands(0, H, H)
    compiled = torch.compile(layers, fullgraph=True, backend="aot_eager")
    equal(results_of(layers, x, dy, compiled), results_of(layers, x, dy), "compile")


def test_transforms():
    on_ranks(2, runs_under_transforms)
    on_ranks(2, compiles_other_options)
    on_ranks(2, initializes_parts)


def runs_with_fsdp(dp, tp):
    """Use FSDP2 over dp and tensor parallelism over tp."""
    mesh = init_device_mesh(device().type, (dp, tp), mesh_dim_names=("dp", "tp"))
    trains_with_fsdp(mesh["dp"], mesh["tp"].get_group())
    loads_with_fsdp(mesh["dp"], mesh["tp"].get_group())


def trains_with_fsdp(dp, group):
    """Compare a step with the unsharded model."""
    whole, replica = model(), dp.get_local_rank()
    xs, dys = draw(dp.size(), B, S, H, seed=1, scale=0.25), draw(dp.size(), B, S, H, seed=2, scale=0.25)
    unsharded = sequential(copy.deepcopy(whole))
    unsharded(xs.flatten(0, 1)).backward(dys.flatten(0, 1) / dp.size())  # FSDP averages over dp
    block = fully_shard(Block(whole, group), mesh=dp)
    y = block(own(xs[replica], 1, group))
    y.backward(own(dys[replica], 1, group))
    tdkernels.synchronize()
    for layers in (block, unsharded):
        torch.optim.SGD(layers.parameters(), lr=0.125).step()
    trained = torch.nn.ModuleDict({"up": unsharded[0], "down": unsharded[2], "mlp": unsharded[3]})
    torch.testing.assert_close(dict(full_state_dict(block)), dict(trained.state_dict()))


def loads_with_fsdp(dp, group):
    """Fill modules on the meta device after fully_shard: by reset_parameters, and from complete parameters."""
    whole = model()
    state = {name: value for name, value in whole.state_dict().items() if not name.startswith("norm")}
    block = fully_shard(Block(whole.to("meta"), group), mesh=dp)
    block.to_empty(device=device())
    torch.manual_seed(0)
    for layer in (block.up, block.mlp.down):
        layer.reset_parameters()
    weight, bias = (one.full_tensor().cpu() for one in (block.up.weight, block.mlp.down.bias))
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (group.rank(), weight, bias))
    for rank, its_weight, its_bias in gathered:
        assert torch.equal(its_weight, weight) == (rank == group.rank()) and torch.equal(its_bias, bias)

    moe = tdkernels.nn.EPMoE(tdkernels.nn.Router(H, 4, 2, device="meta"), I, group=group, device="meta")
    fully_shard(moe, mesh=dp).to_empty(device=device())
    torch.manual_seed(0)
    moe.reset_parameters()
    experts = [None] * dist.get_world_size()
    dist.all_gather_object(experts, (group.rank(), moe.w_down.full_tensor().cpu()))
    for rank, its_experts in experts:
        assert torch.equal(its_experts, experts[dist.get_rank()][1]) == (rank == group.rank())

    block.load_state_dict(state)
    same_state(full_state_dict(block), state)
    changed = {name: value + 1 for name, value in state.items()}
    set_model_state_dict(block, dict(changed), options=StateDictOptions(full_state_dict=True))
    same_state(full_state_dict(block), changed)


def test_fsdp():
    with fresh_ranks(4) as ranks:  # torch caches the groups of a mesh, so they stay until the processes end
        ranks.run(runs_with_fsdp, 2, 2)
