"""The table of rows: finished, missing, quoted and unfinished rows, in each output format."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from made_results import ROWS, change, result, scored, write_evaluation, write_run
from reefknot.lab.recipes.file import Row
from reefknot.lab.reports.cells import format_perplexity
from reefknot.lab.reports.rows import TableRow, join_runs
from reefknot.lab.reports.table import Table, build_table, print_table, rows_from_recipe, to_markdown
from reefknot.lab.runs.loading import collect_runs, load_run


def recipe_rows() -> list[TableRow]:
    rows = [TableRow(name, about["paper"], about["total"]) for name, about in ROWS.items()]
    not_run = TableRow("Small + PR", {"valid": 116.0, "test": 111.7}, 4_691_800)
    quoted = TableRow("KN 5-gram", {"test": 141.0}, quoted=True)
    return [quoted, *rows, not_run]


def cells(table: Table, name: str) -> dict[str, str]:
    """Return the cells of a row by group and title."""
    n = table.names.index(name)
    return {f"{column.group} {column.title}": column.cells[n] for column in table.columns}


def print_to_text(rows: list[TableRow], width: int) -> str:
    out = io.StringIO()
    print_table(rows, Console(file=out, width=width))
    return out.getvalue()


def test_row_shows_mean_over_seeds_and_paper_score(runs: Path) -> None:
    table = build_table(join_runs(recipe_rows(), collect_runs([runs])))
    row = cells(table, "Small")
    assert row["size parameters"] == "4,651,600"
    assert row["test test"] == "117.2 ± 0.7"
    assert row["test paper"] == "114.5"
    assert row["test diff"] == "+2.4 %"
    assert row["time epochs"] == "13"
    assert row["time seconds"] == "150"
    assert row["time s/epoch"] == "11.6"
    assert row["cost tokens/s"] == "80,000"
    assert row["cost memory"] == "700 MB"
    assert row["cost seeds"] == "2"
    assert cells(table, "Small + WT")["validation diff"] == "−0.8 %"
    assert [table.names[n] for n in table.best] == ["Small + WT + PR"]


def test_missing_and_quoted_rows(runs: Path) -> None:
    table = build_table(join_runs(recipe_rows(), collect_runs([runs])))
    assert cells(table, "Small + PR")["test test"] == "not run"
    assert cells(table, "Small + PR")["test paper"] == "111.7"
    assert cells(table, "Small + PR")["cost seeds"] == ""
    quoted = cells(table, "KN 5-gram")
    assert quoted["test paper"] == "141.0"
    assert quoted["test test"] == ""


def test_unfinished_row_shows_its_last_score(tmp_path: Path) -> None:
    rows = join_runs([], [load_run(write_run(tmp_path, "Small"))])
    row = cells(build_table(rows), "Small")
    assert row["test test"] == "unfinished"
    assert row["validation valid"].startswith("so far 12")
    assert row["cost seeds"] == "0 of 1"


def test_unfinished_sub_word_row_says_per_sub_word(tmp_path: Path) -> None:
    rows = join_runs([], [load_run(write_run(tmp_path, "Small", vocabulary={"bpe": {"merges": 9}}))])
    assert cells(build_table(rows), "Small")["validation valid"].endswith(" per sub-word")


def test_only_finished_seeds_are_averaged(tmp_path: Path) -> None:
    write_run(tmp_path, "Small", 0, result("Small", 0))
    write_run(tmp_path, "Small", 1)
    row = cells(build_table(join_runs([], collect_runs([tmp_path]))), "Small")
    assert row["test test"] == "116.7"
    assert row["cost seeds"] == "1 of 2"


def test_empty_columns_are_dropped(tmp_path: Path) -> None:
    write_run(tmp_path, "Small", 0, result("Small", 0, paper={}))
    table = build_table(join_runs([], collect_runs([tmp_path])))
    assert [column.title for column in table.columns] == [
        "parameters",
        "valid",
        "test",
        "unknown words",
        "epochs",
        "seconds",
        "s/epoch",
        "tokens/s",
        "memory",
        "seeds",
    ]
    assert table.best == set()


def test_protocol_scores_are_compared_with_the_paper(tmp_path: Path) -> None:
    for seed, test in enumerate((114.0, 115.0)):
        protocol = {"name": "zaremba", "valid": {"perplexity": 120.0}, "test": {"perplexity": test}}
        write_run(tmp_path, "Small", seed, result("Small", seed, protocol=protocol))
    table = build_table(join_runs(recipe_rows(), collect_runs([tmp_path])))
    row = cells(table, "Small")
    assert row["test test"] == "117.2 ± 0.7"
    assert row["test paper protocol"] == "114.5 ± 0.7"
    assert row["test diff"] == "+0.0 %"
    assert row["validation paper protocol"] == "120.0 ± 0.0"
    (note,) = table.notes
    assert note.startswith("paper protocol: ")
    assert note.endswith("(zaremba); diff compares this score with the paper's")
    (unpublished,) = build_table(
        [replace(row, paper={}) for row in join_runs(recipe_rows(), collect_runs([tmp_path]))]
    ).notes
    assert unpublished.endswith("(zaremba)")


def test_training_perplexity_is_shown_if_scored(tmp_path: Path) -> None:
    paper = {"train": 40.0, "test": 114.5}
    write_run(tmp_path, "Small", 0, result("Small", 0, train=scored(38.0), paper=paper))
    row = cells(build_table(join_runs([], collect_runs([tmp_path]))), "Small")
    assert (row["training train"], row["training paper"], row["training diff"]) == ("38.0", "40.0", "−5.0 %")
    unscored = join_runs([], [load_run(write_run(tmp_path / "other", "Small", 0, result("Small", 0, paper=paper)))])
    assert "training" not in {column.group for column in build_table(unscored).columns}


def test_epochs_are_shown_next_to_the_recipes(tmp_path: Path) -> None:
    changed = [change("training.epochs", 1000, 13), change("training.batch", 20, 40)]
    write_run(tmp_path, "Small", 0, result("Small", 0, changed=changed))
    for seed, epochs in enumerate((13, 9)):
        folder = write_run(tmp_path, "Small + WT", seed, result("Small + WT", seed))
        lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
        (folder / "metrics.jsonl").write_text("".join(lines[: 4 * epochs]))
    table = build_table(join_runs([], collect_runs([tmp_path])))
    short = cells(table, "Small")
    assert (short["time epochs"], short["time s/epoch"]) == ("13 of 1000", "11.6")
    stopped = cells(table, "Small + WT †")
    assert (stopped["time epochs"], stopped["time s/epoch"]) == ("9–13 of 13", "11.6"), "the faster seed counts"
    assert table.notes[0] == "† stopped early"
    assert table.notes[1].startswith("Small: settings differ from the recipe (training.epochs: 1000 -> 13;")


def test_runs_measured_in_updates_show_nothing_per_epoch(tmp_path: Path) -> None:
    """Such runs may end in the middle of an epoch."""
    training = result("Small", 0)["training"] | {"epochs": None}
    write_run(tmp_path, "Small", 0, result("Small", 0, training=training))
    rows = [TableRow("Small", {"test": 114.5, "hours": 30.0}), TableRow("Small + WT", {"hours": 70.0})]
    rows = join_runs(rows, collect_runs([tmp_path]))
    table = build_table(rows)
    ran, waiting = (cells(table, name) for name in ("Small", "Small + WT"))
    assert (ran["time updates"], ran["time paper hours"], waiting["time paper hours"]) == ("30,199", "30", "70")
    assert waiting["time updates"] == ""
    assert not {"time epochs", "time s/epoch"} & set(ran)
    assert table.notes == ()  # no run stopped early
    titles = (
        "| row | parameters | valid | test | paper | diff | unknown words | updates | paper hours | tokens/s | seeds |"
    )
    assert to_markdown(rows).splitlines()[0] == titles


def test_unknown_words_stand_next_to_the_perplexity(tmp_path: Path) -> None:
    write_run(tmp_path, "Small", 0, result("Small", 0, valid=scored(9.0, unknown=0), test=scored(9.0, unknown=0)))
    write_run(tmp_path, "Small + WT", 0, result("Small + WT", 0, test=scored(9.0, unknown=26_378)))
    old = scored(9.0)
    del old["text"]
    write_run(tmp_path, "Small + WT + PR", 0, result("Small + WT + PR", 0, valid=old, test=old))
    table = build_table(join_runs([], collect_runs([tmp_path])))
    shares = {name.rstrip(" †‡§"): cells(table, name)["unknown words unknown words"] for name in table.names}
    assert shares == {"Small": "0 %", "Small + WT": "0.1 % / 32.0 %", "Small + WT + PR": "not recorded"}
    (warning,) = (note for note in table.notes if note.startswith("warning"))
    assert re.match("warning: Small [+] WT .: more than 5% of the words are unknown and scored as <unk>", warning)


def test_changes_shared_by_all_rows_are_noted_once(tmp_path: Path) -> None:
    for row in ("Small", "Small + WT"):
        write_run(tmp_path, row, 0, result(row, 0, changed=[change("training.epochs", 20, 13)]))
    notes = build_table(join_runs(recipe_rows(), collect_runs([tmp_path]))).notes
    assert notes == (
        "Every row: settings differ from the recipe (training.epochs: 20 -> 13)",
        "Every row: trained for fewer epochs than in the recipe or the paper, so not comparable with the paper's "
        "scores; there is no learning curve of the authors to compare with",
    )


def test_unstarted_averaging_and_grid_edges_are_noted(tmp_path: Path) -> None:
    """One row never began averaging, and the best value of one search is at the edge of its grid."""
    averaging = {"averaging": {"start": "nonmonotone", "interval": 5}}
    for row, epoch in (("Small", None), ("Small + WT", 10)):
        training = result(row, 0)["training"] | {"averaged_from_epoch": epoch}
        run = write_run(tmp_path, row, 0, result(row, 0, training=training), training=averaging)
        search = {"text": "the valid text", "best": {"lambda": 0.1}, "edges": ["lambda"] if epoch else []}
        write_evaluation(run, "dynamic", 90.0, search=search)
    notes = build_table(join_runs([], collect_runs([tmp_path]))).notes
    assert "Small: averaging had not begun when training ended" in notes
    assert "Small + WT: the best epoch was before averaging began" in notes
    assert "best value at the edge of the search grid: Small + WT + dynamic evaluation (lambda)" in notes
    assert len(notes) == 3
    at_once = {"averaging": {"start": "at_once"}}
    other = write_run(tmp_path / "other", "Small", 0, result("Small", 0), training=at_once)
    assert build_table(join_runs([], [load_run(other)])).notes == ()


def test_changed_settings_are_not_compared_with_the_paper(tmp_path: Path) -> None:
    changed = [change("corpus.tokens", None, 20000), *(change(f"encoder.setting{n}", 1, 2) for n in range(10))]
    write_run(tmp_path, "Small", 0, result("Small", 0, changed=changed))
    table = build_table(join_runs(recipe_rows(), collect_runs([tmp_path])))
    row = cells(table, "Small")
    assert row["test paper"] == "114.5"
    assert "test diff" not in row
    (note,) = table.notes
    assert note.startswith("Small: settings differ from the recipe (corpus.tokens: not set -> 20000; encoder.setting0")
    assert note.endswith("; and 7 more)")


def timed_rows() -> list[TableRow]:
    """Return rows of two corpora for which the paper reports only seconds."""
    paper = {"Small": 20.0, "Small + WT": 22.0, "Small + WT + PR": 60.0, "other": 40.0, "other + WT": 100.0}
    texts = {name: "wikitext-2" if name.startswith("other") else None for name in paper}
    return [TableRow(name, {"seconds": seconds}, corpus=texts[name]) for name, seconds in paper.items()]


def test_table_of_seconds_shows_times_of_the_first_row(tmp_path: Path) -> None:
    for row, seconds in (("Small", 13.0), ("Small + WT", 26.0)):
        record = result(row, 0)
        write_run(tmp_path, row, 0, record | {"training": record["training"] | {"seconds": seconds}})
    rows = join_runs(timed_rows(), collect_runs([tmp_path]))
    lines = to_markdown(rows).splitlines()
    assert lines[0] == "| row | parameters | s/epoch | paper | times first | paper | epochs | seeds |"
    assert lines[2:7] == [
        "| Small | 4,651,600 | 1.00 | 20 | 1.00 | 1.00 | 13 | 1 |",
        "| Small + WT | 2,651,600 | 2.00 | 22 | 2.00 | 1.10 | 13 | 1 |",
        "| Small + WT + PR |  | not run | 60 |  | 3.00 |  |  |",
        "| other |  | not run | 40 |  | 1.00 |  |  |",
        "| other + WT |  | not run | 100 |  | 2.50 |  |  |",
    ]
    assert build_table(rows).best == set()
    assert (
        build_table(timed_rows()).columns[2].title == "times first"
    )  # a column for our times, although there are none yet


def test_perplexities_are_shown_next_to_seconds(runs: Path) -> None:
    rows = [replace(row, paper=row.paper | {"seconds": 20.0}) for row in recipe_rows()]
    titles = [column.title for column in build_table(join_runs(rows, collect_runs([runs]))).columns]
    assert titles[:5] == ["parameters", "s/epoch", "paper", "times first", "paper"]
    assert {"valid", "test"} <= set(titles)
    assert titles.count("s/epoch") == 1


def skip_gram_record(row: str, seed: int, rhos: dict[str, float]) -> dict[str, Any]:
    """Return the record of a skip-gram run: no perplexity, one judgement per end."""
    record = result("Small", seed, recipe="press2017/table2", row=row, paper={})
    absent = ("valid", "test", "best", "frequency", "samples")
    judged = {
        end: [{"name": "MEN", "rho": rho, "low": 0.0, "high": 1.0, "pairs": 998, "of": 3000}]
        for end, rho in rhos.items()
    }
    return {key: value for key, value in record.items() if key not in absent} | {"similarity": judged}


def test_table_of_word_similarity_shows_both_ends(tmp_path: Path) -> None:
    papers = {"input": {"MEN": 0.66, "SimLex-999": 0.3}, "output": {"MEN": 0.61, "SimLex-999": 0.29}}
    for seed, rhos in enumerate(({"input": 0.5, "output": -0.25}, {"input": 0.6, "output": -0.25})):
        write_run(tmp_path, "Small", seed, skip_gram_record("untied", seed, rhos))
    rows = [
        TableRow("untied", recipe="press2017/table2", paper_similarity=papers),
        TableRow("tied", recipe="press2017/table2", paper_similarity={"tied": {"MEN": 0.5}}),
    ]
    table = build_table(join_runs(rows, collect_runs([tmp_path])))
    assert {group for group, _ in table.groups} == {"size", "SimLex-999", "MEN", "time", "cost"}
    by_group = {group: [column.cells for column in columns] for group, columns in table.groups}
    assert by_group["MEN"] == [("0.55 ± 0.07 / −0.25 ± 0.00", ""), ("0.66 / 0.61", "0.50")]
    # The paper's scores are shown without ours, and a row without runs says "not run" once.
    assert by_group["SimLex-999"] == [("", "not run"), ("0.30 / 0.29", "")]
    assert any("MEN 998 of 3,000" in note for note in table.notes)
    assert not table.best


def test_word_similarity_is_shown_next_to_perplexity(tmp_path: Path) -> None:
    similarity = {"tied": [{"name": "MEN", "rho": 0.2, "low": 0.1, "high": 0.3, "pairs": 90, "of": 3000}]}
    write_run(tmp_path, "Small + WT", 0, result("Small + WT", 0, similarity=similarity))
    table = build_table(join_runs([], collect_runs([tmp_path])))
    row = cells(table, "Small + WT")
    assert row["MEN MEN"] == "0.20"
    assert row["test test"] == "112.6"
    assert "MEN" in to_markdown(join_runs([], collect_runs([tmp_path])))


def test_table_without_runs_shows_the_papers_scores() -> None:
    table = build_table(recipe_rows())
    assert [column.title for column in table.columns] == ["parameters", "valid", "paper", "test", "paper"]


def test_unlisted_runs_follow_the_listed_rows(runs: Path) -> None:
    rows = join_runs(recipe_rows()[:2], collect_runs([runs]))
    assert [row.name for row in rows] == ["KN 5-gram", "Small", "Small + WT", "Small + WT + PR"]


def test_join_is_idempotent(runs: Path) -> None:
    results = collect_runs([runs])
    rows = join_runs(recipe_rows(), results)
    assert join_runs(rows, results) == rows


def test_row_of_another_recipe_gets_no_results(runs: Path) -> None:
    (row, *_) = join_runs([TableRow("Small", recipe="other")], collect_runs([runs]))
    assert row.results == ()


def test_recipe_rows_keep_their_scores() -> None:
    row = Row(name="Small", paper=ROWS["Small"]["paper"], parameters=4_651_600)
    assert rows_from_recipe([row], "r") == [TableRow("Small", ROWS["Small"]["paper"], 4_651_600, recipe="r")]


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_printed_table_shows_every_cell_within_the_width(runs: Path, width: int) -> None:
    rows = join_runs(recipe_rows(), collect_runs([runs]))
    text = print_to_text(rows, width)
    assert max(map(len, text.splitlines())) <= width
    for column in build_table(rows).columns:
        for cell in column.cells:
            assert cell in text
    assert "…" not in text


def test_output_to_a_pipe_has_no_escape_codes(runs: Path) -> None:
    assert "\x1b" not in print_to_text(join_runs(recipe_rows(), collect_runs([runs])), 80)


def test_row_names_are_not_markup() -> None:
    assert "[bold]x[/bold]" in print_to_text([TableRow("[bold]x[/bold]")], 80)


def test_markdown_table_is_regular_and_escaped(runs: Path) -> None:
    lines = to_markdown(join_runs(recipe_rows(), collect_runs([runs]))).splitlines()
    assert lines[0] == (
        "| row | parameters | valid | paper | diff | test | paper | diff | unknown words | epochs | s/epoch | seeds |"
    )
    assert len({line.count("|") for line in lines}) == 1
    assert sum("**102.7 ± 0.7**" in line for line in lines) == 1
    assert to_markdown([TableRow("a|b\n<i>*c*")]).splitlines()[2].startswith("| a\\|b \\<i\\>\\*c\\* |")


@pytest.mark.parametrize(("value", "text"), [(3.456, "3.46"), (114.52, "114.5"), (12_345.6, "12,345.6")])
def test_numbers_are_rounded_by_their_size(value: float, text: str) -> None:
    assert format_perplexity(value) == text
