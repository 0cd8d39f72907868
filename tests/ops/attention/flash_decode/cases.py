"""Test bodies for flash_decode. Every rank runs them; see test_flash_decode.py."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel

import tdkernels
from tests.ops.attention.flash_decode.oracle import (
    CACHES,
    FP8,
    FP32,
    OPERANDS,
    Decode,
    attention,
    enlarge,
    replace_pages,
)
from tests.ops.experts.tp_moe.cases import poisoned_outputs
from tests.support.ranks import a_group, device

# Fields of a FlashDecodeConfig, or None for a call without a config.
CONFIGS = {
    "default": None,
    "small blocks": dict(block_n=16, num_warps=2, num_stages=1, num_programs=3),
    "chunks": dict(block_n=16, num_warps=1, num_stages=1, num_programs=3, chunk_keys=16),
    "high tiles": dict(block_n=32, num_warps=8, num_stages=2, num_programs=2, tile_rows=64),
    "low tiles": dict(block_n=16, num_warps=4, num_stages=1, num_programs=3, tile_rows=16),
    "one program": dict(block_n=32, num_warps=4, num_stages=1, num_programs=1),
    "many programs": dict(block_n=16, num_warps=4, num_stages=1, num_programs=225),
    "split": dict(method="split", block_n=16, num_warps=1, num_stages=1),
    "split, many programs": dict(method="split", block_n=16, num_warps=4, num_stages=1, num_programs=50),
    "torch": dict(method="torch"),
}
SMALL = enlarge(dict(batch=2, heads=4, kv_heads=2, dim=16, keys=7))


def config_of(name):
    return None if CONFIGS[name] is None else tdkernels.FlashDecodeConfig(**CONFIGS[name])


# ---- results ----


def computes(spec, config):
    """Check o, lse and every gradient, that o has the same bits without lse, and the reference in plain torch."""
    case = Decode(**spec)
    inputs = () if spec.get("scales") or spec.get("rope") else OPERANDS
    with poisoned_outputs():
        results = case.run(inputs, config=config_of(config))
    gradients = [f"d{name}" for name in inputs if not (case.latent and name == "v_cache")]
    assert {*results} == {"o", "lse", *gradients}
    case.check(results)
    with torch.no_grad():
        assert torch.equal(case.call(config=config_of(config)), results["o"]), "without its log-sum-exp"
        o, lse = case.call(tdkernels.flash_decode_ref, return_lse=True)
        case.check({"o": o, "lse": lse})


def oracle_matches_torch():
    """Check the oracle against torch's attention and, for soft caps, against a direct formula."""
    generator, shapes = torch.Generator().manual_seed(0), ((3, 4, 8), (7, 2, 8), (7, 2, 5))
    q, k, v = (torch.randn(*shape, generator=generator, dtype=torch.double) for shape in shapes)
    for window in (None, 1, 3):
        last, key = 4 + torch.arange(3)[:, None], torch.arange(7)
        mask = (key <= last) & (key > last - (window or 100))
        heads = [tensor.transpose(0, 1)[None] for tensor in (q, k, v)]
        with sdpa_kernel(SDPBackend.MATH):
            o = torch.nn.functional.scaled_dot_product_attention(*heads, mask, enable_gqa=True, scale=0.3)
        torch.testing.assert_close(attention(q, k, v, 0.3, None, window)[0], o[0].transpose(0, 1))
    for token in range(3):
        for head in range(4):
            scores = 2.0 * torch.tanh(k[: 5 + token, head // 2] @ q[token, head] * 8**-0.5 / 2.0)
            o, lse = (result[token, head] for result in attention(q, k, v, None, 2.0, None))
            torch.testing.assert_close(lse, scores.exp().sum().log())
            torch.testing.assert_close(o, (scores - lse).exp() @ v[: 5 + token, head // 2])


def supports_changing_lens(specs):
    """Check repeated calls with the same tensors if lengths, keys and pages change in them."""
    static = Decode(**specs[0])
    for spec in specs:
        fresh = Decode(**spec)
        refill(static, fresh)
        o, lse = static.call(return_lse=True)
        fresh.check({"o": o, "lse": lse})


def refill(static, fresh):
    """Copy the operands of ``fresh`` into the tensors of ``static``."""
    with torch.no_grad():
        for name in (*OPERANDS, "lens", "do", "dlse"):
            getattr(static, name).copy_(getattr(fresh, name))
        for name, value in fresh.options.items():
            static.options[name].copy_(value)


# ---- autograd ----


def computes_single_gradients():
    """Check each gradient alone."""
    case = Decode(**SMALL, tokens=2, seed=5)
    for name in OPERANDS:
        results = case.run(inputs=(name,))
        assert {*results} == {"o", "lse", f"d{name}"}
        case.check(results)


def computes_gradients_of_one_output():
    """Check gradients of o alone, with and without return_lse, and of lse alone."""
    case = Decode(**SMALL, seed=6)
    dlse, case.dlse = case.dlse, torch.zeros_like(case.dlse)
    for return_lse in (False, True):
        case.require()
        outputs = case.call(return_lse=return_lse)
        (outputs[0] if return_lse else outputs).backward(case.do)
        case.check(case.gradients())
    case = Decode(**SMALL, seed=6)
    case.do = torch.zeros_like(case.do)
    case.require()
    case.call(return_lse=True)[1].backward(dlse)
    gradients = case.gradients()
    assert not gradients.pop("dv_cache").any()
    case.check(gradients)


def saves_nothing_without_grad():
    case = Decode(**SMALL, seed=7)
    case.require()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            o = case.call()
        assert not o.requires_grad
        case.check({"o": o})


def repeats_backward():
    case = Decode(**SMALL, seed=8)
    case.require()
    outputs = case.call(return_lse=True)
    for retain in (True, False):
        torch.autograd.backward(outputs, [case.do, case.dlse], retain_graph=retain)
    case.check({name: gradient / 2 for name, gradient in case.gradients().items()})


def supports_expanded_gradients():
    """Check output gradients with strides of zero, as from ``o.sum().backward()``."""
    case = Decode(**SMALL, dtype=FP32, seed=9)
    case.do, case.dlse = torch.ones_like(case.do), torch.ones_like(case.dlse)
    expected = case.run()
    case.do, case.dlse = (torch.ones((), device=device()).expand(gradient.shape) for gradient in (case.do, case.dlse))
    for name, result in case.run().items():
        assert torch.equal(result, expected[name]), name


def rejects_second_derivatives():
    case = Decode(**SMALL, dtype=FP32, seed=10)
    case.require()
    for config in ("default", "torch"):
        o = case.call(config=config_of(config))
        with pytest.raises(RuntimeError, match="flash_decode: second derivatives"):
            torch.autograd.grad(o, case.q, case.do, create_graph=True)


def rejects_fp8_gradients():
    case = Decode(**SMALL, scales="tensor", seed=11)
    case.q.requires_grad_()
    with pytest.raises((TypeError, ValueError), match="float8_e4m3fn"):
        case.call()
    with torch.no_grad():
        case.check({"o": case.call()})


def supports_compile():
    """Check a call under torch.compile, traced or behind a graph break."""
    torch._dynamo.reset()
    case = Decode(**SMALL, seed=12)
    case.require()

    def function(q, k_cache, v_cache, lens):
        o, lse = tdkernels.flash_decode(q * 1.0, k_cache, v_cache, lens, return_lse=True)
        return o * 1.0, lse * 1.0

    backend = "inductor" if device().type == "cuda" else "aot_eager"
    o, lse = torch.compile(function, backend=backend)(*case.operands())
    torch.autograd.backward([o, lse], [case.do, case.dlse])
    case.check({"o": o.detach(), "lse": lse.detach(), **case.gradients()})


AUTOGRAD = [
    computes_single_gradients, computes_gradients_of_one_output, saves_nothing_without_grad, repeats_backward,
    supports_expanded_gradients, rejects_second_derivatives, rejects_fp8_gradients, supports_compile,
]


# ---- memory layouts ----


def supports_any_layout():
    """Check that strided operands give the same bits as contiguous ones."""
    for spec in (dict(SMALL, tokens=2), dict(SMALL, page=4)):
        case = Decode(**spec, seed=13)
        expected = case.run()
        case.check(expected)
        plain = {name: getattr(case, name).detach() for name in OPERANDS}
        nan = torch.full_like(plain["k_cache"], torch.nan)
        layouts = {
            "by head": {name: plain[name].transpose(1, 2).contiguous().transpose(1, 2) for name in CACHES},
            "side by side": dict(zip(CACHES, torch.stack([plain[name] for name in CACHES], 2).unbind(2))),
            "wider": {name: torch.cat([plain[name], nan], -1)[..., : case.dim] for name in CACHES},
            "q": {"q": plain["q"].mT.contiguous().mT},
            "lens": {},
        }
        for title, changes in layouts.items():
            for name, tensor in {**plain, **changes}.items():
                setattr(case, name, tensor)
            case.lens = torch.stack([case.lens, case.lens], 1)[:, 0] if title == "lens" else case.lens
            for name, result in case.run().items():
                assert torch.equal(result, expected[name]), f"{name}, {title}"


def supports_empty_batch():
    for tokens in (None, 2):
        whole = Decode(**SMALL, tokens=tokens, dtype=FP32)
        q, k_cache, v_cache = (getattr(whole, name)[:0].detach().requires_grad_() for name in OPERANDS)
        o, lse = tdkernels.flash_decode(q, k_cache, v_cache, whole.lens[:0], return_lse=True)
        (o.sum() + lse.sum()).backward()
        assert o.shape == q.shape and lse.shape == q.shape[:-1] and q.grad.shape == q.shape
        assert k_cache.grad.shape == k_cache.shape


# ---- groups ----


def computes_in_a_subgroup():
    """Check a subgroup of the last two ranks; the first rank does not take part."""
    with a_group([1, 2]) as group:
        if dist.get_rank() == 0:
            return
        case = Decode(**SMALL, group=group, seed=14)
        case.check(case.run())
        del group, case


def computes_in_groups_of_one():
    """Check groups of one rank each, with different operands and numbers of calls."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    own = groups[dist.get_rank()]
    for call in range(1 + 2 * dist.get_rank()):
        case = Decode(**SMALL, group=own, seed=20 + 10 * dist.get_rank() + call)
        case.check(case.run())
    del own, case
    dist.barrier()
    for group in groups:
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)


# ---- validation errors ----


def rejects_invalid_arguments():
    """Check validation errors. They are raised before any launch, so later calls work."""
    case = Decode(3, 4, 2, 16, 9)
    q, k, v, lens = case.operands()
    paged = Decode(3, 4, 2, 16, 9, page=4)
    table, pages = paged.options["block_table"], dict(k_cache=paged.k_cache, v_cache=paged.v_cache)
    one = torch.ones((), device=device())
    fp8 = dict(k_cache=k.to(FP8), v_cache=v.to(FP8), k_scale=one, v_scale=one)
    good = dict(q=q, k_cache=k, v_cache=v, kv_lens=lens)
    Config = tdkernels.FlashDecodeConfig
    for changes, error, message in [
        (dict(q=[1.0]), TypeError, "q must be a torch.Tensor, not list"),
        (dict(q=q.double()), TypeError, "q is torch.float64"),
        (dict(q=q[0]), ValueError, r"q must .*\[4, 16\]"),
        (dict(q=q[..., :8]), ValueError, r"q .*\[3, 4, 8\].*\[3, 9, 2, 16\]"),
        (dict(q=q[:2]), ValueError, r"\[2, 4, 16\]"),
        (dict(q=q[:, :3]), ValueError, r"q .*\[3, 3, 16\].*\[3, 9, 2, 16\]"),
        (dict(q=q.float()), TypeError, "k_cache is torch.bfloat16; the type of q, torch.float32"),
        (dict(k_cache=None), TypeError, "k_cache must be a torch.Tensor, not NoneType"),
        (dict(k_cache=k[0]), ValueError, r"k_cache must .*\[9, 2, 16\]"),
        (dict(v_cache=v[:, :5]), ValueError, r"v_cache .*\[3, 5, 2, 16\]"),
        (dict(v_cache=v.half()), TypeError, "v_cache is torch.float16"),
        (dict(v_cache=v.to("meta")), ValueError, "v_cache is on meta"),
        (dict(kv_lens=None), TypeError, "kv_lens must be a torch.Tensor, not NoneType"),
        (dict(kv_lens=lens.float()), TypeError, "kv_lens is torch.float32"),
        (dict(kv_lens=lens[:2]), ValueError, r"kv_lens .*\[2\]"),
        (dict(k_cache=k.mT.contiguous().mT), ValueError, r"k_cache \[3, 9, 2, 16\] must have a contiguous last"),
        (dict(k_cache=pages["k_cache"], v_cache=pages["v_cache"]), ValueError, r"k_cache \[10, 4, 2, 16\] must have"),
        (dict(pages, block_table=table.float()), TypeError, "block_table is torch.float32"),
        (dict(pages, block_table=table[:2]), ValueError, r"block_table .*\[2, 3\]"),
        (dict(pages, block_table=table[0]), ValueError, r"block_table .*\[3\]"),
        (dict(k_scale=one), ValueError, "k_scale is for caches of float8_e4m3fn, k_cache is torch.bfloat16"),
        (dict(fp8, k_scale=torch.ones(3, device=device())), ValueError, r"k_scale .*\[3\]"),
        (dict(fp8, k_scale=one.half()), TypeError, "k_scale is torch.float16"),
        (dict(fp8, k_scale=1.0), TypeError, "k_scale must be a torch.Tensor, not float"),
        (dict(fp8, v_cache=v), TypeError, "v_cache is torch.bfloat16"),
        (dict(window=0), ValueError, "window must .*, not 0"),
        (dict(window=1.5), ValueError, "window must .*, not 1.5"),
        (dict(soft_cap=0.0), ValueError, "soft_cap must .*, not 0.0"),
        (dict(soft_cap="high"), ValueError, "soft_cap must .*, not 'high'"),
        (dict(scale=float("nan")), ValueError, "scale must .*, not nan"),
        (dict(config="best"), TypeError, "config must be a FlashDecodeConfig or None, not str"),
        (dict(config=Config(method="best")), ValueError, "config cannot run: method must be"),
        (dict(config=Config(block_n=24)), ValueError, "block_n must be .*, not 24"),
        (dict(config=Config(num_programs=-1)), ValueError, "num_programs must be .*, not -1"),
        (dict(config=Config(tile_rows=48)), ValueError, "tile_rows must be 0, 16, 32 or 64, not 48"),
        (dict(group="world"), TypeError, "group"),
    ]:
        arguments = {**good, **changes}
        operands = [arguments.pop(name) for name in good]
        with pytest.raises(error, match=message):
            tdkernels.flash_decode(*operands, **arguments)
    case.check({"o": case.call()})


def masks_pages_outside_the_cache(config):
    """Check that keys of pages outside the cache are masked. Half of all pages are; memory around the cache is NaN."""
    for spec in (
        dict(batch=4, heads=4, kv_heads=2, dim=16, keys=24, page=4, dtype=FP32),
        dict(batch=3, heads=4, kv_heads=2, dim=16, keys=40, page=4, tokens=3, window=37, dtype=FP32),
        dict(batch=2, heads=4, kv_heads=1, dim=24, value_dim=16, keys=12, page=4, tokens=2, latent=True),
        dict(batch=2, heads=4, kv_heads=2, dim=32, keys=12, page=4, lens="full", scales="head"),
    ):
        case = Decode(**enlarge(spec), seed=21)
        replace_pages(case)
        _check_call(case, config, spec)


def clamps_64_bit_lengths(config):
    """Check that 64-bit lengths are clamped to the cache. If truncated to 32 bits, they would be 5."""
    for spec in (
        dict(batch=6, heads=4, kv_heads=2, dim=16, keys=12, dtype=FP32),
        dict(batch=6, heads=4, kv_heads=2, dim=16, keys=12, page=4, tokens=3, window=9, dtype=FP32),
    ):
        case = Decode(**enlarge(spec), seed=22)
        lens = case.all_lens[case.rank].clone()
        lens[case.all_lens[case.rank] == spec["keys"]] = (1 << 32) + 5
        lens[case.all_lens[case.rank] == 0] = -(1 << 32) + 5
        assert case.all_lens.eq(0).any() and case.all_lens.eq(spec["keys"]).any(), "no empty or no full sequence"
        case.lens = lens.to(device())
        _check_call(case, config, spec)


def _check_call(case, config, spec):
    inputs = () if spec.get("scales") or spec.get("rope") else OPERANDS
    with poisoned_outputs():
        case.check(case.run(inputs, config=config_of(config)))
    with torch.no_grad():
        o, lse = case.call(tdkernels.flash_decode_ref, return_lse=True)
        case.check({"o": o, "lse": lse})


def validates_in_debug_mode():
    """Check that with TDKERNELS_DEBUG each rank validates its lengths and pages on the device."""
    with mock.patch.dict("os.environ", TDKERNELS_DEBUG="1"):
        for spec, name, wrong, message in (
            (SMALL, "lens", SMALL["keys"] + 1, r"kv_lens\[0\]"), (SMALL, "lens", -1, r"kv_lens\[0\]"),
            (dict(SMALL, page=4, lens="full"), "block_table", 1000, r"block_table\[0, 0\]"),
            (dict(SMALL, page=4, lens="full"), "block_table", -1, r"block_table\[0, 0\]"),
        ):
            case = Decode(**spec, seed=15)
            tensor = case.lens if name == "lens" else case.options[name]
            right = tensor.clone()
            tensor.view(-1)[0] = wrong
            with pytest.raises(ValueError, match=f"{message} is {wrong}, "):
                case.call()
            tensor.copy_(right)
            case.check({"o": case.call()})


