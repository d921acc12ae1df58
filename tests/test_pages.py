"""What holds of every page: its links, commands, options, settings and tests exist; and what the pages on models have
to say together."""

from __future__ import annotations

import re
from typing import Any, get_args

import pytest
import torch

from pages import ROOT, VERBS, Page, anchors, experiments
from reefknot.evaluation.protocols import ProtocolName
from reefknot.parts import ENCODERS, OPTIMISERS, SCHEDULES, WINDOWS
from reefknot.recipe import EvaluationSettings, Experiment, build_model, load_recipe
from reefknot.recipes import shipped
from reefknot.skip_gram_experiment import SkipGramExperiment
from reefknot.training.settings import TrainingSettings

NAMES = ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
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
def test_headings_are_distinct(page: Page) -> None:
    found = anchors(page.text)
    assert found
    assert len(found) == len(set(found))


@every_page
def test_every_command_is_understood(page: Page) -> None:
    for verb, *words in page.commands():
        VERBS[verb].make_context(verb, words)  # a word that the verb does not know raises here


@every_page
def test_rows_and_settings_of_commands_exist(page: Page) -> None:
    known = shipped()
    for verb, *words in page.commands():
        recipe = next((word for word in words if word in known or word.endswith(".toml")), None)
        assert recipe or verb not in ("train", "table", "sweep", "params")
        if recipe in known:
            row: Any = words[words.index("--row") + 1] if "--row" in words else None
            row = [row] if row and verb in ("table", "bench") else row
            changes = [each.partition(",")[0] for each in words if re.match(r"[a-z_.]+=", each)]
            assert load_recipe(recipe, changes, row).experiments


@every_page
def test_verbs_and_options_that_are_named_exist(page: Page) -> None:
    assert page.unknown() == []


@every_page
def test_settings_that_are_named_exist(page: Page) -> None:
    there = {
        f"{section}.{key}"
        for kind in (Experiment, SkipGramExperiment)
        for section, field in kind.model_fields.items()
        for key in getattr(field.annotation, "model_fields", ())
    }
    named = re.findall(r"`((?:training|evaluation|vocabulary|corpus|init|regularisation|skip_gram)\.\w+)", page.prose)
    assert [name for name in named if name not in there] == []


@every_page
def test_tests_that_are_named_exist(page: Page) -> None:
    assert page.missing_tests() == []


def test_pages_have_what_is_looked_for() -> None:
    """Were a pattern wrong, the tests above would find nothing, and so nothing wrong."""
    every = [Page(name) for name in NAMES]
    verbs = {command[0] for page in every for command in page.commands()}
    assert verbs >= VERBS.keys() - {"validate"}
    assert sum(len(page.commands()) for page in every) > 50
    for pattern, least in ((r"\]\([^)]+\)", 100), (r"`tests/\S+`", 20), (r"`test_\w+`", 20), (r"`--\w+", 30)):
        assert sum(len(re.findall(pattern, page.prose)) for page in every) > least, pattern


# -- the pages on models, together -------------------------------------------------------------------------------


def test_every_encoder_has_a_section() -> None:
    assert [kind for _, heading in ENCODER_SECTIONS for kind in re.findall(r"`(\w+)`", heading)] == [*ENCODERS]


@encoder_sections
def test_a_section_has_all_it_should(page: Page, heading: str) -> None:
    section = page.sections[heading]
    order = ["```text\n", "- **Masks**", "- **Settings**", "- **Source**", "```toml\n"]
    places = [section.find(text) for text in order]
    assert -1 not in places
    assert places == sorted(places)
    assert "](../src/reefknot/encoders/" in section


@encoder_sections
def test_an_encoder_builds_and_has_the_size_it_claims(page: Page, heading: str, tmp_path: Any) -> None:
    (frame,), (snippet,) = page.snippets("How to read this page"), page.snippets(heading)
    (kind,) = re.findall(r'^\[base\.encoder\]\nkind = "(\w+)"', snippet, re.MULTILINE)
    assert heading.startswith(f"`{kind}`")
    (experiment,) = experiments(tmp_path, frame, snippet, page.snippets("Training")[0]).values()
    with torch.device("meta"):
        counts = build_model(experiment, WORDS[experiment.corpus.name]).parameter_counts()
    assert re.findall(r"^# ([\d,]+) parameters", snippet, re.MULTILINE) == [f"{sum(counts.values()):,}"]


def test_every_recipe_of_the_papers_is_in_a_table() -> None:
    rows = dict(re.findall(r"^\| `reefknot table (\S+) --data DIR` \| (\d+) \|", TEXT, re.MULTILINE))
    assert rows.keys() == {name for name in shipped() if "/" in name}
    assert {name: int(count) for name, count in rows.items()} == {
        name: len(load_recipe(name).experiments) for name in rows
    }


def test_every_option_of_an_evaluation_is_named() -> None:
    ours = {"--help", "--device", "--data"}
    asked = {each for parameter in VERBS["evaluate"].params for each in parameter.opts if each.startswith("--")}
    assert [option for option in sorted(asked - ours) if option not in TEXT] == []


@pytest.mark.parametrize(
    "name",
    [
        *(
            f"training.{key}"
            for key in TrainingSettings.model_fields
            if key not in ("optimiser", "seed", "save_every", "keep")
        ),
        *(f"evaluation.{key}" for key in EvaluationSettings.model_fields),
    ],
)
def test_settings_are_named(name: str) -> None:
    assert re.search(rf"`{re.escape(name)}\b", TEXT)


def test_every_choice_of_a_setting_is_named() -> None:
    training = TrainingSettings.model_fields
    choices = [*SCHEDULES, *WINDOWS, *get_args(ProtocolName), *get_args(training["determinism"].annotation)]
    assert [choice for choice in choices if f"`{choice}`" not in TEXT] == []
    quoted = [choice for key in ("divisor", "batching", "precision") for choice in get_args(training[key].annotation)]
    assert [choice for choice in quoted if f'`"{choice}"`' not in TEXT] == []
    assert [kind for kind in OPTIMISERS if f'kind = "{kind}"' not in TEXT] == []
