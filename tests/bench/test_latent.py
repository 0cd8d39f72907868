"""The benchmark of flash_decode with latent caches: a rehearsal on CPU ranks, its rows, command and table."""

import json
from types import SimpleNamespace

import pytest
import torch

from bench.attention import latent, latent_methods, latent_report
from bench.attention.latent_methods import Shape
from bench.core import points, rank_program
from bench.report import main as report
from bench.report import rows as all_rows
from tdkernels.ops.attention.flash_decode.reference import flash_decode_ref
from tests.bench.fake_pool import FakePool
from tests.support.ranks import on_ranks

SMALL = Shape(1, 64, 20, dim=72, dim_v=64)
SIZES = [2048, 2048, 2048]


def times(ms, **more):
    return {"ms": ms, "host_ms": ms, **more}


def test_shapes():
    assert latent_methods.parse_shape("8x128x32768") == Shape(8, 128, 32768)
    several = latent_methods.parse_shape("2x128x1024x2")
    assert several.queries == 2 and str(several) == "2x128x1024x2"
    assert several.bytes == 2 * 1024 * 576 * 2 and several.flops == 2 * 2 * 2 * 128 * 1024 * (576 + 512)
    for text in ("8x128", "8x0x4", "8x128x1024x2x2", "8x128xS"):
        with pytest.raises(ValueError, match="is not BxHxS or BxHxSxTq"):
            latent_methods.parse_shape(text)
    assert len({*latent.SHAPES}) == len(latent.SHAPES) and {shape.dim for shape in latent.SHAPES} == {576}
    m, n, k = latent_methods.gemm_sizes(Shape(8, 128, 32768), 2048)
    assert (m, n) == (2048, 2048) and abs(2 * m * n * k / Shape(8, 128, 32768).flops - 1) < 0.01
    assert latent_methods.gemm_sizes(Shape(1, 16, 65536), 2048) == (2048, 2048, 2048), "too little work"


@pytest.mark.parametrize("page", [0, 8])
@pytest.mark.parametrize("queries", [1, 3])
def test_the_check_is_attention(queries, page, monkeypatch):
    """Compare plain torch of the benchmark with the reference of the library."""
    monkeypatch.setattr(latent_methods, "rank_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(latent_methods, "dist", SimpleNamespace(get_world_size=lambda: 1, get_rank=lambda: 0))
    s = latent_methods.inputs(Shape(2, 4, 20, queries, page, 24, 16), 0)
    wide = s.k.float()
    expected = flash_decode_ref(
        s.q.float(), wide, wide[..., :16], s.lens, block_table=s.table, return_lse=True, alone=True
    )
    for got, tensor in zip(latent_methods.attend(s, torch.float32), expected, strict=True):
        torch.testing.assert_close(got, tensor, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("ranks, shape", [(1, SMALL), (2, Shape(1, 16, 20, page=8, dim=72, dim_v=64))])
def test_methods_are_checked_and_timed(ranks, shape, tmp_path):
    table = latent.rows(shape, on_ranks(ranks, latent.measure, shape, 1)[0])
    names = {"split", "fused", "tdkernels"} | ({"fused, 64 rows", "copy", "gemm"} if ranks == 1 else set())
    eager = {row["method"]: row for row in table if not row["graph"]}
    assert {*eager} == names and all(row["ms"] > 0 for row in eager.values())
    assert eager["split"]["config"]["method"] == "split" and eager["fused"]["config"]["method"] == "fused"
    assert (eager["split"]["share"] is None) == (ranks > 1) and eager["split"]["gbps"] > 0
    assert all(row["page"] == shape.page and row["keys"] == 20 for row in table)
    assert latent.line(table).startswith("floor " if ranks == 1 else "split ")
    folder = tmp_path / "testx2"
    folder.mkdir()
    older = {"op": "flash_decode", "what": "configs", "of": "latent", "keys": 4096}
    (folder / f"{latent.FILE}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [older, *table]))
    assert points.read(tmp_path) == [] and points.read_decode(tmp_path) == []
    assert points.read_latent(tmp_path) == table, "the older rows of this file are another kind"


def measure_wrong(method):
    """Measure with one method that attends to one key less."""
    original = latent_methods.calls

    def calls(names, configs):
        found = original(names, configs)
        right = found[method]
        return found | {method: lambda s: right(SimpleNamespace(**vars(s) | {"lens": s.lens - 1}))}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(latent_methods, "calls", calls)
        latent.measure(Shape(1, 4, 8, dim=24, dim_v=16), 1)


def test_wrong_results_are_not_timed():
    with pytest.raises(Exception, match="fused: wrong"):
        on_ranks(1, measure_wrong, "fused")


def test_floors_and_shares():
    shape = Shape(1, 128, 8192)
    scale = shape.flops / (2 * 2048**3)
    found = [("split", True, times(0.02)), ("split", False, times(0.04)), ("fused", True, {"absent": "no memory"}),
             ("copy", True, times(0.004)), ("copy", False, times(0.008)),
             ("gemm", True, times(0.05, sizes=SIZES)), ("gemm", False, times(0.04, sizes=SIZES))]
    table = {(row["method"], row["graph"]): row for row in latent.rows(shape, found)}
    split = table["split", True]
    assert split["floor"] == "gemm" and split["floor_ms"] == pytest.approx(0.04 * scale), "the faster of both"
    assert split["share"] == pytest.approx(0.04 * scale / 0.02) and split["us"] == 20.0
    assert table["split", False]["share"] == pytest.approx(split["share"] / 2)
    assert split["tflops"] == pytest.approx(shape.flops / 0.02e9) and split["gbps"] == shape.bytes / 0.02e6
    assert table["gemm", True]["tflops"] == pytest.approx(2 * 2048**3 / 0.05e9), "of the GEMM that ran"
    assert table["gemm", True]["share"] is table["copy", True]["tflops"] is table["fused", True]["ms"] is None
    start = f"floor {40 * scale:.1f} (gemm), split 20.0, fused – (no memory) us, in CUDA graphs; split: "
    assert latent.line([*table.values()]).startswith(start)
    copy_bound = latent.rows(shape, [*found[:3], ("copy", True, times(1.0)), *found[5:]])
    assert copy_bound[0]["floor"] == "copy" and copy_bound[0]["share"] == 50.0


@pytest.fixture
def pool(monkeypatch):
    fake = FakePool(lambda *_: [("split", True, times(0.02))])
    monkeypatch.setattr(rank_program, "RankPool", fake)
    return fake


@pytest.fixture
def command(monkeypatch, pool, tmp_path):
    def run(gpus, *arguments):
        monkeypatch.setattr(latent.torch.cuda, "device_count", lambda: gpus)
        return latent.main([*arguments, "--out", str(tmp_path)])

    return run


def test_command(command, pool, tmp_path, capsys):
    assert command(1, "--shapes", "1x16x64", "2x16x64x2", "--page", "32") == 0
    assert pool.cases == [Shape(1, 16, 64, 1, 32), Shape(2, 16, 64, 2, 32)]
    assert capsys.readouterr().out.splitlines()[1].startswith("2x16x64x2, pages of 32: split 20.0 us, in CUDA graphs")
    written = points.read_latent(tmp_path)
    assert [row["shape"] for row in written] == ["1x16x64, pages of 32", "2x16x64x2, pages of 32"]
    assert {"git", "date", "rounds"} <= {*written[0]}
    assert (tmp_path / "testingx1" / "flash_decode_latent.jsonl").exists()
    assert command(2) == 0 and pool.ranks == 2
    assert pool.cases == [shape for shape in latent.SHAPES if shape.queries == 1]
    assert command(1, "--seconds", "0") == 0 and pool.cases == [], "the time is over"
    assert "time limit reached" in capsys.readouterr().out
    before = points.read_latent(tmp_path)
    assert command(0) == 0 and pool.ranks == 2 and {shape.dim for shape in pool.cases} == {72}
    assert points.read_latent(tmp_path) == before, "a rehearsal writes nothing"


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--shapes", "2x128x1024x2"], "several query tokens are measured on one rank only"),
        (["--shapes", "1x2"], "'1x2' is not BxHxS or BxHxSxTq"), (["--page", "-1"], "--page must not be negative"),
    ],
)
def test_invalid_arguments(arguments, message, command, capsys):
    with pytest.raises(SystemExit):
        command(2, *arguments)
    assert message in capsys.readouterr().err


def test_rows_have_a_table_on_the_page_of_attention():
    def run(shape, date="2026-01-01", graph=True, ranks=1, **ms):
        found = [(name.replace("_64", ", 64 rows"), graph, times(time)) for name, time in ms.items()]
        if ranks == 1:
            found += [("copy", True, times(0.01)), ("gemm", True, times(0.001, sizes=SIZES))]
        machine = {"gpu": "NVIDIA Testing", "num_gpus": ranks, "torch": "2.99", "triton": "3.99", "git": "0123456789"}
        return [{**row, **machine, "date": date} for row in latent.rows(shape, found)]

    short, long = Shape(1, 128, 8192), Shape(2, 128, 32768, queries=2)
    rows = run(short, "2025-12-31", split=9.0, fused=1.0) + run(short, split=0.02, fused=0.05, fused_64=0.04)
    rows += run(long, split=0.2, fused=0.1) + run(short, ranks=2, split=0.03, fused=0.06, tdkernels=0.03)
    text = latent_report.text(rows)
    one, two = text.split("### flash_decode, latent, dense caches, in CUDA graphs, 2 x NVIDIA Testing")
    assert "| sequences x heads x keys | tokens | floor | split | fused | fused, 64 rows | x fused | TFLOP/s |" in one
    assert "| 1x128x8192 | 1 | 10.0 | 20.0 | 50.0 | 40.0 | 2.50 | 114 | 472 | 0.50 |" in one, "the newest run"
    assert "| 2x128x32768 | 2 | 10.0 | 200.0 | 100.0 | – | 0.50 ▼ | 183 | 377 | 0.05 |" in one
    assert "| 1x128x8192 | 1 | 30.0 | 60.0 | 30.0 | 2.00 | 76 | 315 |" in two, "no floor on two ranks"
    assert "2026-01-01, revision 0123456; torch 2.99, triton 3.99." in one
    assert text.partition("\n")[2].strip() in report.pages(all_rows.Rows(latent=rows))["tables/attention.md"]
    assert latent_report.text([]) == ""
