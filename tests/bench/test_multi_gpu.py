"""The runner of the benchmarks for several GPUs, with stages that need none."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench.core import progress
from bench.multi_gpu import tuning_rows
from bench.multi_gpu.__main__ import Run, main
from bench.multi_gpu.stages import Program, Stage, stages
from tdkernels.autotune.problem import Problem
from tdkernels.autotune.table import Entry, to_json
from tdkernels.cli.parser import make_parser

ROOT = Path(__file__).parents[2]
_APPEND = "import sys; open(sys.argv[1], 'a').write('x')"


def _python(name, code, *arguments, **fields):
    return Program(name, ("-c", code, *arguments), limited=False, out=False, **fields)


def test_finished_stages_are_not_repeated(tmp_path, capsys):
    file = tmp_path / "runs"
    stage = Stage("one", 20, (_python("a", _APPEND, str(file)), _python("b", _APPEND, str(file))))
    assert Run(tmp_path / "out", None).all([stage]) == 0
    assert Run(tmp_path / "out", None).all([stage]) == 0
    assert file.read_text() == "xx"
    assert "one: finished before" in capsys.readouterr().out


def test_program_that_is_cut_off_is_repeated(tmp_path):
    file = tmp_path / "runs"
    code = f"{_APPEND}; import time; time.sleep(60 if open(sys.argv[1]).read() == 'x' else 0)"
    stage = Stage("slow", 2, (_python("a", code, str(file)),))
    assert Run(tmp_path / "out", None).all([stage]) == 1
    assert json.loads((tmp_path / "out" / "stages.json").read_text())["slow"]["codes"] == {"a": None}
    assert Run(tmp_path / "out", None).all([stage]) == 0
    assert file.read_text() == "xx"


def test_program_that_stops_at_its_limit_is_repeated(tmp_path, capsys):
    """A program that leaves out cases exits with 0. The next run measures only the rest."""
    code = (
        "from bench.core import progress; cases = progress.left(['a', 'b'])\n"
        "progress.add(cases[0]); print(cases, flush=True)\n"
        "if len(cases) > 1: progress.cut_off()"
    )
    stage = Stage("some", 20, (_python("p", code),))
    Run(tmp_path, None).all([stage])
    assert not Run(tmp_path, None).state["some"]["finished"]
    assert "cut off: p" in capsys.readouterr().out
    Run(tmp_path, None).all([stage])
    assert Run(tmp_path, None).state["some"]["finished"]
    assert (tmp_path / "logs" / "some-p.log").read_text() == "['a', 'b']\n['b']\n"


def test_programs_end_with_the_runner(tmp_path):
    code = (
        "import bench.multi_gpu.__main__ as runner\nfrom bench.multi_gpu.stages import Program, Stage\n"
        "sleep = 'import os, time; print(os.getpid(), flush=True); time.sleep(60)'\n"
        "runner.torch.cuda.device_count = lambda: 2\n"
        "runner.stages = lambda gpus: [Stage('s', 60, (Program('p', ('-c', sleep), limited=False, out=False),))]\n"
        f"runner.main(['--out', {str(tmp_path)!r}])"
    )
    runner = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    log = tmp_path / "logs" / "s-p.log"
    wait_for(lambda: log.exists() and log.read_text().endswith("\n"))
    pid = int(log.read_text())
    runner.terminate()
    assert runner.wait(timeout=20) == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def wait_for(condition, seconds=30.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_failed_program_is_reported_and_not_repeated(tmp_path):
    stage = Stage("bad", 20, (_python("a", "raise SystemExit(3)"),))
    assert Run(tmp_path, None).all([stage]) == 1
    assert Run(tmp_path, None).state["bad"] == {"finished": True, "codes": {"a": 3}, "seconds": pytest.approx(1, abs=9)}


def test_stage_without_enough_time_is_not_started(tmp_path, capsys):
    assert Run(tmp_path, 5.0).all([Stage("long", 6, ()), Stage("short", 1, ())]) == 0
    assert "long: not started" in capsys.readouterr().out
    assert list(json.loads((tmp_path / "stages.json").read_text())) == ["short"]


def test_programs_get_their_gpus_and_a_cache_of_their_own(tmp_path):
    names = "CUDA_VISIBLE_DEVICES", "TDKERNELS_CACHE_DIR", "NCCL_NVLS_ENABLE"
    code = f"import os; print(*(os.environ[name] for name in {names}))"
    Run(tmp_path, None).all([Stage("s", 20, (_python("p", code, gpus=(2, 3)),))])
    assert (tmp_path / "logs" / "s-p.log").read_text() == f"2,3 {tmp_path / 'tuned'} 0\n"


@pytest.mark.parametrize("gpus", [2, 4, 8])
def test_commands_are_valid(gpus):
    """The arguments of every command of tdkernels are accepted, and programs do not share GPUs."""
    names = set()
    for stage in stages(gpus):
        assert stage.name not in names
        names.add(stage.name)
        used = [gpu for program in stage.programs for gpu in program.gpus or range(gpus)]
        assert len(used) == len(set(used)) and max(used) < gpus, f"programs of {stage.name} share a GPU"
        for program in stage.programs:
            command = program.command("out", stage.seconds)[1:]
            if "--nproc" in command:
                assert int(command[command.index("--nproc") + 1]) == len(program.gpus)
            if command[:2] == ["-m", "tdkernels"]:
                make_parser("0").parse_args(command[2:])


def test_cases_that_are_done_are_skipped(tmp_path, monkeypatch):
    assert progress.left([1, 2]) == [1, 2]
    progress.add(1)  # without the variable nothing is kept
    monkeypatch.setenv(progress.VARIABLE, str(tmp_path / "done"))
    assert progress.left([1, 2]) == [1, 2]
    progress.add(2)
    assert progress.left([1, 2, 3]) == [1, 3]


@pytest.mark.parametrize("arguments, message", [
    (["--stages", "nothing", "--gpus", "8", "--dry-run"], "--stages must be some of tune-models,"),
    (["--gpus", "1", "--dry-run"], "at least 2 GPUs are needed"),
    (["--gpus", "8"], "--gpus can only be used with --dry-run"),
])
def test_invalid_arguments(tmp_path, capsys, arguments, message):
    assert main(["--out", str(tmp_path), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_rows_of_tuned_configs(tmp_path):
    problem = Problem("gemm_rs", "NVIDIA H200", 8, 8, "bfloat16", "nk", (8192, 8192, 28672))
    entry = Entry(problem, {}, {"method": "fused"}, 2.0, 3.0, 2.5, 1.5, 1.0, "2026-01-02")
    file = tmp_path / "tuned" / "nvidia-h200" / "gemm_rs.json"
    file.parent.mkdir(parents=True)
    file.write_text(to_json([entry]))
    machine = dict.fromkeys(("driver", "torch", "triton", "nccl", "multicast", "git"), "v")
    rows = tmp_path / "h200x8" / "ag_gemm.jsonl"
    rows.parent.mkdir()
    rows.write_text(json.dumps({"gpu": "NVIDIA H200", "num_gpus": 8, **machine}) + "\n")
    assert tuning_rows.main(tmp_path) == 0
    row = json.loads((tmp_path / "h200x8" / "tuning.jsonl").read_text())
    assert (row["op"], row["shape"], row["n"]) == ("gemm_rs", "8192x8192x28672", 8192)
    assert (row["speedup"], row["efficiency"], row["date"]) == (1.5, 0.75, "2026-01-02")
