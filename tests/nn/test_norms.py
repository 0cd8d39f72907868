"""SequenceParallel with local norms, and conversions of DTensors, against torch's."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor import parallel as torch_parallel
from torch.distributed.tensor.parallel import parallelize_module

from tdkernels.nn.parallel import SequenceParallel, parallelize
from tdkernels.nn.parallel.dtensors import from_local, to_local
from tests.support.ranks import device, on_ranks

B, S, H = 2, 3, 8


def mesh_of_world():
    return init_device_mesh(device().type, (dist.get_world_size(),))


def draw(*shape, seed=0):
    """Return a random tensor that differs between ranks."""
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    return torch.randn(shape, generator=generator).to(device())


def same_dtensors(got, expected):
    assert type(got) is type(expected) is DTensor
    assert got.placements == expected.placements and got.device_mesh == expected.device_mesh
    assert got.shape == expected.shape and got.stride() == expected.stride() and got.dtype == expected.dtype
    assert got.requires_grad == expected.requires_grad
    assert torch.equal(got.to_local(), expected.to_local())


# ---- conversions ----


def converts():
    mesh = mesh_of_world()
    for layout in (Shard(0), Shard(1), Shard(-1), Replicate(), Partial()):
        for source in (draw(4, 6, 2), draw(6, 4, 2).transpose(0, 1)):
            results = []
            for convert in (from_local, lambda *args: DTensor.from_local(*args, run_check=False)):
                x = source.detach().requires_grad_()
                y = convert(x, mesh, (layout,))
                (y * y.detach()).sum().full_tensor().backward()
                results.append((y, x.grad))
            same_dtensors(results[0][0], results[1][0])
            assert results[0][0].to_local().stride() == results[1][0].to_local().stride()
            assert torch.equal(results[0][1], results[1][1])
    cases = (Shard(0), Shard(0), 4), (Shard(0), Shard(0), 5), (Replicate(), Replicate(), 4), (Replicate(), Partial(), 4)
    for placement, layout, rows in cases:  # 5 rows are divided unevenly
        check_gradients(distribute_tensor(draw(rows, 6), mesh, (placement,)), layout)


def check_gradients(weight, layout):
    for transposed in (False, True):
        grads = []
        for convert in (to_local, lambda x, layouts: x.to_local(grad_placements=layouts)):
            parameter = torch.nn.Parameter(weight.detach().clone())
            local = convert(parameter, (layout,))
            dy = draw(*local.shape, seed=3)
            local.backward(dy.t().contiguous().t() if transposed else dy)
            grads.append(parameter.grad)
        same_dtensors(*grads)
        assert grads[0].to_local().stride() == grads[1].to_local().stride()
    with torch.no_grad():
        assert to_local(weight, (layout,)).grad_fn is None


def redistributes_gradients():
    """A gradient with other placements than the output of ``from_local`` is redistributed to them."""
    mesh, x = mesh_of_world(), draw(4, 6).requires_grad_()
    y = from_local(x, mesh, (Shard(0),))
    dy = DTensor.from_local(draw(6 * dist.get_world_size(), 6, seed=1)[: y.shape[0]], mesh, (Partial(),))
    y.backward(dy)
    assert torch.equal(x.grad, dy.redistribute(placements=(Shard(0),)).to_local())


def does_not_mix_meshes():
    """Equal meshes have their own groups; meshes of other sizes have other global shapes."""
    made = [init_device_mesh(device().type, (2, 1), mesh_dim_names=(name, "other")) for name in ("a", "b")]
    for mesh, ranks in ((made[0]["a"], 2), (made[1]["b"], 2), (made[0]["other"], 1), (made[1]["other"], 1)):
        y = from_local(torch.full((2, 2), float(dist.get_rank()), device=device()), mesh, (Shard(0),))
        assert y.device_mesh is mesh and y.shape == (2 * ranks, 2)
        expected = [0.0, 0.0, 1.0, 1.0] if ranks == 2 else [float(dist.get_rank())] * 2
        assert y.full_tensor()[:, 0].tolist() == expected


def differentiates_twice():
    """The gradient of a gradient, which operators reject and norms have."""
    mesh, results = mesh_of_world(), []
    for style in (SequenceParallel, torch_parallel.SequenceParallel):
        norm = parallelize_module(torch.nn.RMSNorm(H).to(device()), mesh, style())
        x = DTensor.from_local(draw(B, S, H), mesh, (Shard(1),)).requires_grad_()
        (dx,) = torch.autograd.grad(norm(x).pow(3).sum(), x, create_graph=True)
        dx.pow(2).sum().backward()
        results.append((x.grad.full_tensor(), norm.weight.grad.full_tensor()))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want)


def traces_symbolic_sizes():
    from torch.fx.experimental.proxy_tensor import make_fx

    mesh = mesh_of_world()

    def doubles(x):
        return to_local(from_local(x, mesh, (Shard(0),)) * 2, (Shard(0),))

    x = draw(4, 6)
    assert torch.equal(make_fx(doubles, tracing_mode="symbolic")(x)(x), 2 * x)


def test_conversions():
    on_ranks(2, converts)


def test_gradients_are_redistributed():
    on_ranks(2, redistributes_gradients)


def test_equal_meshes():
    on_ranks(2, does_not_mix_meshes)


def test_second_derivatives():
    on_ranks(2, differentiates_twice)


def test_symbolic_sizes():
    on_ranks(2, traces_symbolic_sizes)


# ---- norms ----


class OwnNorm(torch.nn.Module):
    """RMSNorm written with torch's functions, which runs on DTensors."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(H))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight


def norms():
    yield torch.nn.RMSNorm(H)
    yield torch.nn.RMSNorm(H, eps=0.1)
    yield torch.nn.RMSNorm(H, elementwise_affine=False)
    yield torch.nn.LayerNorm(H)
    yield torch.nn.LayerNorm(H, bias=False)
    yield torch.nn.LayerNorm(H, elementwise_affine=False, eps=0.1)
    yield OwnNorm()


def results_of(module, x):
    """Return the output, and the gradients of x and of the parameters."""
    x = x.detach().requires_grad_()
    y = module(x)
    (y * y.detach().relu()).sum().backward()
    return y, x.grad, [one.grad for one in module.parameters()]


def norms_agree():
    mesh = mesh_of_world()
    for norm in norms():
        for one in norm.parameters():
            torch.nn.init.normal_(one.data, generator=torch.Generator().manual_seed(1))
        for dim, use_local_output in ((1, False), (1, True), (0, True)):
            options = {"sequence_dim": dim, "use_local_output": use_local_output}
            ours, theirs = (
                parallelize_module(copy.deepcopy(norm).to(device()), mesh, style(**options))
                for style in (SequenceParallel, torch_parallel.SequenceParallel)
            )
            assert hasattr(ours, "tdkernels_norm") == (type(norm) is not OwnNorm)
            local = draw(B, S, H)
            given = [local, DTensor.from_local(local, mesh, (Shard(dim),))]
            # S = 3 is divided unevenly.
            given += [DTensor.from_local(draw(B, S, H), mesh, (layout,)) for layout in (Partial(), Replicate())]
            given.append(distribute_tensor(draw(B, S, H), mesh, (Shard(dim),)))
            for x in given:
                (y, dx, grads), (z, dz, expected) = results_of(ours, x), results_of(theirs, x)
                for got, want in ((y, z), (dx, dz)):
                    same_dtensors(got, want) if isinstance(want, DTensor) else torch.testing.assert_close(got, want)
                for got, want in zip(grads, expected, strict=True):
                    same_dtensors(got, want)
                for one in (*ours.parameters(), *theirs.parameters()):
                    one.grad = None


def norms_under_fsdp():
    """FSDP2 replaces the class of each module that it is applied to."""
    mesh = init_device_mesh(device().type, (2, 2), mesh_dim_names=("dp", "tp"))
    for norm in (torch.nn.RMSNorm(H, eps=0.1), torch.nn.RMSNorm(H), torch.nn.LayerNorm(H)):
        results = []
        for style in (SequenceParallel, torch_parallel.SequenceParallel):
            model = torch.nn.Sequential(copy.deepcopy(norm), torch.nn.Linear(H, H)).to(device())
            torch.nn.init.eye_(model[1].weight)
            torch.nn.init.zeros_(model[1].bias)
            parallelize_module(model, mesh["tp"], {"0": style(use_local_output=True)})
            fully_shard([model[0], model[1]], mesh=mesh["dp"])
            fully_shard(model, mesh=mesh["dp"])
            y, dx, grads = results_of(model, draw(B, S, H))
            results.append([y, dx, *(one.full_tensor() if isinstance(one, DTensor) else one for one in grads)])
        for got, want in zip(*results, strict=True):
            torch.testing.assert_close(got, want)


def norms_are_copied_and_compiled():
    mesh, x = mesh_of_world(), draw(B, S, H)
    model = torch.nn.Sequential(torch.nn.RMSNorm(H)).to(device())
    parallelize(model, mesh, {"0": torch_parallel.SequenceParallel(use_local_output=True)})
    assert hasattr(model[0], "tdkernels_norm")
    expected = results_of(model, x)[:2]
    for other in (copy.deepcopy(model), torch.compile(model, backend="aot_eager", fullgraph=True)):
        for got, want in zip(results_of(other, x)[:2], expected, strict=True):
            torch.testing.assert_close(got, want)
    with torch.autocast(device().type, torch.bfloat16):
        assert model(x).dtype == torch.nn.functional.rms_norm(x, (H,), torch.ones(H, device=device())).dtype


def sequence_must_not_be_normalized():
    norm = parallelize_module(torch.nn.RMSNorm(H).to(device()), mesh_of_world(), SequenceParallel())
    with pytest.raises(ValueError, match=rf"x \[{S}, {H}\] must have another dimension after the sequence, 1"):
        norm(draw(S, H))


def test_norms_equal_those_of_torch():
    on_ranks(2, norms_agree)


def test_norms_under_fsdp():
    on_ranks(4, norms_under_fsdp)


def test_copies_and_compiled_norms():
    on_ranks(2, norms_are_copied_and_compiled)


def test_invalid_sequence_dimension():
    on_ranks(2, sequence_must_not_be_normalized)
