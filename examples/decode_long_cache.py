"""Decoding with a cache that is divided between ranks along the sequence, and a tensor-parallel MLP.

    python examples/decode_long_cache.py               # on all GPUs if there are two or more, else on 4 CPU processes
    python examples/decode_long_cache.py --nproc 2 --device cpu

Prints how far the last token's hidden state is from float64, ours and that of plain torch on one device, and on GPUs
the time of a token, eagerly and as a replay of a CUDA graph; exit code 1 if it is too far off. The part to copy is
Decoder: all that changes from token to token (lengths, whose turn it is to keep the token's key) stays on the device,
so that one graph serves every token.
"""

import argparse
import dataclasses
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F

import tdkernels
from tdkernels.launch import pick_device, rank_device, run_ranks


@dataclasses.dataclass(frozen=True)
class Sizes:
    batch: int = 2
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    dim: int = 16
    inner: int = 32  # of each rank
    layers: int = 2
    keys: int = 20  # of the prompt, on each rank
    tokens: int = 5
    dtype: torch.dtype = torch.float32


ON_GPUS = Sizes(4, 4096, 32, 8, 128, 3584, 4, 8192, 20, torch.bfloat16)


class Decoder:
    """A step of all layers for one token of each sequence; x [B, H] and y [B, H] are the same on all ranks."""

    def __init__(self, sizes, weights, caches, rank, world_size):
        """``weights``: of each layer (q, k and v in one, o, gate and up in one, down), the last two our part of them;
        ``caches``: of each layer our keys and values [B, room, kv_heads, D], of which sizes.keys are there."""
        self.sizes, self.weights, self.caches, self.rank, self.world_size = sizes, weights, caches, rank, world_size
        device = weights[0][0].device
        self.sequences = torch.arange(sizes.batch, device=device)
        self.lens = torch.full((sizes.batch,), sizes.keys, dtype=torch.int32, device=device)
        self.turn = torch.zeros((), dtype=torch.int32, device=device)

    def __call__(self, x):
        ours = self.turn % self.world_size == self.rank  # one query sees all keys: on which ranks they lie is free
        lens = self.lens + ours
        for (w_qkv, w_o, w_gate_up, w_down), (keys, values) in zip(self.weights, self.caches):
            q, k, v = split_qkv(F.linear(x, w_qkv), self.sizes)
            at = self.sequences, self.lens.long()
            keys[at], values[at] = torch.where(ours, k, keys[at]), torch.where(ours, v, values[at])
            x = x + F.linear(tdkernels.flash_decode(q, keys, values, lens).flatten(1), w_o)
            gate, up = F.linear(x, w_gate_up).chunk(2, dim=-1)
            x = x + tdkernels.gemm_ar(F.silu(gate) * up, w_down)
        self.lens.copy_(lens)
        self.turn += 1
        return x


def split_qkv(qkv, sizes):
    """[B, heads, D] and twice [B, kv_heads, D]."""
    heads = qkv.unflatten(1, (-1, sizes.dim))
    return heads.split((sizes.heads, sizes.kv_heads, sizes.kv_heads), dim=1)


def whole(x, weights, caches, sizes):
    """The same step on one device in plain torch: ``caches`` of all keys, to which it appends."""
    for layer, (w_qkv, w_o, w_gate_up, w_down) in enumerate(weights):
        q, k, v = split_qkv(F.linear(x, w_qkv), sizes)
        keys, values = caches[layer] = [torch.cat([c, new[:, None]], 1) for c, new in zip(caches[layer], (k, v))]
        groups = sizes.heads // sizes.kv_heads
        keys, values = (c.repeat_interleave(groups, 2).transpose(1, 2) for c in (keys, values))
        scores = (q[:, :, None] @ keys.transpose(2, 3)) * sizes.dim**-0.5
        o = (scores.float() if x.dtype != torch.float64 else scores).softmax(-1).to(x.dtype) @ values
        x = x + F.linear(o.flatten(1), w_o)
        gate, up = F.linear(x, w_gate_up).chunk(2, dim=-1)
        x = x + F.linear(F.silu(gate) * up, w_down)
    return x


def tensors(sizes, world_size, device):
    """The same on all ranks: x, the whole weights, and all ranks' keys and values of the prompt by rank."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape, scale=1.0):
        return torch.randn(shape, generator=generator, device=device).mul_(scale).to(sizes.dtype)

    heads, inner = sizes.heads * sizes.dim, sizes.inner * world_size
    qkv, small = heads + 2 * sizes.kv_heads * sizes.dim, sizes.hidden**-0.5
    layers = range(sizes.layers)
    weights = [
        (normal(qkv, sizes.hidden, scale=small), normal(sizes.hidden, heads, scale=small),
         normal(2 * inner, sizes.hidden, scale=small), normal(sizes.hidden, inner, scale=small)) for _ in layers
    ]
    prompt = world_size, sizes.batch, sizes.keys, sizes.kv_heads, sizes.dim
    return normal(sizes.batch, sizes.hidden), weights, [[normal(*prompt), normal(*prompt)] for _ in layers]


def part_of(weights, rank, world_size):
    """A rank's: gate and up by rows, down by columns."""
    return [
        (qkv, o, gate_up.unflatten(0, (2, world_size, -1))[:, rank].flatten(0, 1), down.chunk(world_size, 1)[rank])
        for qkv, o, gate_up, down in weights
    ]


def progress(text):
    """Print from rank 0, at once: CPU ranks take a minute or two for the whole program."""
    if dist.get_rank() == 0:
        print(text, file=sys.stderr, flush=True)


def milliseconds(call, tokens):
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    dist.barrier()
    torch.cuda.synchronize()
    start.record()
    for _ in range(tokens):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / tokens


def on_rank(sizes):
    """Runs on every rank: (our largest error, that of plain torch, milliseconds of a token eagerly and in a graph)."""
    device, rank, ranks = rank_device(), dist.get_rank(), dist.get_world_size()
    x, weights, prompt = tensors(sizes, ranks, device)
    room = sizes.keys + 4 * sizes.tokens
    caches = [[F.pad(c[rank], (0, 0, 0, 0, 0, room - sizes.keys)) for c in layer] for layer in prompt]
    step = Decoder(sizes, part_of(weights, rank, ranks), caches, rank, ranks)

    def decode(name, step, x):
        for token in range(sizes.tokens):
            progress(f"{name}: token {token + 1} of {sizes.tokens}")
            x = F.rms_norm(step(x), x.shape[-1:])  # in place of a vocabulary: the next token is what comes out
        return x

    found = []
    for dtype in (torch.float64, sizes.dtype):
        all_weights = [[w.to(dtype) for w in layer] for layer in weights]
        all_caches = [[torch.cat(list(c), 1).to(dtype) for c in layer] for layer in prompt]
        plain_step = lambda x, w=all_weights, c=all_caches: whole(x, w, c, sizes)  # noqa: E731
        found.append(decode(f"plain torch, {dtype}", plain_step, x.to(dtype)))
    exact, plain = found
    errors = [(y - exact).abs().max().item() for y in (decode("tdkernels", step, x), plain)]
    times = None
    if device.type == "cuda":
        eager = milliseconds(lambda: step(x), sizes.tokens)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step(x)
        times = eager, milliseconds(graph.replay, sizes.tokens)
    tdkernels.synchronize()
    return *errors, times


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--nproc", type=int, help="ranks, at least 2; default: all GPUs, or 4 CPU processes")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    options = parser.parse_args()
    gpus = 0 if options.device == "cpu" else torch.cuda.device_count()
    world_size = options.nproc or (gpus if gpus >= 2 else 4)
    if world_size < 2:
        parser.error("it takes at least 2 ranks")
    device = pick_device(options.device, world_size)
    sizes = ON_GPUS if device == "cuda" else Sizes()
    reports = run_ranks(world_size, on_rank, sizes, device=device)
    ours, plain = max(report[0] for report in reports), reports[0][1]
    print(f"{sizes.tokens} tokens, {sizes.keys * world_size} keys on {world_size} ranks: largest error {ours:.1e}, "
          f"plain torch {plain:.1e}")
    if device == "cuda":
        eager, graph = (max(report[2][which] for report in reports) for which in (0, 1))
        print(f"milliseconds of a token, slowest rank: {eager:.3f}, in a CUDA graph {graph:.3f}")
    print("All as it should be." if ours <= 2 * plain else "NOT as it should be.")
    return 0 if ours <= 2 * plain else 1


if __name__ == "__main__":
    raise SystemExit(main())
