"""torchtitan with the operators of tdkernels: its Functions replaced, and overrides of its modules."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tdkernels.integrations import torchtitan
from tdkernels.ops.dense.ag_gemm import op as ag_gemm_op
from tests.integrations.torchtitan_layers import draw, torchtitan_layers_are_exact
from tests.support.ranks import device, on_ranks

pytest.importorskip("torchtitan.distributed.linear")
NAMES = "AllGatherLinear", "AllGatherLinearMulti", "LinearReduceScatter"
B, S, H, I, HEADS, KV, D = 2, 8, 16, 24, 4, 2, 4


def replaces_the_functions(dtype):
    from torchtitan.distributed import linear
    from torchtitan.models.common import dist_gemm

    originals = [getattr(linear, name) for name in NAMES]
    with torchtitan.enabled():
        torchtitan.enable()
        for module in (linear, dist_gemm):
            assert all(getattr(module, name) is getattr(torchtitan, name) for name in NAMES)
        torchtitan_layers_are_exact(dist_gemm, dtype)
    for module in (linear, dist_gemm):
        assert all(getattr(module, name) is original for name, original in zip(NAMES, originals, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_enable(dtype):
    on_ranks(2, replaces_the_functions, dtype)


def compiles_and_has_types():
    import spmd_types as spmd
    from spmd_types.checker import typecheck
    from torchtitan.models.common import dist_gemm

    group = dist.group.WORLD, dist.group.WORLD.group_name
    x, weight, bias, back = (draw(*shape, seed=seed) for seed, shape in enumerate([(4, 8), (6, 8), (6,), (8, 6)]))
    with torchtitan.enabled():
        expected = dist_gemm.AllGatherLinear.apply(x, weight, bias, *group)
        compiled = torch.compile(
            lambda *operands: dist_gemm.AllGatherLinear.apply(*operands, *group), fullgraph=True, backend="aot_eager"
        )
        assert torch.equal(compiled(x, weight, bias), expected)
        with typecheck():
            for operand, dim in ((x, 0), (weight, 0), (bias, 0), (back, 1)):
                spmd.assert_type(operand, {group[0]: spmd.S(dim)})
            y = dist_gemm.AllGatherLinear.apply(x, weight, bias, *group)
            spmd.assert_type(y, {group[0]: spmd.S(1)})
            spmd.assert_type(dist_gemm.LinearReduceScatter.apply(y, back, None, *group), {group[0]: spmd.S(0)})
            with pytest.raises(spmd.SpmdTypeError):
                dist_gemm.AllGatherLinear.apply(x, back, None, *group)
        assert torch.equal(y, expected)


def test_compilation_and_types():
    on_ranks(2, compiles_and_has_types)


def rejects_other_versions():
    from torchtitan.distributed import linear

    original = linear.AllGatherLinear
    with mock.patch.object(linear, "LinearReduceScatter", None):
        with pytest.raises(ImportError, match="torchtitan.distributed.linear has no LinearReduceScatter"):
            torchtitan.enable()
        assert linear.AllGatherLinear is original


def test_other_versions():
    on_ranks(1, rejects_other_versions)


# ---- overrides ----


def layers(overridden):
    """Return torchtitan's fused q, k, v, its output projection and feed-forward, with random weights and biases."""
    from torchtitan.config.override import OverrideConfig, apply_overrides
    from torchtitan.models.common.config_utils import make_ffn_config
    from torchtitan.models.common.dist_gemm import AllGatherFusedQKVLinear, RowParallelLinear
    from torchtitan.models.common.linear import Linear

    def linear(n, k, kind=Linear):
        return kind.Config(in_features=k, out_features=n, bias=True)

    class Root:
        pass

    root = Root()
    wqkv = linear((HEADS + 2 * KV) * D, H)
    root.qkv = AllGatherFusedQKVLinear.Config(head_dim=D, n_heads=HEADS, n_kv_heads=KV, wqkv=wqkv)
    root.wo = linear(H, HEADS * D, RowParallelLinear)
    root.ffn = make_ffn_config(
        dim=H, hidden_dim=I, w1_param_init={}, w2w3_param_init={}, tp_gemm_backend="dist_gemm"
    )
    if overridden:
        names = ["fused_qkv", "row_parallel", "feed_forward"]
        config = OverrideConfig(imports=[f"tdkernels.integrations.torchtitan.overrides.{name}" for name in names])
        assert len(apply_overrides(config, _Tree(root))) == 3
    modules = torch.nn.ModuleList([root.qkv.build(), root.wo.build(), root.ffn.build()]).to(device())
    with torch.no_grad():
        for number, parameter in enumerate(modules.parameters()):
            parameter.copy_(draw(*parameter.shape, seed=number))
    return modules


class _Tree:
    """A tree of configs with the traversal of torchtitan's root config."""

    def __init__(self, root):
        self.root = root

    def traverse(self, kind):
        return [(name, config, self.root, name) for name, config in vars(self.root).items() if isinstance(config, kind)]


def run(modules, x):
    qkv, wo, ffn = modules
    q, k, v = qkv(x)
    attended = q + k.repeat_interleave(HEADS // KV, 2) - v.repeat_interleave(HEADS // KV, 2)
    return ffn(wo(attended.flatten(2)) / 64)


def shard(modules):
    """Divide the parameters of the modules as torchtitan does."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    qkv, wo, ffn = modules
    for linear, dim in ((qkv.wqkv, 0), (ffn.w1, 0), (ffn.w3, 0), (wo, 1), (ffn.w2, 1)):
        linear.weight = torch.nn.Parameter(linear.weight.detach().chunk(ranks, dim)[rank].contiguous())
        if linear.bias is not None and dim == 0:
            linear.bias = torch.nn.Parameter(linear.bias.detach().chunk(ranks)[rank].contiguous())


def overrides_match_the_whole_model():
    from torchtitan.distributed.spmd_types import set_current_spmd_mesh

    ranks, rank = dist.get_world_size(), dist.get_rank()
    whole, own = layers(False), layers(True)
    shard(own)
    x, dy = draw(B, S, H, seed=50).requires_grad_(), draw(B, S, H, seed=51)
    y = run(whole, x)  # without a mesh: torchtitan's own projections
    y.backward(dy)
    x_own = x.detach().chunk(ranks, 1)[rank].clone().requires_grad_()
    with set_current_spmd_mesh(init_device_mesh(device().type, (ranks,), mesh_dim_names=("tp",))):
        with mock.patch.object(ag_gemm_op.multi, "ag_gemm_multi", wraps=ag_gemm_op.multi.ag_gemm_multi) as gathers:
            y_own = run(own, x_own)
    assert gathers.call_count == 2  # q, k, v; w1 and w3
    y_own.backward(dy.chunk(ranks, 1)[rank])
    close = dict(rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(y_own, y.chunk(ranks, 1)[rank], **close)
    torch.testing.assert_close(x_own.grad, x.grad.chunk(ranks, 1)[rank], **close)
    for (name, got), expected in zip(own.named_parameters(), whole.parameters(), strict=True):
        dims = [dim for dim in range(got.dim()) if got.shape[dim] != expected.shape[dim]]
        part = expected.grad.chunk(ranks, dims[0])[rank] if dims else expected.grad
        torch.testing.assert_close(got.grad, part, **close, msg=lambda text, name=name: f"{name}: {text}")


def test_overrides():
    on_ranks(2, overrides_match_the_whole_model)


# ---- experts ----

EXPERTS, TOP_K = 6, 2


def dispatches_to_experts(dtype):
    """The scored sum of elementwise experts, with gradients of x and of the scores. torchtitan's dispatcher agrees."""
    from torchtitan.config.override import OverrideConfig, apply_overrides
    from torchtitan.distributed.utils import set_spmd_backend
    from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

    ranks, rank = dist.get_world_size(), dist.get_rank()
    local, tokens = EXPERTS // ranks, 5
    x, scales = draw(tokens, H, seed=10 + rank, dtype=dtype), draw(EXPERTS, H, seed=1, dtype=dtype)
    generator = torch.Generator().manual_seed(20 + rank)
    scores = torch.rand(tokens, TOP_K, generator=generator).to(device())
    ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:TOP_K] for _ in range(tokens)]).to(device())
    counts = torch.bincount(ids.flatten(), minlength=EXPERTS)

    class Root:
        pass

    root = Root()
    root.dispatcher = AllToAllTokenDispatcher.Config(num_experts=EXPERTS, top_k=TOP_K)
    stock = root.dispatcher.build()
    imports = ["tdkernels.integrations.torchtitan.overrides.dispatcher"]
    assert len(apply_overrides(OverrideConfig(imports=imports), _Tree(root))) == 1
    ours = root.dispatcher.build()
    mesh = init_device_mesh(device().type, (ranks,), mesh_dim_names=("ep",))

    def run_experts(dispatcher):
        operands = x.clone().requires_grad_(), scores.clone().requires_grad_()
        rows, splits, metadata = dispatcher.dispatch(operands[0], operands[1], ids, counts)
        own = scales[rank * local : (rank + 1) * local]
        assert splits.shape == (local,) and splits.sum() == rows.shape[0]
        y = dispatcher.combine(rows * own.repeat_interleave(splits, 0), metadata, operands[0])
        y.backward(torch.ones_like(y))
        return y.detach(), operands[0].grad, operands[1].grad, splits

    wanted = [t.clone().requires_grad_() for t in (x, scores)]
    y = ((wanted[0][:, None] * scales[ids]) * wanted[1][..., None].to(dtype)).sum(1)
    y.backward(torch.ones_like(y))
    set_spmd_backend("default")  # torchtitan's dispatcher then uses the mesh that it was given
    try:
        for dispatcher in (ours, stock):
            dispatcher.wire_meshes(ep_mesh=mesh)
        results, expected = run_experts(ours), (y.detach(), wanted[0].grad, wanted[1].grad)
        tolerance = dict(rtol=0.03, atol=0.03) if dtype == torch.bfloat16 else dict(rtol=1e-5, atol=1e-5)
        for got, want in zip(results, expected):
            torch.testing.assert_close(got, want, **tolerance)
        with torch.no_grad():
            rows, splits, _ = stock.dispatch(x, scores, ids, counts)
            got, own_splits, _ = ours.dispatch(x, scores, ids, counts)
        assert torch.equal(got, rows) and torch.equal(own_splits, splits)
    finally:
        set_spmd_backend("spmd_types")


@pytest.mark.skipif(
    not hasattr(torch.compiler, "_is_non_strict_tracing"), reason="torchtitan's own dispatcher needs a newer torch"
)
@pytest.mark.parametrize("world_size, dtype", [(2, torch.float32), (3, torch.bfloat16)])
def test_dispatcher(world_size, dtype):
    on_ranks(world_size, dispatches_to_experts, dtype)
