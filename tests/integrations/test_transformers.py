"""Tensor parallelism of transformers with the fused operators: equal to transformers' own styles and to one device.

transformers is in the extra "models"; these tests are skipped without it.
"""

import sys
import warnings
from unittest import mock

import pytest
import torch

from tests.support.ranks import on_ranks

transformers = pytest.importorskip("transformers", minversion="5.23")

from transformers.distributed import tensor_parallel  # noqa: E402

from tdkernels.integrations.transformers import install, installed, uninstall  # noqa: E402
from tests.integrations import transformers_layers as layers  # noqa: E402
from tests.integrations import transformers_models as models  # noqa: E402

STYLES = tensor_parallel.ALL_PARALLEL_STYLES
NAMES = "colwise", "packed_colwise", "rowwise"
FOUR_HEADS = {"num_key_value_heads": 4}


@pytest.fixture(autouse=True)
def restored():
    """Restore the registry, also after a test that fails."""
    with mock.patch.dict(type(STYLES)._global_mapping), mock.patch.dict(STYLES._local_mapping):
        yield
        uninstall()


# ---- models ----


@pytest.mark.parametrize("name", models.MODELS)
def test_training(name, tmp_path):
    on_ranks(2, models.trains, name, str(tmp_path), {})


def test_training_on_four_ranks(tmp_path):
    on_ranks(4, models.trains, "llama", str(tmp_path), FOUR_HEADS)


def test_training_with_fsdp(tmp_path):
    on_ranks(4, models.trains_with_fsdp, "llama", str(tmp_path))


@pytest.mark.parametrize("name", models.MODELS)
def test_generate(name, tmp_path):
    on_ranks(2, models.generates, name, str(tmp_path), {})


def test_generate_on_four_ranks(tmp_path):
    on_ranks(4, models.generates, "llama", str(tmp_path), FOUR_HEADS)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="transformers compiles the decode step on GPUs only")
def test_generate_in_cuda_graphs(tmp_path):
    on_ranks(2, models.generates_compiled, str(tmp_path))


# ---- modules ----


def test_fallback():
    on_ranks(2, layers.runs_and_falls_back)


def test_compile():
    on_ranks(2, layers.compiles)


def test_unsupported_meshes_and_layouts():
    on_ranks(2, layers.rejects_meshes_and_layouts)


# ---- installation ----


def registered():
    return {name: STYLES[name] for name in NAMES}


def test_install_and_uninstall():
    before = registered()
    install()
    ours = registered()
    for name, style in ours.items():
        assert style is not before[name] and isinstance(style, type(before[name]))
        assert vars(style) == vars(before[name]) and type(style).shard_param is type(before[name]).shard_param
    install()  # does nothing
    with installed():  # does nothing, either
        assert registered() == ours
    assert registered() == ours
    uninstall()
    uninstall()
    assert registered() == before
    with pytest.raises(KeyError), installed():
        assert registered() != before
        raise KeyError
    assert registered() == before


class OtherStyle(tensor_parallel.RowwiseParallel):
    """A style of another library."""


@pytest.mark.parametrize("local", [False, True])
def test_style_of_another_library(local):
    other = OtherStyle()
    if local:
        STYLES["rowwise"] = other
    else:
        STYLES.register("rowwise", other)
    with pytest.warns(UserWarning, match="the style 'rowwise' of transformers.* set to .*OtherStyle; modules"):
        install()
    assert isinstance(STYLES["rowwise"], OtherStyle) and STYLES["rowwise"] is not other
    uninstall()
    assert STYLES["rowwise"] is other
    with pytest.warns(UserWarning), installed():
        STYLES["rowwise"] = later = OtherStyle()
    assert STYLES["rowwise"] is later, "uninstall has removed a style that was set after install"


def test_no_warning_for_own_styles():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        install()


def test_other_versions():
    before = registered()
    with mock.patch.dict(sys.modules, {"transformers": None}):
        with pytest.raises(ImportError, match="install: transformers >= 5.23 is needed, and it is not installed"):
            install()
    with mock.patch.dict(sys.modules, {"transformers.distributed.tensor_parallel": None}):
        with pytest.raises(ImportError, match=f"{transformers.__version__} has no transformers.distributed.tensor_par"):
            install()
    changed = {
        "no class RowwiseParallel": ("RowwiseParallel", None),
        "no registry ALL_PARALLEL_STYLES": ("ALL_PARALLEL_STYLES", object()),
        r"no style 'colwise'": ("ALL_PARALLEL_STYLES", Registry()),
        r"no ColwiseParallel.install_forward\(module, mesh\)": ("ColwiseParallel", torch.nn.Linear),
    }
    for message, (attribute, value) in changed.items():
        with mock.patch.object(tensor_parallel, attribute, value), pytest.raises(RuntimeError, match=message):
            install()
    assert registered() == before


class Registry(dict):
    def register(self, name, style):
        self[name] = style
