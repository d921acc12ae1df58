"""The part of the build that pyproject.toml cannot express: a readme whose links also work outside the repository."""

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent


def make_links_absolute(text: str, repository: str | None) -> str:
    """Let the relative links of a Markdown text lead to the repository.

    Without an address of the repository, only the text of a link remains. Relative images are left out.
    """
    relative_link = r"(!?)\[([^\]]*)\]\((?!https?://|#)([^)]+)\)"
    if repository is None:
        return re.sub(relative_link, lambda match: "" if match[1] else match[2], text)
    files = {"": f"{repository}/blob/main/", "!": f"{repository}/raw/main/"}
    return re.sub(relative_link, lambda match: f"{match[1]}[{match[2]}]({files[match[1]]}{match[3]})", text)


project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
readme = (ROOT / "README.md").read_text(encoding="utf-8")
setup(
    long_description=make_links_absolute(readme, project.get("urls", {}).get("Repository")),
    long_description_content_type="text/markdown",
)
