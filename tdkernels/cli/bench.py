"""``python -m tdkernels bench``: its arguments. What they do is in the repository's folder ``bench``."""

import importlib
import json
import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]


def add_arguments(parser):
    parser.add_argument(
        "operators", nargs="*", metavar="operator",
        help="ag_gemm, gemm_rs, gemm_ar, all of them if left out; if named: all_gather, reduce_scatter, all_reduce, "
        "ep_dispatch, ep_combine, ep_latency, all_to_all; apart from those: tp_moe, ep_moe; ag_attention, ulysses_qkv, "
        "ulysses_out; by itself, on one GPU: group_gemm; by itself, on one or more: flash_decode",
    )
    parser.add_argument(
        "--shapes", metavar="NAME,…", help="groups by name, or sizes as MxNxK; all but the sweeps if left out; "
        "of group_gemm shapes by name, or RxNxKxE; of tp_moe or TxIxHxExk, of ep_moe or HxIxExk, of flash_decode or "
        "BxHqxHkvxDxS, of ag_attention or SxHqxHkvxD",
    )
    parser.add_argument(
        "--tokens", metavar="M,M,…",
        help="numbers of rows of the layers of a model, instead of 8192: a sweep; of expert parallelism tokens a rank; "
        "of flash_decode keys a rank; of ag_attention and ulysses_… those of all ranks",
    )
    parser.add_argument(
        "--bytes", metavar="SIZE,…", help="of collectives alone: sizes of the full tensor, such as 64K,1M (1K … 256M)"
    )
    parser.add_argument(
        "--moe", default="7168x256x8", metavar="HxExk",
        help="of expert parallelism: hidden size, experts, experts of a token (7168x256x8)",
    )
    parser.add_argument(
        "--payload", metavar="NAME,…",
        help="of ep_dispatch and ep_latency: bf16, fp8 (quantized on its way), fp8-given (all)",
    )
    parser.add_argument(
        "--routing", default="balanced", metavar="NAME",
        help="of expert parallelism and group_gemm: balanced, or skewed (balanced)",
    )
    parser.add_argument(
        "--sharding", metavar="NAME,…", help="of ag_attention: zigzag, contiguous (both)"
    )
    parser.add_argument(
        "--peers", default="all", metavar="NAME,…", help="what else to measure: all, none, or names (all)"
    )
    parser.add_argument("--nproc", type=int, metavar="W", help="ranks; as many as there are GPUs if left out")
    parser.add_argument("--seconds", type=float, metavar="S", help="begin nothing more after so long (no limit)")
    parser.add_argument("--rounds", type=int, default=10, metavar="N", help="bursts of each method (10)")
    parser.add_argument("--backward", action="store_true", help="measure the backward as well")
    parser.add_argument("--cuda-graph", action="store_true", help="measure each method in a CUDA graph as well")
    parser.add_argument(
        "--config", type=_json_object, action="append", default=[], metavar="JSON",
        help='fields of the default config to change, as one more method: {"tiles": {"block_n": 128}}; repeatable',
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="where the rows go (bench/results)")
    parser.add_argument("--report", action="store_true", help="measure nothing; make tables and plots of the rows")


def _json_object(text):
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError
    return value


_json_object.__name__ = "JSON object"  # argparse says it


def main(options):
    """Exit code 0; 1 if something could not be measured; 2 for arguments that make no sense, or without benchmarks."""
    if not all((_ROOT / file).is_file() for file in ("bench/run.py", "pyproject.toml")):
        print(
            "bench: the benchmarks are not installed with tdkernels, they are in its repository: run this from a clone",
            file=sys.stderr,
        )
        return 2
    if str(_ROOT) not in sys.path:
        sys.path.insert(0, str(_ROOT))
    return importlib.import_module("bench.run").main(options)
