"""Calls of operators on many batches of the same rows, for the tests of batch invariance. They run on every rank."""

from dataclasses import replace

import torch
import torch.distributed as dist

import tdkernels
from tdkernels import AgGemmConfig, EpMoeConfig, FlashDecodeConfig, GemmArConfig, GroupGemmConfig, Tiles
from tests.support.ranks import DEVICE, device

ROWS = 60  # rows that batches draw from
# Rows of a rank in a batch: a single row, odd numbers, and more than a tile of 64 for 2 ranks, on GPUs also for one.
SIZES = (1, 17, 33) if DEVICE == "cpu" else (1, 17, 2, 33, 300)


class Seen:
    """The first result of each row. ``changed`` counts the later results of a row that have other bits."""

    def __init__(self):
        self.first, self.changed = {}, 0

    def add(self, rows, *results):
        """Add the results of a batch. ``rows``: the number of the row of each entry of the results."""
        for at, row in enumerate(rows.tolist()):
            bits = tuple(result[at].detach().cpu() for result in results)
            before = self.first.setdefault(row, tuple(one.clone() for one in bits))
            self.changed += not all(map(torch.equal, before, bits))

    def total(self):
        """Return the number of changed results of all ranks, including results that differ between ranks."""
        everything = [None] * dist.get_world_size()
        dist.all_gather_object(everything, (self.first, self.changed))
        every_rank = Seen()
        for first, _ in everything:
            for row, bits in first.items():
                every_rank.add(torch.tensor([row]), *(one[None] for one in bits))
        return every_rank.changed + sum(changed for _, changed in everything)


def draw(generator, *shape, dtype=torch.float32):
    """Return the same random numbers on every rank."""
    return torch.randn(shape, generator=generator).to(dtype).to(device())


def batches(generator, sizes=SIZES):
    """Return (row numbers of all ranks' rows, this rank's part of them) of several batches, with repeated rows."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    drawn = []
    for size in sizes:
        rows = torch.randint(ROWS, (size * ranks,), generator=generator)
        drawn.append((rows, rows[rank * size : (rank + 1) * size]))
    return drawn


# ---- GEMMs. Each function is (generator, dtype) -> (rows -> result of this rank, whether only its own rows) ----


def _share(tensor, dim=-1):
    """Return this rank's part of a tensor along a dimension."""
    return tensor.chunk(dist.get_world_size(), dim)[dist.get_rank()]


def dense_calls(generator, dtype):
    """Return {name: (call of (all rows, this rank's rows) -> results, whether the results have all rows)}.

    K of a rank is neither a multiple of block_k nor, for all of them, of 16 bytes.
    """
    ranks = dist.get_world_size()
    k, n = 72 * ranks, 40 * ranks
    x, weight = draw(generator, ROWS, k, dtype=dtype), draw(generator, n, k, dtype=dtype)
    as_kn = draw(generator, 35, n, dtype=dtype).t()  # [n, 35], stored as [35, n]
    bias = draw(generator, n, dtype=dtype)
    x, weight, as_kn, bias = (one.to(device()) for one in (x, weight, as_kn, bias))
    narrow = x[:, :35].contiguous()
    return {
        "ag_gemm": (lambda every, own: [tdkernels.ag_gemm(x[own], _share(weight, 0), _share(bias))], True),
        "ag_gemm, kn": (lambda every, own: [tdkernels.ag_gemm(narrow[own], _share(as_kn, 0))], True),
        "ag_gemm, list": (
            lambda every, own: _flat(tdkernels.ag_gemm(
                x[own], [_share(weight, 0), _share(weight, 0)[:24]], return_gathered=True
            )), True,
        ),
        "gemm_rs": (lambda every, own: [tdkernels.gemm_rs(_share(x[every]), _share(weight), bias)], False),
        "gemm_ar": (lambda every, own: [tdkernels.gemm_ar(_share(x[every]), _share(weight), bias)], True),
        "column_linear": (lambda every, own: [tdkernels.column_linear(x[own], _share(weight, 0), _share(bias))], False),
    }


def _flat(outputs):
    ys, gathered = outputs
    return [*ys, gathered]


DENSE = "ag_gemm", "ag_gemm, kn", "ag_gemm, list", "gemm_rs", "gemm_ar", "column_linear"


def dense(dtype, names, mode):
    """Return {operator: number of changed rows} over batches of any rows, with the batch-invariant mode on or off."""
    changed = {}
    for name in names:
        generator = torch.Generator().manual_seed(5)
        call, has_all_rows = dense_calls(generator, dtype)[name]
        seen = Seen()
        with tdkernels.batch_invariant(mode):
            for every, own in batches(generator):
                # Every rank has other columns of ag_gemm and column_linear, so results are compared within a rank.
                for _ in range(2):  # the second call is a hit of the call cache
                    seen.add(every if has_all_rows else own, *call(every, own))
        per_rank = name.startswith(("ag_gemm", "column_linear"))
        changed[name] = seen.changed if per_rank else seen.total()
    return changed


def middle_of_a_sequence(dtype):
    """Compare gemm_rs with dim=1, whose kernel reads rows by sequence or not, with gemm_rs of the same rows."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    generator, seen = torch.Generator().manual_seed(7), Seen()
    x, weight = draw(generator, ROWS, 72 * ranks, dtype=dtype), draw(generator, 40, 72 * ranks, dtype=dtype)
    with tdkernels.batch_invariant():
        for batch, positions in ((1, 1), (2, 3), (3, 64)):
            rows = torch.randint(ROWS, (batch, positions * ranks), generator=generator)
            z = tdkernels.gemm_rs(_share(x[rows]), _share(weight), dim=1)
            own = rows[:, rank * positions : (rank + 1) * positions]
            seen.add(own.flatten(), z.flatten(0, 1))
    return seen.total()


def configs_by_rows(dtype):
    """Return the number of changed rows of {operator} if the caller selects a config by the number of rows.

    The configs have the same arithmetic except for the order of the sum over K, so the counts show that the other tests
    would notice such a selection.
    """
    tiles = Tiles(16, 32, 32, num_warps=1, num_stages=1)
    other = Tiles(16, 32, 16, num_warps=1, num_stages=1)
    generator, changed = torch.Generator().manual_seed(6), {}
    ranks = dist.get_world_size()
    x, weight = draw(generator, ROWS, 160, dtype=dtype), draw(generator, 24, 160, dtype=dtype)
    splits = lambda rows: torch.full((1,), len(rows), device=device())  # noqa: E731
    split = AgGemmConfig(tiles=tiles, transport="one_shot", num_comm_sms=2, split_k=4)
    split_ar = GemmArConfig(exchange="one_shot", tiles=tiles, split_k=4)
    calls = {
        "ag_gemm": lambda rows, many: tdkernels.ag_gemm(
            x[rows], weight, config=replace(split, split_k=1) if many else split
        ),
        "gemm_ar": lambda rows, many: tdkernels.gemm_ar(
            x[rows], weight, config=replace(split_ar, split_k=1) if many else split_ar
        ),
        "group_gemm": lambda rows, many: tdkernels.group_gemm(
            x[rows], weight[None], splits(rows), config=GroupGemmConfig(tiles=other if many else tiles)
        ),
    }
    for name, call in calls.items():
        if ranks == 1 and name != "group_gemm":
            continue
        seen = Seen()
        for size in (1, 3, 17, 9):
            rows = torch.arange(size)
            y = call(rows, size > 8)
            seen.add(rows, y[:size])
        changed[name] = seen.changed
    return changed


# ---- collectives ----


def collectives(dtype):
    """Return {operator: changed} for rows of 40 numbers at any place of tensors of any size."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(8)
    of_ranks = draw(generator, ranks, ROWS, 40, dtype=dtype)
    reduced, scattered = Seen(), Seen()
    exchanges = [None]
    if ranks > 1:
        exchanges += [
            tdkernels.CollectiveConfig("fused", exchange, 4, 4096, 2, 1) for exchange in ("one_shot", "two_shot")
        ]
    with tdkernels.batch_invariant():
        for every, own in batches(generator):
            x = of_ranks[rank, every]
            for config in exchanges:
                reduced.add(every, tdkernels.all_reduce(x, config=config))
            scattered.add(own, tdkernels.reduce_scatter(x))
    for row, (bits,) in scattered.first.items():  # both operators have the same sums
        reduced.add(torch.tensor([row]), bits[None])
    return {"all_reduce": reduced.total(), "reduce_scatter": scattered.total()}


# ---- experts ----


def grouped(dtype, activation):
    """Return the number of changed rows of group_gemm, for groups of any sizes."""
    generator, seen = torch.Generator().manual_seed(9), Seen()
    experts, n, k = 3, 40, 150
    x, w = draw(generator, ROWS, k, dtype=dtype), draw(generator, experts, n, k, dtype=dtype)
    with tdkernels.batch_invariant():
        for size in (1, 3, 20, 7, 200):
            rows = torch.randint(ROWS, (size,), generator=generator)
            of = torch.randint(experts, (size,), generator=generator).sort().values
            splits = torch.bincount(of, minlength=experts).to(device())
            seen.add(rows * experts + of, tdkernels.group_gemm(x[rows], w, splits, activation=activation))
    return seen.changed


def grouped_fp8():
    """Return the number of changed rows of group_gemm and of GEMMs with fp8 operands and scales of each row."""
    generator, changed = torch.Generator().manual_seed(10), {}
    ranks = dist.get_world_size()
    x, scale_x = tdkernels.quantize_fp8(draw(generator, ROWS, 160 * ranks), "row")
    weight, scale_w = tdkernels.quantize_fp8(draw(generator, 32, 160 * ranks), "row")
    k = slice(160 * dist.get_rank(), 160 * (dist.get_rank() + 1))
    at = lambda codes, rows: codes.view(torch.uint8)[rows].view(codes.dtype)  # noqa: E731
    grouped, summed = Seen(), Seen()
    for size in SIZES:
        rows = torch.randint(ROWS, (size,), generator=generator)
        splits = torch.full((1,), size, dtype=torch.int32, device=device())
        with tdkernels.batch_invariant():
            grouped.add(rows, tdkernels.group_gemm(
                at(x, rows), weight[None], splits, scale_x=scale_x[rows], scale_w=scale_w[None]
            ))
            summed.add(rows, tdkernels.gemm_ar(
                at(x, rows)[:, k].contiguous(), weight[:, k].contiguous(), scale_x=scale_x[rows], scale_w=scale_w
            ))
    changed["group_gemm"], changed["gemm_ar"] = grouped.changed, summed.total()
    return changed


def experts(dtype, names, mode):
    """Return {layer: number of changed rows}, where the rank of a token and the other tokens vary."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    hidden, inner, choices, count = 48, 24 * ranks, 3, 2 * ranks if ranks > 1 else 4
    changed = {}
    for name in names:
        generator, seen = torch.Generator().manual_seed(11), Seen()
        x = draw(generator, ROWS, hidden, dtype=dtype)
        ids = torch.stack([torch.randperm(count, generator=generator)[:choices] for _ in range(ROWS)])
        ids[::7, 1] = -1  # dropped assignments
        ids, weights = ids.to(device()), torch.rand(ROWS, choices, generator=generator).to(device())
        gate_up = draw(generator, count, 2 * inner, hidden, dtype=dtype) * hidden**-0.5
        down = draw(generator, count, hidden, inner, dtype=dtype) * inner**-0.5
        of_experts = gate_up.chunk(ranks)[rank], down.chunk(ranks)[rank]
        of_columns = (
            torch.cat([half.chunk(ranks, 1)[rank] for half in gate_up.chunk(2, 1)], 1), down.chunk(ranks, 2)[rank]
        )

        def layer(own, name=name, x=x, ids=ids, weights=weights, of_experts=of_experts, of_columns=of_columns):
            call = x[own], ids[own], weights[own]
            if name == "tp_moe":
                return tdkernels.tp_moe(*call, *of_columns)
            if name == "ep_dispatch, ep_combine":
                recv, handle = tdkernels.ep_dispatch(*call, num_experts=count)
                return tdkernels.ep_combine((recv.x * 1.7).to(dtype), handle)
            if name == "ep_moe, bounded":
                return tdkernels.ep_moe(*call, *of_experts, num_experts=count, max_tokens_per_rank=64)
            config = EpMoeConfig(method="fused") if name == "ep_moe, fused" else None
            return tdkernels.ep_moe(*call, *of_experts, num_experts=count, config=config)

        with tdkernels.batch_invariant(mode):
            for _, own in batches(generator, (1, 7, 26)):
                seen.add(own, layer(own))
        changed[name] = seen.total()
    return changed


# ---- attention ----

DECODES = {  # (queries, heads, query heads per head, D, capacity, chunk_keys or None for the mode's, window)
    "chunks": (1, 2, 2, 16, 150, 16, None),
    "queries and a window": (2, 1, 3, 24, 150, 32, 70),
    "more keys than 64 chunks": (1, 1, 1, 16, 1050, 16, None),
    "large parts in groups": (1, 1, 64, 256, 290, 16, None),
    "default": (1, 1, 2, 16, 1050, None, None),
}


def decode(name, dtype, mode=True, paged=False, method="fused"):
    """Return the number of changed results of flash_decode, over batches of sequences and numbers of programs."""
    queries, heads, group, d, capacity, chunk_keys, window = DECODES[name]
    rank, ranks = dist.get_rank(), dist.get_world_size()
    generator, seen, entries = torch.Generator().manual_seed(12), Seen(), 6
    q = draw(generator, entries, queries, heads * group, d, dtype=dtype)
    caches = draw(generator, ranks, 2, entries, capacity, heads, d, dtype=dtype)[rank]
    lens = torch.randint(capacity + 1, (ranks, entries), generator=generator, dtype=torch.int32)
    lens[:, 0], lens[rank % ranks, 1], lens[:, 2] = 1, 0, capacity
    lens = lens[rank].to(device())
    for batch in ([0], [2], [5, 4, 3, 2, 1, 0], [4, 0, 0, 3, 3]):
        for programs in (0, 3) if capacity < 200 else (0,):
            config = None
            if chunk_keys is not None or programs:
                keys = (chunk_keys or 1024) if mode else 0
                # Compiling the largest tile in fp32 for sm_90 takes 17 s with one warp, 6 s with four (Triton 3.6).
                warps = 1 if device().type == "cpu" else 4
                config = FlashDecodeConfig(
                    method, block_n=16, num_warps=warps, num_stages=1, num_programs=programs, chunk_keys=keys
                )
            k, v = caches[0][batch], caches[1][batch]
            table = None
            if paged:
                pages = capacity // 10
                k, v = (one[:, : pages * 10].reshape(-1, 10, heads, d) for one in (k, v))
                table = torch.arange(len(k), dtype=torch.int32, device=device()).view(len(batch), pages)
            with tdkernels.batch_invariant(mode):
                o, lse = tdkernels.flash_decode(
                    q[batch], k, v, lens[batch], block_table=table, window=window, return_lse=True, config=config
                )
            seen.add(torch.tensor(batch), o, lse)
            if not programs:
                with tdkernels.batch_invariant(False):
                    exact = tdkernels.flash_decode_ref(
                        q[batch].float(), k.float(), v.float(), lens[batch], block_table=table, window=window
                    )
                error = (o.float() - exact).norm() / exact.norm().clamp(min=1e-3)
                assert error < (1e-5 if dtype == torch.float32 else 1e-2), (name, batch, error)
    return seen.changed


def attention(dtype, causal, sharding):
    """Return the number of changed results of ag_attention for batch entries in other batches."""
    generator, seen, entries, positions = torch.Generator().manual_seed(13), Seen(), 4, 37
    rank, ranks = dist.get_rank(), dist.get_world_size()
    q, k, v = (draw(generator, ranks, entries, positions, heads, 16, dtype=dtype)[rank] for heads in (4, 2, 2))
    with tdkernels.batch_invariant():
        for batch in ([0], [3, 2, 1, 0], [2, 2, 1], [1, 3], [3]):
            o, lse = tdkernels.ag_attention(
                q[batch], k[batch], v[batch], causal=causal, sharding=sharding, return_lse=True
            )
            seen.add(torch.tensor(batch), o, lse)
    return seen.changed


# ---- operands of small calls on two ranks ----


def operands(dtype=torch.float32):
    """Return operands of calls on two ranks."""
    draw = lambda *shape: torch.randn(*shape).to(device(), dtype)  # noqa: E731
    lens = torch.tensor([3], dtype=torch.int32, device=device())
    ids = torch.tensor([[0, 1]] * 4, device=device())
    return draw(4, 16), draw(8, 16), draw(1, 2, 16), draw(1, 8, 2, 16), lens, ids, torch.ones(4, 2).to(device())
