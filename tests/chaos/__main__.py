"""Run a fault campaign: `make chaos CASES=1000 SEED=0`, or `make chaos SECONDS=900 DEVICE=shared`.

Campaigns on different GPUs (CUDA_VISIBLE_DEVICES) can run concurrently with different --seed and --out.
"""

import argparse
import os
import shutil
import sys
import tempfile


def parse(arguments=None):
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--cases", type=int, help="number of cases; 1 prints the calls of each rank")
    parser.add_argument("--seconds", type=float, help="start no case after this time; compilation is not counted")
    parser.add_argument("--seed", type=int, default=0, help="of the first case; later cases use the next seeds")
    parser.add_argument("--device", default="cpu", choices=["cpu", "shared", "cuda"],
                        help="shared: all ranks share the GPUs; cuda: each rank has its own GPU")
    parser.add_argument("--ranks", type=_ranks, default=(2, 3), help="world sizes of the cases, 2 or more; default 2,3")
    parser.add_argument("--ops", type=_names, default=(),
                        help="operators of the cases, such as gemm_ar,ep_moe; specialized: warp-specialized kernels")
    parser.add_argument("--jobs", type=int, help="cases at a time, on the same GPUs; default 4 on the CPU, 1 on GPUs")
    parser.add_argument("--warm-up-jobs", type=int,
                        help="pools that compile at a time, on the same GPUs; default 4, or 2 for more than 4 ranks")
    parser.add_argument("--warm-up-seconds", type=float,
                        help="compile no further operator after this time, and skip the cases that need it")
    parser.add_argument("--spawn", action="store_true", help="do not try to fork the ranks; each start takes longer")
    parser.add_argument("--out", help="folder of the summary; default bench/results/reliability")
    parser.add_argument("--add", action="store_true", help="add the counts to the existing summary")
    return parser.parse_args(arguments)


def _ranks(text):
    world_sizes = tuple(dict.fromkeys(int(size) for size in text.split(",")))
    if min(world_sizes) < 2:
        raise argparse.ArgumentTypeError("a case needs at least 2 ranks")
    return world_sizes


def _names(text):
    return tuple(text.replace(",", " ").split())


def main():
    args = parse()
    # The ranks inherit these; see tests/conftest.py.
    os.environ["TDKERNELS_TEST_DEVICE"] = args.device
    os.environ["TDKERNELS_AUTOTUNE"] = "off"
    os.environ["TDKERNELS_CACHE_DIR"] = cache = tempfile.mkdtemp(prefix="tdkernels-chaos-")
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # a query for GPUs must not prevent the process from forking
    from tests.chaos import campaign  # reads the environment on import

    try:
        return campaign.run_and_report(args)
    finally:
        shutil.rmtree(cache, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
