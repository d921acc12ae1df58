"""Read a page of documentation: its sections, recipes, commands and references."""

from __future__ import annotations

import json
import re
import shlex
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

from reefknot.lab.cli.main import VERBS, iter_verbs
from reefknot.lab.recipes.recipe import load_recipe

ROOT = Path(__file__).parent.parent
COMMANDS = {" ".join(words): command for words, command in iter_verbs()}
"""Every command by its verb, such as "train" and "bench heads"."""
GROUPS = {verb.partition(" ")[0] for verb in COMMANDS if " " in verb}
OPTIONS = {
    "--help",
    *(option for command in COMMANDS.values() for parameter in command.params for option in parameter.opts),
    *re.findall(r'addoption\(\s*"(--\w+)"', (ROOT / "tests/conftest.py").read_text(encoding="utf-8")),
}
"""Options of all verbs and of the tests."""


class Page:
    """A Markdown file of the repository, or the text of a notebook."""

    def __init__(self, name: str) -> None:
        self.path = ROOT / name
        self.text = self.path.read_text(encoding="utf-8")
        if self.path.suffix == ".ipynb":
            cells = json.loads(self.text)["cells"]
            self.text = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
        self.prose = re.sub(r"```.*?```", "", self.text, flags=re.DOTALL)

    @cached_property
    def sections(self) -> dict[str, str]:
        """Return the text below every heading, up to the next heading."""
        return dict(re.findall(r"^##+ (.+?)\n(.*?)(?=^##|\Z)", self.text, re.DOTALL | re.MULTILINE))

    def snippets(self, heading: str, language: str = "toml") -> list[str]:
        """Return the code blocks below a heading."""
        return code(self.sections[heading], language)

    def commands(self) -> list[list[str]]:
        """Return the arguments of every `reefknot` command in code blocks and in the text."""
        blocks = [block.replace("\\\n", " ") for block in code(self.text, "sh")]
        lines = [line.partition("#")[0] for block in blocks for line in block.splitlines()]
        quoted = re.findall(r"`(reefknot \w+ [^`]+)`", self.prose)
        lines += [line for line in quoted if line.removeprefix("reefknot ") not in COMMANDS]  # not the verb alone
        single = [part for line in lines for part in line.split("&&") if re.search(r"\breefknot ", part)]
        split = [shlex.split(re.split(r"\breefknot ", part, maxsplit=1)[1].partition("<")[0]) for part in single]
        return [[" ".join(words[:2]), *words[2:]] if words[0] in GROUPS else words for words in split]

    def broken_links(self) -> list[str]:
        """Return the links, paths and anchors that do not exist."""
        links = re.findall(r"\]\((?!https://)([^)#]*)(?:#([^)]+))?\)", self.prose)
        broken = [link for link, _ in links if link and not (self.path.parent / link).exists()]
        for link, anchor in links:
            target = (self.path.parent / link).resolve() if link else self.path
            if anchor and target.suffix == ".md" and anchor not in anchors(target.read_text(encoding="utf-8")):
                broken.append(f"{link}#{anchor}")
        paths = re.findall(r"`((?:src|docs|script|tests)/[^`\s]+)", self.prose)  # without the arguments of scripts
        return [*broken, *(path for path in paths if not (ROOT / path).exists())]

    def unknown_verbs_and_options(self) -> list[str]:
        """Return the verbs and options that do not exist."""
        named = re.findall(r"`reefknot ([a-z]\w*)(?: ([a-z][\w-]*))?", self.prose)
        verbs = [verb for verb, _ in named if verb not in VERBS]
        verbs += [
            f"{verb} {name}" for verb, name in named if verb in GROUPS and name and f"{verb} {name}" not in COMMANDS
        ]
        return [*verbs, *(option for option in re.findall(r"`(--[\w-]+)", self.prose) if option not in OPTIONS)]

    def missing_tests(self) -> list[str]:
        """Return the named tests that do not exist, in the files named with them or in any file."""
        missing = []
        for names, files in re.findall(r"((?:`test_\w+`,? )+)in ((?:`tests/\S+`(?:, )?)+)", self.prose):
            for file, name in product(re.findall(r"`(tests/\S+)`", files), re.findall(r"`(\w+)`", names)):
                if f"def {name}(" not in (ROOT / file).read_text(encoding="utf-8"):
                    missing.append(f"{name} in {file}")
        test_names = re.findall(r"(?<!^\| )`(test_\w+)`", self.prose, re.MULTILINE)  # not the keys in tables
        everything = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
        return missing + [name for name in test_names if f"def {name}(" not in everything]


def code(text: str, language: str) -> list[str]:
    """Return the code blocks in a text."""
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def anchors(text: str) -> list[str]:
    """Return the anchors that GitHub makes of the headings."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


def experiments(folder: Path, *snippets: str) -> dict[str, Any]:
    """Join snippets of a page to a recipe and return its experiments."""
    path = folder / "mine.toml"
    path.write_text("\n".join(snippets), encoding="utf-8")
    return dict(load_recipe(str(path)).experiments)
