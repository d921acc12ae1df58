"""Vocabulary sizes that are known without reading a text."""

from __future__ import annotations

import pytest

from reefknot.errors import CorpusNotFound
from reefknot.lab.cli.sizes import TextCache
from reefknot.lab.recipes.recipe import load_recipe


@pytest.mark.parametrize(
    ("settings", "size"),
    [([], 10_000), (["vocabulary.dictionary=fairseq"], 10_008), (["corpus.name=wikitext-2"], 33_278)],
)
def test_vocabulary_size_of_published_corpus_is_known(
    settings: list[str], size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("REEFKNOT_DATA", raising=False)
    recipe = load_recipe("press2017/table6", settings)
    assert {TextCache(None).vocabulary_size(experiment) for experiment in recipe.experiments.values()} == {size}


def test_vocabulary_size_of_subwords_needs_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REEFKNOT_DATA", raising=False)
    recipe = load_recipe("press2017/table6", ["vocabulary.bpe={}"])
    with pytest.raises(CorpusNotFound):
        TextCache(None).vocabulary_size(next(iter(recipe.experiments.values())))
