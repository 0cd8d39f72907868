"""Benchmarks of ag_attention and ulysses: shapes, methods, checks, rows, command and report."""

import contextlib
import dataclasses
import functools
import json
import math

import pytest
import torch
import torch.distributed as dist

import tdkernels
from bench import run as bench_run
from bench.attention import ag_attention, ag_attention_methods, ulysses
from bench.attention import report as attention_report
from bench.attention.shapes import AttentionShape, parse
from bench.core import measure, multi_method, points
from bench.dense.shapes import Shape
from bench.report import main as report
from tdkernels.__main__ import main
from tests.support.ranks import DEVICE, on_ranks

ON_GPU = DEVICE == "cuda"
SHAPE = AttentionShape(64, 4, 2, 64, "tiny") if ON_GPU else AttentionShape(12, 2, 1, 16, "tiny")
GEMM_SHAPE = Shape(64, 64, 64, "tiny") if ON_GPU else Shape(8, 8, 16, "tiny")
PLAN = measure.Plan(rounds=1, burst_ms=0, peers=("sdpa-flash", "sdpa-cudnn"), overrides=({"nope": 1},))
UNKNOWN = 'tdkernels c1 {"nope": 1}'
MACHINE = {"gpu": "NVIDIA Testing", "num_gpus": 2, "driver": "1.2", "torch": "2.99", "triton": "3.99", "nccl": "2.0",
           "multicast": "off", "git": "0123456789abcdef"}


def attention_case(shape=SHAPE, ranks=2, sharding="zigzag", backward=True):
    return ag_attention.Case(shape, ranks, sharding, backward)


# ---- shapes ----


def test_shapes_by_name_and_by_size():
    all_shapes = parse(None, None, ["ag_attention", "ulysses_qkv", "ulysses_out"])
    heads = {(shape.heads, shape.kv_heads, shape.dim) for shape in all_shapes["ag_attention"]}
    assert heads == {(32, 8, 128), (32, 32, 128)}
    assert {shape.tokens for shape in all_shapes["ag_attention"]} == {8192, 32768, 65536, 131072}
    sizes = {name: {(s.m, s.n, s.k) for s in shapes} for name, shapes in all_shapes.items() if name != "ag_attention"}
    assert sizes == {
        "ulysses_qkv": {(m, n, k) for m in (8192, 32768) for n, k in ((6144, 4096), (10240, 8192))},
        "ulysses_out": {(m, n, n) for m in (8192, 32768) for n in (4096, 8192)},
    }
    selected = parse("h32-kv8,16x4x2x32,8x4x6", [512, 1024], ["ag_attention", "ulysses_out"])
    assert [str(shape) for shape in selected["ag_attention"]] == ["512x32x8x128", "1024x32x8x128", "16x4x2x32"]
    assert selected["ulysses_out"] == [Shape(8, 4, 6)]


def test_why_not_names_the_reason():
    assert attention_case().why_not() is None
    assert "6 tokens are not divisible by 4 chunks" in attention_case(AttentionShape(6, 2, 1, 16)).why_not()
    assert attention_case(AttentionShape(6, 2, 1, 16), sharding="contiguous").why_not() is None
    assert "3 query heads are not divisible by 2 kv heads" in attention_case(AttentionShape(8, 3, 2, 16)).why_not()
    assert attention_case(ranks=1).why_not() == "zigzag sharding needs at least two ranks"
    assert "N = 9 is not divisible by 2 ranks" in ulysses.Case("ulysses_qkv", Shape(8, 9, 3), 2).why_not()
    assert "K = 3 is not divisible by 2 ranks" in ulysses.Case("ulysses_out", Shape(8, 9, 3), 2).why_not()
    assert ulysses.Case("ulysses_out", GEMM_SHAPE, 1).why_not() == "one rank has nothing to exchange"


def test_flops_and_wire_bytes_of_a_pass():
    case = attention_case(AttentionShape(1024, 32, 8, 128), 4)
    scores = 1024 * 1024 / 2 * 32  # scores visible under the mask
    assert case.flops("forward") == 2 * 2 * scores * 128 / 4 and case.flops("backward") == 2.5 * case.flops("forward")
    assert case.wire_bytes("forward") == case.wire_bytes("backward") == 3 * 256 * 8 * 128 * 2 * 2
    qkv, out = (ulysses.Case(operator, Shape(64, 48, 32), 4) for operator in ulysses.OPERATORS)
    assert qkv.flops("forward") == out.flops("forward") == 2 * 16 * 48 * 32 == qkv.flops("backward") / 2
    assert qkv.wire_bytes("forward") == 3 * 16 * 12 * 2 and out.wire_bytes("backward") == 3 * 16 * 8 * 2


def test_long_sequences_check_some_heads_only():
    checked = [attention_case(AttentionShape(tokens, 32, 8, 128)).checked for tokens in (8192, 32768, 65536, 1 << 17)]
    assert checked == [8, 2, 1, 1]
    case = attention_case(AttentionShape(65536, 32, 8, 128))
    q, k = torch.randn(1, 3, 32, 2), torch.randn(1, 3, 8, 2)
    some_q, some_k = ag_attention_methods._checked(case, q, k)
    assert torch.equal(some_q, q[:, :, 28:]) and torch.equal(some_k, k[:, :, 7:])


# ---- measuring ----


def measure_attention(sharding):
    return ag_attention.measure(attention_case(sharding=sharding), PLAN)


@pytest.mark.parametrize("sharding", ag_attention.SHARDINGS)
def test_every_pass_of_ag_attention_is_checked_and_timed(sharding):
    measured = on_ranks(2, measure_attention, sharding)[0]
    case = attention_case(sharding=sharding)
    kernels = {"sdpa-flash", "sdpa-cudnn"} if ON_GPU else {"sdpa"}
    names = {"collective", "tdkernels"} | {f"{kind} {name}" for kind in ("attention", "sequence") for name in kernels}
    timed = {key for key, _, times in measured if times.get("ms")}
    assert timed == {(part, name) for part in ("forward", "backward") for name in names}
    assert {key for key, _, times in measured if times.get("absent")} == {(part, UNKNOWN) for part in case.parts}
    rows = ag_attention.rows(case, measured, 400.0)
    assert json.loads(json.dumps(rows)) == rows and {row["sharding"] for row in rows} == {sharding}
    for part in case.parts:
        ms = {row["method"]: row["ms"] for row in rows if row["pass"] == part}
        row = next(row for row in rows if (row["pass"], row["method"]) == (part, "tdkernels"))
        assert math.isclose(row["speedup"] * row["ms"], min(ms[f"sequence {name}"] for name in kernels))
        floor = max(min(ms[f"attention {name}"] for name in kernels), case.wire_bytes(part) / 400e6)
        assert math.isclose(row["efficiency"] * row["ms"], floor) and row["config"]["method"] == "fused"


def measure_ulysses(operator):
    return ulysses.measure(ulysses.Case(operator, GEMM_SHAPE, 2, True), PLAN)


@pytest.mark.parametrize("operator", ulysses.OPERATORS)
def test_every_pass_of_ulysses_is_checked_and_timed(operator):
    measured = on_ranks(2, measure_ulysses, operator)[0]
    case = ulysses.Case(operator, GEMM_SHAPE, 2, True)
    timed = {key for key, _, times in measured if times.get("ms")}
    assert timed == {
        (part, name) for part in case.parts for name in ("gemm", "collective", "sequence", "tdkernels")
    }
    rows = ulysses.rows(case, measured, 400.0)
    assert json.loads(json.dumps(rows)) == rows and {row["pass"] for row in rows} == {"forward", "backward"}
    for row in rows:
        if row["method"] == "tdkernels":
            assert row["config"]["tiles"] and row["speedup"] and row["efficiency"] and row["tflops"]


def _masked_scores(q, keys, causal):
    scores = q @ keys.transpose(2, 3) * q.shape[3] ** -0.5
    rows, columns = scores.shape[2:]
    visible = torch.ones(rows, columns, dtype=torch.bool, device=q.device).tril(columns - rows)
    return scores.masked_fill(~visible, float("-inf")) if causal else scores


def _kernel_forward(q, k, v, causal):
    scores = _masked_scores(q, k, causal)
    return scores.softmax(3) @ v, scores.logsumexp(3), ["kept"]


def _kernel_backward(do, q, k, v, o, lse, rest, causal):
    assert rest == ["kept"]
    weights = (_masked_scores(q, k, causal) - lse[..., None]).exp()
    dscores = weights * (do @ v.transpose(2, 3) - (do * o).sum(3, keepdim=True)) * q.shape[3] ** -0.5
    return dscores @ k, dscores.transpose(2, 3) @ q, weights.transpose(2, 3) @ do


def compare_kernel_attention(sharding):
    """Compare attention composed of kernel calls with exact results in fp32, for both alignments of the causal mask."""
    case = attention_case(AttentionShape(24, 2, 2, 16), dist.get_world_size(), sharding)
    s = case.inputs(0)
    for name in ("q", "k", "v", "do"):
        setattr(s, name, getattr(s, name).float())
    ag_attention_methods.add_alone(case, s)
    results = []
    for part in case.parts:
        with torch.no_grad():
            expected = ag_attention_methods.exact(case, part, s)
        for lower_right in (True, False):
            attend = ag_attention_methods._by_kernel(_kernel_forward, _kernel_backward, lower_right)
            attend = functools.partial(attend, ag_attention_methods.chunk_starts(case))
            for build in (ag_attention_methods.alone, ag_attention_methods.sequence):
                method = build(case, part, attend)
                with torch.no_grad():
                    close = [
                        torch.allclose(got, exact, atol=1e-5)
                        for got, exact in zip(method.plain(method.call(s)), expected, strict=True)
                    ]
                results.append((part, lower_right, build.__name__, close))
    return results


@pytest.mark.parametrize("sharding", ag_attention.SHARDINGS)
def test_attention_of_a_shard_composed_of_kernels(sharding):
    for results in on_ranks(2, compare_kernel_attention, sharding):
        assert len(results) == 8 and all(all(close) for *_, close in results), results


def find_wrong_methods():
    """Return the verdicts on a correct method, one that is 10% off, and one that fails."""
    case = attention_case(sharding="contiguous")
    with torch.no_grad():
        references = ag_attention._references(case, "forward", [case.inputs(0)])
        correct = ag_attention_methods.sequence(case, "forward", *ag_attention_methods.attentions(case, ()).values())
        wrong = dataclasses.replace(correct, call=lambda s: [1.1 * o for o in correct.call(s)])
        fails = dataclasses.replace(correct, call=lambda s: [][1])
        methods = correct, wrong, fails
        verdicts = [multi_method.absent_reason("sequence sdpa-cudnn", method, references) for method in methods]
        for name, method in (("tdkernels", wrong), ('tdkernels c1 {"block_q": 32}', wrong), ("sequence", fails)):
            try:
                verdicts.append(multi_method.absent_reason(name, method, references))
            except RuntimeError as error:
                verdicts.append(str(error))
    return verdicts


def test_wrong_results_are_not_timed():
    correct, wrong, fails, *errors = on_ranks(2, find_wrong_methods)[0]
    assert correct is None and wrong.startswith("wrong: relative errors") and "list index out of range" in fails
    assert [text.partition(":")[0] for text in errors] == ["tdkernels", 'tdkernels c1 {"block_q"', "sequence"]


# ---- the command ----


def test_operators_exist_in_the_library():
    assert {*ag_attention.OPERATORS, *ulysses.OPERATORS} <= set(tdkernels.__all__)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["ag_attention", "ag_gemm"], "cannot be combined with other operators"),
        (["ag_attention", "--shapes", "8x8x8"], "'8x8x8' is neither SxHqxHkvxD nor one of h32-kv8, h32-kv32"),
        (["ulysses_qkv", "--shapes", "h32-kv8"], "'h32-kv8' is neither MxNxK nor one of hidden-4096, hidden-8192"),
        (["ag_attention", "--sharding", "striped"], "--sharding must be some of zigzag, contiguous, not 'striped'"),
        (["ag_attention", "--tokens", "8K"], "--tokens must be whole numbers"),
        (["ulysses_qkv", "--nproc", "1"], "--nproc must be at least 2 ranks, not 1"),
    ],
)
def test_bench_rejects_invalid_arguments(arguments, message, capsys):
    assert main(["bench", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_rehearsal_writes_no_files(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(bench_run.torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(bench_run, "RankPool", lambda *_, **__: contextlib.nullcontext())
    monkeypatch.setattr(bench_run.sequence_shapes, "REHEARSAL", {"ag_attention": [SHAPE]})
    monkeypatch.setattr(bench_run, "_measure_all", lambda pool, cases, *_: (print(*cases, sep="\n"), ([], []))[1])
    assert main(["bench", "ag_attention", "--sharding", "contiguous", "--out", str(tmp_path)]) == 0
    output = capsys.readouterr().out
    assert output.startswith("Rehearsal on 2 CPU ranks,") and f"ag_attention {SHAPE} tiny contiguous\n" in output
    assert "zigzag" not in output and not [*tmp_path.iterdir()]


# ---- the report ----


def rows_of(module, case, date="2026-01-02", **ms):
    """Return the rows of one run; ``ms`` gives times by pass and method."""
    measured = [
        ((part, name), False, {"ms": time} if time else {"absent": "why"})
        for part, times in ms.items() for name, time in times.items()
    ]
    return [{**row, **MACHINE, "date": date} for row in module.rows(case, measured, 400.0)]


def line(text, heading, start):
    part = text[text.index(heading) :]
    found = next(row for row in part.splitlines() if row.startswith(f"| {start} |"))
    return [cell.strip() for cell in found.strip("|").split("|")]


@pytest.fixture
def folder(tmp_path):
    times = {"collective": 0.1, "attention sdpa-flash": 1.5, "attention sdpa-cudnn": 1.0, "sequence sdpa-flash": 1.75,
             "sequence sdpa-cudnn": 2.0, "tdkernels": 1.25, 'tdkernels c1 {"block_q": 64}': 0.1}
    case = attention_case(AttentionShape(8192, 32, 8, 128, "h32-kv8"))
    rows = rows_of(ag_attention, case, forward=times, backward={**times, "tdkernels": 2.5})
    rows += rows_of(ag_attention, case, forward={**times, "tdkernels": 9.0}, date="2026-01-01")
    failed = {**times, "sequence sdpa-flash": None, "sequence sdpa-cudnn": None, "tdkernels": None}
    case = attention_case(AttentionShape(1024, 32, 8, 128), sharding="contiguous")
    rows += rows_of(ag_attention, case, forward=failed)
    gemm = {"gemm": 0.5, "collective": 0.2, "sequence": 0.75, "tdkernels": 0.6}
    rows += rows_of(ulysses, ulysses.Case("ulysses_out", Shape(8192, 4096, 4096), 2), backward=gemm)
    path = tmp_path / "results" / "testingx2" / "sequences.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "results"


def test_tables_show_the_newest_runs_and_the_fastest_kernels(folder):
    text = attention_report.text(points.read_sequences(folder))
    # Keys and values of the other rank: 4096 x 8 x 128 x 2 x 2 bytes = 16.8 MB, at 400 GB/s.
    forward = line(text, "### ag_attention, zigzag, forward, 2 x NVIDIA Testing", "8K")
    rate = f"{2 * 8192**2 * 32 * 128 / 2 / 1.25e-3 / 1e12:.0f}"
    assert forward == ["8K", "1.000", "0.100", "1.750", "1.250", rate, "0.042", "1.40", "0.80", "sdpa-flash"]
    backward = line(text, "### ag_attention, zigzag, backward", "8K")
    assert backward[4] == "2.500" and backward[7:9] == ["0.70 ▼", "0.40"]
    missing = line(text, "### ag_attention, contiguous, forward", "1K")
    assert missing == ["1K", "1.000", "0.100", "–", "0.005", "–", "–", "–"], "unmeasured methods have no column"
    out = line(text, "### ulysses_out, backward", "8192x4096x4096")
    assert out[1:5] == ["0.500", "0.200", "0.750", "0.600"] and out[-2:] == ["1.25", "0.83"]
    assert "32 / 8 heads of 128, causal" in text and "c1" not in text
    assert attention_report.text([]) == ""


def test_report_has_the_section(folder):
    assert points.read(folder) == [] and points.read_layers(folder) == []
    assert report.main(folder, folder) == 0
    assert "# Attention" in (folder / "tables" / "attention.md").read_text()
    assert "(tables/attention.md)" in (folder / "README.md").read_text()
