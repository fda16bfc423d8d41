"""The table of crashes has every kind of sink and every window."""

from __future__ import annotations

from commands.chaos import matrix


def test_the_table_adds_up_the_passes_of_a_window_and_leaves_out_windows_that_a_sink_does_not_have() -> None:
    hits = {"files: files.renamed": 3, "files: files.renamed (pass 2)": 4, "keyed: keyed.after_commit": 1_000}
    assert matrix(hits).splitlines() == [
        "| killed at | files | keyed |",
        "| --- | --- | --- |",
        "| files.renamed | 7 |  |",
        "| keyed.after_commit |  | 1,000 |",
    ]
