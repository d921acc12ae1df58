"""`reefknot import`, and other verbs on an imported run."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from interop.fairseq_models import WORDS, FairseqModel

from .conftest import Outcome

Cli = Callable[..., Outcome]


@pytest.fixture(scope="module")
def fairseq_model() -> FairseqModel:
    return FairseqModel()


@pytest.fixture
def text(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    for name in ("train", "valid", "test"):
        (folder / f"{name}.txt").write_text("w3 w0 strange w26 w7\n\nw1 w25\n", encoding="utf-8")
    return folder


@pytest.fixture
def run(cli: Cli, fairseq_model: FairseqModel, text: Path, tmp_path: Path) -> Path:
    checkpoint, dictionary = fairseq_model.save(tmp_path / "files")
    outcome = cli("import", checkpoint, "--dictionary", dictionary, "--out", tmp_path / "run", "--corpus", text)
    assert outcome.code == 0, outcome.err
    assert "parameters, 31 words, from" in outcome.out
    return tmp_path / "run"


def test_sentence_has_the_same_score_as_in_fairseq(cli: Cli, fairseq_model: FairseqModel, run: Path) -> None:
    outcome = cli("score", run, "w3 w0 strange w26", "--json")
    assert "not finished" not in outcome.err
    ids = torch.tensor([[2, 7, 4, 3, 30]])
    expected = fairseq_model.log_probs(ids)[0].gather(1, torch.tensor([[7], [4], [3], [30], [2]])).squeeze()
    assert [word["log_prob"] for word in outcome.json()[0]["words"]] == pytest.approx(expected.tolist(), abs=1e-4)


def test_text_is_evaluated_in_windows_with_context(cli: Cli, fairseq_model: FairseqModel, run: Path) -> None:
    """Blocks of 2 tokens are scored independently with up to 3 tokens of context; the text has 10 tokens."""
    text = [7, 4, 3, 30, 11, 2, 2, 5, 29, 2]
    inputs, nll = [2, *text[:-1]], 0.0
    for scored in range(0, len(text), 2):
        start = max(scored - 3, 0)
        logp = fairseq_model.log_probs(torch.tensor([inputs[start : scored + 2]]))[0]
        nll -= sum(logp[position - start, text[position]].item() for position in (scored, scored + 1))
    record = cli("evaluate", run, "--context", 3, "--stride", 2, "--json").json()
    assert record["perplexity"] == pytest.approx(math.exp(nll / len(text)), rel=1e-4)
    assert record["tokens"] == len(text)


def test_generate_neighbors_and_evaluate_work(cli: Cli, run: Path) -> None:
    generated = cli("generate", run, "--prompt", "w3", "--length", 7, "--json").json()
    assert len(generated["tokens"]) == 7
    neighbors = cli("vectors", "neighbors", run, "w5", "-k", 3, "--json").json()
    for table in neighbors.values():
        assert {word for word, _ in table["w5"]} < {*WORDS, "<s>", "<pad>", "<eos>", "<unk>"}
    assert cli("evaluate", run, "--json").json()["tokens"] == 10


def test_mistakes_print_one_line(cli: Cli, fairseq_model: FairseqModel, text: Path, tmp_path: Path) -> None:
    checkpoint, dictionary = fairseq_model.save(tmp_path)
    files = ("import", checkpoint, "--dictionary", dictionary, "--out", tmp_path / "run")
    for words, code, message in (
        ((*files, "--data", text), 2, "--data has no effect without --corpus"),
        ((*files, "--corpus", text, "--data", text), 2, "--data has no effect"),
        ((*files, "--corpus", ""), 2, "--corpus: is empty; pass a corpus"),
        ((*files, "--corpus", "wikitext-3"), 3, "neither a known corpus"),
        (("import", dictionary, *files[2:]), 3, "not a checkpoint of torch"),
    ):
        outcome = cli(*words)
        assert (outcome.code, outcome.err.count("\n")) == (code, 1)
        assert message in outcome.err
    assert cli(*files).code == 0
    outcome = cli("evaluate", tmp_path / "run")
    assert (outcome.code, outcome.out) == (3, "")
    assert "imported without a text; import it again with --corpus NAME" in outcome.err
