"""torch.compile of the dense operators with scaled fp8 operands, and the checks of torch.library.opcheck."""

import pytest
import torch
import torch.distributed as dist

import tdkernels
from tdkernels.ops.common.config import as_argument
from tests.ops.dense.scaled_cases import ScaledCase
from tests.support.dense_oracle import OPERATORS
from tests.support.ranks import DEVICE, device, on_ranks


def compiled_equals_eager(operator, scaling, options):
    """Compare a whole graph with the eager call: twice with 24 rows, then with 36."""
    torch._dynamo.reset()

    def call(x, weight, bias, scale_x, scale_w):
        z = getattr(tdkernels, operator)(
            x, weight, bias, scale_x=scale_x, scale_w=scale_w, out_dtype=torch.float32, **options
        )
        return z.sin()

    backend = "inductor" if device().type == "cuda" else "aot_eager"
    compiled = torch.compile(call, fullgraph=True, backend=backend)
    for rows in (24, 24, 36):
        case = ScaledCase(operator, rows, 40, 144, (scaling, scaling), seed=rows, out_dtype=torch.float32)
        operands = case.x, case.weight, case.bias, case.scale_x, case.scale_w
        torch.testing.assert_close(compiled(*operands), call(*operands), rtol=1e-5, atol=1e-5)
        case.check(getattr(tdkernels, operator)(
            *operands[:3], scale_x=case.scale_x, scale_w=case.scale_w, out_dtype=torch.float32, **options
        ))
    tdkernels.synchronize()


CASES = [
    ("ag_gemm", "row", {}), ("gemm_rs", "block", {"use_fast_accum": True}), ("gemm_ar", "tensor", {}),
    ("ag_gemm", "tensor", {"config": tdkernels.AgGemmConfig(method="torch")}),
    ("gemm_rs", "row", {"config": tdkernels.GemmRsConfig(method="parts")}), ("gemm_ar", "block", {}),
]


@pytest.mark.parametrize("operator, scaling, options", CASES if DEVICE == "cuda" else CASES[:3])
def test_fullgraph(operator, scaling, options):
    on_ranks(2, compiled_equals_eager, operator, scaling, options)


def compiles_lists():
    """Compile ag_gemm of two weights that returns the gathered x, and gemm_rs of the second dimension."""
    torch._dynamo.reset()
    gather, scatter = (ScaledCase(name, 24, 40, 144, seed=1, bias=False) for name in ("ag_gemm", "gemm_rs"))

    def call(x, weight, scale_x, scale_w, rows, other, scale_of_rows, scale_of_other):
        ys, whole = tdkernels.ag_gemm(
            x, [weight, weight[:8]], return_gathered=True, scale_x=scale_x, scale_w=[scale_w, scale_w[:8]]
        )
        z = tdkernels.gemm_rs(rows.view(2, 12, -1), other, dim=1, scale_x=scale_of_rows, scale_w=scale_of_other)
        return *ys, whole.float(), z

    operands = [(case.x, case.weight, case.scale_x, case.scale_w) for case in (gather, scatter)]
    operands = *operands[0], *operands[1]
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for got, expected in zip(compiled(*operands), call(*operands), strict=True):
        assert torch.equal(got, expected)


def test_fullgraph_of_lists_and_dimensions():
    on_ranks(2, compiles_lists)


def check(op, *arguments):
    """Run torch.library.opcheck for the fake implementation, and check that no operand is changed. Collective.

    ``test_schema`` of opcheck compares operands with torch.allclose, which does not support fp8.
    """
    torch.library.opcheck(op, arguments, test_utils=("test_faketensor",))
    tensors = [one for value in arguments for one in (value if isinstance(value, list) else [value])]
    tensors = [tensor for tensor in tensors if isinstance(tensor, torch.Tensor)]
    before = [tensor.clone() for tensor in tensors]
    outputs = op(*arguments)
    for tensor, copy in zip(tensors, before, strict=True):
        assert torch.equal(tensor.view(torch.uint8), copy.view(torch.uint8))
    memory = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    for output in outputs if isinstance(outputs, list) else [outputs]:
        assert output.untyped_storage().data_ptr() not in memory


def opcheck():
    group = dist.group.WORLD.group_name
    for operator in OPERATORS:
        op = getattr(torch.ops.tdkernels, f"{operator}_scaled").default
        for scaling, fast, out_dtype in (("row", False, torch.float16), ("block", True, torch.float32)):
            case = ScaledCase(operator, 8, 5, 144, (scaling, scaling), out_dtype=out_dtype)
            scales = case.scale_x, case.scale_w, scaling, out_dtype, fast
            reordered = 2 if operator == "gemm_rs" else None
            check(op, case.x, case.weight, case.bias, *scales, reordered, group, as_argument(None))
    case = ScaledCase("ag_gemm", 8, 5, 32)
    lists = [case.weight, case.weight[:2]], [case.bias, None], case.scale_x, [case.scale_w, case.scale_w[:2]]
    options = ["row", "row"], torch.bfloat16, False, 8, True, group, "parts", 1
    check(torch.ops.tdkernels.ag_gemm_scaled_multi.default, case.x, *lists, *options)


def test_opcheck():
    on_ranks(2, opcheck)
