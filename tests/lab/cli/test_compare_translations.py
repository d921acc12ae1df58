"""`reefknot compare` on translators: BLEU with an interval, the spread over seeds, sizes, rejected runs."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from reefknot.lab.evaluation.bleu import BleuSettings, create_metrics

from .conftest import Outcome, Runs
from .test_compare import copy_run
from .test_translate import RECIPE, WORDS, translate_line

Cli = Callable[..., Outcome]

UNTIED = """
[[rows]]
name = "untied"
[rows.set]
tables.sources = { kind = "word", dim = 32 }
source.table = "sources"
"""
SENTENCES = 60


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pairs")
    rng = random.Random(0)
    for split, num_lines in (("train", 80), ("valid", 30), ("test", SENTENCES)):
        lines = [" ".join(rng.sample(list(WORDS), rng.randint(4, 8))) for _ in range(num_lines)]
        for language, text in (("en", lines), ("de", map(translate_line, lines))):
            (folder / f"{split}.{language}").write_text("".join(f"{line}\n" for line in text), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def train(cli: Cli, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    def run(pairs: Path, *words: object) -> Path:
        folder = tmp_path_factory.mktemp("trained")
        recipe = folder / "tiny.toml"
        recipe.write_text(RECIPE.format(corpus=repr(str(pairs))) + UNTIED, encoding="utf-8")
        settings = ["training.epochs=1", "encoder.units=8", "evaluation.search.beam=1"]
        outcome = cli("train", recipe, "--out", folder / "run", "--device", "cpu", *settings, *words)
        assert outcome.code == 0, outcome.err
        return folder / "run"

    return run


@pytest.fixture(scope="module")
def tied(train: Callable[..., Path], pairs: Path) -> Path:
    """A run that is hardly trained. Tests copy it and replace its translations."""
    return train(pairs, "--row", "tiny")


@pytest.fixture(scope="module")
def untied(train: Callable[..., Path], pairs: Path) -> Path:
    return train(pairs, "--row", "untied")


@pytest.fixture
def copy_with_translations(tmp_path: Path, pairs: Path) -> Callable[..., Path]:
    """Copy a run with translations in which a word is correct with a given probability."""

    def copy_run_with(run: Path, accuracy: float, name: str, seed: int = 0, **settings: Any) -> Path:
        copy = copy_run(run, tmp_path / name, seed=seed, **settings)
        rng = random.Random(seed + int(1000 * accuracy))
        for split in ("valid", "test"):
            lines = (pairs / f"{split}.de").read_text(encoding="utf-8").splitlines()
            translations = [
                " ".join(word if rng.random() < accuracy else rng.choice(list(WORDS.values())) for word in line.split())
                for line in lines
            ]
            (copy / "translations" / f"{split}.txt").write_text(
                "".join(f"{line}\n" for line in translations), encoding="utf-8"
            )
        return copy

    return copy_run_with


def count_parameters(run: Path) -> int:
    return int(json.loads((run / "result.json").read_text(encoding="utf-8"))["parameters"]["total"])


def test_bleu_equals_the_metric_on_saved_translations(
    cli: Cli, tied: Path, untied: Path, pairs: Path, copy_with_translations: Callable[..., Path]
) -> None:
    runs = copy_with_translations(untied, 0.5, "a"), copy_with_translations(tied, 0.7, "b")
    metrics = create_metrics(BleuSettings(tokenize="none"))
    for split, num_sentences in (("valid", 30), ("test", SENTENCES)):
        references = (pairs / f"{split}.de").read_text(encoding="utf-8").splitlines()
        texts = [(run / "translations" / f"{split}.txt").read_text(encoding="utf-8").splitlines() for run in runs]
        a, b = (metrics.score(lines, references) for lines in texts)
        (record,) = cli("compare", *runs, "--split", split, "--json").json()
        assert (record["bleu_a"], record["bleu_b"]) == (a.bleu, b.bleu)
        assert 5 < record["bleu_a"] < record["bleu_b"] < 95
        assert (record["split"], record["sentences"], record["bleu_signature"]) == (
            split,
            num_sentences,
            a.bleu_signature,
        )


def test_bleu_equals_the_result_of_the_run(cli: Cli, tied: Path, untied: Path) -> None:
    (record,) = cli("compare", tied, untied, "--json").json()
    scores = json.loads((tied / "result.json").read_text(encoding="utf-8"))["translation"]["test"]
    assert (record["bleu_a"], record["bleu_signature"]) == (scores["bleu"], scores["bleu_signature"])
    assert record["sentences"] == scores["pairs"]


def test_clear_difference_is_reported(
    cli: Cli, tied: Path, untied: Path, copy_with_translations: Callable[..., Path]
) -> None:
    a, b = copy_with_translations(untied, 0.5, "a"), copy_with_translations(tied, 0.9, "b")
    (record,) = cli("compare", a, b, "--json").json()
    low, high = record["interval"]
    assert 0 < low < record["difference"] == record["bleu_b"] - record["bleu_a"] < high
    assert record["seen"]
    assert record["interval_with_seeds"] is None
    saved = count_parameters(untied) - count_parameters(tied)
    assert saved > 0
    assert record["parameters_difference"] == -saved
    text = cli("compare", a, b).out
    assert f"A = {a} (1 seed)\ntest text: {SENTENCES} sentences, en to de\nBLEU|nrefs:1|case:mixed" in text
    assert f"B = {b} (1 seed)\n  BLEU A {record['bleu_a']:.2f}, B {record['bleu_b']:.2f}\n" in text
    assert f": {saved:,} fewer, {saved / count_parameters(untied):.1%} of A's\n" in text
    assert f"  B is better: {record['difference']:.2f} BLEU more" in text
    assert f"{saved:,} more" in cli("compare", b, a).out


def test_run_does_not_differ_from_its_copy(cli: Cli, tied: Path, copy_with_translations: Callable[..., Path]) -> None:
    a, b = (copy_with_translations(tied, 0.6, name) for name in "ab")
    text = cli("compare", a, b).out
    assert "  no difference seen (B - A +0.00, 95 % interval over sentences +0.00 to +0.00)" in text
    assert f"parameters A {count_parameters(tied):,}, B {count_parameters(tied):,}: as many\n" in text


def test_seeds_are_averaged_and_widen_the_interval(
    cli: Cli, tied: Path, untied: Path, copy_with_translations: Callable[..., Path], tmp_path: Path
) -> None:
    for seed in (0, 1, 2):
        copy_with_translations(untied, 0.5, f"a/seed{seed}", seed=seed)
        copy_with_translations(tied, 0.55, f"b/seed{seed}", seed=seed)
    a, b = tmp_path / "a", tmp_path / "b"
    (b / "seed2" / "result.json").unlink()
    (record,) = cli("compare", a, b, "--json").json()
    assert record["seeds"] == [3, 2]
    assert [len(scores) for scores in record["bleu_of_seeds"]] == [3, 2]
    assert record["bleu_a"] == pytest.approx(sum(record["bleu_of_seeds"][0]) / 3)
    assert record["interval_with_seeds"][0] < record["interval"][0]
    text = cli("compare", a, b).out
    assert f"B = {b} (2 of 3 seeds finished)\n" in text
    assert f"BLEU A {record['bleu_a']:.2f} +- {record['spreads'][0]:.2f}, B {record['bleu_b']:.2f} +- " in text
    assert "interval over sentences and seeds " in text
    assert len(cli("compare", a / "seed0", b, a / "seed1", "--json").json()) == 2


def test_translator_and_language_model_are_not_compared(cli: Cli, tied: Path, runs: Runs) -> None:
    for words in ((tied, runs.tied), (runs.tied, tied)):
        outcome = cli("compare", *words)
        assert outcome.code == 2
        assert f"{tied} is a translator" in outcome.err
        assert f"{runs.tied} is a language model" in outcome.err
        assert "no fair comparison" in outcome.err


@pytest.mark.parametrize(
    "words", [("--by", "blocks"), ("--block", "500"), ("--bands",), ("--bands", "--figure", "new.svg")], ids=" ".join
)
def test_options_for_language_models_are_rejected(cli: Cli, tied: Path, untied: Path, words: tuple[str, ...]) -> None:
    outcome = cli("compare", tied, untied, *words)
    assert (outcome.code, outcome.out) == (2, "")
    assert re.search(rf"{words[0]} has no effect on .*, which is a translator; leave {words[0]} out", outcome.err)


def test_training_text_is_rejected(cli: Cli, tied: Path, untied: Path) -> None:
    outcome = cli("compare", tied, untied, "--split", "train")
    expected = "reefknot: --split train: a run stores translations of valid and test only\n"
    assert (outcome.code, outcome.err) == (2, expected)


def test_different_texts_are_rejected(
    cli: Cli, tied: Path, train: Callable[..., Path], pairs: Path, tmp_path: Path
) -> None:
    others = tmp_path / "others"
    shutil.copytree(pairs, others)
    lines = (others / "test.de").read_text(encoding="utf-8").splitlines()
    (others / "test.de").write_text("".join(f"{line}\n" for line in reversed(lines)), encoding="utf-8")
    other = train(others, "--row", "tiny")
    outcome = cli("compare", tied, other)
    assert outcome.code == 2
    assert f"{tied} and {other}: no fair comparison: their test texts differ" in outcome.err
    assert cli("compare", tied, other, "--split", "valid").code == 0


def test_different_directions_are_rejected(cli: Cli, tied: Path, train: Callable[..., Path], pairs: Path) -> None:
    back = train(pairs, "--row", "tiny", "corpus.pairs.source=de", "corpus.pairs.target=en")
    outcome = cli("compare", tied, back)
    assert outcome.code == 2
    assert "no fair comparison: one translates en to de, the other de to en; compare runs of one dir" in outcome.err


def test_different_settings_of_bleu_are_rejected(
    cli: Cli, tied: Path, copy_with_translations: Callable[..., Path]
) -> None:
    other = copy_with_translations(tied, 0.5, "other", evaluation={"bleu": {"tokenize": "13a"}})
    outcome = cli("compare", tied, other)
    assert outcome.code == 2
    assert "no fair comparison: their settings of BLEU differ" in outcome.err


def test_different_search_settings_print_a_warning(
    cli: Cli, tied: Path, copy_with_translations: Callable[..., Path]
) -> None:
    other = copy_with_translations(tied, 0.5, "other")
    result = json.loads((other / "result.json").read_text(encoding="utf-8"))
    result["translation"]["test"]["search"]["beam"] = 9
    (other / "result.json").write_text(json.dumps(result), encoding="utf-8")
    outcome = cli("compare", tied, other)
    assert outcome.code == 0
    assert f"note: {other} and {tied} searched with different settings: beam 9, not 1\n" in outcome.err
    assert "note" not in cli("compare", tied, other, "--split", "valid").err


def test_missing_translations_are_rejected(cli: Cli, tied: Path, copy_with_translations: Callable[..., Path]) -> None:
    short = copy_with_translations(tied, 0.5, "short")
    (short / "translations" / "test.txt").write_text("ein Hund\n", encoding="utf-8")
    outcome = cli("compare", tied, short)
    assert outcome.code == 3
    assert f"run 1 of system B has 1 translations, but there are {SENTENCES} references" in outcome.err
    shutil.rmtree(short / "translations")
    outcome = cli("compare", tied, short)
    assert outcome.code == 3
    assert f"{short / 'translations' / 'test.txt'} is missing" in outcome.err


def test_moved_pairs_are_found_with_data_option(
    cli: Cli, train: Callable[..., Path], pairs: Path, tmp_path: Path
) -> None:
    text, moved = tmp_path / "text", tmp_path / "moved"
    shutil.copytree(pairs, text)
    run = train(text, "--row", "tiny")
    copy = tmp_path / "copy"
    shutil.copytree(run, copy, symlinks=True)
    text.rename(moved)
    assert f"its text was in {text}, which does not exist here" in cli("compare", run, copy).err
    assert cli("compare", run, copy, "--data", moved).code == 0
