"""`reefknot advise`: one table of all ends, every end in its own process, and messages about mistakes."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from reefknot.lab.cli import advise

from .conftest import Outcome

Cli = Callable[..., Outcome]
TINY = ("--dim", 16, "--layers", 1, "--heads", 2, "--ffn", 16, "--tokens", 32, "--seconds", 0, "--device", "cpu")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    for split in ("train", "valid", "test"):
        words = [f"w{index // (1 + index % 7)}" for index in range(200)]
        lines = [" ".join(words[start : start + 10]) for start in range(0, 200, 10)]
        (tmp_path / f"{split}.txt").write_text("\n".join(lines) + "\n")
    return tmp_path


def test_one_end_is_measured_in_this_process(cli: Cli, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advise, "_measure_in_new_process", lambda *_: pytest.fail("no other process is needed"))
    record = cli("advise", text, "--end", "ADP-T", *TINY, "--json").json()
    assert record["body"] == {"dim": 16, "layers": 1, "heads": 2, "ffn": 16, "tokens": 32}
    (row,) = record["rows"]
    assert row["end"] == "ADP-T"
    assert row["memory_bytes"] > row["parameters"] > row["ends_parameters"] > 0
    assert row["words_per_second"] == pytest.approx(row["tokens_per_second"])
    assert record["advice"] == "Only ADP-T was measured: there is nothing to compare it with."


def test_update_is_not_longer_than_the_text(cli: Cli, text: Path) -> None:
    command = ("advise", text, "--end", "SM-T", *TINY, "--tokens", 5000)
    assert "; updates of 1 x 220 tokens; " in cli(*command).out
    assert cli(*command, "--json").json()["body"]["tokens"] == 220


def test_several_ends_are_measured_in_new_processes(cli: Cli, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []
    real_run = subprocess.run

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        if "advise" not in command:
            return real_run(command, **options)
        commands.append(command)
        end = command[command.index("--end") + 1]
        if end == "SM":
            return subprocess.CompletedProcess(command, -9, "", "")
        if end == "ASM":
            return subprocess.CompletedProcess(command, 3, "", "a warning\nreefknot: the disk is full\n")
        # The second round of ADP-T is slower.
        speed = 30.0 if end == "ADP" else 40.0 if len(commands) <= 4 else 35.0
        row = {"end": end, "memory_bytes": 7 * 2**20, "tokens_per_second": 50.0, "words_per_second": speed}
        row |= {"min_words_per_second": speed - 1.0, "max_words_per_second": speed + 1.0}
        return subprocess.CompletedProcess(command, 0, json.dumps({"rows": [row]}), "")

    monkeypatch.setattr(subprocess, "run", run)
    ends = ("--end", "SM", "--end", "ASM", "--end", "ADP", "--end", "ADP-T")
    outcome = cli("advise", text, *ends, *TINY)
    assert outcome.code == 0, outcome.err
    assert "SM: killed, perhaps out of memory" in outcome.out
    assert "ASM: reefknot: the disk is full" in outcome.out
    assert "and 100% of the text)" in outcome.out
    assert "words + line ends/s" in outcome.out
    assert "Use ADP-T. It also has the best perplexity in the paper." in outcome.out
    (line,) = (line for line in outcome.out.splitlines() if line.startswith("ADP-T ") and "reads" not in line)
    assert line.split()[-6:] == ["7", "50", "40", "34", "to", "41"]
    ends_in_order = [command[command.index("--end") + 1] for command in commands]
    assert ends_in_order == ["SM", "ASM", "ADP", "ADP-T", "ADP", "ADP-T"]
    assert commands[0][1:6] == ["-m", "reefknot", "advise", str(text), "--end"]
    assert commands[0][-1] == "--json"
    assert commands[0][commands[0].index("--tokens") + 1] == "32"


def test_own_text_is_measured(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REEFKNOT_CACHE", str(tmp_path / "cache"))
    rows = [{"body": " ".join(f"w{(number * index) % 90}" for index in range(20))} for number in range(120)]
    (tmp_path / "a.json").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ("--text", tmp_path / "a.json", "--field", "body", *TINY)
    record = cli("advise", *options, "--end", "SM-T", "--json").json()
    assert record["rows"][0]["words_per_second"] > 0
    assert record["words"] <= 91 + 2

    commands = []
    monkeypatch.setattr(advise, "_measure_in_new_process", lambda row, command: commands.append(command) or row)
    assert cli("advise", *options, "--end", "SM", "--end", "SM-T").code == 0
    assert commands[0][:5] == ["advise", "--text", str(tmp_path / "a.json"), "--field", "body"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "advise needs a text"),
        ((__file__,), "is a file, not a corpus or a folder; use `reefknot advise --text"),
        (("--text", "-"), "advise reads the text once per end"),
        (("--text", "missing.txt"), "missing.txt does not exist"),
        (("python-docs", "--text", "a.txt"), "has no effect with --text"),
        (("python-docs", "--field", "body"), "--field has no effect without --text"),
    ],
)
def test_mistakes_with_own_text(cli: Cli, words: tuple[str, ...], message: str) -> None:
    outcome = cli("advise", *words)
    assert outcome.code in (2, 3)
    assert message in " ".join(outcome.err.split())


def test_mistakes_print_a_message(cli: Cli, text: Path) -> None:
    outcome = cli("advise", text, "--end", "LSTM")
    assert outcome.code == 2
    assert "--end LSTM: must be one of SM, SM-T, BPE" in outcome.err
    outcome = cli("advise", text, *TINY, "--heads", 3)
    assert outcome.code == 2
    assert "heads = 3 does not divide" in outcome.err
    assert cli("advise", text / "nothing", *TINY).code == 3
