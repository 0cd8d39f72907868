"""The vLLM plugin, with a stand-in for vLLM: which class is created, values, fallbacks, torch.compile."""

import os
from importlib.metadata import entry_points
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import tdkernels
from tdkernels.integrations import vllm
from tests.integrations import vllm_stand_in
from tests.support.ranks import device, on_ranks

IN, OUT = 16, 6


def draw(*shape, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, shape, generator=generator).float().to(device())


def layer_of(kind=vllm_stand_in.RowParallelLinear, **options):
    layer = kind(IN, OUT, **options).to(device())
    weight = draw(OUT, IN, seed=1)
    with torch.no_grad():
        layer.weight.copy_(weight.chunk(layer.tp_size, 1)[layer.tp_rank])
        if layer.bias is not None:
            layer.bias.copy_(draw(OUT, seed=2))
    return layer


def enabled(**environment):
    return mock.patch.dict(os.environ, {"TDKERNELS_VLLM": "1", **environment})


def runs_gemm_ar():
    with vllm_stand_in.installed():
        with mock.patch.dict(os.environ, clear=False):
            os.environ.pop("TDKERNELS_VLLM", None)
            vllm.register()
        assert type(layer_of()) is vllm_stand_in.RowParallelLinear
        expected = draw(4, IN, seed=3) @ draw(OUT, IN, seed=1).t()
        bias = draw(OUT, seed=2)
        with enabled(TDKERNELS_VLLM_MAX_ROWS="4"):
            vllm.register()
            vllm.register()
            for options in ({}, {"bias": False}, {"skip_bias_add": True}, {"return_bias": False},
                            {"input_is_parallel": False}):
                layer = layer_of(**options)
                assert type(layer) is vllm.row_parallel_linear() and layer.tdkernels_runs == ("gemm_ar", "")
                check(layer, options, expected, bias)
        assert vllm_stand_in.all_reduces == []


def check(layer, options, expected, bias):
    x = draw(4, IN, seed=3)
    if options.get("input_is_parallel", True):
        x = x.chunk(dist.get_world_size(), 1)[dist.get_rank()].contiguous()
    with torch.inference_mode():
        result = layer(x)
    z, returned = result if options.get("return_bias", True) else (result, None)
    adds = options.get("bias", True) and not options.get("skip_bias_add")
    assert torch.equal(z, expected + bias if adds else expected)
    assert (returned is not None) == bool(options.get("skip_bias_add"))


def test_values():
    on_ranks(2, runs_gemm_ar)


def falls_back():
    """More rows than the limit run vLLM's all-reduce; unsupported layers run vLLM's forward."""
    x, bias = draw(5, IN, seed=3), draw(OUT, seed=2)
    own = x.chunk(dist.get_world_size(), 1)[dist.get_rank()].contiguous()
    expected = x @ draw(OUT, IN, seed=1).t() + bias
    with vllm_stand_in.installed(), enabled(TDKERNELS_VLLM_MAX_ROWS="4"):
        vllm.register()
        assert torch.equal(layer_of()(own)[0], expected)
        assert vllm_stand_in.all_reduces == [(5, OUT)]
        layer = layer_of(quant_config="fp8")
        assert layer.tdkernels_runs == (None, "it is quantized: Fp8LinearMethod")
        assert torch.equal(layer(own[:2])[0], expected[:2])
        assert vllm_stand_in.all_reduces == [(5, OUT), (2, OUT)]
        layer = layer_of(reduce_results=False, bias=False)
        assert layer.tdkernels_runs == (None, "reduce_results is False: the layer has no all-reduce")
        assert torch.equal(layer(own)[0], own @ layer.weight.t())
        assert layer_of(disable_tp=True).tdkernels_runs == (None, "the layer has one rank")
        model = torch.nn.ModuleList([layer_of(), layer])
        table = tdkernels.nn.report(model, rows=2)
        assert table["0"].runs == "gemm_ar" and table["0"].config and table["1"].runs is None and not table["1"].config
        assert layer_of(params_dtype=torch.float64).tdkernels_runs == (None, "its weight is torch.float64")


def test_fallbacks():
    on_ranks(2, falls_back)


def compiles_for_any_number_of_rows():
    with vllm_stand_in.installed(), enabled(TDKERNELS_VLLM_MAX_ROWS="4"):
        vllm.register()
        layer = layer_of()
        torch._dynamo.reset()
        with torch.no_grad():
            compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
            for rows in (3, 4, 7):
                x = draw(rows, IN // 2, seed=rows)
                assert torch.equal(compiled(x)[0], layer(x)[0])
        assert len(vllm_stand_in.all_reduces) == 2  # 7 rows, compiled and not


def test_compilation():
    on_ranks(2, compiles_for_any_number_of_rows)


def reports_errors():
    with enabled(), pytest.raises(ImportError, match="tdkernels.integrations.vllm needs vLLM"):
        vllm.register()
    with vllm_stand_in.installed(), enabled():
        vllm_stand_in.op_registry_oot["RowParallelLinear"] = torch.nn.Linear
        with pytest.raises(RuntimeError, match="RowParallelLinear of vLLM was replaced by torch.nn.modules.linear.Lin"):
            vllm.register()
    with vllm_stand_in.installed(), enabled(TDKERNELS_VLLM_MAX_ROWS="many"):
        vllm.register()
        with pytest.raises(ValueError, match="TDKERNELS_VLLM_MAX_ROWS must be a positive integer, not 'many'"):
            layer_of()


def test_errors():
    on_ranks(1, reports_errors)


def test_entry_point():
    plugins = [one for one in entry_points(group="vllm.general_plugins") if one.name == "tdkernels"]
    if not plugins:
        pytest.skip("tdkernels is not installed, only on the path")
    assert plugins[0].load() is vllm.register
