"""The documentation site builds without warnings, works without a network, and has every page, key and verb."""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlparse

import pytest

import reefknot
from pages import COMMANDS, ROOT

pytest.importorskip("furo", reason="the extra docs is not installed")

pytestmark = pytest.mark.slow


class Links(HTMLParser):
    """The links of an HTML page, and the addresses that a browser fetches to show the page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: set[Path] = set()
        self.fetched: set[str] = set()
        self.path = path
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attributes}
        if tag == "a" and not urlparse(values.get("href", "")).scheme:
            path = unquote(urlparse(values.get("href", "")).path)
            if path:
                self.links.add((self.path.parent / path).resolve())
        elif tag != "a":
            self.fetched |= {values[name] for name in ("src", "href", "srcset", "data") if name in values}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    # tests/test_notebooks.py executes the notebooks.
    build = [sys.executable, str(ROOT / "script/docs"), str(folder), "--no-execute"]
    completed = subprocess.run(build, capture_output=True, text=True, check=False)
    assert completed.returncode == 0, completed.stderr
    return (folder / "html").resolve()


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Links]:
    return {path: Links(path) for path in site.rglob("*.html")}


def test_every_page_can_be_reached_from_the_first(site: Path, pages: dict[Path, Links]) -> None:
    reached, waiting = set(), [site / "index.html"]
    while waiting:
        path = waiting.pop()
        if path not in reached and path in pages:
            reached.add(path)
            waiting += pages[path].links
    generated = {site / name for name in ("genindex.html", "search.html", "py-modindex.html")}
    assert sorted(set(pages) - reached - generated) == []


def test_links_lead_to_files(pages: dict[Path, Links]) -> None:
    assert sorted({str(link) for page in pages.values() for link in page.links if not link.exists()}) == []


def test_links_show_titles_in_place_of_file_names(site: Path) -> None:
    pages = "".join(path.read_text(encoding="utf-8") for path in site.rglob("*.html"))
    assert re.findall(r"<a [^>]*>(?:<[^>]*>)*([\w./-]+\.(?:md|ipynb))(?:<[^>]*>)*</a>", pages) == []
    text = re.sub(r"<[^>]+>", "", (site / "several_gpus.html").read_text(encoding="utf-8"))
    assert "Self-attention language models has the details" in text


def test_types_in_signatures_are_links(site: Path) -> None:
    encoders = (site / "reference/api/encoders.html").read_text(encoding="utf-8")
    for name in ("Probability", "Dim", "Encoded"):
        assert f'href="types.html#{name}"' in encoders
        assert f'id="{name}"' in (site / "reference/api/types.html").read_text(encoding="utf-8")


def test_pages_fetch_nothing_from_other_hosts(site: Path, pages: dict[Path, Links]) -> None:
    fetched = {address for page in pages.values() for address in page.fetched}
    assert sorted(address for address in fetched if re.match(r"(\w+:)?//", address)) == []
    styles = "".join(path.read_text(encoding="utf-8") for path in site.rglob("*.css"))
    assert re.findall(r"url\(['\"]?(?:https?:)?//[^)]*\)|@import[^;]*//", styles) == []


def test_search_index_has_names_verbs_and_topics(site: Path) -> None:
    index = (site / "searchindex.js").read_text(encoding="utf-8")
    for word in ("cutoff", "pretrain", "torchrun", "slurm", "resum", "linear_cross_entropy", "tail_dropout", "multipl"):
        assert word in index, word


def test_every_public_name_and_verb_has_an_entry(site: Path) -> None:
    api = "".join(path.read_text(encoding="utf-8") for path in (site / "reference/api").glob("*.html"))
    assert [name for name in reefknot.__all__ if f'id="reefknot.{name}"' not in api] == []
    assert [verb for verb in COMMANDS if not (site / f"reference/verbs/{verb.replace(' ', '-')}.html").exists()] == []


def test_first_command_of_a_verb_page_is_its_help(site: Path) -> None:
    page = (site / "reference/verbs/train.html").read_text(encoding="utf-8")
    for option in COMMANDS["train"].params:
        assert option.opts[0] in page


def test_recipe_keys_have_bounds_and_descriptions(site: Path) -> None:
    page = (site / "reference/recipes/encoders.html").read_text(encoding="utf-8")
    assert "Dropout rate before, between and after the layers." in page
    keys = (site / "reference/recipes/language_model.html").read_text(encoding="utf-8")
    assert "training.determinism" in keys
    assert "vocabulary.bpe.merges" in keys
