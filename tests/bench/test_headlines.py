"""The headline table of the repository's README agrees with the rows of the benchmarks."""

import re
from pathlib import Path

import pytest

from bench import run as bench_run
from bench.report import headlines
from bench.report import rows as all_rows

ROOT = Path(__file__).parents[2]
LAYERS = {  # description in the README: fields of the rows, method of ours, index of the pass
    "`ep_moe`, 4096 tokens a rank, forward": ({"shape": "4096x7168x2048x256x8"}, "tdkernels-max-tokens", 0),
    "`tp_moe`, 8192 tokens, forward": ({"shape": "8192x8192x8192x32x4"}, "tdkernels", 0),
    "`tp_moe`, 8192 tokens, forward and backward": ({"shape": "8192x8192x8192x32x4"}, "tdkernels", 1),
}


def readme_lines():
    """Return the cells of each line of the README's table of results."""
    text = (ROOT / "README.md").read_text()
    part = text[text.index("## How fast it is") : text.index("## What it does not do")]
    lines = [line.strip("|").split("|") for line in part.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line] for line in lines]


@pytest.fixture(scope="module")
def rows():
    return all_rows.read(bench_run.RESULTS)


def measured(rows, problem, num_gpus):
    """Return the measured (GEMM alone, unfused, ours) of a line of the table in ms."""
    if problem in LAYERS:
        fields, ours, index = LAYERS[problem]
        run = headlines.layer_runs(rows.layers, problem[1:7], fields)[index]
        assert run["grouped"]["num_gpus"] == num_gpus
        return [run[method]["ms"] for method in ("grouped", "sequence", ours)]
    operator, shape = re.match(r"`(\w+)` ([\d ×]+)", problem).groups()
    sizes = tuple(map(int, shape.split("×")))
    point = headlines.dense_point(rows.dense, operator, sizes, "forward", "CUDA graph" in problem, num_gpus)
    return [point.gemm, point.sequence, point.ours]


def test_the_table_has_lines():
    assert len(readme_lines()) >= 6


@pytest.mark.parametrize("line", readme_lines(), ids=lambda line: line[0])
def test_line_agrees_with_the_rows(rows, line):
    problem, hardware, *times, speedup = line
    found = measured(rows, problem, int(hardware.split()[0]))
    for printed, value in zip(times, found, strict=True):
        digits = len(printed.partition(".")[2])
        assert f"{value:.{digits}f}" == printed
    assert speedup == f"{found[1] / found[2]:.2f} ×"
