"""Compile a kernel for a GPU that is not there, with just the specialisation that a launch would give it."""

import contextlib
import re
import subprocess
import tempfile
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature
from triton.tools.tensor_descriptor import TensorDescriptor

from tdkernels.lang._jit import Kernel
from tdkernels.symm.topology import Topology

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_89": GPUTarget("cuda", 89, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
}

# What kernels that speak to the network are linked with, in the place of its library; on AMD GPUs not at all.
NETWORK = {"nvshmem": str(Path(__file__).with_name("nvshmem_stub.ll"))}

# What one program may have, in bytes; a kernel that needs more compiles but cannot be launched.
SHARED_MEMORY = {"sm_80": 166912, "sm_89": 101376, "sm_90": 232448, "sm_100": 232448, "gfx942": 65536, "gfx950": 163840}


def compile_for(kernel, args, kwargs, arch):
    """The compiled kernel (``.asm``, ``.metadata``) for a launch ``kernel[grid](*args, **kwargs)`` on ``arch``."""
    target = TARGETS[arch]
    backend = make_backend(target)
    network = {"extern_libs": NETWORK} if kernel._network and arch.startswith("sm") else {}
    kwargs = {"debug": False, **network, **kwargs}
    binder = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, options = binder(*args, **kwargs)
    options, signature, constants, attributes = kernel._pack_args(backend, kwargs, bound, specialization, options)
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=target, options=options.__dict__)


def pointer(dtype):
    """Something that specialises like an aligned tensor on the GPU."""
    return torch.empty(64, dtype=dtype)


def descriptor(dtype, shape, block):
    """Something that specialises like a host-made tensor descriptor."""
    return TensorDescriptor(torch.empty(shape, dtype=dtype), list(shape), list(torch.empty(shape).stride()), block)


def assemble(ptx, gpu="sm_90a"):
    """(what ptxas tells of it, its machine code: [(address, instruction)])."""
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "cubin")
        ptxas = [knobs.nvidia.ptxas.path, "-v", f"--gpu-name={gpu}", "-o", cubin, "-"]
        told = subprocess.run(ptxas, input=ptx, text=True, capture_output=True, check=True).stderr
        dump = [knobs.nvidia.cuobjdump.path, "-sass", cubin]
        sass = subprocess.run(dump, text=True, capture_output=True, check=True).stdout
    return told, [(int(at, 16), text) for at, text in re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", sass)]


def product_loops(code):
    """The instructions of each loop that multiplies by wgmma and has none in it that does."""
    jumps = [(at, re.search(r"\bBRA\b.*?(0x[0-9a-f]+)", text)) for at, text in code]
    spans = [(int(to[1], 16), at) for at, to in jumps if to and int(to[1], 16) < at]
    loops = {span: [text for at, text in code if span[0] <= at <= span[1]] for span in spans}
    loops = {span: body for span, body in loops.items() if any("HGMMA" in text for text in body)}
    return [
        body for (first, last), body in loops.items()
        if not any(first <= begin and end <= last and (begin, end) != (first, last) for begin, end in loops)
    ]  # fmt: skip


class _Recorder:
    """In the place of a kernel: keeps what it would have been launched with."""

    def __init__(self, kernel, launches):
        self._kernel, self._launches = kernel, launches

    def __getitem__(self, grid):
        return lambda *args, **kwargs: self._launches.append((self._kernel, list(args), kwargs))


@contextlib.contextmanager
def recorded_launches(launcher, ranks=1, nodes=1):
    """Within, the launcher's module launches nothing; gives the list of (kernel, args, kwargs) that it would have.

    ``nodes``: on how many nodes the group's ``ranks`` are, for those who ask their workspace.
    """
    launches = []
    workspace = MagicMock(ctx=pointer(torch.int64), kept={})
    workspace.group.topology = Topology(0, ranks, ranks // nodes)
    workspace.group.local_world_size = ranks // nodes if nodes > 1 else 1 << 30
    workspace.prepare.return_value = 3  # the plan
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launcher, "get_workspace", lambda *args, **options: workspace, raising=False)  # some need none
        for name, value in list(vars(launcher).items()):
            if isinstance(value, Kernel):
                patch.setattr(launcher, name, _Recorder(value, launches))
        yield launches
