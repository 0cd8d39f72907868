"""Attention of one query token to a cache that the ranks share: ours, torch's, and torch's with NCCL.

    python -m tdkernels bench flash_decode --cuda-graph [--shapes h96-kv12-b1,BxHqxHkvxDxS] [--tokens 65536,131072]

A step of decoding is captured, so what counts is what runs in a CUDA graph. Caches take turns until no cache of the GPU
can hold them. The floor of a method is the time in which the device's memory, at the rate of a large copy in the same
run, gives the keys and values of a rank once.
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
LOCAL, SEQUENCE = "torch-local ", "sequence "  # what the names of torch's methods begin with
_COLD_BYTES = 256 << 20  # input sets take turns until this much has gone by: several times any L2 cache
_MAX_SETS = 64


@dataclass(frozen=True)
class Shape:
    """q [batch, heads, dim] attends to ``keys`` keys and values of each rank, of ``kv_heads`` heads."""

    batch: int
    heads: int
    kv_heads: int
    dim: int
    keys: int
    name: str = ""

    def __str__(self):
        return f"{self.batch}x{self.heads}x{self.kv_heads}x{self.dim}x{self.keys}"

    @property
    def kv_bytes(self):
        """Of a rank's keys and values."""
        return 2 * self.batch * self.keys * self.kv_heads * self.dim * DTYPE.itemsize


_MOST_KEYS = {1: 17, 8: 14, 32: 12, 128: 10}  # {batch: log2 of the most keys of a rank}
SHAPES = [
    Shape(batch, heads, kv_heads, 128, 1 << exponent, f"h{heads}-kv{kv_heads}-b{batch}")
    for heads, kv_heads in ((96, 12), (32, 8))
    for batch, most in _MOST_KEYS.items()
    for exponent in range(10, most + 1)
]
REHEARSAL_SHAPES = [Shape(1, 4, 2, 16, 8, "rehearsal")]


def parse_shapes(text, keys=None):
    """Shapes by what their names begin with, or as BxHqxHkvxDxS, with ',' between them; all if there is no text.

    Args:     keys: numbers of keys to take of those that have names, or None
    """
    chosen = []
    for word in text.split(",") if text else ("h",):
        named = [shape for shape in SHAPES if shape.name.startswith(word)]
        if named:
            chosen += [shape for shape in named if keys is None or shape.keys in keys]
        elif re.fullmatch(r"([1-9]\d*x){4}[1-9]\d*", word):
            chosen.append(Shape(*map(int, word.split("x"))))
        else:
            names = ", ".join(dict.fromkeys(shape.name for shape in SHAPES))
            raise ValueError(f"--shapes of flash_decode: {word!r} is neither BxHqxHkvxDxS nor the beginning of {names}")
    if not chosen:
        raise ValueError(f"--tokens: no shape of flash_decode has {' or '.join(map(str, keys))} keys of a rank")
    return list(dict.fromkeys(chosen))


@dataclass(frozen=True)
class Case:
    """One shape to measure on ``ranks`` ranks."""

    shape: Shape
    ranks: int
    operator: str = "flash_decode"

    def __str__(self):
        return f"flash_decode {self.shape} {self.shape.name}".strip()

    def why_not(self):
        """Why it cannot be measured, or None."""
        if self.shape.heads % self.shape.kv_heads:
            return f"{self.shape.heads} query heads are not divisible by {self.shape.kv_heads} kv heads"
        return None

    def inputs(self, seed):
        """q, the same on all ranks, this rank's caches, and their lengths; others for another seed."""
        shape, device = self.shape, rank_device()

        def draw(seed, *sizes):
            generator = torch.Generator(device).manual_seed(seed)
            return torch.randn(*sizes, generator=generator, dtype=DTYPE, device=device)

        q = draw(seed, shape.batch, shape.heads, shape.dim)
        own = 1000 + 2 * (seed * self.ranks + dist.get_rank())
        cache = shape.batch, shape.keys, shape.kv_heads, shape.dim
        lens = torch.full((shape.batch,), shape.keys, dtype=torch.int32, device=device)
        return SimpleNamespace(q=q, k=draw(own, *cache), v=draw(own + 1, *cache), lens=lens)


def cases(operators, shapes, ranks):
    """The cases of a run."""
    for _ in operators:
        yield from (Case(shape, ranks) for shape in shapes)


# ---- On the ranks ----


@harness.measurement
def measure(case, plan):
    """As ``measure.measure``; a copy's times have "bytes", too."""
    sets = _input_sets(case)
    alone, together, configs, absent = _methods(case, plan, _default_config(sets[0]))
    captured, not_captured = {}, {}
    for calls, merge in ((alone, None), (together, methods.sequence)):
        references = _references(sets[:2], merge)  # two: our workspaces have two halves
        for name in list(calls):
            if reason := _why_absent(name, calls[name], references):
                absent[name] = reason
                del calls[name]
        if plan.cuda_graph:
            of_calls, reasons = graphs.capture_all(calls, sets, references, unchecked=())
            captured, not_captured = captured | of_calls, not_captured | reasons
        del references
    configs |= _what_runs([*alone, *together], sets[0])
    copy, nbytes = methods.copy_on_device()
    calls = {"copy": copy, **alone, **together}
    found = timed(calls, captured, sets, plan, configs, absent, not_captured)
    return [(name, graph, {**times, "bytes": nbytes} if name == "copy" else times) for name, graph, times in found]


def _input_sets(case):
    count = 2
    if rank_device().type == "cuda":
        count = max(2, min(_MAX_SETS, -(-_COLD_BYTES // case.shape.kv_bytes)))
    return [case.inputs(seed) for seed in range(count)]


def _what_runs(names, s):
    """{name: config} of the calls without one."""
    groups = {"local": methods.own_group(), "tdkernels": None}
    operands = s.q, s.k, s.v, s.lens
    return {
        name: tdkernels.explain("flash_decode", *operands, group=group).config
        for name, group in groups.items() if name in names
    }


def _default_config(s):
    return default_config(shape_of(s.q[:, None], s.k, s.v), rank_device())


def _methods(case, plan, default):
    """({name: call} of this rank's keys alone, {name: call} of all ranks', {name: config}, {name: why it is absent}).

    One rank has nothing to do with others.
    """
    attentions, missing = methods.attentions([name for name in plan.peers if name in PEERS])
    tries, absent = _overridden(plan, default)
    alone = {f"{LOCAL}{name}": lambda s, attend=attend: attend(s)[0] for name, attend in attentions.items()}
    together = {f"{SEQUENCE}{name}": lambda s, a=attend: methods.sequence(a, s) for name, attend in attentions.items()}
    configs = {}
    for suffix, config in {"": None, **tries}.items():
        configs[f"local{suffix}"] = configs[f"tdkernels{suffix}"] = config
        alone[f"local{suffix}"] = lambda s, config=config: methods.ours(s, config, methods.own_group())
        together[f"tdkernels{suffix}"] = lambda s, config=config: methods.ours(s, config)
    absent |= {f"{LOCAL}{name}": reason for name, reason in missing.items()}
    return alone, together if case.ranks > 1 else {}, configs, absent


def _overridden(plan, default):
    """({suffix of a name: config}, {name: why it is absent}) of tries of other configs."""
    configs, absent = {}, {}
    for number, fields in enumerate(plan.overrides, 1):
        suffix = f" c{number} {json.dumps(fields)}"
        try:
            configs[suffix] = _override(default, fields)
        except TypeError as err:  # a field of another operator
            absent[f"tdkernels{suffix}"] = str(err)
    return configs, absent


def _references(sets, merge):
    """Per set it, o in fp32, and how far off plain torch is in the dtype.

    Args:     merge: what makes o of all ranks' keys of an attention; None: of this rank's alone
    """
    o_of = (lambda s: methods.math(s)[0]) if merge is None else (lambda s: merge(methods.math, s))
    found = []
    for s in sets:
        exact = o_of(methods.in_fp32(s))
        found.append((s, exact, harness.errors(o_of(s), exact)))
    return found


def _why_absent(name, call, references):
    """None if a method can be timed; raises where ours is wrong, or fails in its default config."""
    reason = harness.why_it_fails(call, references[0][0])
    wrong = None if reason else harness.why_it_is_wrong(call, references)
    ours = not name.startswith((LOCAL, SEQUENCE))
    if ours and (wrong or (reason and "{" not in name)):
        raise RuntimeError(f"{name}: {wrong or reason}")
    return reason or wrong


# ---- In the calling process ----


def rows(case, found, link_gbps):
    """One row a method: what was measured and what follows from it.

    ``floor_ms`` is keys and values over the rate of the copy, so ``efficiency`` is the share of the memory's bandwidth.
    ``speedup``: of local over the best torch-local, of the others over the best sequence. ``added_us``: tdkernels more
    than local. What runs in a graph is compared with what does.
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
            "keys": shape.keys, "dtype": str(DTYPE).removeprefix("torch."), "method": name, "graph": graph,
            "absent": times.get("absent"), "ms": ms, "host_ms": times.get("host_ms"), "burst": times.get("burst"),
            "tflops": None, "wire_gbps": None, "kv_bytes": shape.kv_bytes, "copy_gbps": copy_gbps,
            "kv_gbps": shape.kv_bytes / read / 1e6 if read else None, "speedup": base / read if base and read else None,
            "floor_ms": floor_ms, "efficiency": floor_ms / read if read else None,
            "added_us": (ms - local_ms) * 1e3 if added else None,
            "link_gbps": link_gbps, "config": times.get("config"),
        })
    return table


def _base(name):
    """What the names of those begin with that a method is compared with."""
    return LOCAL if name.startswith(("local", LOCAL)) else SEQUENCE
