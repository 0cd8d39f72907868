"""The words that a kernel may use to speak with its peers, in plain Triton.

Names and meanings follow Triton-distributed's primitives (https://arxiv.org/abs/2504.19442); where its compiler hides a
context, stock Triton takes it as an explicit argument, ``ctx``. Each word has three realisations, chosen at compile
time: inline PTX for NVIDIA, Triton's atomics for AMD, and the interpreter. ``docs/primitives.md`` is the tutorial.
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
from tdkernels.lang.failure_record import end_wait, failed, failed_for_all
from tdkernels.lang.host_error import note_if
from tdkernels.lang.intra_node import notify_node, wait_plan_node
from tdkernels.lang.kernel import jit
from tdkernels.lang.math import dot, from_float32, to_e4m3, to_float32
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
from tdkernels.lang.reduce import max_of, pick, running_sum, sum_of, turns_of
from tdkernels.lang.signals import (
    announce_failure,
    arrive,
    check_peers,
    consume_token,
    in_time,
    notify,
    notify_all,
    wait,
    wait_plan,
    wait_plan_all,
)
from tdkernels.lang.targets import target
from tdkernels.lang.work_queue import take_first_ticket, take_ticket, ticket_of

__all__ = [
    "add_release", "announce_failure", "arrive", "await_put", "await_tma_stores", "call", "check_alone", "check_peers",
    "clock_ns", "consume_token", "data_at", "dot", "end_wait", "epoch", "failed", "failed_for_all", "fence",
    "fence_before_tma_load", "finish", "flag_at", "from_float32", "in_time", "is_void", "is_void_for_all", "jit",
    "keep_signal", "load_acquire", "local_ranks", "mark", "max_of", "note_if", "notify", "notify_all", "notify_node",
    "num_ranks", "pick", "pointer_to", "prefetch", "put", "put_nbi", "put_signal", "quiet", "rank", "ready_at",
    "running_sum", "signal", "signal_at", "signal_of", "status_at", "store_release", "store_release_each",
    "store_release_if", "sum_of", "symm_at", "symm_base", "take_first_ticket", "take_ticket", "target", "ticket_of",
    "to_e4m3", "to_float32", "turns_of", "wait", "wait_plan", "wait_plan_all", "wait_plan_node",
]
