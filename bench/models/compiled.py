"""DTensor models under torch.compile: torch's asynchronous tensor parallelism, and the adapters of tdkernels.

"compile + async TP" and "compile + symm_mem.install" run the same graphs, in which inductor has replaced collectives
and matrix products by ``torch.ops.symm_mem``. The kernels behind these operators are switched when the method changes.
"""

import dataclasses

import torch
import torch._inductor.config as inductor_config
import torch.distributed as dist
from torch.distributed._symmetric_memory import enable_symm_mem_for_group

from bench.models.method import full
from tdkernels.integrations import inductor, symm_mem
from tdkernels.launch import rank_device

_installed = False  # whether the kernels of tdkernels are behind torch.ops.symm_mem


def start_case():
    """Discard the compiled code of earlier cases.

    Methods of one case do not share code: they differ in the options of torch.compile, or run the same graphs anyway.
    """
    torch._dynamo.reset()
    inductor_config.force_disable_caches = True  # the report of the pass does not contain graphs from the cache


def with_async_tp(build):
    """Return the Method of a model compiled with ``_micro_pipeline_tp``, on torch's kernels.

    Args:
        build: function that returns the Method for a function that compiles the model.
    """
    if rank_device().type == "cpu":
        raise RuntimeError("torch's fused operators need GPUs")
    return _with_symm_mem(build, installed=False)


def with_tdkernels(build):
    """Return the Method of a model compiled with ``_micro_pipeline_tp``, on the kernels of tdkernels.

    Its note has the number of fused operators in one call, which is that of ``with_async_tp``, too.

    Args:
        build: function that returns the Method for a function that compiles the model.
    """
    _switch(False)  # the first call installs the kernels
    before = _counts()
    method, fused = _with_symm_mem(build, installed=True), {}

    def complete(outputs):
        fused.update({name: number - before[name] for name, number in _counts().items()})
        if not any(fused.values()):
            raise RuntimeError("inductor replaced no collective by torch.ops.symm_mem")
        return full(outputs)

    def note():
        return ", ".join(f"{number} {name}" for name, number in fused.items() if number)

    return dataclasses.replace(method, complete=complete, note=note)


def _counts():
    """Return {operator of torch.ops.symm_mem: number of its calls that ran tdkernels}."""
    return {name: count["tdkernels"] for name, count in symm_mem.counts().items()}


def _with_symm_mem(build, installed):
    enable_symm_mem_for_group(dist.group.WORLD.group_name)
    method = build(lambda model: torch.compile(model, options={"_micro_pipeline_tp": True}))

    def call(inputs):
        _switch(installed)
        return method.call(inputs)

    return dataclasses.replace(method, call=call)


def _switch(install):
    """Put the kernels of tdkernels or of torch behind torch.ops.symm_mem.

    A burst begins with untimed calls, so the switch itself is not timed.
    """
    global _installed
    if install != _installed:
        (symm_mem.install if install else symm_mem.uninstall)()
        _installed = install


def with_pass(build):
    """Return the Method of a model compiled with the pass of ``tdkernels.integrations.inductor``.

    Args:
        build: function that returns the Method for a function that compiles the model.
    """
    passes = inductor.overlap_pass()
    method = build(lambda model: torch.compile(model, options={"post_grad_custom_pre_pass": passes}))

    def complete(outputs):
        if not passes.report.fused:
            raise RuntimeError(f"the pass fused no collective: {passes.report}")
        return full(outputs)

    return dataclasses.replace(method, complete=complete, note=lambda: str(passes.report).splitlines()[0])
