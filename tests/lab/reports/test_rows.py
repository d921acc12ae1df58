"""Rows: which runs belong to one row, and which rows are comparable."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from made_results import in_pieces, result, scored, write_evaluation, write_run
from reefknot.lab.reports.footnotes import add_footnotes
from reefknot.lab.reports.rows import (
    TableRow,
    add_recipe_names,
    group_by_row,
    join_runs,
    largest_comparable_group,
)
from reefknot.lab.reports.table import Table, build_table, to_markdown
from reefknot.lab.runs.loading import Spread, collect_runs
from reefknot.lab.runs.scores import PERPLEXITY


def test_seeds_of_a_row_are_grouped(runs: Path) -> None:
    groups = group_by_row(collect_runs([runs]))
    assert {name: len(members) for name, members in groups.items()} == {
        "Small": 2,
        "Small + WT": 1,
        "Small + WT + PR": 2,
    }


def test_runs_with_other_settings_are_not_grouped(runs: Path) -> None:
    path = runs / "press2017" / "table6" / "small" / "seed1" / "config.json"
    config = json.loads(path.read_text())
    config["settings"]["training"]["epochs"] = 3
    path.write_text(json.dumps(config))
    groups = group_by_row(collect_runs([runs]))
    assert list(groups)[:2] == ["Small (training.epochs=13)", "Small (training.epochs=3)"]


def test_rows_of_several_recipes_get_the_recipe_name() -> None:
    rows = [TableRow("Baseline", recipe="a/one"), TableRow("b/two: Baseline", recipe="b/two")]
    assert [row.name for row in add_recipe_names(rows)] == ["a/one: Baseline", "b/two: Baseline"]
    assert add_recipe_names(rows[:1]) == rows[:1]


def test_groups_of_several_recipes_get_the_recipe_name(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "Small", 0, result("Small", 0))
    write_run(tmp_path / "b", "Small", 0, result("Small", 0, recipe="other"))
    assert list(group_by_row(collect_runs([tmp_path]))) == ["press2017/table6: Small", "other: Small"]


def test_recipes_with_different_texts_show_the_corpus(tmp_path: Path) -> None:
    for recipe, corpus, perplexity in (("a", "a.txt", 120.0), ("b", "a.txt", 110.0), ("c", "c.txt", 50.0)):
        changes = {"recipe": recipe, "corpus": {"name": corpus}, "test": scored(perplexity)}
        write_run(tmp_path / recipe, "Small", 0, result("Small", 0, **changes))
    table = build_table(join_runs([], collect_runs([tmp_path])))
    assert dict(zip(table.names, column(table, "size", "corpus"), strict=True)) == {
        "a: Small": "a.txt",
        "b: Small": "a.txt",
        "c: Small": "c.txt",
    }
    assert [table.names[index] for index in table.best] == ["b: Small"]
    assert table.notes[0] == (
        "corpus: only rows with the same corpus can be compared; a bold score is the best of its corpus"
    )
    same_corpus = build_table(join_runs([], collect_runs([tmp_path / "a", tmp_path / "b"])))
    assert column(same_corpus, "size", "corpus") == ()


def three_rows(root: Path, unknown: int) -> list[TableRow]:
    """Write three rows: words, sub-words with this number of unknown words, and words again."""
    write_run(root, "Small", 0, result("Small", 0, test=scored(120.0)))
    write_run(root, "Small + WT", 0, in_pieces("Small + WT", unknown=unknown))
    write_run(root, "Small + WT + PR", 0, result("Small + WT + PR", 0, test=scored(110.0)))
    return join_runs([], collect_runs([root]))


def test_sub_word_rows_are_marked_and_compared_per_word(tmp_path: Path) -> None:
    rows = three_rows(tmp_path, unknown=77)
    assert largest_comparable_group(rows) == rows
    marked, notes = add_footnotes(rows)
    assert [row.name for row in marked] == ["Small", "Small + WT †", "Small + WT + PR"]
    assert notes == (
        "† perplexity per word: the probability of a word is the product of the probabilities of its sub-words "
        "(on average, 2.0 sub-words per word)",
    )
    table = build_table(rows)
    assert table.best == {1}
    assert column(table, "test", "test") == ("120.0", "100.0 per word", "110.0")
    assert column(table, "test", "per token") == ("", "10.0", "")
    assert column(table, "validation", "per token") == ("", "10.0", "")


def column(table: Table, group: str, title: str) -> tuple[str, ...]:
    """Return the cells of a column; an empty tuple if the table does not have it."""
    matches = (candidate.cells for candidate in table.columns if (candidate.group, candidate.title) == (group, title))
    return next(matches, ())


def test_text_without_spaces_shows_perplexity_per_token(tmp_path: Path) -> None:
    """In Chinese, a "word" between spaces is a clause, and its perplexity has no meaning."""
    score = scored(10.0, pieces=7, unknown=0, size=26 * 82_430)
    write_run(tmp_path, "Small", 0, result("Small", 0, test=score, valid=score))
    rows = join_runs([], collect_runs([tmp_path]))
    table = build_table(rows)
    assert column(table, "test", "test") == column(table, "validation", "valid") == ("10.0 per token",)
    assert column(table, "test", "per token") == ()
    assert table.notes == ("† perplexity per token, because spaces do not separate the words of this text",)


def test_long_words_have_a_perplexity_per_word(tmp_path: Path) -> None:
    """Neither words of many bytes nor words of many sub-words (such as characters) alone mean a text without spaces."""
    for seed, score in enumerate((scored(10.0, pieces=6), scored(10.0, pieces=4, size=26 * 82_430))):
        write_run(tmp_path / str(seed), "Small", 0, result("Small", 0, test=score))
        (row,) = join_runs([], collect_runs([tmp_path / str(seed)]))
        assert row.has_words


def test_rows_with_other_unknown_words_are_not_comparable(tmp_path: Path) -> None:
    rows = three_rows(tmp_path, unknown=0)
    assert [row.name for row in largest_comparable_group(rows)] == ["Small", "Small + WT + PR"]
    table = build_table(rows)
    assert table.best == {2}
    (note,) = table.notes
    assert note.endswith("not comparable: no unknown words scored as <unk> here, 77 in Small")
    assert "| Small + WT † |" in to_markdown(rows)
    assert "\n† perplexity per word" in to_markdown(rows)


def test_first_row_with_a_score_is_the_reference(tmp_path: Path) -> None:
    sub_words = three_rows(tmp_path, unknown=0)[1]
    assert largest_comparable_group([TableRow("not run"), sub_words]) == [sub_words]
    assert len(add_footnotes([TableRow("not run"), sub_words])[1]) == 1


def test_rows_with_the_same_note_share_a_sign(tmp_path: Path) -> None:
    first, sub_words, last = three_rows(tmp_path, unknown=0)
    assert [row.name for row in add_footnotes([first, sub_words, sub_words, last])[0]].count("Small + WT †") == 2


def test_incomparable_first_row_is_not_the_reference(tmp_path: Path) -> None:
    first, sub_words, last = three_rows(tmp_path, unknown=0)
    rows = [sub_words, first, last]
    assert largest_comparable_group(rows) == [first, last]
    marked, (note,) = add_footnotes(rows)
    assert [row.name for row in marked] == ["Small + WT †", first.name, last.name]
    assert note.endswith(f"77 in {first.name}")


def test_notes_name_start_row_and_early_stop(tmp_path: Path) -> None:
    training = {"epochs": 13, "start": {"row": "Small"}, "stop": {"rule": "nonmonotone", "interval": 5}}
    write_run(tmp_path, "Small", 0, result("Small", 0))
    record = result("Small + WT", 0)
    folder = write_run(tmp_path, "Small + WT", 0, record, training=training)
    rows = join_runs([], collect_runs([tmp_path]))
    assert add_footnotes(rows)[1] == ("† began with the best weights of Small",)
    second = write_run(
        tmp_path, "Small + WT", 1, result("Small + WT", 1, best={"step": 0, "epoch": 0}), training=training
    )
    suffix = "; with 1 of 2 seeds, no epoch improved on them, so their scores are shown"
    assert add_footnotes(join_runs([], collect_runs([tmp_path])))[1] == (
        f"† began with the best weights of Small{suffix}",
    )
    shutil.rmtree(second)
    record["training"]["epochs"] = 20
    (folder / "result.json").write_text(json.dumps(record))
    rows = join_runs([], collect_runs([tmp_path]))
    assert [row.name for row in add_footnotes(rows)[0]] == ["Small", "Small + WT †"]
    assert add_footnotes(rows)[1] == ("† began with the best weights of Small; stopped early, by the nonmonotone rule",)


def test_long_streams_get_only_a_note(tmp_path: Path) -> None:
    write_run(tmp_path, "Small", 0, result("Small", 0, test=scored(120.0)))
    write_run(tmp_path, "Small + WT", 0, result("Small + WT", 0, test=scored(110.0, streams=20)))
    rows = join_runs([], collect_runs([tmp_path]))
    assert build_table(rows).best == {1}
    assert add_footnotes(rows)[1] == ("† context differs: here 20 contiguous streams; in Small one stream",)


def test_every_corpus_has_its_best_row(tmp_path: Path) -> None:
    other = {"name": "wikitext-2"}
    for row, corpus, test in (("Small", {}, 120.0), ("Small + WT", {}, 110.0), ("Small + WT + PR", other, 90.0)):
        record = result(row, 0, test=scored(test) | ({"bytes": 1} if corpus else {}))
        write_run(tmp_path, row, 0, record | {"corpus": record["corpus"] | corpus})
    rows = join_runs([], collect_runs([tmp_path]))
    assert build_table(rows).best == {1}  # the last row is alone on its corpus
    assert add_footnotes(rows)[1] == ()
    (*_, last) = rows
    assert build_table([*rows, replace(last, name="again")]).best == {1, 2}


def test_row_with_a_pending_second_session_is_not_the_best(tmp_path: Path) -> None:
    for row in ("Small", "Small + WT"):
        write_run(tmp_path, row, 0, result(row, 0))
    names = ("Small", "Small + WT", "Small + WT + PR")
    listed = [TableRow(name, start="Small + WT" if name == names[2] else None) for name in names]
    assert build_table(join_runs(listed, collect_runs([tmp_path]))).best == set()  # the second session has not run
    assert build_table(join_runs(listed[:2], collect_runs([tmp_path]))).best == {1}


def rows_with_evaluations(root: Path, seeds: int = 2) -> list[TableRow]:
    """Write a row with saved evaluations, and return it with the rows that its recipe lists for them."""
    for seed in range(seeds):
        write_evaluation(write_run(root, "Small", seed, result("Small", seed)), "dynamic", test=90.0 + 2 * seed)
    return [
        TableRow("Small", {"test": 114.5}),
        TableRow("Small, adapting", {"test": 80.0}, source_row="Small", mode="dynamic"),
        TableRow("Small, remembering", {"test": 85.0}, source_row="Small", mode="cache"),
    ]


def test_row_can_be_another_rows_model_in_another_mode(tmp_path: Path) -> None:
    listed = rows_with_evaluations(tmp_path)
    results = collect_runs([tmp_path])
    rows = join_runs(listed, results)
    static, adapting, remembering = rows
    assert join_runs(rows, results) == rows
    assert adapting.mean_score(PERPLEXITY, "test") == Spread(91.0, pytest.approx(2**0.5), 2)
    assert adapting.relative_difference("test") == 91.0 / 80.0 - 1
    assert (adapting.parameter_count, adapting.results, adapting.state) == (static.parameter_count, (), "")
    assert (remembering.state, remembering.source_runs) == ("not run", ())
    assert build_table(rows).best == set()  # only one row adapts
    lines = to_markdown(rows).splitlines()
    assert lines[3] == "| Small, adapting | 4,651,600 | 100.0 ± 0.0 | 91.0 ± 1.4 | 80.0 | +13.7 % | 0.1 % |  |  | 2 |"
    assert lines[4] == "| Small, remembering |  |  | not run | 85.0 |  |  |  |  |  |"


def test_unlisted_evaluations_follow_their_row(tmp_path: Path) -> None:
    rows_with_evaluations(tmp_path, seeds=1)
    rows = join_runs([], collect_runs([tmp_path]))
    assert [row.name for row in rows] == ["Small", "Small + dynamic evaluation"]
    assert join_runs(rows, collect_runs([tmp_path])) == rows


def test_evaluations_of_other_settings_are_other_rows(tmp_path: Path) -> None:
    listed = rows_with_evaluations(tmp_path, seeds=1)
    write_evaluation(write_run(tmp_path, "Small", 1, result("Small", 1), training={"epochs": 3}), "dynamic", test=70.0)
    names = [row.name for row in join_runs(listed, collect_runs([tmp_path])) if row.source_runs]
    assert [name.partition(" (")[0] for name in names] == ["Small, adapting"] * 2
    assert names[1].startswith("Small, adapting (training.epochs=3")


def test_different_windows_are_compared_with_a_note(tmp_path: Path) -> None:
    blocks = scored(120.0) | {"windows": "context-0-stride-512"}
    write_evaluation(
        write_run(tmp_path, "Small", 0, result("Small", 0, test=blocks)), "context-2560-stride-512", test=110.0
    )
    rows = join_runs([], collect_runs([tmp_path]))
    assert [row.name for row in rows] == ["Small", "Small + windows of 2,560 + 512 tokens"]
    assert build_table(rows).best == {1}
    assert add_footnotes(rows)[1] == (
        "† context differs: here windows of 3,072 tokens, of which the last 512 are scored; in Small blocks of 512 "
        "tokens",
    )
