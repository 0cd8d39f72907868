"""Benchmark flash_decode: attention of a few query tokens over a sharded KV cache, against torch with and without NCCL.

    python -m tdkernels bench flash_decode --cuda-graph [--shapes h96-kv12-b1,BxHqxHkvxDxS] [--tokens 65536,131072]
    python -m tdkernels bench flash_decode --cuda-graph --nproc 1 --shapes one-gpu

Shapes are BxHqxHkvxDxS[xTq[xP]]. Several query tokens Tq are the last positions of their sequence, as in speculative
decoding. P is the number of keys per page of a paged cache.

Decoding steps usually run in a CUDA graph, so times in a graph are the relevant ones. Calls cycle through KV caches
that exceed the GPU's caches. The floor is the time to read the keys and values of a rank once, at the rate of a large
device-to-device copy measured in the same run.
"""

import json
import re
from dataclasses import dataclass
from types import SimpleNamespace

import torch
import torch.distributed as dist

import tdkernels
from bench.attention import flash_decode_methods as methods
from bench.core import graphs, harness
from bench.core.measure import _override, timed
from bench.dense.operators import DTYPE
from tdkernels.launch import rank_device
from tdkernels.ops.attention.flash_decode.config import default_config
from tdkernels.ops.attention.flash_decode.launch import shape_of

OPERATORS = ["flash_decode"]
PEERS = tuple(methods.PEERS)
LOCAL, SEQUENCE = "torch-local ", "sequence "  # prefixes of the names of torch methods
_COLD_BYTES = 256 << 20  # total size of the input sets that calls cycle through: several times any L2 cache
_MAX_SETS = 64


@dataclass(frozen=True)
class Shape:
    """q [batch, heads, dim] with a KV cache of ``keys`` positions per rank and ``kv_heads`` heads.

    With several query tokens, q is [batch, queries, heads, dim]. ``page`` is the number of keys per page of a paged
    cache; 0 means a dense cache.
    """

    batch: int
    heads: int
    kv_heads: int
    dim: int
    keys: int
    name: str = ""
    queries: int = 1
    page: int = 0

    def __str__(self):
        tokens = f"x{self.queries}" if self.queries > 1 else ""
        pages = f", pages of {self.page}" if self.page else ""
        return f"{self.batch}x{self.heads}x{self.kv_heads}x{self.dim}x{self.keys}{tokens}{pages}"

    @property
    def kv_bytes(self):
        """Bytes of a rank's keys and values."""
        return 2 * self.batch * self.keys * self.kv_heads * self.dim * DTYPE.itemsize


def _sized(text, name=""):
    """Return the Shape of sizes BxHqxHkvxDxS[xTq[xP]]."""
    sizes = list(map(int, text.split("x")))
    return Shape(*sizes[:5], name, *sizes[5:])


_MAX_LOG2_KEYS = {1: 17, 8: 14, 32: 12, 128: 10}  # {batch: log2 of the largest number of keys per rank}
SHAPES = [
    Shape(batch, heads, kv_heads, 128, 1 << exponent, f"h{heads}-kv{kv_heads}-b{batch}")
    for heads, kv_heads in ((96, 12), (32, 8))
    for batch, largest in _MAX_LOG2_KEYS.items()
    for exponent in range(10, largest + 1)
]
ONE_GPU = "one-gpu"  # prefix of the names of LOCAL_SHAPES
# Shapes for a single GPU: many query heads per kv head, other head dimensions, several query tokens, and pages.
LOCAL_SHAPES = [
    _sized(sizes, f"{ONE_GPU}-{group}")
    for group, shapes in {
        "dense": (
            "16x16x1x128x24576", "4x64x8x128x40000", "8x40x40x128x10000", "1x64x8x128x500000", "8x16x8x256x16384",
            "256x32x8x128x600", "1x32x1x128x65536",
        ),
        "tokens": [
            f"{sizes}x{queries}" for sizes in ("16x16x1x128x24576", "4x64x8x128x40000") for queries in (2, 4, 8)
        ],
        "pages": (
            "16x16x1x128x24576x1x16", "4x64x8x128x40000x1x16", "256x32x8x128x600x1x16", "4x64x8x128x40000x4x16",
        ),
        "small": ("1x32x8x128x1024", "1x32x8x128x8192", "8x32x8x128x2048"),
    }.items()
    for sizes in shapes
]
REHEARSAL_SHAPES = [_sized(sizes, "rehearsal") for sizes in ("1x4x2x16x8", "1x4x2x16x8x2", "1x4x2x16x8x1x4")]


def parse_shapes(text, keys=None):
    """Parse comma-separated prefixes of shape names, or sizes as BxHqxHkvxDxS[xTq[xP]]; without text return SHAPES.

    Args:
        keys: restrict named shapes to these numbers of keys per rank, or None.
    """
    chosen, known = [], [*SHAPES, *LOCAL_SHAPES]
    for word in text.split(",") if text else ("h",):
        named = [shape for shape in known if shape.name.startswith(word)]
        if named:
            chosen += [shape for shape in named if keys is None or shape.keys in keys]
        elif re.fullmatch(r"([1-9]\d*x){4,6}[1-9]\d*", word):
            chosen.append(_sized(word))
        else:
            names = ", ".join(dict.fromkeys(shape.name for shape in known))
            sizes = "BxHqxHkvxDxS[xTq[xP]]"
            raise ValueError(f"--shapes of flash_decode: {word!r} is neither {sizes} nor a prefix of {names}")
    if not chosen:
        raise ValueError(f"--tokens: no shape of flash_decode has {' or '.join(map(str, keys))} keys per rank")
    return list(dict.fromkeys(chosen))


@dataclass(frozen=True)
class Case:
    """One benchmark case: a shape on ``ranks`` ranks."""

    shape: Shape
    ranks: int
    operator: str = "flash_decode"

    def __str__(self):
        return f"flash_decode {self.shape} {self.shape.name}".strip()

    def why_not(self):
        """Return the reason why the case cannot be measured, or None."""
        if self.shape.heads % self.shape.kv_heads:
            return f"{self.shape.heads} query heads are not divisible by {self.shape.kv_heads} kv heads"
        if self.shape.queries > self.shape.keys:  # the mask would leave a query token without keys
            return f"{self.shape.queries} query tokens are more than {self.shape.keys} keys"
        return None

    def inputs(self, seed):
        """Return q (the same on all ranks), this rank's KV cache, its lengths and block table, drawn with ``seed``."""
        shape, device = self.shape, rank_device()

        def draw(seed, *sizes):
            generator = torch.Generator(device).manual_seed(seed)
            return torch.randn(*sizes, generator=generator, dtype=DTYPE, device=device)

        tokens = (shape.queries,) if shape.queries > 1 else ()
        q = draw(seed, shape.batch, *tokens, shape.heads, shape.dim)
        own = 1000 + 2 * (seed * self.ranks + dist.get_rank())
        rows, table = methods.rows_of_cache(shape, torch.Generator(device).manual_seed(own))
        cache = *rows, shape.kv_heads, shape.dim
        lens = torch.full((shape.batch,), shape.keys, dtype=torch.int32, device=device)
        k, v = draw(own, *cache), draw(own + 1, *cache)
        return SimpleNamespace(q=q, k=k, v=v, lens=lens, table=table, keys=shape.keys)


def cases(operators, shapes, ranks):
    """Yield the cases of a run."""
    for _ in operators:
        yield from (Case(shape, ranks) for shape in shapes)


# ---- on the ranks ----


@harness.measurement
def measure(case, plan):
    """Check and time all methods of a case. Returns the same as ``measure.measure``; the copy also has "bytes"."""
    sets = _input_sets(case)
    alone, together, configs, absent = _methods(case, plan, _default_config(sets[0]))
    captured, not_captured = {}, {}
    for calls, merge in ((alone, None), (together, methods.sequence)):
        references = _references(sets[:2], merge)  # two, because workspaces are double-buffered
        for name in list(calls):
            if reason := _absent_reason(name, calls[name], references):
                absent[name] = reason
                del calls[name]
        if plan.cuda_graph:
            graphs_, reasons = graphs.capture_all(calls, sets, references, unchecked=())
            captured, not_captured = captured | graphs_, not_captured | reasons
        del references
    configs |= _selected_configs([*alone, *together], sets[0])
    copy, nbytes = methods.copy_on_device()
    calls = {"copy": copy, **alone, **together}
    found = timed(calls, captured, sets, plan, configs, absent, not_captured)
    return [(name, graph, {**times, "bytes": nbytes} if name == "copy" else times) for name, graph, times in found]


def _input_sets(case):
    count = 2
    if rank_device().type == "cuda":
        count = max(2, min(_MAX_SETS, -(-_COLD_BYTES // case.shape.kv_bytes)))
    return [case.inputs(seed) for seed in range(count)]


def _selected_configs(names, s):
    """Return {name: config} that calls without an explicit config select."""
    groups = {"local": methods.own_group(), "tdkernels": None}
    operands = s.q, s.k, s.v, s.lens, *(() if s.table is None else (s.table,))
    return {
        name: tdkernels.explain("flash_decode", *operands, group=group).config
        for name, group in groups.items() if name in names
    }


def _default_config(s):
    q = s.q if s.q.dim() == 4 else s.q[:, None]
    return default_config(shape_of(q, s.k, s.v, s.table), rank_device(), dist.get_world_size())


def _methods(case, plan, default):
    """Build the methods.

    Returns:
        ({name: call} on this rank's keys, {name: call} on all ranks' keys, {name: config}, {name: reason for absence}).
        The second is empty if there is one rank.
    """
    attentions, missing = methods.attentions([name for name in plan.peers if name in PEERS])
    if case.shape.queries > 1 or case.shape.page:
        del attentions["math"]  # it computes one sequence at a time then, which is only good for the reference
    overrides, absent = _overridden(plan, default)
    alone = {f"{LOCAL}{name}": lambda s, attend=attend: attend(s)[0] for name, attend in attentions.items()}
    partial = {name: methods.of_all_ranks(attend) for name, attend in attentions.items()}
    together = {f"{SEQUENCE}{name}": lambda s, a=attend: methods.sequence(a, s) for name, attend in partial.items()}
    plain = methods.TORCH_CONFIG
    alone[LOCAL + methods.METHOD_TORCH] = lambda s: methods.ours(s, plain, methods.own_group())
    together[SEQUENCE + methods.METHOD_TORCH] = lambda s: methods.ours(s, plain)
    configs = dict.fromkeys((LOCAL + methods.METHOD_TORCH, SEQUENCE + methods.METHOD_TORCH), plain)
    for suffix, config in {"": None, **overrides}.items():
        configs[f"local{suffix}"] = configs[f"tdkernels{suffix}"] = config
        alone[f"local{suffix}"] = lambda s, config=config: methods.ours(s, config, methods.own_group())
        together[f"tdkernels{suffix}"] = lambda s, config=config: methods.ours(s, config)
    absent |= {f"{LOCAL}{name}": reason for name, reason in missing.items()}
    return alone, together if case.ranks > 1 else {}, configs, absent


def _overridden(plan, default):
    """Return ({suffix of a method name: config}, {name: reason for absence}) for the config overrides of the plan."""
    configs, absent = {}, {}
    for number, fields in enumerate(plan.overrides, 1):
        suffix = f" c{number} {json.dumps(fields)}"
        try:
            configs[suffix] = _override(default, fields)
        except TypeError as err:  # a field of another operator
            absent[f"tdkernels{suffix}"] = str(err)
    return configs, absent


def _references(sets, merge):
    """Return [(operands, fp32 o, error of plain torch in the operands' dtype)], one entry per input set.

    Args:
        merge: function (attention, operands) that returns o for all ranks' keys; None for this rank's keys only.
    """
    o_of = (lambda s: methods.math(s)[0]) if merge is None else (lambda s: merge(methods.of_all_ranks(methods.math), s))
    found = []
    for s in sets:
        exact = o_of(methods.in_fp32(s))
        found.append((s, exact, harness.errors(o_of(s), exact)))
    return found


def _absent_reason(name, call, references):
    """Return None if a method can be timed, else the reason.

    Raises:
        RuntimeError: if tdkernels is wrong, or fails with its default config.
    """
    reason = harness.failure_reason(call, references[0][0])
    wrong = None if reason else harness.mismatch_reason(call, references)
    ours = not name.startswith((LOCAL, SEQUENCE))
    if ours and (wrong or (reason and "{" not in name)):
        raise RuntimeError(f"{name}: {wrong or reason}")
    return reason or wrong


# ---- in the calling process ----


def rows(case, found, link_gbps):
    """Return one row per method, with the measured times and the derived values.

    ``floor_ms`` is the bytes of keys and values over the copy rate; ``efficiency`` is therefore the fraction of the
    memory bandwidth. ``speedup`` is over the fastest torch-local for local methods, and over the fastest unfused
    baseline for the others. ``added_us`` is the time of tdkernels minus the time of local. Methods in a graph are
    compared with methods in a graph.
    """
    shape = case.shape
    ms_of = {(name, graph): times["ms"] for name, graph, times in found if times.get("ms")}
    copy_gbps = next(times["bytes"] / times["ms"] / 1e6 for name, _, times in found if name == "copy")
    floor_ms = shape.kv_bytes / copy_gbps / 1e6
    table = []
    for name, graph, times in found:
        ms = ms_of.get((name, graph))
        read = None if name == "copy" else ms
        base = min((ms_of[key] for key in ms_of if key[1] == graph and key[0].startswith(_base(name))), default=None)
        local_ms = ms_of.get((name.replace("tdkernels", "local"), graph))
        added = name.startswith("tdkernels") and ms and local_ms
        table.append({
            "op": case.operator, "what": "flash_decode", "pass": "forward", "shape": str(shape), "name": shape.name,
            "batch": shape.batch, "heads": shape.heads, "kv_heads": shape.kv_heads, "dim": shape.dim,
            "keys": shape.keys, "queries": shape.queries, "page": shape.page,
            "dtype": str(DTYPE).removeprefix("torch."), "method": name, "graph": graph,
            "absent": times.get("absent"), "ms": ms, "host_ms": times.get("host_ms"), "burst": times.get("burst"),
            "tflops": None, "wire_gbps": None, "kv_bytes": shape.kv_bytes, "copy_gbps": copy_gbps,
            "kv_gbps": shape.kv_bytes / read / 1e6 if read else None, "speedup": base / read if base and read else None,
            "floor_ms": floor_ms, "efficiency": floor_ms / read if read else None,
            "added_us": (ms - local_ms) * 1e3 if added else None,
            "link_gbps": link_gbps, "config": times.get("config"),
        })
    return table


def _base(name):
    """Return the name prefix of the baselines of a method."""
    return LOCAL if name.startswith(("local", LOCAL)) else SEQUENCE
