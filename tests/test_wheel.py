"""What a release uploads: a complete source distribution, and a wheel that works outside the repository."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import Distribution
from pathlib import Path

import pytest

import reefknot

ROOT = Path(__file__).parent.parent


def tracked_files() -> list[str]:
    """Return the files of the repository. A source distribution does not have this list."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        pytest.skip("not a git repository")
    return [name for name in listed.stdout.splitlines() if (ROOT / name).exists()]


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Build the source distribution from the files of the repository, and the wheel from the source distribution."""
    folder = tmp_path_factory.mktemp("distributions")
    source = folder / "source"
    for name in tracked_files():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder)]
    subprocess.run([*build, "--sdist", str(source)], check=True, capture_output=True)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as sdist:
        sdist.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    subprocess.run([*build, "--wheel", str(unpacked)], check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    return {"sdist": archive, "unpacked": unpacked, "wheel": wheel}


@pytest.fixture(scope="module")
def installed(distributions: dict[str, Path]) -> Path:
    folder = distributions["wheel"].parent / "installed"
    with zipfile.ZipFile(distributions["wheel"]) as archive:
        archive.extractall(folder)
    return folder


def test_source_distribution_is_complete(distributions: dict[str, Path]) -> None:
    assert [name for name in tracked_files() if not (distributions["unpacked"] / name).exists()] == []


def test_descriptions_are_valid(distributions: dict[str, Path]) -> None:
    files = [str(distributions["sdist"]), str(distributions["wheel"])]
    completed = subprocess.run(
        [sys.executable, "-m", "twine", "check", "--strict", *files], capture_output=True, text=True, check=False
    )
    assert completed.returncode == 0, completed.stdout


def test_wheel_has_the_whole_package(distributions: dict[str, Path]) -> None:
    with zipfile.ZipFile(distributions["wheel"]) as archive:
        names = set(archive.namelist())
    assert {name.removeprefix("src/") for name in tracked_files() if name.startswith("src/")} <= names
    assert not [name for name in names if name.startswith(("tests", "results"))]


def test_metadata_have_the_version_and_a_readme_without_relative_links(installed: Path) -> None:
    (folder,) = installed.glob("*.dist-info")
    metadata = Distribution.at(folder).metadata
    assert metadata["Version"] == reefknot.__version__
    text = metadata.get_payload()
    assert "# Reefknot" in text
    assert "](docs/" not in text
    assert "](PAPERS.md" not in text


def test_wheel_works_outside_the_repository(installed: Path, tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(installed)}
    show_path = [sys.executable, "-c", "import reefknot; print(reefknot.__file__)"]
    shown = subprocess.run(show_path, env=environment, cwd=tmp_path, check=True, capture_output=True, text=True)
    assert str(installed) in shown.stdout
    command = [sys.executable, "-m", "reefknot", "validate", "press2017/table6"]
    completed = subprocess.run(command, env=environment, cwd=tmp_path, check=True, capture_output=True, text=True)
    assert "2,691,800 parameters" in completed.stdout
