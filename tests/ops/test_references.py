"""References accept the same groups as the operators, including a one-dimensional DeviceMesh."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import tdkernels
from tests.support.ranks import device, on_ranks


def references():
    """Return {name: function of a group}. Requires two ranks."""
    draw = lambda *shape: torch.randn(*shape).to(device())  # noqa: E731
    x, weight, rows, ids = draw(4, 8), draw(6, 8), draw(4, 4, 2, 8), torch.tensor([[0, 1]] * 4, device=device())
    weights, gate_up, down, splits = torch.rand(4, 2).to(device()), draw(2, 8, 8), draw(2, 8, 4), torch.tensor([2, 2])
    lens = torch.tensor([4] * 4, dtype=torch.int32, device=device())
    experts = x, ids, weights, gate_up[:1], down[:1]

    def dispatch_and_combine(group):
        received, state = tdkernels.ep_dispatch_ref(x, ids, weights, num_experts=2, group=group)
        return tdkernels.ep_combine_ref(received.x, state, weights, group=group)

    return {
        "ag_gemm": lambda group: tdkernels.ag_gemm_ref(x, weight, group=group),
        "gemm_rs": lambda group: tdkernels.gemm_rs_ref(x, weight, group=group),
        "gemm_ar": lambda group: tdkernels.gemm_ar_ref(x, weight, group=group),
        "gemm_ar_rms_norm": lambda group: tdkernels.gemm_ar_rms_norm_ref(x, weight, None, draw(6), group=group),
        "gemm_ar_layer_norm": lambda group: tdkernels.gemm_ar_layer_norm_ref(x, weight, None, draw(6), group=group),
        "all_gather": lambda group: tdkernels.all_gather_ref(x, group=group),
        "reduce_scatter": lambda group: tdkernels.reduce_scatter_ref(x, group=group),
        "all_reduce": lambda group: tdkernels.all_reduce_ref(x, group=group),
        "all_reduce_rms_norm": lambda group: tdkernels.all_reduce_rms_norm_ref(x, x, x[0], group=group),
        "all_reduce_layer_norm": lambda group: tdkernels.all_reduce_layer_norm_ref(x, None, x[0], group=group),
        "all_to_all": lambda group: tdkernels.all_to_all_ref(x, splits.to(device()), group=group),
        "ep_dispatch, ep_combine": dispatch_and_combine,
        "ep_moe": lambda group: tdkernels.ep_moe_ref(*experts, num_experts=2, group=group),
        "tp_moe": lambda group: tdkernels.tp_moe_ref(x, ids, weights, gate_up, down, group=group),
        "flash_decode": lambda group: tdkernels.flash_decode_ref(draw(4, 2, 8), rows, rows, lens, group=group),
        "ag_attention": lambda group: tdkernels.ag_attention_ref(rows, rows, rows, group=group),
        "ulysses_qkv": lambda group: tdkernels.ulysses_qkv_ref(x[None], weight, group=group),
        "ulysses_out": lambda group: tdkernels.ulysses_out_ref(x[None], torch.cat([weight, weight], 1), group=group),
    }


def accept_mesh():
    mesh = init_device_mesh(device().type, (dist.get_world_size(),))
    failed = {}
    for name, call in references().items():
        try:
            call(mesh)
        except Exception as error:
            failed[name] = repr(error)
    assert not failed, failed


def test_references_accept_a_mesh():
    on_ranks(2, accept_mesh)
