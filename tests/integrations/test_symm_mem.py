"""torch.ops.symm_mem on tdkernels: equal to collectives and products of torch, with the strides of torch's kernels."""

import contextlib
import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed._symmetric_memory as torch_symm_mem

from tdkernels.integrations import symm_mem, symm_mem_calls, symm_mem_tuning
from tests.integrations.torchtitan_layers import draw, torchtitan_layers_are_exact
from tests.support.ranks import ASKED, device, on_ranks

GATHER, SCATTER = "fused_all_gather_matmul", "fused_matmul_reduce_scatter"
# torch's symmetric memory needs a GPU for each rank.
runs_torch = pytest.mark.skipif(ASKED == "shared", reason="torch's kernels need a GPU for each rank")


def group_name():
    return dist.group.WORLD.group_name


def draw_all(*shape, seed, dtype=torch.float32):
    """Return the tensors of all ranks."""
    return [draw(*shape, seed=1000 * rank + seed, dtype=dtype) for rank in range(dist.get_world_size())]


def counts():
    """Return ``symm_mem.counts()`` of the two unscaled operators."""
    return {operator: symm_mem.counts()[operator] for operator in (GATHER, SCATTER)}


def column_major(B):
    return B.t().contiguous().t()


def strides(results):
    """Return the strides of (A or None, outputs)."""
    A, outputs = results
    return A if A is None else A.stride(), [y.stride() for y in outputs]


def strides_of_torch(A, Bs, dim, return_A):
    """Return the strides of torch's CUDA kernel: the gathered dimension is the outermost, except if it is the last."""
    lead = [*A.shape[:-1]]
    if dim < A.dim() - 1:
        lead[dim] *= dist.get_world_size()
        lead.insert(0, lead.pop(dim))
    else:
        dim = 0
    widths = [Bs[0].shape[0], *(B.shape[1] for B in Bs)]
    gathered, *outputs = (torch.empty(*lead, width, device="meta").movedim(0, dim).stride() for width in widths)
    return gathered if return_A else None, outputs


def meta_strides(A, Bs, dim, return_A):
    """Return the strides that torch's Meta kernel promises to torch.compile."""
    A, Bs = A.to("meta"), [B.to("meta") for B in Bs]
    return strides(torch.ops.symm_mem.fused_all_gather_matmul(A, Bs, dim, group_name(), return_A=return_A))


# ---- the operators ----


def gathers(shape, dim, number, dtype, change):
    """Compare all-gather-matmul with torch: ``number`` matrices B of both layouts, of different widths."""
    shards = [change(A) for A in draw_all(*shape, seed=1, dtype=dtype)]
    own, whole = shards[dist.get_rank()], torch.cat(shards, dim)
    K = whole.shape[-1]
    Bs = [draw(K, 16 * (i + 1), seed=2000 * dist.get_rank() + i, dtype=dtype) for i in range(number)]
    Bs = [column_major(B) if i % 2 else B for i, B in enumerate(Bs)]
    for return_A in (True, False):
        A, ys = torch.ops.symm_mem.fused_all_gather_matmul(own, Bs, dim, group_name(), return_A=return_A)
        assert torch.equal(A, whole) if return_A else A is None
        assert len(ys) == number
        for y, B in zip(ys, Bs, strict=True):
            assert y.dtype == dtype and torch.equal(y.double(), whole.double() @ B.double())
        assert strides((A, ys)) == strides_of_torch(own, Bs, dim, return_A)
        # With W = 1 torch's Meta kernel differs from its CUDA kernel.
        assert dist.get_world_size() == 1 or strides((A, ys)) == meta_strides(own, Bs, dim, return_A)


def unchanged(A):
    return A


def transposed(A):
    """Return A in another memory layout."""
    return A.transpose(0, -1).contiguous().transpose(0, -1)


def gathers_all(cases):
    with symm_mem.installed():
        for case in cases:
            gathers(*case)
        calls = symm_mem.counts()[GATHER]
    last = 2 * sum(dim == len(shape) - 1 for shape, dim, *_ in cases)
    assert calls["tdkernels"] == 2 * len(cases) - last
    assert calls["torch"] == ({"gather_dim is the last dimension": last} if last else {})


GATHERS = [
    ((5, 32), 0, 1, torch.float32, unchanged),
    ((5, 32), 0, 2, torch.bfloat16, unchanged),
    ((5, 32), 0, 3, torch.float32, transposed),
    ((4, 3, 32), 0, 1, torch.bfloat16, unchanged),
    ((3, 4, 32), 1, 1, torch.float32, unchanged),
    ((3, 4, 32), 1, 2, torch.bfloat16, transposed),
    ((1, 4, 32), 1, 1, torch.float32, unchanged),
    ((2, 2, 3, 32), 2, 1, torch.float32, unchanged),
    ((0, 32), 0, 2, torch.float32, unchanged),
]


@pytest.mark.parametrize("world_size, cases", [(1, GATHERS), (2, GATHERS), (3, GATHERS[2:6:3])])
def test_all_gather_matmul(world_size, cases):
    on_ranks(world_size, gathers_all, cases)


@runs_torch
def test_all_gather_matmul_of_the_last_dimension():
    on_ranks(2, gathers_all, [
        ((5, 16), 1, 2, torch.float32, unchanged), ((2, 5, 16), 2, 1, torch.bfloat16, transposed),
    ])


def scatters(shape, dim, reduce_op, dtype, layout):
    ranks, rank = dist.get_world_size(), dist.get_rank()
    As, Bs = draw_all(*shape, seed=1, dtype=dtype), draw_all(shape[-1], 6 * ranks, seed=2, dtype=dtype)
    # With "avg" W equal partials, whose mean is exact in bf16, too.
    if reduce_op == "avg":
        As, Bs = [As[0]] * ranks, [Bs[0]] * ranks
    total = sum(A.double() @ B.double() for A, B in zip(As, Bs, strict=True))
    expected = (total / ranks if reduce_op == "avg" else total).chunk(ranks, dim)[rank]
    z = torch.ops.symm_mem.fused_matmul_reduce_scatter(As[rank], layout(Bs[rank]), reduce_op, dim, group_name())
    assert z.dtype == dtype and torch.equal(z.double(), expected)
    assert z.is_contiguous()


def scatters_all(cases):
    with symm_mem.installed():
        for case in cases:
            scatters(*case)
        calls = symm_mem.counts()[SCATTER]
    last = sum(dim == len(shape) - 1 for shape, dim, *_ in cases)
    assert calls["tdkernels"] == len(cases) - last
    assert calls["torch"] == ({"scatter_dim is the last dimension": last} if last else {})


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_matmul_reduce_scatter(world_size):
    on_ranks(world_size, scatters_all, [
        ((6, 16), 0, "sum", torch.float32, unchanged),
        ((6, 16), 0, "avg", torch.bfloat16, column_major),
        ((6, 2, 16), 0, "sum", torch.bfloat16, unchanged),
        ((2, 6, 16), 1, "sum", torch.float32, column_major),
        ((2, 6, 16), 1, "avg", torch.float32, unchanged),
        ((0, 16), 0, "sum", torch.float32, unchanged),
    ])


@runs_torch
def test_matmul_reduce_scatter_of_the_last_dimension():
    on_ranks(2, scatters_all, [
        ((5, 16), 1, "sum", torch.float32, unchanged), ((2, 5, 16), 2, "avg", torch.bfloat16, column_major),
    ])


def falls_back():
    """Calls that tdkernels rejects give the results of torch, and are counted with the reason."""
    ranks, name = dist.get_world_size(), group_name()
    A, B = draw(4, 8, seed=0, dtype=torch.float64), draw(8, 6, seed=1, dtype=torch.float64)
    whole = torch.cat([A] * ranks)
    gather, scatter = torch.ops.symm_mem.fused_all_gather_matmul, torch.ops.symm_mem.fused_matmul_reduce_scatter
    with symm_mem.installed():
        gathered, (y,) = gather(A, [B], 0, name)
        assert torch.equal(gathered, whole) and torch.equal(y, whole @ B)
        assert torch.equal(gather(A, [], 0, name)[0], whole)
        _, (y,) = gather(A.float(), [B[:, :0].float()], 0, name, return_A=False)
        assert y.shape == (4 * ranks, 0)
        with pytest.raises(RuntimeError, match="dtype"):
            gather(A, [B.float()], 0, name)
        for reduce_op, factor in (("sum", ranks), ("avg", 1)):
            z = scatter(A, B, reduce_op, 0, name)
            assert torch.equal(z, factor * (A @ B).chunk(ranks)[dist.get_rank()])
        assert counts() == {
            GATHER: {"tdkernels": 0, "torch": {
                "torch.float64 is not supported": 1, "Bs is empty": 1, "K or N is 0": 1,
                "A and B have different dtypes": 1,
            }},
            SCATTER: {"tdkernels": 0, "torch": {"torch.float64 is not supported": 2}},
        }


@runs_torch
def test_unsupported_calls_run_on_torch():
    on_ranks(2, falls_back)


def explains_calls():
    A, B, name = draw(4, 8, seed=0), draw(8, 6, seed=1), group_name()
    with symm_mem.installed():
        assert symm_mem.explain().splitlines()[:2] == [f"{GATHER}: not called", f"{SCATTER}: not called"]
        for _ in range(2):
            torch.ops.symm_mem.fused_all_gather_matmul(A, [B, column_major(B)[:, :3]], 0, name)
        torch.ops.symm_mem.fused_all_gather_matmul(A, [], 0, name)
        torch.ops.symm_mem.fused_matmul_reduce_scatter(A, column_major(B), "sum", 0, name)
        gather, lists, by_torch, scatter, own, *_ = symm_mem.explain().splitlines()
    assert (gather, scatter) == (GATHER, SCATTER)
    assert by_torch == "      1 x torch's kernel: Bs is empty"
    assert lists.startswith("      2 x ag_gemm 8x18x8 float32 kn ") and lists.endswith("; one gather for N of 6, 3")
    assert own.startswith("      1 x gemm_rs 4x6x16 float32 nk ") and ": fused (" in own


@runs_torch
def test_explanation():
    on_ranks(2, explains_calls)


def runs_the_faster_kernel():
    """With times that favour torch's kernel on one rank, all ranks run it. Times are taken once for each shape."""
    A, B, name = draw(4, 8, seed=0), draw(8, 6, seed=1), group_name()
    timed = []

    def burst(call, inputs, calls, rank_device, group):
        call(inputs[0])
        timed.append(calls)
        candidate = (len(timed) + 1) % 2  # tdkernels and torch by turns
        slow = candidate == 0 and dist.get_rank() == 0
        return (3.0 if slow else 2.0 if candidate else 1.0), 0.0

    def choose(key, _device, *rest):  # as on a GPU
        return symm_mem_tuning.torch_is_faster(key, torch.device("cuda", 0), *rest)

    gather, scatter = torch.ops.symm_mem.fused_all_gather_matmul, torch.ops.symm_mem.fused_matmul_reduce_scatter
    with contextlib.ExitStack() as patches:
        patches.enter_context(symm_mem.installed())
        patches.enter_context(mock.patch.object(symm_mem_tuning, "burst", burst))
        patches.enter_context(mock.patch.object(symm_mem_calls, "torch_is_faster", choose))
        patches.enter_context(mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: False))
        gather(A, [B], 0, name)
        assert not timed, "timed without the mode on"
        patches.enter_context(mock.patch.object(symm_mem_tuning, "get_mode", lambda: "on"))
        for _ in range(2):
            _, (y,) = gather(A, [B], 0, name)
            assert torch.equal(y, torch.cat([A] * dist.get_world_size()) @ B)
        assert len(timed) == 6
        scatter(A, B, "sum", 0, name)
        assert counts() == {
            GATHER: {"tdkernels": 1, "torch": {"torch's kernel is faster": 2}},
            SCATTER: {"tdkernels": 0, "torch": {"torch's kernel is faster": 1}},
        }


@runs_torch
def test_tuning():
    on_ranks(2, runs_the_faster_kernel)


def rejects_invalid_arguments():
    A, B, name = draw(4, 8, seed=0), draw(8, 6, seed=1), group_name()
    gather, scatter = torch.ops.symm_mem.fused_all_gather_matmul, torch.ops.symm_mem.fused_matmul_reduce_scatter
    with symm_mem.installed():
        for call, message in (
            (lambda: gather(A[0], [B], 0, name), r"fused_all_gather_matmul: A must have at least 2 .*\[8\]"),
            (lambda: gather(A, [B, B[0]], 0, name), r"B must have 2 dimensions \[K, N\], its shape is \[6\]"),
            (lambda: gather(A, [B, B[:7]], 0, name), r"B \[7, 6\] must have 8 rows for A \[4, 8\]"),
            (lambda: gather(A, [B], 1, name), r"B \[8, 6\] must have 16 rows for A \[4, 8\]"),
            (lambda: gather(A, [B], 2, name), "gather_dim must be at least 0 and less than 2, not 2"),
            (lambda: gather(A, [B], -1, name), "gather_dim must be at least 0 and less than 2, not -1"),
            (lambda: scatter(A[0], B, "sum", 0, name), "fused_matmul_reduce_scatter: A must have at least 2"),
            (lambda: scatter(A, B[0], "sum", 0, name), "B must have 2 dimensions"),
            (lambda: scatter(A, B.t(), "sum", 0, name), r"B \[6, 8\] must have 8 rows for A \[4, 8\]"),
            (lambda: scatter(A, B, "max", 0, name), "reduce_op must be \"sum\" or \"avg\", not 'max'"),
            (lambda: scatter(A, B, "sum", -1, name), "scatter_dim must be at least 0 and less than 2, not -1"),
            (lambda: scatter(A[:3], B, "sum", 0, name), r"dimension 0 of A \[3, 8\] must be divisible by .* 2 ranks"),
            (lambda: scatter(A, B[:, :5], "sum", 1, name), r"dimension 1 of B \[8, 5\] must be divisible by"),
        ):
            with pytest.raises(ValueError, match=message):
                call()
        assert counts() == {op: {"tdkernels": 0, "torch": {}} for op in (GATHER, SCATTER)}


def test_invalid_arguments():
    on_ranks(2, rejects_invalid_arguments)


def ignores_autograd_and_autocast():
    A, B = draw(4, 8, seed=0).requires_grad_(), draw(8, 6, seed=1)
    whole = torch.cat([A.detach()] * dist.get_world_size())
    with symm_mem.installed(), torch.autocast(device().type, dtype=torch.bfloat16):
        gathered, (y,) = torch.ops.symm_mem.fused_all_gather_matmul(A, [B], 0, group_name())
        z = torch.ops.symm_mem.fused_matmul_reduce_scatter(A, B, "sum", 0, group_name())
        assert symm_mem.counts()[GATHER]["tdkernels"] == symm_mem.counts()[SCATTER]["tdkernels"] == 1
    assert gathered.dtype == y.dtype == z.dtype == torch.float32
    with torch.no_grad():
        assert torch.equal(y, whole @ B)


def test_autograd_and_autocast_do_not_reach_the_kernels():
    on_ranks(2, ignores_autograd_and_autocast)


# ---- installation ----


def registered():
    return {
        key: torch._C._dispatch_has_kernel_for_dispatch_key(f"symm_mem::{op}", key)
        for op in (GATHER, SCATTER) for key in ("CUDA", "CPU")
    }


def sources(key):
    return symm_mem._registrations(GATHER, key) + symm_mem._registrations(SCATTER, key)


def test_install_and_uninstall():
    of_torch = sources("CUDA")
    assert len(of_torch) == 2 and all(source.startswith(torch_symm_mem.__file__) for source in of_torch)
    assert registered() == {"CUDA": True, "CPU": False}
    symm_mem.uninstall()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        symm_mem.install()
        symm_mem.install()
    try:
        assert registered() == {"CUDA": True, "CPU": True}
        for key, number in (("CUDA", 4), ("CPU", 2)):
            assert len(sources(key)) == number and sources(key)[0].startswith(symm_mem.__file__)
        with symm_mem.installed():
            pass
        assert registered()["CPU"], "the block did not install the kernels, so it must not remove them"
    finally:
        symm_mem.uninstall()
    assert registered() == {"CUDA": True, "CPU": False} and sources("CUDA") == of_torch
    with contextlib.suppress(KeyError), symm_mem.installed():
        assert registered()["CPU"]
        raise KeyError
    assert not registered()["CPU"]
    A = torch.zeros(2, 2)
    with pytest.raises(NotImplementedError, match="CPU"):
        torch.ops.symm_mem.fused_all_gather_matmul(A, [A], 0, "0")
    with pytest.raises(NotImplementedError, match="CPU"):
        torch.ops.symm_mem.fused_matmul_reduce_scatter(A, A, "sum", 0, "0")


def test_install_warns_about_the_kernel_of_another_library():
    other = torch.library.Library("symm_mem", "IMPL")
    try:
        other.impl(GATHER, lambda A, Bs, gather_dim, group_name, *, return_A=True: (None, []), "CPU")
        of_other = sources("CPU")
        with pytest.warns(UserWarning, match=f"the CPU kernel of symm_mem::{GATHER} .*test_symm_mem.py") as caught:
            symm_mem.install()
        assert len(caught) == 1 and caught[0].filename == __file__
        symm_mem.uninstall()
        assert sources("CPU") == of_other
        A = torch.zeros(2, 2)
        assert torch.ops.symm_mem.fused_all_gather_matmul(A, [A], 0, "0") == (None, [])
    finally:
        symm_mem.uninstall()
        other._destroy()
    assert not registered()["CPU"]


# ---- callers of the operators ----


@contextlib.contextmanager
def mm_with_out_dtype():
    """Register torch.mm(out_dtype=...) for CPU tensors if torch has it on CUDA only."""
    if device().type != "cpu" or torch._C._dispatch_has_kernel_for_dispatch_key("aten::mm.dtype", "CPU"):
        yield
        return
    library = torch.library.Library("aten", "IMPL")
    library.impl("mm.dtype", lambda a, b, dtype: a.to(dtype) @ b.to(dtype), "CPU")
    try:
        yield
    finally:
        library._destroy()


def torchtitan_layers(dtype):
    from torchtitan.distributed import linear

    with symm_mem.installed(), mm_with_out_dtype():
        torchtitan_layers_are_exact(linear, dtype)
        # Forward and backward of the layers: 2, 1 and 2 gathers, and one scatter each.
        assert counts() == {
            GATHER: {"tdkernels": 5, "torch": {}}, SCATTER: {"tdkernels": 3, "torch": {}},
        }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_of_torchtitan(dtype):
    pytest.importorskip("torchtitan.distributed.linear")
    on_ranks(2, torchtitan_layers, dtype)


def gather_then_products(A, B, C):
    all_gather = getattr(funcol, "all_gather_single", None) or funcol.all_gather_tensor
    whole = all_gather(A, 0, group_name())
    return whole @ B, whole @ C


def product_then_scatter(A, B):
    reduce_scatter = getattr(funcol, "reduce_scatter_single", None) or funcol.reduce_scatter_tensor
    return reduce_scatter(A @ B, "sum", 0, group_name())


def compiles():
    """torch.compile replaces collectives and products by the operators, which run on tdkernels."""
    from torch._inductor import config

    As, B, C = draw_all(8, 32, seed=0), draw(32, 16, seed=1), draw(32, 48, seed=2)
    A, whole = As[dist.get_rank()], torch.cat(As)
    with (
        symm_mem.installed(),
        config.patch(_micro_pipeline_tp=True),
        # Inductor replaces nothing if torch is built without NCCL or symmetric memory is not enabled for the group.
        mock.patch.object(dist, "is_nccl_available", lambda: True),
        torch_symm_mem._test_mode({group_name()}),
    ):
        for _ in range(2):
            y, z = torch.compile(gather_then_products, fullgraph=True)(A, B, C)
            assert torch.equal(y, whole @ B) and torch.equal(z, whole @ C)
            z = torch.compile(product_then_scatter, fullgraph=True)(A, B)
            assert torch.equal(z, sum(A @ B for A in As).chunk(len(As))[dist.get_rank()])
        assert counts() == {
            GATHER: {"tdkernels": 2, "torch": {}}, SCATTER: {"tdkernels": 2, "torch": {}},
        }


def test_micro_pipeline_of_torch_compile():
    on_ranks(2, compiles)
