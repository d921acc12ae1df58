"""The library needs no extra. A missing extra is one sentence with the command that installs it, and exit code 2."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import reefknot as rk
from pages import ROOT, code
from reefknot.errors import SettingsError
from reefknot.extras import EXTRAS, import_extra, require_extra
from reefknot.kernels.skip_gram import numba_available, resolve_impl
from reefknot.lab.interop.export import ExportRequest, check_request
from reefknot.lab.text.detokenization import build_detokenizer
from reefknot.lab.training.trackers import check_trackers
from reefknot.vectors.word_vectors import WordVectors, to_keyed_vectors

OPTIONAL_PACKAGES = [package for packages in EXTRAS.values() for package in packages]
DEPENDENCIES = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def run_without(packages: list[str], program: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a new process in which these packages cannot be imported."""
    block = f"import sys; sys.modules.update(dict.fromkeys({packages!r}))\n"
    environment = os.environ | {"PYTHONPATH": str(Path(rk.__file__).parent.parent)}
    return subprocess.run(
        [sys.executable, "-c", block + program], capture_output=True, text=True, check=False, env=environment
    )


# -- the list of extras --------------------------------------------------------------------------------------------


def test_extras_have_the_packages_of_the_project_file() -> None:
    declared = {
        extra: tuple(sorted(re.split(r"[<>=!~\[; ]", requirement)[0].replace("-", "_") for requirement in requirements))
        for extra, requirements in DEPENDENCIES["optional-dependencies"].items()
        if extra in EXTRAS
    }
    assert declared == EXTRAS


def test_core_has_three_dependencies() -> None:
    names = [re.split(r"[<>=]", requirement)[0] for requirement in DEPENDENCIES["dependencies"]]
    assert names == ["torch", "numpy", "safetensors"]


@pytest.mark.parametrize(("extra", "package"), [(extra, name) for extra, names in EXTRAS.items() for name in names])
def test_every_missing_package_is_reported(extra: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    message = rf"^this needs {package}; install it with: pip install 'reefknot\[{extra}\]'$"
    with pytest.raises(SettingsError, match=message):
        import_extra(package, "this")
    with pytest.raises(SettingsError, match=rf"{package}.*pip install 'reefknot\[{extra}\]'$"):
        require_extra(extra, "this")


def test_broken_package_keeps_its_own_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gensim.py").write_text("import a_missing_requirement\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "gensim", raising=False)
    with pytest.raises(ModuleNotFoundError, match="a_missing_requirement"):
        import_extra("gensim", "this")


# -- the features that need an extra -------------------------------------------------------------------------------


def use_numba() -> None:
    numba_available.cache_clear()
    resolve_impl(torch.zeros(3, 2), "numba")


FEATURES: dict[str, tuple[str, Callable[[], object]]] = {
    "hf": ("transformers", lambda: importlib.import_module("reefknot.hf")),
    "gensim": ("gensim", lambda: to_keyed_vectors(WordVectors(("a",), torch.ones(1, 2).numpy()))),
    "moses": ("sacremoses", lambda: build_detokenizer("de")),
    "numba": ("numba", use_numba),
    "onnx": ("onnxscript", lambda: check_request(ExportRequest("onnx", Path("unused")))),
    "track": ("torch.utils.tensorboard", lambda: check_trackers(["tensorboard"])),
}
"""For each extra, a module that it needs and a call that uses the module."""


@pytest.mark.parametrize("extra", FEATURES)
def test_feature_without_its_extra_is_a_settings_error(extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, use = FEATURES[extra]
    monkeypatch.setitem(sys.modules, module, None)
    for name in [name for name in sys.modules if name.startswith(f"{module}.")]:
        monkeypatch.delitem(sys.modules, name)
    for name in [name for name in sys.modules if name.startswith("reefknot.hf")]:
        monkeypatch.delitem(sys.modules, name)
    try:
        with pytest.raises(SettingsError, match=rf"pip install 'reefknot\[{extra}\]'$") as raised:
            use()
    finally:
        numba_available.cache_clear()
    assert raised.value.exit_code == 2
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("arguments", [[], ["--help"], ["train", "demo"]])
def test_command_without_the_laboratory_says_what_to_install(arguments: list[str]) -> None:
    program = f"from reefknot.__main__ import main; sys.argv[1:] = {arguments!r}; main()"
    completed = run_without(["typer", "pydantic"], program)
    assert completed.returncode == 2
    assert completed.stdout == ""
    (line,) = completed.stderr.splitlines()
    assert line.startswith("reefknot: the laboratory (reefknot.lab and the command line) needs pydantic, typer;")
    assert line.endswith("pip install 'reefknot[lab]'")


def test_names_of_the_laboratory_say_what_to_install() -> None:
    completed = run_without(
        ["scipy"], "import reefknot\ntry: reefknot.load_recipe\nexcept Exception as error: print(error)"
    )
    assert completed.stdout.strip().endswith("needs scipy; install it with: pip install 'reefknot[lab]'")


# -- the library ----------------------------------------------------------------------------------------------------


def test_library_examples_of_the_readme_need_no_extra() -> None:
    program = "".join(code((ROOT / "README.md").read_text(encoding="utf-8"), "python"))
    completed = run_without(OPTIONAL_PACKAGES, program)
    assert completed.returncode == 0, completed.stderr


NEW_MODULES = """
import sys
{before}
loaded = set(sys.modules)
{then}
own = sys.stdlib_module_names | {{"reefknot"}}
print(sorted(name for name in set(sys.modules) - loaded if name.partition(".")[0] not in own))
"""


@pytest.mark.parametrize(
    ("before", "then"),
    [("", "import reefknot"), ("import torch, numpy", "import reefknot; reefknot.linear_cross_entropy")],
)
def test_imports_load_no_third_party_modules(before: str, then: str) -> None:
    program = NEW_MODULES.format(before=before, then=then)
    completed = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert completed.stdout.strip() == "[]"
