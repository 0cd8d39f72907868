"""Count the Python that a call of each operator runs on the host: ``python -m bench.core.call_path``.

Two CPU ranks make the same call without gradients several times. For the first call and for the fifth, rank 0 counts
the files of ``tdkernels/`` that are entered, the changes from one file to another (by calls and by returns), and the
functions of ``tdkernels/`` that are called. Kernels, which the interpreter runs here, are not counted. A GPU adds
stream handling and Triton's launcher.
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
    """Counts what is called while it is installed with ``sys.setprofile``."""

    def __init__(self):
        self.files, self.changes, self.calls = set(), 0, 0
        self._stack = []  # files of the functions of ours that are running

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


def calls():
    """{name: a function that makes the call}, in a rank."""
    rank, bf16 = dist.get_rank(), torch.bfloat16
    draw = lambda *shape, dtype=bf16: torch.randn(*shape).to(dtype)  # noqa: E731
    x, weight = draw(32, 32), draw(32, 32)
    splits, experts = torch.tensor([16, 16], dtype=torch.int32), draw(2, 32, 32)
    ids = torch.tensor([[0, 1], [1, 2], [2, 3], [3, 0]], dtype=torch.int32)
    weights, tokens = torch.full((4, 2), 0.5), draw(4, 32)
    q, cache, lens = draw(2, 4, 16), draw(2, 32, 2, 16), torch.full((2,), 32 - rank, dtype=torch.int32)
    rows = draw(1, 16, 2, 16)
    gate_up, down = draw(2, 64, 32), draw(2, 32, 32)
    bounds = {"num_experts": 4, "max_tokens_per_rank": 4}
    received, handle = tdkernels.ep_dispatch(tokens, ids, weights, num_experts=4)
    combined = received.x.clone()
    return {
        "ag_gemm": lambda: tdkernels.ag_gemm(x, weight),
        "gemm_rs": lambda: tdkernels.gemm_rs(x, weight),
        "gemm_ar": lambda: tdkernels.gemm_ar(x, weight),
        "all_reduce": lambda: tdkernels.all_reduce(x),
        "group_gemm": lambda: tdkernels.group_gemm(x, experts, splits),
        "ulysses_qkv": lambda: tdkernels.ulysses_qkv(x, weight),
        "flash_decode": lambda: tdkernels.flash_decode(q, cache, cache, lens),
        "ag_attention": lambda: tdkernels.ag_attention(rows, rows, rows),
        "ep_dispatch, max_tokens_per_rank": lambda: tdkernels.ep_dispatch(tokens, ids, weights, **bounds),
        "ep_dispatch, exact": lambda: tdkernels.ep_dispatch(tokens, ids, weights, num_experts=4),
        "ep_combine": lambda: tdkernels.ep_combine(combined, handle),
        "tp_moe": lambda: tdkernels.tp_moe(tokens, ids % 2, weights, gate_up, down),
        "ep_moe": lambda: tdkernels.ep_moe(tokens, ids, weights, gate_up, down, num_experts=4),
    }


def measure():
    """In a rank: {operator: (Counter of the first call, Counter of a steady one)}."""
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
    print("| operator | first call: files, changes, calls | steady call: files, changes, calls |\n|---|---|---|")
    for name, counters in found.items():
        print(f"| {name} | " + " | ".join(f"{len(c.files)}, {c.changes}, {c.calls}" for c in counters) + " |")


if __name__ == "__main__":
    main()
