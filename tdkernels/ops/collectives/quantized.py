"""all_reduce with wire compression: e4m3 codes with one fp32 scale per 128 consecutive elements, in one launch.

Each rank quantizes the chunks that it sends. The owner of a chunk adds its own exact part and the dequantized parts in
fp32 in rank order, and quantizes the sum. Every rank, the owner included, dequantizes the same sum
(``kernel_quantized``).
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from tdkernels.autotune.invariance import reject_invariant, reject_max_ranks
from tdkernels.ops.collectives import launch_quantized
from tdkernels.ops.collectives.config import CollectiveConfig, default_config
from tdkernels.ops.common.config import as_argument, from_text
from tdkernels.ops.common.validation import check_wire_format
from tdkernels.runtime import autograd, call_cache, torch_op
from tdkernels.symm.group import group_state
from tdkernels.symm.workspace import refuse_nodes

if TYPE_CHECKING:
    import torch.distributed as dist


def _resolved(text, x, group):
    """Return the config of a call: the one given as ``text``, or the heuristic one if it is empty."""
    if text:
        return from_text(CollectiveConfig, text)
    return default_config("all_reduce", x.nbytes, group.size(), x.device, "two_shot")


def _forward(x, quantize, group, config):
    reject_max_ranks("all_reduce", f'quantize="{quantize}"')  # on one rank, too: it quantizes nothing
    group = torch_op.group_by_name(group)
    if group.size() == 1:
        return x.clone(memory_format=torch.contiguous_format)
    reject_invariant("all_reduce", f'quantize="{quantize}"')
    refuse_nodes(f'all_reduce with quantize="{quantize}"', group_state(group))
    if not x.numel():
        group_state(group).check_consensus_cached("all_reduce", launch_quantized.problem_fields(x, quantize))
        return x.new_empty(x.shape)
    return launch_quantized.launch(x, quantize, group, _resolved(config, x, group))


torch_op.register(
    "all_reduce_quantized(Tensor x, str quantize, str group, str config) -> Tensor",
    _forward,
    lambda x, quantize, group, config: x.new_empty(x.shape),
)


class _AllReduceQuantized(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, quantize, group, config):
        return torch.ops.tdkernels.all_reduce_quantized(x, quantize, group, config)

    @staticmethod
    def backward(ctx, dz):
        autograd.reject_second_derivatives("all_reduce")
        return dz, None, None, None


def _check(x, quantize, config):
    """Raise ValueError if the quantized kernel does not support the config."""
    if config is None:
        return
    if config.method != "fused" or config.exchange != "two_shot":
        raise ValueError(
            f'all_reduce: with quantize="{quantize}" config must be None or have method "fused" and exchange '
            f'"two_shot", not "{config.method}" and "{config.exchange}"'
        )
    smallest = launch_quantized.MIN_BLOCK * x.element_size()
    if config.block_bytes < smallest:
        raise ValueError(
            f'all_reduce: config cannot run: with quantize="{quantize}" block_bytes must be at least {smallest} for '
            f"x {list(x.shape)} in {x.dtype}, not {config.block_bytes}"
        )


def call(
    x: Any, quantize: Any, group: "dist.ProcessGroup", config: Any, check: Callable[..., None]
) -> torch.Tensor:
    """Execute ``all_reduce`` with quantization. Arguments and result as for ``all_reduce``.

    Args:
        x: See ``all_reduce``.
        quantize: See ``all_reduce``; not None.
        group: The resolved group.
        config: See ``all_reduce``.
        check: (operator, x, W, config) -> None, validates the other arguments.
    """
    check_wire_format("all_reduce", "quantize", quantize)
    known, key = call_cache.lookup_run("all_reduce, quantized", group, (x,), (quantize, config))
    if known is not None:
        return known(group, x)
    check("all_reduce", x, group.size(), config)
    _check(x, quantize, config)
    text = as_argument(config)
    op = torch.ops.tdkernels.all_reduce_quantized
    z = autograd.apply(_AllReduceQuantized, op, x, quantize, group.group_name, text)
    if call_cache.is_current(group, key) and group.size() > 1 and x.numel():
        resolved = _resolved(text, x, group)
        run = lambda group, x: launch_quantized.launch(x, quantize, group, resolved)  # noqa: E731
        bind = lambda group, x: launch_quantized.bind(x, quantize, group, resolved)  # noqa: E731
        call_cache.insert(group, key, call_cache.CachedCall(run, bind, z.shape))
    return z
