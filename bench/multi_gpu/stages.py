"""The stages of a run on several GPUs. Each consists of programs that run at the same time, on GPUs of their own.

The programs of a stage share its time limit. Later stages use the configs that earlier ones tuned.
"""

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

from bench.dense.shapes import GROUPS

_MODELS = "--model", "llama-3.1-70b", "--model", "llama-3.1-8b"
_START_S = 15.0  # that a program needs before its first case and after its last
_WIRE_GBPS = "390"  # the most that a pair of H200 reached in each direction


@dataclass(frozen=True)
class Program:
    """One process.

    Attributes:
        name: The name of its log.
        arguments: The arguments of the Python interpreter.
        gpus: The GPUs that it sees, or None for all.
        environment: Further environment variables.
        limited: Whether it takes ``--seconds``.
        out: Whether it takes ``--out``.
        subfolder: The part of the output folder that it writes to, for programs that would write the same file.
    """

    name: str
    arguments: tuple
    gpus: tuple | None = None
    environment: dict = field(default_factory=dict)
    limited: bool = True
    out: bool = True
    subfolder: str = ""

    def command(self, folder, seconds):
        """Return the command line for an output folder and the time limit of the stage."""
        limit = ("--seconds", f"{max(seconds - _START_S, 1.0):g}") if self.limited else ()
        out = ("--out", str(Path(folder) / self.subfolder)) if self.out else ()
        return [sys.executable, *self.arguments, *limit, *out]

    def variables(self):
        """Return the environment of the process."""
        visible = {} if self.gpus is None else {"CUDA_VISIBLE_DEVICES": ",".join(map(str, self.gpus))}
        return {**os.environ, **visible, **self.environment}


@dataclass(frozen=True)
class Stage:
    """Programs that run at the same time.

    Attributes:
        name: The name, which ``--stages`` selects.
        seconds: The time after which the programs are killed. Nothing is started if less is left.
        programs: The programs.
    """

    name: str
    seconds: float
    programs: tuple


def stages(gpus):
    """Return the stages for a machine, in the order in which they run."""
    return [*_dense(gpus), *_models(), *_scaled(gpus), *_norms(gpus), *_faults(gpus), *_others(gpus)]


def _module(name, *arguments, **fields):
    return Program(fields.pop("log", name.rpartition(".")[2]), ("-m", name, *arguments), **fields)


def _tdkernels(*arguments, **fields):
    return Program(fields.pop("log", "-".join(arguments[:2])), ("-m", "tdkernels", *arguments), **fields)


def _groups(gpus, size):
    """Return the GPUs in groups of a size."""
    return [tuple(range(first, first + size)) for first in range(0, gpus - size + 1, size)]


def _dense(gpus):
    """Return the stages of the dense operators: tuning, measurements, and the predictions of solo mode."""
    tune = {"limited": False, "out": False}
    yield Stage("tune-models", 240, (_tdkernels("tune", *_MODELS, "--tokens", "8192,2048,64", log="tune", **tune),))
    rows = "1024,4096,16384,32768"
    for short, operator in (("ag", "ag_gemm"), ("rs", "gemm_rs")):
        sizes = [f"--shape={shape}" for shape in GROUPS["seed"][operator]]
        yield Stage(f"tune-{short}", 70, (_tdkernels("tune", operator, *sizes, **tune),))
        by_rows = _tdkernels("tune", operator, *_MODELS, "--tokens", rows, log="tune", **tune)
        yield Stage(f"tune-{short}-rows", 110, (by_rows,))
        mlps = [f"--shape={shape}" for shape in GROUPS["mlp"][operator]]
        yield Stage(f"tune-{short}-mlp", 70, (_tdkernels("tune", operator, *mlps, log="tune", **tune),))
    for operator in ("ag_gemm", "gemm_rs", "gemm_ar"):
        shapes = "--shapes", "llama-70b,llama-8b" + ",seed" * (operator != "gemm_ar"), "--rounds", "5", "--cuda-graph"
        yield Stage(f"bench-{operator}", 80, (_tdkernels("bench", operator, *shapes, "--backward"),))
    yield from _one_gpu_each("solo", 90, list(_solo(gpus)), gpus)


def _one_gpu_each(name, seconds, programs, gpus):
    """Yield stages of as many programs as there are GPUs, each of which runs on a GPU of its own."""
    for number in range(0, len(programs), gpus):
        yield Stage(f"{name}-{number // gpus + 1}", seconds, tuple(programs[number : number + gpus]))


def _solo(gpus):
    """Yield programs for the GPUs in turn: the models' layers as one of all ranks and with a modelled link."""
    shapes = {"ag_gemm": [(57344, 8192), (10240, 8192), (28672, 4096), (6144, 4096)],
              "gemm_rs": [(8192, 28672), (8192, 8192), (4096, 14336), (4096, 4096)]}
    problems = [(operator, f"8192x{n}x{k}") for operator, sizes in shapes.items() for n, k in sizes]
    for number, (operator, sizes) in enumerate(problems):
        yield _tdkernels(
            "bench", operator, "--solo", str(gpus), "--link", _WIRE_GBPS, "--shapes", sizes, "--rounds", "5",
            log=f"solo-{operator}-{sizes}", gpus=(number % gpus,),
        )


def _models():
    for size in ("8b", "70b"):
        yield Stage(f"model-{size}", 120, (
            _module("bench.models", "--frameworks", "torch", "--size", size, "--sequences", "2", "--compile",
                    "--rounds", "5", log=f"model-{size}"),
        ))
    yield Stage("model-transformers", 60, (
        _module("bench.models", "--frameworks", "transformers", "--rounds", "5", log="transformers"),
    ))


def _scaled(gpus):
    tune = {"limited": False, "out": False}
    for operator in ("ag_gemm", "gemm_rs", "gemm_ar"):
        options = "--operators", operator, "--layouts", "scaled", "scaled fast", "--configs"
        yield Stage(f"scaled-{operator}", 75, (_module("bench.dense.scaled", *options),))
    yield Stage("wire", 50, (_module("bench.dense.wire", limited=False),))
    yield Stage("tune-fp8", 60, (
        _tdkernels("tune", *_MODELS[:2], "--tokens", "8192", "--dtype", "fp8", "--layout", "scaled", log="tune-fp8",
                   **tune),
    ))


def _norms(gpus):
    rows = ",".join(f"{rows}x8192" for rows in (1, 4, 16, 64, 128, 512))
    sizes = dict.fromkeys([gpus, max(gpus // 2, 2)])
    for ranks in sizes:
        half, other = (_groups(gpus, ranks) * 2)[:2]
        fused = _tdkernels("bench", "all_reduce_rms_norm", "--shapes", rows, "--cuda-graph", "--nproc", str(ranks),
                           "--rounds", "5", log=f"norm-{ranks}", gpus=half)
        product = _module("bench.dense.norm", "--rounds", "5", "--nproc", str(ranks), limited=False,
                          log=f"gemm-norm-{ranks}", gpus=other)
        if half == other:
            yield Stage(f"norm-{ranks}", 75, (fused,))
            yield Stage(f"gemm-norm-{ranks}", 60, (product,))
        else:
            yield Stage(f"norms-{ranks}", 60, (fused, product))


def _others(gpus):
    yield Stage("collectives", 60, (
        _tdkernels("bench", "all_reduce", "all_gather", "reduce_scatter", "--cuda-graph", "--bytes",
                   "16K,256K,4M,64M", "--rounds", "5", log="collectives"),
    ))
    yield Stage("dispatch", 70, (
        _tdkernels("bench", "ep_dispatch", "ep_combine", "ep_latency", "--cuda-graph", "--tokens", "128,4096",
                   "--rounds", "5", log="dispatch"),
    ))
    yield Stage("experts", 70, (_tdkernels("bench", "ep_moe", "tp_moe", "--backward", "--rounds", "3", log="experts"),))
    yield Stage("decode", 40, (_tdkernels("bench", "flash_decode", "--cuda-graph", "--rounds", "5", log="decode"),))
    yield from _one_gpu_each("decode-one-gpu", 90, list(_decode(gpus)), gpus)
    yield Stage("attention", 50, (
        _tdkernels("bench", "ag_attention", "--tokens", "32768,8192", "--sharding", "zigzag", "--rounds", "3",
                   log="attention"),
    ))


def _decode(gpus):
    """Yield programs for the GPUs in turn: ``flash_decode`` on one GPU."""
    for number, kind in enumerate(("dense", "tokens", "pages", "small")):
        yield _tdkernels(
            "bench", "flash_decode", "--shapes", f"one-gpu-{kind}", "--cuda-graph", "--nproc", "1", "--rounds", "5",
            "--peers", "sdpa-flash,sdpa-cudnn", log=f"decode-{kind}", gpus=(number % gpus,),
        )


def _campaigns(gpus):
    """Yield chaos campaigns with 2 ranks each, and on 6 GPUs or more one with half of them.

    Most cases of a campaign wait for a timeout or for new processes, so several run at the same time.
    """
    in_pairs = gpus // 2 if gpus >= 6 else gpus
    pairs, others = _groups(in_pairs, 2), [tuple(range(in_pairs, gpus))] if in_pairs < gpus else []
    limits = "--cases", "60", "--warm-up-seconds", "60", "--seconds", "60"  # the time of the warm-up does not count
    for number, chosen in enumerate(pairs + others):
        yield _module(
            "tests.chaos", "--device", "cuda", "--ranks", str(len(chosen)), "--seed", str(1000 * number), *limits,
            limited=False, log=f"chaos-{number}", gpus=chosen, subfolder=f"chaos-{number}",
        )


def _faults(gpus):
    """Return the stages of faults: the chaos campaigns, and kernels with planted races, which need three GPUs."""
    yield Stage("chaos", 130, tuple(_campaigns(gpus)))
    if gpus >= 3:
        yield Stage("mutants", 150, (
            _module("tests.sanitizer.on_gpus", "--jobs", str(max(gpus // 4, 1)), log="mutants"),
        ))
