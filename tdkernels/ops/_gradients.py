"""The weight gradient of both dense operators: a product over all rows, one side of which is gathered."""

import torch


def gathered_weight_gradient(gather, local, *, gathered_on_left, overlapped):
    """sum over ranks of gathered.T @ local (``gathered_on_left``), or of local.T @ gathered.

    Args:     gather: a started Gather of [rows, P] a rank; local: [W * rows, Q], in the dtype of the gathered
              overlapped: the gather has run beside another product, so that all of it will be here at once; otherwise
              each shard is multiplied while later ones are on their way
    Returns:  [P, Q] (gathered on the left) or [Q, P], accumulated in fp32
    """
    if overlapped:
        gather.finish()
        full = gather.gathered.reshape(-1, gather.width)
        return full.t() @ local if gathered_on_left else local.t() @ full
    locals_by_rank = local.view(gather.world_size, gather.rows, local.shape[1])
    total = None
    for step in range(gather.world_size):
        source = gather.source(step)
        if step == 0:
            shard = gather.x
        else:
            gather.wait(step)
            shard = gather.gathered[source]
        left, right = (shard, locals_by_rank[source]) if gathered_on_left else (locals_by_rank[source], shard)
        product = _matmul_fp32(left.t(), right)
        total = product if total is None else total.add_(product)
    return total.to(local.dtype)


def _matmul_fp32(a, b):
    if a.device.type == "cuda" and a.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()
