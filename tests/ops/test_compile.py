"""torch.compile traces through the operators; torch.library's own checks of an operator pass."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tdkernels
from tests.ranks import device, on_ranks

HIDDEN, INNER = 16, 24


class Mlp(nn.Module):
    """The tensor-parallel MLP of one rank, with biases."""

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


class MlpOfAllRows(Mlp):
    """The same where every rank has all rows."""

    def forward(self, x):
        h = torch.relu(F.linear(x, self.up, self.up_bias))
        return tdkernels.gemm_ar(h, self.down, self.down_bias, config=self.config)


def _backend():
    # The CPU's inductor would need a C++ compiler and much time; it sees the operators through the same graph.
    return "inductor" if device().type == "cuda" else "aot_eager"


def _run(module, x):
    x = x.clone().requires_grad_()
    y = module(x)
    y.square().sum().backward()
    gradients = [x.grad, *(p.grad for p in module.parameters())]
    module.zero_grad()
    return [y.detach(), *gradients]


def compiled_equals_eager(mlp, config):
    torch._dynamo.reset()
    torch.manual_seed(torch.distributed.get_rank())
    module = mlp(config).to(device())
    compiled = torch.compile(module, fullgraph=True, backend=_backend())
    for rows in (4, 4, 6):  # the third call meets a shape that was not traced
        x = torch.randn(2, rows, HIDDEN, device=device())
        for got, expected in zip(_run(compiled, x), _run(module, x), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), module(x), rtol=1e-5, atol=1e-5)
    tdkernels.synchronize()


class Reduced(nn.Module):
    """Rows scattered, worked on and gathered, and a sum over ranks beside."""

    def __init__(self, config=None):
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.randn(HIDDEN))

    def forward(self, x):
        rows = tdkernels.reduce_scatter(x * self.weight, config=self.config)
        return tdkernels.all_gather(rows.sin(), config=self.config) + tdkernels.all_reduce(x, config=self.config)


class Decoder(nn.Module):
    """Queries of the last tokens over a cache that is sharded along the sequence; paged or not."""

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
        )  # fmt: skip
        return o.sin() * lse.unsqueeze(-1)


class PagedDecoder(Decoder):
    def __init__(self, config=None):
        super().__init__(config, paged=True)


class Attention(nn.Module):
    """Causal attention over a sharded sequence, with heads of a size that has to be padded on a GPU."""

    def __init__(self, config=None):
        super().__init__()
        self.config = config
        self.qkv = nn.Parameter(torch.randn((4 + 2 + 2) * 20, HIDDEN) / 4)

    def forward(self, x):
        q, k, v = F.linear(x, self.qkv).unflatten(-1, (8, 20)).split([4, 2, 2], dim=2)
        o, lse = tdkernels.ag_attention(q, k, v, sharding="zigzag", return_lse=True, config=self.config)
        return o.sin() * lse.unsqueeze(-1)


class SlicedExperts(nn.Module):
    """A router over experts of which every rank has a slice; one choice of each token is dropped."""

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


class SlicedExpertsOfOneProduct(SlicedExperts):
    activation = None


def opchecks():
    """Schema, fake implementation and registration, on ranks that make the same calls."""
    group = torch.distributed.group.WORLD.group_name
    ranks = torch.distributed.get_world_size()
    x, dy = torch.randn(ranks * 3, 8, device=device()), torch.randn(ranks * 3, 5, device=device())
    weight, bias = torch.randn(5, 8, device=device()), torch.randn(5, device=device())
    calls = {
        "ag_gemm": (x[:3], weight, bias, group, ""),
        "ag_gemm_backward": (dy, x[:3], weight, True, True, group, ""),
        "gemm_rs": (x, weight, bias, group, ""),
        "gemm_ar": (x, weight, bias, group, ""),
        "all_gather": (x, group, ""),
        "reduce_scatter": (x, group, ""),
        "all_reduce": (x, group, ""),
        "gemm_rs_backward": (dy[:3].contiguous(), x, weight, True, True, True, group, ""),
    }
    for name, arguments in calls.items():
        torch.library.opcheck(
            getattr(torch.ops.tdkernels, name).default, arguments, test_utils=("test_schema", "test_faketensor")
        )


@pytest.mark.parametrize(
    "mlp, config",
    [
        (Mlp, None),
        (Mlp, tdkernels.AgGemmConfig(method="torch")),
        (MlpOfAllRows, None),
        (MlpOfAllRows, tdkernels.GemmArConfig(exchange="one_shot", split_k=2)),
        (Reduced, None),
        (Reduced, tdkernels.CollectiveConfig(num_programs=2, block_bytes=1024)),
        (Decoder, None),
        (PagedDecoder, tdkernels.FlashDecodeConfig(block_n=16, num_warps=1, num_stages=1)),
        (Decoder, tdkernels.FlashDecodeConfig(method="torch")),
        (Attention, None),
        (Attention, tdkernels.AgAttentionConfig(method="torch")),
        (SlicedExperts, None),
        (SlicedExperts, tdkernels.MoeTpConfig(chunk_rows=16, stages=2)),
        (SlicedExpertsOfOneProduct, tdkernels.MoeTpConfig(method="torch")),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "explicit" if value else "default",
)
def test_fullgraph(mlp, config):
    on_ranks(2, compiled_equals_eager, mlp, config)


def test_opcheck():
    on_ranks(2, opchecks)
