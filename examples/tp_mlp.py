"""A tensor-parallel SwiGLU MLP, trained beside the same block on one device.

    python examples/tp_mlp.py               # on all GPUs if there are two or more, else on 4 CPU processes
    python examples/tp_mlp.py --nproc 2 --device cpu

Prints what ran where, the errors of the output and of every gradient against float64, both loss curves and, on GPUs,
times against NCCL + cuBLAS. Exit code 1 if errors or losses are too far off. The part to copy is ParallelSwiGLU.
"""

import argparse
import dataclasses
import math
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import nn

import tdkernels
from tdkernels.launch import pick_device, rank_device, run_ranks


class ParallelSwiGLU(nn.Module):
    """x [tokens / W, H] -> [tokens / W, H], over the W ranks of a group; each holds 1 / W of the weights.

    Between two such blocks every rank has its own tokens only (sequence parallel). The weights' gradients are complete:
    each rank sees all tokens of its columns, and no all-reduce is needed.
    """

    def __init__(self, hidden, intermediate, *, group=None, up_config=None, down_config=None):
        super().__init__()
        self.group, self.up_config, self.down_config = group, up_config, down_config
        part = intermediate // dist.get_world_size(group)
        # One matrix, so that x is gathered once: the rows of the gate, then those of the up projection.
        self.w_gate_up = nn.Parameter(torch.empty(2 * part, hidden))
        self.w_down = nn.Parameter(torch.empty(hidden, part))

    @torch.no_grad()
    def load_full(self, w_gate_up, w_down):
        """Take this rank's part of the full weights, [2 I, H] and [H, I]."""
        place = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.w_gate_up.copy_(shard_gate_up(w_gate_up, *place))
        self.w_down.copy_(shard_down(w_down, *place))
        return self

    def forward(self, x):
        h = tdkernels.ag_gemm(x, self.w_gate_up, group=self.group, config=self.up_config)
        gate, up = h.chunk(2, dim=-1)
        return tdkernels.gemm_rs(F.silu(gate) * up, self.w_down, group=self.group, config=self.down_config)


def shard_rows(x, rank, world_size):
    return x.chunk(world_size)[rank]


def shard_gate_up(w, rank, world_size):
    return w.unflatten(0, (2, world_size, -1))[:, rank].flatten(0, 1)


def shard_down(w, rank, world_size):
    return w.chunk(world_size, dim=1)[rank]


class SwiGLU(nn.Module):
    """The same block on one device, in plain torch: what the parallel one is measured against."""

    def __init__(self, w_gate_up, w_down):
        super().__init__()
        self.w_gate_up, self.w_down = nn.Parameter(w_gate_up.clone()), nn.Parameter(w_down.clone())

    def forward(self, x):
        gate, up = F.linear(x, self.w_gate_up).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, self.w_down)


@dataclasses.dataclass(frozen=True)
class Problem:
    tokens: int
    hidden: int
    intermediate: int
    dtype: torch.dtype
    steps: int
    loss_tolerance: float  # by how much the two loss curves may differ, relative

    def tensors(self, device):
        """The same on all ranks: x, the block's weights, the targets, and a gradient to start the backward with."""
        generator = torch.Generator().manual_seed(0)

        def normal(rows, cols, scale=1.0):
            return torch.randn(rows, cols, generator=generator).mul_(scale).to(device, self.dtype)

        def weights():
            w_gate_up = normal(2 * self.intermediate, self.hidden, self.hidden**-0.5)
            return w_gate_up, normal(self.hidden, self.intermediate, self.intermediate**-0.5)

        x, teacher = normal(self.tokens, self.hidden), SwiGLU(*weights())
        return x, weights(), teacher(x).detach(), normal(self.tokens, self.hidden)


def on_rank(problem):
    """Runs on every rank: all that it has to report, without GPU tensors, since it travels to the parent."""
    device = rank_device()
    if device.type == "cpu":
        tdkernels.autotune.set_mode("off")  # plain torch is always faster there, and this is to show the kernels
    x, weights, target, dy = problem.tensors(device)
    x_part, target_part, dy_part = (shard_rows(t, dist.get_rank(), dist.get_world_size()) for t in (x, target, dy))

    def parallel(up_config=None, down_config=None):
        block = ParallelSwiGLU(problem.hidden, problem.intermediate, up_config=up_config, down_config=down_config)
        return block.to(device, problem.dtype).load_full(*weights)

    progress("comparing output and gradients with plain torch ...")
    exact = forward_and_backward(SwiGLU(*(w.double() for w in weights)), x.double(), dy.double())
    plain = forward_and_backward(SwiGLU(*weights), x, dy)
    ours = forward_and_backward(parallel(), x_part, dy_part)
    report = {"runs": what_runs(parallel(), x_part), "errors": errors(ours, plain, exact)}
    runs = {"tdkernels": (parallel(), x_part, target_part), "plain torch": (SwiGLU(*weights), x, target)}
    report["losses"] = {name: train(name, *run, problem) for name, run in runs.items()}
    if device.type == "cuda":
        # Method "torch" is all_gather_into_tensor, then a matmul; a matmul, then reduce_scatter_tensor.
        in_sequence = parallel(tdkernels.AgGemmConfig(method="torch"), tdkernels.GemmRsConfig(method="torch"))
        report["times"] = times(parallel(), in_sequence, x_part, dy_part)
    tdkernels.synchronize()
    return report


def what_runs(block, x):
    """Method and config of ag_gemm and gemm_rs, and where they come from."""
    h = x.new_empty(x.shape[0] * dist.get_world_size(), block.w_down.shape[1])
    operands = {tdkernels.ag_gemm: (x, block.w_gate_up), tdkernels.gemm_rs: (h, block.w_down)}
    return [tdkernels.explain(operator, *tensors).line() for operator, tensors in operands.items()]


def forward_and_backward(block, x, dy):
    x = x.detach().requires_grad_()
    block.zero_grad()
    output = block(x)
    output.backward(dy)
    return {"output": output.detach(), "dx": x.grad, "dw_gate_up": block.w_gate_up.grad, "dw_down": block.w_down.grad}


def errors(ours, plain, exact):
    """By name: our largest error (on this rank) and plain torch's, both relative to the largest exact value."""
    shard = {"dw_gate_up": shard_gate_up, "dw_down": shard_down}
    found = {}
    for name, wanted in exact.items():
        our_part = shard.get(name, shard_rows)(wanted, dist.get_rank(), dist.get_world_size())
        differences = ours[name] - our_part, plain[name] - wanted
        found[name] = [(difference.abs().max() / wanted.abs().max()).item() for difference in differences]
    return found


def progress(text):
    """Print from rank 0, at once: CPU ranks take a minute or two for the whole program."""
    if dist.get_rank() == 0:
        print(text, file=sys.stderr, flush=True)


def train(name, block, x, target, problem):
    """Losses of AdamW on the mean squared error over all tokens; x and target are all of them, or this rank's."""
    optimizer = torch.optim.AdamW(block.parameters(), lr=0.5 / problem.hidden)
    losses = []
    for step in range(problem.steps):
        if step % 5 == 0:
            progress(f"{name}: step {step} of {problem.steps}")
        # Divided by the number of all elements, not of ours: the gradients are sums over the tokens of all ranks.
        loss = (block(x) - target).float().square().sum() / (problem.tokens * problem.hidden)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    losses = torch.stack(losses)
    if len(x) < problem.tokens:
        dist.all_reduce(losses)
    return losses.tolist()


def times(ours, in_sequence, x, dy, samples=21, calls=5):
    """Milliseconds of each block's forward and of its forward + backward, a list each, sampled in turns."""
    forward = torch.no_grad()(lambda block: block(x))
    runs = [(forward, ours), (forward, in_sequence)]
    runs += [(lambda block: forward_and_backward(block, x, dy), block) for block in (ours, in_sequence)]
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    found = [[] for _ in runs]
    for _ in range(samples + 3):
        for (run, block), milliseconds in zip(runs, found):
            dist.barrier()
            torch.cuda.synchronize()
            start.record()
            for _ in range(calls):
                run(block)
            end.record()
            end.synchronize()
            milliseconds.append(start.elapsed_time(end) / calls)
    return [milliseconds[3:] for milliseconds in found]  # the first three warmed up


def show(problem, device, reports):
    """Runs in the parent: print what the ranks report; True if it is as it should be."""
    console, first, good = Console(highlight=False, soft_wrap=True), reports[0], True
    where = torch.cuda.get_device_name(0) if device == "cuda" else "process on the CPU (Triton's interpreter)"
    console.print(f"[bold]SwiGLU block[/] on {len(reports)} × {where}: {problem}")
    console.print(*first["runs"], sep="\n")

    table = Table("largest error, relative", "tdkernels", "plain torch, one device", "within 2 ×")
    for name in first["errors"]:
        ours, plain = torch.tensor([report["errors"][name] for report in reports]).amax(0).tolist()  # keeps a NaN
        good &= ours <= 2 * plain
        table.add_row(name, f"{ours:.2e}", f"{plain:.2e}", "yes" if ours <= 2 * plain else "[red]NO[/]")
    console.print(table)

    table = Table("loss", "curve", "first", "middle", "last")
    for label, losses in first["losses"].items():
        table.add_row(label, sparkline(losses), *(f"{losses[i]:.5f}" for i in (0, len(losses) // 2, -1)))
    ours, plain = torch.tensor(list(first["losses"].values()))
    apart = ((ours - plain) / plain).abs().max().item()
    good &= apart <= problem.loss_tolerance
    console.print(table)
    console.print(f"The losses differ by {apart:.1e} at most (relative); {problem.loss_tolerance:g} is allowed.")

    if "times" in first:
        table = Table("milliseconds, slowest rank", "tdkernels", "NCCL + cuBLAS", "speed-up")
        times_of = torch.tensor([report["times"] for report in reports]).amax(0).median(1).values.tolist()
        for what, ours, plain in (("forward", *times_of[:2]), ("forward + backward", *times_of[2:])):
            table.add_row(what, f"{ours:.3f}", f"{plain:.3f}", f"{plain / ours:.2f}")
        console.print(table)
    console.print("[green]All as it should be.[/]" if good else "[red]NOT as it should be.[/]")
    return good


def sparkline(values, width=20):
    values = values[:: math.ceil(len(values) / width)]
    top = max((v for v in values if math.isfinite(v)), default=1.0)
    return "".join("▁▂▃▄▅▆▇█"[round(7 * v / top)] if math.isfinite(v) else "?" for v in values)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--nproc", type=int, help="ranks, at least 2; default: all GPUs, or 4 CPU processes")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--steps", type=int, default=20, help="of training")
    options = parser.parse_args()
    gpus = 0 if options.device == "cpu" else torch.cuda.device_count()
    world_size = options.nproc or (gpus if gpus >= 2 else 4)
    if world_size < 2 or options.steps < 1:
        parser.error("it takes at least 2 ranks and 1 step")
    device = pick_device(options.device, world_size)
    problem = Problem(64 * world_size, 64, 32 * world_size, torch.float32, options.steps, loss_tolerance=1e-4)
    if device == "cuda":  # the MLP of Llama 3 8B, rounded up to what can be dealt out to the ranks
        tokens, intermediate = (math.ceil(n / world_size) * world_size for n in (8192, 14336))
        problem = Problem(tokens, 4096, intermediate, torch.bfloat16, options.steps, loss_tolerance=1e-2)
    return 0 if show(problem, device, run_ranks(world_size, on_rank, problem, device=device)) else 1


if __name__ == "__main__":
    raise SystemExit(main())
