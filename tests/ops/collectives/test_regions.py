"""copy_to_ranks, gather_rows and scatter_rows: gradients of a sharded computation equal those of the whole one."""

import pytest
import torch
import torch.distributed as dist

import tdkernels
from tests.support.ranks import device, on_ranks


def draw(*shape, seed):
    """Return integers from -2 to 2 as floats, the same on all ranks, so that all sums are exact."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, shape, generator=generator).float().to(device())


def own(x, dim=0):
    return x.chunk(dist.get_world_size(), dim)[dist.get_rank()]


def gradient_of(function, x):
    x = x.detach().clone().requires_grad_()
    y = function(x)
    (dx,) = torch.autograd.grad(y.sum(), x)
    tdkernels.synchronize()
    return y.detach(), dx


def gradients_match(compiled):
    ranks, rank = dist.get_world_size(), dist.get_rank()
    x, columns, whole = draw(2 * ranks, 3, seed=0), draw(3, 4 * ranks, seed=1), draw(3, 4, seed=2)
    scale = draw(2 * ranks, 1, seed=3)
    wrap = (lambda f: torch.compile(f, fullgraph=True, backend="aot_eager")) if compiled else lambda f: f
    _, dx_of_columns = gradient_of(lambda x: (x @ columns) ** 2, x)
    y_whole, dx_whole = gradient_of(lambda x: scale * (x @ whole) ** 2, x)

    # Divided columns after a replicated x.
    _, dx = gradient_of(wrap(lambda x: (tdkernels.copy_to_ranks(x) @ own(columns, 1)) ** 2), x)
    assert torch.equal(dx, dx_of_columns)

    # Divided rows, gathered for divided columns.
    _, dx = gradient_of(wrap(lambda x: (tdkernels.gather_rows(x, backward="sum") @ own(columns, 1)) ** 2), own(x))
    assert torch.equal(dx, own(dx_of_columns))

    # Divided rows, gathered for what every rank computes alike.
    y, dx = gradient_of(wrap(lambda x: scale * (tdkernels.gather_rows(x, backward="slice") @ whole) ** 2), own(x))
    assert torch.equal(y, y_whole) and torch.equal(dx, own(dx_whole))

    # A replicated x, divided into rows.
    y, dx = gradient_of(wrap(lambda x: own(scale) * (tdkernels.scatter_rows(x, backward="sum") @ whole) ** 2), x)
    assert torch.equal(y, own(y_whole)) and torch.equal(dx, dx_whole)

    # The same; the gradients are added by copy_to_ranks.
    def divided(x):
        return own(scale) * (tdkernels.scatter_rows(tdkernels.copy_to_ranks(x), backward="slice") @ whole) ** 2

    _, dx = gradient_of(wrap(divided), x)
    assert torch.equal(dx, dx_whole)
    _, dx = gradient_of(lambda x: tdkernels.scatter_rows(x, backward="slice"), x)
    assert torch.equal(dx, torch.eye(ranks, device=device())[rank].repeat_interleave(2)[:, None].expand_as(x))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_gradients(world_size):
    on_ranks(world_size, gradients_match, False)


def test_compiled_without_a_graph_break():
    on_ranks(2, gradients_match, True)


def rejects_invalid_arguments():
    x = torch.zeros(4 + dist.get_world_size(), 8, device=device())
    for call, error, message in (
        (lambda: tdkernels.copy_to_ranks(x.long()), TypeError, "copy_to_ranks: x is torch.int64"),
        (lambda: tdkernels.gather_rows(x.double(), backward="sum"), TypeError, "gather_rows: x is torch.float64"),
        (lambda: tdkernels.gather_rows(x[0, 0], backward="sum"), ValueError, "gather_rows: x must have at least one"),
        (lambda: tdkernels.gather_rows(x, backward="mean"), ValueError, "\"sum\" or \"slice\", not 'mean'"),
        (lambda: tdkernels.scatter_rows(x[:5], backward="sum"), ValueError, r"scatter_rows: .*\[5, 8\].*2 ranks"),
        (lambda: tdkernels.scatter_rows(x, backward=None), ValueError, "scatter_rows: backward must be"),
    ):
        with pytest.raises(error, match=message):
            call()
    for function in (
        tdkernels.copy_to_ranks, lambda x: tdkernels.gather_rows(x, backward="slice"),
        lambda x: tdkernels.scatter_rows(x, backward="slice"),
    ):
        leaf = x.clone().requires_grad_()
        with pytest.raises(RuntimeError, match="second derivatives"):
            torch.autograd.grad(function(leaf).sum(), leaf, create_graph=True)


def test_invalid_arguments():
    on_ranks(2, rejects_invalid_arguments)
