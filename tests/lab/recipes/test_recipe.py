"""Recipes: how rows differ from the base, how overrides are read, and what is said when something is wrong."""

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
from reefknot.lab.recipes.file import FOLDER, find_recipe, shipped
from reefknot.lab.recipes.recipe import Row, load_recipe
from reefknot.lab.runs.changes import Change
from reefknot.lab.tasks import build_model, check_experiment
from reefknot.lab.tasks.language_model import LanguageModelExperiment
from reefknot.lab.text.corpora import known_corpus
from reefknot.lab.text.corpus import CorpusSettings
from reefknot.lab.text.dataset import open_dataset
from reefknot.lab.text.vocabulary import VocabularySettings, fairseq_size

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
ENCODERS_THERE = ", ".join(ENCODERS)


def write(folder: Path, text: str) -> str:
    path = folder / "made.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def complaint(folder: Path, text: str, *overrides: str) -> str:
    with pytest.raises(SettingsError) as found:
        load_recipe(write(folder, text), overrides)
    said = str(found.value)
    assert len(said.splitlines()) <= 10
    assert found.value.exit_code == 2
    return said


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
    recipe = load_recipe(write(tmp_path, BASE + rows), ["training.seed=5", "training.epochs=9"])
    assert recipe.name == "made"
    assert [row.slug for row in recipe.rows] == ["small-pr", "quoted", "longer"]
    assert set(recipe.experiments) == {"Small + PR", "Longer"}
    classifier = recipe.experiments["Small + PR"].output.classifier  # type: ignore[attr-defined]
    assert (classifier.kind, classifier.bias, classifier.penalty) == ("projected", True, 0.15)
    assert {each.training.seed for each in recipe.experiments.values()} == {5}
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
def test_what_counts_as_a_change(tmp_path: Path, override: str, changed: list[Change]) -> None:
    assert load_recipe(write(tmp_path, BASE + ROW), [override]).changed == {"only": changed}


@pytest.mark.parametrize("value", ["0", "1979-05-27", "nan", "0x" + "f" * 6000])
def test_changes_of_a_row_that_is_wrong_without_them(tmp_path: Path, value: str) -> None:
    text = BASE.replace("epochs = 2", f"epochs = {value}") + ROW
    (found,) = load_recipe(write(tmp_path, text), ["training.epochs=3", "training.batch=4"]).changed["only"]
    assert (found.key, found.new) == ("training.epochs", 3)


@pytest.mark.parametrize(
    ("override", "kept"),
    [
        ("training.epochs=3", True),
        ("init.uniform=0.5", True),
        ("evaluation.streams=3", True),
        ("encoder.layers=2", True),  # as it was
        ("encoder.layers=3", False),
        ("vocabulary.min_count=2", False),
        ("corpus.tokens=100", False),
        ("output.classifier.bias=true", False),
    ],
)
def test_the_papers_size_holds_while_the_model_does(tmp_path: Path, override: str, kept: bool) -> None:
    (row,) = load_recipe(write(tmp_path, BASE + ROW + "parameters = 99\n"), [override]).rows
    assert row.parameters == (99 if kept else None)


# -- mistakes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("training.epoch=3", "training.epoch: no such setting; did you mean training.epochs?"),
        ("epochs=3", "epochs: no such setting; did you mean training.epochs?"),
        ("encoder.learning_rate=3", "encoder.learning_rate: no such setting; did you mean training.optimiser.learn"),
        (
            "output.classifier.bais=true",
            "output.classifier.bais: no such setting; did you mean output.classifier.bias?",
        ),
        ("tables.words.dmi=3", "tables.words.dmi: no such setting; did you mean tables.words.dim?"),
        ("zzz.qqq=1", "zzz: no such setting"),
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
        ("training.optimiser.lr=1.0", "training.optimiser.lr: no such setting\n"),
        ("corpus.part=3/2", 'corpus.part: give "k/n" with 1 <= k <= n'),
        ("encoder=3", f"encoder: must be a table with a kind; there are: {ENCODERS_THERE} (it is 3)"),
    ],
)
def test_a_wrong_setting_is_named_as_one_would_write_it(tmp_path: Path, override: str, sentence: str) -> None:
    said = complaint(tmp_path, BASE + ROW, override)
    assert sentence in f"{said}\n"
    assert 'made.toml, row "only":' in said


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ('kind = "lstmm"', "encoder.kind: no encoder is called 'lstmm'; did you mean lstm?"),
        ('kind = "qqq"', f"encoder.kind: no encoder is called 'qqq'; there are: {ENCODERS_THERE}"),
        ("kind = 3", f"encoder.kind: must be a name; there are: {ENCODERS_THERE}"),
        ("", f"encoder.kind: must be set; there are: {ENCODERS_THERE}"),
    ],
)
def test_a_wrong_kind_is_the_only_complaint(tmp_path: Path, kind: str, sentence: str) -> None:
    """Whether the other settings are right depends on the kind."""
    text = BASE.replace('kind = "lstm"\nhidden_dim = 4', f"{kind}\nwidth = 4") + ROW
    assert complaint(tmp_path, text).splitlines()[1:] == [f"  {sentence}"]


def test_what_must_be_set_is_named(tmp_path: Path) -> None:
    said = complaint(tmp_path, BASE.replace("hidden_dim = 4\n", "").replace("batch = 4\n", "") + ROW)
    assert "encoder.hidden_dim: must be set" in said
    assert "training.batch: must be set" in said


def test_all_mistakes_at_once_but_no_more_than_ten_lines(tmp_path: Path) -> None:
    said = complaint(tmp_path, BASE + ROW, *(f"training.wrong{number}=1" for number in range(40)))
    assert len(said.splitlines()) == 10
    assert said.endswith("and 32 more")
    two = complaint(tmp_path, BASE + ROW, "training.epochs=0", "encoder.layers=0")
    assert "training.epochs" in two
    assert "encoder.layers" in two


def test_mistakes_of_all_rows_at_once_and_those_of_the_base_once(tmp_path: Path) -> None:
    wrong = {"a": "layers = 0", "b": "layers = -1", "c": "layer = 2"}
    rows = "".join(f'\n[[rows]]\nname = "{name}"\nset.encoder.{setting}\n' for name, setting in wrong.items())
    said = complaint(tmp_path, BASE.replace("epochs = 2", "epochs = 0") + rows).splitlines()
    assert said == [
        said[0],
        "  encoder.layers: must be greater than or equal to 1 (it is 0)",
        "  training.epochs: must be greater than or equal to 1 (it is 0)",
        said[3],
        "  encoder.layers: must be greater than or equal to 1 (it is -1)",
        said[5],
        "  encoder.layer: no such setting; did you mean encoder.layers?",
    ]
    assert [line[-8:] for line in said if not line.startswith(" ")] == ['row "a":', 'row "b":', 'row "c":']


def test_a_mistake_that_parts_of_two_kinds_share_is_told_once(tmp_path: Path) -> None:
    rows = ROW + '[[rows]]\nname = "PR"\nset.output.classifier = { kind = "projected", table = "words" }\n'
    said = complaint(tmp_path, BASE + rows, "output.classifier.biass=true")
    assert said.count("output.classifier.biass: no such setting; did you mean output.classifier.bias?") == 1
    assert len(said.splitlines()) == 2


def test_many_wrong_rows_still_make_ten_lines(tmp_path: Path) -> None:
    rows = "".join(f'\n[[rows]]\nname = "row {n}"\nset.encoder.layers = -{n}\n' for n in range(1, 31))
    said = complaint(tmp_path, BASE + rows).splitlines()
    assert len(said) == 9
    assert said[-1] == "  and 26 more"
    nine = complaint(tmp_path, BASE + ROW, *(f"training.wrong{number}=1" for number in range(9)))
    assert len(nine.splitlines()) == 10
    assert "more" not in nine


def test_hostile_values_stay_short_and_printable(tmp_path: Path) -> None:
    said = complaint(tmp_path, BASE + ROW, "training.epochs=" + "\x1b[31m" + "x" * 10_000)
    assert len(said) < 400
    assert "\x1b" not in said
    assert len(complaint(tmp_path, BASE + ROW, "k" * 10_000 + "=1")) < 400
    digits = "9" * 5_000
    assert "training.epochs: must be a valid integer" in complaint(tmp_path, BASE + ROW, f"training.epochs={digits}")
    assert "cannot be read: Exceeds the limit" in complaint(tmp_path, f"title = {digits}")


def test_tables_must_be_there_and_be_used(tmp_path: Path) -> None:
    assert "no table 'wrods' in [tables] (there: words)" in complaint(tmp_path, BASE + ROW, "input.table=wrods")
    spare = 'tables.spare={ kind = "word", dim = 3 }'
    assert "no end uses tables.spare; remove it or name it in an end" in complaint(tmp_path, BASE + ROW, spare)


@pytest.mark.parametrize("second", ["small wt", "Small - WT!", "SMALL+WT"])
def test_rows_that_would_share_a_folder(tmp_path: Path, second: str) -> None:
    rows = f'\n[[rows]]\nname = "Small + WT"\n[[rows]]\nname = "{second}"\n'
    assert f'rows "Small + WT" and "{second}" would share a folder' in complaint(tmp_path, BASE + rows)


@pytest.mark.parametrize(
    ("text", "sentence"),
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
def test_a_file_that_is_no_recipe(tmp_path: Path, text: str, sentence: str) -> None:
    assert sentence in complaint(tmp_path, text)


def test_files_that_are_not_text(tmp_path: Path) -> None:
    path = tmp_path / "made.toml"
    path.write_bytes(b"title = '\xff'")
    with pytest.raises(SettingsError, match=r"not UTF-8 text \(byte 9\)"):
        load_recipe(str(path))


def test_unknown_recipes() -> None:
    with pytest.raises(SettingsError, match=r"did you mean press2017/table6\?"):
        find_recipe("press2017/tabel6")
    with pytest.raises(SettingsError, match=r"shipped recipes: .*press2017/table6"):
        find_recipe("qqqqqq")


# -- rows ----------------------------------------------------------------------------------------------------------


def test_rows_are_found_by_name_in_any_case_or_by_slug() -> None:
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
def test_rows_are_chosen_by_patterns_with_what_they_start_from(
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
    name = write(tmp_path, BASE + rows)
    if names is None:
        with pytest.raises(SettingsError, match=r'no row to train matches|no row "o"'):
            load_recipe(name, row=patterns)
        return
    assert [row.name for row in load_recipe(name, row=patterns).rows] == names
    assert [row.name for row in load_recipe(name, ["training.start=default"], ["bb"]).rows] == ["bb"]


def test_the_only_row_needs_no_name(tmp_path: Path) -> None:
    assert load_recipe(write(tmp_path, BASE + ROW)).row(None).name == "only"


@pytest.mark.parametrize(
    ("name", "slug"), [("Small + WT", "small-wt"), ("λ = 0.15", "0-15"), ("日本", "row"), ("../..", "row")]
)
def test_slugs_are_harmless_folder_names(name: str, slug: str) -> None:
    assert Row(name=name).slug == slug


# -- what is shipped -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(shipped()))
def test_every_shipped_recipe_is_sound(name: str) -> None:
    recipe = load_recipe(name)
    text = (FOLDER / f"{name}.toml").read_text(encoding="utf-8")
    assert recipe.name == tomllib.loads(text).get("extends", name)
    assert recipe.title == shipped()[name]
    assert recipe.experiments
    for experiment in recipe.experiments.values():
        with torch.device("meta"):
            assert sum(build_model(experiment, 300_000).parameter_counts().values()) > 0
    assert f"reefknot table {name}" in text.partition("title")[0]


HALVES = {"1/2": 28_693, "2/2": 28_886}
"""Types of either half of WikiText-2's training text."""
BILLION_WORD = 793_470
"""Types of Billion Word that are seen at least three times, as published: 793,471 with <S>."""


def types(experiment: LanguageModelExperiment) -> int | None:
    """Types of a row's vocabulary, where they are known without its text."""
    corpus, vocabulary = experiment.corpus, experiment.vocabulary
    if corpus.part is not None:
        return HALVES[corpus.part]
    if vocabulary.bpe is not None or corpus.tokens is not None:
        return None
    known = known_corpus(corpus.name)
    published = known.types if known and known.types else vocabulary.max_size
    number = BILLION_WORD if corpus.name == "billion-word" else published
    return fairseq_size(number) if number and vocabulary.dictionary == "fairseq" else number


@pytest.mark.parametrize("name", sorted(name for name in shipped() if "/" in name))
def test_the_size_of_every_row_of_a_papers_table_is_exact(name: str) -> None:
    recipe = load_recipe(name)
    for row in recipe.rows:
        number = None if not row.trained else types(recipe.experiments[row.name])
        if number is None:
            assert row.parameters is None, row.name
            continue
        with torch.device("meta"):
            model = recipe.build(row, number)
        assert sum(model.parameter_counts().values()) == row.parameters, row.name


@pytest.mark.parametrize("name", sorted(name for name in shipped() if "/" in name))
def test_every_row_of_a_papers_table_has_its_figures_or_says_why_not(name: str) -> None:
    """Rows without: a first stage, a row or a table of our own, those of which the paper gives seconds, and those of a
    figure, which has curves."""
    recipe = load_recipe(name)
    assert recipe.paper == name.partition("/")[0]
    first = {each.start for each in recipe.experiments.values() if each.start}
    for row in recipe.rows if not recipe.title.startswith("Ours, after ") else ():
        if not row.paper and not row.paper_similarity:
            excused = name == "pappas2019/table3" or "/figure" in name
            assert excused or row.name in first or "(ours)" in row.name, row.name


@pytest.mark.corpus
@pytest.mark.skipif(not os.environ.get("REEFKNOT_DATA"), reason="REEFKNOT_DATA names no folder of real corpora")
def test_the_types_of_the_halves() -> None:
    for part, number in HALVES.items():
        settings = CorpusSettings(name="wikitext-2", part=part)
        assert len(open_dataset(settings, VocabularySettings()).vocabulary) == number


def test_a_checked_experiment_survives_its_own_dump() -> None:
    experiment = check_experiment(SETTINGS, "test")
    assert check_experiment(experiment.model_dump(mode="json"), "test") == experiment


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (["projections.bands.table=nope"], "no table 'nope' in [tables] (there: words)"),
        (["output.projections=nope"], "no projection 'nope' in [projections] (there: bands)"),
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
def test_names_that_lead_nowhere(changes: list[str], sentence: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(sentence)):
        load_recipe("ends", changes, "adaptive ends, tied")


def test_the_order_of_overrides_does_not_matter() -> None:
    changes = ["encoder.hidden_dim=200", "encoder.layers=1", "encoder.kind=gru"]
    one, other = (load_recipe("ends", each, "tied").experiments["tied"] for each in (changes, changes[::-1]))
    assert one == other
    assert one.encoder.layers == 1  # type: ignore[attr-defined]
    base = load_recipe("ends", row="tied").experiments["tied"].encoder
    assert one.encoder.dropout == base.dropout > 0  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("override", "kept"),
    [
        ("encoder.kind=gru", {"hidden_dim": 4, "layers": 3, "dropout": 0.3}),
        ("encoder.kind=awd_lstm", {"hidden_dim": 4, "layers": 3, "weight_drop": 0.0}),
        ('encoder={kind = "gru", hidden_dim = 4}', {"layers": 2, "dropout": 0.0}),
        ("encoder.dropout=default", {"layers": 3, "dropout": 0.0}),
    ],
)
def test_a_kind_alone_keeps_what_the_new_part_has_too(tmp_path: Path, override: str, kept: dict[str, Any]) -> None:
    text = BASE.replace("hidden_dim = 4", "hidden_dim = 4\nlayers = 3\ndropout = 0.3") + ROW
    recipe = load_recipe(write(tmp_path, text), [override])
    encoder = recipe.experiments["only"].encoder.model_dump()
    assert {name: encoder[name] for name in kept} == kept
    assert recipe.overrides == (override,)


def test_a_row_that_states_a_kind_starts_anew(tmp_path: Path) -> None:
    rows = '\n[[rows]]\nname = "only"\nset.encoder = { kind = "gru" }\n'
    assert "encoder.hidden_dim: must be set" in complaint(tmp_path, BASE + rows)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            ["input.table=words", "training.epochs=0"],
            "input.table: no such setting; kinds that have it: lookup, adaptive\n  training.epochs: must be",
        ),
        (["vocabulary.bpe.merges=10"], "an input of kind char_cnn reads the spelling of whole words"),
    ],
)
def test_what_a_spelling_input_cannot_do(changes: list[str], sentence: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(sentence)):
        load_recipe("ends", changes, "char-CNN")


def test_a_mistake_found_while_building_says_where() -> None:
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
def test_the_windows_of_an_experiment(tmp_path: Path, overrides: list[str], name: str | None) -> None:
    experiment = load_recipe(write(tmp_path, BASE + ROW), overrides).experiments["only"]
    windows = experiment.windows
    assert (windows and windows.name) == (name and name.format(steps=experiment.training.steps))


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ([LINES, "evaluation.streams=2"], "streams = 2: windows are computed independently; leave streams out"),
        ([TRANSFORMER, "evaluation.streams=2"], "evaluation.streams: an encoder of kind transformer carries no state"),
        ([TRANSFORMER, "evaluation.protocol=awd"], "evaluation.protocol: an encoder of kind transformer carries no"),
        ([LINES, "vocabulary.end_of_line=false"], "evaluation.windows: the text has no line ends to cut it at"),
        (["evaluation.windows.kind=blocks"], "evaluation.windows.kind: no window is called 'blocks'"),
        (["evaluation.windows.kind=sliding"], "evaluation.windows.context: must be set"),
        (['evaluation.windows={kind = "complete", length = 0}'], "evaluation.windows.length: must be greater than or"),
    ],
)
def test_windows_without_a_meaning_are_refused(tmp_path: Path, overrides: list[str], told: str) -> None:
    assert told in complaint(tmp_path, BASE + ROW, *overrides)


def test_a_row_may_score_another_rows_model_in_windows(tmp_path: Path) -> None:
    more = '\n[[rows]]\nname = "more context"\nof = "only"\nby = "context-20-stride-10"\n'
    row = load_recipe(write(tmp_path, BASE + ROW + more)).rows[-1]
    assert (row.by, row.trained) == ("context-20-stride-10", False)
    wrong = complaint(tmp_path, BASE + ROW + more.replace("20-stride", "stride"))
    assert "by: must be dynamic, cache, mc, context-C-stride-S, complete-L or lines" in wrong
