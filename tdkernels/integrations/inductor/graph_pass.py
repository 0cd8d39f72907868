"""The pass over post-grad graphs, and its installation in torch._inductor.config."""

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch._inductor.config as inductor_config
from torch import fx
from torch._inductor import custom_graph_pass
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

from tdkernels.integrations.inductor import gather, reduction
from tdkernels.integrations.inductor.nodes import NotFused, arguments, c10d, value_of
from tdkernels.integrations.inductor.report import Entry, Report
from tdkernels.symm import GroupLike, resolve_group

_REWRITES: dict[Any, Callable[[fx.Node], tuple[str, str]]] = {
    c10d.all_gather_into_tensor.default: gather.fuse,
    c10d.reduce_scatter_tensor.default: reduction.fuse,
    c10d.all_reduce.default: reduction.fuse,
}
# torch passes is_inference to passes of this class only. A previous pass may need it.
_WithInference: Any = getattr(custom_graph_pass, "CustomInferenceAwareGraphPass", CustomGraphPass)
# Namespaces of collectives. Only those of _c10d_functional are replaced; the others are listed in the report.
_NAMESPACES = ("_c10d_functional", "_c10d_functional_autograd", "c10d", "_dtensor")
Passes = Callable[..., None] | Sequence[Callable[..., None]] | None


def _is_collective(node):
    """Return whether a node is a collective."""
    target = node.target
    return getattr(target, "namespace", "") in _NAMESPACES and getattr(target, "_opname", "") != "wait_tensor"


def _description(node):
    """Return a collective with the shape and dtype of its input."""
    value = value_of(node.args[0]) if node.args else None
    operand = f" {list(value.shape)} {str(value.dtype).removeprefix('torch.')}" if value is not None else ""
    return f"{node.name}{operand}"


def _names_of(groups):
    """Return the sorted names of groups, or None."""
    return None if groups is None else tuple(sorted(str(resolve_group(group).group_name) for group in groups))


class OverlapPass(_WithInference):
    """Pass that replaces functional collectives and matrix products by operators. Create it with ``overlap_pass``.

    Attributes:
        previous: The passes that it calls first.
        group_names: The names of the groups whose collectives it replaces; None: all groups.
        report: The collectives of the graphs that it has seen in this process.
    """

    def __init__(self, previous: Passes = None, groups: Sequence[GroupLike] | None = None) -> None:
        self.previous = () if previous is None else tuple(previous) if isinstance(previous, Sequence) else (previous,)
        self.group_names = _names_of(groups)
        self.report = Report()

    def __call__(self, graph: fx.Graph | fx.GraphModule, is_inference: bool = False) -> None:
        """Rewrite a graph in place.

        Args:
            graph: A post-grad graph of aten operators with fake tensors in ``node.meta["val"]``, or a GraphModule,
                which is recompiled.
            is_inference: Passed to those of the previous passes that need it.
        """
        if isinstance(graph, fx.GraphModule):
            self(graph.graph, is_inference)
            graph.recompile()
            return
        for one in self.previous:
            if _WithInference is not CustomGraphPass and isinstance(one, _WithInference):
                one(graph, is_inference)
            else:
                one(graph)
        for node in [node for node in graph.nodes if _is_collective(node)]:
            self.report.entries.append(self._rewritten(node))
        self.report.graphs += 1

    def _rewritten(self, node):
        """Rewrite one collective, and return its entry of the report."""
        number, name = self.report.graphs, _description(node)
        rewrite = _REWRITES.get(node.target)
        if rewrite is None:
            return Entry(number, name, None, "no operator of tdkernels contains this collective")
        group = arguments(node)["group_name"]
        if self.group_names is not None and group not in self.group_names:
            return Entry(number, name, None, f"the pass has no group {group}")
        try:
            return Entry(number, name, *rewrite(node))
        except NotFused as err:
            return Entry(number, name, None, str(err))

    def uuid(self) -> Any:
        """Return the key in inductor's cache: a hash of the source, the groups, and the keys of the previous passes.

        Returns:
            None if a previous pass has no key. Then inductor does not cache graphs.
        """
        keys = [one.uuid() if isinstance(one, CustomGraphPass) else None for one in self.previous]
        if None in keys:
            return None
        files = tuple(str(file) for file in sorted(Path(__file__).parent.glob("*.py")))
        return get_hash_for_files(files), self.group_names, *keys


def overlap_pass(previous: Passes = None, *, groups: Sequence[GroupLike] | None = None) -> OverlapPass:
    """Return a pass for ``torch._inductor.config.post_grad_custom_pre_pass``.

    It replaces these patterns in the forward and in the backward graph:

        collective       pattern                                                   operator
        all-gather       all_gather_into_tensor, then one or several mm, addmm     ag_gemm
        reduce-scatter   mm or addmm, then reduce_scatter_tensor                   gemm_rs
        all-reduce       mm or addmm, then all_reduce                              gemm_ar

    A dimension other than 0 may be gathered or scattered, except the last. If the gathered tensor is also needed
    elsewhere, such as in the backward, the operator returns it. A mean is the sum, divided by W: a sum in fp16 may
    overflow where a mean does not. Other collectives stay as they are; ``pass.report`` has the reason for each.

    Args:
        previous: Passes that are called before this one: one, a list, or None. ``install`` takes those of the config.
        groups: The groups whose collectives are replaced, such as ``[mesh["tp"]]``; None for all. With data parallelism
            the reduction of a weight gradient follows an mm, too: leave its group out.

    Raises:
        ValueError, TypeError: If a group is invalid.

    Contract:
        All ranks must compile the same program, because the pass decides by the structure of the graph. The compiled
        function is then collective, as ``ag_gemm``, ``gemm_rs`` and ``gemm_ar``, and raises their errors.

    Example:
        passes = overlap_pass()
        compiled = torch.compile(model, options={"post_grad_custom_pre_pass": passes})
        compiled(x).sum().backward()
        print(passes.report)
    """
    return OverlapPass(previous, groups)


def install(groups: Sequence[GroupLike] | None = None) -> OverlapPass:
    """Set the pass in ``torch._inductor.config`` for all graphs that this process compiles from now on.

    A pass that is set already is called before it. A second call returns the installed pass.

    Args:
        groups: See ``overlap_pass``.

    Returns:
        The pass; its ``report`` starts empty.

    Raises:
        ValueError: If the pass is installed already with other groups, or a group is invalid.
        TypeError: If a group has another type.

    Contract:
        Local. All ranks must call it before they compile. Graphs that are compiled already do not change. A backward
        graph is compiled in the first call of ``backward``.
    """
    current = inductor_config.post_grad_custom_pre_pass
    if isinstance(current, OverlapPass):
        if current.group_names != _names_of(groups):
            raise ValueError(f"the pass is installed already, for the groups {current.group_names}")
        return current
    installed_pass = overlap_pass(current, groups=groups)
    inductor_config.post_grad_custom_pre_pass = installed_pass
    return installed_pass


def uninstall() -> None:
    """Restore the passes of the config that were set before ``install``. Compiled graphs do not change.

    Warns:
        UserWarning: If another pass has been set since then. The config does not change.
    """
    current = inductor_config.post_grad_custom_pre_pass
    if isinstance(current, OverlapPass):
        previous = current.previous
        inductor_config.post_grad_custom_pre_pass = (
            None if not previous else previous[0] if len(previous) == 1 else list(previous)
        )
    elif current is not None:
        warnings.warn(
            f"post_grad_custom_pre_pass is {current!r}, not the pass of tdkernels; it does not change", UserWarning,
            stacklevel=2,
        )


@contextlib.contextmanager
def installed(groups: Sequence[GroupLike] | None = None) -> Iterator[OverlapPass]:
    """Install the pass for a ``with`` block, as ``install``. If it is installed already, it stays so after the block.

    The backward must run in the block, too: its graph is compiled in the first call of ``backward``.

    Example:
        with inductor.installed() as passes:
            torch.compile(model)(x).sum().backward()
        print(passes.report)
    """
    before = inductor_config.post_grad_custom_pre_pass
    try:
        yield install(groups)
    finally:
        inductor_config.post_grad_custom_pre_pass = before
