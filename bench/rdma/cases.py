"""Benchmark the RDMA primitives between two nodes of one rank against direct stores: ``python -m bench.rdma.cases``.

A hop is half of a round trip of a 64-bit word with its signal; one kernel makes many round trips. A rate is the
bandwidth per direction with both directions busy: each program sends chunks, each with a signal, and waits for as many
chunks of the peer. Prints one line per row and appends rows to a file in ``--out``. Between simulated nodes NVSHMEM
stores over NVLink, so the times show the cost of its calls, not the speed of a network.
"""

import argparse
import contextlib
import json
import os
import sys
from datetime import datetime, timezone
from pathlib import Path

import torch
import triton.language as tl

import tdkernels
from bench.core import harness
from bench.run import revision
from tdkernels import lang as td
from tdkernels.lang.context import CTX_HALF_DATA
from tdkernels.launch import RankPool, pick_device, rank_device
from tdkernels.symm import get_workspace, resolve_group, topology
from tdkernels.symm.group import group_state

HOPS = 500
MESSAGE_BYTES = 64 << 20
PROGRAMS = [1, 4, 8, 16, 32]
CHUNK_BYTES = [64 << 10, 512 << 10, 4 << 20]


@td.jit
def _send(ctx, half, place, num_bytes, index, signal, peer, BY_NETWORK: tl.constexpr):
    """Copy bytes at offset ``place`` of the buffer's second part to the peer's first part, and set signal ``index``."""
    base = td.data_at(ctx, half, td.rank(ctx))
    size = tl.load(ctx + CTX_HALF_DATA) // 2
    if BY_NETWORK:
        td.put_signal(
            ctx, base + place, base + size + place, num_bytes, td.signal_at(ctx, half, index), signal, peer
        )
    else:
        td.put(td.data_at(ctx, half, peer) + place, base + size + place, num_bytes)
        td.notify(ctx, td.signal_at(ctx, half, index), peer, signal)


@td.jit
def _await(ctx, half, index, signal, peer, BY_NETWORK: tl.constexpr):
    if BY_NETWORK:
        td.await_put(ctx, td.signal_at(ctx, half, index), signal, peer)
    else:
        td.wait_plan(ctx, td.signal_at(ctx, half, index), signal, peer)


def _hops(ctx, hops, BY_NETWORK: tl.constexpr):
    """Ping-pong: rank 0 sends a 64-bit word, rank 1 sends it back."""
    me = td.rank(ctx)
    epoch = td.epoch(ctx) + 1
    half = (epoch % 2).to(tl.int32)
    for hop in range(hops):
        signal = (epoch * 1024 + hop) << 16
        if me == hop % 2:
            _send(ctx, half, 0, 8, 0, signal, 1 - me, BY_NETWORK)
        else:
            _await(ctx, half, 0, signal, 1 - me, BY_NETWORK)
    td.finish(ctx)


def _chunks(ctx, chunk_bytes, chunks, BY_NETWORK: tl.constexpr):
    """Send all chunks, divided between the programs, and wait for the chunks of the peer."""
    peer = 1 - td.rank(ctx)
    epoch = td.epoch(ctx) + 1
    half = (epoch % 2).to(tl.int32)
    signal = (epoch * 1024) << 16
    for chunk in range(tl.program_id(0), chunks, tl.num_programs(0)):
        _send(ctx, half, tl.cast(chunk, tl.int64) * chunk_bytes, chunk_bytes, chunk, signal, peer, BY_NETWORK)
    for chunk in range(tl.program_id(0), chunks, tl.num_programs(0)):
        _await(ctx, half, chunk, signal, peer, BY_NETWORK)
    td.finish(ctx)


_KERNELS = {network: (td.jit(_hops, network=network), td.jit(_chunks, network=network)) for network in (False, True)}


def _timed_us(calls, launch, *args):
    """Return microseconds per call of ``launch``, the maximum over the ranks; None on the CPU."""
    launch(*args)
    tdkernels.synchronize()
    if rank_device().type == "cpu":
        return None
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(calls):
        launch(*args)
    end.record()
    tdkernels.synchronize()
    return harness.slowest([begin.elapsed_time(end) * 1e3 / calls])[0]


def measure(message_bytes, hops, numbers_of_programs):
    """Return the rows of one transport: the network if the two ranks are on two nodes, else direct stores."""
    group = resolve_group(None)
    by_network = group_state(group).topology.num_nodes > 1
    one_hop, many_chunks = _KERNELS[by_network]
    workspace = get_workspace(group, rank_device(), "bench", across_nodes=True)
    workspace.prepare("bench", {}, 2 * message_bytes, max(message_bytes // min(CHUNK_BYTES), 1))

    def launch(kernel, grid, *args):
        workspace.before_launch()
        kernel[(grid,)](workspace.ctx, *args, BY_NETWORK=by_network, num_warps=16)
        workspace.after_launch()

    common = {"what": "network", "by": "network" if by_network else "direct"}
    us = _timed_us(5, launch, one_hop, 1, hops)
    rows = [{**common, "measure": "hop", "us": us and us / hops}]
    for chunk_bytes in CHUNK_BYTES:
        chunks = message_bytes // chunk_bytes
        for programs in numbers_of_programs if chunks else ():
            us = _timed_us(10, launch, many_chunks, min(programs, chunks), chunk_bytes, chunks)
            rows.append({
                **common, "measure": "rate", "programs": programs, "chunk_bytes": chunk_bytes,
                "message_bytes": message_bytes, "us": us, "gbps": us and message_bytes / us / 1e3,
            })
    return rows


@contextlib.contextmanager
def _simulated_nodes(ranks):
    """Start ranks within this context on simulated nodes of ``ranks`` ranks each."""
    before = os.environ.get(topology.VARIABLE)
    os.environ[topology.VARIABLE] = str(ranks)
    try:
        yield
    finally:
        os.environ.pop(topology.VARIABLE)
        if before is not None:
            os.environ[topology.VARIABLE] = before


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m bench.rdma.cases", description=__doc__.split("\n")[0])
    parser.add_argument("--out", help="folder for the rows, written as JSON lines")
    options = parser.parse_args(argv)
    device = pick_device("auto", 2)
    size = (MESSAGE_BYTES, HOPS, PROGRAMS) if device == "cuda" else (64 << 10, 4, [1])  # CPU: a rehearsal
    when = {"date": datetime.now(timezone.utc).isoformat(timespec="seconds"), "git": revision()}
    rows, machine = [], None
    for nodes in (1, 2):
        with _simulated_nodes(2 // nodes), RankPool(2, device) as pool:
            machine = machine or pool.run(harness.machine)[0]
            rows += [{**row, **machine, **when} for row in pool.run(measure, *size)[0]]
    for row in rows:
        shown = ("by", "measure", "programs", "chunk_bytes", "us", "gbps")
        print(*(f"{key} {row[key]}" for key in shown if key in row))
    if options.out:
        Path(options.out).mkdir(parents=True, exist_ok=True)
        with open(Path(options.out, "network.jsonl"), "a") as f:
            f.writelines(json.dumps(row) + "\n" for row in rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
