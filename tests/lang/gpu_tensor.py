"""Tensors that say they are on a GPU, for what is decided on the host."""

import torch


class _Tensor(torch.Tensor):
    address = 0
    is_cuda = True
    device = torch.device("cuda", 0)

    def data_ptr(self):
        return self.address


def gpu_tensor(address=4096, dtype=torch.bfloat16):
    """One of 4 x 4 elements, at an address of the test's choice."""
    tensor = torch.empty(4, 4, dtype=dtype).as_subclass(_Tensor)
    tensor.address = address
    return tensor
