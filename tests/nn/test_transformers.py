"""EPMoE and TPMoE in the place of transformers' own MoE blocks: the same numbers, gradients and checkpoints.

transformers is in the extra "models"; without it this is skipped.
"""

import pytest

from tests.nn import transformers_models as models
from tests.support.ranks import on_ranks

transformers = pytest.importorskip("transformers", minversion="5.0")

each = pytest.mark.parametrize("kind, model", [
    ("EPMoE", "qwen3_moe"), ("EPMoE", "mixtral"), ("TPMoE", "qwen3_moe"), ("TPMoE", "mixtral")
])


@each
def test_model(kind, model):
    on_ranks(2, models.computes_the_same, kind, model)


@pytest.mark.parametrize("normalize", [True, False])
def test_block(normalize):
    on_ranks(2, models.takes_a_block, normalize)


@pytest.mark.parametrize("model", ["qwen3_moe", "mixtral"])
def test_files(model, tmp_path):
    """What transformers writes to disk is loaded, and what is made of it by layers without weights is the same."""
    on_ranks(2, models.loads_files, model, str(tmp_path))


def test_blocks_that_compute_something_else():
    on_ranks(1, models.refuses_other_blocks)
