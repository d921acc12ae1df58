"""`reefknot tokens`: sub-words of a folder, of a known corpus and of a recipe."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from reefknot.lab.recipes.recipe import load_recipe
from reefknot.lab.text.pair_dataset import open_pairs

from .conftest import Outcome

Cli = Callable[..., Outcome]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for split in ("train", "valid", "test"):
        (tmp_path / f"{split}.en").write_text("ab ab x\nab\nab\n", encoding="utf-8")
        (tmp_path / f"{split}.de").write_text("ab z\nz\nab\n", encoding="utf-8")
    return tmp_path


def test_subword_counts_are_correct(cli: Cli, folder: Path) -> None:
    command = ("tokens", folder, "--source", "en", "--target", "de", "--merges", 1)
    (counts,) = cli(*command, "--json").json().values()
    assert counts == {
        "corpus": f"{folder.name}/",
        "merges": 1,
        "pairs": 3,
        "source_only": 1,  # x</w>
        "target_only": 1,  # z</w>
        "both": 1,  # ab</w>
        "source_tokens": 5,
        "target_tokens": 4,
    }
    lines = cli(*command).out.splitlines()
    assert lines[0].split() == ["source", "only", "target", "only", "both", "source", "tokens", "target", "tokens"]
    assert lines[1].split() == [str(folder), "1", "1", "1", "5", "4"]


def test_subword_counts_of_a_recipe_match_its_vocabularies(cli: Cli, tmp_path: Path) -> None:
    """Table 1 of Press & Wolf counts the vocabularies that determine the model sizes of their Table 8."""
    texts = {"en": "the table is in the park\nno station\n", "fr": "la table est dans le parc\naucune station\n"}
    place = tmp_path / "wmt14-en-fr"
    place.mkdir()
    for stem in ("train", "newstest2013", "newstest2014"):
        for language, text in texts.items():
            (place / f"{stem}.{language}").write_text(text, encoding="utf-8")
    row = "EN-FR: Baseline"
    counts = cli("tokens", "press2017/table8", "--row", row, "--data", tmp_path, "--json").json()[row]
    assert (counts["source_only"], counts["target_only"], counts["both"]) == (
        5,
        6,
        2,
    )  # all words are merged completely
    experiment = load_recipe("press2017/table8").experiments[row]
    words = open_pairs(experiment.corpus, experiment.vocabulary, data=tmp_path).vocabulary_pair.vocabularies
    for vocabulary, text, only in zip(
        words, texts.values(), (counts["source_only"], counts["target_only"]), strict=True
    ):
        assert sum(count > 0 for count in vocabulary.counts) == only + counts["both"] + 1  # <eos>
        characters = set(text) - set(" \n")
        assert len(vocabulary) == only + counts["both"] + 2 * len(characters) + 2  # <eos>, <unk>


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ("{folder}", 2, "pass the languages with --source and --target"),
        ("{folder} --source en --target en", 2, "source and target are both en"),
        ("{folder} --source en --target fr", 3, "no file is a side of the train text"),
        ("{folder} --source en --target de --row x", 2, "--row has no effect on"),
        ("{folder} --source en --target de --merges 0", 2, "bpe.merges: must be greater than or equal to 1"),
        ("{folder} --source en --target de --data {folder}", 2, "--data has no effect on"),
        ("press2017/table8 --source en", 2, "--source and --target have no effect on a recipe"),
        ("multi30k --target fr", 2, "multi30k has en and de, not en and fr"),
        ("multi30k --data {folder}", 3, "multi30k not found in"),
        ("nowhere", 2, "parallel corpora are multi30k, "),
        ("demo", 2, "demo does not train on parallel text"),
    ],
)
def test_wrong_arguments_are_rejected(words: str, code: int, message: str, cli: Cli, folder: Path) -> None:
    outcome = cli("tokens", *(word.format(folder=folder) for word in words.split()))
    assert outcome.code == code
    assert message in outcome.err
