"""The sentences about a table state exactly what its scores support."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from made_results import ROWS, change, in_pieces, result, scored, write_evaluation, write_run
from reefknot.lab.reports.rows import TableRow, join_runs
from reefknot.lab.reports.sentences import summarise_rows
from reefknot.lab.runs.loading import collect_runs, load_run


def sentences(rows: list[TableRow]) -> list[str]:
    """Return the sentences about these rows, with ordinary spaces."""
    return [sentence.replace("\u00a0", " ") for sentence in summarise_rows(rows)]


def sentences_on(root: Path) -> list[str]:
    """Return the sentences about the runs in a folder."""
    return sentences(join_runs([], collect_runs([root])))


def states(text: list[str], *facts: str) -> bool:
    """Return whether one of the sentences contains all these facts."""
    return any(all(fact in sentence for fact in facts) for sentence in text)


def test_best_worst_savings_and_paper_are_stated(runs: Path) -> None:
    text = sentences_on(runs)
    assert states(text, "Small + WT + PR has the lowest test perplexity, 102.7 ± 0.7", "2,691,800 parameters")
    assert states(text, "Small has the highest, 117.2 ± 0.7")
    assert states(text, "saves 2,000,000 parameters (43 %)", "4,651,600 in Small", "2,651,600 in Small + WT")
    assert states(text, "+2.4 %", "Small: 117.2 against 114.5")
    assert states(text, "1 of 1 pairs", "the same order as in the paper")
    assert states(text, "one seed", "noise")


def test_savings_are_stated_only_if_nothing_else_differs(tmp_path: Path) -> None:
    """The rows are untied, tied, REAL (tied, with another output) and adaptive (tied, in bands)."""
    word = {"kind": "word", "dim": 128}
    plain = {"kind": "softmax", "classifier": {"kind": "plain", "table": "words"}}
    demo: dict[str, tuple[int, dict[str, Any]]] = {
        "untied": (836_792, {"tables": {"words": word, "classes": word}, "output": _using(plain, "classes")}),
        "REAL": (483_000, {"tables": {"words": word}, "output": plain | {"kind": "augmented", "table": "words"}}),
        "adaptive": (336_000, {"tables": {"words": word | {"kind": "banded"}}, "output": plain | {"kind": "adaptive"}}),
        "tied": (485_560, {"tables": {"words": word}, "output": plain}),
    }

    def rows(*names: str) -> list[TableRow]:
        loaded: list[TableRow] = []
        for name in names:
            size, settings = demo[name]
            record = result("Small", 0, row=name, parameters={"total": size}, paper={})
            folder = write_run(tmp_path / "-".join(names) / name, "Small", 0, record)
            config = {"recipe": "demo", "row": name, "settings": settings | {"training": {"seed": len(loaded)}}}
            (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
            loaded += join_runs([], [load_run(folder)])
        return loaded

    text = sentences(rows(*demo))
    assert states(text, "saves 351,232 parameters (42 %)", "836,792 in untied", "485,560 in tied")
    for names in (("untied", "REAL", "adaptive"), ("tied", "adaptive")):
        assert not states(sentences(rows(*names)), "Sharing")


def _using(output: dict[str, Any], table: str) -> dict[str, Any]:
    return output | {"classifier": output["classifier"] | {"table": table}}


def test_only_comparable_rows_are_ranked(tmp_path: Path) -> None:
    write_run(tmp_path, "Small", 0, result("Small", 0, test=scored(120.0)))
    write_run(tmp_path, "Small + WT", 0, in_pieces("Small + WT", unknown=0))
    write_run(tmp_path, "Small + WT + PR", 0, result("Small + WT + PR", 0, test=scored(130.0)))
    text = sentences_on(tmp_path)
    assert states(text, "Small has the lowest test perplexity, 120.0")
    assert states(text, "Small + WT + PR has the highest, 130.0")
    assert not states(text, "order"), "one seed cannot separate two rows"
    assert states(text, "Not compared", "Small + WT.")


def test_perplexity_of_sub_words_has_its_unit(tmp_path: Path) -> None:
    write_run(tmp_path / "words", "Small", 0, in_pieces("Small", unknown=0))
    assert states(
        sentences_on(tmp_path / "words"), "Small reaches a test perplexity of 100.0 per word (10.0 per token)"
    )
    score = scored(10.0, pieces=7, unknown=0, size=26 * 82_430)
    write_run(tmp_path / "clauses", "Small", 0, result("Small", 0, test=score))
    text = sentences_on(tmp_path / "clauses")
    assert states(text, "Small reaches a test perplexity of 10.0 per token (0.894 bits per byte)")


def test_one_seed_per_row_is_called_possible_noise(tmp_path: Path) -> None:
    for row in ROWS:
        write_run(tmp_path, row, 0, result(row, 0))
    assert states(sentences_on(tmp_path), "one seed", "noise")


def test_another_order_than_the_papers_is_stated_if_seeds_show_it(tmp_path: Path) -> None:
    for seed in range(3):
        noise = seed / 10
        write_run(tmp_path, "Small", seed, result("Small", seed, test=scored(117 + noise), paper={"test": 90.0}))
        write_run(tmp_path, "Small + WT", seed, result("Small + WT", seed, test=scored(112 + noise)))
        write_run(tmp_path, "Small + WT + PR", seed, result("Small + WT + PR", seed, test=scored(112.01 + noise)))
    assert states(sentences_on(tmp_path), "0 of 2 pairs", "the same order as in the paper")


def test_rows_with_changed_settings_are_not_compared_with_the_paper(tmp_path: Path) -> None:
    for row in ("Small", "Small + WT"):
        write_run(tmp_path, row, 0, result(row, 0, changed=[change("corpus.tokens", None, 20000)]))
    assert not states(sentences_on(tmp_path), "paper")


def test_each_corpus_and_mode_has_its_sentence(runs: Path, tmp_path: Path) -> None:
    elsewhere = result("Small", 0, corpus={"name": "text8"}, recipe="other")
    write_evaluation(write_run(tmp_path / "other", "Small", 0, elsewhere), "dynamic", test=70.0)
    text = sentences(join_runs([], collect_runs([runs, tmp_path / "other"])))
    assert states(text, "Small + WT + PR has the lowest test perplexity on ptb")
    assert states(text, "other: Small reaches", "text8", "116.7")
    assert states(text, "dynamic evaluation reaches", "text8", "70.0")


def test_table_of_seconds_compares_seconds_per_epoch(tmp_path: Path) -> None:
    for row, seconds in (("Small", 13.0), ("Small + WT", 26.0)):
        record = result(row, 0)
        write_run(tmp_path, row, 0, record | {"training": record["training"] | {"seconds": seconds}})
    rows = [TableRow("Small", {"seconds": 20.0}), TableRow("Small + WT", {"seconds": 22.0})]
    text = sentences(join_runs(rows, collect_runs([tmp_path])))
    assert states(text[:1], "Relative to Small", "2.00 times as long in Small + WT", "paper 1.10")


def test_single_row_is_not_compared(tmp_path: Path) -> None:
    write_run(tmp_path, "Small", 0, result("Small", 0, paper={}))
    text = sentences_on(tmp_path)
    assert len(text) == 1
    assert states(text, "Small reaches", "116.7", "4,651,600 parameters")


def test_wrong_parameter_count_is_stated(tmp_path: Path) -> None:
    record = result("Small", 0, parameters={"total": 5, "expected": 6})
    write_run(tmp_path, "Small", 0, record)
    assert states(sentences_on(tmp_path), "Small has 5 parameters", "expects 6")


def test_unfinished_and_missing_rows_are_named(tmp_path: Path) -> None:
    write_run(tmp_path, "Small")
    text = sentences(join_runs([TableRow("Small"), TableRow("Other")], collect_runs([tmp_path])))
    assert len(text) == 2
    assert states(text[:1], "Not finished (the last metrics are shown)", "Small.")
    (run,) = tmp_path.rglob("metrics.jsonl")
    run.unlink()
    assert states(sentences_on(tmp_path)[:1], "Not finished, without metrics so far", "Small.")
    assert states(text[1:], "Not run: Other.")
    assert summarise_rows([]) == []


def test_paper_is_compared_with_scores_by_its_protocol(tmp_path: Path) -> None:
    protocol = {"name": "awd", "test": {"perplexity": 114.5}}
    write_run(tmp_path, "Small", 0, result("Small", 0, protocol=protocol))
    write_run(tmp_path, "Small + WT", 0, result("Small + WT", 0))
    assert states(sentences_on(tmp_path), "+0.2 %", "Small + WT: 112.6 against 112.4")
