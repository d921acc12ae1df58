"""`reefknot translate`, `evaluate` on translators, and verbs that reject one kind of run."""

from __future__ import annotations

import io
import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from reefknot.lab.cli import translate as verb
from reefknot.lab.cli.options import open_trained
from reefknot.lab.evaluation.beam import SearchSettings
from reefknot.lab.evaluation.translation import Translation

from .conftest import Outcome, Runs

Cli = Callable[..., Outcome]

WORDS = {
    "a": "ein",
    "the": "der",
    "red": "rote",
    "old": "alte",
    "dog": "Hund",
    "bird": "Vogel",
    "man": "Mann",
    "runs": "läuft",
    "sees": "sieht",
    "eats": "frisst",
    "here": "hier",
    "now": "jetzt",
}
RECIPE = """
title = "Tiny: a translator that memorises its pairs"

[base.corpus]
name = {corpus}
pairs = {{ source = "en", target = "de", longest = 20 }}

[base.vocabulary]
bpe = {{ merges = 60 }}

[base.tables.words]
kind = "word"
dim = 32

[base.source]
kind = "lookup"
table = "words"

[base.input]
kind = "lookup"
table = "words"

[base.encoder]
kind = "attention_gru"
units = 48

[base.output]
kind = "softmax"
classifier = {{ kind = "plain", table = "words" }}

[base.training]
epochs = 16
batching = "pairs"
batch = 16
steps = 16
log_every = 1000
optimiser = {{ kind = "adam", learning_rate = 0.01 }}
schedule = {{ kind = "constant" }}

[base.evaluation]
bleu = {{ tokenize = "none" }}
search = {{ beam = 3, early_stop = false }}

[[rows]]
name = "tiny"
"""


def translate_line(line: str) -> str:
    return " ".join(WORDS[word] for word in line.split())


@pytest.fixture(scope="module")
def sources() -> list[str]:
    """Return 50 different sentences."""
    rng = random.Random(0)
    lines: dict[str, None] = {}
    while len(lines) < 50:
        lines[" ".join(rng.sample(list(WORDS), rng.randint(3, 6)))] = None
    return list(lines)


@pytest.fixture(scope="module")
def run(cli: Cli, sources: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that is trained on its test sentences. Tests do not change it."""
    folder = tmp_path_factory.mktemp("pairs")
    # Every epoch saves a checkpoint, which takes time, so there are few long epochs.
    for split, lines in (("train", sources * 10), ("valid", sources[:10]), ("test", sources)):
        (folder / f"{split}.en").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        (folder / f"{split}.de").write_text("".join(f"{translate_line(line)}\n" for line in lines), encoding="utf-8")
    recipe = folder / "tiny.toml"
    recipe.write_text(RECIPE.format(corpus=repr(str(folder))), encoding="utf-8")
    outcome = cli("train", recipe, "--out", folder / "run", "--device", "cpu")
    assert outcome.code == 0, outcome.err
    return folder / "run"


@pytest.fixture
def file(tmp_path: Path, sources: list[str]) -> Path:
    path = tmp_path / "in.en"
    path.write_text("".join(f"{line}\n" for line in sources), encoding="utf-8")
    return path


@pytest.fixture
def run_with_input(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Outcome]:
    """Run a command with the given bytes as its standard input."""

    def run(data: bytes, *words: object) -> Outcome:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        return cli(*words)

    return run


def test_training_sentences_are_translated_correctly(cli: Cli, run: Path, file: Path, sources: list[str]) -> None:
    outcome = cli("translate", run, file)
    assert outcome.code == 0
    assert outcome.out == "".join(f"{translate_line(line)}\n" for line in sources)
    assert outcome.err == ""
    scores = json.loads((run / "result.json").read_text())["translation"]["test"]
    assert scores["bleu"] == pytest.approx(100.0)
    assert (run / "translations" / "test.txt").read_text(encoding="utf-8") == outcome.out


def test_unusual_lines_of_standard_input_are_translate_line(
    run_with_input: Callable[..., Outcome], run: Path, sources: list[str]
) -> None:
    """Lines with CRLF, only spaces, an unknown character or a carriage return, and no line end after the last line."""
    first, second, *_ = sources
    data = f"{first}\r\n\n  \t\n{second} ☃\nthe\rdog\n{first}".encode()
    outcome = run_with_input(data, "translate", run)
    assert outcome.code == 0, outcome.err
    lines = outcome.out.split("\n")
    assert len(lines) == 7
    assert lines[0] == lines[5] == translate_line(first)
    assert lines[1] == lines[2] == lines[6] == ""
    assert lines[3]
    assert lines[4]
    assert outcome.err == "1 word of the source with unknown characters, which are read as <unk>\n"
    assert run_with_input(b"", "translate", run).out == ""


def test_long_line_prints_a_warning(run_with_input: Callable[..., Outcome], run: Path, sources: list[str]) -> None:
    outcome = run_with_input(f"{sources[0]}\n{'the dog ' * 20}\n".encode(), "translate", run)
    lines = outcome.out.splitlines()
    assert len(lines) == 2
    assert lines[1]
    assert re.fullmatch(r"line 2: \d+ tokens, but .* had 20; the translation may be poor\n", outcome.err)


def test_invalid_utf_8_is_rejected(run_with_input: Callable[..., Outcome], run: Path, tmp_path: Path) -> None:
    outcome = run_with_input(b"the dog\nthe \xff\n", "translate", run)
    assert outcome.code == 3
    assert "standard input, line 2: byte 12 (0xff) is not valid UTF-8" in outcome.err
    outcome = run_with_input(b"", "translate", run, tmp_path / "nowhere")
    assert outcome.code == 3
    assert "nowhere: cannot be read" in outcome.err


@pytest.mark.parametrize("verb", ["translate", "score"])
def test_closed_standard_input_is_rejected(
    cli: Cli, run: Path, runs: Runs, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    outcome = cli(verb, run if verb == "translate" else runs.tied)
    assert (outcome.code, outcome.out) == (3, "")
    assert outcome.err == "reefknot: standard input is closed; give the lines as `< FILE`, or on the command line\n"


def test_lines_stay_in_order_in_groups_and_batches(
    cli: Cli, run: Path, file: Path, sources: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = cli("translate", run, file, "--n-best", 2)
    monkeypatch.setattr(verb, "GROUP_SIZE", 7)
    assert cli("translate", run, file, "--n-best", 2, "--batch-tokens", 30).out == expected.out
    numbers = [int(line.split(" ||| ")[0]) for line in expected.out.splitlines()]
    assert numbers == [line_number for line_number in range(1, len(sources) + 1) for _ in range(2)]


def test_n_best_scores_and_json_agree(cli: Cli, run: Path, file: Path, sources: list[str]) -> None:
    records = [json.loads(line) for line in cli("translate", run, file, "--n-best", 3, "--json").out.splitlines()]
    assert [record["source"] for record in records] == sources
    assert [record["line"] for record in records] == list(range(1, 51))
    printed = iter(cli("translate", run, file, "--n-best", 3).out.splitlines())
    scored = cli("translate", run, file, "--scores").out.splitlines()
    for record, line in zip(records, scored, strict=True):
        translations = record["translations"]
        assert len(translations) == 3
        scores = [translation["score"] for translation in translations]
        assert scores == sorted(scores, reverse=True)
        assert all(translation["finished"] for translation in translations[:1])
        for translation in translations:
            assert next(printed) == f"{record['line']} ||| {translation['text']} ||| {translation['score']:.4f}"
        assert line == f"{translations[0]['text']} ||| {scores[0]:.4f}"


def test_greedy_equals_beam_1_and_sampling_depends_on_the_seed(cli: Cli, run: Path, file: Path) -> None:
    greedy = cli("translate", run, file, "--greedy").out
    assert greedy == cli("translate", run, file, "--beam", 1).out
    assert greedy == cli("translate", run, file, "--sample", "--temperature", 0).out
    sampled, repeated, other_seed = (
        cli("translate", run, file, "--sample", "--temperature", 3, "--seed", seed).out for seed in (1, 1, 2)
    )
    assert sampled == repeated
    assert sampled != other_seed
    assert len(sampled.split("\n")) == len(greedy.split("\n"))
    narrow = cli("translate", run, file, "--sample", "--temperature", 3, "--top-k", 1, "--seed", 5).out
    assert narrow == greedy


def test_detokenize_uses_the_target_language(
    cli: Cli, run: Path, file: Path, sources: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def build_joiner(language: str) -> Callable[[str], str]:
        return lambda line: f"{language}:{line.replace(' ', '')}"

    monkeypatch.setattr("reefknot.lab.text.detokenization.build_detokenizer", build_joiner)
    expected = [f"de:{translate_line(line).replace(' ', '')}" for line in sources]
    assert cli("translate", run, file, "--detokenize").out.splitlines() == expected
    n_best = cli("translate", run, file, "--detokenize", "--n-best", 2).out.splitlines()
    assert [line.split(" ||| ")[1] for line in n_best[::2]] == expected


def test_score_without_length_penalty_is_the_log_probability(cli: Cli, run: Path, file: Path) -> None:
    printed = cli("translate", run, file, "--length-penalty", 0, "--json").out
    for line in printed.splitlines():
        (best,) = json.loads(line)["translations"]
        assert best["score"] == best["logp"]


def test_rescoring_adds_the_weighted_log_probability(cli: Cli, run: Path, runs: Runs, file: Path) -> None:
    """The language model knows none of these words, so its scores depend only on the length of a translation."""
    plain = [json.loads(line) for line in cli("translate", run, file, "--n-best", 3, "--json").out.splitlines()]
    rescored = ("translate", run, file, "--rescore", runs.tied, "--weight")
    num_changed = 0
    for weight in (10.0, -10.0):
        outcome = cli(*rescored, weight, "--n-best", 3, "--json")
        assert re.search("words of translations not in the vocabulary of .*: scored as <unk>\n$", outcome.err)
        printed = [json.loads(line)["translations"] for line in outcome.out.splitlines()]
        texts = [translation["text"] for translation in printed[0]]
        scored = cli("score", runs.tied, *texts, "--json").json()
        logp = {sentence["sentence"]: sentence["log_prob"] for sentence in scored}
        old = {translation["text"]: translation for translation in plain[0]["translations"]}
        expected = [(old[t]["logp"] + weight * logp[t]) / old[t]["length"] for t in texts]
        assert [translation["score"] for translation in printed[0]] == pytest.approx(expected)
        for translations in printed:
            assert translations == sorted(translations, key=lambda best: (not best["finished"], -best["score"]))
        num_changed += sum(
            now[0]["text"] != before["translations"][0]["text"] for now, before in zip(printed, plain, strict=True)
        )
        best = cli(*rescored, weight).out.splitlines()
        assert best == [translations[0]["text"] for translations in printed]
    assert num_changed > 0
    unchanged = [json.loads(line) for line in cli(*rescored, 0, "--n-best", 3, "--json").out.splitlines()]
    assert unchanged == plain


def test_rescored_words_are_split_at_ascii_whitespace(runs: Runs) -> None:
    """Words are split as in the training text of the language model: a no-break space is part of its word."""
    rescorer = verb._Rescorer(open_trained(runs.tied), 1.0, SearchSettings(), runs.tied)
    rescorer.rescore([[Translation("10\u00a0000 Hunde\u2028", -1.0, -0.25, True, 4)]])
    assert rescorer.num_unknown == 2


REJECTED = [
    ("translate {run} {file} --greedy --sample", "--greedy and --sample exclude each other"),
    ("translate {run} {file} --greedy --beam 2", "--beam is for beam search, which --greedy does not use"),
    ("translate {run} {file} --sample --n-best 2", "--n-best is for beam search, which --sample does not use"),
    ("translate {run} {file} --top-k 3", "--top-k has no effect without --sample"),
    ("translate {run} {file} --n-best 4", "--n-best 4: a beam of 3 finds at most 3 translations; use a wider --beam"),
    ("translate {run} {file} --rescore {lm}", "--rescore needs --weight"),
    ("translate {run} {file} --weight 1", "--weight needs --rescore"),
    ("translate {run} {file} --rescore {lm} --weight nan", "--weight nan: must be a finite number"),
    (
        "translate {run} {file} --rescore {run} --weight 1",
        "is a translator, not a language model",
    ),
    ("translate {run} {file} --length-penalty -1", "length_penalty: must be greater than or equal to 0"),
    ("translate {lm} {file}", "is a language model, not a translator; use `reefknot evaluate`"),
    ("translate {run} {file} --scores --n-best 2", "--scores has no effect with --n-best"),
    ("translate {run} {file} --scores --json", "--scores has no effect with --json"),
    ("translate {run} {file} --sample --temperature 0 --seed 1", "--seed has no effect at temperature 0"),
    ("translate {run} {file} --sample --temperature 0 --top-k 2", "--top-k has no effect at temperature 0"),
    ("translate {run} {file} --sample --temperature 0 --top-p 0.5", "--top-p has no effect at temperature 0"),
    ("evaluate {run} --context 0", "--context has no effect on .*, which is a translator; leave --context out"),
    ("evaluate {run} --dynamic", "--dynamic has no effect on .*, which is a translator"),
    ("evaluate {run} --dynamic-decay 0.1", "--dynamic-decay has no effect on .*, which is a translator"),
    ("evaluate {lm} --length-penalty 0", "--length-penalty has no effect on .*, which is a language model"),
    ("evaluate {run} --split all", "--split all: must be one of train, valid, test"),
    ("evaluate {run} --save", "--save needs --beam or --length-penalty"),
    ("evaluate {run} --save --beam 2 --limit 3", "leave --limit out"),
    ("evaluate {run} --save --beam 2 --split train", "leave --split train out"),
    ("generate {run}", "is a translator, not a language model; use `reefknot translate` or `evaluate` with it"),
    ("score {run} dog", "is a translator"),
    ("predict {run} dog", "is a translator"),
    ("rank {run}", "is a translator"),
    ("advise multi30k", "multi30k is parallel text, for translation; use a monolingual corpus"),
    ("import {file} --dictionary {file} --out {copy} --corpus tatoeba", "tatoeba is parallel text, for translation"),
    ("compare {run} {copy} --bands", "--bands has no effect on .*, which is a translator"),
]


@pytest.mark.parametrize(("words", "message"), REJECTED, ids=[words for words, _ in REJECTED])
def test_unsuitable_options_and_runs_are_rejected(
    cli: Cli, run: Path, runs: Runs, file: Path, tmp_path: Path, words: str, message: str
) -> None:
    copy = tmp_path / "copy"
    if words.startswith("compare"):
        shutil.copytree(run, copy)
    filled = [word.format(run=run, lm=runs.tied, file=file, copy=copy) for word in words.split()]
    outcome = cli(*filled)
    assert outcome.code in (2, 3)
    assert outcome.out == ""
    assert re.search(message, outcome.err)
    assert len(outcome.err.splitlines()) <= 2


def test_evaluate_repeats_the_result_of_training(cli: Cli, run: Path) -> None:
    printed = cli("evaluate", run, "--json").json()
    record = json.loads((run / "result.json").read_text())
    recorded = record["translation"]["test"] | record["test"]
    assert {key: printed[key] for key in recorded} == recorded
    lines = cli("evaluate", run).out.splitlines()
    assert lines[0].startswith(f"test BLEU {printed['bleu']:.2f}  chrF {printed['chrf']:.2f}  perplexity ")
    assert lines[1] == f"BLEU|{printed['bleu_signature']}"
    assert lines[2] == f"chrF2|{printed['chrf_signature']}"
    assert "tok:none" in lines[1]
    assert "beam 3, length penalty 1" in lines[3]
    assert lines[4].startswith("BLEU by source tokens (pairs): 0-10: ")
    assert lines[5:] == printed["definition"].splitlines()


def test_limit_evaluates_the_first_pairs(cli: Cli, run: Path) -> None:
    printed = cli("evaluate", run, "--split", "valid", "--limit", 3, "--beam", 2, "--json").json()
    assert printed["pairs"] == 3
    assert printed["search"]["beam"] == 2
    full = cli("evaluate", run, "--split", "valid", "--json").json()
    assert printed["tokens"] < full["tokens"]
    text = cli("evaluate", run, "--split", "valid", "--limit", 3).out
    assert text.endswith("limit: only the first 3 of 10 pairs\n")


def test_save_writes_the_scores_of_both_splits(cli: Cli, run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    outcome = cli("evaluate", tmp_path / "run", "--beam", 2, "--length-penalty", 0.6, "--save", "--json")
    path = tmp_path / "run" / "evaluations" / "beam-2-length-penalty-0.6.json"
    assert f"saved to {path}" in outcome.err
    record: dict[str, Any] = json.loads(path.read_text())
    for printed in outcome.json():
        assert record[printed["split"]]["perplexity"] == printed["perplexity"]
        saved_scores = record["translation"][printed["split"]]
        assert (saved_scores["bleu"], saved_scores["bleu_signature"]) == (printed["bleu"], printed["bleu_signature"])
    assert record["kind"] == "beam-2-length-penalty-0.6"
    assert record["settings"]["beam"] == 2
    assert cli("report", tmp_path / "run", "-o", tmp_path / "report").code == 0


def test_closed_pipe_is_not_an_error(run: Path, file: Path) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "reefknot", "translate", run, file, "--device", "cpu"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    assert (process.wait(), errors) == (0, "")
