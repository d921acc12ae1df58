"""Every command and example of docs/export.md runs. The runs are small and not trained."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cli.conftest import run_command

from contract.combinations import Case
from pages import Page
from reefknot.lab.cli.main import load_verb
from reefknot.lab.text.vocabulary import Vocabulary, VocabularyPair
from untrained import make_run

pytestmark = pytest.mark.slow

PAGE = Page("docs/export.md")
SCRIPT = "The command of the harness"
WORDS = ["<eos>", "<unk>", "a", "list", "of", "return", "this", "function", "returns", "strings", "man", "two"]
VOCABULARY = Vocabulary(tuple(WORDS), tuple(range(len(WORDS), 0, -1)))
PACKAGES = ("onnx", "onnxruntime", "transformers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the runs that the page names."""
    folder = tmp_path_factory.mktemp("page")
    (folder / "runs").mkdir()
    make_run(folder / "runs" / "tied", Case("lookup", "lstm", "softmax", "plain", True).settings(), VOCABULARY)
    translator = Case("lookup", "attention_gru", "softmax", "plain", True)
    make_run(folder / "runs" / "de", translator.settings(), VocabularyPair(VOCABULARY, VOCABULARY))
    return folder


def commands_below(*verbs: str) -> list[list[str]]:
    return [words for words in PAGE.commands() if words[0] in verbs and "RUN" not in words]


def test_training_command_has_valid_options(folder: Path) -> None:
    (command,) = commands_below("train")
    context = load_verb("train").make_context("train", command[1:])
    assert context.params["recipe"] == "demo"
    assert (folder / context.params["out"]).is_dir()  # the run that the other commands use


def test_exports_and_examples_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = [package for package in PACKAGES if importlib.util.find_spec(package) is None]
    if missing:
        pytest.skip(f"{missing[0]} is not installed")
    monkeypatch.chdir(folder)
    exports = commands_below("export")
    assert {words[words.index("--format") + 1] for words in exports} == {"hf", "onnx", "pt2"}
    for command in exports:
        outcome = run_command(*command)
        assert outcome.code == 0, outcome.err
    programs = [block for heading in PAGE.sections for block in PAGE.snippets(heading, "python") if heading != SCRIPT]
    assert len(programs) == 5
    environment = {"HF_HUB_OFFLINE": "1"}
    printed = run_program("\n".join(programs), environment)

    # The example with ONNX Runtime prints what `reefknot score` prints.
    sentence = "return a list of strings"
    (scored,) = run_command("score", "runs/tied", sentence, "--json").json()
    assert f"{scored['log_prob']:10.3f}\n" in printed
    for word in scored["words"]:
        assert f"{word['log_prob']:10.3f}  {word['word']}\n" in printed


def run_program(program: str, environment: dict[str, str]) -> str:
    import os

    completed = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, env=os.environ | environment
    )
    assert completed.returncode == 0, completed.stderr
    return completed.stdout


def write_task(folder: Path, name: str, document: dict[str, Any], settings: str) -> None:
    data = folder / f"{name}.jsonl"
    data.write_text(json.dumps(document) + "\n", encoding="utf-8")
    header = f"task: {name}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}}}\ntest_split: test\n"
    (folder / f"{name}.yaml").write_text(header + settings, encoding="utf-8")


def test_harness_command_runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("lm_eval") is None:
        pytest.skip("lm_eval is not installed")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    tasks = folder / "tasks"
    tasks.mkdir()
    rolling = 'output_type: loglikelihood_rolling\ndoc_to_text: ""\ndoc_to_target: "{{text}}"\n'
    write_task(
        tasks, "local_rolling", {"text": "a list of strings"}, f"{rolling}metric_list: [metric: word_perplexity]"
    )
    choice = 'output_type: multiple_choice\ndoc_to_text: "{{text}}"\ndoc_to_choice: [a, of]\ndoc_to_target: 1\n'
    write_task(tasks, "local_choice", {"text": "a list"}, f"{choice}metric_list: [metric: acc]")
    (command,) = commands_below("evaluate")
    outcome = run_command(*command)
    assert outcome.code == 0, outcome.err
    assert outcome.out.count("unknown words:") == outcome.out.count("end of line:") == 2
