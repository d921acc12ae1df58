"""What docs/translation.md says is true: recipes that go together, sizes, choices of settings, and its Python."""

from __future__ import annotations

import re
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import get_args

import pytest
import torch

from pages import ROOT, Page, code, experiments
from reefknot.cli.translate import LINES_AT_ONCE
from reefknot.evaluation.beam import SearchSettings
from reefknot.evaluation.bleu import BleuSettings
from reefknot.models.translator import Translator
from reefknot.recipe import Experiment, build_model, load_recipe
from reefknot.text import tatoeba
from reefknot.text.corpora import PAIRED, PairsSettings
from reefknot.text.pair_batches import MULTIPLE
from reefknot.text.vocabulary import VocabularySettings

PAGE = Page("docs/translation.md")
(FRAME,) = PAGE.snippets("How to read this page")
(FIRST,) = PAGE.snippets("A first translator")
(DRILL,) = PAGE.snippets("Any end on both")
TRAININGS = PAGE.snippets("Training")
ENCODER_HEADINGS = [heading for heading in PAGE.sections if heading.startswith("`")]
WORDS = 10_124
"""Sub-words of Multi30k with 10,000 merges."""


def sizes(experiment: Experiment, words: int = WORDS) -> dict[str, int]:
    with torch.device("meta"):
        return build_model(experiment, words).parameter_counts()


def test_the_first_translator_has_one_table(tmp_path: Path) -> None:
    (experiment,) = experiments(tmp_path, FIRST).values()
    with torch.device("meta"):
        model = build_model(experiment, 2_000)
    assert isinstance(model, Translator)
    assert model.three_way
    assert experiment.input.model_dump()["scale"] == pytest.approx(128**0.5, rel=1e-2)


def test_encoders_and_trainings_go_together(tmp_path: Path) -> None:
    assert (len(ENCODER_HEADINGS), len(TRAININGS)) == (2, 2)
    for heading, training in product(ENCODER_HEADINGS, TRAININGS):
        assert experiments(tmp_path, FRAME, *PAGE.snippets(heading), training).keys() == {"mine"}


@pytest.mark.parametrize(
    ("training", "recipe", "row"),
    [(TRAININGS[0], "pappas2019/multi30k", "TWWT"), (TRAININGS[1], "press2017/table8", "EN-FR: TWWT")],
)
def test_trainings_are_those_of_the_recipes(tmp_path: Path, training: str, recipe: str, row: str) -> None:
    (ours,) = experiments(tmp_path, FRAME, *PAGE.snippets(ENCODER_HEADINGS[0]), training).values()
    theirs = load_recipe(recipe, row=row).experiments[row]
    assert ours.training == theirs.training
    assert "average" not in training or ours.evaluation == theirs.evaluation


def test_other_labels_add_what_is_said(tmp_path: Path) -> None:
    (snippet,) = PAGE.snippets(ENCODER_HEADINGS[1])
    plain = experiments(tmp_path, FRAME, snippet, TRAININGS[0])["mine"]
    model = snippet.partition("[base.output]")[0]
    deep = experiments(tmp_path, FRAME, model, DRILL, TRAININGS[0])["mine"]
    assert f"adds {sizes(deep)['output'] - sizes(plain)['output']:,} parameters" in PAGE.sections["Any end on both"]


def test_sizes_of_the_ties_are_those_of_the_recipe() -> None:
    section = " ".join(PAGE.sections["Three ends and their ties"].split())
    rows = load_recipe("press2017/multi30k").experiments.values()
    baseline, decoder, three = (f"{sum(sizes(row).values()):,}" for row in rows)
    assert f"{baseline}, {decoder} and {three} parameters" in section


def test_bodies_are_as_large_as_is_said() -> None:
    gru = load_recipe("press2017/table8", row="EN-FR: TWWT").experiments["EN-FR: TWWT"]
    assert f"{sizes(gru)['encoder']:,} parameters" in PAGE.sections[ENCODER_HEADINGS[0]]
    for row in ("Transformer (base) (Vaswani et al. 2017)", "Transformer (big) (Vaswani et al. 2017)"):
        body = sizes(load_recipe("pappas2019/table5", row=row).experiments[row])["encoder"]
        assert f"{body:,}" in PAGE.sections[ENCODER_HEADINGS[1]]


def test_every_choice_of_a_setting_is_named() -> None:
    sides = get_args(VocabularySettings.model_fields["sides"].annotation)
    tokenisers = get_args(BleuSettings.model_fields["tokenize"].annotation)
    assert [each for each in (*sides, *tokenisers) if f'"{each}"' not in PAGE.prose] == []
    assert [each for each in SearchSettings.model_fields if f"`{each}`" not in PAGE.sections["Search"]] == []
    assert [each for each in PAIRED if f"`{each}`" not in PAGE.sections["Published corpora"]] == []


def test_defaults_are_those_of_the_code() -> None:
    search, pairs = SearchSettings(), PairsSettings(source="en", target="de")
    assert f"for each sentence, {search.beam};" in PAGE.sections["Search"]
    assert f"tokens: {search.longest:g} and {search.beyond}" in PAGE.sections["Search"]
    assert f"on a side, {pairs.longest} unless" in PAGE.sections["Filters"]
    assert pairs.ratio is None
    assert f"multiples of {MULTIPLE}" in PAGE.sections["Batches of pairs"]
    assert f"{LINES_AT_ONCE:,} lines at a time" in PAGE.sections["Translate"]
    assert f'tokenize = "{BleuSettings().tokenize}"' in PAGE.sections["BLEU"]


def test_numbers_of_pairs_are_those_of_the_text() -> None:
    (told,) = re.findall(r"^\| `tatoeba` .+\| ([\d,]+) / ([\d,]+) / ([\d,]+) \|$", PAGE.text, re.MULTILINE)
    assert "{} pairs to train on, {} valid and {} test".format(*told) in (tatoeba.__doc__ or "")


def test_lengths_of_our_recipes_are_those_of_their_headers() -> None:
    rows = re.findall(r"^\| `reefknot table (\S+) .+?; (\d+) epochs of (\d+) updates", PAGE.text, re.MULTILINE)
    assert len(rows) == 4
    for name, epochs, updates in rows:
        header = (ROOT / f"src/reefknot/recipes/{name}.toml").read_text(encoding="utf-8").partition("title =")[0]
        assert f"{epochs} epochs of {updates} updates" in header


def test_the_python_example_runs() -> None:
    (example,) = code(PAGE.text, "python")
    done = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
