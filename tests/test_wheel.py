"""A wheel built from the repository works outside it, with its recipes and templates."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_wheel_works_outside_the_repository(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(source)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        archive.extractall(tmp_path / "installed")
    packaged = {
        path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src/reefknot").rglob("*") if path.is_file()
    }
    assert {name for name in packaged if "__pycache__" not in name} <= names
    assert not [name for name in names if name.startswith(("tests", "results"))]
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "installed")}
    show_path = [sys.executable, "-c", "import reefknot; print(reefknot.__file__)"]
    shown = subprocess.run(show_path, env=environment, cwd=tmp_path, check=True, capture_output=True, text=True)
    assert str(tmp_path / "installed") in shown.stdout
    command = [sys.executable, "-m", "reefknot", "validate", "press2017/table6"]
    completed = subprocess.run(command, env=environment, cwd=tmp_path, check=True, capture_output=True, text=True)
    assert "2,691,800 parameters" in completed.stdout
