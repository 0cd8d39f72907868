"""Report section of whole tensor-parallel Llama models in frameworks."""

from bench.models.cases import ASYNC_TP, COMPILED, FRAMEWORKS, METHODS, OURS, OURS_COMPILED, OWN, PHASES
from bench.report import tables as run_tables
from bench.report.cells import factor, markdown

_INTRO = """## Models

Whole Llama models with random weights, divided by tensor parallelism. Rows are written by `python -m bench.models`.

- Times are milliseconds of all decoder layers and the last norm. Those of transformers contain the embedding and an
  output layer with a vocabulary of 4096, too.
- **prefill** is a forward without gradients, of one sequence unless noted. **train** is a forward and backward with the
  gradients of all weights, without an optimizer. **decode** is one token for each sequence, with the given number of
  keys.
- **no communication**: the layers of one rank without any collective. It is not quite a lower bound: its norms and sums
  run on all tokens; with sequence parallelism those of the other methods run on 1 / W of them.
- **nccl**: collectives written by hand around the same layers. Prefill and train use sequence parallelism: one
  all-gather for q, k and v, another for gate and up, and a reduce-scatter after o and down. Decode uses all-reduces.
- **DTensor**: torch's `parallelize_module` with the usual plan. **compile**: this model under `torch.compile`, with
  torch's asynchronous tensor parallelism, with the adapter of tdkernels behind its operators, or with the inductor pass
  of tdkernels.
- **transformers**: its own tensor parallelism, with complete hidden states and all-reduces in every phase.
- **megatron**: its local layers with sequence parallelism, and torch's RMSNorm. The local attention is not fused.
- **x own**: the framework's own method (nccl, transformers, megatron) over the fastest eager method of tdkernels.
  **x async TP**: torch's asynchronous tensor parallelism over the fastest compiled method of tdkernels. torch.compile
  also makes other parts of the model faster, so compiled and eager methods are not compared.
- With sequence parallelism the gradients of norm weights must be summed over the ranks once per optimizer step. The sum
  is not timed, except with the adapter `parallelize` of transformers, whose backward contains it.
- Outputs, and in training two gradients, were checked against the complete model on one GPU before timing.
"""
_MEMORY = "Memory that torch allocates during one eager call, GiB. Symmetric memory of tdkernels is not included.\n"


def text(rows):
    """Return the section for rows of ``measure.rows``, or "" if there are none."""
    found = _newest(rows)
    return "\n".join([_INTRO, *(_section(found[place]) for place in sorted(found))]) if found else ""


def _newest(rows):
    """Return {place: [{method: row}]} with the newest run of each problem, in the order of the problems.

    In contrast to ``tables.newest``, a run may have absent methods only.
    """
    dates = {}
    for row in rows:
        key = _place(row), _problem(row)
        dates[key] = max(dates.get(key, ""), row["date"])
    found = {}
    for place, problem in sorted(dates):
        run = {
            row["method"]: row for row in rows
            if (_place(row), _problem(row)) == (place, problem) and row["date"] == dates[place, problem]
        }
        found.setdefault(place, []).append(run)
    return found


def _place(row):
    return row["gpu"], row["num_gpus"], FRAMEWORKS.index(row["framework"]), row["size"], row["layers"], row["dtype"]


def _problem(row):
    """Return the sort key of a problem."""
    return PHASES.index(row["phase"]), row["graph"], row["tokens"], row["batch"], row["context"] or 0


def _section(runs):
    """Return the tables of a framework and size, and the reasons for absent methods."""
    any_row = next(iter(runs[0].values()))
    framework = any_row["framework"]
    names = METHODS[framework] + (COMPILED if framework == "torch" else ())
    first = {"phase": lambda run: _phase(next(iter(run.values())))}
    parts = []
    timed = [run for run in runs if any(row["ms"] for row in run.values())]
    title = f"Llama-{any_row['size']}, {framework}"
    if timed:
        what = f"{any_row['layers']} layers, {any_row['dtype']}; {framework} {any_row['version']}"
        more = {"x own": lambda run: _over_fastest(run, OWN[framework], OURS)}
        if any(run_tables.ms(run, ASYNC_TP) for run in timed):
            more["x async TP"] = lambda run: _over_fastest(run, ASYNC_TP, OURS_COMPILED)
        parts.append(run_tables.table(title, what, timed, first, {name: name for name in names}, more))
    else:
        parts.append(f"### {title}, {any_row['num_gpus']} x {any_row['gpu']}\n")
    eager = [run for run in timed if any(row["peak_bytes"] for row in run.values())]
    if eager:
        parts += [_MEMORY, _memory(eager, first, names)]
    notes = [
        f"- {_phase(row)}: **{row['method']}**: {row['note']}" for run in runs for row in run.values() if row["note"]
    ]
    absent = [
        f"- {_phase(row)}: **{row['method']}** is absent: {row['absent']}"
        for run in runs for row in run.values() if row["absent"]
    ]
    lines = notes + absent
    return "\n".join(parts + lines + [""] * bool(lines))


def _phase(row):
    graph = ", CUDA graph" * row["graph"]
    if row["phase"] != "decode":
        sequences = f" in {row['batch']} sequences" if row["batch"] > 1 else ""
        return f"{row['phase']}, {row['tokens']} tokens{sequences}{graph}"
    return f"decode, {row['batch']} x {row['context']} keys{graph}"


def _over_fastest(run, baseline, methods):
    """Show the time of a baseline over that of the fastest of the methods."""
    base = run_tables.ms(run, baseline)
    times = [time for name in methods if (time := run_tables.ms(run, name))]
    return factor(base / min(times) if base and times else None)


def _memory(runs, first, names):
    shown = [name for name in names if any(name in run for run in runs)]
    lines = [[*first, *shown], ["---"] * len(first) + ["---:"] * len(shown)]
    for run in runs:
        peaks = [run.get(name, {}).get("peak_bytes") for name in shown]
        cells = ["–" if peak is None else f"{peak / 2**30:.2f}" for peak in peaks]
        lines.append([*(cell(run) for cell in first.values()), *cells])
    return markdown(lines)
