"""Links, commands, options, settings and tests in the documentation exist, and its Python and recipes run."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import pytest
import torch

from pages import COMMANDS, ROOT, Page, code, experiments
from reefknot.lab.recipes.file import list_shipped_recipes
from reefknot.lab.recipes.recipe import load_recipe
from reefknot.lab.tasks import build_model
from reefknot.lab.tasks.language_model import LanguageModelExperiment
from reefknot.lab.tasks.skip_gram import SkipGramExperiment

NAMES = [
    "README.md",
    "CONTRIBUTING.md",
    *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")),
    *sorted(f"docs/notebooks/{path.name}" for path in (ROOT / "docs/notebooks").glob("*.ipynb")),
]
SEPARATELY_TESTED = {
    "CONTRIBUTING.md",
    "docs/export.md",
    "docs/replace_head.md",
    "docs/training_frameworks.md",
    "docs/vectors.md",
    "docs/your_model.md",
}
"""Pages whose Python code has separate tests."""
PYTHON_PAGES = [name for name in NAMES if code(Page(name).text, "python") and name not in SEPARATELY_TESTED]
"""Pages whose Python blocks form one program."""
ENCODER_PAGES = [Page(f"docs/{name}.md") for name in ("recurrent", "attention", "translation")]
ENCODER_SECTIONS = [(page, heading) for page in ENCODER_PAGES for heading in page.sections if heading.startswith("`")]
WORDS = {"ptb": 10_000, "wikitext-103": 267_744, "multi30k": 10_124}
"""Vocabulary sizes of the corpora in the recipes of the pages."""

encoder_sections = pytest.mark.parametrize(
    ("page", "heading"), ENCODER_SECTIONS, ids=[heading for _, heading in ENCODER_SECTIONS]
)


@pytest.fixture
def page(request: pytest.FixtureRequest) -> Page:
    return Page(request.param)


every_page = pytest.mark.parametrize("page", NAMES, indirect=True)


# -- every page ----------------------------------------------------------------------------------------------------


@every_page
def test_links_paths_and_anchors_exist(page: Page) -> None:
    assert page.broken_links() == []


@every_page
def test_command_arguments_are_valid(page: Page) -> None:
    for verb, *words in page.commands():
        COMMANDS[verb].make_context(verb, words)  # raises an error for unknown arguments


@every_page
def test_rows_and_settings_of_commands_exist(page: Page) -> None:
    known = list_shipped_recipes()
    for verb, *words in page.commands():
        recipe = next((word for word in words if word in known or word.endswith(".toml")), None)
        is_complete = recipe or "--text" in words or any(word.startswith("runs/") for word in words)
        assert is_complete or verb not in ("train", "table", "sweep", "params")
        if recipe in known:
            row: Any = words[words.index("--row") + 1] if "--row" in words else None
            row = [row] if row and verb in ("table", "bench steps", "bench translation") else row
            changes = [word.partition(",")[0] for word in words if re.match(r"[a-z_.]+=", word)]
            assert load_recipe(recipe, changes, row).experiments


@every_page
def test_named_verbs_and_options_exist(page: Page) -> None:
    assert page.unknown_verbs_and_options() == []


@every_page
def test_named_settings_exist(page: Page) -> None:
    existing = {
        f"{section}.{key}"
        for kind in (LanguageModelExperiment, SkipGramExperiment)
        for section, field in kind.model_fields.items()
        for key in getattr(field.annotation, "model_fields", ())
    }
    named = re.findall(r"`((?:training|evaluation|vocabulary|corpus|init|regularisation|skip_gram)\.\w+)", page.prose)
    assert [name for name in named if name not in existing] == []


@every_page
def test_named_tests_exist(page: Page) -> None:
    assert page.missing_tests() == []


@pytest.mark.parametrize("page", PYTHON_PAGES, indirect=True)
def test_python_code_of_a_page_runs(page: Page) -> None:
    program = "".join(code(page.text, "python"))
    completed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert completed.returncode == 0, completed.stderr


def test_recipe_in_runs_page_has_rows_with_different_dropout(tmp_path: Any) -> None:
    (recipe,) = Page("docs/runs.md").snippets("Recipes")
    dropout = [row.encoder.dropout for row in experiments(tmp_path, recipe).values()]
    assert dropout == [0.0, 0.3]


# -- pages about models ------------------------------------------------------------------------------------------


@encoder_sections
def test_encoder_recipe_builds_with_the_stated_size(page: Page, heading: str, tmp_path: Any) -> None:
    (frame,), (snippet,) = page.snippets("How to read this page"), page.snippets(heading)
    (experiment,) = experiments(tmp_path, frame, snippet, page.snippets("Training")[0]).values()
    with torch.device("meta"):
        counts = build_model(experiment, WORDS[experiment.corpus.name]).parameter_counts()
    assert re.findall(r"^# ([\d,]+) parameters", snippet, re.MULTILINE) == [f"{sum(counts.values()):,}"]
