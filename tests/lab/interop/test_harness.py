"""lm-eval on local tasks, offline: scores can be derived by hand from `reefknot score`."""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cli.conftest import Outcome, run_command

from contract.combinations import WORDS, Case
from reefknot.lab.tasks import open_run
from untrained import make_run

Cli = Callable[..., Outcome]

DOCUMENTS = ["the file is a naïve string", "in x of the", "a dog is in the house\nthe file is x\n"]
"""Words outside the vocabulary: dog and house. The last document has two lines."""
QUESTIONS = [
    {"question": "the file is", "choices": ["a string", "of"], "answer": 0},
    {"question": "in the", "choices": ["x", "dog is", "naïve file"], "answer": 1},
    {"question": "", "choices": ["the", "is"], "answer": 1},
]
ROLLING_TASK = """
task: local_rolling
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
output_type: loglikelihood_rolling
test_split: test
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list: [{{metric: word_perplexity}}, {{metric: bits_per_byte}}]
"""
CHOICE_TASK = """
task: local_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list: [{{metric: acc}}]
"""
WINDOW = 4

needs_harness = pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="lm-eval is not installed")


def write_lines(path: Path, documents: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(document) + "\n" for document in documents), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write two local tasks: a rolling one and a multiple choice."""
    folder = tmp_path_factory.mktemp("tasks")
    documents = write_lines(folder / "documents.jsonl", [{"text": text} for text in DOCUMENTS])
    (folder / "rolling.yaml").write_text(ROLLING_TASK.format(file=documents), encoding="utf-8")
    questions = write_lines(folder / "questions.jsonl", QUESTIONS)
    (folder / "choice.yaml").write_text(CHOICE_TASK.format(file=questions), encoding="utf-8")
    return folder


@pytest.fixture(scope="module", params=["lstm", "transformer"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    settings = Case("lookup", request.param, "softmax", "plain", True).settings()
    settings["training"] = settings["training"] | {"steps": WINDOW}
    return make_run(tmp_path_factory.mktemp(request.param) / "run", settings, WORDS)


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path_factory.getbasetemp() / "datasets"))


@torch.no_grad()
def log_probs_by_hand(run: Path, ids: list[int]) -> list[float]:
    """Return the log-probability of each token, in windows of the training length for a transformer."""
    model = open_run(run).model
    ids = [WORDS.eos, *ids]  # type: ignore[list-item]
    log_probs = []
    for position in range(1, len(ids)):
        begin = 0
        if not model.encoder.carries_state and len(ids) - 1 > WINDOW:
            # Disjoint windows; the last one is moved back, so that it is full.
            begin = min((position - 1) // WINDOW * WINDOW, len(ids) - 1 - WINDOW)
        hidden = model(torch.tensor([ids[begin:position]])).output[:, -1]
        log_probs.append(float(model.output.log_probs(hidden)[0, ids[position]]))
    return log_probs


def encode(text: str) -> list[int]:
    """Return the ids of a text, with <eos> for a line break."""
    ids: list[int] = []
    for index, line in enumerate(text.split("\n")):
        ids += [WORDS.eos] * (index > 0) + WORDS.encode(line.split())  # type: ignore[operator]
    return ids


@needs_harness
def test_word_perplexity_follows_from_reefknot_score(run: Path, tasks: Path) -> None:
    """The documents with one line are scored by `reefknot score`, without the <eos> after the last word."""
    evaluation = run_command("evaluate", run, "--harness", "local_rolling", "--include-path", tasks, "--json").json()
    total = 0.0
    for text in DOCUMENTS:
        if "\n" not in text and len(text.split()) <= WINDOW:
            (sentence,) = run_command("score", run, text, "--json").json()
            words = sentence["words"]
            assert words.pop()["word"] == "<eos>"
            total += sum(word["log_prob"] for word in words)
        else:
            total += sum(log_probs_by_hand(run, encode(text)))
    # The harness splits documents at whitespace, so a line break at the end makes one more, empty word.
    num_words = sum(len(text.split()) + text.endswith("\n") for text in DOCUMENTS)
    task = evaluation["tasks"]["local_rolling"]
    assert task["scores"]["word_perplexity"] == pytest.approx(math.exp(-total / num_words), rel=1e-5)
    num_bytes = sum(len(text.encode()) for text in DOCUMENTS)
    assert task["scores"]["bits_per_byte"] == pytest.approx(-total / num_bytes / math.log(2), rel=1e-5)
    tokens = [encode(text) for text in DOCUMENTS]
    assert task["counts"] == {
        "scored_tokens": sum(map(len, tokens)),
        "scored_unknown": 2,
        "context_tokens": 0,
        "context_unknown": 0,
        "line_ends": 2,
    }


@needs_harness
def test_multiple_choice_follows_from_the_log_probabilities(run: Path, tasks: Path) -> None:
    outcome = run_command("evaluate", run, "--harness", "local_choice", "--include-path", tasks)
    assert outcome.code == 0, outcome.err
    correct = 0
    for question in QUESTIONS:
        context = encode(question["question"])
        scores = []
        for choice in question["choices"]:
            ids = context + encode(choice)
            assert len(ids) <= WINDOW + 1
            begin = max(0, len(ids) - WINDOW)  # a transformer reads at most one window
            model = open_run(run).model
            inputs = [WORDS.eos, *ids][:-1]
            if not model.encoder.carries_state:
                inputs = inputs[begin:]
            with torch.no_grad():
                log_probs = model.output.log_probs(model(torch.tensor([inputs])).output[0])
            targets = ids[len(context) :]
            scores.append(float(log_probs[-len(targets) :].gather(1, torch.tensor(targets)[:, None]).sum()))
        correct += max(range(len(scores)), key=scores.__getitem__) == question["answer"]
    assert f"acc {correct / len(QUESTIONS):.4f}" in " ".join(outcome.out.split())
    assert "unknown words: 1 of 10 (10.00%) scored tokens are <unk>, and 0 of 12 (0.00%) context tokens" in outcome.out
    is_recurrent = open_run(run).model.encoder.carries_state
    context_note = "all tokens before, in the recurrent state" if is_recurrent else "at most 4 tokens, as in training"
    assert f"context: {context_note}" in outcome.out
    assert "end of line: a line break is <eos>, 0 of 10 (0.00%) scored tokens" in outcome.out


@needs_harness
def test_requests_of_the_harness(run: Path) -> None:
    from lm_eval.api.instance import Instance

    from reefknot.lab.interop.harness import ReefknotLM

    model = ReefknotLM(str(run), device="cpu")
    best = run_command("generate", run, "--prompt", "the file", "--length", 3, "--temperature", 0, "--json").json()
    requests = [
        Instance("generate_until", {}, ("the file", {"until": ["\n\n\n"], "max_gen_toks": 3}), 0),
        Instance("generate_until", {}, ("the file", {"until": best["text"].split()[2], "max_gen_toks": 3}), 0),
    ]
    whole, cut = model.generate_until(requests, disable_tqdm=True)
    assert f"the file {whole}" == best["text"]
    assert cut == ""
    # The most probable continuation is greedy, and another is not. An unknown word is scored as <unk>.
    trained = open_run(run)
    with torch.no_grad():
        hidden = trained.model(torch.tensor([[WORDS.eos, *WORDS.encode(["the", "file"])]])).output[:, -1]
        order = trained.model.output.log_probs(hidden)[0].argsort(descending=True).tolist()
    texts = ["dog" if index == WORDS.unk else "\n" if index == WORDS.eos else WORDS.words[index] for index in order]
    requests = [Instance("loglikelihood", {}, ("the file", f" {text}"), 0) for text in texts]
    scores = model.loglikelihood(requests, disable_tqdm=True)
    assert [is_best for _, is_best in scores] == [True] + [False] * (len(WORDS) - 1)
    assert sum(math.exp(log_prob) for log_prob, _ in scores) == pytest.approx(1, abs=1e-5)


@needs_harness
def test_script_of_the_harness(tasks: Path, run: Path, tmp_path: Path) -> None:
    """The three lines that docs/export.md shows make the model known to the harness's own command."""
    from pages import Page

    (script,) = Page("docs/export.md").snippets("The command of the harness", "python")
    (tmp_path / "evaluate.py").write_text(script, encoding="utf-8")
    command = [sys.executable, tmp_path / "evaluate.py", "run", "--model", "reefknot", "--model_args", f"run={run}"]
    command += ["--tasks", "local_choice", "--include_path", tasks, "--output_path", tmp_path / "results"]
    completed = subprocess.run(command, capture_output=True, text=True, check=False)
    assert completed.returncode == 0, completed.stderr
    (results,) = (tmp_path / "results").rglob("results*.json")
    scores = json.loads(results.read_text(encoding="utf-8"))["results"]["local_choice"]
    ours = run_command("evaluate", run, "--harness", "local_choice", "--include-path", tasks, "--json").json()
    assert scores["acc,none"] == ours["tasks"]["local_choice"]["scores"]["acc"]


@needs_harness
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--harness", "no_such_task"], "unknown task: no_such_task; `lm_eval ls tasks` lists"),
        (["--harness", "local_choice", "--include-path", "no/such/folder"], "no/such/folder: is not a folder"),
        (["--harness", "local_choice", "--dynamic"], "--dynamic has no effect on tasks of the harness"),
        (["--harness", "local_choice", "--split", "test"], "--split has no effect on tasks of the harness"),
        (["--include-path", "."], "--include-path has no effect without --harness"),
    ],
)
def test_mistakes_are_explained(run: Path, options: list[str], message: str) -> None:
    outcome = run_command("evaluate", run, *options)
    assert (outcome.code, outcome.out) == (2, "")
    assert message in outcome.err


def test_missing_package_is_explained(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "lm_eval" else find_spec(name))
    outcome = run_command("evaluate", run, "--harness", "local_choice")
    assert (outcome.code, outcome.out) == (2, "")
    assert "--harness needs lm_eval, which is not installed; run: pip install 'reefknot[harness]'" in outcome.err
