"""What docs/vectors.md says is true: settings and their defaults, benchmarks, formats, figures, recipes, its Python."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from cli.conftest import run_command
from pages import ROOT, Page, code, experiments
from reefknot.evaluation.pairwise_similarity import EXACT_BELOW, SAMPLES
from reefknot.evaluation.pca import EXAMPLES
from reefknot.evaluation.similarity import BENCHMARKS, FOLDER
from reefknot.evaluation.spearman import FEWEST_RESAMPLED
from reefknot.evaluation.subspace import chance_distance
from reefknot.figures import FIGURES, open_figure
from reefknot.kernels.skip_gram import CLIP
from reefknot.models.skip_gram import SkipGram, SkipGramSettings
from reefknot.recipe import build_model, load_recipe
from reefknot.recipes.file import read_file
from reefknot.skip_gram_experiment import SkipGramExperiment, VectorEvaluation
from reefknot.training.skip_gram import SkipGramTraining
from reefknot.vectors.files import FORMATS
from skip_gram_recipe import write_judgements, write_recipe

PAGE = Page("docs/vectors.md")
(FIRST,) = PAGE.snippets("First word vectors")
(START,) = PAGE.snippets("A table that starts from a file")
PYTHON = code(PAGE.text, "python")


def rows(heading: str) -> list[list[str]]:
    """The cells of the table below a heading, without its head."""
    lines = re.findall(r"^\| (.+) \|$", PAGE.sections[heading], re.MULTILINE)
    return [[cell.strip() for cell in line.split(" | ")] for line in lines[1:]]


def size(settings: SkipGramSettings, words: int) -> int:
    with torch.device("meta"):
        return sum(SkipGram.of(settings, words).parameter_counts().values())


def test_the_first_vectors_are_skip_gram_untied_and_tied(tmp_path: Path) -> None:
    untied, tied = experiments(tmp_path, FIRST).values()
    assert isinstance(untied, SkipGramExperiment)
    assert isinstance(tied, SkipGramExperiment)
    assert untied.corpus.name == "python-docs"
    assert (untied.skip_gram.tied, tied.skip_gram.tied) == (False, True)
    assert tied.skip_gram.model_copy(update={"tied": False}) == untied.skip_gram


def test_every_setting_is_named_with_its_default() -> None:
    sections = {"skip_gram": SkipGramSettings(), "training": SkipGramTraining(), "evaluation": VectorEvaluation()}
    ours = {
        f"`{section}.{name}`": str(value).lower() if isinstance(value, bool) else f"{value:,}"
        for section, settings in sections.items()
        for name, value in settings
    }
    assert {name: default for name, default, _ in rows("Settings")} == ours


def test_sizes_are_those_of_the_model() -> None:
    untied, tied = (size(SkipGramSettings(tied=each), 10_000) for each in (False, True))
    assert f"With 10,000 words the defaults are {untied:,} parameters, tied {tied:,}." in PAGE.sections["Settings"]


def test_constants_are_those_of_the_code() -> None:
    computed = " ".join(PAGE.sections["What is computed"].split())
    assert f"A score beyond {CLIP:g} " in computed
    assert f"counts to the power {SkipGramSettings().power:g};" in computed
    compared = " ".join(PAGE.sections["Two tables against each other"].split())
    assert f"`--exact-below` words ({EXACT_BELOW:,})" in compared
    assert f"`--samples` pairs ({SAMPLES:,})" in compared
    assert EXAMPLES == 8
    assert FEWEST_RESAMPLED == 10
    assert "Fewer than ten pairs have no interval" in PAGE.sections["People's judgements"]


def test_the_report_has_benchmarks_only_of_runs_that_were_judged(
    tmp_path: Path, made_text: Callable[[int], Path]
) -> None:
    recipe, data = write_recipe(tmp_path, made_text(600)), write_judgements(tmp_path)
    judged = []
    for similarity in ("true", "false"):
        run, page = tmp_path / similarity, tmp_path / f"{similarity}.html"
        settings = ("training.epochs=1", f"evaluation.similarity={similarity}")
        train = ("train", recipe, "--row", "tied", "--out", run, "--device", "cpu", "--data", data, *settings)
        for command in (train, ("report", run, "-o", page)):
            outcome = run_command(*command)
            assert outcome.code == 0, outcome.err
        html = page.read_text(encoding="utf-8")
        assert "<h2>Results</h2>" in html
        judged.append(("<h3>Word similarity</h3>" in html, "60 of 999" in html))
    assert judged == [(True, True), (False, False)]


def test_benchmarks_are_those_of_the_code() -> None:
    ours = [[f"`{name}`", f"`{each.file}`", f"{each.pairs:,}"] for name, each in BENCHMARKS.items()]
    assert rows("The benchmarks") == ours
    assert f"`DIR/{FOLDER}`" in PAGE.sections["The benchmarks"]


def test_formats_are_those_of_the_code() -> None:
    assert [name for name, *_ in rows("Formats")] == [f"`{name}`" for name in FORMATS]


def test_figures_are_those_of_the_code() -> None:
    listed = {row[0].strip("`"): row for row in rows("The figures of the papers")}
    assert [*listed] == [*FIGURES]
    for name, (_, _, recipes, reads) in listed.items():
        figure = open_figure(name)
        stand_in = (figure.stand_in,) if figure.stand_in else ()
        assert re.findall(r"`([^`]+)`", recipes) == [*figure.recipes, *stand_in]
        assert ("stands in" in recipes) == bool(stand_in)
        assert reads in ((figure.needs,) if figure.needs else ("results", "metrics"))


def test_recipes_are_as_long_as_is_said_and_parts_of_what_is_said() -> None:
    for command, _, _, needs in rows("The recipes"):
        name = command.split()[2]
        recipe = load_recipe(name)
        extended = read_file(ROOT / f"src/reefknot/recipes/{name}.toml", name).extends
        assert re.findall(r"part of `([^`]+)`", needs) == ([extended] if extended else [])
        if "epochs" in needs:
            told = {int(number) for number in re.findall(r"\b(\d+)(?= and \d+ epochs| epochs)", needs)}
            assert told == {experiment.training.epochs for experiment in recipe.experiments.values()}


def test_the_chance_level_of_figure_1_is_the_one_told() -> None:
    recipe = ROOT / "src/reefknot/recipes/inan2017/figure1.toml"
    assert "the vocabulary its 3,318 types" in recipe.read_text(encoding="utf-8")
    (row, *_) = load_recipe("inan2017/figure1").experiments.values()
    dim = row.model_dump()["tables"]["classes"]["dim"]
    section = " ".join(PAGE.sections["Subspace distance"].split())
    assert f"the 3,318 words and {dim} numbers of Figure 1 it is {chance_distance(3_318, dim):.3f}" in section


def test_a_table_starts_from_the_file_and_may_be_frozen(tmp_path: Path) -> None:
    drawn, started, frozen = experiments(tmp_path, START).values()
    with torch.device("meta"):
        tables = [build_model(each, 100).input.tables()[0] for each in (drawn, started, frozen)]
    assert [table.file for table in tables] == [None, "words.vec", "words.vec"]
    assert [table.frozen for table in tables] == [False, False, True]


@pytest.mark.parametrize("gensim", [False, True])
def test_the_python_examples_run(gensim: bool, tmp_path: Path) -> None:
    ours, with_gensim = PYTHON
    if gensim:
        pytest.importorskip("gensim")
        ours += with_gensim
    done = subprocess.run([sys.executable, "-c", ours], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
