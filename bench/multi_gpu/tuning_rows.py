"""Turn tuned configs into rows: ``python -m bench.multi_gpu.tuning_rows DIR``.

DIR is the output folder of ``bench.multi_gpu``. The entries of dense operators in bf16 in DIR/tuned are written to
DIR/<gpu>x<ranks>/tuning.jsonl. Driver, library versions and revision are those of other rows in that folder.
"""

import json
import sys
from pathlib import Path

from bench.core.row_files import append
from tdkernels.autotune import disk_cache

_OPERATORS = "ag_gemm", "gemm_rs", "gemm_ar"
_MACHINE = "gpu", "num_gpus", "driver", "torch", "triton", "nccl", "multicast", "git"


def row_of(entry):
    """Return the row of an entry, without the fields of the machine."""
    problem = entry.problem
    floor = max(entry.local_ms, entry.wire_ms or 0.0)
    return {
        "op": problem.operator, "what": "tune", "shape": "x".join(map(str, problem.shape)),
        **dict(zip("mnk", problem.shape, strict=True)), "dtype": problem.dtype, "layout": problem.layout,
        "graph": entry.graph, "ms": entry.ms, "sequence_ms": entry.plain_ms, "default_ms": entry.default_ms,
        "gemm_ms": entry.local_ms, "wire_ms": entry.wire_ms,
        "speedup": None if entry.plain_ms is None else round(entry.plain_ms / entry.ms, 3),
        "efficiency": round(floor / entry.ms, 3), "config": entry.config, "date": entry.when,
    }


def main(folder):
    """Write the rows of all entries. Return the exit code."""
    for operator_rows in sorted(Path(folder).glob("*x*/ag_gemm.jsonl")):
        other = json.loads(operator_rows.read_text().splitlines()[-1])
        machine = {name: other[name] for name in _MACHINE}
        entries = [
            entry for operator in _OPERATORS
            for file in (Path(folder) / "tuned").glob(f"*/{operator}.json") for entry in disk_cache.load(file)
        ]
        rows = [
            {**row_of(entry), **machine} for entry in entries
            if entry.problem.gpu == machine["gpu"] and entry.problem.world_size == machine["num_gpus"]
            and entry.problem.dtype == "bfloat16" and entry.local_ms is not None
        ]
        if rows:
            append(rows, Path(folder), "tuning")
            print(f"{len(rows)} rows for {machine['num_gpus']} x {machine['gpu']}")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
