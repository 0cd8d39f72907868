"""Configs of problems without table entries, and defaults that supersede older entries."""

from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import tdkernels
from tdkernels.autotune import disk_cache, selection
from tdkernels.autotune.hardware import Hardware
from tdkernels.autotune.problem import Problem
from tdkernels.autotune.tunable import tunable, versions
from tdkernels.ops.common import gemm_tunable
from tdkernels.ops.common.scaling import LAYOUTS
from tdkernels.ops.common.tile_config import LARGE
from tdkernels.ops.dense.ag_gemm import multi
from tdkernels.ops.dense.gemm_rs import launch_specialized
from tdkernels.runtime import gpu as runtime_gpu
from tests.autotune.entries import make_entry
from tests.ops.dense.specialized_support import pretend_hopper
from tests.support.dense_oracle import OPERATORS


@pytest.mark.parametrize("operator", OPERATORS)
def test_fallback_is_torch_for_medium_m_on_a_gpu(operator, monkeypatch):
    """On a simulated GPU: medium M is too large for one tile and too small for overlap to pay."""
    rates = Hardware(790e12, 4.3e12, 380e9, 132, measured=True)
    monkeypatch.setattr(gemm_tunable, "hardware", lambda device, dtype: rates)
    monkeypatch.setattr(runtime_gpu, "num_sms", lambda device: 132)
    op, gpu = tunable(operator), torch.device("cuda", 0)
    for capability, medium in (((8, 0), "torch"), ((9, 0), "fused")):  # Hopper has kernels that are fast there, too
        monkeypatch.setattr(runtime_gpu, "capability", lambda device, value=capability: value)
        methods = {
            m: op.fallback(Problem(operator, "NVIDIA Testing", 4, 4, "bfloat16", "nk", (m, 8192, 8192)), gpu).method
            for m in (4, 64, 1024, 8192, 32768)
        }
        assert methods == {4: "fused", 64: "fused", 1024: medium, 8192: "fused", 32768: "fused"}
    on_nodes = Problem(operator, "NVIDIA Testing", 4, 2, "bfloat16", "nk", (4, 8192, 8192))
    wide = Problem(operator, "NVIDIA Testing", 4, 4, "float32", "nk", (64, 8192, 8192))
    for problem in (on_nodes, wide):
        assert op.fallback(problem, gpu).method == "torch", "small-M kernels need one node and a 16-bit dtype"


def test_fallback_is_fused_on_cpu_ranks(monkeypatch):
    problem = Problem("ag_gemm", "cpu", 2, 2, "float32", "nk", (4, 4, 4))
    assert tunable("ag_gemm").fallback(problem, torch.device("cpu")).method == "fused"


def simulated_hopper(monkeypatch):
    """Return a device with the properties of an H200 on which configs depend."""
    pretend_hopper(monkeypatch)
    monkeypatch.setattr(runtime_gpu, "shared_memory_bytes", lambda device: 227 << 10)
    return torch.device("cuda", 0)


@pytest.mark.parametrize("operator, lower, higher", [
    ("gemm_rs", {"transport": "forward"}, {"transport": "direct"}),
    ("gemm_rs", {"transport": "direct"}, {"transport": "direct", "warp_specialize": True}),
    ("gemm_ar", {"transport": "forward"}, {"transport": "direct", "warp_specialize": True}),
    ("ag_gemm", {"transport": "push"}, {"transport": "push", "warp_specialize": True}),
    ("ag_gemm", {"method": "parts"}, {"transport": "push", "warp_specialize": True}),
    ("gemm_rs", {"method": "torch"}, {"transport": "direct"}),
])
def test_default_of_a_newer_kind_supersedes_older_measurements(operator, lower, higher, monkeypatch):
    """On a simulated Hopper GPU the default has the highest kind of kernel for this shape."""
    tuned, device = tunable(operator), simulated_hopper(monkeypatch)
    monkeypatch.setattr(disk_cache, "user_entries", lambda *name: [])
    current = versions(tuned)
    problem = Problem(operator, "NVIDIA Testing", 4, 4, "bfloat16", "nk", (8192, 8192, 8192))
    best = tuned.default(problem, device)
    assert best.warp_specialize

    def selected(changes, default=best, current_kernels=False, modelled=False, near=False, kin=False):
        config = tuned.config_to_dict(replace(best, **{"warp_specialize": False, **changes}))
        kernels = {**current, "kernels": current["kernels"] if current_kernels else "older"}
        entry = make_entry(operator, config=config, versions=kernels, modelled=modelled)
        of_entry = replace(problem, gpu="Kin 9000") if kin else problem
        entry = replace(entry, problem=replace(of_entry, shape=(8192, 8192, 4096)) if near else of_entry)
        monkeypatch.setattr(selection, "KIN", {problem.gpu: "Kin 9000"} if kin else {})
        monkeypatch.setattr(disk_cache, "shipped_entries", lambda _, gpu: [entry] * (gpu == of_entry.gpu))
        monkeypatch.setattr(type(tuned), "default", lambda self, problem, device: default)
        return selection.look_up(tuned, problem, device, "cached").source

    of_higher = replace(best, **{"warp_specialize": False, **higher})
    assert selected(lower, of_higher) == selected(lower, of_higher, near=True) == "default"
    assert selected(lower, of_higher, current_kernels=True) == "shipped"
    assert selected(lower, of_higher, modelled=True) == "modelled"
    assert selected(lower, of_higher, modelled=True, near=True) == "default"
    assert selected(lower, of_higher, modelled=True, kin=True) == "similar_gpu"
    assert selected(lower, of_higher, modelled=True, kin=True, near=True) == "default"
    assert selected(lower, of_higher, kin=True) == "default"
    assert selected(higher, of_higher) == "shipped" and selected(higher, of_higher, near=True) == "nearest"
    assert selected(higher, replace(best, **{"warp_specialize": False, **lower})) == "shipped"


def test_few_rows_keep_older_measurements(monkeypatch):
    tuned, device = tunable("ag_gemm"), simulated_hopper(monkeypatch)
    for ranks, m, superseded in ((2, 512, ()), (2, 1024, ("fused", "torch")), (4, 512, ("torch",))):
        problem = Problem("ag_gemm", "NVIDIA Testing", ranks, ranks, "bfloat16", "nk", (m, 32768, 8192))
        assert tuned.default(problem, device).warp_specialize
        for method in ("fused", "torch"):
            found = tuned.is_superseded(tdkernels.AgGemmConfig(method=method), problem, device)
            assert found == (method in superseded)


def test_few_rows_keep_measurements_of_torch_unless_their_defaults_were_compared(monkeypatch):
    tuned, device = tunable("gemm_rs"), simulated_hopper(monkeypatch)
    torch_config = tdkernels.GemmRsConfig(method="torch")

    def is_superseded(m=512, nodes=1, ranks=4, dtype="bfloat16", layout="nk"):
        problem = Problem("gemm_rs", "NVIDIA Testing", ranks, ranks // nodes, dtype, layout, (m, 8192, 8192))
        return tuned.is_superseded(torch_config, problem, device)

    fp8 = {"dtype": "float8_e4m3fn", "layout": "scaled"}
    assert is_superseded() and is_superseded(1024, nodes=2) and is_superseded(**fp8)
    by_block = {**fp8, "layout": "scaled by block"}
    assert is_superseded(448, ranks=2, **by_block) and not is_superseded(400, ranks=2, **by_block)
    assert not is_superseded(nodes=2) and not is_superseded(64, **fp8)


@pytest.mark.parametrize("dtype, layout", [("bfloat16", "nk"), ("float8_e4m3fn", "scaled")])
def test_gemm_ar_of_33_to_63_rows_never_runs_torch(dtype, layout, monkeypatch):
    """For wide outputs one-shot would send too many bytes."""
    device, tuned = simulated_hopper(monkeypatch), tunable("gemm_ar")
    rates = Hardware(790e12, 4.3e12, 380e9, 132, measured=True)
    monkeypatch.setattr(gemm_tunable, "hardware", lambda device, dtype: rates)
    for n in (8192, 16384):
        found = [tuned.fallback(Problem("gemm_ar", "NVIDIA Testing", 8, 8, dtype, layout, (m, n, 28672)), device)
                 for m in (33, 48, 63)]
        assert all(config.method == "fused" for config in found)
        assert found[-1].transport == "direct" or n == 8192


def kinds_in_fp8(monkeypatch, operator, ranks, layout, n, k, rows):
    """Return {rows: kind of the selected config}: "one_shot", "narrow", "specialized", "plain" or "torch"."""
    device, tuned = simulated_hopper(monkeypatch), tunable(operator)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    rates = Hardware(1.4e15, 4.5e12, 390e9, 132, measured=True)
    monkeypatch.setattr(gemm_tunable, "hardware", lambda device, dtype: rates)

    def kind(m):
        problem = Problem(operator, "NVIDIA Testing", ranks, ranks, "float8_e4m3fn", layout, (m, n, k))
        config = tuned.fallback(problem, device)
        if config.method == "torch":
            return "torch"
        assert config.tiles.block_k >= 128 and config.illegal(device, problem.torch_dtype) is None
        if "one_shot" in (config.transport, getattr(config, "exchange", None)):
            return "one_shot"
        if config.warp_specialize:
            return "specialized"
        return "narrow" if config.transport == "direct" else "plain"

    return {m: kind(m) for m in rows}


@pytest.mark.parametrize("layout, last", [("scaled fast", 384), ("scaled", 256), ("scaled by block", 256)])
def test_ag_gemm_of_few_rows_in_fp8(layout, last, monkeypatch):
    """With two accumulators the small-M GEMM is selected for fewer rows."""
    rows = 8, 64, 128, 256, 384, 512, 768, 1024
    found = kinds_in_fp8(monkeypatch, "ag_gemm", 4, layout, 28672, 4096, rows)
    expected = {m: "one_shot" if m <= last else "specialized" for m in rows}
    if layout == "scaled fast":
        expected[512] = "one_shot"
    assert found == expected


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", [4, 8])
@pytest.mark.parametrize("n, k", [(57344, 8192), (106496, 16384), (229376, 8192)])
def test_ag_gemm_of_few_rows_in_fp8_never_runs_torch_for_more_than_two_ranks(layout, ranks, n, k, monkeypatch):
    """Neither if the rows of a shard are no multiple of 8, so that tiles of several shards are not possible."""
    found = kinds_in_fp8(monkeypatch, "ag_gemm", ranks, layout, n, k, range(ranks, 257, ranks))
    assert set(found.values()) <= {"one_shot", "specialized"}
    assert all(kind == "one_shot" for m, kind in found.items() if m <= 64)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("n, k", [(57344, 8192), (106496, 16384), (229376, 8192)])
def test_ag_gemm_of_few_rows_in_fp8_on_two_ranks(layout, n, k, monkeypatch):
    """Where torch would dequantize the operands, because M is no multiple of 4, it is not selected."""
    found = kinds_in_fp8(monkeypatch, "ag_gemm", 2, layout, n, k, range(2, 257, 2))
    assert all(kind == "one_shot" for m, kind in found.items() if m <= 64)
    assert set(found.values()) <= {"one_shot", "specialized", "torch"}
    if layout == "scaled by block":
        assert {kind for m, kind in found.items() if m % 4} == {"one_shot", "specialized"}


@pytest.mark.parametrize("operator, layout, last", [
    ("ag_gemm", "scaled fast", 512), ("ag_gemm", "scaled", 384), ("ag_gemm", "scaled by block", 256),
    ("gemm_rs", "scaled fast", 640), ("gemm_rs", "scaled", 512), ("gemm_rs", "scaled by block", 192),
    ("gemm_ar", "scaled fast", 512), ("gemm_ar", "scaled", 512), ("gemm_ar", "scaled by block", 192),
])
def test_few_rows_in_fp8_on_two_ranks(operator, layout, last, monkeypatch):
    """Above the limit of "one_shot", torch's sequence is selected up to 400 rows."""
    rows = 8, 64, 128, 192, 256, 384, 400, 404, 512, 640, 768, 1024
    n, k = (10240, 8192) if operator == "ag_gemm" else (8192, 28672)
    found = kinds_in_fp8(monkeypatch, operator, 2, layout, n, k, rows)
    assert found == {m: "one_shot" if m <= last else "torch" if m <= 400 else "specialized" for m in rows}


def test_torch_is_not_selected_if_it_dequantizes(monkeypatch):
    """It has no block-wise scales if K of a rank is not a multiple of 512, and none for N not a multiple of 16."""
    for n, k, expected in ((8192, 28672, "torch"), (8192, 28416, "specialized")):
        assert kinds_in_fp8(monkeypatch, "gemm_rs", 2, "scaled by block", n, k, [256]) == {256: expected}
    for layout in LAYOUTS:
        assert kinds_in_fp8(monkeypatch, "gemm_rs", 2, layout, 8200, 8192, [768])[768] in ("narrow", "plain")
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    problem = Problem("gemm_rs", "NVIDIA Testing", 2, 2, "float8_e4m3fn", "scaled by block", (256, 8192, 28672))
    assert tunable("gemm_rs").fallback(problem, torch.device("cuda", 0)).warp_specialize


@pytest.mark.parametrize("layout, expected", [
    ("scaled fast", ["one_shot", "one_shot", "one_shot", "one_shot", "specialized", "one_shot", "specialized"]),
    ("scaled", ["one_shot", "one_shot", "one_shot", "one_shot", "specialized", "specialized", "specialized"]),
    ("scaled by block", ["one_shot", "one_shot", "narrow", "specialized", "specialized", "specialized", "specialized"]),
])
def test_gemm_rs_of_few_rows_in_fp8(layout, expected, monkeypatch):
    rows = 64, 128, 256, 384, 512, 768, 1024
    found = kinds_in_fp8(monkeypatch, "gemm_rs", 4, layout, 8192, 28672, rows)
    assert list(found.values()) == expected


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks, n, one_shot", [(4, 8192, (8, 32)), (8, 8192, (8, 56)), (4, 4096, (8, 64, 128))])
def test_gemm_ar_of_few_rows_in_fp8(layout, ranks, n, one_shot, monkeypatch):
    """One-shot sends more bytes. Below 64 rows, which were not measured, the limit is that of 16 bits."""
    found = kinds_in_fp8(monkeypatch, "gemm_ar", ranks, layout, n, 14336, (*one_shot, 192, 1024))
    assert [found[m] for m in one_shot] == ["one_shot"] * len(one_shot)
    assert found[192] == "narrow" and found[1024] in ("narrow", "specialized")
    assert kinds_in_fp8(monkeypatch, "gemm_ar", ranks, layout, 8192, 28672, [1024]) == {1024: "specialized"}


def test_few_rows_do_not_use_shipped_configs_of_other_shapes(monkeypatch):
    """The user's own configs are used."""
    tuned, device = tunable("gemm_rs"), simulated_hopper(monkeypatch)
    monkeypatch.setattr(selection, "KIN", {"NVIDIA Testing": "Kin 9000"})
    problem = Problem("gemm_rs", "NVIDIA Testing", 4, 4, "bfloat16", "nk", (512, 8192, 8192))
    config = tuned.config_to_dict(tuned.default(problem, device))
    mine = make_entry("gemm_rs", config=config, versions=versions(tuned))

    def source(m, gpu="NVIDIA Testing", own=False, local_ranks=4):
        of = replace(problem, shape=(m, 8192, 8192), local_world_size=local_ranks)
        entry = replace(mine, problem=replace(of, gpu=gpu, shape=(m, 8192, 4096)))
        for table, is_there in (("user_entries", own), ("shipped_entries", not own)):
            monkeypatch.setattr(disk_cache, table, lambda _, name, found=[entry] * is_there: found * (name == gpu))
        return selection.look_up(tuned, of, device, "cached").source

    assert source(512) == source(65) == source(1023) == source(512, "Kin 9000") == "default"
    assert source(512, own=True) == source(1024) == source(64) == "nearest"
    assert source(1024, "Kin 9000") == "similar_gpu" and source(512, local_ranks=2) == "nearest"


def test_several_weights_use_one_launch_instead_of_one_shot(monkeypatch):
    device, one_shot = simulated_hopper(monkeypatch), tdkernels.AgGemmConfig(transport="one_shot")
    monkeypatch.setattr(multi, "config_for", lambda *args: one_shot)
    monkeypatch.setattr(multi, "spans_nodes", lambda group: False)
    group = SimpleNamespace(size=lambda: 8)

    def selected(rows, ns=(1024, 1024), dtype=torch.bfloat16, biases=None, segment_rows=None, keeps=False, text=""):
        with FakeTensorMode():
            x = torch.empty(rows, 8192, dtype=dtype, device=device)
            weights = [torch.empty(n, 8192, dtype=dtype, device=device) for n in ns]
        biases = biases or [None] * len(ns)
        return multi._resolved(text, x, weights, biases, segment_rows or rows, keeps, group, dict)

    config = selected(96)
    assert (config.transport, config.warp_specialize) == ("push", True)
    assert selected(128, segment_rows=128).warp_specialize and selected(256, segment_rows=128).warp_specialize
    assert selected(96, text="given") == one_shot
    assert selected(32) == one_shot, "few rows"
    assert selected(96, ns=(1024,)) == one_shot, "x is gathered once"
    assert selected(96, keeps=True) == one_shot, "x is gathered once"
    assert selected(96, dtype=torch.float32) == one_shot
    assert selected(96, ns=(1024, 1000, 24)) == one_shot, "columns that TMA cannot store"
    assert selected(96, ns=(512,) * 4) == one_shot, "more weights than a launch has"
    assert selected(96, biases=[None, torch.empty(1024)]) == one_shot
    assert selected(96, segment_rows=48) == one_shot, "tiles of two segments"


def test_halves_of_tiles_of_two_ranks_unless_splitting_along_k_takes_less_time(monkeypatch):
    simulated_hopper(monkeypatch)

    def in_pairs(rows, n, k, ranks):
        x = torch.empty(rows * ranks, k, dtype=torch.bfloat16, device="meta")
        return launch_specialized._is_in_pairs(x, n, ranks, LARGE)

    assert in_pairs(192, 8192, 28672, 8) and in_pairs(192, 8192, 128, 2)
    assert not in_pairs(96, 8192, 28672, 8), "the last tile row of a rank has more than 64 rows"
    assert not in_pairs(192, 4096, 14336, 2)
    with tdkernels.batch_invariant():
        assert in_pairs(192, 4096, 14336, 2)


def test_modelled_entries_rank_between_current_and_older_measurements(monkeypatch):
    tuned, device = tunable("gemm_rs"), torch.device("cpu")
    current = versions(tuned)
    mine = []

    def entry(item_tiles, kernels, day, modelled=False):
        config = asdict(tdkernels.GemmRsConfig(tiles=tdkernels.Tiles(16, 16, 16), item_tiles=item_tiles))
        kernels = {**current, "kernels": kernels}
        return make_entry("gemm_rs", config=config, versions=kernels, modelled=modelled, when=f"2026-01-{day:02}")

    older, now, model = entry(1, "older", 8), entry(2, current["kernels"], 8), entry(3, "older", 9, modelled=True)
    monkeypatch.setattr(disk_cache, "user_entries", lambda *name: mine)

    def selected(*entries, shape=older.problem.shape):
        monkeypatch.setattr(disk_cache, "shipped_entries", lambda *name: list(entries))
        choice = selection.look_up(tuned, replace(older.problem, shape=shape), device, "cached")
        return choice.config.item_tiles, choice.source

    assert selected(older) == (1, "shipped")
    assert selected(older, model) == selected(model, older) == selected(model) == (3, "modelled")
    assert selected(older, now, model) == selected(model, now) == (2, "shipped")
    for day in (9, 10):  # measured when the model was, or later
        later = replace(older, when=f"2026-01-{day:02}")
        assert selected(later, model) == selected(model, later) == (1, "shipped")
    assert selected(replace(now, versions={**now.versions, "torch": "older"}), model) == (2, "shipped")
    near = (8192, 4096, 8192)
    assert selected(model, shape=near) == (3, "nearest")
    for kernels in ("0000", "zzzz"):  # the order of the hashes does not matter
        other = replace(older, versions={**current, "kernels": kernels})
        assert selected(other, model, shape=near) == selected(model, other, shape=near) == (3, "nearest")
    mine.append(now)
    assert selected(model) == (2, "cache")
    assert selected(older, model, shape=near) == (2, "nearest")


def test_nearest_shape_without_a_gain(monkeypatch):
    """If ``prefers_default``, the config of another shape is used only if it was clearly faster than the default."""
    tuned, device = tunable("gemm_rs"), torch.device("cpu")
    config = asdict(tdkernels.GemmRsConfig(tiles=tdkernels.Tiles(16, 16, 16), item_tiles=3))
    entry = make_entry("gemm_rs", config=config, versions=versions(tuned))
    near = replace(entry.problem, shape=(8192, 4096, 8192))
    default = tuned.default(near, device)
    assert tunable("group_gemm").prefers_default
    timed = replace(entry, default_ms=entry.ms / 0.99)
    monkeypatch.setattr(disk_cache, "shipped_entries", lambda *name: [timed])
    assert selection.look_up(tuned, near, device, "cached").source == "nearest"
    monkeypatch.setattr(type(tuned), "prefers_default", True)
    # Of equal times the config was the default then, which may be another one now.
    for share, is_used in ((None, True), (0.9, True), (0.969, True), (0.971, False), (0.999, False), (1.0, True)):
        timed = replace(entry, default_ms=None if share is None else entry.ms / share)
        monkeypatch.setattr(disk_cache, "shipped_entries", lambda *name, timed=timed: [timed])
        choice = selection.look_up(tuned, near, device, "cached")
        assert choice.source == ("nearest" if is_used else "default")
        assert choice.config == (tuned.config_from_dict(config) if is_used else default)
        assert selection.look_up(tuned, entry.problem, device, "cached").source == "shipped"
