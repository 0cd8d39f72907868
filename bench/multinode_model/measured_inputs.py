"""The measured half of a nodes.Machine, from the rows of one node: medians and extremes, nothing typed."""

from statistics import median

from bench.multinode_model import model, token_model
from bench.multinode_model.model import ITEM, World

GPU = "NVIDIA H200"
ROWS = 8192  # products with fewer rows wait for the host: these rows are of eager calls
_LEAST = 1024  # what cuBLAS alone takes is right from fewer rows on
_WAITS = 1.5  # an operator waits for the wire if that alone takes so much longer than the product
_DECODE = (1, 96, 12, 128)  # batch, heads, heads of keys, size
_BYTES = {"ag_gemm": lambda s, world: model.ag_gemm_bytes(s.m, s.k, world),
          "gemm_rs": lambda s, world: model.gemm_rs_bytes(s.m, s.n, world),
          "gemm_ar": lambda s, world: model.gemm_ar_bytes(s.m, s.n, world)}


class Missing(ValueError):
    """A piece for which there are no rows."""


def machine(points, alone, ep, decode):
    """A nodes.Machine; Missing says which rows it lacks.

    Args:     points: those of points.read
              alone, ep, decode: rows of collectives, of expert parallelism, of decoding
    """
    dense = usable(points)
    ag, rs, ar = (widest(dense, operator) for operator in ("ag_gemm", "gemm_rs", "gemm_ar"))
    link = median(_piece("that wait for the wire", [_link_bytes(p) / p.ours / 1e6 for p in ag + rs if _waits(p)]))
    tokens = {name: _tokens(ep, name) for name in ("ep_dispatch", "ep_combine")}
    dispatch, combine = (_start_and_memory(name, rows) for name, rows in tokens.items())
    return model.Machine(
        products=products(dense),
        best_link_gbps=max(_piece("with a link rate", [r["link_gbps"] for r in alone if r["gpu"] == GPU])),
        link_gbps=link,
        ag_share=_lost(ag, link), rs_share=_lost(rs, link), ar_share=_lost(ar, link),
        nccl_gather_gbps=_nccl(ag), nccl_scatter_gbps=_nccl(rs), nccl_reduce_gbps=_nccl(ar),
        exchange_us=_exchange_us(alone),
        dispatch_us=dispatch[0], dispatch_memory_gbps=dispatch[1],
        combine_us=combine[0], combine_memory_gbps=combine[1],
        **_decoding(decode),
    )


def usable(points):
    """Points of the tuner's last rounds, in which no other library heats the GPU."""
    found = [p for p in points if p.tuner and p.direction == "forward" and (p.dtype, p.layout) == ("bfloat16", "nk")]
    return [p for p in found if p.settings["gpu"] == GPU and p.gemm and p.ours and p.sequence]


def _piece(what, found):
    if not found:
        raise Missing(f"no rows {what}")
    return found


# ---- products ----


def products(points):
    """nodes.Products of what cuBLAS took alone on each GPU; of what was measured often, the median."""
    found = {}
    for point in points:
        if point.shape.m >= _LEAST:
            found.setdefault(local_sizes(point), []).append(point.gemm)
    return model.Products({sizes: median(times) for sizes, times in found.items()})


def local_sizes(point):
    """(m, n, k) of one GPU's product."""
    shape, ranks = point.shape, point.settings["num_gpus"]
    if point.operator == "ag_gemm":
        return shape.m, shape.n // ranks, shape.k
    return shape.m, shape.n, shape.k // ranks


def widest(points, operator):
    """The long products of an operator on as many GPUs as there are rows of."""
    found = [p for p in points if p.operator == operator and p.shape.m >= ROWS]
    most = max(_piece(f"of {operator}", [p.settings["num_gpus"] for p in found]))
    return [p for p in found if p.settings["num_gpus"] == most]


def _link_bytes(point):
    return _BYTES[point.operator](point.shape, World(1, point.settings["num_gpus"])).link


def _waits(point):
    return point.wire > _WAITS * point.gemm


def _lost(points, link):
    """The median of what a ms of NVLink takes from a product that is longer."""
    times = [(p, model.ms(_link_bytes(p), link)) for p in points]
    return median(_piece("of long products", [(p.ours - p.gemm) / wire for p, wire in times if p.gemm > wire]))


def _nccl(points):
    """GB/s of the collective in the sequence, where that is no small part of it."""
    apart = [(p, p.sequence - p.gemm) for p in points]
    rates = [_link_bytes(p) / time / 1e6 for p, time in apart if time > p.gemm / 2]
    return median(_piece("of long collectives", rates))


# ---- latencies ----


def _exchange_us(rows):
    rows = [r for r in rows if r["op"] == "all_gather" and r["graph"] and r["gpu"] == GPU and r["ms"]]
    rows = [r for r in rows if r["method"] == "tdkernels" and r["bytes"] == 1024]
    return 1e3 * max(_piece("of a small all-gather", rows), key=lambda r: (r["num_gpus"], r["date"]))["ms"]


# ---- experts ----


def _tokens(rows, operator):
    """{(tokens, payload): newest row} of uniform routing, in a graph, on the fewest GPUs: there memory counts most."""
    method = {"ep_dispatch": "tdkernels-max-tokens", "ep_combine": "tdkernels"}[operator]
    rows = [r for r in rows if (r["op"], r["method"], r["routing"]) == (operator, method, "balanced")]
    rows = [r for r in rows if r["graph"] and r["gpu"] == GPU and r["ms"] and r["payload"] in ("fp8", "bf16")]
    fewest = min(r["num_gpus"] for r in _piece(f"of {operator}", rows))
    rows = sorted((r for r in rows if r["num_gpus"] == fewest), key=lambda r: r["date"])
    return {(r["tokens"], r["payload"]): r for r in rows}


def _start_and_memory(operator, rows):
    """(us of the fewest tokens, GB/s of memory with the most): means of what was sent as fp8 and as bf16."""
    few, most = (choose(tokens for tokens, _ in rows) for choose in (min, max))
    if few == most:
        raise Missing(f"no rows of {operator} for two numbers of tokens")
    payloads = [payload for tokens, payload in rows if tokens == most and (few, payload) in rows]
    pairs = [(rows[few, payload], rows[most, payload]) for payload in _piece(f"of {operator}, few and many", payloads)]
    start = sum(a["ms"] for a, _ in pairs) / len(pairs)
    rates = [_memory_bytes(b) / (b["ms"] - a["ms"]) / 1e6 for a, b in pairs]
    return 1e3 * start, sum(rates) / len(rates)


def _memory_bytes(row):
    routing = token_model.routed(row["experts"], row["choices"], World(1, row["num_gpus"]))
    tokens, hidden, choices = row["tokens"], row["hidden"], row["choices"]
    if row["op"] == "ep_combine":
        return token_model.combine_memory(tokens, hidden, choices, routing)
    return token_model.dispatch_memory(tokens, hidden, choices, row_bytes(hidden, row["payload"]), routing)


def row_bytes(hidden, payload):
    """A token on its way to the experts; in fp8 with a scale of 4 bytes for 128 channels."""
    return hidden * ITEM if payload == "bf16" else hidden + 4 * -(-hidden // 128)


# ---- decoding ----


def _decoding(rows):
    """What a rank takes alone and what communication adds, on the fewest GPUs that have any."""
    rows = [r for r in rows if (r["batch"], r["heads"], r["kv_heads"], r["dim"]) == _DECODE]
    rows = [r for r in rows if r["graph"] and r["gpu"] == GPU and r["ms"] and r["num_gpus"] > 1]
    fewest = min(r["num_gpus"] for r in _piece("of flash_decode", rows))
    runs = {}
    for row in sorted((r for r in rows if r["num_gpus"] == fewest), key=lambda r: r["date"]):
        name = row["method"].split()[0]
        run = runs.setdefault(row["keys"], {})
        if row["date"] != run.get("date"):
            run.clear()
        run["date"] = row["date"]
        run[name] = min(row["ms"], run.get(name, row["ms"]))  # of several libraries the fastest
    wanted = ("local", "torch-local", "sequence", "tdkernels")
    full = {keys: run for keys, run in runs.items() if all(name in run for name in wanted)}
    if len(full) < 2:
        raise Missing("no rows of flash_decode for two lengths")
    return {
        "attention": tuple((keys, run["local"]) for keys, run in full.items()),
        "torch_attention": tuple((keys, run["torch-local"]) for keys, run in full.items()),
        "decode_exchange_us": 1e3 * median(run["tdkernels"] - run["local"] for run in full.values()),
        "decode_sequence_us": 1e3 * median(run["sequence"] - run["torch-local"] for run in full.values()),
    }
