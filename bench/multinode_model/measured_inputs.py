"""Compute the measured inputs of the cost model, a ``model.Machine``, from single-node rows."""

from statistics import median

from bench.core.points import is_plain_decode
from bench.multinode_model import model, token_model
from bench.multinode_model.model import ITEM, World

GPU = "NVIDIA H200"
ROWS = 8192  # the rows are of eager calls, and GEMMs with smaller M are bound by host launch time
_MIN_GEMM_ROWS = 1024  # cuBLAS alone is not bound by host launch time from this M on
_WIRE_BOUND = 1.5  # an operator counts as wire-bound if the transfer takes this many times as long as the GEMM
_DECODE = (1, 96, 12, 128)  # batch, heads, kv heads, head dimension
_BYTES = {"ag_gemm": lambda s, world: model.ag_gemm_bytes(s.m, s.k, world),
          "gemm_rs": lambda s, world: model.gemm_rs_bytes(s.m, s.n, world),
          "gemm_ar": lambda s, world: model.gemm_ar_bytes(s.m, s.n, world)}
_SHARES = {"ag_share": "ag_gemm", "rs_share": "gemm_rs", "ar_share": "gemm_ar"}  # fields of the model.Machine


class Missing(ValueError):
    """There are no rows for an input of the model."""


def machine(points, alone, ep, decode):
    """Return the ``model.Machine``.

    Args:
        points: the points of ``points.read``.
        alone, ep, decode: rows of collectives, of dispatch and combine, and of flash_decode.

    Raises:
        Missing: if rows are missing; the message says which.
    """
    dense = usable(points)
    ag, rs, ar = (widest(dense, operator) for operator in ("ag_gemm", "gemm_rs", "gemm_ar"))
    link = median(_require("bound by the wire", [_link_bytes(p) / p.ours / 1e6 for p in ag + rs if _wire_bound(p)]))
    tokens = {name: _tokens(ep, name) for name in ("ep_dispatch", "ep_combine")}
    dispatch, combine = (_start_and_memory(name, rows) for name, rows in tokens.items())
    return model.Machine(
        gemms=gemm_times(dense),
        best_link_gbps=max(_require("with a link rate", [r["link_gbps"] for r in alone if r["gpu"] == GPU])),
        link_gbps=link,
        **{name: _lost(dense, operator, link) for name, operator in _SHARES.items()},
        nccl_gather_gbps=_nccl(ag), nccl_scatter_gbps=_nccl(rs), nccl_reduce_gbps=_nccl(ar),
        exchange_us=_exchange_us(alone),
        dispatch_us=dispatch[0], dispatch_memory_gbps=dispatch[1],
        combine_us=combine[0], combine_memory_gbps=combine[1],
        **_decoding(decode),
    )


def usable(points):
    """Select points of the tuner's final rounds, in which no other library heats the GPU."""
    found = [p for p in points if p.tuner and p.direction == "forward" and (p.dtype, p.layout) == ("bfloat16", "nk")]
    return [p for p in found if p.settings["gpu"] == GPU and p.gemm and p.ours and p.sequence]


def _require(what, found):
    """Return ``found``, or raise Missing if it is empty."""
    if not found:
        raise Missing(f"no rows {what}")
    return found


# ---- GEMMs ----


def gemm_times(points):
    """Return the ``model.GemmTimes`` of cuBLAS alone; the median if a size was measured repeatedly."""
    found = {}
    for point in points:
        if point.shape.m >= _MIN_GEMM_ROWS:
            found.setdefault(local_sizes(point), []).append(point.gemm)
    return model.GemmTimes({sizes: median(times) for sizes, times in found.items()})


def local_sizes(point):
    """Return (m, n, k) of the GEMM on one GPU."""
    shape, ranks = point.shape, point.settings["num_gpus"]
    if point.operator == "ag_gemm":
        return shape.m, shape.n // ranks, shape.k
    return shape.m, shape.n, shape.k // ranks


def widest(points, operator):
    """Return the large-M points of an operator on the largest number of GPUs."""
    found = [p for p in points if p.operator == operator and p.shape.m >= ROWS]
    most = max(_require(f"of {operator}", [p.settings["num_gpus"] for p in found]))
    return [p for p in found if p.settings["num_gpus"] == most]


def _link_bytes(point):
    return _BYTES[point.operator](point.shape, World(1, point.settings["num_gpus"])).link


def _wire_bound(point):
    return point.wire > _WIRE_BOUND * point.gemm


def _lost(points, operator, link):
    """Return the median slowdown of a GEMM per ms of concurrent NVLink transfer.

    It is measured on the largest number of GPUs on which the GEMM of some problem takes longer than the transfer.
    """
    long = [p for p in points if p.operator == operator and p.gemm > model.ms(_link_bytes(p), link)]
    found = widest(_require(f"of long GEMMs of {operator}", long), operator)
    return median([(p.ours - p.gemm) / model.ms(_link_bytes(p), link) for p in found])


def _nccl(points):
    """Return the median GB/s of NCCL in the unfused baseline, over points where the collective is a large part."""
    collectives = [(p, p.sequence - p.gemm) for p in points]
    rates = [_link_bytes(p) / time / 1e6 for p, time in collectives if time > p.gemm / 2]
    return median(_require("of long collectives", rates))


# ---- latencies ----


def _exchange_us(rows):
    rows = [r for r in rows if r["op"] == "all_gather" and r["graph"] and r["gpu"] == GPU and r["ms"]]
    rows = [r for r in rows if r["method"] == "tdkernels" and r["bytes"] == 1024]
    return 1e3 * max(_require("of a small all-gather", rows), key=lambda r: (r["num_gpus"], r["date"]))["ms"]


# ---- dispatch and combine ----


def _tokens(rows, operator):
    """Return {(tokens, payload): newest row} of balanced routing, in a graph.

    The rows are of the smallest number of GPUs, where memory traffic has the largest share.
    """
    method = {"ep_dispatch": "tdkernels-max-tokens", "ep_combine": "tdkernels"}[operator]
    rows = [r for r in rows if (r["op"], r["method"], r["routing"]) == (operator, method, "balanced")]
    rows = [r for r in rows if r["graph"] and r["gpu"] == GPU and r["ms"] and r["payload"] in ("fp8", "bf16")]
    fewest = min(r["num_gpus"] for r in _require(f"of {operator}", rows))
    rows = sorted((r for r in rows if r["num_gpus"] == fewest), key=lambda r: r["date"])
    return {(r["tokens"], r["payload"]): r for r in rows}


def _start_and_memory(operator, rows):
    """Return (us for the fewest tokens, memory GB/s for the most tokens), the means over fp8 and bf16 payloads."""
    few, most = (choose(tokens for tokens, _ in rows) for choose in (min, max))
    if few == most:
        raise Missing(f"no rows of {operator} for two token counts")
    payloads = [payload for tokens, payload in rows if tokens == most and (few, payload) in rows]
    payloads = _require(f"of {operator} for the fewest and the most tokens", payloads)
    pairs = [(rows[few, payload], rows[most, payload]) for payload in payloads]
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
    """Return the bytes of a dispatched token; fp8 has a scale of 4 bytes per 128 channels."""
    return hidden * ITEM if payload == "bf16" else hidden + 4 * -(-hidden // 128)


# ---- decoding ----


def _decoding(rows):
    """Return the times of one rank alone and of the communication, on the smallest number of GPUs above one."""
    rows = [r for r in rows if (r["batch"], r["heads"], r["kv_heads"], r["dim"]) == _DECODE and is_plain_decode(r)]
    rows = [r for r in rows if r["graph"] and r["gpu"] == GPU and r["ms"] and r["num_gpus"] > 1]
    fewest = min(r["num_gpus"] for r in _require("of flash_decode", rows))
    runs = {}
    for row in sorted((r for r in rows if r["num_gpus"] == fewest), key=lambda r: r["date"]):
        name = row["method"].split()[0]
        run = runs.setdefault(row["keys"], {})
        if row["date"] != run.get("date"):
            run.clear()
        run["date"] = row["date"]
        run[name] = min(row["ms"], run.get(name, row["ms"]))  # the fastest of several libraries
    required = ("local", "torch-local", "sequence", "tdkernels")
    full = {keys: run for keys, run in runs.items() if all(name in run for name in required)}
    if len(full) < 2:
        raise Missing("no rows of flash_decode for two cache lengths")
    return {
        "attention": tuple((keys, run["local"]) for keys, run in full.items()),
        "torch_attention": tuple((keys, run["torch-local"]) for keys, run in full.items()),
        "decode_exchange_us": 1e3 * median(run["tdkernels"] - run["local"] for run in full.values()),
        "decode_sequence_us": 1e3 * median(run["sequence"] - run["torch-local"] for run in full.values()),
    }
