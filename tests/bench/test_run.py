"""Benchmark runner: shapes, measurement of methods and peers, CUDA graphs, and the command."""

import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import tdkernels
from bench import run as bench_run
from bench.collectives import cases as collectives
from bench.collectives import norm
from bench.core import graphs, harness, measure
from bench.dense import peers
from bench.dense.operators import Case
from bench.dense.shapes import DEFAULT_GROUPS, GROUPS, Shape, select
from tdkernels.__main__ import main
from tdkernels.autotune.timing import LEAD_CALLS
from tdkernels.cli import bench
from tests.support.programs import run_without_gpus
from tests.support.ranks import DEVICE, device, on_ranks
from tests.support.simulated_nodes import thorough

ROOT = Path(__file__).parents[2]

# ---- shapes ----


def test_groups_contain_commonly_used_shapes():
    assert {(s.m, s.n, s.k) for s in GROUPS["ar"]["gemm_ar"]} == {
        (32, 5120, 25600), (2048, 5120, 25600), (28000, 7168, 4096), (8192, 8192, 28672)
    }
    decode = select(["decode"], "gemm_ar")
    assert {s.m for s in decode} == {1, 2, 4, 8, 16, 32, 64, 128, 256, 512}
    assert {(s.n, s.k) for s in decode} == {(8192, 8192), (8192, 28672)}
    expected = {(11008, 4096), (14336, 4096), (28672, 8192), (53248, 16384), (29568, 8192), (49152, 12288)}
    assert {(s.n, s.k) for s in GROUPS["mlp"]["ag_gemm"]} == expected
    assert {(s.k, s.n) for s in GROUPS["mlp"]["gemm_rs"]} == expected
    for name in ("sweep-8b", "sweep-70b"):
        for operator in ("ag_gemm", "gemm_rs", "gemm_ar"):
            layers = select([name], operator)
            assert {s.m for s in layers} == {2**i for i in range(16)} and len(layers) == 32
    assert {s.m for name in DEFAULT_GROUPS for s in select([name], "ag_gemm")} == {8192}


def test_tokens_apply_to_model_shapes_only():
    selected = select(["seed", "llama-70b", "8x8x8"], "ag_gemm", [16, 32])
    assert sorted({s.m for s in selected if s.name}) == [16, 32]
    assert [(s.m, s.n, s.k) for s in selected if not s.name][-1] == (8, 8, 8)
    assert len([s for s in selected if s.m == 8192]) == 6 and len(selected) == 6 + 2 * 2 + 1


def test_shapes_are_unique():
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
def test_why_not_names_the_indivisible_size(case, reason):
    assert case.why_not() is None if reason is None else reason in case.why_not()


def test_indivisible_shapes_are_skipped_with_a_message(capsys):
    shapes = {"ag_gemm": [Shape(7, 8, 8), Shape(8, 8, 8)], "gemm_ar": [Shape(7, 8, 8)]}
    found = [str(case) for case in bench_run._cases(shapes, 2, backward=True)]
    assert found == ["ag_gemm 8x8x8", "ag_gemm backward 8x8x8", "gemm_ar 7x8x8"]
    output = capsys.readouterr().out
    assert "ag_gemm 7x8x8 is skipped: M = 7" in output
    assert "gemm_ar backward 7x8x8 is skipped: the backward is" in output


def test_bytes_and_flops_per_gpu():
    shape = Shape(8192, 8192, 28672)
    flops = 2 * 8192 * 8192 * 28672 // 4
    received = {"ag_gemm": 8192 * 28672 * 2 * 3 // 4, "gemm_rs": 8192 * 8192 * 2 * 3 // 4}
    for operator, num_bytes in received.items():
        forward, backward = Case(operator, shape, 4), Case(operator, shape, 4, backward=True)
        assert (forward.flops, backward.flops) == (flops, 2 * flops)
        # The backward of AG-GEMM gathers x again and scatters dx. GEMM-RS gathers dz once for both gradients.
        assert (forward.wire_bytes, backward.wire_bytes) == (num_bytes, num_bytes * (2 if operator == "ag_gemm" else 1))
    reduced = Case("gemm_ar", shape, 4)
    assert (reduced.flops, reduced.wire_bytes) == (flops, 2 * received["gemm_rs"])


# ---- measuring ----

TINY = Shape(64, 32, 32)
PLAN = measure.Plan(rounds=1, burst_ms=0)


def by_method(found):
    return {(method, graph): times for method, graph, times in found}


def measure_gemm_ar():
    return measure.measure(Case("gemm_ar", TINY, dist.get_world_size()), PLAN)


def test_gemm_ar_is_measured():
    found = by_method(on_ranks(2, measure_gemm_ar)[0])
    assert {"gemm", "collective", "sequence", "tdkernels"} <= {m for (m, _), times in found.items() if times.get("ms")}


def measure_wrong_method(method):
    case = Case("gemm_rs", TINY, dist.get_world_size())
    peer = peers.Peer(("gemm_rs",), lambda case: lambda s: tdkernels.gemm_rs_ref(s.x, s.weight) * 1.1)
    original = tdkernels.gemm_rs
    peers.PEERS["wrong"] = peer
    if method == "tdkernels":
        tdkernels.gemm_rs = lambda x, weight, config=None: original(x, weight, config=config) * 1.1
    try:
        return measure.measure(case, measure.Plan(rounds=1, burst_ms=0, peers=("wrong",)))
    except RuntimeError as error:
        return str(error)
    finally:
        del peers.PEERS["wrong"]
        tdkernels.gemm_rs = original


def test_wrong_peer_is_absent_and_wrong_tdkernels_stops_the_case():
    found = by_method(on_ranks(2, measure_wrong_method, "peer")[0])
    assert "wrong: relative errors" in found["wrong", False]["absent"]
    assert "tdkernels: wrong: relative errors" in on_ranks(2, measure_wrong_method, "tdkernels")[0]


def find_absent_peers():
    """Return the peers if one fails on rank 1 only; it must be absent on all ranks."""

    def fails_on_one(case):
        if dist.get_rank() == 1:
            raise peers.Absent("not here")
        return lambda s: None

    peers.PEERS["shy"] = peers.Peer(("ag_gemm",), fails_on_one)
    try:
        return peers.calls(Case("ag_gemm", TINY, 2), ["shy"]), peers.calls(Case("gemm_rs", TINY, 2), ["shy"])
    finally:
        del peers.PEERS["shy"]


def test_ranks_agree_on_absent_peers():
    first, second = on_ranks(2, find_absent_peers)
    assert first == (({}, {"shy": "failed on another rank"}), ({}, {}))
    assert second == (({}, {"shy": "not here"}), ({}, {}))


def measure_in_graphs(operator, backward):
    case = Case(operator, Shape(256, 256, 256), dist.get_world_size(), backward)
    return measure.measure(case, measure.Plan(rounds=2, burst_ms=1, peers=tuple(peers.PEERS), cuda_graph=True))


@pytest.mark.skipif(DEVICE == "cpu" or torch.cuda.device_count() < 2, reason="CUDA graphs need GPUs")
@pytest.mark.parametrize("backward", (False, True))
@pytest.mark.parametrize("operator", ("ag_gemm", "gemm_rs"))
def test_methods_are_timed_in_graphs(operator, backward):
    found = by_method(on_ranks(2, measure_in_graphs, operator, backward)[0])
    for method in ("gemm", "collective", "sequence", "tdkernels"):
        assert found[method, True]["ms"] > 0, found[method, True]
        assert found[method, True]["burst"] % graphs._CALLS == 0


class FakeGraph:
    """A stand-in for torch.cuda.CUDAGraph and torch.cuda.graph that captures nothing."""

    def __init__(self, *_, **__):
        pass

    def __enter__(self):
        pass

    def __exit__(self, *exc):
        pass

    def replay(self):
        pass


def capture_fake_graph(num_sets, fault=None):
    """Capture a fake graph; return the order of input sets, the number of calls, and why there is no graph.

    ``fault`` is "raises" (an error on rank 1), "wrong" (wrong results on all ranks) or None.
    """
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
        mock.patch("bench.core.graphs.rank_device", lambda: torch.device("cuda", 0)),
        mock.patch("bench.core.graphs.synchronize", lambda device: None),
    ):
        captured, reason = graphs.capture(call, sets, references)
    return seen[1:], captured and captured.calls, reason


@pytest.mark.parametrize("num_sets, calls", ((2, 8), (3, 9), (8, 8)))
def test_graph_cycles_through_input_sets_and_ends_with_the_first(num_sets, calls):
    for seen, num_calls, reason in on_ranks(2, capture_fake_graph, num_sets):
        assert reason is None and num_calls == len(seen) == calls
        assert seen[-1] == 0 and {seen.count(s) for s in range(num_sets)} == {calls // num_sets}


def test_failed_capture_is_reported_on_all_ranks():
    (_, first, why), (_, second, reason) = on_ranks(2, capture_fake_graph, 2, "raises")
    assert first is second is None
    assert (why, reason) == ("failed on another rank", "RuntimeError: not while capturing")


def test_graph_outputs_are_checked():
    for _, captured, reason in on_ranks(2, capture_fake_graph, 2, "wrong"):
        assert captured is None and "wrong: relative errors" in reason


def time_replayed_calls():
    """Time a method whose ``calls`` is 4; return the times and the number of timed replays."""

    class Replayed:
        calls = 4

        def __init__(self):
            self.count = 0

        def __call__(self, inputs):
            self.count += 1
            time.sleep(0.02)

    single, several = Replayed(), Replayed()
    single.calls = 1
    rounds = 3
    found = harness.time_methods({"single": single, "several": several}, [None], rounds=rounds, burst_ms=0)
    untimed = rounds * LEAD_CALLS if device().type == "cuda" else 0
    return found, several.count - untimed


def test_graph_of_several_calls_is_timed_per_call():
    (found, count), (_, other) = on_ranks(2, time_replayed_calls)
    assert count == other == 3
    assert (found["single"]["burst"], found["several"]["burst"]) == (1, 4)
    assert found["several"]["ms"] < found["single"]["ms"], "its four calls take as long as one"


def test_graph_rows_are_compared_with_graph_rows():
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
        (["ag_gemm", "--shapes", "decode"], "--shapes: decode has no shapes for ag_gemm"),
        (["--peers", "flux"], "--peers must be all, none, or some of torch-fused"),
        (["--peers", "torch-fused,"], "--peers must be all, none"),
        (["--nproc", "1"], "--nproc must be at least 2"),
        (["--nproc", "many"], "--nproc"),
        (["all_gather", "--bytes", "1T"], "--bytes must be sizes such as 64K,1M"),
        (["--rounds", "0"], "--rounds must be at least 1"),
        (["--shapes", "seed", "--tokens", "8"], "--tokens needs a model in --shapes"),
        (["--shapes", "llama-70b", "--tokens", "few"], "--tokens must be whole numbers"),
        (["--shapes", "llama-70b", "--tokens", "0"], "--tokens must be whole numbers"),
        (["--config", "{"], "--config: invalid JSON object"),
        (["--config", "[]"], "--config: invalid JSON object"),
        (["--out", __file__], "is not a folder"),
        (["--report", "--out", "/nowhere"], "--report: there are no rows in /nowhere"),
    ],
)
def test_bench_rejects_invalid_arguments(arguments, message, capsys):
    try:
        code = main(["bench", *arguments])
    except SystemExit as exit:  # raised by argparse
        code = exit.code
    assert code == 2
    assert message in capsys.readouterr().err


def test_bench_outside_the_repository_is_an_error(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(bench, "_ROOT", tmp_path)
    assert main(["bench"]) == 2
    assert "run this in a clone of the repository" in capsys.readouterr().err


def run_python(*arguments, cwd):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=240, env=environment, cwd=cwd
    )
    return run.returncode, run.stdout, run.stderr


def test_rehearsal_measures_all_methods_and_writes_nothing(tmp_path):
    options = ["--peers", "torch-fused", "--cuda-graph", "--shapes", "seed", "--out", str(tmp_path / "out")]
    code, out, err = run_without_gpus(main, ["bench", "gemm_rs", *options], cwd=tmp_path)
    assert code == 0, err
    assert out.startswith("Rehearsal on 2 CPU ranks")
    for method in ("gemm", "collective", "sequence", "tdkernels", "tdkernels-default"):
        assert f"rehearsal │ {method} " in out
    assert "small sizes instead of the requested sizes" in out
    assert "torch-fused (absent: torch's symmetric memory needs GPUs)" in out
    assert "tdkernels (graph) (absent: CUDA graphs need a GPU)" in out
    assert "ag_gemm" not in out
    assert list(tmp_path.iterdir()) == []


@thorough
def test_rehearsal_measures_requested_small_shapes(tmp_path):
    options = ["--peers", "none", "--shapes", "64x32x32"]
    code, out, err = run_without_gpus(main, ["bench", "ag_gemm", *options], cwd=tmp_path)
    assert code == 0, err
    assert re.search(r"│ 64x32x32 +│ tdkernels ", out) and "instead of" not in out and "256x128x128" not in out


def test_rehearsal_of_collectives(tmp_path):
    options = ["--bytes", "1M", "--cuda-graph", "--config", '{"num_programs": 2}', "--out", str(tmp_path / "out")]
    code, out, err = run_without_gpus(main, ["bench", "all_reduce", "all_gather", *options], cwd=tmp_path)
    assert code == 0, err
    for size in ("1K", "16K"):
        for method in ("nccl", "tdkernels", "tdkernels-default", "tdkernels-one-shot", "tdkernels-two-shot"):
            assert f"all_reduce {size}: " in out and re.search(rf"│ {size} +│ {method} +│", out), (size, method)
    assert "tdkernels-copy-engine" in out and 'tdkernels c1 {"num_programs": 2}' in out
    assert "torch-symm-one-shot (absent: torch's symmetric memory needs GPUs)" in out
    assert "gemm" not in out and list(tmp_path.iterdir()) == []


def test_message_sizes_and_wire_bytes():
    assert [collectives.format_size(n) for n in (1 << 10, 1 << 28, 3 << 20, 1000)] == ["1K", "256M", "3M", "1000"]
    assert collectives.parse("1K,256M,1000,1K") == [1 << 10, 1 << 28, 1000]
    assert collectives.SIZES[0] == 1 << 10 and collectives.SIZES[-1] == 256 << 20
    wire = {op: collectives.Case(op, 4096, 4).wire_bytes for op in collectives.OPERATORS}
    assert wire == {"all_gather": 3072, "reduce_scatter": 3072, "all_reduce": 6144}
    assert collectives.Case("reduce_scatter", 1002, 4).why_not() == "1002 bytes are no multiple of 8"
    assert collectives.Case("all_reduce", 1002, 4).why_not() is None


def test_rehearsal_of_norms(tmp_path):
    options = ["--config", '{"num_warps": 2}', "--out", str(tmp_path / "out")]
    code, out, err = run_without_gpus(main, ["bench", "all_reduce_layer_norm", *options], cwd=tmp_path)
    assert code == 0, err
    methods = "sequence", "all-reduce", "tdkernels", "tdkernels-default", "tdkernels-one-shot", "tdkernels-two-shot"
    for shape in ("1x64", "5x48"):
        for method in methods:
            assert f"all_reduce_layer_norm {shape}: " in out and re.search(rf"│ {shape} +│ {method} +│", out), method
    assert "sequence-compiled (absent: " in out and 'tdkernels c1 {"num_warps": 2}' in out
    assert list(tmp_path.iterdir()) == []


def test_shapes_of_norms(capsys):
    assert norm.parse_shapes("16x8192,1x64,16x8192") == [(16, 8192), (1, 64)]
    assert (1, 4096) in norm.SHAPES and (2048, 16384) in norm.SHAPES and len(norm.SHAPES) == 33
    assert norm.Case("all_reduce_rms_norm", 8, 512, 4).wire_bytes == 2 * 3 * 8 * 512 * 2 // 4
    for words, message in (
        (["all_reduce_rms_norm", "--shapes", "16"], "ROWSxHIDDEN such as 16x8192, not '16'"),
        (["all_reduce_rms_norm", "all_reduce"], "all_reduce_rms_norm and all_reduce_layer_norm cannot be combined"),
    ):
        assert main(["bench", *words]) == 2 and message in capsys.readouterr().err


def test_run_py_is_the_bench_command(tmp_path):
    code, _, err = run_python(str(ROOT / "bench" / "run.py"), "--rounds", "0", cwd=tmp_path)
    assert code == 2 and "bench: --rounds must be at least 1, not 0" in err
