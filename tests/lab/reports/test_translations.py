"""Translators in tables, readings and on the page: BLEU beside the paper's, by length, pairs and pictures."""

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
from reefknot.lab.reports.reading import read
from reefknot.lab.reports.results import collect, load
from reefknot.lab.reports.rows import TableRow, join
from reefknot.lab.reports.sweep import Trial, rank, summary
from reefknot.lab.reports.table import build, to_markdown
from reefknot.lab.runs.scores import BLEU

TABLES = {"Baseline": ("source", "words", "classes"), "Decoder WT": ("source", "words"), "TWWT": ("words",)}
SIZES = {"Baseline": 13_315_980, "Decoder WT": 10_724_236, "TWWT": 8_132_492}
SIGNATURE = "nrefs:1|case:mixed|eff:no|tok:none|smooth:exp|version:2.5.1"


def translated(bleu: float, **changes: Any) -> dict[str, Any]:
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
    told = {
        "valid": translated(bleu + 0.5),
        "test": translated(bleu),
        "examples": [example(f"ein hund {row.lower()}")],
    }
    size = {"total": SIZES[row], "parts": {}, "expected": None}
    about = {
        "recipe": "pappas2019/multi30k",
        "row": row,
        "parameters": size,
        "paper": {},
        "translation": told,
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
    """Two seeds of the first and the last row; one row is not run, one is quoted."""
    for row, figures in (("Baseline", (38.0, 38.4)), ("Decoder WT", (38.1,)), ("TWWT", (39.0, 39.2))):
        for seed, bleu in enumerate(figures):
            write_translator(tmp_path / "runs", row, bleu, seed)
    known = listed("Baseline", "Decoder WT", "TWWT", "TWWT + DRILL", TWWT={"bleu_valid": 29.43, "bleu_test": 38.1})
    quoted = TableRow("GNMT", {"bleu_test": 24.6}, quoted=True)
    return join([*known, quoted], collect([tmp_path / "runs"]))


def cells(rows: list[TableRow], name: str) -> dict[tuple[str, str], str]:
    table = build(rows)
    place = next(n for n, each in enumerate(table.names) if each.startswith(name))
    return {(column.group, column.title): column.cells[place] for column in table.columns}


def test_bleu_stands_beside_the_paper_s_in_points(rows: list[TableRow]) -> None:
    found = cells(rows, "TWWT")
    assert found["test BLEU", "test BLEU"] == "39.10 ± 0.14"
    assert found["test BLEU", "paper"] == "38.1"
    assert found["test BLEU", "diff"] == "+1.00"
    assert found["test BLEU", "chrF"] == "59.10 ± 0.14"
    assert found["valid BLEU", "valid BLEU"] == "39.60 ± 0.14"
    assert found["valid BLEU", "paper"] == "29.43"
    assert found["test", "test"] == "117.2 ± 0.7"
    assert any("higher is better" in note for note in build(rows).notes)


def test_rows_without_figures_say_so_among_the_bleu(rows: list[TableRow]) -> None:
    missing, quoted = cells(rows, "TWWT + DRILL"), cells(rows, "GNMT")
    assert missing["test BLEU", "test BLEU"] == "not run"
    assert missing["test", "test"] == ""
    assert (quoted["test BLEU", "test BLEU"], quoted["test BLEU", "paper"]) == ("", "24.6")


def test_the_highest_bleu_is_the_best(rows: list[TableRow]) -> None:
    table = build(rows)
    assert [table.names[n].split()[0] for n in table.best] == ["TWWT"]
    assert table.decides == "test BLEU"
    assert "**39.10 ± 0.14**" in to_markdown(rows)
    assert to_markdown(rows).count("**") == 2


def test_other_ways_of_counting_do_not_compete(tmp_path: Path) -> None:
    write_translator(tmp_path, "Baseline", 38.0)
    write_translator(tmp_path, "Decoder WT", 38.1)
    other = {"test": translated(45.0, bleu_signature=SIGNATURE.replace("tok:none", "tok:13a"))}
    write_translator(tmp_path, "TWWT", 45.0, translation=other)
    table = build(found := join([], collect([tmp_path])))
    assert [table.names[n].split()[0] for n in table.best] == ["Decoder"]
    (plot,) = translations.by_length(found)
    assert "Left out" in plot.caption
    assert "TWWT" in plot.caption


def test_a_paper_s_table_that_was_not_run() -> None:
    rows = listed("TWWT", TWWT={"bleu_valid": 21.02, "bleu_test": 17.15})
    table = build(rows)
    shown = {(column.group, column.title): column.cells for column in table.columns}
    assert shown == {
        ("valid BLEU", "valid BLEU"): ("",),
        ("valid BLEU", "paper"): ("21.02",),
        ("test BLEU", "test BLEU"): ("not run",),
        ("test BLEU", "paper"): ("17.15",),
    }


def test_changed_settings_have_no_difference_to_the_paper(tmp_path: Path) -> None:
    write_translator(tmp_path, "TWWT", 39.0, changed=[change("training.epochs", 50, 1)])
    rows = join(listed("TWWT", TWWT={"bleu_test": 38.1}), collect([tmp_path]))
    assert ("test BLEU", "diff") not in cells(rows, "TWWT")


def test_perplexities_of_other_words_leave_bleu_comparable(tmp_path: Path) -> None:
    """A vocabulary for each side reads other words as <unk>: the footnote is about perplexity alone."""
    for row, bleu, words in (("Baseline", 38.0, 9), ("Decoder WT", 38.2, 9), ("TWWT", 39.0, 12)):
        score = scored(116.7, unknown=words) | {"pairs": 1_000}
        write_translator(tmp_path, row, bleu, test=score, valid=score)
    table = build(join([], collect([tmp_path])))
    assert [table.names[n].split()[0] for n in table.best] == ["TWWT"]
    assert any("perplexity not comparable: 12 unknown words" in note for note in table.notes)


def test_the_reading_tells_what_ties_save(rows: list[TableRow]) -> None:
    sentences = [sentence.replace("\u00a0", " ") for sentence in read(rows)]
    assert sentences[0] == (
        "TWWT has the highest test BLEU, 39.10 ± 0.14 with 8,132,492 parameters; Decoder WT has the lowest, 38.10."
    )
    twwt = next(each for each in sentences if "in TWWT" in each)
    assert "Sharing tables saves 5,183,488 parameters (39 %) in TWWT" in twwt
    assert "differs from Baseline in nothing else: +0.90 BLEU, 95 % interval over seeds" in twwt
    wt = next(each for each in sentences if "in Decoder WT" in each)
    assert wt.endswith("(19 %) in Decoder WT, which differs from Baseline in nothing else: −0.10 BLEU.")
    assert any("largest difference to the paper's test BLEU is +1.00" in each for each in sentences)
    assert "Not run: TWWT + DRILL." in sentences


def test_the_interval_is_welch_s(rows: list[TableRow]) -> None:
    """38.0, 38.4 against 39.0, 39.2: as scipy.stats.ttest_ind(equal_var=False).confidence_interval() has it."""
    from scipy.stats import ttest_ind

    interval = ttest_ind([39.0, 39.2], [38.0, 38.4], equal_var=False).confidence_interval(0.95)
    text = next(each for each in read(rows) if "in TWWT" in each).replace("\u00a0", " ").replace("−", "-")
    found = re.search(r"seeds ([+-][\d.]+) to ([+-][\d.]+)\.", text)
    assert found is not None
    assert [float(each) for each in found.groups()] == pytest.approx([interval.low, interval.high], abs=0.005)


def test_sizes_are_drawn_against_bleu(rows: list[TableRow]) -> None:
    (plot,) = plots.sizes([row for row in rows if row.results])
    assert plot.caption.startswith("Parameters against test BLEU; higher and further left is better.")


def test_bleu_by_length_is_a_mean_over_seeds(rows: list[TableRow]) -> None:
    bands = translations._bands(next(row for row in rows if row.name == "TWWT"))
    assert [(band.low, band.high, band.pairs, band.bleu) for band in bands] == [
        (0, 10, 76, pytest.approx(40.1)),
        (11, None, 924, pytest.approx(39.1)),
    ]
    (plot,) = translations.by_length(rows)
    texts = ["".join(each.itertext()) for each in ET.fromstring(plot.svg).iter() if each.tag.endswith("text")]
    assert {"0–10", "11+", "76", "924"} <= set(texts)
    assert translations.by_length([replace(rows[0], results=())]) == []


def test_pairs_stand_side_by_side(rows: list[TableRow]) -> None:
    (pair,) = translations.side_by_side(rows)
    assert pair.reference == "ein hund läuft"
    assert pair.translations == (
        ("Baseline", "ein hund baseline"),
        ("Decoder WT", "ein hund decoder wt"),
        ("TWWT", "ein hund twwt"),
    )


def test_pictures_have_the_tokens_as_axes(rows: list[TableRow]) -> None:
    pictures = dict(translations.attention(rows))
    assert list(pictures) == ["Baseline", "Decoder WT", "TWWT"]
    (plot,) = pictures["TWWT"]
    root = ET.fromstring(plot.svg)
    texts = ["".join(each.itertext()) for each in root.iter() if each.tag.endswith("text")]
    assert texts == ["a", "<b>dog</b>", "runs", "<eos>", "ein", "hund", "twwt", "<eos>"]
    ids = [each.attrib["id"] for each in root.iter() if "id" in each.attrib]
    assert all(each.startswith("attention-2-0-") for each in ids)


def test_pieces_of_words_are_drawn_as_people_read_them(tmp_path: Path) -> None:
    told = {"test": translated(38.0), "examples": [example("ein</w> hu nd</w>")]}
    folder = write_translator(tmp_path, "TWWT", 38.0, translation=told)
    config = json.loads((folder / "config.json").read_text())
    config["settings"]["vocabulary"] = {"bpe": {"merges": 9}}
    (folder / "config.json").write_text(json.dumps(config))
    ((_, (plot,)),) = translations.attention(join([], [load(folder)]))
    texts = ["".join(each.itertext()) for each in ET.fromstring(plot.svg).iter() if each.tag.endswith("text")]
    assert texts[-4:] == ["ein", "hu…", "nd", "<eos>"]


def test_what_does_not_fit_is_not_drawn(tmp_path: Path) -> None:
    torn = example("ein hund") | {"attention": [[1.0]]}
    long = example(" ".join(["wort"] * translations.LONGEST))
    told = {"test": translated(38.0), "examples": [torn, long]}
    (row,) = join([], [load(write_translator(tmp_path, "TWWT", 38.0, translation=told))])
    assert translations.attention([row]) == []
    assert len(translations.side_by_side([row])[0].translations) == 1


def test_the_page_has_a_section(rows: list[TableRow]) -> None:
    page = render(rows, "Translators")
    section = page[page.index('<section id="translations">') :].partition("</section>")[0]
    assert '<a href="#translations">Translations</a>' in page
    for text in ("The same sentences in every row", "Where translations looked", SIGNATURE, "39.20", "0.987"):
        assert text in section
    assert "<b>dog" not in page
    assert "<td>3</td>" in section
    assert render(rows, "Translators") == page


def test_pages_of_language_models_have_none(runs: Path) -> None:
    assert "translations" not in render(join([], collect([runs])), "Language models").lower()


def test_a_list_of_ideas_says_bleu(rows: list[TableRow]) -> None:
    assert papers._scores(next(row for row in rows if row.name == "TWWT")) == ("BLEU 39.10 ± 0.14", "BLEU 38.1")
    assert papers._scores(next(row for row in rows if row.name == "GNMT")) == ("", "BLEU 24.6")


def test_where_figures_came_from_names_the_signature(rows: list[TableRow]) -> None:
    records = [record for row in rows for record in row.records]
    told = papers._origin(papers.RecipeTable("pappas2019/multi30k", "Ours", rows), records)
    assert f"; BLEU by sacrebleu, `{SIGNATURE}`.\n" in told
    assert "Ours: at the epoch with the best validation perplexity" in told


def test_reports_tell_how_many_checkpoints_were_averaged(tmp_path: Path) -> None:
    """Not how many were asked for: training may have left fewer."""
    for seed, number in enumerate((10, 1, 10)):
        averaged = [f"step_{step:08d}" for step in range(number)]
        write_translator(tmp_path, "TWWT", 39.0, seed, averaged=averaged)
    (row,) = join([], collect([tmp_path]))
    told = papers._origin(papers.RecipeTable("a", "b", [row]), row.records)
    assert "Ours: the last checkpoint or the mean of the last 10 checkpoints; ±" in told
    page = render([row], "Translators")
    assert re.findall(r"<td>mean of (\d+)</td>", page) == ["10", "1", "10"]


def test_a_sweep_is_judged_by_the_validation_s_bleu(tmp_path: Path) -> None:
    folders = [write_translator(tmp_path, row, bleu) for row, bleu in (("Baseline", 38.0), ("TWWT", 39.0))]
    ranked = rank([Trial(folder.parent.name, {}, (folder,)) for folder in folders])
    assert [trial.name for trial, _ in ranked] == ["twwt", "baseline"]
    assert [row.figure(BLEU, "test") for _, row in ranked] == [None, None]
    assert build([row for _, row in ranked]).decides == "valid BLEU"
    assert summary(ranked, tmp_path)[0]["bleu_valid"]["mean"] == 39.5
    assert translations.side_by_side([row for _, row in ranked]) == []
