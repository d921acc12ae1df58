"""Recipes of translation tables, the papers' and ours: scores, sizes and consistent settings."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from reefknot.lab.cli.main import app
from reefknot.lab.config.parts import SCHEDULES
from reefknot.lab.recipes.file import Row
from reefknot.lab.recipes.recipe import Recipe, load_recipe
from reefknot.lab.reports.rows import join_runs
from reefknot.lab.reports.table import rows_from_recipe
from reefknot.lab.runs.loading import collect_runs
from reefknot.lab.runs.scores import BLEU, CHRF
from reefknot.lab.text.vocabulary import VocabularyPair

PAPER_SCORES = Path(__file__).parent / "translation.csv"
PAPERS = ["press2017/table8", "pappas2019/table5"]
OURS = ["press2017/multi30k", "press2017/tatoeba", "pappas2019/multi30k", "pappas2019/tatoeba"]
ATTENTION_GRU = {
    "EN-FR: Baseline": (VocabularyPair(87_000, 92_000), 167_860_501),
    "EN-FR: Decoder WT": (VocabularyPair(87_000, 92_000), 121_860_501),
    "EN-FR: TWWT": (VocabularyPair(94_000, 94_000), 79_362_501),
    "EN-DE: Baseline": (VocabularyPair(83_000, 91_000), 164_859_501),
    "EN-DE: Decoder WT": (VocabularyPair(83_000, 91_000), 119_359_501),
    "EN-DE: TWWT": (VocabularyPair(94_000, 94_000), 79_362_501),
}
"""Vocabulary sizes as printed in the paper (in thousands), and the resulting parameter counts."""


def size(recipe: Recipe, row: Row | str, words: int | VocabularyPair) -> int:
    with torch.device("meta"):
        model = recipe.build(recipe.row(row) if isinstance(row, str) else row, words)
    return sum(model.parameter_counts().values())


def settings(part: Any, *left_out: str) -> dict[str, Any]:
    return {key: value for key, value in part.model_dump().items() if key not in left_out}


@pytest.mark.parametrize("name", PAPERS)
def test_every_row_of_the_paper_has_its_scores(name: str) -> None:
    with PAPER_SCORES.open(encoding="utf-8", newline="") as file:
        lines = [line for line in csv.DictReader(file) if line["recipe"] == name]
    papers = {
        line["row"]: {key: float(line[key]) for key in ("bleu_valid", "bleu_test") if line[key]} for line in lines
    }
    actual = {row.name: row.paper for row in load_recipe(name).rows}
    assert actual == papers
    assert list(actual) == list(papers)  # rows are in the order of the paper


def test_parameter_counts_of_attention_models() -> None:
    recipe = load_recipe("press2017/table8")
    assert {row.name: size(recipe, row, ATTENTION_GRU[row.name][0]) for row in recipe.rows} == {
        name: number for name, (_, number) in ATTENTION_GRU.items()
    }
    for name, (words, _) in ATTENTION_GRU.items():
        assert (recipe.experiments[name].vocabulary.sides == "joint") == words.joint


def test_parameter_counts_of_transformers() -> None:
    """The paper prints 79.4, 79.9 and 240 million parameters, but not the number of sub-words."""
    recipe = load_recipe("pappas2019/table5")
    base, drill = (
        size(recipe, f"Transformer{name}", 34_400) for name in (" (base) (Vaswani et al. 2017)", "-DRILL (base)")
    )
    assert f"{base / 1e6:.1f}" == "79.4"
    assert f"{drill / 1e6:.1f}" == "79.9"
    assert drill - base == 525_312
    assert size(recipe, "Transformer (big) (Vaswani et al. 2017)", 34_400) == pytest.approx(240e6, rel=0.05)


@pytest.mark.parametrize(
    ("row", "dim"), [("Transformer-DRILL (base)", 512), ("Transformer (big) (Vaswani et al. 2017)", 1024)]
)
def test_learning_rate_is_twice_that_of_vaswani(row: str, dim: int) -> None:
    training = load_recipe("pappas2019/table5").experiments[row].training
    schedule = SCHEDULES.build(training.schedule, {})
    for update in (1, 4_000, 8_000, 350_000):
        theirs = 2 * dim**-0.5 * min(update**-0.5, update * 8_000**-1.5)
        assert training.optimiser.learning_rate * schedule.learning_rate_factor(1, update) == pytest.approx(theirs)  # type: ignore[attr-defined]


def test_settings_are_those_of_the_papers() -> None:
    press = load_recipe("press2017/table8").experiments["EN-DE: TWWT"]
    assert settings(press.training.optimiser) == {
        "kind": "adadelta",
        "learning_rate": 1.0,
        "rho": 0.95,
        "epsilon": 1e-6,
    }
    assert (press.training.updates, press.training.clip) == (300_000, 1.0)
    assert press.corpus.pairs is not None
    assert press.corpus.pairs.model_dump() == {"source": "en", "target": "de", "longest": 50, "ratio": None}
    assert press.vocabulary.bpe is not None
    assert press.vocabulary.bpe.merges == 89_500
    pappas = load_recipe("pappas2019/table5").experiments["Transformer-DRILL (base)"]
    assert (pappas.training.updates, pappas.training.clip) == (350_000, None)
    assert pappas.training.batch * pappas.training.steps == 2 * 4_096
    assert pappas.training.accumulate == 2
    assert pappas.output.smoothing == 0.1  # type: ignore[attr-defined]
    assert settings(pappas.training.optimiser)["beta2"] == 0.998


@pytest.mark.parametrize("name", OURS)
def test_our_rows_differ_only_in_their_ends(name: str) -> None:
    first, *others = load_recipe(name).experiments.values()
    for experiment in others:
        assert settings(experiment, "tables", "source", "input", "output") == settings(
            first, "tables", "source", "input", "output"
        )
        assert settings(experiment.output, "classifier") == settings(first.output, "classifier")


@pytest.mark.parametrize("name", OURS)
def test_every_tie_saves_one_table(name: str) -> None:
    recipe = load_recipe(name)
    baseline, decoder, all_three = (size(recipe, row, 10_000) for row in ("Baseline", "Decoder WT", "TWWT"))
    assert baseline - decoder == decoder - all_three == 256 * 10_000


def test_label_encoders_add_only_their_layers() -> None:
    recipe = load_recipe("pappas2019/multi30k")
    plain = size(recipe, "TWWT", 10_000)
    added = {row: size(recipe, f"TWWT + {row}", 10_000) - plain for row in ("bilinear", "dual", "DRILL")}
    assert added == {"bilinear": 256**2, "dual": 2 * (256**2 + 256), "DRILL": 2 * (256**2 + 256)}


@pytest.mark.parametrize("name", [name for name in PAPERS + OURS if name.startswith("pappas")])
def test_inputs_are_scaled_by_the_square_root_of_the_dimension(name: str) -> None:
    for experiment in load_recipe(name).experiments.values():
        dim = experiment.tables["words"].dim  # type: ignore[attr-defined]
        for end in (experiment.source, experiment.input):
            assert end.scale == dim**0.5  # type: ignore[union-attr]


@pytest.mark.parametrize("name", OURS)
def test_averaged_checkpoints_are_those_at_epoch_ends(name: str) -> None:
    for experiment in load_recipe(name).experiments.values():
        training = experiment.training
        assert experiment.evaluation.average == training.keep == 10
        assert training.save_every > 10_000  # more than the number of updates


def test_row_can_be_trained_and_has_bleu(tmp_path: Path) -> None:
    """The recipe is used as shipped, with smaller sizes."""
    text, run = tmp_path / "text", tmp_path / "run"
    text.mkdir()
    pairs = [("the dog runs .", "der hund läuft ."), ("a cat sleeps", "eine katze schläft"), ("a dog", "ein hund")]
    for split, times in (("train", 8), ("valid", 1), ("test", 1)):
        for side, language in enumerate(("en", "de")):
            lines = "".join(f"{pair[side]}\n" for pair in pairs * times)
            (text / f"{split}.{language}").write_text(lines, encoding="utf-8")
    sizes = ["tables.words.dim=8", "encoder.layers=1", "encoder.heads=2", "encoder.ffn_dim=8", "training.epochs=2"]
    sizes += ["vocabulary.bpe.merges=20", "training.precision=float32"]
    command = ["train", "pappas2019/multi30k", "--row", "TWWT + DRILL", f"corpus.name={text}", *sizes]
    done = CliRunner().invoke(app, [*command, "--out", str(run), "--device", "cpu"])
    assert done.exit_code == 0, done.output
    recipe = load_recipe("pappas2019/multi30k")
    rows = join_runs(rows_from_recipe(recipe.rows, recipe.name), collect_runs([run]))
    (row,) = [row for row in rows if row.has_scores]
    assert row.name == "TWWT + DRILL"
    assert row.mean_score(BLEU, "test") is not None
    assert row.mean_score(CHRF, "valid") is not None
    assert row.translation_scores("test")[0].bleu_signature.startswith("nrefs:1|case:mixed|eff:no|tok:none")
    assert row.records[0].translation is not None
    assert len(row.records[0].translation.examples) == 3
