"""All rows of a folder of results, by family."""

from dataclasses import dataclass

from bench.core import points
from bench.reliability import faults_report


@dataclass(frozen=True)
class Rows:
    """The measurements that a report is made of; each field may be empty.

    dense:        Points of AG-GEMM, GEMM-RS and GEMM-AR
    others:       JSONL rows as dictionaries: collectives, norms after an all-reduce, GEMMs before these norms, dispatch
                  and combine, layers of experts and grouped GEMM, flash-decode, flash-decode with latent caches,
                  sequence parallelism, network primitives, host time per call, configs that the tuner selected, test
                  runs, solo mode in CUDA graphs and eager, the kernels of tp_moe in solo mode, torch's fused operators,
                  whole models in frameworks, scaled fp8 operands, grouped GEMMs with scaled fp8 operands, quantization
                  and linear layers in fp8, calls inside and outside the batch-invariant mode
    dense_graphs: the benchmark rows of ``dense`` in CUDA graphs, as dictionaries
    faults:       summaries of fault campaigns, as dictionaries
    """

    dense: tuple = ()
    collectives: tuple = ()
    norms: tuple = ()
    gemm_ar_norms: tuple = ()
    dispatch: tuple = ()
    layers: tuple = ()
    decode: tuple = ()
    latent: tuple = ()
    sequences: tuple = ()
    network: tuple = ()
    host: tuple = ()
    tuner: tuple = ()
    tests: tuple = ()
    solo: tuple = ()
    solo_eager: tuple = ()
    solo_moe: tuple = ()
    torch_operators: tuple = ()
    models: tuple = ()
    scaled: tuple = ()
    scaled_experts: tuple = ()
    fp8_layers: tuple = ()
    quantize: tuple = ()
    invariance: tuple = ()
    dense_graphs: tuple = ()
    faults: tuple = ()

    def __bool__(self):
        return any(vars(self).values())


def read(folder):
    """Read the rows of a folder; ``points.BadRow`` if a line cannot be read."""
    return Rows(
        dense=points.read(folder), collectives=points.read_collectives(folder), norms=points.read_norms(folder),
        gemm_ar_norms=points.read_gemm_ar_norms(folder), dispatch=points.read_ep(folder),
        layers=points.read_layers(folder), decode=points.read_decode(folder), latent=points.read_latent(folder),
        sequences=points.read_sequences(folder), network=points.read_network(folder), host=points.read_host(folder),
        tuner=points.read_chosen(folder), tests=points.read_tests(folder), solo=points.read_solo(folder),
        solo_eager=points.read_solo(folder, graph=False), solo_moe=points.read_solo_moe(folder),
        torch_operators=points.read_torch_operators(folder), models=points.read_models(folder),
        scaled=points.read_scaled(folder), scaled_experts=points.read_scaled_experts(folder),
        fp8_layers=points.read_fp8_layers(folder), quantize=points.read_quantize(folder),
        invariance=points.read_invariance(folder), dense_graphs=points.read_dense_graphs(folder),
        faults=faults_report.read(folder),
    )
