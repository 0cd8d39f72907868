"""Entries of the shipped tables from rows of a run on all ranks."""

import json

from bench.dense import measured
from bench.dense.modelled import RESULTS

SINCE = "2026-11-29T17"


def test_entries_are_not_slower_than_default_or_torch():
    """The recorded rows have a problem in which torch's collective and matmul are the fastest. It gets no entry."""
    rows = [json.loads(line) for line in (RESULTS / "h200x2" / "ag_gemm.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["date"] >= SINCE and row["m"] in (512, 1024)]
    times = {
        (row["m"], row["n"], row["k"], row["method"]): row["ms"] for row in rows if not row["graph"]
    }
    found = {entry.problem.shape: entry for entry in measured.entries_of(rows)}
    assert set(found) == {(512, 6144, 4096), (512, 10240, 8192), (1024, 10240, 8192)}
    assert times[512, 57344, 8192, "sequence"] < times[512, 57344, 8192, "tdkernels-default"]
    for shape, entry in found.items():
        assert entry.ms <= min(times[(*shape, "sequence")], times[(*shape, "tdkernels-default")])
        assert entry.problem.world_size == 2 and not entry.modelled
    # The default is the fastest, and its kernel was not in the table before.
    assert found[1024, 10240, 8192].config["warp_specialize"]
    assert not found[512, 6144, 4096].config.get("warp_specialize")
