"""Batch-invariant mode with ``max_ranks``: results have the same bits for every number of ranks."""

import re

import pytest
import torch

import tdkernels
from tdkernels.autotune.invariance import selection_mode
from tdkernels.autotune.problem import Problem
from tdkernels.autotune.tunable import tunable
from tdkernels.symm import shared_settings
from tests.ops import rank_invariance_cases as cases
from tests.ops.test_batch_invariance_configs import of_bits, simulated_gpu  # noqa: F401  a fixture
from tests.support.ranks import ASKED, on_ranks
from tests.support.simulated_nodes import thorough
from tests.test_protocol import failure_of

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture(autouse=True)
def restored():
    yield
    shared_settings.set_batch_invariant(None)


# ---- the setting ----


def test_setting(monkeypatch):
    monkeypatch.setenv("TDKERNELS_AUTOTUNE", "off")
    modes = {selection_mode()}
    for max_ranks in (None, 2, 4, 8):
        with tdkernels.batch_invariant(True, max_ranks):
            assert shared_settings.is_batch_invariant() and shared_settings.invariant_ranks() == (max_ranks or 0)
            modes.add(selection_mode())
            with tdkernels.batch_invariant(False):
                assert not shared_settings.is_batch_invariant() and shared_settings.invariant_ranks() == 0
            assert shared_settings.batch_invariance() == (max_ranks or 1)
    assert len(modes) == 5 and shared_settings.batch_invariance() == 0


def test_environment_variable(monkeypatch):
    for text, expected in (("4", 4), ("8", 8), ("2", 2), ("1", 0), ("0", 0)):
        monkeypatch.setenv("TDKERNELS_BATCH_INVARIANT", text)
        tdkernels.set_batch_invariant(None)
        assert shared_settings.invariant_ranks() == expected and shared_settings.is_batch_invariant() == (text != "0")


@pytest.mark.parametrize("arguments, error", [
    ((True, 3), ValueError), ((True, 16), ValueError), ((True, 1), ValueError), ((True, "4"), TypeError),
    ((True, True), TypeError), ((False, 4), ValueError), ((None, 4), ValueError),
])
def test_invalid_settings(arguments, error):
    for call in (tdkernels.set_batch_invariant, lambda *of: tdkernels.batch_invariant(*of).__enter__()):
        with pytest.raises(error, match=re.escape(f"max_ranks{'=4' if arguments[0] is not True else ' must be 2, 4'}")):
            call(*arguments)
    assert not shared_settings.is_batch_invariant()


# ---- bits ----


@pytest.mark.parametrize("ranks, max_ranks, dtype, w_is_kn", [
    (1, 8, BF16, False), (1, 4, FP32, False), (2, 2, BF16, False), (2, 4, FP16, True), (4, 4, BF16, False),
    (4, 4, FP32, False), pytest.param(8, 8, BF16, False, marks=thorough),
    pytest.param(8, 8, FP32, False, marks=thorough),
])
def test_sums_are_the_tree(ranks, max_ranks, dtype, w_is_kn):
    on_ranks(ranks, cases.products, max_ranks, dtype, w_is_kn)
    on_ranks(ranks, cases.sums, max_ranks, dtype)


@pytest.mark.skipif(ASKED == "auto" and 0 < torch.cuda.device_count() < 4, reason="ranks would have different devices")
def test_results_do_not_depend_on_the_number_of_ranks():
    of_one, *others = (results for ranks in (1, 2, 4) for results in on_ranks(ranks, cases.results, 4))
    for results in others:
        assert {name for name in of_one if not torch.equal(of_one[name], results[name])} == set()


def test_heads_of_flash_decode():
    on_ranks(1, cases.heads_of_a_cache)


@pytest.mark.parametrize("sizes", [(1, 4, 128, 128), (1, 1, 128, 128), (2, 16, 576, 512)])
def test_config_of_flash_decode_does_not_depend_on_the_heads(sizes, simulated_gpu):  # noqa: F811
    queries, group, d, dv = sizes
    made, configs = tunable("flash_decode"), set()
    for heads in (128, 32, 8, 1):
        one = Problem(
            "flash_decode", "a GPU", 1, 1, "bfloat16", "dense", (4, queries, heads * group, heads, d, dv, 4096)
        )
        with tdkernels.batch_invariant(max_ranks=8):
            configs.add(made.invariant(one, simulated_gpu))
    assert len(configs) == 1


@pytest.mark.parametrize("operator, shape", [
    ("gemm_rs", (64, 4096, 4096)), ("gemm_ar", (64, 4096, 4096)), ("gemm_ar_rms_norm", (64, 4096, 4096)),
    ("all_reduce_rms_norm", (64, 4096)), ("ag_gemm", (64, 4096, 4096)),
])
def test_config_does_not_depend_on_the_number_of_ranks(operator, shape, simulated_gpu):  # noqa: F811
    made, found = tunable(operator), set()
    for ranks in (1, 2, 4, 8):
        layout = "rows" if operator.endswith("norm") else "nk"
        with tdkernels.batch_invariant(max_ranks=8):
            config = made.invariant(Problem(operator, "a GPU", ranks, ranks, "bfloat16", layout, shape), simulated_gpu)
            assert config.variant_reason() is None
        if operator.startswith("all"):
            found.add((config.num_warps, config.exchange))
        else:
            found.add(of_bits(config, simulated_gpu).tiles)
    assert len(found) == 1


# ---- errors and gradients ----


@pytest.mark.parametrize("ranks", [1, 2])
def test_unsupported_calls(ranks):
    on_ranks(ranks, cases.errors, failure_of)


def test_unsupported_numbers_of_ranks():
    on_ranks(3, cases.unsupported_sizes, 4, failure_of)
    on_ranks(4, cases.unsupported_sizes, 2, failure_of)


def test_ranks_with_different_max_ranks():
    for errors in on_ranks(2, cases.ranks_differ, failure_of):
        for error in errors:
            assert type(error) is ValueError and "max_ranks is 2 on rank 0, 4 on rank 1" in str(error), error


def test_ranks_with_different_k():
    for errors in on_ranks(2, cases.ranks_have_different_k, failure_of):
        for error in errors:
            assert type(error) is ValueError and "K/W is 512 on rank 0, 488 on rank 1" in str(error), error


@pytest.mark.parametrize("ranks, max_ranks", [(2, 4), (3, 2)])
def test_gradients(ranks, max_ranks):
    on_ranks(ranks, cases.trains, max_ranks)
