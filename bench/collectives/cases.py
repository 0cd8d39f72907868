"""Benchmark the collectives against NCCL and torch's symmetric-memory all-reduce, by message size.

The message is the full tensor, as in nccl-tests: the output of all_gather, the input of reduce_scatter and all_reduce.
The floor is the minimum number of bytes received per GPU over the best rate of a link.
"""

import dataclasses
import json
import re
from dataclasses import dataclass
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem  # defines torch.ops.symm_mem

import tdkernels
from bench.core import graphs, harness
from bench.core.measure import timed
from bench.dense.operators import DTYPE
from tdkernels.launch import rank_device
from tdkernels.ops.collectives.config import EXCHANGES, default_config
from tdkernels.ops.common.torch_collectives import all_gather_rows, reduce_scatter_rows

OPERATORS = list(EXCHANGES)
SIZES = [1 << exponent for exponent in range(10, 29, 2)]  # 1 KiB … 256 MiB
REHEARSAL_SIZES = [1 << 10, 1 << 14]
PEERS = ("torch-symm-one-shot", "torch-symm-two-shot")
_UNITS = {"": 0, "K": 10, "M": 20, "G": 30}
_COLD_BYTES = 256 << 20  # total size of the input sets that calls cycle through: several times any L2 cache
_MAX_SETS = 8


def parse(text):
    """Parse comma-separated sizes such as 4K,1M into bytes."""
    sizes = []
    for word in text.split(","):
        match = re.fullmatch(r"([1-9]\d*)([KMG]?)", word)
        if match is None:
            raise ValueError(f"--bytes must be sizes such as 64K,1M, not {text!r}")
        sizes.append(int(match[1]) << _UNITS[match[2]])
    return list(dict.fromkeys(sizes))


def format_size(nbytes):
    """Return a size as text: 4K for 4096."""
    unit = max((unit for unit, shift in _UNITS.items() if nbytes % (1 << shift) == 0), key=_UNITS.get)
    return f"{nbytes >> _UNITS[unit]}{unit}"


@dataclass(frozen=True)
class Case:
    """One benchmark case: a collective with a message of ``nbytes`` on ``ranks`` ranks."""

    operator: str
    nbytes: int
    ranks: int

    def __str__(self):
        return f"{self.operator} {format_size(self.nbytes)}"

    @property
    def wire_bytes(self):
        """Minimum number of bytes that a GPU receives from its peers."""
        return self.nbytes * (self.ranks - 1) // self.ranks * (2 if self.operator == "all_reduce" else 1)

    def why_not(self):
        """Return the reason why the case cannot be measured, or None."""
        multiple = DTYPE.itemsize * (1 if self.operator == "all_reduce" else self.ranks)
        return f"{self.nbytes} bytes are no multiple of {multiple}" if self.nbytes % multiple else None

    def inputs(self, seed):
        """Return this rank's x, drawn with ``seed``."""
        generator = torch.Generator(rank_device()).manual_seed(seed * self.ranks + dist.get_rank())
        count = self.nbytes // DTYPE.itemsize // (self.ranks if self.operator == "all_gather" else 1)
        return SimpleNamespace(x=torch.randn(count, generator=generator, dtype=DTYPE, device=rank_device()))


# ---- on the ranks ----


@harness.measurement
def measure(case, plan):
    """Check and time all methods of a case. Returns the same as ``bench.core.measure.measure``."""
    count = max(2, min(_MAX_SETS, -(-_COLD_BYTES // case.nbytes)))
    sets = [case.inputs(seed) for seed in range(count)]
    methods, configs, absent = _methods(case, plan)
    references = _references(case, sets[:2])  # two, because workspaces are double-buffered
    for name in list(methods):
        _, checked = methods[name]
        reason = harness.failure_reason(checked, sets[0]) or harness.mismatch_reason(checked, references)
        if reason and name.startswith("tdkernels"):
            raise RuntimeError(f"{name}: {reason}")
        if reason:
            absent[name] = reason
            del methods[name]
    if "tdkernels" in methods:
        configs["tdkernels"] = tdkernels.explain(case.operator, sets[0].x).config
    calls = {name: call for name, (call, _) in methods.items()}
    captured, not_captured = {}, {}
    if plan.cuda_graph:
        unchecked = [name for name, (call, checked) in methods.items() if call is not checked]
        captured, not_captured = graphs.capture_all(calls, sets, references, unchecked)
    del references
    return timed(calls, captured, sets, plan, configs, absent, not_captured)


def _references(case, sets):
    """Return references in the form of ``measure._references``."""
    reference = getattr(tdkernels, f"{case.operator}_ref")
    found = []
    for s in sets:
        exact = reference(s.x.float())
        found.append((s, exact, harness.errors(reference(s.x), exact)))
    return found


def _methods(case, plan):
    """Return ({name: (call to time, call to check)}, {name: config}, {name: reason for absence})."""
    ours = getattr(tdkernels, case.operator)
    methods, configs, absent = {"nccl": _nccl(case), "tdkernels": (lambda s: ours(s.x),) * 2}, {}, {}
    for name in (name for name in PEERS if name in plan.peers and case.operator == "all_reduce"):
        if rank_device().type == "cuda":
            try:
                methods[name] = _torch_symm(case, name)
            except Exception as err:
                absent[name] = f"{type(err).__name__}: {err}".splitlines()[0]
        else:
            absent[name] = "torch's symmetric memory needs GPUs"
        if harness.slowest([name in absent])[0]:  # failed on some rank: all ranks must measure the same peers
            methods.pop(name, None)
            absent.setdefault(name, "failed on another rank")

    def default(exchange=None):
        return default_config(case.operator, case.nbytes, case.ranks, rank_device(), exchange)

    configs["tdkernels-default"] = default()
    for exchange in EXCHANGES[case.operator]:
        configs[f"tdkernels-{exchange.replace('_', '-')}"] = default(exchange)
    for number, override in enumerate(plan.overrides, 1):
        try:
            configs[f"tdkernels c{number} {json.dumps(override)}"] = dataclasses.replace(default(), **override)
        except TypeError as err:  # a field of another operator
            absent[f"c{number} {json.dumps(override)}"] = str(err)
    for name, config in configs.items():
        methods[name] = (lambda s, config=config: ours(s.x, config=config),) * 2
    return methods, configs, absent


def _nccl(case):
    if case.operator == "all_gather":
        return (lambda s: all_gather_rows(s.x),) * 2
    if case.operator == "reduce_scatter":
        return (lambda s: reduce_scatter_rows(s.x),) * 2
    # In place, without a copy. The sum is repeated; values other than zero would overflow.
    zeros = torch.zeros(case.nbytes // DTYPE.itemsize, dtype=DTYPE, device=rank_device())
    return lambda s: dist.all_reduce(zeros), lambda s: tdkernels.all_reduce_ref(s.x)


def _torch_symm(case, name):
    """Use torch's kernels on a tensor that is already in symmetric memory, so that no copy into it is timed."""
    group = dist.group.WORLD.group_name
    buffer = symm_mem.empty(case.nbytes // DTYPE.itemsize, dtype=DTYPE, device=rank_device())
    symm_mem.rendezvous(buffer, group)
    buffer.zero_()
    one_shot, two_shot = torch.ops.symm_mem.one_shot_all_reduce, torch.ops.symm_mem.two_shot_all_reduce_

    def call(s):
        return one_shot(buffer, "sum", group) if name == PEERS[0] else two_shot(buffer, "sum", group)

    def checked(s):
        buffer.copy_(s.x)
        result = call(s).clone()
        torch.cuda.synchronize()
        dist.barrier()  # peers may still read the buffer, which is overwritten next
        buffer.zero_()
        torch.cuda.synchronize()
        dist.barrier()
        return result

    return call, checked


# ---- in the calling process ----


def rows(case, found, link_gbps):
    """Return one row per method, with the measured times and the derived values."""
    nccl = {graph: times.get("ms") for method, graph, times in found if method == "nccl"}
    floor_ms = case.wire_bytes / link_gbps / 1e6 if link_gbps else None
    table = []
    for method, graph, times in found:
        ms = times.get("ms")
        table.append({
            "op": case.operator, "what": "collective", "pass": "forward", "bytes": case.nbytes,
            "shape": format_size(case.nbytes), "name": "", "dtype": str(DTYPE).removeprefix("torch."),
            "method": method, "graph": graph, "absent": times.get("absent"),
            "ms": ms, "host_ms": times.get("host_ms"), "burst": times.get("burst"), "tflops": None,
            "wire_gbps": case.wire_bytes / ms / 1e6 if ms else None,
            "speedup": nccl[graph] / ms if ms and nccl.get(graph) else None,
            "floor_ms": floor_ms, "efficiency": floor_ms / ms if ms and floor_ms else None, "link_gbps": link_gbps,
            "config": times.get("config"),
        })
    return table
