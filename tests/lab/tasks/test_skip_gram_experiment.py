"""Skip-gram experiments: settings, training, results, reports, and verbs that do not apply."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cli.conftest import run_command

from reefknot.errors import SettingsError
from reefknot.lab.config.upgrade import detect_task
from reefknot.lab.recipes.recipe import load_recipe
from reefknot.lab.tasks import build_model, check_experiment
from reefknot.lab.tasks.word_vectors import store_embedding
from reefknot.nn.models.skip_gram import SkipGram
from skip_gram_recipe import write_judgements, write_recipe

SETTINGS: dict[str, Any] = {"corpus": {"name": "python-docs"}, "skip_gram": {"dim": 8}}


@pytest.fixture
def recipe(tmp_path: Path, made_text: Callable[[int], Path]) -> Path:
    return write_recipe(tmp_path, made_text(600))


def train(recipe: Path, row: str, out: Path, *more: object) -> tuple[dict[str, Any], str]:
    outcome = run_command("train", recipe, "--row", row, "--out", out, "--device", "cpu", *more)
    assert outcome.code == 0, outcome.err
    return json.loads((out / "result.json").read_text(encoding="utf-8")), outcome.out


def test_task_is_inferred_from_the_settings() -> None:
    assert detect_task(SETTINGS) == "skip_gram"
    assert detect_task({"encoder": {"kind": "lstm"}}) == "language_model"
    assert detect_task({"corpus": {"pairs": {"source": "en", "target": "de"}}}) == "translation"
    experiment = check_experiment(SETTINGS, "test")
    assert check_experiment(experiment.model_dump(mode="json"), "test") == experiment
    assert experiment.start is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"encoder": {"kind": "lstm"}}, "encoder: no such setting"),
        ({"skip_gram": {"dmi": 8}}, "skip_gram.dmi: no such setting; did you mean skip_gram.dim?"),
        ({"skip_gram": {"dim": 0}}, "skip_gram.dim: must be greater than or equal to 1"),
        ({"vocabulary": {"keep_spellings": True}}, "skip-gram cannot read spellings"),
        ({"vocabulary": {"sides": "separate"}}, "skip-gram reads monolingual text"),
        ({"corpus": {"name": "multi30k", "pairs": {"source": "en", "target": "de"}}}, "skip-gram reads monolingual"),
        ({"evaluation": {"streams": 2}}, "evaluation.streams: no such setting"),
    ],
)
def test_invalid_skip_gram_settings_are_rejected(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match="test:\n") as caught:
        check_experiment(SETTINGS | changes, "test")
    assert message in str(caught.value)


def test_model_can_be_built_on_the_meta_device() -> None:
    with torch.device("meta"):
        for tied, ends in ((False, {"input": 800, "output": 800}), (True, {"input": 800, "output": 0})):
            settings = SETTINGS | {"skip_gram": {"dim": 8, "tied": tied}}
            model = build_model(check_experiment(settings, "test"), 100)
            assert isinstance(model, SkipGram)
            assert model.parameter_counts() == ends


def test_training_writes_a_complete_run_folder(recipe: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    result, output = train(recipe, "untied", out, "--data", write_judgements(tmp_path))
    files = {"config.json", "environment.json", "vocabulary.json", "metrics.jsonl", "result.json", "log.txt"}
    assert files | {"checkpoints", "best"} <= {path.name for path in out.iterdir()}
    assert not {"valid", "test", "best"} & set(result)
    assert result["row"] == "untied"
    assert result["seed"] == 0
    assert result["parameters"]["parts"]["input"] == result["parameters"]["parts"]["output"] == 32 * 8
    assert result["training"]["tokens"] == 2 * 600
    assert result["paper_similarity"]["output"] == {"SimLex-999": 0.29, "MEN": 0.61}
    assert not result["neighbors"]["tied"]
    assert "embedding" not in result, "pictures are made when a report first shows them"
    assert set(result["neighbors"]["input"]) == set(result["neighbors"]["output"])
    for end in ("input", "output"):
        (judgement,) = result["similarity"][end]
        assert (judgement["name"], judgement["pairs"], judgement["of"]) == ("SimLex-999", 60, 999)
        assert -1 <= judgement["low"] <= judgement["rho"] <= judgement["high"] <= 1
    assert "rho of input vectors: SimLex-999" in output.splitlines()[-1]
    assert "(60 of 999 pairs)" in output.splitlines()[-1]
    again = run_command("train", recipe, "--row", "untied", "--out", out, "--device", "cpu")
    assert "done already" in again.out
    assert not [
        line for line in (out / "metrics.jsonl").read_text().splitlines() if not math.isfinite(json.loads(line)["loss"])
    ]


def test_symbols_are_not_neighbours(tmp_path: Path) -> None:
    """The text has so few words that every word is among the nearest."""
    for split in ("train", "valid", "test"):
        line = "alpha beta gamma delta\n" * 30
        (tmp_path / f"{split}.txt").write_text(line + "once\n", encoding="utf-8")
    recipe = write_recipe(tmp_path, tmp_path)
    for row, ends in (("untied", {"input", "output"}), ("tied", {"tied"})):
        result, _ = train(recipe, row, tmp_path / row)
        neighbors = result["neighbors"]
        for end in ("input", "output"):
            assert {word: {near for near, _ in nearest} for word, nearest in neighbors[end].items()} == {
                word: {"alpha", "beta", "gamma", "delta"} - {word} for word in ("alpha", "beta", "gamma", "delta")
            }
        picture = store_embedding(tmp_path / row).record()["embedding"]
        assert set(picture["words"]) == {"alpha", "beta", "gamma", "delta"}
        assert ends <= set(picture)
        assert json.loads((tmp_path / row / "result.json").read_text())["embedding"] == picture
        outcome = run_command("vectors", "neighbors", tmp_path / row, "alpha", "-k", 10)
        assert outcome.code == 0
        assert "beta" in outcome.out
        assert "<" not in outcome.out
        assert run_command("vectors", "neighbors", tmp_path / row, "<eos>").code != 0


@pytest.mark.parametrize("row", ["untied", "tied"])
def test_too_small_vocabulary_leaves_no_folder(recipe: Path, tmp_path: Path, row: str) -> None:
    out, small = tmp_path / "run", ("vocabulary.max_size=3", "vocabulary.min_count=1")
    outcome = run_command("train", recipe, "--row", row, "--out", out, "--device", "cpu", *small)
    assert outcome.code == 3
    assert (
        "the vocabulary has 1 besides <unk> and <eos>; lower vocabulary.min_count, or use a larger vocabulary.max_size"
        in outcome.err
    )
    assert not out.exists()


def test_equal_seeds_give_equal_results(recipe: Path, tmp_path: Path) -> None:
    data = write_judgements(tmp_path)
    seeds = ((tmp_path / "one", 0), (tmp_path / "same", 0), (tmp_path / "other", 1))
    one, same, other = (train(recipe, "tied", out, "--data", data, f"training.seed={seed}")[0] for out, seed in seeds)
    assert one["similarity"] == same["similarity"] != other["similarity"]
    assert one["neighbors"] == same["neighbors"]
    assert set(one["similarity"]) == {"tied"}


def test_missing_judgements_are_reported_once_and_skipped(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("REEFKNOT_DATA", raising=False)
    result, output = train(recipe, "tied", tmp_path / "run")
    assert "similarity" not in result
    assert output.count("evaluation.similarity is skipped") == 1
    assert output.splitlines()[-1].endswith("finished")


def test_language_model_is_scored_by_similarity(tiny_recipe: Callable[..., Path], tmp_path: Path) -> None:
    recipe, data = tiny_recipe(120, "plain"), write_judgements(tmp_path)
    result, output = train(recipe, "tied", tmp_path / "run", "evaluation.similarity=true", "--data", data)
    assert [judgement["name"] for judgement in result["similarity"]["tied"]] == ["SimLex-999"]
    assert "test perplexity" in output.splitlines()[-1]
    assert "rho of tied vectors: SimLex-999" in output.splitlines()[-1]


@pytest.mark.parametrize(
    "command",
    [
        ["evaluate", "RUN"],
        ["evaluate", "RUN", "--beam", "5"],
        ["generate", "RUN"],
        ["rank", "RUN"],
        ["predict", "RUN", "w1 w2"],
        ["translate", "RUN", "w1 w2"],
        ["compare", "RUN", "RUN"],
    ],
)
def test_verbs_that_need_another_task_reject_skip_gram(recipe: Path, tmp_path: Path, command: list[str]) -> None:
    out = tmp_path / "run"
    train(recipe, "tied", out)
    outcome = run_command(*(str(out) if word == "RUN" else word for word in command))
    assert outcome.code == 2
    assert f"reefknot: {out} is a run of skip-gram, " in outcome.err
    assert "; use `reefknot vectors` or `reefknot report` with it\n" in outcome.err


def test_sweep_rejects_skip_gram(recipe: Path) -> None:
    outcome = run_command("sweep", recipe, "skip_gram.dim=4,8", "--row", "tied")
    assert outcome.code == 2
    assert 'row "tied" has no validation perplexity' in outcome.err


def test_table_shows_correlations_next_to_the_papers(recipe: Path, tmp_path: Path) -> None:
    out, data = tmp_path / "runs", write_judgements(tmp_path)
    for row in ("untied", "tied"):
        train(recipe, row, out / row / "seed0", "--data", data)
    outcome = run_command("table", recipe, "--out", out, "--device", "cpu", "--data", data)
    assert outcome.code == 0, outcome.err
    assert "2 runs in" in outcome.out
    assert "2 of them done" in outcome.out
    assert "0.30 / 0.29" in outcome.out
    assert "0.66 / 0.61" in outcome.out
    assert "Spearman's rho" in outcome.out
    assert "SimLex-999 60 of 999" in outcome.out
    assert "valid" not in outcome.out.partition("of them done")[2]
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "0.30 / 0.29" in page
    assert "perplexity" not in page.partition("<main>")[2].partition('id="settings"')[0]


def test_sizes_and_rows_are_listed_without_training(recipe: Path) -> None:
    assert "untied: valid, 512 parameters" in run_command("validate", recipe).out
    assert "tied: valid, 256 parameters" in run_command("validate", recipe).out
    sizes = json.loads(run_command("params", recipe, "--json").out)
    assert sizes["tied"] == {"input": 256, "output": 0, "total": 256, "parts": {"input": 256}}
    listed = run_command("ls", recipe).out
    assert "paper's rho, input: SimLex-999 0.3, MEN 0.66" in listed
    records = json.loads(run_command("ls", recipe, "--json").out)
    assert records[1]["paper_similarity"] == {"tied": {"SimLex-999": 0.17, "MEN": 0.5}}


@pytest.mark.parametrize(
    ("figures", "message"),
    [
        ("input = { SimLex-998 = 0.3 }", "paper_similarity: unknown benchmark 'SimLex-998'"),
        ("input = { SimLex-999 = 30 }", "paper_similarity.input.SimLex-999: must be"),
        ("inptu = { SimLex-999 = 0.3 }", "paper_similarity.inptu: no such setting"),
    ],
)
def test_invalid_paper_correlations_are_rejected(recipe: Path, tmp_path: Path, figures: str, message: str) -> None:
    text = recipe.read_text(encoding="utf-8").replace("input = { SimLex-999 = 0.30, MEN = 0.66 }", figures)
    (tmp_path / "wrong.toml").write_text(text, encoding="utf-8")
    with pytest.raises(SettingsError) as caught:
        load_recipe(str(tmp_path / "wrong.toml"))
    assert message in str(caught.value)
