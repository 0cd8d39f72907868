"""explain() of the attention operators, given tensors, shapes or sizes, and a layout that these do not determine."""

import logging
import sys
from dataclasses import replace

import pytest
import torch

from tdkernels import explain
from tdkernels.autotune import on_demand, selection
from tdkernels.autotune.tunable import plain_ms, tunable
from tests.autotune.attention_support import FP32, entry_of, problem_of
from tests.autotune.selection_support import capture_log, tables_in
from tests.autotune.test_cost_model import GPU, H200

DECODE = "flash_decode"
FP8 = torch.float8_e4m3fn
CPU = torch.device("cpu")


@pytest.fixture
def tables(tmp_path):
    with tables_in(tmp_path):
        yield


SHAPES = [  # operator, operand shapes, and the sizes and the layout that they imply for two ranks
    ("ulysses_qkv", ((2, 8, 16), (32, 16)), (32, 32, 16), "nk"),
    ("ulysses_out", ((2, 16, 16), (16, 32), (16,)), (32, 16, 32), "nk"),
    ("ag_attention", ((3, 16, 4, 48), (3, 16, 2, 48), (3, 16, 2, 16)), (3, 32, 4, 2, 48, 16), "causal contiguous"),
    (DECODE, ((3, 4, 48), (3, 24, 2, 48), (3, 24, 2, 16)), (3, 1, 4, 2, 48, 16, 24), "dense"),
    (DECODE, ((3, 2, 4, 48), (7, 8, 2, 48), (7, 8, 2, 16), (3,), (3, 5)), (3, 2, 4, 2, 48, 16, 40), "paged"),
]


@pytest.mark.usefixtures("tables")
@pytest.mark.parametrize("operator, shapes, sizes, layout", SHAPES)
def test_explain_takes_tensors_or_shapes_or_sizes(operator, shapes, sizes, layout):
    expected = explain(operator, *sizes, dtype=FP32, layout=layout, world_size=2)
    assert (expected.problem.shape, expected.problem.layout, expected.source) == (sizes, layout, "default")
    assert explain(operator, *shapes, dtype=FP32, world_size=2) == expected
    tensors = [torch.zeros(shape, device=expected_device(expected)) for shape in shapes]
    assert explain(operator, *tensors, world_size=2) == expected


def expected_device(result):
    return torch.device("cpu" if result.problem.gpu == "cpu" else "cuda")


@pytest.mark.usefixtures("tables")
def test_explain_infers_the_layout_of_a_cache():
    q, k, table = torch.zeros(3, 4, 96), torch.zeros(3, 24, 1, 96), torch.zeros(3, 5, dtype=torch.int32)
    lens = torch.zeros(3, dtype=torch.int32)
    for caches, paged, layout in (
        ((k, k.clone()), None, "dense"), ((k, k[..., :64]), None, "dense latent"),
        ((k, k[..., :64]), table, "paged latent"), ((k.to(FP8), k.to(FP8)), table, "paged fp8"),
    ):
        assert explain(DECODE, q, *caches, lens, paged, world_size=2).problem.layout == layout
    weight = torch.zeros(16, 32).t()
    assert explain("ulysses_qkv", torch.zeros(8, 16), weight, world_size=2).problem.layout == "kn"
    full = explain("ag_attention", *[torch.zeros(1, 8, 2, 16)] * 3, layout="full", world_size=2)
    assert full.problem.layout == "full"


@pytest.mark.usefixtures("tables")
@pytest.mark.parametrize(
    "operator, shapes, message",
    [
        ("ulysses_out", ((32, 16), (16, 33)), r"o \[32, 16\], of 2 ranks, and weight \[16, 33\] do not fit"),
        ("ulysses_qkv", ((32, 16), (16, 17)), r"x \[32, 16\] and weight \[16, 17\] do not fit"),
        ("ag_attention", ((1, 8, 2, 16), (1, 8, 2, 16)), "the operands are q, k and v, not 2 of them"),
        ("ag_attention", ((1, 8, 2, 16), (1, 9, 2, 16), (1, 9, 2, 16)), r"k \[1, 9, 2, 16\] .* do not fit"),
        (DECODE, ((2, 4, 16), (2, 9, 2, 16)), "q, k_cache, v_cache, kv_lens and perhaps block_table and k_rope, not 2"),
        (DECODE, ((2, 4, 16), (3, 9, 2, 16), (3, 9, 2, 16)), r"k_cache \[3, 9, 2, 16\], .* do not fit"),
        (DECODE, ((2, 4, 16), (3, 9, 2, 16), (3, 9, 2, 16), (2,), (3, 5)), r"block_table \[3, 5\] do not fit"),
    ],
)
def test_explain_rejects_mismatched_operands(operator, shapes, message):
    with pytest.raises(ValueError, match=f"^{operator}: .*{message}"):
        explain(operator, *shapes, world_size=2)


@pytest.mark.usefixtures("tables", "fake_h200")
def test_explain_on_a_gpu(monkeypatch):
    monkeypatch.setattr(sys.modules["tdkernels.autotune.explain"], "hardware", lambda device, dtype: H200)

    def text(operator, layout, sizes):
        problem = replace(problem_of(operator, layout, sizes, on=CPU), gpu="NVIDIA H200", dtype="bfloat16")
        choice = selection.look_up(tunable(operator), problem, GPU, "cached")
        return str(sys.modules["tdkernels.autotune.explain"].explanation(tunable(operator), problem, GPU, choice))

    decode = text(DECODE, "paged", (8, 1, 32, 8, 128, 128, 65536)).splitlines()
    assert decode[:2] == [
        "flash_decode 8x1x32x8x128x128x65536 bfloat16 paged on 2 x NVIDIA H200",
        "  sizes       batch=8 queries=1 heads=32 kv_heads=8 d=128 dv=128 keys=65536",
    ]
    assert any(line.startswith("  computation ") and "(bytes of memory at the best rate)" in line for line in decode)
    attention = text("ag_attention", "causal zigzag", (1, 65536, 32, 8, 128, 128))
    assert "ag_attention 1x65536x32x8x128x128 bfloat16 causal zigzag on 2 x NVIDIA H200\n" in attention
    assert "dq_block_q=128" in attention and "=0" not in attention, "the config includes the backward's fields"
    assert "(flops at the best rate)" in attention
    assert "  sizes" not in text("ulysses_out", "kn", (8192, 8192, 8192))


@pytest.mark.usefixtures("tables", "fake_h200")
def test_explain_names_the_baseline_of_flash_decode(monkeypatch):
    """The time of the baseline of earlier versions is not shown as that of today's."""
    module, op = sys.modules["tdkernels.autotune.explain"], tunable(DECODE)
    monkeypatch.setattr(module, "hardware", lambda device, dtype: H200)
    for layout, d, dv, words in (
        ("dense", 128, 128, "torch's flash attention"), ("dense", 192, 128, "attention in fp32 with torch"),
        ("paged", 128, 128, "a copy of the pages, torch's flash attention"),
        ("dense latent", 576, 512, "attention in fp32 with torch"),
        ("dense fp8", 128, 128, "attention in fp32 with torch"),
    ):
        problem = problem_of(DECODE, layout, (8, 1, 32, 8, d, dv, 4096), on=CPU)
        problem = replace(problem, gpu="NVIDIA H200", dtype="bfloat16")
        for baseline, shown in ((op.baseline, True), ("", False)):
            entry = replace(entry_of(problem, op.plain()), baseline=baseline)
            result = module.explanation(op, problem, GPU, selection.Choice(op.plain(), "shipped", entry))
            lines = str(result).splitlines()
            assert f"  runs        {words}, then an all-gather" in lines
            assert (f"  unfused     3.0000 ms, {words} and all-gather; 1.50 x ours" in lines) == shown
            assert ("unfused" in str(result)) == ("unfused baseline 3.000 ms" in result.line()) == shown
            assert plain_ms(entry) == (3.0 if shown else None)
        assert op.plain_words_of(replace(problem, world_size=1, local_world_size=1)) == (words, words)


@pytest.mark.usefixtures("tables", "fake_h200")
def test_tuning_advice_names_a_non_default_layout(monkeypatch):
    monkeypatch.setattr(sys.modules["tdkernels.autotune.explain"], "hardware", lambda device, dtype: H200)
    op, advice = tunable("ag_attention"), []
    for layout in ("causal contiguous", "causal zigzag"):
        problem = replace(problem_of("ag_attention", layout, on=CPU), gpu=f"NVIDIA Testing {layout}")
        with capture_log(logging.WARNING) as records:
            for _ in range(2):  # the warning is logged once per GPU
                on_demand._log_choice(op, problem, GPU, selection.Choice(op.plain(), "default"))
        advice += [record.getMessage().split("python -m ")[1] for record in records]
    assert advice == [
        "tdkernels tune ag_attention --shape 1x32x2x1x16x16 --nproc 2",
        "tdkernels tune ag_attention --shape 1x32x2x1x16x16 --layout 'causal zigzag' --nproc 2",
    ]
