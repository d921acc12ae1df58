"""Translators in tables, readings and on the page: BLEU next to the paper's, by length, examples and attention."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from made_results import change, metrics, result, scored
from reefknot.lab.papers import page as papers
from reefknot.lab.reports import plots, translations
from reefknot.lab.reports.page import render
from reefknot.lab.reports.rows import TableRow, join_runs
from reefknot.lab.reports.sentences import summarise_rows
from reefknot.lab.reports.sweep import Trial, rank_trials, summarise_trials
from reefknot.lab.reports.table import build_table, to_markdown
from reefknot.lab.runs.loading import collect_runs, load_run
from reefknot.lab.runs.scores import BLEU

TABLES = {"Baseline": ("source", "words", "classes"), "Decoder WT": ("source", "words"), "TWWT": ("words",)}
SIZES = {"Baseline": 13_315_980, "Decoder WT": 10_724_236, "TWWT": 8_132_492}
SIGNATURE = "nrefs:1|case:mixed|eff:no|tok:none|smooth:exp|version:2.5.1"


def translation_scores(bleu: float, **changes: Any) -> dict[str, Any]:
    bands = [{"from": 0, "to": 10, "pairs": 76, "bleu": bleu + 1}, {"from": 11, "to": None, "pairs": 924, "bleu": bleu}]
    return {
        "bleu": bleu,
        "chrf": bleu + 20,
        "bleu_signature": SIGNATURE,
        "chrf_signature": "nrefs:1|case:mixed|eff:yes|nc:6|nw:0|space:no|version:2.5.1",
        "brevity_penalty": 0.987,
        "length_ratio": 0.9871,
        "pairs": 1000,
        "unfinished": 3,
        "search": {"beam": 5},
        "by_length": bands,
    } | changes


def example(translation: str) -> dict[str, Any]:
    tokens = [*translation.split(), "<eos>"]
    return {
        "source": "a <b>dog</b> runs",
        "reference": "ein hund läuft",
        "translation": translation,
        "source_tokens": ["a", "<b>dog</b>", "runs", "<eos>"],
        "target_tokens": tokens,
        "attention": [[0.7, 0.2, 0.1, 0.0] for _ in tokens],
    }


def write_translator(root: Path, row: str, bleu: float, seed: int = 0, **changes: Any) -> Path:
    folder = root / row.lower().replace(" ", "-") / f"seed{seed}"
    folder.mkdir(parents=True)
    scores = {
        "valid": translation_scores(bleu + 0.5),
        "test": translation_scores(bleu),
        "examples": [example(f"ein hund {row.lower()}")],
    }
    size = {"total": SIZES[row], "parts": {}, "expected": None}
    about = {
        "recipe": "pappas2019/multi30k",
        "row": row,
        "parameters": size,
        "paper": {},
        "translation": scores,
        "task": "translation",
    }
    (folder / "result.json").write_text(json.dumps(result("Small", seed) | about | changes))
    tables = TABLES[row]
    settings = {
        "tables": {name: {"kind": "word", "dim": 256} for name in tables},
        "source": {"kind": "lookup", "table": tables[0]},
        "input": {"kind": "lookup", "table": "words"},
        "output": {"kind": "softmax", "classifier": {"kind": "plain", "table": tables[-1]}},
        "training": {"seed": seed},
    }
    config = {"recipe": "pappas2019/multi30k", "row": row, "settings": settings}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics("Small")))
    return folder


def listed(*names: str, **papers: dict[str, float]) -> list[TableRow]:
    return [TableRow(name, papers.get(name, {}), recipe="pappas2019/multi30k") for name in names]


@pytest.fixture
def rows(tmp_path: Path) -> list[TableRow]:
    """Return two seeds of the first and the last row; one row is not run, one is quoted."""
    for row, scores in (("Baseline", (38.0, 38.4)), ("Decoder WT", (38.1,)), ("TWWT", (39.0, 39.2))):
        for seed, bleu in enumerate(scores):
            write_translator(tmp_path / "runs", row, bleu, seed)
    known = listed("Baseline", "Decoder WT", "TWWT", "TWWT + DRILL", TWWT={"bleu_valid": 29.43, "bleu_test": 38.1})
    quoted = TableRow("GNMT", {"bleu_test": 24.6}, quoted=True)
    return join_runs([*known, quoted], collect_runs([tmp_path / "runs"]))


def cells_of(rows: list[TableRow], name: str) -> dict[tuple[str, str], str]:
    table = build_table(rows)
    index = next(n for n, row_name in enumerate(table.names) if row_name.startswith(name))
    return {(column.group, column.title): column.cells[index] for column in table.columns}


def test_bleu_is_compared_with_the_paper_in_points(rows: list[TableRow]) -> None:
    row = cells_of(rows, "TWWT")
    assert row["test BLEU", "test BLEU"] == "39.10 ± 0.14"
    assert row["test BLEU", "paper"] == "38.1"
    assert row["test BLEU", "diff"] == "+1.00"
    assert row["test BLEU", "chrF"] == "59.10 ± 0.14"
    assert row["valid BLEU", "valid BLEU"] == "39.60 ± 0.14"
    assert row["valid BLEU", "paper"] == "29.43"
    assert row["test", "test"] == "117.2 ± 0.7"
    assert any("higher is better" in note for note in build_table(rows).notes)


def test_missing_and_quoted_rows_show_bleu_columns(rows: list[TableRow]) -> None:
    missing, quoted = cells_of(rows, "TWWT + DRILL"), cells_of(rows, "GNMT")
    assert missing["test BLEU", "test BLEU"] == "not run"
    assert missing["test", "test"] == ""
    assert (quoted["test BLEU", "test BLEU"], quoted["test BLEU", "paper"]) == ("", "24.6")


def test_highest_bleu_is_marked_as_best(rows: list[TableRow]) -> None:
    table = build_table(rows)
    assert [table.names[n].split()[0] for n in table.best] == ["TWWT"]
    assert table.ranking_column == "test BLEU"
    assert "**39.10 ± 0.14**" in to_markdown(rows)
    assert to_markdown(rows).count("**") == 2


def test_other_bleu_signatures_are_not_compared(tmp_path: Path) -> None:
    write_translator(tmp_path, "Baseline", 38.0)
    write_translator(tmp_path, "Decoder WT", 38.1)
    other = {"test": translation_scores(45.0, bleu_signature=SIGNATURE.replace("tok:none", "tok:13a"))}
    write_translator(tmp_path, "TWWT", 45.0, translation=other)
    table = build_table(joined := join_runs([], collect_runs([tmp_path])))
    assert [table.names[n].split()[0] for n in table.best] == ["Decoder"]
    (plot,) = translations.plot_by_length(joined)
    assert "Left out" in plot.caption
    assert "TWWT" in plot.caption


def test_table_without_runs_shows_the_papers_bleu() -> None:
    rows = listed("TWWT", TWWT={"bleu_valid": 21.02, "bleu_test": 17.15})
    table = build_table(rows)
    columns = {(column.group, column.title): column.cells for column in table.columns}
    assert columns == {
        ("valid BLEU", "valid BLEU"): ("",),
        ("valid BLEU", "paper"): ("21.02",),
        ("test BLEU", "test BLEU"): ("not run",),
        ("test BLEU", "paper"): ("17.15",),
    }


def test_changed_settings_are_not_compared_with_the_paper(tmp_path: Path) -> None:
    write_translator(tmp_path, "TWWT", 39.0, changed=[change("training.epochs", 50, 1)])
    rows = join_runs(listed("TWWT", TWWT={"bleu_test": 38.1}), collect_runs([tmp_path]))
    assert ("test BLEU", "diff") not in cells_of(rows, "TWWT")


def test_bleu_is_comparable_across_vocabularies(tmp_path: Path) -> None:
    """Separate vocabularies have other unknown words, so only perplexity gets a note."""
    for row, bleu, words in (("Baseline", 38.0, 9), ("Decoder WT", 38.2, 9), ("TWWT", 39.0, 12)):
        score = scored(116.7, unknown=words) | {"pairs": 1_000}
        write_translator(tmp_path, row, bleu, test=score, valid=score)
    table = build_table(join_runs([], collect_runs([tmp_path])))
    assert [table.names[n].split()[0] for n in table.best] == ["TWWT"]
    assert any("perplexity not comparable: 12 unknown words" in note for note in table.notes)


def test_reading_states_what_sharing_tables_saves(rows: list[TableRow]) -> None:
    sentences = [sentence.replace("\u00a0", " ") for sentence in summarise_rows(rows)]
    for fact in ("TWWT has the highest test BLEU, 39.10 ± 0.14", "8,132,492", "Decoder WT has the lowest, 38.10"):
        assert fact in sentences[0]
    twwt = next(sentence for sentence in sentences if "in TWWT" in sentence)
    assert "Sharing tables saves 5,183,488 parameters (39 %) in TWWT" in twwt
    assert "differs from Baseline in nothing else: +0.90 BLEU, 95 % interval over seeds" in twwt
    wt = next(sentence for sentence in sentences if "in Decoder WT" in sentence)
    assert wt.endswith("(19 %) in Decoder WT, which differs from Baseline in nothing else: −0.10 BLEU.")
    assert any("largest difference from the paper's test BLEU is +1.00" in sentence for sentence in sentences)
    assert "Not run: TWWT + DRILL." in sentences


def test_interval_of_bleu_is_welchs(rows: list[TableRow]) -> None:
    """Expected: scipy.stats.ttest_ind(equal_var=False) of 38.0, 38.4 and 39.0, 39.2."""
    from scipy.stats import ttest_ind

    interval = ttest_ind([39.0, 39.2], [38.0, 38.4], equal_var=False).confidence_interval(0.95)
    text = (
        next(sentence for sentence in summarise_rows(rows) if "in TWWT" in sentence)
        .replace("\u00a0", " ")
        .replace("−", "-")
    )
    numbers = re.search(r"seeds ([+-][\d.]+) to ([+-][\d.]+)\.", text)
    assert numbers is not None
    assert [float(number) for number in numbers.groups()] == pytest.approx([interval.low, interval.high], abs=0.005)


def test_sizes_are_plotted_against_bleu(rows: list[TableRow]) -> None:
    (plot,) = plots.plot_sizes([row for row in rows if row.results])
    assert plot.caption.startswith("Parameters against test BLEU; higher and further left is better.")


def test_bleu_by_length_is_a_mean_over_seeds(rows: list[TableRow]) -> None:
    bands = translations._length_bands(next(row for row in rows if row.name == "TWWT"))
    assert [(band.low, band.high, band.pairs, band.bleu) for band in bands] == [
        (0, 10, 76, pytest.approx(40.1)),
        (11, None, 924, pytest.approx(39.1)),
    ]
    (plot,) = translations.plot_by_length(rows)
    texts = ["".join(node.itertext()) for node in ET.fromstring(plot.svg).iter() if node.tag.endswith("text")]
    assert {"0–10", "11+", "76", "924"} <= set(texts)
    assert translations.plot_by_length([replace(rows[0], results=())]) == []


def test_translations_of_a_sentence_are_side_by_side(rows: list[TableRow]) -> None:
    (pair,) = translations.compare_examples(rows)
    assert pair.reference == "ein hund läuft"
    assert pair.translations == (
        ("Baseline", "ein hund baseline"),
        ("Decoder WT", "ein hund decoder wt"),
        ("TWWT", "ein hund twwt"),
    )


def test_attention_pictures_have_tokens_as_axes(rows: list[TableRow]) -> None:
    pictures = dict(translations.plot_attention(rows))
    assert list(pictures) == ["Baseline", "Decoder WT", "TWWT"]
    (plot,) = pictures["TWWT"]
    root = ET.fromstring(plot.svg)
    texts = ["".join(node.itertext()) for node in root.iter() if node.tag.endswith("text")]
    assert texts == ["a", "<b>dog</b>", "runs", "<eos>", "ein", "hund", "twwt", "<eos>"]
    ids = [node.attrib["id"] for node in root.iter() if "id" in node.attrib]
    assert all(anchor.startswith("attention-2-0-") for anchor in ids)


def test_sub_words_are_drawn_in_readable_form(tmp_path: Path) -> None:
    stored = {"test": translation_scores(38.0), "examples": [example("ein</w> hu nd</w>")]}
    folder = write_translator(tmp_path, "TWWT", 38.0, translation=stored)
    config = json.loads((folder / "config.json").read_text())
    config["settings"]["vocabulary"] = {"bpe": {"merges": 9}}
    (folder / "config.json").write_text(json.dumps(config))
    ((_, (plot,)),) = translations.plot_attention(join_runs([], [load_run(folder)]))
    texts = ["".join(node.itertext()) for node in ET.fromstring(plot.svg).iter() if node.tag.endswith("text")]
    assert texts[-4:] == ["ein", "hu…", "nd", "<eos>"]


def test_damaged_or_long_attention_is_not_drawn(tmp_path: Path) -> None:
    damaged = example("ein hund") | {"attention": [[1.0]]}
    long = example(" ".join(["wort"] * translations.MAX_PLOTTED_TOKENS))
    stored = {"test": translation_scores(38.0), "examples": [damaged, long]}
    (row,) = join_runs([], [load_run(write_translator(tmp_path, "TWWT", 38.0, translation=stored))])
    assert translations.plot_attention([row]) == []
    assert len(translations.compare_examples([row])[0].translations) == 1


def test_page_has_a_translations_section(rows: list[TableRow]) -> None:
    page = render(rows, "Translators")
    section = page[page.index('<section id="translations">') :].partition("</section>")[0]
    assert '<a href="#translations">Translations</a>' in page
    for text in ("The same sentences in every row", "<h3>Attention</h3>", SIGNATURE, "39.20", "0.987"):
        assert text in section
    assert "<b>dog" not in page
    assert "<td>3</td>" in section
    assert render(rows, "Translators") == page


def test_language_model_page_has_no_translations_section(runs: Path) -> None:
    assert "translations" not in render(join_runs([], collect_runs([runs])), "Language models").lower()


def test_ideas_list_shows_bleu(rows: list[TableRow]) -> None:
    assert papers._format_scores(next(row for row in rows if row.name == "TWWT")) == ("BLEU 39.10 ± 0.14", "BLEU 38.1")
    assert papers._format_scores(next(row for row in rows if row.name == "GNMT")) == ("", "BLEU 24.6")


def test_origin_names_the_bleu_signature(rows: list[TableRow]) -> None:
    records = [record for row in rows for record in row.records]
    origin = papers._describe_origin(papers.RecipeTable("pappas2019/multi30k", "Ours", rows), records)
    assert f" BLEU is computed by sacrebleu, `{SIGNATURE}`.\n" in origin
    assert "Our scores are from the epoch with the best validation perplexity" in origin


def test_reports_state_the_number_of_averaged_checkpoints(tmp_path: Path) -> None:
    """The number is the actual one; training may have left fewer than requested."""
    for seed, number in enumerate((10, 1, 10)):
        averaged = [f"step_{step:08d}" for step in range(number)]
        write_translator(tmp_path, "TWWT", 39.0, seed, averaged=averaged)
    (row,) = join_runs([], collect_runs([tmp_path]))
    origin = papers._describe_origin(papers.RecipeTable("a", "b", [row]), row.records)
    assert "Our scores are from the last checkpoint or the mean of the last 10 checkpoints. ±" in origin
    page = render([row], "Translators")
    assert re.findall(r"<td>mean of (\d+)</td>", page) == ["10", "1", "10"]


def test_sweep_is_ranked_by_validation_bleu(tmp_path: Path) -> None:
    folders = [write_translator(tmp_path, row, bleu) for row, bleu in (("Baseline", 38.0), ("TWWT", 39.0))]
    ranked = rank_trials([Trial(folder.parent.name, {}, (folder,)) for folder in folders])
    assert [trial.name for trial, _ in ranked] == ["twwt", "baseline"]
    assert [row.mean_score(BLEU, "test") for _, row in ranked] == [None, None]
    assert build_table([row for _, row in ranked]).ranking_column == "valid BLEU"
    assert summarise_trials(ranked, tmp_path)[0]["bleu_valid"]["mean"] == 39.5
    assert translations.compare_examples([row for _, row in ranked]) == []
