"""What the ends learned, on the page: pictures with labels apart, neighbours marked where ends differ, similarity."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from made_results import result, write_run
from reefknot.lab.reports import embedding
from reefknot.lab.reports.page import render
from reefknot.lab.reports.results import collect
from reefknot.lab.reports.rows import join

WORDS = [f"word{n}" for n in range(20)]


def picture(seed: int = 0, count: int = 20) -> dict[str, Any]:
    places = np.random.default_rng(seed).normal(size=(count, 2)).round(3)
    return {"xy": places.tolist(), "explained": [0.25, 0.125]}


def shown(**ends: Any) -> dict[str, Any]:
    return {"words": WORDS, "groups": [n // 5 for n in range(20)], **ends}


def judged(**rho: float | None) -> list[dict[str, Any]]:
    return [
        {"name": name, "rho": each, "low": each and each - 0.1, "high": each and each + 0.1, "pairs": 812, "of": 999}
        for name, each in rho.items()
    ]


def learned(tmp_path: Path, row: str = "Small", **changes: Any) -> list[embedding.Learned]:
    write_run(tmp_path, row, 0, result(row, 0, **changes))
    return embedding.learned(join([], collect([tmp_path])))


def texts(plot: embedding.Plot) -> list[str]:
    return [element.text or "" for element in ET.fromstring(plot.svg).iter() if element.tag == "text"]


def test_both_ends_are_drawn_side_by_side_with_the_same_words(tmp_path: Path) -> None:
    (found,) = learned(tmp_path, embedding=shown(input=picture(1), output=picture(2)))
    one, other = found.pictures
    assert texts(one) == texts(other) == WORDS
    assert one.caption.startswith("Input vectors: ")
    assert other.caption.startswith("Output vectors: ")
    assert "25 and 12 % of the variance" in one.caption
    boxes = [re.search('viewBox="(.*?)"', plot.svg) for plot in found.pictures]
    assert len({box and box[1] for box in boxes}) == 1
    ids = [each for plot in found.pictures for each in re.findall(' id="(.*?)"', plot.svg)]
    assert len(ids) == len(set(ids))


def test_one_table_is_drawn_once(tmp_path: Path) -> None:
    (found,) = learned(tmp_path, "Small + WT", embedding=shown(tied=picture()), similarity={"tied": judged(MEN=0.5)})
    assert [plot.caption.partition(":")[0] for plot in found.pictures] == ["Shared table"]
    assert found.note == "one table for both ends"
    assert found.near_ends == found.judged_ends == ("shared table",)
    assert found.judged[0].best is None


def test_the_page_takes_the_words_as_text_in_its_own_colour(tmp_path: Path) -> None:
    hostile = ["<script>x</script>", "$a_b$", "a\nb\x00", "w" * 50, *WORDS[4:]]
    (found,) = learned(tmp_path, embedding=shown(input=picture()) | {"words": hostile})
    seen = texts(found.pictures[0])
    assert seen[:4] == ["<script>x</script>", "$a_b$", "a\ufffdb\ufffd", "w" * 17 + "…"]
    assert "<script>" not in found.pictures[0].svg
    assert "#010203" not in found.pictures[0].svg


@pytest.mark.parametrize(
    "xy",
    [
        [[0.0, 0.0]] * 20,
        [[float(n), 0.0] for n in range(20)],
        [[0.0, float(n)] for n in range(20)],
        [[1e9 * n, 1e-9 * n] for n in range(20)],
    ],
)
def test_words_without_extent_are_drawn_all_the_same(tmp_path: Path, xy: list[list[float]]) -> None:
    (found,) = learned(tmp_path, embedding=shown(input={"xy": xy, "explained": [0.0, 0.0]}))
    svg = found.pictures[0].svg
    assert texts(found.pictures[0]) == WORDS
    assert "nan" not in svg
    assert "inf" not in svg


def test_a_word_without_neighbours_stands_alone(tmp_path: Path) -> None:
    (found,) = learned(tmp_path, embedding=shown(input=picture()) | {"groups": list(range(20))})
    assert texts(found.pictures[0]) == WORDS


@pytest.mark.parametrize("damage", [{"words": WORDS[:3]}, {"groups": [0]}, {"input": picture(count=2)}, {"words": []}])
def test_a_record_without_a_place_for_every_word_has_no_picture(tmp_path: Path, damage: dict[str, Any]) -> None:
    (found,) = learned(tmp_path, embedding=shown(input=picture()) | damage)
    assert found.pictures == ()
    assert found.near


def test_labels_keep_off_each_other_and_inside() -> None:
    """Of points that leave room for it; and no label of a crowd leaves the picture."""
    grid = np.array([[60.0 * x + 50, 40.0 * y + 40] for x in range(5) for y in range(4)])
    crowd = 150 + np.random.default_rng(0).normal(size=(20, 2))
    for points, apart in ((grid, True), (crowd, False)):
        places = embedding._place(points, WORDS, 200.0)
        boxes = [(x, y, x + embedding._width(word), y + 8) for word, (x, y, _) in zip(WORDS, places, strict=True)]
        assert all(left >= 0 and low >= 0 and right <= 4.9 * 72 and high <= 202 for left, low, right, high in boxes)
        covered = [
            min(a[2], b[2]) - max(a[0], b[0]) > 0 and min(a[3], b[3]) - max(a[1], b[1]) > 0
            for a, b in combinations(boxes, 2)
        ]
        assert not (apart and any(covered))
        assert any(far for *_, far in places) is not apart


def test_neighbours_that_only_one_end_has_are_marked(tmp_path: Path) -> None:
    near = {"input": {"cat": [["dog", 0.9], ["cow", 0.8]]}, "output": {"cat": [["dog", 0.7], ["car", 0.6]]}}
    (found,) = learned(tmp_path, neighbors=near | {"tied": False})
    assert found.near_ends == ("input vectors", "output vectors")
    ((word, ends),) = found.near
    assert word == "cat"
    assert [[(each.word, each.only) for each in end] for end in ends] == [
        [("dog", False), ("cow", True)],
        [("dog", False), ("car", True)],
    ]


def test_pieces_of_words_are_shown_as_people_read_them(tmp_path: Path) -> None:
    near = {"input": {"cat</w>": [["cat", 0.9]]}, "output": {"cat</w>": [["cats</w>", 0.7]]}, "tied": False}
    pieces = ["cat</w>", "cat", *WORDS[2:]]
    changes = {"neighbors": near, "embedding": shown(input=picture()) | {"words": pieces}}
    for merges, (whole, begun, others) in ((None, ("cat</w>", "cat", "cats</w>")), (9, ("cat", "cat…", "cats"))):
        folder = write_run(tmp_path / str(merges), "Small", 0, result("Small", 0, **changes))
        config = json.loads((folder / "config.json").read_text())
        config["settings"]["vocabulary"] = {"bpe": {"merges": merges}}
        (folder / "config.json").write_text(json.dumps(config))
        (found,) = embedding.learned(join([], collect([folder])))
        ((word, ends),) = found.near
        assert [word, *(each.word for end in ends for each in end)] == [whole, begun, others]
        assert texts(found.pictures[0])[:2] == [whole, begun]


@pytest.mark.parametrize(
    ("ties", "tied", "note"),
    [
        ("three-way", True, "one table for source, input and output"),
        ("decoder", True, "one table for input and output, one for the source"),
        ("none", False, "two tables for input and output, and the source's"),
    ],
)
def test_the_source_of_a_translator_is_an_end_too(tmp_path: Path, ties: str, tied: bool, note: str) -> None:
    near = {"input": {"cat": [["dog", 0.9]]}, "output": {"cat": [["dog", 0.9]]}, "tied": tied}
    (found,) = learned(tmp_path, tied=ties, neighbors=near)
    assert found.note == note


def test_the_higher_correlation_is_the_best_and_what_nobody_knows_is_left_out(tmp_path: Path) -> None:
    ends = {"input": judged(MEN=0.31, SimLex=0.2, Rare=None), "output": judged(MEN=0.42, SimLex=0.1, Rare=None)}
    (found,) = learned(tmp_path, similarity=ends)
    assert [each.name for each in found.judged] == ["MEN", "SimLex"]
    assert [each.best and each.best.rho for each in found.judged] == [0.42, 0.2]
    html = render(join([], collect([tmp_path])), "x")
    assert "<strong>0.420</strong> <small>0.32 to 0.52</small>" in html
    assert "812 of 999" in html
    assert "Rare" not in html


def test_records_from_before_are_shown_as_before(tmp_path: Path) -> None:
    (found,) = learned(tmp_path)
    assert found.pictures == found.judged == ()
    assert found.note == "two tables"
    assert len(found.near) == 8
    assert "<h3>Word similarity</h3>" not in render(join([], collect([tmp_path])), "x")


def test_a_run_of_skip_gram_has_its_loss_and_no_perplexity(tmp_path: Path) -> None:
    kept = ("format", "task", "recipe", "row", "seed", "corpus", "parameters", "training", "neighbors")
    record = {key: value for key, value in result("Small", 0).items() if key in kept}
    lines = [{"kind": "train", "step": n, "epoch": n, "loss": 4 - n / 2, "tokens": 200_000 * n} for n in (1, 2, 3)]
    for row, found in (("Small", record | {"similarity": {"tied": judged(MEN=-0.31)}}), ("Small + WT", None)):
        folder = write_run(tmp_path, row, 0, found)
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    html = render(join([], collect([tmp_path])), "Skip-gram")
    assert "perplexity" not in html
    assert 'id="curve-pairs-' in html
    assert ">nats per pair</text>" in html
    assert "not finished; last metrics: pairs loss 2.500 in epoch 3" in html
    assert "−0.310 <small>−0.41 to −0.21</small>" in html


def test_a_run_with_nothing_to_show_is_left_out(tmp_path: Path) -> None:
    assert learned(tmp_path, neighbors={}) == []
    assert 'id="ends"' not in render(join([], collect([tmp_path])), "x")


def test_the_same_record_gives_the_same_bytes(tmp_path: Path) -> None:
    (found,) = learned(tmp_path, embedding=shown(input=picture(1), output=picture(2)))
    (again,) = embedding.learned(join([], collect([tmp_path])))
    assert found == again
