"""The number of overlap stages that the cost model selects."""

import pytest
import torch

from tdkernels.autotune.hardware import Hardware
from tdkernels.ops.experts.tp_moe import stages

H200 = Hardware(flops=790e12, memory=4.3e12, link=380e9, num_sms=132, measured=True)

# Ranks, tokens of all ranks, experts per token, experts, N and K of a rank's weight: times in ms of moe_ag_gemm
# (warp-specialized) by number of stages, as one of these ranks on an H200 in solo mode, with a link of 320 GB/s.
MEASURED = {
    (8, 8192, 2, 8, 3584, 4096): {2: 0.808, 3: 0.726, 4: 0.731},
    (8, 8192, 2, 8, 2048, 8192): {2: 1.089, 3: 0.920, 4: 0.876, 5: 0.862, 6: 0.879, 8: 0.917},
    (8, 2048, 2, 8, 3584, 4096): {1: 0.253, 2: 0.254, 3: 0.243},
    (8, 8192, 4, 32, 2048, 8192): {2: 1.880, 3: 1.776, 4: 1.831},
    (8, 2048, 4, 60, 352, 2048): {1: 0.0921, 2: 0.0926},
    (4, 8192, 2, 8, 7168, 4096): {2: 1.452, 3: 1.460},
}


def _selected(monkeypatch, ranks, tokens, choices, experts, n, k):
    monkeypatch.setattr(stages, "hardware", lambda device, dtype: H200)
    select = stages.best_stages.__wrapped__
    return select(ranks, tokens // ranks, choices, experts, n, k, torch.bfloat16, torch.device("cuda", 0))


@pytest.mark.parametrize("problem", MEASURED, ids=str)
def test_measured_problems(monkeypatch, problem):
    """The selected number of stages was measured, and takes at most 5 % longer than the fastest one."""
    times = MEASURED[problem]
    assert times[_selected(monkeypatch, *problem)] <= 1.05 * min(times.values())


def test_one_rank_has_one_stage(monkeypatch):
    assert _selected(monkeypatch, 1, 8192, 2, 8, 3584, 4096) == 1


def test_few_rows_per_expert_have_one_stage(monkeypatch):
    """A further stage would read the weights once more, which takes longer than all products."""
    assert _selected(monkeypatch, 8, 256, 2, 64, 3584, 4096) == 1


def test_waiting_decreases_with_the_number_of_stages():
    """Without weights to read, more stages are never slower, and an infinitely fast link needs only one."""
    times = [stages.seconds_of_stages(number, 8, 1.0, 1.0, 0.0, 0.1) for number in range(1, 9)]
    assert times == sorted(times, reverse=True) and times[0] > times[-1]
    fast = [stages.seconds_of_stages(number, 8, 0.0, 1.0, 0.1, 0.1) for number in range(1, 9)]
    assert fast == sorted(fast)
