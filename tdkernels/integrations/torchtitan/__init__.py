"""Operators of tdkernels in torchtitan.

torchtitan's ``tp_gemm_backend="dist_gemm"`` runs three autograd Functions of ``torchtitan.distributed.linear``:

    Function                what it computes                                            replacement
    AllGatherLinear         all_gather(x) @ weight.T + bias                             ag_gemm
    AllGatherLinearMulti    all_gather(x) @ weight.T for two weights                    ag_gemm of a list
    LinearReduceScatter     reduce_scatter(x @ weight.T) + bias                         gemm_rs

``enable`` replaces them in this process. The modules still transpose their input, because the Functions take
[sequence, batch] rows. The overrides of ``overrides`` replace the modules instead, and gather and scatter dimension 1
of [batch, sequence, hidden] without a transpose.

In torchtitan's Functions the gradient of a weight gathers x once more along its features; here it is gathered along
the rows, during the GEMM of dx.

Example:
    from tdkernels.integrations import torchtitan

    torchtitan.enable()  # before the model runs, on every rank
"""

import contextlib
import sys
from collections.abc import Callable
from typing import Any

import torch

from tdkernels.integrations.installation import during_block
from tdkernels.ops.dense.ag_gemm.op import ag_gemm
from tdkernels.ops.dense.gemm_rs.op import gemm_rs

_SOURCE = "torchtitan.distributed.linear"
_replaced: list[tuple[Any, str, Any]] = []  # (module, name, the class that it had)


class AllGatherLinear:
    """``ag_gemm`` with the interface of torchtitan's AllGatherLinear."""

    @staticmethod
    def apply(
        x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, group: Any, group_name: str
    ) -> torch.Tensor:
        """Return all_gather(x) @ weight.T + bias for x [M / W, K] and weight [N / W, K]."""
        divided = [(one, 0) for one in (x, weight, bias) if one is not None]
        return typed(lambda: ag_gemm(x, weight, bias, group=group), divided, x, 1, group)


class AllGatherLinearMulti:
    """``ag_gemm`` of two weights with the interface of torchtitan's AllGatherLinearMulti."""

    @staticmethod
    def apply(
        x: torch.Tensor, first: torch.Tensor, second: torch.Tensor, group: Any, group_name: str
    ) -> tuple[torch.Tensor, ...]:
        """Return the products of all_gather(x) with both weights, [M, N / W]."""
        call = lambda: tuple(ag_gemm(x, [first, second], group=group))  # noqa: E731
        return typed(call, [(x, 0), (first, 0), (second, 0)], x, 1, group)


class LinearReduceScatter:
    """``gemm_rs`` with the interface of torchtitan's LinearReduceScatter."""

    @staticmethod
    def apply(
        x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, group: Any, group_name: str
    ) -> torch.Tensor:
        """Return reduce_scatter(x @ weight.T) + bias for x [M, K / W] and weight [N, K / W]."""
        return typed(lambda: gemm_rs(x, weight, bias, group=group), [(x, 1), (weight, 1)], x, 0, group)


def is_type_checking() -> bool:
    """Return whether spmd_types checks types."""
    if torch.compiler.is_compiling():
        return False
    import spmd_types

    return spmd_types.is_type_checking()


def typed(
    call: Callable[[], Any], divided: list[tuple[torch.Tensor, int]], x: torch.Tensor, out_dim: int, group: Any
) -> Any:
    """Return call(); while spmd_types checks types, also check those of the operands and set those of the outputs.

    Args:
        call: Computes the output, or a tuple of outputs.
        divided: Pairs of an operand and the dimension that the ranks of the group divide.
        x: The operand that has the types of the outputs on the other axes of the mesh.
        out_dim: The dimension of the outputs that the ranks divide.
        group: The group.
    """
    if not is_type_checking():
        return call()
    import spmd_types as spmd

    for operand, dim in divided:
        spmd.assert_type(operand, {group: spmd.S(dim)})
    with spmd.no_typecheck():
        outputs = call()
    kind = {**spmd.get_local_type(x), group: spmd.S(out_dim)}
    for output in outputs if isinstance(outputs, tuple) else (outputs,):
        spmd.assert_type(output, kind)
    return outputs


_REPLACEMENTS = AllGatherLinear, AllGatherLinearMulti, LinearReduceScatter


def enable() -> None:
    """Replace the autograd Functions of ``torchtitan.distributed.linear`` in this process.

    Every module of torchtitan that has imported one of them gets the replacement, too. Parameters, checkpoints and
    results are the same; sums are rounded in another order. A second call does nothing.

    Raises:
        ImportError: If torchtitan is not installed, or lacks one of the Functions.

    Contract:
        Local. All ranks must call it before the model runs: torchtitan's kernels and those of tdkernels do not
        communicate with each other.
    """
    if _replaced:
        return
    try:
        import torchtitan.distributed.linear as source
        import torchtitan.models.common.dist_gemm  # noqa: F401  it imports the Functions by name
    except ImportError as error:
        raise ImportError(f"tdkernels.integrations.torchtitan needs torchtitan 0.3 or newer: {error}") from error
    for replacement in _REPLACEMENTS:
        name = replacement.__name__
        original = getattr(source, name, None)
        if original is None:
            disable()
            raise ImportError(f"{_SOURCE} has no {name}: tdkernels supports torchtitan 0.3")
        for module in list(sys.modules.values()):
            if getattr(module, "__name__", "").startswith("torchtitan.") and vars(module).get(name) is original:
                setattr(module, name, replacement)
                _replaced.append((module, name, original))


def disable() -> None:
    """Restore torchtitan's Functions. It does nothing if they are not replaced."""
    while _replaced:
        module, name, original = _replaced.pop()
        setattr(module, name, original)


def enabled() -> contextlib.AbstractContextManager[None]:
    """Replace the Functions for a ``with`` block. If they are replaced already, they stay so after the block."""
    return during_block(enable, disable, lambda: bool(_replaced))
