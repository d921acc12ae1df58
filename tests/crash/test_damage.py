"""Damaged files of runs and of the cache never change a number silently.

    pytest tests/crash/test_damage.py --mutations 5000        a longer campaign

Every file that feeds a number is damaged at random places, with a printed seed. A damaged file of a run must raise an
error that names the file. A damaged file of the cache must be made again, with the same content.
"""

from __future__ import annotations

import math
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reefknot.errors import DataError
from reefknot.lab import experiment as experiments
from reefknot.lab.recipes.recipe import load_recipe
from reefknot.lab.runs.folder import RunFolder
from reefknot.lab.runs.loading import load_run
from reefknot.lab.runs.result import SavedEvaluation
from reefknot.lab.tasks import create_task, create_task_for_run
from reefknot.lab.training.display import SilentDisplay
from reefknot.lab.training.distributed import World
from tiny import write_pairs_recipe

LOGS = (".lock", "log.txt")
"""Endings of files that feed no number."""

Damage = Callable[[bytearray, random.Random], None]


def flip_bit(data: bytearray, draw: random.Random) -> None:
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)


def change_digit(data: bytearray, draw: random.Random) -> None:
    """Replace a digit by another one, so that JSON and text stay valid."""
    places = [place for place, byte in enumerate(data) if byte in b"0123456789"]
    if places:
        place = draw.choice(places)
        data[place : place + 1] = str((int(chr(data[place])) + draw.randint(1, 9)) % 10).encode()


def cut(data: bytearray, draw: random.Random) -> None:
    del data[draw.randrange(len(data)) :]


def insert_byte(data: bytearray, draw: random.Random) -> None:
    data.insert(draw.randrange(len(data) + 1), draw.randrange(256))


def clear_block(data: bytearray, draw: random.Random) -> None:
    """Replace up to 512 bytes by zeros, as a lost sector does."""
    place = draw.randrange(len(data))
    length = min(512, len(data) - place)
    data[place : place + length] = bytes(length)


def swap_lines(data: bytearray, draw: random.Random) -> None:
    lines = bytes(data).split(b"\n")
    first, second = draw.randrange(len(lines)), draw.randrange(len(lines))
    lines[first], lines[second] = lines[second], lines[first]
    data[:] = b"\n".join(lines)


DAMAGES: tuple[Damage, ...] = (flip_bit, change_digit, cut, insert_byte, clear_block, swap_lines)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a clock that is a minute late, because hashes of new files are not cached."""
    monkeypatch.setenv("REEFKNOT_CACHE", str(tmp_path / "cache"))
    now = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: now() + 60 * 10**9)
    return tmp_path / "cache"


@pytest.fixture
def recipes(tmp_path: Path, tiny_recipe: Callable[..., Path]) -> list[Path]:
    """The recipes of a language model and of a translator with two vocabularies of sub-words."""
    return [tiny_recipe(), write_pairs_recipe(tmp_path)]


@pytest.fixture
def runs(tmp_path: Path, recipes: list[Path]) -> list[Path]:
    """A finished run of each recipe, with a saved evaluation."""
    folders = []
    for number, path in enumerate(recipes):
        recipe = load_recipe(str(path), [], "tied")
        out = tmp_path / f"run{number}"
        result = experiments.train(recipe, recipe.row("tied"), out, world=World(), display=SilentDisplay())
        assert result is not None
        RunFolder.open(out).write_evaluation(SavedEvaluation(format=2, kind="dynamic", test=result.test))
        folders.append(out)
    return folders


def read_run(folder: Path) -> None:
    """Read everything of a run that a verb turns into numbers."""
    load_run(folder)
    run = RunFolder.open(folder)
    task = create_task_for_run(run)
    task.load_vocabularies(run)
    run.best_weights()
    assert run.result is not None
    assert run.environment is not None
    assert run.evaluation("dynamic") is not None
    run.read_scores()
    if run.task == "translation":
        for split in ("valid", "test"):
            run.read_translations(split)


def read_error(folder: Path) -> str:
    """Read a run, and return the message of the error that it raises."""
    try:
        read_run(folder)
    except DataError as error:
        return str(error)
    return ""


def read_data(recipe: Path, notify: Callable[[str], None]) -> list[Any]:
    """Return everything of a text that a verb turns into numbers."""
    loaded = load_recipe(str(recipe), [], "tied")
    dataset = create_task(loaded.experiments["tied"]).open_data(None, notify=notify)
    values: list[Any] = [dataset.fingerprint, dataset.describe()]
    for split in dataset.splits.values():
        if hasattr(split, "ids"):
            values.append(np.array(split.ids))
        else:
            for lines in (split.source, split.target):
                values += [np.array(lines.ids), np.array(lines.bounds)]
            values += [np.array(split.line_numbers), split.read_text("target")]
    values += [vocabulary.words for vocabulary in dataset.vocabulary_pair.vocabularies]
    return values


def numeric_files(folder: Path) -> list[Path]:
    """Return the files of a run or of a cache that feed numbers, without the copies behind the link `best`."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and not path.name.endswith(LOGS)]
    best = (folder / "best").resolve() if (folder / "best").exists() else None
    return [path for path in files if best is None or "checkpoints" not in path.parts or path.parent == best]


def damaged(path: Path, draw: random.Random, count: int) -> Iterator[str]:
    """Damage a file in `count` ways, one at a time, and restore it."""
    original = path.read_bytes()
    for number in range(count):
        data = bytearray(original)
        damage = DAMAGES[number % len(DAMAGES)]
        damage(data, draw)
        if data == original:
            flip_bit(data, draw)
            damage = flip_bit
        path.write_bytes(data)
        yield damage.__name__
        path.write_bytes(original)


def count_per_file(request: pytest.FixtureRequest, num_files: int) -> int:
    return max(len(DAMAGES), math.ceil(request.config.getoption("--mutations") / num_files))


@pytest.mark.timeout(0)
def test_damaged_run_is_rejected_with_the_name_of_the_file(runs: list[Path], request: pytest.FixtureRequest) -> None:
    seed = random.SystemRandom().randrange(10**6)
    draw = random.Random(seed)
    paths = [path for run in runs for path in numeric_files(run)]
    kinds = {path.name for path in paths}
    assert {
        "config.json",
        "environment.json",
        "vocabulary.json",
        "tokenizer.json",
        "result.json",
        "MANIFEST.json",
    } < kinds
    assert {"scores.safetensors", "dynamic.json", "metrics.jsonl", "test.txt", "model.safetensors"} < kinds
    counts: Counter[str] = Counter()
    for run in runs:
        read_run(run)
        for path in numeric_files(run):
            for damage in damaged(path, draw, count_per_file(request, 2 * len(paths))):
                message = read_error(run)
                assert message, f"{damage} of {path} was not noticed (seed {seed})"
                assert path.name in message, (damage, path)
                counts[path.name] += 1
        read_run(run)
    print(f"{sum(counts.values())} damaged files of runs, 0 silent: {dict(counts)}")


@pytest.mark.timeout(0)
def test_damaged_cache_is_made_again(recipes: list[Path], cache: Path, request: pytest.FixtureRequest) -> None:
    seed = random.SystemRandom().randrange(10**6)
    draw = random.Random(seed)
    counts: Counter[str] = Counter()
    for recipe in recipes:
        shutil.rmtree(cache, ignore_errors=True)
        expected = read_data(recipe, pytest.fail)
        assert equal(read_data(recipe, pytest.fail), expected)
        paths = numeric_files(cache)
        kinds = {path.suffix for path in paths}
        assert kinds >= ({".json", ".ids"} if recipe == recipes[0] else {".json", ".ids", ".bounds", ".numbers"})
        for path in paths:
            for damage in damaged(path, draw, count_per_file(request, 4 * len(paths))):
                messages: list[str] = []
                found = read_data(recipe, messages.append)
                assert equal(found, expected), f"{damage} of {path} was not noticed (seed {seed})"
                assert "hashes" in path.parts or path.name in messages[0], (damage, path, messages)
                counts[path.suffix] += 1
    print(f"{sum(counts.values())} damaged files of the cache, 0 silent: {dict(counts)}")


def equal(values: list[Any], expected: list[Any]) -> bool:
    return len(values) == len(expected) and all(map(np.array_equal, values, expected))
