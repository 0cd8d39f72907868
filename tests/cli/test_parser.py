"""Help texts and usage errors of the command line."""

import subprocess
import sys

import pytest

import tdkernels
from tdkernels.__main__ import main

COMMANDS = ["doctor", "tune", "explain", "cache", "bench", "trace"]


def test_no_arguments_prints_help(capsys):
    assert main([]) == 0
    out = capsys.readouterr().out
    assert out.startswith("usage: tdkernels") and all(f"    {name} " in out for name in COMMANDS)


def test_cache_without_an_action_prints_help(capsys):
    assert main(["cache"]) == 0
    assert capsys.readouterr().out.startswith("usage: tdkernels cache")


def test_version(capsys):
    with pytest.raises(SystemExit) as exit_of:
        main(["--version"])
    assert exit_of.value.code == 0
    assert capsys.readouterr().out == f"tdkernels {tdkernels.__version__}\n"


@pytest.mark.parametrize("command", [*([name] for name in COMMANDS), ["cache", "show"], ["cache", "merge"]], ids=str)
def test_unknown_argument_prints_the_usage_of_the_command(command, capsys):
    operands = {"explain": ["ag_gemm", "--shape", "1x1x1"], "merge": ["folder"]}.get(command[-1], [])
    with pytest.raises(SystemExit) as exit_of:
        main([*command, *operands, "--jsn"])
    assert exit_of.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(f"usage: tdkernels {' '.join(command)} ") and "unrecognized arguments: --jsn" in error


@pytest.mark.parametrize("arguments, word", [
    (["tun"], "tune"), (["cache", "shwo"], "show"), (["tune", "ag_gem", "--shape", "8x8x8"], "ag_gemm"),
    (["trace", "gemm_sr", "--shape", "8x8x8"], "gemm_rs"), (["tune", "--model", "llama-3.1-7b"], "llama-3.1-70b"),
])
def test_similar_word_is_suggested(arguments, word, capsys):
    try:
        code = main(arguments)
    except SystemExit as exit_of:
        code = exit_of.code
    assert code == 2 and f"did you mean {word!r}?" in capsys.readouterr().err


def test_arguments_are_parsed_without_torch():
    program = "import sys; from tdkernels.__main__ import main; assert main([]) == 0; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60, stdout=subprocess.DEVNULL)
