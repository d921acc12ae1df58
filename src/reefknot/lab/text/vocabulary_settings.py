"""The `vocabulary` section of a recipe: which words are in the vocabulary, and how other words are treated.

`VocabularySettings` are the settings, and `select_tokens` applies them to the word counts of a training text:

    select_tokens({"the": 5, "cat": 1, "<eos>": 3}, VocabularySettings(min_count=2))
    # {"the": 5, "<eos>": 3, "<unk>": 1}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from reefknot.lab.config.settings import Count, Settings
from reefknot.nn.constants import END_OF_LINE, PADDING, START, UNKNOWN

UnknownPolicy = Literal["replace", "refuse"]
"""What to do with a word outside the vocabulary: replace it by `<unk>`, or raise an error."""

_FAIRSEQ_MULTIPLE = 8  # the size of fairseq's dictionary is a multiple of this number


class BPESettings(Settings):
    """Settings of byte-pair encoding, which splits words into sub-words learned from the training text."""

    merges: Annotated[
        Count,
        Field(
            description="Number of merges to learn. Each merge joins two sub-words. A small text may give fewer merges."
        ),
    ] = 32_000
    words: Annotated[
        Count | None,
        Field(
            description="Learn the merges from this many of the most frequent words, because time and memory grow with "
            "the number of words. By default from all words."
        ),
    ] = None
    unknown: Annotated[
        Literal["word", "character"],
        Field(
            description="What becomes <unk> if a word has characters that are not in the training text: the whole "
            "word, or only these characters, which suits scripts without spaces."
        ),
    ] = "word"

    @model_serializer(mode="wrap")
    def _leave_out_defaults(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out the defaults of settings that older runs and cache entries do not have."""
        contents: dict[str, Any] = serialize(self)
        newer_defaults = {"unknown": "word", "words": None}
        return {
            key: value for key, value in contents.items() if key not in newer_defaults or value != newer_defaults[key]
        }


class VocabularySettings(Settings):
    """Settings that define which words are in the vocabulary, and how other words are treated."""

    min_count: Annotated[
        Count,
        Field(
            description="Minimum number of occurrences in the training text for a word to be in the vocabulary. With "
            "bpe, rarer words become <unk> before merges are learned and words are split."
        ),
    ] = 1
    max_size: Annotated[
        int | None,
        Field(
            ge=3,
            le=10**9,
            description="Maximum number of types in the vocabulary, including <unk> and <eos>. With bpe, of words that "
            "are split.",
        ),
    ] = None
    unknown: Annotated[
        UnknownPolicy,
        Field(
            description="What to do with words outside the vocabulary: replace them by <unk> (replace), or reject the "
            "text (refuse)."
        ),
    ] = "replace"
    end_of_line: Annotated[bool, Field(description="End each line with <eos>.")] = True
    bpe: Annotated[
        BPESettings | None,
        Field(description="Byte-pair encoding: split words into sub-words, which are then the tokens."),
    ] = None
    dictionary: Annotated[
        Literal["own", "fairseq"],
        Field(
            description="With fairseq, the vocabulary has the size of fairseq's dictionary, including <s>, <pad> and "
            "fillers up to a multiple of 8."
        ),
    ] = "own"
    keep_spellings: Annotated[
        bool,
        Field(
            description="Let a char_cnn input read the spelling of words outside the vocabulary. As targets, these "
            "words are <unk>."
        ),
    ] = False
    sides: Annotated[
        Literal["joint", "joint_bpe", "separate"],
        Field(
            description="Vocabularies of parallel text. joint: one vocabulary for both sides; separate: one "
            "vocabulary per side; joint_bpe: one vocabulary per side, with merges learned on both sides."
        ),
    ] = "joint"
    text: Annotated[
        Literal["train", "all"],
        Field(
            description="The text whose words are counted for the vocabulary: the training text (train), or the whole "
            "train, valid and test text, even if corpus.part or corpus.tokens cuts the training text (all)."
        ),
    ] = "train"

    @model_validator(mode="after")
    def _check_together(self) -> VocabularySettings:
        if self.limits_split_words and (self.unknown == "refuse" or self.bpe.unknown == "character"):  # type: ignore[union-attr]
            raise ValueError(
                "with bpe, min_count and max_size replace whole words by <unk>, so unknown must be replace and "
                "bpe.unknown must be word"
            )
        if self.limits_split_words and self.sides == "joint_bpe":
            raise ValueError('sides = "joint_bpe" splits all words into sub-words; remove min_count and max_size')
        if self.bpe and self.text == "all":
            raise ValueError('bpe learns its merges from the training text; remove text = "all"')
        if self.keep_spellings and (self.bpe or self.unknown == "refuse"):
            raise ValueError(
                'keep_spellings is for words outside the vocabulary, which bpe and unknown = "refuse" do not have;'
                " use one or the other"
            )
        if self.sides == "joint_bpe" and not self.bpe:
            raise ValueError('sides = "joint_bpe" needs bpe, whose merges are learned on both sides; set bpe.merges')
        return self

    @property
    def limits_split_words(self) -> bool:
        """Whether some words are `<unk>` and all others are split into sub-words."""
        return self.bpe is not None and (self.min_count > 1 or self.max_size is not None)

    @property
    def identity(self) -> dict[str, Any]:
        """The settings that identify an encoded text. Newer settings are included only if they are not the default."""
        always_included = ("min_count", "max_size", "unknown", "end_of_line")
        defaults = VocabularySettings().model_dump()
        settings = self.model_dump()
        return {key: value for key, value in settings.items() if key in always_included or value != defaults[key]}

    def describe(self) -> str:
        """Return a human-readable description of the tokens."""
        text = "training text" if self.text == "train" else "whole text"
        phrases = [f"the words of the {text}"]
        if self.bpe is not None:
            subwords = f"sub-words learned from it by byte-pair encoding ({self.bpe.merges:,} merges)"
            phrases = [f"the characters of the training text, and {subwords}"]
        if self.limits_split_words:
            phrases.append("without words that are not")
        if self.min_count > 1:
            phrases.append(f"seen at least {self.min_count:,} times")
        if self.max_size:
            phrases.append(f"at most {self.max_size:,} types")
        return ", ".join(phrases)


def select_tokens(
    counts: Mapping[str, int], settings: VocabularySettings, all_counts: Mapping[str, int] | None = None
) -> dict[str, int]:
    """Return the tokens of the vocabulary and their counts, in the order of their ids.

    The tokens are `<eos>`, `<unk>` and the most frequent tokens of the text, sorted by frequency and then in
    lexicographic order. The counts of tokens that are not selected are added to the count of `<unk>`.

    Args:
        counts: Number of occurrences of each token (word, sub-word or `<eos>`) in the training text.
        settings: The settings of the vocabulary. If it has sub-words, `select_words` has applied the limits to words.
        all_counts: The counts in the text from which the tokens are selected, if it is not the training text.
    """
    if settings.bpe is not None:
        # All sub-words are needed, because one that does not occur in training may occur later.
        settings = settings.model_copy(update={"min_count": 0, "max_size": None})
    selected = _select_most_frequent(counts if all_counts is None else all_counts, settings)
    if all_counts is not None:
        selected = {token: counts.get(token, 0) for token in selected}

    # <unk> stands for all other tokens.
    if UNKNOWN in selected:
        selected[UNKNOWN] += sum(count for token, count in counts.items() if token not in selected)

    if settings.dictionary == "fairseq":
        _add_fairseq_symbols(selected)
    return dict(sorted(selected.items(), key=_frequency_order))


def select_words(counts: Mapping[str, int], settings: VocabularySettings) -> dict[str, int]:
    """Return the words that may be split into sub-words, with their counts. `<unk>` stands for all other words."""
    words = _select_most_frequent(counts, settings)
    words[UNKNOWN] += sum(count for word, count in counts.items() if word not in words)
    return words


def _select_most_frequent(counts: Mapping[str, int], settings: VocabularySettings) -> dict[str, int]:
    """Return `<eos>`, `<unk>` and the most frequent tokens of a text, with their counts."""
    selected: dict[str, int] = {}
    if settings.end_of_line:
        selected[END_OF_LINE] = counts.get(END_OF_LINE, 0)
    if settings.unknown == "replace":
        selected[UNKNOWN] = counts.get(UNKNOWN, 0)

    # Add the most frequent tokens.
    candidates = []
    for token, count in counts.items():
        if token not in selected and count >= settings.min_count:
            candidates.append((token, count))
    candidates.sort(key=_frequency_order)
    if settings.max_size is not None:
        capacity = settings.max_size - len(selected)
        candidates = candidates[:capacity]
    selected.update(candidates)
    return selected


def _frequency_order(token_and_count: tuple[str, int]) -> tuple[int, str]:
    """Return the sort key of a token and its count: most frequent first, then in lexicographic order."""
    token, count = token_and_count
    return -count, token


def _add_fairseq_symbols(counts: dict[str, int]) -> None:
    """Add the symbols that fairseq's dictionary has in addition to the types of a text, with the count 0."""
    for symbol in (START, PADDING):
        counts.setdefault(symbol, 0)
    filler_number = 0
    while len(counts) % _FAIRSEQ_MULTIPLE:
        counts.setdefault(f"<filler{filler_number}>", 0)
        filler_number += 1


def fairseq_dictionary_size(num_types: int) -> int:
    """Return the size of fairseq's dictionary for this many types, <unk> and <eos> included.

    fairseq adds <s> and <pad>, and fills up to a multiple of 8.
    """
    size = num_types + 2
    return -(-size // _FAIRSEQ_MULTIPLE) * _FAIRSEQ_MULTIPLE
