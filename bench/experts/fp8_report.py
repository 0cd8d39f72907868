"""Report section of layers of experts with weights in fp8, from the rows of ``bench.experts.fp8_layers``."""

from bench.experts.fp8_layer_methods import BF16, KINDS, PORTABLE, SENT, SEQUENCE
from bench.report import tables
from bench.report.cells import factor

_INTRO = """## Layers of experts with fp8 weights

Milliseconds of the forward of `tp_moe` and `ep_moe`. All methods of a line ran in turns, and every output was checked
first, against the layer in fp32.

- **unfused** is NCCL, torch's grouped GEMM and permutes in bf16, **bf16** the operator with weights in bf16.
- **block** and **row** have weights in fp8, with a scale for each 128 × 128 elements or for each output channel. Rows
  are quantized before each GEMM. **fast** is with `use_fast_accum=True`. **portable** is without warp specialization,
  `MoeTpConfig()`. With **sent**, tokens are also sent in fp8.
- **x bf16** is the speedup of the fastest of them over bf16.

Rows are written by `python -m bench.experts.fp8_layers`.
"""
_METHODS = {"unfused": SEQUENCE, "bf16": BF16}
_FP8 = [kind + suffix for kind in KINDS for suffix in ("", PORTABLE, SENT)]
_METHODS |= {name: name for name in _FP8}


def text(rows):
    """Return the section, "" if it has no rows."""
    return tables.sections(_INTRO, rows, _place, _problem, _table)


def _place(row):
    return row["op"], row["gpu"], row["num_gpus"], row["graph"]


def _problem(row):
    return row["hidden"], row["inner"], row["experts"], row["choices"], row["tokens"]


def _any_row(run):
    return next(iter(run.values()))


def _table(place, runs):
    operator, _, _, graph = place
    first = {
        "tokens" if operator == "tp_moe" else "tokens of a rank": lambda run: str(_any_row(run)["tokens"]),
        "I x H x E x k": lambda run: "{inner}x{hidden}x{experts}x{choices}".format(**_any_row(run)),
    }
    title = f"{operator}, fp8 weights{', in CUDA graphs' * graph}"
    ordered = [runs[problem] for problem in sorted(runs)]
    return tables.table(title, "Forward", ordered, first, _METHODS, {"x bf16": _over_bf16})


def _over_bf16(run):
    base = tables.ms(run, BF16)
    ours = [one for one in (tables.ms(run, name) for name in _FP8) if one]
    return factor(base / min(ours) if base and ours else None)
