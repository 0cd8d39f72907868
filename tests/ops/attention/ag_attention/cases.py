"""Test bodies for ag_attention. Every rank runs them; see test_ag_attention.py."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import tdkernels
from tdkernels import AgAttentionConfig
from tdkernels.ops.attention.ag_attention import launch_dq as ag_attention_launch_dq
from tdkernels.ops.attention.ag_attention import pipelined
from tests.ops.attention.ag_attention.oracle import BF16, FP32, NAMES, Sharded, enlarge
from tests.ops.experts.tp_moe.cases import check_rejection, poisoned_outputs
from tests.support.ranks import device

CONFIGS = {
    "default": None,
    "small blocks": AgAttentionConfig(
        block_q=16, block_k=32, num_warps=4, num_stages=2, dq_block_q=32, dq_block_k=16, dq_num_warps=4,
        dkv_block_q=16, dkv_block_k=32, dkv_num_warps=4, num_comm_sms=1, chunk_rows=16,
    ),
    "large chunks": AgAttentionConfig(block_q=64, block_k=16, dkv_block_q=64, num_comm_sms=3, chunk_rows=48),
    "flash": AgAttentionConfig(method="flash"),
    "cudnn": AgAttentionConfig(method="cudnn"),
    "torch": AgAttentionConfig(method="torch"),
}
PIPELINED = ("flash", "cudnn")  # on GPUs without fp32; on CPU ranks without cuDNN
SMALL = enlarge(dict(rows=21, heads=2, kv_heads=1, d=16, dv=24))


# ---- results ----


def computes(spec, config):
    """Check the forward and every gradient."""
    case = Sharded(**spec)
    with poisoned_outputs():
        results = case.run(config=CONFIGS[config])
    assert set(results) == {"o", "lse", *(f"d{name}" for name in NAMES)}
    case.check(results)


def computes_pipelined_gradients(spec, method, config):
    """Check the gradients of o alone with the given backward method, and that this method has run."""
    case = Sharded(**spec, lse=False)
    with (
        poisoned_outputs(),
        mock.patch.object(ag_attention_launch_dq, "launch", wraps=ag_attention_launch_dq.launch) as fused,
        mock.patch.object(pipelined, "backward", wraps=pipelined.backward) as pipelined_backward,
    ):
        results = case.run(config=replace(CONFIGS[config] or AgAttentionConfig(), backward=method))
    case.check(results)
    assert (fused.call_count, pipelined_backward.call_count) == ((1, 0) if method == "fused" else (0, 1))


def matches_reference(spec):
    case = Sharded(**spec)
    with torch.no_grad():
        o, lse = case.call(tdkernels.ag_attention_ref)
    case.check({"o": o, "lse": lse})


def returns_requested_outputs():
    """Check that o has the same bits with and without lse, and that a zero dlse adds nothing to the gradients."""
    case = Sharded(**SMALL, lse=False, seed=4)
    expected = case.run()
    case.require()
    o = tdkernels.ag_attention(*(case.own[name] for name in NAMES))
    assert isinstance(o, torch.Tensor)
    o.backward(case.do)
    for name, result in {"o": o.detach(), **case.gradients()}.items():
        assert torch.equal(result, expected[name]), name
    case.require()
    _, lse = case.call()
    lse.backward(torch.zeros_like(lse))
    assert not any(gradient.any() for gradient in case.gradients().values())


# ---- autograd ----


def computes_single_gradients():
    """Check each gradient alone, and that no kernel is launched for the others."""
    case = Sharded(**SMALL, seed=5)
    for name, launches in (("q", (1, 0)), ("k", (0, 1)), ("v", (0, 1))):
        with (
            mock.patch.object(ag_attention_launch_dq, "launch_dq", wraps=ag_attention_launch_dq.launch_dq) as dq,
            mock.patch.object(ag_attention_launch_dq, "launch_dkv", wraps=ag_attention_launch_dq.launch_dkv) as dkv,
        ):
            results = case.run(inputs=(name,))
        assert set(results) == {"o", "lse", f"d{name}"}
        case.check(results)
        assert (dq.call_count, dkv.call_count) == launches, name


def repeats_backward():
    case = Sharded(**SMALL, seed=7)
    case.require()
    o, lse = case.call()
    torch.autograd.backward([o, lse], [case.do, case.dlse], retain_graph=True)
    case.backward(o, lse)
    case.check({name: gradient / 2 for name, gradient in case.gradients().items()})


def supports_any_layout(config="default"):
    """Check that strided, misaligned and expanded operands give the same bits as contiguous ones.

    Gradients of torch's kernels on GPUs are only compared with a tolerance: their order of summation varies.
    """
    ordered = config not in PIPELINED or device().type == "cpu"
    case = Sharded(**SMALL, dtype=BF16 if config in PIPELINED else FP32, lse=config not in PIPELINED, seed=9)
    config = CONFIGS[config]
    case.do, case.dlse = torch.ones_like(case.do), torch.zeros_like(case.dlse)
    expected = case.run(config=config)
    case.own["q"] = case.own["q"].detach().transpose(1, 2).contiguous().transpose(1, 2)
    case.own["k"] = torch.stack([case.own["k"].detach()] * 2, dim=3)[:, :, :, 1]
    padded = torch.zeros(case.own["v"].numel() + 1, dtype=case.dtype, device=device())
    padded[1:] = case.own["v"].detach().flatten()
    case.own["v"] = padded[1:].view(case.own["v"].shape)
    case.do = torch.ones((), dtype=case.dtype, device=device()).expand(case.do.shape)
    for name, result in case.run(config=config).items():
        bound = {} if ordered or name in ("o", "lse") else dict(rtol=2**-7, atol=2**-7)
        torch.testing.assert_close(result, expected[name], **(bound or dict(rtol=0, atol=0)), msg=name)


def supports_any_layout_pipelined():
    supports_any_layout("flash")


def supports_checkpoint():
    case = Sharded(**SMALL, seed=10)
    case.require()
    o, lse = checkpoint(case.call, use_reentrant=False)
    case.backward(o, lse)
    case.check({"o": o.detach(), "lse": lse.detach(), **case.gradients()})


def supports_autocast():
    case = Sharded(**SMALL, seed=11)
    case.own = {name: operand.float() for name, operand in case.own.items()}
    with torch.autocast(device().type, BF16):
        results = case.run()
    assert results["o"].dtype == BF16 and {results[f"d{name}"].dtype for name in NAMES} == {FP32}
    case.check({name: result if name == "lse" else result.to(BF16) for name, result in results.items()})


def rejects_second_derivatives():
    case = Sharded(**SMALL, dtype=FP32, seed=12)
    case.require()
    for config in ("default", "torch"):
        o, _ = case.call(config=CONFIGS[config])
        with pytest.raises(RuntimeError, match="ag_attention: second derivatives"):
            torch.autograd.grad(o, case.own["k"], case.do, create_graph=True)


def runs_between_compiled_operations():
    """Check a call between operations that torch.compile traces."""
    torch._dynamo.reset()
    case = Sharded(**SMALL, lse=False, seed=16)
    case.require()

    def function(q, k, v):
        return tdkernels.ag_attention(q * 1.0, k, v) * 1.0

    o = torch.compile(function, backend="eager")(*(case.own[name] for name in NAMES))
    o.backward(case.do)
    case.check({"o": o.detach(), **case.gradients()})


def compiles_without_lse():
    """Check that an unused lse, for which torch.compile creates a zero gradient, does not force the fused backward."""
    torch._dynamo.reset()
    case = Sharded(**SMALL, lse=False, seed=17)
    case.require()
    attend = torch.compile(
        lambda q, k, v: tdkernels.ag_attention(q, k, v, config=CONFIGS["flash"]), backend="aot_eager", fullgraph=True
    )
    with mock.patch.object(pipelined, "backward", wraps=pipelined.backward) as pipelined_backward:
        o = attend(*(case.own[name] for name in NAMES))
        o.backward(case.do)
    assert pipelined_backward.call_count == 1
    case.check({"o": o.detach(), **case.gradients()})


AUTOGRAD = [
    returns_requested_outputs, computes_single_gradients, repeats_backward, supports_any_layout,
    supports_any_layout_pipelined, supports_checkpoint, supports_autocast, rejects_second_derivatives,
    runs_between_compiled_operations, compiles_without_lse,
]


def computes_in_a_subgroup(config):
    """Check a subgroup of two of three ranks, in reverse order."""
    group = dist.new_group([2, 0])
    try:
        if dist.get_rank() != 1:
            case = Sharded(**SMALL, sharding="zigzag", lse=config not in PIPELINED, seed=3, group=group)
            case.check(case.run(config=CONFIGS[config]))
            del case
    finally:
        if dist.get_rank() != 1:
            dist.destroy_process_group(group)


# ---- validation errors ----


def rejects_invalid_arguments():
    """Check that errors name the argument and its shape. They are raised before any launch, without a collective."""
    case = Sharded(6, heads=4, kv_heads=2, batch=2)
    q, k, v = (case.own[name] for name in NAMES)
    unsupported = (
        dict(config=AgAttentionConfig(method="cudnn")), ValueError, "method 'cudnn': cuDNN runs on NVIDIA GPUs"
    )
    if device().type == "cuda":
        unsupported = (
            dict(unsupported[0], v=v.repeat(1, 1, 1, 16)), ValueError, "heads of at most 128 elements, not q .*256"
        )
    for changes, error, message in (
        (dict(q=[1.0]), TypeError, "q must be a torch.Tensor, not list"),
        (dict(v=None), TypeError, "v must be a torch.Tensor, not NoneType"),
        (dict(q=q.double()), TypeError, "q is torch.float64; bfloat16, float16 and float32"),
        (dict(k=k.float()), TypeError, "q is torch.bfloat16 but k is torch.float32"),
        (dict(k=k.to("meta")), ValueError, "q is on .* but k is on meta"),
        (dict(q=q[0]), ValueError, r"q must have 4 dimensions \[B, S / W, heads, D\], its shape is \[6, 4, 16\]"),
        (dict(q=q[..., :8]), ValueError, r"the heads of q \[2, 6, 4, 8\] must have 16 to 256 elements"),
        (dict(v=v.repeat(1, 1, 1, 17)), ValueError, r"the heads of v \[2, 6, 2, 272\] must have 16 to 256"),
        (dict(q=q[:0]), ValueError, r"q \[0, 6, 4, 16\] has an empty dimension"),
        (dict(k=k[:, :, :0]), ValueError, r"k \[2, 6, 0, 16\] has an empty dimension"),
        (dict(k=k[:1]), ValueError, r"q \[2, 6, 4, 16\] and k \[1, 6, 2, 16\] must have the same B and S / W"),
        (dict(v=v[:, :5]), ValueError, r"q \[2, 6, 4, 16\] and v \[2, 5, 2, 16\] must have the same B and S / W"),
        (dict(v=v[:, :, :1]), ValueError, r"k \[2, 6, 2, 16\] and v \[2, 6, 1, 16\] must have the same number"),
        (dict(q=q[:, :, :3]), ValueError, r"q \[2, 6, 3, 16\] must be a multiple of the number .* k \[2, 6, 2, 16\]"),
        (dict(k=k.repeat(1, 1, 1, 2)), ValueError, r"last dimension of q .* and of k \[2, 6, 2, 32\] must be the same"),
        (dict(causal=1), TypeError, "causal must be True or False, not 1"),
        (dict(sharding="striped"), ValueError, "sharding must be .*, not 'striped'"),
        (dict(scale="1"), TypeError, "scale must be a number or None, not str"),
        (dict(scale=0.0), ValueError, "scale must be positive and finite, not 0.0"),
        (dict(scale=float("nan")), ValueError, "scale must be positive and finite, not nan"),
        (dict(config="best"), TypeError, "config must be an AgAttentionConfig or None, not str"),
        (dict(config=AgAttentionConfig("best")), ValueError, "config cannot run: method must be"),
        (dict(config=AgAttentionConfig(backward="torch")), ValueError, "config cannot run: backward must be one of ''"),
        unsupported,
        (dict(config=AgAttentionConfig(block_q=24)), ValueError, "block_q must be a power of two of at least 16"),
        (dict(config=AgAttentionConfig(dkv_num_warps=3)), ValueError, "dkv_num_warps must be 1, 2, 4, 8 or 16"),
        (dict(config=AgAttentionConfig(chunk_rows=24)), ValueError, "chunk_rows must be a multiple of 16, not 24"),
        (dict(config=AgAttentionConfig(num_comm_sms=-1)), ValueError, "num_comm_sms must be at least 1"),
        (dict(group="world"), TypeError, "group"),
    ):
        good = dict(q=q, k=k, v=v)
        check_rejection("ag_attention", lambda **call: tdkernels.ag_attention(**call), good, changes, error, message)
    with torch.no_grad():
        case.check({"o": case.call()[0]})
