"""The programs of ag_gemm that multiply compute every tile once, however many of them begin late."""

import torch
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from tdkernels import lang as td
from tdkernels.ops.common.tile_config import Tiles
from tdkernels.ops.dense.ag_gemm import launch
from tdkernels.ops.dense.ag_gemm.config import AgGemmConfig
from tdkernels.ops.dense.ag_gemm.kernel import _rounds
from tdkernels.symm.topology import Topology


@td.jit
def count_kernel(counts_ptr, tiles, num_late, first_late):
    """Count the tiles of each program, as the loop of ag_gemm_kernel does."""
    place = tl.program_id(0)
    on_time = tl.num_programs(0) - num_late
    first, last = _rounds(place, tiles, on_time, num_late, first_late)
    for number in range(first, last):
        tile = number * on_time + tl.maximum(number - first_late, 0) * num_late + place
        tl.store(counts_ptr + tile, tl.load(counts_ptr + tile) + 1)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 40), st.integers(1, 7), st.integers(0, 4), st.integers(0, 5))
def test_every_tile_is_computed_once(tiles, on_time, num_late, first_late):
    counts = torch.zeros(tiles + 64, dtype=torch.int32)
    first_late *= num_late > 0
    count_kernel[(on_time + num_late,)](counts, tiles, num_late, first_late)
    assert counts.tolist() == [1] * tiles + [0] * 64


def test_programs_begin_late_if_the_push_ends_before_the_gemm(monkeypatch):
    config = AgGemmConfig(tiles=Tiles(16, 16, 16, 1, 4, 1), num_comm_sms=2)

    def programs(rows, n, k):
        x, weight = torch.empty(rows, k), torch.empty(n, k)
        topology = Topology(0, 2, 2)
        pieces, _ = launch._count(x, [weight], config.num_comm_sms, topology, config)
        return launch._programs(x, [weight], pieces, config.num_comm_sms, topology, config)

    number, (num_late, first_late) = programs(16, 1600, 16)
    assert (number, num_late) == (2 + 2 + 2, 2) and first_late > 0
    monkeypatch.setattr(launch, "push_rate", lambda programs, rates: 1.0)
    assert programs(16, 1600, 16) == (2 + 2, (0, 0)), "the push takes longer than the GEMM"
