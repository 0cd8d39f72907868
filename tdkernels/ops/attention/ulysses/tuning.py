"""Tunables of ulysses_qkv and ulysses_out: problems, search spaces and cost models.

The sizes of a problem are M = B * S, the positions of all sequences, and N and K of the whole weight. The dgrad of each
operator is a call of the other operator with a weight [K, N], and uses the config that was tuned for this operator in
the layout "kn". Tuning measures the forward of one sequence.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from tdkernels.autotune.tunable import Floors, register
from tdkernels.ops.attention.ulysses import config as ulysses_config
from tdkernels.ops.attention.ulysses import launch_out, launch_qkv, op
from tdkernels.ops.attention.ulysses.config import TRANSPORTS, UlyssesConfig
from tdkernels.ops.common import costs, gemm_space
from tdkernels.ops.common import gemm_tunable as dense
from tdkernels.rounding import cdiv, round_up
from tdkernels.runtime import gpu

if TYPE_CHECKING:
    import torch.distributed as dist

    from tdkernels.autotune.hardware import Hardware
    from tdkernels.autotune.problem import Problem

_WAIT_S = 3e-6  # cost of a wait for a signal, after which the pipeline of the main loop fills again
_LOAD_S = 2e-6  # latency of a load from a peer's memory
_PROGRAM_LINK_SHARE = 1 / 8  # share of a link's rate that one program reaches when it loads from a peer's memory


class UlyssesTunable(dense.DenseTunable):
    """Base of the Tunables of ulysses_qkv and ulysses_out."""

    config_class = UlyssesConfig
    op = op
    across_nodes = False
    layouts, dtypes = ("nk", "kn"), dense.ConfigTunable.dtypes  # no scaled operands

    def fallback(self, problem: "Problem", device: torch.device) -> UlyssesConfig:
        return self.default(problem, device)

    def default(self, problem: "Problem", device: torch.device) -> UlyssesConfig:
        rows, n, _ = self.of_a_rank(problem)  # type: ignore[attr-defined]
        return ulysses_config.completed(None, rows, n, problem.torch_dtype, device)

    def product(self, problem: "Problem") -> tuple[int, int, int]:
        """Return the sizes (rows, columns, depth) of a rank's GEMM."""
        m, n, k = problem.shape
        return m // problem.world_size, n, k

    def operands(
        self, problem: "Problem", device: torch.device, generator: torch.Generator
    ) -> tuple[torch.Tensor, ...]:
        _, n, k = problem.shape
        rows, columns = self.operand_sizes(problem)  # type: ignore[attr-defined]
        dtype = problem.torch_dtype
        x = torch.randn(rows, columns, generator=generator, dtype=dtype, device=device)
        shape = (n, k) if problem.layout == "nk" else (k, n)
        weight = torch.randn(shape, generator=generator, dtype=dtype, device=device).mul_(k**-0.5)
        return x, weight if problem.layout == "nk" else weight.t()

    def reference_bytes(self, problem: "Problem") -> int:
        rows, n, k = self.product(problem)
        # x as it is and gathered, the weight, and the product as it is, reordered, received and for comparison.
        return 2 * problem.torch_dtype.itemsize * (2 * rows * k + n * k + 5 * rows * n)

    def sequence_s(self, problem: "Problem", moved_bytes: int, hardware: "Hardware") -> float:
        """Return the seconds of the torch baseline, which copies the exchanged data before and after the all-to-all."""
        wire_bytes, dtype = self.floors(problem).wire_bytes, problem.torch_dtype
        return costs.sequence_s(*self.product(problem), wire_bytes, dtype, hardware) + 4 * moved_bytes / hardware.memory


class QkvTunable(UlyssesTunable):
    """The Tunable of ulysses_qkv."""

    name = "ulysses_qkv"
    launch = launch_qkv
    divided = (0, 1)
    plain_words = "torch matmul, then all-to-all", "torch's matmul and all-to-all"

    def sizes_of(self, *shapes: Sequence[int], world_size: int) -> tuple[int, ...]:
        x, weight = dense.two_operands(self.name, shapes)
        return world_size * torch.Size(x[:-1]).numel(), weight[0], weight[1]

    def of_a_rank(self, problem: "Problem") -> tuple[int, int, int]:
        m, n, k = problem.shape
        return m // problem.world_size, n // problem.world_size, k

    def operand_sizes(self, problem: "Problem") -> tuple[int, int]:
        return problem.shape[0] // problem.world_size, problem.shape[2]

    def space(self, problem: "Problem", device: torch.device) -> list[UlyssesConfig]:
        rows, width, _ = self.of_a_rank(problem)
        num_sms = gpu.num_sms(device)
        lags = (0, 2) if device.type == "cpu" else (0, num_sms // 2, num_sms, 3 * num_sms)
        default, configs = self.default(problem, device), []
        for tiles in gemm_space.tile_space(device, problem.torch_dtype):
            most = problem.world_size * _tiles_of(rows, width, tiles)
            for lag in sorted({min(number, most) for number in lags}):
                configs += [replace(default, tiles=tiles, transport=how, lag_tiles=lag) for how in TRANSPORTS]
        return configs

    def estimate_ms(self, config: Any, problem: "Problem", hardware: "Hardware") -> float:
        rows, width, k = self.of_a_rank(problem)
        ranks, dtype = problem.world_size, problem.torch_dtype
        if config.method == "torch":
            return 1e3 * self.sequence_s(problem, rows * ranks * width * dtype.itemsize, hardware)
        tiles, num_sms = config.tiles, hardware.num_sms
        count = _tiles_of(rows, width, tiles)  # per rank's heads; the last column of tiles may be partly empty
        padded = ranks * round_up(width, tiles.block_n)
        product, tile = costs.product_s(rows, padded, k, dtype, tiles, num_sms, hardware)
        # A program that receives a tile does not multiply. It loads the tile from a peer, or from its own memory with
        # transport "push".
        nbytes = tiles.block_m * tiles.block_n * dtype.itemsize
        if config.transport == "pull":
            receive_s = _LOAD_S + nbytes / (hardware.link * _PROGRAM_LINK_SHARE)
        else:
            receive_s = 2 * nbytes * num_sms / hardware.memory
        receives = (ranks - 1) * count
        lag = min(config.lag_tiles or 1.5 * num_sms, ranks * count)
        early = max(0.0, 1.0 - lag / num_sms) * tile  # the first tiles to receive are still being computed
        late = max(0.0, lag - count) * nbytes / hardware.link  # when no tile is left to compute concurrently
        wire = self.floors(problem).wire_bytes / costs.push_rate(num_sms, hardware)
        return 1e3 * (max(product + receives / num_sms * receive_s, wire) + tile + early + late)

    def floors(self, problem: "Problem") -> Floors:
        rows, n, k = self.product(problem)
        width = n // problem.world_size
        return Floors(2 * rows * n * k, (problem.world_size - 1) * rows * width * problem.torch_dtype.itemsize)

    def local(self, operands: tuple[torch.Tensor, ...], problem: "Problem") -> Callable[[], object]:
        return lambda: F.linear(*operands)

    def run(
        self, operands: Any, problem: "Problem", group: "dist.ProcessGroup", config: UlyssesConfig
    ) -> torch.Tensor:
        if config.method == "torch":
            return self.reference(operands, problem, group)
        return launch_qkv.launch(self.name, *operands, None, 1, group, config)  # type: ignore[call-arg]

    def compile(self, operands: Any, problem: "Problem", config: UlyssesConfig) -> None:
        launch_qkv.compile(*operands, None, problem.world_size, config)  # type: ignore[call-arg]


class OutTunable(UlyssesTunable):
    """The Tunable of ulysses_out."""

    name = "ulysses_out"
    launch = launch_out
    divided = (0, 2)
    plain_words = "torch all-to-all, then matmul", "torch's all-to-all and matmul"

    def sizes_of(self, *shapes: Sequence[int], world_size: int) -> tuple[int, ...]:
        if not 2 <= len(shapes) <= 3:
            raise ValueError(f"ulysses_out: the operands are o and weight, not {len(shapes)} of them")
        o, weight = shapes[:2]
        if len(o) < 2 or len(weight) != 2 or world_size * o[-1] != weight[1]:
            raise ValueError(
                f"ulysses_out: o {list(o)}, of {world_size} ranks, and weight {list(weight)} do not fit"
            )
        return torch.Size(o[:-1]).numel(), weight[0], weight[1]

    def of_a_rank(self, problem: "Problem") -> tuple[int, int, int]:
        return self.product(problem)

    def operand_sizes(self, problem: "Problem") -> tuple[int, int]:
        return problem.shape[0], problem.shape[2] // problem.world_size

    def space(self, problem: "Problem", device: torch.device) -> list[UlyssesConfig]:
        rows, _, _ = self.of_a_rank(problem)
        width, peers = problem.shape[2] // problem.world_size, problem.world_size - 1
        on_cpu = device.type == "cpu"
        pushing = ((2, 1), (2, 2)) if on_cpu else ((8, 2), (16, 4), (32, 4))  # (programs, programs per chunk)
        configs = []
        for tiles in gemm_space.tile_space(device, problem.torch_dtype):
            chunks = {min(chunk, cdiv(rows, tiles.block_m)) for chunk in ((1,) if on_cpu else (1, 2))}
            # If a block of columns has heads of two ranks, the kernel waits for one source at a time.
            at_once = {1} if width % tiles.block_k else {min(2, peers), peers}
            configs += [
                UlyssesConfig(
                    tiles=tiles, num_comm_sms=programs, chunk_tiles=chunk, chunk_parts=parts, sources_at_once=sources
                ) for programs, parts in pushing for chunk in sorted(chunks) for sources in sorted(at_once)
            ]
        return configs

    def estimate_ms(self, config: Any, problem: "Problem", hardware: "Hardware") -> float:
        rows, n, k = self.of_a_rank(problem)
        ranks, dtype = problem.world_size, problem.torch_dtype
        wire_bytes = self.floors(problem).wire_bytes
        if config.method == "torch":
            return 1e3 * self.sequence_s(problem, rows * k * dtype.itemsize, hardware)
        tiles = config.tiles
        product, tile = costs.product_s(rows, n, k, dtype, tiles, hardware.num_sms, hardware)
        chunk_rows = min(config.chunk_tiles * tiles.block_m, rows)
        parts = (ranks - 1) * cdiv(rows, chunk_rows) * config.chunk_parts
        rate = costs.push_rate(min(config.num_comm_sms, parts), hardware)
        wire = wire_bytes / rate
        # Programs that push start their tiles later.
        pushing = wire * config.num_comm_sms / hardware.num_sms
        # The first tiles begin with this rank's heads, 1 / W of the work, until a chunk of each peer has arrived.
        first = min((ranks - 1) * chunk_rows * (k // ranks) * dtype.itemsize / rate, wire)
        waits = cdiv(ranks - 1, config.sources_at_once) * _WAIT_S
        # The last part of the last chunk is pushed by a single program.
        last = chunk_rows * (k // ranks) * dtype.itemsize / config.chunk_parts / costs.push_rate(1, hardware)
        return 1e3 * (max(product + pushing, wire + last) + tile + max(0.0, first - tile / ranks) + waits)

    def floors(self, problem: "Problem") -> Floors:
        rows, n, k = self.product(problem)
        width = k // problem.world_size
        return Floors(2 * rows * n * k, (problem.world_size - 1) * rows * width * problem.torch_dtype.itemsize)

    def local(self, operands: tuple[torch.Tensor, ...], problem: "Problem") -> Callable[[], object]:
        o, weight = operands
        rows = o.view(problem.world_size, -1, o.shape[1]).transpose(0, 1).reshape(-1, weight.shape[1])
        return lambda: F.linear(rows, weight)

    def run(
        self, operands: Any, problem: "Problem", group: "dist.ProcessGroup", config: UlyssesConfig
    ) -> torch.Tensor:
        if config.method == "torch":
            return self.reference(operands, problem, group)
        return launch_out.launch(self.name, *operands, None, 1, group, config)[0]  # type: ignore[call-arg]

    def compile(self, operands: Any, problem: "Problem", config: UlyssesConfig) -> None:
        launch_out.compile(*operands, None, problem.world_size, config)  # type: ignore[call-arg]


def _tiles_of(rows, columns, tiles):
    return tiles.count(rows, columns)


register(QkvTunable())
register(OutTunable())
