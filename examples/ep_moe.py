"""A mixture of experts divided between ranks, trained on different tokens on each, beside the same layer in one piece.

    python examples/ep_moe.py               # on all GPUs if there are two or more, else on 4 CPU processes
    python examples/ep_moe.py --nproc 2 --device cpu

Prints the largest error of the output and of each gradient against float64, and both loss curves; exit code 1 if they
are too far off. The parts to copy are ``train``, which says what to do with the router's gradient, and ``by_hand``: the
same layer made of tdkernels' parts, where something else runs while tokens travel.
"""

import argparse
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F

import tdkernels
from tdkernels.launch import pick_device, rank_device, run_ranks

HIDDEN, INNER, EXPERTS, TOP_K, STEPS = 64, 32, 8, 2, 10
NAMES = "y", "dx", "dgate", "dw_gate_up", "dw_down"


def new_layer(device, dtype):
    """The layer of this rank: the router is the same on all ranks, of the experts it has its part."""
    torch.manual_seed(0)
    router = tdkernels.nn.Router(HIDDEN, EXPERTS, TOP_K, device=device, dtype=dtype)
    return tdkernels.nn.EPMoE(router, INNER, device=device, dtype=dtype)


def whole(x, gate, w_gate_up, w_down):
    """What the layer computes, in plain torch: every expert for every token, and the weights of most are 0."""
    weights, ids = torch.topk(torch.softmax(F.linear(x, gate).float(), dim=-1), TOP_K)
    weights = (weights / weights.sum(1, keepdim=True)).to(x.dtype)
    weights = torch.zeros(len(x), EXPERTS, dtype=x.dtype, device=x.device).scatter(1, ids, weights)
    g, u = torch.einsum("th,efh->etf", x, w_gate_up).chunk(2, dim=-1)
    return torch.einsum("etf,ehf,te->th", F.silu(g) * u, w_down, weights)


@torch.no_grad()
def by_hand(layer, x, shared):
    """The layer of its parts, and a shared expert that runs while the tokens are on their way."""
    ids, weights = layer.gate(x)
    sent = tdkernels.ep_dispatch_send(x, ids, weights, num_experts=EXPERTS)
    y = shared(x)
    recv, handle = sent.receive()  # recv.x [R, H] by expert, recv.splits [E / W]
    hidden = tdkernels.group_gemm(recv.x, layer.w_gate_up, recv.splits, activation="swiglu")
    return y + tdkernels.ep_combine(tdkernels.group_gemm(hidden, layer.w_down, recv.splits), handle)


def train(name, forward, parameters, x, target, tokens, shared=()):
    """Losses, the mean squared error over the ``tokens`` of all ranks; ``shared``: parameters that all ranks have."""
    optimizer = torch.optim.AdamW(parameters, lr=3e-3)
    losses = []
    for step in range(STEPS):
        progress(f"{name}: step {step + 1} of {STEPS}")
        loss = (forward(x) - target).float().square().sum() / (tokens * HIDDEN)
        optimizer.zero_grad()
        loss.backward()
        for parameter in shared:  # of the experts the gradient is of all ranks' tokens, of these it is of ours
            dist.all_reduce(parameter.grad)
        optimizer.step()
        losses.append(loss.detach())
    losses = torch.stack(losses)
    if len(x) < tokens:
        dist.all_reduce(losses)
    return losses.tolist()


def progress(text):
    """Print from rank 0, at once: CPU ranks take a minute or two for the whole program."""
    if dist.get_rank() == 0:
        print(text, file=sys.stderr, flush=True)


def gathered(part):
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, part.detach().cpu())
    return torch.cat(parts)


def on_rank():
    """Runs on every rank: {name: (largest error of ours, of plain torch)}, and both loss curves."""
    device = rank_device()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    layer = new_layer(device, dtype)
    torch.manual_seed(1 + dist.get_rank())
    # Ranks need not have as many tokens.
    x, target, dy = (torch.randn(24 + 8 * dist.get_rank(), HIDDEN, device=device, dtype=dtype) for _ in range(3))

    progress("comparing output and gradients with plain torch ...")
    x.requires_grad_()
    y = layer(x)
    y.backward(dy)
    dist.all_reduce(layer.gate.weight.grad)
    parts = {"y": y, "dx": x.grad, "dw_gate_up": layer.w_gate_up.grad, "dw_down": layer.w_down.grad}
    ours = {name: gathered(part) for name, part in parts.items()} | {"dgate": layer.gate.weight.grad.cpu()}
    weights = layer.gate.weight.detach().cpu().clone(), gathered(layer.w_gate_up), gathered(layer.w_down)
    exact, plain = (reference(gathered(x), weights, gathered(dy), of) for of in (torch.float64, dtype))
    # As the shared expert, here, x itself.
    ours["by hand"], plain["by hand"] = gathered(by_hand(layer, x, torch.nn.Identity())), plain["y"] + gathered(x)
    exact["by hand"] = exact["y"] + gathered(x)
    errors = {name: [(got[name] - exact[name]).abs().max().item() for got in (ours, plain)] for name in exact}

    whole_x, whole_target = gathered(x), gathered(target)
    ours = train("tdkernels", layer, layer.parameters(), x.detach(), target, len(whole_x), shared=[layer.gate.weight])
    weights = [weight.detach().clone().requires_grad_() for weight in weights]
    plain = train("plain torch", lambda x: whole(x, *weights), weights, whole_x, whole_target, len(whole_x))
    tdkernels.synchronize()
    return errors, ours, plain


def reference(x, weights, dy, dtype):
    x, *weights = (tensor.to(dtype).requires_grad_() for tensor in (x, *weights))
    y = whole(x, *weights)
    gradients = torch.autograd.grad(y, (x, *weights), dy.to(dtype))
    return dict(zip(NAMES, (y.detach(), *gradients)))


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--nproc", type=int, help="ranks, which divide 8; default: all GPUs, or 4 CPU processes")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    options = parser.parse_args()
    gpus = 0 if options.device == "cpu" else torch.cuda.device_count()
    world_size = options.nproc or (gpus if gpus >= 2 else 4)
    if world_size < 2 or EXPERTS % world_size:
        parser.error(f"{EXPERTS} experts are not divisible by {world_size} ranks, at least 2")
    device = pick_device(options.device, world_size)
    errors, *losses = run_ranks(world_size, on_rank, device=device)[0]
    for name, (ours, plain) in errors.items():
        print(f"{name:11} largest error {ours:.1e}, plain torch {plain:.1e}")
    for name, curve in zip(("tdkernels", "plain torch"), losses):
        print(f"loss, {name:11}", " ".join(f"{loss:.4f}" for loss in curve))
    apart = max(abs(ours - plain) / plain for ours, plain in zip(*losses))
    good = all(ours <= 2 * plain for ours, plain in errors.values()) and apart <= (1e-2 if device == "cuda" else 1e-4)
    print("All as it should be." if good else "NOT as it should be.")
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
