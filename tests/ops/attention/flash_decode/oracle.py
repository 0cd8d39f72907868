"""A cache that is cut along the sequence between the ranks, and what attention to the whole of it gives.

    case = Decode(3, heads=4, kv_heads=2, dim=64, keys=20)      # sequences; keys of a rank, at most
    case.check(case.run())                                      # o, its log-sum-exp and every gradient, by name

Every rank makes all ranks' keys and values from the seed and keeps its own part of them. What lies in a cache beyond
its length is NaN, since nobody may look at it.
"""

import functools

import torch
import torch.distributed as dist

import tdkernels
from tests.support.dense_oracle import assert_close
from tests.support.ranks import device
from tests.support.subset import EVERYTHING

BF16, FP16, FP32, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
OPERANDS, CACHES = ("q", "k_cache", "v_cache"), ("k_cache", "v_cache")
_ROOM = 1 << 20  # elements of keys up to which everything is drawn on the CPU, the same numbers on all machines
_AT_ONCE = 1 << 24  # elements of the keys of some heads for which the reference is made at a time


def many(spec, rows=48):
    """The spec; on GPUs, which are asked much, with so many sequences that its error is a statistic.

    Of few query rows plain torch is often more than twice as good as anybody, by luck.
    """
    each = spec["batch"] * spec["kv_heads"]
    return dict(spec, batch=spec["batch"] * (-(-rows // each) | 1)) if EVERYTHING else spec


def gives_memory_back(function):
    """What a rank has taken of its GPU for a test is free again afterwards, since other processes share the GPU."""

    @functools.wraps(function)
    def called(*args, **kwargs):
        try:
            return function(*args, **kwargs)
        finally:
            torch.cuda.empty_cache()

    return called


class Decode:
    """q, this rank's caches, and what they are to give.

    Args:     batch, heads, kv_heads, dim: B, Hq, Hkv, D; keys: S, the room of a rank for one sequence
              tokens: Tq; None for q [B, Hq, D]
              value_dim: Dv; D if None
              lens: of each sequence on each rank "ragged" (any number, often none or all), "full", "none", "one" key,
              "last" (all on the last rank), "not first" (none on the first, any on others), "some none" (ragged; none
              at all of the first sequence)
              page: block_size of a paged cache, whose pages lie in any order; None for a cache by sequence
              scales: of fp8 caches "tensor" ([]), "one" ([1]), "head" ([Hkv]) or "mixed" ([] and [Hkv]); None:
              they are of the dtype
              latent: v_cache is a view of the first value_dim channels of k_cache
              scale, soft_cap, window: as of flash_decode
              group: None for the world

    q, k_cache, v_cache, lens, do and dlse are tensors that a test may replace by others of the same values, and
    ``options`` is what else a call is given.
    """

    def __init__(
        self, batch, heads, kv_heads, dim, keys, dtype=BF16, *, tokens=None, value_dim=None, lens="ragged", page=None,
        scales=None, latent=False, scale=None, soft_cap=None, window=None, seed=0, group=None,
    ):
        self.group, self.rank, self.world_size = group, dist.get_rank(group), dist.get_world_size(group)
        self.title = (
            f"B={batch} Hq={heads} Hkv={kv_heads} D={dim} Dv={value_dim} S={keys} Tq={tokens} {dtype} lens={lens} "
            f"page={page} scales={scales} latent={latent} soft_cap={soft_cap} window={window} seed={seed}"
        )
        self.dtype, self.dim, self.value_dim, self.latent = dtype, dim, value_dim or dim, latent
        self.how = dict(scale=scale, soft_cap=soft_cap, window=window)
        self.page, self.table, self.options = page, None, {}
        self.masked = None  # per sequence the keys of all ranks that have no weight, see ``attention``
        self.cpu = torch.Generator().manual_seed(seed)
        few = batch * keys * kv_heads * dim <= _ROOM
        self.generator = self.cpu if few else torch.Generator(device()).manual_seed(seed)
        self.all_lens = draw_lens(lens, self.world_size, batch, keys, self.cpu)
        self.lens = self.all_lens[self.rank].to(device(), torch.int32)
        of_tokens = [batch, heads] if tokens is None else [batch, tokens, heads]
        self.q, self.do = self._draw(*of_tokens, dim).to(dtype), self._draw(*of_tokens, self.value_dim).to(dtype)
        self.dlse = self._draw(*of_tokens)
        self.whole = self._draw_keys(kv_heads, scales)
        self._lay_out(keys, kv_heads, FP8 if scales else dtype)
        self._expected = {}

    def _draw(self, *shape):
        return torch.randn(*shape, generator=self.generator, device=self.generator.device).to(device())

    def _draw_keys(self, kv_heads, scales):
        """{cache: per sequence the keys or values of all ranks, as the caches hold them}."""
        stored = self.dtype
        if scales:
            stored, head = FP8, [kv_heads]
            shapes = {"tensor": ([], []), "one": ([1], [1]), "head": (head, head), "mixed": ([], head)}[scales]
            for name, shape in zip(("k_scale", "v_scale"), shapes):
                self.options[name] = (0.5 + torch.rand(shape, generator=self.cpu)).to(device())
        lengths = self.all_lens.sum(0).tolist()
        k = [self._draw(length, kv_heads, self.dim).to(stored) for length in lengths]
        if self.latent:
            return {"k_cache": k, "v_cache": [keys[..., : self.value_dim] for keys in k]}
        v = [self._draw(length, kv_heads, self.value_dim).to(stored) for length in lengths]
        return {"k_cache": k, "v_cache": v}

    def _lay_out(self, keys, kv_heads, stored):
        """Make this rank's caches, of NaN where there are no keys."""
        shape = [len(self.lens), keys]
        if self.page is not None:
            each = -(-keys // self.page)
            shape = [len(self.lens) * each + 1, self.page]  # the last is of nobody
            order = torch.randperm(shape[0] - 1, generator=self.cpu).view(-1, each)
            used = torch.arange(each) * self.page < self.all_lens[self.rank][:, None]
            self.table = torch.where(used, order, shape[0] - 1)
            self.options["block_table"] = self.table.to(device(), torch.int32)
        for name in CACHES:
            whole = self.whole[name]
            channels = self.dim if name == "k_cache" else self.value_dim
            cache = torch.full([*shape, kv_heads, channels], torch.nan, dtype=self.dtype, device=device()).to(stored)
            for part, place in zip(self.own_parts(whole), self._places(), strict=True):
                _bits(cache)[place] = _bits(part)
            setattr(self, name, cache)
        if self.latent:
            self.v_cache = self.k_cache[..., : self.value_dim]

    def _places(self):
        """Per sequence where its keys are in this rank's caches: what to put into their brackets."""
        for sequence, length in enumerate(self.all_lens[self.rank].tolist()):
            position = torch.arange(length)
            if self.table is None:
                yield torch.tensor(sequence), position
            else:
                yield self.table[sequence, position // self.page], position % self.page

    def own_parts(self, whole):
        """Per sequence this rank's keys of those of all ranks."""
        ends = self.all_lens[: self.rank + 1].sum(0)
        starts = ends - self.all_lens[self.rank]
        return [of_all[start:end] for of_all, start, end in zip(whole, starts, ends, strict=True)]

    # ---- calls ----

    def operands(self):
        return self.q, self.k_cache, self.v_cache, self.lens

    def call(self, function=None, **options):
        """o, with ``return_lse=True`` also its log-sum-exp."""
        function = function or tdkernels.flash_decode
        return function(*self.operands(), **{**self.how, **self.options, "group": self.group, **options})

    def run(self, wanted=OPERANDS, **options):
        """Forward and backward: o, its log-sum-exp and the gradients of the operands that are wanted, by name."""
        self.require(wanted)
        o, lse = self.call(return_lse=True, **options)
        if wanted:
            torch.autograd.backward([o, lse], [self.do, self.dlse])
        return {"o": o.detach(), "lse": lse.detach(), **self.gradients()}

    def require(self, wanted=OPERANDS):
        """Let the named operands, and no others, want a gradient, of which they have none yet."""
        for name in OPERANDS:
            setattr(self, name, getattr(self, name).detach().requires_grad_(name in wanted))
        if self.latent:  # one leaf
            self.v_cache = self.k_cache[..., : self.value_dim]

    def gradients(self):
        """The gradients that the operands have, by name."""
        operands = {name: getattr(self, name) for name in OPERANDS if getattr(self, name).is_leaf}
        return {f"d{name}": operand.grad for name, operand in operands.items() if operand.grad is not None}

    # ---- checks ----

    def check(self, results):
        """Each of the named results, no further from fp64 than twice what plain torch is; collective.

        What all ranks have has the same bits on all of them. Gradients of the caches are looked at for all ranks
        together, as a rank may have so few keys that plain torch has them right by luck, and are zero where there are
        no keys.
        """
        tdkernels.synchronize()
        ranks = [None] * self.world_size
        own = {name: self._keys_of(name, got) if name[1:] in CACHES else got.cpu() for name, got in results.items()}
        dist.all_gather_object(ranks, own, self.group)
        backward = any(name.startswith("d") for name in results)
        exact, low = (self.expected(dtype, backward) for dtype in (torch.double, self.dtype))
        for name in results:
            title = f"{name} of {self.title}"
            if name[1:] in CACHES:
                assert results[name].shape == getattr(self, name[1:]).shape, f"{title}: {list(results[name].shape)}"
                got = torch.cat([part for of_rank in ranks for part in of_rank[name]])
            else:
                got = ranks[self.rank][name]
                for rank, of_rank in enumerate(ranks):
                    assert _same(of_rank[name], got), f"{title}: rank {rank} has other bits than rank {self.rank}"
            if name == "lse":
                got = _finite_as(title, got, exact[name])
            assert_close(title, got, *(_finite(of[name]) for of in (exact, low)))

    def _keys_of(self, name, gradient):
        """Per sequence the part of a cache's gradient where keys are; the rest is zeros."""
        gradient, parts = gradient.cpu().clone(), []
        for place in self._places():
            parts.append(gradient[place].clone())
            gradient[place] = 0
        assert not gradient.any(), f"{name} of {self.title}: not zero where there are no keys"  # a NaN is not
        return parts

    def expected(self, dtype, backward=True):
        """What the whole of every sequence gives in a dtype; gradients of the caches rank by rank. On the CPU."""
        if (dtype, backward) in self._expected:
            return self._expected[dtype, backward]
        found = [self._expected_of(sequence, dtype, backward) for sequence in range(len(self.lens))]
        shapes = {"o": self.do.shape, "lse": self.dlse.shape} | ({"dq": self.q.shape} if backward else {})
        expected = {name: torch.stack([of[name] for of in found]).view(shape) for name, shape in shapes.items()}
        for name in ("dk_cache", "dv_cache") if backward else ():
            by_sequence = [of[name].split(self.all_lens[:, i].tolist()) for i, of in enumerate(found)]
            expected[name] = torch.cat([part for of_rank in zip(*by_sequence) for part in of_rank])
        self._expected[dtype, backward] = expected
        return expected

    def _expected_of(self, sequence, dtype, backward):
        """The results of one sequence, by name. So many heads of the caches at a time as memory should be taken for."""
        length, kv_heads, _ = self.whole["k_cache"][sequence].shape
        each = max(1, _AT_ONCE // max(length * self.dim, 1))
        heads = [slice(first, min(first + each, kv_heads)) for first in range(0, kv_heads, each)]
        found = [self._expected_of_heads(sequence, of, kv_heads, dtype, backward) for of in heads]
        return {name: torch.cat([part[name] for part in found], 1) for name in found[0]}

    @torch.enable_grad()
    def _expected_of_heads(self, sequence, heads, kv_heads, dtype, backward):
        group = self.q.shape[-2] // kv_heads
        rows = slice(heads.start * group, heads.stop * group)

        def of_rows(tensor, *width):
            return tensor[sequence].detach().reshape(-1, kv_heads * group, *width)[:, rows]

        q = of_rows(self.q, self.dim).to(dtype).requires_grad_(backward)
        k, v = (self._counted(name, sequence, heads, kv_heads, dtype).requires_grad_(backward) for name in CACHES)
        one_leaf = self.latent and "k_scale" not in self.options
        masked = None if self.masked is None else self.masked[sequence]
        o, lse = attention(q, k, k[..., : self.value_dim] if one_leaf else v, **self.how, masked=masked)
        found = {"o": o.detach(), "lse": lse.detach()}
        if backward:
            incoming = [of_rows(self.do, self.value_dim).to(dtype), of_rows(self.dlse).to(lse.dtype)]
            gradients = torch.autograd.grad([o, lse], [q, k, v], incoming, allow_unused=True, materialize_grads=True)
            found |= dict(zip(("dq", "dk_cache", "dv_cache"), gradients))
        return {name: result.cpu() for name, result in found.items()}

    def _counted(self, name, sequence, heads, kv_heads, dtype):
        """The keys or values of some heads of a sequence as they count."""
        stored, factor = self.whole[name][sequence][:, heads].detach(), self.options.get(f"{name[0]}_scale")
        if factor is None:
            return stored.to(dtype, copy=True)
        return (stored.double() * factor.expand(kv_heads)[heads, None]).to(dtype)


def attention(q, k, v, scale, soft_cap, window, masked=None):
    """(o [Tq, Hq, Dv], lse [Tq, Hq]) of one sequence, by plain torch in the dtype of q; sums in no less than fp32.

    Args:     q: [Tq, Hq, D], the last positions of the sequence; k: [L, Hkv, D]; v: [L, Hkv, Dv]
              masked: [L] bool, keys that have no weight for any token, whatever their position; None: there are none
    """
    (tokens, heads, dim), (length, kv_heads, _) = q.shape, k.shape
    wide = torch.promote_types(q.dtype, FP32)
    scores = torch.einsum("thgd,lhd->htgl", q.view(tokens, kv_heads, -1, dim), k).to(wide)
    scores = scores * (dim**-0.5 if scale is None else scale)
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    position = length - tokens + torch.arange(tokens, device=q.device)[:, None]
    key = torch.arange(length, device=q.device)
    visible = key <= position
    if window is not None:
        visible &= key > position - window
    if masked is not None:
        visible &= ~masked
    any_key = visible.any(1)[:, None]
    # A token that sees nothing is taken as one that sees all, and its result replaced: so no gradient becomes NaN.
    scores = scores.masked_fill((any_key & ~visible)[:, None], -torch.inf)
    o = torch.einsum("htgl,lhd->thgd", scores.softmax(-1).to(v.dtype), v).reshape(tokens, heads, -1)
    lse = scores.logsumexp(-1).transpose(0, 1).reshape(tokens, heads)
    return o.where(any_key[..., None], 0.0), lse.where(any_key, -torch.inf)


def draw_lens(lens, ranks, batch, keys, generator):
    """[W, B] lengths of the kind that ``Decode`` names."""
    if lens in ("ragged", "some none"):
        drawn = torch.randint(0, keys + 1, (ranks, batch), generator=generator)
        kind = torch.randint(0, 4, (ranks, batch), generator=generator)
        drawn = drawn.where(kind != 0, 0).where(kind != 1, keys)
        if lens == "some none":
            drawn[:, 0] = 0
        return drawn
    drawn = torch.zeros(ranks, batch, dtype=torch.int64)
    if lens == "full":
        drawn[:] = keys
    elif lens == "last":
        drawn[-1] = keys
    elif lens == "one":
        drawn[torch.randint(0, ranks, (batch,), generator=generator), torch.arange(batch)] = 1
    elif lens == "not first":
        drawn[1:] = torch.randint(1, keys + 1, (ranks - 1, batch), generator=generator)
    else:
        assert lens == "none", lens
    return drawn


def _bits(tensor):
    """fp8 as bytes, which can be indexed."""
    return tensor.view(torch.uint8) if tensor.dtype == FP8 else tensor


def _same(one, other):
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def _finite(lse):
    return lse.masked_fill(lse == -torch.inf, 0.0)


def _finite_as(title, got, exact):
    """got with zeros for -inf, which is where it is in ``exact``."""
    assert torch.equal(got == -torch.inf, exact == -torch.inf), f"{title}: -inf where there are keys, or the reverse"
    return _finite(got)
