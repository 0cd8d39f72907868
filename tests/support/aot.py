"""Compile a kernel ahead of time for a GPU that is not present, with the specialization that a launch would use."""

import contextlib
import re
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource, make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import create_function_from_signature
from triton.tools.tensor_descriptor import TensorDescriptor

from tdkernels.caches import RecentCache
from tdkernels.lang import rocshmem
from tdkernels.lang.gluon_kernel import GluonKernel
from tdkernels.lang.kernel import Kernel, with_constexpr_fields
from tdkernels.symm.topology import Topology
from tests.support import kernel_digests
from tests.support.stages import Compilation
from tests.support.subset import THOROUGH

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_89": GPUTarget("cuda", 89, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
}

# Stubs of the network libraries: NVSHMEM on NVIDIA, rocSHMEM on AMD.
_NVSHMEM = Path(__file__).with_name("nvshmem_stub.ll")
_ROCSHMEM = Path(__file__).parents[1] / "lang" / "rocshmem_stand_in.ll"

# Shared memory per program in bytes; a kernel that needs more compiles but cannot be launched.
SHARED_MEMORY = {"sm_80": 166912, "sm_89": 101376, "sm_90": 232448, "sm_100": 232448, "gfx942": 65536, "gfx950": 163840}

PLAN = 3  # the plan id of all launches


def compile_for(kernel, args, kwargs, arch):
    """Compile the kernel (``.asm``, ``.metadata``) of a launch ``kernel[grid](*args, **kwargs)`` on ``arch``.

    It is compiled to LLVM IR, and to machine code if a test reads that, if it is the first launch of this kernel for
    ``arch``, or if it contains inline assembly that no earlier kernel contained: only the assembler parses that.
    """
    options, *specialization = specialised(kernel, args, kwargs, arch)
    source = (GluonASTSource if isinstance(kernel, GluonKernel) else ASTSource)(kernel, *specialization)
    if _stops_early:
        lowered = Compilation(source, TARGETS[arch], options).run("ttgir")
        return SimpleNamespace(asm={"ttgir": lowered}, metadata=SimpleNamespace(shared=0))
    key = source.hash(), arch, str(sorted(options.items(), key=str))
    compiled = _compiled.get(key)
    if compiled is None:
        compiled = _compiled[key] = Compilation(source, TARGETS[arch], options)
    if THOROUGH or kernel_digests.is_recording() or _is_new(kernel, arch, compiled):
        compiled.run()
        kernel_digests.record(kernel, arch, compiled)
    return compiled


_compiled = RecentCache(16)  # several tests of a module read the same kernel
_assembled = set()  # (kernel, arch) and (inline assembly, arch) that have been compiled to machine code


def _is_new(kernel, arch, compiled):
    """Return whether a launch must be compiled to machine code; the next one like it need not."""
    parts = {(part, arch) for part in (kernel, *compiled.inline_assembly())}
    is_new = not parts <= _assembled
    _assembled.update(parts)
    return is_new


_stops_early = False


@contextlib.contextmanager
def without_machine_code(condition=True):
    """Within a ``with`` block, compile kernels to Triton's GPU dialect (``.asm["ttgir"]``), if ``condition``.

    It takes a third of the time. For arguments that change only the code before that, such as sizes of 1: Triton
    specializes them to constants. The shared memory that a kernel needs is unknown. With TDKERNELS_TEST_THOROUGH
    the kernels are compiled to machine code.
    """
    global _stops_early
    before, _stops_early = _stops_early, condition and not THOROUGH
    try:
        yield
    finally:
        _stops_early = before


def specialised(kernel, args, kwargs, arch):
    """Return all inputs of Triton's compiler for a launch: (options, signature, constants, attributes)."""
    backend = make_backend(TARGETS[arch])
    network = {"extern_libs": network_library(arch)} if getattr(kernel, "_network", False) else {}
    kwargs = with_constexpr_fields({"debug": False, **network, **kwargs})
    binder = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, options = binder(*args, **kwargs)
    options, *specialization = kernel._pack_args(backend, kwargs, bound, specialization, options)
    return options.__dict__, *specialization


def network_library(arch):
    """Return the libraries that a kernel with network primitives is linked with."""
    if arch.startswith("sm"):
        return {"nvshmem": str(_NVSHMEM)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(rocshmem._VARIABLE, str(_ROCSHMEM))
        return rocshmem.device_library(arch)


def pointer(dtype):
    """Return an operand that specializes like an aligned tensor on the GPU."""
    return torch.empty(64, dtype=dtype)


def descriptor(dtype, shape, block):
    """Return an operand that specializes like a tensor descriptor made on the host."""
    return TensorDescriptor(torch.empty(shape, dtype=dtype), list(shape), list(torch.empty(shape).stride()), block)


def narrow(ptx):
    """Return the loads and stores of less than 8 bytes per thread; signals and tables consist of 64-bit words."""
    return re.findall(r"(?:ld|st)\.global\.[bu](?:8|16|32)\b.*", ptx)


def assemble(ptx, gpu="sm_90a"):
    """Return (the output of ptxas -v, the machine code: [(address, instruction)])."""
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "cubin")
        ptxas = [get_ptxas(int(re.findall(r"\d+", gpu)[0])).path, "-v", f"--gpu-name={gpu}", "-o", cubin, "-"]
        report = subprocess.run(ptxas, input=ptx, text=True, capture_output=True, check=True).stderr
        return report, _instructions(_dumped(cubin))


def machine_code(compiled):
    """Return (bytes of the stack of a thread, [(address, instruction)]) of a compiled kernel.

    It takes a quarter of the time of ``assemble``, which compiles the kernel again for its report.
    """
    dump = _dump_of(compiled)
    (stack,) = re.findall(r"\bSTACK:(\d+)", dump)
    return int(stack), _instructions(dump)


def registers(compiled):
    """Return the number of registers of a thread of a compiled kernel."""
    (number,) = re.findall(r"\bREG:(\d+)", _dump_of(compiled))
    return int(number)


def _dump_of(compiled):
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "cubin")
        cubin.write_bytes(compiled.asm["cubin"])
        return _dumped(cubin)


def _dumped(cubin):
    command = [knobs.nvidia.cuobjdump.path, "-sass", "-res-usage", cubin]
    return subprocess.run(command, text=True, capture_output=True, check=True).stdout


def _instructions(dump):
    return [(int(at, 16), text) for at, text in re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", dump)]


def unwritten(code):
    """Return the instructions that read a uniform register not written on every path there: [(address, instruction)].

    ptxas 12.8 may drop the shared memory address of a tile, so that the old contents of a register select the operands
    of an MMA. A test on a GPU need not show it.
    """
    at = {address: number for number, (address, _) in enumerate(code)}
    steps = [_uniform_registers(text) for _, text in code]
    before, todo = {0: 0}, [0]  # bit mask of the registers written on all paths to an instruction
    while todo:
        number = todo.pop()
        after = before[number] | steps[number][0]
        for target in _next(code[number][1], number, at):
            known = before.get(target, after) & after
            if target < len(code) and known != before.get(target):
                before[target] = known
                todo.append(target)
    return [code[number] for number, known in sorted(before.items()) if steps[number][1] & ~known]


def _next(text, number, at):
    """Return the indices of the instructions that may follow."""
    guarded = text.startswith("@")
    opcode, _, operands = text.split(" ", 1)[1].partition(" ") if guarded else text.partition(" ")
    if opcode.startswith("BRA"):
        follows = [at[int(target, 16)] for target in re.findall("0x[0-9a-f]+", operands)]
        return follows + [number + 1] * (guarded or "," in operands)
    return [] if opcode.startswith(("EXIT", "RET")) and not guarded else [number + 1]


def _uniform_registers(text):
    """Return (registers that an instruction writes, registers that it reads), as bit masks."""
    opcode, _, operands = (text.split(" ", 1)[1] if text.startswith("@") else text).partition(" ")
    operands = operands.split(", ")
    written = read = 0
    # Opcodes with the prefix U write uniform registers, except copies, which read them, and those that set predicates.
    others = opcode.startswith(("UTMA", "UBLK", "UISETP"))
    if opcode.startswith(("U", "R2UR", "S2UR", "VOTEU", "REDUX")) and not others and re.match(r"UR\d", operands[0]):
        pair = not opcode.startswith(("R2UR", "S2UR")) and (".64" in opcode or ".WIDE" in opcode)
        written = (3 if pair else 1) << int(operands.pop(0).strip()[2:])
    elif opcode == "ELECT":  # writes a predicate and the elected thread
        register = operands.pop(1).strip()[2:]
        written = 0 if register == "Z" else 1 << int(register)
    for operand in operands:
        for register in map(int, re.findall(r"\bUR(\d+)\b", operand)):
            if "gdesc" in operand:  # descriptors of both matrices; the first matrix may be in registers
                count = 12 if re.match(r"R\d", operands[1]) else 15
            else:
                count = 3 if "desc" in operand or opcode.startswith("UIADD3.64") else 1
            read |= count << register
    return written, read


def product_loops(code, part="GMMA"):
    """Return the instructions of each innermost loop that contains ``part``, a regular expression; by default wgmma.

    Rare branches lie after the end of the program. A jump back from there closes no loop.
    """
    end = max(at for at, text in code if re.search(r"\bEXIT\b", text))
    code = [(at, text) for at, text in code if at <= end]
    jumps = [(at, re.search(r"\bBRA\b.*?(0x[0-9a-f]+)", text)) for at, text in code]
    spans = [(int(to[1], 16), at) for at, to in jumps if to and int(to[1], 16) < at]
    loops = {span: [text for at, text in code if span[0] <= at <= span[1]] for span in spans}
    loops = {span: body for span, body in loops.items() if any(re.search(part, text) for text in body)}
    return [
        body for (first, last), body in loops.items()
        if not any(first <= begin and end <= last and (begin, end) != (first, last) for begin, end in loops)
    ]


class Recorder:
    """Stand-in for a kernel: records the arguments of its launches."""

    def __init__(self, kernel, launches):
        self._kernel, self._launches = kernel, launches
        self.params = kernel.params

    def __getitem__(self, grid):
        return lambda *args, **kwargs: self._launches.append((self._kernel, list(args), kwargs))

    def warmup(self, *args, grid, **kwargs):
        self[grid](*args, **kwargs)

    def launch_bound(self, bound_launch, values, stream=None):
        self[bound_launch.grid](*bound_launch.filled(values), **bound_launch.constants)


@contextlib.contextmanager
def recorded_launches(launchers, ranks=1, nodes=1):
    """Replace the kernels of a launcher's module, and yield the list of (kernel, args, kwargs) of their launches.

    ``launchers``: the module, or a tuple of modules; ``nodes``: the number of nodes of the group's ``ranks``, for
    launchers that query their workspace.
    """
    launches = []
    workspace = MagicMock(
        ctx=pointer(torch.int64), launches=RecentCache(64), pending=None, world_size=ranks, half_bytes=1 << 30
    )
    workspace.note_call = 1
    workspace.group.topology = Topology(0, ranks, ranks // nodes)
    workspace.group.local_world_size = ranks // nodes if nodes > 1 else 1 << 30
    workspace.prepare.return_value = PLAN
    with pytest.MonkeyPatch.context() as patch:
        for launcher in launchers if isinstance(launchers, tuple) else (launchers,):
            patch.setattr(launcher, "get_workspace", lambda *args, **options: workspace, raising=False)
            patch.setattr(launcher, "local_workspace_of", lambda device: workspace, raising=False)
            for name, value in list(vars(launcher).items()):
                if isinstance(value, Kernel):
                    patch.setattr(launcher, name, Recorder(value, launches))
        yield launches
