"""Page of the fault campaigns, from summaries of `make chaos`."""

import json

from bench.reliability import faults_report
from bench.report import main as report
from bench.report import rows as all_rows


def summary(device, **changes):
    return {
        "cases": 3, "cases_by_fault": {"kill": 2, "none": 1}, "device": device, "seconds": 7, "seeds": [[4, 7]],
        "wrong": 0, "hangs": 1, "longest_error_beyond_the_timeout_s": 0.25,
        "calls_by_fault": {
            "kill, faulty rank": {"killed": 2},
            "kill, healthy ranks": {"LATE": 1, "PeerTimeoutError": 5, "correct": 9},
            "none, healthy ranks": {"correct": 16},
        },
        **changes,
    }


def test_campaigns_have_a_page(tmp_path):
    assert faults_report.text(faults_report.read(tmp_path)) == ""
    (tmp_path / "reliability").mkdir()
    on_links = {
        "cases_by_world_size": {"8": 1, "4": 2}, "gpus": ["NVIDIA Testing"], "skipped": 2, "revisions": ["0123456789+"],
    }
    for found in (summary("shared"), summary("cuda", **on_links)):
        (tmp_path / "reliability" / f"chaos-{found['device']}.json").write_text(json.dumps(found))
    rows = all_rows.read(tmp_path)
    text = report.pages(rows)["tables/faults.md"]
    one, on_links = text.split("### A GPU for each rank, NVIDIA Testing: `chaos-cuda.json`")
    assert "### Ranks that share a GPU: `chaos-shared.json`\n\n3 cases in 7 s, seeds 4 to 6. Wrong results: 0." in one
    assert "3 cases (2 on 4 ranks, 1 on 8 ranks) in 7 s, seeds 4 to 6, revision 0123456+. 2 further" in on_links
    assert "Hangs or late errors: 1. Errors were raised at most 0.2 s after the timeout." in on_links
    assert "| fault of one rank | cases | PeerTimeoutError | correct | LATE |" in on_links
    assert "| kill | 2 | 5 | 9 | 1 |\n| none | 1 | 0 | 16 | 0 |" in on_links
    assert "- [Fault campaigns](tables/faults.md)" in report.pages(rows)["README.md"]
