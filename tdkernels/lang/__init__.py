"""Device functions (primitives) for communication between GPUs in plain Triton kernels.

Names and meanings follow the primitives of Triton-distributed (https://arxiv.org/abs/2504.19442). Its compiler hides a
context. In stock Triton the context is an explicit argument, ``ctx``: the kernel receives ``workspace.ctx`` from the
host and passes it on. Each primitive has three implementations, selected at compile time: inline PTX for NVIDIA,
Triton's atomics for AMD, and Triton's interpreter. ``docs/contributing/primitives.md`` is the tutorial.

Addresses are int64 scalars. Words are 64-bit words, read and written through pointers to int64. Docstrings do not list
``ctx`` among the arguments: it is always the context of the workspace.
"""

from tdkernels.lang.calls import call, check_alone, epoch, finish, is_void, is_void_for_all, keep_signal, signal_of
from tdkernels.lang.context import (
    data_at,
    flag_at,
    local_ranks,
    num_ranks,
    rank,
    ready_at,
    signal_at,
    status_at,
    symm_at,
    symm_base,
)
from tdkernels.lang.copy import put
from tdkernels.lang.dependent_launch import launch_dependents, wait_for_prerequisites
from tdkernels.lang.failure_record import end_wait, failed, failed_for_all
from tdkernels.lang.host_error import report_if
from tdkernels.lang.intra_node import notify_node, wait_plan_node
from tdkernels.lang.kernel import jit
from tdkernels.lang.math import dot, from_e4m3, from_float32, sigmoid, to_e4m3, to_float32
from tdkernels.lang.memory import (
    add_release,
    await_tma_stores,
    clock_ns,
    fence_before_tma_load,
    load_acquire,
    pointer_to,
    prefetch,
    store_release,
    store_release_each,
    store_release_if,
)
from tdkernels.lang.profile import mark
from tdkernels.lang.rdma import await_put, fence, put_nbi, put_signal, quiet, signal
from tdkernels.lang.reduce import compact_indices, gather_lane, max_of, running_sum, sum_of
from tdkernels.lang.signals import (
    announce_failure,
    check_peers,
    completed,
    consume_token,
    is_last_arriver,
    notify,
    notify_all,
    wait,
    wait_plan,
    wait_plan_all,
)
from tdkernels.lang.targets import target
from tdkernels.lang.work_queue import await_work_item, fetch_work_item, take_first_ticket

__all__ = [
    "add_release", "announce_failure", "await_put", "await_tma_stores", "await_work_item", "call", "check_alone",
    "check_peers", "clock_ns", "compact_indices", "completed", "consume_token", "data_at", "dot", "end_wait", "epoch",
    "failed", "failed_for_all", "fence", "fence_before_tma_load", "fetch_work_item", "finish", "flag_at", "from_e4m3",
    "from_float32", "gather_lane", "is_last_arriver", "is_void", "is_void_for_all", "jit", "keep_signal",
    "launch_dependents", "load_acquire", "local_ranks", "mark", "max_of", "notify", "notify_all", "notify_node",
    "num_ranks", "pointer_to", "prefetch", "put", "put_nbi", "put_signal", "quiet", "rank", "ready_at", "report_if",
    "running_sum", "sigmoid", "signal", "signal_at", "signal_of", "status_at", "store_release", "store_release_each",
    "store_release_if", "sum_of", "symm_at", "symm_base", "take_first_ticket", "target", "to_e4m3", "to_float32",
    "wait", "wait_for_prerequisites", "wait_plan", "wait_plan_all", "wait_plan_node",
]
