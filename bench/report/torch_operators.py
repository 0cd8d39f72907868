"""Report section of torch's fused operators, torch.ops.symm_mem, with torch's kernels and with tdkernels."""

from bench.report import cells
from bench.report.machines import section

_INTRO = """## torch.ops.symm_mem

torch's fused operators with torch's kernels and with `tdkernels.integrations.symm_mem`, eager mode, milliseconds. The
operators are `fused_all_gather_matmul`, with and without the gathered A, and `fused_matmul_reduce_scatter`. The scatter
has the width of the first weight. **tuned** is a call in the tuning mode "on", with the kernel that it selected. It was
timed after the other methods, not in turns with them. Rows are written by `python -m bench.dense.torch_operators`.
"""


def text(rows):
    """Return the section, or "" if there are no rows."""
    # The shapes of a run are written one after the other, so "the newest run" is that of a day.
    return section(_INTRO, [{**row, "date": row["date"][:10]} for row in rows], _table)


def _table(rows):
    runs = {}
    for row in rows:  # the last row of a method counts
        runs.setdefault((row["m"], row["k"], tuple(row["n"]), row["op"]), {})[row["method"]] = row
    lines = [["M x K: N", "operator", "torch", "tdkernels", "x torch", "tuned"], ["---"] * 2 + ["---:"] * 4]
    for (m, k, widths, operator), run in runs.items():
        by_torch, ours, tuned = (run.get(method) for method in ("torch", "tdkernels", "tuned"))
        selected = "–" if tuned is None else f"{cells.ms(tuned['ms'])} ({tuned['kernel']})"
        ratio = cells.factor(by_torch["ms"] / ours["ms"])
        lines.append([f"{m} x {k}: {', '.join(map(str, widths))}", operator, cells.ms(by_torch["ms"]),
                      cells.ms(ours["ms"]), ratio, selected])
    place = f"{rows[0]['num_gpus']} x {rows[0]['gpu']}, {rows[0]['date']}, revision {rows[0]['git'][:7]}."
    return f"{place}\n\n{cells.markdown(lines)}"
