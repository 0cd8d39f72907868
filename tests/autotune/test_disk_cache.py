"""Disk cache of tuned configs: shared between processes, and robust against broken files and folders."""

import contextlib
import json
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import platformdirs
import pytest
from filelock import FileLock

from tdkernels.autotune import disk_cache, table
from tests.autotune.entries import GPU, cache_in, make_entry

ROOT = Path(__file__).parents[2]
WANTED = "ag_gemm", GPU
SAME_SLUG = "NVIDIA-Testing"  # another GPU name with the slug of GPU


@pytest.fixture(autouse=True)
def folder(tmp_path):
    """Use a cache in a folder that does not exist yet."""
    with cache_in(tmp_path / "cache") as folder:
        yield folder


@pytest.fixture
def file(folder):
    """Return the file for entries of ``make_entry``, in an existing folder."""
    file = folder / "nvidia-testing" / "ag_gemm.json"
    file.parent.mkdir(parents=True)
    return file


def read_from_disk(operator="ag_gemm", gpu=GPU):
    """Return the entries that a new process finds."""
    disk_cache.forget()
    return disk_cache.user_entries(operator, gpu)


def warnings(caplog):
    assert all(record.levelno == logging.WARNING for record in caplog.records if record.name == "tdkernels")
    return [record.getMessage() for record in caplog.records if record.name == "tdkernels"]


def write_as_another_process(file, entries):
    """Write a file as ``store`` of another process does."""
    aside = file.with_suffix(".new")
    aside.write_text(table.to_json(entries))
    os.replace(aside, file)


# ---- folder, files and contents ----


def test_folder_is_given_by_the_variable_or_the_platform(monkeypatch, folder):
    assert disk_cache.folder() == folder
    monkeypatch.setenv("TDKERNELS_CACHE_DIR", "")
    assert disk_cache.folder() == platformdirs.user_cache_path("tdkernels")
    monkeypatch.delenv("TDKERNELS_CACHE_DIR")
    assert disk_cache.folder() == platformdirs.user_cache_path("tdkernels")


def test_one_file_per_gpu_and_operator(folder):
    disk_cache.store([make_entry(), make_entry("gemm_rs"), make_entry(gpu="NVIDIA H200 NVL (80GB)")])
    assert [str(file.relative_to(folder)) for file in disk_cache.files()] == [
        "nvidia-h200-nvl-80gb/ag_gemm.json", "nvidia-testing/ag_gemm.json", "nvidia-testing/gemm_rs.json",
    ]
    assert disk_cache.path(*WANTED) == folder / "nvidia-testing" / "ag_gemm.json"


def test_stored_entries_are_found():
    disk_cache.store([make_entry(), make_entry(shape=(1, 2, 3)), make_entry("gemm_rs", ms=2.0)])
    found = [make_entry(shape=(1, 2, 3)), make_entry()]
    assert sorted(disk_cache.user_entries(*WANTED), key=lambda entry: entry.problem.shape) == found
    assert read_from_disk() == found
    assert read_from_disk("gemm_rs") == [make_entry("gemm_rs", ms=2.0)]
    assert read_from_disk(gpu="NVIDIA Other") == []


def test_later_entries_win_and_other_problems_stay():
    disk_cache.store([make_entry(ms=2.0), make_entry(shape=(1, 2, 3))])
    disk_cache.store([make_entry(ms=1.0)])
    assert read_from_disk() == [make_entry(shape=(1, 2, 3)), make_entry(ms=1.0)]


def test_entries_of_other_versions_stay_in_the_file():
    old, new = make_entry(versions={"torch": "2.13.0"}), make_entry(versions={"torch": "2.14.0"}, ms=2.0)
    disk_cache.store([old])
    disk_cache.store([new])
    assert read_from_disk() == [old, new]


# Prints how many entries it finds, and stores one more.
ANOTHER_PROCESS = """
from tdkernels.autotune import disk_cache
from tests.autotune.entries import GPU, make_entry, cache_in
print(len(disk_cache.user_entries("ag_gemm", GPU)))
disk_cache.store([make_entry(shape=(2, 2, 2))])
"""


def test_processes_find_entries_of_each_other():
    disk_cache.store([make_entry()])
    command = [sys.executable, "-c", ANOTHER_PROCESS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
    assert disk_cache.load(disk_cache.path(*WANTED)) == [make_entry(shape=(2, 2, 2)), make_entry()]


def test_changed_file_is_read_again(file):
    for ms in (1.0, 2.0):  # the file size does not change
        write_as_another_process(file, [make_entry(ms=ms)])
        assert disk_cache.load(file) == disk_cache.user_entries(*WANTED) == [make_entry(ms=ms)]
    file.unlink()
    assert disk_cache.load(file) == disk_cache.user_entries(*WANTED) == []


def test_shipped_entries_are_separate_from_user_entries(monkeypatch, tmp_path):
    monkeypatch.setattr(disk_cache, "SHIPPED", tmp_path / "configs")
    shipped = tmp_path / "configs" / "nvidia-testing" / "ag_gemm.json"
    shipped.parent.mkdir(parents=True)
    shipped.write_text(table.to_json([make_entry()]))
    assert disk_cache.shipped_entries(*WANTED) == [make_entry()]
    assert disk_cache.user_entries(*WANTED) == disk_cache.shipped_entries("ag_gemm", SAME_SLUG) == []


# ---- broken files ----

GOOD = table.to_json([make_entry(), make_entry(shape=(1, 2, 3))]).encode()
LATER = json.dumps({**json.loads(GOOD), "format": table.FORMAT + 1}).encode()
LATER_AND_OTHER = json.dumps({"format": table.FORMAT + 1, "operator": "ag_gemm", "shapes": {}}).encode()
CORRUPT = {
    "empty": b"",
    **{f"cut at {end}": GOOD[:end] for end in (1, len(GOOD) // 4, len(GOOD) // 2, len(GOOD) - 4, len(GOOD) - 2)},
    "no text": bytes(range(256)),
    "zeros": bytes(4096),
    "deep": b"[" * 100_000,
    "another tool's": b'{"plugins": [], "version": 3}',
    "another tool's entries": b'{"entries": [1, 2]}',
    "a list": b"[1, 2]",
    "null": b"null",
    "no operator": b'{"format": 1, "entries": []}',
}
corrupt = pytest.mark.parametrize("content", [pytest.param(content, id=name) for name, content in CORRUPT.items()])
later = pytest.mark.parametrize("content", [LATER, LATER_AND_OTHER], ids=["later", "later and without entries"])
wrong_table = pytest.mark.parametrize(
    "other",
    [make_entry("gemm_rs", shape=(1, 2, 3)), make_entry(gpu=SAME_SLUG, shape=(1, 2, 3))],
    ids=["operator", "gpu"],
)


@corrupt
def test_corrupt_file_is_reported_once_and_has_no_entries(caplog, file, content):
    file.write_bytes(content)
    for _ in range(3):
        assert disk_cache.load(file) == disk_cache.user_entries(*WANTED) == []
    [warning] = warnings(caplog)
    assert str(file) in warning


@corrupt
def test_corrupt_file_is_moved_aside_by_store(caplog, file, content):
    file.write_bytes(content)
    disk_cache.store([make_entry()])
    aside = file.with_name("ag_gemm.json.bad")
    assert aside.read_bytes() == content
    [warning] = warnings(caplog)
    assert str(file) in warning and aside.name in warning
    assert read_from_disk() == [make_entry()]


def test_bad_entries_are_reported_once_and_good_ones_used(caplog, file):
    content = json.loads(GOOD)
    del content["entries"][0]["config"]
    file.write_text(json.dumps(content))
    for _ in range(3):
        assert disk_cache.user_entries(*WANTED) == [make_entry()]
    [warning] = warnings(caplog)
    assert str(file) in warning and "1 " in warning


@wrong_table
def test_table_of_another_operator_or_gpu_has_no_entries_for_this_one(file, other):
    file.write_text(table.to_json([other]))
    assert disk_cache.user_entries(*WANTED) == []


@wrong_table
def test_table_of_another_operator_or_gpu_is_reported_once(caplog, file, other):
    file.write_text(table.to_json([other]))
    for _ in range(3):
        disk_cache.user_entries(*WANTED)
    [warning] = warnings(caplog)
    assert str(file) in warning


@wrong_table
def test_store_keeps_entries_of_another_operator_or_gpu_apart(file, other):
    file.write_text(table.to_json([other]))
    disk_cache.store([make_entry()])
    assert read_from_disk() == [make_entry()]
    # The previous entry is kept, in the file or in a file next to it, with its own operator and GPU.
    files = [path for path in file.parent.glob("ag_gemm.json*") if path.suffix != ".lock"]
    kept = [entry for path in files for entry in disk_cache.load(path)]
    assert [entry for entry in kept if entry != make_entry()] == [other]


@later
def test_table_of_a_later_format_is_not_modified(caplog, file, content):
    file.write_bytes(content)
    disk_cache.store([make_entry()])
    [warning] = warnings(caplog)
    assert str(file) in warning and "cannot be written" in warning
    assert disk_cache.user_entries(*WANTED) == [make_entry()]
    assert file.read_bytes() == content
    assert not file.with_name("ag_gemm.json.bad").exists()
    assert read_from_disk() == []


# ---- unwritable files and folders ----


def file_instead_of_cache_folder(folder):
    folder.write_text("")


def file_instead_of_gpu_folder(folder):
    folder.mkdir()
    (folder / "nvidia-testing").write_text("")


def folder_instead_of_table(folder):
    (folder / "nvidia-testing" / "ag_gemm.json").mkdir(parents=True)


def folder_instead_of_lock(folder):
    (folder / "nvidia-testing" / "ag_gemm.json.lock").mkdir(parents=True)


def read_only_folder(folder):
    if os.geteuid() == 0:
        pytest.skip("root can write to read-only folders")
    folder.mkdir(mode=0o500)


@pytest.mark.parametrize("break_cache", [None, file_instead_of_cache_folder, file_instead_of_gpu_folder])
def test_missing_file_is_not_reported(caplog, folder, break_cache):
    if break_cache:
        break_cache(folder)
    assert disk_cache.user_entries(*WANTED) == []
    assert warnings(caplog) == []


@pytest.mark.parametrize(
    "break_cache",
    [
        file_instead_of_cache_folder, file_instead_of_gpu_folder, folder_instead_of_table, folder_instead_of_lock,
        read_only_folder,
    ],
)
def test_failed_write_is_reported_and_entry_used_by_this_process(caplog, folder, break_cache):
    break_cache(folder)
    disk_cache.store([make_entry()])
    assert [str(disk_cache.path(*WANTED)) in warning for warning in warnings(caplog)] == [True]
    assert "cannot be written" in warnings(caplog)[0]
    assert disk_cache.user_entries(*WANTED) == [make_entry()]
    assert read_from_disk() == []


def test_failed_write_does_not_prevent_other_writes(folder):
    folder_instead_of_table(folder)
    disk_cache.store([make_entry(), make_entry("gemm_rs")])
    assert read_from_disk("gemm_rs") == [make_entry("gemm_rs")]


def test_store_leaves_no_temporary_files(file):
    disk_cache.store([make_entry()])
    assert file.exists()
    assert {path.name for path in file.parent.iterdir()} <= {file.name, f"{file.name}.lock"}


@pytest.mark.parametrize("error", [OSError("no space left"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_failed_store_leaves_only_the_old_file(monkeypatch, file, error):
    disk_cache.store([make_entry()])

    def fails(*_):
        raise error

    with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        patch.setattr(os, "replace", fails)
        disk_cache.store([make_entry(ms=2.0)])
    assert disk_cache.user_entries(*WANTED) == [make_entry(ms=2.0)]
    assert read_from_disk() == [make_entry()]
    assert {path.name for path in file.parent.iterdir()} <= {file.name, f"{file.name}.lock"}


# ---- several writers ----


def test_writer_gives_up_if_the_lock_is_held(monkeypatch, caplog, file):
    monkeypatch.setattr(disk_cache, "_LOCK_S", 0.2)
    start = time.monotonic()
    with FileLock(f"{file}.lock"):
        disk_cache.store([make_entry()])
    assert time.monotonic() - start < 5
    [warning] = warnings(caplog)
    assert str(file) in warning and "cannot be written" in warning
    assert not file.exists()
    assert disk_cache.user_entries(*WANTED) == [make_entry()]


def test_stale_lock_file_is_ignored(file):
    Path(f"{file}.lock").touch()
    disk_cache.store([make_entry()])
    assert read_from_disk() == [make_entry()]


WRITERS, STORES = 3, 10
WRITER = f"""
import sys
from tdkernels.autotune import disk_cache
from tests.autotune.entries import make_entry
disk_cache._LOCK_S = 100  # the machine may be busy
print("ready", flush=True)
sys.stdin.readline()
for number in range({STORES}):
    disk_cache.store([make_entry(shape=(int(sys.argv[1]), number, 1))])
"""


def start_writer(number):
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen([sys.executable, "-c", WRITER, str(number)], cwd=ROOT, text=True, **pipes)


def test_concurrent_writers_lose_no_entry_and_readers_see_whole_files(caplog, file):
    with contextlib.ExitStack() as stack:
        writers = [stack.enter_context(start_writer(number)) for number in range(WRITERS)]
        for writer in writers:
            assert writer.stdout.readline() == "ready\n", writer.stderr.read()
        for writer in writers:
            writer.stdin.write("go\n")
            writer.stdin.flush()
        counts = [0]
        while any(writer.poll() is None for writer in writers):
            counts.append(len(disk_cache.load(file)))
        assert [(writer.returncode, writer.stderr.read()) for writer in writers] == [(0, "")] * WRITERS
    assert warnings(caplog) == []
    assert counts == sorted(counts)  # no reader saw a missing or shorter table
    shapes = [(m, n, 1) for m in range(WRITERS) for n in range(STORES)]
    assert [entry.problem.shape for entry in read_from_disk()] == shapes
    assert table.from_json(file.read_text())[1] == 0
    assert {path.name for path in file.parent.iterdir()} <= {file.name, f"{file.name}.lock"}


# ---- clear ----

ENTRIES = [make_entry(), make_entry("gemm_rs"), make_entry(gpu="AMD Testing"), make_entry("gemm_rs", "AMD Testing")]


def test_clear_deletes_the_tables_of_given_operators(folder):
    disk_cache.store(ENTRIES)
    cleared = disk_cache.clear(["ag_gemm"])
    assert cleared == [folder / "amd-testing/ag_gemm.json", folder / "nvidia-testing/ag_gemm.json"]
    assert disk_cache.files() == [folder / "amd-testing/gemm_rs.json", folder / "nvidia-testing/gemm_rs.json"]
    assert disk_cache.user_entries("ag_gemm", GPU) == []  # also in this process
    assert disk_cache.user_entries("gemm_rs", GPU) == [make_entry("gemm_rs")]


def test_clear_deletes_only_tables(folder):
    disk_cache.store(ENTRIES)
    others = [folder / "other.json", folder / "nvidia-testing" / "notes.txt", folder / "nvidia-testing/deeper/a.json"]
    for other in others:
        other.parent.mkdir(exist_ok=True)
        other.write_text("{}")
    assert len(disk_cache.clear()) == len(ENTRIES)
    assert disk_cache.files() == []
    assert [other for other in others if not other.exists()] == []
    assert [entry for entry in ENTRIES if disk_cache.user_entries(entry.problem.operator, entry.problem.gpu)] == []


def test_clear_of_an_empty_cache(folder):
    assert disk_cache.clear() == []
    assert not folder.exists()
