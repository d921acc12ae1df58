"""The vocabulary of a model: it maps tokens (words or sub-words) to ids and back.

`Vocabulary` is an immutable value. `from_counts` builds it from the word counts of a training text, `encode` and
`decode` convert between words and ids, and `save` and `load` store it as JSON:

    vocabulary = Vocabulary.from_counts({"the": 5, "cat": 2, "<eos>": 3}, VocabularySettings())
    vocabulary.words                    # ("the", "<eos>", "cat", "<unk>")
    vocabulary.encode(["the", "dog"])   # [0, 3]

`VocabularyPair` holds the vocabularies of both sides of a model. A language model has the same vocabulary twice. A
translator has a joint vocabulary or two separate ones; the setting `vocabulary.sides` of its recipe decides.

Related files: `vocabulary_settings.py` (which words are in the vocabulary) and `bpe.py` (byte-pair encoding, which
splits words into sub-words).
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from reefknot.errors import DataError
from reefknot.lab.text.vocabulary_checks import find_problem
from reefknot.lab.text.vocabulary_settings import UnknownPolicy, VocabularySettings, select_tokens, select_words
from reefknot.nn.constants import END_OF_LINE, END_OF_WORD, UNKNOWN
from reefknot.storage import files, manifest

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from reefknot.lab.text.bpe import BPE


@dataclass(frozen=True)
class Vocabulary:
    """Tokens and their counts in the training text, most frequent first; ties are in lexicographic order.

    The id of a token is its index in `words`. A token is a word or, with `bpe`, a sub-word.
    """

    words: tuple[str, ...]
    """The tokens in the order of their ids."""
    counts: tuple[int, ...]
    """Number of occurrences of each token in the training text."""
    spelled_words: tuple[str, ...] = ()
    """Words outside the vocabulary that an input end (the model's embedding) reads by their characters. They have input
    ids, which follow the ids of the tokens, but they are never targets."""
    bpe: BPE | None = field(default=None, repr=False)
    """The byte-pair encoding, if words are split into sub-words."""
    split_words: Mapping[str, int] | None = field(default=None, repr=False)
    """The words that are split into sub-words, and their counts in the training text. All other words are `<unk>`. None
    if all words are split, or if there is no byte-pair encoding."""
    ordered: bool = True
    """Whether ids are in the order of frequency. The dictionary of another program may begin with its own symbols."""

    @classmethod
    def from_counts(
        cls,
        counts: Mapping[str, int],
        settings: VocabularySettings,
        bpe: BPE | None = None,
        all_counts: Mapping[str, int] | None = None,
    ) -> Vocabulary:
        """Build the vocabulary from the counts of words and `<eos>` in a training text.

        The count of `<unk>` includes all words that it replaces. If the settings ask for sub-words and `bpe` is None,
        they are learned here. Words are selected by `all_counts`, if given: their counts in a larger text.
        """
        split_words = None
        if settings.limits_split_words:
            counts = split_words = select_words(counts, settings)
        if bpe is None and settings.bpe is not None:
            from reefknot.lab.text.bpe import BPE

            bpe = BPE.train(counts, settings.bpe.merges, settings.bpe.words)
            bpe = replace(bpe, splits_unknown=settings.bpe.unknown == "character")
        if bpe is not None:
            counts = bpe.count_subwords(counts)
        token_counts = select_tokens(counts, settings, all_counts)
        return cls(tuple(token_counts), tuple(token_counts.values()), bpe=bpe, split_words=split_words)

    # -- words to ids ----------------------------------------------------------------------------------------------

    def encode(self, words: Iterable[str], unknown: UnknownPolicy = "replace") -> list[int]:
        """Return the ids of words. A vocabulary without `<unk>` rejects unknown words whatever the policy."""
        tokens = words
        if self.bpe is not None:
            tokens = (token for word in words for token in self.split_word(word))
        return self._look_up(tokens, self._ids, unknown)

    def encode_inputs(self, words: Iterable[str]) -> list[int]:
        """Return the ids of words as inputs of a model: like `encode`, but `spelled_words` have their own ids."""
        if not self.spelled_words:
            return self.encode(words)
        return self._look_up(words, self._input_ids)

    def id_of(self, token: str) -> int:
        """Return the input id of a token or of a word in `spelled_words`, or the id of `<unk>` for any other word."""
        return self._look_up([token], self._input_ids)[0]

    def split_word(self, word: str) -> tuple[str, ...]:
        """Split a word into tokens."""
        if self.bpe is None:
            return (word,)
        if not self._is_split(word):
            return (UNKNOWN,)
        return self.bpe.split_word(word)

    def split_at_unknown(self, words: Sequence[str]) -> Sequence[str]:
        """Split words around their unknown characters, so that these become `<unk>` and not the whole word.

        If "ö" is unknown, "löw" becomes "l", "<unk>" and "w". Without sub-words, the words are returned unchanged.
        """
        if self.bpe is None or self.unk is None:
            return words
        words = [word if self._is_split(word) else UNKNOWN for word in words]
        return [fragment for word in words for fragment in self.bpe.split_at_unknown(word)]

    def __len__(self) -> int:
        return len(self.words)

    def __contains__(self, word: str) -> bool:
        return self._is_split(word) and all(token in self._ids for token in self.split_word(word))

    def _is_split(self, word: str) -> bool:
        """Return whether a word may be split into sub-words, and is not one of the rare words that are `<unk>`."""
        return self.split_words is None or word in self.split_words

    @property
    def unk(self) -> int | None:
        """Id of `<unk>`, if the vocabulary has it."""
        return self._ids.get(UNKNOWN)

    @property
    def eos(self) -> int | None:
        """Id of `<eos>`, if the vocabulary has it."""
        return self._ids.get(END_OF_LINE)

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {token: index for index, token in enumerate(self.words)}

    @cached_property
    def _input_ids(self) -> dict[str, int]:
        """The ids of the tokens and of the words in `spelled_words`."""
        return self._ids | {word: index for index, word in enumerate(self.spelled_words, start=len(self))}

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

    # -- words that are read by their spelling ---------------------------------------------------------------------

    def can_read(self, word: str) -> bool:
        """Return whether an input end (embedding) can distinguish the word from `<unk>`, by tokens or by spelling."""
        return self._is_split(word) and all(token in self._input_ids for token in self.split_word(word))

    def with_spelled_words(self, words: Iterable[str]) -> Vocabulary:
        """Return a vocabulary in which words that cannot be read are added to `spelled_words`."""
        unreadable_words = dict.fromkeys(word for word in words if not self.can_read(word))
        return replace(self, spelled_words=(*self.spelled_words, *unreadable_words))

    @property
    def has_exact_tokenizer(self) -> bool:
        """Whether a tokenizer of another program can split words as this vocabulary does.

        It cannot if only some sub-words are allowed, or if rare words are `<unk>`.
        """
        return self.split_words is None and (self.bpe is None or self.bpe.allowed_subwords is None)

    # -- ids to words ----------------------------------------------------------------------------------------------

    def count_unknown(self, ids: NDArray[np.int32]) -> int:
        """Return how often `<unk>` occurs among ids."""
        if self.unk is None:
            return 0
        return int((ids == self.unk).sum())

    def decode(self, ids: Iterable[int]) -> list[str]:
        """Return the words of ids. Sub-words are joined to words."""
        tokens = [self.words[index] for index in ids]
        if self.bpe is None:
            return tokens
        return self.bpe.join(tokens)

    def decode_text(self, ids: Iterable[int]) -> str:
        """Return the words of ids separated by spaces, with a line end for each `<eos>`."""
        words = ("\n" if word == END_OF_LINE else word for word in self.decode(ids))
        return " ".join(words).replace(" \n", "\n").replace("\n ", "\n")

    def ends_word(self, token: str) -> bool:
        """Return whether a token is the last token of a word."""
        return self.bpe is None or self.bpe.ends_word(token)

    def whole_word(self, token: str) -> str | None:
        """Return the word that consists of this token alone, or None for a sub-word that does not end a word."""
        if self.bpe is None:
            return token
        if not self.ends_word(token):
            return None
        return token.removesuffix(END_OF_WORD)

    # -- files and hashes ------------------------------------------------------------------------------------------

    def save(self, path: Path) -> None:
        """Write the vocabulary as JSON in ASCII, which preserves every character, including control characters.

            {"format": 1, "words": ["the", "<eos>"], "counts": [5, 3]}

        Optional keys are `spelled` (the spelled words), `tokenizer` (the SHA-256 of tokenizer.json), `unknown`
        ("character" if only unknown characters become `<unk>`, and not whole words), `split` (the words that are split
        into sub-words, with their counts, if all others are `<unk>`) and `ordered`. The byte-pair
        encoding, if there is one, is written to tokenizer.json in the same folder.
        """
        if self.bpe is not None:
            manifest.write_bytes(_tokenizer_path(path), self.bpe.file_content)
        manifest.write_bytes(path, self._to_bytes())

    @classmethod
    def load(cls, path: Path) -> Vocabulary:
        """Read a file that `save` wrote. Raise a DataError if it is damaged."""
        data = manifest.read_bytes(path)
        contents = files.decode_object(data, path)
        problem = find_problem(contents)
        if problem is not None:
            raise DataError(f"{path} is not a vocabulary: {problem}")

        bpe = None
        if "tokenizer" in contents:
            bpe = _load_bpe(path, contents["tokenizer"]).restrict_to_tokens(contents["words"])
            bpe = replace(bpe, splits_unknown=contents.get("unknown") == "character")
        vocabulary = cls(
            words=tuple(contents["words"]),
            counts=tuple(contents["counts"]),
            spelled_words=tuple(contents.get("spelled", ())),
            bpe=bpe,
            split_words=contents.get("split"),
            ordered=contents.get("ordered", True),
        )
        # Set the cached property, because formatting millions of words as JSON again takes long.
        vars(vocabulary)["fingerprint"] = hashlib.sha256(data).hexdigest()
        return vocabulary

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the file that `save` writes."""
        return hashlib.sha256(self._to_bytes()).hexdigest()

    @cached_property
    def tokens_sha256(self) -> str:
        """SHA-256 of the tokens in the order of their ids, and of the byte-pair encoding.

        If the hashes of two vocabularies are equal, they give a text the same ids. Counts and spelled words are not
        included.
        """
        values: list[Any] = [self.words, self._tokenizer_sha256]
        if self.bpe is not None and self.bpe.splits_unknown:
            values.append("character")
        if self.split_words is not None:
            values.append(sorted(self.split_words))
        identity = json.dumps(values)
        return hashlib.sha256(identity.encode()).hexdigest()

    @property
    def _tokenizer_sha256(self) -> str | None:
        if self.bpe is None:
            return None
        return hashlib.sha256(self.bpe.file_content).hexdigest()

    def _to_bytes(self) -> bytes:
        contents: dict[str, Any] = {"format": 1, "words": self.words, "counts": self.counts}
        if self.spelled_words:
            contents["spelled"] = self.spelled_words
        if self.bpe is not None:
            contents["tokenizer"] = self._tokenizer_sha256
            if self.bpe.splits_unknown:
                contents["unknown"] = "character"
        if self.split_words is not None:
            contents["split"] = dict(self.split_words)
        if not self.ordered:
            contents["ordered"] = False
        return json.dumps(contents, indent=0).encode()


def _tokenizer_path(vocabulary_path: Path) -> Path:
    return vocabulary_path.with_name("tokenizer.json")


def _load_bpe(vocabulary_path: Path, expected_sha256: str) -> BPE:
    from reefknot.lab.text.bpe import BPE

    tokenizer_path = _tokenizer_path(vocabulary_path)
    data = manifest.read_bytes(tokenizer_path)
    if hashlib.sha256(data).hexdigest() != expected_sha256:
        raise DataError(f"{tokenizer_path} is damaged, or was not written together with {vocabulary_path.name}")
    return BPE(data)


class VocabularyPair(NamedTuple):
    """The vocabularies of both sides of parallel text, or only their sizes if no text is read."""

    source: Vocabulary | int
    target: Vocabulary | int

    @classmethod
    def from_counts(
        cls, source_counts: Mapping[str, int], target_counts: Mapping[str, int], settings: VocabularySettings
    ) -> VocabularyPair:
        """Build the vocabularies from the counts of words and `<eos>` in two texts.

        Joint vocabularies are one object. With `joint_bpe` (Press & Wolf 2017), the merges are learned on both texts,
        but each side has only the sub-words and characters of its own text. Other sub-words are split further, and
        other characters are unknown.
        """
        if settings.sides == "separate":
            source = Vocabulary.from_counts(source_counts, settings)
            target = Vocabulary.from_counts(target_counts, settings)
            return cls(source, target)

        total_counts = Counter(source_counts) + Counter(target_counts)
        if settings.sides == "joint_bpe":
            assert settings.bpe is not None
            from reefknot.lab.text.bpe import BPE

            bpe = BPE.train(total_counts, settings.bpe.merges, settings.bpe.words)
            source = Vocabulary.from_counts(source_counts, settings, bpe.restrict_to_text(source_counts))
            target = Vocabulary.from_counts(target_counts, settings, bpe.restrict_to_text(target_counts))
            return cls(source, target)

        joint_vocabulary = Vocabulary.from_counts(total_counts, settings)
        return cls(joint_vocabulary, joint_vocabulary)

    @property
    def joint(self) -> bool:
        """Whether a word has the same id on both sides."""
        if isinstance(self.source, int):
            return self.source == self.target
        return self.source is self.target

    @property
    def vocabularies(self) -> tuple[Vocabulary, Vocabulary]:
        """The vocabularies, source first. Raises a TypeError if only their sizes are known."""
        if isinstance(self.source, int) or isinstance(self.target, int):
            raise TypeError("only the sizes of these vocabularies are known")
        return self.source, self.target
