"""Reproduce failures that need a host running ahead of its GPU, on ranks that share one GPU.

    python -m bench.reliability.host_ahead

Prints one line of JSON per case: whether a healthy rank returned wrong values without an error, or the errors raised.
The program uses no API that is newer than its cases, so that it also runs on earlier revisions.
"""

import json
import time

import pytest
import torch
import torch.distributed as dist

import tdkernels
from tdkernels.launch import RankError, RankPool, rank_device
from tdkernels.ops.experts.dispatch import launch as ep_launch
from tdkernels.symm import get_workspace


def _error(call):
    try:
        call()
        tdkernels.synchronize()
    except BaseException as error:
        return f"{type(error).__name__}: {error}"[:240]
    return None


def _verdict(y, expected):
    wrong = int((y != expected).sum())
    return "right" if not wrong else f"WRONG: {wrong} of {y.numel()} elements"


def void_launch(operator):
    """Finding 2: rank 0 times out after its host has launched two more calls; rank 2 is late, rank 1 is healthy."""
    rank, device = dist.get_rank(), rank_device()
    group = dist.new_group()
    weight = torch.ones(64, 64, device=device, dtype=torch.bfloat16)
    config = {
        "gemm_ar": lambda: tdkernels.GemmArConfig(exchange="one_shot", tiles=tdkernels.Tiles(16, 32, 32)),
        "gemm_rs": lambda: tdkernels.GemmRsConfig(transport="one_shot", tiles=tdkernels.Tiles(16, 32, 32)),
        "ag_gemm": lambda: tdkernels.AgGemmConfig(transport="copy_engine", tiles=tdkernels.Tiles(16, 32, 32)),
    }[operator]()
    operation = getattr(tdkernels, operator)

    def call(number):
        x = torch.full((48, 64), float(number + rank), device=device, dtype=torch.bfloat16)
        return operation(x, weight, group=group, config=config)

    for number in range(2):
        call(number)
    tdkernels.synchronize()
    dist.barrier()
    tdkernels.set_timeout(0.5 if rank == 0 else 8.0)
    if rank == 2:
        time.sleep(2.0)
    outputs, errors = [], []
    for number in range(2, 6 if rank == 0 else 3):
        try:
            outputs.append(call(number))
        except RuntimeError as error:
            errors.append(str(error)[:120])
    error = _error(lambda: None)
    outcome = error
    if error is None and outputs:
        sums = 64.0 * (3 * 2 + 3)
        expected = torch.full_like(outputs[0], sums)
        if operator == "ag_gemm":
            per_rank = torch.tensor([2.0, 3.0, 4.0], device=device, dtype=torch.bfloat16) * 64
            expected = per_rank.repeat_interleave(48)[:, None].expand_as(outputs[0])
        outcome = _verdict(outputs[0], expected)
    tdkernels.set_timeout(None)
    return outcome


def _dispatch(group, ids, rows, experts=6):
    x = torch.ones(rows, 64, device=rank_device(), dtype=torch.bfloat16)
    ids = torch.tensor(ids, device=rank_device()).expand(rows, -1).contiguous()
    return tdkernels.ep_dispatch(x, ids, num_experts=experts, max_tokens=64, group=group), ids


def lost_host_error():
    """Finding 3: ids of rank 0 are invalid; the count workspace grows before the host error is read."""
    rank, group = dist.get_rank(), dist.new_group()
    for _ in range(2):
        _dispatch(group, [1, 5], 2)
    tdkernels.synchronize()
    dist.barrier()
    if rank == 1:
        time.sleep(0.5)
    error = _error(lambda: (_dispatch(group, [1, 77] if rank == 0 else [1, 5], 2), _dispatch(group, [1, 599], 2, 600)))
    return error or "no error: the call's empty result stands"


def lost_failure():
    """Finding 4: the ranks pass different cached shapes; then both make a larger call, which grows the workspace."""
    rank, device, group = dist.get_rank(), rank_device(), dist.new_group()
    weight = torch.ones(64, 64, device=device, dtype=torch.bfloat16)
    config = tdkernels.AgGemmConfig(transport="push", tiles=tdkernels.Tiles(16, 32, 32))

    def call(rows):
        x = torch.ones(rows, 64, device=device, dtype=torch.bfloat16)
        return tdkernels.ag_gemm(x, weight, group=group, config=config)

    for rows in (16, 32, 16, 32):
        call(rows)
    tdkernels.synchronize()
    dist.barrier()
    tdkernels.set_timeout(5.0)
    if rank == 1:
        time.sleep(0.5)
    first = _error(lambda: (call(16 if rank == 0 else 32), call(4096)))
    again = _error(get_workspace(group, device, "ag_gemm", across_nodes=True).check)
    tdkernels.set_timeout(None)
    return {"first": first, "later": again}


def interrupted_call():
    """Finding 5: rank 1 runs out of memory between two launches of a dispatch, and continues."""
    rank, group = dist.get_rank(), dist.new_group()

    def call(value):
        x = torch.full((4, 64), float(value), device=rank_device(), dtype=torch.bfloat16)
        ids = torch.tensor([[0, 1]] * 4, device=rank_device())
        recv, _ = tdkernels.ep_dispatch(x, ids, num_experts=2, max_tokens=64, group=group)
        return recv.x[: int(recv.splits.sum())]

    for value in range(2):
        call(value)
    tdkernels.synchronize()
    dist.barrier()
    tdkernels.set_timeout(3.0)
    outcomes = []
    for value in range(2, 6):
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1 and value == 3:

                def no_memory(*args, **kwargs):
                    raise torch.OutOfMemoryError("not this much")

                patch.setattr(ep_launch, "prepare_dispatch", no_memory)
            try:
                rows = call(value)
                tdkernels.synchronize()
                outcomes.append(_verdict(rows, torch.full_like(rows, float(value))))
            except (RuntimeError, ValueError) as error:
                outcomes.append(f"{type(error).__name__}: {error}"[:100])
    tdkernels.set_timeout(None)
    return outcomes


def misattributed_host_error():
    """Finding 11: a dispatch of 3 rows has invalid ids; an all_to_all and a dispatch of 2 rows follow."""
    rank, group = dist.get_rank(), dist.new_group()
    for rows in (3, 2):
        _dispatch(group, [1, 5], rows)
    x = torch.ones(3, 64, device=rank_device(), dtype=torch.bfloat16)
    splits = torch.tensor([2, 1], device=rank_device())
    tdkernels.all_to_all(x, splits, max_tokens=64, group=group)
    tdkernels.synchronize()
    dist.barrier()
    if rank == 1:
        time.sleep(0.5)
    kept = []

    def calls():
        kept.append(_dispatch(group, [6, 2] if rank == 0 else [1, 5], 3))
        tdkernels.all_to_all(x, splits, max_tokens=64, group=group)
        kept.append(_dispatch(group, [0, 5], 2))

    return _error(calls)


CASES = [
    ("2, gemm_ar one shot", 3, void_launch, "gemm_ar"),
    ("2, gemm_rs one shot", 3, void_launch, "gemm_rs"),
    ("2, ag_gemm by the copy engine", 3, void_launch, "ag_gemm"),
    ("3", 2, lost_host_error),
    ("4", 2, lost_failure),
    ("5", 2, interrupted_call),
    ("11", 2, misattributed_host_error),
]


def main():
    for finding, ranks, function, *args in CASES:
        with RankPool(ranks, "shared", timeout_s=100.0, grace_s=40.0) as pool:
            try:
                outcomes = pool.run(function, *args)
            except RankError as error:
                outcomes = [str(one) for one in error.exceptions]
        print(json.dumps({"finding": finding, "ranks": outcomes}), flush=True)


if __name__ == "__main__":
    main()
