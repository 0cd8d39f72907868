"""Test bodies for single layers with the tensor-parallel styles of transformers. Every rank runs them."""

import types

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

import tdkernels
from tdkernels.integrations.transformers import installed
from tests.integrations.transformers_models import assert_counts, assert_same, calls_counted, full
from tests.support.dense_oracle import relative_error
from tests.support.ranks import device


def comparable(gradient):
    """Return the complete gradient, or this rank's part of a strided shard, which torch 2.11 cannot gather."""
    strided = isinstance(gradient, DTensor) and any(isinstance(p, _StridedShard) for p in gradient.placements)
    return gradient.to_local() if strided and torch.__version__.startswith("2.11.") else full(gradient)


class Subclass(torch.nn.Linear):
    pass


class Layers(torch.nn.Module):
    """Linear layers with the styles of PLAN. The operators do not support most of these layers."""

    def __init__(self):
        super().__init__()
        self.column, self.row = torch.nn.Linear(16, 24), torch.nn.Linear(16, 12)
        self.packed, self.packed_uneven = torch.nn.Linear(16, 24, bias=False), torch.nn.Linear(16, 10, bias=False)
        self.subclass, self.patched = Subclass(16, 24), torch.nn.Linear(16, 24)
        self.patched.forward = types.MethodType(torch.nn.Linear.forward, self.patched)
        self.uneven_column, self.uneven_row = torch.nn.Linear(16, 17), torch.nn.Linear(17, 16)
        self.fp64, self.quantized = torch.nn.Linear(16, 24).double(), torch.nn.Linear(16, 24)
        self.bf16 = torch.nn.Linear(16, 24, dtype=torch.bfloat16)


PLAN = {
    "column": "colwise", "row": "rowwise", "packed": "packed_colwise", "subclass": "colwise", "patched": "rowwise",
    "uneven_column": "colwise", "uneven_row": "rowwise", "fp64": "colwise", "quantized": "rowwise", "bf16": "rowwise",
}
RUNS = {"column": "column_linear", "row": "gemm_ar", "packed": "column_linear", "bf16": "gemm_ar"}
REASONS = {
    "subclass": "class Subclass is not torch.nn.Linear",
    "patched": "its forward was replaced by another library",
    "uneven_column": "2 ranks do not divide out_features 17",
    "uneven_row": "2 ranks do not divide in_features 17",
    "fp64": "its weight is torch.float64, which the operators do not support",
    "quantized": "it is quantized",
    "packed_uneven": "torch.nn.Linear: not parallel",
}


def divided_layers(mesh):
    """Return Layers with the styles that are installed."""
    torch.manual_seed(0)
    model = Layers().to(device())
    plan = {}
    for name, style in PLAN.items():
        parameters = [f"{name}.{one}" for one, _ in model.get_submodule(name).named_parameters()]
        plan.update(dict.fromkeys([*parameters, name], style))
    apply_tensor_parallelism(model, mesh, plan)
    model.quantized._hf_quantized_needs_local_tp = True
    return model


def outputs_of(model, name, compiled=None):
    """Return the outputs of a layer with and without gradients, and the gradients of its input and its parameters."""
    module, style = model.get_submodule(name), PLAN[name]
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(3, 2, module.in_features, generator=generator).to(device(), module.weight.dtype)
    if style == "rowwise":  # transformers' layouts of uneven parts are those of torch.chunk
        x = x.chunk(2, dim=-1)[dist.get_rank()].contiguous()
    with torch.no_grad():
        z = module(x)
    x.requires_grad_()
    y = (module if compiled is None else compiled)(x)
    (y * torch.arange(1, y.shape[-1] + 1, device=y.device)).sum().backward()
    gradients = {one: comparable(p.grad) for one, p in module.named_parameters()}
    return {"y": y.detach(), "y without gradients": z, "x": x.grad, **gradients}


def compiles():
    """Compare the operators under torch.compile, without a graph break, with eager calls."""
    mesh = init_device_mesh(device().type, (2,), mesh_dim_names=("tp",))
    with installed():
        model = divided_layers(mesh)
    for name in ("column", "row", "packed"):
        expected = outputs_of(model, name)
        model.zero_grad()
        compiled = torch.compile(model.get_submodule(name), backend="aot_eager", fullgraph=True)
        for part, value in outputs_of(model, name, compiled).items():
            assert_same(f"{name}, {part}", value, expected[part])


def runs_and_falls_back():
    """Compare layers of all kinds with transformers' own styles, and check the reasons in the report."""
    mesh = init_device_mesh(device().type, (2,), mesh_dim_names=("tp",))
    theirs = divided_layers(mesh)
    with installed():
        ours = divided_layers(mesh)
    report = tdkernels.nn.report(ours)
    found = {entry.module: entry.runs or entry.reason for entry in report.entries}
    assert found == {**RUNS, **REASONS}, str(report)
    for name in PLAN:
        with calls_counted() as counts:
            got = outputs_of(ours, name)
        rows = PLAN[name] == "rowwise"  # without gradients only these have a collective
        assert_counts(counts, kernels=(name in RUNS) * (1 + rows))
        reference = outputs_of(theirs, name)
        assert {*got} == {*reference}
        for part, value in got.items():
            limit = 1e-2 if value.dtype == torch.bfloat16 else 1e-5
            assert type(value) is type(reference[part]) and value.stride() == reference[part].stride()
            assert relative_error(value, reference[part].double()) < limit, f"{name}, {part}"
    checks_dtype_again(ours)


def checks_dtype_again(ours):
    """Convert a layer after its first call: the report and the forward follow."""
    ours.row.double()
    with calls_counted() as counts:
        outputs_of(ours, "row")
    assert_counts(counts, kernels=0)
    assert tdkernels.nn.report(ours)["row"].reason == "its weight is torch.float64, which the operators do not support"
    ours.row.float()
    with calls_counted() as counts:
        outputs_of(ours, "row")
    assert_counts(counts, kernels=2)
    assert tdkernels.nn.report(ours)["row"].runs == "gemm_ar"


def rejects_meshes_and_layouts():
    """Check the reasons for meshes without a dimension "tp" and for styles with other layouts."""
    from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES, ColwiseParallel, Replicate

    mesh = init_device_mesh(device().type, (1, 2), mesh_dim_names=("dp", "tp"))
    other = init_device_mesh(device().type, (1, 2), mesh_dim_names=("dp", "ep"))
    before = ALL_PARALLEL_STYLES["colwise"]
    gathering = ColwiseParallel(output_layouts=Replicate())
    with_dtensors = ColwiseParallel(use_local_output=False)
    for style, its_mesh, reason in (
        (before, mesh, None), (before, other, 'the mesh has several dimensions, none of which is "tp"'),
        (gathering, mesh, "column_linear does not have the layouts Replicate() and Replicate()"),
        (with_dtensors, mesh, "its output is a DTensor"),
    ):
        ALL_PARALLEL_STYLES.register("colwise", style)
        try:
            with installed():
                layer = torch.nn.Linear(16, 24)
                ALL_PARALLEL_STYLES["colwise"].shard_param(layer, "weight", mesh["tp"])
                ALL_PARALLEL_STYLES["colwise"].install_forward(layer, its_mesh)
        finally:
            ALL_PARALLEL_STYLES.register("colwise", before)
        entry = tdkernels.nn.report(layer)[""]
        assert (entry.runs, entry.reason) == (("column_linear", "") if reason is None else (None, reason))
