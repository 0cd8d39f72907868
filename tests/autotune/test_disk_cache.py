"""Tuned configs on disk: found by other processes, and no file or folder, however broken, stops a program."""

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
from tests.autotune.entries import GPU, an_entry, cache_in

ROOT = Path(__file__).parents[2]
WANTED = "ag_gemm", GPU
SAME_SLUG = "NVIDIA-Testing"  # as GPU has


@pytest.fixture(autouse=True)
def folder(tmp_path):
    """A cache of the test's own, in a folder that is not there yet."""
    with cache_in(tmp_path / "cache") as folder:
        yield folder


@pytest.fixture
def file(folder):
    """Where entries of ``an_entry`` are, in a folder that is there."""
    file = folder / "nvidia-testing" / "ag_gemm.json"
    file.parent.mkdir(parents=True)
    return file


def on_disk(operator="ag_gemm", gpu=GPU):
    """What a process finds that has tuned nothing."""
    disk_cache.forget()
    return disk_cache.user_entries(operator, gpu)


def warnings(caplog):
    assert all(record.levelno == logging.WARNING for record in caplog.records if record.name == "tdkernels")
    return [record.getMessage() for record in caplog.records if record.name == "tdkernels"]


def by_another_process(file, entries):
    """Write a file as ``store`` of another process does."""
    aside = file.with_suffix(".new")
    aside.write_text(table.to_json(entries))
    os.replace(aside, file)


# ---- where, and what ----


def test_the_folder_is_the_variable_or_the_platforms(monkeypatch, folder):
    assert disk_cache.folder() == folder
    monkeypatch.setenv("TDKERNELS_CACHE_DIR", "")
    assert disk_cache.folder() == platformdirs.user_cache_path("tdkernels")
    monkeypatch.delenv("TDKERNELS_CACHE_DIR")
    assert disk_cache.folder() == platformdirs.user_cache_path("tdkernels")


def test_a_file_for_each_gpu_and_operator(folder):
    disk_cache.store([an_entry(), an_entry("gemm_rs"), an_entry(gpu="NVIDIA H200 NVL (80GB)")])
    assert [str(file.relative_to(folder)) for file in disk_cache.files()] == [
        "nvidia-h200-nvl-80gb/ag_gemm.json", "nvidia-testing/ag_gemm.json", "nvidia-testing/gemm_rs.json",
    ]
    assert disk_cache.path(*WANTED) == folder / "nvidia-testing" / "ag_gemm.json"


def test_what_is_stored_is_found():
    disk_cache.store([an_entry(), an_entry(shape=(1, 2, 3)), an_entry("gemm_rs", ms=2.0)])
    found = [an_entry(shape=(1, 2, 3)), an_entry()]
    assert sorted(disk_cache.user_entries(*WANTED), key=lambda entry: entry.problem.shape) == found
    assert on_disk() == found
    assert on_disk("gemm_rs") == [an_entry("gemm_rs", ms=2.0)]
    assert on_disk(gpu="NVIDIA Other") == []


def test_later_entries_win_and_the_others_stay():
    disk_cache.store([an_entry(ms=2.0), an_entry(shape=(1, 2, 3))])
    disk_cache.store([an_entry(ms=1.0)])
    assert on_disk() == [an_entry(shape=(1, 2, 3)), an_entry(ms=1.0)]


def test_entries_of_other_versions_stay_in_the_file():
    old, new = an_entry(versions={"torch": "2.13.0"}), an_entry(versions={"torch": "2.14.0"}, ms=2.0)
    disk_cache.store([old])
    disk_cache.store([new])
    assert on_disk() == [old, new]


# Prints how many entries it finds, and stores one more.
ANOTHER_PROCESS = """
from tdkernels.autotune import disk_cache
from tests.autotune.entries import GPU, an_entry, cache_in
print(len(disk_cache.user_entries("ag_gemm", GPU)))
disk_cache.store([an_entry(shape=(2, 2, 2))])
"""


def test_processes_find_what_the_other_has_stored():
    disk_cache.store([an_entry()])
    command = [sys.executable, "-c", ANOTHER_PROCESS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
    assert disk_cache.load(disk_cache.path(*WANTED)) == [an_entry(shape=(2, 2, 2)), an_entry()]


def test_a_file_that_changes_is_read_again(file):
    for ms in (1.0, 2.0):  # the size stays
        by_another_process(file, [an_entry(ms=ms)])
        assert disk_cache.load(file) == disk_cache.user_entries(*WANTED) == [an_entry(ms=ms)]
    file.unlink()
    assert disk_cache.load(file) == disk_cache.user_entries(*WANTED) == []


def test_what_comes_with_the_package_is_found_beside_the_users(monkeypatch, tmp_path):
    monkeypatch.setattr(disk_cache, "SHIPPED", tmp_path / "configs")
    shipped = tmp_path / "configs" / "nvidia-testing" / "ag_gemm.json"
    shipped.parent.mkdir(parents=True)
    shipped.write_text(table.to_json([an_entry()]))
    assert disk_cache.shipped_entries(*WANTED) == [an_entry()]
    assert disk_cache.user_entries(*WANTED) == disk_cache.shipped_entries("ag_gemm", SAME_SLUG) == []


# ---- broken files ----

GOOD = table.to_json([an_entry(), an_entry(shape=(1, 2, 3))]).encode()
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
of_another = pytest.mark.parametrize(
    "other",
    [an_entry("gemm_rs", shape=(1, 2, 3)), an_entry(gpu=SAME_SLUG, shape=(1, 2, 3))],
    ids=["operator", "gpu"],
)


@corrupt
def test_a_corrupt_file_is_reported_once_and_has_no_entries(caplog, file, content):
    file.write_bytes(content)
    for _ in range(3):
        assert disk_cache.load(file) == disk_cache.user_entries(*WANTED) == []
    [warning] = warnings(caplog)
    assert str(file) in warning


@corrupt
def test_a_corrupt_file_is_put_aside_when_something_is_stored(caplog, file, content):
    file.write_bytes(content)
    disk_cache.store([an_entry()])
    aside = file.with_name("ag_gemm.json.bad")
    assert aside.read_bytes() == content
    [warning] = warnings(caplog)
    assert str(file) in warning and aside.name in warning
    assert on_disk() == [an_entry()]


def test_bad_entries_are_reported_once_and_the_good_ones_are_used(caplog, file):
    content = json.loads(GOOD)
    del content["entries"][0]["config"]
    file.write_text(json.dumps(content))
    for _ in range(3):
        assert disk_cache.user_entries(*WANTED) == [an_entry()]
    [warning] = warnings(caplog)
    assert str(file) in warning and "1 " in warning


@of_another
def test_the_table_of_another_operator_or_gpu_has_nothing_for_this_one(file, other):
    file.write_text(table.to_json([other]))
    assert disk_cache.user_entries(*WANTED) == []


@of_another
def test_the_table_of_another_operator_or_gpu_is_reported_once(caplog, file, other):
    file.write_text(table.to_json([other]))
    for _ in range(3):
        disk_cache.user_entries(*WANTED)
    [warning] = warnings(caplog)
    assert str(file) in warning


@of_another
def test_entries_do_not_become_another_operators_or_gpus(file, other):
    file.write_text(table.to_json([other]))
    disk_cache.store([an_entry()])
    assert on_disk() == [an_entry()]
    # What was there is kept, in the file or beside it, and is still only of the operator and GPU that it is of.
    files = [path for path in file.parent.glob("ag_gemm.json*") if path.suffix != ".lock"]
    kept = [entry for path in files for entry in disk_cache.load(path)]
    assert [entry for entry in kept if entry != an_entry()] == [other]


@later
def test_a_table_of_a_later_format_is_left_alone(caplog, file, content):
    file.write_bytes(content)
    disk_cache.store([an_entry()])
    [warning] = warnings(caplog)
    assert str(file) in warning and "cannot be written" in warning
    assert disk_cache.user_entries(*WANTED) == [an_entry()]
    assert file.read_bytes() == content
    assert not file.with_name("ag_gemm.json.bad").exists()
    assert on_disk() == []


# ---- what cannot be written ----


def a_file_for_a_folder(folder):
    folder.write_text("")


def a_file_for_a_gpus_folder(folder):
    folder.mkdir()
    (folder / "nvidia-testing").write_text("")


def a_folder_for_a_file(folder):
    (folder / "nvidia-testing" / "ag_gemm.json").mkdir(parents=True)


def a_folder_for_a_lock(folder):
    (folder / "nvidia-testing" / "ag_gemm.json.lock").mkdir(parents=True)


def a_folder_that_is_read_only(folder):
    if os.geteuid() == 0:
        pytest.skip("root writes everywhere")
    folder.mkdir(mode=0o500)


@pytest.mark.parametrize("poison", [None, a_file_for_a_folder, a_file_for_a_gpus_folder])
def test_where_there_is_no_file_nothing_is_said(caplog, folder, poison):
    if poison:
        poison(folder)
    assert disk_cache.user_entries(*WANTED) == []
    assert warnings(caplog) == []


@pytest.mark.parametrize(
    "poison",
    [
        a_file_for_a_folder, a_file_for_a_gpus_folder, a_folder_for_a_file, a_folder_for_a_lock,
        a_folder_that_is_read_only,
    ],
)
def test_what_cannot_be_written_is_reported_and_used_by_this_process(caplog, folder, poison):
    poison(folder)
    disk_cache.store([an_entry()])
    assert [str(disk_cache.path(*WANTED)) in warning for warning in warnings(caplog)] == [True]
    assert "cannot be written" in warnings(caplog)[0]
    assert disk_cache.user_entries(*WANTED) == [an_entry()]
    assert on_disk() == []


def test_a_file_that_cannot_be_written_does_not_keep_others_from_being_written(folder):
    a_folder_for_a_file(folder)
    disk_cache.store([an_entry(), an_entry("gemm_rs")])
    assert on_disk("gemm_rs") == [an_entry("gemm_rs")]


def test_store_leaves_no_temporary_files(file):
    disk_cache.store([an_entry()])
    assert file.exists()
    assert {path.name for path in file.parent.iterdir()} <= {file.name, f"{file.name}.lock"}


@pytest.mark.parametrize("error", [OSError("no space left"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_a_store_that_fails_leaves_the_old_file_and_nothing_else(monkeypatch, file, error):
    disk_cache.store([an_entry()])

    def fails(*_):
        raise error

    with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        patch.setattr(os, "replace", fails)
        disk_cache.store([an_entry(ms=2.0)])
    assert disk_cache.user_entries(*WANTED) == [an_entry(ms=2.0)]
    assert on_disk() == [an_entry()]
    assert {path.name for path in file.parent.iterdir()} <= {file.name, f"{file.name}.lock"}


# ---- several writers ----


def test_a_writer_that_does_not_get_the_lock_gives_up(monkeypatch, caplog, file):
    monkeypatch.setattr(disk_cache, "_LOCK_S", 0.2)
    start = time.monotonic()
    with FileLock(f"{file}.lock"):
        disk_cache.store([an_entry()])
    assert time.monotonic() - start < 5
    [warning] = warnings(caplog)
    assert str(file) in warning and "cannot be written" in warning
    assert not file.exists()
    assert disk_cache.user_entries(*WANTED) == [an_entry()]


def test_the_lock_of_a_process_that_died_is_no_lock(file):
    Path(f"{file}.lock").touch()
    disk_cache.store([an_entry()])
    assert on_disk() == [an_entry()]


WRITERS, STORES = 4, 10
WRITER = f"""
import sys
from tdkernels.autotune import disk_cache
from tests.autotune.entries import an_entry
disk_cache._LOCK_S = 100  # the machine may be busy
print("ready", flush=True)
sys.stdin.readline()
for number in range({STORES}):
    disk_cache.store([an_entry(shape=(int(sys.argv[1]), number, 1))])
"""


def a_writer(number):
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen([sys.executable, "-c", WRITER, str(number)], cwd=ROOT, text=True, **pipes)


def test_writers_lose_nothing_and_readers_see_whole_files(caplog, file):
    with contextlib.ExitStack() as stack:
        writers = [stack.enter_context(a_writer(number)) for number in range(WRITERS)]
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
    assert counts == sorted(counts)  # it was never gone, and never shorter
    assert [entry.problem.shape for entry in on_disk()] == [(m, n, 1) for m in range(WRITERS) for n in range(STORES)]
    assert table.from_json(file.read_text())[1] == 0
    assert {path.name for path in file.parent.iterdir()} <= {file.name, f"{file.name}.lock"}


# ---- clear ----

EVERYTHING = [an_entry(), an_entry("gemm_rs"), an_entry(gpu="AMD Testing"), an_entry("gemm_rs", "AMD Testing")]


def test_clear_deletes_what_there_is_of_some_operators(folder):
    disk_cache.store(EVERYTHING)
    cleared = disk_cache.clear(["ag_gemm"])
    assert cleared == [folder / "amd-testing/ag_gemm.json", folder / "nvidia-testing/ag_gemm.json"]
    assert disk_cache.files() == [folder / "amd-testing/gemm_rs.json", folder / "nvidia-testing/gemm_rs.json"]
    assert disk_cache.user_entries("ag_gemm", GPU) == []  # this process has forgotten it too
    assert disk_cache.user_entries("gemm_rs", GPU) == [an_entry("gemm_rs")]


def test_clear_deletes_all_tables_and_nothing_else(folder):
    disk_cache.store(EVERYTHING)
    others = [folder / "other.json", folder / "nvidia-testing" / "notes.txt", folder / "nvidia-testing/deeper/a.json"]
    for other in others:
        other.parent.mkdir(exist_ok=True)
        other.write_text("{}")
    assert len(disk_cache.clear()) == len(EVERYTHING)
    assert disk_cache.files() == []
    assert [other for other in others if not other.exists()] == []
    assert [entry for entry in EVERYTHING if disk_cache.user_entries(entry.problem.operator, entry.problem.gpu)] == []


def test_there_may_be_nothing_to_clear(folder):
    assert disk_cache.clear() == []
    assert not folder.exists()
