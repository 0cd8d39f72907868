"""A plain Llama decoder in torch, without embedding and output layer.

The number of heads follows from the width of the projections. So the model also runs with sharded weights, and its
attention takes a sharded input if the projections gather it.
"""

import copy

import torch
import torch.nn.functional as F
from torch import nn

COLUMNS = "attention.wq", "attention.wk", "attention.wv", "feed_forward.w1", "feed_forward.w3"
ROWS = "attention.wo", "feed_forward.w2"
_EPS, _ROPE_BASE = 1e-5, 10000.0


def rope_angles(positions, head_dim, device):
    """Return the angles of the rotary embedding of positions 0 to ``positions`` - 1, fp32 [positions, head_dim]."""
    exponents = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
    angles = torch.outer(torch.arange(positions, device=device, dtype=torch.float32), _ROPE_BASE**-exponents)
    return torch.cat((angles, angles), -1)


def rotate(x, rope):
    """Apply the rotary embedding (cos, sin) to x [B, heads, S, head_dim]."""
    cos, sin = rope
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class Cache:
    """Keys and values of a layer, [B, kv heads, context, head_dim]. The last position is that of the new token."""

    def __init__(self, keys, values):
        self.keys, self.values = keys, values

    def append(self, key, value):
        """Write the key and the value of the new token. Return all keys and values."""
        self.keys[:, :, -1:].copy_(key)
        self.values[:, :, -1:].copy_(value)
        return self.keys, self.values

    def own(self, rank, ranks):
        """Return the cache of the kv heads of a rank."""
        return Cache(*(one.chunk(ranks, 1)[rank].contiguous() for one in (self.keys, self.values)))


class Attention(nn.Module):
    def __init__(self, size):
        super().__init__()
        query, key = size.heads * size.head_dim, size.kv_heads * size.head_dim
        self.head_dim = size.head_dim
        self.wq, self.wk, self.wv = (nn.Linear(size.hidden, width, bias=False) for width in (query, key, key))
        self.wo = nn.Linear(query, size.hidden, bias=False)

    def forward(self, x, *, rope, cache=None):
        q, k, v = (self._heads(linear(x)) for linear in (self.wq, self.wk, self.wv))
        q, k = rotate(q, rope), rotate(k, rope)
        if cache is not None:
            k, v = cache.append(k, v)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=cache is None, enable_gqa=True)
        return self.wo(y.transpose(1, 2).flatten(2))

    def _heads(self, x):
        """Return x [B, S, heads * head_dim] as [B, heads, S, head_dim]."""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class FeedForward(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.w1, self.w3 = (nn.Linear(size.hidden, size.intermediate, bias=False) for _ in range(2))
        self.w2 = nn.Linear(size.intermediate, size.hidden, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Layer(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.attention_norm, self.feed_forward_norm = (nn.RMSNorm(size.hidden, eps=_EPS) for _ in range(2))
        self.attention, self.feed_forward = Attention(size), FeedForward(size)

    def forward(self, x, rope, cache=None):
        x = x + self.attention(self.attention_norm(x), rope=rope, cache=cache)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Llama(nn.Module):
    """The decoder layers and the last norm."""

    def __init__(self, size, layers):
        super().__init__()
        self.layers = nn.ModuleList(Layer(size) for _ in range(layers))
        self.norm = nn.RMSNorm(size.hidden, eps=_EPS)

    def forward(self, x, rope, caches=None):
        """Return the hidden states [B, S, hidden] for embeddings x of the same shape.

        Args:
            rope: (cos, sin) of the positions of x.
            caches: one Cache per layer, or None for causal attention among the tokens of x.
        """
        for layer, cache in zip(self.layers, caches or [None] * len(self.layers), strict=True):
            x = layer(x, rope, cache)
        return self.norm(x)


@torch.no_grad()
def draw_weights(model, generator):
    """Draw the weights of a model, so that every layer has outputs of the magnitude of its inputs."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(std=parameter.shape[-1] ** -0.5, generator=generator)
        else:
            parameter.normal_(mean=1.0, std=0.1, generator=generator)


@torch.no_grad()
def shard(model, rank, ranks):
    """Return a copy of a complete Llama with the weights of one rank, in the usual tensor-parallel layout."""
    part = copy.deepcopy(model)
    for layer in part.layers:
        for names, dim in ((COLUMNS, 0), (ROWS, 1)):
            for name in names:
                linear = layer.get_submodule(name)
                linear.weight = nn.Parameter(linear.weight.chunk(ranks, dim)[rank].clone().contiguous())
    return part
