"""Kernels of tdkernels in models of Hugging Face transformers (5.23 or later), in one of two ways.

    install        the tensor parallelism of transformers, ``distributed_config=``, runs gemm_ar and column_linear
    parallelize    tensor and sequence parallelism of tdkernels, for a model that transformers has not divided

Nothing is imported from transformers before ``install``.

Example:
    from tdkernels.integrations.transformers import install

    install()
    model = AutoModelForCausalLM.from_pretrained(name, distributed_config=DistributedConfig(tp_size=8))
"""

from tdkernels.integrations.transformers.sequence_parallel import parallelize
from tdkernels.integrations.transformers.styles import install, installed, uninstall

__all__ = ["install", "installed", "parallelize", "uninstall"]
