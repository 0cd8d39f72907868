"""Test bodies for EPMoE and TPMoE. Every rank runs them; test_moe.py starts them."""

import copy
import re

import pytest
import torch
import torch.distributed as dist

import tdkernels
from tdkernels.nn import EPMoE, Router, TPMoE, full_state_dict, replace_moe
from tests.support.dense_oracle import assert_close
from tests.support.moe_oracle import mixture
from tests.support.ranks import device

KINDS = {"EPMoE": EPMoE, "TPMoE": TPMoE}
E, K, H, I = 6, 2, 16, 12  # E and I are divisible by 1, 2 and 3 ranks
GATE = "gate.weight"


# ---- whole weights and shards ----


def whole_weights(dtype=torch.float32, seed=0):
    """Return the weights of a block in the fused checkpoint layout, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {GATE: (E, H), "experts.gate_up_proj": (E, 2 * I, H), "experts.down_proj": (E, H, I)}
    drawn = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return {name: (weight * weight.shape[-1] ** -0.5).to(dtype) for name, weight in drawn.items()}


def in_layout(whole, layout):
    """Return ``whole`` in another checkpoint layout. Names and splits are written out independently of the library."""
    if layout == "fused":
        return dict(whole)
    gate, up, down = {"qwen3_moe": ("gate_proj", "up_proj", "down_proj"), "mixtral": ("w1", "w3", "w2")}[layout]
    state = {GATE: whole[GATE]}
    for e in range(E):
        state[f"experts.{e}.{gate}.weight"] = whole["experts.gate_up_proj"][e, :I]
        state[f"experts.{e}.{up}.weight"] = whole["experts.gate_up_proj"][e, I:]
        state[f"experts.{e}.{down}.weight"] = whole["experts.down_proj"][e]
    return state


def shard_of(kind, gate_up, down):
    """Return this rank's shards (w_gate_up, w_down) of whole weights."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if kind == "EPMoE":
        return gate_up.chunk(world_size)[rank], down.chunk(world_size)[rank]
    gate, up = (weight.chunk(world_size, dim=1)[rank] for weight in gate_up.chunk(2, dim=1))
    return torch.cat([gate, up], dim=1), down.chunk(world_size, dim=2)[rank]


def make(kind, **options):
    gate = Router(H, E, K, device=device())
    return KINDS[kind](gate, I, device=device(), **options)


# ---- forward and gradients ----


def computes(kind):
    """Compare forward and all gradients with the unsharded layer, after loading whole weights."""
    module = make(kind)
    whole = whole_weights()
    module.load_state_dict(whole)
    rows = [3, 0, 5] if kind == "EPMoE" else [4, 4, 4]
    rows = rows[: dist.get_world_size()]
    generator = torch.Generator().manual_seed(1)
    all_x, all_dy = (torch.randn(2 * sum(rows), H, generator=generator) for _ in range(2))
    mine = slice(2 * sum(rows[: dist.get_rank()]), 2 * sum(rows[: dist.get_rank() + 1]))
    x = all_x[mine].to(device()).view(2, -1, H).requires_grad_()
    y = module(x)
    assert y.shape == x.shape
    y.backward(all_dy[mine].to(device()).view(y.shape))
    tdkernels.synchronize()

    exact, low = (unsharded(whole, all_x, all_dy, dtype) for dtype in (torch.double, torch.float32))
    got = {"y": y.detach().flatten(0, 1), "dx": x.grad.flatten(0, 1)}
    for name, value in got.items():
        compare(f"{name} of {kind}", value, exact[name][mine], low[name][mine])
    gate = module.gate.weight.grad
    if dist.get_world_size() > 1:  # each rank has the gradient from its own tokens
        dist.all_reduce(gate)
    assert_close(f"dgate of {kind}", gate, exact["gate"], low["gate"])
    parts = [shard_of(kind, results["gate_up"], results["down"]) for results in (exact, low)]
    for name, number in (("w_gate_up", 0), ("w_down", 1)):
        value = getattr(module, name).grad
        compare(f"d{name} of {kind}", value, parts[0][number], parts[1][number])


def unsharded(whole, x, dy, dtype):
    """Return y and all gradients of the unsharded router and experts for the tokens of all ranks."""
    x, gate, gate_up, down = (tensor.to(dtype).requires_grad_() for tensor in (x.clone(), *whole_copies(whole)))
    scores = torch.softmax(x @ gate.t(), -1)
    weights, ids = torch.topk(scores, K)
    y = mixture(x, ids, weights / weights.sum(-1, keepdim=True), gate_up, down)
    y.backward(dy.to(dtype))
    return {"y": y.detach(), "dx": x.grad, "gate": gate.grad, "gate_up": gate_up.grad, "down": down.grad}


def whole_copies(whole):
    return [whole[name].clone() for name in (GATE, "experts.gate_up_proj", "experts.down_proj")]


def compare(name, got, exact, low):
    """Call ``assert_close`` on the concatenated shards of all ranks."""
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, [part.detach().cpu().flatten() for part in (got, exact, low)])
    assert_close(name, *(torch.cat(of_ranks) for of_ranks in zip(*parts, strict=True)))


# ---- checkpoints ----


def loads_and_saves_checkpoints(kind):
    """Load and save whole weights in each layout, and sharded weights, bitwise; also as a submodule of a model."""
    whole = whole_weights(seed=2)
    gate_up, down = shard_of(kind, whole["experts.gate_up_proj"], whole["experts.down_proj"])
    for layout in ("fused", "qwen3_moe", "mixtral"):
        module = make(kind)
        module.load_state_dict(in_layout(whole, layout))
        assert torch.equal(module.w_gate_up.detach().cpu(), gate_up), layout
        assert torch.equal(module.w_down.detach().cpu(), down), layout
        again = make(kind)
        again.load_state_dict(module.state_dict())
        assert {*module.state_dict()} == {GATE, "w_gate_up", "w_down"}
        model = torch.nn.ModuleDict({"norm": torch.nn.Linear(2, 2), "mlp": again})
        saved = full_state_dict(model, layout)
        expected = {"mlp." + name: weight for name, weight in in_layout(whole, layout).items()}
        assert {*saved} == {*expected, "norm.weight", "norm.bias"}
        for name, weight in expected.items():
            assert torch.equal(saved[name].cpu(), weight), name
        model["mlp"] = make(kind)
        model.load_state_dict(saved)
        assert torch.equal(model["mlp"].w_down.detach().cpu(), down), layout
        assert {*full_state_dict(again, layout)} == {*in_layout(whole, layout)}
    with pytest.raises(ValueError, match="layout must be one of .*, not 'gguf'"):
        full_state_dict(model, "gguf")


def loads_own_experts_only():
    """EPMoE loads a checkpoint that contains only the experts of its rank."""
    module = make("EPMoE")
    state = in_layout(whole_weights(), "qwen3_moe")
    own_experts = {
        name: weight for name, weight in state.items()
        if name == GATE or int(name.split(".")[1]) in module.shard.experts
    }
    module.load_state_dict(own_experts)
    _, down = shard_of("EPMoE", *whole_copies(whole_weights())[1:])
    assert torch.equal(module.w_down.detach().cpu(), down)


def copies_module():
    """A deep copy has separate weights, loads checkpoints, and uses the same group."""
    module = make("EPMoE")
    other = copy.deepcopy(torch.nn.Sequential(module))[0]
    before = module.w_down.detach().clone()
    other.load_state_dict(whole_weights(seed=3))
    assert torch.equal(module.w_down.detach(), before) and not torch.equal(other.w_down.detach(), before)
    assert other.group is module.group


def rejects_invalid_checkpoints(kind):
    """Errors name missing keys, wrong sizes and wrong experts, and the weights of the experts stay unchanged."""
    module = make(kind)
    before = module.w_gate_up.detach().clone()
    first = module.shard.experts.start
    right = in_layout(whole_weights(), "qwen3_moe")
    down, up = f"experts.{first}.down_proj.weight", f"experts.{first}.up_proj.weight"
    missing = {name: weight for name, weight in right.items() if name != down}
    wider = {name: torch.cat([weight, weight], dim=0 if "down" not in name else 1) for name, weight in right.items()}
    fused = whole_weights()
    for state, message in (
        (missing, rf'Missing key\(s\) in state_dict: "experts.{first} \(down\)"\.'),
        (right | {up: right[up][:-1]}, rf"size mismatch for {re.escape(up)}: up .* \[11, 16\] .*, \[12, 16\] in"),
        (wider | {GATE: right[GATE]}, r"size mismatch for experts.\d.gate_proj.weight: gate .* \[24, 16\] in"),
        (fused | {name: torch.cat([w, w]) for name, w in fused.items() if name != GATE}, f"has {E} experts"),
        ({GATE: right[GATE]}, 'Missing key.*"w_gate_up", "w_down"'),
    ):
        with pytest.raises(RuntimeError, match=message):
            module.load_state_dict(state)
        assert torch.equal(module.w_gate_up.detach(), before)
    for name in (f"experts.{E}.up_proj.weight", up + "_scale_inv"):
        with pytest.raises(RuntimeError, match=rf'Unexpected key.* "{name}"'):
            module.load_state_dict(right | {name: right[up]})
    missing_keys, _ = module.load_state_dict(missing, strict=False)
    assert missing_keys == [f"experts.{first} (down)"]


# ---- initialization, options and balancing ----


def initializes_experts_per_rank(kind):
    """Ranks with the same seed get equal routers and different experts."""
    torch.manual_seed(0)
    module = make(kind)
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, [p.detach().cpu() for p in (module.gate.weight, module.w_gate_up, module.w_down)])
    for gate, gate_up, down in parts[1:]:
        assert torch.equal(gate, parts[0][0])
        assert not torch.equal(gate_up, parts[0][1]) and not torch.equal(down, parts[0][2])
    for weight, fan_in in ((module.w_gate_up, H), (module.w_down, I)):
        assert 0.9 * fan_in**-0.5 < weight.abs().max() <= fan_in**-0.5
    assert f"rank {dist.get_rank()} of {len(parts)}" in repr(module)


def passes_options():
    """The module passes its constructor options to each call, and rejects sizes that are not divisible."""
    calls = []
    module = make("EPMoE", max_tokens=100, max_tokens_per_rank=7, config=tdkernels.EpMoeConfig())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tdkernels, "ep_moe", lambda x, *_, **options: calls.append(options) or x)
        module(torch.randn(3, H, device=device()))
    assert calls == [
        dict(
            num_experts=E, quantize=None, max_tokens=100, max_tokens_per_rank=7, group=dist.group.WORLD,
            config=tdkernels.EpMoeConfig(),
        )
    ]
    sizes = {"EPMoE": ("num_experts 7", Router(H, 7, K), I), "TPMoE": ("intermediate 13", Router(H, E, K), 13)}
    for kind, (size, gate, intermediate) in sizes.items():
        with pytest.raises(ValueError, match=f"{kind}: {size} must be divisible by the group's 2 ranks"):
            KINDS[kind](gate, intermediate)
    with pytest.raises(ValueError, match="Linear is none of .*Mixtral"):
        EPMoE.from_hf(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="replace_moe: Sequential has none of"):
        replace_moe(torch.nn.Sequential(torch.nn.Linear(2, 2)), TPMoE)


def balances_router():
    """``balance`` lowers the bias of overloaded experts on every rank; weights depend only on the scores."""
    torch.manual_seed(0)
    gate = Router(H, 4, 2, scores="sigmoid", scale=2.5, balanced=True, device=device())
    x = torch.randn(8, H, device=device())
    gate.e_score_correction_bias.copy_(torch.tensor([9.0, 0.0, -9.0, 5.0]))
    ids, weights = gate(x)
    assert sorted({*ids.flatten().tolist()}) == [0, 3]
    scores = torch.sigmoid(x @ gate.weight.t())[:, [0, 3]]
    expected = 2.5 * scores / scores.sum(1, keepdim=True)
    torch.testing.assert_close(weights, torch.where(ids == 0, expected[:, :1], expected[:, 1:]))
    gate.eval()(x)  # does not count in eval mode
    assert gate.choices.tolist() == [8, 0, 0, 8]
    if dist.get_rank() == 0:
        gate.choices[1] += 100
    gate.balance(0.5)
    balanced = [9.5, -0.5, -8.5, 5.5] if dist.get_world_size() == 2 else None
    assert gate.e_score_correction_bias.tolist() == balanced and not gate.choices.any()
    assert {*gate.state_dict()} == {"weight", "e_score_correction_bias"}
