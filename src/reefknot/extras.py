"""Packages that Reefknot needs only for some features, and the extras of pyproject.toml that install them.

    gensim = import_extra("gensim.models", "the conversion to KeyedVectors")

If gensim is missing, this raises:

    the conversion to KeyedVectors needs gensim; install it with: pip install 'reefknot[gensim]'
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from reefknot.errors import SettingsError

EXTRAS = {
    "lab": ("jinja2", "matplotlib", "pydantic", "rich", "sacrebleu", "scipy", "tokenizers", "typer"),
    "hf": ("transformers",),
    "harness": ("lm_eval",),
    "onnx": ("onnx", "onnxruntime", "onnxscript"),
    "track": ("tensorboard", "trackio", "wandb"),
    "data": ("pandas", "pyarrow", "zstandard"),
    "gensim": ("gensim",),
    "moses": ("sacremoses",),
    "numba": ("numba",),
}
"""The packages of every extra, by the names under which they are imported."""


def import_extra(module: str, purpose: str) -> Any:
    """Import a module of an optional package. If the package is missing, the error says how to install it.

    Args:
        module: The module, such as "gensim.models".
        purpose: What needs the package; the subject of the error message.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if (error.name or "").partition(".")[0] != package:
            raise  # the package is installed, but one of its own requirements is missing
        raise missing_packages([package], purpose) from error


def require_extra(extra: str, purpose: str) -> None:
    """Raise an error if a package of an extra is not installed. The packages are not imported.

    Args:
        extra: A key of `EXTRAS`.
        purpose: What needs the packages; the subject of the error message.
    """
    missing = [package for package in EXTRAS[extra] if importlib.util.find_spec(package) is None]
    if missing:
        raise missing_packages(missing, purpose)


def missing_packages(packages: list[str], purpose: str) -> SettingsError:
    """Return the error for missing packages, all of the same extra."""
    (extra,) = {extra for extra, members in EXTRAS.items() if packages[0] in members}
    pronoun = "it" if len(packages) == 1 else "them"
    names = ", ".join(packages)
    return SettingsError(f"{purpose} needs {names}; install {pronoun} with: pip install 'reefknot[{extra}]'")
