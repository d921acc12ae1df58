"""The vocabulary of a model: it maps tokens (words or sub-words) to ids and back.

Start with `Vocabulary`. `Vocabulary.from_counts` builds one from the word counts of the training text, `encode` and
`decode` convert between words and ids, and `save` and `load` store it as JSON. `VocabularySettings` are the settings of
a recipe. `VocabularyPair` holds the two vocabularies of parallel text.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from pydantic import Field, model_validator

from reefknot.errors import DataError
from reefknot.lab.config.settings import Count, Settings
from reefknot.nn.constants import END_OF_LINE, END_OF_WORD, PADDING, START, UNKNOWN
from reefknot.storage import files

if TYPE_CHECKING:
    from reefknot.lab.text.bpe import BPE

__all__ = [
    "END_OF_LINE",
    "UNKNOWN",
    "BPESettings",
    "Vocabulary",
    "VocabularyPair",
    "VocabularySettings",
    "fairseq_dictionary_size",
]

UnknownPolicy = Literal["replace", "refuse"]


class BPESettings(Settings):
    """Settings of byte-pair encoding, which splits words into sub-words learned from the training text."""

    merges: Annotated[
        Count,
        Field(
            description="Number of merges to learn. Each merge joins two sub-words. A small text may give fewer merges."
        ),
    ] = 32_000


class VocabularySettings(Settings):
    """Settings that define which words are in the vocabulary, and how other words are treated."""

    min_count: Annotated[
        Count,
        Field(description="Minimum number of occurrences in the training text for a word to be in the vocabulary."),
    ] = 1
    max_size: Annotated[
        int | None,
        Field(ge=3, le=10**9, description="Maximum number of types in the vocabulary, including <unk> and <eos>."),
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

    @model_validator(mode="after")
    def _check_together(self) -> VocabularySettings:
        if self.bpe and (self.min_count > 1 or self.max_size is not None):
            raise ValueError("bpe splits all words into sub-words, so min_count and max_size do nothing; remove them")
        if self.keep_spellings and (self.bpe or self.unknown == "refuse"):
            raise ValueError(
                'keep_spellings is for words outside the vocabulary, which bpe and unknown = "refuse" do not have;'
                " use one or the other"
            )
        if self.sides == "joint_bpe" and not self.bpe:
            raise ValueError('sides = "joint_bpe" needs bpe, whose merges are learned on both sides; set bpe.merges')
        return self

    @property
    def identity(self) -> dict[str, Any]:
        """The settings that identify an encoded text. Newer settings are included only if they are not the default."""
        always_included = ("min_count", "max_size", "unknown", "end_of_line")
        defaults = VocabularySettings().model_dump()
        settings = self.model_dump()
        return {key: value for key, value in settings.items() if key in always_included or value != defaults[key]}

    def describe(self) -> str:
        """Return a human-readable description of the tokens."""
        tokens = "the words"
        if self.bpe is not None:
            tokens = f"sub-words by byte-pair encoding with {self.bpe.merges:,} merges, and the characters,"
        phrases = [f"{tokens} of the training text"]
        if self.min_count > 1:
            phrases.append(f"seen at least {self.min_count:,} times")
        if self.max_size:
            phrases.append(f"at most {self.max_size:,} types")
        return ", ".join(phrases)


def fairseq_dictionary_size(num_types: int) -> int:
    """Return the size of fairseq's dictionary for this many types, <unk> and <eos> included.

    fairseq adds <s> and <pad>, and fills up to a multiple of 8.
    """
    return -(-(num_types + 2) // 8) * 8


@dataclass(frozen=True)
class Vocabulary:
    """Tokens and their counts in the training text, most frequent first; ties are in lexicographic order.

    The id of a token is its index in `words`. A token is a word or, with `bpe`, a sub-word.

        vocabulary = Vocabulary.from_counts({"the": 5, "cat": 2, "<eos>": 3}, VocabularySettings())
        vocabulary.words                    # ("the", "<eos>", "cat", "<unk>")
        vocabulary.encode(["the", "dog"])   # [0, 3]
    """

    words: tuple[str, ...]
    """The tokens in the order of their ids."""
    counts: tuple[int, ...]
    """Number of occurrences of each token in the training text."""
    spelled: tuple[str, ...] = ()
    """Words outside the vocabulary whose spelling an input end (the model's embedding) reads. Their ids follow the ids
    of the tokens."""
    bpe: BPE | None = field(default=None, repr=False)
    ordered: bool = True
    """Whether ids are in the order of frequency. The dictionary of another program may begin with its own symbols."""

    @classmethod
    def from_counts(cls, counts: Mapping[str, int], settings: VocabularySettings, bpe: BPE | None = None) -> Vocabulary:
        """Build the vocabulary from the counts of words and `<eos>` in a training text.

        The count of `<unk>` includes all words that it replaces. If the settings ask for sub-words and `bpe` is None,
        they are learned here.
        """
        if bpe is None and settings.bpe:
            from reefknot.lab.text.bpe import BPE

            bpe = BPE.train(counts, settings.bpe.merges)
        if bpe:
            # A sub-word that does not occur in training may be needed later, so there is no minimum count.
            token_counts = _select_tokens(bpe.count_subwords(counts), settings, min_count=0)
        else:
            token_counts = _select_tokens(counts, settings, settings.min_count)
        if settings.dictionary == "fairseq":
            _add_fairseq_symbols(token_counts)
        tokens, sorted_counts = zip(*sorted(token_counts.items(), key=_frequency_order), strict=True)
        return cls(tokens, sorted_counts, bpe=bpe)

    # -- tokens and ids --------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.words)

    def __contains__(self, word: str) -> bool:
        return all(token in self._ids for token in self.split_word(word))

    def can_read(self, word: str) -> bool:
        """Return whether an input end (embedding) can distinguish the word from `<unk>`, by tokens or by spelling."""
        return all(token in self._input_ids for token in self.split_word(word))

    def with_spelled_words(self, words: Iterable[str]) -> Vocabulary:
        """Return a vocabulary in which words that cannot be read are added to `spelled`."""
        unreadable_words = dict.fromkeys(word for word in words if not self.can_read(word))
        return replace(self, spelled=(*self.spelled, *unreadable_words))

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {word: index for index, word in enumerate(self.words)}

    @property
    def unk(self) -> int | None:
        """Id of `<unk>`, if the vocabulary has it."""
        return self._ids.get(UNKNOWN)

    @property
    def eos(self) -> int | None:
        """Id of `<eos>`, if the vocabulary has it."""
        return self._ids.get(END_OF_LINE)

    def id_of(self, token: str) -> int:
        """Return the id of a token or of a word in `spelled`, or the id of `<unk>` for any other word."""
        return self._look_up([token], self._input_ids)[0]

    def split_word(self, word: str) -> tuple[str, ...]:
        """Split a word into tokens."""
        return self.bpe.split_word(word) if self.bpe else (word,)

    def encode(self, words: Iterable[str], unknown: UnknownPolicy = "replace") -> list[int]:
        """Return the ids of words. A vocabulary without `<unk>` rejects unknown words whatever the policy."""
        tokens = words
        if self.bpe is not None:
            tokens = (token for word in words for token in self.bpe.split_word(word))
        return self._look_up(tokens, self._ids, unknown)

    def split_at_unknown(self, words: Sequence[str]) -> Sequence[str]:
        """Split words around their unknown characters, so that these become `<unk>` and not the whole word.

        If "ö" is unknown, "löw" becomes "l", "<unk>" and "w". Without sub-words, the words are returned unchanged.
        """
        if self.bpe is None or self.unk is None:
            return words
        return [fragment for word in words for fragment in self.bpe.split_at_unknown(word)]

    def encode_inputs(self, words: Iterable[str]) -> list[int]:
        """Return the ids of words as inputs of a model: like `encode`, but words in `spelled` have their own ids."""
        return self._look_up(words, self._input_ids) if self.spelled else self.encode(words)

    @cached_property
    def _input_ids(self) -> dict[str, int]:
        return self._ids | {word: index for index, word in enumerate(self.spelled, start=len(self))}

    def _look_up(self, tokens: Iterable[str], ids: Mapping[str, int], unknown: UnknownPolicy = "replace") -> list[int]:
        unk = self.unk
        if unknown == "replace" and unk is not None:
            return [ids.get(token, unk) for token in tokens]
        try:
            return [ids[token] for token in tokens]
        except KeyError as error:
            raise DataError(
                f"'{error.args[0]}' is not in the vocabulary; use another word, or train with unknown = \"replace\""
            ) from None

    def text(self, ids: Iterable[int]) -> str:
        """Return the words separated by spaces, with a line end for each `<eos>`."""
        words = ("\n" if word == END_OF_LINE else word for word in self.decode(ids))
        return " ".join(words).replace(" \n", "\n").replace("\n ", "\n")

    def decode(self, ids: Iterable[int]) -> list[str]:
        """Return the words of ids. Sub-words are joined to words."""
        tokens = [self.words[index] for index in ids]
        return self.bpe.join(tokens) if self.bpe else tokens

    def ends_word(self, token: str) -> bool:
        """Return whether a token is the last token of a word."""
        return self.bpe is None or self.bpe.ends_word(token)

    # -- files and hashes ------------------------------------------------------------------------------------------

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the file that `save` writes."""
        return hashlib.sha256(self._to_bytes()).hexdigest()

    @cached_property
    def tokens_sha256(self) -> str:
        """SHA-256 of the tokens in the order of their ids, and of the byte-pair encoding.

        If the hashes of two vocabularies are equal, they give a text the same ids. Counts and spellings of unknown
        words are not included.
        """
        tokenizer = hashlib.sha256(self.bpe.file_content).hexdigest() if self.bpe else None
        return hashlib.sha256(json.dumps([self.words, tokenizer]).encode()).hexdigest()

    def save(self, path: Path) -> None:
        """Write the vocabulary as JSON in ASCII, which preserves every character, including control characters.

        The byte-pair encoding, if there is one, is written to tokenizer.json in the same folder.
        """
        if self.bpe:
            files.write_bytes(_tokenizer_path(path), self.bpe.file_content)
        files.write_bytes(path, self._to_bytes())

    def _to_bytes(self) -> bytes:
        contents: dict[str, Any] = {"format": 1, "words": self.words, "counts": self.counts}
        if self.spelled:
            contents["spelled"] = self.spelled
        if self.bpe:
            contents["tokenizer"] = hashlib.sha256(self.bpe.file_content).hexdigest()
        if not self.ordered:
            contents["ordered"] = False
        return json.dumps(contents, indent=0).encode()

    @classmethod
    def load(cls, path: Path) -> Vocabulary:
        """Read a file that `save` wrote. Raise a DataError if it is damaged."""
        data = files.read_bytes(path)
        contents = files.decode_object(data, path)
        problem = _find_problem(contents)
        if problem:
            raise DataError(f"{path} is not a vocabulary: {problem}")
        bpe = None
        if "tokenizer" in contents:
            bpe = _load_bpe(path, contents["tokenizer"]).restrict_to(contents["words"])
        vocabulary = cls(
            words=tuple(contents["words"]),
            counts=tuple(contents["counts"]),
            spelled=tuple(contents.get("spelled", ())),
            bpe=bpe,
            ordered=contents.get("ordered", True),
        )
        vars(vocabulary)["fingerprint"] = hashlib.sha256(data).hexdigest()  # because computing it takes long
        return vocabulary


class VocabularyPair(NamedTuple):
    """The vocabularies of both sides of parallel text, or only their sizes if no text is read."""

    source: Vocabulary | int
    target: Vocabulary | int

    @classmethod
    def from_counts(
        cls, source: Mapping[str, int], target: Mapping[str, int], settings: VocabularySettings
    ) -> VocabularyPair:
        """Build the vocabularies from the counts of words and `<eos>` in two texts; one object if they are joint.

        With `joint_bpe` (Press & Wolf 2017), the merges are learned on both texts, but each side has only the sub-words
        and characters of its own text. Other sub-words are split further, and other characters are unknown.
        """
        if settings.sides == "separate":
            return cls(Vocabulary.from_counts(source, settings), Vocabulary.from_counts(target, settings))
        total_counts = Counter(source) + Counter(target)
        if settings.sides == "joint_bpe":
            assert settings.bpe is not None
            from reefknot.lab.text.bpe import BPE

            bpe = BPE.train(total_counts, settings.bpe.merges)
            return cls(
                Vocabulary.from_counts(source, settings, bpe.restrict_to_text(source)),
                Vocabulary.from_counts(target, settings, bpe.restrict_to_text(target)),
            )
        joint_vocabulary = Vocabulary.from_counts(total_counts, settings)
        return cls(joint_vocabulary, joint_vocabulary)

    @property
    def joint(self) -> bool:
        """Whether a word has the same id on both sides."""
        return self.source is self.target or (isinstance(self.source, int) and self.source == self.target)

    @property
    def vocabularies(self) -> tuple[Vocabulary, Vocabulary]:
        """The vocabularies, source first. Raises a TypeError if only their sizes are known."""
        if isinstance(self.source, int) or isinstance(self.target, int):
            raise TypeError("only the sizes of these vocabularies are known")
        return self.source, self.target


def _tokenizer_path(path: Path) -> Path:
    return path.with_name("tokenizer.json")


def _load_bpe(path: Path, sha256: str) -> BPE:
    from reefknot.lab.text.bpe import BPE

    tokenizer = _tokenizer_path(path)
    data = files.read_bytes(tokenizer)
    if hashlib.sha256(data).hexdigest() != sha256:
        raise DataError(f"{tokenizer} is damaged, or was not written together with {path.name}")
    return BPE(data)


def _select_tokens(counts: Mapping[str, int], settings: VocabularySettings, min_count: int) -> dict[str, int]:
    """Return the tokens of the vocabulary and their counts: `<eos>`, `<unk>` and the most frequent tokens.

    The counts of tokens that are not selected are added to the count of `<unk>`.
    """
    token_counts: dict[str, int] = {}
    if settings.end_of_line:
        token_counts[END_OF_LINE] = counts.get(END_OF_LINE, 0)
    if settings.unknown == "replace":
        token_counts[UNKNOWN] = counts.get(UNKNOWN, 0)
    candidates = [(token, count) for token, count in counts.items() if token not in token_counts and count >= min_count]
    capacity = None if settings.max_size is None else settings.max_size - len(token_counts)
    token_counts.update(sorted(candidates, key=_frequency_order)[:capacity])
    if UNKNOWN in token_counts:
        token_counts[UNKNOWN] += sum(count for token, count in counts.items() if token not in token_counts)
    return token_counts


def _add_fairseq_symbols(counts: dict[str, int]) -> None:
    """Add the symbols that fairseq's dictionary has in addition to the types of a text, with the count 0."""
    for symbol in (START, PADDING):
        counts.setdefault(symbol, 0)
    index = 0
    while len(counts) % 8:
        counts.setdefault(f"<filler{index}>", 0)
        index += 1


def _frequency_order(item: tuple[str, int]) -> tuple[int, str]:
    """Return the sort key of a token and its count: most frequent first, then in lexicographic order."""
    token, count = item
    return -count, token


def _find_problem(contents: dict[str, Any]) -> str | None:
    """Return why the contents of a file are not a vocabulary, or None if they are.

    The checks are fast even for millions of words.
    """
    required_keys, optional_keys = {"format", "words", "counts"}, {"spelled", "tokenizer", "ordered"}
    if contents.keys() - optional_keys != required_keys or contents["format"] != 1:
        return "it must hold format 1, words and counts"
    words, counts = contents["words"], contents["counts"]
    return (
        _find_word_problem(words, counts)
        or _find_order_problem(words, counts, contents.get("ordered", True))
        or _find_spelling_problem(words, contents.get("spelled", []))
    )


def _find_word_problem(words: Any, counts: Any) -> str | None:
    if not isinstance(words, list) or not isinstance(counts, list) or not words:
        return "it has no words"
    if len(words) != len(counts):
        return f"{len(words)} words but {len(counts)} counts"
    if not _are_strings(words):
        return "a word is not a valid string"
    if set(map(type, counts)) != {int} or min(counts) < 0:
        return "a count is not a whole number from 0"
    if len(set(words)) != len(words):
        return "a word occurs twice"
    return None


def _find_order_problem(words: list[str], counts: list[int], ordered: Any) -> str | None:
    if not isinstance(ordered, bool):
        return "ordered is neither true nor false"
    if not ordered:
        return None
    for (word, count), (next_word, next_count) in pairwise(zip(words, counts, strict=True)):
        if count < next_count or (count == next_count and word > next_word):
            return "the words are not in order of frequency"
    return None


def _find_spelling_problem(words: list[str], spelled: Any) -> str | None:
    if not isinstance(spelled, list) or not _are_strings(spelled):
        return "a word in `spelled` is not a valid string"
    if len({*words, *spelled}) != len(words) + len(spelled):
        return "a word in `spelled` occurs twice"
    return None


def _are_strings(values: list[Any]) -> bool:
    """Return whether all values are valid strings."""
    return set(map(type, values)) <= {str} and _is_unicode(values)


def _is_unicode(words: list[str]) -> bool:
    """Return whether all words can be encoded. JSON may contain lone surrogates, which cannot be written to a file."""
    try:
        "".join(words).encode()
    except UnicodeEncodeError:
        return False
    return True


def whole_word(token: str, vocabulary: Vocabulary) -> str | None:
    """Return the word that consists of this token alone, or None for a sub-word that does not end a word."""
    if vocabulary.bpe is None:
        return token
    return token.removesuffix(END_OF_WORD) if vocabulary.ends_word(token) else None
