"""A page of documentation as its tests read it: sections, recipes, commands, and what it refers to."""

from __future__ import annotations

import re
import shlex
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

from reefknot.lab.cli.main import VERBS, every_verb
from reefknot.lab.recipes.recipe import load_recipe

ROOT = Path(__file__).parent.parent
COMMANDS = {" ".join(words): command for words, command in every_verb()}
"""Every command by its verb, such as "train" and "bench heads"."""
GROUPS = {verb.partition(" ")[0] for verb in COMMANDS if " " in verb}
OPTIONS = {
    "--help",
    *(option for command in COMMANDS.values() for parameter in command.params for option in parameter.opts),
    *re.findall(r'addoption\(\s*"(--\w+)"', (ROOT / "tests/conftest.py").read_text(encoding="utf-8")),
}
"""Of all verbs, and of our tests."""


class Page:
    """A Markdown file of the repository."""

    def __init__(self, name: str) -> None:
        self.path = ROOT / name
        self.text = self.path.read_text(encoding="utf-8")
        self.prose = re.sub(r"```.*?```", "", self.text, flags=re.DOTALL)

    @cached_property
    def sections(self) -> dict[str, str]:
        """The text below every heading, down to the next one."""
        return dict(re.findall(r"^##+ (.+?)\n(.*?)(?=^##|\Z)", self.text, re.DOTALL | re.MULTILINE))

    def group(self, heading: str) -> str:
        """The text below a heading of the second level, with what is below it."""
        return self.text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]

    def snippets(self, heading: str, language: str = "toml") -> list[str]:
        return code(self.sections[heading], language)

    def commands(self) -> list[list[str]]:
        """Every command line of ours, in a block or in the prose, as its verb and the words that follow it."""
        lines = [line.partition("#")[0] for block in code(self.text, "sh") for line in block.splitlines()]
        quoted = re.findall(r"`(reefknot \w+ [^`]+)`", self.prose)
        lines += [line for line in quoted if line.removeprefix("reefknot ") not in COMMANDS]  # not the verb alone
        single = [part for line in lines for part in line.split("&&") if re.search(r"\breefknot ", part)]
        split = [shlex.split(re.split(r"\breefknot ", part, maxsplit=1)[1].partition("<")[0]) for part in single]
        return [[" ".join(words[:2]), *words[2:]] if words[0] in GROUPS else words for words in split]

    def lost(self) -> list[str]:
        """Links, paths and anchors that lead nowhere."""
        links = re.findall(r"\]\((?!https://)([^)#]*)(?:#([^)]+))?\)", self.prose)
        wrong = [link for link, _ in links if link and not (self.path.parent / link).exists()]
        for link, anchor in links:
            there = (self.path.parent / link).resolve() if link else self.path
            if anchor and there.suffix == ".md" and anchor not in anchors(there.read_text(encoding="utf-8")):
                wrong.append(f"{link}#{anchor}")
        named = re.findall(r"`((?:src|docs|script|tests)/[^`\s]+)", self.prose)  # a script may have arguments
        return [*wrong, *(path for path in named if not (ROOT / path).exists())]

    def unknown(self) -> list[str]:
        """Verbs and options that do not exist."""
        named = re.findall(r"`reefknot ([a-z]\w*)(?: ([a-z][\w-]*))?", self.prose)
        verbs = [verb for verb, _ in named if verb not in VERBS]
        verbs += [
            f"{verb} {name}" for verb, name in named if verb in GROUPS and name and f"{verb} {name}" not in COMMANDS
        ]
        return [*verbs, *(option for option in re.findall(r"`(--[\w-]+)", self.prose) if option not in OPTIONS)]

    def missing_tests(self) -> list[str]:
        """Tests that are named but not there: in the files that are named behind them, or, alone, in any."""
        wrong = []
        for names, files in re.findall(r"((?:`test_\w+`,? )+)in ((?:`tests/\S+`(?:, )?)+)", self.prose):
            for file, name in product(re.findall(r"`(tests/\S+)`", files), re.findall(r"`(\w+)`", names)):
                if f"def {name}(" not in (ROOT / file).read_text(encoding="utf-8"):
                    wrong.append(f"{name} in {file}")
        named = re.findall(r"`(test_\w+)`", self.prose)
        everything = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
        return wrong + [name for name in named if f"def {name}(" not in everything]


def code(text: str, language: str) -> list[str]:
    """The blocks of code in a text."""
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def anchors(text: str) -> list[str]:
    """What links may lead to: the headings, as GitHub spells them."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


def experiments(folder: Path, *snippets: str) -> dict[str, Any]:
    """The experiments, of either kind, of a recipe that is made as a page says: its frame, and snippets below that."""
    path = folder / "mine.toml"
    path.write_text("\n".join(snippets), encoding="utf-8")
    return dict(load_recipe(str(path)).experiments)
