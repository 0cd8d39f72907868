"""Benchmark of the network primitives: rows from CPU ranks and the table of the report."""

import json

from bench.core import harness, points
from bench.rdma import cases as network
from bench.rdma import report as network_report
from tdkernels.launch import run_ranks
from tdkernels.symm import topology


def test_rows_and_table(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(network, "pick_device", lambda device, ranks: "cpu")
    assert network.main(["--out", str(tmp_path / "cpu")]) == 0
    output = capsys.readouterr().out
    assert "by direct measure hop" in output and "by network measure rate programs 1" in output
    rows = points.read_network(tmp_path)
    assert [row["by"] for row in rows] == ["direct"] * 2 + ["network"] * 2
    assert all(row["us"] is None for row in rows)  # interpreted kernels are not timed


def test_table_shows_the_newest_rows(tmp_path):
    rows = []
    for date, us in (("2026-11-02", 4.5), ("2026-11-01", 9.5)):
        common = {"what": "network", "gpu": "G", "num_gpus": 2, "date": date}
        rows.append({**common, "by": "network", "measure": "hop", "us": us})
        rows.append({**common, "by": "direct", "measure": "hop", "us": us / 2})
        rate = {"measure": "rate", "chunk_bytes": 65536, "us": us, "gbps": 10 * us}
        rows.append({**common, **rate, "by": "network", "programs": 8})
        rows.append({**common, **rate, "by": "direct", "programs": 1})
    (tmp_path / "Gx2").mkdir()
    (tmp_path / "Gx2" / "network.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert points.read(tmp_path) == []  # not points of dense operators
    text = network_report.text(points.read_network(tmp_path))
    assert "2 x G, 2026-11-02; one-way latency: 2.2 us direct, 4.5 us network." in text
    assert "| transport | KiB per signal | 1 programs | 8 programs |" in text
    assert "| direct | 64 | 45 | – |" in text and "| network | 64 | – | 45 |" in text
    assert network_report.text([]) == ""


def machine_name():
    return harness.machine()["gpu"]


def test_rows_of_simulated_nodes_are_labelled(monkeypatch):
    monkeypatch.setenv(topology.VARIABLE, "1")
    assert run_ranks(2, machine_name, device="cpu") == ["cpu on 2 simulated nodes"] * 2
