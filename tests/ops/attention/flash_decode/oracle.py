"""Reference for attention over a KV cache that is sharded along the sequence: attention over the whole sequence.

    case = Decode(3, heads=4, kv_heads=2, dim=64, keys=20)      # 3 sequences; at most 20 keys per rank
    case.check(case.run())                                      # o, lse and every gradient, by name

Every rank draws the keys and values of all ranks from the seed and keeps its own shard. The cache is NaN beyond its
length, since it must not be read there.
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
_MAX_CPU_ELEMENTS = 1 << 20  # up to this many elements of keys, draw on the CPU: the same numbers on all machines
_REFERENCE_ELEMENTS = 1 << 24  # elements of keys that the reference processes at a time


def enlarge(spec, rows=48):
    """Return the spec, on GPUs with a larger batch, so that its error is statistically stable.

    With few query rows, plain torch, which sets the tolerance, is often more than twice as exact by chance.
    """
    each = spec["batch"] * spec["kv_heads"]
    return dict(spec, batch=spec["batch"] * (-(-rows // each) | 1)) if EVERYTHING else spec


def releases_memory(function):
    """Wrap a test body to release cached GPU memory at the end, since other processes share the GPU."""

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        try:
            return function(*args, **kwargs)
        finally:
            torch.cuda.empty_cache()

    return wrapper


class Decode:
    """q, this rank's caches, and the expected results.

    A test may replace q, k_cache, v_cache, lens, do and dlse by tensors with the same values. ``options`` holds further
    arguments of the call.

    Args:
        batch, heads, kv_heads, dim: B, Hq, Hkv, D.
        keys: S, the capacity of a rank for one sequence.
        tokens: Tq; None for q [B, Hq, D].
        value_dim: Dv; None means D.
        lens: lengths of each sequence on each rank: "ragged" (any, often none or all), "full", "none", "one" (one key),
            "last" (all on the last rank), "not first" (none on the first rank), "some none" (ragged, the first sequence
            is empty); or a list of the lengths on rank 0, which rank r has in an order rotated by r.
        page: block_size of a paged cache with pages in random order; None for a cache by sequence.
        scales: shapes of the scales of fp8 caches: "tensor" ([]), "one" ([1]), "head" ([Hkv]) or "mixed" ([] and
            [Hkv]); None for caches in ``dtype``.
        latent: v_cache is a view of the first value_dim channels of k_cache.
        rope: channels of the keys that are in k_rope instead of k_cache, in ``dtype``. They have no gradient.
        scale, soft_cap, window: as in flash_decode.
        group: None for the world.
    """

    def __init__(
        self, batch, heads, kv_heads, dim, keys, dtype=BF16, *, tokens=None, value_dim=None, lens="ragged", page=None,
        scales=None, latent=False, rope=0, scale=None, soft_cap=None, window=None, seed=0, group=None,
    ):
        self.group, self.rank, self.world_size = group, dist.get_rank(group), dist.get_world_size(group)
        self.title = (
            f"B={batch} Hq={heads} Hkv={kv_heads} D={dim} Dv={value_dim} S={keys} Tq={tokens} {dtype} lens={lens} "
            f"page={page} scales={scales} latent={latent} rope={rope} soft_cap={soft_cap} window={window} seed={seed}"
        )
        self.dtype, self.dim, self.value_dim, self.latent, self.rope = dtype, dim, value_dim or dim, latent, rope
        self.settings = dict(scale=scale, soft_cap=soft_cap, window=window)
        self.page, self.table, self.options = page, None, {}
        self.masked = None  # per sequence the mask of all ranks' keys that are ignored, see ``attention``
        self.cpu = torch.Generator().manual_seed(seed)
        draw_on_cpu = batch * keys * kv_heads * dim <= _MAX_CPU_ELEMENTS
        self.generator = self.cpu if draw_on_cpu else torch.Generator(device()).manual_seed(seed)
        self.all_lens = draw_lens(lens, self.world_size, batch, keys, self.cpu)
        self.lens = self.all_lens[self.rank].to(device(), torch.int32)
        token_shape = [batch, heads] if tokens is None else [batch, tokens, heads]
        self.q, self.do = self._draw(*token_shape, dim).to(dtype), self._draw(*token_shape, self.value_dim).to(dtype)
        self.dlse = self._draw(*token_shape)
        self.whole = self._draw_keys(kv_heads, scales)
        self._create_caches(keys, kv_heads, FP8 if scales else dtype)
        self._expected = {}

    def _draw(self, *shape):
        return torch.randn(*shape, generator=self.generator, device=self.generator.device).to(device())

    def _draw_keys(self, kv_heads, scales):
        """Return {cache: [keys or values of all ranks, per sequence]}, in the dtype of the caches."""
        stored = self.dtype
        if scales:
            stored, head = FP8, [kv_heads]
            shapes = {"tensor": ([], []), "one": ([1], [1]), "head": (head, head), "mixed": ([], head)}[scales]
            for name, shape in zip(("k_scale", "v_scale"), shapes):
                self.options[name] = (0.5 + torch.rand(shape, generator=self.cpu)).to(device())
        lengths = self.all_lens.sum(0).tolist()
        k = [self._draw(length, kv_heads, self.dim - self.rope).to(stored) for length in lengths]
        whole = {"k_cache": k}
        if self.rope:
            whole["k_rope"] = [self._draw(length, kv_heads, self.rope).to(self.dtype) for length in lengths]
        if self.latent:
            return whole | {"v_cache": [keys[..., : self.value_dim] for keys in k]}
        return whole | {"v_cache": [self._draw(length, kv_heads, self.value_dim).to(stored) for length in lengths]}

    def _create_caches(self, keys, kv_heads, stored):
        """Create this rank's caches, filled with NaN where there are no keys."""
        shape = [len(self.lens), keys]
        if self.page is not None:
            each = -(-keys // self.page)
            shape = [len(self.lens) * each + 1, self.page]  # the last page is unused
            order = torch.randperm(shape[0] - 1, generator=self.cpu).view(-1, each)
            used = torch.arange(each) * self.page < self.all_lens[self.rank][:, None]
            self.table = torch.where(used, order, shape[0] - 1)
            self.options["block_table"] = self.table.to(device(), torch.int32)
        channels = {"k_cache": self.dim - self.rope, "v_cache": self.value_dim, "k_rope": self.rope}
        for name, whole in self.whole.items():
            cache = torch.full([*shape, kv_heads, channels[name]], torch.nan, dtype=self.dtype, device=device())
            cache = cache if name == "k_rope" else cache.to(stored)
            for part, index in zip(self.own_parts(whole), self._key_indices(), strict=True):
                _bits(cache)[index] = _bits(part)
            setattr(self, name, cache)
        if self.latent:
            self.v_cache = self.k_cache[..., : self.value_dim]
        if self.rope:
            self.options["k_rope"] = self.k_rope

    def _key_indices(self):
        """Yield for each sequence the index of its keys in this rank's caches."""
        for sequence, length in enumerate(self.all_lens[self.rank].tolist()):
            position = torch.arange(length)
            if self.table is None:
                yield torch.tensor(sequence), position
            else:
                yield self.table[sequence, position // self.page], position % self.page

    def own_parts(self, whole):
        """Return for each sequence this rank's slice of all ranks' keys."""
        ends = self.all_lens[: self.rank + 1].sum(0)
        starts = ends - self.all_lens[self.rank]
        return [full[start:end] for full, start, end in zip(whole, starts, ends, strict=True)]

    # ---- calls ----

    def operands(self):
        return self.q, self.k_cache, self.v_cache, self.lens

    def call(self, function=None, **options):
        """Call the operator; return o, or (o, lse) if ``return_lse=True``."""
        function = function or tdkernels.flash_decode
        return function(*self.operands(), **{**self.settings, **self.options, "group": self.group, **options})

    def run(self, inputs=OPERANDS, **options):
        """Run forward and backward; return o, lse and the gradients of the operands in ``inputs``, by name."""
        self.require(inputs)
        o, lse = self.call(return_lse=True, **options)
        if inputs:
            torch.autograd.backward([o, lse], [self.do, self.dlse])
        return {"o": o.detach(), "lse": lse.detach(), **self.gradients()}

    def require(self, inputs=OPERANDS):
        """Set requires_grad for the named operands only, and clear all gradients."""
        for name in OPERANDS:
            setattr(self, name, getattr(self, name).detach().requires_grad_(name in inputs))
        if self.latent:  # one leaf
            self.v_cache = self.k_cache[..., : self.value_dim]

    def gradients(self):
        """Return the gradients of the operands that have one, by name."""
        operands = {name: getattr(self, name) for name in OPERANDS if getattr(self, name).is_leaf}
        return {f"d{name}": operand.grad for name, operand in operands.items() if operand.grad is not None}

    # ---- checks ----

    def check(self, results):
        """Check that the error of each result to fp64 is at most twice the error of plain torch. Collective.

        Replicated results must have the same bits on all ranks. Gradients of the caches must be zero where there are
        no keys; they are compared for all ranks together, as one rank may have so few keys that plain torch is exact
        by chance.
        """
        tdkernels.synchronize()
        ranks = [None] * self.world_size
        own = {
            name: self._key_gradients(name, got) if name[1:] in CACHES else got.cpu() for name, got in results.items()
        }
        dist.all_gather_object(ranks, own, self.group)
        backward = any(name.startswith("d") for name in results)
        exact, baseline = (self.expected(dtype, backward) for dtype in (torch.double, self.dtype))
        for name in results:
            title = f"{name} of {self.title}"
            if name[1:] in CACHES:
                assert results[name].shape == getattr(self, name[1:]).shape, f"{title}: {list(results[name].shape)}"
                got = torch.cat([part for rank_results in ranks for part in rank_results[name]])
            else:
                got = ranks[self.rank][name]
                for rank, rank_results in enumerate(ranks):
                    assert _same(rank_results[name], got), f"{title}: rank {rank} differs from rank {self.rank}"
            if name == "lse":
                got = _finite_as(title, got, exact[name])
            assert_close(title, got, *(_finite(item[name]) for item in (exact, baseline)))

    def _key_gradients(self, name, gradient):
        """Return for each sequence the gradient of its keys; check that the rest of the cache's gradient is zero."""
        gradient, parts = gradient.cpu().clone(), []
        for index in self._key_indices():
            parts.append(gradient[index].clone())
            gradient[index] = 0
        assert not gradient.any(), f"{name} of {self.title}: not zero where there are no keys"  # NaN counts as nonzero
        return parts

    def expected(self, dtype, backward=True):
        """Return the results of the whole sequences in ``dtype``, on the CPU; gradients of the caches rank by rank."""
        if (dtype, backward) in self._expected:
            return self._expected[dtype, backward]
        partial = [self._expected_sequence(sequence, dtype, backward) for sequence in range(len(self.lens))]
        shapes = {"o": self.do.shape, "lse": self.dlse.shape} | ({"dq": self.q.shape} if backward else {})
        expected = {name: torch.stack([item[name] for item in partial]).view(shape) for name, shape in shapes.items()}
        for name in ("dk_cache", "dv_cache") if backward else ():
            by_sequence = [item[name].split(self.all_lens[:, i].tolist()) for i, item in enumerate(partial)]
            expected[name] = torch.cat([part for rank_results in zip(*by_sequence) for part in rank_results])
        self._expected[dtype, backward] = expected
        return expected

    def _expected_sequence(self, sequence, dtype, backward):
        """Return the results of one sequence, by name. Heads are processed in groups to limit memory."""
        length, kv_heads, _ = self.whole["k_cache"][sequence].shape
        each = max(1, _REFERENCE_ELEMENTS // max(length * self.dim, 1))
        heads = [slice(first, min(first + each, kv_heads)) for first in range(0, kv_heads, each)]
        partial = [self._expected_heads(sequence, item, kv_heads, dtype, backward) for item in heads]
        return {name: torch.cat([part[name] for part in partial], 1) for name in partial[0]}

    @torch.enable_grad()
    def _expected_heads(self, sequence, heads, kv_heads, dtype, backward):
        group = self.q.shape[-2] // kv_heads
        rows = slice(heads.start * group, heads.stop * group)

        def select_rows(tensor, *width):
            return tensor[sequence].detach().reshape(-1, kv_heads * group, *width)[:, rows]

        q = select_rows(self.q, self.dim).to(dtype).requires_grad_(backward)
        k, v = (self._dequantized(name, sequence, heads, kv_heads, dtype).requires_grad_(backward) for name in CACHES)
        one_leaf = self.latent and "k_scale" not in self.options
        masked = None if self.masked is None else self.masked[sequence]
        o, lse = attention(q, k, k[..., : self.value_dim] if one_leaf else v, **self.settings, masked=masked)
        partial = {"o": o.detach(), "lse": lse.detach()}
        if backward:
            incoming = [select_rows(self.do, self.value_dim).to(dtype), select_rows(self.dlse).to(lse.dtype)]
            gradients = torch.autograd.grad([o, lse], [q, k, v], incoming, allow_unused=True, materialize_grads=True)
            partial |= dict(zip(("dq", "dk_cache", "dv_cache"), gradients))
        return {name: result.cpu() for name, result in partial.items()}

    def _dequantized(self, name, sequence, heads, kv_heads, dtype):
        """Return the dequantized keys or values of some heads of a sequence."""
        stored, factor = self.whole[name][sequence][:, heads].detach(), self.options.get(f"{name[0]}_scale")
        if factor is None:
            found = stored.to(dtype, copy=True)
        else:
            found = (stored.double() * factor.expand(kv_heads)[heads, None]).to(dtype)
        if name == "k_cache" and self.rope:
            return torch.cat((found, self.whole["k_rope"][sequence][:, heads].to(dtype)), -1)
        return found


def attention(q, k, v, scale, soft_cap, window, masked=None):
    """Compute (o [Tq, Hq, Dv], lse [Tq, Hq]) of one sequence in plain torch, in the dtype of q; sums at least in fp32.

    Args:
        q: [Tq, Hq, D], the last positions of the sequence. k is [L, Hkv, D], v is [L, Hkv, Dv].
        masked: [L] bool, keys that every token ignores; None if there are none.
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
    # If a token has no visible key, compute it unmasked and replace its result, so that no gradient becomes NaN.
    scores = scores.masked_fill((any_key & ~visible)[:, None], -torch.inf)
    o = torch.einsum("htgl,lhd->thgd", scores.softmax(-1).to(v.dtype), v).reshape(tokens, heads, -1)
    lse = scores.logsumexp(-1).transpose(0, 1).reshape(tokens, heads)
    return o.where(any_key[..., None], 0.0), lse.where(any_key, -torch.inf)


def draw_lens(lens, ranks, batch, keys, generator):
    """Draw lengths [W, B] of the given kind; see ``Decode``."""
    if isinstance(lens, list):
        return torch.stack([torch.tensor(lens).roll(rank) for rank in range(ranks)])
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


# 64-bit page numbers: before and behind the cache, inside it if truncated to 32 bits, and some whose byte offset
# exceeds 64 bits.
WRONG_PAGES = [-1, None, 10**9, 1 << 32, -(1 << 32) + 1, 1 << 62, -(1 << 62)]  # None: the first page behind the cache


def replace_pages(case):
    """Replace every other page of a case by one outside the cache, and surround the caches with NaN."""
    wrong, case.masked = _wrong_pages(case)
    blocks = case.k_cache.shape[0]
    table = case.options["block_table"].long()
    for number, (sequence, page) in enumerate(wrong[case.rank].nonzero().tolist()):
        value = WRONG_PAGES[number % len(WRONG_PAGES)]
        table[sequence, page] = blocks if value is None else value
    case.options["block_table"] = table
    for name in CACHES if not case.latent else CACHES[:1]:
        setattr(case, name, _surround_with_nan(getattr(case, name)))
    if case.latent:
        case.v_cache = case.k_cache[..., : case.value_dim]
    if case.rope:
        case.k_rope = case.options["k_rope"] = _surround_with_nan(case.k_rope)


def _wrong_pages(case):
    """Return (mask of every other page [W, B, pages], per sequence the mask of all ranks' keys in these pages)."""
    ranks, batch, pages = case.world_size, *case.table.shape
    wrong = (torch.arange(batch)[:, None] + torch.arange(pages) + torch.arange(ranks)[:, None, None]) % 2 == 0
    wrong_keys = wrong.repeat_interleave(case.page, 2)
    masked = [
        torch.cat([wrong_keys[rank, sequence, : case.all_lens[rank, sequence]] for rank in range(ranks)]).to(device())
        for sequence in range(batch)
    ]
    return wrong, masked


def _surround_with_nan(cache):
    """Return a copy of the cache with two blocks of NaN before and behind it in memory."""
    whole = torch.full((cache.shape[0] + 4, *cache.shape[1:]), torch.nan, device=cache.device).to(cache.dtype)
    view = whole[2:-2]
    view.copy_(cache)
    return view


def _bits(tensor):
    """View fp8 as bytes, which support indexing."""
    return tensor.view(torch.uint8) if tensor.dtype == FP8 else tensor


def _same(one, other):
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def _finite(lse):
    return lse.masked_fill(lse == -torch.inf, 0.0)


def _finite_as(title, got, exact):
    """Replace -inf by zero, and check that it is in the same places as in ``exact``."""
    assert torch.equal(got == -torch.inf, exact == -torch.inf), f"{title}: -inf where there are keys, or the reverse"
    return _finite(got)
