"""Operators of tdkernels in programs that torch.compile compiles from functional collectives.

Inductor calls a pass of this package on its graphs of aten operators. The pass replaces an all-gather and the products
of its rows by ag_gemm, and a product and its reduce-scatter or all-reduce by gemm_rs or gemm_ar. DTensor models, such
as those of torch's ``parallelize_module``, compile into functional collectives, too.

    file         contents
    graph_pass   the pass, and its installation
    gather       all-gather and products -> ag_gemm
    reduction    product and reduce-scatter or all-reduce -> gemm_rs, gemm_ar
    matching     conditions for collectives and products
    nodes        views, sizes and pieces in a graph; new nodes
    report       which collectives were fused, and why others were not

torch's own pass for this, ``torch._inductor.config._micro_pipeline_tp``, runs later and finds the collectives that are
left.

Example:
    from tdkernels.integrations import inductor

    passes = inductor.install()          # before the model is compiled, on every rank
    loss = torch.compile(model)(x)
    print(passes.report)
"""

from tdkernels.integrations.inductor.graph_pass import OverlapPass, install, installed, overlap_pass, uninstall
from tdkernels.integrations.inductor.report import Entry, Report

__all__ = ["Entry", "OverlapPass", "Report", "install", "installed", "overlap_pass", "uninstall"]
