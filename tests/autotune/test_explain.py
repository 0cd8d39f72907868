"""explain(): the config of a call, its source and its limits, without communication."""

import re
import sys
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import tdkernels
from tdkernels import AgGemmConfig, GemmArConfig, GemmRsConfig, Tiles, autotune, explain
from tdkernels.autotune import disk_cache, table
from tdkernels.autotune.explain import explanation
from tdkernels.autotune.hardware import Hardware, hardware
from tdkernels.autotune.problem import Problem, gpu_name
from tdkernels.autotune.selection import Choice
from tdkernels.autotune.tunable import tunable, versions
from tdkernels.symm.group import GroupState, group_state
from tests.autotune.entries import cache_in
from tests.support.dense_oracle import OPERATORS, Case
from tests.support.ranks import a_group, device, on_ranks

FP32 = torch.float32
SHAPE = (64, 32, 96)  # M, N, K, for two ranks
# Device of this process, which is not a rank.
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu", 0)
TILES = Tiles(32, 64, 32, num_warps=4, num_stages=2)
TUNED = {
    "ag_gemm": AgGemmConfig(tiles=TILES, num_comm_sms=3),
    "gemm_rs": GemmRsConfig(tiles=TILES, item_tiles=3),
    "gemm_ar": GemmArConfig(tiles=TILES, item_tiles=3),
}


def problem_of(operator, shape=SHAPE, layout="nk", dtype="float32", device=DEVICE):
    return Problem(operator, gpu_name(device), 2, 2, dtype, layout, tuple(shape))


def entry_of(operator, shape=SHAPE, ms=2.0, plain_ms=3.0, local_ms=0.5, wire_ms=0.25, config=None, **problem_fields):
    op = tunable(operator)
    config = op.config_to_dict(config or TUNED[operator])
    problem = problem_of(operator, shape, **problem_fields)
    return table.Entry(problem, versions(op), config, ms, plain_ms, 4.0, local_ms, wire_ms, "2026-01-02")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Use empty tables and the default mode of users, "cached"."""
    monkeypatch.setattr(disk_cache, "SHIPPED", tmp_path / "shipped")
    with cache_in(tmp_path / "user"), autotune.mode("cached"):
        yield tmp_path


def ship(*entries):
    problem = entries[0].problem
    file = disk_cache.SHIPPED / disk_cache.path(problem.operator, problem.gpu).relative_to(disk_cache.folder())
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(table.to_json(entries), encoding="utf-8")


def explained(operator, *shapes, **options):
    return explain(operator, *(shapes or SHAPE), **{"dtype": FP32, "world_size": 2, **options})


def floors_of(problem, rates):
    """Compute the floors of computation and wire in ms: a GEMM of M x N x K / W, and the rows of W - 1 peers."""
    (m, n, k), ranks = problem.shape, problem.world_size
    width = {"ag_gemm": k, "gemm_rs": n, "gemm_ar": 2 * n}[problem.operator]  # an all-reduce does both
    moved = m / ranks * width * 4 * (ranks - 1)
    return 2 * m * n * k / ranks / rates.flops * 1e3, moved / rates.link * 1e3


def check_estimated(result):
    """Check that times and floors are the cost model's; on CPU ranks, where kernels are interpreted, they are None."""
    assert not result.measured and not result.local_measured and result.plain_ms is None
    if DEVICE.type == "cpu":
        assert (result.expected_ms, result.local_ms, result.wire_ms, result.floor_ms) == (None,) * 4
        assert str(result).endswith("  expected    unknown: an interpreter runs the kernels on CPU ranks")
        assert " ms" not in result.line()
        return
    rates = hardware(DEVICE, FP32)
    assert result.expected_ms == tunable(result.problem.operator).estimate_ms(result.config, result.problem, rates) > 0
    assert (result.local_ms, result.wire_ms) == pytest.approx(floors_of(result.problem, rates))


def check_text(result, *lines):
    """Check the lines of the text below its title against these patterns."""
    title, *rest = str(result).splitlines()
    assert title == str(result.problem)
    assert len(rest) == len(lines), rest
    for got, pattern in zip(rest, lines):
        assert re.fullmatch(pattern, got), f"{pattern!r} is not {got!r}"


# ---- sources ----

CONFIG_LINES = {
    "ag_gemm": "  config      method=fused tiles=32/64/32/8/4/2 transport=push num_comm_sms=3 chunk_tiles=1 split_k=1",
    "gemm_rs": "  config      method=fused tiles=32/64/32/8/4/2 transport=forward item_tiles=3 split_k=1",
    "gemm_ar": "  config      method=fused exchange=two_shot tiles=32/64/32/8/4/2 item_tiles=3 split_k=1 "
               "transport=forward num_comm_sms=0",
}


@pytest.mark.parametrize("operator", OPERATORS)
def test_default(operator):
    result = explained(operator)
    problem, op = problem_of(operator), tunable(operator)
    assert result.problem == problem
    expected = op.fallback(problem, DEVICE)
    assert (result.source, result.config) == ("default", expected)
    assert (result.method, result.tuned_for) == (expected.method, None)
    with autotune.mode("off"):
        assert explained(operator).config == op.default(problem, DEVICE)
    check_estimated(result)
    assert "  came from   the built-in heuristic: " in str(result)


@pytest.mark.parametrize("rate", ["the best rate", "a rate guessed from the GPU's properties"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_estimated_on_a_gpu(operator, rate, monkeypatch):
    """On a simulated GPU with fixed rates."""
    rates = Hardware(1e12, 1e12, 1e10, 100, measured=rate == "the best rate")
    monkeypatch.setattr(sys.modules["tdkernels.autotune.explain"], "hardware", lambda device, dtype: rates)
    op, problem = tunable(operator), replace(problem_of(operator), gpu="NVIDIA Testing")
    result = explanation(op, problem, torch.device("cuda", 0), Choice(TUNED[operator], "default"))
    assert result.expected_ms == op.estimate_ms(TUNED[operator], problem, rates) > 0
    assert (result.local_ms, result.wire_ms) == pytest.approx(floors_of(problem, rates)) and not result.local_measured
    assert result.floor_ms == max(result.local_ms, result.wire_ms) > 0
    local, wire = (f"{round(100 * ms / result.expected_ms)}%" for ms in (result.local_ms, result.wire_ms))
    check_text(
        result,
        "  runs        fused",
        CONFIG_LINES[operator],
        "  came from   the built-in heuristic: .*",
        f"  expected    {result.expected_ms:.4f} ms, estimated",
        rf"  computation {result.local_ms:.4f} ms at least \(flops at {rate}\), {local} of the expected time",
        rf"  wire        {result.wire_ms:.4f} ms at least \(bytes at {rate}\), {wire} of the expected time",
    )
    assert f"; {result.expected_ms:.3f} ms estimated; floors: computation " in result.line()


@pytest.mark.parametrize("source", ["cache", "shipped"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_measured(operator, source):
    entry = entry_of(operator)
    (disk_cache.store if source == "cache" else lambda entries: ship(*entries))([entry])
    result = explained(operator)
    assert (result.source, result.config, result.method) == (source, TUNED[operator], "fused")
    assert result.problem == result.tuned_for == entry.problem
    assert (result.expected_ms, result.measured, result.plain_ms) == (2.0, True, 3.0)
    assert (result.local_ms, result.local_measured, result.wire_ms, result.floor_ms) == (0.5, True, 0.25, 0.5)
    check_text(
        result,
        "  runs        fused",
        CONFIG_LINES[operator],
        "  came from   " + {"cache": "the cache on disk: tuned here", "shipped": "the table shipped with.*"}[source],
        "  expected    2.0000 ms, measured",
        "  unfused     3.0000 ms, .*; 1.50 x ours",
        r"  computation 0.5000 ms at least \(the library alone, measured\), 25% of the expected time",
        r"  wire        0.2500 ms at least \(.*\), 12% of the expected time",
    )
    line = result.line()
    assert line.startswith(f"{entry.problem}: fused ({source}), {CONFIG_LINES[operator].split(maxsplit=1)[1]}; ")
    assert "; 2.000 ms measured, unfused baseline 3.000 ms; " in line and "\n" not in line


def test_partly_measured():
    disk_cache.store([entry_of("ag_gemm", plain_ms=None, local_ms=None, wire_ms=None)])
    result = explained("ag_gemm")
    assert (result.source, result.expected_ms, result.measured, result.plain_ms) == ("cache", 2.0, True, None)
    assert not result.local_measured
    if DEVICE.type == "cuda":
        assert (result.local_ms, result.wire_ms) == pytest.approx(floors_of(result.problem, hardware(DEVICE, FP32)))
    else:
        assert result.local_ms is result.wire_ms is None and str(result).endswith("2.0000 ms, measured")
    assert "sequence" not in str(result) and "sequence" not in result.line()


def test_torch_baseline():
    disk_cache.store([entry_of("gemm_rs", ms=3.0, config=GemmRsConfig(method="torch"))])
    result = explained("gemm_rs")
    assert (result.method, result.config, result.source) == ("torch", GemmRsConfig(method="torch"), "cache")
    text = str(result)
    assert "  runs        torch collective, then matmul\n  config      method=torch\n" in text
    assert "1.00 x ours" in text and ": torch (cache), method=torch; 3.000 ms measured" in result.line()


@pytest.mark.parametrize("operator", OPERATORS)
def test_nearest(operator):
    far = tuple(2 * size for size in SHAPE)
    disk_cache.store([entry_of(operator, far)])
    result = explained(operator)
    assert (result.source, result.config) == ("nearest", TUNED[operator])
    assert (result.problem, result.tuned_for) == (problem_of(operator), problem_of(operator, far))
    # The measurement is of another problem.
    check_estimated(result)
    assert f"\n  tuned for   {problem_of(operator, far)}\n" in str(result)


@pytest.mark.parametrize("operator", OPERATORS)
def test_explicit(operator):
    disk_cache.store([entry_of(operator)])
    config = replace(TUNED[operator], tiles=None)
    result = explained(operator, config=config)
    tiles = tunable(operator).default(problem_of(operator), DEVICE).tiles
    assert (result.source, result.config) == ("explicit", replace(config, tiles=tiles)), "unset fields are filled in"
    assert (result.tuned_for, result.measured) == (None, False)
    check_estimated(explained(operator, config=TUNED[operator]))
    assert "  came from   the call\n" in str(result)
    assert explained(operator, config=replace(config, method="torch")).method == "torch"


def test_mode_off_ignores_tables():
    disk_cache.store([entry_of("ag_gemm")])
    with autotune.mode("off"):
        assert explained("ag_gemm").source == "default"
    assert explained("ag_gemm").source == "cache"


# ---- arguments ----


def test_by_name_and_by_function():
    for name in OPERATORS:
        assert explained(getattr(tdkernels, name)) == explained(name)
        assert explained(name).problem.operator == name
    assert tdkernels.explain is explain


# Operand shapes on each of two ranks, for SHAPE.
OPERANDS = {
    "ag_gemm": ((32, 96), (16, 96)),
    "gemm_rs": ((64, 48), (32, 48)),
    "gemm_ar": ((64, 48), (32, 48)),
}


@pytest.mark.parametrize("operator", OPERATORS)
def test_by_sizes_by_shapes_and_by_tensors(operator):
    expected = explained(operator)
    x, weight = OPERANDS[operator]
    assert explained(operator, x, weight) == expected
    assert explained(operator, torch.Size(x), list(weight)) == expected
    tensors = [torch.empty(shape, device=DEVICE) for shape in (x, weight)]
    assert explain(operator, *tensors, world_size=2) == expected  # dtype and device of the tensors
    batched = tensors[0].view(2, x[0] // 2, x[1])
    assert explain(operator, batched, tensors[1], world_size=2) == expected
    half = [tensor.half() for tensor in tensors]
    assert explain(operator, *half, world_size=2).problem == problem_of(operator, dtype="float16")
    assert explain(operator, *SHAPE, world_size=2).problem.dtype == "bfloat16"


@pytest.mark.parametrize("operator", OPERATORS)
def test_layout_of_a_transposed_weight(operator):
    disk_cache.store([entry_of(operator, layout="kn")])
    x, weight = (torch.empty(shape, device=DEVICE) for shape in OPERANDS[operator])
    assert explain(operator, x, weight, world_size=2).source == "default"
    transposed = weight.t().contiguous().t()
    result = explain(operator, x, transposed, world_size=2)
    assert (result.problem, result.source) == (problem_of(operator, layout="kn"), "cache")
    assert explained(operator, layout="kn") == explained(operator, *OPERANDS[operator], layout="kn") == result
    copied = torch.empty(2 * weight.shape[0], 2 * weight.shape[1], device=DEVICE)[::2, ::2]  # copied to "nk"
    assert explain(operator, x, copied, world_size=2).problem.layout == "nk"


@pytest.mark.parametrize(
    "shapes, options, message",
    [
        (SHAPE, {"operator": "reduce"}, "operator must be one of .*ag_gemm, .*, not 'reduce'"),
        pytest.param(
            SHAPE, {"operator": torch.matmul}, "operator must be one of .*ag_gemm, .*, not 'matmul'",
            id="another function",  # its repr contains an address, which would change the test's id in each process
        ),
        ((65, 32, 96), {}, "ag_gemm: M = 65 is not divisible by 2 ranks"),
        ((64, 33, 96), {}, "ag_gemm: N = 33 is not divisible by 2 ranks"),
        ((64, 32, 97), {"operator": "gemm_rs"}, "gemm_rs: K = 97 is not divisible by 2 ranks"),
        ((65, 33, 97), {"operator": "gemm_ar"}, "gemm_ar: K = 97 is not divisible by 2 ranks"),
        (((65, 48), (32, 48)), {"operator": "gemm_rs"}, "gemm_rs: M = 65 is not divisible by 2 ranks"),
        ((64, 0, 96), {}, "3 positive sizes"),
        ((64, 32), {}, "3 positive sizes"),
        (((32, 96), (16, 95)), {}, r"ag_gemm: x \[32, 96\] and weight \[16, 95\] do not fit"),
        (((32,), (16, 32)), {"operator": "gemm_rs"}, r"gemm_rs: x \[32\] and weight \[16, 32\] do not fit"),
        (SHAPE, {"dtype": torch.float64}, "dtype must be one of .*, not float64"),
        (SHAPE, {"layout": "mn"}, "layout must be one of nk, kn, scaled, .*, not 'mn'"),
        (SHAPE, {"world_size": 1}, "one rank has nothing to tune"),
        (SHAPE, {"config": AgGemmConfig(num_comm_sms=0)}, "ag_gemm: config cannot run: num_comm_sms must be at least"),
        (SHAPE, {"config": AgGemmConfig(tiles=Tiles(block_m=48))}, "ag_gemm: config cannot run: block_m must be"),
        (SHAPE, {"world_size": None}, "init_process_group"),
    ],
    ids=str,
)
def test_bad_arguments(shapes, options, message):
    options = dict(options)  # a copy, because the parameter is reused if the test is repeated
    with pytest.raises(ValueError, match=message):
        explained(options.pop("operator", "ag_gemm"), *shapes, **options)


def test_gemm_ar_accepts_any_m_and_n():
    assert explained("gemm_ar", 65, 33, 96) == explained("gemm_ar", (65, 48), (33, 48))


@pytest.mark.parametrize("config", [GemmRsConfig(), GemmRsConfig(method="torch"), "fused"], ids=str)
def test_config_of_wrong_type(config):
    with pytest.raises((TypeError, ValueError), match="AgGemmConfig"):  # as for the operator itself
        explained("ag_gemm", config=config)


# ---- on ranks ----


def check_no_communication():
    """Call explain on rank 0 only, then check with a call that the group is still in step."""
    with a_group() as group, pytest.MonkeyPatch.context() as patch:
        case = Case("ag_gemm", FP32, 32, 16, 96, exact=True)
        if dist.get_rank() == 0:
            patch.setattr(GroupState, "exchange", None)
            by_operands = explain("ag_gemm", case.x, case.weight, group=group)
            for result in (by_operands, explain("ag_gemm", *SHAPE, dtype=FP32)):
                assert (result.problem.shape, result.problem.world_size) == (SHAPE, 2)
                assert result.problem.gpu == gpu_name(device()) and result.source == "default"
            with pytest.raises(ValueError, match="M = 65 is not divisible by 2 ranks"):
                explain("ag_gemm", 65, 32, 96, group=group)
            patch.undo()
            assert not group_state(group).choices
        case.check({"output": case.call(group=group)})
        del group


def test_explain_on_one_rank_only():
    on_ranks(2, check_no_communication)


def check_subgroup():
    with a_group([0, 2]) as group:
        if dist.get_rank() != 1:
            assert explain("ag_gemm", *SHAPE, group=group).problem.world_size == 2
        else:
            with pytest.raises(ValueError, match="rank 1 is not a member"):
                explain("ag_gemm", *SHAPE, group=group)
        with pytest.raises(ValueError, match="M = 64 is not divisible by 3 ranks"):
            explain("ag_gemm", *SHAPE)
        assert explain("ag_gemm", *SHAPE, world_size=2).problem.world_size == 2
        del group


def test_explain_for_a_subgroup():
    on_ranks(3, check_subgroup)


def check_agreed_config(folder):
    """Check that explain reports the agreed config if rank 1 has other entries, and rank 0 gets them later."""
    rank = dist.get_rank()
    case = Case("ag_gemm", FP32, 32, 16, 96, exact=True)
    default = tunable("ag_gemm").default(problem_of("ag_gemm", device=device()), device())
    agreed, others = (replace(default, num_comm_sms=number) for number in (3, 4))

    def store(config, ms):
        disk_cache.store([entry_of("ag_gemm", config=config, ms=ms, device=device())])

    def explained_config(group):
        result = explain("ag_gemm", case.x, case.weight, group=group)
        assert (result.source, result.measured) == ("cache", True)
        return result.config, result.expected_ms

    with a_group() as group, pytest.MonkeyPatch.context() as patch, autotune.mode("cached"):
        patch.setenv("TDKERNELS_CACHE_DIR", str(folder / f"rank{rank}"))
        patch.setattr(disk_cache, "SHIPPED", folder / "none")
        disk_cache.forget()
        try:
            store(*[(agreed, 7.0), (others, 9.0)][rank])
            own = [(agreed, 7.0), (others, 9.0)][rank]
            assert explained_config(group) == own, "before a call, each rank reports its own selection"
            case.check({"output": case.call(group=group)})
            assert explained_config(group) == (agreed, 7.0)
            store(others, 1.0)
            assert explained_config(group) == (agreed, 7.0)
            with autotune.mode("off"):
                assert explain("ag_gemm", case.x, case.weight, group=group).source == "default"
            # An explicit config needs no agreement.
            assert explain("ag_gemm", case.x, case.weight, group=group, config=others).source == "explicit"
        finally:
            disk_cache.forget()
        del group


def test_explain_after_a_call_reports_the_agreed_config(folder):
    on_ranks(2, check_agreed_config, folder)


def test_tensor_instead_of_operator_is_not_printed():
    x = torch.zeros(1000, 1000)
    with pytest.raises(ValueError, match="or an operator such as tdkernels.ag_gemm, not a Tensor$"):
        explain(x, x, world_size=2)
