"""The plain reading of a table says what the figures say and no more."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from made_results import ROWS, change, in_pieces, result, scored, write_evaluation, write_run
from reefknot.lab.reports.reading import read
from reefknot.lab.reports.results import collect, load
from reefknot.lab.reports.rows import TableRow, join


def reading(root: Path) -> str:
    return " ".join(read(join([], collect([root])))).replace("\u00a0", " ")


def test_three_rows(runs: Path) -> None:
    text = reading(runs)
    assert "Small + WT + PR has the lowest test perplexity, 102.7 ± 0.7 with 2,691,800 parameters" in text
    assert "Small has the highest, 117.2 ± 0.7" in text
    assert "saves 2,000,000 parameters (43 %): 4,651,600 in Small, 2,651,600 in Small + WT" in text
    assert "+2.4 % (Small: 117.2 against 114.5). Pairs of rows that differ by more than twice" in text
    assert "over seeds: 1, all in the paper's order." in text
    assert "Rows with one seed have none: their differences may be noise." in text


def test_what_sharing_saves_is_said_only_where_nothing_else_differs(tmp_path: Path) -> None:
    """The demo's rows: untied, tied, REAL (tied, another output) and adaptive (tied, in bands)."""
    word = {"kind": "word", "dim": 128}
    plain = {"kind": "softmax", "classifier": {"kind": "plain", "table": "words"}}
    demo: dict[str, tuple[int, dict[str, Any]]] = {
        "untied": (836_792, {"tables": {"words": word, "classes": word}, "output": _using(plain, "classes")}),
        "REAL": (483_000, {"tables": {"words": word}, "output": plain | {"kind": "augmented", "table": "words"}}),
        "adaptive": (336_000, {"tables": {"words": word | {"kind": "banded"}}, "output": plain | {"kind": "adaptive"}}),
        "tied": (485_560, {"tables": {"words": word}, "output": plain}),
    }

    def rows(*names: str) -> list[TableRow]:
        found = []
        for name in names:
            size, settings = demo[name]
            record = result("Small", 0, row=name, parameters={"total": size}, paper={})
            folder = write_run(tmp_path / "-".join(names) / name, "Small", 0, record)
            config = {"recipe": "demo", "row": name, "settings": settings | {"training": {"seed": len(found)}}}
            (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
            found += join([], [load(folder)])
        return found

    said = " ".join(read(rows(*demo))).replace("\u00a0", " ")
    assert "saves 351,232 parameters (42 %): 836,792 in untied, 485,560 in tied, which differ in nothing else" in said
    assert "Sharing" not in " ".join(read(rows("untied", "REAL", "adaptive")))
    assert "Sharing" not in " ".join(read(rows("tied", "adaptive")))


def _using(output: dict[str, Any], table: str) -> dict[str, Any]:
    return output | {"classifier": output["classifier"] | {"table": table}}


def test_only_rows_scored_alike_are_ranked(tmp_path: Path) -> None:
    write_run(tmp_path, "Small", 0, result("Small", 0, test=scored(120.0)))
    write_run(tmp_path, "Small + WT", 0, in_pieces("Small + WT", unknown=0))
    write_run(tmp_path, "Small + WT + PR", 0, result("Small + WT + PR", 0, test=scored(130.0)))
    text = reading(tmp_path)
    assert "Small has the lowest test perplexity, 120.0" in text
    assert "Small + WT + PR has the highest, 130.0" in text
    assert "order" not in text  # one seed tells no two rows apart
    assert "Not compared, as scored in another way: Small + WT." in text


def test_one_seed_may_be_noise(tmp_path: Path) -> None:
    for row in ROWS:
        write_run(tmp_path, row, 0, result(row, 0))
    assert "One seed for each row: differences between rows may be noise." in reading(tmp_path)


def test_another_order_than_the_papers_is_said_where_seeds_show_it(tmp_path: Path) -> None:
    for seed in range(3):
        noise = seed / 10
        write_run(tmp_path, "Small", seed, result("Small", seed, test=scored(117 + noise), paper={"test": 90.0}))
        write_run(tmp_path, "Small + WT", seed, result("Small + WT", seed, test=scored(112 + noise)))
        write_run(tmp_path, "Small + WT + PR", seed, result("Small + WT + PR", seed, test=scored(112.01 + noise)))
    assert "over seeds: 2, none in the paper's order." in reading(tmp_path)


def test_rows_with_other_settings_are_not_held_against_the_paper(tmp_path: Path) -> None:
    for row in ("Small", "Small + WT"):
        write_run(tmp_path, row, 0, result(row, 0, changed=[change("corpus.tokens", None, 20000)]))
    assert "paper" not in reading(tmp_path)


def test_each_text_and_way_of_scoring_has_its_sentence(runs: Path, tmp_path: Path) -> None:
    elsewhere = result("Small", 0, corpus={"name": "text8"}, recipe="other")
    write_evaluation(write_run(tmp_path / "other", "Small", 0, elsewhere), "dynamic", test=70.0)
    text = " ".join(read(join([], collect([runs, tmp_path / "other"]))))
    assert "Small + WT + PR has the lowest test perplexity on ptb, " in text
    assert "other: Small reaches a test perplexity on text8 of 116.7" in text
    assert "dynamic evaluation reaches a test perplexity on text8 by dynamic evaluation of 70.0" in text


def test_a_table_of_seconds_speaks_of_seconds(tmp_path: Path) -> None:
    for row, seconds in (("Small", 13.0), ("Small + WT", 26.0)):
        record = result(row, 0)
        write_run(tmp_path, row, 0, record | {"training": record["training"] | {"seconds": seconds}})
    rows = [TableRow("Small", {"seconds": 20.0}), TableRow("Small + WT", {"seconds": 22.0})]
    assert read(join(rows, collect([tmp_path])))[0] == (
        "Against Small, an epoch takes 2.00 times as long in Small + WT (paper 1.10)."
    )


def test_one_row_is_compared_with_nothing(tmp_path: Path) -> None:
    write_run(tmp_path, "Small", 0, result("Small", 0, paper={}))
    assert reading(tmp_path) == "Small reaches a test perplexity of 116.7 with 4,651,600 parameters."


def test_a_wrong_parameter_count_is_said(tmp_path: Path) -> None:
    record = result("Small", 0, parameters={"total": 5, "expected": 6})
    write_run(tmp_path, "Small", 0, record)
    assert "Small has 5 parameters where 6 were expected." in reading(tmp_path)


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    write_run(tmp_path, "Small")
    text = " ".join(read(join([TableRow("Small"), TableRow("Other")], collect([tmp_path]))))
    assert text == "Not finished, shown with the last metrics: Small. Not run: Other."
    assert read([]) == []


def test_the_paper_is_compared_with_what_was_scored_its_way(tmp_path: Path) -> None:
    protocol = {"name": "awd", "test": {"perplexity": 114.5}}
    write_run(tmp_path, "Small", 0, result("Small", 0, protocol=protocol))
    write_run(tmp_path, "Small + WT", 0, result("Small + WT", 0))
    text = reading(tmp_path)
    assert "+0.2 % (Small + WT: 112.6 against 112.4)" in text
