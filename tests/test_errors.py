"""Invalid arguments are rejected before any launch, with the type, the argument and the shape in the error."""

import dataclasses
import pickle
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import tdkernels
from tdkernels import AgGemmConfig, GemmArConfig, GemmRsConfig, Tiles
from tests.support.dense_oracle import Case
from tests.support.ranks import a_group, device, on_ranks
from tests.test_protocol import failure_of, timeout

ROWS, N, K = 4, 6, 8


def tensor(*shape, dtype=torch.float32, on=None):
    return torch.zeros(shape, dtype=dtype, device=on or device())


def x(*shape, **options):
    return {"x": tensor(*shape, **options)}


def weight(*shape, **options):
    return {"weight": tensor(*shape, **options)}


def bias(*shape, **options):
    return {"bias": tensor(*shape, **options)}


# Replaced arguments of a call with x [4, 8], weight [6, 8] and bias [6] in fp32 (made in the rank, on its device);
# the type of the error; and parts of its message.
OPERANDS = {
    "other K in x": (lambda: x(4, 7), ValueError, "x [4, 7]", "weight [6, 8]", "K"),
    "other K in weight": (lambda: weight(6, 9), ValueError, "x [4, 8]", "weight [6, 9]", "K"),
    "x without rows": (lambda: x(8), ValueError, "x must have at least 2 dimensions", "[8]"),
    "x is a scalar": (lambda: x(), ValueError, "x must have at least 2 dimensions", "[]"),
    "weight of 3 dimensions": (lambda: weight(1, 6, 8), ValueError, "weight must have 2 dimensions", "[1, 6, 8]"),
    "weight of 1 dimension": (lambda: weight(8), ValueError, "weight must have 2 dimensions", "[8]"),
    "no N": (lambda: {**weight(0, 8), **bias(0)}, ValueError, "weight [0, 8]", "empty"),
    "no K": (lambda: {**x(4, 0), **weight(6, 0)}, ValueError, "weight [6, 0]", "empty"),
    "bias too long": (lambda: bias(7), ValueError, "bias [7]", "weight [6, 8]"),
    "bias of one element": (lambda: bias(1), ValueError, "bias [1]", "weight [6, 8]"),
    "bias of 2 dimensions": (lambda: bias(1, 6), ValueError, "bias [1, 6]", "weight [6, 8]"),
    "x in fp16": (lambda: x(4, 8, dtype=torch.float16), TypeError, "x is torch.float16", "weight is torch.float32"),
    "weight in bf16": (lambda: weight(6, 8, dtype=torch.bfloat16), TypeError, "x is torch.float32", "weight is torch"),
    "bias in bf16": (lambda: bias(6, dtype=torch.bfloat16), TypeError, "x is torch.float32", "bias is torch.bfloat16"),
    "x of integers": (lambda: x(4, 8, dtype=torch.int32), TypeError, "x is torch.int32", "supported"),
    "weight of integers": (lambda: weight(6, 8, dtype=torch.int8), TypeError, "weight is torch.int8"),
    "x in fp64": (lambda: x(4, 8, dtype=torch.float64), TypeError, "x is torch.float64", "supported"),
    "x on meta": (lambda: x(4, 8, on="meta"), ValueError, "x is on meta"),
    "weight on meta": (lambda: weight(6, 8, on="meta"), ValueError, "x is on", "weight is on meta"),
    "bias on meta": (lambda: bias(6, on="meta"), ValueError, "x is on", "bias is on meta"),
    "all on meta": (
        lambda: {**x(4, 8, on="meta"), **weight(6, 8, on="meta"), **bias(6, on="meta")},
        ValueError, "x is on meta", "supported",
    ),
    "x is a list": (lambda: {"x": [[1.0] * 8] * 4}, TypeError, "x must be a torch.Tensor", "list"),
    "weight is None": (lambda: {"weight": None}, TypeError, "weight must be a torch.Tensor", "NoneType"),
    "bias is a number": (lambda: {"bias": 1.0}, TypeError, "bias must be a torch.Tensor", "float"),
}

TILES = Tiles(64, 64, 64, num_warps=4, num_stages=1)


def ag(**changes):
    return {"config": dataclasses.replace(AgGemmConfig(tiles=TILES, num_comm_sms=1), **changes)}


def rs(**changes):
    return {"config": dataclasses.replace(GemmRsConfig(tiles=TILES), **changes)}


def ar(**changes):
    return {"config": dataclasses.replace(GemmArConfig(tiles=TILES), **changes)}


def tiles(**changes):
    return dataclasses.replace(TILES, **changes)


AG_GEMM = {
    "config of gemm_rs": (lambda: rs(), TypeError, "config must be an AgGemmConfig or None, not GemmRsConfig"),
    "config is a dict": (lambda: {"config": {"method": "fused"}}, TypeError, "AgGemmConfig", "dict"),
    "unknown method": (lambda: ag(method="nccl"), ValueError, "method", "'nccl'"),
    "unknown transport": (lambda: ag(transport="pull"), ValueError, "transport", "'pull'"),
    "no communication SMs": (lambda: ag(num_comm_sms=0), ValueError, "num_comm_sms", "not 0"),
    "empty chunks": (lambda: ag(chunk_tiles=0), ValueError, "chunk_tiles", "not 0"),
    "block_m not a power of two": (lambda: ag(tiles=tiles(block_m=48)), ValueError, "block_m", "power of two", "48"),
    "block_n too small": (lambda: ag(tiles=tiles(block_n=8)), ValueError, "block_n", "8"),
    "block_k zero": (lambda: ag(tiles=tiles(block_k=0)), ValueError, "block_k", "0"),
    "three warps": (lambda: ag(tiles=tiles(num_warps=3)), ValueError, "num_warps", "3"),
    "no stages": (lambda: ag(tiles=tiles(num_stages=0)), ValueError, "num_stages", "0"),
    "group of no tiles": (lambda: ag(tiles=tiles(group_m=0)), ValueError, "group_m", "0"),
    "tiles is a tuple": (lambda: ag(tiles=(64, 64, 64)), TypeError, "tiles must be a Tiles or None", "(64, 64, 64)"),
    "num_comm_sms is a string": (lambda: ag(num_comm_sms="24"), TypeError, "num_comm_sms must be an integer", "'24'"),
    "num_comm_sms is a float": (lambda: ag(num_comm_sms=2.5), TypeError, "num_comm_sms must be an integer", "2.5"),
    "a float for a block": (lambda: ag(tiles=tiles(block_m=64.0)), TypeError, "tiles: block_m must be an integer"),
}

GEMM_RS = {
    "config of ag_gemm": (lambda: ag(), TypeError, "config must be a GemmRsConfig or None, not AgGemmConfig"),
    "unknown method": (lambda: rs(method="nccl"), ValueError, "method", "'nccl'"),
    "empty items": (lambda: rs(item_tiles=0), ValueError, "item_tiles", "not 0"),
    "block_n not a power of two": (lambda: rs(tiles=tiles(block_n=96)), ValueError, "block_n", "power of two", "96"),
    "warp_specialize is a number": (
        lambda: rs(warp_specialize=1), TypeError, "warp_specialize must be True or False", "1",
    ),
    "rows not divisible by 2": (lambda: x(5, 8), ValueError, "x [5, 8]", "divisible", "2 ranks"),
    "batch not divisible by 2": (lambda: x(3, 2, 8), ValueError, "x [3, 2, 8]", "divisible", "2 ranks"),
}

GEMM_AR = {
    "config of gemm_rs": (lambda: rs(), TypeError, "config must be a GemmArConfig or None, not GemmRsConfig"),
    "unknown method": (lambda: ar(method="nccl"), ValueError, "method", "'nccl'"),
    "unknown exchange": (lambda: ar(exchange="three_shot"), ValueError, "exchange", "'three_shot'"),
    "empty items": (lambda: ar(item_tiles=0), ValueError, "item_tiles", "not 0"),
    "unknown transport": (lambda: ar(transport="push"), ValueError, "transport", "'push'"),
    "negative communication SMs": (lambda: ar(num_comm_sms=-1), ValueError, "num_comm_sms", "at least 0", "not -1"),
    "split_k zero": (lambda: ar(exchange="one_shot", split_k=0), ValueError, "split_k", "not 0"),
    "block_k not a power of two": (lambda: ar(tiles=tiles(block_k=48)), ValueError, "block_k", "power of two", "48"),
    "block_m of one shot": (lambda: ar(exchange="one_shot", tiles=tiles(block_m=8)), ValueError, "block_m", "8"),
}


def group_without_rank_1(ranks):
    """Return a group without rank 1 as rank 1 sees it; on the other ranks None, the world."""
    group = dist.new_group(ranks)
    return {"group": group if dist.get_rank() == 1 else None}


# Only rank 1 passes these invalid groups.
GROUPS = {
    "not a member": (lambda: group_without_rank_1([0]), ValueError, "group", "rank 1 is not a member"),
    "mesh of two dimensions": (
        lambda: {"group": init_device_mesh(device().type, (2, 1), mesh_dim_names=("a", "b"))},
        ValueError, "group", "one dimension", "2",
    ),
    "name of a group": (lambda: {"group": "0"}, TypeError, "group", "str"),
    "list of ranks": (lambda: {"group": [0, 1]}, TypeError, "group", "list"),
}

TABLES = {
    "ag_gemm": {**OPERANDS, **AG_GEMM, **GROUPS},
    "gemm_rs": {**OPERANDS, **GEMM_RS, **GROUPS},
    "gemm_ar": {**OPERANDS, **GEMM_AR, **GROUPS},
}


def reject(operator, what):
    replace, kind, *parts = TABLES[operator][what]
    arguments = {**x(ROWS, K), **weight(N, K), **bias(N), **replace()}
    if what not in GROUPS or dist.get_rank() == 1:
        with pytest.raises((TypeError, ValueError)) as caught:
            getattr(tdkernels, operator)(**arguments)
        assert caught.type is kind, repr(caught.value)
        message = str(caught.value)
        assert all(part in message for part in parts), f"{parts} in {message!r}"
        assert what in GROUPS or message.startswith(f"{operator}: "), message
    # No rank has sent anything, so the group is still usable.
    case = Case(operator, torch.float32, ROWS, N, K, exact=True)
    case.check(case.run())


@pytest.mark.parametrize(
    "operator, what", [(operator, what) for operator, table in TABLES.items() for what in table], ids=str
)
def test_invalid_arguments_are_rejected(operator, what):
    on_ranks(2, reject, operator, what)


def reject_too_many_comm_sms():
    if device().type == "cpu":
        return False  # the interpreter runs programs in turn
    with pytest.raises(ValueError, match="num_comm_sms.*100000"):
        tdkernels.ag_gemm(tensor(ROWS, K), tensor(N, K), **ag(num_comm_sms=100_000))
    return True


def test_num_comm_sms_must_leave_sms_for_the_gemm():
    if not all(on_ranks(2, reject_too_many_comm_sms)):
        pytest.skip("only a GPU can be full")


def reject_on_one_rank(operator, what):
    """One rank validates its arguments like many, although it sends nothing."""
    replace, kind, *_ = TABLES[operator][what]
    with pytest.raises(kind):
        getattr(tdkernels, operator)(**{**x(ROWS, K), **weight(N, K), **bias(N), **replace()})


@pytest.mark.parametrize("what", ["other K in x", "bias too long", "x in fp16", "x of integers", "unknown method"])
@pytest.mark.parametrize("operator", TABLES)
def test_invalid_arguments_are_rejected_with_one_rank(operator, what):
    on_ranks(1, reject_on_one_rank, operator, what)


def pass_positional_option(operator):
    with pytest.raises(TypeError, match="positional"):
        getattr(tdkernels, operator)(tensor(ROWS, K), tensor(N, K), tensor(N), None)


@pytest.mark.parametrize("operator", TABLES)
def test_options_are_keyword_only(operator):
    on_ranks(1, pass_positional_option, operator)


# ---- calls that differ between ranks ----


def call_with_other_rows():
    """Rank 1 has a shorter last batch, in a call that is new to it alone: both ranks raise before the timeout."""
    with a_group() as group, timeout(60.0):
        for _ in range(2):
            tdkernels.ag_gemm(tensor(ROWS, K), tensor(N, K), group=group)
        start = time.monotonic()
        error = failure_of(tdkernels.ag_gemm, tensor(ROWS - dist.get_rank(), K), tensor(N, K), group=group)
        again = failure_of(tdkernels.ag_gemm, tensor(ROWS - 2, K), tensor(N, K), group=group)
        seconds = time.monotonic() - start
        del group
    return type(error).__name__, str(error), str(pickle.loads(pickle.dumps(error))), str(again), seconds


def test_call_that_is_new_to_one_rank():
    for kind, text, copy, again, seconds in on_ranks(2, call_with_other_rows):
        assert kind == "PlanMismatchError" and copy == text == again
        assert seconds < 20, "the ranks waited for the timeout"
        assert "rank 1 waits in the consensus check of a new call, ag_gemm(M/W=3, K=8" in text
        assert f"rank 0 makes ag_gemm(M/W={ROWS}, K=8" in text


@pytest.mark.parametrize("seconds", ["60", True, 0, -1, 1e10, float("nan")], ids=str)
def test_invalid_timeouts_are_rejected(seconds):
    with pytest.raises(ValueError, match="timeout must be a positive number of seconds"):
        tdkernels.set_timeout(seconds)


def test_decode_without_a_process_group_is_rejected_if_world_size_is_set(monkeypatch):
    """Otherwise each rank would silently attend to its own keys only."""
    q, cache = torch.zeros(1, 2, 16), torch.zeros(1, 4, 1, 16)
    call = q, cache, cache, torch.tensor([4])
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert tdkernels.flash_decode(*call).shape == q.shape
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="torch.distributed is not initialized, but WORLD_SIZE is 2"):
        tdkernels.flash_decode(*call)


def check_reference_gradients():
    operand, w = tensor(ROWS, K).requires_grad_(), tensor(N, K).requires_grad_()
    for operator in TABLES:
        assert not getattr(tdkernels, f"{operator}_ref")(operand, w).requires_grad, operator
    assert tdkernels.gemm_rs(operand, w).requires_grad


def test_references_have_no_gradient():
    on_ranks(2, check_reference_gradients)


def reject_dtensors():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh(device().type, (dist.get_world_size(),))
    whole = distribute_tensor(torch.randn(4, 8, device=device()), mesh, [Shard(0)])
    part = torch.randn(4, 8, device=device())
    for operator in (tdkernels.ag_gemm, tdkernels.gemm_rs, tdkernels.gemm_ar):
        for operands, name in (((whole, part), "x"), ((part, whole), "weight")):
            with pytest.raises(TypeError, match=rf"{name} \[4, 8\] is a DTensor; pass its to_local\(\)"):
                operator(*operands)
    for operator in (tdkernels.all_reduce, tdkernels.all_gather, tdkernels.reduce_scatter):
        with pytest.raises(TypeError, match=r"x \[4, 8\] is a DTensor; pass its to_local\(\)"):
            operator(whole)
    for operator in (tdkernels.all_reduce_rms_norm, tdkernels.all_reduce_layer_norm):
        for operands, name in (((whole, part, part[0]), "x"), ((part, whole, part[0]), "residual")):
            with pytest.raises(TypeError, match=rf"{name} \[4, 8\] is a DTensor; pass its to_local\(\)"):
                operator(*operands)


def test_dtensors_are_rejected_by_name():
    on_ranks(2, reject_dtensors)
