"""Choose a recipe for any text: how it is split, its sub-words or words, the ends, the size of the model, the training.

    text = examine_text("docs/")                      # reads the text, or the beginning of a large text
    recipe = choose_recipe(text, tokens="bpe", device="cpu")
    print("\\n".join(recipe.reasons))                  # what was chosen, and why
    recipe.toml                                       # the same as a recipe to edit

The choices depend only on the text, the device and the number of cores, so that the same command always gives the same
recipe, and can resume its run. The constants are rules of thumb: the sizes of published models of texts of this size,
reduced until training takes minutes rather than days.
"""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from reefknot.errors import DataError
from reefknot.lab.text.corpus import CorpusSettings
from reefknot.lab.text.sources import DEFAULT_FIELD, TextSource, open_text
from reefknot.lab.text.splitting import SplitRule, TextSettings, has_named_splits
from reefknot.lab.text.workers import num_cores
from reefknot.storage.progress import Notify, silent

TokenKind = Literal["bpe", "words"]

_SAMPLE_CHARACTERS = 20_000_000  # a larger text is estimated from its beginning
_MIN_CHARACTERS = 2_000
_MIN_DOCUMENTS = 200  # with fewer documents, the held-out ones would not represent the text
_MIN_LINES = 200
_CHARACTERS_PER_WORD = 20  # more characters between spaces mean a script without spaces
_MERGE_WORDS = 400_000
"""Merges are learned from this many words. Rarer words hardly change the merges, and large texts have millions."""
_MERGES = (250, 500, 1_000, 2_000, 4_000, 8_000, 16_000, 32_000)
_MAX_CPU_MERGES = 8_000
_DIMENSIONS = (64, 128, 256, 384, 512, 768, 1024)
_MANY_WORDS = 30_000  # an adaptive softmax is worth it beyond this vocabulary
_CORE_SPEED = 1.5e10  # floating-point operations per second that training reaches on one core
_GPU_SPEED = 1e13
_MAX_SECONDS = {"cpu": 240, "cuda": 3600}


@dataclass(frozen=True)
class TextSummary:
    """What is known about a text before it is prepared. Numbers are estimates if only its beginning was read."""

    path: str
    """The absolute path of the file or folder, or the pattern."""
    source: TextSource
    documents: int
    lines: int
    words: int
    characters: int
    repeated_types: int
    """Number of distinct words that occur at least twice in the part that was read."""
    is_estimate: bool

    def describe(self) -> str:
        """Return the size of the text in one line."""
        files = f"{len(self.source.files):,} files" if len(self.source.files) > 1 else "one file"
        documents = f", {self.documents:,} documents" if self.source.has_documents else ""
        estimate = " (estimated from its beginning)" if self.is_estimate else ""
        return f"{self.source.name}: {files}{documents}, {self.lines:,} lines, {self.words:,} words{estimate}"

    @property
    def has_spaces(self) -> bool:
        """Whether spaces separate the words of the text."""
        return self.characters <= _CHARACTERS_PER_WORD * self.words

    @property
    def subwords(self) -> int:
        """Approximate number of sub-words."""
        if not self.has_spaces:
            return int(self.characters / 1.5)
        return int(self.words * 1.5)


def examine_text(
    path: str, *, field: str = DEFAULT_FIELD, encoding: str | None = None, notify: Notify = silent
) -> TextSummary:
    """Read a text, or the beginning of a large text, and return its size.

    Args:
        path: A file, a folder or a pattern.
        field: Field of JSON lines, or column of Parquet, that holds the text.
        encoding: Encoding of the files.
        notify: Called with a message about files that are not read.
    """
    source = open_text(path, encoding=encoding, field=field)
    if source.skipped:
        notify(f"{source.name}: {len(source.skipped):,} files are skipped, such as {source.skipped[0]}")
    num_bytes = documents = lines = characters = 0
    word_counts: Counter[str] = Counter()

    def add_bytes(count: int) -> None:
        nonlocal num_bytes
        num_bytes += count

    for document in source.read_documents(add_bytes):
        documents += 1
        for line in document.lines:
            lines += 1
            characters += len(line) + 1
            word_counts.update(line.split())
            if characters > _SAMPLE_CHARACTERS:
                break
        if characters > _SAMPLE_CHARACTERS:
            break
    is_estimate = characters > _SAMPLE_CHARACTERS
    scale = max(source.size / max(num_bytes, 1), 1.0) if is_estimate else 1.0
    if characters < _MIN_CHARACTERS:
        raise DataError(
            f"{source.name}: the text has {word_counts.total():,} words ({characters:,} characters), which is too "
            f"little to train and test a model; use at least {_MIN_CHARACTERS:,} characters"
        )
    return TextSummary(
        path=str(Path(path).expanduser().absolute()),
        source=source,
        documents=round(documents * scale),
        lines=round(lines * scale),
        words=round(word_counts.total() * scale),
        characters=round(characters * scale),
        repeated_types=sum(1 for count in word_counts.values() if count > 1),
        is_estimate=is_estimate,
    )


@dataclass(frozen=True)
class TextRecipe:
    """A recipe for one text."""

    toml: str
    reasons: list[str]
    """One line per choice: what was chosen and why."""


@dataclass(frozen=True)
class _Choice:
    """Settings in TOML, and the reason for them."""

    reason: str
    toml: str


def choose_recipe(
    text: TextSummary,
    *,
    tokens: TokenKind = "bpe",
    device: str = "cpu",
    field: str = DEFAULT_FIELD,
    encoding: str | None = None,
) -> TextRecipe:
    """Choose the recipe of a text.

    Args:
        text: The text.
        tokens: Split words into sub-words (bpe), or use the words of a text that is already tokenised (words).
        device: "cpu" or "cuda".
        field: Field of JSON lines, or column of Parquet, that holds the text.
        encoding: Encoding of the files.
    """
    num_tokens = text.subwords if tokens == "bpe" else text.words + text.lines
    split_settings, split_reason = _choose_split(text, field, encoding)
    split_toml = [f"{key} = {_quote(value)}" for key, value in split_settings.items()]
    vocabulary, num_types = _choose_vocabulary(text, tokens, device)
    model = _choose_model(num_tokens, num_types, device)
    choices = [
        _Choice(split_reason, "\n".join(["[base.corpus.text]", *split_toml])),
        vocabulary,
        _choose_ends(num_types, model.dim, tokens),
        model.describe(),
        _choose_training(num_tokens, model),
    ]
    header = [
        f"# A language model of {text.source.name}, written by `reefknot new --text`.",
        f"#   {text.describe()}",
        "#   reefknot validate THIS_FILE",
        "#   reefknot train THIS_FILE",
        f"title = {_quote(f'Language model of {text.source.name}')}",
        "",
        "[base.corpus]",
        f"name = {_quote(text.path)}",
    ]
    body = [f"{_comment(choice.reason)}\n{choice.toml}" for choice in choices]
    footer = ["[[rows]]", 'name = "model"', ""]
    return TextRecipe("\n".join([*header, "", "\n\n".join(body), "", *footer]), [choice.reason for choice in choices])


def choose_corpus(text: TextSummary, *, field: str = DEFAULT_FIELD, encoding: str | None = None) -> CorpusSettings:
    """Return the section `corpus` of the recipe of a text: its path, and how it is read and split."""
    settings, _ = _choose_split(text, field, encoding)
    return CorpusSettings.model_validate({"name": text.path, "text": settings})


def _quote(value: object) -> str:
    """Return a string or a number in TOML."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _comment(reason: str) -> str:
    """Return a reason as comment lines of at most 100 characters."""
    return "\n".join(textwrap.wrap(reason, 98, initial_indent="# ", subsequent_indent="# "))


# -- the choices ---------------------------------------------------------------------------------------------------


def _choose_split(text: TextSummary, field: str, encoding: str | None) -> tuple[dict[str, object], str]:
    """Return the settings that say how the text is read and split, and the reason for the split."""
    lines = text.lines
    settings: dict[str, object] = {}
    if field != DEFAULT_FIELD:
        settings["field"] = field
    if encoding is not None:
        settings["encoding"] = encoding
    if text.lines < _MIN_LINES:  # such as a text in one line
        settings["longest_line"] = min(max(text.characters // (2 * _MIN_LINES), 100), 20_000)
        lines = 2 * _MIN_LINES

    share = next(share for limit, share in ((5e5, 0.1), (5e6, 0.05), (5e7, 0.01), (1e99, 0.005)) if text.words < limit)
    rule: SplitRule = "lines"
    if has_named_splits(text.source):
        rule = "names"
        reason = "The names of the files say which are training, validation and test text."
    elif text.source.has_documents and text.documents >= _MIN_DOCUMENTS:
        rule = "documents"
        reason = "Whole documents are held out, chosen by hash, so that none is both trained on and tested."
    else:
        why = "few documents" if text.source.has_documents else "no documents"
        reason = f"The text has {why}, so blocks of consecutive lines are held out, spread evenly."
    if rule != "names":
        reason = f"Split: {share:.1%} validation and {share:.1%} test text. {reason}"
    settings |= {"split": rule, "valid": share, "test": share}
    if rule != "documents":
        settings["block"] = min(max(lines // 400, 1), 50)
    TextSettings.model_validate(settings)
    return settings, reason


def _choose_vocabulary(text: TextSummary, tokens: TokenKind, device: str) -> tuple[_Choice, int]:
    """Return the settings of the vocabulary, and about how many types it will have."""
    if tokens == "words":
        reason = (
            f"Tokens: the words of the text that occur at least twice, about {text.repeated_types:,}. Other words "
            "become <unk>; the share of <unk> is printed with the scores."
        )
        return _Choice(reason, "[base.vocabulary]\nmin_count = 2"), max(text.repeated_types, 2)

    merges = max((size for size in _MERGES if size * 75 <= text.subwords), default=_MERGES[0])
    reason = f"Tokens: sub-words from {merges:,} merges, about 75 occurrences per sub-word or more."
    if device == "cpu" and merges > _MAX_CPU_MERGES:
        merges = _MAX_CPU_MERGES
        reason = f"Tokens: sub-words from {merges:,} merges; the classifier of a larger vocabulary is slow on a CPU."
    toml = f"[base.vocabulary.bpe]\nmerges = {merges}\nwords = {_MERGE_WORDS:_}"
    if not text.has_spaces:
        toml += '\nunknown = "character"'
        reason += " The words are not separated by spaces, so single unknown characters become <unk>, not whole lines."
    return _Choice(reason, toml), merges + 200


def _choose_ends(num_types: int, dim: int, tokens: TokenKind) -> _Choice:
    if tokens == "bpe" or num_types < _MANY_WORDS:
        reason = (
            "Ends: a softmax tied to the input, which halves the parameters of the ends and lowers the perplexity of "
            "models of this size (Press & Wolf 2017)."
        )
        toml = f"""[base.tables.words]
kind = "word"
dim = {dim}

[base.input]
kind = "lookup"
table = "words"

[base.output]
kind = "softmax"
classifier = {{ kind = "plain", table = "words" }}"""
        return _Choice(reason, toml)
    reason = (
        f"Ends: adaptive input and softmax, tied. Of about {num_types:,} words most are rare, and rare words get "
        "smaller vectors, which makes training faster (Baevski & Auli 2019)."
    )
    toml = f"""[base.tables.words]
kind = "banded"
dim = {dim}
sizes = [4000, 12000]
factor = 4

[base.projections.bands]
kind = "bands"
table = "words"
dim = {dim}

[base.input]
kind = "adaptive"
table = "words"
projections = "bands"

[base.output]
kind = "adaptive"
projections = "bands"
classifier = {{ kind = "plain", table = "words", bias = false }}"""
    return _Choice(reason, toml)


@dataclass(frozen=True)
class _Model:
    """An LSTM and the length of its training."""

    dim: int
    layers: int
    dropout: float
    epochs: int
    seconds: float
    """Estimated time of training."""
    machine: str

    def describe(self) -> _Choice:
        time = f"{_format_minutes(self.seconds)} ({_format_epochs(self.epochs)} on {self.machine}, a rough estimate)"
        reason = (
            f"Model: {self.layers} x {self.dim} LSTM. It is the largest that suits the size of the text and trains in "
            f"about {time}."
        )
        toml = f"""[base.encoder]
kind = "lstm"
hidden_dim = {self.dim}
layers = {self.layers}
dropout = {self.dropout}"""
        return _Choice(reason, toml)


def _choose_model(num_tokens: int, num_types: int, device: str) -> _Model:
    """Return the largest model with at most five parameters per token whose training is short enough."""
    cores = num_cores()
    machine = "a GPU" if device == "cuda" else f"{cores} {'core' if cores == 1 else 'cores'}"
    speed = _GPU_SPEED if device == "cuda" else _CORE_SPEED * min(cores, 8)
    epochs = next(count for limit, count in ((5e5, 10), (5e6, 5), (5e7, 2), (1e99, 1)) if num_tokens < limit)
    dropout = next(rate for limit, rate in ((1e6, 0.3), (1e7, 0.2), (1e99, 0.1)) if num_tokens < limit)
    models: list[_Model] = []
    for dim in _DIMENSIONS:
        layers = 1 if dim < 256 else 2
        lstm_parameters = 8 * dim * dim * layers
        parameters = lstm_parameters + num_types * dim
        seconds = 6 * parameters * num_tokens * epochs / speed
        model = _Model(dim, layers, dropout, epochs, seconds, machine)
        if not models or (parameters <= 5 * num_tokens and seconds <= _MAX_SECONDS[device]):
            models.append(model)
    return models[-1]


def _format_epochs(count: int) -> str:
    return "one epoch" if count == 1 else f"{count} epochs"


def _format_minutes(seconds: float) -> str:
    if seconds < 10:
        return "ten seconds"
    if seconds < 90:
        return "a minute" if seconds > 30 else "half a minute"
    if seconds < 5400:
        return f"{seconds / 60:.0f} minutes"
    return f"{seconds / 3600:.0f} hours"


def _choose_training(num_tokens: int, model: _Model) -> _Choice:
    batch, steps = next(
        sizes for limit, sizes in ((2e4, (4, 20)), (2e6, (16, 35)), (1e99, (32, 64))) if num_tokens < limit
    )
    hold = max(model.epochs // 2, 1)
    reason = (
        f"Training: Adam, {_format_epochs(model.epochs)}; the learning rate is halved after every epoch from epoch "
        f"{hold + 1}."
    )
    if model.epochs > 1 and model.seconds > 60:
        one_epoch = _format_minutes(model.seconds / model.epochs)
        reason += f" For a quicker look, train for one epoch, which takes about {one_epoch}: training.epochs=1."
    toml = f"""[base.training]
epochs = {model.epochs}
batch = {batch}
steps = {steps}
clip = 1.0
optimiser = {{ kind = "adam", learning_rate = 0.003 }}
schedule = {{ kind = "decay", hold = {hold}, factor = 0.5 }}"""
    if num_tokens > 5e6:
        toml += "\nvalidate_every = 2000"
    return _Choice(reason, toml)
