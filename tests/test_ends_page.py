"""What docs/ends.md says of the ends is true: parts, paths, pictures, recipes, sizes, combinations."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from reefknot.models.language_model import LanguageModel
from reefknot.parts import INPUTS, LABELS, OUTPUTS, PROJECTIONS, TABLES, WITHOUT_MEANING
from reefknot.recipe import build_model, load_recipe

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs/ends.md").read_text(encoding="utf-8")
WORDS = 10_000  # the Penn Treebank's, which the page's recipes name
FRAME, CHANGE = re.findall(r"```toml\n(.*?)```", PAGE.partition("## Which end when")[0], re.DOTALL)
SECTIONS = dict(re.findall(r"^### (.+?)\n(.*?)(?=^##|\Z)", PAGE, re.DOTALL | re.MULTILINE))
"""Every section on a part, by its heading."""


def _group(name: str) -> str:
    return PAGE.partition(f"\n## {name}\n")[2].partition("\n## ")[0]


def _recipe(section: str) -> str:
    (snippet,) = re.findall(r"```toml\n(.*?)```", section, re.DOTALL)
    return str(snippet)


def _build(snippet: str, folder: Path) -> LanguageModel:
    """The model of a recipe as the page says to make it: the frame, and the snippet below it."""
    path = folder / "mine.toml"
    path.write_text(FRAME + "\n" + snippet, encoding="utf-8")
    (experiment,) = load_recipe(str(path)).experiments.values()
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
    assert re.findall(r"^### `(\w+)`", _group(group), re.MULTILINE) == kinds


@pytest.mark.parametrize("heading", SECTIONS)
def test_a_section_has_all_it_should(heading: str) -> None:
    section = SECTIONS[heading]
    order = ["```text\n", "](ends/", "- **Use it**", "- **Cost**", "- **Settings**", "- **Source**", "```toml\n"]
    places = [section.find(text) for text in order]
    assert -1 not in places
    assert places == sorted(places)
    assert "](../src/reefknot/" in section.partition("- **Source**")[2]


@pytest.mark.parametrize("heading", SECTIONS)
def test_a_recipe_builds_and_has_the_size_it_claims(heading: str, tmp_path: Path) -> None:
    snippet = _recipe(SECTIONS[heading])
    counts = _build(snippet, tmp_path).parameter_counts()
    claimed = re.findall(r"^# ends: ([\d,]+) parameters", snippet, re.MULTILINE)
    if "[base.vocabulary" in snippet:
        assert not claimed, "another vocabulary has another size"
    else:
        assert claimed == [f"{counts['input'] + counts['output']:,}"]


def test_a_row_changes_the_base_as_the_page_says(tmp_path: Path) -> None:
    base = _recipe(SECTIONS["The tie: ends that hold one table"]).replace("dim = 400", "dim = 400\nunit_norm = true")
    path = tmp_path / "mine.toml"
    text = FRAME.replace('name = "mine"\n', f'name = "mine"\n{CHANGE}') + "\n" + base
    path.write_text(text + "\n[base.vocabulary]\nmin_count = 2\nmax_size = 5_000\n", encoding="utf-8")
    (experiment,) = load_recipe(str(path)).experiments.values()
    assert experiment.tables["words"].model_dump() == {"kind": "word", "dim": 256, "unit_norm": False}
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
    sections = re.findall(r"^### `(\w+)`(.*?)(?=^###|\Z)", _group(group), re.DOTALL | re.MULTILINE)
    assert sections
    for kind, section in sections:
        assert re.search(f'{place}"{kind}"', _recipe(section), re.MULTILINE), kind


def test_links_and_paths_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", PAGE)
    named = re.findall(r"`((?:src|docs|script|tests)/[^`]+)`", PAGE)
    assert len(links) > 40
    assert [link for link in links if not (ROOT / "docs" / link).exists()] == []
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_anchors_lead_to_headings() -> None:
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", PAGE, flags=re.DOTALL), re.MULTILINE)
    anchors = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
    asked = set(re.findall(r"\]\(#([^)]+)\)", PAGE))
    assert len(anchors) == len(set(anchors))
    assert asked <= set(anchors)


def test_pictures_are_up_to_date_and_all_are_shown() -> None:
    done = subprocess.run(
        [sys.executable, "script/pictures", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    shown = re.findall(r"^!\[.+\]\((ends/\w+\.svg)\)$", PAGE, re.MULTILINE)
    drawn = [path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs/ends").iterdir()]
    assert sorted(shown) == sorted(drawn)


def test_combinations_without_a_meaning_are_those_of_the_list() -> None:
    rows = re.findall(r"^\| (input .+?) \| (.+?) \|$", _group("Combinations without a meaning"), re.MULTILINE)
    listed = [
        (", ".join(f"{end} = {kind}" for end, kind in pattern.items()), sentence)
        for pattern, sentence in WITHOUT_MEANING
    ]
    assert rows == listed


def test_there_is_room_for_what_was_measured() -> None:
    assert re.search(r"<!-- results:begin -->.*<!-- results:end -->", _group("Measured side by side"), re.DOTALL)
