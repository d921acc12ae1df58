"""Skip-gram experiments: settings, training, results, reports, and verbs that do not apply."""

from __future__ import annotations

import json
import math
import shutil
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


def train(recipe: Path, row: str, out: Path, *arguments: object) -> tuple[dict[str, Any], str]:
    """Train a row of a recipe. Returns the content of result.json, and what the command printed."""
    outcome = run_command("train", recipe, "--row", row, "--out", out, "--device", "cpu", *arguments)
    assert outcome.code == 0, outcome.err
    result = json.loads((out / "result.json").read_text(encoding="utf-8"))
    return result, outcome.out


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
        for tied, expected_counts in ((False, {"input": 800, "output": 800}), (True, {"input": 800, "output": 0})):
            settings = SETTINGS | {"skip_gram": {"dim": 8, "tied": tied}}
            model = build_model(check_experiment(settings, "test"), 100)
            assert isinstance(model, SkipGram)
            assert model.parameter_counts() == expected_counts


def test_training_writes_a_complete_run_folder(recipe: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    result, output = train(recipe, "untied", out, "--data", write_judgements(tmp_path))
    expected_files = {"config.json", "environment.json", "vocabulary.json", "metrics.jsonl", "result.json", "log.txt"}
    assert expected_files | {"checkpoints", "best"} <= {path.name for path in out.iterdir()}

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

    last_line = output.splitlines()[-1]
    assert "rho of input vectors: SimLex-999" in last_line
    assert "(60 of 999 pairs)" in last_line
    for line in (out / "metrics.jsonl").read_text().splitlines():
        assert math.isfinite(json.loads(line)["loss"])

    second_outcome = run_command("train", recipe, "--row", "untied", "--out", out, "--device", "cpu")
    assert "done already" in second_outcome.out


def test_symbols_are_not_neighbours(tmp_path: Path) -> None:
    """The text has so few words that every word is among the nearest."""
    words = {"alpha", "beta", "gamma", "delta"}
    text = "alpha beta gamma delta\n" * 30 + "once\n"
    for split in ("train", "valid", "test"):
        (tmp_path / f"{split}.txt").write_text(text, encoding="utf-8")
    recipe = write_recipe(tmp_path, tmp_path)
    for row, ends in (("untied", {"input", "output"}), ("tied", {"tied"})):
        run_folder = tmp_path / row
        result, _ = train(recipe, row, run_folder)
        for end in ("input", "output"):
            neighbors = result["neighbors"][end]
            assert set(neighbors) == words
            for word, nearest in neighbors.items():
                assert {neighbor for neighbor, _ in nearest} == words - {word}

        embedding = store_embedding(run_folder).record()["embedding"]
        assert set(embedding["words"]) == words
        assert ends <= set(embedding)
        assert json.loads((run_folder / "result.json").read_text())["embedding"] == embedding

        outcome = run_command("vectors", "neighbors", run_folder, "alpha", "-k", 10)
        assert outcome.code == 0
        assert "beta" in outcome.out
        assert "<" not in outcome.out
        assert run_command("vectors", "neighbors", run_folder, "<eos>").code != 0


@pytest.mark.parametrize("row", ["untied", "tied"])
def test_too_small_vocabulary_leaves_no_folder(recipe: Path, tmp_path: Path, row: str) -> None:
    out = tmp_path / "run"
    overrides = ("vocabulary.max_size=3", "vocabulary.min_count=1")
    outcome = run_command("train", recipe, "--row", row, "--out", out, "--device", "cpu", *overrides)
    assert outcome.code == 3
    assert (
        "the vocabulary has 1 besides <unk> and <eos>; lower vocabulary.min_count, or use a larger vocabulary.max_size"
        in outcome.err
    )
    assert not out.exists()


def test_equal_seeds_give_equal_results(recipe: Path, tmp_path: Path) -> None:
    data = write_judgements(tmp_path)
    first, _ = train(recipe, "tied", tmp_path / "first", "--data", data, "training.seed=0")
    same_seed, _ = train(recipe, "tied", tmp_path / "same_seed", "--data", data, "training.seed=0")
    other_seed, _ = train(recipe, "tied", tmp_path / "other_seed", "--data", data, "training.seed=1")
    assert first["similarity"] == same_seed["similarity"]
    assert first["similarity"] != other_seed["similarity"]
    assert first["neighbors"] == same_seed["neighbors"]
    assert set(first["similarity"]) == {"tied"}


def test_missing_judgements_are_reported_once_and_skipped(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("REEFKNOT_DATA", raising=False)
    result, output = train(recipe, "tied", tmp_path / "run")
    assert "similarity" not in result
    assert output.count("evaluation.similarity is skipped") == 1
    assert output.splitlines()[-1].endswith("finished")


def test_language_model_is_scored_by_similarity(tiny_recipe: Callable[..., Path], tmp_path: Path) -> None:
    recipe = tiny_recipe(120, "plain")
    data = write_judgements(tmp_path)
    result, output = train(recipe, "tied", tmp_path / "run", "evaluation.similarity=true", "--data", data)
    assert [judgement["name"] for judgement in result["similarity"]["tied"]] == ["SimLex-999"]
    last_line = output.splitlines()[-1]
    assert "test perplexity" in last_line
    assert "rho of tied vectors: SimLex-999" in last_line


@pytest.mark.parametrize(
    "command",
    [
        ["evaluate", "RUN"],
        ["evaluate", "RUN", "--beam", "5"],
        ["generate", "RUN"],
        ["rank", "RUN"],
        ["predict", "RUN", "w1 w2"],
        ["translate", "RUN", "w1 w2"],
        ["compare", "RUN", "COPY"],
    ],
)
def test_verbs_that_need_another_task_reject_skip_gram(recipe: Path, tmp_path: Path, command: list[str]) -> None:
    out = tmp_path / "run"
    train(recipe, "tied", out)
    shutil.copytree(out, tmp_path / "copy", symlinks=True)
    folders = {"RUN": str(out), "COPY": str(tmp_path / "copy")}
    arguments = [folders.get(argument, argument) for argument in command]
    outcome = run_command(*arguments)
    assert outcome.code == 2
    assert f"reefknot: {out} is a run of skip-gram, " in outcome.err
    assert "; use `reefknot vectors` or `reefknot report` with it\n" in outcome.err


def test_sweep_rejects_skip_gram(recipe: Path) -> None:
    outcome = run_command("sweep", recipe, "skip_gram.dim=4,8", "--row", "tied")
    assert outcome.code == 2
    assert 'row "tied" has no validation perplexity' in outcome.err


def test_table_shows_correlations_next_to_the_papers(recipe: Path, tmp_path: Path) -> None:
    out = tmp_path / "runs"
    data = write_judgements(tmp_path)
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
    validate_output = run_command("validate", recipe).out
    assert "untied: valid, 512 parameters" in validate_output
    assert "tied: valid, 256 parameters" in validate_output
    sizes = json.loads(run_command("params", recipe, "--json").out)
    assert sizes["tied"] == {"input": 256, "output": 0, "total": 256, "parts": {"input": 256}}
    assert "paper's rho, input: SimLex-999 0.3, MEN 0.66" in run_command("ls", recipe).out
    records = json.loads(run_command("ls", recipe, "--json").out)
    assert records[1]["paper_similarity"] == {"tied": {"SimLex-999": 0.17, "MEN": 0.5}}


@pytest.mark.parametrize(
    ("correlations", "message"),
    [
        ("input = { SimLex-998 = 0.3 }", "paper_similarity: unknown benchmark 'SimLex-998'"),
        ("input = { SimLex-999 = 30 }", "paper_similarity.input.SimLex-999: must be"),
        ("inptu = { SimLex-999 = 0.3 }", "paper_similarity.inptu: no such setting"),
    ],
)
def test_invalid_paper_correlations_are_rejected(recipe: Path, tmp_path: Path, correlations: str, message: str) -> None:
    valid_correlations = "input = { SimLex-999 = 0.30, MEN = 0.66 }"
    text = recipe.read_text(encoding="utf-8").replace(valid_correlations, correlations)
    invalid_recipe = tmp_path / "invalid.toml"
    invalid_recipe.write_text(text, encoding="utf-8")
    with pytest.raises(SettingsError) as caught:
        load_recipe(str(invalid_recipe))
    assert message in str(caught.value)
