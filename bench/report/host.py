"""Report section of host launch times of small calls."""

from bench.dense.modules import BARE, MODULE, WITH_GRADIENTS
from bench.report.machines import section

_INTRO = """## Host launch time

Microseconds per call for small calls issued back to back: until the host has launched the call / until the device has
finished it. **unfused** is torch + NCCL written by hand, **ours, method "torch"** is a tdkernels call that runs torch +
NCCL, and **ours** runs the kernels with heuristic configs. GEMMs have M = 64, K = 4096 and N = 1536 per rank,
collectives 1 KiB, caches 1024 keys. †: attention in fp32, which method "torch" of `flash_decode` was before torch's
flash attention. Rows are written by `python -m bench.dense.host`.
"""
_MODULES_INTRO = """
Modules of `tdkernels.nn` and the operators that they call, microseconds until the host has launched the call. The call
of the operator reads the weight and the bias from the module, too. **more** is the difference. It varies by a few
microseconds between runs. M = 32, hidden size 1024, inner size 2048. **MiB** is the peak of the memory that a call of
the operator / the module allocates.

| module | gradients | operator | module | more | MiB |
|---|---|---:|---:|---:|---:|
"""
# Method names as stored in rows. Rows of flash_decode with the name ``TORCH_METHOD`` are older than ``TORCH_METHODS``.
_METHODS = SEQUENCE, TORCH_METHOD, OURS = "sequence", "ours by torch", "ours"
TORCH_METHODS = {"flash_decode": "ours by torch flash"}
_TITLES = ("unfused", 'ours, method "torch"', "ours")


def text(rows):
    """Return the section, or "" if there are no rows."""
    return section(_INTRO, rows, _table)


def _table(rows):
    times = {}
    for row in rows:
        operator, method, text = row["op"], row["method"], f"{row['host_us']:.0f} / {row['call_us']:.0f}"
        if operator in TORCH_METHODS and method == TORCH_METHOD:
            text += " †"
        times[operator, TORCH_METHOD if method == TORCH_METHODS.get(operator) else method] = text
    lines = [
        f"{rows[0]['num_gpus']} x {rows[0]['gpu']}, {rows[0]['date'][:10]}, revision {rows[0]['git'][:7]}.",
        "",
        f"| operator | {' | '.join(_TITLES)} |",
        "|---|" + "---:|" * len(_METHODS),
    ]
    for operator in dict.fromkeys(operator for operator, method in times if method in _METHODS):
        lines.append(f"| {operator} | {' | '.join(times.get((operator, method), '–') for method in _METHODS)} |")
    return "\n".join(lines) + "\n" + _modules({(row["op"], row["method"]): row for row in rows})


def _modules(rows):
    """Return the table of the modules, or "" if they were not measured."""
    lines = []
    for name, method in rows:
        if not method.startswith(BARE):
            continue
        bare, module = rows[name, method], rows[name, method.replace(BARE, MODULE)]
        more = module["host_us"] - bare["host_us"]
        mebibytes = " / ".join(f"{row['peak_bytes'] / 2**20:.2f}" for row in (bare, module))
        with_gradients = "yes" if method.endswith(WITH_GRADIENTS) else "no"
        times = f"{bare['host_us']:.1f} | {module['host_us']:.1f} | {more:.1f}"
        lines.append(f"| {name} | {with_gradients} | {times} | {mebibytes} |")
    return _MODULES_INTRO + "\n".join(lines) + "\n" if lines else ""
