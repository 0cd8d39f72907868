"""Programs that a test starts outside the repository, as a reader would."""

import os
from pathlib import Path

from tests.support import ranks

ROOT = Path(__file__).parents[2]


def environment():
    """Return an environment in which tdkernels can be imported, without GPUs if the tests run on CPU ranks."""
    without_gpus = {"CUDA_VISIBLE_DEVICES": ""} if ranks.DEVICE == "cpu" else {}
    return {**os.environ, "PYTHONPATH": str(ROOT), **without_gpus}
