"""Fixtures of all tests (a separate cache, a small text and a small recipe) and options for longer tests.

pytest tests/crash --kills 1000 [--device cuda]                 more kills than in CI, also on a GPU
pytest tests/crash/test_damage.py --mutations 5000              more damaged files
HYPOTHESIS_PROFILE=campaign pytest tests/fuzz --timeout 0       more damaged recipes
pytest tests/contract --combinations all                        all combinations of ends instead of a pairwise covering
pytest tests/contract tests/lab/cli tests/golden --freeze       write the frozen files; read and commit the difference
"""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

# Some virtual machines advertise AMX but kill a process that uses it. No test needs it, so oneDNN must not choose it.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
# Some tests use two threads, which must not wait in a loop while another test needs the CPU.
os.environ.setdefault("GOMP_SPINCOUNT", "0")

import pytest
import torch
import typer.main
from hypothesis import HealthCheck, settings

from recorded_graph import recorded  # noqa: F401  (a fixture)
from tiny import MODEL, UNTIED

settings.register_profile("ci", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
num_examples = int(os.environ.get("HYPOTHESIS_EXAMPLES", "20000"))
settings.register_profile("campaign", settings.get_profile("ci"), derandomize=False, max_examples=num_examples)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

# A shell starts a background job with SIGINT ignored, and nohup ignores SIGHUP. Processes that the tests start and then
# interrupt must not inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

TRAINING = """
[base.init]
uniform = 0.1

[base.training]
epochs = 2
batch = 4
steps = 5
divisor = "batch"
clip = 5.0
log_every = 2
save_every = 3
optimiser = { kind = "sgd", learning_rate = 1.0 }
schedule = { kind = "decay", hold = 1, factor = 0.5 }

[[rows]]
name = "tied"
"""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--kills", type=int, default=20, help="number of kills in tests/crash")
    parser.addoption("--models", default="lstm", help="models of tests/crash/test_kill.py, separated by commas")
    parser.addoption("--mutations", type=int, default=400, help="number of damaged files in tests/crash")
    parser.addoption("--device", default="cpu", help="device of tests/crash: cpu or cuda")
    parser.addoption(
        "--combinations", choices=["pairs", "all"], default="pairs", help="combinations of ends in tests/contract"
    )
    parser.addoption("--freeze", action="store_true", help="write the frozen files instead of comparing with them")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start with the slow tests, so that no process is left with a slow test when the others have finished."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the number of combinations of ends, and how many of them are tested."""
    from contract.combinations import summary
    from contract.conftest import chosen_cases

    terminalreporter.write_line(summary(chosen_cases(config)))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a GPU")


@pytest.fixture(scope="session", autouse=True)
def separate_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Keep tests away from the user's cache, and use one thread, which is faster for small models."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REEFKNOT_CACHE", str(folder))
        patch.setenv("OMP_NUM_THREADS", "1")
        torch.set_num_threads(1)
        yield folder


@pytest.fixture(scope="session", autouse=True)
def cached_parser() -> Iterator[None]:
    """Keep the parser of all verbs, because building it takes most of the time of a command."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.main, "get_command", cache(typer.main.get_command))
        yield


@pytest.fixture(autouse=True)
def fast_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not wait for the disk, which only guards against power loss. Child processes still wait."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def frozen(request: pytest.FixtureRequest) -> Callable[[Path, dict[str, Any]], dict[str, Any]]:
    """Read a committed JSON file. With --freeze, first write the current values to it."""

    def read(path: Path, current: dict[str, Any]) -> dict[str, Any]:
        if request.config.getoption("--freeze"):
            path.write_text(json.dumps(current, indent=1) + "\n", encoding="utf-8")
        stored: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return stored

    return read


@pytest.fixture(scope="session")
def made_text(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Write a folder of train, valid and test text with about `tokens` training tokens, which also seed the text."""

    def write(tokens: int) -> Path:
        folder = tmp_path_factory.mktemp("text")
        generator = random.Random(tokens)
        words = [f"w{index}" for index in range(30)]
        for name, size in (("train", tokens), ("valid", 60), ("test", 60)):
            lines = []
            for _ in range(size // 10):
                # Every word has few successors, so that a model can learn them.
                line = [generator.randrange(30)]
                while len(line) < 9:
                    line.append((3 * line[-1] + generator.randrange(3)) % 30)
                lines.append(" ".join(words[index] for index in line) + "\n")
            (folder / f"{name}.txt").write_text("".join(lines), encoding="utf-8")
        return folder

    return write


@pytest.fixture
def tiny_recipe(tmp_path: Path, made_text: Callable[[int], Path]) -> Callable[..., Path]:
    """Write a recipe with the rows "tied" and "untied" and with dropout. 120 tokens make 6 updates per epoch."""

    def write(tokens: int = 120, classifier: str = "projected") -> Path:
        path = tmp_path / "tiny.toml"
        model = MODEL.format(corpus=repr(str(made_text(tokens))), layers=2, dropout=0.3, classifier=classifier)
        text = f'title = "Tiny: two rows on a made text"\n{model}{TRAINING}{UNTIED}'
        path.write_text(text, encoding="utf-8")
        return path

    return write
