"""Markdown files of the repository as pages of the site: split long files, and let links lead to the new places."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import PurePosixPath

CODE = re.compile(r"(^ *```.*?^ *```$)", re.DOTALL | re.MULTILINE)
HEADING = re.compile(r"^(#+) (.+)$", re.MULTILINE)
FILE_NAME = re.compile(r"`?[\w./-]+\.(?:md|ipynb)`?")
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
NamePage = Callable[[str, str], tuple[str, str] | None]
"""Maps the text of a heading and of the second-level heading above it to the name and the title of its page.

Without a title, the heading itself is the title. None stands for the page of the heading above it.
"""


@dataclass
class Page:
    """A page of the site: the file that it comes from, and its Markdown text."""

    source: str
    text: str


@dataclass
class Site:
    """All pages, and where the files of the repository and their headings are now."""

    pages: dict[str, Page] = field(default_factory=dict)
    """The pages by name, such as `ends/tables-word`."""
    files: dict[str, str] = field(default_factory=dict)
    """The page of every file: {"docs/runs.md": "runs"}."""
    anchors: dict[tuple[str, str], str] = field(default_factory=dict)
    """The page of every heading of a file that was split: {("docs/ends.md", "in-python"): "ends/index"}."""

    def add(self, name: str, source: str, text: str) -> None:
        """Add a file as one page."""
        self.pages[name] = Page(source, text)
        self.files[source] = name

    def add_split(self, source: str, text: str, index: str, name_page: NamePage) -> None:
        """Add a file as several pages. The text before the first heading with a page of its own goes to `index`."""
        self.add(index, source, "")
        name, depth, chapter, new_level = index, 0, "", 0
        for block in CODE.split(text):
            parts = [block] if CODE.match(block) else re.split(r"(?=^#+ )", block, flags=re.MULTILINE)
            for part in parts:
                heading = HEADING.match(part)
                if heading:
                    level, title = len(heading[1]), heading[2]
                    chapter = title if level == 2 else chapter
                    own_page = name_page(title, chapter) if level > 1 else None
                    if own_page is not None:
                        name, page_title = own_page
                        depth = 0 if page_title else level - 1
                        self.pages.setdefault(name, Page(source, f"# {page_title}\n\n" if page_title else ""))
                    elif level <= 2:
                        name, depth = index, 0
                    self.anchors[source, slug(title)] = name
                    new_level = min(max(1, level - depth), new_level + 1)  # no level is left out
                    part = "#" * new_level + part[level:]
                self.pages[name].text += part

    def rewrite_links(self) -> None:
        """Let the links of all pages lead to pages of the site. A link to any other file becomes text.

        The name of a file as the text of a link becomes the title of its page.
        """
        for name, page in self.pages.items():
            blocks = CODE.split(page.text)
            page.text = "".join(
                block if CODE.match(block) else LINK.sub(lambda link, name=name: self._rewrite(name, link), block)
                for block in blocks
            )

    def title(self, name: str) -> str:
        """Return the first heading of a page."""
        heading = HEADING.search(self.pages[name].text)
        return heading[2] if heading else name

    def _rewrite(self, name: str, link: re.Match[str]) -> str:
        """Return a link of a page with its new target."""
        image, text, target = link.groups()
        if re.match(r"https?://", target):
            return link[0]
        path, _, anchor = target.partition("#")
        file = self.pages[name].source
        if path:
            file = os.path.normpath(PurePosixPath(file).parent / path)
        folder = PurePosixPath(name).parent
        if image:
            return f"![{text}]({os.path.relpath(PurePosixPath(file).relative_to('docs'), folder)})"
        page = self.anchors.get((file, anchor)) or self.files.get(file)
        if page is None:
            return text
        if FILE_NAME.fullmatch(text):
            text = self.title(page)
        return f"[{text}]({os.path.relpath(page, folder)}.md{'#' + anchor if anchor else ''})"


def slug(heading: str) -> str:
    """Return the anchor that GitHub makes of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
