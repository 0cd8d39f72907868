"""Benchmark of flash_decode with several query tokens and paged caches, and its shapes and table for one GPU."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from bench.attention import flash_decode, flash_decode_methods, flash_decode_report
from bench.attention.flash_decode import LOCAL_SHAPES, SHAPES, Case, Shape
from bench.core import measure, points
from bench.multinode_model import measured_inputs
from bench.report import headlines
from bench.report import rows as all_rows
from tdkernels.ops.attention.flash_decode.reference import flash_decode_ref
from tests.bench.test_flash_decode import gathered_caches
from tests.support.ranks import DEVICE, on_ranks

ON_GPU = DEVICE == "cuda"
DIM, KEYS = (64, 32) if ON_GPU else (16, 9)
PAGE = 16 if ON_GPU else 4
PLAN = measure.Plan(rounds=1, burst_ms=0)
MACHINE = {"gpu": "NVIDIA Testing", "num_gpus": 1, "torch": "2.99", "triton": "3.99", "git": "0123456789abcdef"}


# ---- shapes ----


def test_shapes_with_tokens_and_pages():
    several, paged = flash_decode.parse_shapes("4x64x8x128x40000x4,4x64x8x128x40000x4x16")
    assert (several.queries, several.page, several.name) == (4, 0, "") and (paged.queries, paged.page) == (4, 16)
    assert str(several) == "4x64x8x128x40000x4" and str(paged) == "4x64x8x128x40000x4, pages of 16"
    assert str(flash_decode.parse_shapes("2x4x2x16x24x1x8")[0]) == "2x4x2x16x24, pages of 8"
    assert several.kv_bytes == paged.kv_bytes == 2 * 4 * 40000 * 8 * 128 * 2
    for text in ("2x4x2x16x24x0", "2x4x2x16x24x1x8x1"):
        with pytest.raises(ValueError, match="is neither .*, one-gpu-dense, one-gpu-tokens, one-gpu-pages"):
            flash_decode.parse_shapes(text)


def test_shapes_for_one_gpu_are_no_default():
    local = flash_decode.parse_shapes("one-gpu")
    assert local == LOCAL_SHAPES and len({*map(str, local)}) == len(local) == 20
    assert all(shape.name.startswith(flash_decode.ONE_GPU) for shape in local)
    assert flash_decode.parse_shapes(None) == flash_decode.parse_shapes("h") == SHAPES
    assert not {*SHAPES} & {*LOCAL_SHAPES}
    assert sorted((s.queries, s.page) for s in local if (s.queries, s.page) != (1, 0)) == [
        (1, 16), (1, 16), (1, 16), (2, 0), (2, 0), (4, 0), (4, 0), (4, 16), (8, 0), (8, 0)
    ]
    assert all(Case(shape, 1).why_not() is None for shape in local)
    assert [s.keys for s in flash_decode.parse_shapes("one-gpu-small", keys=[8192])] == [8192]


def test_more_tokens_than_keys_are_rejected():
    assert Case(Shape(1, 4, 2, 16, 3, queries=4), 2).why_not() == "4 query tokens are more than 3 keys"
    assert Case(Shape(1, 4, 2, 16, 4, queries=4), 2).why_not() is None


# ---- operands and attentions ----


@pytest.fixture
def inputs(monkeypatch):
    """A function that returns the operands of a shape in this process, on the CPU."""
    monkeypatch.setattr(flash_decode, "rank_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(flash_decode, "dist", SimpleNamespace(get_rank=lambda: 0))
    return lambda shape, seed=0: Case(shape, 1).inputs(seed)


def test_operands(inputs):
    dense, one = inputs(Shape(3, 4, 2, 16, 9, queries=2)), inputs(Shape(3, 4, 2, 16, 9))
    assert dense.q.shape == (3, 2, 4, 16) and dense.k.shape == (3, 9, 2, 16) and dense.table is None
    assert one.q.shape == (3, 4, 16) and torch.equal(one.k, dense.k)
    paged = inputs(Shape(3, 4, 2, 16, 9, page=4))
    assert paged.q.shape == (3, 4, 16) and paged.k.shape == paged.v.shape == (9, 4, 2, 16)
    assert paged.table.shape == (3, 3) and paged.table.dtype == torch.int32 and paged.lens.tolist() == [9] * 3
    assert sorted(paged.table.flatten().tolist()) == list(range(9)) != paged.table.flatten().tolist()


@pytest.mark.parametrize("page", [0, 4])
@pytest.mark.parametrize("queries", [1, 3])
def test_math_is_attention(queries, page, inputs):
    s = flash_decode_methods.in_fp32(inputs(Shape(2, 6, 2, 16, 9, "", queries, page)))
    expected = flash_decode_ref(s.q, s.k, s.v, s.lens, block_table=s.table, return_lse=True, alone=True)
    for got, tensor in zip(flash_decode_methods.math(s), expected, strict=True):
        torch.testing.assert_close(got, tensor, atol=1e-5, rtol=1e-5)


def test_peers_without_a_mask_or_pages_are_absent(inputs):
    several, paged = inputs(Shape(2, 6, 2, 16, 9, queries=3)), inputs(Shape(2, 6, 2, 16, 9, page=4))
    for name in ("sdpa-flash", "sdpa-cudnn", "sdpa-efficient"):
        attend = flash_decode_methods.PEERS[name]()
        with pytest.raises(ValueError, match="it does not read pages"):
            attend(paged)
        if name != "sdpa-flash":
            with pytest.raises(ValueError, match="it has no mask for several query tokens"):
                attend(several)
        with pytest.raises(ValueError, match="its mask covers the keys of one rank only"):
            flash_decode_methods.of_all_ranks(attend)(several)


def test_flash_attention_masks_several_tokens(inputs):
    s = inputs(Shape(2, 6, 2, 16, 9, queries=3))
    for name in "qkv":
        setattr(s, name, getattr(s, name).to("meta"))
    o, lse = flash_decode_methods.PEERS["sdpa-flash"]()(s)
    assert o.shape == s.q.shape and lse.shape == s.q.shape[:3]


def test_flash_attn_gets_the_mask_and_the_pages(inputs, monkeypatch):
    calls = []

    def with_kvcache(q, k, v, **more):
        calls.append((more.get("causal", False), more.get("block_table")))
        return q, q.new_zeros(q.shape[0], q.shape[2], q.shape[1])

    monkeypatch.setitem(sys.modules, "flash_attn_interface", SimpleNamespace(flash_attn_with_kvcache=with_kvcache))
    attend = flash_decode_methods.PEERS["flash-attn"]()
    for queries, page in ((1, 0), (3, 0), (3, 4)):
        s = inputs(Shape(2, 6, 2, 16, 9, "", queries, page))
        o, lse = attend(s)
        assert o.shape == s.q.shape and lse.shape == s.q.shape[:-1]
        causal, table = calls.pop()
        assert causal == (queries > 1) and table is s.table


# ---- on ranks ----


def check_sequence():
    """Compare the torch baseline with attention over the gathered keys of all ranks."""
    case = Case(Shape(2, 4, 2, 16, 5, "", queries=3), dist.get_world_size())
    s = flash_decode_methods.in_fp32(case.inputs(0))
    caches = gathered_caches(s)
    mask = torch.ones(3, 5 * case.ranks, dtype=torch.bool, device=s.q.device).tril(5 * case.ranks - 3)
    expected = torch.nn.functional.scaled_dot_product_attention(s.q.transpose(1, 2), *caches, attn_mask=mask)
    merged = flash_decode_methods.sequence(flash_decode_methods.of_all_ranks(flash_decode_methods.math), s)
    torch.testing.assert_close(merged, expected.transpose(1, 2), atol=1e-5, rtol=1e-5)


def test_torch_baseline_masks_the_last_keys_of_all_ranks():
    on_ranks(2, check_sequence)


@pytest.mark.parametrize("world_size, queries, page", [(1, 3, 0), (1, 1, PAGE), (2, 2, 0)])
def test_methods_are_checked_and_timed(world_size, queries, page):
    case = Case(Shape(2, 4, 2, DIM, KEYS, "", queries, page), world_size)
    rows = flash_decode.rows(case, on_ranks(world_size, flash_decode.measure, case, PLAN)[0], None)
    expected = {"copy", "torch-local method-torch", "local"}
    together = {"sequence method-torch", "tdkernels"}
    assert {row["method"] for row in rows if row["ms"]} == expected | (together if world_size > 1 else set())
    assert all((row["queries"], row["page"], row["shape"]) == (queries, page, str(case.shape)) for row in rows)
    assert json.loads(json.dumps(rows)) == rows


# ---- the report ----


def rows_of(shape, ranks=1, date="2026-01-02", graph=True, **ms):
    """Return the rows of one run, with a copy at 4000 GB/s; "__" in the name of a method is a space, "_" a hyphen."""
    found = [("copy", False, {"ms": 1.0, "bytes": 4 * 10**9})]
    for name, time in ms.items():
        method = name.replace("__", " ").replace("_", "-")
        found.append((method, graph, {"ms": time, "config": {"method": "split"} if method == "local" else None}))
    rows = flash_decode.rows(Case(shape, ranks), found, None)
    return [{**row, **MACHINE, "num_gpus": ranks, "nccl": "2.0", "multicast": "off", "date": date} for row in rows]


def test_rows_have_a_table_of_their_own():
    dense, several = Shape(4, 64, 8, 128, 40000, "one-gpu-dense"), Shape(4, 64, 8, 128, 40000, "one-gpu-tokens", 4)
    paged = Shape(16, 16, 1, 128, 24576, "", 1, 16)
    times = {"torch_local__math": 0.9, "torch_local__sdpa_flash": 0.3, "local": 0.2}
    rows = rows_of(dense, **times, **{'local__c1__{"warps":__2}': 0.25}) + rows_of(several, **times)
    rows += rows_of(dense, date="2026-01-01", **{**times, "local": 9.0}) + rows_of(paged, local=0.4)
    text = flash_decode_report.text(rows, lambda figure: figure.caption)
    assert text.startswith("## Decoding on one GPU\n") and text.count("### ") == 1
    assert "### flash_decode on one GPU, NVIDIA Testing, in CUDA graphs\n\n2026-01-02, revision 0123456; torch" in text
    assert "| tokens | page | copy | torch | flash_decode | `c1 {\"warps\": 2}` | x torch | bandwidth |" in text
    # 2 x 4 x 40000 keys and values x 8 x 128 elements x 2 bytes = 655 MB: 163.8 us at 4000 GB/s.
    start = "| 4x64x8x128x40000 |"
    lines = [line for line in text.splitlines() if "x128x" in line]
    assert lines == [
        f"{start} 1 | – | 163.8 | 300.0 | 200.0 | 250.0 | 1.50 | 0.82 | sdpa-flash | split |",
        f"{start} 4 | – | 163.8 | 300.0 | 200.0 | – | 1.50 | 0.82 | sdpa-flash | split |",
        "| 16x16x1x128x24576 | 1 | 16 | 50.3 | – | 400.0 | – | – | 0.13 | – | split |",
    ]
    eager = flash_decode_report.text(rows_of(dense, graph=False, local=0.1), None)
    assert "### flash_decode on one GPU, NVIDIA Testing\n" in eager


def test_other_tables_leave_these_rows_out():
    times = {"torch_local__math": 0.9, "local": 0.2, "sequence__math": 1.0, "tdkernels": 0.5}
    plain = rows_of(Shape(1, 96, 12, 128, 8192), 2, **times)
    others = [
        *rows_of(Shape(1, 96, 12, 128, 8192, "", 4), 2, "2026-02-01", **{**times, "tdkernels": 0.25}),
        *rows_of(Shape(1, 96, 12, 128, 8192, "", 1, 16), 2, "2026-02-02", **{**times, "tdkernels": 0.25}),
    ]
    older = [{name: value for name, value in row.items() if name not in ("queries", "page")} for row in plain]
    for decode in (plain, older):
        assert all(map(points.is_plain_decode, decode)) and not any(map(points.is_plain_decode, others))
        text = flash_decode_report.text(decode, lambda figure: figure.caption)
        assert flash_decode_report.text(decode + others, lambda figure: figure.caption) == text != ""
        assert "| 2.00 |" in headlines.text(all_rows.Rows(decode=decode + others))
    with pytest.raises(measured_inputs.Missing, match="no rows of flash_decode$"):
        measured_inputs._decoding([{**row, "gpu": measured_inputs.GPU} for row in others])
    named = rows_of(Shape(1, 32, 1, 128, 65536, "one-gpu-dense"), 2, **times)
    assert flash_decode_report.text(named, None) == "", "a table for one GPU only"
