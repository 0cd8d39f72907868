"""A vLLM plugin: ``gemm_ar`` in the row-parallel linear layers of unquantized models.

vLLM calls ``register`` in each of its processes, by the entry point "tdkernels" of the group ``vllm.general_plugins``.
It does nothing unless the environment variable TDKERNELS_VLLM is 1. It then registers a subclass of vLLM's
RowParallelLinear with ``PluggableLayer.register_oot``, and vLLM creates this class instead of its own.

    rows of x               what a layer runs
    up to max_rows()        gemm_ar
    more                    vLLM's GEMM, then vLLM's all-reduce

Each new number of rows is a new shape, for which the ranks run a consensus check once. Decoding has few of them: the
sizes of vLLM's CUDA graphs. A prefill has many, so it runs vLLM's code.

The plugin was written against the interfaces of vLLM and tested with a stand-in for them. It was not run in vLLM.
"""

import functools
import os
from typing import Any

import torch

from tdkernels.ops.common.validation import DTYPES
from tdkernels.ops.dense.gemm_ar.op import gemm_ar
from tdkernels.runtime import torch_op

_ENABLED, _MAX_ROWS = "TDKERNELS_VLLM", "TDKERNELS_VLLM_MAX_ROWS"
_DEFAULT_MAX_ROWS = 512


def max_rows() -> int:
    """Return the largest number of rows for which a layer runs ``gemm_ar``: TDKERNELS_VLLM_MAX_ROWS, 512 by default.

    Raises:
        ValueError: If the environment variable is not a positive integer.
    """
    text = os.environ.get(_MAX_ROWS) or str(_DEFAULT_MAX_ROWS)
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{_MAX_ROWS} must be a positive integer, not {text!r}")
    return int(text)


def why_not(layer: Any) -> str | None:
    """Return why a RowParallelLinear of vLLM does not run ``gemm_ar``; None if it does for few rows."""
    if layer.tp_size == 1:
        return "the layer has one rank"
    if not layer.reduce_results:
        return "reduce_results is False: the layer has no all-reduce"
    method = type(layer.quant_method).__name__
    if method != "UnquantizedLinearMethod":
        return f"it is quantized: {method}"
    if layer.weight.dtype not in DTYPES:
        return f"its weight is {layer.weight.dtype}"
    return None


# ---- one torch.library operator: torch.compile must not branch on the number of rows, which is symbolic ----


def _linear(x, weight, bias, group, most):
    """Compute all_reduce(x @ weight.T) + bias."""
    if x.shape[:-1].numel() <= most:
        return gemm_ar(x, weight, bias, group=torch_op.group_by_name(group))
    from vllm.distributed import tensor_model_parallel_all_reduce

    z = tensor_model_parallel_all_reduce(torch.nn.functional.linear(x, weight))
    return z if bias is None else z + bias


def _fake_linear(x, weight, bias, group, most):
    return x.new_empty(*x.shape[:-1], weight.shape[0])


torch_op.register(
    "vllm_row_parallel_linear(Tensor x, Tensor weight, Tensor? bias, str group, int most) -> Tensor",
    _linear, _fake_linear,
)


@functools.cache
def row_parallel_linear() -> type:
    """Return the class that replaces vLLM's RowParallelLinear.

    Raises:
        ImportError: If vLLM is not installed, or has another RowParallelLinear.
    """
    try:
        from vllm.distributed import get_tp_group
        from vllm.model_executor.layers.linear import RowParallelLinear
    except ImportError as error:
        raise ImportError(f"tdkernels.integrations.vllm needs vLLM: {error}") from error

    class FusedRowParallelLinear(RowParallelLinear):
        """vLLM's RowParallelLinear, with ``gemm_ar`` for few rows."""

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.tdkernels_max_rows, self.tdkernels_group = max_rows(), get_tp_group().device_group.group_name

        @property
        def tdkernels_runs(self) -> tuple[str | None, str]:
            """The operator and an empty reason, or None and the reason why it is not used."""
            reason = why_not(self)
            return ("gemm_ar", "") if reason is None else (None, reason)

        @property
        def tdkernels_problem(self) -> tuple[int, int, Any, torch.dtype]:
            """Number of input and of output features, group and dtype, for ``tdkernels.nn.report``."""
            group = torch_op.group_by_name(self.tdkernels_group)
            return self.input_size, self.output_size, group, self.weight.dtype

        def forward(self, input_: torch.Tensor) -> Any:
            if why_not(self) is not None:
                return super().forward(input_)
            x = input_
            if not self.input_is_parallel:
                x = input_.chunk(self.tp_size, -1)[self.tp_rank].contiguous()
            bias = None if self.skip_bias_add or self.bias is None else self.bias.data
            # The parameters of vLLM are a subclass of Parameter; the operator takes plain tensors.
            z = torch.ops.tdkernels.vllm_row_parallel_linear(
                x, self.weight.data, bias, self.tdkernels_group, self.tdkernels_max_rows
            )
            if not self.return_bias:
                return z
            return z, self.bias if self.skip_bias_add else None

    return FusedRowParallelLinear


def register() -> None:
    """Replace vLLM's RowParallelLinear in this process if TDKERNELS_VLLM is 1. The entry point of the plugin.

    A second call does nothing. Layers that are quantized, or have no all-reduce, run vLLM's forward.

    Raises:
        ImportError: If vLLM has no PluggableLayer with ``register_oot``.
        RuntimeError: If another plugin has replaced RowParallelLinear.

    Contract:
        Local. vLLM loads plugins in every process, so all ranks of a group get the same layers.

    Example:
        TDKERNELS_VLLM=1 vllm serve meta-llama/Llama-3.1-8B --tensor-parallel-size 4
    """
    if os.environ.get(_ENABLED) != "1":
        return
    replacement = row_parallel_linear()
    try:
        from vllm.model_executor import custom_op

        registered, layer = custom_op.op_registry_oot, custom_op.PluggableLayer
    except (ImportError, AttributeError) as error:
        raise ImportError(f"tdkernels.integrations.vllm needs PluggableLayer.register_oot of vLLM: {error}") from error
    current = registered.get("RowParallelLinear")
    if current is None:
        layer.register_oot(replacement, name="RowParallelLinear")
    elif current is not replacement:
        raise RuntimeError(f"RowParallelLinear of vLLM was replaced by {current.__module__}.{current.__qualname__}")
