"""Multi-node results published by Triton-distributed, for comparison with the predictions.

Source: its README and plots at revision 1512a81 (July 2026). Values of bars were measured in the plots.
"""

_README = "https://github.com/ByteDance-Seed/Triton-distributed/blob/main/README.md"
_ASSETS = "https://github.com/ByteDance-Seed/Triton-distributed/blob/main/asset"
_DEEPEP = "https://github.com/deepseek-ai/DeepEP/blob/main/docs/legacy.md"

H800_LINK_GBPS = 160.0  # maximum NVLink rate of an H800 according to DeepEP

# {operator: {(M, N, K): speedup over PyTorch + NCCL}} on 2 nodes of 8 H800; heights of bars, +- 0.02.
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

# Tokens per rank, H, k, E. The README gives the first three; E is the default of tutorial 04-deepseek-infer-all2all.
ALL_TO_ALL = (128, 7168, 8, 256)
ALL_TO_ALL_US = {
    "published by Triton-distributed, 32 H800": 137,
    "DeepEP, published by Triton-distributed, 32 H800, without NVLink": 182,
    "DeepEP dispatch, published by DeepEP, 32 H800, without NVLink": 155,
}

# {keys of all ranks: us on 1, 2 and 4 nodes of 8 H800}; heights of bars, +- 2. The number of heads is not published;
# with DECODE_HEADS the rate of a rank at 1M keys is 2.7 TB/s, which is plausible.
DECODE_US = {
    2**16: (36, 45, 52), 2**17: (58, 54, 55), 2**18: (92, 74, 63), 2**19: (161, 109, 82), 2**20: (299, 178, 116),
}
DECODE_HEADS = (96, 128)

NOTE = f"""The published results were measured on other machines: nodes of 8 H800, which have half the NVLink rate
([{H800_LINK_GBPS:.0f} GB/s according to DeepEP]({_DEEPEP})) and
0.7 of the memory rate. The dense operators are therefore predicted twice, with the links of H200 and with the links of
H800; all other inputs are unchanged. Published speedups are over PyTorch + NCCL on a network unknown to the model.

Sources: [README]({_README}) (137 and 182 µs), and
heights of bars (+- 0.02, +- 2 µs) in the plots of
[AG-GEMM]({_ASSETS}/ag-gemm-internode-perf.png),
[GEMM-RS]({_ASSETS}/gemm-rs-internode-perf.png) and
[flash-decode]({_ASSETS}/flash-decode-scaling.png).
"""
