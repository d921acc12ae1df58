"""Word vectors on the page: pictures with separate labels, neighbours marked where the ends differ, similarity."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from made_results import result, write_run
from reefknot.lab.reports import embedding
from reefknot.lab.reports.drawing import Drawing
from reefknot.lab.reports.page import render
from reefknot.lab.reports.rows import join_runs
from reefknot.lab.runs.loading import collect_runs

WORDS = [f"word{n}" for n in range(20)]


def make_picture(seed: int = 0, count: int = 20) -> dict[str, Any]:
    places = np.random.default_rng(seed).normal(size=(count, 2)).round(3)
    return {"xy": places.tolist(), "explained": [0.25, 0.125]}


def embedding_record(**ends: Any) -> dict[str, Any]:
    return {"words": WORDS, "groups": [n // 5 for n in range(20)], **ends}


def judgements(**rho: float | None) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "rho": value,
            "low": value and value - 0.1,
            "high": value and value + 0.1,
            "pairs": 812,
            "of": 999,
        }
        for name, value in rho.items()
    ]


def write_sections(tmp_path: Path, row: str = "Small", **changes: Any) -> list[embedding.EmbeddingSection]:
    """Write one run with these changes and return what the page shows of its word vectors."""
    write_run(tmp_path, row, 0, result(row, 0, **changes))
    return embedding.build_sections(join_runs([], collect_runs([tmp_path])))


def drawn_texts(plot: Drawing) -> list[str]:
    return [element.text or "" for element in ET.fromstring(plot.svg).iter() if element.tag == "text"]


def test_both_ends_are_drawn_with_the_same_words(tmp_path: Path) -> None:
    (section,) = write_sections(tmp_path, embedding=embedding_record(input=make_picture(1), output=make_picture(2)))
    first, second = section.pictures
    assert drawn_texts(first) == drawn_texts(second) == WORDS
    assert first.caption.startswith("Input vectors: ")
    assert second.caption.startswith("Output vectors: ")
    assert "25 and 12 % of the variance" in first.caption
    boxes = [re.search('viewBox="(.*?)"', plot.svg) for plot in section.pictures]
    assert len({box and box[1] for box in boxes}) == 1
    ids = [anchor for plot in section.pictures for anchor in re.findall(' id="(.*?)"', plot.svg)]
    assert len(ids) == len(set(ids))


def test_tied_table_is_drawn_once(tmp_path: Path) -> None:
    (section,) = write_sections(
        tmp_path,
        "Small + WT",
        embedding=embedding_record(tied=make_picture()),
        similarity={"tied": judgements(MEN=0.5)},
    )
    assert [plot.caption.partition(":")[0] for plot in section.pictures] == ["Shared table"]
    assert section.tying == "one table for both ends"
    assert section.neighbor_ends == section.similarity_ends == ("shared table",)
    assert section.similarity[0].best is None


def test_words_are_escaped_and_take_the_colour_of_the_page(tmp_path: Path) -> None:
    malicious = ["<script>x</script>", "$a_b$", "a\nb\x00", "w" * 50, *WORDS[4:]]
    (section,) = write_sections(tmp_path, embedding=embedding_record(input=make_picture()) | {"words": malicious})
    seen = drawn_texts(section.pictures[0])
    assert seen[:4] == ["<script>x</script>", "$a_b$", "a\ufffdb\ufffd", "w" * 17 + "…"]
    assert "<script>" not in section.pictures[0].svg
    assert "#010203" not in section.pictures[0].svg


@pytest.mark.parametrize(
    "xy",
    [
        [[0.0, 0.0]] * 20,
        [[float(n), 0.0] for n in range(20)],
        [[0.0, float(n)] for n in range(20)],
        [[1e9 * n, 1e-9 * n] for n in range(20)],
    ],
)
def test_words_in_one_place_are_drawn(tmp_path: Path, xy: list[list[float]]) -> None:
    (section,) = write_sections(tmp_path, embedding=embedding_record(input={"xy": xy, "explained": [0.0, 0.0]}))
    svg = section.pictures[0].svg
    assert drawn_texts(section.pictures[0]) == WORDS
    assert "nan" not in svg
    assert "inf" not in svg


def test_words_without_neighbours_are_drawn(tmp_path: Path) -> None:
    (section,) = write_sections(
        tmp_path, embedding=embedding_record(input=make_picture()) | {"groups": list(range(20))}
    )
    assert drawn_texts(section.pictures[0]) == WORDS


@pytest.mark.parametrize(
    "damage", [{"words": WORDS[:3]}, {"groups": [0]}, {"input": make_picture(count=2)}, {"words": []}]
)
def test_incomplete_record_has_no_picture(tmp_path: Path, damage: dict[str, Any]) -> None:
    (section,) = write_sections(tmp_path, embedding=embedding_record(input=make_picture()) | damage)
    assert section.pictures == ()
    assert section.neighbors


def test_labels_do_not_overlap_and_stay_inside() -> None:
    """Labels of a grid do not overlap; labels of a crowd may, but stay inside the picture."""
    grid = np.array([[60.0 * x + 50, 40.0 * y + 40] for x in range(5) for y in range(4)])
    crowd = 150 + np.random.default_rng(0).normal(size=(20, 2))
    for points, estimate_difference in ((grid, True), (crowd, False)):
        places = embedding._place_labels(points, WORDS, 200.0)
        boxes = [
            (x, y, x + embedding._estimate_width(word), y + 8) for word, (x, y, _) in zip(WORDS, places, strict=True)
        ]
        assert all(left >= 0 and low >= 0 and right <= 4.9 * 72 and high <= 202 for left, low, right, high in boxes)
        covered = [
            min(a[2], b[2]) - max(a[0], b[0]) > 0 and min(a[3], b[3]) - max(a[1], b[1]) > 0
            for a, b in combinations(boxes, 2)
        ]
        assert not (estimate_difference and any(covered))
        assert any(far for *_, far in places) is not estimate_difference


def test_neighbours_of_only_one_end_are_marked(tmp_path: Path) -> None:
    near = {"input": {"cat": [["dog", 0.9], ["cow", 0.8]]}, "output": {"cat": [["dog", 0.7], ["car", 0.6]]}}
    (section,) = write_sections(tmp_path, neighbors=near | {"tied": False})
    assert section.neighbor_ends == ("input vectors", "output vectors")
    ((word, ends),) = section.neighbors
    assert word == "cat"
    assert [[(neighbor.word, neighbor.is_unique) for neighbor in end] for end in ends] == [
        [("dog", False), ("cow", True)],
        [("dog", False), ("car", True)],
    ]


def test_sub_words_are_shown_in_readable_form(tmp_path: Path) -> None:
    near = {"input": {"cat</w>": [["cat", 0.9]]}, "output": {"cat</w>": [["cats</w>", 0.7]]}, "tied": False}
    sub_words = ["cat</w>", "cat", *WORDS[2:]]
    changes = {"neighbors": near, "embedding": embedding_record(input=make_picture()) | {"words": sub_words}}
    for merges, (whole, existing_run, others) in ((None, ("cat</w>", "cat", "cats</w>")), (9, ("cat", "cat…", "cats"))):
        folder = write_run(tmp_path / str(merges), "Small", 0, result("Small", 0, **changes))
        config = json.loads((folder / "config.json").read_text())
        config["settings"]["vocabulary"] = {"bpe": {"merges": merges}}
        (folder / "config.json").write_text(json.dumps(config))
        (section,) = embedding.build_sections(join_runs([], collect_runs([folder])))
        ((word, ends),) = section.neighbors
        assert [word, *(neighbor.word for end in ends for neighbor in end)] == [whole, existing_run, others]
        assert drawn_texts(section.pictures[0])[:2] == [whole, existing_run]


@pytest.mark.parametrize(
    ("ties", "tied", "note"),
    [
        ("three-way", True, "one table for source, input and output"),
        ("decoder", True, "one table for input and output, one for the source"),
        ("none", False, "separate tables for source, input and output"),
    ],
)
def test_note_names_the_shared_tables_of_a_translator(tmp_path: Path, ties: str, tied: bool, note: str) -> None:
    near = {"input": {"cat": [["dog", 0.9]]}, "output": {"cat": [["dog", 0.9]]}, "tied": tied}
    (section,) = write_sections(tmp_path, tied=ties, neighbors=near)
    assert section.tying == note


def test_best_correlation_is_marked_and_unknown_benchmarks_left_out(tmp_path: Path) -> None:
    ends = {"input": judgements(MEN=0.31, SimLex=0.2, Rare=None), "output": judgements(MEN=0.42, SimLex=0.1, Rare=None)}
    (section,) = write_sections(tmp_path, similarity=ends)
    assert [benchmark.name for benchmark in section.similarity] == ["MEN", "SimLex"]
    assert [benchmark.best and benchmark.best.rho for benchmark in section.similarity] == [0.42, 0.2]
    html = render(join_runs([], collect_runs([tmp_path])), "x")
    assert "<strong>0.420</strong> <small>0.32 to 0.52</small>" in html
    assert "812 of 999" in html
    assert "Rare" not in html


def test_old_records_without_pictures_are_shown(tmp_path: Path) -> None:
    (section,) = write_sections(tmp_path)
    assert section.pictures == section.similarity == ()
    assert section.tying == "two tables"
    assert len(section.neighbors) == 8
    assert "<h3>Word similarity</h3>" not in render(join_runs([], collect_runs([tmp_path])), "x")


def test_skip_gram_run_shows_its_loss_and_no_perplexity(tmp_path: Path) -> None:
    keys = ("format", "task", "recipe", "row", "seed", "corpus", "parameters", "training", "neighbors")
    record = {key: value for key, value in result("Small", 0).items() if key in keys}
    lines = [{"kind": "train", "step": n, "epoch": n, "loss": 4 - n / 2, "tokens": 200_000 * n} for n in (1, 2, 3)]
    for row, content in (("Small", record | {"similarity": {"tied": judgements(MEN=-0.31)}}), ("Small + WT", None)):
        folder = write_run(tmp_path, row, 0, content)
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    html = render(join_runs([], collect_runs([tmp_path])), "Skip-gram")
    assert "perplexity" not in html
    assert 'id="curve-pairs-' in html
    assert ">nats per pair</text>" in html
    assert "not finished; last metrics: pairs loss 2.500 in epoch 3" in html
    assert "−0.310 <small>−0.41 to −0.21</small>" in html


def test_run_without_vectors_is_left_out(tmp_path: Path) -> None:
    assert write_sections(tmp_path, neighbors={}) == []
    assert 'id="ends"' not in render(join_runs([], collect_runs([tmp_path])), "x")


def test_same_record_gives_the_same_picture(tmp_path: Path) -> None:
    (section,) = write_sections(tmp_path, embedding=embedding_record(input=make_picture(1), output=make_picture(2)))
    (again,) = embedding.build_sections(join_runs([], collect_runs([tmp_path])))
    assert len(section.pictures) == 2
    assert [(plot.svg, plot.caption) for plot in section.pictures] == [
        (plot.svg, plot.caption) for plot in again.pictures
    ]
    assert replace(section, pictures=()) == replace(again, pictures=())
