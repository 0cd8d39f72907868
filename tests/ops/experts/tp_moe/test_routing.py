"""The routing of tp_moe: the exact order of rows, and the parts of the messages of all ranks."""

import itertools

import pytest
import torch
import torch.distributed as dist

from tdkernels.ops.experts.tp_moe.kernel_route import BY_EXPERT
from tdkernels.ops.experts.tp_moe.routing import chunk_rows_of, route
from tdkernels.rounding import cdiv
from tests.ops.experts.tp_moe.cases import poisoned_outputs
from tests.support.ranks import device, on_ranks

TILE_ROWS = 16


def test_chunks_have_about_the_same_size():
    for tokens, most in itertools.product([0, 1, 15, 16, 17, 40, 255, 256, 257, 300, 1000, 4096], [16, 48, 256]):
        rows = chunk_rows_of(tokens, most)
        chunks = cdiv(tokens, rows)
        assert rows % 16 == 0 and 16 <= rows <= most and chunks <= cdiv(tokens, most)
        assert chunks * rows - tokens < 16 * chunks or not tokens, "a chunk has 16 tokens too many"


def _tokens_in_order_of_arrival(tokens, chunk_rows):
    """Return the tokens of all ranks: this rank's, then the first chunks of the others, their second chunks, …"""
    me, ranks = dist.get_rank(), dist.get_world_size()
    turns = [(me, chunk) for chunk in range(cdiv(tokens, chunk_rows))]
    others = [(me - step) % ranks for step in range(1, ranks)]
    turns += [(source, chunk) for chunk in range(cdiv(tokens, chunk_rows)) for source in others]
    return [
        source * tokens + token for source, chunk in turns
        for token in range(chunk * chunk_rows, min((chunk + 1) * chunk_rows, tokens))
    ]


def checks_routing(tokens, choices, experts, chunk_rows, stages, ids_dtype, weights_dtype):
    ranks, generator = dist.get_world_size(), torch.Generator().manual_seed(1)
    ids = torch.randint(-1, experts, (ranks * tokens, choices), generator=generator)
    weights = None
    if weights_dtype is not None:
        weights = torch.rand(ids.shape, generator=generator).to(weights_dtype)
    scales = torch.rand(len(ids), choices + 1, generator=generator)
    mine = slice(dist.get_rank() * tokens, (dist.get_rank() + 1) * tokens)
    own = ids[mine].to(device(), ids_dtype), None if weights is None else weights[mine].to(device())
    scale_x = None if weights is None else scales[mine].to(device())
    with poisoned_outputs():
        routing = route("tp_moe", own[0], experts, dist.group.WORLD, chunk_rows, TILE_ROWS, stages, own[1], scale_x)
    order = torch.tensor(_tokens_in_order_of_arrival(tokens, routing.chunk_rows))
    assignments = (order[:, None] * choices + torch.arange(choices)).flatten()
    expected = torch.cat([assignments[ids.flatten()[assignments] == expert] for expert in range(experts)])
    found = routing.choices.cpu().long()
    assert torch.equal(found[: len(expected)], expected)
    assert not found[len(expected) :].any(), "rows past the last one of the last expert have assignment 0"
    rows = torch.full((ids.numel(),), -1).index_copy(0, expected, torch.arange(len(expected)))
    assert torch.equal(routing.rows.cpu().long(), rows.view(ids.shape))
    splits = torch.bincount(ids[ids >= 0], minlength=experts)
    assert torch.equal(routing.splits.cpu().long(), splits) and torch.equal(routing.ids.cpu().long(), ids)
    if weights is None:
        assert routing.weights is None and routing.scales is None
    else:
        assert torch.equal(routing.scales.cpu(), scales[found // choices])
        assert torch.equal(routing.weights.cpu(), weights.float())
    table = routing.tiling(TILE_ROWS).table[: int((splits + TILE_ROWS - 1).div(TILE_ROWS, rounding_mode="floor").sum())]
    by_expert = table[:, BY_EXPERT.value : BY_EXPERT.value + 3].cpu().long()
    first = torch.cat([torch.arange(0, count, TILE_ROWS) for count in splits.tolist()])
    assert torch.equal(by_expert[:, 0], torch.repeat_interleave((splits + TILE_ROWS - 1) // TILE_ROWS))
    assert torch.equal(by_expert[:, 1], first + (splits.cumsum(0) - splits)[by_expert[:, 0]])


# Tokens of a rank, experts per token, experts, tokens of a chunk, stages. The kernels scan 1024 or 4096 assignments at
# a time. Chunks may have more or fewer, and the last one of a rank may be shorter.
PROBLEMS = [(5, 2, 3, 16, 1), (130, 3, 8, 16, 3), (300, 8, 5, 256, 2), (700, 8, 7, 48, 4), (1100, 6, 4, 1024, 3)]


def checks_problems(ids_dtype, weights_dtype):
    for problem in PROBLEMS:
        checks_routing(*problem, ids_dtype, weights_dtype)


@pytest.mark.parametrize("ranks, ids_dtype, weights_dtype", [
    (1, torch.int64, torch.float32), (2, torch.int32, torch.bfloat16), (3, torch.int64, None),
], ids=str)
def test_order_of_rows(ranks, ids_dtype, weights_dtype):
    on_ranks(ranks, checks_problems, ids_dtype, weights_dtype)
