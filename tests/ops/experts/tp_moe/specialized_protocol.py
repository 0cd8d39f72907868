"""Run the partitions of the warp-specialized kernels of tp_moe on the CPU, with stand-ins for Gluon, in random order.

See ``tests.ops.dense.specialized_protocol``. The source of the partitions and of functions of ``kernel_route`` runs
without its imports and type conversions. Only some programs of a launch have started, those with the smallest ids.
"""

import ast
import re
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from tdkernels.ops.common import gemm_tile
from tdkernels.ops.common.specialized import push
from tdkernels.ops.experts.grouped_gemm.specialized import partitions
from tdkernels.ops.experts.tp_moe import kernel_route
from tdkernels.ops.experts.tp_moe.specialized import add, gather, kernel_ag_gemm, kernel_gemm_rs, slices, sums, tiles
from tests.ops.dense import specialized_protocol
from tests.ops.dense.specialized_protocol import BLOCK_N, functions_of
from tests.support.subset import THOROUGH
from tests.support.thread_schedule import Schedule

SIGNAL, HALF = 7, 1
SEEDS = 100 if THOROUGH else 8
STRIDE = 1 << 40  # distance between the addresses of the data of two ranks; rank 0 has the first one
TOKENS = 16  # of a work item
PAIR_BYTES = 4  # of two adjacent numbers of 16 bits
MAX_STAGES, TILE_WORDS = kernel_route.MAX_STAGES.value, kernel_route.TILE_WORDS.value

# ---- source, and stand-ins for the language ----


class Constexpr(int):
    value = property(int)


class Pointer:
    """A pointer to an element of a list, or pointers to several."""

    def __init__(self, values, offset=0):
        self.values, self.offset = values, offset

    def __add__(self, offset):
        return Pointer(self.values, self.offset + offset)

    def to(self, size, bitcast):
        """Return a pointer to pairs of elements of an array. A pair of numbers is a complex number."""
        assert size == PAIR_BYTES and bitcast and self.offset % 2 == 0
        return Pointer(self.values.view(complex), self.offset // 2)

    def load(self, mask, other):
        """Return the elements where mask is true, otherwise ``other``."""
        offsets, mask = self._at(mask)
        found = np.full(offsets.shape, other, np.asarray(self.values).dtype)
        found[mask] = np.asarray(self.values)[offsets[mask]]
        return found if found.shape else int(found)

    def store(self, values, mask):
        """Store the values where mask is true. No element may have been stored before: it is NaN."""
        offsets, mask = self._at(mask)
        offsets, values = offsets[mask], np.broadcast_to(values, mask.shape)[mask]
        assert np.isnan(self.values[offsets]).all() and len(set(offsets)) == len(offsets), "stores an element twice"
        self.values[offsets] = values

    def _at(self, mask):
        """Return the offsets and the mask, of one shape."""
        offsets, mask = np.broadcast_arrays(self.offset, mask)
        assert ((offsets >= 0) & (offsets < len(self.values)))[mask].all(), "accesses memory outside of a tensor"
        return offsets, mask


def _of_scalars_or_vectors(of_scalars, of_vectors):
    """Return a function of scalars that also takes vectors."""
    return lambda *args: (of_vectors if any(isinstance(each, np.ndarray) for each in args) else of_scalars)(*args)


ARITHMETIC = {
    "minimum": _of_scalars_or_vectors(min, np.minimum), "maximum": _of_scalars_or_vectors(max, np.maximum),
    "where": _of_scalars_or_vectors(lambda condition, one, other: one if condition else other, np.where),
    "min": lambda values, axis: int(values.min(axis)), "max": lambda values, axis: int(values.max(axis)),
    "sum": lambda values, axis: int(values.sum(axis)), "arange": lambda first, end, layout: np.arange(first, end),
    "load": lambda ptr, mask=True, other=0: ptr.load(mask, other),
}


def source_of(*modules):
    """Return the source of modules, one after the other."""
    return "\n".join(Path(module.__file__).read_text() for module in modules)


def without_types(source):
    """Return the source without conversions of integers and pointers."""
    return re.sub(r"\.to\([gt]l\.(int32|int64|pointer_type\(gl\.int32\))\)", "", source)


def compiled(source, **names):
    """Run the source of modules with stand-ins. Return its names."""
    tree = ast.parse(without_types(source))
    tree.body = [node for node in tree.body if not isinstance(node, (ast.Import, ast.ImportFrom))]
    names |= {
        "gl": SimpleNamespace(constexpr=Constexpr, static_range=range, **ARITHMETIC),
        "tl": SimpleNamespace(constexpr=Constexpr, **ARITHMETIC),
        "gluon": SimpleNamespace(jit=lambda function: function, constexpr_function=lambda function: function),
        "gluon_jit": lambda **_: lambda function: function,
        "MAX_STAGES": Constexpr(MAX_STAGES), "TILE_WORDS": Constexpr(TILE_WORDS), "BLOCK_N": BLOCK_N,
        "BLOCK_TOKENS": TOKENS, "ONE_WARP": None, "VECTOR": None, "ALIGN": 16, "_WARPS": 2,
    }
    exec(compile(tree, "<partitions>", "exec"), names)
    return names


ROUTE = functions_of(kernel_route, "chunk_at_turn", "first_turn_of", "stage_of_turn")
SWIZZLE = functions_of(gemm_tile, "swizzle")
PUSH_SOURCE = source_of(push, kernel_ag_gemm) + ROUTE + functions_of(gather, "await_tokens")
GATHER_SOURCE = functions_of(gather, "_assignments", "_pointers")
ADD_SOURCE = source_of(slices, sums, add, kernel_gemm_rs) + ROUTE
# ``tiles`` replaces functions of ``partitions`` that have the same name.
_TILES = specialized_protocol.source_of(partitions, tiles) + SWIZZLE
AG_GEMM_SOURCE = (
    _TILES.replace(functions_of(tiles, "load_partition"), "") + functions_of(gather, "_load_steps", "gather_partition")
)
GEMM_RS_SOURCE = source_of(slices) + _TILES + functions_of(kernel_gemm_rs, "_load")


def slice_of(column, firsts, unit):
    """Return the slice of a tile column. ``firsts`` are the first units of the slices, of ``unit`` tile columns."""
    return sum(first * unit <= column for first in firsts) - 1


class FastSchedule(Schedule):
    """A schedule of many threads. It wakes only the thread that runs next."""

    def start(self, functions):
        lock = threading.RLock()
        self.turn = threading.Condition(lock)
        self.wake = {name: threading.Condition(lock) for name in functions}
        super().start(functions)

    def _await(self, name):
        self.wake[name].wait_for(lambda: self.running == name or self.errors)
        super()._await(name)

    def _next(self):
        super()._next()
        for name in [self.running] if self.running else self.wake:
            self.wake[name].notify()


def num_warps():
    """Return the number of warps of the partition that runs."""
    return {"multiply": 4, "push": 1}.get(threading.current_thread().name.split()[0], 2)


def code_of_values(source):
    """Run a source with stand-ins that load and store numbers. Return (its names, {address // STRIDE: array})."""
    memory = {}

    def pointer_to(address, size):
        place, offset = divmod(address, STRIDE)
        values = memory[place].view(complex) if size == PAIR_BYTES else memory[place]
        return Pointer(values, offset // size)

    code = compiled(
        re.sub(r"\.to\((dtype|gl\.float32)\)", "", source), pointer_to=pointer_to,
        data_at=lambda ctx, half, rank: rank * STRIDE,
    )
    code["_split"] = lambda pairs, dtype: (pairs.real, pairs.imag)
    code["_join"] = lambda halves, dtype: halves[0] + 1j * halves[1]
    code["_mask_of"] = bool
    code["_either"] = lambda part, own, is_own: own if is_own else part
    vars(code["tl"])["int64"] = 8
    vars(code["gl"]).update(
        BlockedLayout=lambda *_: None, SliceLayout=lambda *_: None, int32=PAIR_BYTES, pointer_type=lambda size: size,
        zeros_like=np.zeros_like, full=lambda shape, value, dtype, layout: np.full(shape, value),
        gather=np.take_along_axis, store=lambda ptr, values, mask: ptr.store(values, mask),
    )
    return code, memory
