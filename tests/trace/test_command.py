"""`python -m tdkernels trace`: arguments, files and printed tables."""

import sys

import pytest

from tdkernels.__main__ import main
from tests.support.programs import run_here
from tests.support.simulated_nodes import thorough

SMALL = ["ag_gemm", "--shape", "128x64x32", "--dtype", "fp32", "--device", "cpu", "--world-size", "2"]


def test_trace_command_writes_files_and_prints_tables(tmp_path):
    pytest.importorskip("matplotlib")
    code, output, errors = run_here(main, ["trace", *SMALL, "--repetitions", "1", "--out", str(tmp_path)])
    assert code == 0, errors
    name = "ag_gemm-128x64x32-float32-cpux2"
    assert sorted(file.name for file in tmp_path.iterdir()) == [f"{name}.json", f"{name}.png"]
    for phrase in ("ag_gemm 128x64x32 float32 on 2 CPU ranks", "multiplies", "idle", "longest waits", "untraced",
                  "clocks agree within", "transport=", "perfetto", f"{name}.png", "times say nothing"):
        assert phrase in " ".join(output.split())  # the title of a narrow table is wrapped
    check_redrawing(tmp_path / f"{name}.json")


def check_redrawing(file):
    plot = file.with_suffix(".png")
    plot.unlink()
    assert main(["trace", "--draw", str(file)]) == 0
    assert plot.stat().st_size > 10_000
    plot.unlink()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib", None)
        assert main(["trace", "--draw", str(file)]) == 1
        assert main(["trace", "--draw", str(file), "--no-picture"]) == 0
    assert not plot.exists()


def test_error_without_matplotlib_names_the_extra(tmp_path, monkeypatch):
    from tdkernels.trace import plot

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(plot.NoMatplotlib, match=r"tdkernels\[bench\]"):
        plot.draw(None, tmp_path / "trace.png")


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "no operator is named; give one of ag_attention, ag_gemm, ep_combine, ep_dispatch,"),
        (["ag_gemm"], "no shape is given"),
        (["nonsense", "--shape", "8x8x8"], "ulysses_out, ulysses_qkv, not 'nonsense'"),
        (["ag_gemm", "--shape", "8x8"], "--shape must be 3 positive whole numbers, MxNxK, not '8x8'"),
        (["ag_gemm", "--shape", "8x0x8"], "--shape must be 3 positive whole numbers"),
        (["moe_ag_gemm", "--shape", "8x8x8"], "--shape must be 5 positive whole numbers, MxNxKxEXPERTSxCHOICES"),
        (["moe_ag_gemm", "--shape", "8x8x8x4x2", "--layout", "nk", "--world-size", "2"], "layout must be one of none"),
        (["ag_gemm", "--shape", "7x8x8", "--world-size", "2"], "M = 7 is not divisible by 2 ranks"),
        (["gemm_rs", "--shape", "8x8x9", "--world-size", "2"], "K = 9 is not divisible by 2 ranks"),
        (["ag_gemm", "--shape", "8x8x8", "--world-size", "1"], "--world-size must be auto or a number from 2"),
        (["ag_gemm", "--shape", "8x8x8", "--world-size", "129"], "from 2 to 128"),
        (["ag_gemm", "--shape", "8x8x8", "--world-size", "99", "--device", "cuda"], "99 ranks need"),
        (["ag_gemm", "--shape", "8x8x8", "--repetitions", "0"], "--repetitions must be at least 1"),
        (["ag_gemm", "--shape", "8x8x8", "--out", __file__], "is not a folder"),
        (["--draw", __file__], "is not a trace of tdkernels"),
        (["--draw", "missing.json"], "missing.json"),
    ],
)
def test_invalid_arguments_are_rejected(arguments, message, capsys):
    assert main(["trace", "--device", "cpu", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("trace: ") and message in error


def test_config_that_is_not_json_is_rejected(capsys):
    with pytest.raises(SystemExit) as raised:
        main(["trace", *SMALL, "--config", "tiles"])
    assert raised.value.code == 2 and "JSON object" in capsys.readouterr().err


@pytest.mark.parametrize(
    "config, message",
    [
        pytest.param('{"colour": 1}', "colour", marks=thorough),
        ('{"chunk_tiles": 0}', "chunk_tiles must be at least 1"),
        pytest.param('{"method": "torch"}', "torch's kernels", marks=thorough),
    ],
)
def test_invalid_config_is_rejected_by_the_ranks(config, message, tmp_path, capsys):
    assert main(["trace", *SMALL, "--out", str(tmp_path), "--config", config]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
