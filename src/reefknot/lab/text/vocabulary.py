"""The vocabulary: which words, or pieces of words, there are, in order of their frequency in the training text."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count, pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, model_validator

from reefknot.errors import DataError
from reefknot.lab.config.settings import Count, Settings
from reefknot.lab.text.bpe import BPE, BPESettings
from reefknot.nn.inputs.symbols import END_OF_LINE, END_OF_WORD, PADDING, START, UNKNOWN
from reefknot.storage import files as durable

__all__ = ["END_OF_LINE", "UNKNOWN", "Sides", "Vocabulary", "VocabularySettings", "fairseq_size"]

UnknownPolicy = Literal["replace", "refuse"]


class VocabularySettings(Settings):
    """Which training words get a vector of their own, and what becomes of the others."""

    min_count: Annotated[Count, Field(description="keep words seen at least so many times in the training text")] = 1
    max_size: Annotated[
        int | None,
        Field(ge=3, le=10**9, description="keep at most so many types, <unk> and <eos> included"),
    ] = None
    unknown: Annotated[
        UnknownPolicy,
        Field(description="a word outside the vocabulary: replace it by <unk>, or refuse the text"),
    ] = "replace"
    end_of_line: Annotated[bool, Field(description="end each line with <eos>")] = True
    bpe: Annotated[
        BPESettings | None, Field(description="cut words into pieces (byte-pair encoding), which are then the tokens")
    ] = None
    dictionary: Annotated[
        Literal["own", "fairseq"],
        Field(description="fairseq: as large as fairseq's, with <s>, <pad> and fillers up to a multiple of 8"),
    ] = "own"
    keep_spellings: Annotated[
        bool,
        Field(
            description="words outside the vocabulary keep their spelling at a char_cnn input; as targets they are"
            " <unk>"
        ),
    ] = False
    sides: Annotated[
        Literal["joint", "joint_bpe", "separate"],
        Field(
            description="of pairs: one vocabulary learned on both sides together, one for each side, or one for each"
            " side with the merges of bpe learned on both (joint_bpe)"
        ),
    ] = "joint"

    @model_validator(mode="after")
    def _check_together(self) -> VocabularySettings:
        if self.bpe and (self.min_count > 1 or self.max_size is not None):
            raise ValueError("bpe spells every word in pieces, so min_count and max_size have no meaning; remove them")
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
        """What tells encoded texts apart; a setting that came later counts only where it is used."""
        first = ("min_count", "max_size", "unknown", "end_of_line")
        unused = VocabularySettings().model_dump()
        return {key: value for key, value in self.model_dump().items() if key in first or value != unused[key]}

    def describe(self) -> str:
        """What the tokens are, for people."""
        told = "the words"
        if self.bpe is not None:
            told = f"pieces of the words, of byte-pair encoding with {self.bpe.merges:,} merges, and the characters"
        limits = [f"{told} of the training text"]
        limits += [f"seen at least {self.min_count:,} times"] if self.min_count > 1 else []
        limits += [f"at most {self.max_size:,} types"] if self.max_size else []
        return ", ".join(limits)


def fairseq_size(types: int) -> int:
    """Types of fairseq's dictionary of so many types, <unk> and <eos> included."""
    return -(-(types + 2) // 8) * 8


@dataclass(frozen=True)
class Vocabulary:
    """Tokens by id, most frequent first (ties in the order of their characters), and their training counts.

    A token is a word, or with `bpe` a piece of one.
    """

    words: tuple[str, ...]
    counts: tuple[int, ...]
    spelled: tuple[str, ...] = ()
    """Words outside the vocabulary that an input end spells; their ids follow those of the tokens."""
    bpe: BPE | None = field(default=None, repr=False)
    ordered: bool = True
    """Whether ids are given by frequency; a dictionary of another program may put its own symbols first."""

    @classmethod
    def from_counts(cls, counts: Mapping[str, int], settings: VocabularySettings, bpe: BPE | None = None) -> Vocabulary:
        """The vocabulary of a training text in which each word, and `<eos>`, was counted.

        `<unk>` counts for its own occurrences and for every word it replaces. Without `bpe`, the pieces that the
        settings ask for are learned here.
        """
        if bpe is None and settings.bpe:
            bpe = BPE.train(counts, settings.bpe.merges)
        least = settings.min_count
        if bpe:
            counts, least = bpe.count(counts), 0  # a piece that training has not seen may be needed later
        policy = {END_OF_LINE: settings.end_of_line, UNKNOWN: settings.unknown == "replace"}
        kept = {word: counts.get(word, 0) for word, reserved in policy.items() if reserved}
        room = None if settings.max_size is None else settings.max_size - len(kept)
        others = [(w, n) for w, n in counts.items() if w not in kept and n >= least]
        kept.update(sorted(others, key=_frequency_order)[:room])
        if UNKNOWN in kept:
            kept[UNKNOWN] += sum(n for word, n in counts.items() if word not in kept)
        if settings.dictionary == "fairseq":
            _fill_up(kept)
        words, numbers = zip(*sorted(kept.items(), key=_frequency_order), strict=True)
        return cls(words, numbers, bpe=bpe)

    def __len__(self) -> int:
        return len(self.words)

    def __contains__(self, word: str) -> bool:
        return all(token in self._ids for token in self.cut(word))

    def reads(self, word: str) -> bool:
        """Whether an input end tells the word from `<unk>`: by a vector of its own, or by its spelling."""
        return all(token in self._input_ids for token in self.cut(word))

    def spelling(self, words: Iterable[str]) -> Vocabulary:
        """This vocabulary, where words that it does not read yet are spelled."""
        new = dict.fromkeys(word for word in words if not self.reads(word))
        return replace(self, spelled=(*self.spelled, *new))

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {word: index for index, word in enumerate(self.words)}

    @property
    def unk(self) -> int | None:
        """The id of `<unk>`, if the vocabulary has it."""
        return self._ids.get(UNKNOWN)

    @property
    def eos(self) -> int | None:
        """The id of `<eos>`, if the vocabulary has it."""
        return self._ids.get(END_OF_LINE)

    def id_of(self, token: str) -> int:
        """The id of a token, or of a word that is only spelled; that of `<unk>` for any other."""
        return self._look_up([token], self._input_ids)[0]

    def cut(self, word: str) -> tuple[str, ...]:
        """The tokens of a word."""
        return self.bpe.cut(word) if self.bpe else (word,)

    def encode(self, words: Iterable[str], unknown: UnknownPolicy = "replace") -> list[int]:
        """Ids of words. A vocabulary without `<unk>` refuses an unknown word whatever the policy."""
        tokens = words if self.bpe is None else (token for word in words for token in self.bpe.cut(word))
        return self._look_up(tokens, self._ids, unknown)

    def known_parts(self, words: Sequence[str]) -> Sequence[str]:
        """Words of a line, where of one with characters that no piece has these alone become `<unk>`, not all of it."""
        if self.bpe is None or self.unk is None:
            return words
        return [part for word in words for part in self.bpe.known_parts(word)]

    def encode_inputs(self, words: Iterable[str]) -> list[int]:
        """Ids of words for an input end: as `encode`, but words of `spelled` keep their own."""
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
        """Words with spaces between them; an `<eos>` ends its line."""
        words = ("\n" if word == END_OF_LINE else word for word in self.decode(ids))
        return " ".join(words).replace(" \n", "\n").replace("\n ", "\n")

    def decode(self, ids: Iterable[int]) -> list[str]:
        """Words of ids; pieces are joined."""
        tokens = [self.words[index] for index in ids]
        return self.bpe.join(tokens) if self.bpe else tokens

    def ends_word(self, token: str) -> bool:
        """Whether the next token begins a word."""
        return self.bpe is None or self.bpe.ends_word(token)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of its file."""
        return hashlib.sha256(self._file()).hexdigest()

    @cached_property
    def tokens_sha256(self) -> str:
        """SHA-256 of the tokens in the order of their ids, and of how words are cut into them.

        With equal hashes a text has equal ids. Counts and spellings of unknown words do not matter.
        """
        tokenizer = hashlib.sha256(self.bpe.file).hexdigest() if self.bpe else None
        return hashlib.sha256(json.dumps([self.words, tokenizer]).encode()).hexdigest()

    def save(self, path: Path) -> None:
        """Write the vocabulary as JSON in ASCII; any word survives, control characters included.

        How words are cut into pieces, if they are, is written to tokenizer.json beside it.
        """
        if self.bpe:
            durable.write_bytes(_tokenizer_path(path), self.bpe.file)
        durable.write_bytes(path, self._file())

    def _file(self) -> bytes:
        stored: dict[str, Any] = {"format": 1, "words": self.words, "counts": self.counts}
        if self.spelled:
            stored["spelled"] = self.spelled
        if self.bpe:
            stored["tokenizer"] = hashlib.sha256(self.bpe.file).hexdigest()
        if not self.ordered:
            stored["ordered"] = False
        return json.dumps(stored, indent=0).encode()

    @classmethod
    def load(cls, path: Path) -> Vocabulary:
        """Read what `save` wrote; a file that is not sound is refused."""
        data = durable.read_bytes(path)
        stored = durable.decode_object(data, path)
        fault = _fault(stored)
        if fault:
            raise DataError(f"{path} is not a vocabulary: {fault}")
        bpe = _load_bpe(path, stored["tokenizer"]).keeping(stored["words"]) if "tokenizer" in stored else None
        words, counts, spelled = (tuple(stored.get(key, ())) for key in ("words", "counts", "spelled"))
        vocabulary = cls(words, counts, spelled, bpe, stored.get("ordered", True))
        vars(vocabulary)["fingerprint"] = hashlib.sha256(data).hexdigest()  # as if computed already: it takes long
        return vocabulary


class Sides(NamedTuple):
    """The words of both sides of parallel text; where no text is read, their number is enough."""

    source: Vocabulary | int
    target: Vocabulary | int

    @classmethod
    def from_counts(cls, source: Mapping[str, int], target: Mapping[str, int], settings: VocabularySettings) -> Sides:
        """The vocabularies of two texts in which each word, and `<eos>`, was counted; one object where joint.

        With the merges alone joint (Press & Wolf 2017), a side has the pieces and characters of its own text, and
        cuts what is said with other pieces into these; a character of the other side alone is unknown to it.
        """
        if settings.sides == "separate":
            return cls(*(Vocabulary.from_counts(counts, settings) for counts in (source, target)))
        together = Counter(source) + Counter(target)
        if settings.sides == "joint_bpe":
            assert settings.bpe is not None
            bpe = BPE.train(together, settings.bpe.merges)
            return cls(*(Vocabulary.from_counts(counts, settings, bpe.of_text(counts)) for counts in (source, target)))
        both = Vocabulary.from_counts(together, settings)
        return cls(both, both)

    @property
    def joint(self) -> bool:
        """Whether a word has the same id on both sides."""
        return self.source is self.target or (isinstance(self.source, int) and self.source == self.target)

    @property
    def vocabularies(self) -> tuple[Vocabulary, Vocabulary]:
        """The words themselves, source first; their number alone is a mistake of the caller."""
        if isinstance(self.source, int) or isinstance(self.target, int):
            raise TypeError("these sides are numbers of words, without the words")
        return self.source, self.target


def _tokenizer_path(path: Path) -> Path:
    return path.with_name("tokenizer.json")


def _load_bpe(path: Path, sha256: str) -> BPE:
    tokenizer = _tokenizer_path(path)
    data = durable.read_bytes(tokenizer)
    if hashlib.sha256(data).hexdigest() != sha256:
        raise DataError(f"{tokenizer} is damaged, or not the one that was written with {path.name}")
    return BPE(data)


def _fill_up(kept: dict[str, int]) -> None:
    """Add what fairseq's dictionary has beyond the types of a text, all never seen."""
    kept.update({word: 0 for word in (START, PADDING) if word not in kept})
    fillers = (name for number in count() if (name := f"<filler{number}>") not in kept)
    kept.update(dict.fromkeys([next(fillers) for _ in range(-len(kept) % 8)], 0))


def _frequency_order(item: tuple[str, int]) -> tuple[int, str]:
    word, seen = item
    return -seen, word


def _fault(stored: dict[str, Any]) -> str | None:
    """Why what was read is no vocabulary, or None. There may be millions of words: each check is a plain loop."""
    if stored.keys() - {"spelled", "tokenizer", "ordered"} != {"format", "words", "counts"} or stored["format"] != 1:
        return "it must hold format 1, words and counts"
    words, counts = stored["words"], stored["counts"]
    if not isinstance(words, list) or not isinstance(counts, list) or not words:
        return "it holds no words"
    if len(words) != len(counts):
        return f"{len(words)} words but {len(counts)} counts"
    if set(map(type, words)) != {str} or not _is_unicode(words):
        return "a word is no text"
    if set(map(type, counts)) != {int} or min(counts) < 0:
        return "a count is no whole number from 0"
    if len(set(words)) != len(words):
        return "a word stands in it twice"
    ordered = stored.get("ordered", True)
    if not isinstance(ordered, bool):
        return "whether it is ordered is neither true nor false"
    if ordered and any(a < b or (a == b and v > w) for (a, v), (b, w) in pairwise(zip(counts, words, strict=True))):
        return "the words are not in order of frequency"
    spelled = stored.get("spelled", [])
    if not isinstance(spelled, list) or not set(map(type, spelled)) <= {str} or not _is_unicode(spelled):
        return "a spelled word is no text"
    if len({*words, *spelled}) != len(words) + len(spelled):
        return "a spelled word stands in it twice"
    return None


def _is_unicode(words: list[str]) -> bool:
    """JSON can spell halves of characters, which no file and no screen takes."""
    try:
        "".join(words).encode()
    except UnicodeEncodeError:
        return False
    return True


def whole_word(token: str, vocabulary: Vocabulary) -> str | None:
    """The word that a token of a vocabulary is the whole of; None of a piece that does not end a word."""
    if vocabulary.bpe is None:
        return token
    return token.removesuffix(END_OF_WORD) if vocabulary.ends_word(token) else None
