"""tdkernels.nn.parallel against torch's parallelize_module: results, gradients, checkpoints, reports."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor import parallel as torch_parallel
from torch.distributed.tensor.parallel import PrepareModuleInput, SequenceParallel, parallelize_module
from torch.nn import Linear, RMSNorm

import tdkernels
from tdkernels.nn import EPMoE, Router, RowParallelLinear, SwiGLU
from tdkernels.nn.parallel import ColwiseParallel, RowwiseParallel, parallelize, report, styles
from tests.support.ranks import device, on_ranks
from tests.support.subset import THOROUGH

B, S, H, I, V, HEAD = 2, 4, 16, 24, 12, 4  # four heads, of which pairs share keys and values


# ---- a transformer ----


class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (Linear(H, n) for n in (H, H // 2, H // 2, H))

    def forward(self, x):
        b, s, _ = x.shape
        q, k, v = (layer(x).view(b, s, -1, HEAD).transpose(1, 2) for layer in (self.q, self.k, self.v))
        k, v = (one.repeat_interleave(2, dim=1) for one in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).reshape(b, s, -1))


class FeedForward(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w2, self.w3 = Linear(H, I), Linear(I, H), Linear(H, I)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.feed_forward = Attention(), FeedForward()
        self.norm1, self.norm2 = RMSNorm(H), RMSNorm(H)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.feed_forward(self.norm2(x))


class Transformer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(V, H)
        self.layers = torch.nn.ModuleList([Block()])
        self.norm, self.head = RMSNorm(H), Linear(H, V)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def transformer(seed=0):
    torch.manual_seed(seed)
    return Transformer().to(device())


def plan_of(sequence_parallel, prepare_inputs=True):
    """Return a plan of torch's styles. Without ``prepare_inputs`` each ColwiseParallel gathers its own input."""
    colwise, rowwise = torch_parallel.ColwiseParallel, torch_parallel.RowwiseParallel
    gathers = sequence_parallel and not prepare_inputs
    own_input = {"input_layouts": Shard(1)} if gathers else {}
    output = {"output_layouts": Shard(1)} if sequence_parallel else {}
    plan = {f"layers.*.attention.{name}": colwise(**own_input) for name in "qkv"}
    plan |= {f"layers.*.feed_forward.{name}": colwise(**own_input) for name in ("w1", "w3")}
    plan |= {f"layers.*.{name}": rowwise(**output) for name in ("attention.o", "feed_forward.w2")}
    plan["embedding"] = rowwise(input_layouts=Replicate(), **output)
    if sequence_parallel:
        plan |= {name: SequenceParallel() for name in ("layers.*.norm1", "layers.*.norm2", "norm")}
        plan["head"] = colwise(input_layouts=Shard(1), output_layouts=Replicate())
        if prepare_inputs:
            gather = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
            plan |= {"layers.*.attention": gather, "layers.*.feed_forward": gather}
    return plan


def mesh_of_world():
    return init_device_mesh(device().type, (dist.get_world_size(),))


def full(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def close(got, expected, case=""):
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        where = f"{name} {case}: "
        torch.testing.assert_close(got[name], value, rtol=1e-4, atol=1e-5, msg=lambda text, where=where: where + text)


# ---- training ----


def train(model, steps=10 if THOROUGH else 2):
    """Return the loss, the norm of the gradients, all gradients and the parameters after each step."""
    # torch's foreach implementation, the default on GPUs, does not take tensors and DTensors together.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5, foreach=False)
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(V, (steps, B, S + 1), generator=generator).to(device())
    results = {}
    for step in range(steps):
        optimizer.zero_grad()
        logits = model(tokens[step, :, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[step, :, 1:].flatten())
        loss.backward()
        tdkernels.synchronize()
        results[f"loss {step}"] = loss.detach()
        results |= {f"gradient {step} of {name}": full(one.grad) for name, one in model.named_parameters()}
        divided = [one for one in model.parameters() if isinstance(one, DTensor)]
        others = [one for one in model.parameters() if not isinstance(one, DTensor)]
        for group in (divided, others):
            if group:
                results[f"norm {step} of {len(group)}"] = full(torch.nn.utils.clip_grad_norm_(group, 0.5))
        optimizer.step()
    return results | {name: full(one) for name, one in model.named_parameters()}


def same_placements(got, expected):
    for (name, one), other in zip(got.named_parameters(), expected.parameters(), strict=True):
        assert getattr(one, "placements", None) == getattr(other, "placements", None), name
        assert getattr(one.grad, "placements", None) == getattr(other.grad, "placements", None), name


def trains_as_torch(sequence_parallel):
    mesh = mesh_of_world()
    stock = parallelize_module(transformer(), mesh, plan_of(sequence_parallel))
    unsharded, expected = train(transformer(), 1), train(stock)
    torch.testing.assert_close(expected["loss 0"], unsharded["loss 0"])
    cases = [(True, False), (True, True), (False, False)] if sequence_parallel else [(False, False)]
    for prepare_inputs, fuse_inputs in cases:
        model = transformer()
        parallelize(model, mesh, plan_of(sequence_parallel, prepare_inputs), fuse_inputs=fuse_inputs)
        close(train(model), expected, f"with {prepare_inputs=}, {fuse_inputs=}")
        if not fuse_inputs:
            same_placements(model, stock)

    # Checkpoints: this rank's DTensors are interchangeable, and so are complete parameters.
    state = model.state_dict()
    close({name: full(one) for name, one in state.items()}, {name: full(o) for name, o in stock.state_dict().items()})
    other = parallelize_module(transformer(seed=1), mesh, plan_of(sequence_parallel))
    other.load_state_dict(state)
    model.load_state_dict(other.state_dict())
    close(train(other), train(model), "after load_state_dict")


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_training_equals_torch(sequence_parallel):
    on_ranks(2, trains_as_torch, sequence_parallel)


# ---- one layer: layouts, tensors, transforms ----


def results_of(layer, x, run=None):
    """Return the complete y, dx and gradients of the parameters for a loss that weighs all elements of y."""
    layer.zero_grad()
    y = layer(x) if run is None else run(x)
    whole = y if isinstance(y, DTensor) else None
    local = y.to_local() if whole is not None else y
    (local * torch.arange(local.numel(), device=local.device).view(local.shape).cos()).sum().backward()
    tdkernels.synchronize()
    named = {name: full(one.grad) for name, one in layer.named_parameters()}
    return {"y": local.detach(), **named}


def leaf(x, placement, as_dtensor):
    """Return (leaf, x for a layer): the local tensor, or a DTensor of it."""
    local = x.chunk(dist.get_world_size(), placement.dim)[dist.get_rank()] if isinstance(placement, Shard) else x
    local = local.detach().clone().requires_grad_()
    return local, DTensor.from_local(local, MESH, (placement,)) if as_dtensor else local


MESH = None


def styled(style, layer=None):
    torch.manual_seed(0)
    layer = (layer or Linear(H, I)).to(device())
    return parallelize_module(layer, MESH, style)


def results_with(module, x, kind, options, given, as_dtensor):
    """Return ``results_of`` and the gradient of x for a style of ``module``."""
    layer = styled(getattr(module, f"{kind}Parallel")(**options, use_local_output=not as_dtensor))
    local, tensor = leaf(x, given, as_dtensor)
    return results_of(layer, tensor) | {"x": local.grad}


def layouts_match():
    global MESH
    MESH = mesh_of_world()
    torch.manual_seed(1)
    x = torch.randn(B, S, H).to(device())
    placements = Replicate(), Shard(0), Shard(1), Shard(2)
    cases = [("Colwise", {"input_layouts": one}, given) for one in placements for given in placements]
    cases += [
        ("Rowwise", {"input_layouts": one, "output_layouts": to}, given)
        for one in (Shard(-1), Replicate()) for to in (Replicate(), Shard(0), Shard(1)) for given in placements
    ]
    for kind, options, given in cases:
        as_declared = given == options["input_layouts"] or (given == Shard(2) and options["input_layouts"] == Shard(-1))
        for as_dtensor in [True, False] if as_declared else [True]:
            case = kind, options, given, as_dtensor
            try:
                expected = results_with(torch_parallel, x, *case)
            except RuntimeError as error:  # torch 2.11, for some DTensors with another layout than declared
                assert not as_declared and "redistribution" in str(error), case
                continue
            close(results_with(styles, x, *case), expected, f"with {case}")


def takes_asynchronous_results():
    """An AsyncCollectiveTensor keeps its gradient."""
    global MESH
    MESH = mesh_of_world()
    x = torch.randn(B, S, H).to(device())
    dist.broadcast(x, 0)
    for plan in ({"input_layouts": Replicate()}, {"input_layouts": Shard(1)}):
        results = []
        for style in (ColwiseParallel, torch_parallel.ColwiseParallel):
            local, tensor = leaf(x, Partial(), True)
            tensor = tensor.redistribute(placements=(plan["input_layouts"],), async_op=True).to_local()
            assert isinstance(tensor, AsyncCollectiveTensor)
            results.append(results_of(styled(style(**plan)), tensor) | {"x": local.grad})
        close(*results, plan)


def test_layouts():
    on_ranks(2, layouts_match)
    on_ranks(2, takes_asynchronous_results)


def feed_forward(**options):
    model = transformer()
    parallelize(model, MESH, plan_of(True), **options)
    return model.layers[0].feed_forward


def runs_under_transforms():
    global MESH
    MESH = mesh_of_world()
    x = torch.randn(B, S // 2, H).to(device())
    for style in (ColwiseParallel(input_layouts=Shard(1)), ColwiseParallel(), RowwiseParallel(output_layouts=Shard(1))):
        layer = styled(style)
        given = x if not isinstance(style, RowwiseParallel) else torch.randn(B, S, H // 2).to(device())
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        close(results_of(layer, given, compiled), results_of(layer, given), "compiled")
        layer.zero_grad()  # torch cannot copy the gradients of DTensors
        close(results_of(copy.deepcopy(layer), given), results_of(layer, given), "copied")
    mlp = feed_forward(fuse_inputs=True)
    plain = results_of(mlp, x)
    mlp.zero_grad()
    copied = copy.deepcopy(mlp)
    assert copied.w1.tdkernels_style.gather is copied.w3.tdkernels_style.gather is not mlp.w1.tdkernels_style.gather
    assert copied.w1.tdkernels_style.gather.members == [copied.w1, copied.w3]
    close(results_of(copied, x), plain, "deepcopy")
    close(results_of(mlp, x, torch.compile(mlp, fullgraph=True, backend="aot_eager")), plain, "compiled, fused")
    graphs = []

    def keeps_graph(graph, _inputs):
        graphs.append(graph.code)
        return graph

    with torch.no_grad():
        torch.compile(mlp, fullgraph=True, backend=keeps_graph)(x)
    assert "".join(graphs).count("tdkernels.ag_gemm") == 1
    with torch.autocast(device().type, torch.bfloat16):
        assert mlp(x).dtype == torch.bfloat16


def trains_under_fsdp():
    """FSDP2 over dp around tensor parallelism over tp."""
    mesh = init_device_mesh(device().type, (1, 2), mesh_dim_names=("dp", "tp"))
    results = []
    for fuse_inputs in (None, False, True):
        model = transformer()
        if fuse_inputs is None:
            parallelize_module(model, mesh["tp"], plan_of(True))
        else:
            parallelize(model, mesh["tp"], plan_of(True), fuse_inputs=fuse_inputs)
        for layer in model.layers:
            fully_shard(layer, mesh=mesh["dp"])
        results.append(train(fully_shard(model, mesh=mesh["dp"])))
    close(results[1], results[0])
    close(results[2], results[0], "fused")

    # Each linear layer by itself: the parameters of the others are divided during its forward.
    model = transformer()
    parallelize(model, mesh["tp"], plan_of(True), fuse_inputs=True)
    for layer in [one for one in model.modules() if isinstance(one, Linear)]:
        fully_shard(layer, mesh=mesh["dp"])
    close(train(fully_shard(model, mesh=mesh["dp"])), results[0], "each linear layer")


def test_transforms():
    on_ranks(2, runs_under_transforms)
    on_ranks(2, trains_under_fsdp)


# ---- the shared gather ----


def gathers_once():
    global MESH
    MESH = mesh_of_world()
    calls = []
    original = styles.ag_gemm

    def counted(x, weight, *args, **kwargs):
        calls.append(len(weight) if isinstance(weight, list) else 1)
        return original(x, weight, *args, **kwargs)

    styles.ag_gemm = counted
    try:
        x = torch.randn(B, S // 2, H).to(device())
        mlp = feed_forward(fuse_inputs=["layers.*.feed_forward"])
        gather = mlp.w1.tdkernels_style.gather
        first = mlp(x)
        assert calls == [2] and gather.x is None and not gather.outputs and not gather.active
        mlp.w1(x), mlp.w3(x)  # outside of the forward of the parent
        assert calls == [2, 1, 1] and not gather.outputs

        calls.clear()
        other = x + 1

        def forward(x):
            """Use other tensors, and a tensor that is modified between the calls."""
            a, b = mlp.w1(x), mlp.w3(other)
            return a, b, mlp.w3(x)

        mlp.forward = forward
        a, b, c = mlp(x)
        assert calls == [2, 1]
        for got, (layer, given) in zip((a, b, c), ((mlp.w1, x), (mlp.w3, other), (mlp.w3, x)), strict=True):
            torch.testing.assert_close(got, layer(given))

        def modifying(x):
            x = x.to_local().clone()
            a = mlp.w1(x)
            return a, mlp.w3(x.add_(1))

        mlp.forward = modifying
        with torch.no_grad():
            torch.testing.assert_close(mlp(x)[1], mlp.w3(x + 1))

        def raising(x):
            mlp.w1(x)
            raise RuntimeError("stop")

        mlp.forward = raising
        with pytest.raises(RuntimeError, match="stop"):
            mlp(x)
        assert not gather.active and not gather.outputs
        del mlp.forward
        torch.testing.assert_close(mlp(x), first)
    finally:
        styles.ag_gemm = original


def fuses_keywords_and_local_inputs():
    """Parents with a keyword argument, and with local inputs."""
    global MESH
    MESH = mesh_of_world()
    x = torch.randn(B, S // 2, H).to(device())
    expected = results_of(feed_forward(), x)
    keyword = PrepareModuleInput(
        input_kwarg_layouts={"x": Shard(1)}, desired_input_kwarg_layouts={"x": Replicate()}, use_local_output=True
    )
    for prepare in (
        keyword,
        PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate(), use_local_output=True),
    ):
        model = transformer()
        made = parallelize(model, MESH, plan_of(True) | {"layers.*.feed_forward": prepare}, fuse_inputs=True)
        assert made["layers.0.feed_forward"].runs == "ag_gemm of w1, w3"
        mlp = model.layers[0].feed_forward
        run = (lambda x, mlp=mlp: mlp(x=x)) if prepare is keyword else None
        close(results_of(mlp, x, run), expected)


def test_shared_gather():
    on_ranks(2, gathers_once)
    on_ranks(2, fuses_keywords_and_local_inputs)


# ---- reports and errors ----


class OtherLinear(Linear):
    pass


def reports_everything():
    mesh = mesh_of_world()
    model = transformer()
    model.layers[0].feed_forward.w2 = OtherLinear(I, H, device=device())
    model.extra, model.odd, model.fp64 = Linear(H, H), Linear(H, 7), Linear(H, H, dtype=torch.double)
    model.features = Linear(H, H)
    odd = {name: torch_parallel.ColwiseParallel() for name in ("odd", "fp64", "layers.*.attention.qkv")}
    odd["features"] = torch_parallel.ColwiseParallel(input_layouts=Shard(-1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = parallelize(model, mesh, plan_of(True) | odd, fuse_inputs=["layers.*.feed_forward", "head"])
    kept = "gather kept in PrepareModuleInput; pass fuse_inputs to fuse it with q, k, v"
    expected = {
        "embedding": (None, "class Embedding is not torch.nn.Linear"),
        "layers.0.attention": (None, kept),
        "layers.0.attention.q": (None, "its input is gathered by PrepareModuleInput of layers.0.attention"),
        "layers.0.attention.k": (None, "its input is gathered by PrepareModuleInput of layers.0.attention"),
        "layers.0.attention.v": (None, "its input is gathered by PrepareModuleInput of layers.0.attention"),
        "layers.0.attention.o": ("gemm_rs", ""),
        "layers.0.feed_forward": ("ag_gemm of w1, w3", ""),
        "layers.0.feed_forward.w1": ("ag_gemm, gather shared with 1 more", ""),
        "layers.0.feed_forward.w2": (None, "class OtherLinear is not torch.nn.Linear"),
        "layers.0.feed_forward.w3": ("ag_gemm, gather shared with 1 more", ""),
        "head": (None, "output layout Replicate() is not Shard(-1)"),
        "extra": (None, "not in the plan"),
        "odd": (None, "out_features 7 must be divisible by the mesh's 2 ranks"),
        "fp64": (None, "its weight is torch.float64, which the operators do not support"),
        "features": ("column_linear, x redistributed from Shard(dim=-1) by torch", ""),
        "layers.*.attention.qkv": (None, "matches no module"),
    }
    entries = [(entry.module, (entry.runs, entry.reason)) for entry in made.entries]
    assert dict(entries[:-1]) == expected
    assert entries[-1] == ("head", (None, "fuse_inputs: matches no module with an all-gather in PrepareModuleInput"))
    lines = str(made).splitlines()
    assert len(lines) == 2 + len(entries) and lines[0].split(" | ")[2].strip() == "runs"
    assert len({line.index("|") for line in [lines[0], *lines[2:]]}) == 1 and kept in str(made)
    with pytest.raises(KeyError):
        made["layers.1"]
    model(torch.zeros(B, S, dtype=torch.long, device=device()))

    later = report(model)
    assert later["layers.0.attention.o"].runs == "gemm_rs"
    assert later["extra"].reason == "torch.nn.Linear: not parallel"
    assert later["head"].reason == "torch.nn.Linear: a DTensor parameter: parallel by torch"
    assert "default: method=" in report(model, rows=S)["layers.0.attention.o"].config


def reports_modules():
    modules = {
        "down": RowParallelLinear(H, H), "mlp": SwiGLU(H, I, sequence_parallel=True), "linear": Linear(H, H),
        "moe": EPMoE(Router(H, 4, 2), I),
    }
    made = report(torch.nn.ModuleDict(modules), rows=S)
    runs = {"down": "gemm_ar", "mlp": "ag_gemm, gemm_rs", "linear": None, "moe": "ep_moe"}
    assert {entry.module: entry.runs for entry in made.entries} == runs
    assert made["mlp"].config.count("method=") == 2 and "config" in str(made).splitlines()[0]
    assert report(modules["down"])[""].runs == "gemm_ar"


def fuses_only_safe_parents():
    mesh = mesh_of_world()
    gather = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    mlp = "layers.*.feed_forward"
    for changes, reason in (
        ({f"{mlp}.w3": None}, "layers.0.feed_forward.w3 below it is neither ColwiseParallel nor RowwiseParallel"),
        ({f"{mlp}.w3": torch_parallel.ColwiseParallel(input_layouts=Shard(1))}, "input layout is not Replicate()"),
        ({f"{mlp}.w3": torch_parallel.ColwiseParallel(output_layouts=Replicate())}, "w3: output layout Replicate()"),
        ({"layers.*": gather}, None),
    ):
        plan = {name: style for name, style in (plan_of(True) | changes).items() if style is not None}
        made = parallelize(transformer(), mesh, plan, fuse_inputs=True)
        entry = made["layers.0.feed_forward"] if reason else made["layers.0"]
        assert entry.runs is None and (reason or "below another module with PrepareModuleInput") in entry.reason


    made = parallelize(transformer(), mesh, plan_of(False))
    assert made["layers.0.attention.q"].runs == "column_linear" and made["layers.0.attention.o"].runs == "gemm_ar"


def rejects_invalid_arguments():
    global MESH
    MESH = mesh_of_world()
    x = torch.randn(B, 3, H // 2).to(device())
    for layer, style, message in (
        (Linear(H, 7), ColwiseParallel(), "ColwiseParallel of Linear.*out_features 7 must be divisible"),
        (Linear(7, H), RowwiseParallel(), "RowwiseParallel of Linear.*in_features 7 must be divisible"),
        (Linear(H, H), ColwiseParallel(output_layouts=Replicate()), r"output layout Replicate\(\) is not Shard\(-1\)"),
        (Linear(H, H), RowwiseParallel(output_layouts=Partial()), "output layout Partial.* is not Replicate"),
    ):
        with pytest.raises(ValueError, match=message):
            styled(style, layer)
    row = styled(RowwiseParallel(output_layouts=Shard(1)))
    with pytest.raises(ValueError, match="dimension 1 of x .* must be divisible"):
        row(x)
    with pytest.raises(ValueError, match="needs an x with more dimensions than 2"):
        row(x[0])
    shard = x.new_zeros(B, 1 + dist.get_rank(), H)
    uneven = DTensor.from_local(shard, MESH, (Shard(1),), shape=torch.Size((B, 3, H)), stride=(48, 16, 1))
    with pytest.raises(ValueError, match=r"ColwiseParallel: dimension 1 of x \[2, 3, 16\] must be divisible"):
        styled(ColwiseParallel(input_layouts=Shard(1)))(uneven)
    square = init_device_mesh(device().type, (1, 2), mesh_dim_names=("dp", "tp"))
    for call in (
        lambda: parallelize(transformer(), square, plan_of(True)),
        lambda: ColwiseParallel()._apply(Linear(H, H), square),
    ):
        with pytest.raises(ValueError, match="the mesh must have one dimension"):
            call()
    with pytest.raises(ValueError, match=r"\['block'\] match no module; children of the model: \['embedding'"):
        parallelize(transformer(), MESH, {"block": ColwiseParallel()})
    with pytest.raises(TypeError, match=r"plan\['head'\] is a str, not a ParallelStyle"):
        parallelize(transformer(), MESH, {"head": "colwise"})
    replaced = Linear(H, H)
    replaced.forward = torch.sin
    assert "its forward was replaced" in parallelize(replaced, MESH, ColwiseParallel())[""].reason
    with torch.device("meta"):
        on_meta = torch.nn.Sequential(Linear(H, H))
    parallelize(on_meta, MESH, {"0": torch_parallel.ColwiseParallel()})
    filled = styled(ColwiseParallel(), Linear(H, H))
    on_meta.to_empty(device=device())[0].load_state_dict(filled.state_dict())
    torch.testing.assert_close(on_meta(x.new_ones(2, H)), filled(x.new_ones(2, H)))
    with pytest.raises(NotImplementedError, match="only support nn.Linear"):
        styled(ColwiseParallel(), RMSNorm(H))


def test_reports_and_errors():
    on_ranks(2, reports_everything)
    on_ranks(2, reports_modules)
    on_ranks(2, fuses_only_safe_parents)
    on_ranks(2, rejects_invalid_arguments)
