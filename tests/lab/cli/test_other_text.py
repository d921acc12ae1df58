"""`evaluate`, `score` and `compare` with --text: any text, with its unknown words, its name and its hash."""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import Outcome, Runs

Cli = Callable[..., Outcome]


@pytest.fixture
def news(tmp_path: Path) -> Path:
    """A text with one unknown word in ten words and four line ends, and an empty line, which is skipped."""
    path = tmp_path / "news.txt"
    path.write_text("green river house\n\nbird zebra tree\nstone cloud\nwinter bird\n")
    return path


@pytest.fixture
def same(corpus: Path, tmp_path: Path) -> Path:
    """The test text of the runs without its empty lines."""
    path = tmp_path / "same.txt"
    lines = (corpus / "test.txt").read_text().splitlines()
    path.write_text("".join(f"{line}\n" for line in lines if line))
    return path


def test_another_text_is_scored_with_its_unknown_words(cli: Cli, runs: Runs, news: Path) -> None:
    outcome = cli("evaluate", runs.tied, "--text", news)
    assert outcome.code == 0, outcome.err
    assert outcome.out.startswith("news.txt perplexity ")
    assert "7.1 % unknown words" in outcome.out.splitlines()[0]
    assert "unknown words: 1 here (7.1 % of the words and line ends), scored as the token <unk>" in outcome.out
    assert "warning: 7.1 % of the words of the news.txt text are unknown" in outcome.out
    record = cli("evaluate", runs.tied, "--text", news, "--json").json()
    assert (record["split"], record["tokens"], record["words"]) == ("news.txt", 14, 14)
    assert record["unknown_share"] == 1 / 14
    assert record["perplexity"] == pytest.approx(math.exp(record["nll"]))


@pytest.mark.parametrize("kind", ["plain", "gzip", "jsonl", "latin"])
def test_every_kind_of_file_gives_the_same_score(cli: Cli, runs: Runs, news: Path, tmp_path: Path, kind: str) -> None:
    text = news.read_text().replace("zebra", "zürich")
    lines = [line for line in text.splitlines() if line]
    plain = tmp_path / "plain.txt"
    plain.write_text(text, encoding="utf-8")
    expected = cli("evaluate", runs.tied, "--text", plain, "--json").json()
    options: tuple[object, ...]
    if kind == "plain":
        options = (plain,)
    elif kind == "gzip":
        (tmp_path / "named.txt").write_bytes(gzip.compress(text.encode()))
        options = (tmp_path / "named.txt",)
    elif kind == "jsonl":
        rows = [json.dumps({"body": line}) for line in lines]
        (tmp_path / "rows.jsonl").write_text("\n".join(rows))
        options = (tmp_path / "rows.jsonl", "--field", "body")
    else:
        (tmp_path / "latin.txt").write_bytes(text.encode("cp1252"))
        options = (tmp_path / "latin.txt", "--encoding", "cp1252")
    record = cli("evaluate", runs.tied, "--text", *options, "--json").json()
    assert record["nll"] == expected["nll"]
    assert record["text"]["sha256"] == expected["text"]["sha256"]
    assert record["text"]["sha256"] == hashlib.sha256("".join(f"{line}\n" for line in lines).encode()).hexdigest()


def test_saved_evaluation_has_the_name_and_the_hash_of_the_text(
    cli: Cli, recipe: Path, tmp_path: Path, news: Path
) -> None:
    run = tmp_path / "run"
    assert cli("train", recipe, "--row", "tied", "--out", run, "--device", "cpu", "training.epochs=1").code == 0
    outcome = cli("evaluate", run, "--text", news, "--save")
    assert outcome.code == 0, outcome.err
    (path,) = (run / "texts").iterdir()
    assert f"saved to {path}" in outcome.err
    saved = json.loads(path.read_text())
    assert path.name == f"news-txt-{saved['other']['text']['sha256'][:12]}-plain.json"
    assert saved["other"]["text"]["split"] == "news.txt"
    assert saved["other"]["unknown_share"] == 1 / 14
    assert "--text" in saved["command"]
    # Another mode is another file. CSV and the page show both, and the table of scores shows neither.
    assert cli("evaluate", run, "--text", news, "--cache", "--save").code == 0
    assert len(list((run / "texts").iterdir())) == 2
    plain, *others = csv.DictReader(io.StringIO(cli("report", run, "--csv").out))
    assert [row["mode"].rpartition("-")[2] for row in others] == ["cache", "plain"]
    assert {row["other.text.split"] for row in others} == {"news.txt"}
    assert float(others[1]["other.perplexity"]) == saved["other"]["perplexity"]
    assert (others[1]["test.perplexity"], plain["other.perplexity"]) == ("", "")
    assert cli("report", run, "-o", tmp_path / "page.html").code == 0
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    section = page.split('<section id="texts">')[1].split("</section>")[0]
    assert section.count("<td>news.txt</td>") == 2
    assert "news.txt" not in page.split('<section id="results">')[1].split("</section>")[0]


def test_modes_and_windows_score_another_text(cli: Cli, runs: Runs, news: Path) -> None:
    assert "dynamic evaluation" in cli("evaluate", runs.tied, "--text", news, "--dynamic").out
    windows = cli("evaluate", runs.tied, "--text", news, "--context", 4, "--stride", 2, "--json").json()
    assert windows["windows"] == "context-4-stride-2"
    limited = cli("evaluate", runs.tied, "--text", news, "--limit", 5, "--json").json()
    assert limited["limit"] == limited["tokens"] == 5


def test_text_of_a_run_that_is_gone_is_not_needed(
    cli: Cli, recipe: Path, corpus: Path, tmp_path: Path, news: Path
) -> None:
    moved = tmp_path / "moved"
    moved.mkdir()
    for path in corpus.iterdir():
        (moved / path.name).write_bytes(path.read_bytes())
    run = tmp_path / "run"
    settings = (f"corpus.name={moved}", "training.epochs=1")
    assert cli("train", recipe, "--row", "tied", "--out", run, "--device", "cpu", *settings).code == 0
    moved.rename(tmp_path / "gone")
    assert cli("evaluate", run).code == 3
    assert cli("evaluate", run, "--text", news).code == 0
    assert cli("evaluate", run, "--text", news, "--dynamic").code == 3, "it reads the training text"


def test_score_sums_up_the_lines_of_a_text(cli: Cli, runs: Runs, news: Path) -> None:
    lines = cli("score", runs.tied, "--text", news).out.splitlines()
    assert "4 sentences, 14 tokens, perplexity per token " in lines[-1]
    assert "7.1 % unknown words; each sentence is scored without the sentences before it" in lines[-1]
    assert any(line.endswith("zebra  (unknown)") for line in lines)
    records = cli("score", runs.tied, "--text", news, "--json").json()
    assert [record["sentence"] for record in records] == [line for line in news.read_text().splitlines() if line]


def test_compare_scores_another_text_now(cli: Cli, runs: Runs, same: Path) -> None:
    outcome = cli("compare", runs.untied, runs.tied, "--text", same, "--bands")
    assert outcome.code == 0, outcome.err
    assert "same.txt text: 420 tokens in 20 blocks of 21," in outcome.out
    assert "0 % unknown words" in outcome.out
    assert "loss per token by how often the target was seen in training" in outcome.out
    (record,) = cli("compare", runs.untied, runs.tied, "--text", same, "--json").json()
    for run, key in ((runs.untied, "perplexity_a"), (runs.tied, "perplexity_b")):
        evaluated = cli("evaluate", run, "--text", same, "--json").json()
        assert record[key] == pytest.approx(evaluated["perplexity"])


def test_systems_with_other_tokens_are_compared_by_words(
    cli: Cli, recipe: Path, runs: Runs, tmp_path: Path, same: Path, news: Path
) -> None:
    run = tmp_path / "subwords"
    settings = ("vocabulary.bpe.merges=5", "training.epochs=1")
    assert cli("train", recipe, "--row", "tied", "--out", run, "--device", "cpu", *settings).code == 0
    outcome = cli("compare", runs.tied, run, "--text", same)
    assert "same.txt text: 420 words in " in outcome.out
    # Sub-words are not what a model of sub-words lacks: its unknown words have unknown characters.
    for model, suggests_subwords in ((runs.tied, True), (run, False)):
        warning = next(
            line
            for line in cli("evaluate", model, "--text", news).out.splitlines()
            if line.startswith("warning: 7.1 %")
        )
        assert ("sub-words (vocabulary.bpe) have fewer" in warning) == suggests_subwords
        assert ("characters that are not in the training text" in warning) == (not suggests_subwords)
    # "zebra" has an unknown character, so it is unknown to both. "birds" is unknown only to the model of words.
    news.write_text("green birds\n" * 30)
    outcome = cli("compare", runs.tied, run, "--text", news)
    assert outcome.code == 2
    assert "no fair comparison: one scores 30 unknown words as <unk>, the other 0" in outcome.err
    bits = [cli("evaluate", model, "--text", news, "--json").json()["bits_per_byte"] for model in (runs.tied, run)]
    assert f"compare their bits per byte, {bits[0]:.4f} and {bits[1]:.4f}" in outcome.err


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (("--split", "valid"), 2, "--split and --text both name the text"),
        (("--data", "."), 2, "--data has no effect"),
        (("--protocol", "awd"), 2, "leave --text out"),
        (("--encoding", "no-such"), 2, "Python does not know this encoding"),
    ],
)
def test_contradictory_options_are_rejected(
    cli: Cli, runs: Runs, news: Path, options: tuple[object, ...], code: int, message: str
) -> None:
    outcome = cli("evaluate", runs.tied, "--text", news, *options)
    assert (outcome.code, message in outcome.err) == (code, True), outcome.err


def test_mistakes_name_the_option_or_the_file(cli: Cli, runs: Runs, tmp_path: Path, news: Path) -> None:
    assert "missing.txt does not exist" in cli("evaluate", runs.tied, "--text", tmp_path / "missing.txt").err
    (tmp_path / "empty.txt").write_text("\n\n")
    outcome = cli("evaluate", runs.tied, "--text", tmp_path / "empty.txt")
    assert (outcome.code, "the text has no words" in outcome.err) == (3, True)
    assert "--field has no effect without --text" in cli("evaluate", runs.tied, "--field", "body").err
    assert "--device has no effect without --text" in cli("compare", runs.tied, runs.untied, "--device", "cpu").err
    assert "leave one of them out" in cli("score", runs.tied, "green", "--text", news).err
    assert "standard input only once" in cli("compare", runs.tied, runs.untied, "--text", "-").err


def test_data_that_is_not_read_is_never_ignored(cli: Cli, runs: Runs, tmp_path: Path) -> None:
    for command in (("evaluate", runs.tied), ("compare", runs.tied, runs.untied), ("rank", runs.tied)):
        outcome = cli(*command, "--data", tmp_path)
        assert (outcome.code, "--data has no effect" in outcome.err) == (2, True), command
    assert "or use --text for another text" in cli("evaluate", runs.tied, "--data", tmp_path).err
