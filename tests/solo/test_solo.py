"""Solo mode: the operators run unchanged, and compute what they would if all peers were mirror images of this rank."""

import subprocess
import sys

import pytest

from tdkernels.__main__ import main
from tests.support.programs import environment, run_without_gpus
from tests.support.simulated_nodes import thorough

PROGRAM = """
import pytest, torch
import tdkernels
from tdkernels import AgGemmConfig, GemmArConfig, GemmRsConfig, MoeTpConfig, Tiles
from tdkernels.ops.common.scaling import dequantize, quantize_ref
from tdkernels.solo import solo_group

RANKS = 4
device = "cuda" if torch.cuda.is_available() else "cpu"
group = solo_group(RANKS)
with pytest.raises(RuntimeError, match="process of its own"):
    solo_group(RANKS)
torch.manual_seed(0)
on_gpu = device == "cuda"
sizes = [(8192, 1024, 512), (4096, 2048, 512)] if on_gpu else [(128, 64, 64), (128, 64, 32)]
def later_results(call):
    # On a GPU, the first call of a plan runs with all signals set, also those of data that has not been sent yet.
    first = call()
    return [call(), call()] + ([] if on_gpu else [first])

for m, n, k in sizes * 2:  # each plan again, after others have used the same workspace
    x = torch.randn(m, k, dtype=torch.bfloat16, device=device)
    weight = torch.randn(n, k, dtype=torch.bfloat16, device=device) * k**-0.5
    gathered = torch.nn.functional.linear(torch.cat([x] * RANKS), weight)
    for config in (
        None, AgGemmConfig(num_comm_sms=2), AgGemmConfig(transport="copy_engine"), AgGemmConfig(transport="one_shot"),
        AgGemmConfig(method="parts"),
    ):
        for y in later_results(lambda: tdkernels.ag_gemm(x, weight, config=config)):
            torch.testing.assert_close(y, gathered)
    for call, config in ((tdkernels.ag_gemm, AgGemmConfig), (tdkernels.gemm_rs, GemmRsConfig)):
        with pytest.raises(NotImplementedError, match="torch's collectives do not communicate"):
            call(x, weight, config=config(method="torch"))
    summed = torch.nn.functional.linear(x, weight).unflatten(0, (RANKS, -1)).float().sum(0).to(x.dtype)
    for config in (GemmRsConfig(), GemmRsConfig(transport="direct"), GemmRsConfig(method="parts")):
        for z in later_results(lambda: tdkernels.gemm_rs(x, weight, config=config)):
            torch.testing.assert_close(z, summed, rtol=1.6e-2, atol=2e-2)
    x, weight = x[:32].repeat(m // 32, 1), weight[:32].repeat(n // 32, 1)  # so that all tiles are equal
    added = (RANKS * torch.nn.functional.linear(x, weight).float()).to(x.dtype)
    for config in (
        GemmArConfig(transport="direct"), GemmArConfig(transport="direct", num_comm_sms=2),
        GemmArConfig(exchange="one_shot"),
    ):
        for z in later_results(lambda: tdkernels.gemm_ar(x, weight, config=config)):
            torch.testing.assert_close(z, added, rtol=1.6e-2, atol=4e-2)

def check_scaled(rows, n, k, scaling, config):
    # The scales of mirror images do not arrive, so only this rank's rows are checked.
    x, scale_x = quantize_ref(torch.randn(rows, k, device=device) * torch.rand(rows, 1, device=device), scaling)
    weight, scale_w = quantize_ref(torch.randn(n, k, device=device) * k**-0.5, scaling, weight=True)
    expected = dequantize(x, scale_x) @ dequantize(weight, scale_w).T
    for y in later_results(lambda: tdkernels.ag_gemm(x, weight, scale_x=scale_x, scale_w=scale_w, config=config)):
        torch.testing.assert_close(y[:rows].float(), expected, rtol=1.6e-2, atol=2e-2)

for scaling in ("row", "block"):
    for config in (AgGemmConfig(num_comm_sms=2), AgGemmConfig(transport="one_shot", num_comm_sms=2)):
        check_scaled(*((1024, 512, 512) if on_gpu else (64, 32, 160)), scaling, config)
    if on_gpu:  # tiles with rows of several shards, on Hopper
        check_scaled(400, 512, 2560, scaling, AgGemmConfig(tiles=Tiles(128, 256, 128), warp_specialize=True))
ids, weights = torch.randint(3, (512, 2), device=device), torch.rand(512, 2, device=device)
x, gate_up, down = (
    (torch.randn(size, device=device) * size[-1] ** -0.25).to(torch.bfloat16)
    for size in ((512, 32), (3, 32, 32), (3, 32, 32))
)
config = MoeTpConfig(tiles=Tiles(64, 32, 32, num_warps=4, num_stages=2), num_comm_sms=1, stages=2)
rows = torch.einsum("tk,tcnk->tcn", x.float(), gate_up[ids].float()).to(x.dtype)
y = (torch.einsum("tck,tcnk->tcn", rows.float(), down[ids].float()) * weights.unsqueeze(-1)).sum(1)
def layer():
    h, routing = tdkernels.moe_ag_gemm(x, ids, gate_up, config=config)
    return h[routing.rows.long()], tdkernels.moe_gemm_rs(h, routing, weights, down, config=config)

for h, z in later_results(layer):
    torch.testing.assert_close(h, rows.repeat(RANKS, 1, 1))
    torch.testing.assert_close(z.float(), RANKS * y, rtol=1.6e-2, atol=0.2)
for name, call in (
    ("gemm_ar", lambda: tdkernels.gemm_ar(x, weight[:, :32], config=GemmArConfig())),
    ("gemm_rs one shot", lambda: tdkernels.gemm_rs(x, weight[:, :32], config=GemmRsConfig(transport="one_shot"))),
):
    with pytest.raises(NotImplementedError, match=f"{name}: not in solo mode"):
        call()
with pytest.raises(ValueError, match="solo mode needs 4 equal slots of at least .* bytes, not slots of 512 bytes"):
    tdkernels.ag_gemm(x[:16, :16], weight[:, :16], config=AgGemmConfig())
tdkernels.synchronize()
print("as the mirror images")
"""


def test_operators_compute_the_mirrored_result():
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment(), capture_output=True, text=True, timeout=300
    )
    assert run.stdout.splitlines()[-1:] == ["as the mirror images"], run.stderr[-2000:]


@pytest.mark.parametrize("call, message", [
    ("solo_group(1)", "world_size must be at least 2, not 1"),
    ("solo_group(2, 0.0)", "link_rate must be positive, not 0.0"),
])
def test_invalid_arguments(call, message):
    from tdkernels.solo import solo_group

    with pytest.raises(ValueError, match=message):
        eval(call, {"solo_group": solo_group})


def bench(*arguments):
    code, output, errors = run_without_gpus(main, ["bench", *arguments])
    assert code == 0, errors[-2000:]
    return output


def test_bench_rehearses_on_the_cpu():
    output = bench("ag_gemm", "gemm_rs", "gemm_ar", "--solo", "4", "--link", "390", "--shapes", "256x256x128",
                   "--backward", "--eager", "--config", '{"transport": "direct"}')
    lines = output.splitlines()
    for case in ("ag_gemm 256", "ag_gemm backward 256", "gemm_rs 256", "gemm_rs backward 256"):
        (line,) = [line for line in lines if line.startswith(case)]
        assert "gemm " in line and "tdkernels " in line and "tdkernels (eager) " in line
        assert ('{"transport": "direct"}' in line) == (case == "gemm_rs 256")
    (line,) = [line for line in lines if line.startswith("gemm_ar 256")]
    assert "gemm " in line and '{"transport": "direct"}' in line and "tdkernels " not in line  # selects "forward"
    assert "No byte crossed a link." in output and "nothing is written" in lines[-1]


@thorough
def test_bench_starts_no_case_after_the_time_limit():
    output = bench("ag_gemm", "--solo", "4", "--shapes", "256x128x128", "--seconds", "0.001")
    assert "time limit reached: 1 of 1 cases are skipped, from ag_gemm 256x128x128 on" in output
    assert "No byte crossed a link." in output


@pytest.mark.parametrize("arguments, message", [
    (["all_gather", "--solo", "4"], "--solo supports ag_gemm, gemm_ar, gemm_rs, not all_gather"),
    (["gemm_rs", "all_reduce", "--solo", "4"], "--solo supports ag_gemm, gemm_ar, gemm_rs, not all_reduce"),
    (["ag_gemm", "--eager"], "--eager is for --solo"),
    (["ag_gemm", "--solo", "1"], "--solo must be at least 2 ranks, not 1"),
    (["ag_gemm", "--solo", "4", "--link", "0"], "--link must be more than 0 GB/s, not 0"),
    (["ag_gemm", "--link", "390"], "--link is for --solo"),
])
def test_bench_rejects(arguments, message, capsys):
    assert main(["bench", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_trace_records_the_only_rank(tmp_path, capsys):
    from tdkernels.trace.perfetto import load

    arguments = ["trace", "gemm_rs", "--solo", "4", "--shape", "512x256x128", "--device", "cpu", "--no-picture"]
    assert main([*arguments, "--config", '{"transport": "direct"}', "--out", str(tmp_path)]) == 0
    (file,) = tmp_path.iterdir()
    assert file.name == "gemm_rs-512x256x128-bfloat16-cpu-one-of-4.json"
    trace = load(file)
    assert "one of 4 ranks in solo mode" in trace.title and len(trace.ranks) == 1
    assert {i.peer for i in trace.ranks[0] if i.kind == "pushes"} == {1, 2, 3}
    assert main(["trace", "ulysses_qkv", "--solo", "4", "--shape", "512x256x128"]) == 2
    assert "--solo supports ag_gemm, gemm_ar, gemm_rs, not ulysses_qkv" in capsys.readouterr().err
