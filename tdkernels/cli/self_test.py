"""The doctor's self-test: the dense operators on ranks, forward and backward, against the unsharded computation."""

import torch
import torch.distributed as dist
import torch.nn.functional as F

import tdkernels
from tdkernels.launch import rank_device

_PEER_TIMEOUT_S = 120.0  # enough for a peer that compiles for a GPU; a rank that hangs shall say for whom it waits


def try_operators():
    """Runs on every rank: the largest error of each output and gradient, relative to the largest exact value.

    Returns:
        dict: such as "dweight of ag_gemm" -> (error, what is allowed)
    """
    tdkernels.set_timeout(_PEER_TIMEOUT_S)
    tdkernels.autotune.set_mode("off")  # the kernels shall run, even where something else is faster
    device, place = rank_device(), (dist.get_rank(), dist.get_world_size())
    dtype, allowed = _dtype_for(device)
    m, n, k = (size * dist.get_world_size() for size in (96, 80, 64))
    generator = torch.Generator().manual_seed(0)
    full = [torch.randn(shape, generator=generator).to(device, dtype) for shape in ((m, k), (n, k), (n,), (m, n))]
    exact = _output_and_gradients(F.linear, *(tensor.double() for tensor in full))
    # The dimension of x, weight, bias and dy that is dealt out to the ranks; None: each rank holds all of it.
    dealt = {
        tdkernels.ag_gemm: (0, 0, 0, 1),
        tdkernels.gemm_rs: (1, 1, None, 0),
        tdkernels.gemm_ar: (1, 1, None, None),
    }
    errors = {}
    for operator, dims in dealt.items():
        ours = _output_and_gradients(operator, *(_part(tensor, dim, *place) for tensor, dim in zip(full, dims)))
        for name, dim in zip(ours, (dims[-1], *dims[:-1])):  # y is dealt out as dy is, each gradient as its input
            error = (ours[name] - _part(exact[name], dim, *place)).abs().max() / exact[name].abs().max()
            errors[f"{name} of {operator.__name__}"] = error.item(), allowed
    tdkernels.synchronize()
    return errors


def _dtype_for(device):
    """The type to try, and an error that rounding never reaches and a tile gone wrong always exceeds."""
    if device.type == "cpu":
        return torch.float32, 1e-5
    return (torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16), 3e-2


def _part(tensor, dim, rank, world_size):
    return tensor if dim is None else tensor.chunk(world_size, dim)[rank]


def _output_and_gradients(operator, x, weight, bias, dy):
    x, weight, bias = (tensor.detach().requires_grad_() for tensor in (x, weight, bias))
    y = operator(x, weight, bias)
    y.backward(dy)
    return {"output": y.detach(), "dx": x.grad, "dweight": weight.grad, "dbias": bias.grad}
