"""AG-GEMM and GEMM-RS against cuBLAS alone, NCCL alone, both in sequence, and torch's fused operators."""

import dataclasses
import json
from dataclasses import dataclass
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory  # defines torch.ops.symm_mem
import torch.nn.functional as F

import tdkernels
from bench import harness
from bench.shapes import Shape
from tdkernels.launch import rank_device
from tdkernels.ops import ag_gemm_kernel, gemm_rs_kernel
from tdkernels.ops._collectives import all_gather_rows, reduce_scatter_rows
from tdkernels.symm import resolve_group

OPERATORS = ("ag_gemm", "gemm_rs")
_DTYPE = torch.bfloat16
_COLD_BYTES = 256 << 20  # input sets take turns until this much has gone by: several times any L2 cache
_MAX_SETS = 8


@dataclass(frozen=True)
class Case:
    """One thing to measure: the forward or the backward of an operator at a shape, on ``ranks`` ranks."""

    operator: str
    shape: Shape
    ranks: int
    backward: bool = False

    def __str__(self):
        return f"{self.operator}{' backward' if self.backward else ''} {self.shape}"

    @property
    def flops(self):
        """Per GPU. The backward is two products, dx and dweight."""
        return (2 if self.backward else 1) * 2 * self.shape.m * self.shape.n * self.shape.k // self.ranks

    @property
    def wire_bytes(self):
        """What a GPU receives from its peers."""
        shape = self.shape
        # AG-GEMM: x comes, in the backward again, and there dx comes in parts. GEMM-RS: parts of z, or all of dz.
        rows_of = {"ag_gemm": shape.k * (2 if self.backward else 1), "gemm_rs": shape.n}
        return shape.m * rows_of[self.operator] * _DTYPE.itemsize * (self.ranks - 1) // self.ranks


# ---- Operands ----


def _randn(generator, *shape, scale=1.0):
    return torch.randn(shape, generator=generator, dtype=_DTYPE, device=generator.device).mul_(scale)


def _inputs(case, seed):
    """This rank's operands; ``full`` and ``partial`` are what cuBLAS alone reads and what NCCL alone reduces."""
    generator = torch.Generator(rank_device()).manual_seed(seed * case.ranks + dist.get_rank())
    m, n, k, ranks = case.shape.m, case.shape.n, case.shape.k, case.ranks
    s = SimpleNamespace()
    if case.operator == "ag_gemm":
        s.x = _randn(generator, m // ranks, k)
        s.weight = _randn(generator, n // ranks, k, scale=k**-0.5)
        s.full = all_gather_rows(s.x)
        if case.backward:
            s.dy, s.partial = _randn(generator, m, n // ranks), _randn(generator, m, k)
    else:
        s.x = _randn(generator, m, k // ranks)
        s.weight = _randn(generator, n, k // ranks, scale=k**-0.5)
        if case.backward:
            s.dy = _randn(generator, m // ranks, n)
            s.full = all_gather_rows(s.dy)
        else:
            s.partial = _randn(generator, m, n)
    return s


def _input_sets(case):
    sets = [_inputs(case, 0)]
    nbytes = sets[0].x.nbytes + sets[0].weight.nbytes
    count = max(2, min(_MAX_SETS, -(-_COLD_BYTES // nbytes)))
    return sets + [_inputs(case, seed) for seed in range(1, count)]


# ---- Methods: functions of one set of operands ----


def _backward_of_rs(s):
    full = all_gather_rows(s.dy)
    return full @ s.weight, full.t() @ s.x


_PLAIN = {
    ("ag_gemm", False): {
        "gemm": lambda s: F.linear(s.full, s.weight),
        "collective": lambda s: all_gather_rows(s.x),
        "sequence": lambda s: tdkernels.ag_gemm_ref(s.x, s.weight),
    },
    ("ag_gemm", True): {
        "gemm": lambda s: (s.dy @ s.weight, s.dy.t() @ s.full),
        "collective": lambda s: (reduce_scatter_rows(s.partial), all_gather_rows(s.x)),
        "sequence": lambda s: (reduce_scatter_rows(s.dy @ s.weight), s.dy.t() @ all_gather_rows(s.x)),
    },
    ("gemm_rs", False): {
        "gemm": lambda s: F.linear(s.x, s.weight),
        "collective": lambda s: reduce_scatter_rows(s.partial),
        "sequence": lambda s: tdkernels.gemm_rs_ref(s.x, s.weight),
    },
    ("gemm_rs", True): {
        "gemm": lambda s: (s.full @ s.weight, s.full.t() @ s.x),
        "collective": lambda s: all_gather_rows(s.dy),
        "sequence": _backward_of_rs,
    },
}


def _torch_fused(case):
    name = dist.group.WORLD.group_name

    def ag_gemm(s):
        # For few rows it would use multicast, but not if it has to return what it gathered.
        return_gathered = case.shape.m <= 2048
        fused = torch.ops.symm_mem.fused_all_gather_matmul
        return fused(s.x, [s.weight.t()], 0, name, return_A=return_gathered)[1][0]

    def gemm_rs(s):
        return torch.ops.symm_mem.fused_matmul_reduce_scatter(s.x, s.weight.t(), "sum", 0, name)

    return ag_gemm if case.operator == "ag_gemm" else gemm_rs


def _ours(case, config=None):
    if not case.backward:
        operator = getattr(tdkernels, case.operator)
        return lambda s: operator(s.x, s.weight, config=config)
    # The op itself, as torch + NCCL does not pay for autograd here either. "": it chooses its own configs.
    backward = getattr(torch.ops.tdkernels, f"{case.operator}_backward")
    group = resolve_group().group_name
    if case.operator == "ag_gemm":
        return lambda s: backward(s.dy, s.x, s.weight, True, True, group, "")
    return lambda s: backward(s.dy, s.x, s.weight, True, True, False, group, "")[:2]


def _default_config(case, s):
    """What the forward takes if it is given none."""
    if case.operator == "ag_gemm":
        return ag_gemm_kernel.default_config_for(s.x, s.weight)
    return gemm_rs_kernel.default_config_for(s.x, s.weight, case.ranks)


def _override(config, overrides):
    tiles = dataclasses.replace(config.tiles, **overrides.get("tiles", {}))
    return dataclasses.replace(config, **{**overrides, "tiles": tiles})


def _methods(case, inputs, overrides):
    """({name: call}, {name: config}, {name: why it is absent})."""
    calls, configs, absent = dict(_PLAIN[case.operator, case.backward]), {}, {}
    if case.backward:
        return calls | {"tdkernels": _ours(case)}, configs, absent
    default = configs["tdkernels-default"] = _default_config(case, inputs)
    calls |= {
        "torch-fused": _torch_fused(case),
        "tdkernels": _ours(case),  # the best config that is known, by mode "cached"
        "tdkernels-default": _ours(case, default),
    }
    for number, override in enumerate(overrides, 1):
        name = f"c{number} {json.dumps(override)}"
        try:
            configs[name] = _override(default, override)
        except TypeError as err:  # a field of the other operator
            absent[name] = str(err)
        else:
            calls[name] = _ours(case, configs[name])
    return calls, configs, absent


# ---- On the ranks ----


def _references(case, sets):
    """Per set its operands, the results in fp32, and how far off torch + NCCL is in the dtype."""
    sequence = _PLAIN[case.operator, case.backward]["sequence"]
    found = []
    for s in sets:
        operands = {name: getattr(s, name).float() for name in ("x", "weight", "dy") if hasattr(s, name)}
        exact = sequence(SimpleNamespace(**operands))
        found.append((s, exact, harness.errors(sequence(s), exact)))
    return found


def _why_absent(name, call, references):
    """None if a method can be timed; raises where ours is wrong, or fails in its default config."""
    reason = harness.why_it_fails(call, references[0][0])
    wrong = None if reason else harness.why_it_is_wrong(call, references)
    if (wrong and name != "torch-fused") or (reason and name.startswith("tdkernels")):
        raise RuntimeError(f"{name}: {wrong or reason}")
    return reason or wrong


@torch.no_grad()
def measure(case, overrides, rounds, burst_ms):
    """What ``harness.time_methods`` finds, with "config", per method; {"absent": why} for one that cannot run here."""
    sets = _input_sets(case)
    calls, configs, absent = _methods(case, sets[0], overrides)
    references = _references(case, sets[:2])  # two: our workspaces have two halves
    for name in [name for name in calls if name not in ("gemm", "collective", "sequence")]:
        if reason := _why_absent(name, calls[name], references):
            absent[name] = reason
            del calls[name]
    del references
    if not case.backward:
        configs["tdkernels"] = tdkernels.explain(case.operator, sets[0].x, sets[0].weight).config
    found = harness.time_methods(calls, sets, rounds, burst_ms)
    tdkernels.synchronize()  # raises if a peer did not come in time while the clock ran
    for name, times in found.items():
        times["config"] = dataclasses.asdict(configs[name]) if name in configs else None
    del sets
    if rank_device().type == "cuda":
        torch.cuda.empty_cache()
    return found | {name: {"absent": reason} for name, reason in absent.items()}


# ---- In the calling process ----


def rows(case, found, link_gbps):
    """One row a method: what was measured and what follows from it."""
    gemm_ms, sequence_ms = found["gemm"]["ms"], found["sequence"]["ms"]
    wire_ms = case.wire_bytes / link_gbps / 1e6 if link_gbps else 0.0
    floor_ms = max(gemm_ms, wire_ms)
    table = []
    for method, times in found.items():
        ms = times.get("ms")
        both = ms is not None and method not in ("gemm", "collective")
        table.append({
            "op": case.operator,
            "pass": "backward" if case.backward else "forward",
            "shape": str(case.shape), "name": case.shape.name,
            "m": case.shape.m, "n": case.shape.n, "k": case.shape.k, "dtype": str(_DTYPE).removeprefix("torch."),
            "method": method,
            "absent": times.get("absent"),
            "ms": ms, "host_ms": times.get("host_ms"), "burst": times.get("burst"),
            "tflops": case.flops / ms / 1e9 if both or method == "gemm" else None,
            "wire_gbps": case.wire_bytes / ms / 1e6 if both or method == "collective" else None,
            "speedup": sequence_ms / ms if both else None,
            "floor_ms": floor_ms,
            "efficiency": floor_ms / ms if both else None,
            "link_gbps": link_gbps,
            "config": times.get("config"),
        })  # fmt: skip
    return table
