"""The README's Python examples run."""

import re
import subprocess
import sys

from pages import Page

README = Page("README.md").text


def test_the_python_example_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    code = "".join(blocks)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
