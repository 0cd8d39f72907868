"""The benchmarks: which shapes, what counts as ours or a peer, the command, and the report from made-up rows."""

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import tdkernels
from bench import graphs, harness, measure, peers, plots, points, report
from bench import run as bench_run
from bench.operators import Case
from bench.shapes import DEFAULT_GROUPS, GROUPS, Shape, select
from tdkernels import bench_command
from tdkernels.__main__ import main
from tests.ranks import DEVICE, on_ranks

ROOT = Path(__file__).parent.parent

# ---- made-up rows ----

MACHINE = {"gpu": "NVIDIA Testing", "num_gpus": 4, "driver": "1.2", "torch": "2.99", "triton": "3.99", "nccl": "2.0",
           "multicast": "off", "git": "0123456789abcdef"}  # fmt: skip
TILES = {"block_m": 64, "block_n": 32, "block_k": 16, "group_m": 8, "num_warps": 4, "num_stages": 7}
CONFIG = {"method": "fused", "tiles": TILES, "transport": "push", "num_comm_sms": 5, "chunk_tiles": 3}


def run_of(shape, date="2026-01-01T00:00:00+00:00", op="ag_gemm", direction="forward", graph=False, floor=1.0, **ms):
    """The rows of one run: times by method, - for _ in the names."""
    m, n, k = map(int, shape.split("x"))
    common = {"op": op, "pass": direction, "shape": shape, "name": "", "m": m, "n": n, "k": k, "dtype": "bfloat16",
              "graph": graph, "absent": None, "floor_ms": floor, "link_gbps": 400.0, "date": date, **MACHINE}
    config = {"tdkernels": CONFIG, "tdkernels_default": CONFIG}
    times = {"gemm": 1.0, "collective": 0.5, "tdkernels_default": 3.0, **ms}
    return [
        {**common, "method": name.replace("_", "-"), "ms": time, "config": config.get(name)}
        for name, time in times.items()
    ]


def tuned(shape, date="2026-01-01", op="ag_gemm", ms=1.0, sequence_ms=2.0, config=CONFIG, **fields):
    m, n, k = map(int, shape.split("x"))
    return {"op": op, "what": "tune", "shape": shape, "m": m, "n": n, "k": k, "dtype": "bfloat16", "layout": "nk",
            "ms": ms, "sequence_ms": sequence_ms, "default_ms": 3.0, "gemm_ms": 0.5, "wire_ms": 0.25, "config": config,
            **MACHINE, "date": date, **fields}  # fmt: skip


@pytest.fixture
def results(tmp_path):
    """A function that writes rows to a folder of results, which it returns; a file a call."""
    folder = tmp_path / "results"

    def write(rows, file="rows", machine="testingx4"):
        path = folder / machine / f"{file}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return folder

    return write


def text_of(folder):
    return report.text(points.read(folder))


def cells(text, start, after=""):
    """The cells of the first table line that starts so, under a heading."""
    part = text[text.index(after) :]
    (line, *_) = [line for line in part.splitlines() if line.startswith(f"| {start} |")]
    return [cell.strip() for cell in line.strip("|").split("|")]


# ---- the report ----


def test_a_line_of_the_report_has_what_was_measured(results):
    text = text_of(results(run_of("8192x4096x12288", sequence=3.0, torch_fused=2.4, tdkernels=2.0, floor=1.5)))
    assert cells(text, "8192x4096x12288", "### ag_gemm, forward") == [
        "8192x4096x12288", "1.000", "0.500", "3.000", "2.400 (torch-fused)", "2.000", "3.000", "1.50", "1.20", "0.75",
        "64x32x16, 7 stages, push by 5, chunks of 3",
    ]  # fmt: skip
    assert "2026-01-01, revision 0123456; torch 2.99, triton 3.99, NCCL 2.0, driver 1.2; NVLink multicast off" in text
    assert "best link rate 400 GB/s" in text and "multicast was **off** in all rows" in text


def test_layers_of_models_are_named(results):
    text = text_of(results(run_of("8192x57344x8192", sequence=3.0, tdkernels=2.0)))
    assert cells(text, "8192x57344x8192")[1] == "llama-70b gate-up"


@pytest.mark.parametrize("newest_first", (False, True))
def test_the_newest_run_counts_and_runs_do_not_mix(results, newest_first):
    old = run_of("8x8x8", "2026-01-01T23:00:00+00:00", sequence=9.0, tdkernels=1.0, torch_fused=0.5)
    new = run_of("8x8x8", "2026-01-02T01:00:00+00:00", sequence=3.0, tdkernels=2.0)
    text = text_of(results(new + old if newest_first else old + new))
    line = cells(text, "8x8x8", "### ag_gemm")
    assert line[3:5] == ["3.000", "2.000"] and "1.50" in line
    assert "0.500 (torch-fused)" not in text, "a peer of the older run"


def test_means_worst_shape_and_losses(results):
    rows = (
        run_of("8192x8x8", sequence=4.0, torch_fused=3.0, tdkernels=1.0, floor=0.25)
        + run_of("8192x16x8", sequence=4.5, torch_fused=1.0, tdkernels=9.0, floor=9.0)
        + run_of("8192x24x8", sequence=0.997, torch_fused=0.994, tdkernels=1.0, floor=1.0)
    )
    text = text_of(results(rows))
    assert cells(text, "8192x16x8")[7:10] == ["0.50 ▼", "0.11 ▼", "1.00"]
    assert cells(text, "8192x24x8")[7:9] == ["1.00", "0.99 ▼"], "a loss is what is printed as one"
    over = (4.0 * 0.5 * 0.997) ** (1 / 3)
    fused = (3.0 * (1 / 9) * 0.994) ** (1 / 3)
    assert f"means of 3 shapes: **{over:.2f} x** the sequence (worst 0.50 x, 8192x16x8; slower in 1 of 3)" in text
    assert f"**{fused:.2f} x** torch-fused (worst 0.11 x, 8192x16x8; slower in 2 of 3)" in text
    assert f"efficiency **{0.25 ** (1 / 3):.2f}**" in text
    line = cells(text, "4 x NVIDIA Testing", "## In short")
    assert line[3:] == ["a benchmark", "3", "1.26", "0.50 ▼", "0.69 ▼", "0.11 ▼", "0.63"]


def test_few_rows_have_a_mean_of_their_own(results):
    few, many = run_of("64x8x8", sequence=1.0, tdkernels=2.0), run_of("1024x8x8", sequence=3.0, tdkernels=1.0)
    text = text_of(results(few + many))
    assert "M < 1024: geometric means of 1 shape: **0.50 x**" in text
    assert "M at least 1024: geometric means of 1 shape: **3.00 x**" in text
    assert cells(text, "4 x NVIDIA Testing", "## In short")[5] == "3.00"


def test_rows_of_the_tuner_stand_apart(results):
    rows = run_of("8192x8x8", sequence=3.0, torch_fused=1.0, tdkernels=2.0)
    rows += [tuned("8192x8x8", "2026-01-02", ms=1.0), tuned("8192x8x8", ms=0.125)]
    text = text_of(results(rows))
    benchmark, tuner = text.split("### From the tuner's last round")
    assert cells(benchmark, "8192x8x8", "### ag_gemm")[5] == "2.000"
    assert cells(tuner, "8192x8x8")[:5] == ["8192x8x8", "0.500", "2.000", "1.000", "3.000"]
    assert "torch-fused" not in tuner and "Not a benchmark" in tuner
    assert [line[3] for line in lines_in_short(text)] == ["a benchmark", "the tuner"]


def lines_in_short(text):
    part = text.split("## In short")[1].split("\n## ")[0]
    return [
        [cell.strip() for cell in line.strip("|").split("|")] for line in part.splitlines() if line.startswith("| 4 x")
    ]


def test_a_sweep_of_the_tuner_is_a_table_of_rows_and_layers(results):
    sweep = [tuned(f"{m}x6144x4096", ms=m / 10, sequence_ms=m / 5) for m in (16, 32, 64, 8192)]
    sweep.append(tuned("32x6144x4096", "2026-01-03", ms=0.05, sequence_ms=0.05, config={"method": "torch"}))
    text = text_of(results(sweep))
    assert "| M | llama-8b qkv 6144 x 4096 |" in text
    assert cells(text, "16") == ["16", "1.600 (2.00)"]
    assert cells(text, "32") == ["32", "0.0500 (1.00)"]
    assert "| 32x6144x4096 |" not in text, "of a layer that was swept only M = 8192 is a line of the other table"
    assert cells(text, "8192x6144x4096")[-1] == "64x32x16, 7 stages, push by 5, chunks of 3"


def test_graphs_passes_and_machines_have_tables_of_their_own(results):
    eager = run_of("8x8x8", sequence=3.0, tdkernels=2.0)
    in_graph = run_of("8x8x8", graph=True, sequence=0.5, tdkernels=0.25)
    back = run_of("8x8x8", direction="backward", sequence=8.0, tdkernels=4.0)
    other = run_of("8x8x8", sequence=30.0, tdkernels=2.0)
    results(eager + in_graph + back)
    text = text_of(results([{**row, "num_gpus": 16} for row in other], machine="testingx16"))
    assert cells(text, "8x8x8", "### ag_gemm, forward\n")[3] == "3.000"
    assert cells(text, "8x8x8", "### ag_gemm, forward, in a CUDA graph")[3] == "0.500"
    assert cells(text, "8x8x8", "### ag_gemm, backward")[3] == "8.000"
    assert text.index("## 4 x NVIDIA Testing") < text.index("## 16 x NVIDIA Testing")
    assert cells(text, "8x8x8", "## 16 x")[3] == "30.000"


def test_what_is_tried_and_what_is_absent_is_no_peer(results):
    rows = run_of("8x8x8", sequence=3.0, tdkernels=2.0)
    rows.append({**rows[0], "method": 'c1 {"num_comm_sms": 32}', "ms": 0.1})
    rows.append({**rows[0], "method": "torch-fused", "ms": None, "absent": "why"})
    text = text_of(results(rows))
    assert "c1" not in text and "best peer |" not in text and "x torch-fused" not in text.split("## 4 x")[1]
    rows += [{**rows[0], "method": "torch-fused", "ms": 2.5}, {**rows[0], "method": "another", "ms": 1.5}]
    text = text_of(results(rows))
    assert "1.500 (another)" in cells(text, "8x8x8") and "1.25" in cells(text, "8x8x8")


def test_runs_from_before_there_was_a_tuner_are_called_so(results):
    rows = [row for row in run_of("8192x8x8", sequence=3.0, tdkernels=2.0) if row["method"] != "tdkernels-default"]
    text = text_of(results(rows))
    assert cells(text, "8192x8x8")[-1] == "default: 64x32x16, 7 stages, push by 5, chunks of 3"
    assert "a benchmark of the default" in text


def test_multicast_that_was_on_is_said(results):
    rows = run_of("8192x8x8", sequence=3.0, tdkernels=2.0)
    text = text_of(results([{**row, "multicast": "on"} for row in rows]))
    assert "multicast was **on** in all rows" in text and "NVLink multicast on" in text
    assert "4 x Testing (multicast on)" in text and "multicast off" not in text


@pytest.mark.parametrize(
    "config, words",
    [
        (None, ""),
        ({"method": "torch", "tiles": None}, "the sequence"),
        ({**CONFIG, "transport": "copy_engine"}, "64x32x16, 7 stages, copy engine, chunks of 3"),
        ({"method": "fused", "tiles": TILES, "item_tiles": 8}, "64x32x16, 7 stages, items of 8"),
        ({"method": "fused", "tiles": None, "new_field": 2}, "new field 2"),
    ],
)
def test_configs_in_short(config, words):
    assert report.config_in_short(config) == words


def test_the_report_names_the_line_that_is_no_row(results, capsys):
    folder = results(run_of("8x8x8", sequence=3.0, tdkernels=2.0))
    with (folder / "testingx4" / "rows.jsonl").open("a") as file:
        file.write('{"op": "ag_gemm"}\n')
    assert report.main(folder, folder) == 1
    assert "rows.jsonl, line 6: KeyError" in capsys.readouterr().err
    assert not (folder / "README.md").exists()


def test_the_report_does_not_overwrite_what_somebody_wrote(results, capsys):
    folder = results(run_of("8x8x8", sequence=3.0, tdkernels=2.0))
    (folder / "README.md").write_text("Mine.\n")
    assert report.main(folder, folder) == 2
    assert (folder / "README.md").read_text() == "Mine.\n" and "not one of ours" in capsys.readouterr().err


def test_without_matplotlib_the_tables_are_written_and_the_same(results, monkeypatch, capsys):
    folder = results(run_of("8192x8x8", sequence=3.0, tdkernels=2.0))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["bench", "--report", "--out", str(folder)]) == 0
    assert (folder / "README.md").read_text() == text_of(folder)
    assert not (folder / "plots").exists() and "plots are left out" in capsys.readouterr().err


def test_the_same_rows_give_the_same_plots(results, tmp_path):
    pytest.importorskip("matplotlib")
    rows = []
    for op, shape in (("ag_gemm", "{}x6144x4096"), ("gemm_ar", "{}x8192x8192")):
        for m in (1, 64, 1024, 8192):
            times = {"sequence": m / 100 + 0.1, "tdkernels": m / 120 + 0.05, "floor": m / 150}
            rows += run_of(shape.format(m), op=op, torch_fused=m / 110, **times)
            rows += run_of(shape.format(m), op=op, graph=True, **times)
        rows.append(tuned(shape.format(8192), op=op))
    rows += run_of("8192x8x8", sequence=None, tdkernels=1.0)  # nothing to compare with
    folder = results(rows)
    (tmp_path / "elsewhere").mkdir()
    assert report.main(folder, folder) == 0 and report.main(folder, tmp_path / "elsewhere") == 0
    names = sorted(path.name for path in (folder / "plots").iterdir())
    assert names == [
        "roofline.png", "speedup-testingx4-graph.png", "speedup-testingx4.png", "speedup-tuner.png",
        "sweep-testingx4-graph.png", "sweep-testingx4.png",
    ]  # fmt: skip
    for name in names:
        once, again = (place / "plots" / name for place in (folder, tmp_path / "elsewhere"))
        assert once.read_bytes() == again.read_bytes(), name
        assert f"(plots/{name})" in (folder / "README.md").read_text()


def test_the_repositorys_report_is_that_of_its_rows():
    found = points.read(bench_run.RESULTS)
    assert (ROOT / "bench" / "README.md").read_text() == report.text(found), (
        "bench/README.md is stale: python -m tdkernels bench --report"
    )
    drawn = {path.name: path.stat().st_size for path in (ROOT / "bench" / "plots").iterdir()}
    assert drawn.keys() == {figure.file for figure in plots.figures(found)}
    assert max(drawn.values()) < 120 << 10


# ---- shapes ----


def test_groups_have_the_shapes_that_the_field_uses():
    assert {(s.m, s.n, s.k) for s in GROUPS["ar"]["gemm_ar"]} == {
        (32, 5120, 25600), (2048, 5120, 25600), (28000, 7168, 4096), (8192, 8192, 28672)
    }  # fmt: skip
    decode = select(["decode"], "gemm_ar")
    assert {s.m for s in decode} == {1, 2, 4, 8, 16, 32, 64, 128, 256, 512}
    assert {(s.n, s.k) for s in decode} == {(8192, 8192), (8192, 28672)}
    field = {(11008, 4096), (14336, 4096), (28672, 8192), (53248, 16384), (29568, 8192), (49152, 12288)}
    assert {(s.n, s.k) for s in GROUPS["mlp"]["ag_gemm"]} == field
    assert {(s.k, s.n) for s in GROUPS["mlp"]["gemm_rs"]} == field
    for name in ("sweep-8b", "sweep-70b"):
        for operator in ("ag_gemm", "gemm_rs", "gemm_ar"):
            layers = select([name], operator)
            assert {s.m for s in layers} == {2**i for i in range(16)} and len(layers) == 32
    assert {s.m for name in DEFAULT_GROUPS for s in select([name], "ag_gemm")} == {8192}


def test_tokens_replace_the_rows_of_models_only():
    chosen = select(["seed", "llama-70b", "8x8x8"], "ag_gemm", [16, 32])
    assert sorted({s.m for s in chosen if s.name}) == [16, 32]
    assert [(s.m, s.n, s.k) for s in chosen if not s.name][-1] == (8, 8, 8)
    assert len([s for s in chosen if s.m == 8192]) == 6 and len(chosen) == 6 + 2 * 2 + 1


def test_no_shape_is_measured_twice():
    assert select(["headline", "seed", "8192x8192x28672"], "ag_gemm").count(Shape(8192, 8192, 28672)) == 1
    assert select(["8192x8192x8192", "llama-70b"], "gemm_rs")[0].name == "llama-70b o"


@pytest.mark.parametrize(
    "case, reason",
    [
        (Case("ag_gemm", Shape(7, 8, 8), 2), "M = 7 is not divisible by 2 ranks"),
        (Case("ag_gemm", Shape(8, 6, 8), 4), "N = 6 is not divisible by 4 ranks"),
        (Case("ag_gemm", Shape(8, 8, 7), 4), None),
        (Case("gemm_rs", Shape(8, 8, 6), 4), "K = 6 is not divisible by 4 ranks"),
        (Case("gemm_rs", Shape(6, 8, 8), 4, backward=True), "M = 6 is not divisible by 4 ranks"),
        (Case("gemm_ar", Shape(1, 7, 8), 4), None),
        (Case("gemm_ar", Shape(1, 7, 8), 3), "K = 8 is not divisible by 3 ranks"),
        (Case("gemm_ar", Shape(8, 8, 8), 4, backward=True), "without communication"),
    ],
)
def test_what_ranks_do_not_divide_is_left_out_with_a_reason(case, reason):
    assert case.why_not() is None if reason is None else reason in case.why_not()


def test_what_cannot_be_divided_is_skipped_and_said(capsys):
    shapes = {"ag_gemm": [Shape(7, 8, 8), Shape(8, 8, 8)], "gemm_ar": [Shape(7, 8, 8)]}
    found = [str(case) for case in bench_run._cases(shapes, 2, backward=True)]
    assert found == ["ag_gemm 8x8x8", "ag_gemm backward 8x8x8", "gemm_ar 7x8x8"]
    said = capsys.readouterr().out
    assert "ag_gemm 7x8x8 is skipped: M = 7" in said and "gemm_ar backward 7x8x8 is skipped: the backward is" in said


def test_bytes_and_flops_of_a_gpu():
    shape = Shape(8192, 8192, 28672)
    product = 2 * 8192 * 8192 * 28672 // 4
    received = {"ag_gemm": 8192 * 28672 * 2 * 3 // 4, "gemm_rs": 8192 * 8192 * 2 * 3 // 4}
    for operator, nbytes in received.items():
        forward, backward = Case(operator, shape, 4), Case(operator, shape, 4, backward=True)
        assert (forward.flops, backward.flops) == (product, 2 * product)
        # AG-GEMM gathers x again for dweight and scatters dx; GEMM-RS gathers dz once, for both.
        assert (forward.wire_bytes, backward.wire_bytes) == (nbytes, nbytes * (2 if operator == "ag_gemm" else 1))
    reduced = Case("gemm_ar", shape, 4)
    assert (reduced.flops, reduced.wire_bytes) == (product, 2 * received["gemm_rs"])


# ---- measuring ----

TINY = Shape(64, 32, 32)
PLAN = measure.Plan(rounds=1, burst_ms=0)


def by_method(found):
    return {(method, graph): times for method, graph, times in found}


def measures_an_all_reduce():
    return measure.measure(Case("gemm_ar", TINY, dist.get_world_size()), PLAN)


def test_an_all_reduce_is_one_entry():
    found = by_method(on_ranks(2, measures_an_all_reduce)[0])
    assert {"gemm", "collective", "sequence", "tdkernels"} <= {m for (m, _), times in found.items() if times.get("ms")}


def measures_something_wrong(method):
    case = Case("gemm_rs", TINY, dist.get_world_size())
    peer = peers.Peer(("gemm_rs",), lambda case: lambda s: tdkernels.gemm_rs_ref(s.x, s.weight) * 1.1)
    right = tdkernels.gemm_rs
    peers.PEERS["wrong"] = peer
    if method == "tdkernels":
        tdkernels.gemm_rs = lambda x, weight, config=None: right(x, weight, config=config) * 1.1
    try:
        return measure.measure(case, measure.Plan(rounds=1, burst_ms=0, peers=("wrong",)))
    except RuntimeError as error:
        return str(error)
    finally:
        del peers.PEERS["wrong"]
        tdkernels.gemm_rs = right


def test_a_peer_that_is_wrong_is_absent_and_ours_stops_the_case():
    found = by_method(on_ranks(2, measures_something_wrong, "peer")[0])
    assert "wrong: relative errors" in found["wrong", False]["absent"]
    assert "tdkernels: wrong: relative errors" in on_ranks(2, measures_something_wrong, "tdkernels")[0]


def asks_for_peers():
    """A peer that fails on one rank is absent on all."""

    def fails_on_one(case):
        if dist.get_rank() == 1:
            raise peers.Absent("not here")
        return lambda s: None

    peers.PEERS["shy"] = peers.Peer(("ag_gemm",), fails_on_one)
    try:
        return peers.calls(Case("ag_gemm", TINY, 2), ["shy"]), peers.calls(Case("gemm_rs", TINY, 2), ["shy"])
    finally:
        del peers.PEERS["shy"]


def test_ranks_agree_on_who_is_absent():
    first, second = on_ranks(2, asks_for_peers)
    assert first == (({}, {"shy": "failed on another rank"}), ({}, {}))
    assert second == (({}, {"shy": "not here"}), ({}, {}))


def measures_in_graphs(operator, backward):
    case = Case(operator, Shape(256, 256, 256), dist.get_world_size(), backward)
    return measure.measure(case, measure.Plan(rounds=2, burst_ms=1, peers=tuple(peers.PEERS), cuda_graph=True))


@pytest.mark.skipif(DEVICE == "cpu" or torch.cuda.device_count() < 2, reason="CUDA graphs need GPUs")
@pytest.mark.parametrize("backward", (False, True))
@pytest.mark.parametrize("operator", ("ag_gemm", "gemm_rs"))
def test_methods_in_graphs(operator, backward):
    found = by_method(on_ranks(2, measures_in_graphs, operator, backward)[0])
    for method in ("gemm", "collective", "sequence", "tdkernels"):
        assert found[method, True]["ms"] > 0, found[method, True]
        assert found[method, True]["burst"] % graphs._CALLS == 0


class FakeGraph:
    """Instead of torch.cuda.CUDAGraph and torch.cuda.graph: remembers nothing, replays nothing."""

    def __init__(self, *_, **__):
        pass

    def __enter__(self):
        pass

    def __exit__(self, *exc):
        pass

    def replay(self):
        pass


def captures(num_sets, fault=None):
    """How often which set was called, and why there is no graph; ``fault`` is of rank 1, or "wrong" on all."""
    sets, seen = list(range(num_sets)), []

    def call(inputs):
        seen.append(inputs)
        if fault == "raises" and len(seen) == 3 and dist.get_rank() == 1:
            raise RuntimeError("not while capturing")
        return torch.full((2,), 5.0 if fault == "wrong" else inputs + 1.0)

    references = [(sets[0], torch.ones(2), [0.0])]
    with (
        mock.patch("torch.cuda.CUDAGraph", FakeGraph),
        mock.patch("torch.cuda.graph", FakeGraph),
        mock.patch("bench.graphs.rank_device", lambda: torch.device("cuda", 0)),
        mock.patch("bench.graphs.synchronize", lambda device: None),
    ):
        captured, reason = graphs.capture(call, sets, references)
    return seen[1:], captured and captured.calls, reason


@pytest.mark.parametrize("num_sets, calls", ((2, 8), (3, 9), (8, 8)))
def test_a_graph_takes_all_sets_in_turn_and_the_first_one_last(num_sets, calls):
    for seen, counted, reason in on_ranks(2, captures, num_sets):
        assert reason is None and counted == len(seen) == calls
        assert seen[-1] == 0 and {seen.count(s) for s in range(num_sets)} == {calls // num_sets}


def test_what_cannot_be_captured_is_absent_on_all_ranks():
    (_, first, why), (_, second, reason) = on_ranks(2, captures, 2, "raises")
    assert first is second is None
    assert (why, reason) == ("failed on another rank", "RuntimeError: not while capturing")


def test_outputs_of_graphs_are_checked():
    for _, captured, reason in on_ranks(2, captures, 2, "wrong"):
        assert captured is None and "wrong: relative errors" in reason


def counts_calls():
    """A method that stands for several calls is timed by the call, and ranks make as many of them."""

    class Replayed:
        calls = 4

        def __init__(self):
            self.count = 0

        def __call__(self, inputs):
            self.count += 1
            time.sleep(0.02)

    single, several = Replayed(), Replayed()
    single.calls = 1
    found = harness.time_methods({"single": single, "several": several}, [None], rounds=3, burst_ms=0)
    return found, several.count


def test_a_graph_of_several_calls_is_timed_by_the_call():
    (found, count), (_, other) = on_ranks(2, counts_calls)
    assert count == other == 3
    assert (found["single"]["burst"], found["several"]["burst"]) == (1, 4)
    assert found["several"]["ms"] < found["single"]["ms"], "four calls of it take as long as one"


def test_rows_of_graphs_are_compared_with_each_other():
    case = Case("ag_gemm", Shape(64, 32, 32), 2)
    found = [(method, False, {"ms": ms}) for method, ms in (("gemm", 1.0), ("collective", 1.0), ("sequence", 4.0))]
    found += [("tdkernels", False, {"ms": 2.0}), ("gemm", True, {"ms": 0.25}), ("sequence", True, {"ms": 1.5})]
    found += [("tdkernels", True, {"ms": 0.5}), ("collective", True, {"absent": "no"})]
    rows = {(row["method"], row["graph"]): row for row in measure.rows(case, found, link_gbps=400.0)}
    assert rows["tdkernels", False]["speedup"] == 2 and rows["tdkernels", False]["efficiency"] == 0.5
    assert rows["tdkernels", True]["speedup"] == 3 and rows["tdkernels", True]["efficiency"] == 0.5
    assert rows["collective", True]["absent"] == "no" and rows["collective", True]["wire_gbps"] is None
    assert math.isclose(rows["collective", False]["wire_gbps"], case.wire_bytes / 1e6)


# ---- the command ----


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["nonsense"], "operator must be one of ag_gemm, gemm_rs"),
        (["--shapes", "nonsense"], "--shapes: 'nonsense' is neither MxNxK nor one of headline"),
        (["--shapes", "8x0x8"], "--shapes: '8x0x8'"),
        (["ag_gemm", "--shapes", "decode"], "--shapes: decode has nothing for ag_gemm"),
        (["--peers", "flux"], "--peers must be all, none, or some of torch-fused"),
        (["--peers", "torch-fused,"], "--peers must be all, none"),
        (["--nproc", "1"], "--nproc must be at least 2"),
        (["--nproc", "many"], "--nproc"),
        (["--rounds", "0"], "--rounds must be at least 1"),
        (["--shapes", "seed", "--tokens", "8"], "--tokens is for the layers of a model"),
        (["--shapes", "llama-70b", "--tokens", "few"], "--tokens must be whole numbers"),
        (["--shapes", "llama-70b", "--tokens", "0"], "--tokens must be whole numbers"),
        (["--config", "{"], "--config: invalid JSON object"),
        (["--config", "[]"], "--config: invalid JSON object"),
        (["--out", __file__], "is not a folder"),
        (["--report", "--out", "/nowhere"], "--report: there are no rows in /nowhere"),
    ],
)
def test_bench_refuses_what_makes_no_sense(arguments, message, capsys):
    try:
        code = main(["bench", *arguments])
    except SystemExit as exit:  # argparse's own
        code = exit.code
    assert code == 2
    assert message in capsys.readouterr().err


def test_without_the_repository_it_says_where_the_benchmarks_are(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(bench_command, "_ROOT", tmp_path)
    assert main(["bench"]) == 2
    assert "they are in its repository" in capsys.readouterr().err


def command(*arguments, cwd):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=240, env=environment, cwd=cwd
    )
    return run.returncode, run.stdout, run.stderr


def test_the_rehearsal_measures_everything_and_writes_nothing(tmp_path):
    options = ["--peers", "torch-fused", "--cuda-graph", "--shapes", "seed", "--out", str(tmp_path / "out")]
    code, out, err = command("-m", "tdkernels", "bench", "gemm_rs", *options, cwd=tmp_path)
    assert code == 0, err
    assert out.startswith("Rehearsal on 2 CPU ranks")
    for method in ("gemm", "collective", "sequence", "tdkernels", "tdkernels-default"):
        assert f"rehearsal │ {method} " in out
    assert "torch-fused (absent: " in out and "tdkernels (graph) (absent: CUDA graphs need a GPU)" in out
    assert "ag_gemm" not in out
    assert list(tmp_path.iterdir()) == []


def test_the_file_and_the_command_are_one(tmp_path):
    code, _, err = command(str(ROOT / "bench" / "run.py"), "--rounds", "0", cwd=tmp_path)
    assert code == 2 and "bench: --rounds must be at least 1, not 0" in err
