"""Tensors that claim to be on a GPU, for tests of host code."""

import torch


class _Tensor(torch.Tensor):
    address = 0
    is_cuda = True
    device = torch.device("cuda", 0)

    def data_ptr(self):
        return self.address


def gpu_tensor(address=4096, dtype=torch.bfloat16):
    """Return a 4 x 4 tensor with the given address."""
    tensor = torch.empty(4, 4, dtype=dtype).as_subclass(_Tensor)
    tensor.address = address
    return tensor
