"""rocSHMEM device functions, compiled for AMD GPUs ahead of time, with a stand-in for its device library.

The tests check that a kernel calls the correct functions, in order, with the correct types, from the correct threads,
and that Triton links the library. The effect of the functions cannot be tested without an AMD GPU.
"""

import re
from pathlib import Path

import pytest
import torch
import triton.language as tl

from tdkernels.lang import jit, rocshmem, target
from tdkernels.lang.rocshmem_library import RocshmemError
from tests.support.aot import compile_for, pointer
from tests.support.ranks import DEVICE

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="needs no GPU: `make test` runs it")

STAND_IN = Path(__file__).parent / "rocshmem_stand_in.ll"
VARIABLE = rocshmem._VARIABLE
ARCHS = ["gfx942", "gfx950"]


@pytest.fixture
def stand_in(monkeypatch):
    monkeypatch.setenv(VARIABLE, str(STAND_IN))


@jit
def send_kernel(out_ptr, dst, num_bytes, signal_ptr, peer, value):
    if target() == "hip":
        tl.store(out_ptr + tl.arange(0, 256), tl.arange(0, 256).to(tl.int64))
        rocshmem.put_signal_nbi_block(dst, out_ptr, num_bytes, signal_ptr, value, peer)
        rocshmem.quiet()
        tl.store(out_ptr, (rocshmem.my_pe() * 1000 + rocshmem.n_pes()).to(tl.int64))


@jit
def convert_kernel(dst, src, num_bytes, peer):
    if target() == "hip":
        rocshmem.put_nbi_block(dst, src, num_bytes, peer)
        rocshmem.signal_set(dst, 7, 1)


ARGS = [pointer(torch.int64), 1 << 45, 1 << 40, pointer(torch.int64), 2, 5]  # int64s, a pointer, int32s


def compiled(kernel, args, arch):
    return compile_for(kernel, args, {"extern_libs": rocshmem.device_library(arch), "num_warps": 4}, arch)


def in_order(code, *patterns):
    """Return the positions of the patterns in ``code``; each must match once, and they must be in order."""
    positions = []
    for pattern in patterns:
        found = [match.start() for match in re.finditer(pattern, code)]
        assert len(found) == 1, f"{pattern}: found {len(found)} times in\n{code}"
        positions.append(found[0])
    assert positions == sorted(positions), f"{patterns} are at {positions} in\n{code}"
    return positions


ADDRESS, NUMBER = r"ptr (\S+)", r"(?:range\(.*?\) )?(\S+)"  # the compiler may put a range before a number
PUT = rf"call void @rocshmem_putmem_nbi_wg\({ADDRESS}, {ADDRESS}, i64 {NUMBER}, i32 {NUMBER}\)"
SET = rf"call void @rocshmem_uint64_atomic_set\({ADDRESS}, i64 {NUMBER}, i32 {NUMBER}\)"
FIRST = r"br i1 %is_first\S*, label %first"


def origins(code, call):
    """Return the sources of a call's arguments before conversions: constants, or arguments of the kernel, like "%2"."""

    def origin(value):
        converted = re.search(rf"^\s*{re.escape(value)} = (?:inttoptr|ptrtoint|sext|trunc) .*?(%\S+) to ", code, re.M)
        return origin(converted[1]) if converted else value

    return [origin(value) for value in re.search(call, code).groups()]


@pytest.mark.parametrize("arch", ARCHS)
def test_calls(stand_in, arch):
    code = compiled(send_kernel, ARGS, arch).asm["llir"]
    start = code.index("define amdgpu_kernel")
    body = code[start : code.index("\n}", start)]
    at = in_order(
        body, r"buffer\.store\.i64\(", r"fence release", PUT, r"call void @rocshmem_fence\(\)", FIRST, SET,
        r"call void @rocshmem_quiet\(\)", r"call i32 @rocshmem_my_pe\(\)", r"call i32 @rocshmem_n_pes\(\)", r"ret void",
    )
    _, released, put, fenced, branch, _, quiet, pe, _, _ = at
    barriers = [match.start() for match in re.finditer(r"@llvm.amdgcn.s.barrier\(\)", body)]
    for first, last in ((released, put), (fenced, branch), (quiet, pe)):
        assert any(first < barrier < last for barrier in barriers), f"no barrier between {first} and {last}:\n{body}"
    assert re.search(r"%is_first\S* = icmp eq i32 %\S+, 0", body)
    assert origins(body, PUT) == ["%1", "%0", "%2", "%4"], "dst, out_ptr, num_bytes, peer"
    assert origins(body, SET) == ["%3", "%5", "%4"], "signal_ptr, value, peer"


def test_converts_arguments(stand_in):
    """Integers of any width and constants are converted; pointers are passed as addresses."""
    code = compiled(convert_kernel, [1 << 45, pointer(torch.bfloat16), 100, 1 << 40], "gfx942").asm["llir"]
    in_order(code, PUT, SET)
    assert origins(code, PUT) == ["%0", "%1", "%2", "%3"] and origins(code, SET) == ["%0", "7", "1"]
    assert "sext i32" in code and "trunc i64" in code


@pytest.mark.parametrize("arch", ARCHS)
def test_links_the_device_library(stand_in, arch):
    """All functions are resolved, and a code object is generated."""
    kernel = compiled(send_kernel, ARGS, arch)
    assert not re.search(r"^declare .*rocshmem", kernel.asm["llir"], re.M)
    assert len(re.findall(r"^define internal .*@rocshmem_\w+\(", kernel.asm["llir"], re.M)) == 6
    for mark in ("; put v", "; set v", "; rocshmem fence", "; rocshmem quiet", "; my pe v", "; n pes v"):
        assert mark in kernel.asm["amdgcn"], mark
    assert kernel.metadata.name == "send_kernel"
    object_file = kernel.asm["hsaco"]
    assert object_file[:4] == b"\x7fELF"
    assert b"ROCSHMEM_CTX_DEFAULT" in object_file, "the host finds the variable by its name"


def test_other_kernels_link_nothing(stand_in):
    kernel = compiled(nothing, ARGS[:1], "gfx942")
    assert "@rocshmem" not in kernel.asm["llir"] and "ROCSHMEM" not in kernel.asm["llir"]


@jit
def nothing(out_ptr):
    tl.store(out_ptr, 1)


# ---- lookup of the device library ----


def test_order_and_content(stand_in, tmp_path, monkeypatch):
    libraries = rocshmem.device_library("gfx942")
    names = list(libraries)
    assert names[:2] == ["tdkernels_rocshmem", "rocshmem"] and libraries["rocshmem"] == str(STAND_IN)
    # The third entry gives Triton's cache the hash of the file's content; no function name contains it.
    assert re.fullmatch(r"rocshmem [0-9a-f]{64}", names[2])
    other = tmp_path / "other.ll"
    other.write_text(STAND_IN.read_text() + "; changed\n")
    monkeypatch.setenv(VARIABLE, str(other))
    assert list(rocshmem.device_library("gfx942"))[2] != names[2]


def test_finds_the_library_for_the_gpu(tmp_path, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    for arch in ARCHS:
        path = tmp_path / "lib" / f"librocshmem_device_{arch}.bc"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(STAND_IN.read_bytes() + arch.encode())
    monkeypatch.setenv("ROCSHMEM_HOME", str(tmp_path))
    rocshmem._device_library.cache_clear()
    assert [Path(rocshmem.device_library(arch)["rocshmem"]).stem[-6:] for arch in ARCHS] == ARCHS
    with pytest.raises(RocshmemError, match=f"librocshmem_device_gfx1201.bc was not found in {tmp_path}/lib, "):
        rocshmem.device_library("gfx1201")


def test_missing(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "none.bc"))
    with pytest.raises(RocshmemError, match="none.bc', where there is no file.* Set TDKERNELS_ROCSHMEM_DEVICE_LIBRARY"):
        rocshmem.device_library("gfx942")
    old = tmp_path / "old.bc"  # a rocSHMEM with C++ names for all but two device functions
    text = STAND_IN.read_text()
    for name in ("rocshmem_putmem_nbi_wg", "rocshmem_uint64_atomic_set", "rocshmem_quiet", "rocshmem_my_pe"):
        text = text.replace(f"@{name}", f"@_ZN8rocshmem{len(name)}{name}Ev")
    old.write_text(text)
    monkeypatch.setenv(VARIABLE, str(old))
    lacks = "rocshmem_my_pe, rocshmem_putmem_nbi_wg, rocshmem_quiet, rocshmem_uint64_atomic_set"
    with pytest.raises(RocshmemError, match=f"old.bc lacks {lacks}: this build of rocSHMEM has no C names"):
        rocshmem.device_library("gfx942")
