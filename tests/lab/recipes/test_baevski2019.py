"""Recipes of Baevski & Auli's tables: every row has its published scores, and the settings are consistent."""

from __future__ import annotations

import csv
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from reefknot.lab.cli.main import app
from reefknot.lab.config.parts import SCHEDULES
from reefknot.lab.recipes.recipe import Recipe, load_recipe
from reefknot.lab.reports.rows import join_runs
from reefknot.lab.reports.table import rows_from_recipe
from reefknot.lab.runs.loading import collect_runs
from reefknot.lab.runs.modes import parse_window_sizes
from reefknot.lab.runs.scores import PERPLEXITY
from reefknot.lab.tasks.language_model import LanguageModelExperiment

PAPER_SCORES = Path(__file__).parent / "baevski2019.csv"
"""Scores of the paper's eight tables. A row that a table prints twice is listed once."""
TABLES = [f"table{number}" for number in range(1, 9)]
OURS = ["enwiki", "wikitext2"]
PAPER = {
    "corpus.name": ("wikitext-103", "billion-word"),
    "vocabulary.min_count": (1, 3),
    "vocabulary.dictionary": ("fairseq", "fairseq"),
    "tables.words.sizes": ([20_000, 40_000], [60_000, 100_000]),
    "tables.words.dim": (1024, 1024),
    "tables.words.factor": (4, 4),
    "encoder.kind": ("transformer", "transformer"),
    "encoder.layers": (16, 16),
    "encoder.heads": (16, 16),
    "encoder.ffn_dim": (4096, 4096),
    "encoder.dropout": (0.3, 0.1),
    "encoder.dropout_attention": (0.1, 0.1),
    "encoder.dropout_relu": (0.1, 0.0),
    "encoder.final_norm": (False, False),
    "output.softmax_dropout": (0.0, 0.0),
    "output.tail_dropout": (0.2, 0.0),
    "init.tables": ("normal", "normal"),
    "training.updates": (286_000, 975_000),
    "training.batching": ("blocks", "sentences"),
    "training.batch": (128, 128),
    "training.steps": (512, 512),
    "training.divisor": ("tokens", "tokens"),
    "training.clip": (0.1, 0.1),
    "training.optimiser.kind": ("sgd", "sgd"),
    "training.optimiser.learning_rate": (1.0, 1.0),
    "training.optimiser.momentum": (0.99, 0.99),
    "training.optimiser.nesterov": (True, True),
    "training.schedule.kind": ("cosine", "cosine"),
    "training.schedule.warmup": (16_000, 16_000),
    "training.schedule.warmup_from": (1e-7, 1e-7),
    "training.schedule.period": (18_000, 137_000),
    "training.schedule.growth": (2.0, 2.0),
    "training.schedule.shrink": (0.75, 0.6),
    "training.schedule.least": (1e-5, 1e-5),
    "evaluation.windows": ({"kind": "complete", "length": 512, "context": 0}, {"kind": "lines"}),
}
"""Settings of ADP-T on both corpora (Tables 3 and 4). The updates of Table 1 are twice as large."""
SAME_ROWS = {
    ("table1", "Adaptive inputs"): ("table4", "ADP-T", "training.batch=256", "training.accumulate=8"),
    ("table1", "Char-CNN"): ("table4", "CNN", "training.batch=256", "training.accumulate=8"),
    ("table2", "Adaptive inputs"): (
        *("table3", "ADP-T", "training.batch=24", "training.steps=3072"),
        'evaluation.windows={ kind = "complete", length = 512, context = 2560 }',
    ),
    ("table5", "train block 512 / inference context 0"): ("table3", "ADP-T"),
    ("table6", "Softmax (SM)"): ("table3", "SM"),
    ("table6", "Adaptive, tail dropout 0.2"): ("table3", "ASM"),
    ("table7", "64d Embedding -> Adaptive"): ("table3", "ASM"),
    ("table7", "512d Embedding -> 512d Softmax"): ("table3", "SM"),
    ("table7", "512d Embedding -> 512d Softmax (tied)"): ("table3", "SM-T"),
    ("table7", "Adaptive -> Adaptive (tied emb/proj not head)"): ("table3", "ADP-T"),
    ("table8", "20k/40k/200k"): ("table3", "ADP-T"),
}
"""Rows equal to a row of another table, except for the listed overrides."""


def recipe(name: str) -> Recipe:
    return load_recipe(f"baevski2019/{name}")


def paper_scores() -> dict[str, dict[str, dict[str, float]]]:
    """Return the published scores by table and row."""
    scores: dict[str, dict[str, dict[str, float]]] = {}
    with PAPER_SCORES.open(encoding="utf-8", newline="") as file:
        for line in csv.DictReader(file):
            row = {key: float(line[key]) for key in ("valid", "test", "hours") if line[key]}
            scores.setdefault(f"table{line['table']}", {})[line["row"]] = row
    return scores


def settings(part: Any, *left_out: str) -> dict[str, Any]:
    return {key: value for key, value in part.model_dump().items() if key not in left_out}


def test_every_row_of_the_paper_has_its_scores() -> None:
    actual = {table: {row.name: row.paper for row in recipe(table).rows} for table in TABLES}
    assert actual == paper_scores()
    assert [list(rows) for rows in actual.values()] == [
        list(rows) for rows in paper_scores().values()
    ]  # rows are in the order of the paper


@pytest.mark.parametrize(("text", "table"), [(0, "table3"), (1, "table4")])
def test_settings_are_those_of_the_paper(text: int, table: str) -> None:
    experiment = recipe(table).experiments["ADP-T"].model_dump()
    actual = {path: reduce(getitem, path.split("."), experiment) for path in PAPER}
    assert actual == {path: values[text] for path, values in PAPER.items()}


def test_tables_agree_except_for_their_stated_differences() -> None:
    """Together with the next test: all rows have the settings of Tables 3 and 4 except for their ends."""
    assert {table for table, _ in SAME_ROWS} == {*TABLES} - {"table3", "table4"}
    for (table, row), (other, name, *overrides) in SAME_ROWS.items():
        expected = load_recipe(f"baevski2019/{other}", overrides, name).experiments[name]
        assert recipe(table).experiments[row].model_dump() == expected.model_dump(), (table, row)


@pytest.mark.parametrize("name", TABLES + OURS)
def test_rows_differ_only_in_their_ends(name: str) -> None:
    """Exceptions of the paper: encoder sizes (Table 1), blocks (5), dropout (7), tokens per update of SM (3)."""
    experiments = list(recipe(name).experiments.values())
    body = () if name not in ("table1", "table7") else ("layers", "ffn_dim") if name == "table1" else ("dropout",)
    words = [row.vocabulary for row in experiments if row.vocabulary.bpe is None]
    assert all(vocabulary == words[0] for vocabulary in words)
    for experiment in experiments[1:]:
        assert settings(experiment.encoder, *body) == settings(experiments[0].encoder, *body)
        assert settings(experiment.training, "batch", "steps") == settings(experiments[0].training, "batch", "steps")
        assert (experiment.corpus, experiment.init) == (experiments[0].corpus, experiments[0].init)
        if name != "table5":
            assert experiment.training.steps == experiments[0].training.steps
            assert experiment.evaluation == experiments[0].evaluation


def test_nesterov_rows_differ_from_enwiki_only_in_their_optimiser() -> None:
    for name, experiment in recipe("enwiki-nesterov").experiments.items():
        usual = recipe("enwiki").experiments[name].model_dump()
        changed = experiment.model_dump()
        training, usual_training = changed.pop("training"), usual.pop("training")
        assert changed == usual
        keys = {key for key in training if training[key] != usual_training[key]}
        assert keys == {"clip", "optimiser", "schedule"}


@pytest.mark.parametrize("name", TABLES)
def test_dropout_is_the_papers_unless_the_row_names_another(name: str) -> None:
    """Checks dropout of the encoder and of the tails."""
    usual = PAPER["encoder.dropout"], PAPER["output.tail_dropout"]
    for row, experiment in recipe(name).experiments.items():
        body, tails = (rates[name in ("table1", "table4")] for rates in usual)
        settings_of_row = experiment.model_dump()
        assert settings_of_row["encoder"]["dropout"] == (0.4 if row.endswith(", dropout 0.4") else body), row
        if settings_of_row["output"]["kind"] == "adaptive":
            assert settings_of_row["output"]["tail_dropout"] == (0.0 if row.endswith("tail dropout 0.0") else tails), (
                row
            )
            assert settings_of_row["output"]["softmax_dropout"] == 0.0, row


def tokens(experiment: LanguageModelExperiment) -> int:
    return experiment.training.batch * experiment.training.steps


def test_tokens_per_update_are_those_of_the_paper() -> None:
    updates = {
        table: {row: tokens(experiment) for row, experiment in recipe(table).experiments.items()} for table in TABLES
    }
    assert set(updates["table1"].values()) == {64 * 2_048}
    assert set(updates["table2"].values()) == {24 * 3_072}
    assert set(updates["table4"].values()) == {32 * 2_048}
    assert set(updates["table8"].values()) == {8 * 4_096 * 2}
    assert list(updates["table5"].values()) == [65_536, 65_536, 24 * 3_072]
    for table in ("table3", "table6", "table7"):
        for row, number in updates[table].items():
            plain = recipe(table).experiments[row].output.kind == "softmax"  # type: ignore[attr-defined]
            assert number == (8 * 1_024 * 4 if plain and "BPE" not in row else 65_536), row


@pytest.mark.parametrize(("name", "cycles"), [(name, 3 if name in ("table1", "table4") else 4) for name in TABLES])
def test_training_ends_at_the_minimum_of_the_last_cycle(name: str, cycles: int) -> None:
    training = next(iter(recipe(name).experiments.values())).training
    schedule = SCHEDULES.build(training.schedule, {})
    assert training.updates is not None
    assert training.updates == schedule.warmup + sum(schedule.period * 2**cycle for cycle in range(cycles))
    lowest = schedule.shrink ** (cycles - 1) * 1e-5
    assert schedule.learning_rate_factor(1, training.updates - 1) == pytest.approx(lowest, rel=1e-3)
    assert schedule.learning_rate_factor(1, training.updates) == pytest.approx(schedule.shrink**cycles)
    assert (schedule.learning_rate_factor(1, 0), schedule.learning_rate_factor(1, 16_000)) == (1e-7, 1.0)


def test_our_rows_end_when_the_learning_rate_reaches_zero() -> None:
    enwiki, wikitext2 = (next(iter(recipe(name).experiments.values())).training for name in OURS)
    updates = 30 * -(-2_088_628 // (32 * 256))  # 30 epochs of WikiText-2
    for training, last in ((enwiki, enwiki.updates), (wikitext2, updates)):
        factors = [SCHEDULES.build(training.schedule, {}).learning_rate_factor(1, step) for step in range(last or 0)]
        peak = factors.index(1.0)
        assert factors[peak:] == sorted(factors[peak:], reverse=True)
        assert factors[-1] < 1e-3


def test_inputs_are_scaled_by_the_square_root_of_the_dimension() -> None:
    dims = {"enwiki": 512, "wikitext2": 256}
    for name in TABLES + OURS:
        for row, experiment in recipe(name).experiments.items():
            dim = 1536 if row == "Adaptive inputs (very large)" else dims.get(name, 1024)
            assert experiment.input.scale == dim**0.5, row  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["table5", "enwiki"])
def test_context_and_scored_tokens_fill_the_training_block(name: str) -> None:
    loaded = recipe(name)
    scoring = [row for row in loaded.rows if row.of]
    assert scoring
    for row in scoring:
        assert row.by is not None
        assert row.of is not None
        sizes = parse_window_sizes(row.by)
        assert sizes is not None
        assert sizes.context + sizes.stride + sizes.length == loaded.experiments[row.of].training.steps
        assert f"context {sizes.context}" in row.name


def test_row_can_be_trained_and_scored_with_context(tmp_path: Path) -> None:
    """The recipe is used as shipped, with smaller sizes."""
    text, runs = tmp_path / "text", tmp_path / "runs"
    text.mkdir()
    lines = ["the wind is high and the sea is cold .\n", "a ship came in with the wind .\n", "high seas !\n"]
    for split, times in (("train", 40), ("valid", 3), ("test", 3)):
        (text / f"{split}.txt").write_text("".join(lines * times), encoding="utf-8")
    sizes = ["tables.words.dim=16", "tables.words.sizes=[4, 6]", "projections.bands.dim=16", "training.batch=4"]
    sizes += ["encoder.layers=1", "encoder.heads=2", "encoder.ffn_dim=16", "training.updates=3", "training.steps=12"]
    words = ["--row", "ADP-T", f"corpus.name={text}", "evaluation.windows.length=12", *sizes, "--out", str(runs / "a")]
    for command in (
        ["train", "baevski2019/enwiki", *words],
        ["evaluate", str(runs / "a"), "--context", "480", "--stride", "32", "--save"],
    ):
        assert CliRunner().invoke(app, command).exit_code == 0
    rows = join_runs(rows_from_recipe(recipe("enwiki").rows, "baevski2019/enwiki"), collect_runs([runs]))
    scores = {row.name: row.mean_score(PERPLEXITY, "test") for row in rows if row.has_scores}
    assert set(scores) == {"ADP-T", "ADP-T, context 480"}
    # One window holds the whole text, so it has more context than blocks of twelve tokens.
    assert scores["ADP-T"] != scores["ADP-T, context 480"]
    assert rows[-1].changes
