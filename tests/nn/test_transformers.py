"""EPMoE and TPMoE in place of transformers' MoE blocks: equal outputs, gradients and checkpoints.

transformers is in the extra "integrations"; these tests are skipped without it.
"""

import pytest

from tests.nn import transformers_models as models
from tests.support.ranks import on_ranks

transformers = pytest.importorskip("transformers", minversion="5.0")

each_model = pytest.mark.parametrize("kind, model", [
    ("EPMoE", "qwen3_moe"), ("EPMoE", "mixtral"), ("TPMoE", "qwen3_moe"), ("TPMoE", "mixtral")
])


@each_model
def test_model(kind, model):
    on_ranks(2, models.matches_transformers, kind, model)


@pytest.mark.parametrize("normalize", [True, False])
def test_block(normalize):
    on_ranks(2, models.converts_a_block, normalize)


@pytest.mark.parametrize("model", ["qwen3_moe", "mixtral"])
def test_safetensors(model, tmp_path):
    """Files written by transformers load into layers on the meta device, and the saved state dict is the same."""
    on_ranks(2, models.loads_safetensors, model, str(tmp_path))


def test_unsupported_blocks():
    on_ranks(1, models.rejects_unsupported_blocks)
