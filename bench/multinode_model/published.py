"""What Triton-distributed publishes of several nodes, and on what: figures to stand beside predictions.

Read on the README and its pictures at revision 1512a81 (July 2026). Bars were measured in the pictures.
"""

_README = "https://github.com/ByteDance-Seed/Triton-distributed/blob/main/README.md"
_ASSETS = "https://github.com/ByteDance-Seed/Triton-distributed/blob/main/asset"
_DEEPEP = "https://github.com/deepseek-ai/DeepEP/blob/main/docs/legacy.md"

H800_LINK_GBPS = 160.0  # what DeepEP gives as the most of an H800's NVLink

# {operator: {(M, N, K): x PyTorch + NCCL}} on 2 nodes of 8 H800; heights of bars, +- 0.02.
TWO_NODES = {
    "ag_gemm": {
        (8192, 49152, 12288): 1.36, (16384, 49152, 12288): 1.51, (32768, 11008, 4096): 1.07,
        (32768, 14336, 4096): 1.09, (8192, 28672, 8192): 1.11, (16384, 28672, 8192): 1.19, (32768, 28672, 8192): 1.34,
        (8192, 53248, 16384): 1.49, (16384, 53248, 16384): 1.61, (32768, 53248, 16384): 1.69,
    },
    "gemm_rs": {
        (4096, 12288, 49152): 1.13, (8192, 12288, 49152): 1.34, (16384, 12288, 49152): 1.51,
        (32768, 12288, 49152): 1.58, (65536, 12288, 49152): 1.57,
    },
}

# Tokens a rank, H, k, E. The README says the first three; E is the default of their tutorial 04-deepseek-infer-all2all.
ALL_TO_ALL = (128, 7168, 8, 256)
ALL_TO_ALL_US = {
    "published: Triton-distributed, 32 H800": 137,
    "published there: DeepEP, 32 H800, without NVLink": 182,
    "published by DeepEP: dispatch, 32 H800, without NVLink": 155,
}

# {keys of all ranks: us on 1, 2 and 4 nodes of 8 H800}; heights of bars, +- 2. Heads are not said there; a rank's rate
# at 1M keys, 2.7 TB/s, fits these.
DECODE_US = {
    2**16: (36, 45, 52), 2**17: (58, 54, 55), 2**18: (92, 74, 63), 2**19: (161, 109, 82), 2**20: (299, 178, 116),
}
DECODE_HEADS = (96, 128)

NOTE = f"""What is published was measured, but on other machines: nodes of 8 H800, whose NVLink has half the rate
([DeepEP gives]({_DEEPEP}) {H800_LINK_GBPS:.0f} GB/s) and
whose memory has 0.7 of it. So the products are asked for twice, with the links of H200 and with such links, both with
everything else as it is here. Published factors are over PyTorch and NCCL, whose network the model does not know.

Sources: [README]({_README}) (137 and 182 µs), and
bars, read off by the pixel (+- 0.02, +- 2 µs), of
[AG-GEMM]({_ASSETS}/ag-gemm-internode-perf.png),
[GEMM-RS]({_ASSETS}/gemm-rs-internode-perf.png) and
[flash-decode]({_ASSETS}/flash-decode-scaling.png).
"""
