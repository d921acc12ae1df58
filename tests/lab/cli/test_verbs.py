"""Printed output and JSON of every verb on two tiny runs."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import shutil
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, get_args

import pytest

from reefknot.lab.runs.result import ProtocolName
from reefknot.lab.training.averaging import AveragingSettings, StoppingSettings

from .conftest import Outcome, Runs

Cli = Callable[..., Outcome]


def test_train_prints_its_progress(runs: Runs) -> None:
    assert f"tied  {runs.tied}" in runs.printed
    assert "untied  epoch 2/2  valid perplexity" in runs.printed
    assert "test perplexity" in runs.printed
    assert {path.name for path in runs.tied.iterdir()} >= {"config.json", "result.json", "metrics.jsonl", "best"}


def test_training_a_finished_run_again_does_nothing(cli: Cli, recipe: Path, runs: Runs) -> None:
    outcome = cli("train", recipe, "--row", "tied", "--out", runs.tied)
    assert outcome.code == 0
    assert "done already" in outcome.out


def test_other_settings_are_rejected_with_the_difference(cli: Cli, recipe: Path, runs: Runs) -> None:
    outcome = cli("train", recipe, "training.epochs=9", "--row", "tied", "--out", runs.tied)
    assert outcome.code == 2
    assert "training.epochs: 2 -> 9" in outcome.err


def test_ls_lists_every_family(cli: Cli) -> None:
    output = cli("ls", "--json").json()
    assert {"recipes", "corpora", "classifiers", "outputs"} <= set(output)
    assert "class vectors are the rows of a table" in output["classifiers"]["plain"]
    assert all(text for entries in output.values() for text in entries.values())
    text = cli("ls").out
    assert "press2017/table6" in text
    assert set(cli("ls", "classifiers", "--json").json()) == {"classifiers"}


def test_ls_lists_every_rule(cli: Cli) -> None:
    output = cli("ls", "--json").json()
    rules = {
        "evaluation.protocol": get_args(ProtocolName),
        "training.averaging.start": get_args(AveragingSettings.model_fields["start"].annotation),
        "training.stop.rule": get_args(StoppingSettings.model_fields["rule"].annotation),
    }
    assert {setting: tuple(output[setting]) for setting in rules} == rules


def test_ls_lists_the_rows_of_a_recipe(cli: Cli, recipe: Path) -> None:
    assert cli("ls", recipe).out.splitlines()[1:3] == [
        "  quoted  paper: test 12.5; quoted",
        "  tied    paper: test 14.5",
    ]
    lines = cli("ls", "pappas2019/table1").out.splitlines()
    assert any(line.endswith('test 57.3; starts from "AWD-LSTM w/o finetune"') for line in lines)
    rows = {row["name"]: row for row in cli("ls", "press2017/table7", "--json").json()}
    assert rows["Small, text8"]["corpus"] == "text8"
    assert rows["Small, text8"]["paper"].keys() >= {"test"}


def test_validate_counts_parameters(cli: Cli, recipe: Path) -> None:
    output = cli("validate", recipe, "press2017/table6", "--json").json()
    sizes = {(Path(entry["recipe"]).stem, entry["row"]): entry["parameters"] for entry in output}
    assert sizes["table6", "Small + WT + PR"] == 2_691_800
    # 12 words of dimension 8, an LSTM of 4 * 8 * (8 + 8 + 1), and a bias per word.
    assert sizes["tiny", "tied"] == 12 * 8 + 544 + 12
    assert ("tiny", "quoted") not in sizes
    assert cli("validate", recipe).out.splitlines() == [
        f"{recipe}  tied: valid, 652 parameters",
        f"{recipe}  untied: valid, 748 parameters",
        f"{recipe}  1 other row: nothing to train",
    ]
    assert "Small + WT: valid, 2,651,600 parameters, as the recipe says\n" in cli("validate", "press2017/table6").out


def test_validate_needs_no_text_of_a_known_corpus(
    cli: Cli, recipe: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("REEFKNOT_DATA", raising=False)
    changed = tmp_path / "changed.toml"

    def validate_with_corpus(corpus_name: str, *options: object) -> Outcome:
        changed.write_text(recipe.read_text("utf-8").replace(repr(str(corpus)), corpus_name), encoding="utf-8")
        return cli("validate", changed, *options)

    assert "tied: valid, 90,544 parameters" in validate_with_corpus("'ptb'").out
    shortened = "'ptb'\ntokens = 100"
    assert "tied: valid, size unknown" in validate_with_corpus(shortened).out
    assert validate_with_corpus(shortened, "--data", tmp_path).code == 0
    (tmp_path / "ptb.test.txt").write_text("half a corpus", encoding="utf-8")
    assert validate_with_corpus(shortened, "--data", tmp_path).code == 3
    mistyped = validate_with_corpus("'ptbb'")
    assert (mistyped.code, mistyped.out) == (3, "")
    assert mistyped.err.count("corpus 'ptbb' is neither a known corpus") == 1
    (tmp_path / "train.txt").write_text("only one split", encoding="utf-8")
    incomplete = validate_with_corpus(repr(str(tmp_path)))
    assert incomplete.code == 3
    assert "the valid text" in incomplete.err


def test_validate_checks_every_recipe_and_reports_all_problems(cli: Cli, recipe: Path, tmp_path: Path) -> None:
    text = recipe.read_text("utf-8")
    wrong, small, lost = (tmp_path / f"{name}.toml" for name in ("wrong", "small", "lost"))
    wrong.write_text(text.replace("epochs = 2", "epochs = 0"), encoding="utf-8")
    small.write_text(text.replace('"tied"\n', '"tied"\nparameters = 9\n'), encoding="utf-8")
    lost.write_text(re.sub("name = '.*'", "name = 'nowhere'", text), encoding="utf-8")
    output = cli("validate", lost, wrong, recipe, "dmo", small)
    assert (output.code, output.out) == (3, "")
    for message in ("'nowhere' is neither", "training.epochs:", "'dmo'", 'row "tied": 652 parameters, expected 9'):
        assert output.err.count(message) == 1
    assert cli("validate", small, lost).code == 2


def test_common_mistake_is_reported_once_with_all_its_rows(cli: Cli, recipe: Path, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.toml"
    rows = """
[[rows]]
name = "wide"
[rows.set]
encoder.hidden_dim = 9

[[rows]]
name = "wide too"
[rows.set]
encoder = { kind = "lstm", hidden_dim = 9, layers = 2 }

[[rows]]
name = "short"
parameters = 9
"""
    wrong.write_text(recipe.read_text("utf-8") + rows, encoding="utf-8")
    for words in (("validate", wrong), ("table", wrong, "--out", tmp_path / "runs")):
        outcome = cli(*words)
        assert outcome.code == 2
        first, second = outcome.err.splitlines()
        assert first.startswith(f'reefknot: {wrong}, rows "wide", "wide too": the encoder has dimension 9 ')
        assert second == f'{wrong}, row "short": 652 parameters, expected 9'
    assert not (tmp_path / "runs").exists()  # the rows that are right were not trained either


def test_params_counts_by_part(cli: Cli, recipe: Path) -> None:
    output = cli("params", recipe, "--json").json()
    parts = {"input.table": 96, "encoder.layers": 544, "output.classifier.bias": 12}
    assert output["tied"] == {"input": 96, "encoder": 544, "output": 12, "total": 652, "parts": parts}
    assert output["untied"]["output"] == 12 + 96
    assert "4,651,600" in cli("params", "press2017/table6").out
    wider = cli("params", recipe, "tables.words.dim=16", "encoder.hidden_dim=16", "--row", "tied", "--json").json()
    assert wider["tied"]["total"] == 192 + 4 * 16 * 33 + 12
    lines = cli("params", recipe, "--row", "tied").out.splitlines()
    assert [line.split() for line in lines] == [*([name, str(n)] for name, n in parts.items()), ["total", "652"]]


def test_params_counts_the_rows_that_need_no_text(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REEFKNOT_DATA", raising=False)
    outcome = cli("params", "baevski2019/table3")
    assert outcome.code == 0
    assert [line.split()[0] for line in outcome.out.splitlines()] == ["SM", "SM-T", "ASM", "CNN", "ADP", "ADP-T"]
    assert outcome.err.startswith('not counted: "BPE", "BPE-T": the vocabulary is made from the text; wikitext-103 not')
    assert "Pass --data DIR or set REEFKNOT_DATA" in outcome.err
    record = cli("params", "baevski2019/table3", "--json").json()
    assert record["ADP-T"]["total"] == 246_933_504
    assert {row for row, counts in record.items() if "not_counted" in counts} == {"BPE", "BPE-T"}
    assert "wikitext-103 not found" in record["BPE"]["not_counted"]


@pytest.mark.parametrize("options", [("--row", "BPE"), ("--data", "DIR")], ids=" ".join)
def test_params_fails_if_a_requested_row_cannot_be_counted(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, str]
) -> None:
    monkeypatch.delenv("REEFKNOT_DATA", raising=False)
    option, value = options
    outcome = cli("params", "baevski2019/table3", option, tmp_path if value == "DIR" else value)
    assert (outcome.code, outcome.out) == (3, "")
    assert "wikitext-103 not found" in outcome.err


def test_evaluate_repeats_the_score_of_training(cli: Cli, runs: Runs) -> None:
    output = cli("evaluate", runs.tied, "--json").json()
    stored = json.loads((runs.tied / "result.json").read_text(encoding="utf-8"))
    assert output["nll"] == pytest.approx(stored["test"]["nll"], abs=1e-6)
    assert output["perplexity"] == pytest.approx(math.exp(output["nll"]))
    text = cli("evaluate", runs.tied, "--split", "valid", "--streams", 3).out
    assert text.startswith("valid perplexity ")
    assert "3 contiguous streams" in text
    assert cli("evaluate", runs.tied, "--split", "train", "--json").json()["split"] == "train"


def test_compare_with_a_copy_shows_no_difference(cli: Cli, runs: Runs, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(runs.tied, copy, symlinks=True)
    (output,) = cli("compare", runs.tied, copy, "--json").json()
    assert output["difference"] == 0
    assert not output["seen"]
    assert "no difference seen" in cli("compare", runs.tied, copy).out


@pytest.mark.parametrize("by", ["blocks", "documents"])
def test_compare_prints_an_interval_around_the_difference(cli: Cli, runs: Runs, by: str) -> None:
    (output,) = cli("compare", runs.tied.parent, runs.untied, "--by", by, "--json").json()
    low, high = output["interval"]
    assert low <= output["difference"] <= high
    assert output["perplexity_b"] / output["perplexity_a"] == pytest.approx(output["ratio"])
    assert (output["by"], output["seeds"]) == (by, [1, 1])
    # Sixty lines with an empty line after every second line are thirty documents.
    assert by == "blocks" or output["units"] == 30
    text = cli("compare", runs.tied, runs.untied, "--split", "valid").out
    assert f"A = {runs.tied}" in text
    assert "Both were trained once" in text


def test_report_writes_a_page(cli: Cli, runs: Runs, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    output = cli("report", runs.root, "-o", page, "--title", "Ends & ties", "--json").json()
    assert output == {"report": str(page.resolve()), "runs": 2}
    html = page.read_text(encoding="utf-8")
    assert "Ends &amp; ties" in html
    assert "<b>bold</b>" not in html
    assert cli("report", runs.tied, "-o", page).out == f"report: {page.resolve()}\n"


def test_report_writes_csv(cli: Cli, runs: Runs, tmp_path: Path) -> None:
    outcome = cli("report", runs.root, "--csv")
    assert outcome.code == 0, outcome.err
    rows = {row["row"]: row for row in csv.DictReader(io.StringIO(outcome.out))}
    assert list(rows) == ["tied", "untied"]
    record = json.loads((runs.tied / "result.json").read_text("utf-8"))
    assert float(rows["tied"]["test.perplexity"]) == record["test"]["perplexity"]
    assert rows["tied"]["settings.training.epochs"] == "2"

    table = tmp_path / "results.csv"
    assert cli("report", runs.root, "--csv", "-o", table).out == f"results: {table.resolve()}\n"
    assert table.read_text("utf-8") == outcome.out
    for option in (["--json"], ["--title", "x"], ["--figures"], ["--words", "green"]):
        rejected = cli("report", runs.root, "--csv", *option)
        assert (rejected.code, rejected.out) == (2, "")
        assert f"{option[0]} has no effect with --csv; leave {option[0]} out" in rejected.err


def test_report_shows_chosen_words(cli: Cli, runs: Runs, tmp_path: Path) -> None:
    page, record = tmp_path / "page.html", tmp_path / "record"
    chosen = ("--words", "Green, river", "--words", "house")
    outcome = cli("report", runs.root, "-o", page, *chosen)
    assert (outcome.code, outcome.err) == (0, "")
    html = page.read_text(encoding="utf-8")
    shown_words = re.findall(r'<tr><th scope="row"><bdi>(.*?)</bdi>', html)
    assert shown_words == ["green", "river", "house"] * 2
    (neighbor, cosine), *_ = cli("vectors", "neighbors", runs.tied, "green", "-k", 1, "--json").json()["tied"]["green"]
    assert f"<bdi>{neighbor}</bdi> <small>{cosine:.2f}</small>" in html
    # A row without weights, or without one of the words, shows the words in its record.
    shutil.copytree(runs.untied, record, ignore=shutil.ignore_patterns("best", "checkpoints", "vocabulary.json"))
    outcome = cli("report", runs.tied, record, "-o", page, *chosen)
    assert outcome.code == 0
    message = (
        f"untied shows the words that training chose: {record} is the record of a run, without weights; use the folder"
    )
    assert outcome.err.startswith(message)
    page.unlink()
    for words, code, expected in (
        (("--words", "green,grean"), 3, f"not in the vocabulary of {runs.tied}: grean (did you mean green?)"),
        (("--words", ","), 2, "--words: there is no word"),
        (("--words", "a,b,c,d,e", "--words", "f,g,h,i"), 2, "--words: 9 words"),
    ):
        outcome = cli("report", runs.root, "-o", page, *words)
        assert (outcome.code, outcome.out) == (code, "")
        assert expected in outcome.err
        assert not page.exists()


def test_generate_continues_the_prompt(cli: Cli, runs: Runs) -> None:
    options = ("--length", 12, "--temperature", 0.7, "--top-k", 5, "--top-p", 0.9, "--seed", 3)
    output = cli("generate", runs.tied, "--prompt", "green river", *options, "--json").json()
    assert len(output["tokens"]) == 12
    assert "<unk>" not in output["tokens"]
    assert output["text"].startswith("green river")
    assert "<eos>" not in output["text"]
    assert cli("generate", runs.tied, "--prompt", "green river", *options).out == output["text"] + "\n"
    assert cli("generate", runs.tied, "--length", 1).code == 0


def test_generate_warns_about_unknown_words(cli: Cli, runs: Runs) -> None:
    outcome = cli("generate", runs.tied, "--prompt", "green zebra", "--json")
    assert outcome.json()["prompt"] == "green zebra"
    assert "not in the vocabulary, read as <unk>: zebra" in outcome.err


def test_score_sums_the_log_probabilities_of_the_words(cli: Cli, runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    (output,) = cli("score", runs.tied, "green zebra", "--json").json()
    assert [word["word"] for word in output["words"]] == ["green", "zebra", "<eos>"]
    assert [word["unknown"] for word in output["words"]] == [False, True, False]
    assert output["log_prob"] == pytest.approx(sum(word["log_prob"] for word in output["words"]))
    text = cli("score", runs.tied, "green zebra").out
    assert "zebra  (unknown)" in text
    with (runs.root.parent / "lines.txt").open("w+", encoding="utf-8") as lines:
        lines.write("green river\n\nhouse\n")
        lines.seek(0)
        monkeypatch.setattr(sys, "stdin", lines)
        output = cli("score", runs.tied, "--json").json()
    assert [entry["sentence"] for entry in output] == ["green river", "", "house"]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"green\n\xff\n")))
    outcome = cli("score", runs.tied)
    assert (outcome.code, outcome.out) == (3, "")
    assert "standard input, line 2: byte 6 (0xff) is not valid UTF-8" in outcome.err


def test_neighbors_prints_every_table(cli: Cli, runs: Runs) -> None:
    output = cli("vectors", "neighbors", runs.tied, "green", "river", "-k", 3, "--json").json()
    assert list(output) == ["tied"]
    assert set(output["tied"]) == {"green", "river"}
    assert [len(neighbors) for neighbors in output["tied"].values()] == [3, 3]
    assert cli("vectors", "neighbors", runs.tied, "green").out.count("green (tied): ") == 1
    untied = cli("vectors", "neighbors", runs.untied, "green", "--json").json()
    assert list(untied) == ["input", "output"]
    assert untied["input"] != untied["output"]
    lines = cli("vectors", "neighbors", runs.untied, "green").out.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["green (input)", "green (output)"]


def test_report_keeps_the_order_of_the_recipe(cli: Cli, tmp_path: Path) -> None:
    records = Path(__file__).parents[3] / "results/press2017/table6"
    cli("report", records, "-o", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    names = ["Small model", "Small + WT", "Small + PR", "Small + WT + PR"]
    positions = [page.index(f">{name}<") for name in names]
    assert positions == sorted(positions)


def test_table_trains_the_missing_rows_and_writes_a_report(cli: Cli, recipe: Path, runs: Runs, tmp_path: Path) -> None:
    """The row "tied" is already finished. The row "untied" is trained in a new process."""
    root = tmp_path / "table"
    shutil.copytree(runs.tied, root / "tied" / "seed0", symlinks=True)
    outcome = cli("table", recipe, "--out", root, "--device", "cpu")
    assert outcome.code == 0, outcome.err
    assert "2 runs in" in outcome.out
    assert "1 of them done" in outcome.out
    assert all(name in outcome.out for name in ("quoted", "tied", "untied", "parameters", "tokens/s", "memory"))
    assert f"report: {(root / 'report.html').resolve()}" in outcome.out
    assert "untied" in (root / "report.html").read_text(encoding="utf-8")
    # The same seed gives the same scores, by `train` in this process and by `table` in a new process.
    results = [json.loads((folder / "result.json").read_text()) for folder in (root / "untied" / "seed0", runs.untied)]
    assert results[0]["test"] == results[1]["test"]
    again = cli("table", recipe, "--out", root)
    assert again.code == 0
    assert "2 runs in" in again.out
    assert "2 of them done" in again.out


ELSEWHERE = """
[[rows]]
name = "over PTB"
set.corpus = { name = "ptb" }

[[rows]]
name = "second"
set.training.start.row = "tied"
"""


@pytest.fixture
def mixed(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a recipe with a row whose corpus is missing and a row that starts from another row."""
    monkeypatch.delenv("REEFKNOT_DATA", raising=False)
    path = tmp_path / recipe.name
    path.write_text(recipe.read_text("utf-8") + ELSEWHERE, encoding="utf-8")
    return path


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Record the jobs instead of running them."""
    planned_jobs: list[Any] = []
    monkeypatch.setattr("reefknot.lab.cli.jobs.run_jobs", lambda jobs, max_parallel: planned_jobs.extend(jobs))
    return planned_jobs


def test_table_leaves_out_rows_whose_corpus_is_missing(
    cli: Cli, mixed: Path, runs: Runs, tmp_path: Path, planned: list[Any]
) -> None:
    root = tmp_path / "table"
    shutil.copytree(runs.tied, root / "tied" / "seed0", symlinks=True)
    outcome = cli("table", mixed, "--out", root)
    assert (outcome.code, [job.row for job in planned]) == (0, ["untied", "second"])
    assert outcome.err.startswith('not run: "over PTB": ptb not found: expected')
    assert len(outcome.err.splitlines()) == 1
    assert re.search(r"^over PTB +not run", outcome.out, re.MULTILINE)
    for words in (("--row", "over ptb", "--row", "tied"), ("--row", "over*")):
        outcome = cli("table", mixed, "--out", root, *words)
        assert (outcome.code, len(planned)) == (3, 2)
        assert "ptb not found: expected" in outcome.err


def test_table_trains_the_selected_rows_and_their_starts(
    cli: Cli, mixed: Path, tmp_path: Path, planned: list[Any]
) -> None:
    assert cli("table", mixed, "--out", tmp_path, "--row", "SECOND").code == 0
    assert [job.row for job in planned] == ["tied", "second"]
    assert planned[1].start == planned[0].out
    assert cli("table", mixed, "--out", tmp_path, "--row", "*TIED", "--seeds", 2).code == 0
    assert [(job.row, job.seed) for job in planned[2:]] == [("tied", 0), ("tied", 1), ("untied", 0), ("untied", 1)]


def test_table_does_not_count_runs_with_other_settings_as_done(
    cli: Cli, recipe: Path, runs: Runs, tmp_path: Path
) -> None:
    root = tmp_path / "table"
    shutil.copytree(runs.tied, root / "tied" / "seed0", symlinks=True)
    outcome = cli("table", recipe, "training.epochs=9", "--row", "tied", "--out", root)
    assert outcome.code == 2
    assert "0 of them done" in outcome.out
    assert "these runs failed" in outcome.err


def test_train_warns_if_a_model_is_worse_than_uniform(cli: Cli, recipe: Path, tmp_path: Path) -> None:
    wild = ("training.optimiser.learning_rate=300", "training.epochs=1", "--row", "tied", "--device", "cpu")
    text = cli("train", recipe, *wild, "--out", tmp_path / "run").out
    assert text.count("tied  warning: worse than 12, the perplexity of a uniform distribution over all words") == 1
    assert "kernels of the output end" not in text
    assert "kernels of the output end: " in (tmp_path / "run" / "log.txt").read_text("utf-8")


def test_train_plans_one_job_per_seed(cli: Cli, recipe: Path, tmp_path: Path, planned: list[Any]) -> None:
    assert cli("train", recipe, "--row", "tied", "--seeds", 3, "--out", tmp_path / "runs").code == 0
    assert [job.seed for job in planned] == [0, 1, 2]
    assert [job.out for job in planned] == [tmp_path / "runs" / f"seed{seed}" for seed in range(3)]
    command = planned[2].command()
    assert command[:2] == ["train", str(recipe)]
    assert "training.seed=2" in command


def test_train_evaluate_and_report_do_not_use_the_network(
    cli: Cli, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> NoReturn:
        raise AssertionError("a default run opened a connection")

    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, fail)
    monkeypatch.setattr(socket, "getaddrinfo", fail)
    out = tmp_path / "run"
    assert cli("train", recipe, "training.epochs=1", "--row", "tied", "--out", out, "--device", "cpu").code == 0
    assert cli("evaluate", out).code == 0
    assert cli("report", out, "-o", tmp_path / "report.html").code == 0
