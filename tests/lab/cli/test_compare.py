"""`reefknot compare` on language models: runs that are averaged, rejected or left out."""

from __future__ import annotations

import json
import math
import re
import shutil
import xml.etree.ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .conftest import Outcome, Runs

Cli = Callable[..., Outcome]


def copy_run(run: Path, to: Path, seed: int = 0, **settings: dict[str, Any]) -> Path:
    """Copy a run, with another seed or other settings in its files."""
    shutil.copytree(run, to, symlinks=True)
    (to / "MANIFEST.json").unlink()
    config = json.loads((to / "config.json").read_text(encoding="utf-8"))
    for name, changed in {"training": {"seed": seed}, **settings}.items():
        config["settings"][name] |= changed
    (to / "config.json").write_text(json.dumps(config), encoding="utf-8")
    result = json.loads((to / "result.json").read_text(encoding="utf-8"))
    (to / "result.json").write_text(json.dumps(result | {"seed": seed}), encoding="utf-8")
    return to


@pytest.fixture
def seeds(runs: Runs, tmp_path: Path) -> Path:
    """Three seeds of a row. The last run is not finished."""
    folders = [copy_run(runs.tied, tmp_path / "seeds" / f"seed{seed}", seed=seed) for seed in range(3)]
    (folders[2] / "result.json").unlink()
    return tmp_path / "seeds"


def test_seeds_are_averaged_and_counted(cli: Cli, runs: Runs, seeds: Path) -> None:
    text = cli("compare", seeds, runs.untied).out
    assert f"A = {seeds} (2 of 3 seeds finished)\n" in text
    assert f"B = {runs.untied} (1 seed)\n" in text
    assert "B was trained once" in text
    shutil.rmtree(seeds / "seed2")
    assert f"A = {seeds} (2 seeds)\n" in cli("compare", seeds, runs.untied).out
    (record,) = cli("compare", seeds, runs.untied, "--json").json()
    assert record["seeds"] == [2, 1]


def test_runs_with_different_settings_are_rejected(cli: Cli, runs: Runs, seeds: Path) -> None:
    copy_run(runs.tied, seeds / "longer", seed=3, training={"seed": 3, "epochs": 9})
    outcome = cli("compare", runs.untied, seeds)
    assert outcome.code == 2
    assert f"{seeds} holds runs that differ in more than the seed" in outcome.err
    assert "training.epochs=9" in outcome.err
    outcome = cli("compare", runs.root)
    assert outcome.code == 2
    assert f"so pass one folder per system: reefknot compare {runs.tied} {runs.untied}" in outcome.err


def test_repeated_seed_is_rejected(cli: Cli, runs: Runs, seeds: Path) -> None:
    copy_run(runs.tied, seeds / "again", seed=1)
    outcome = cli("compare", runs.untied, seeds)
    assert outcome.code == 2
    assert "both have seed 1; leave one of them out" in outcome.err


def train(cli: Cli, recipe: Path, out: Path, *settings: object) -> Path:
    outcome = cli("train", recipe, "--row", "tied", "--out", out, "--device", "cpu", "training.epochs=1", *settings)
    assert outcome.code == 0, outcome.err
    return out


def test_different_texts_are_rejected(cli: Cli, runs: Runs, recipe: Path, corpus: Path, tmp_path: Path) -> None:
    text = tmp_path / "text"
    shutil.copytree(corpus, text)
    (text / "test.txt").write_text("green river\n" * 60, encoding="utf-8")
    other = train(cli, recipe, tmp_path / "other", f"corpus.name={text}")
    outcome = cli("compare", runs.untied, other)
    assert outcome.code == 2
    assert f"{runs.untied} and {other}: no fair comparison: their test texts differ" in outcome.err
    assert cli("compare", runs.untied, other, "--split", "valid", "--json").json()[0]["of"] == "token"


def test_different_windows_print_a_warning(cli: Cli, recipe: Path, runs: Runs, tmp_path: Path) -> None:
    lines = train(cli, recipe, tmp_path / "lines", 'evaluation.windows={kind="lines"}')
    outcome = cli("compare", runs.tied, lines)
    assert outcome.code == 0
    assert f"note: {runs.tied} and {lines}: scored with different context: one stream and lines\n" in outcome.err
    assert "note" not in cli("compare", lines, copy_run(lines, tmp_path / "copy")).err


def test_different_unknown_words_are_rejected(cli: Cli, recipe: Path, runs: Runs, tmp_path: Path) -> None:
    fewer = train(cli, recipe, tmp_path / "fewer", "vocabulary.max_size=9")
    outcome = cli("compare", runs.tied, fewer)
    assert outcome.code == 2
    assert re.search(
        r"one scores 0 unknown words as <unk>, the other \d+; compare runs whose vocabularies", outcome.err
    )
    ends = train(cli, recipe, tmp_path / "ends", "vocabulary.end_of_line=false")
    assert "one scores line ends, the other does not" in cli("compare", runs.tied, ends).err


def test_models_with_and_without_spellings_are_compared_by_token(cli: Cli, recipe: Path, tmp_path: Path) -> None:
    word_run = train(cli, recipe, tmp_path / "words", "vocabulary.max_size=9")
    spelling = ['input={kind="char_cnn", dim=8, filters=[[1, 4]], byte_dim=4}', "vocabulary.keep_spellings=true"]
    spelling_run = train(cli, recipe, tmp_path / "spelled", "vocabulary.max_size=9", *spelling)
    (record,) = cli("compare", word_run, spelling_run, "--by", "documents", "--json").json()
    assert (record["of"], record["units"]) == ("token", 30)
    results = [json.loads((run / "result.json").read_text(encoding="utf-8")) for run in (word_run, spelling_run)]
    expected = [result["test"]["perplexity"] for result in results]
    assert [record["perplexity_a"], record["perplexity_b"]] == pytest.approx(expected)


def remove_text_description(run: Path) -> None:
    """Remove the description of the scored texts from the result of a run."""
    result = json.loads((run / "result.json").read_text(encoding="utf-8"))
    for split in ("valid", "test"):
        del result[split]["text"]
    (run / "MANIFEST.json").unlink(missing_ok=True)
    (run / "result.json").write_text(json.dumps(result), encoding="utf-8")


def test_texts_are_opened_only_if_results_do_not_describe_them(
    cli: Cli, recipe: Path, corpus: Path, tmp_path: Path
) -> None:
    text = tmp_path / "text"
    shutil.copytree(corpus, text)
    name = f"corpus.name={text}"
    word_run = train(cli, recipe, tmp_path / "words", name, "vocabulary.max_size=9")
    spelling = ['input={kind="char_cnn", dim=8, filters=[[1, 4]], byte_dim=4}', "vocabulary.keep_spellings=true"]
    spelling_run = train(cli, recipe, tmp_path / "spelled", name, "vocabulary.max_size=9", *spelling)
    fewer = train(cli, recipe, tmp_path / "fewer", name, "vocabulary.max_size=8")
    rejected = cli("compare", word_run, fewer)
    record = cli("compare", word_run, spelling_run, "--json").json()
    text.rename(tmp_path / "gone")
    assert cli("compare", word_run, spelling_run, "--json").json() == record, "the results describe equal tokens"
    assert rejected.err in cli("compare", word_run, fewer).err
    remove_text_description(word_run)
    assert cli("compare", word_run, spelling_run).code == 3
    (tmp_path / "gone").rename(text)
    record[0]["unknown_share"] = None  # the description is gone
    assert cli("compare", word_run, spelling_run, "--json").json() == record, "the texts have equal tokens"
    assert rejected.err in cli("compare", word_run, fewer).err


def test_moved_text_is_found_with_data_option(cli: Cli, recipe: Path, corpus: Path, tmp_path: Path) -> None:
    text, moved = tmp_path / "text", tmp_path / "moved"
    shutil.copytree(corpus, text)
    run = train(cli, recipe, tmp_path / "run", f"corpus.name={text}")
    text.rename(moved)
    outcome = cli("evaluate", run)
    assert outcome.code == 3
    assert f"{run}: its text was in {text}, which does not exist here; pass the folder" in outcome.err
    assert cli("evaluate", run, "--data", moved).code == 0
    (moved / "test.txt").write_text("other words\n", encoding="utf-8")
    assert "has changed; restore it" in cli("evaluate", run, "--data", moved).err


def test_different_streams_are_rejected(cli: Cli, runs: Runs, tmp_path: Path) -> None:
    other = copy_run(runs.tied, tmp_path / "other")
    result = json.loads((other / "result.json").read_text(encoding="utf-8"))
    result["test"]["streams"] = 7
    (other / "result.json").write_text(json.dumps(result), encoding="utf-8")
    outcome = cli("compare", runs.untied, other)
    assert outcome.code == 2
    assert f"{runs.untied} and {other}: no fair comparison: scored in 1 and in 7 streams; train both" in outcome.err


def test_data_option_is_rejected_if_no_text_is_read_from_it(cli: Cli, recipe: Path, runs: Runs, tmp_path: Path) -> None:
    for words in (
        ("evaluate", runs.tied),
        ("predict", runs.tied, "--split", "test"),
        ("compare", runs.tied, runs.untied),
    ):
        outcome = cli(*words, "--data", tmp_path)
        assert (outcome.code, outcome.out) == (2, "")
        assert "--data has no effect, because the text is" in outcome.err
    moved = copy_run(runs.tied, tmp_path / "moved", corpus={"name": "nowhere"})
    other = copy_run(runs.tied, tmp_path / "other", corpus={"name": "nowhere"})
    outcome = cli("compare", moved, other, "--data", tmp_path)
    assert (outcome.code, outcome.out) == (2, "")
    assert "--data has no effect, because this comparison needs only the losses" in outcome.err


def test_comparison_by_documents_needs_the_text_but_no_weights(
    cli: Cli, runs: Runs, corpus: Path, tmp_path: Path
) -> None:
    without_weights = copy_run(runs.tied, tmp_path / "without weights")
    shutil.rmtree(without_weights / "checkpoints")
    (record,) = cli("compare", without_weights, runs.untied, "--by", "documents", "--json").json()
    assert record["units"] == 30
    changed = tmp_path / "text"
    shutil.copytree(corpus, changed)
    (changed / "test.txt").write_text("other words\n\n" * 50, encoding="utf-8")
    moved = copy_run(runs.tied, tmp_path / "moved")
    config = (moved / "config.json").read_text(encoding="utf-8").replace(str(corpus), str(changed))
    (moved / "config.json").write_text(config, encoding="utf-8")
    outcome = cli("compare", moved, runs.untied, "--by", "documents")
    assert outcome.code == 3
    assert "has changed; restore it" in outcome.err


def test_bands_cover_all_tokens(cli: Cli, runs: Runs, recipe: Path, tmp_path: Path) -> None:
    (record,) = cli("compare", runs.tied, runs.untied, "--bands", "--json").json()
    for bands in (record["bands"][side] for side in ("target", "previous")):
        tokens = sum(band["tokens"] for band in bands)
        for side in "ab":
            mean = sum(band["tokens"] * band[f"nll_{side}"] for band in bands) / tokens
            assert math.exp(mean) == pytest.approx(record[f"perplexity_{side}"])
    # Ten words with about ninety occurrences each, <eos> after 225 lines, and <unk>, which does not occur.
    types = {(band["low"], band["high"]): band["types"] for band in record["bands"]["target"]}
    assert sum(types.values()) == 11
    assert types[100, 249] >= 1
    assert "bands" not in cli("compare", runs.tied, runs.untied, "--json").json()[0]
    text = cli("compare", runs.tied, copy_run(runs.tied, tmp_path / "copy"), "--bands").out
    assert "100-249" in text
    assert "+0.00%" in text
    assert list(record["bands"]["symbols"]) == ["<eos>"]
    for band in (*record["bands"]["target"], *record["bands"]["symbols"].values()):
        low, high = band["interval"]
        assert low < band["difference"] < high
        assert band["difference"] == pytest.approx(band["nll_b"] - band["nll_a"])
    # The bands cover all tokens, so <eos> is counted in them too.
    assert sum(band["tokens"] for band in record["bands"]["target"]) == 60 * 7 + 30
    assert re.search(r"\n +of these:\n +<eos> +90 .* \+0\.0000  \+0\.0000 \+0\.0000\n  loss per token by", text)
    assert max(map(len, text.splitlines()[5:])) <= 85
    subword_run = train(cli, recipe, tmp_path / "subwords", "vocabulary.bpe={merges=8}")
    rejected = cli("compare", runs.tied, subword_run, "--bands")
    assert rejected.code == 2
    assert "these runs do not have the same tokens; leave out --bands" in rejected.err


def test_figure_draws_the_bands(cli: Cli, runs: Runs, tmp_path: Path) -> None:
    file = tmp_path / "new" / "bands.svg"
    (record,) = cli("compare", runs.tied, runs.untied, "--bands", "--figure", file, "--json").json()
    svg = xml.etree.ElementTree.parse(file).getroot()
    assert svg.tag == "{http://www.w3.org/2000/svg}svg"
    drawn = "".join(svg.itertext())
    labels = [f"{band['low']:,}-" for band in record["bands"]["target"] if band["high"] not in (None, band["low"])]
    assert labels
    assert all(label in drawn for label in labels)
    rejected = cli("compare", runs.tied, runs.untied, "--figure", file)
    assert (rejected.code, rejected.out) == (2, "")
    assert "--figure has no effect without --bands" in rejected.err


def test_compare_writes_a_page_with_the_intervals(cli: Cli, runs: Runs, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    outcome = cli("compare", runs.untied, runs.tied, "--bands", "--html", page)
    assert outcome.code == 0, outcome.err
    assert outcome.out.endswith(f"report: {page.resolve()}\n")
    html = page.read_text(encoding="utf-8")
    [comparison] = cli("compare", runs.untied, runs.tied, "--json").json()
    low, high = (f"{100 * (ratio - 1):+.2f}".replace("-", "−") for ratio in comparison["ratio_interval"])
    assert f"{low} % to {high} %" in html
    assert "tied compared with untied" in html
    assert 'download="comparison.csv"' in html
    assert "times seen in training" in html
    assert "Nearest neighbours" in html
    assert cli("compare", runs.untied, runs.tied, "--html", tmp_path).code == 2
