"""Training a Llama of transformers with tensor and sequence parallelism, compared with one rank.

    pip install "transformers>=5.23"
    python examples/train_llama.py               # on all GPUs if there are two or more, else on 2 CPU processes
    python examples/train_llama.py --nproc 2 --device cpu --steps 8 --plot losses.png
    python examples/train_llama.py --layers 8 --hidden 4096 --intermediate 14336 --vocab 32000    # on GPUs

The model has random weights and learns to continue sequences in which each token determines the next one. It is
trained twice from the same weights: complete, with plain torch, and divided between the ranks by
`tdkernels.integrations.transformers.parallelize`. The divided model runs `ag_gemm`, `gemm_rs` and `column_linear`, and
the hidden states between its layers are divided along the sequence. The rest of the training loop is the same.

Prints both losses of each step. Exit code 1 if they differ by more than 1e-4 of the first loss (5e-2 with bf16), if the
loss does not fall, or if the ranks have different losses.
"""

import argparse
import copy
import dataclasses
import importlib.util
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import tdkernels
from tdkernels.integrations.transformers import parallelize
from tdkernels.launch import pick_device, rank_device, run_ranks


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The model and its training. Each field is an option of the program."""

    layers: int = 2
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    intermediate: int = 128
    vocab: int = 32
    batch: int = 8
    sequence: int = 16
    steps: int = 12
    lr: float = 1e-2
    dtype: str = "float32"


ON_GPUS = Sizes(4, 2048, 32, 8, 8192, 4096, 2, 4096, 20, 3e-4, "bfloat16")
# Of the loss of the first step. AdamW amplifies rounding errors, and with bf16 it also rounds the parameters.
TOLERANCES = {"float32": 1e-4, "bfloat16": 5e-2}


def llama(sizes, device):
    """Return a LlamaForCausalLM with random weights, the same on every rank."""
    from transformers import AutoModelForCausalLM, LlamaConfig  # a slow import

    config = LlamaConfig(
        num_hidden_layers=sizes.layers, hidden_size=sizes.hidden, intermediate_size=sizes.intermediate,
        num_attention_heads=sizes.heads, num_key_value_heads=sizes.kv_heads, vocab_size=sizes.vocab,
        max_position_embeddings=sizes.sequence, use_cache=False,
    )
    torch.manual_seed(0)
    with device:
        return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, sizes.dtype)).train()


def tokens_of(step, sizes, device):
    """Return the token ids [batch, sequence] of a step. A permutation gives the next token of each token."""
    following = torch.randperm(sizes.vocab, generator=torch.Generator().manual_seed(0))
    columns = [torch.randint(sizes.vocab, (sizes.batch,), generator=torch.Generator().manual_seed(step))]
    for _ in range(sizes.sequence - 1):
        columns.append(following[columns[-1]])
    return torch.stack(columns, dim=1).to(device)


def train(name, model, sizes):
    """Return the loss of each step."""
    device = rank_device()
    optimizer = torch.optim.AdamW(model.parameters(), lr=sizes.lr)
    losses = []
    for step in range(sizes.steps):
        ids = tokens_of(step, sizes, device)
        loss = model(input_ids=ids, labels=ids).loss  # transformers shifts the labels
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        progress(f"{name}: step {step + 1} of {sizes.steps}, loss {losses[-1]:.4f}")
    return losses


def on_rank(sizes):
    """Run on every rank: return {name: losses} of both trainings, and the report of ``parallelize``."""
    device = rank_device()
    if device.type == "cpu":
        tdkernels.autotune.set_mode("off")  # plain torch is always faster there, and this is to show the kernels
    progress("creating the model ...")
    model = llama(sizes, device)
    losses = {"one rank": train("one rank", copy.deepcopy(model), sizes)}

    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("tp",))
    report = parallelize(model, mesh["tp"])

    losses["parallel"] = train("parallel", model, sizes)
    tdkernels.synchronize()
    return losses, str(report)


def progress(text):
    """Print from rank 0 at once, since a run on the CPU takes a minute."""
    if dist.get_rank() == 0:
        print(text, file=sys.stderr, flush=True)


def show(sizes, results):
    """Print the results of the ranks. Return whether they are correct."""
    losses, report = results[0]
    print(report)
    single, parallel = (torch.tensor(losses[name], dtype=torch.float64) for name in ("one rank", "parallel"))
    print(f"step {'one rank':>10} {f'{len(results)} ranks':>10} {'difference':>11}")
    for step, pair in enumerate(zip(single.tolist(), parallel.tolist()), start=1):
        print(f"{step:4} {pair[0]:10.6f} {pair[1]:10.6f} {abs(pair[0] - pair[1]):11.1e}")
    difference = ((parallel - single) / single[0]).abs().max().item()  # NaN if there is one
    tolerance = TOLERANCES[sizes.dtype]
    print(f"largest difference, relative to the first loss: {difference:.1e}; {tolerance:g} is allowed")
    same = all(result[0]["parallel"] == losses["parallel"] for result in results)
    falls = sizes.steps == 1 or bool(parallel[-1] < parallel[0])
    good = difference <= tolerance and same and falls
    print("All as it should be." if good else "NOT as it should be.")
    return good


def plot(path, losses):
    """Write both losses of each step to an image."""
    from matplotlib.figure import Figure  # optional

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for (name, values), style in zip(losses.items(), ("-", "o")):
        axes.plot(range(1, len(values) + 1), values, style, label=name)
    axes.set(xlabel="step", ylabel="loss", ylim=(0, None))
    axes.legend()
    figure.savefig(path)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--nproc", "--ranks", type=int, help="ranks, at least 2; default: all GPUs, or 2 CPU processes")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--plot", metavar="FILE", help="write the losses to an image, such as losses.png")
    for field in dataclasses.fields(Sizes):
        gpu, cpu = getattr(ON_GPUS, field.name), getattr(Sizes, field.name)
        choices = TOLERANCES if field.name == "dtype" else None
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=field.type, choices=choices,
                            help=f"default: {gpu} on GPUs, {cpu} on the CPU")
    options = vars(parser.parse_args())
    if importlib.util.find_spec("transformers") is None:
        parser.error('transformers is missing: pip install "transformers>=5.23"')
    if options["plot"] and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install matplotlib")
    gpus = 0 if options["device"] == "cpu" else torch.cuda.device_count()
    world_size = options["nproc"] or (gpus if gpus >= 2 else 2)
    if world_size < 2:
        parser.error("it takes at least 2 ranks")
    device = pick_device(options["device"], world_size)
    given = {field.name: options[field.name] for field in dataclasses.fields(Sizes)}
    sizes = dataclasses.replace(
        ON_GPUS if device == "cuda" else Sizes(), **{name: value for name, value in given.items() if value is not None}
    )
    print(f"Llama on {world_size} ranks, device {device}: {sizes}", flush=True)
    results = run_ranks(world_size, on_rank, sizes, device=device)
    if options["plot"]:
        plot(options["plot"], results[0][0])
        print(f"losses: {options['plot']}")
    return 0 if show(sizes, results) else 1


if __name__ == "__main__":
    raise SystemExit(main())
