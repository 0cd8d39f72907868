"""Headline tables of the summary page: a few problems of each family, wins and losses, taken from the rows."""

from bench.core.points import is_plain_decode
from bench.report import tables
from bench.report.cells import factor, ms
from bench.report.dense import table

# (operator, M, N, K) of the eager table; the same on every machine that has them.
_LARGE = (
    ("ag_gemm", 8192, 8192, 28672), ("ag_gemm", 8192, 6144, 4096), ("ag_gemm", 8192, 10240, 8192),
    ("ag_gemm", 8192, 57344, 8192), ("gemm_rs", 8192, 8192, 8192), ("gemm_rs", 8192, 8192, 28672),
    ("gemm_ar", 8192, 8192, 8192), ("gemm_ar", 8192, 8192, 28672), ("gemm_ar", 28000, 7168, 4096),
)
_BACKWARD = (
    ("ag_gemm", 8192, 8192, 28672), ("ag_gemm", 8192, 10240, 8192), ("ag_gemm", 8192, 57344, 8192),
    ("gemm_rs", 8192, 8192, 8192), ("gemm_rs", 8192, 8192, 28672),
)
_SMALL = (
    ("ag_gemm", 16, 6144, 4096), ("ag_gemm", 64, 10240, 8192), ("gemm_rs", 128, 4096, 4096),
    ("gemm_rs", 16, 8192, 28672), ("gemm_ar", 1, 8192, 8192), ("gemm_ar", 128, 8192, 8192),
    ("gemm_ar", 32, 5120, 25600),
)
_DISPATCH_OURS = ("tdkernels", "tdkernels-max-tokens", "tdkernels-direct")
_TOKENS = (16, 128, 1024, 4096)
# (operator, fields of the row, method of ours, description)
_LAYERS = (
    ("tp_moe", {"shape": "8192x8192x8192x32x4"}, "tdkernels", "8192 tokens, H 8192, I 8192, E 32, k 4"),
    ("tp_moe", {"shape": "2048x14336x4096x8x2"}, "tdkernels", "2048 tokens, Mixtral-8x7B"),
    ("tp_moe", {"shape": "2048x1408x2048x60x4"}, "tdkernels", "2048 tokens, H 2048, I 1408, E 60, k 4"),
    ("ep_moe", {"shape": "4096x7168x2048x256x8"}, "tdkernels-max-tokens",
     "4096 tokens a rank, H 7168, I 2048, E 256, k 8, `max_tokens`"),
    ("ep_moe", {"shape": "128x7168x2048x256x8"}, "tdkernels-max-tokens", "128 tokens a rank, the same layer"),
)
_COLLECTIVES = (("all_reduce", 16 << 10), ("all_reduce", 4 << 20), ("all_reduce", 256 << 20), ("all_gather", 64 << 10))
_DENSE = ("operator", "M x N x K", "layer", "GEMM", "unfused", "ours", "x unfused")


def text(rows):
    """Return the headline sections for which there are rows."""
    sections = (
        _dense(rows.dense, "Large GEMMs, forward", "Eager, milliseconds.", _LARGE, "forward", False),
        _dense(rows.dense, "Backward passes", "dx and dweight, eager, milliseconds.", _BACKWARD, "backward", False),
        _dense(rows.dense, "Small M", "As in decoding: CUDA graphs, milliseconds.", _SMALL, "forward", True),
        _collectives(rows.collectives), _dispatch(rows.dispatch), _layers(rows.layers), _attention(rows),
    )
    return "\n".join(filter(None, sections))


# ---- dense ----


def dense_point(points, operator, shape, direction, graph, num_gpus):
    """Return the benchmarked bf16 Point of a problem on one host, or None."""
    for point in points:
        place = point.operator, point.direction, point.graph, point.settings["num_gpus"]
        if place == (operator, direction, graph, num_gpus) and _is_plain(point):
            if (point.shape.m, point.shape.n, point.shape.k) == shape:
                return point
    return None


def _is_plain(point):
    usual = (point.dtype, point.layout) == ("bfloat16", "nk") and "simulated" not in point.settings["gpu"]
    return usual and not point.tuner and point.speedup is not None


def _dense(points, title, what, problems, direction, graph):
    sizes = sorted({point.settings["num_gpus"] for point in points})
    for num_gpus in reversed(sizes):  # the largest machine on which most of the problems were measured
        found = [dense_point(points, operator, tuple(shape), direction, graph, num_gpus)
                 for operator, *shape in problems]
        found = [point for point in found if point]
        if len(found) * 2 > len(problems):
            gpu = found[0].settings["gpu"]
            return f"### {title}, {num_gpus} x {gpu}\n\n{what}\n\n{table(_DENSE, map(_dense_line, found))}"
    return ""


def _dense_line(point):
    return (
        f"`{point.operator}`", str(point.shape), point.shape.name, ms(point.gemm), ms(point.sequence), ms(point.ours),
        factor(point.speedup),
    )


# ---- collectives, dispatch ----


def _newest(rows, **fields):
    """Return {method: row} of the newest run whose rows have these fields and a time, {} if there is none."""
    found = [row for row in rows if all(row[name] == value for name, value in fields.items()) and row["ms"]]
    same = lambda row: None  # noqa: E731 - the fields select one problem on one machine
    return tables.newest(found, same, same).get(None, {}).get(None, {})


def _us(row):
    return f"{row['ms'] * 1e3:.1f}" if row else ""


def _collectives(rows):
    lines = []
    for operator, nbytes in _COLLECTIVES:
        for num_gpus in (4, 2):
            run = _newest(rows, op=operator, bytes=nbytes, num_gpus=num_gpus, graph=True)
            if {"nccl", "tdkernels"} <= set(run):
                ours = run["tdkernels"]
                size = f"{nbytes >> 10} KiB" if nbytes < 1 << 20 else f"{nbytes >> 20} MiB"
                lines.append([f"`{operator}`", size, f"{num_gpus} x {ours['gpu']}", _us(run["nccl"]), _us(ours),
                              factor(run["nccl"]["ms"] / ours["ms"])])
                break
    if not lines:
        return ""
    return ("### Collectives\n\nCUDA graphs, microseconds, by the bytes of the full tensor.\n\n"
            + table(("operator", "bytes", "GPUs", "NCCL", "ours", "x NCCL"), lines))


def _dispatch(rows):
    lines = []
    problems = (("ep_dispatch", "fp8"), ("ep_dispatch", "bf16"), ("ep_combine", None))
    for operator, payload in problems:
        for tokens in _TOKENS:
            payload_field = {"payload": payload} if payload else {}
            run = _newest(rows, op=operator, tokens=tokens, num_gpus=2, graph=True, hidden=7168, experts=256,
                          choices=8, routing="balanced", **payload_field)
            ours, base = _fastest(run, *_DISPATCH_OURS), _fastest(run, "sequence", "sequence-known-splits")
            if ours and base:
                name = f"`{operator}`{f', {payload}' if payload else ''}"
                strategy = "low-latency" if ours["method"] == "tdkernels-direct" else "two-phase" if payload else ""
                lines.append([name, str(tokens), strategy, _us(base), _us(ours), factor(base["ms"] / ours["ms"])])
    if not lines:
        return ""
    titles = "operator", "tokens a rank", "strategy", "unfused", "ours", "x unfused"
    return ("### Dispatch and combine, 2 ranks\n\nCUDA graphs, microseconds; H = 7168, 256 experts, 8 for each token. "
            "Unfused is NCCL's all-to-all with the permutations around it.\n\n" + table(titles, lines))


def _fastest(run, *methods):
    return min((run[name] for name in methods if name in run), key=lambda row: row["ms"], default=None)


# ---- layers of experts, attention ----


def layer_runs(rows, operator, fields):
    """Return [forward run, forward + backward run] of a layer, eager and with balanced routing; each {method: row}."""
    return [_newest(rows, what=operator, **{"pass": which}, graph=False, routing="balanced", **fields)
            for which in ("forward", "forward+backward")]


def _layers(rows):
    lines = []
    for operator, fields, ours, name in _LAYERS:
        runs = layer_runs(rows, operator, fields)
        if all({"grouped", "sequence", ours} <= set(run) for run in runs):
            times = [" / ".join(ms(run[method]["ms"]) for run in runs) for method in ("grouped", "sequence", ours)]
            ratio = " / ".join(factor(run["sequence"]["ms"] / run[ours]["ms"]) for run in runs)
            lines.append([f"`{operator}`", name, *times, ratio])
    if not lines:
        return ""
    titles = "operator", "layer", "grouped GEMM", "unfused", "ours", "x unfused"
    return ("### Layers of experts, 2 ranks\n\nEager, milliseconds: forward / forward and backward. Unfused is NCCL, "
            "permutations and torch's grouped GEMM.\n\n" + table(titles, lines))


def _attention(rows):
    lines, decode = [], list(filter(is_plain_decode, rows.decode))
    for keys in (8192, 65536):
        run = _newest(decode, num_gpus=2, graph=True, batch=1, heads=96, keys=keys)
        lines += _attention_line(run, "`flash_decode`, CUDA graph", f"96 / 12 heads, {keys} keys a rank")
    for tokens in (8192, 32768):
        run = _newest(rows.sequences, what="ag_attention", num_gpus=2, graph=False, tokens=tokens, heads=32,
                      sharding="zigzag", **{"pass": "forward"})
        lines += _attention_line(run, "`ag_attention`", f"32 / 8 heads, {tokens} tokens, zigzag")
    if not lines:
        return ""
    titles = "operator", "problem", "unfused", "ours", "x unfused"
    return ("### Attention, 2 ranks\n\nForward, milliseconds. Unfused is NCCL's all-gathers and the fastest of torch's "
            "attention kernels.\n\n" + table(titles, lines))


def _attention_line(run, operator, problem):
    """Return [line] with the fastest of torch's attention kernels as the baseline, or [] without one."""
    base = _fastest(run, *(method for method in run if method.startswith("sequence ")))
    if not base or "tdkernels" not in run:
        return []
    kernel, ours = base["method"].removeprefix("sequence "), run["tdkernels"]
    return [[operator, problem, f"{ms(base['ms'])} ({kernel})", ms(ours["ms"]), factor(base["ms"] / ours["ms"])]]
