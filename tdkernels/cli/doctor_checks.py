"""The checks of ``python -m tdkernels doctor``: functions that return one ``Check`` each.

The first ones look; the self-test runs the operators on ranks.
"""

import dataclasses
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path

import torch
import triton

from tdkernels.autotune import disk_cache, get_mode
from tdkernels.autotune.hardware import KIN
from tdkernels.autotune.tunable import operators
from tdkernels.cli.self_test import try_operators
from tdkernels.launch import RankError, run_ranks
from tdkernels.symm import get_timeout, topology

_TOOL_TIMEOUT_S = 10.0  # nvidia-smi can hang where a driver is sick
_RANKS_TIMEOUT_S = 240.0
_MIN_TORCH, _MIN_TRITON = (2, 11), (3, 6)
_MULTICAST_OFF = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}


@dataclasses.dataclass(frozen=True)
class Check:
    """What one check found.

    Attributes:
        name: of the check.
        status: "ok"; "n/a" if something optional is absent; "warning" if everything works, but not as well as it could;
            "problem" if something does not work.
        found: what is there and, unless the status is "ok", what does not work and why.
        advice: what to do about it, or "".
        details: for example a traceback, or "".
    """

    name: str
    status: str
    found: str
    advice: str = ""
    details: str = ""


# ---- Software ----


def check_python():
    return Check("Python", "ok", f"{platform.python_version()} on {platform.system()} {platform.machine()}")


def check_torch(version=torch.__version__):
    if _numbers(version) < _MIN_TORCH:
        found = f"{version}: the operators need {_dots(_MIN_TORCH)} or newer"
        return Check("torch", "problem", found, "Upgrade torch.")
    return Check("torch", "ok", version)


def check_triton(version=triton.__version__):
    if _numbers(version) < _MIN_TRITON:
        found = f"{version}: the kernels need {_dots(_MIN_TRITON)} or newer"
        return Check("triton", "problem", found, f"Install the triton that goes with a torch ≥ {_dots(_MIN_TORCH)}.")
    return Check("triton", "ok", version)


def check_numpy():
    """Only Triton's interpreter, and so only CPU ranks, need numpy."""
    if importlib.util.find_spec("numpy") is None:
        found = "not installed: CPU ranks do not work, since Triton's interpreter needs it"
        return Check("numpy", "problem", found, "pip install numpy")
    return Check("numpy", "ok", importlib.metadata.version("numpy"))


def check_compiler(gpus=None):
    """Triton builds the code that launches a kernel with the C compiler of the machine."""
    gpus = torch.cuda.device_count() if gpus is None else gpus
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang") or shutil.which("cc")
    if compiler:
        return Check("C compiler", "ok", compiler)
    if gpus:
        found = "none: no kernel runs on the GPUs, since Triton compiles what launches it"
        return Check("C compiler", "problem", found, "Install gcc or clang, or name one in CC.")
    return Check("C compiler", "ok", "none; only GPUs need one")


# ---- GPUs ----


def check_gpus():
    count = torch.cuda.device_count()
    if count == 0:
        if shutil.which("nvidia-smi") or shutil.which("rocm-smi"):
            found = "torch sees none, yet there is a driver's tool: the operators run on CPU ranks only"
            return Check("GPUs", "warning", found, _why_no_gpu())
        return Check("GPUs", "ok", "none: the operators run on CPU ranks, in Triton's interpreter (slow)")
    devices = [torch.cuda.get_device_properties(i) for i in range(count)]
    lines = []
    for i, d in enumerate(devices):
        lines.append(f"{i}: {d.name}, capability {d.major}.{d.minor}, {d.total_memory / 2**30:.0f} GiB")
    lines.append(f"driver {_driver_version() or 'unknown'}, {_runtime()}")
    if not torch.version.hip and min((d.major, d.minor) for d in devices) < (8, 0):
        found = "\n".join([*lines, "bfloat16 does not work on capability below 8.0"])
        return Check("GPUs", "warning", found, "Use float16 or float32 there.")
    if count == 1:
        lines.append("with one GPU there is nothing to overlap: several ranks run on the CPU")
    return Check("GPUs", "ok", "\n".join(lines))


def check_links():
    """Whether each GPU reaches the memory of every other one, and over what."""
    count = torch.cuda.device_count()
    if count < 2:
        return Check("links", "ok", "nothing to link: fewer than two GPUs")
    reach = [[i == j or torch.cuda.can_device_access_peer(i, j) for j in range(count)] for i in range(count)]
    return links_from(reach, _link_kinds())


def links_from(reach, kinds):
    """The check made of the matrix of peer access and the kinds of link (a text, or "")."""
    count = len(reach)
    kinds = f"; links: {kinds}" if kinds else "; kind of link unknown"
    if all(map(all, reach)):
        return Check("links", "ok", f"each of the {count} GPUs reaches the memory of all others{kinds}")
    rows = [f"{i}: " + " ".join("yes" if reached else "NO " for reached in row) for i, row in enumerate(reach)]
    found = f"some GPUs do not reach each other's memory, and a group that contains such a pair does not work{kinds}"
    advice = "Use groups of GPUs that reach each other (CUDA_VISIBLE_DEVICES); look at virtualisation, IOMMU and ACS."
    return Check("links", "problem", "\n".join([found, *rows]), advice)


# ---- Symmetric memory ----


def check_cpu_memory():
    """Do what symm/shm.py does, with one process; the self-test does it with two."""
    name = "symmetric memory, CPU ranks"
    try:
        fd = os.memfd_create("tdkernels-doctor", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, 4096)
            os.close(os.open(f"/proc/self/fd/{fd}", os.O_RDWR))
        finally:
            os.close(fd)
        Path("/proc/sys/kernel/random/boot_id").read_text()
    except (AttributeError, OSError) as error:
        found = f"CPU ranks do not work, since they cannot share memory: {describe(error)}"
        return Check(name, "problem", found, "It takes Linux, with memfd_create and /proc.")
    return Check(name, "ok", "memfd_create and /proc work")


def check_gpu_memory():
    name = "symmetric memory, GPUs"
    gpus = torch.cuda.device_count()
    try:
        importlib.import_module("torch.distributed._symmetric_memory")
    except Exception as error:
        found = f"GPU ranks do not work, since torch's symmetric memory does not import: {describe(error)}"
        return Check(name, "problem" if gpus else "warning", found, "Install an official build of torch.")
    return Check(name, "ok", "torch.distributed._symmetric_memory (p2p, GPUs of one host)")


def check_nvshmem():
    packages = ("nvshmem4py-cu13", "nvshmem4py-cu12", "nvidia-nvshmem-cu13", "nvidia-nvshmem-cu12")
    versions = [f"{name} {version}" for name in packages if (version := _version_of(name))]
    try:
        from tdkernels.symm.backends import nvshmem

        versions.append(f"library {nvshmem.installed_version()}")
        if torch.cuda.is_available():
            versions.append(f"device library {nvshmem.device_library(torch.cuda.get_device_capability())}")
    except ImportError as error:
        versions.append(f"groups across nodes do not work on NVIDIA GPUs ({error})")
        return Check("NVSHMEM", "n/a", "; ".join(versions) + "; not needed on one host")
    return Check("NVSHMEM", "ok", "; ".join(versions) + "; not needed on one host")


def check_nodes():
    """Where a group's ranks would be told to be, and what there is to reach other hosts by."""
    try:
        size = topology.simulated_local_world_size()
    except ValueError as error:
        found = f"no operator works: {error}"
        return Check("nodes", "problem", found, f"Unset {topology.VARIABLE}, or correct it.")
    here = f"this host is {socket.gethostname()!r}"
    if size is not None:
        here += f", split into simulated nodes of {size} ranks each by {topology.VARIABLE}"
    return Check("nodes", "ok", f"{here}; {_network_devices()}; {_network_settings()}")


def _network_devices(folder="/sys/class/infiniband"):
    try:
        devices = sorted(os.listdir(folder))
    except OSError:
        devices = []
    if not devices:
        return "no InfiniBand or RoCE device: NVSHMEM does not reach other hosts from here"
    return f"InfiniBand or RoCE devices {', '.join(devices)}"


def _network_settings():
    """What is set of NVSHMEM's and rocSHMEM's own variables."""
    names = sorted(name for name in os.environ if name.startswith(("NVSHMEM_", "ROCSHMEM_")))
    return ", ".join(f"{name}={os.environ[name]}" for name in names) or "no variable of NVSHMEM or rocSHMEM is set"


def check_multicast():
    """Reads the environment and nothing else: to ask the driver would mean to make a multicast object."""
    states = []
    for variable, off in _MULTICAST_OFF.items():
        value = os.environ.get(variable)
        states.append(f"{variable} is {'not set' if value is None else value}{' (off)' if value == off else ''}")
    return Check("NVLink multicast", "ok", "tdkernels does not use it; " + ", ".join(states))


# ---- Settings ----


def check_timeout():
    try:
        return Check("timeout", "ok", f"a rank waits {get_timeout():g} s for its peers")
    except ValueError as error:
        return Check("timeout", "problem", f"no operator works: {error}", "Unset TDKERNELS_TIMEOUT_S, or correct it.")


def check_cache():
    try:
        folder = disk_cache.folder()
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except ImportError:
        found = "results of tuning cannot be kept: platformdirs, which knows where, is not installed"
        return Check("cache", "warning", found, "pip install platformdirs, or name a folder in TDKERNELS_CACHE_DIR.")
    except OSError as error:
        found = f"results of tuning cannot be kept in {folder}: {describe(error)}"
        return Check("cache", "warning", found, "Name a folder that can be written in TDKERNELS_CACHE_DIR.")
    return Check("cache", "ok", f"{folder} can be written")


def check_tuning():
    """Whether there are tuned configs for the GPUs."""
    try:
        mode = get_mode()
    except ValueError as error:
        return Check("tuning", "problem", f"no operator works: {error}", "Unset TDKERNELS_AUTOTUNE, or correct it.")
    names = sorted({torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())})
    found, missing = [f"mode {mode}"], False
    for name in names:
        cached, shipped = (
            sum(len(known(operator, name)) for operator in operators())
            for known in (disk_cache.user_entries, disk_cache.shipped_entries)
        )
        kin = KIN.get(name)
        of_kin = f", and those of {kin}, which is of the same kind" if kin else ""
        found.append(f"{name}: {cached} configs tuned here, {shipped} shipped{of_kin}")
        missing |= not (cached or shipped or kin)
    advice = "Tune your shapes once: python -m tdkernels tune --help" if missing else ""
    return Check("tuning", "warning" if missing else "ok", "; ".join(found), advice)


# ---- Self-test ----


def check_operators(world_size, device):
    """Run the dense operators, forward and backward, on ranks."""
    name = f"self-test, {world_size} {'GPUs' if device == 'cuda' else 'CPU ranks'}"
    try:
        reports = run_ranks(world_size, try_operators, device=device, timeout_s=_RANKS_TIMEOUT_S)
    except RankError as error:
        found = f"the operators do not work here: {describe(error.exceptions[error.rank])}"
        return Check(name, "problem", found, "Look at the other rows and at the traceback.", str(error))
    errors = [(error, allowed, what) for report in reports for what, (error, allowed) in report.items()]
    wrong = sorted({what for error, allowed, what in errors if not error <= allowed})  # a NaN is wrong
    if wrong:
        details = "\n".join(f"{what}: error {error:.1e}, {allowed:g} allowed" for error, allowed, what in errors)
        advice = "Do not use the operators here, and please report this."
        return Check(name, "problem", f"wrong results: {', '.join(wrong)}", advice, details)
    found = f"ag_gemm, gemm_rs, gemm_ar and their gradients are right; largest error {max(errors)[0]:.1e}"
    return Check(name, "ok", found)


# ---- What the checks ask ----


def _numbers(version):
    """(major, minor) of a version such as "2.11.0a0+git1234"."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def _dots(version):
    return ".".join(map(str, version))


def describe(error):
    return f"{type(error).__name__}: {error}"


def _version_of(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _runtime():
    return f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"


def _why_no_gpu():
    if not (torch.version.cuda or torch.version.hip):
        return "This torch is built for CPUs: install one that is built for your GPUs."
    return "See why torch.cuda.init() fails: the driver may be too old, or CUDA_VISIBLE_DEVICES may hide the GPUs."


def _output_of(*command):
    """What a tool prints; "" when it is absent, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TOOL_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout


def _driver_version():
    lines = _output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()
    return lines[0].strip() if lines else ""


def _link_kinds():
    """Kinds of link between GPUs of this host, such as "NV18": from nvidia-smi's matrix, else from NVML."""
    return kinds_in_topology(_output_of("nvidia-smi", "topo", "-m")) or _nvlinks_by_nvml()


def kinds_in_topology(topology):
    """The entries of nvidia-smi's matrix that are in a row and in a column of a GPU."""
    lines = [line.split() for line in re.sub(r"\x1b\[[0-9;]*m", "", topology).splitlines()]
    lines = [cells for cells in lines if cells and re.fullmatch(r"GPU\d+", cells[0])]
    gpus = len(lines) - 1  # the first of these lines is the heading
    return ", ".join(sorted({cell for cells in lines[1:] for cell in cells[1 : 1 + gpus] if cell != "X"}))


def _nvlinks_by_nvml():
    try:
        import pynvml

        pynvml.nvmlInit()
        gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
    except Exception:  # pynvml has an error class of its own, which may not be there
        return ""
    active = 0
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        try:
            active += pynvml.nvmlDeviceGetNvLinkState(gpu, link)
        except Exception:
            break
    return f"{active} NVLinks on GPU 0" if active else "no NVLink"
