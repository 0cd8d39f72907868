"""Calls whose bits must not depend on the number of ranks, for ``test_rank_invariance.py``. They run on every rank."""

import torch
import torch.distributed as dist
import torch.nn.functional as F

import tdkernels
from tests.support.ranks import DEVICE, a_group, device

STEP = 64 if DEVICE == "cpu" or not torch.cuda.is_available() else 128  # a multiple of block_k of all tiles of the mode
N = 40  # columns of the GEMMs: divisible by 8 ranks
BATCHES = [list(range(72)), [71, 3, 3, 40, 0, 17, 64, 8]]  # rows: of several tiles, and of a few rows of them
SOME = [5, 23, 5, 0, 14, 8, 1, 1]  # rows of a batch of 24


def share(tensor, dim=-1):
    """Return this rank's part of a tensor along a dimension."""
    return tensor.chunk(dist.get_world_size(), dim)[dist.get_rank()].contiguous()


def joined(part, dim=0):
    """Return the parts of all ranks along a dimension."""
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, part.cpu())
    return torch.cat(parts, dim).to(device())


def tree(nodes, dtype):
    """Return the root of the reduction tree over leaves in fp32: nodes except the root are rounded to ``dtype``."""
    if len(nodes) == 1:
        return nodes[0]
    half = len(nodes) // 2
    left, right = (tree(part, dtype).to(dtype).float() for part in (nodes[:half], nodes[half:]))
    return left + right


def exact_operands(leaves, dtype):
    """Return x [72, K] and weight [N, K] whose leaves are exact in fp32, but neither in 16 bits nor their sums in fp32.

    So every order of additions within a leaf has the same result, and every other tree has another one.
    """
    generator = torch.Generator().manual_seed(21)
    largest, exponents = 9, torch.tensor([0, 15, -4, 11, 15, 2, 14, 7])[:leaves, None]  # fp32 has 24 bits
    if dtype == torch.float16:  # it has 11 bits, and its numbers are less than 2**16
        largest, exponents = 30, exponents // 15
    x = torch.randint(-largest, largest + 1, (72, leaves, STEP), generator=generator).float() * 2.0**exponents
    weight = torch.randint(-largest, largest + 1, (N, leaves * STEP), generator=generator).float()
    return x.flatten(1).to(dtype).to(device()), weight.to(dtype).to(device())


def leaves_of(x, weight, leaves):
    """Return the products of all leaves in fp32."""
    pairs = zip(x.float().chunk(leaves, 1), weight.float().chunk(leaves, 1), strict=True)
    return [one @ other.T for one, other in pairs]


def draw(*shape, dtype=torch.bfloat16, seed=22):
    """Return the same random numbers on every rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device())


# ---- comparison with the tree in torch ----


def products(max_ranks, dtype, w_is_kn):
    """Compare gemm_rs, gemm_ar and gemm_ar_rms_norm with the tree, for several batches.

    ``w_is_kn``: whether the weight is [K, N] in memory.
    """
    every_x, weight = exact_operands(max_ranks, dtype)
    bias, w = draw(N, dtype=dtype, seed=23) * 64, share(weight)
    w = w.t().contiguous().t() if w_is_kn else w
    for rows in BATCHES:
        x = every_x[rows]
        root = tree(leaves_of(x, weight, max_ranks), dtype)
        in_order = sum(leaves_of(x, weight, max_ranks)[1:], leaves_of(x, weight, max_ranks)[0])
        assert not torch.equal(root, in_order)  # the comparison can fail
        with tdkernels.batch_invariant(max_ranks=max_ranks):
            for given, expected in ((None, root), (bias, root + bias.float()))[len(rows) > 8 :]:
                z = tdkernels.gemm_ar(share(x), w, given)
                assert torch.equal(z, expected.to(dtype)), ("gemm_ar", rows, given is None)
                z = tdkernels.gemm_rs(share(x), w, given)
                assert torch.equal(z, share(expected.to(dtype), 0)), ("gemm_rs", rows, given is None)
            z = tdkernels.gemm_ar(share(x[:1]), w)
            assert torch.equal(z, root[:1].to(dtype)), "gemm_ar of one row"
            residual, norm = draw(len(rows), N, dtype=dtype, seed=24), torch.ones(N, device=device(), dtype=dtype)
            r = tdkernels.gemm_ar_rms_norm(share(x), w, residual, norm, bias=bias)[1]
            assert torch.equal(r, (root + bias.float() + residual.float()).to(dtype)), ("gemm_ar_rms_norm", rows)


def sums(max_ranks, dtype):
    """Compare the collectives with the tree: the part of a rank is the root of its subtree."""
    values = [2.0 ** (5 * (leaf % 3)) * draw(16, 24, dtype=dtype, seed=30 + leaf).float() for leaf in range(max_ranks)]
    ranks, rank = dist.get_world_size(), dist.get_rank()
    of_rank = values[rank * max_ranks // ranks :][: max_ranks // ranks]
    part, expected = tree(of_rank, dtype).to(dtype), tree(values, dtype).to(dtype)
    assert max_ranks == 2 or not torch.equal(expected, sum(values).to(dtype))  # the comparison can fail
    with tdkernels.batch_invariant(max_ranks=max_ranks):
        exchanges = [None]
        if ranks > 1:
            exchanges += [tdkernels.CollectiveConfig(exchange=name, num_warps=1) for name in ("one_shot", "two_shot")]
        for config in exchanges:
            assert torch.equal(tdkernels.all_reduce(part, config=config), expected), config
        assert torch.equal(tdkernels.reduce_scatter(part), share(expected, 0))
        residual, weight = draw(16, 24, dtype=dtype, seed=40), draw(24, dtype=dtype, seed=41)
        r = tdkernels.all_reduce_rms_norm(part, residual, weight)[1]
        assert torch.equal(r, (expected.float() + residual.float()).to(dtype))


# ---- results that are compared between numbers of ranks ----


def _mlp(x, residual):
    """Return the output of a column-parallel and a row-parallel layer and a norm."""
    hidden, inner = x.shape[1], 4 * STEP
    up, down = draw(inner, hidden, seed=50) / 16, draw(hidden, inner, seed=51) / 16
    h = F.silu(tdkernels.column_linear(x, share(up, 0), share(draw(inner, seed=52))))
    norm = draw(hidden, seed=53)
    y, r = tdkernels.gemm_ar_rms_norm(h, share(down), residual, norm, bias=draw(hidden, seed=54))
    ln, _ = tdkernels.gemm_ar_layer_norm(h, share(down), r, norm, draw(hidden, seed=55))
    return torch.cat([y, r, ln], 1)


def _gathered(x, dtype):
    """Return the outputs of ag_gemm: one weight, a list with the gathered x, dim=1, and float8."""
    weight, bias = draw(N, x.shape[1], dtype=dtype, seed=56), draw(N, dtype=dtype, seed=57)
    own, w, b = share(x, 0), share(weight, 0), share(bias)
    y = tdkernels.ag_gemm(own, w, b)
    assert torch.equal(tdkernels.column_linear(x, w, b), y)  # whether x is sharded or replicated
    found = [joined(y, 1)]
    if dtype == torch.bfloat16:
        ys, _ = tdkernels.ag_gemm(own, [w, w], [b, b], return_gathered=True)
        sequence = tdkernels.ag_gemm(share(x.view(2, -1, x.shape[1]), 1), w, dim=1).flatten(0, 1)
        found += [joined(one, 1) for one in (*ys, sequence)]
        codes, scale = tdkernels.quantize_fp8(x, "row")
        codes_w, scale_w = tdkernels.quantize_fp8(weight, "row")
        at = [share(one.view(torch.uint8), 0).view(one.dtype) for one in (codes, codes_w)]
        scales = {"scale_x": share(scale, 0), "scale_w": share(scale_w, 0)}
        found.append(joined(tdkernels.ag_gemm(*at, **scales), 1))
    return torch.cat(found, 1)


def _tokens(x):
    """Return the outputs of the expert-parallel operators for this rank's tokens."""
    ids = torch.stack([torch.randperm(4, generator=torch.Generator().manual_seed(row))[:2] for row in range(len(x))])
    weights = torch.rand(len(x), 2, generator=torch.Generator().manual_seed(58))
    call = share(x, 0), share(ids, 0).to(device()), share(weights, 0).to(device())
    gate_up, down = draw(4, 32, x.shape[1], seed=59) / 8, draw(4, x.shape[1], 16, seed=60) / 4
    recv, handle = tdkernels.ep_dispatch(*call, num_experts=4)
    found = [tdkernels.ep_combine((recv.x * 1.7).to(x.dtype), handle)]
    for config in (None, tdkernels.EpMoeConfig(method="fused")):
        found.append(tdkernels.ep_moe(*call, share(gate_up, 0), share(down, 0), num_experts=4, config=config))
    return joined(torch.cat(found, 1))


def _norms(x, max_ranks):
    """Return y and r of the norms after an all-reduce of the roots of subtrees."""
    nodes = [draw(*x.shape, seed=61 + leaf).float() * x.float() for leaf in range(max_ranks)]
    ranks, rank = dist.get_world_size(), dist.get_rank()
    part = tree(nodes[rank * max_ranks // ranks :][: max_ranks // ranks], x.dtype).to(x.dtype)
    weight, bias = draw(x.shape[1], seed=70), draw(x.shape[1], seed=71)
    found = [*tdkernels.all_reduce_rms_norm(part, x, weight)]
    found += tdkernels.all_reduce_layer_norm(part, None, weight, bias)
    codes, r, scale = tdkernels.all_reduce_rms_norm(part, x, weight, quantize="fp8")
    return torch.cat([*found, codes.to(x.dtype), r, scale.to(x.dtype)], 1)


def results(max_ranks):
    """Return {operator: results of all rows} in the mode. Rows of other batches are compared with them here."""
    whole, parts = draw(24, 2 * STEP), {}
    calls = {
        "mlp": lambda x: _mlp(x, (x * 3).to(x.dtype)), "ag_gemm": lambda x: _gathered(x, torch.bfloat16),
        "ag_gemm, fp32": lambda x: _gathered(x.float(), torch.float32), "norms": lambda x: _norms(x, max_ranks),
        "experts": _tokens,
        "gemm_ar": lambda x: tdkernels.gemm_ar(
            share(x.repeat(1, 2)).float(), share(draw(N, 4 * STEP, seed=72)).float()
        ),
    }
    with tdkernels.batch_invariant(max_ranks=max_ranks):
        for name, call in calls.items():
            parts[name] = call(whole)
            if name in ("mlp", "gemm_ar"):
                assert torch.equal(call(whole[SOME]), parts[name][SOME]), name
    return {name: part.cpu() for name, part in parts.items()}


def heads_of_a_cache():
    """Compare flash_decode of all heads with calls of some of the heads, as tensor-parallel ranks make them."""
    q, cache = draw(2, 1, 8, 16), draw(2, 2, 600, 4, 16, seed=80)
    lens = torch.tensor([600, 1], dtype=torch.int32, device=device())
    with a_group([dist.get_rank()]) as group, tdkernels.batch_invariant(max_ranks=4):
        whole = tdkernels.flash_decode(q, *cache, lens, group=group)
        for ranks in (2, 4):
            part = tdkernels.flash_decode(q.chunk(ranks, 2)[-1], *cache.chunk(ranks, 3)[-1], lens, group=group)
            assert torch.equal(part, whole.chunk(ranks, 2)[-1])


# ---- errors and gradients ----


def _rejected(dtype=torch.bfloat16):
    """Return {part of the message: a call that is not supported}."""
    x, weight = draw(8, 256, dtype=dtype), draw(16, 256, dtype=dtype)
    codes, scale = tdkernels.quantize_fp8(x, "row")
    codes_w, scale_w = tdkernels.quantize_fp8(weight, "row")
    scales = {"scale_x": scale, "scale_w": scale_w}
    ids, weights = torch.zeros(8, 1, dtype=torch.int64, device=device()), torch.ones(8, 1, device=device())
    gate_up, down, kv = draw(2, 16, 256), draw(2, 256, 8), draw(2, 4, 2, 16)
    layer = tdkernels.nn.RowParallelLinear(512, 16, dtype=dtype, device=device(), float8="tensorwise")
    of_one_rank = {
        'gemm_rs: wire="fp8"': lambda: tdkernels.gemm_rs(x, weight, wire="fp8"),
        'ag_gemm: wire="fp8"': lambda: tdkernels.ag_gemm(x, weight, wire="fp8"),
        'all_reduce: quantize="fp8"': lambda: tdkernels.all_reduce(x, quantize="fp8"),
    }
    return (of_one_rank if dist.get_world_size() == 1 else {}) | {
        'RowParallelLinear: float8="tensorwise"': lambda: layer(draw(8, layer.weight.shape[1], dtype=dtype)),
        "gemm_rs: float8": lambda: tdkernels.gemm_rs(codes, codes_w, **scales),
        "gemm_ar: float8": lambda: tdkernels.gemm_ar(codes, codes_w, **scales),
        "ag_gemm: float8 with a bias": lambda: tdkernels.ag_gemm(codes, codes_w, weight[:, 0].contiguous(), **scales),
        "tp_moe: the operator": lambda: tdkernels.tp_moe(x, ids, weights, gate_up, down),
        "ag_attention: the operator": lambda: tdkernels.ag_attention(kv, kv, kv),
    }


def errors(failure_of):
    """Check the errors of calls that the mode does not support, on every rank of 1 or 2."""
    ranks = dist.get_world_size()
    for message, call in _rejected().items():
        with tdkernels.batch_invariant():
            call()  # only ``max_ranks`` is not supported
        with tdkernels.batch_invariant(max_ranks=2):
            error = failure_of(call)
        assert type(error) is NotImplementedError and "max_ranks=2" in str(error) and message in str(error), error
    x, weight = draw(8, 320 // ranks), draw(16, 320 // ranks)
    norm = torch.ones(16, device=device(), dtype=x.dtype)
    calls = {
        "gemm_rs": lambda x: tdkernels.gemm_rs(x, weight), "gemm_ar": lambda x: tdkernels.gemm_ar(x, weight),
        "gemm_ar_rms_norm": lambda x: tdkernels.gemm_ar_rms_norm(x, weight, None, norm)[0],
    }
    for operator, call in calls.items():
        with tdkernels.batch_invariant(max_ranks=2):
            error = failure_of(call, x)
            assert call(x[:0]).shape == (0, 16)
        expected = f"{operator}: weight {list(weight.shape)} on each of {ranks} rank"
        assert type(error) is ValueError and expected in str(error) and "K = 320" in str(error), error
        assert "must be divisible by " in str(error)
        with tdkernels.batch_invariant():
            call(x)


def unsupported_sizes(max_ranks, failure_of):
    """Check the errors in a group that cannot divide the tree."""
    x, weight = draw(12, 256), draw(12, 256)
    calls = {
        "gemm_rs": lambda: tdkernels.gemm_rs(x, weight), "gemm_ar": lambda: tdkernels.gemm_ar(x, weight),
        "all_reduce": lambda: tdkernels.all_reduce(x), "reduce_scatter": lambda: tdkernels.reduce_scatter(x),
        "all_reduce_rms_norm": lambda: tdkernels.all_reduce_rms_norm(x, None, weight[0]),
        "gemm_ar_rms_norm": lambda: tdkernels.gemm_ar_rms_norm(x, weight, None, weight[0, :12].contiguous()),
    }
    for operator, call in calls.items():
        with tdkernels.batch_invariant(max_ranks=max_ranks):
            error = failure_of(call)
        assert type(error) is ValueError and f"{operator}: a group of" in str(error), (operator, error)
        assert f"power of two of at most {max_ranks} ranks" in str(error)


def ranks_differ(failure_of):
    """Return the errors of calls whose ranks have different ``max_ranks``."""
    x, weight = draw(8, 512), draw(16, 512)
    found = []
    for call in (tdkernels.gemm_ar, lambda x, weight, group: tdkernels.all_reduce(x, group=group)):
        with a_group() as group, tdkernels.batch_invariant(max_ranks=2 << dist.get_rank()):
            found.append(failure_of(call, x, weight, group=group))
    return found


def ranks_have_different_k(failure_of):
    """Return the errors of calls whose ranks have different K / W, and some of them one that the tree cannot divide."""
    k = 512 - 24 * dist.get_rank()
    x, weight, norm = draw(8, k), draw(16, k), draw(16)
    calls = (  # with an explicit config, because the selection of a config compares the ranks
        lambda group: tdkernels.gemm_rs(x, weight, group=group, config=tdkernels.GemmRsConfig(transport="direct")),
        lambda group: tdkernels.gemm_ar(x, weight, group=group, config=tdkernels.GemmArConfig(transport="direct")),
        lambda group: tdkernels.gemm_ar_rms_norm(
            x, weight, None, norm, group=group, config=tdkernels.GemmArNormConfig(method="fused")
        ),
    )
    with a_group() as group, tdkernels.batch_invariant(max_ranks=8):
        return [failure_of(call, group=group) for call in calls]


def trains(max_ranks):
    """Compare gradients in the mode with those outside of it, for sizes or ranks that a tree cannot be divided by."""
    by_torch = tdkernels.CollectiveConfig(method="torch")
    calls = {
        "gemm_rs": (128, tdkernels.gemm_rs), "ag_gemm": (24, tdkernels.ag_gemm),
    } if dist.get_world_size() <= max_ranks else {
        "all_gather": (24, lambda x, weight: tdkernels.all_gather(x) @ weight.t()),
        "all_gather by torch": (24, lambda x, weight: tdkernels.all_gather(x, config=by_torch) @ weight.t()),
        "copy_to_ranks": (24, lambda x, weight: tdkernels.copy_to_ranks(x) @ weight.t()),
        "return_gathered": (24, lambda x, weight: torch.cat(tdkernels.ag_gemm(x, weight, return_gathered=True), 1)),
    }
    for k, call in calls.values():
        found = []
        for setting in ((False, None), (True, max_ranks)):
            x = draw(8, k, dtype=torch.float32, seed=90).requires_grad_()
            weight = draw(24, k, dtype=torch.float32, seed=91).requires_grad_()
            with tdkernels.batch_invariant(*setting):
                y = call(x, weight)
                y.backward(torch.ones_like(y))
            found.append((y.detach(), x.grad, weight.grad))
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
