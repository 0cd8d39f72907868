"""Test bodies for the warp-specialized kernels of tp_moe; see test_specialized.py."""

import contextlib
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import tdkernels
from tdkernels import MoeTpConfig, Tiles
from tdkernels.ops.experts.tp_moe import launch_specialized
from tests.ops.dense import specialized_support
from tests.ops.experts.tp_moe.cases import poisoned_outputs
from tests.ops.experts.tp_moe.fp8_cases import Fp8Slices
from tests.ops.experts.tp_moe.oracle import Sliced
from tests.support.moe_oracle import NAMES
from tests.support.ranks import device

CONFIG = MoeTpConfig(tiles=Tiles(128, 256, 64), num_comm_sms=5, warp_specialize=True)
FP8_CONFIG = replace(CONFIG, tiles=Tiles(128, 256, 128))
WORKSPACES = ("moe_ag_gemm", 2), ("moe_gemm_rs", 2)


def portable(config):
    """Return the config of the portable kernels."""
    return replace(config, warp_specialize=False)


@contextlib.contextmanager
def specialized(expected=True, ranks=None):
    """Check whether the first launch in a ``with`` block can use the warp-specialized kernel.

    Cached launches are cleared first. The block receives a list with an element for each new launch: whether it can use
    that kernel. Gradients may need another one, see ``_supported``.
    ``ranks``: the ranks that may run the warp-specialized kernels, or None for all
    """
    specialized_support.forget_launches(*WORKSPACES)
    found = []
    with pytest.MonkeyPatch.context() as patch:
        def supports(*args, original=launch_specialized.supports):
            found.append(original(*args))
            return found[-1] and (ranks is None or dist.get_rank() in ranks)

        patch.setattr(launch_specialized, "supports", supports)
        yield found
    assert found and found[0] == expected, found


def _supported(layer):
    """Return whether the warp-specialized kernels support the products with dy and with the gradient of h."""
    return [layer.own[name].shape[1] % 64 == 0 for name in ("w_down", "w_gate_up")]


def computes(spec, stages):
    """Check forward and all gradients against the unsharded layer."""
    for chunk_rows in (16, 256):
        layer = Sliced(**spec)
        with specialized() as found, poisoned_outputs():
            results = layer.run(config=replace(CONFIG, stages=stages, chunk_rows=chunk_rows))
        assert found == [True, True, *_supported(layer)], found
        layer.check(results)


RESULTS = "h", "y", "dx", "dh", "dtopk_weights", "dw_down"


def _run_both_kernels(layer, config):
    """Return the RESULTS of both stages and of their gradients, with rows in the order of the routing."""
    x, ids, weights, w_gate_up, w_down = (
        tensor.detach().requires_grad_(tensor.is_floating_point()) for tensor in layer.operands()
    )
    h, routing = tdkernels.moe_ag_gemm(x, ids, w_gate_up, activation=layer.activation, config=config)
    used = int(routing.splits.sum())
    rows = h.detach().requires_grad_()
    y = tdkernels.moe_gemm_rs(rows, routing, weights, w_down, config=config)
    dh = torch.randn(h.shape, generator=torch.Generator(device()).manual_seed(1), device=device()).to(h.dtype)
    h.backward(dh)
    y.backward(layer.dy)
    return h.detach()[:used], y.detach(), x.grad, rows.grad[:used], weights.grad, w_down.grad


def has_the_bits_of_the_portable_kernels(spec, stages, repeats=3):
    """Check rows, sums and gradients, with new operands each time."""
    for seed in range(repeats):
        for chunk_rows in (32, 128):
            layer = Sliced(**spec | {"seed": 10 * seed + chunk_rows})
            config = replace(CONFIG, stages=stages, chunk_rows=chunk_rows)
            with specialized() as launches, poisoned_outputs():
                found = [_run_both_kernels(layer, config) for _ in range(3)]
            assert launches == [True, True, *reversed(_supported(layer))], launches
            expected = _run_both_kernels(layer, portable(config))
            for results in found:
                for name, result, other in zip(RESULTS, results, expected, strict=True):
                    assert torch.equal(result, other), (layer.title, name, (result - other).abs().max())


def works_with_portable_kernels_on_other_ranks(spec, stages):
    """Check ranks that run different kernels for the same calls, with different numbers of programs that push."""
    config = replace(CONFIG, stages=stages, chunk_rows=32)
    for seed, ranks in enumerate([(0,), (1,), (0, 2)]):
        layer = Sliced(**spec | {"seed": seed})
        with specialized(ranks=ranks), poisoned_outputs():
            found = _run_both_kernels(layer, config)
        specialized_support.forget_launches(*WORKSPACES)
        for result, other in zip(found, _run_both_kernels(layer, portable(config)), strict=True):
            assert torch.equal(result, other), layer.title


def has_the_bits_in_fp8(tokens, stages, **changes):
    """Check the layer with weights in fp8, by default with block-wise scales."""
    config = replace(FP8_CONFIG, stages=stages, chunk_rows=64)
    for seed in range(3):
        layer = Fp8Slices(tokens, seed=seed, **changes)
        with specialized(), poisoned_outputs():
            found = [layer.call(config=config) for _ in range(2)]
        expected = layer.call(config=portable(config))
        assert all(torch.equal(result, expected) for result in found)


def falls_back(spec):
    """Check that unsupported operands run on the portable kernels."""
    layer = Sliced(**spec)
    with specialized(False):
        layer.check(layer.run(config=CONFIG))


def replays_in_a_graph(spec):
    """Check replays of a CUDA graph of three calls with new tokens and ids."""
    layer = Sliced(**spec, ids="distinct")
    operands = [tensor.detach().clone() for tensor in layer.operands()]
    call = lambda config: tdkernels.tp_moe(*operands, config=config)  # noqa: E731

    def renew():
        operands[0].normal_()
        operands[1].copy_(operands[1].roll(1, 0))

    with specialized():
        call(CONFIG)
    call(portable(CONFIG))
    specialized_support.replays_in_a_graph(renew, lambda: call(CONFIG), lambda: call(portable(CONFIG)))


def replays_a_step_in_a_graph(spec):
    """Check replays of a CUDA graph of forward and backward with new tokens, ids and gradients."""
    layer = Sliced(**spec, ids="distinct")
    layer.require()
    assert all(_supported(layer))

    def step(config):
        y = layer.call(config=config)
        return y.detach(), *torch.autograd.grad(y, [layer.own[name] for name in NAMES], layer.dy)

    def renew():
        layer.own["x"].detach().normal_()
        layer.dy.normal_()
        layer.ids.copy_(layer.ids.roll(1, 0))

    with specialized():
        step(CONFIG)
    step(portable(CONFIG))
    specialized_support.replays_in_a_graph(renew, lambda: step(CONFIG), lambda: step(portable(CONFIG)))


def selects_kernels(spec, config, expected):
    """Check a config without tiles or no config, forward and gradients."""
    layer = Sliced(**spec)
    with specialized(expected):
        layer.check(layer.run(config=config))


def selects_tiles_in_fp8(expected, **changes):
    layer = Fp8Slices(512, **changes)
    with specialized(expected):
        found = layer.call(config=MoeTpConfig(warp_specialize=True))
    assert torch.equal(found, layer.call(config=MoeTpConfig()))


def computes_on_other_devices(spec):
    """Check that the config runs the portable kernels."""
    layer = Sliced(**spec)
    config = MoeTpConfig(tiles=Tiles(16, 32, 16, 2, 4, 2), num_comm_sms=2, chunk_rows=16, warp_specialize=True)
    layer.check(layer.run(config=config))
