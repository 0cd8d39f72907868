"""Benchmark report: tables and plots from synthetic rows, and a check that bench/README.md is up to date."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from bench import run as bench_run
from bench.collectives import cases as collectives
from bench.collectives import norm
from bench.core import points
from bench.report import main as report
from bench.report import rows as all_rows
from bench.report import tuned as tuned_report
from bench.report.config_text import config_in_short
from tdkernels.__main__ import main

ROOT = Path(__file__).parents[2]

# ---- synthetic rows ----

MACHINE = {"gpu": "NVIDIA Testing", "num_gpus": 4, "driver": "1.2", "torch": "2.99", "triton": "3.99", "nccl": "2.0",
           "multicast": "off", "git": "0123456789abcdef"}
TILES = {"block_m": 64, "block_n": 32, "block_k": 16, "group_m": 8, "num_warps": 4, "num_stages": 7}
CONFIG = {"method": "fused", "tiles": TILES, "transport": "push", "num_comm_sms": 5, "chunk_tiles": 3}


def run_of(shape, date="2026-01-01T00:00:00+00:00", op="ag_gemm", direction="forward", graph=False, floor=1.0, **ms):
    """Return the rows of one run; ``ms`` gives times by method, with "_" for "-" in the names."""
    m, n, k = map(int, shape.split("x"))
    common = {"op": op, "pass": direction, "shape": shape, "name": "", "m": m, "n": n, "k": k, "dtype": "bfloat16",
              "graph": graph, "absent": None, "floor_ms": floor, "link_gbps": 400.0, "date": date, **MACHINE}
    config = {"tdkernels": CONFIG, "tdkernels_default": CONFIG}
    times = {"gemm": 1.0, "collective": 0.5, "tdkernels_default": 3.0, **ms}
    return [
        {**common, "method": name.replace("_", "-"), "ms": time, "config": config.get(name)}
        for name, time in times.items()
    ]


def tuner_row(shape, date="2026-01-01", op="ag_gemm", ms=1.0, sequence_ms=2.0, config=CONFIG, **fields):
    m, n, k = map(int, shape.split("x"))
    return {"op": op, "what": "tune", "shape": shape, "m": m, "n": n, "k": k, "dtype": "bfloat16", "layout": "nk",
            "ms": ms, "sequence_ms": sequence_ms, "default_ms": 3.0, "gemm_ms": 0.5, "wire_ms": 0.25, "config": config,
            **MACHINE, "date": date, **fields}


@pytest.fixture
def results(tmp_path):
    """Return a function that writes rows to a file in a folder of results and returns the folder."""
    folder = tmp_path / "results"

    def write(rows, file="rows", machine="testingx4"):
        path = folder / machine / f"{file}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return folder

    return write


def text_of(folder):
    """Return all pages of the report, the summary first."""
    return "\n".join(report.pages(all_rows.read(folder)).values())


def written(folder):
    """Return the pages that the report wrote to a folder, in the order of ``text_of``."""
    return "\n".join((folder / name).read_text() for name in report.pages(all_rows.read(folder)))


def cells(text, start, after=""):
    """Return the cells of the first table line that starts with ``start``, after the text ``after``."""
    part = text[text.index(after) :]
    (line, *_) = [line for line in part.splitlines() if line.startswith(f"| {start} |")]
    return [cell.strip() for cell in line.strip("|").split("|")]


# ---- the report ----


def test_table_line_has_the_measured_values(results):
    text = text_of(results(run_of("8192x4096x12288", sequence=3.0, torch_fused=2.4, tdkernels=2.0, floor=1.5)))
    assert cells(text, "8192x4096x12288", "### ag_gemm, forward") == [
        "8192x4096x12288", "1.000", "0.500", "3.000", "2.400 (torch-fused)", "2.000", "3.000", "1.50", "1.20", "0.75",
        "64x32x16, 7 stages, 5 comm SMs, chunks of 3 tiles",
    ]
    assert "2026-01-01, revision 0123456; torch 2.99, triton 3.99, NCCL 2.0, driver 1.2; NVLink multicast off" in text
    assert "best link rate 400 GB/s" in text and "multicast was **off** in all rows" in text


def test_layers_of_models_have_names(results):
    text = text_of(results(run_of("8192x57344x8192", sequence=3.0, tdkernels=2.0)))
    assert cells(text, "8192x57344x8192")[1] == "llama-70b gate-up"


@pytest.mark.parametrize("newest_first", (False, True))
def test_newest_run_is_shown_and_runs_do_not_mix(results, newest_first):
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
    assert cells(text, "8192x24x8")[7:9] == ["1.00", "0.99 ▼"], "losses are marked after rounding"
    over = (4.0 * 0.5 * 0.997) ** (1 / 3)
    fused = (3.0 * (1 / 9) * 0.994) ** (1 / 3)
    worst = "(worst 0.50 x, 8192x16x8; slower in 1 of 3)"
    assert f"means of 3 shapes: **{over:.2f} x** the unfused baseline {worst}" in text
    assert f"**{fused:.2f} x** torch-fused (worst 0.11 x, 8192x16x8; slower in 2 of 3)" in text
    assert f"efficiency **{0.25 ** (1 / 3):.2f}**" in text
    line = cells(text, "4 x NVIDIA Testing", "## All dense shapes")
    assert line[3:] == ["benchmark", "3", "1.26", "0.50 ▼", "0.69 ▼", "0.11 ▼", "0.63"]


def test_small_m_has_its_own_mean(results):
    small, large = run_of("64x8x8", sequence=1.0, tdkernels=2.0), run_of("1024x8x8", sequence=3.0, tdkernels=1.0)
    text = text_of(results(small + large))
    assert "M < 1024: geometric means of 1 shape: **0.50 x**" in text
    assert "M >= 1024: geometric means of 1 shape: **3.00 x**" in text
    assert cells(text, "4 x NVIDIA Testing", "## All dense shapes")[5] == "3.00"


def test_rows_of_the_tuner_have_their_own_table(results):
    rows = run_of("8192x8x8", sequence=3.0, torch_fused=1.0, tdkernels=2.0)
    rows += [tuner_row("8192x8x8", "2026-01-02", ms=1.0), tuner_row("8192x8x8", ms=0.125)]
    text = text_of(results(rows))
    benchmark, tuner = text.split("### From the tuner's last round")
    assert cells(benchmark, "8192x8x8", "### ag_gemm")[5] == "2.000"
    assert cells(tuner, "8192x8x8")[:5] == ["8192x8x8", "0.500", "2.000", "1.000", "3.000"]
    assert "torch-fused" not in tuner and "They are no benchmark" in tuner
    assert [line[3] for line in summary_lines(text)] == ["benchmark", "tuner"]


def summary_lines(text):
    part = text.split("## All dense shapes")[1].split("\n## ")[0]
    return [
        [cell.strip() for cell in line.strip("|").split("|")] for line in part.splitlines() if line.startswith("| 4 x")
    ]


def test_tuner_sweep_is_a_table_of_m_by_layer(results):
    sweep = [tuner_row(f"{m}x6144x4096", ms=m / 10, sequence_ms=m / 5) for m in (16, 32, 64, 8192)]
    sweep.append(tuner_row("32x6144x4096", "2026-01-03", ms=0.05, sequence_ms=0.05, config={"method": "torch"}))
    text = text_of(results(sweep))
    assert "| M | llama-8b qkv 6144 x 4096 |" in text
    assert cells(text, "16") == ["16", "1.600 (2.00)"]
    assert cells(text, "32") == ["32", "0.0500 (1.00)"]
    assert "| 32x6144x4096 |" not in text, "the other table lists only M = 8192 of a swept layer"
    assert cells(text, "8192x6144x4096")[-1] == "64x32x16, 7 stages, 5 comm SMs, chunks of 3 tiles"


def test_graphs_passes_and_machines_have_their_own_tables(results):
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


def test_overridden_configs_and_absent_methods_are_not_peers(results):
    rows = run_of("8x8x8", sequence=3.0, tdkernels=2.0)
    rows.append({**rows[0], "method": 'c1 {"num_comm_sms": 32}', "ms": 0.1})
    rows.append({**rows[0], "method": "torch-fused", "ms": None, "absent": "why"})
    text = text_of(results(rows))
    assert "c1" not in text and "best peer |" not in text and "x torch-fused" not in text.split("## 4 x")[1]
    rows += [{**rows[0], "method": "torch-fused", "ms": 2.5}, {**rows[0], "method": "another", "ms": 1.5}]
    text = text_of(results(rows))
    assert "1.500 (another)" in cells(text, "8x8x8") and "1.25" in cells(text, "8x8x8")


def test_runs_without_tuner_are_labelled_default(results):
    rows = [row for row in run_of("8192x8x8", sequence=3.0, tdkernels=2.0) if row["method"] != "tdkernels-default"]
    text = text_of(results(rows))
    assert cells(text, "8192x8x8")[-1] == "heuristic: 64x32x16, 7 stages, 5 comm SMs, chunks of 3 tiles"
    assert "benchmark, heuristic" in text


def test_enabled_multicast_is_reported(results):
    rows = run_of("8192x8x8", sequence=3.0, tdkernels=2.0)
    text = text_of(results([{**row, "multicast": "on"} for row in rows]))
    assert "multicast was **on** in all rows" in text and "NVLink multicast on" in text
    assert "4 x Testing (multicast on)" in text and "multicast off" not in text


@pytest.mark.parametrize(
    "config, expected",
    [
        (None, ""),
        ({"method": "torch", "tiles": None}, "torch"),
        ({"method": "cudnn"}, "pipelined cudnn"),
        ({**CONFIG, "transport": "copy_engine"}, "64x32x16, 7 stages, copy engine, chunks of 3 tiles"),
        ({"method": "fused", "tiles": TILES, "item_tiles": 8}, "64x32x16, 7 stages, groups of 8 tiles"),
        ({"method": "fused", "tiles": None, "new_field": 2}, "new field 2"),
    ],
)
def test_config_in_short(config, expected):
    assert config_in_short(config) == expected


def test_invalid_row_is_reported_with_its_line(results, capsys):
    folder = results(run_of("8x8x8", sequence=3.0, tdkernels=2.0))
    with (folder / "testingx4" / "rows.jsonl").open("a") as file:
        file.write('{"op": "ag_gemm"}\n')
    assert report.main(folder, folder) == 1
    assert "rows.jsonl, line 6: KeyError" in capsys.readouterr().err
    assert not (folder / "README.md").exists()


def test_report_does_not_overwrite_foreign_files(results, capsys):
    folder = results(run_of("8x8x8", sequence=3.0, tdkernels=2.0))
    (folder / "README.md").write_text("Mine.\n")
    assert report.main(folder, folder) == 2
    assert (folder / "README.md").read_text() == "Mine.\n" and "was not generated" in capsys.readouterr().err


def test_tables_are_written_without_matplotlib(results, monkeypatch, capsys):
    folder = results(run_of("8192x8x8", sequence=3.0, tdkernels=2.0))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["bench", "--report", "--out", str(folder)]) == 0
    assert written(folder) == text_of(folder)
    assert not (folder / "plots").exists() and "plots are left out" in capsys.readouterr().err


def collective(nbytes, ms, date="2026-01-01T00:00:00+00:00", op="all_reduce", graph=False):
    """Return the rows of one run of a collective; ``ms`` gives times by method."""
    case = collectives.Case(op, nbytes, MACHINE["num_gpus"])
    found = [(method, graph, {"ms": time} if time else {"absent": "why"}) for method, time in ms.items()]
    return [{**row, **MACHINE, "date": date} for row in collectives.rows(case, found, link_gbps=400.0)]


def test_collectives_have_their_own_section(results):
    old = collective(1 << 20, {"nccl": 1.0, "tdkernels": 0.001}, "2025-12-31T00:00:00+00:00")
    times = {"nccl": 0.02, "torch-symm-one-shot": None, "tdkernels": 0.025, "tdkernels-two-shot": 0.03}
    new = collective(1 << 20, times)
    new += collective(1 << 10, {"nccl": 0.012, "tdkernels": 0.006, 'tdkernels c1 {"num_programs": 2}': 0.001})
    in_graph = collective(1 << 10, {"nccl": 0.010, "tdkernels": 0.005}, graph=True)
    dense = run_of("8192x8x8", sequence=3.0, tdkernels=2.0)
    folder = results(new + dense + old + in_graph)
    pages = report.pages(all_rows.read(folder))
    assert pages["tables/dense.md"] == report.pages(all_rows.Rows(dense=points.read(folder)))["tables/dense.md"]
    text = pages["tables/collectives.md"]
    part = "### all_reduce, 4 x"
    # 1.5 MiB at 400 GB/s take 3.9 us.
    assert cells(text, "1M", part) == ["1M", "20.0", "–", "25.0", "30.0", "0.80 ▼", "0.16"]
    assert cells(text, "1K", part)[:4] == ["1K", "12.0", "–", "6.0"] and "2.00" in cells(text, "1K", part)
    assert "c1" not in text and cells(text, "1K", "### all_reduce, in a CUDA graph")[1:3] == ["10.0", "5.0"]
    assert report.main(folder, folder) == 0 and (folder / "tables" / "collectives.md").read_text() == text
    for name in ("collectives-testingx4.png", "collectives-testingx4-graph.png"):
        assert f"(../plots/{name})" in text
        if importlib.util.find_spec("matplotlib"):
            assert (folder / "plots" / name).stat().st_size > 5000, "the plot is empty"


def norms(shape, ms, date="2026-01-01T00:00:00+00:00", graph=False):
    """Return the rows of one run of all_reduce_rms_norm; ``ms`` gives times by method."""
    case = norm.Case("all_reduce_rms_norm", *shape, MACHINE["num_gpus"])
    found = [(method, graph, {"ms": time} if time else {"absent": "why"}) for method, time in ms.items()]
    return [{**row, **MACHINE, "date": date} for row in norm.rows(case, found, link_gbps=400.0)]


def test_norms_have_a_table_behind_the_collectives(results):
    old = norms((8, 4096), {"sequence": 1.0, "tdkernels": 0.001}, "2025-12-31T00:00:00+00:00")
    new = norms((8, 4096), {
        "sequence": 0.03, "sequence-compiled": None, "all-reduce": 0.01, "tdkernels": 0.012,
        'tdkernels c1 {"num_warps": 4}': 0.001,
    })
    in_graph = norms((16, 4096), {"sequence": 0.02, "tdkernels": 0.025}, graph=True)
    rows = all_rows.read(results(old + new + in_graph))
    pages = report.pages(rows)
    text = pages["tables/collectives.md"]
    part = "### all_reduce_rms_norm, 4 x"
    assert cells(text, "8 x 4096", part)[:5] == ["8 x 4096", "30.0", "–", "10.0", "12.0"]
    assert "2.50" in cells(text, "8 x 4096", part) and "c1" not in text
    assert "0.80 ▼" in cells(text, "16 x 4096", "### all_reduce_rms_norm, in CUDA graphs, 4 x")
    both = report.pages(all_rows.read(results(new + collective(1 << 10, {"nccl": 0.012, "tdkernels": 0.006}))))
    assert "## Collectives" in both["tables/collectives.md"] and "## All-reduce with" in both["tables/collectives.md"]
    alone = [row for row in rows.norms if row["method"] == "all-reduce"]
    assert all(row["speedup"] is None and row["efficiency"] is None for row in alone)


def test_plots_are_deterministic(results, tmp_path):
    pytest.importorskip("matplotlib")
    rows = []
    for op, shape in (("ag_gemm", "{}x6144x4096"), ("gemm_ar", "{}x8192x8192")):
        for m in (1, 64, 1024, 8192):
            times = {"sequence": m / 100 + 0.1, "tdkernels": m / 120 + 0.05, "floor": m / 150}
            rows += run_of(shape.format(m), op=op, torch_fused=m / 110, **times)
            rows += run_of(shape.format(m), op=op, graph=True, **times)
        rows.append(tuner_row(shape.format(8192), op=op))
    rows += run_of("8192x8x8", sequence=None, tdkernels=1.0)  # no baseline to compare with
    folder = results(rows)
    (tmp_path / "elsewhere").mkdir()
    assert report.main(folder, folder) == 0 and report.main(folder, tmp_path / "elsewhere") == 0
    names = sorted(path.name for path in (folder / "plots").iterdir())
    assert names == [
        "roofline.png", "speedup-testingx4-graph.png", "speedup-testingx4.png", "speedup-tuner.png",
        "sweep-testingx4-graph.png", "sweep-testingx4.png",
    ]
    for name in names:
        first, second = (place / "plots" / name for place in (folder, tmp_path / "elsewhere"))
        assert first.read_bytes() == second.read_bytes(), name
        assert f"plots/{name})" in written(folder)


def test_report_in_the_repository_is_up_to_date():
    rows = all_rows.read(bench_run.RESULTS)
    pages = report.pages(rows)
    for name, text in pages.items():
        assert (ROOT / "bench" / name).read_text() == text, f"bench/{name} is stale: python -m tdkernels bench --report"
    tables = {f"tables/{path.name}" for path in (ROOT / "bench" / "tables").iterdir()}
    assert tables == pages.keys() - {"README.md"}
    drawn = {path.name: path.stat().st_size for path in (ROOT / "bench" / "plots").iterdir()}
    assert drawn.keys() == {figure.file for figure in report.figures(rows)}
    assert max(drawn.values()) < 120 << 10


def test_table_of_tuned_configs():
    row = {"what": "chosen", "op": "ep_combine", "shape": "8x4", "layout": "static", "ms": 2.0, "sequence_ms": None,
           "default_ms": 3.0, "gemm_ms": 1.0, "wire_ms": None, "shipped": True, "config": {"num_warps": 4},
           "gpu": "Testing", "num_gpus": 2, "git": "0123456789", "date": "2026-01-01"}
    lines = tuned_report.text([row, {**row, "shipped": False, "config": {"method": "torch"}}]).splitlines()
    assert lines[-2] == "| ep_combine | 8x4 | static | 2.000 | – | 1.50 | 1.000 | – | yes | num warps 4 |"
    assert lines[-1].endswith("| host | torch |")
    assert tuned_report.text([]) == ""


def test_old_baseline_of_flash_decode_is_marked():
    row = {"what": "chosen", "op": "flash_decode", "shape": "8x4", "layout": "dense", "ms": 2.0, "sequence_ms": 3.0,
           "default_ms": 3.0, "gemm_ms": 1.0, "wire_ms": None, "shipped": True, "config": {"num_warps": 4},
           "gpu": "Testing", "num_gpus": 2, "git": "0123456789", "date": "2026-01-01"}
    rows = row, {**row, "baseline": "flash attention"}, {**row, "op": "ag_attention"}
    speedups = [line.split(" | ")[4] for line in tuned_report.text(list(rows)).splitlines()[-3:]]
    assert speedups == ["1.50 †", "1.50", "1.50"]


def solo_row(shape, method, time, link=390.0, config=None, date="2026-01-01", direction="forward"):
    m, n, k = map(int, shape.split("x"))
    return {"what": "solo", "op": "gemm_rs", "pass": direction, "shape": shape, "m": m, "n": n, "k": k, "ranks": 8,
            "dtype": "bfloat16", "link_gbps": link, "method": method, "ms": time, "wire_ms": 2.0,
            "over_floor": time and time / 2, "config": config, **MACHINE, "num_gpus": 1, "date": date}


def test_solo_mode_has_a_table_for_each_link(results):
    forward = {"method": "fused", "tiles": TILES, "transport": "forward", "item_tiles": 4}
    direct, parts = {**forward, "transport": "direct"}, {"method": "parts", "pieces": 1}
    folder = results([
        solo_row("8x8x8", "tdkernels", 9.0, config=forward, date="2025-12-31"),
        solo_row("8x8x8", "gemm", 1.0), solo_row("8x8x8", "tdkernels", 3.0, config=forward),
        solo_row("8x8x8", "c1", 2.5, config=direct), solo_row("8x8x8", "c2", 4.0, config=parts),
        solo_row("8x8x8", "c3", None, config=direct),
        solo_row("8x8x8", "gemm", 1.0, None), solo_row("8x8x8", "tdkernels", 2.25, None, config=forward),
        solo_row("8x8x8", "gemm", 1.0, None, direction="backward"),
        solo_row("8x8x8", "tdkernels", 5.0, None, direction="backward"),
    ], "solo")
    text = report.pages(all_rows.read(folder))["tables/solo.md"]
    assert "No byte crossed a link" in text
    modelled, at_once = text.split("### ")[1:]
    assert modelled.startswith("NVIDIA Testing, one of 8 ranks, data arrives at 390 GB/s (model)")
    line = "| gemm_rs | 8 × 8 × 8 | 1.000 | 2.000 | 3.000 | 2.500 | 1.25 | 64x32x16, 7 stages, direct | "
    assert line + "forward 3.000, pipelined 4.000 |" in modelled
    assert "gemm_rs with M < 8192 1.25 (1 shapes)" in modelled
    assert at_once.startswith("NVIDIA Testing, one of 8 ranks, data arrives at once")
    assert "| gemm_rs backward | 8 × 8 × 8 | 1.000 | 2.000 | 5.000 | 5.000 | 2.50 |  |  |" in at_once


def test_eager_calls_in_solo_mode_have_a_table_of_their_own(results):
    eager = {"graph": False, "host_ms": 0.5}
    folder = results([
        solo_row("8x8x8", "gemm", 1.0), solo_row("8x8x8", "tdkernels", 3.0, config=CONFIG),
        {**solo_row("8x8x8", "gemm", 1.25), **eager}, {**solo_row("8x8x8", "tdkernels", 3.5, config=CONFIG), **eager},
        solo_row("8x8x16", "gemm", 1.0), {**solo_row("8x8x16", "gemm", 1.25), **eager},
        solo_row("8x8x16", "c1", 3.0, config=CONFIG), solo_row("8x8x16", "tdkernels", None),
    ], "solo")
    captured, calls = report.pages(all_rows.read(folder))["tables/solo.md"].split("### Eager calls in solo mode")
    assert "| gemm_rs | 8 × 8 × 8 | 1.000 | 2.000 | 3.000 | 3.000 | 1.50 |" in captured
    assert "#### NVIDIA Testing, one of 8 ranks, data arrives at 390 GB/s (model)" in calls
    assert "| gemm_rs | 8 × 8 × 8 | 0.500 | 1.250 | 1.000 | 0.500 | 3.500 | 3.000 | 1.75 |" in calls
    assert "| gemm_rs | 8 × 8 × 16 | 0.500 | 1.250 | 1.000 | – | – | – | – |" in calls, "no selected config"
