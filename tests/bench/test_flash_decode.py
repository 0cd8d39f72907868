"""Benchmark of flash_decode: shapes, methods, checks, rows, command, tables and plots."""

import json
import math

import pytest
import torch
import torch.distributed as dist

import tdkernels
from bench import run as bench_run
from bench.attention import flash_decode, flash_decode_methods, flash_decode_plots, flash_decode_report
from bench.core import measure, points
from bench.report import main as report
from tdkernels.__main__ import main
from tests.bench.fake_pool import FakePool
from tests.support.ranks import DEVICE, on_ranks

ON_GPU = DEVICE == "cuda"
SHAPE = flash_decode.Shape(2, 4, 2, 64, 16) if ON_GPU else flash_decode.Shape(2, 4, 2, 16, 5)
CHANGED, UNKNOWN = 'c1 {"num_warps": 2}', 'c2 {"nope": 1}'
PLAN = measure.Plan(rounds=1, burst_ms=0, peers=("sdpa-flash",), overrides=({"num_warps": 2}, {"nope": 1}))
MACHINE = {"gpu": "NVIDIA Testing", "num_gpus": 2, "driver": "1.2", "torch": "2.99", "triton": "3.99", "nccl": "2.0",
           "multicast": "off", "git": "0123456789abcdef"}


# ---- shapes ----


def test_shapes_by_name_and_by_size():
    all_shapes = flash_decode.parse_shapes(None)
    assert all_shapes == flash_decode.SHAPES and len({*all_shapes}) == len(all_shapes)
    assert {(s.heads, s.kv_heads, s.dim) for s in all_shapes} == {(96, 12, 128), (32, 8, 128)}
    keys_by_prefix = [s.keys for s in flash_decode.parse_shapes("h96-kv12-b1")]
    assert {*keys_by_prefix} >= {1 << exponent for exponent in range(10, 18)}
    exact = [s for s in all_shapes if s.name == "h96-kv12-b1"]
    assert [s.keys for s in exact] == [1 << exponent for exponent in range(10, 18)]
    for batch in (8, 32, 128):
        most = max(s.keys for s in all_shapes if s.batch == batch)
        assert 1024 <= most < 1 << 17 and batch * most <= 1 << 17
    named, sized = flash_decode.parse_shapes("h32-kv8-b8,2x4x2x16x5", keys=[2048])
    assert str(named) == "8x32x8x128x2048" and str(sized) == "2x4x2x16x5"
    assert named.kv_bytes == 2 * 8 * 2048 * 8 * 128 * 2
    assert [str(case) for case in flash_decode.cases(["flash_decode"], [named], 4)] == [
        "flash_decode 8x32x8x128x2048 h32-kv8-b8"
    ]


def test_why_not_names_the_reason():
    assert flash_decode.Case(SHAPE, 2).why_not() is None
    odd = flash_decode.Shape(1, 5, 2, 64, 8)
    assert flash_decode.Case(odd, 2).why_not() == "5 query heads are not divisible by 2 kv heads"


# ---- measuring ----


def measure_case(plan):
    case = flash_decode.Case(SHAPE, dist.get_world_size())
    first, second = (case.inputs(seed) for seed in range(2))
    assert not torch.equal(first.q, second.q) and not torch.equal(first.k, first.v)
    return flash_decode.measure(case, plan), (first.q.cpu(), first.k.cpu())


@pytest.mark.parametrize("world_size", [1, 2])
def test_all_methods_are_checked_and_timed(world_size):
    results = on_ranks(world_size, measure_case, PLAN)
    if world_size == 2:
        (q, k), (other_q, other_k) = (operands for _, operands in results)
        assert torch.equal(q, other_q) and not torch.equal(k, other_k)
    found, case = results[0][0], flash_decode.Case(SHAPE, world_size)
    rows = flash_decode.rows(case, found, None)
    timed = {row["method"] for row in rows if row["ms"]}
    expected = {"copy", "torch-local math", "torch-local method-torch", "local", f"local {CHANGED}"}
    together = {"sequence math", "sequence method-torch", "tdkernels", f"tdkernels {CHANGED}"}
    expected |= together if world_size > 1 else set()
    peer_methods = {"torch-local sdpa-flash"} | ({"sequence sdpa-flash"} if world_size > 1 else set())
    assert timed == expected | (peer_methods if ON_GPU else set())
    absent = {row["method"] for row in rows if row["absent"]}
    assert absent == {f"tdkernels {UNKNOWN}"} | (set() if ON_GPU else {"torch-local sdpa-flash"})
    assert json.loads(json.dumps(rows)) == rows
    assert {row["config"]["num_warps"] for row in rows if CHANGED in row["method"]} == {2}
    assert {row["config"]["method"] for row in rows if row["method"].endswith("method-torch")} == {"torch"}


def test_quantities_derived_from_times():
    case = flash_decode.Case(flash_decode.Shape(1, 8, 2, 64, 1 << 16), 2)
    times = {"torch-local math": 0.5, "torch-local sdpa-flash": 0.2, "local": 0.1, "sequence math": 0.6,
             "sequence sdpa-flash": 0.25, "tdkernels": 0.125}
    found = [("copy", False, {"ms": 1.0, "bytes": 10**9})]
    found += [(name, False, {"ms": 2 * ms}) for name, ms in times.items()]
    found += [(name, True, {"ms": ms}) for name, ms in times.items()]
    rows = {(row["method"], row["graph"]): row for row in flash_decode.rows(case, found, 400.0)}
    ours, local = rows["tdkernels", True], rows["local", True]
    kv_bytes = 2 * (1 << 16) * 2 * 64 * 2
    assert ours["kv_bytes"] == kv_bytes and ours["copy_gbps"] == 1000.0
    assert math.isclose(ours["floor_ms"], kv_bytes / 1e9) and math.isclose(ours["efficiency"], kv_bytes / 1e9 / 0.125)
    assert math.isclose(local["efficiency"] * 1000, local["kv_gbps"])
    assert math.isclose(ours["added_us"], 25.0) and local["added_us"] is None
    assert math.isclose(rows["tdkernels", False]["added_us"], 50.0)
    assert ours["speedup"] == 2.0 and local["speedup"] == 2.0 and rows["sequence math", True]["speedup"] == 0.25 / 0.6
    assert rows["copy", False]["efficiency"] is None and rows["copy", False]["speedup"] is None


def measure_wrong_method(local):
    original = flash_decode_methods.ours

    def wrong(s, config=None, group=None):
        return original(s, config, group) * (1.1 if (group is not None) == local else 1.0)

    flash_decode_methods.ours = wrong
    try:
        flash_decode.measure(flash_decode.Case(SHAPE, dist.get_world_size()), measure.Plan(1, 0))
    except RuntimeError as error:
        return str(error)
    finally:
        flash_decode_methods.ours = original


@pytest.mark.parametrize("local, name", [(True, "local"), (False, "tdkernels")])
def test_wrong_results_are_not_timed(local, name):
    for message in on_ranks(2, measure_wrong_method, local):
        assert message.startswith(f"{name}: wrong: relative errors")


def gathered_caches(s):
    """Return the keys and values of all ranks as [B, Hq, S, D], with two query heads per head of the caches."""
    for cache in (s.k, s.v):
        gathered = [torch.empty_like(cache) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, cache)
        yield torch.cat(gathered, 1).transpose(1, 2).repeat_interleave(2, 1)


def check_sequence():
    """Compare the torch baseline with attention over the gathered keys of all ranks."""
    case = flash_decode.Case(SHAPE, dist.get_world_size())
    s = flash_decode_methods.in_fp32(case.inputs(0))
    caches = gathered_caches(s)
    expected = torch.nn.functional.scaled_dot_product_attention(s.q[:, :, None], *caches)[:, :, 0]
    merged = flash_decode_methods.sequence(flash_decode_methods.math, s)
    local, lse = flash_decode_methods.math(s)
    assert lse.shape == s.q.shape[:2] and not torch.allclose(local, expected, atol=1e-3)
    torch.testing.assert_close(merged, expected, atol=1e-5, rtol=1e-5)


def test_torch_baseline_is_attention_over_all_keys():
    on_ranks(2, check_sequence)


# ---- the command ----


@pytest.mark.parametrize("gpus, nproc, ranks", [(0, None, 2), (1, None, 1), (4, None, 4), (4, 1, 1), (4, 2, 2)])
def test_number_of_ranks(gpus, nproc, ranks, monkeypatch, capsys, tmp_path):
    pool = FakePool(lambda *_: [("copy", False, {"ms": 1.0, "bytes": 10}), ("local", False, {"ms": 2.0})])
    monkeypatch.setattr(bench_run, "RankPool", pool)
    monkeypatch.setattr(bench_run.torch.cuda, "device_count", lambda: gpus)
    options = ["--shapes", "h32-kv8-b8", "--tokens", "1024,2048", "--out", str(tmp_path)]
    options += ["--nproc", str(nproc)] if nproc else []
    assert main(["bench", "flash_decode", *options]) == 0
    assert pool.ranks == ranks
    assert capsys.readouterr().out.startswith("Rehearsal on 2 CPU ranks,") == (gpus == 0)
    path = tmp_path / f"testingx{ranks}" / "flash_decode.jsonl"
    assert path.exists() == (gpus > 0)
    if gpus:
        written = [json.loads(line) for line in path.open()]
        assert [(row["keys"], row["method"]) for row in written] == [
            (keys, method) for keys in (1024, 2048) for method in ("copy", "local")
        ]
        assert points.read(tmp_path) == [] and points.read_decode(tmp_path) == written


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["flash_decode", "ag_gemm"], "flash_decode cannot be combined with other operators"),
        (["flash_decode", "--shapes", "8x8x8"], "'8x8x8' is neither BxHqxHkvxDxS[xTq[xP]] nor a prefix of h96-kv12-b1"),
        (["flash_decode", "--tokens", "7"], "--tokens: no shape of flash_decode has 7 keys"),
        (["flash_decode", "--nproc", "0"], "--nproc must be at least 1 rank, not 0"),
        (["flash_decode", "--peers", "sdpa"], "sdpa-flash, sdpa-cudnn"),
    ],
)
def test_bench_rejects_invalid_arguments(arguments, message, capsys):
    assert main(["bench", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_operator_exists_in_the_library():
    assert {*flash_decode.OPERATORS, "FlashDecodeConfig"} <= set(tdkernels.__all__)


# ---- the report ----


def run_of(keys, ranks=2, graph=True, date="2026-01-02", batch=1, **ms):
    """Return the rows of one run, with a copy at 4000 GB/s.

    ``ms`` gives times by method; "__" stands for a space and "_" for a hyphen.
    """
    case = flash_decode.Case(flash_decode.Shape(batch, 96, 12, 128, keys, "h96-kv12-b1"), ranks)
    found = [("copy", False, {"ms": 1.0, "bytes": 4 * 10**9})]
    found += [(name.replace("__", " ").replace("_", "-"), graph, {"ms": time}) for name, time in ms.items()]
    rows = flash_decode.rows(case, found, 400.0 if ranks > 1 else None)
    return [{**row, **MACHINE, "num_gpus": ranks, "date": date} for row in rows]


def line(text, heading, start):
    part = text[text.index(heading) :]
    found = next(row for row in part.splitlines() if row.startswith(f"| {start} |"))
    return [cell.strip() for cell in found.strip("|").split("|")]


@pytest.fixture
def folder(tmp_path):
    times = {"torch_local__math": 0.9, "torch_local__sdpa_flash": 0.15, "local": 0.11, "sequence__math": 2.0,
             "sequence__sdpa_flash": 0.25, "tdkernels": 0.12}
    rows = run_of(1 << 16, **times)
    rows += run_of(1 << 16, date="2026-01-01", **{**times, "tdkernels": 9.0})
    rows += run_of(1 << 17, **{**times, "local": 0.25, "tdkernels": 0.2621})
    rows += [row for exponent in (10, 11, 12) for row in run_of(1 << exponent, **times)]
    rows += run_of(1 << 16, ranks=1, **{name: times[name] for name in ("torch_local__sdpa_flash", "local")})
    rows += run_of(500, batch=8, **times, **{'tdkernels__c1__{"num_warps":__2}': 0.001})
    path = tmp_path / "results" / "testingx2" / "flash_decode.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "results"


def test_tables_show_the_newest_runs_and_mark_missed_targets(folder):
    text = flash_decode_report.text(points.read_decode(folder), lambda figure: figure.caption)
    # 2 x 65536 keys and values x 12 x 128 elements x 2 bytes = 403 MB: 0.1007 ms at 4000 GB/s.
    heading = "### flash_decode, 96 / 12 heads of 128, batch 1, in CUDA graphs, 2 x NVIDIA Testing"
    assert line(text, heading, "64K") == [
        "64K", "0.150", "0.110", "0.250", "0.120", "0.92", "1.36", "0.84 ▼", "10.0", "2.08", "sdpa-flash", "sdpa-flash",
    ]
    long = line(text, heading, "128K")
    assert long[5:9] == ["0.81 ▼", "0.60 ▼", "0.77 ▼", "12.1 ▼"] and long[9] == "0.95 ▼"
    assert line(text, heading, "1K")[7] == "0.01", "no target for few keys"
    local = line(text, "batch 1, in CUDA graphs, 1 x NVIDIA Testing", "64K")
    assert local == ["64K", "0.150", "0.110", "0.92", "1.36", "sdpa-flash"]
    assert line(text, "batch 8, in CUDA graphs", "500")[4] == "0.120", "not the row of the overridden config"
    assert "copy rate 4000 to 4000 GB/s" in text and "2026-01-02, revision 0123456; torch 2.99" in text
    assert flash_decode_report.text([], None) == ""


def test_report_has_the_section_and_its_plot(folder):
    assert points.read(folder) == []
    assert report.main(folder, folder) == 0
    assert "../plots/flash-decode-testing-graph.png" in (folder / "tables" / "attention.md").read_text()
    (figure,) = flash_decode_plots.figures(flash_decode_report.newest_runs(points.read_decode(folder)))
    ((place, by_ranks),) = figure.points.items()
    assert place == ((96, 12, 128), 1) and [*by_ranks] == [2], "too few points for a curve"
    pytest.importorskip("matplotlib")
    assert (folder / "plots" / figure.file).stat().st_size > 5000, "the plot is empty"
