"""`python -m tdkernels tune`, `cache` and `explain`: arguments, output and stored entries."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tdkernels.__main__ import main
from tdkernels.autotune import disk_cache, table
from tests.autotune.entries import GPU, cache_in, make_entry
from tests.support.programs import run_here

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def folder(tmp_path):
    with cache_in(tmp_path / "cache") as folder:
        yield folder


def run_cli(*arguments):
    """Run the command line in a new process, which starts the ranks; return exit code, stdout and stderr."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [sys.executable, "-m", "tdkernels", *arguments], capture_output=True, text=True, timeout=240, env=environment
    )
    return run.returncode, run.stdout, run.stderr


def test_tune_stores_the_entry_and_does_not_tune_again(folder):
    tune = ["tune", "ag_gemm", "--shape", "32x32x16", "--dtype", "fp32", "--device", "cpu", "--nproc", "2"]
    code, out, err = run_here(main, tune)
    assert code == 0 and "nothing is kept" in out, err
    assert not folder.exists(), "a rehearsal on CPU ranks must not store its result"
    tune.append("--keep")
    code, out, err = run_here(main, tune)
    assert code == 0, err
    assert "rehearsal" in out and "ag_gemm 32x32x16 float32 nk on 2 x cpu" in out
    assert "method=torch" in out and "efficiency" in out and "candidates" in out
    (entry,) = disk_cache.load(folder / "cpu" / "ag_gemm.json")
    assert entry.problem.shape == (32, 32, 16) and entry.plain_ms > 0
    code, out, err = run_here(main, tune)
    assert code == 0 and "is in the cache" in out and "nothing to tune" in out


def test_tune_prints_only_json_on_stdout(folder):
    tune = ["tune", "ag_gemm", "--shape", "32x32x16", "--dtype", "fp32", "--device", "cpu", "--nproc", "2", "--json"]
    code, out, err = run_cli(*tune, "--keep")
    assert code == 0 and "rehearsal" in err and "efficiency" in err, err
    (entry,) = json.loads(out)
    assert entry["operator"] == "ag_gemm" and entry["shape"] == [32, 32, 16]
    code, out, err = run_here(main, tune)
    assert code == 0 and json.loads(out) == [] and "is in the cache" in err


def test_tune_with_layout_on_one_rank(folder, capfd):
    tune = ["tune", "flash_decode", "--shape", "1x1x2x1x16x16x8", "--dtype", "fp32", "--device", "cpu", "--keep"]
    assert main([*tune, "--layout", "paged", "--nproc", "1"]) == 0
    out = capfd.readouterr().out  # printed by the rank
    assert "flash_decode 1x1x2x1x16x16x8 float32 paged on 1 x cpu" in out
    assert "method=fused block_n=" in out and "method=torch" in out
    (entry,) = disk_cache.load(folder / "cpu" / "flash_decode.json")
    assert (entry.problem.layout, entry.problem.world_size) == ("paged", 1)


def test_tune_covers_the_layers_of_a_model(folder, monkeypatch):
    from tdkernels import model_shapes

    monkeypatch.setitem(model_shapes.MODELS, "tiny", model_shapes.Model(16, 24, 2, 1, head=8))
    model = ["--model", "tiny", "--tokens", "8,7", "--dtype", "fp32"]
    assert main(["tune", *model, "--device", "cpu", "--tp", "2", "--keep"]) == 0
    found = {file.stem: {entry.problem.shape for entry in disk_cache.load(file)} for file in disk_cache.files()}
    # 7 rows are not divisible by 2 ranks. ag_gemm and gemm_rs skip them with a message; gemm_ar does not divide M.
    assert found == {
        "ag_gemm": {(8, 32, 16), (8, 48, 16)},
        "gemm_rs": {(8, 16, 16), (8, 16, 24)},
        "gemm_ar": {(m, 16, k) for m in (8, 7) for k in (16, 24)},
    }


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "nothing to tune is named"),
        (["ag_gemm"], "give ag_gemm with --shape MxNxK"),
        (["--shape", "8x8x8"], "needs the operator"),
        (["nonsense", "--shape", "8x8x8"], "operator must be one of ag_attention, ag_gemm, all_gather, all_re"),
        (["ag_gemm", "--shape", "8x8"], "3 positive sizes"),
        (["ag_gemm", "--shape", "8xx8"], "whole numbers"),
        (["ag_gemm", "--shape", "7x8x8", "--nproc", "2"], "M = 7 is not divisible by 2 ranks"),
        (["gemm_ar", "--shape", "7x7x7", "--nproc", "2"], "K = 7 is not divisible by 2 ranks"),
        (["gemm_rs", "--shape", "8x8x9", "--nproc", "2"], "K = 9 is not divisible by 2 ranks"),
        (["ag_gemm", "--shape", "8x8x8", "--nproc", "1"], "at least 2 ranks"),
        (["ag_gemm", "--shape", "8x8x8", "--nproc", "many"], "--nproc must be auto or a number"),
        (["flash_decode", "--shape", "1x1x4x2x16x16x8", "--nproc", "0"], "a number of at least 1 rank, not '0'"),
        (["ag_gemm", "--shape", "8x8x8", "--layout", "full"], "ag_gemm must be one of 'nk', 'kn', 'scaled'"),
        (["--model", "gpt-3", "--layout", "full"], "--layout of ag_gemm must be one of 'nk', 'kn', 'scaled'"),
        (["ag_attention", "--shape", "8x8"], "6 positive sizes, BATCH x SEQ x HEADS x KV_HEADS x D x DV, not (8, 8)"),
        (["ag_attention", "--shape", "1x8x2x1x16x16", "--layout", "nk"], "'causal zigzag', 'full', not 'nk'"),
        (["ag_attention"], "--shape BATCHxSEQxHEADSxKV_HEADSxDxDV, and --layout if not 'causal contiguous': 'ca"),
        (["--model", "gpt-0"], "--model must be one of"),
        (["--model", "gpt-3", "--tokens", "few"], "--tokens must be whole numbers"),
    ],
)
def test_tune_rejects_invalid_arguments(arguments, message, capsys, folder):
    assert main(["tune", "--device", "cpu", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not folder.exists()


def test_export_and_merge_keep_all_entries(folder, tmp_path, capsys):
    kept = [make_entry(shape=(2, 3, 4)), make_entry(shape=(5, 6, 7), ms=2.5), make_entry("gemm_rs", gpu="AMD Testing")]
    disk_cache.store(kept)
    assert main(["cache", "export", str(tmp_path / "out")]) == 0
    assert main(["cache", "clear"]) == 0
    assert disk_cache.files() == []
    disk_cache.forget()
    newer = make_entry(shape=(2, 3, 4), ms=0.25)
    disk_cache.store([make_entry(shape=(2, 3, 4), ms=9.0)])
    disk_cache.forget()
    (tmp_path / "one.json").write_text(table.to_json([newer]))
    assert main(["cache", "merge", str(tmp_path / "out"), str(tmp_path / "one.json")]) == 0
    assert disk_cache.user_entries("gemm_rs", "AMD Testing") == [kept[2]]
    found = disk_cache.user_entries("ag_gemm", GPU)
    assert sorted(entry.ms for entry in found) == [0.25, 2.5], "merged entries win, and later files win"


def test_export_writes_only_tables(tmp_path):
    disk_cache.store([make_entry()])
    assert main(["cache", "export", str(tmp_path / "out")]) == 0
    assert [p.name for p in (tmp_path / "out").rglob("*") if p.is_file()] == ["ag_gemm.json"]


def test_export_of_some_operators(tmp_path):
    disk_cache.store([make_entry()])
    disk_cache.store([make_entry("gemm_rs")])
    assert main(["cache", "export", str(tmp_path / "out"), "gemm_rs"]) == 0
    assert [file.stem for file in disk_cache.files(tmp_path / "out")] == ["gemm_rs"]


@pytest.mark.parametrize("newest", [False, True])
def test_export_to_a_folder_with_older_versions(newest, tmp_path):
    folder = tmp_path / "out"
    disk_cache.store([make_entry(shape=(2, 3, 4), ms=9.0), make_entry(shape=(5, 6, 7))])
    assert main(["cache", "export", str(folder)]) == 0
    disk_cache.clear()
    disk_cache.forget()
    fresh = make_entry(shape=(2, 3, 4), ms=1.0)
    disk_cache.store([dataclasses.replace(fresh, versions={**fresh.versions, "kernels": "new"}, when="2100-01-01")])
    assert main(["cache", "export", str(folder), *(["--newest"] if newest else [])]) == 0
    [file] = disk_cache.files(folder)
    found = sorted(entry.ms for entry in disk_cache.load(file) if entry.problem.shape == (2, 3, 4))
    assert found == ([1.0] if newest else [1.0, 9.0])
    assert len({entry.problem for entry in disk_cache.load(file)}) == 2
    assert file.read_text() == table.to_json(disk_cache.load(file))


@pytest.mark.parametrize("text", ["", "{}", '{"format": 2}', "[1]"])
def test_merge_of_an_invalid_table(text, tmp_path, capsys):
    (tmp_path / "bad.json").write_text(text)
    good = tmp_path / "good.json"
    good.write_text(table.to_json([make_entry()]))
    assert main(["cache", "merge", str(tmp_path / "bad.json"), str(good), str(tmp_path / "missing.json")]) == 1
    assert disk_cache.user_entries("ag_gemm", GPU) == [make_entry()], "valid files are still merged"
    errors = capsys.readouterr().err
    assert "bad.json" in errors and "missing.json" in errors and "good.json" not in errors


# Names that would leave the cache folder. They must be rejected with an error that names the file and the field.
BAD_NAMES = {
    "operator": [
        "../../victim/settings", "{victim}", "..", ".", "", "a/b", "a\\b", "a.b", "a\0b", "a\n", "1a", "a" * 300
    ],
    "gpu": ["", "a\0b", "a\n", "a" * 300],
}


@pytest.mark.parametrize("field, name", [(field, name) for field, names in BAD_NAMES.items() for name in names])
def test_merge_rejects_names_outside_the_cache(field, name, folder, tmp_path, capsys):
    victim = tmp_path / "victim" / "settings.json"
    victim.parent.mkdir()
    victim.write_text('{"color": "dark"}')
    bad = json.loads(table.to_json([make_entry()]))
    bad[field] = name.format(victim=victim.with_suffix(""))
    source = tmp_path / "exchanged.json"
    source.write_text(json.dumps(bad))
    assert main(["cache", "merge", str(source)]) == 1
    error = capsys.readouterr().err
    assert str(source) in error and f"{field} must be" in error and len(error) < 1000
    assert victim.read_text() == '{"color": "dark"}'
    remaining = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert sorted(remaining) == sorted([victim, source]) and not folder.exists()


@pytest.mark.parametrize("gpu", ["../../victim", "/victim", "..", "~", "a/../../b"])
def test_merge_keeps_any_gpu_name_inside_the_cache(gpu, folder, tmp_path):
    source = tmp_path / "exchanged.json"
    source.write_text(table.to_json([make_entry(gpu=gpu)]))
    assert main(["cache", "merge", str(source)]) == 0
    assert disk_cache.user_entries("ag_gemm", gpu) == [make_entry(gpu=gpu)]
    outside = [path for path in tmp_path.rglob("*") if path.is_file() and folder not in path.parents]
    assert outside == [source]
    assert {file.parent.parent for file in folder.rglob("*.json")} == {folder}


def test_show_and_path(folder, capsys):
    assert main(["cache", "show"]) == 0
    assert "nothing was tuned yet" in capsys.readouterr().out
    disk_cache.store([make_entry(shape=(8192, 11, 22))])
    assert main(["cache", "show"]) == 0
    assert "8192x11x22" in capsys.readouterr().out
    assert main(["cache", "show", "gemm_rs"]) == 0
    assert "8192x11x22" not in capsys.readouterr().out
    assert main(["cache", "show", "--shipped", "gemm_rs"]) == 0
    assert "H200" in capsys.readouterr().out
    assert main(["cache", "path"]) == 0
    assert capsys.readouterr().out.strip() == str(folder)


def test_show_omits_the_speedup_over_another_baseline(capsys):
    """An entry whose baseline was replaced by a better one keeps its time in the file."""
    for baseline, speedup in (("", "?"), ("flash attention", "2.25")):
        disk_cache.store([make_entry("flash_decode", plain_ms=2.25, baseline=baseline)])
        assert main(["cache", "show", "flash_decode"]) == 0
        out = capsys.readouterr().out
        assert speedup in out and ("2.25" in out) == (speedup == "2.25")
    disk_cache.store([make_entry("retired_operator", plain_ms=2.25)])
    assert main(["cache", "show"]) == 0


def test_show_as_json_and_by_number_of_ranks(capsys):
    disk_cache.store([make_entry(shape=(8192, 11, 22))])
    ranks = make_entry().problem.world_size
    for number, count in ((ranks, 1), (ranks + 1, 0)):
        assert main(["cache", "show", "--json", "--nproc", str(number)]) == 0
        entries = json.loads(capsys.readouterr().out)
        assert len(entries) == count
    assert main(["cache", "show", "--json", "ag_gemm"]) == 0
    (entry,) = json.loads(capsys.readouterr().out)
    assert entry["operator"] == "ag_gemm" and entry["gpu"] == GPU and entry["shape"] == [8192, 11, 22]
    assert set(entry["versions"]) == set(make_entry().versions)


def test_show_fits_100_columns(capsys):
    assert main(["cache", "show", "--shipped"]) == 0
    out = capsys.readouterr().out
    assert "ag_gemm" in out and max(map(len, out.splitlines())) <= 100


@pytest.mark.parametrize("action", ["show", "clear", "export"])
def test_unknown_operator_is_an_error(action, tmp_path, capsys):
    folder = [str(tmp_path / "out")] if action == "export" else []
    assert main(["cache", action, *folder, "ag_gem"]) == 2
    assert "did you mean 'ag_gemm'?" in capsys.readouterr().err


def test_explain(capsys):
    assert main(["explain", "ag_gemm", "--shape", "64x96x128", "--tp", "2"]) == 0
    text = capsys.readouterr().out
    assert "ag_gemm 64x96x128 bfloat16 nk on 2 x" in text and "came from" in text
    assert main(["explain", "ag_gemm", "--shape", "64x96x128", "--tp", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["problem"]["shape"] == [64, 96, 128] and found["method"] == found["config"]["method"]


@pytest.mark.parametrize("arguments, message", [
    (["ag_gem", "--shape", "8x8x8"], "did you mean 'ag_gemm'?"), (["ag_gemm", "--shape", "8x8"], "3 positive sizes"),
    (["ag_gemm", "--shape", "8xfoo"], "whole numbers"), (["ag_gemm", "--shape", "7x8x8", "--tp", "2"], "M = 7 is not"),
])
def test_explain_rejects_invalid_arguments(arguments, message, capsys):
    assert main(["explain", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("explain: ") and message in error


def test_failed_clear_is_an_error_without_traceback(folder, monkeypatch, capsys):
    disk_cache.store([make_entry()])

    def refuse(*_, **__):
        raise PermissionError("not yours")

    monkeypatch.setattr(Path, "unlink", refuse)
    assert main(["cache", "clear"]) == 1
    assert "not yours" in capsys.readouterr().err


def test_clear_keeps_foreign_files(folder):
    foreign = folder / "editor" / "settings.json"
    foreign.parent.mkdir(parents=True)
    foreign.write_text(json.dumps({"a": 1}))
    disk_cache.store([make_entry()])
    assert main(["cache", "clear"]) == 0
    assert disk_cache.files() == [foreign]
