"""Report section that compares times of solo mode with measured times, from synthetic rows."""

import json

import pytest

from bench.core import points
from bench.report import main as report
from bench.report import predictions
from bench.report import rows as all_rows
from bench.report.config_text import used_fields

TILES = {"block_m": 64, "block_n": 32, "block_k": 16, "group_m": 8, "num_warps": 4, "num_stages": 7}
DIRECT = {"method": "fused", "tiles": TILES, "transport": "direct", "item_tiles": 4}
FORWARD = {**DIRECT, "transport": "forward"}
PARTS = {"method": "parts", "pieces": 1}
COMMON = {"dtype": "bfloat16", "graph": True, "absent": None, "driver": "1.2", "torch": "2.99", "triton": "3.99",
          "nccl": "2.0", "multicast": "off"}


def row(method, ms, config=DIRECT, shape="8x8x8", direction="forward", gpu="Testing", git="1234567890",
        date="2026-01-02", **fields):
    """Return the fields that rows of both sides have."""
    m, n, k = map(int, shape.split("x"))
    return {**COMMON, "op": "gemm_rs", "pass": direction, "shape": shape, "name": "", "m": m, "n": n, "k": k,
            "method": method, "ms": ms, "config": config, "gpu": gpu, "git": git, "date": date, **fields}


def solo(method, ms, config=DIRECT, link=390.0, gemm=1.0, wire=0.5, ranks=4, **fields):
    return row(method, ms, config, what="solo", ranks=ranks, link_gbps=link, gemm_ms=gemm, wire_ms=wire,
               over_floor=ms and ms / max(gemm, wire), num_gpus=1, **fields)


def run_on(num_gpus, ms, config=DIRECT, gemm=1.25, method="tdkernels", **fields):
    """Return the rows of a measured run: the GEMM and one config."""
    common = {**fields, "num_gpus": num_gpus, "link_gbps": 400.0, "floor_ms": 1.0}
    return [row("gemm", gemm, None, **common), row(method, ms, config, **common)]


def lines_of(text, after="### "):
    """Return the cells of all table lines of an operator that follow ``after``."""
    lines = text[text.index(after) :].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| gemm_rs")]


def test_line_of_equal_configs():
    text = predictions.text([solo("tdkernels", 2.0), solo("c1", 3.0, FORWARD)], run_on(4, 2.5))
    line, mean = lines_of(text, "### 4 x Testing, predicted on 1 x Testing at 390 GB/s")
    assert line == ["gemm_rs", "8 × 8 × 8", "GEMM", "2.000", "2.500", "1.25", "1.000", "1.250", "1.25", "0.500",
                    "64x32x16, 7 stages, direct", "1234567, 1234567"]
    assert mean == ["gemm_rs", "direct", "GEMM", "1", "1", "1.25", "1.25 (8 × 8 × 8)", "1.25 (8 × 8 × 8)", "1.25"]
    assert "**Different configs.**" not in text and "### Measured, but not predicted" not in text


def test_overridden_and_heuristic_configs_are_compared_and_other_methods_are_not():
    forward = run_on(4, 3.0, FORWARD, method='c1 {"transport": "forward"}')
    heuristic = run_on(4, 4.0, {**FORWARD, "item_tiles": 2}, method="tdkernels-default")
    peer = run_on(4, 9.0, {**FORWARD, "item_tiles": 8}, method="torch-fused")
    predicted = [solo(f"c{tiles}", 2.0, {**FORWARD, "item_tiles": tiles}) for tiles in (2, 4, 8)]
    found, other = predictions.comparisons(predicted, {problem(forward[0]): by_method(forward + heuristic + peer)})
    assert sorted(one.measured for one in found) == [3.0, 4.0] and not other


def problem(one):
    return one["op"], one["pass"], one["dtype"], one["m"], one["n"], one["k"]


def by_method(rows):
    return {one["method"]: one for one in rows}


def test_selected_config_that_was_not_predicted_is_compared_with_the_fastest():
    text = predictions.text([solo("tdkernels", 3.0), solo("c1", 2.0, PARTS)], run_on(4, 2.5, FORWARD))
    line = lines_of(text, "**Different configs.**")[0]
    assert line[3:6] == ["2.000", "2.500", "1.25"]
    assert line[10:12] == ["pipelined", "64x32x16, 7 stages, groups of 4 tiles"]
    assert "**The same config**" not in text
    unknown = predictions.text([solo("tdkernels", 3.0)], run_on(4, 2.5, None))
    assert lines_of(unknown, "**Different configs.**")[0][11] == "not recorded"


def test_solo_run_of_the_measured_revision_counts_else_the_newest_one_marked():
    runs = [
        solo("tdkernels", 2.0, git="aaaaaaaaaa", date="2026-01-01"), solo("tdkernels", 4.0, git="bbbbbbbbbb"),
        solo("c1", 5.0, git="bbbbbbbbbb"),
    ]
    same = lines_of(predictions.text(runs, run_on(4, 2.0, git="aaaaaaaa")))[0]
    assert (same[3], same[-1]) == ("2.000", "aaaaaaa, aaaaaaa")
    differ = lines_of(predictions.text(runs, run_on(4, 2.0, git="cccccccccc")))[0]
    assert (differ[3], differ[-1]) == ("4.500", "bbbbbbb, ccccccc †"), "the mean of two times of one config"


def test_backward_compares_the_selected_configs():
    text = predictions.text([solo("tdkernels", 2.0, None, direction="backward")],
                            run_on(4, 3.0, None, direction="backward"))
    line = lines_of(text)[0]
    assert line[0] == "gemm_rs backward" and line[5] == "1.50" and line[10] == "selected by each revision"


@pytest.mark.parametrize("predicted, measured", (
    (solo("tdkernels", 2.0, link=None), run_on(4, 2.0)),  # no modelled link
    (solo("gemm", 2.0), run_on(4, 2.0)),
    (solo("tdkernels", None), run_on(4, 2.0)),
    (solo("tdkernels", 2.0, ranks=8), run_on(4, 2.0)),
    (solo("tdkernels", 2.0, shape="8x8x16"), run_on(4, 2.0)),
    (solo("tdkernels", 2.0), run_on(4, 2.0, gpu="Testing on 2 simulated nodes")),
))
def test_nothing_to_compare(predicted, measured):
    assert predictions.text([predicted], measured) == ""


def test_another_gpu_model_has_parts_of_its_own_and_only_for_problems_without_a_prediction():
    predicted = [solo("tdkernels", 2.0), solo("tdkernels", 2.0, gpu="Older"),
                 solo("tdkernels", 2.0, gpu="Older", shape="8x8x16", wire=4.0)]
    measured = run_on(4, 2.5) + run_on(4, 6.0, shape="8x8x16") + run_on(4, 6.0, shape="8x8x24")
    text = predictions.text(predicted, measured)
    alike, unlike = text.split("**Predicted on another GPU model**")
    assert [line[1] for line in lines_of(alike)][0] == "8 × 8 × 8" and "8 × 8 × 16" not in alike
    line, mean = lines_of(unlike, "**The same config**")
    assert (line[1], line[2], line[5], mean[2]) == ("8 × 8 × 16", "wire", "3.00", "wire")
    assert "- 4 x Testing: gemm_rs 2\n" in text


def test_means_of_an_operator():
    predicted = [solo("tdkernels", 1.0, shape=f"8x8x{k}", wire=wire) for k, wire in ((8, 0.5), (16, 2.0))]
    measured = run_on(4, 0.5, shape="8x8x8") + run_on(4, 2.0, shape="8x8x16")
    means = lines_of(predictions.text(predicted, measured))[2:]
    assert means[0] == ["gemm_rs", "all", "all", "2", "2", "1.00", "0.50 (8 × 8 × 8)", "2.00 (8 × 8 × 16)", "1.25"]
    assert [line[2:6] for line in means[1:]] == [["GEMM", "1", "1", "0.50"], ["wire", "1", "1", "2.00"]]


def test_configs_are_equal_if_the_fields_that_their_transport_uses_are():
    assert used_fields(DIRECT) == used_fields({**DIRECT, "item_tiles": 2, "pieces": 1, "split_k": 1})
    assert used_fields(FORWARD) != used_fields({**FORWARD, "item_tiles": 2})
    assert used_fields(FORWARD) != used_fields({**FORWARD, "tiles": {**TILES, "num_warps": 8}})
    assert used_fields(PARTS) == used_fields({**PARTS, "tiles": TILES}) != used_fields({**PARTS, "pieces": 2})


def test_section_is_on_the_page_of_solo_mode(tmp_path):
    (tmp_path / "testingx4").mkdir()
    eager = [{**one, "graph": False, "ms": 9.0} for one in run_on(4, 2.5)]
    rows = [solo("gemm", 1.0, None), solo("tdkernels", 2.0), *run_on(4, 2.5), *eager]
    (tmp_path / "testingx4" / "rows.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    found = all_rows.read(tmp_path)
    assert found.dense_graphs == points.read_dense_graphs(tmp_path) and len(found.dense_graphs) == 2
    page = report.pages(found)["tables/solo.md"]
    assert page.index("## Solo mode") < page.index("## Predicted in solo mode and measured")
    assert lines_of(page, "### 4 x Testing")[0][5] == "1.25"
