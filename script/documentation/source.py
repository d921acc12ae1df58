"""Write the source of the site: the files of docs/, split and generated pages, and the table of contents."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Collection
from pathlib import Path

import nbformat
from documentation.api import toctree, write_api_pages
from documentation.contents import PAPERS, ROOT_PAGES, SECTIONS
from documentation.markdown import NamePage, Site, slug
from documentation.notebooks import convert, execute
from documentation.reference import write_recipe_pages, write_verb_pages

ROOT = Path(__file__).resolve().parents[2]
PICTURES = ("ends", "figures", "performance")
"""Folders of docs/ that have pictures."""
ENDS_CHAPTERS = ("Tables", "Inputs", "Classifiers", "Outputs", "Penalties on activations")
"""Chapters of docs/ends.md that become one page per part."""


def write_source(folder: Path, *, execute_notebooks: bool) -> None:
    """Write all files that Sphinx reads into an empty folder.

    Args:
        folder: The folder. Its old files are removed.
        execute_notebooks: Show the outputs of the notebooks. Otherwise their pages have only text and code.
    """
    site = Site()
    files: dict[str, bytes] = {}
    for path in sorted((ROOT / "docs").glob("*.md")):
        if path.name != "ends.md":
            site.add(path.stem, f"docs/{path.name}", path.read_text(encoding="utf-8"))
    for file, name in ROOT_PAGES.items():
        site.add(name, file, (ROOT / file).read_text(encoding="utf-8"))
    add_split(site, "docs/ends.md", "ends/index", name_end_page)
    add_split(site, "PAPERS.md", "papers/index", name_paper_page)
    for path in sorted((ROOT / "docs" / "notebooks").glob("*.ipynb")):
        files |= add_notebook(site, path, is_executed=execute_notebooks)
    site.rewrite_links()
    texts = {name: page.text for name, page in site.pages.items()}
    texts |= dict(write_api_pages()) | dict(write_verb_pages()) | dict(write_recipe_pages())
    texts["index"] = add_contents(texts["index"], texts)

    shutil.rmtree(folder, ignore_errors=True)
    for name, text in texts.items():
        path = folder / f"{name}.md"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    for name, content in files.items():
        (folder / name).write_bytes(content)
    for name in PICTURES:
        shutil.copytree(ROOT / "docs" / name, folder / name, dirs_exist_ok=True)


def add_notebook(site: Site, path: Path, *, is_executed: bool) -> dict[str, bytes]:
    """Add a notebook as a page. Return the files that the page refers to: its plots and the notebook itself."""
    if is_executed:
        print(f"executing {path.name}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            notebook = execute(path, Path(folder))
    else:
        notebook = nbformat.read(path, as_version=4)
    text, plots = convert(notebook, path.stem)
    site.add(f"notebooks/{path.stem}", f"docs/notebooks/{path.name}", text)
    files = plots | {path.name: nbformat.writes(notebook).encode()}
    return {f"notebooks/{name}": content for name, content in files.items()}


def add_split(site: Site, file: str, index: str, name_page: NamePage) -> None:
    """Split a file and list its pages on the first one."""
    site.add_split(file, (ROOT / file).read_text(encoding="utf-8"), index, name_page)
    folder = index.rpartition("/")[0]
    pages = [name.removeprefix(f"{folder}/") for name in site.pages if name.startswith(f"{folder}/") and name != index]
    site.pages[index].text += "\n" + toctree(pages)


def name_end_page(heading: str, chapter: str) -> tuple[str, str] | None:
    """Return the page of a part of docs/ends.md, such as `ends/inputs-adaptive`."""
    if chapter not in ENDS_CHAPTERS:
        return None
    family = slug(chapter.split()[0])
    part = "" if heading == chapter else f"-{slug(heading.partition(':')[0])}"
    return f"ends/{family}{part}", ""


def name_paper_page(heading: str, chapter: str) -> tuple[str, str] | None:
    """Return the page of a table or a figure of PAPERS.md."""
    return next(((f"papers/{page}", paper) for paper, page in PAPERS.items() if paper in chapter), None)


def add_contents(index: str, pages: Collection[str]) -> str:
    """Return the first page with the table of contents, which the sidebar shows."""
    for section, names in SECTIONS.items():
        existing = [name for name in names if name in pages]
        index += f"\n```{{toctree}}\n:hidden:\n:caption: {section}\n\n" + "\n".join(existing) + "\n```\n"
    return index
