"""Exported models: log-probabilities equal those of the run to the bit, and `generate` that of `reefknot generate`."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import reefknot.hf
from contract.combinations import LANGUAGE_MODEL_ENCODERS, TRANSLATOR_ENCODERS, WORDS, Case
from hf.models import evaluate_with_trainer, smoothed_loss
from reefknot.lab.evaluation.beam import greedy
from reefknot.lab.evaluation.generation import encode_prompt, generate
from reefknot.lab.interop.export import ExportRequest, export_run
from reefknot.lab.interop.huggingface import _build_tokenizer
from reefknot.lab.tasks import open_run
from reefknot.lab.text.vocabulary import Vocabulary, VocabularyPair
from reefknot.lab.text.vocabulary_settings import VocabularySettings
from untrained import make_run

transformers = pytest.importorskip("transformers", minversion="5")

ENDS = {
    "plain": ("lookup", "softmax", "plain"),
    "drill": ("lookup", "softmax", "drill"),
    "mixture": ("lookup", "mixture", "plain"),
    "adaptive": ("adaptive", "adaptive", None),
}
COMBINATIONS = list(product(LANGUAGE_MODEL_ENCODERS, ENDS, (True, False)))
# Every encoder with two ends, and every end tied and untied.
FEW = [
    (encoder, list(ENDS)[(index + shift) % 4], bool((index // 4 + shift) % 2))
    for index, encoder in enumerate(LANGUAGE_MODEL_ENCODERS)
    for shift in (0, 1)
]
PROMPT = ["the", "file", "is"]
WINDOW = 6
LENGTH = 16
"""Number of generated tokens, so many that the window of a transformer fills up twice."""


def settings_of(case: Case, **sections: Any) -> dict[str, Any]:
    settings = case.settings()
    return settings | {"training": settings["training"] | {"steps": WINDOW}} | sections


def export(run: Path, folder: Path) -> Any:
    """Export a run and load the model."""
    export_run(open_run(run), ExportRequest("hf", folder))
    auto_class = transformers.AutoModelForCausalLM
    if open_run(run).run.task == "translation":
        auto_class = transformers.AutoModelForSeq2SeqLM
    return auto_class.from_pretrained(folder)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "combination" in metafunc.fixturenames:
        combinations = COMBINATIONS if metafunc.config.getoption("--combinations") == "all" else FEW
        metafunc.parametrize("combination", combinations, ids=lambda parts: "-".join(map(str, parts)))


@torch.no_grad()
def run_log_probs(run: Path, ids_BT: Tensor) -> Tensor:
    model = open_run(run).model
    return model.output.log_probs(model(ids_BT).output.flatten(0, 1)).unflatten(0, ids_BT.shape)


def reefknot_generate(run: Path, words: list[str], length: int = LENGTH) -> list[int]:
    """Return what `reefknot generate --temperature 0` generates."""
    trained = open_run(run)
    prompt = encode_prompt(words, trained.vocabulary)
    banned = (trained.vocabulary.unk,) if trained.vocabulary.unk is not None else ()
    return list(generate(trained.model, prompt, length, temperature=0.0, banned=banned, window=WINDOW))


@torch.no_grad()
def test_exported_model_equals_the_run(combination: tuple[str, str, bool], tmp_path: Path) -> None:
    encoder, end, tied = combination
    input_kind, output, classifier = ENDS[end]
    run = make_run(tmp_path / "run", settings_of(Case(input_kind, encoder, output, classifier, tied)), WORDS)
    model = export(run, tmp_path / "hf")
    assert model.config.tie_word_embeddings == tied

    ids_BT = torch.randint(len(WORDS), (3, 7))
    assert torch.equal(model(ids_BT).logits, run_log_probs(run, ids_BT))
    prompt = torch.tensor([encode_prompt(PROMPT, WORDS)])
    cached = model.generate(prompt, max_new_tokens=LENGTH)
    assert cached[0, prompt.shape[1] :].tolist() == reefknot_generate(run, PROMPT)
    assert torch.equal(model.generate(prompt, max_new_tokens=LENGTH, use_cache=False), cached)


@pytest.fixture(scope="module", params=["lstm", "transformer"])
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run and its exported folder."""
    folder = tmp_path_factory.mktemp("exported")
    run = make_run(folder / "run", settings_of(Case("lookup", request.param, "softmax", "plain", True)), WORDS)
    export_run(open_run(run), ExportRequest("hf", folder / "hf"))
    return run, folder / "hf"


def test_cached_steps_give_the_log_probabilities_of_a_window(exported: tuple[Path, Path]) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(exported[1])
    ids_BT = torch.randint(len(WORDS), (2, 6))
    calls = []
    encoder_forward = model.model.encoder.forward
    model.model.encoder.forward = lambda inputs, state: calls.append(inputs.shape[1]) or encoder_forward(inputs, state)
    steps, cache = [], None
    with torch.no_grad():
        for column in ids_BT.split(1, dim=1):
            outputs = model(column, past_key_values=cache, use_cache=True)
            steps.append(outputs.logits)
            cache = outputs.past_key_values
        assert calls == [1] * 6
        torch.testing.assert_close(torch.cat(steps, 1), model(ids_BT).logits)


def test_padded_texts_are_generated_like_single_texts(exported: tuple[Path, Path]) -> None:
    run, folder = exported
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    texts = ["the file is", "x", "in a string of x is the", "x"]
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    generated = model.generate(**batch, max_new_tokens=LENGTH)
    for text, ids in zip(texts, generated, strict=True):
        assert ids[-LENGTH:].tolist() == reefknot_generate(run, text.split())
    assert torch.equal(model.generate(**batch, max_new_tokens=LENGTH, use_cache=False), generated)
    # Hidden states of tokens do not depend on the padding.
    with torch.no_grad():
        padded = model(**batch).logits[0, -4:]
        torch.testing.assert_close(padded, model(tokenizer(texts[0], return_tensors="pt").input_ids).logits[0])


def test_beam_search_with_a_cache_equals_beam_search_without(exported: tuple[Path, Path]) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(exported[1])
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported[1])
    batch = tokenizer(["the file is", "x"], padding=True, return_tensors="pt")
    options = {**batch, "num_beams": 3, "max_new_tokens": 10}
    assert torch.equal(model.generate(**options), model.generate(**options, use_cache=False))


def test_generation_continues_from_a_returned_cache(exported: tuple[Path, Path]) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(exported[1])
    prompt = torch.tensor([encode_prompt(PROMPT, WORDS)])
    first = model.generate(prompt, max_new_tokens=3, return_dict_in_generate=True)
    second = model.generate(first.sequences, max_new_tokens=LENGTH - 3, past_key_values=first.past_key_values)
    assert torch.equal(second, model.generate(prompt, max_new_tokens=LENGTH))


def test_text_generation_pipeline(exported: tuple[Path, Path]) -> None:
    run, folder = exported
    pipe = transformers.pipeline("text-generation", model=str(folder))
    ids = reefknot_generate(run, PROMPT)
    words = [WORDS.words[index] for index in ids if index != WORDS.eos]
    (single,) = pipe(" ".join(PROMPT), max_new_tokens=LENGTH)
    assert single["generated_text"] == " ".join([*PROMPT, *words])
    (with_lines,) = pipe(" ".join(PROMPT), max_new_tokens=LENGTH, skip_special_tokens=False)
    text = " ".join(PROMPT) + " " + WORDS.decode_text(ids)
    assert with_lines["generated_text"] == text.replace(" \n", "\n")


def test_loss_is_that_of_the_labels_and_trains(exported: tuple[Path, Path]) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(exported[1])
    ids_BT = torch.randint(len(WORDS), (3, 7))
    labels_BT = ids_BT.clone()
    labels_BT[0, 2:5] = -100
    logits_BTV = model(ids_BT).logits
    expected = torch.nn.functional.cross_entropy(logits_BTV[:, :-1].flatten(0, 1), labels_BT[:, 1:].flatten())
    torch.testing.assert_close(model(ids_BT, labels=labels_BT).loss, expected)
    loss = model.train()(ids_BT, labels=labels_BT).loss
    torch.testing.assert_close(loss, expected)
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    halves = [model(ids_BT[rows], labels=labels_BT[rows], num_items_in_batch=15).loss for rows in ([0], [1, 2])]
    torch.testing.assert_close(sum(halves), loss)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_trainer_evaluates_the_loss_of_the_next_tokens(
    exported: tuple[Path, Path], smoothing: float, tmp_path: Path
) -> None:
    pytest.importorskip("accelerate")
    model = transformers.AutoModelForCausalLM.from_pretrained(exported[1])
    ids_BT = torch.randint(len(WORDS), (3, 7))
    loss = evaluate_with_trainer(model, tmp_path, ids_BT, smoothing)
    assert loss == pytest.approx(smoothed_loss(model, ids_BT, smoothing))


def test_weights_are_stored_once_and_saved_again(exported: tuple[Path, Path], tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(exported[1])
    parameters = sum(parameter.numel() for parameter in model.parameters())
    header = 8 + int.from_bytes((exported[1] / "model.safetensors").read_bytes()[:8], "little")
    assert (exported[1] / "model.safetensors").stat().st_size == header + 4 * parameters
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    ids_BT = torch.randint(len(WORDS), (2, 5))
    assert torch.equal(again(ids_BT).logits, model(ids_BT).logits)


@torch.no_grad()
def test_spelled_words_are_read_and_scored_as_unknown(tmp_path: Path) -> None:
    case = Case("char_cnn", "lstm", "softmax", "plain", False)
    words = Vocabulary(WORDS.words, WORDS.counts, spelled_words=("files", "strings"))
    settings = settings_of(case, vocabulary={"keep_spellings": True})
    run = make_run(tmp_path / "run", settings, words)
    model = export(run, tmp_path / "hf")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    ids = tokenizer("the files is", return_tensors="pt").input_ids
    assert ids.tolist() == [encode_prompt(["the", "files", "is"], words)]
    assert torch.equal(model(ids).logits, run_log_probs(run, ids))
    targets = ids.where(ids < len(words), words.unk)
    expected = -model(ids).logits[0, :-1].gather(1, targets[0, 1:, None]).mean()
    torch.testing.assert_close(model(ids, labels=ids).loss, expected)


def test_config_without_settings_is_explained() -> None:
    with pytest.raises(reefknot.hf.models.ArgumentError, match=r"has no settings; export a run with `reefknot export"):
        reefknot.hf.ReefknotForCausalLM(reefknot.hf.ReefknotConfig())


def test_exported_model_cannot_be_resized(exported: tuple[Path, Path]) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(exported[1])
    assert model.resize_token_embeddings(len(WORDS)) is model.get_input_embeddings()
    for options in ({"new_num_tokens": 500}, {"pad_to_multiple_of": 64}):
        with pytest.raises(reefknot.ArgumentError, match="cannot be resized"):
            model.resize_token_embeddings(**options)


def test_tokens_are_scored(exported: tuple[Path, Path]) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(exported[1])
    ids = torch.randint(len(WORDS), (7,))
    losses = reefknot.hf.score_tokens(model, ids)
    torch.testing.assert_close(losses.mean(), model(ids[None], labels=ids[None]).loss)


# -- translators ---------------------------------------------------------------------------------------------------

SOURCE_WORDS = Vocabulary(("<eos>", "das", "ist", "<unk>", "ein", "Haus"), (6, 5, 4, 3, 2, 1))


@pytest.fixture(scope="module", params=list(product(TRANSLATOR_ENCODERS, (True, False))), ids=str)
def translator(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A translator with a joint vocabulary, or with two, and its exported folder."""
    encoder, joint = request.param
    settings = settings_of(Case("lookup", encoder, "softmax", "plain", tied=True))
    words: Any = VocabularyPair(WORDS, WORDS)
    if not joint:
        words = VocabularyPair(SOURCE_WORDS, WORDS)
        settings["vocabulary"] = {"sides": "separate"}
        settings["tables"] = settings["tables"] | {"source": settings["tables"]["words"]}
        settings["source"] = settings["source"] | {"table": "source"}
    folder = tmp_path_factory.mktemp("translator")
    run = make_run(folder / "run", settings, words)
    export_run(open_run(run), ExportRequest("hf", folder / "hf"))
    return run, folder / "hf"


@torch.no_grad()
def test_exported_translator_equals_the_run(translator: tuple[Path, Path]) -> None:
    run, folder = translator
    trained = open_run(run)
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    source_vocabulary, _ = trained.words.vocabularies
    lines = [list(source_vocabulary.words[:4]), [source_vocabulary.words[4]]]
    batch = tokenizer([" ".join(line) for line in lines], padding=True, return_tensors="pt")
    source_BS = batch.input_ids.where(batch.attention_mask.bool(), -100)
    assert source_BS[0].tolist() == [*source_vocabulary.encode(lines[0]), source_vocabulary.eos]

    # Log-probabilities, to the bit.
    targets_BT = torch.randint(len(WORDS), (2, 5))
    inputs_BT = torch.cat([torch.full((2, 1), WORDS.eos), targets_BT[:, :-1]], 1)
    encoded = trained.model(inputs_BT, trained.model.encode_source(source_BS))
    outputs = model(**batch, labels=targets_BT)
    assert torch.equal(outputs.logits, trained.model.output.log_probs(encoded.output))
    expected = torch.nn.functional.cross_entropy(outputs.logits.flatten(0, 1), targets_BT.flatten())
    torch.testing.assert_close(outputs.loss, expected)

    # Greedy translations, with and without cache.
    generated = model.generate(**batch, num_beams=1, max_new_tokens=9)
    for ids, hypothesis in zip(
        generated, greedy(trained.model, source_BS, WORDS.eos, banned=(WORDS.unk,)), strict=True
    ):
        translation = [*hypothesis.ids, WORDS.eos][:9]
        assert ids[1 : 1 + len(translation)].tolist() == translation
    assert torch.equal(model.generate(**batch, num_beams=1, max_new_tokens=9, use_cache=False), generated)
    beams = model.generate(**batch, num_beams=3, max_new_tokens=9)
    assert torch.equal(model.generate(**batch, num_beams=3, max_new_tokens=9, use_cache=False), beams)


def test_sources_are_padded_on_the_right(translator: tuple[Path, Path]) -> None:
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(translator[1])
    with pytest.raises(ValueError, match="padded on the right"):
        model.generate(torch.zeros((1, 3), dtype=torch.long), attention_mask=torch.tensor([[0, 1, 1]]))


def test_translator_has_a_tokenizer_per_vocabulary(translator: tuple[Path, Path]) -> None:
    run, folder = translator
    is_joint = open_run(run).words.joint
    assert (folder / "target").exists() is not is_joint
    if not is_joint:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, subfolder="target")
        assert tokenizer("the file").input_ids == [*WORDS.encode(["the", "file"]), WORDS.eos]


# -- tokenizers ----------------------------------------------------------------------------------------------------

TEXTS = [
    "the file is\na naïve  string\t", "x", "", "\n\n", "löw löws <eos> wow", "über <unk> lower, newest <b>",
    "`<eos>`: wow<unk>low low<eos>\n<eos> \x0b\x0c<unk>", "\ue000 wow\x0clow",
    "<pad> low<s> <pad>low wow</w>wow",
]  # fmt: skip
COUNTS = {"low": 5, "lower": 3, "newest": 6, "wow": 2, "`<eos>`:": 1, "wow<unk>low": 1, "<pad>/": 1, "<eos>": 4}


def encode(words: Vocabulary, text: str) -> list[int]:
    """Return the ids that a run gives a text."""
    ids = [words.eos]
    for index, line in enumerate(text.split("\n")):
        ids += [words.eos] * (index > 0) + words.encode(line.split())
    return ids  # type: ignore[return-value]


@pytest.mark.parametrize("unknown", [None, "word", "character"])
def test_tokenizer_gives_the_ids_of_the_vocabulary(unknown: str | None, tmp_path: Path) -> None:
    settings = VocabularySettings()
    if unknown is not None:
        settings = VocabularySettings(bpe={"merges": 12, "unknown": unknown})  # type: ignore[arg-type]
    words = Vocabulary.from_counts(COUNTS, settings)
    _build_tokenizer(words, is_translator=False).save_pretrained(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        ids = encode(words, text)
        assert tokenizer(text).input_ids == ids, text
        assert tokenizer.decode(ids[1:]).removeprefix(" ") == words.decode_text(ids[1:]), text
    assert (tokenizer.eos_token_id, tokenizer.unk_token_id) == (words.eos, words.unk)
    assert "<eos>" not in tokenizer.decode(encode(words, "low\nlow"), skip_special_tokens=True)


def test_unknown_characters_of_a_source_are_split_off() -> None:
    settings = VocabularySettings(bpe={"merges": 4})  # type: ignore[arg-type]
    words = Vocabulary.from_counts({"low": 5, "lower": 3, "<eos>": 4}, settings)
    tokenizer = _build_tokenizer(words, is_translator=True)
    for text in ["löw lower", "XYlow <unk> low", "low", "X<eos>Xlow low<unk>"]:
        assert tokenizer(text).input_ids == [*words.encode(words.split_at_unknown(text.split())), words.eos], text
