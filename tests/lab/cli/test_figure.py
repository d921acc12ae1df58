"""`reefknot figure`: from run folders to a table, a picture and a record, and figures in the report."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from reefknot.lab.papers.figures import FIGURES
from reefknot.lab.papers.figures.predictions import CONTEXTS

from .conftest import Outcome, Runs

Cli = Callable[..., Outcome]


@pytest.fixture(scope="module")
def drill(tmp_path_factory: pytest.TempPathFactory, cli: Cli, recipe: Path) -> Path:
    """A tiny run with DRILL's classifiers."""
    folder = tmp_path_factory.mktemp("drill") / "seed0"
    classifier = 'output.classifier={kind = "drill", table = "words", depth = 1}'
    outcome = cli("train", recipe, "--row", "tied", classifier, "--out", folder, "--device", "cpu")
    assert outcome.code == 0, outcome.err
    return folder


@pytest.fixture(scope="module")
def skip_gram(tmp_path_factory: pytest.TempPathFactory, cli: Cli, corpus: Path) -> Path:
    """A tiny run of skip-gram."""
    folder = tmp_path_factory.mktemp("skip-gram")
    settings = "[base.skip_gram]\ndim = 6\n[base.training]\nepochs = 1\n[[rows]]\nname = 'untied'\n"
    text = f"title = 'Vectors'\n[base.corpus]\nname = {str(corpus)!r}\n{settings}"
    (folder / "vectors.toml").write_text(text, encoding="utf-8")
    outcome = cli("train", folder / "vectors.toml", "--out", folder / "seed0", "--device", "cpu")
    assert outcome.code == 0, outcome.err
    return folder / "seed0"


def test_figures_are_listed_without_a_name(cli: Cli) -> None:
    outcome = cli("figure")
    assert outcome.code == 0, outcome.err
    assert [line.split()[0] for line in outcome.out.splitlines()] == list(FIGURES)
    assert "(reads weights)" in outcome.out


def test_figure_of_curves_is_printed_drawn_and_recorded(cli: Cli, runs: Runs, tmp_path: Path) -> None:
    for suffix, start in ((".svg", b"<svg xmlns="), (".png", b"\x89PNG"), (".html", b"<!doctype html>")):
        picture, record = tmp_path / f"figure{suffix}", tmp_path / "figure.json"
        outcome = cli("figure", "inan2017/2", runs.root, "-o", picture, "--json", record)
        assert outcome.code == 0, outcome.err
        assert picture.read_bytes().startswith(start)
    assert outcome.out.startswith("Inan et al. 2017, Figure 2: ")
    assert "\nuntied " in outcome.out
    assert "runs of tiny are shown in place of the rows of inan2017/figure2" in outcome.err
    written = json.loads(record.read_text())
    assert (written["figure"], len(written["runs"])) == ("inan2017/2", 2)
    assert {curve["row"] for curve in written["measured"]["curves"]} == {"tied", "untied"}


def test_next_words_are_predicted_for_the_contexts_of_the_paper(cli: Cli, runs: Runs) -> None:
    outcome = cli("figure", "inan2017/table4", runs.tied, runs.untied, "--device", "cpu")
    assert outcome.code == 0, outcome.err
    # This text does not have the paper's contexts, so they are read as beginnings of lines.
    assert outcome.out.count("   read as the beginning of a line\n") == len(CONTEXTS)
    assert all(f"{context.end} [{context.next}]" in outcome.out for context in CONTEXTS)
    assert "paper: VD-LSTM+REAL large" in outcome.out
    assert "0.22 federal" in outcome.out


def test_runs_of_another_task_are_left_out_or_rejected(cli: Cli, runs: Runs, skip_gram: Path) -> None:
    outcome = cli("figure", "inan2017/table4", runs.tied, skip_gram, "--device", "cpu")
    assert outcome.code == 0, outcome.err
    assert "left out, not a language model: vectors (1 run)" in outcome.err
    for name, run, message in (
        ("inan2017/1", skip_gram, "it shows a language model, but"),
        ("press2017/table3", skip_gram, "it shows a language model, but"),
        ("press2017/table2", runs.tied, "it shows a run of skip-gram, but"),
    ):
        outcome = cli("figure", name, run)
        assert outcome.code == 3
        assert message in outcome.err
    outcome = cli("figure", "press2017/section3", runs.tied, skip_gram, "--device", "cpu")
    assert outcome.code == 0, outcome.err
    assert "norms in the input table" in outcome.out


def test_pairs_of_tables_are_compared(cli: Cli, runs: Runs, tmp_path: Path) -> None:
    outcome = cli("figure", "press2017/table4", runs.root, "-o", tmp_path / "pairs.svg")
    assert outcome.code == 0, outcome.err
    assert "NNLM, 8 units" in outcome.out
    assert "  output, tied " in outcome.out


def test_relative_loss_by_band_equals_compare(cli: Cli, runs: Runs, drill: Path, tmp_path: Path) -> None:
    record = tmp_path / "bands.json"
    outcome = cli("figure", "pappas2019/3", drill, runs.tied, runs.untied, "--json", record)
    assert outcome.code == 0, outcome.err
    measured = json.loads(record.read_text())["measured"]
    (compared,) = measured["compared"]  # an untied table is not a baseline of the paper
    assert compared["baseline"] == "weight tying"
    # The numbers equal those of `compare` for the same runs.
    (comparison,) = cli("compare", runs.tied, drill, "--bands", "--json").json()
    expected = {band["low"]: band["relative"] for band in comparison["bands"]["target"]}
    assert {band["low"]: band["relative"]["mean"] for band in compared["bands"]} == pytest.approx(expected)
    for band in compared["bands"]:
        if band["types"] > 1:
            assert band["relative"]["low"] <= band["relative"]["mean"] <= band["relative"]["high"]


def test_records_without_weights_are_rejected_with_a_message(cli: Cli, runs: Runs, drill: Path, tmp_path: Path) -> None:
    for run, name in ((runs.tied, "tied"), (drill, "drill")):
        (tmp_path / name).mkdir()
        for file in ("config.json", "environment.json", "metrics.jsonl", "result.json"):
            (tmp_path / name / file).write_bytes((run / file).read_bytes())
    for figure in ("press2017/table4", "inan2017/table4"):
        outcome = cli("figure", figure, tmp_path)
        assert outcome.code == 3
        assert "Traceback" not in outcome.err
    outcome = cli("figure", "pappas2019/3", tmp_path)
    assert outcome.code == 3
    assert "run folders contain the loss of every token, records do not" in outcome.err
    assert cli("figure", "inan2017/2", tmp_path).code == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["zebra"], "unknown figure 'zebra'; choose one of "),
        (["inan2017/2", "-o", "figure.jpg"], "-o figure.jpg: must end with .svg, .png, .html"),
        (["inan2017/2", "--json", "no/such/folder/f.json"], "--json no/such/folder/f.json: the folder "),
        (["inan2017/2", "-o", "."], "-o .: must end with"),
        (["pappas2019/3", "nowhere"], "nowhere: there is no such folder"),
    ],
)
def test_mistakes_print_a_message(cli: Cli, words: list[str], message: str) -> None:
    outcome = cli("figure", *words)
    assert outcome.code in (2, 3)
    assert message in outcome.err


def test_report_shows_figures_of_its_runs(cli: Cli, runs: Runs, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    assert cli("report", runs.root, "-o", page).code == 0
    assert "figure-inan2017-2" not in page.read_text()
    folder = tmp_path / "runs"
    folder.mkdir()
    (folder / "metrics.jsonl").write_bytes((runs.tied / "metrics.jsonl").read_bytes())
    for name in ("config.json", "result.json"):
        changed = json.loads((runs.tied / name).read_text()) | {"recipe": "inan2017/table1", "row": "VD-LSTM large"}
        (folder / name).write_text(json.dumps(changed))
    outcome = cli("report", folder, "-o", page)
    assert outcome.code == 0, outcome.err
    text = page.read_text()
    assert '<section id="figure-inan2017-2">' in text
    assert "Inan et al. 2017, Figure 2: progress" in text
    assert "figure-inan2017-table4" not in text  # it reads weights, which needs --figures
    outcome = cli("report", folder, "-o", page, "--figures")
    assert outcome.code == 0
    assert "inan2017/table4 is left out: " in outcome.err
