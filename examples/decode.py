"""Decode tokens with a tensor-parallel Llama (random weights), with tdkernels and with plain torch and NCCL.

    python examples/decode.py               # on all GPUs if there are two or more, else on 2 CPU processes
    python examples/decode.py --nproc 2 --device cpu

Each rank has its heads, its columns of the MLP and its part of the vocabulary. A layer has two all-reduces, each
followed by the residual addition and a norm. ``WithTdkernels`` makes each of these one call, ``gemm_ar_rms_norm``, and
reads the cache with ``flash_decode``. ``WithTorch`` is the same model in plain torch.

The program compares the tokens of both models: exit code 1 if they differ where the logits are not close. On GPUs it
also prints the time of a token, eagerly and as a replay of a CUDA graph, and its parts. All state of the models
(lengths, tokens, caches) stays on the device, so one graph serves every token.
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
    """Sizes of the whole model, and of the run."""

    vocabulary: int = 64
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    dim: int = 16
    inner: int = 96
    layers: int = 2
    batch: int = 2
    context: int = 12  # keys in the cache before the first token
    tokens: int = 6
    dtype: torch.dtype = torch.float32


ON_GPUS = Sizes(128256, 4096, 32, 8, 128, 14336, 8, 4, 4096, 32, torch.bfloat16)  # 8 of the 32 layers of Llama-3.1-8B
EPS = 1e-5


class Weights:
    """The weights of a rank. Every rank draws the whole matrices from the same seed and keeps its part."""

    def __init__(self, sizes, rank, ranks):
        self.generator, self.dtype = torch.Generator(rank_device()).manual_seed(0), sizes.dtype
        attention = sizes.heads * sizes.dim
        self.embedding = self._draw(sizes.vocabulary, sizes.hidden)
        self.layers = []
        for _ in range(sizes.layers):
            heads = sizes.heads + 2 * sizes.kv_heads
            qkv = self._draw(heads, sizes.dim, sizes.hidden, scale=sizes.hidden**-0.5)
            q, k, v = (part.chunk(ranks)[rank] for part in qkv.split((sizes.heads, sizes.kv_heads, sizes.kv_heads)))
            gate_up = self._draw(2, sizes.inner, sizes.hidden, scale=sizes.hidden**-0.5)
            self.layers.append((
                self._norm(sizes.hidden), torch.cat((q, k, v)).flatten(0, 1),
                self._draw(sizes.hidden, attention, scale=attention**-0.5).chunk(ranks, 1)[rank].contiguous(),
                self._norm(sizes.hidden), gate_up.chunk(ranks, 1)[rank].flatten(0, 1),
                self._draw(sizes.hidden, sizes.inner, scale=sizes.inner**-0.5).chunk(ranks, 1)[rank].contiguous(),
            ))
        self.last_norm = self._norm(sizes.hidden)
        self.output = self._draw(sizes.vocabulary, sizes.hidden, scale=sizes.hidden**-0.5).chunk(ranks)[rank].clone()

    def _draw(self, *shape, scale=1.0):
        device = self.generator.device
        return torch.randn(shape, generator=self.generator, device=device).mul_(scale).to(self.dtype)

    def _norm(self, size):
        return 1 + self._draw(size, scale=0.1)

    def caches(self, sizes, rank, ranks):
        """Return keys and values [B, room, kv heads of this rank, D] of each layer; ``context`` of them are drawn."""
        shape = sizes.batch, sizes.context, sizes.kv_heads, sizes.dim
        room = 0, 0, 0, 0, 0, 6 * sizes.tokens  # for all runs of ``on_rank``
        return [
            [F.pad(self._draw(*shape).chunk(ranks, 2)[rank], room) for _ in ("keys", "values")] for _ in self.layers
        ]


def rotate(x, angles):
    """Apply the rotary embedding to x [B, heads, D]; angles [B, D / 2] in fp32."""
    cos, sin = angles.cos().unsqueeze(1), angles.sin().unsqueeze(1)
    first, second = x.float().chunk(2, -1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), -1).to(x.dtype)


class WithTorch:
    """A tensor-parallel Llama that decodes one token of each sequence, in plain torch.

    Attributes:
        tokens: The next token of each sequence, int64 [B]. ``step`` replaces it by the token that follows.
        lens: Number of keys in the cache of each sequence, int32 [B].
        logits: The logits of the last step, [B, vocabulary].
    """

    def __init__(self, sizes, weights, rank, ranks):
        self.sizes, self.weights, self.ranks = sizes, weights, ranks
        device = weights.embedding.device
        self.heads, self.kv_heads = sizes.heads // ranks, sizes.kv_heads // ranks
        self.caches = weights.caches(sizes, rank, ranks)
        self.sequences = torch.arange(sizes.batch, device=device)
        self.tokens = torch.arange(sizes.batch, device=device)
        self.lens = torch.full((sizes.batch,), sizes.context, dtype=torch.int32, device=device)
        self.logits = weights.embedding.new_empty(sizes.batch, sizes.vocabulary)
        exponents = torch.arange(0, sizes.dim, 2, device=device, dtype=torch.float32) / sizes.dim
        self.frequencies = 500000.0**-exponents

    def step(self):
        """Decode one token of each sequence."""
        layers = self.weights.layers
        angles = self.lens.unsqueeze(1) * self.frequencies
        after = self.lens + 1
        residual = self.weights.embedding[self.tokens]
        y = F.rms_norm(residual, residual.shape[-1:], layers[0][0], EPS)
        for number, (_, w_qkv, w_o, norm, w_gate_up, w_down) in enumerate(layers):
            heads = self.heads, self.kv_heads, self.kv_heads
            q, k, v = F.linear(y, w_qkv).unflatten(1, (-1, self.sizes.dim)).split(heads, 1)
            keys, values = self.caches[number]
            place = self.sequences, self.lens.long()
            keys[place], values[place] = rotate(k, angles), v
            o = self.attention(rotate(q, angles), keys, values, after).flatten(1)
            y, residual = self.reduce(o, w_o, residual, norm)
            gate, up = F.linear(y, w_gate_up).chunk(2, -1)
            next_norm = layers[number + 1][0] if number + 1 < len(layers) else self.weights.last_norm
            y, residual = self.reduce(F.silu(gate) * up, w_down, residual, next_norm)
        self.logits.copy_(self.gather(F.linear(y, self.weights.output)))
        self.tokens.copy_(self.logits.argmax(-1))
        self.lens.copy_(after)

    def attention(self, q, keys, values, lens):
        """Return the attention [B, heads, D] of q [B, heads, D] over the first ``lens`` keys.

        The query heads that share a head of the keys are passed as query tokens of that head, so no key is copied.
        """
        mask = torch.arange(keys.shape[1], device=q.device) < lens.view(-1, 1, 1, 1)
        groups = q.unflatten(1, (self.kv_heads, -1))
        mask = mask.expand(-1, -1, groups.shape[2], -1)
        return F.scaled_dot_product_attention(groups, keys.transpose(1, 2), values.transpose(1, 2), mask).flatten(1, 2)

    def reduce(self, x, weight, residual, norm):
        """Return (norm of r, r) for r = all_reduce(x @ weight.T) + residual."""
        z = F.linear(x, weight)
        dist.all_reduce(z)
        z += residual
        return F.rms_norm(z, norm.shape, norm, EPS), z

    def gather(self, logits):
        """Return the logits of the whole vocabulary."""
        parts = [torch.empty_like(logits) for _ in range(self.ranks)]
        dist.all_gather(parts, logits)
        return torch.cat(parts, 1)


class WithTdkernels(WithTorch):
    """The same model with tdkernels."""

    def __init__(self, sizes, weights, rank, ranks, alone):
        """``alone``: a group of this rank only. Every rank has all keys of its heads, so attention needs no peers."""
        super().__init__(sizes, weights, rank, ranks)
        self.alone = alone

    def attention(self, q, keys, values, lens):
        return tdkernels.flash_decode(q, keys, values, lens, group=self.alone)

    def reduce(self, x, weight, residual, norm):
        return tdkernels.gemm_ar_rms_norm(x, weight, residual, norm, EPS)

    def gather(self, logits):
        parts = tdkernels.all_gather(logits)  # [ranks * B, vocabulary / ranks]
        return parts.view(self.ranks, *logits.shape).transpose(0, 1).flatten(1)


class WithoutCommunication(WithTdkernels):
    """With torch's GEMM, addition and norm, and without peers, for the breakdown; its results are wrong."""

    def reduce(self, x, weight, residual, norm):
        z = F.linear(x, weight) + residual
        return F.rms_norm(z, norm.shape, norm, EPS), z

    def gather(self, logits):
        return logits.repeat(1, self.ranks)


class WithoutAttention(WithTdkernels):
    """Without reading the cache, for the breakdown; its results are wrong."""

    def attention(self, q, keys, values, lens):
        return q


# ---- comparison ----


def decode(model, number):
    """Run ``number`` steps; return the tokens that they read [number, B] and the logits [number, B, vocabulary]."""
    read, logits = [], []
    for _ in range(number):
        read.append(model.tokens.clone())
        model.step()
        logits.append(model.logits.clone())
    return torch.stack(read), torch.stack(logits)


def follow(model, read):
    """Run a step for each of the tokens in ``read`` [number, B], instead of the model's own; return the logits."""
    logits = []
    for tokens in read:
        model.tokens.copy_(tokens)
        model.step()
        logits.append(model.logits.clone())
    return torch.stack(logits)


def compare(expected, logits):
    """Compare two models' logits [number, B, vocabulary]: return (tokens equal, all, different without a near tie).

    The logits of both models are rounded differently, by up to ``error``. A token may differ if the logit of the other
    model's token is closer to the largest one than twice the error.
    """
    eps = torch.finfo(expected.dtype).eps
    expected, logits = expected.float(), logits.float()
    error = 16 * eps * expected.abs().max()  # rounding in some ten operations, which add up randomly
    theirs, ours = expected.argmax(-1), logits.argmax(-1)
    gap = expected.amax(-1) - expected.gather(-1, ours.unsqueeze(-1)).squeeze(-1)
    wrong = (ours != theirs) & (gap > 2 * error) | ~logits.isfinite().all(-1)
    return (ours == theirs).sum().item(), theirs.numel(), wrong.sum().item()


def milliseconds(call, number):
    """Return the milliseconds of a call, the mean of ``number`` calls."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    call()
    dist.barrier()
    torch.cuda.synchronize()
    start.record()
    for _ in range(number):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / number


def capture(model):
    """Return a CUDA graph of a step."""
    model.step()  # the first call with a shape allocates, which a graph cannot
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        model.step()
    return graph


def times(model, number):
    """Return the milliseconds of a token, (eagerly, in a CUDA graph)."""
    eager = milliseconds(model.step, number)
    return eager, milliseconds(capture(model).replay, number)


def on_rank(sizes):
    """Run on every rank; return (result of ``compare``, times by name or None)."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    alone = [dist.new_group([one]) for one in range(ranks)][rank]
    weights = Weights(sizes, rank, ranks)

    def progress(text):
        if rank == 0:
            print(text, file=sys.stderr, flush=True)  # CPU ranks take a minute or two for the whole program

    with torch.no_grad():
        progress("plain torch")
        read, expected = decode(WithTorch(sizes, weights, rank, ranks), sizes.tokens)
        # The caches of both models are drawn from the same generator, one after the other.
        weights = Weights(sizes, rank, ranks)
        progress("tdkernels")
        found = compare(expected, follow(WithTdkernels(sizes, weights, rank, ranks, alone), read))
        measured = None
        if rank_device().type == "cuda":
            measured = {"torch": times(WithTorch(sizes, weights, rank, ranks), sizes.tokens)}
            for kind in (WithTdkernels, WithoutCommunication, WithoutAttention):
                measured[kind.__name__] = times(kind(sizes, weights, rank, ranks, alone), sizes.tokens)
    tdkernels.synchronize()
    return found, measured


def report_times(reports):
    """Print the times of the slowest rank."""
    slowest = {name: [max(report[1][name][way] for report in reports) for way in (0, 1)] for name in reports[0][1]}
    print("milliseconds of a token          eager   graph")
    for name, words in (("torch", "plain torch and NCCL"), ("WithTdkernels", "tdkernels")):
        print(f"  {words:<28} {slowest[name][0]:8.3f} {slowest[name][1]:7.3f}")
    total = slowest["WithTdkernels"]
    parts = {
        "all-reduces, all-gather *": [total[way] - slowest["WithoutCommunication"][way] for way in (0, 1)],
        "attention": [total[way] - slowest["WithoutAttention"][way] for way in (0, 1)],
    }
    parts["the rest, mostly GEMMs"] = [total[way] - sum(part[way] for part in parts.values()) for way in (0, 1)]
    for name, (eager, graph) in parts.items():
        print(f"    {name:<26} {eager:8.3f} {graph:7.3f}")
    print("* the time saved by torch's GEMM, addition and norm without communication in their place")


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--nproc", type=int, help="ranks, at least 2; default: all GPUs, or 2 CPU processes")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    options = parser.parse_args()
    gpus = 0 if options.device == "cpu" else torch.cuda.device_count()
    world_size = options.nproc or (gpus if gpus >= 2 else 2)
    device = pick_device(options.device, world_size) if world_size > 1 else "cpu"
    sizes = ON_GPUS if device == "cuda" else Sizes()
    if world_size < 2 or sizes.kv_heads % world_size:
        parser.error(f"--nproc must be at least 2 and a divisor of the {sizes.kv_heads} heads of keys")
    reports = run_ranks(world_size, on_rank, sizes, device=device)
    equal, number, wrong = reports[0][0]
    print(f"{number} tokens of {sizes.batch} sequences on {world_size} ranks: {equal} equal to those of plain torch, "
          f"{wrong} different without a near tie")
    if device == "cuda":
        report_times(reports)
    good = not any(report[0][2] for report in reports)
    print("All as it should be." if good else "NOT as it should be.")
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
