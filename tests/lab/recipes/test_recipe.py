"""Recipes: rows and base, overrides, and error messages."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from reefknot.errors import SettingsError
from reefknot.lab.config.parts import ENCODERS
from reefknot.lab.recipes.file import FOLDER, find_recipe, list_shipped_recipes
from reefknot.lab.recipes.recipe import Row, load_recipe
from reefknot.lab.runs.changes import Change
from reefknot.lab.tasks import build_model, check_experiment
from reefknot.lab.tasks.language_model import LanguageModelExperiment
from reefknot.lab.text.corpora import known_corpus
from reefknot.lab.text.corpus import CorpusSettings
from reefknot.lab.text.dataset import open_dataset
from reefknot.lab.text.vocabulary_settings import VocabularySettings, fairseq_dictionary_size

BASE = """
title = "Made for a test"

[base.corpus]

[base.tables.words]
kind = "word"
dim = 4

[base.input]
kind = "lookup"
table = "words"

[base.encoder]
kind = "lstm"
hidden_dim = 4

[base.output]
kind = "softmax"
classifier = { kind = "plain", table = "words", bias = false }

[base.training]
epochs = 2
batch = 4
steps = 5
optimiser = { kind = "sgd", learning_rate = 1.0 }
schedule = { kind = "decay", hold = 1, factor = 0.5 }
"""
SETTINGS: dict[str, Any] = tomllib.loads(BASE)["base"]
ROW = '\n[[rows]]\nname = "only"\n'
ENCODER_NAMES = ", ".join(ENCODERS)


def write_recipe(folder: Path, text: str) -> str:
    path = folder / "made.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def error_message(folder: Path, text: str, *overrides: str) -> str:
    """Load a recipe that is wrong and return the error message, which has at most ten lines."""
    with pytest.raises(SettingsError) as caught:
        load_recipe(write_recipe(folder, text), overrides)
    message = str(caught.value)
    assert len(message.splitlines()) <= 10
    assert caught.value.exit_code == 2
    return message


def test_rows_and_overrides_reach_the_experiment(tmp_path: Path) -> None:
    rows = """
[[rows]]
name = "Small + PR"
[rows.set]
output.classifier = { kind = "projected", table = "words" }

[[rows]]
name = "Quoted"
quoted = true
paper = { test = 100 }

[[rows]]
name = "Longer"
[rows.set]
training.epochs = 7
"""
    recipe = load_recipe(write_recipe(tmp_path, BASE + rows), ["training.seed=5", "training.epochs=9"])
    assert recipe.name == "made"
    assert [row.slug for row in recipe.rows] == ["small-pr", "quoted", "longer"]
    assert set(recipe.experiments) == {"Small + PR", "Longer"}
    classifier = recipe.experiments["Small + PR"].output.classifier  # type: ignore[attr-defined]
    assert (classifier.kind, classifier.bias, classifier.penalty) == ("projected", True, 0.15)
    assert {experiment.training.seed for experiment in recipe.experiments.values()} == {5}
    assert recipe.experiments["Longer"].training.epochs == 9


# -- overrides -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "changed"),
    [
        ("training.epochs=3", [Change(key="training.epochs", old=2, new=3)]),
        ("training.epochs=2", []),
        ("encoder.layers=2", []),
        ("training.optimiser.learning_rate=1", []),
        ("training.seed=7", []),
        ("training.log_every=7", []),
        ("training.save_every=7", []),
        ("training.keep=7", []),
    ],
)
def test_changed_lists_settings_that_affect_results(tmp_path: Path, override: str, changed: list[Change]) -> None:
    assert load_recipe(write_recipe(tmp_path, BASE + ROW), [override]).changed == {"only": changed}


@pytest.mark.parametrize("value", ["0", "1979-05-27", "nan", "0x" + "f" * 6000])
def test_override_can_correct_an_invalid_value(tmp_path: Path, value: str) -> None:
    text = BASE.replace("epochs = 2", f"epochs = {value}") + ROW
    (change,) = load_recipe(write_recipe(tmp_path, text), ["training.epochs=3", "training.batch=4"]).changed["only"]
    assert (change.key, change.new) == ("training.epochs", 3)


@pytest.mark.parametrize(
    ("override", "unchanged"),
    [
        ("training.epochs=3", True),
        ("init.uniform=0.5", True),
        ("evaluation.streams=3", True),
        ("encoder.layers=2", True),  # the same value
        ("encoder.layers=3", False),
        ("vocabulary.min_count=2", False),
        ("corpus.tokens=100", False),
        ("output.classifier.bias=true", False),
    ],
)
def test_paper_parameter_count_is_dropped_if_the_model_changes(tmp_path: Path, override: str, unchanged: bool) -> None:
    (row,) = load_recipe(write_recipe(tmp_path, BASE + ROW + "parameters = 99\n"), [override]).rows
    assert row.parameters == (99 if unchanged else None)


# -- mistakes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("training.epoch=3", "training.epoch: no such setting; did you mean training.epochs?"),
        ("epochs=3", "epochs: no such setting; did you mean training.epochs?"),
        ("training.optimiser.lr=3", "training.optimiser.lr: no such setting; did you mean training.optimiser.learning"),
        ("training.lr=3", "training.lr: no such setting; did you mean training.optimiser.learning_rate?"),
        ("lr=3", "lr: no such setting; did you mean training.optimiser.learning_rate?"),
        ("training.bs=3", "training.bs: no such setting; did you mean training.batch?"),
        ("training.batch_size=3", "training.batch_size: no such setting; did you mean training.batch?"),
        ("training.bptt=3", "training.bptt: no such setting; did you mean training.steps?"),
        ("training.grad_clip=3", "training.grad_clip: no such setting; did you mean training.clip?"),
        ("training.optimiser.wd=3", "training.optimiser.wd: no such setting; did you mean training.optimiser.weight"),
        ("encoder.hidden_size=3", "encoder.hidden_size: no such setting; did you mean encoder.hidden_dim?"),
        ("encoder.dim=3", "encoder.dim: no such setting; did you mean encoder.hidden_dim?"),
        ("device=cuda", "device: no such setting; it is an option of the command: --device"),
        ("encoder.nlayers=3", "encoder.nlayers: no such setting; did you mean encoder.layers?"),
        ("tables.words.emb=3", "tables.words.emb: no such setting; did you mean tables.words.dim?"),
        ("encoder.learning_rate=3", "encoder.learning_rate: no such setting; did you mean training.optimiser.learn"),
        (
            "output.classifier.bais=true",
            "output.classifier.bais: no such setting; did you mean output.classifier.bias?",
        ),
        ("tables.words.dmi=3", "tables.words.dmi: no such setting; did you mean tables.words.dim?"),
        ("zzz.qqq=1", "zzz: no such setting; the settings are: corpus, vocabulary, tables, "),
        (
            "encoder.zzz=-5",
            "encoder.zzz: no such setting; the settings of encoder are: kind, hidden_dim, layers, dropout, biases\n",
        ),
        (
            "tables.words.zzz=1",
            "tables.words.zzz: no such setting; the settings of tables.words are: kind, dim, ",
        ),
        ("training.epochs=1.5", "training.epochs: must be a valid integer (it is 1.5)"),
        ("training.clip=nan", "training.clip: must be"),
        ("encoder.dropout=1.0", "encoder.dropout: must be less than 1 (it is 1.0)"),
        (
            "training.schedule.kind=linear",
            "schedule.kind: no schedule is called 'linear'; there are: constant, decay, cosine, inverse_sqrt\n",
        ),
        ("training.schedule.kind=deacy", "training.schedule.kind: no schedule is called 'deacy'; did you mean decay?"),
        ("output.classifier.kind=3", "output.classifier.kind: must be a name; there are: plain, projected"),
        (
            "output.classifier.penalty=1.0",
            "output.classifier.penalty: no such setting; kinds that have it: projected\n",
        ),
        ("tables.words.sizes=[1]", "tables.words.sizes: no such setting; kinds that have it: banded\n"),
        ("corpus.part=3/2", 'corpus.part: give "k/n" with 1 <= k <= n'),
        (
            "encoder=lstmm",
            "encoder: must be a table with a kind (it is 'lstmm'); did you mean encoder.kind=lstm?\n",
        ),
        (
            "output.classifier=plain",
            "output.classifier: must be a table with a kind (it is 'plain'); did you mean output.classifier.kind=",
        ),
        ("encoder=3", f"encoder: must be a table with a kind; there are: {ENCODER_NAMES} (it is 3)"),
    ],
)
def test_wrong_setting_is_named_with_its_full_key(tmp_path: Path, override: str, expected: str) -> None:
    message = error_message(tmp_path, BASE + ROW, override)
    assert expected in f"{message}\n"
    assert 'made.toml, row "only":' in message


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ('kind = "lstmm"', "encoder.kind: no encoder is called 'lstmm'; did you mean lstm?"),
        ('kind = "qqq"', f"encoder.kind: no encoder is called 'qqq'; there are: {ENCODER_NAMES}"),
        ("kind = 3", f"encoder.kind: must be a name; there are: {ENCODER_NAMES}"),
        ("", f"encoder.kind: must be set; there are: {ENCODER_NAMES}"),
    ],
)
def test_wrong_kind_is_reported_alone(tmp_path: Path, kind: str, expected: str) -> None:
    """The other settings cannot be checked without the kind."""
    text = BASE.replace('kind = "lstm"\nhidden_dim = 4', f"{kind}\nwidth = 4") + ROW
    assert error_message(tmp_path, text).splitlines()[1:] == [f"  {expected}"]


def test_missing_required_settings_are_named(tmp_path: Path) -> None:
    message = error_message(tmp_path, BASE.replace("hidden_dim = 4\n", "").replace("batch = 4\n", "") + ROW)
    assert "encoder.hidden_dim: must be set" in message
    assert "training.batch: must be set" in message


def test_many_mistakes_are_shortened_to_ten_lines(tmp_path: Path) -> None:
    message = error_message(tmp_path, BASE + ROW, *(f"training.wrong{number}=1" for number in range(40)))
    assert len(message.splitlines()) == 10
    assert message.endswith("and 32 more")
    two = error_message(tmp_path, BASE + ROW, "training.epochs=0", "encoder.layers=0")
    assert "training.epochs" in two
    assert "encoder.layers" in two


def test_mistakes_of_all_rows_are_listed_and_the_bases_once(tmp_path: Path) -> None:
    wrong = {"a": "layers = 0", "b": "layers = -1", "c": "layer = 2"}
    rows = "".join(f'\n[[rows]]\nname = "{name}"\nset.encoder.{setting}\n' for name, setting in wrong.items())
    message = error_message(tmp_path, BASE.replace("epochs = 2", "epochs = 0") + rows).splitlines()
    assert message == [
        message[0],
        "  encoder.layers: must be greater than or equal to 1 (it is 0)",
        "  training.epochs: must be greater than or equal to 1 (it is 0)",
        message[3],
        "  encoder.layers: must be greater than or equal to 1 (it is -1)",
        message[5],
        "  encoder.layer: no such setting; did you mean encoder.layers?",
    ]
    assert [line[-8:] for line in message if not line.startswith(" ")] == ['row "a":', 'row "b":', 'row "c":']


def test_mistake_shared_by_two_kinds_is_reported_once(tmp_path: Path) -> None:
    rows = ROW + '[[rows]]\nname = "PR"\nset.output.classifier = { kind = "projected", table = "words" }\n'
    message = error_message(tmp_path, BASE + rows, "output.classifier.biass=true")
    assert message.count("output.classifier.biass: no such setting; did you mean output.classifier.bias?") == 1
    assert len(message.splitlines()) == 2


def test_many_wrong_rows_are_shortened_to_ten_lines(tmp_path: Path) -> None:
    rows = "".join(f'\n[[rows]]\nname = "row {number}"\nset.encoder.layers = -{number}\n' for number in range(1, 31))
    message = error_message(tmp_path, BASE + rows).splitlines()
    assert len(message) == 9
    assert message[-1] == "  and 26 more"
    nine = error_message(tmp_path, BASE + ROW, *(f"training.wrong{number}=1" for number in range(9)))
    assert len(nine.splitlines()) == 10
    assert "more" not in nine


def test_malicious_values_are_shortened_and_escaped(tmp_path: Path) -> None:
    message = error_message(tmp_path, BASE + ROW, "training.epochs=" + "\x1b[31m" + "x" * 10_000)
    assert len(message) < 400
    assert "\x1b" not in message
    assert len(error_message(tmp_path, BASE + ROW, "k" * 10_000 + "=1")) < 400
    digits = "9" * 5_000
    assert "training.epochs: must be a valid integer" in error_message(
        tmp_path, BASE + ROW, f"training.epochs={digits}"
    )
    assert "cannot be read: Exceeds the limit" in error_message(tmp_path, f"title = {digits}")


def test_unknown_or_unused_table_is_rejected(tmp_path: Path) -> None:
    assert "no table 'wrods' in [tables]; there are: words" in error_message(tmp_path, BASE + ROW, "input.table=wrods")
    spare = 'tables.spare={ kind = "word", dim = 3 }'
    assert "no end uses tables.spare; remove it, or use it in an end" in error_message(tmp_path, BASE + ROW, spare)


@pytest.mark.parametrize("second", ["small wt", "Small - WT!", "SMALL+WT"])
def test_rows_that_would_share_a_folder_are_rejected(tmp_path: Path, second: str) -> None:
    rows = f'\n[[rows]]\nname = "Small + WT"\n[[rows]]\nname = "{second}"\n'
    assert f'rows "Small + WT" and "{second}" would share a folder' in error_message(tmp_path, BASE + rows)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("title = ", "not valid TOML"),
        (BASE, "rows: must be set"),
        (BASE + "rows = []", "rows"),
        (ROW, "base: must be set"),
        (BASE + '[[rows]]\nname = ""\n', "rows.0.name"),
        (BASE + ROW + "parametres = 3\n", "rows.0.parametres: no such setting; did you mean rows.0.parameters?"),
        ('colour = "red"\n' + BASE + ROW, "colour: no such setting"),
        (BASE + ROW + "paper = { test = -1.0 }\n", "rows.0.paper.test"),
        (BASE + ROW + "paper = { tset = 1.0 }\n", "paper.tset: no such setting; did you mean rows.0.paper.test?"),
        (BASE + ROW + "paper = { qqq = 1.0 }\n", "rows.0.paper.qqq: no such setting"),
    ],
)
def test_invalid_recipe_file_is_rejected(tmp_path: Path, text: str, expected: str) -> None:
    assert expected in error_message(tmp_path, text)


def test_recipe_file_must_be_utf8(tmp_path: Path) -> None:
    path = tmp_path / "made.toml"
    path.write_bytes(b"title = '\xff'")
    with pytest.raises(SettingsError, match=r"not UTF-8 text \(byte 9\)"):
        load_recipe(str(path))


def test_unknown_recipe_is_rejected_with_suggestions() -> None:
    with pytest.raises(SettingsError, match=r"did you mean press2017/table6\?"):
        find_recipe("press2017/tabel6")
    with pytest.raises(SettingsError, match=r"`reefknot ls recipes` lists the shipped recipes"):
        find_recipe("qqqqqq")


# -- rows ----------------------------------------------------------------------------------------------------------


def test_rows_are_found_by_name_or_slug() -> None:
    recipe = load_recipe("press2017/table6")
    for name in ("Small + WT", "small + wt", "small-wt"):
        assert recipe.row(name).name == "Small + WT"
    with pytest.raises(SettingsError, match=r'no row "VD-LSTM"; there are: "Small model", "Small'):
        recipe.row("VD-LSTM")
    with pytest.raises(SettingsError, match=r'no row "smal \+ WT"; did you mean "Small \+ WT"\?'):
        recipe.row("smal + WT")
    with pytest.raises(SettingsError, match=r'row "Deep RNN.*" is quoted .*: there is nothing to train'):
        recipe.row(next(row.name for row in recipe.rows if row.quoted and "Deep RNN" in row.name))
    with pytest.raises(SettingsError, match=r'no row "qqq"; `reefknot ls inan2017/table1` lists the 24 rows'):
        load_recipe("inan2017/table1", row="qqq")
    with pytest.raises(SettingsError, match=r'evaluates the model of row "AWD-LSTM"; train that row'):
        load_recipe("pappas2019/table1", row="AWD-LSTM + dynamic evaluation")
    with pytest.raises(SettingsError, match="choose a row with --row"):
        recipe.row(None)


@pytest.mark.parametrize(
    ("patterns", "names"),
    [
        (["B*"], ["a", "b", "bb"]),
        (["*"], ["a", "b", "bb", "quoted [b]", "other"]),
        (["QUOTED*", "a"], None),
        (["*b]*", "A"], None),
        (["b", "A"], ["a", "b"]),
        (["OTHER"], ["other"]),
        (["*t*r"], ["other"]),
        (["c*"], None),
        (["o"], None),
    ],
)
def test_row_patterns_include_the_rows_they_start_from(
    tmp_path: Path, patterns: list[str], names: list[str] | None
) -> None:
    rows = """
[[rows]]
name = "a"
[[rows]]
name = "b"
set.training.start.row = "a"
[[rows]]
name = "bb"
set.training.start.row = "b"
[[rows]]
name = "quoted [b]"
quoted = true
[[rows]]
name = "other"
"""
    name = write_recipe(tmp_path, BASE + rows)
    if names is None:
        with pytest.raises(SettingsError, match=r'no row to train matches|no row "o"'):
            load_recipe(name, row=patterns)
        return
    assert [row.name for row in load_recipe(name, row=patterns).rows] == names
    assert [row.name for row in load_recipe(name, ["training.start=default"], ["bb"]).rows] == ["bb"]


def test_only_row_needs_no_name(tmp_path: Path) -> None:
    assert load_recipe(write_recipe(tmp_path, BASE + ROW)).row(None).name == "only"


@pytest.mark.parametrize(
    ("name", "slug"), [("Small + WT", "small-wt"), ("λ = 0.15", "0-15"), ("日本", "row"), ("../..", "row")]
)
def test_slugs_are_safe_folder_names(name: str, slug: str) -> None:
    assert Row(name=name).slug == slug


# -- shipped recipes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(list_shipped_recipes()))
def test_every_shipped_recipe_loads_and_builds(name: str) -> None:
    recipe = load_recipe(name)
    text = (FOLDER / f"{name}.toml").read_text(encoding="utf-8")
    assert recipe.name == tomllib.loads(text).get("extends", name)
    assert recipe.title == list_shipped_recipes()[name]
    assert recipe.experiments
    for experiment in recipe.experiments.values():
        with torch.device("meta"):
            assert sum(build_model(experiment, 300_000).parameter_counts().values()) > 0
    assert f"reefknot table {name}" in text.partition("title")[0]


BILLION_WORD = 793_470
"""Published number of Billion Word types that occur at least three times, without <S>."""


def vocabulary_size(experiment: LanguageModelExperiment) -> int | None:
    """Return the vocabulary size of a row, or None if it is not known without the text."""
    corpus, vocabulary = experiment.corpus, experiment.vocabulary
    is_cut = corpus.part is not None or corpus.tokens is not None
    if vocabulary.bpe is not None or (is_cut and vocabulary.text == "train"):
        return None
    known = known_corpus(corpus.name)
    published = known.types if known and known.types else vocabulary.max_size
    number = BILLION_WORD if corpus.name == "billion-word" else published
    return fairseq_dictionary_size(number) if number and vocabulary.dictionary == "fairseq" else number


@pytest.mark.parametrize("name", sorted(name for name in list_shipped_recipes() if "/" in name))
def test_parameter_counts_of_paper_tables_are_exact(name: str) -> None:
    recipe = load_recipe(name)
    for row in recipe.rows:
        number = None if not row.trained else vocabulary_size(recipe.experiments[row.name])
        if number is None:
            assert row.parameters is None, row.name
            continue
        with torch.device("meta"):
            model = recipe.build(row, number)
        assert sum(model.parameter_counts().values()) == row.parameters, row.name


@pytest.mark.parametrize("name", sorted(name for name in list_shipped_recipes() if "/" in name))
def test_every_row_of_a_paper_table_has_scores_or_a_reason(name: str) -> None:
    """First stages, our own rows and tables, tables of seconds, and figures have no scores."""
    recipe = load_recipe(name)
    assert recipe.paper == name.partition("/")[0]
    first = {row.start for row in recipe.experiments.values() if row.start}
    for row in recipe.rows if not recipe.title.startswith("Ours, after ") else ():
        if not row.paper and not row.paper_similarity:
            excused = name == "pappas2019/table3" or "/figure" in name
            assert excused or row.name in first or "(ours)" in row.name, row.name


@pytest.mark.corpus
@pytest.mark.skipif(not os.environ.get("REEFKNOT_DATA"), reason="REEFKNOT_DATA names no folder of real corpora")
def test_halves_of_wikitext2_have_the_published_vocabulary() -> None:
    for part in ("1/2", "2/2"):
        settings = CorpusSettings(name="wikitext-2", part=part)
        assert len(open_dataset(settings, VocabularySettings(text="all")).vocabulary) == 33_278


def test_experiment_can_be_dumped_and_checked_again() -> None:
    experiment = check_experiment(SETTINGS, "test")
    assert check_experiment(experiment.model_dump(mode="json"), "test") == experiment


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (["projections.bands.table=nope"], "no table 'nope' in [tables]; there are: words"),
        (["output.projections=nope"], "no projection 'nope' in [projections]; there are: bands"),
        (['tables.extra={kind="word", dim=8}'], "no end uses tables.extra"),
        (
            ['tables.extra={kind="banded", dim=8, sizes=[9]}', "projections.bands.table=extra"],
            "no end uses tables.extra",
        ),
        (['projections.extra={kind="bands", table="words", dim=200}'], "no end uses projections.extra"),
        (["vocabulary.keep_spellings=true"], "an input of kind adaptive cannot read spellings"),
        (["training.epoch=default"], "training.epoch: no such setting; did you mean training.epochs?"),
        (["vocabulary.bpe.merges=default"], "vocabulary.bpe.merges: must be a valid integer"),
    ],
)
def test_unknown_or_unused_names_are_rejected(changes: list[str], expected: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(expected)):
        load_recipe("ends", changes, "adaptive ends, tied")


def test_order_of_overrides_does_not_matter() -> None:
    changes = ["encoder.hidden_dim=200", "encoder.layers=1", "encoder.kind=gru"]
    straight, reversed_order = (
        load_recipe("ends", order, "tied").experiments["tied"] for order in (changes, changes[::-1])
    )
    assert straight == reversed_order
    assert straight.encoder.layers == 1  # type: ignore[attr-defined]
    base = load_recipe("ends", row="tied").experiments["tied"].encoder
    assert straight.encoder.dropout == base.dropout > 0  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("encoder.kind=gru", {"hidden_dim": 4, "layers": 3, "dropout": 0.3}),
        ("encoder.kind=awd_lstm", {"hidden_dim": 4, "layers": 3, "weight_drop": 0.0}),
        ('encoder={kind = "gru", hidden_dim = 4}', {"layers": 2, "dropout": 0.0}),
        ("encoder.dropout=default", {"layers": 3, "dropout": 0.0}),
    ],
)
def test_overriding_only_the_kind_keeps_shared_settings(
    tmp_path: Path, override: str, expected: dict[str, Any]
) -> None:
    text = BASE.replace("hidden_dim = 4", "hidden_dim = 4\nlayers = 3\ndropout = 0.3") + ROW
    recipe = load_recipe(write_recipe(tmp_path, text), [override])
    encoder = recipe.experiments["only"].encoder.model_dump()
    assert {name: encoder[name] for name in expected} == expected
    assert recipe.overrides == (override,)


def test_row_that_sets_a_kind_drops_the_bases_settings(tmp_path: Path) -> None:
    rows = '\n[[rows]]\nname = "only"\nset.encoder = { kind = "gru" }\n'
    assert "encoder.hidden_dim: must be set" in error_message(tmp_path, BASE + rows)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            ["input.table=words", "training.epochs=0"],
            "input.table: no such setting; kinds that have it: lookup, adaptive\n  training.epochs: must be",
        ),
        (["vocabulary.bpe.merges=10"], "an input of kind char_cnn reads the spelling of whole words"),
    ],
)
def test_settings_unusable_with_char_cnn_are_rejected(changes: list[str], expected: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(expected)):
        load_recipe("ends", changes, "char-CNN")


def test_error_while_building_names_recipe_row_and_table() -> None:
    recipe = load_recipe("ends", ["tables.words.sizes=[9000, 3000]"], "adaptive ends, tied")
    with pytest.raises(SettingsError, match=r'ends, row "adaptive ends, tied": tables\.words: banded table: the bands'):
        recipe.build(recipe.row(None), 10_000)


# -- windows of an evaluation --------------------------------------------------------------------------------------

TRANSFORMER = 'encoder={kind = "transformer", layers = 1, heads = 1, ffn_dim = 4}'
LINES = 'evaluation.windows={kind = "lines"}'


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        ([], None),
        ([TRANSFORMER], "context-0-stride-{steps}"),
        ([LINES], "lines"),
        ([TRANSFORMER, 'evaluation.windows={kind = "complete", length = 12}'], "complete-12"),
        (['evaluation.windows={kind = "sliding", context = 0, stride = 3}'], "context-0-stride-3"),
        (["evaluation.windows.kind=complete", "evaluation.windows.length=4"], "complete-4"),
    ],
)
def test_evaluation_windows_of_an_experiment(tmp_path: Path, overrides: list[str], name: str | None) -> None:
    experiment = load_recipe(write_recipe(tmp_path, BASE + ROW), overrides).experiments["only"]
    windows = experiment.windows
    assert (windows and windows.name) == (name and name.format(steps=experiment.training.steps))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([LINES, "evaluation.streams=2"], "streams = 2 has no meaning with windows"),
        ([TRANSFORMER, "evaluation.streams=2"], "evaluation.streams: an encoder of kind transformer carries no state"),
        ([TRANSFORMER, "evaluation.protocol=awd"], "evaluation.protocol: an encoder of kind transformer carries no"),
        ([LINES, "vocabulary.end_of_line=false"], "evaluation.windows: the text has no line ends to cut it at"),
        (["evaluation.windows.kind=blocks"], "evaluation.windows.kind: no window is called 'blocks'"),
        (["evaluation.windows.kind=sliding"], "evaluation.windows.context: must be set"),
        (['evaluation.windows={kind = "complete", length = 0}'], "evaluation.windows.length: must be greater than or"),
    ],
)
def test_invalid_evaluation_windows_are_rejected(tmp_path: Path, overrides: list[str], message: str) -> None:
    assert message in error_message(tmp_path, BASE + ROW, *overrides)


def test_row_can_score_another_rows_model_in_windows(tmp_path: Path) -> None:
    more = '\n[[rows]]\nname = "more context"\nof = "only"\nby = "context-20-stride-10"\n'
    row = load_recipe(write_recipe(tmp_path, BASE + ROW + more)).rows[-1]
    assert (row.by, row.trained) == ("context-20-stride-10", False)
    wrong = error_message(tmp_path, BASE + ROW + more.replace("20-stride", "stride"))
    assert "by: must be dynamic, cache, mc, context-C-stride-S, complete-L, context-C-complete-L or lines" in wrong
