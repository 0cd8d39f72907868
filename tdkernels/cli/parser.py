"""The arguments of ``python -m tdkernels``.

This module does not import torch, so that help texts and usage errors appear at once. The commands check later what
depends on the operators.
"""

import argparse
import json
from collections.abc import Iterable
from pathlib import Path

from tdkernels.cli.suggest import did_you_mean

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp8": "float8_e4m3fn"}  # torch's names
TRACED = (
    "ag_attention", "ag_gemm", "ep_combine", "ep_dispatch", "flash_decode", "gemm_ar", "gemm_rs", "moe_ag_gemm",
    "moe_gemm_rs", "ulysses_out", "ulysses_qkv",
)


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that suggests a similar word for an invalid choice."""

    def _check_value(self, action, value):
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            text = error.message + did_you_mean(value, action.choices)
            raise argparse.ArgumentError(action, text) from None


def parse(argv: list[str] | None, version: str) -> argparse.Namespace | None:
    """Parse the command line; None if there was only help to print.

    Unknown arguments are reported by the parser of the subcommand, with its usage.
    """
    parser = make_parser(version)
    options, unknown = parser.parse_known_args(argv)
    if unknown:
        options.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if options.command is None or (options.command == "cache" and options.action is None):
        options.parser.print_help()
        return None
    return options


def make_parser(version: str) -> Parser:
    """Return the parser of all commands."""
    parser = Parser(
        prog="tdkernels",
        description="Check a machine, tune, explain, benchmark and trace the operators of tdkernels.",
        epilog="tdkernels COMMAND --help describes a command.",
    )
    parser.add_argument("--version", action="version", version=f"tdkernels {version}")
    parser.set_defaults(parser=parser)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    for name, add_arguments, summary, description in COMMANDS:
        command = commands.add_parser(name, help=summary, description=description)
        command.set_defaults(parser=command)
        add_arguments(command)
    return parser


def _doctor(parser):
    parser.add_argument("--no-self-test", action="store_true", help="do not start ranks to try the operators")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def _tune(parser):
    parser.add_argument(
        "operator", nargs="?",
        help="ag_gemm, gemm_rs, all_gather, flash_decode ...; default with --model: all. Without --shape and --model, "
        "print the sizes and layouts of the operator",
    )
    parser.add_argument(
        "--shape", action="append", default=[], metavar="SIZES",
        help="sizes of the whole problem, before it is divided between ranks, separated by x: MxNxK of a GEMM, the "
        "elements of the full tensor of a collective. May be given several times",
    )
    parser.add_argument("--model", action="append", default=[], help="layers of a model, such as llama-3.1-70b")
    parser.add_argument(
        "--tokens", default="8192", metavar="M,M,...", help="with --model: numbers of rows (default: 8192)"
    )
    parser.add_argument(
        "--nproc", "--tp", default="auto", metavar="W",
        help="number of ranks; auto: all GPUs, or 2 processes; 1 for single-rank operators such as flash_decode",
    )
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="dtype of the operands (default: bf16)")
    parser.add_argument(
        "--layout",
        help='layout of the operands: "nk" or, as in the backward pass, "kn" of a weight; "causal zigzag" of '
        "ag_attention; default: the usual one",
    )
    parser.add_argument(
        "--device", choices=("auto", "cuda", "cpu"), default="auto", help="device of the ranks (default: auto)"
    )
    parser.add_argument(
        "--budget", type=float, default=20.0, metavar="S", help="seconds for a shape, about (default: 20)"
    )
    parser.add_argument("--again", action="store_true", help="tune shapes that the cache has already, too")
    parser.add_argument(
        "--keep", action="store_true",
        help="keep the result on CPU ranks too; without it, tuning on CPU ranks is a rehearsal that keeps nothing",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def _explain(parser):
    parser.add_argument("operator", help="ag_gemm, gemm_rs, flash_decode ...")
    parser.add_argument(
        "--shape", required=True, metavar="SIZES",
        help="sizes of the whole problem, separated by x: MxNxK of a GEMM; `tdkernels tune OPERATOR` prints the others",
    )
    parser.add_argument(
        "--nproc", "--tp", type=int, metavar="W", help="number of ranks (default: the number of GPUs, at least 2)"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="dtype of the operands (default: bf16)")
    parser.add_argument("--layout", help="layout of the operands, as for tune")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def _cache(parser):
    actions = parser.add_subparsers(dest="action", metavar="ACTION", parser_class=Parser)

    def action(name, text):
        found = actions.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        found.set_defaults(parser=found)
        return found

    show = action("show", "list what was tuned on this machine")
    show.add_argument("operator", nargs="*", help="only these operators")
    show.add_argument("--shipped", action="store_true", help="list the tables shipped with the package instead")
    show.add_argument("--nproc", "--tp", type=int, metavar="W", help="only entries for W ranks")
    show.add_argument("--json", action="store_true", help="print JSON instead of a table, with versions")
    action("path", "print the folder")
    export = action("export", "copy the tables into a folder, adding to those that are there")
    export.add_argument("folder", type=Path)
    export.add_argument("operator", nargs="*", help="only these operators")
    export.add_argument(
        "--newest", action="store_true",
        help="keep only the newest entry for each problem, instead of one for each version of the kernels, and the "
        "newest modelled one: for tables that are to be shipped",
    )
    merge = action("merge", "add tables from files or folders to the cache; their entries win")
    merge.add_argument("source", nargs="+", type=Path)
    clear = action("clear", "delete the cache, or its entries for some operators")
    clear.add_argument("operator", nargs="*", help="only these operators")


def _bench(parser):
    parser.add_argument(
        "operators", nargs="*", metavar="operator",
        help="default: ag_gemm, gemm_rs, gemm_ar. Also: all_gather, reduce_scatter, all_reduce, ep_dispatch, "
        "ep_combine, ep_latency, all_to_all. In runs of their own: tp_moe and ep_moe; ag_attention, ulysses_qkv and "
        "ulysses_out; all_reduce_rms_norm and all_reduce_layer_norm; group_gemm, on one GPU; flash_decode, on one or "
        "more",
    )
    parser.add_argument(
        "--shapes", metavar="NAME,...",
        help="groups of shapes by name, or sizes: MxNxK; group_gemm RxNxKxE; tp_moe TxIxHxExk; ep_moe HxIxExk; "
        "flash_decode BxHqxHkvxDxS; ag_attention SxHqxHkvxD; all_reduce_rms_norm ROWSxHIDDEN. Default: all groups but "
        "the sweeps",
    )
    parser.add_argument(
        "--tokens", metavar="M,M,...",
        help="numbers of rows of a model's layers, instead of 8192; of expert parallelism tokens of a rank; of "
        "flash_decode keys of a rank; of ag_attention and ulysses_* tokens of all ranks",
    )
    parser.add_argument(
        "--bytes", metavar="SIZE,...",
        help="collectives: sizes of the full tensor, such as 64K,1M (default: 1K to 256M)",
    )
    parser.add_argument(
        "--moe", default="7168x256x8", metavar="HxExk",
        help="expert parallelism: hidden size, experts, experts of a token (default: 7168x256x8)",
    )
    parser.add_argument(
        "--payload", metavar="NAME,...",
        help="ep_dispatch and ep_latency: bf16, fp8 (quantized by the kernel), fp8-given (default: all)",
    )
    parser.add_argument(
        "--routing", default="balanced", metavar="NAME",
        help="expert parallelism and group_gemm: balanced or skewed (default: balanced)",
    )
    parser.add_argument("--sharding", metavar="NAME,...", help="ag_attention: zigzag, contiguous (default: both)")
    parser.add_argument(
        "--peers", default="all", metavar="NAME,...", help="baselines: all, none, or names (default: all)"
    )
    parser.add_argument("--nproc", "--tp", type=int, metavar="W", help="number of ranks (default: the number of GPUs)")
    parser.add_argument(
        "--solo", type=int, metavar="W",
        help="ag_gemm, gemm_ar and gemm_rs: measure one rank of W on one GPU, without the others and without a link",
    )
    parser.add_argument(
        "--link", type=float, metavar="GB/s", help="with --solo: data arrives at this rate (default: at once)"
    )
    parser.add_argument(
        "--seconds", type=float, metavar="S", help="start nothing more after S seconds (default: no limit)"
    )
    parser.add_argument("--rounds", type=int, default=10, metavar="N", help="bursts of each method (default: 10)")
    parser.add_argument("--backward", action="store_true", help="measure the backward pass as well")
    parser.add_argument("--cuda-graph", action="store_true", help="measure each method in a CUDA graph as well")
    parser.add_argument("--eager", action="store_true", help="with --solo: measure eager calls as well")
    parser.add_argument(
        "--config", type=_json_object, action="append", default=[], metavar="JSON",
        help='fields of the default config to change, as one more method: {"tiles": {"block_n": 128}}; repeatable',
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of the rows (default: bench/results)")
    parser.add_argument("--report", action="store_true", help="measure nothing; make tables and plots of the rows")


def _trace(parser):
    parser.add_argument("operator", nargs="?", help=", ".join(TRACED))
    parser.add_argument("--shape", metavar="SIZES", help="sizes of the whole problem: MxNxK of a GEMM; as for tune")
    parser.add_argument("--layout", help='layout of the operands, as for tune: "swiglu", "causal zigzag" ...')
    parser.add_argument(
        "--nproc", "--tp", "--world-size", dest="world_size", default="auto", metavar="W",
        help="number of ranks; auto: all GPUs, or 2 processes",
    )
    parser.add_argument(
        "--solo", type=int, metavar="W",
        help="ag_gemm, gemm_ar and gemm_rs: record one rank of W on one GPU, as in bench",
    )
    parser.add_argument("--link", type=float, metavar="GB/s", help="with --solo: data arrives at this rate")
    parser.add_argument(
        "--config", type=_config, metavar="JSON",
        help='fields of the default config to change: {"tiles": {"block_n": 128}}; default: the best config known',
    )
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="dtype of the operands (default: bf16)")
    parser.add_argument(
        "--device", choices=("auto", "cuda", "cpu"), default="auto", help="device of the ranks (default: auto)"
    )
    parser.add_argument(
        "--repetitions", type=int, metavar="N", help="launches; the median is kept (default: 7, on CPU ranks 3)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("traces"), metavar="DIR", help="folder of the files (default: ./traces)"
    )
    parser.add_argument("--no-picture", action="store_true", help="write no PNG, which needs matplotlib")
    parser.add_argument("--draw", type=Path, metavar="FILE", help="record nothing; show a trace that was kept before")


def _json_object(text):
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError
    return value


def _config(text):
    value = _json_object(text)
    if not isinstance(value.get("tiles", {}), dict):
        raise ValueError
    return value


_json_object.__name__ = _config.__name__ = "JSON object"  # named in argparse's error

COMMANDS: Iterable[tuple] = (
    (
        "doctor", _doctor, "check this machine: what works, what does not, and what to do about it",
        "Check this machine: what works, what does not, and what to do about it. Exit code 1 if there is a problem.",
    ),
    (
        "tune", _tune, "find the best configs for shapes on this machine, and keep them",
        "Find the best config for each shape, on ranks that this command starts, and keep it in the cache.",
    ),
    (
        "explain", _explain, "print which config a call would run with, and what limits it",
        "Print which config a call would run with, where the config comes from, and what limits the call.",
    ),
    (
        "cache", _cache, "show, export, merge or clear what was tuned",
        "Show what was tuned on this machine, and carry it to other machines.",
    ),
    (
        "bench", _bench, "measure the operators against plain torch and other libraries (in a clone)",
        "Measure the operators, plain torch and other libraries in turns, on ranks that this command starts.",
    ),
    (
        "trace", _trace, "show what the programs of an operator do, and when, on every rank",
        "Record one launch of an operator on ranks that this command starts: when each program computed, pushed and "
        "waited. Writes a file for Perfetto and a picture, and prints where the time went.",
    ),
)
