"""Count the Python functions that each operator executes per call: ``python -m bench.core.call_path``.

Two CPU ranks make the same call without gradients several times. For the first and the fifth call, rank 0 counts the
files of ``tdkernels/`` that are entered, the transitions from one file to another (by call or return), and the calls
of functions of ``tdkernels/``. Kernels are interpreted on the CPU and are not counted. On a GPU, stream handling and
Triton's launcher are added.
"""

import contextlib
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import tdkernels
from tdkernels.lang.kernel import Kernel
from tdkernels.launch import run_ranks

_PACKAGE = str(Path(tdkernels.__file__).parent)
_STEADY = 5  # the call that counts as steady


class Counter:
    """Profile function for ``sys.setprofile`` that counts the calls into tdkernels."""

    def __init__(self):
        self.files, self.changes, self.calls = set(), 0, 0
        self._stack = []  # files of the tdkernels functions on the call stack

    def __call__(self, frame, event, _):
        file = frame.f_code.co_filename
        if event not in ("call", "return") or not file.startswith(_PACKAGE):
            return
        if event == "call":
            self.calls += 1
            self.files.add(file)
            self.changes += bool(self._stack) and self._stack[-1] != file
            self._stack.append(file)
        elif self._stack:  # else the function was called before the counter was installed
            self._stack.pop()
            self.changes += bool(self._stack) and self._stack[-1] != file


@contextlib.contextmanager
def kernels_not_counted():
    """Suspend the profile function while a kernel is interpreted."""
    run = Kernel.run

    def suspended(self, *args, **options):
        counter = sys.getprofile()
        sys.setprofile(None)
        try:
            return run(self, *args, **options)
        finally:
            sys.setprofile(counter)

    Kernel.run = suspended
    try:
        yield
    finally:
        Kernel.run = run


def _operands(device):
    """Return the operands of all calls on this rank, by name."""
    rank, bf16 = dist.get_rank(), torch.bfloat16
    draw = lambda *shape, dtype=bf16: torch.randn(*shape).to(device, dtype)  # noqa: E731
    make = lambda data: torch.tensor(data, dtype=torch.int32, device=device)  # noqa: E731
    return {
        "x": draw(32, 32), "weight": draw(32, 32), "splits": make([16, 16]), "experts": draw(2, 32, 32),
        "ids": make([[0, 1], [1, 2], [2, 3], [3, 0]]), "weights": draw(4, 2, dtype=torch.float32),
        "tokens": draw(4, 32), "q": draw(2, 4, 16), "cache": draw(2, 32, 2, 16), "lens": make([32 - rank] * 2),
        "rows": draw(1, 16, 2, 16), "gate_up": draw(2, 64, 32), "down": draw(2, 32, 32),
    }


def calls(device="cpu"):
    """Return {name: a function that makes the call} for this rank."""
    given = _operands(device)
    x, weight, cache, rows = given["x"], given["weight"], given["cache"], given["rows"]
    tokens, ids, weights = given["tokens"], given["ids"], given["weights"]
    gate_up, down = given["gate_up"], given["down"]
    bounds = {"num_experts": 4, "max_tokens_per_rank": 4}
    received, handle = tdkernels.ep_dispatch(tokens, ids, weights, num_experts=4)
    combined, ids_of_slices = received.x.clone(), ids % 2
    return {
        "ag_gemm": lambda: tdkernels.ag_gemm(x, weight),
        "gemm_rs": lambda: tdkernels.gemm_rs(x, weight),
        "gemm_ar": lambda: tdkernels.gemm_ar(x, weight),
        "all_reduce": lambda: tdkernels.all_reduce(x),
        "group_gemm": lambda: tdkernels.group_gemm(x, given["experts"], given["splits"]),
        "ulysses_qkv": lambda: tdkernels.ulysses_qkv(x, weight),
        "flash_decode": lambda: tdkernels.flash_decode(given["q"], cache, cache, given["lens"]),
        "ag_attention": lambda: tdkernels.ag_attention(rows, rows, rows),
        "ep_dispatch, max_tokens_per_rank": lambda: tdkernels.ep_dispatch(tokens, ids, weights, **bounds),
        "ep_dispatch, exact": lambda: tdkernels.ep_dispatch(tokens, ids, weights, num_experts=4),
        "ep_combine": lambda: tdkernels.ep_combine(combined, handle),
        "tp_moe": lambda: tdkernels.tp_moe(tokens, ids_of_slices, weights, gate_up, down),
        "ep_moe": lambda: tdkernels.ep_moe(tokens, ids, weights, gate_up, down, num_experts=4),
        "ep_moe, max_tokens_per_rank": lambda: tdkernels.ep_moe(tokens, ids, weights, gate_up, down, **bounds),
    }


def training_calls(device="cpu"):
    """Return {name: a function that runs a forward and a backward pass} for this rank."""
    given = _operands(device)
    x, weight, rows = (given[name].requires_grad_() for name in ("x", "weight", "rows"))
    layer = [given[name].requires_grad_() for name in ("tokens", "weights", "gate_up", "down")]
    tokens, weights, *experts = layer
    ids, ids_of_slices = given["ids"], given["ids"] % 2
    call_ep_moe = lambda: tdkernels.ep_moe(tokens, ids, weights, *experts, num_experts=4)  # noqa: E731

    def step(call, operands):
        y = call()
        torch.autograd.grad(y, operands, torch.ones_like(y))

    return {
        "ag_gemm, training": lambda: step(lambda: tdkernels.ag_gemm(x, weight), [x, weight]),
        "ag_attention, training": lambda: step(lambda: tdkernels.ag_attention(rows, rows, rows), [rows]),
        "tp_moe, training": lambda: step(lambda: tdkernels.tp_moe(tokens, ids_of_slices, weights, *experts), layer),
        "ep_moe, training": lambda: step(call_ep_moe, layer),
    }


def measure():
    """Return {operator: (Counter of the first call, Counter of a steady call)} on this rank."""
    found = {}
    with torch.no_grad(), tdkernels.autotune.mode("off"), kernels_not_counted():
        for name, call in calls().items():
            counters = []
            for _ in range(_STEADY):
                counters.append(Counter())
                sys.setprofile(counters[-1])
                try:
                    call()
                finally:
                    sys.setprofile(None)
            found[name] = counters[0], counters[-1]
    return found


def main():
    found = run_ranks(2, measure, device="cpu")[0]
    print("| operator | first: files, changes, calls | steady: files, changes, calls |\n|---|---|---|")
    for name, counters in found.items():
        print(f"| {name} | " + " | ".join(f"{len(c.files)}, {c.changes}, {c.calls}" for c in counters) + " |")


if __name__ == "__main__":
    main()
