"""Benchmark of whole models: rehearsals in each framework, methods that fail, and the page of the report."""

import importlib.metadata
import json
import sys
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from bench.models import __main__ as program
from bench.models import measure, torch_methods
from bench.models.cases import METHODS, Case
from bench.report import main as report
from bench.report import rows as all_rows
from tests.support.ranks import on_ranks

FIELDS = {
    "op", "what", "framework", "method", "phase", "size", "layers", "tokens", "batch", "context", "dtype", "version",
    "ms", "host_ms", "burst", "graph", "note", "absent", "error", "peak_bytes", "link_gbps", "rounds", "git", "date",
    "gpu", "num_gpus", "driver", "torch", "triton", "nccl", "multicast",
}
TINY = dict(size="rehearsal", layers=1, tokens=8, batch=2, context=4, ranks=2, dtype=torch.float32)
PLAN = measure.Plan(rounds=1, burst_ms=0.0)

# ---- rehearsals ----


def rehearse(framework, phases, tmp_path, monkeypatch):
    """Run the program on CPU ranks. Return {phase: {method: row}}."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert program.main(["--frameworks", framework, "--out", str(tmp_path)]) == 0
    rows = [json.loads(line) for line in (tmp_path / "cpux2" / "models.jsonl").read_text().splitlines()]
    assert all(row.keys() == FIELDS and row["framework"] == framework for row in rows)
    found = {phase: {row["method"]: row for row in rows if row["phase"] == phase} for phase in phases}
    for phase, by_method in found.items():
        assert {*by_method} == {*METHODS[framework]}, phase
        for name, row in by_method.items():
            assert row["absent"] is None and row["ms"] > 0 and not row["graph"], row
            assert row["error"] is None if name == "no communication" else row["error"] < 1e-5, row
    assert sum(map(len, found.values())) == len(rows)
    return found


def test_torch(tmp_path, monkeypatch):
    found = rehearse("torch", ("prefill", "train", "decode"), tmp_path, monkeypatch)
    decode, train = found["decode"]["nccl"], found["train"]["nccl"]
    assert (decode["tokens"], decode["batch"], decode["context"]) == (1, 2, 16)
    assert (train["tokens"], train["batch"], train["context"]) == (32, 2, None)
    assert train["version"] == importlib.metadata.version("torch")


def test_transformers(tmp_path, monkeypatch):
    pytest.importorskip("transformers", minversion="5.23")
    rehearse("transformers", ("prefill", "train", "decode"), tmp_path, monkeypatch)


def test_megatron(tmp_path, monkeypatch):
    pytest.importorskip("megatron.core")
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    rehearse("megatron", ("prefill", "train"), tmp_path, monkeypatch)
    assert program.os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "8"


def test_rehearsal_writes_nothing_without_out(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(program, "append", mock.Mock(side_effect=AssertionError))
    assert program.main(["--frameworks", "torch", "--phases", "decode"]) == 0
    output = capsys.readouterr().out
    assert "times are meaningless" in output and "nccl: " in output and "were written" not in output


def test_time_limit(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert program.main(["--frameworks", "torch,megatron", "--seconds", "0"]) == 0
    output = capsys.readouterr().out
    assert "time limit reached: skipped from torch rehearsal prefill" in output and "nccl: " not in output


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--frameworks", "jax"], "--frameworks must be some of torch, transformers, megatron, not 'jax'"),
        (["--phases", "train,test"], "--phases must be some of prefill, train, decode, not 'test'"),
        (["--megatron-tokens", "0"], "--megatron-tokens must be at least 1, not 0"),
    ],
)
def test_invalid_arguments(arguments, message, capsys):
    assert program.main(arguments) == 2
    assert message in capsys.readouterr().err


def test_sizes_on_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    options = program._parser().parse_args(["--size", "70b", "--compile"])
    runs = program._runs(options, rehearsal=False)
    assert [case.tokens for case in runs["torch"]] == [8192] * 3
    assert [case.tokens for case in runs["megatron"]] == [4096] * 2, "decode is skipped"
    assert [len(case.methods) for case in runs["torch"]] == [7, 7, 4]
    options.nproc = 5
    with pytest.raises(ValueError, match="--nproc must be from 2 to 4"):
        program._runs(options, rehearsal=False)
    assert "16 ranks" in Case("torch", "train", **{**TINY, "ranks": 16}).why_not()


# ---- methods that fail ----


def measured(phase="prefill", framework="torch"):
    return {row["method"]: row for row in measure.measure(Case(framework, phase, **TINY), PLAN)}


def one_is_wrong():
    apply = torch_methods._parallelize

    def wrong(model, mesh, plan):
        apply(model, mesh, plan)
        with torch.no_grad():
            model.norm.weight.mul_(1.01)

    with mock.patch.object(torch_methods, "_parallelize", wrong):
        return measured()


def test_wrong_method_is_left_out():
    for found in on_ranks(2, one_is_wrong):
        assert found["tdkernels.nn.parallelize"]["absent"] == "wrong: relative errors output 0.01, the limit is 0.0001"
        assert found["tdkernels.nn.parallelize"]["ms"] is None and found["DTensor"]["ms"] > 0


def own_is_wrong():
    with mock.patch.object(torch_methods, "add_collectives", lambda model, sequence_parallel: None):
        return measured("decode")


def test_own_method_may_be_wrong():
    found = on_ranks(2, own_is_wrong)[0]
    assert found["nccl"]["absent"].startswith("wrong: ")
    assert all(found[name]["absent"] is None for name in ("DTensor", "tdkernels.nn.parallelize"))


def one_rank_fails():
    def fails(*args):
        if dist.get_rank() == 1:
            raise ValueError("no\nreason")

    with mock.patch.object(torch_methods, "_parallelize", fails):
        return measured("train")


def test_failure_of_one_rank_is_known_to_all():
    results = on_ranks(2, one_rank_fails)
    reasons = [found["tdkernels.nn.parallelize"]["absent"] for found in results]
    assert reasons == ["failed on another rank", "ValueError: no"]
    merged = measure.first_reasons([[*found.values()] for found in results])
    assert [row["absent"] for row in merged] == [None, None, None, "ValueError: no"]


def runs_torch():
    with mock.patch.object(torch_methods, "_parallelize", lambda *args: torch_methods.parallelize_module(*args)):
        return measured()


def test_method_without_operators_is_left_out():
    reason = on_ranks(2, runs_torch)[0]["tdkernels.nn.parallelize"]["absent"]
    assert "layers.0.attention.wq runs no operator of tdkernels" in reason


def without_transformers():
    with mock.patch.dict(sys.modules, transformers=None):
        return measured(framework="transformers")


def test_missing_package():
    found = on_ranks(2, without_transformers)[0]
    assert {*found} == {*METHODS["transformers"]}
    assert all(row["absent"].startswith("ModuleNotFoundError") for row in found.values())


# ---- the report ----

MACHINE = {"gpu": "NVIDIA Testing", "num_gpus": 2, "driver": "1.2", "torch": "2.99", "triton": "3.99", "nccl": "2.0",
           "multicast": "off", "git": "0123456789abcdef", "rounds": 7}


def run_of(framework, phase, times, date="2026-01-02", graph=False, absent=()):
    """Return the rows of one run: {method: ms} and {method: reason for absence}."""
    case = Case(framework, phase, "8b", 2, tokens=8192, batch=64, context=2048, ranks=2)
    found = [measure._row(name, graph, ms=ms, host_ms=ms, error=0.001, peak_bytes=2**30) for name, ms in times.items()]
    found += [measure._row(name, graph, absent=reason) for name, reason in dict(absent).items()]
    return [{**row, **MACHINE, "date": date} for row in measure.rows(case, found, 400.0)]


def test_report(tmp_path):
    ours, fast = "tdkernels.nn.parallelize", "compile + symm_mem.install"
    rows = [
        *run_of("torch", "prefill", {"nccl": 9.0, ours: 1.0}, date="2026-01-01"),
        *run_of("torch", "prefill", {"no communication": 1.5, "nccl": 3.0, ours: 2.0}, absent={"DTensor": "no reason"}),
        *run_of("torch", "train", {"nccl": 6.0, ours: 4.0, "compile + async TP": 4.5, fast: 3.0}),
        *run_of("torch", "train", {"nccl": 5.0, ours: 4.0}, graph=True),
        *run_of("torch", "decode", {"nccl": 0.5, ours: 0.4}, graph=True),
        *run_of("torch", "decode", {"nccl": 1.0, ours: 2.0}),
        *run_of("transformers", "decode", {"transformers": 3.0, "install": 2.5, "parallelize": 2.0}),
        *run_of("megatron", "train", {}, absent={"megatron": "not installed", "tdkernels": "not installed"}),
    ]
    next(row for row in rows if row["method"] == fast)["note"] = "8 fused"
    (tmp_path / "testingx2").mkdir()
    (tmp_path / "testingx2" / "models.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pages = report.pages(all_rows.read(tmp_path))
    assert "- [Models](tables/models.md)" in pages["README.md"]
    text = pages["tables/models.md"]
    title = "### Llama-8b, {}, 2 x NVIDIA Testing\n"
    torch_part, rest = text.split(title.format("transformers"))
    for line in (
        "| phase | no communication | nccl | tdkernels.nn.parallelize | compile + async TP | "
        "compile + symm_mem.install | x own | x async TP |",
        "| prefill, 8192 tokens | 1.500 | 3.000 | 2.000 | – | – | 1.50 | – |",
        "| train, 8192 tokens | – | 6.000 | 4.000 | 4.500 | 3.000 | 1.50 | 1.50 |",
        "| train, 8192 tokens, CUDA graph | – | 5.000 | 4.000 | – | – | 1.25 | – |",
        "| decode, 64 x 2048 keys | – | 1.000 | 2.000 | – | – | 0.50 ▼ | – |",
        "| decode, 64 x 2048 keys, CUDA graph | – | 0.500 | 0.400 | – | – | 1.25 | – |",
        f"- train, 8192 tokens: **{fast}**: 8 fused",
        "- prefill, 8192 tokens: **DTensor** is absent: no reason",
    ):
        assert line in torch_part.splitlines(), line
    assert title.format("torch") in torch_part and "9.000" not in text, "the newest run counts"
    assert "| decode, 64 x 2048 keys | 3.000 | 2.500 | 2.000 | 1.50 |" in rest
    part = rest.split(title.format("megatron"))[1]
    assert "- train, 8192 tokens: **megatron** is absent: not installed" in part and "|" not in part
