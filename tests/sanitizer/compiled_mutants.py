"""Plant a bug in compiled kernels: replace the source text of a ``td.jit`` function, so that the next call compiles it.

    with mutated_source(memory.load_acquire, 'sem="acquire"', 'sem="relaxed"'):
        with a_group() as group:        # a new group has no cached launches
            tdkernels.gemm_ar(x, weight, group=group)
"""

import contextlib
import hashlib
import sys
from importlib import import_module

from triton.runtime.jit import JITCallable

from tdkernels.runtime import kernel_launch


@contextlib.contextmanager
def mutated_source(kernel, old, new):
    """Compile ``kernel`` (a ``td.jit`` function) and all its callers with ``old`` replaced by ``new``.

    The GPU must be idle at the beginning and at the end. Workspaces that exist at the beginning keep their launches of
    the unchanged kernel, so calls within the block must use a new group. Triton's files of compiled kernels are named
    by a hash of the source, so they stay correct.

    Raises:   AssertionError if ``old`` does not occur exactly once in the source: then the mutant must be updated
    """
    source = kernel.src
    assert source.count(old) == 1, f"{old!r} is {source.count(old)} times in {kernel.fn.__name__}"
    assert old.count("\n") == new.count("\n"), "line numbers would change"
    kernel._unsafe_update_src(source.replace(old, new))
    forget_compiled()
    try:
        yield
    finally:
        kernel._unsafe_update_src(source)
        forget_compiled()


def planted(mutant):
    """Plant the bug of a ``mutants.Mutant`` in compiled kernels."""
    module, kernel, old, new = mutant.nvidia or (mutant.module, mutant.kernel, mutant.old, mutant.new)
    return mutated_source(getattr(import_module(module), kernel), old, new)


def jit_functions():
    """Return all functions that Triton compiles. Each is a global variable of a module."""
    modules = [module for name, module in list(sys.modules.items()) if name.startswith(("tdkernels", "tests"))]
    values = [value for module in modules for value in vars(module).values() if isinstance(value, JITCallable)]
    return list({id(value): value for value in values}.values())  # not a set: the hash of a function may change


def forget_compiled():
    """Clear all hashes of sources and all compiled kernels of this process.

    The hash of a function includes its callees. So do the keys of the caches that are not cleared.
    """
    for function in jit_functions():
        function.hash, function.used_global_vals = None, {}  # a hash also includes those of callees hashed before
        for cache in ("device_caches", "_known"):  # of Triton, of Kernel
            if hasattr(function, cache):
                getattr(function, cache).clear()
    kernel_launch._local_workspace_of_stream.cache_clear()


def machine_code():
    """Return {(name of a kernel, digest of its machine code)} of all kernels that this process has compiled."""
    return {
        (function.fn.__name__, hashlib.sha256(compiled.asm["cubin"]).hexdigest())
        for function in jit_functions()
        for caches in getattr(function, "device_caches", {}).values()
        for compiled in caches[0].values()
    }
