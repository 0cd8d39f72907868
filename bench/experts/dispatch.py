"""Benchmark expert-parallel dispatch and combine against NCCL with permutes and other libraries, by tokens per rank.

    ep_dispatch, ep_combine     one direction alone. The payload of a dispatch is "bf16", "fp8" (quantized by the
                                dispatch), or "fp8-given" (already quantized, with scales)
    ep_latency                  a dispatch and a combine, each pair timed separately: median and 99th percentile
    all_to_all                  rows to their destination ranks

The floor is the number of bytes that the busiest GPU sends or receives over the best rate of a link. A token counts
once per destination rank, and not at all for the sender's own rank.
"""

import dataclasses
import json
import re
from dataclasses import dataclass
from types import SimpleNamespace

import torch
import torch.distributed as dist

import tdkernels
from bench.core import graphs, harness
from bench.core.measure import timed
from bench.dense.operators import DTYPE
from bench.experts import dispatch_methods, dispatch_peers, latency
from tdkernels.launch import rank_device
from tdkernels.ops.experts.dispatch.config import default_config

OPERATORS = ["ep_dispatch", "ep_combine", "ep_latency", "all_to_all"]
PEERS = tuple(dispatch_peers.PEERS)
TOKENS = (8192, 4096, 2048, 512, 128, 32, 8, 1)  # the largest first, so that workspaces never grow
LATENCY_TOKENS = (128, 32, 8, 1)
REHEARSAL_TOKENS = (4,)
PAYLOADS = ("bf16", "fp8", "fp8-given")  # the largest first, too
ROUTINGS = ("balanced", "skewed")
LAYER = (7168, 256, 8)
REHEARSAL_LAYER = (128, 4, 2)
_SKEW = 0.6  # the probability of the expert with rank r is proportional to r ** -0.6
_WORST_CASE_ROWS = 8192  # max_tokens is the worst case up to this many rows, and twice the balanced number above
_COLD_BYTES = 256 << 20  # total size of the input sets that calls cycle through: several times any L2 cache
_MAX_SETS = 8


def parse_layer(text):
    """Parse (H, E, k) from a text such as 7168x256x8."""
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)x([1-9]\d*)", text)
    if match is None:
        raise ValueError(f"--moe must be HxExk such as {'x'.join(map(str, LAYER))}, not {text!r}")
    return tuple(map(int, match.groups()))


@dataclass(frozen=True)
class Case:
    """One benchmark case: an operator with ``tokens`` tokens per rank on ``ranks`` ranks."""

    operator: str
    tokens: int
    ranks: int
    hidden: int
    experts: int
    choices: int
    payload: str
    routing: str

    def __str__(self):
        payload = "" if self.operator in ("ep_combine", "all_to_all") else f" {self.payload}"
        return f"{self.operator}{payload} {self.tokens} tokens{' skewed' * (self.routing == 'skewed')}"

    @property
    def wire_dtype(self):
        """The dtype of a row during the transfer."""
        return "bfloat16" if self.payload == "bf16" else "float8_e4m3fn"

    @property
    def row_bytes(self):
        """Bytes of a transferred row, including scales; for ep_latency the sum of both directions."""
        back = self.hidden * DTYPE.itemsize
        there = back if self.payload == "bf16" else self.hidden + 4 * -(-self.hidden // dispatch_methods.QUANTUM)
        return {"ep_combine": back, "ep_latency": there + back}.get(self.operator, there)

    def why_not(self):
        """Return the reason why the case cannot be measured, or None."""
        if self.experts % self.ranks:
            return f"E = {self.experts} is not divisible by {self.ranks} ranks"
        if self.choices > self.experts:
            return f"k = {self.choices} is more than E = {self.experts}"
        if self.hidden % dispatch_methods.QUANTUM:
            return f"H = {self.hidden} is not divisible by {dispatch_methods.QUANTUM}"
        return None

    def ids_of_all(self, seed):
        """Draw the experts of all ranks' tokens, [W, T, k], the same on each rank."""
        ids = drawn_ids(self.ranks, self.tokens, self.experts, self.choices, self.routing, seed)
        return ids.sort(1)[0] if self.operator == "all_to_all" else ids

    def inputs(self, seed):
        """Return this rank's operands and the traffic of all ranks' routing, drawn with ``seed``."""
        ids, me, device = self.ids_of_all(seed), dist.get_rank(), rank_device()
        generator = torch.Generator(device).manual_seed(seed * self.ranks + me)
        s = SimpleNamespace(ids=ids[me].int().contiguous(), scales=None)
        s.weights = torch.rand(self.tokens, self.choices, generator=generator, device=device) + 0.1
        s.x = torch.randn(self.tokens, self.hidden, generator=generator, dtype=DTYPE, device=device)
        if self.payload == "fp8-given":
            s.x, s.scales = dispatch_methods.quantized(s.x)
        local = self.experts // self.ranks
        s.counts = torch.bincount(ids[me].flatten(), minlength=self.experts)
        s.rows, s.most_rows, *s.crossing = traffic(ids // local, me)
        return s


def drawn_ids(ranks, tokens, experts, choices, routing, seed):
    """Draw k distinct experts for each token of all ranks, [W, T, k], the same on each rank."""
    device = rank_device()
    generator = torch.Generator(device).manual_seed(seed)
    draw = torch.rand(ranks * tokens, experts, generator=generator, device=device)
    if routing == "skewed":
        order = torch.randperm(experts, generator=torch.Generator().manual_seed(0)).to(device) + 1
        draw = -torch.log(-torch.log(draw)) - _SKEW * torch.log(order)  # Gumbel top-k: sampling without replacement
    return draw.topk(choices, sorted=False)[1].view(ranks, tokens, choices)


def traffic(dest, me):
    """Count the traffic of a routing.

    Args:
        dest: destination ranks of the top-k assignments, [W, T, k].

    Returns:
        (rows received by rank ``me``, rows received by the busiest rank, tokens sent or received by the busiest rank
        if a token counts once per destination rank, the same if it counts once per assignment). The last two exclude
        rows for the sender's own rank.
    """
    ranks = dest.shape[0]
    assignments = torch.stack([(dest == r).sum((1, 2)) for r in range(ranks)], 1)  # [from, to]
    once = torch.stack([(dest == r).any(2).sum(1) for r in range(ranks)], 1)
    rows = assignments.sum(0)
    remote = [(n - torch.diag(n.diagonal())) for n in (once, assignments)]
    return int(rows[me]), int(rows.max()), *(int(torch.maximum(n.sum(0), n.sum(1)).max()) for n in remote)


def capacity(case, most_rows):
    """Return max_tokens of a case."""
    worst = case.ranks * case.tokens * min(case.choices, case.experts // case.ranks)
    rows = worst if worst <= _WORST_CASE_ROWS else 2 * case.tokens * case.choices
    return min(max(rows, most_rows), worst)


# ---- on the ranks ----


@harness.measurement
def measure(case, plan):
    """Check and time all methods of a case. Returns the same as ``measure.measure``, plus the routing's traffic."""
    sets = _input_sets(case)
    max_tokens = capacity(case, max(s.most_rows for s in sets))
    methods, absent = _methods(case, plan, max_tokens, sets)
    references = _references(case, sets[:2])  # two, because workspaces are double-buffered
    for name in list(methods):
        if reason := _absent_reason(name, methods[name], references):
            absent[name] = reason
            del methods[name]
    for method in methods.values():
        for s in sets[2:]:  # without max_tokens, a set may need a larger workspace than the two checked ones
            method.call(s)
    calls = {name: method.call for name, method in methods.items()}
    configs = {name: method.config for name, method in methods.items()}
    if case.operator == "ep_latency":
        found = latency.measure(methods, sets, plan, configs, absent)
    else:
        captured, not_captured = _in_graphs(methods, sets, references) if plan.cuda_graph else ({}, {})
        del references
        found = timed(calls, captured, sets, plan, configs, absent, not_captured)
    summary = {
        "wire_bytes": sum(s.crossing[0] for s in sets) / len(sets) * case.row_bytes,
        "wire_bytes_per_expert": sum(s.crossing[1] for s in sets) / len(sets) * case.row_bytes,
        "most_rows": max(s.most_rows for s in sets), "max_tokens": max_tokens,
    }
    return [(method, graph, {**times, **summary}) for method, graph, times in found]


def _input_sets(case):
    """Return the operand sets, including the inputs of combines: expert outputs and the sizes of the routing."""
    sets = [case.inputs(0)]
    nbytes = sets[0].x.nbytes if case.operator != "ep_combine" else sets[0].rows * case.row_bytes
    count = int(max(2, min(_MAX_SETS, -(-_COLD_BYTES // max(nbytes, 1))))) if rank_device().type == "cuda" else 2
    count = int(harness.slowest([count])[0])  # the number of rows differs between ranks
    sets += [case.inputs(seed) for seed in range(1, count)]
    if case.operator in ("ep_combine", "ep_latency"):
        max_tokens = capacity(case, max(s.most_rows for s in sets))
        generator = torch.Generator(rank_device()).manual_seed(1 + dist.get_rank())
        for s in sets:
            s.expert_out = torch.randn(
                max_tokens, case.hidden, generator=generator, dtype=DTYPE, device=rank_device()
            )
    for s in sets:
        dispatch_methods.add_known_sizes(case, s)
    return sets


def _methods(case, plan, max_tokens, sets):
    """Return ({name: dispatch_methods.Method}, {name: reason for absence})."""
    methods, absent = dispatch_methods.sequences(case, sets), {}
    known = [name for name in plan.peers if name in PEERS]
    for name in (name for name in known if case.operator in dispatch_peers.PEERS[name].operators):
        method = reason = None
        try:
            method = dispatch_peers.PEERS[name].method(case, max_tokens, sets)
        except dispatch_peers.Absent as err:
            reason = str(err)
        except Exception as err:
            reason = f"{type(err).__name__}: {err}".splitlines()[0][:200]
        if harness.slowest([reason is not None])[0]:  # failed on some rank: all ranks must measure the same peers
            absent[name] = reason or "failed on another rank"
        else:
            methods[name] = method
    default = default_config(rank_device())
    methods |= dispatch_methods.ours(case, max_tokens, sets)
    for number, override in enumerate(plan.overrides, 1):
        name = f"tdkernels c{number} {json.dumps(override)}"
        try:
            config = dataclasses.replace(default, **override)
        except TypeError as err:  # a field of another operator
            absent[name] = str(err)
        else:
            methods[name] = dispatch_methods.ours_with(case, max_tokens, sets, config)
    return methods, absent


def _references(case, sets):
    """Return [(operands, fp32 results, errors of plain torch in the transferred dtype)], one entry per input set."""
    found = []
    for s in sets:
        if case.operator == "all_to_all":
            out, splits = tdkernels.all_to_all_ref(s.x.float(), s.counts)
            exact, plain = (out, splits.float()), (out, splits.float())
        elif case.operator == "ep_dispatch":
            exact = _dispatched(case, s, dispatch_methods.dequantized(s.x, s.scales))
            plain = exact
            if case.payload == "fp8":
                plain = _dispatched(case, s, dispatch_methods.dequantized(*dispatch_methods.quantized(s.x)))
        else:
            _, state = tdkernels.ep_dispatch_ref(s.x[:, :1].float(), s.ids, s.weights, num_experts=case.experts)
            rows = s.expert_out[: s.rows]
            exact, plain = ((tdkernels.ep_combine_ref(r, state).float(),) for r in (rows.float(), rows))
        found.append((s, exact, _errors(plain, exact)))
    return found


def _dispatched(case, s, x):
    recv, _ = tdkernels.ep_dispatch_ref(x, s.ids, s.weights, num_experts=case.experts)
    return recv.x, recv.splits.float(), recv.topk_weights


def _errors(outputs, exact):
    """Return errors as ``harness.errors``, for outputs that may be empty."""
    found = []
    for output, expected in zip(outputs, exact, strict=True):
        error = float("inf")
        if output.shape == expected.shape:
            error = ((output - expected).norm() / (expected.norm() if expected.norm() > 0 else 1)).item()
        found.append(error if error == error else float("inf"))
    return harness.slowest(found)


def _mismatch_reason(plain, call, references):
    for s, exact, allowed in references:
        got = _errors(plain(call(s)), exact)
        if any(error > 2 * plain_error for error, plain_error in zip(got, allowed, strict=True)):
            return f"wrong: relative errors {got}, plain torch has {allowed}"
    return None


def _absent_reason(name, method, references):
    """Return None if a method can be timed, else the reason.

    Raises:
        RuntimeError: if tdkernels or the baseline is wrong, or fails with its default config.
    """
    reason = harness.failure_reason(method.call, references[0][0])
    wrong = None if reason else _mismatch_reason(method.plain, method.call, references)
    ours = name.startswith(("tdkernels", "sequence"))
    if ours and (wrong or (reason and "{" not in name)):
        raise RuntimeError(f"{name}: {wrong or reason}")
    return reason or wrong


def _in_graphs(methods, sets, references):
    """Capture the methods that do not wait on the host. Returns the same as ``graphs.capture_all``."""
    calls = {name: method.call for name, method in methods.items() if not method.host_waits}
    captured, reasons = graphs.capture_all(calls, sets, None, unchecked=calls)
    for name in list(captured):
        outputs = captured[name].outputs
        wrong = _mismatch_reason(methods[name].plain, lambda _, outputs=outputs: outputs, references[:1])
        if wrong:
            reasons[name] = wrong
            del captured[name]
    reasons |= {name: "the host waits for the number of rows" for name in methods if name not in calls}
    return captured, reasons


# ---- in the calling process ----


def rows(case, found, link_gbps):
    """Return one row per method, with the measured times and the derived values."""
    sequence = {(method, graph): times.get("ms") for method, graph, times in found}
    table = []
    for method, graph, times in found:
        ms, wire = times.get("ms"), times["wire_bytes"]
        base = sequence.get(("sequence", graph)) or sequence.get(("sequence-known-splits", graph))
        floor_ms = wire / link_gbps / 1e6 if link_gbps else None
        table.append({
            "op": case.operator, "what": "ep", "pass": "forward", "shape": f"{case.tokens}x{case.hidden}",
            "name": case.payload, "tokens": case.tokens, "hidden": case.hidden, "experts": case.experts,
            "choices": case.choices, "payload": case.payload, "routing": case.routing, "dtype": case.wire_dtype,
            "method": method, "graph": graph, "absent": times.get("absent"),
            "ms": ms, "p99_ms": times.get("p99_ms"), "host_ms": times.get("host_ms"), "burst": times.get("burst"),
            "tflops": None, "wire_bytes": wire, "wire_bytes_per_expert": times["wire_bytes_per_expert"],
            "most_rows": times["most_rows"], "max_tokens": times["max_tokens"],
            "wire_gbps": wire / ms / 1e6 if ms else None, "speedup": base / ms if ms and base else None,
            "floor_ms": floor_ms, "efficiency": floor_ms / ms if ms and floor_ms else None, "link_gbps": link_gbps,
            "config": times.get("config"),
        })
    return table


def _latency_payload(payloads):
    return "fp8" if "fp8" in payloads else payloads[0]


def cases(operators, tokens, ranks, layer, payloads, routing):
    """Yield the cases of a run; ``tokens`` None uses the default token counts of each operator."""
    hidden, experts, choices = layer
    for count in tokens or TOKENS:  # all operators of one token count together, in case the time runs out
        for operator in operators:
            if tokens is None and operator == "ep_latency" and count not in LATENCY_TOKENS:
                continue
            if operator == "all_to_all":
                yield Case(operator, count, ranks, hidden, ranks, 1, "bf16", routing)
            elif operator == "ep_combine":
                yield Case(operator, count, ranks, hidden, experts, choices, "bf16", routing)
            else:
                for payload in payloads if operator == "ep_dispatch" else [_latency_payload(payloads)]:
                    yield Case(operator, count, ranks, hidden, experts, choices, payload, routing)
