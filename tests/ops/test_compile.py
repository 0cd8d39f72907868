"""torch.compile of every operator, and the checks of torch.library.opcheck."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tdkernels
from tdkernels.ops.common.config import as_argument
from tests.support.ranks import DEVICE, device, on_ranks

HIDDEN, INNER = 16, 24


class Mlp(nn.Module):
    """A tensor-parallel MLP with biases and sharded rows."""

    def __init__(self, config=None):
        super().__init__()
        self.config = config
        self.up = nn.Parameter(torch.randn(INNER, HIDDEN))
        self.up_bias = nn.Parameter(torch.randn(INNER))
        self.down = nn.Parameter(torch.randn(HIDDEN, INNER))
        self.down_bias = nn.Parameter(torch.randn(HIDDEN))

    def forward(self, x):
        h = torch.relu(tdkernels.ag_gemm(x, self.up, self.up_bias, config=self.config))
        return tdkernels.gemm_rs(h, self.down, self.down_bias)


class ReplicatedMlp(Mlp):
    """A tensor-parallel MLP in which every rank has all rows."""

    def forward(self, x):
        h = torch.relu(F.linear(x, self.up, self.up_bias))
        return tdkernels.gemm_ar(h, self.down, self.down_bias, config=self.config)


def _backend():
    # On CPU, inductor needs a C++ compiler and is slow. aot_eager traces the same graph.
    return "inductor" if device().type == "cuda" else "aot_eager"


def _run(module, x):
    x = x.clone().requires_grad_()
    y = module(x)
    y.square().sum().backward()
    gradients = [x.grad, *(p.grad for p in module.parameters())]
    module.zero_grad()
    return [y.detach(), *gradients]


def _assert_close(got, expected):
    """Compare with an fp32 tolerance; on GPUs relative to the maximum, since inductor sums in another order."""
    size = expected.abs().max().clamp(min=1).item() if device().type == "cuda" else 1
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5 * size)


def compiled_equals_eager(mlp, config, fullgraph=True):
    torch._dynamo.reset()
    torch.manual_seed(torch.distributed.get_rank())
    module = mlp(config).to(device())
    compiled = torch.compile(module, fullgraph=fullgraph, backend=_backend())
    for rows in (4, 4, 6):  # the third call has a shape that was not traced
        x = torch.randn(2, rows, HIDDEN, device=device())
        for got, expected in zip(_run(compiled, x), _run(module, x), strict=True):
            _assert_close(got, expected)
        with torch.no_grad():
            _assert_close(compiled(x), module(x))
    tdkernels.synchronize()


class Collectives(nn.Module):
    """reduce_scatter, an elementwise operation and all_gather, plus an all_reduce."""

    def __init__(self, config=None):
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.randn(HIDDEN))

    def forward(self, x):
        rows = tdkernels.reduce_scatter(x * self.weight, config=self.config)
        return tdkernels.all_gather(rows.sin(), config=self.config) + tdkernels.all_reduce(x, config=self.config)


class ReducedNorms(nn.Module):
    """A residual stream: all_reduce_rms_norm without a residual, then all_reduce_layer_norm of its results."""

    def __init__(self, config=None):
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.randn(HIDDEN))
        self.bias = nn.Parameter(torch.randn(HIDDEN))

    def forward(self, x):
        y, r = tdkernels.all_reduce_rms_norm(x, None, self.weight, config=self.config)
        y, r = tdkernels.all_reduce_layer_norm(y.sin(), r, self.weight, self.bias, config=self.config)
        with torch.no_grad():
            codes, _, scale = tdkernels.all_reduce_rms_norm(x, r, self.weight, quantize="fp8", config=self.config)
        return y.sin() + r + codes.to(r.dtype) * scale


class Decoder(nn.Module):
    """flash_decode over a cache that is sharded along the sequence, paged or not."""

    def __init__(self, config=None, paged=False):
        super().__init__()
        self.config = config
        self.keys = nn.Parameter(torch.randn(2, 8, 2, HIDDEN))
        self.values = nn.Parameter(torch.randn(2, 8, 2, INNER))
        self.register_buffer("lens", torch.tensor([8, 5], dtype=torch.int32))
        self.register_buffer("blocks", torch.tensor([[1], [0]], dtype=torch.int32) if paged else None)

    def forward(self, x):
        q = tdkernels.all_reduce(x)  # the same on all ranks
        o, lse = tdkernels.flash_decode(
            q, self.keys, self.values, self.lens, block_table=self.blocks, soft_cap=5.0, return_lse=True,
            config=self.config,
        )
        return o.sin() * lse.unsqueeze(-1)


class PagedDecoder(Decoder):
    def __init__(self, config=None):
        super().__init__(config, paged=True)


class LatentDecoder(nn.Module):
    """flash_decode over a cache in a buffer, whose values are its first columns."""

    def __init__(self, config=None):
        super().__init__()
        self.config = config
        self.register_buffer("cache", torch.randn(2, 8, 1, HIDDEN))
        self.register_buffer("lens", torch.tensor([8, 5], dtype=torch.int32))

    def forward(self, x):
        q = tdkernels.all_reduce(x)  # the same on all ranks
        values = self.cache[..., : HIDDEN // 2]
        o, lse = tdkernels.flash_decode(q, self.cache, values, self.lens, return_lse=True, config=self.config)
        return o.sin() * lse.unsqueeze(-1)


class Attention(nn.Module):
    """Causal attention over a sharded sequence, with a head dimension that is padded on a GPU."""

    def __init__(self, config=None):
        super().__init__()
        self.config = config
        self.qkv = nn.Parameter(torch.randn((4 + 2 + 2) * 20, HIDDEN) / 4)

    def forward(self, x):
        q, k, v = F.linear(x, self.qkv).unflatten(-1, (8, 20)).split([4, 2, 2], dim=2)
        o, lse = tdkernels.ag_attention(q, k, v, sharding="zigzag", return_lse=True, config=self.config)
        return o.sin() * lse.unsqueeze(-1)


class TensorParallelExperts(nn.Module):
    """Tensor-parallel experts behind a router; the assignments of one token are dropped."""

    activation = "swiglu"

    def __init__(self, config=None):
        super().__init__()
        self.config = config
        self.router = nn.Parameter(torch.randn(4, HIDDEN))
        width = 2 * INNER if self.activation else INNER
        self.gate_up = nn.Parameter(torch.randn(4, width, HIDDEN) / 4)
        self.down = nn.Parameter(torch.randn(4, HIDDEN, INNER) / 4)

    def forward(self, x):
        tokens = x.flatten(0, 1)
        weights, ids = F.linear(tokens, self.router).softmax(-1).topk(2)
        ids = ids.masked_fill(torch.arange(len(ids), device=ids.device).view(-1, 1) == 1, -1)
        y = tdkernels.tp_moe(
            tokens, ids, weights, self.gate_up, self.down, activation=self.activation, config=self.config
        )
        return y.view_as(x)


class TensorParallelExpertsNoActivation(TensorParallelExperts):
    activation = None


class ExpertParallelExperts(nn.Module):
    """Expert-parallel experts behind a router, with capacity for all tokens."""

    quantize = None
    max_tokens = 64

    def __init__(self, config=None):
        super().__init__()
        self.config = config
        self.router = nn.Parameter(torch.randn(4, HIDDEN))
        self.gate_up = nn.Parameter(torch.randn(2, 2 * INNER, HIDDEN) / 4)
        self.down = nn.Parameter(torch.randn(2, HIDDEN, INNER) / 4)

    def forward(self, x):
        tokens = x.flatten(0, 1)
        weights, ids = F.linear(tokens, self.router).softmax(-1).topk(2)
        ids = ids.masked_fill(torch.arange(len(ids), device=ids.device).view(-1, 1) == 1, -1)
        tokens = tokens if self.quantize is None else tokens.detach()
        y = tdkernels.ep_moe(
            tokens, ids, weights, self.gate_up, self.down, num_experts=4, quantize=self.quantize,
            max_tokens=self.max_tokens, config=self.config,
        )
        return y.view_as(x)


class MoeModules(nn.Module):
    """The modules of tdkernels.nn in sequence."""

    def __init__(self, config=None):
        super().__init__()
        where = {"device": device(), "dtype": torch.float32}
        routers = (tdkernels.nn.Router(HIDDEN, 4, 2, **where) for _ in range(2))
        self.expert_parallel = tdkernels.nn.EPMoE(next(routers), INNER, max_tokens_per_rank=24, **where)
        self.tensor_parallel = tdkernels.nn.TPMoE(next(routers), INNER, **where)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.3)

    def forward(self, x):
        return self.tensor_parallel(self.expert_parallel(x).sin())


class QuantizedExpertParallelExperts(ExpertParallelExperts):
    quantize = "fp8"


class ExactExpertParallelExperts(ExpertParallelExperts):
    """Without capacity the host waits for the number of rows, so the layer runs between graphs."""

    max_tokens = None


def op(name):
    if not hasattr(torch.ops.tdkernels, name):  # import the module that registers it
        getattr(tdkernels, name.removesuffix("_backward").removesuffix("_multi"))
    return getattr(torch.ops.tdkernels, name).default


def opcheck(name, *arguments):
    """Run torch.library.opcheck for schema and fake implementation. Collective."""
    torch.library.opcheck(op(name), arguments, test_utils=("test_schema", "test_faketensor"))


def opcheck_dense():
    group = torch.distributed.group.WORLD.group_name
    ranks = torch.distributed.get_world_size()
    x, dy = torch.randn(ranks * 3, 8, device=device()), torch.randn(ranks * 3, 5, device=device())
    weight, bias = torch.randn(5, 8, device=device()), torch.randn(5, device=device())
    opcheck("ag_gemm", x[:3], weight, bias, group, "")
    opcheck("ag_gemm_backward", dy, x[:3], weight, [], True, True, group, "")
    opcheck("ag_gemm_backward", dy, x[:3], weight, [torch.ones_like(weight)], True, True, group, "")
    opcheck("column_linear_backward", dy, x, weight, [torch.ones_like(weight)], True, True, group, "")
    opcheck("accumulate_weight_gradient", [torch.ones_like(weight)], dy, x)
    opcheck("ag_gemm_multi", x[:3], [weight, weight[:2]], [bias, None], 3, True, group, "")
    opcheck("gemm_rs", x, weight, bias, None, group, "")
    opcheck("gemm_ar", x, weight, bias, group, "")
    opcheck("all_gather", x, group, "")
    opcheck("reduce_scatter", x, group, "")
    opcheck("all_reduce", x, group, "")
    opcheck("reduce_scatter_of_gradient", x, group, "")
    assert tdkernels.all_reduce_rms_norm  # imports the module that registers the next operators
    for keep in (False, True):
        opcheck("all_reduce_norm", x, x, weight[0], None, "all_reduce_rms_norm", 1e-6, keep, group, "")
    opcheck("all_reduce_norm_fp8", x, None, weight[0], weight[1], "all_reduce_layer_norm", 1e-6, group, "")
    opcheck("gemm_rs_backward", dy[:3].contiguous(), x, weight, [], True, True, True, group, "")


def opcheck_attention():
    group = torch.distributed.group.WORLD.group_name
    q, k, v = (torch.randn(2, 6, heads, d, device=device()) for heads, d in ((4, 20), (2, 20), (2, 24)))
    o, lse = op("ag_attention")(q, k, v, True, 0.2, "zigzag", group, "")
    opcheck("ag_attention", q, k, v, True, 0.2, "zigzag", group, "")
    opcheck("ag_attention_backward", o, None, q, k, v, o, lse, True, True, False, True, 0.2, "zigzag", group, "")
    pipelined = as_argument(tdkernels.AgAttentionConfig(method="flash"))
    call = [x.bfloat16() for x in (q, k.transpose(1, 2).contiguous().transpose(1, 2), v)]
    o, lse = op("ag_attention")(*call, True, 0.2, "zigzag", group, pipelined)
    opcheck("ag_attention", *call, True, 0.2, "zigzag", group, pipelined)
    opcheck("ag_attention_backward", o, None, *call, o, lse, True, True, True, True, 0.2, "zigzag", group, pipelined)
    q, lens = q[:, :2].contiguous(), torch.tensor([6, 3], dtype=torch.int32, device=device())
    for group_name in (group, ""):  # "": this rank alone
        cache = q, k, v, lens, None
        o, _, lse = op("flash_decode")(*cache, None, None, None, 0.2, None, 4, True, group_name, "")
        opcheck("flash_decode", *cache, None, None, None, 0.2, None, 4, True, group_name, "")
        opcheck("flash_decode", *cache, None, None, None, 0.2, 5.0, None, False, group_name, "")
        opcheck(
            "flash_decode_backward", None, torch.ones_like(lse), *cache, o, lse, True, False, True, 0.2, None, 4,
            group_name, "",
        )


def opcheck_experts():
    group = torch.distributed.group.WORLD.group_name
    x, dy = torch.randn(3, HIDDEN, device=device()), torch.randn(3, HIDDEN, device=device())
    weights, ids = torch.rand(3, 2, device=device()), torch.tensor([[0, 1], [3, 2], [-1, 1]], device=device())
    gate_up, down = torch.randn(4, 2 * INNER, HIDDEN, device=device()), torch.randn(4, HIDDEN, INNER, device=device())
    for activation in ("swiglu", ""):
        layer = x, ids, weights, gate_up if activation else gate_up[:, :INNER].contiguous(), down
        _, *kept = op("tp_moe")(*layer, activation, True, group, "")
        opcheck("tp_moe", *layer, activation, False, group, "")
        opcheck("tp_moe_backward", dy, *layer, *kept, True, False, True, True, activation, group, "")
    layer, settings = (x, ids, weights, gate_up[:2], down[:2]), (4, "swiglu", None, 16, 8)
    _, *kept = op("ep_moe")(*layer, *settings, True, group, "", "")
    opcheck("ep_moe", *layer, *settings, False, group, "", "")
    opcheck("ep_moe_backward", dy, *layer, *kept, True, True, False, True, *settings, group, "")


CASES = {
    "Mlp": (Mlp, None),
    "Mlp, torch": (Mlp, tdkernels.AgGemmConfig(method="torch")),
    "ReplicatedMlp": (ReplicatedMlp, None),
    "ReplicatedMlp, one shot": (ReplicatedMlp, tdkernels.GemmArConfig(exchange="one_shot", split_k=2)),
    "Collectives": (Collectives, None),
    "ReducedNorms": (ReducedNorms, None),
    "ReducedNorms, torch": (ReducedNorms, tdkernels.AllReduceNormConfig(method="torch")),
    "Collectives, blocks": (Collectives, tdkernels.CollectiveConfig(num_programs=2, block_bytes=1024)),
    "Decoder": (Decoder, None),
    "PagedDecoder": (PagedDecoder, tdkernels.FlashDecodeConfig(block_n=16, num_warps=1, num_stages=1)),
    "Decoder, torch": (Decoder, tdkernels.FlashDecodeConfig(method="torch")),
    "Attention": (Attention, None),
    "Attention, torch": (Attention, tdkernels.AgAttentionConfig(method="torch")),
    "TensorParallelExperts": (TensorParallelExperts, None),
    "TensorParallelExperts, two stages": (TensorParallelExperts, tdkernels.MoeTpConfig(chunk_rows=16, stages=2)),
    "TensorParallelExperts, no activation, torch": (
        TensorParallelExpertsNoActivation, tdkernels.MoeTpConfig(method="torch")
    ),
    "ExpertParallelExperts": (ExpertParallelExperts, None),
    "ExpertParallelExperts, per expert": (
        ExpertParallelExperts, tdkernels.EpMoeConfig(tdkernels.EpConfig(combine="per_expert", num_warps=1))
    ),
    "ExpertParallelExperts, fp8": (QuantizedExpertParallelExperts, None),
    "ExpertParallelExperts, torch": (ExpertParallelExperts, tdkernels.EpMoeConfig(method="torch")),
    "MoeModules": (MoeModules, None),
}
# CPU ranks compile slowly, so they run one case of each kind.
COVERING = (
    "Mlp", "ReplicatedMlp, one shot", "Collectives", "ReducedNorms", "PagedDecoder", "Attention", "Decoder, torch",
    "Attention, torch", "TensorParallelExperts, two stages", "ExpertParallelExperts", "ExpertParallelExperts, torch",
)


# torch's grouped GEMM does not support fp32 on a GPU.
ON_GPUS = [case for case in CASES if case != "TensorParallelExperts, no activation, torch"]


@pytest.mark.parametrize("case", ON_GPUS if DEVICE == "cuda" else COVERING)
def test_fullgraph(case):
    on_ranks(2, compiled_equals_eager, *CASES[case])


@pytest.mark.parametrize("method", ["sequence", "fused"])
def test_between_graphs(method):
    config = tdkernels.EpMoeConfig(method=method)
    on_ranks(2, compiled_equals_eager, ExactExpertParallelExperts, config, False)


def test_caches_in_buffers():
    config = tdkernels.FlashDecodeConfig(method="split", block_n=16, num_warps=1, num_stages=1)
    on_ranks(2, compiled_equals_eager, LatentDecoder, config)


@pytest.mark.parametrize("checks", [opcheck_dense, opcheck_attention, opcheck_experts])
def test_opcheck(checks):
    on_ranks(2, checks)
