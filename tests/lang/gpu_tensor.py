"""Tensors that claim to be on a GPU, for tests of host code."""

import torch


class _Tensor(torch.Tensor):
    address = 0
    is_cuda = True
    device = torch.device("cuda", 0)

    def data_ptr(self):
        return self.address


def gpu_tensor(address=4096, dtype=torch.bfloat16, rows=4):
    """Return a tensor of 4 columns with the given address."""
    tensor = torch.empty(rows, 4, dtype=dtype).as_subclass(_Tensor)
    tensor.address = address
    return tensor
