"""Check that the packages of an extra, such as `reefknot[onnx]`, are installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

from reefknot.errors import SettingsError


def check_packages(option: str, packages: Sequence[str], extra: str) -> None:
    """Raise an error with the pip command if a package is missing.

    Args:
        option: The option that needs the packages, for the message.
        packages: Names under which the packages are imported.
        extra: The extra of Reefknot that installs them.
    """
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise SettingsError(
            f"{option} needs {', '.join(missing)}, which {verb} not installed; run: pip install 'reefknot[{extra}]'"
        )
