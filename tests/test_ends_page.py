"""What docs/ends.md says of the ends is true: parts, pictures, recipes, sizes, combinations."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pages import ROOT, Page, code, experiments
from reefknot.models.language_model import LanguageModel
from reefknot.parts import INPUTS, LABELS, OUTPUTS, PROJECTIONS, TABLES, WITHOUT_MEANING
from reefknot.recipe import build_model

PAGE = Page("docs/ends.md")
WORDS = 10_000  # the Penn Treebank's, which the page's recipes name
FRAME, CHANGE = PAGE.snippets("How to read this page")
PARTS = re.findall(r"^### (.+)$", PAGE.text, re.MULTILINE)
"""Headings of the sections on a part."""


def _recipe(section: str) -> str:
    (snippet,) = code(section, "toml")
    return snippet


def _build(snippet: str, folder: Path) -> LanguageModel:
    """The model of a recipe as the page says to make it: the frame, and the snippet below it."""
    (experiment,) = experiments(folder, FRAME, snippet).values()
    with torch.device("meta"):
        return build_model(experiment, WORDS)


@pytest.mark.parametrize(
    ("group", "kinds"),
    [
        ("Tables", [*TABLES, *PROJECTIONS]),
        ("Inputs", [*INPUTS]),
        ("Labels", [*LABELS]),
        ("Outputs", [*OUTPUTS]),
    ],
)
def test_every_part_has_a_section(group: str, kinds: list[str]) -> None:
    assert re.findall(r"^### `(\w+)`", PAGE.group(group), re.MULTILINE) == kinds


@pytest.mark.parametrize("heading", PARTS)
def test_a_section_has_all_it_should(heading: str) -> None:
    section = PAGE.sections[heading]
    order = ["```text\n", "](ends/", "- **Use it**", "- **Cost**", "- **Settings**", "- **Source**", "```toml\n"]
    places = [section.find(text) for text in order]
    assert -1 not in places
    assert places == sorted(places)
    assert "](../src/reefknot/" in section.partition("- **Source**")[2]


@pytest.mark.parametrize("heading", PARTS)
def test_a_recipe_builds_and_has_the_size_it_claims(heading: str, tmp_path: Path) -> None:
    snippet = _recipe(PAGE.sections[heading])
    counts = _build(snippet, tmp_path).parameter_counts()
    claimed = re.findall(r"^# ends: ([\d,]+) parameters", snippet, re.MULTILINE)
    if "[base.vocabulary" in snippet:
        assert not claimed, "another vocabulary has another size"
    else:
        assert claimed == [f"{counts['input'] + counts['output']:,}"]


def test_a_row_changes_the_base_as_the_page_says(tmp_path: Path) -> None:
    base = _recipe(PAGE.sections["The tie: ends that hold one table"]).replace(
        "dim = 400", "dim = 400\nunit_norm = true"
    )
    changed = FRAME.replace('name = "mine"\n', f'name = "mine"\n{CHANGE}')
    vocabulary = "[base.vocabulary]\nmin_count = 2\nmax_size = 5_000\n"
    (experiment,) = experiments(tmp_path, changed, base, vocabulary).values()
    assert experiment.tables["words"].model_dump(exclude_defaults=True) == {"kind": "word", "dim": 256}
    assert not experiment.tables["words"].unit_norm
    assert (experiment.vocabulary.min_count, experiment.vocabulary.max_size) == (2, None)


@pytest.mark.parametrize(
    ("group", "place"),
    [
        ("Tables", r"^kind = "),
        ("Inputs", r"^\[base\.input\]\nkind = "),
        ("Labels", r"^labels = \{ kind = "),
        ("Outputs", r"^\[base\.output\]\nkind = "),
    ],
)
def test_a_recipe_uses_the_part_it_stands_under(group: str, place: str) -> None:
    sections = re.findall(r"^### `(\w+)`(.*?)(?=^###|\Z)", PAGE.group(group), re.DOTALL | re.MULTILINE)
    assert sections
    for kind, section in sections:
        assert re.search(f'{place}"{kind}"', _recipe(section), re.MULTILINE), kind


def test_pictures_are_up_to_date_and_all_are_shown() -> None:
    done = subprocess.run(
        [sys.executable, "script/pictures", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    shown = re.findall(r"^!\[.+\]\((ends/\w+\.svg)\)$", PAGE.text, re.MULTILINE)
    drawn = [path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs/ends").iterdir()]
    assert sorted(shown) == sorted(drawn)


def test_combinations_without_a_meaning_are_those_of_the_list() -> None:
    rows = re.findall(r"^\| (input .+?) \| (.+?) \|$", PAGE.group("Combinations without a meaning"), re.MULTILINE)
    listed = [
        (", ".join(f"{end} = {kind}" for end, kind in pattern.items()), sentence)
        for pattern, sentence in WITHOUT_MEANING
    ]
    assert rows == listed


def test_there_is_room_for_what_was_measured() -> None:
    assert re.search(r"<!-- results:begin -->.*<!-- results:end -->", PAGE.group("Measured side by side"), re.DOTALL)
