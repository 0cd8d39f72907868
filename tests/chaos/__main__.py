"""Run a fault campaign: `make chaos CASES=1000 SEED=0`, or `make chaos SECONDS=900 DEVICE=shared`."""

import argparse
import os
import shutil
import sys
import tempfile


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--cases", type=int, help="number of cases; 1 prints the calls of each rank")
    parser.add_argument("--seconds", type=float, help="start no case after this time; compilation is not counted")
    parser.add_argument("--seed", type=int, default=0, help="of the first case; later cases use the next seeds")
    parser.add_argument("--device", default="cpu", choices=["cpu", "shared"])
    parser.add_argument("--jobs", type=int, help="cases at a time; default 4 on the CPU, 1 on a GPU")
    parser.add_argument("--out", help="folder of the summary; default bench/results/reliability")
    parser.add_argument("--add", action="store_true", help="add the counts to the existing summary")
    args = parser.parse_args()
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
