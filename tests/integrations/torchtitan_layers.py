"""torchtitan's distributed linear layers, compared with a layer of the whole weight. Small integers give exact sums."""

import torch
import torch.distributed as dist

from tests.support.ranks import device


def draw(*shape, seed, dtype=torch.float32):
    """Return integers from -2 to 2, so that all sums are exact. Tensors differ between ranks if the seeds do."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, shape, generator=generator).to(device(), dtype)


def gradients(function, operands, dy):
    operands = [None if x is None else x.detach().clone().requires_grad_() for x in operands]
    y = function(*operands)
    return y.detach(), torch.autograd.grad(y, [x for x in operands if x is not None], dy)


def torchtitan_layers_are_exact(layers, dtype):
    """Compare forward and backward of ``layers``, a module with torchtitan's three autograd Functions."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    group = dist.group.WORLD, dist.group.WORLD.group_name
    M, K, N = 4 * ranks, 8 * ranks, 6 * ranks
    x, weights = draw(M, K, seed=0, dtype=dtype), [draw(N, K, seed=seed, dtype=dtype) for seed in (1, 2)]
    bias, dy = draw(N, seed=3, dtype=dtype), draw(M, 2 * N, seed=4, dtype=dtype)

    def own(t, dim=0):
        return t.chunk(ranks, dim)[rank]

    def whole(function, *operands, dy):
        y, grads = gradients(function, [t.double() for t in operands], dy.double())
        return [y.to(dtype), *(grad.to(dtype) for grad in grads)]

    def check(results, expected, dims):
        y, grads = results
        for got, want, dim in zip((y, *grads), expected, dims, strict=True):
            assert got.dtype == dtype and torch.equal(got, want if dim is None else own(want, dim))

    expected = whole(torch.nn.functional.linear, x, weights[0], bias, dy=dy[:, :N])
    operands = own(x), own(weights[0]), own(bias)
    results = gradients(lambda *t: layers.AllGatherLinear.apply(*t, *group), operands, own(dy[:, :N], 1))
    check(results, expected, (1, 0, 0, 0))
    operands = own(x, 1), own(weights[0], 1), bias
    results = gradients(lambda *t: layers.LinearReduceScatter.apply(*t, *group), operands, own(dy[:, :N]))
    check(results, expected, (0, 1, 1, None))

    expected = whole(lambda x, a, b: torch.cat((x @ a.T, x @ b.T), 1), x, *weights, dy=dy)
    own_columns = torch.cat([own(half, 1) for half in dy.chunk(2, 1)], 1)
    expected[0] = torch.cat([own(half, 1) for half in expected[0].chunk(2, 1)], 1)
    operands = own(x), own(weights[0]), own(weights[1])
    both = lambda *t: torch.cat(layers.AllGatherLinearMulti.apply(*t, *group), 1)  # noqa: E731
    check(gradients(both, operands, own_columns), expected, (None, 0, 0, 0))
