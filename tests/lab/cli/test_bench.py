"""`reefknot bench`: printed tables, JSON records, and messages about mistakes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from reefknot.errors import ReefknotError
from reefknot.lab.bench import encoders, steps

from .conftest import Outcome

Cli = Callable[..., Outcome]
TINY = ("--shape", "16,8,50", "--competitor", "reefknot", "--competitor", "eager", "--competitor", "cce")
QUICK = (*TINY, "--seconds", "0", "--device", "cpu")


def test_heads_print_a_table_and_write_a_record(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    outcome = cli("bench", "heads", *QUICK, "--end", "plain", "--end", "drill", "--json", path)
    assert outcome.code == 0, outcome.err
    assert "TFLOP/s in large products" in outcome.out.splitlines()[0]
    assert "plain, N = 16, D = 8, V = 50: floor" in outcome.out
    assert "eager torch" in outcome.out
    assert "CCE, CCE, unfiltered: not installed" in outcome.out
    assert "  reefknot, chunked" in outcome.err
    record = json.loads(path.read_text())
    assert record["bench"] == "heads"
    assert record["vocabulary"] is False
    assert record["machine"]["matrix_tflops"] > 0
    assert record["environment"]["torch"] == record["machine"]["torch"]
    assert {row["end"] for row in record["rows"]} == {"plain", "drill"}
    assert all(row["over_floor"] > 0 for row in record["rows"] if row["ms"] is not None)


def test_functions_are_compared_with_the_matrix_products(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    ends = ("--end", "softcap", "--end", "log_probs", "--end", "distil")
    competitors = ("--competitor", "reefknot", "--competitor", "eager", "--competitor", "trl")
    options = ("--shape", "16,8,50", "--seconds", "0", "--device", "cpu", "--json", path)
    outcome = cli("bench", "heads", *ends, *competitors, *options)
    assert outcome.code == 0, outcome.err
    assert all(text in outcome.out for text in ("x products", "4 matrix products", "chunks as in TRL"))
    rows = json.loads(path.read_text())["rows"]
    assert {row["end"] for row in rows} == {"softcap", "log_probs", "distil"}
    assert all(row["note"] == "" for row in rows)
    assert all(row["over_products"] == row["ms"] / row["products_ms"] for row in rows)
    without_products = cli("bench", "heads", "--end", "drill", *competitors[:4], *options[:-2])
    assert "x floor" in without_products.out
    assert "x products" not in without_products.out


def test_encoders_print_a_table_and_write_a_record(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    shapes = ("--shape", "2,3,4-5-5", "--shape", "2,3,4-6-6-4")
    outcome = cli("bench", "encoders", *shapes, "--seconds", "0", "--device", "cpu", "--json", path)
    assert outcome.code == 0, outcome.err
    assert "B = 2, T = 3, 4-6-6-4, float32" in outcome.out
    assert all(title in outcome.out for title in ("ms", "x nn.LSTM", "worst error", "same bits", "plain loop"))
    assert "graph ms" not in outcome.out
    record = json.loads(path.read_text())
    assert set(record) == {"bench", "machine", "environment", "rows", "not_measured"}
    assert record["not_measured"] == {}
    assert {"device", "torch", "triton", "cudnn"} <= set(record["machine"])
    assert [row["competitor"] for row in record["rows"]].count("reefknot, AWD") == 1
    assert all(row["over_lstm"] > 0 for row in record["rows"])


def test_steps_print_a_table_and_write_a_record(cli: Cli, recipe: Path, tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    quick = ("--seconds", "0", "--device", "cpu", "--json", path)
    outcome = cli("bench", "steps", recipe, "training.batch=2", "--row", "untied", "--row", "tied", *quick)
    assert outcome.code == 0, outcome.err
    assert "1,125 / 150 / 450 tokens" in outcome.out
    assert "untied: 2 streams of 10 steps" in outcome.out
    assert all(title in outcome.out for title in ("tokens/s", "s/epoch", "TFLOP/s", "encoder", "ends"))
    assert all(title in outcome.out for title in ("x baseline", "x first"))
    assert "GiB" not in outcome.out, "memory is measured on GPUs only"
    assert max(map(len, outcome.out.splitlines()[4:])) <= 120
    record = json.loads(path.read_text())
    assert record["overrides"] == ["training.batch=2"]
    for changes in record["changed"].values():
        assert any(change["key"] == "training.batch" for change in changes)
    assert [(row["row"], row["mode"]) for row in record["rows"]][::2] == [
        ("untied", "plain loop"),
        ("tied", "plain loop"),
    ]
    assert record["rows"][0]["over_first"] == 1.0
    assert record["rows"][0]["flops"] > 0
    assert record["rows"][0]["ends_share"] > record["rows"][0]["input_share"] > 0
    assert record["machine"]["matrix_flops"] == record["not_measured"] == {}


@pytest.mark.slow
def test_models_print_a_table_and_write_a_record(cli: Cli, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    path = tmp_path / "record.json"
    competitors = ("--competitor", "transformers", "--competitor", "reefknot", "--competitor", "liger")
    options = ("--model", "tiny", "--batch", "2", "--length", "16", "--seconds", "0", "--device", "cpu")
    outcome = cli("bench", "models", *options, *competitors, "--json", path)
    assert outcome.code == 0, outcome.err
    assert "without optimiser" in outcome.out
    assert "tiny, 2 layers, 35,104 parameters, sdpa attention: 2 x 16 tokens" in outcome.out
    assert all(title in outcome.out for title in ("tokens/s", "x transformers", "loss error", "gradient error"))
    record = json.loads(path.read_text())
    assert record["not_measured"] == {}
    transformers_row, reefknot_row, liger_row = record["rows"]
    assert transformers_row["over_baseline"] == 1.0
    assert reefknot_row["loss"] == pytest.approx(transformers_row["loss"], rel=1e-6)
    assert liger_row["note"] in ("not installed", "needs a GPU")
    assert f"liger: {liger_row['note']}" in outcome.out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--model", "gpt-9"), "--model gpt-9: must be qwen2.5-0.5b or gemma-2-2b or tiny"),
        (("--largest", "64"), "--largest needs a GPU"),
        (("--memory", "64", "--competitor", "trl"), "--memory has no effect without --competitor reefknot"),
    ],
)
def test_mistakes_in_options_of_models_are_reported(cli: Cli, options: tuple[str, ...], message: str) -> None:
    pytest.importorskip("transformers")
    outcome = cli("bench", "models", *options, "--device", "cpu")
    assert outcome.code != 0
    assert message in outcome.err
    assert "Traceback" not in outcome.err


@pytest.mark.parametrize(
    ("verb", "options", "unreached"),
    [
        ("steps", ("--row", "untied", "--row", "tied"), "tied"),
        ("encoders", ("--shape", "2,3,4-4", "--shape", "2,3,5-5"), "B = 2, T = 3, 5-5, float32"),
    ],
)
def test_record_of_stopped_benchmark_lists_unmeasured_cases(
    cli: Cli,
    recipe: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    verb: str,
    options: tuple[str, ...],
    unreached: str,
) -> None:
    module = {"steps": steps, "encoders": encoders}[verb]
    measure_all = module.measure_all

    def stop_after_first(*arguments: Any) -> Iterator[list[Any]]:
        yield next(measure_all(*arguments))
        raise ReefknotError("stopped")

    path = tmp_path / "record.json"
    monkeypatch.setattr(module, "measure_all", stop_after_first)
    words = [recipe] if verb == "steps" else []
    quick = ("--seconds", "0", "--device", "cpu", "--json", path)
    assert "stopped" in cli("bench", verb, *words, *options, *quick).err
    record = json.loads(path.read_text())
    assert record["rows"]
    assert unreached not in {row.get("row") for row in record["rows"]}
    assert [5, 5] not in [row.get("shape", [0, 0, 0])[2] for row in record["rows"]]
    assert record["not_measured"] == {unreached: "not reached"}


def test_row_pattern_does_not_add_the_rows_that_rows_start_from(cli: Cli, recipe: Path, tmp_path: Path) -> None:
    path, resumed = tmp_path / "record.json", tmp_path / "resumed.toml"
    second_row = '[[rows]]\nname = "tied again"\nset.training.start = { row = "tied" }\n'
    resumed.write_text(recipe.read_text(encoding="utf-8") + second_row, encoding="utf-8")
    quick = ("training.batch=2", "--seconds", "0", "--device", "cpu", "--json", path)
    for patterns, rows in ((("*again",), ["tied again"]), (("UN*", "*D", "tied"), ["untied", "tied"])):
        outcome = cli("bench", "steps", resumed, *(word for pattern in patterns for word in ("--row", pattern)), *quick)
        assert outcome.code == 0, outcome.err
        measured = [row["row"] for row in json.loads(path.read_text())["rows"]]
        assert list(dict.fromkeys(measured)) == rows


def test_steps_use_random_text_if_the_corpus_is_missing(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REEFKNOT_DATA", raising=False)
    small = ("encoder.hidden_dim=4", "tables.words.dim=4", "training.batch=2", "training.steps=2")
    outcome = cli(
        "bench", "steps", "press2017/table6", *small, "--row", "small + wt", "--seconds", "0", "--device", "cpu"
    )
    assert outcome.code == 0, outcome.err
    assert "ptb not found: random text with its 10,000 words; an epoch has its 929,589 tokens" in outcome.out
    assert "Small + WT: 2 streams of 2 steps" in outcome.out


ATTENTION = """
title = "ends of a small Transformer"
[base]
corpus.name = "ptb"
encoder = { kind = "transformer", layers = 1, heads = 2, ffn_dim = 8 }
[base.training]
updates = 2
batching = "blocks"
batch = 4
steps = 8
accumulate = 2
divisor = "tokens"
optimiser = { kind = "sgd", learning_rate = 1.0 }
schedule = { kind = "constant" }
[[rows]]
name = "plain"
[rows.set]
tables.words = { kind = "word", dim = 8 }
input = { kind = "lookup", table = "words" }
output = { kind = "softmax", classifier = { kind = "plain", table = "words" } }
[[rows]]
name = "adaptive"
[rows.set]
tables.words = { kind = "banded", dim = 8, sizes = [20, 40], factor = 2 }
projections.bands = { kind = "bands", table = "words", dim = 8 }
input = { kind = "adaptive", table = "words", projections = "bands" }
output = { kind = "adaptive", projections = "bands", classifier = { kind = "plain", table = "words", bias = false } }
[[rows]]
name = "subwords"
[rows.set]
vocabulary.bpe.merges = 20
tables.words = { kind = "word", dim = 8 }
input = { kind = "lookup", table = "words" }
output = { kind = "softmax", classifier = { kind = "plain", table = "words" } }
[[rows]]
name = "spellings"
[rows.set]
tables.words = { kind = "word", dim = 8 }
input = { kind = "char_cnn", dim = 8, filters = [[1, 4]] }
output = { kind = "softmax", classifier = { kind = "plain", table = "words" } }
"""


def test_steps_of_transformers_leave_out_rows_that_need_the_corpus(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("REEFKNOT_DATA", raising=False)
    path, recipe = tmp_path / "record.json", tmp_path / "attention.toml"
    recipe.write_text(ATTENTION)
    quick = ("--seconds", "0", "--device", "cpu", "--json", path)
    outcome = cli("bench", "steps", recipe, *quick)
    assert outcome.code == 0, outcome.err
    assert "plain: 4 blocks of 8 steps, in 2 parts" in outcome.out
    assert "not measured: subwords, spellings, because their vocabulary is made from the corpus:" in outcome.out
    record = json.loads(path.read_text())
    assert list(record["not_measured"]) == ["subwords", "spellings"]
    modes = [(row["row"], row["mode"], row["note"]) for row in record["rows"]]
    assert modes == [(name, mode, "") for name in ("plain", "adaptive") for mode in ("stored logits", "eager")]
    outcome = cli("bench", "steps", recipe, "--row", "subwords", *quick)
    assert outcome.code == 3
    assert "ptb not found: expected DIR/ptb" in outcome.err


def test_translation_measures_training_and_decoding(cli: Cli, tmp_path: Path) -> None:
    text, path = tmp_path / "text", tmp_path / "record.json"
    text.mkdir()
    for split in ("train", "valid", "test"):
        (text / f"{split}.tsv").write_text("a dog runs\tein hund läuft\na cat\teine katze\n" * 4, encoding="utf-8")
    sizes = ["encoder.layers=1", "encoder.heads=2", "encoder.ffn_dim=8", "tables.words.dim=8", "training.batch=2"]
    sizes += ["vocabulary.bpe.merges=20", "training.precision=float32", f"corpus.name={text}"]
    quick = ("--seconds", "0", "--device", "cpu", "--json", path)
    outcome = cli("bench", "translation", "pappas2019/multi30k", *sizes, "--row", "TWWT", *quick)
    assert outcome.code == 0, outcome.err
    assert "8 / 8 / 8 pairs" in outcome.out
    assert all(text in outcome.out for text in ("TWWT, training", "TWWT, decoding", "tokens/s", "x baseline", "same"))
    assert "GiB" not in outcome.out, "memory is measured on GPUs only"
    record = json.loads(path.read_text())
    assert record["recipe"] == "pappas2019/multi30k"
    modes = ["nn.Transformer", "eager", "whole prefix", "cached"]
    assert [(row["mode"], row["note"]) for row in record["rows"]] == [(mode, "") for mode in modes]
    assert record["rows"][-1]["same"] == 1.0


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("tails", "No such command 'tails'"),
        ("steps", "Missing argument 'RECIPE'"),
        ("steps demo --graph", "No such option: --graph"),
        ("steps demo --row tide", 'demo: no row "tide"'),
        ("steps demo --row tide*", 'demo: no row to train matches "tide*"; `reefknot ls demo` lists the'),
        ("steps demo --data DIR", "--data has no effect: demo reads python-docs"),
        ("steps pappas2019/multi30k", 'row "Baseline" trains a translator; use reefknot bench translation'),
        ("translation pappas2019/multi30k --row x*", 'pappas2019/multi30k: no row to train matches "x*"; '),
        ("translation demo", "a language model; use reefknot bench steps"),
        ("translation --graph", "No such option: --graph"),
        ("encoders --end plain", "No such option: --end"),
        ("encoders --shape 20,35", "--shape 20,35: must be streams,steps,dimensions"),
        ("encoders --weights float8", "--weights float8: must be float32 or bfloat16 or tf32"),
        ("encoders --weights bfloat16 --device cpu", "--weights bfloat16 needs a GPU"),
        ("heads demo", "(demo)"),
        ("heads --workers 2", "No such option: --workers"),
        ("heads --shape 16,8", "--shape 16,8: must be rows,dim,classes, such as 700,200,10000"),
        ("heads --end planar", "--end planar: must be plain or adaptive"),
        ("heads --competitor tiger", "--competitor tiger: must be reefknot or eager"),
        ("heads --weights float8", "--weights float8: must be float32 or bfloat16"),
        ("heads --weights bfloat16 --device cpu", "--weights bfloat16 needs a GPU"),
        ("heads --graph --device cpu", "--graph needs a GPU"),
        ("heads --vocabulary --shape 16,8,50", "--shape has no effect with --vocabulary"),
        ("heads --vocabulary --end mixture", "--vocabulary --end mixture: must be plain or adaptive"),
        ("heads --json /nowhere/at/all.json", "the folder /nowhere/at does not exist"),
        ("heads --memory -1", "--memory -1: must be a number of MiB above 0"),
        ("heads --memory 32 --competitor eager", "--memory has no effect without --competitor reefknot"),
    ],
)
def test_mistakes_exit_with_2_and_a_message(cli: Cli, command: str, message: str) -> None:
    outcome = cli("bench", *command.split())
    assert outcome.code == 2
    assert message.lower() in outcome.err.lower()
    assert "Traceback" not in outcome.err
