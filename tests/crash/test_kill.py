"""A run that is killed by SIGKILL at random moments and resumed by the same command ends bit for bit the same.

    pytest tests/crash --kills 1000                  a longer campaign, over several runs if needed
    pytest tests/crash --kills 200 --device cuda     the same on a GPU
    pytest tests/crash --models lstm,translator      other models; `MODELS` lists them

The moments are drawn with a printed seed and spread over start-up, updates and saves. Dropout is on. To save time,
processes that are killed after their start-up are forked from one that has imported everything. Processes that are
killed during their start-up, and the last process of a run, start from scratch. The process that is forked has never
used the GPU, so a kill on a GPU is as fast.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from tiny import encoder, write_pairs_recipe

SAVE_EVERY = 40
SETTINGS = ("training.log_every=1", f"training.save_every={SAVE_EVERY}")
MODELS = {
    "lstm": ("training.epochs=10",),
    "awd_lstm": ("training.epochs=10", encoder("awd_lstm")),
    "transformer": ("training.epochs=10", encoder("transformer")),
    "translator": ("training.epochs=20",),
}
"""Settings of each model. A run has a thousand or two thousand updates of a few milliseconds each."""
MOMENTS = {"start-up": 1, "update": 3, "save": 2}
"""Intended moments of the kills, and their weights."""

FRESH, FORKED = multiprocessing.get_context("spawn"), multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(["pytest", "reefknot.lab.cli.main", "reefknot.lab.experiment"])


def reefknot(words: list[str]) -> None:
    """Run a command in this process without output."""
    from reefknot.lab.cli.main import main

    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    sys.argv[1:] = words
    main()


@dataclass
class Campaign:
    """A command that is killed and run again."""

    recipe: Path
    model: str
    draw: random.Random
    device: str
    landed: Counter[str] = field(default_factory=Counter)
    """Where the kills actually happened, judged by the run folder."""

    def words(self, out: Path) -> list[str]:
        exact = ["training.determinism=exact"] if self.device == "cuda" else []
        where = ["--row", "tied", "--out", str(out), "--device", self.device]
        return ["train", str(self.recipe), *where, *SETTINGS, *MODELS[self.model], *exact]

    def finish(self, out: Path) -> None:
        """Run the command to the end. This also produces the run without interruptions."""
        command = [sys.executable, "-m", "reefknot", *self.words(out)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 0, done.stdout + done.stderr

    def kill(self, out: Path) -> bool:
        """Start or resume the run and kill it once. Returns False if the run ended before the kill."""
        moment = self.draw.choices(list(MOMENTS), list(MOMENTS.values()))[0]
        before, base = modified_time(out / "metrics.jsonl"), newest_step(out)
        context = FRESH if moment == "start-up" else FORKED
        process = context.Process(target=reefknot, args=(self.words(out),))
        process.start()
        try:
            if moment == "start-up":
                time.sleep(self.draw.uniform(0, 3))
            else:
                # Count updates after the checkpoint, because the speed of the machine varies.
                further = self.draw.randint(1, 3 * SAVE_EVERY)
                wait_for(
                    process,
                    lambda: modified_time(out / "metrics.jsonl") != before and logged_step(out) >= base + further,
                )
                time.sleep(self.draw.uniform(0, 0.005))
            if moment == "save":
                wait_for(process, lambda: any(out.glob(f"checkpoints/*.tmp-{process.pid}")))
        finally:
            process.kill()
            process.join()
        if process.exitcode == 0:
            return False
        self._note(out, process.pid)
        return True

    def _note(self, out: Path, pid: int | None) -> None:
        saved, logged = newest_step(out), logged_step(out)
        self.landed["after the first update"] += logged > 0
        self.landed["between two checkpoints"] += logged > saved > 0
        self.landed["while saving"] += any(out.glob(f"checkpoints/*.tmp-{pid}"))


def wait_for(process: BaseProcess, condition: Callable[[], object]) -> None:
    """Wait until a condition is true or the process has ended."""
    until = time.monotonic() + 120
    while process.is_alive() and not condition():
        assert time.monotonic() < until, "nothing has happened for two minutes"
        time.sleep(0.002)


def newest_step(run: Path) -> int:
    """Return the step of the newest checkpoint."""
    return max((int(path.name[5:]) for path in run.glob("checkpoints/step_" + "[0-9]" * 8)), default=0)


def logged_step(run: Path) -> int:
    """Return the step of the last complete line of metrics."""
    path = run / "metrics.jsonl"
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return int(json.loads(lines[-1])["step"]) if lines else 0


def modified_time(path: Path) -> int | None:
    """Return the time of the last change of a file, or None if the file does not exist."""
    return path.stat().st_mtime_ns if path.exists() else None


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """Return the complete lines of metrics without the timings."""
    path = run / "metrics.jsonl"
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return [{key: value for key, value in json.loads(line).items() if key != "wall"} for line in lines]


def outcome(run: Path) -> dict[str, Any]:
    """Return everything that must be equal bit for bit."""
    newest = max((run / "checkpoints").iterdir())
    return {
        "files": sorted(str(path.relative_to(run)) for path in run.rglob("*")),
        "best": (run / "best" / "model.safetensors").read_bytes(),
        "last": (newest / "model.safetensors").read_bytes(),
        "state": (newest / "state.safetensors").read_bytes(),
        "scores": (run / "scores.safetensors").read_bytes(),
        "metrics": read_metrics(run),
    }


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "model" in metafunc.fixturenames:
        metafunc.parametrize("model", metafunc.config.getoption("--models").split(","))


@pytest.mark.slow
@pytest.mark.timeout(0)  # a campaign may take hours; every wait in it has its own timeout
def test_run_killed_at_random_moments_resumes_bit_for_bit(
    tmp_path: Path, tiny_recipe: Callable[..., Path], request: pytest.FixtureRequest, model: str
) -> None:
    recipe = write_pairs_recipe(tmp_path, 600) if model == "translator" else tiny_recipe(4000)
    kills: int = request.config.getoption("--kills")
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    campaign = Campaign(recipe, model, random.Random(seed), request.config.getoption("--device"))
    campaign.finish(tmp_path / "unbroken")
    expected = outcome(tmp_path / "unbroken")
    assert len(expected["metrics"]) > 500
    done, runs = 0, 0
    while done < kills:
        runs += 1
        out = tmp_path / f"killed{runs}"
        while done < kills and campaign.kill(out):
            done += 1
            if done % 10 == 0:
                print(f"{model}: {done} of {kills} kills", flush=True)
        campaign.finish(out)
        resumed = outcome(out)
        assert [key for key in expected if resumed[key] != expected[key]] == [], f"{out} differs"
        # If a long campaign is stopped early, its output shows how far it came.
        print(f"{model}: {done} of {kills} kills, {dict(campaign.landed)}, no difference so far", flush=True)
    print(f"{model}: {done} kills in {runs} runs, {dict(campaign.landed)}, 0 differences")
    assert campaign.landed["after the first update"] >= kills // 3
    assert campaign.landed["between two checkpoints"] >= kills // 5
    assert campaign.landed["while saving"] >= kills // 20
