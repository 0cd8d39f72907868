"""Table entries from rows of a run on all ranks."""

import json

import pytest

from bench.dense import measured
from tdkernels.autotune import disk_cache

MACHINE = {
    "op": "gemm_rs", "pass": "forward", "m": 8192, "n": 8192, "k": 1024, "dtype": "bfloat16", "absent": None,
    "gpu": "NVIDIA H200", "num_gpus": 4, "torch": "2.11.0", "triton": "3.6.0", "link_gbps": 390.0,
}
TILES = {"block_m": 128, "block_n": 256, "block_k": 64, "group_m": 8, "num_warps": 8, "num_stages": 3}
DIRECT = {"method": "fused", "tiles": TILES, "transport": "direct"}
FORWARD = {**DIRECT, "transport": "forward"}


def rows_of(date, times):
    """Return rows of {method: (ms eager, ms in a graph, config)}."""
    return [
        {**MACHINE, "method": method, "graph": graph, "ms": both[graph], "config": config, "date": date}
        for method, (*both, config) in times.items() for graph in (False, True)
    ]


PLAIN = {"gemm": (0.4, 0.4, None), "sequence": (0.8, 0.7, None)}
NEW = {**PLAIN, "tdkernels-default": (0.52, 0.51, DIRECT), 'c1 {"a": 1}': (0.50, 0.54, FORWARD)}
OLD = {**PLAIN, "tdkernels-default": (0.1, 0.1, FORWARD)}


def test_the_fastest_config_of_the_newest_run():
    (entry,) = measured.entries_of(rows_of("2026-01-01T01", OLD) + rows_of("2026-01-02T01", NEW))
    assert entry.config["transport"] == "direct" and not entry.modelled  # 0.515 ms on average, the other one 0.52
    assert (entry.ms, entry.plain_ms, entry.default_ms, entry.local_ms) == (0.52, 0.8, 0.52, 0.4)
    assert entry.wire_ms == pytest.approx(3 * 2048 * 8192 * 2 / 390e6) and entry.when == "2026-01-02"


def test_no_entry_if_torch_is_the_fastest():
    """Also in eager calls only, where an entry must not be slower."""
    slow = {**NEW, "sequence": (0.49, 0.7, None)}
    assert measured.entries_of(rows_of("2026-01-02T01", slow)) == []
    between = {**NEW, "sequence": (0.51, 0.7, None)}
    (entry,) = measured.entries_of(rows_of("2026-01-02T01", between))
    assert entry.config["transport"] == "forward" and entry.ms == 0.50


def test_entries_are_replaced(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_cache, "SHIPPED", tmp_path)
    (tmp_path / "nvidia-h200").mkdir()
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows_of("2026-01-01T01", OLD)))
    for since, expected in (("2026-01-01", ["forward"]), ("2026-01-02", ["direct"])):
        measured.main([str(file), "--since", since])
        assert [e.config["transport"] for e in disk_cache.shipped_entries("gemm_rs", "NVIDIA H200")] == expected
        with file.open("a") as more:
            more.writelines(json.dumps(row) + "\n" for row in rows_of("2026-01-02T01", NEW))
