"""A stand-in for the parts of vLLM that the plugin uses, as modules in sys.modules. It computes what vLLM documents."""

import contextlib
import sys
import types

import torch
import torch.distributed as dist


class PluggableLayer(torch.nn.Module):
    """Creates the class that a plugin has registered under the name of the class, if there is one."""

    def __new__(cls, *args, **kwargs):
        return super().__new__(op_registry_oot.get(cls.__name__, cls))

    @classmethod
    def register_oot(cls, layer=None, name=None):
        if name in op_registry_oot:
            raise AssertionError(f"{name} is registered already")
        op_registry_oot[name] = layer
        return layer


op_registry_oot = {}


class UnquantizedLinearMethod:
    def apply(self, layer, x, bias=None):
        return torch.nn.functional.linear(x, layer.weight, bias)


class Fp8LinearMethod(UnquantizedLinearMethod):
    pass


class Weight(torch.nn.Parameter):
    """vLLM's parameters are a subclass of Parameter."""


class RowParallelLinear(PluggableLayer):
    def __init__(
        self, input_size, output_size, bias=True, input_is_parallel=True, skip_bias_add=False, params_dtype=None,
        reduce_results=True, quant_config=None, prefix="", *, return_bias=True, disable_tp=False,
    ):
        super().__init__()
        self.tp_rank, self.tp_size = (0, 1) if disable_tp else (dist.get_rank(), dist.get_world_size())
        self.input_size, self.output_size = input_size, output_size
        self.input_is_parallel, self.skip_bias_add = input_is_parallel, skip_bias_add
        self.reduce_results, self.return_bias = reduce_results, return_bias
        self.quant_method = Fp8LinearMethod() if quant_config == "fp8" else UnquantizedLinearMethod()
        weight = torch.empty(output_size, input_size // self.tp_size, dtype=params_dtype)
        self.weight = Weight(weight, requires_grad=False)
        self.bias = torch.nn.Parameter(weight.new_empty(output_size), requires_grad=False) if bias else None

    def forward(self, input_):
        x = input_ if self.input_is_parallel else input_.chunk(self.tp_size, -1)[self.tp_rank].contiguous()
        bias = None if self.tp_rank > 0 or self.skip_bias_add else self.bias
        z = self.quant_method.apply(self, x, bias)
        if self.reduce_results and self.tp_size > 1:
            z = tensor_model_parallel_all_reduce(z)
        if not self.return_bias:
            return z
        return z, self.bias if self.skip_bias_add else None


all_reduces = []  # the shapes of vLLM's all-reduces


def tensor_model_parallel_all_reduce(x):
    all_reduces.append(tuple(x.shape))
    x = x.clone()
    dist.all_reduce(x)
    return x


def get_tp_group():
    return types.SimpleNamespace(device_group=dist.group.WORLD)


@contextlib.contextmanager
def installed():
    """Let ``import vllm`` get the stand-in in a ``with`` block. Other modules that are imported in the block stay."""
    names = {
        "vllm": {}, "vllm.model_executor": {}, "vllm.model_executor.layers": {},
        "vllm.distributed": {"get_tp_group": get_tp_group,
                             "tensor_model_parallel_all_reduce": tensor_model_parallel_all_reduce},
        "vllm.model_executor.layers.linear": {"RowParallelLinear": RowParallelLinear},
        "vllm.model_executor.custom_op": {"PluggableLayer": PluggableLayer, "op_registry_oot": op_registry_oot},
    }
    modules = {}
    for name, members in names.items():
        modules[name] = types.ModuleType(name)
        vars(modules[name]).update(members, __path__=[])
    for name, module in modules.items():
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(modules[parent], last, module)
    op_registry_oot.clear()
    all_reduces.clear()
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]
