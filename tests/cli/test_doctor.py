"""`tdkernels doctor`: each check with fakes, exit code, output, and the self-test on CPU ranks."""

import json
import subprocess
import sys

import pytest
import torch

from tdkernels import __main__ as command_line
from tdkernels.cli import doctor, doctor_checks
from tdkernels.cli.doctor_checks import Check


def test_old_versions_are_problems():
    assert doctor_checks.check_torch("2.10.3").status == "problem"
    assert doctor_checks.check_torch("2.11.0a0+git1234").status == "ok"
    assert doctor_checks.check_triton("3.5.1").status == "problem"
    assert doctor_checks.check_triton("3.10.0").status == "ok"


@pytest.mark.parametrize("installed, status", [(True, "ok"), (False, "problem")])
def test_missing_numpy_is_a_problem(installed, status, monkeypatch):
    monkeypatch.setattr(doctor_checks.importlib.util, "find_spec", lambda name: object() if installed else None)
    assert doctor_checks.check_numpy().status == status


def test_missing_compiler_is_a_problem_only_with_gpus(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert doctor_checks.check_compiler(gpus=0).status == "ok"
    assert doctor_checks.check_compiler(gpus=2).status == "problem"


def test_gpus_without_peer_access_are_a_problem():
    assert doctor_checks.links_from([[True, True], [True, True]], "NV18").status == "ok"
    check = doctor_checks.links_from([[True, False], [True, True]], "")
    assert check.status == "problem"
    assert "0: yes NO" in check.found


def test_link_kinds_are_read_from_the_topology():
    matrix = "\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\x1b[0m\nGPU0\t X \tNV18\tSYS\t0-31\nGPU1\tNV18\t X \tSYS\t0-31\n"
    assert doctor_checks.kinds_in_topology(matrix) == "NV18"
    assert doctor_checks.kinds_in_topology("") == ""


def test_output_of_a_missing_failing_or_hanging_tool_is_empty(monkeypatch):
    monkeypatch.setattr(doctor_checks, "_TOOL_TIMEOUT_S", 0.2)
    assert doctor_checks._output_of("/no/such/tool") == ""
    assert doctor_checks._output_of(sys.executable, "-c", "import sys; sys.exit(3)") == ""
    assert doctor_checks._output_of("sleep", "20") == ""


def test_cache_folder_is_taken_from_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("TDKERNELS_CACHE_DIR", str(tmp_path / "new" / "folder"))
    check = doctor_checks.check_cache()
    assert check.status == "ok" and str(tmp_path) in check.found


def test_unwritable_cache_folder_is_a_warning(monkeypatch, tmp_path):
    (tmp_path / "file").touch()  # a read-only folder would not do: root can write to it
    monkeypatch.setenv("TDKERNELS_CACHE_DIR", str(tmp_path / "file" / "cache"))
    check = doctor_checks.check_cache()
    assert check.status == "warning"
    assert "TDKERNELS_CACHE_DIR" in check.advice


@pytest.mark.parametrize("gpu, status", [
    ("NVIDIA H200", "ok"), ("NVIDIA H100 80GB HBM3", "ok"), ("NVIDIA Untuned", "warning"),
])
def test_gpu_without_a_table_is_a_warning(gpu, status, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: gpu)
    check = doctor_checks.check_tuning()
    assert check.status == status and gpu in check.found
    assert ("tdkernels tune" in check.advice) == (status == "warning")


def test_invalid_autotune_mode_is_a_problem(monkeypatch):
    monkeypatch.setenv("TDKERNELS_AUTOTUNE", "sometimes")
    assert doctor_checks.check_tuning().status == "problem"


def test_timeout_that_is_not_a_number_is_a_problem(monkeypatch):
    monkeypatch.setenv("TDKERNELS_TIMEOUT_S", "soon")
    assert doctor_checks.check_timeout().status == "problem"
    monkeypatch.setenv("TDKERNELS_TIMEOUT_S", "7")
    assert "7 s" in doctor_checks.check_timeout().found


def test_multicast_variables_are_shown(monkeypatch):
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    monkeypatch.delenv("NVSHMEM_DISABLE_NVLS", raising=False)
    found = doctor_checks.check_multicast().found
    assert "NCCL_NVLS_ENABLE is 0 (off)" in found and "NVSHMEM_DISABLE_NVLS is not set" in found


def test_missing_memfd_is_a_problem(monkeypatch):
    monkeypatch.delattr("os.memfd_create")
    assert doctor_checks.check_cpu_memory().status == "problem"


def _fine():
    return Check("fine", "ok", "all there")


def _warning():
    return Check("so so", "warning", "slow", "Wait.")


def _bad():
    return Check("bad", "problem", "[rank 0] is [no/such markup]", "Repair it.", "Traceback [/of] it")


def _broken():
    raise KeyError("oops")


@pytest.mark.parametrize("checks, code", [((_fine, _warning), 0), ((_fine, _bad), 1), ((_broken, _fine), 1)])
@pytest.mark.parametrize("as_json", [False, True])
def test_exit_code_reports_problems(monkeypatch, capsys, checks, code, as_json):
    monkeypatch.setattr(doctor, "LOOKS", checks)
    assert command_line.main(["doctor", "--no-self-test"] + ["--json"] * as_json) == code
    assert "fine" in capsys.readouterr().out


def test_problem_text_is_printed_literally(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "LOOKS", (_bad,))
    command_line.main(["doctor", "--no-self-test"])
    out = capsys.readouterr().out
    assert "[rank 0]" in out and "Repair it." in out and "Traceback [/of] it" in out and "1 problem" in out


def test_self_test_passes_on_cpu_ranks(monkeypatch, capsys):
    monkeypatch.setattr(doctor.torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(doctor, "LOOKS", (_fine,))
    assert command_line.main(["doctor", "--json"]) == 0
    fine, self_test = json.loads(capsys.readouterr().out)["checks"]
    assert fine == {"name": "fine", "status": "ok", "found": "all there", "advice": "", "details": ""}
    assert self_test["name"] == "self-test, 2 CPU ranks" and self_test["status"] == "ok"


def _raise():
    raise ZeroDivisionError("of a rank")


def test_failed_self_test_shows_the_error(monkeypatch):
    monkeypatch.setattr(doctor_checks, "try_operators", _raise)
    check = doctor_checks.check_operators(1, "cpu")
    assert check.status == "problem"
    assert "ZeroDivisionError: of a rank" in check.found and "Traceback" in check.details


@pytest.mark.parametrize("error", [1.0, float("nan")])
def test_wrong_result_is_a_problem(monkeypatch, error):
    errors = {"dx of ag_gemm": (error, 0.1), "output": (0.0, 0.1)}
    monkeypatch.setattr(doctor_checks, "run_ranks", lambda *_, **__: [errors])
    check = doctor_checks.check_operators(2, "cpu")
    assert check.status == "problem"
    assert check.found == "wrong results: dx of ag_gemm"


def test_doctor_runs_as_a_module():
    done = subprocess.run(
        [sys.executable, "-m", "tdkernels", "doctor", "--no-self-test", "--json"],
        capture_output=True, text=True, timeout=120,
    )
    checks = json.loads(done.stdout)["checks"]
    assert done.returncode == any(check["status"] == "problem" for check in checks)
    assert {"torch", "GPUs", "NVSHMEM"} <= {check["name"] for check in checks}


def test_unknown_command_is_rejected(capsys):
    with pytest.raises(SystemExit) as exit_of:
        command_line.main(["cure"])
    assert exit_of.value.code == 2
    assert "doctor" in capsys.readouterr().err
