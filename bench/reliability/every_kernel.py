"""Run every operator in every variant once, on ranks that share one GPU: for tools that watch each kernel.

    compute-sanitizer --tool memcheck --target-processes all python -m bench.reliability.every_kernel

Results are compared with the references, so a variant that fails is named; the tool's findings are its own output.
"""

import os
import sys

os.environ["TDKERNELS_TEST_DEVICE"] = "shared"

import torch  # noqa: E402

import tdkernels  # noqa: E402
from tdkernels.launch import RankError  # noqa: E402
from tests.support import ranks, variants  # noqa: E402


def aligned(operator, changes):
    """A size at which kernels load and store by TMA on Hopper."""
    variants.dense.computes(operator, torch.bfloat16, [(128, 128, 128)], exact=True, **changes)


def run(function, args):
    tdkernels.set_timeout(120.0)  # the tool makes kernels many times slower
    function(*args)
    tdkernels.synchronize()


def main(world_size):
    calls = [(name, way.function, way.args) for name, way in variants.ONE_NODE.items()]
    dense = [(way.operator, way.args[2]) for way in variants.ONE_NODE.values() if way.function is variants._exact]
    calls += [(f"{operator} {changes}, aligned", aligned, (operator, changes)) for operator, changes in dense]
    failed = 0
    for name, function, args in calls:
        try:
            ranks.on_ranks(world_size, run, function, args)
            print(f"ran {name}", flush=True)
        except RankError as error:
            failed += 1
            print(f"FAILED {name}: {str(error)[-300:]}", flush=True)
    ranks.close_all()
    print(f"{len(calls) - failed} of {len(calls)} variants are right", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 2)
