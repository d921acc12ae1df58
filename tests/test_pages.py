"""What holds of every page: its links, commands, options, settings and tests exist; and what the pages on models have
to say together."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import pytest
import torch

from pages import COMMANDS, ROOT, Page, code, experiments
from reefknot.lab.recipes.file import shipped
from reefknot.lab.recipes.recipe import load_recipe
from reefknot.lab.tasks import build_model
from reefknot.lab.tasks.language_model import LanguageModelExperiment
from reefknot.lab.tasks.skip_gram import SkipGramExperiment

NAMES = ["README.md", "CONTRIBUTING.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
OWN_TESTS = {"CONTRIBUTING.md", "docs/vectors.md"}
"""Pages whose Python has a test of its own: files to add, and a part that needs gensim."""
PYTHON_PAGES = [name for name in NAMES if code(Page(name).text, "python") and name not in OWN_TESTS]
"""Pages whose Python is one program each."""
ENCODER_PAGES = [Page(f"docs/{name}.md") for name in ("recurrent", "attention", "translation")]
TEXT = "".join(page.text for page in (*ENCODER_PAGES, Page("docs/vectors.md")))
"""Of all pages that have recipes of the papers."""
ENCODER_SECTIONS = [(page, heading) for page in ENCODER_PAGES for heading in page.sections if heading.startswith("`")]
WORDS = {"ptb": 10_000, "wikitext-103": 267_744, "multi30k": 10_124}
"""Entries of the vocabularies that the pages' recipes name."""

encoder_sections = pytest.mark.parametrize(
    ("page", "heading"), ENCODER_SECTIONS, ids=[heading for _, heading in ENCODER_SECTIONS]
)


@pytest.fixture
def page(request: pytest.FixtureRequest) -> Page:
    return Page(request.param)


every_page = pytest.mark.parametrize("page", NAMES, indirect=True)


# -- each page -----------------------------------------------------------------------------------------------------


@every_page
def test_links_paths_and_anchors_lead_somewhere(page: Page) -> None:
    assert page.lost() == []


@every_page
def test_every_command_is_understood(page: Page) -> None:
    for verb, *words in page.commands():
        COMMANDS[verb].make_context(verb, words)  # a word that the verb does not know raises here


@every_page
def test_rows_and_settings_of_commands_exist(page: Page) -> None:
    known = shipped()
    for verb, *words in page.commands():
        recipe = next((word for word in words if word in known or word.endswith(".toml")), None)
        assert recipe or verb not in ("train", "table", "sweep", "params")
        if recipe in known:
            row: Any = words[words.index("--row") + 1] if "--row" in words else None
            row = [row] if row and verb in ("table", "bench steps", "bench translation") else row
            changes = [each.partition(",")[0] for each in words if re.match(r"[a-z_.]+=", each)]
            assert load_recipe(recipe, changes, row).experiments


@every_page
def test_verbs_and_options_that_are_named_exist(page: Page) -> None:
    assert page.unknown() == []


@every_page
def test_settings_that_are_named_exist(page: Page) -> None:
    there = {
        f"{section}.{key}"
        for kind in (LanguageModelExperiment, SkipGramExperiment)
        for section, field in kind.model_fields.items()
        for key in getattr(field.annotation, "model_fields", ())
    }
    named = re.findall(r"`((?:training|evaluation|vocabulary|corpus|init|regularisation|skip_gram)\.\w+)", page.prose)
    assert [name for name in named if name not in there] == []


@every_page
def test_tests_that_are_named_exist(page: Page) -> None:
    assert page.missing_tests() == []


@pytest.mark.parametrize("page", PYTHON_PAGES, indirect=True)
def test_the_python_of_a_page_runs(page: Page) -> None:
    program = "".join(code(page.text, "python"))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_recipe_on_runs_has_two_rows_that_differ_in_dropout(tmp_path: Any) -> None:
    (recipe,) = Page("docs/runs.md").snippets("Recipes")
    dropout = [row.encoder.dropout for row in experiments(tmp_path, recipe).values()]
    assert dropout == [0.0, 0.3]


# -- the pages on models, together -------------------------------------------------------------------------------


@encoder_sections
def test_an_encoder_builds_and_has_the_size_it_claims(page: Page, heading: str, tmp_path: Any) -> None:
    (frame,), (snippet,) = page.snippets("How to read this page"), page.snippets(heading)
    (kind,) = re.findall(r'^\[base\.encoder\]\nkind = "(\w+)"', snippet, re.MULTILINE)
    assert heading.startswith(f"`{kind}`")
    (experiment,) = experiments(tmp_path, frame, snippet, page.snippets("Training")[0]).values()
    with torch.device("meta"):
        counts = build_model(experiment, WORDS[experiment.corpus.name]).parameter_counts()
    assert re.findall(r"^# ([\d,]+) parameters", snippet, re.MULTILINE) == [f"{sum(counts.values()):,}"]
