"""Run every operator variant once on ranks that share one GPU, for tools that instrument kernels.

    compute-sanitizer --tool memcheck --target-processes all python -m bench.reliability.every_kernel

Results are compared with the references, and variants that fail are listed. The tool prints its own findings.
"""

import os
import sys

os.environ["TDKERNELS_TEST_DEVICE"] = "shared"

import torch  # noqa: E402

import tdkernels  # noqa: E402
from tdkernels.launch import RankError  # noqa: E402
from tests.support import ranks, variants  # noqa: E402


def aligned(operator, changes):
    """Run an operator at a size for which kernels use TMA on Hopper."""
    variants.dense.computes(operator, torch.bfloat16, [(128, 128, 128)], exact=True, **changes)


def run(function, args):
    tdkernels.set_timeout(120.0)  # kernels are many times slower under the tool
    function(*args)
    tdkernels.synchronize()


def main(world_size):
    calls = [(name, variant.function, variant.args) for name, variant in variants.ONE_NODE.items()]
    dense = [(one.operator, one.args[2]) for one in variants.ONE_NODE.values() if one.function is variants._exact]
    calls += [(f"{operator} {changes}, aligned", aligned, (operator, changes)) for operator, changes in dense]
    failed = 0
    for name, function, args in calls:
        try:
            ranks.on_ranks(world_size, run, function, args)
            print(f"passed {name}", flush=True)
        except RankError as error:
            failed += 1
            print(f"FAILED {name}: {str(error)[-300:]}", flush=True)
    ranks.close_all()
    print(f"{len(calls) - failed} of {len(calls)} variants passed", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 2)
