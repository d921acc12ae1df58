"""Training runs of translators: learning, exact resume, averaged checkpoints and tied tables."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sacrebleu
import torch
from safetensors.torch import load_file

from reefknot.errors import SettingsError, Stopped
from reefknot.lab import experiment as experiments
from reefknot.lab.recipes.recipe import load_recipe
from reefknot.lab.runs.checkpoints import Checkpoints
from reefknot.lab.tasks import open_run
from reefknot.lab.text.pair_batches import PairBatches
from reefknot.lab.training.distributed import World
from reefknot.nn.models.translator import Translator

ARTICLES, NOUNS = ("a", "the", "one", "this", "that"), ("dog", "cat", "man", "tree", "bird")
VERBS = {"sees": "sieht", "likes": "mag"}
GERMAN = {"a": "ein", "the": "der", "one": "eine", "this": "dieser", "that": "jener", "dog": "hund", "cat": "katze"}
GERMAN |= {"man": "mann", "tree": "baum", "bird": "vogel"}

RECIPE = """
title = "Pairs"
[base]
corpus = {{ name = "{folder}", pairs = {{ source = "en", target = "de" }} }}
tables.words = {{ kind = "word", dim = 16 }}
source = {{ kind = "lookup", table = "words", scale = 4.0 }}
input = {{ kind = "lookup", table = "words", scale = 4.0 }}
encoder = {{ kind = "encoder_decoder", layers = 1, heads = 2, ffn_dim = 32, dropout = 0.1 }}
output = {{ kind = "softmax", smoothing = 0.1, classifier = {{ kind = "plain", table = "words" }} }}
[base.init]
tables = "normal"
[base.training]
batching = "pairs"
batch = 8
steps = 8
epochs = 2
log_every = 1
save_every = 3
optimiser = {{ kind = "adam", learning_rate = 0.01 }}
schedule = {{ kind = "inverse_sqrt", warmup = 4 }}
[base.evaluation]
bleu = {{ tokenize = "none" }}
[[rows]]
name = "transformer"
[[rows]]
name = "gru"
[rows.set]
encoder = {{ kind = "attention_gru", units = 16, dropout = 0.1 }}
training.optimiser = {{ kind = "adadelta" }}
[[rows]]
name = "separate"
[rows.set]
vocabulary.sides = "separate"
tables.theirs = {{ kind = "word", dim = 16 }}
source.table = "theirs"
"""


def sentences() -> list[tuple[str, str]]:
    """Return fifty pairs, translated word by word, except that the verb moves to the end."""
    pairs = []
    for number, (article, noun) in enumerate((a, n) for a in ARTICLES for n in NOUNS):
        for verb, german in VERBS.items():
            object_noun = NOUNS[(number + 2) % 5]
            source = f"{article} {noun} {verb} {object_noun}"
            pairs.append((source, f"{GERMAN[article]} {GERMAN[noun]} {GERMAN[object_noun]} {german}"))
    return pairs


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A recipe on a folder of fifty pairs. The first ten are also the valid and test pairs."""
    folder = tmp_path / "pairs"
    folder.mkdir()
    for split, number in (("train", 50), ("valid", 10), ("test", 10)):
        for side, language in enumerate(("en", "de")):
            lines = [pair[side] for pair in sentences()[:number]]
            (folder / f"{split}.{language}").write_text("\n".join(lines) + "\n", encoding="utf-8")
    path = tmp_path / "pairs.toml"
    path.write_text(RECIPE.format(folder=folder), encoding="utf-8")
    return path


@pytest.fixture
def train(recipe: Path, display: Any) -> Callable[..., Any]:
    def run(out: Path, row: str, *overrides: str, device: str = "cpu") -> Any:
        loaded, world = load_recipe(str(recipe), overrides, row), World(device=torch.device(device))
        result = experiments.train(loaded, loaded.row(row), out, world=world, display=display)
        return result and result.record()

    return run


@pytest.fixture
def stop_in_step(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """A function that makes this process receive SIGTERM during its n-th update from now."""
    read = PairBatches.window

    def arm(step: int) -> None:
        count = 0

        def window(self: PairBatches, index: int) -> tuple[torch.Tensor, torch.Tensor]:
            nonlocal count
            count += 1
            if count == step:
                signal.raise_signal(signal.SIGTERM)
            return read(self, index)

        monkeypatch.setattr(PairBatches, "window", window)

    return arm


@pytest.mark.parametrize(("row", "epochs"), [("transformer", 20), ("gru", 30)])
def test_fifty_pairs_are_learned_exactly(tmp_path: Path, train: Callable[..., Any], row: str, epochs: int) -> None:
    fast = (
        "encoder.dropout=0.0",
        "output.smoothing=0.0",
        f"training.epochs={epochs}",
        "training.save_every=1000",
        'training.optimiser={kind = "adam", learning_rate = 0.01}',
        'training.schedule={kind = "constant"}',
    )
    result = train(tmp_path / "run", row, *fast)
    assert result["translation"]["test"]["bleu"] == pytest.approx(100.0)
    written = (tmp_path / "run" / "translations" / "test.txt").read_text(encoding="utf-8").splitlines()
    references = [target for _, target in sentences()[:10]]
    assert written == references
    expected = sacrebleu.corpus_bleu(written, [references], tokenize="none")
    assert expected.score == pytest.approx(result["translation"]["test"]["bleu"])


@pytest.mark.parametrize(("vocabulary", "unit"), [((), ""), (("vocabulary.bpe.merges=5",), " per sub-word")])
def test_perplexity_per_sub_word_is_marked(
    tmp_path: Path, train: Callable[..., Any], display: Any, vocabulary: tuple[str, ...], unit: str
) -> None:
    train(tmp_path / "run", "transformer", "training.epochs=1", *vocabulary)
    (validated,) = (line for line in display.lines if "valid perplexity" in line)
    perplexity = rf"valid perplexity [\d.]+{unit}, 0 % unknown words"
    assert re.fullmatch(rf"transformer  epoch 1/1  {perplexity}  \(best\)", validated)
    assert ("test perplexity" in display.lines[-1], " per word" in display.lines[-1]) == (True, bool(unit))


@pytest.mark.parametrize("row", ["transformer", "gru", "separate"])
def test_run_stopped_in_mid_epoch_resumes_bit_for_bit(
    tmp_path: Path, train: Callable[..., Any], stop_in_step: Callable[[int], None], row: str
) -> None:
    averaged = ("evaluation.average=2",)
    whole = train(tmp_path / "whole", row, *averaged)
    stop_in_step(4)
    with pytest.raises(Stopped):
        train(tmp_path / "stopped", row, *averaged)
    stopped = train(tmp_path / "stopped", row, *averaged)
    assert stopped["test"] == whole["test"]
    assert stopped["translation"] == whole["translation"]
    checkpoints = (Checkpoints(tmp_path / name) for name in ("whole", "stopped"))
    best, resumed = (folder.load(folder.best_path()) for folder in checkpoints)  # type: ignore[arg-type]
    assert resumed.state_values == best.state_values
    assert best.state_values["mean_of"]
    assert all(torch.equal(best.weights[name], resumed.weights[name]) for name in best.weights)


@pytest.mark.parametrize(
    ("intervals", "number"), [((), 2), (("training.save_every=1000", "training.validate_every=1000"), 1)]
)
def test_averaging_fewer_checkpoints_than_requested_is_reported(
    tmp_path: Path, train: Callable[..., Any], display: Any, intervals: tuple[str, ...], number: int
) -> None:
    """If validations are counted in updates, epochs do not end with a validation and a checkpoint."""
    result = train(tmp_path / "run", "transformer", "evaluation.average=2", *intervals)
    assert len(result["averaged"]) == number
    reports = [line for line in display.lines if "evaluation.average" in line]
    assert ["only 1 checkpoint" in report for report in reports] == [True] * (number < 2)


@pytest.mark.gpu
@pytest.mark.parametrize("row", ["transformer", "gru"])
def test_captured_run_equals_eager_run(tmp_path: Path, train: Callable[..., Any], row: str) -> None:
    """Sentences of any length have few shapes, and replayed updates equal eager updates bit for bit."""
    weights = []
    for capture in ("true", "false"):
        change = f"training.capture={capture}", "training.determinism=exact", "training.epochs=6"
        train(tmp_path / capture, row, *change, device="cuda")
        weights.append(load_file(max((tmp_path / capture / "checkpoints").iterdir()) / "model.safetensors"))
    assert all(torch.equal(weights[0][name], weight) for name, weight in weights[1].items())


def test_opened_run_keeps_its_ties(tmp_path: Path, train: Callable[..., Any]) -> None:
    train(tmp_path / "joint", "transformer", "training.epochs=1")
    train(tmp_path / "separate", "separate", "training.epochs=1")
    joint, separate = (open_run(tmp_path / name) for name in ("joint", "separate"))
    assert isinstance(joint.model, Translator)
    assert isinstance(separate.model, Translator)
    assert joint.model.three_way
    assert joint.words.joint
    assert joint.model.source.tables()[0].weight is joint.model.output.tables()[0].weight
    assert not separate.model.three_way
    assert separate.model.tied
    assert [len(words) for words in separate.words.vocabularies] == [14, 14]
    assert separate.words.vocabularies[0].words != separate.words.vocabularies[1].words
    assert separate.dataset(None).fingerprint == separate.run.config["corpus"]


def test_run_with_joint_bpe_opens_with_the_vocabulary_of_each_side(tmp_path: Path, train: Callable[..., Any]) -> None:
    train(tmp_path / "run", "separate", "training.epochs=1", "vocabulary={sides = 'joint_bpe', bpe = {merges = 30}}")
    opened = open_run(tmp_path / "run")
    source, target = opened.words.vocabularies
    assert source.words != target.words
    assert (source, target) == opened.dataset(None).vocabulary_pair.vocabularies
    assert isinstance(opened.model, Translator)
    sizes = [opened.model.source.tables()[0].weight.shape[0], opened.model.output.tables()[0].weight.shape[0]]
    assert sizes == [len(source), len(target)]


@pytest.mark.parametrize(
    ("row", "override", "message"),
    [
        ("transformer", "corpus.pairs=default", "[source] is for translation, which also needs corpus.pairs"),
        ("transformer", "training.batching=sentences", 'which also needs training.batching = "pairs"'),
        ("transformer", "encoder={kind = 'gru', hidden_dim = 16}", "also needs an encoder such as encoder_decoder"),
        ("transformer", "source=default", "corpus.pairs is for translation, which also needs [source]"),
        ("transformer", "vocabulary.sides=separate", "tables.words is used by the source and by the target"),
        (
            "transformer",
            "vocabulary={sides = 'joint_bpe', bpe = {merges = 9}}",
            "tables.words is used by the source and by the target",
        ),
        ("transformer", "evaluation.average=9", "training.keep = 2; keep at least 9"),
        ("transformer", "evaluation.train=true", "translator scores pairs"),
    ],
)
def test_contradictory_settings_are_rejected(recipe: Path, row: str, override: str, message: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(message)):
        load_recipe(str(recipe), [override], row)


def test_search_settings_of_a_language_model_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"evaluation\.search: is only for translation"):
        load_recipe("demo", ["evaluation.search={beam = 3}"], "tied")
