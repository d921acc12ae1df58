"""Byte-pair encoding: words as pieces, learned from how often characters stand together (Sennrich et al. 2016).

Trained and applied by Hugging Face's `tokenizers`; its file, `tokenizer.json`, reads there as well. Ids are those of
the vocabulary, by frequency, not the file's. The last piece of a word ends in `</w>`, so words can be put together
again. For the same reason `<unk>` is always a word: one with a character that training has not seen is unknown as a
whole, where another reader of the file gives `<unk>` for that character alone.

Merges that were learned on two texts together can be kept to the pieces that one of them has (`of_text`). Of a word
that asks for another piece, the merges that made it are undone as far as it takes, as subword-nmt does with a
vocabulary; the file, which knows nothing of it, still has all pieces.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, groupby, repeat
from types import ModuleType
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from reefknot.errors import SettingsError
from reefknot.lab.config.settings import Count, Settings
from reefknot.nn.inputs.symbols import END_OF_LINE, END_OF_WORD, PADDING, START, UNKNOWN

if TYPE_CHECKING:
    from tokenizers import Tokenizer

WHOLE = (UNKNOWN, END_OF_LINE)
"""Words that are never cut."""
_RESERVED = (*WHOLE, START, PADDING, END_OF_WORD)
_WHITESPACE = r"[ \t\r\n\x0B\x0C]+"  # what parts words in lines.py: tokenizer.json cuts a text there and nowhere else
_STRETCH = 4_096  # learning takes time with the square of a word's length, and a line without spaces is one word


class BPESettings(Settings):
    """Words are cut into pieces, which are learned from the training text."""

    merges: Annotated[
        Count, Field(description="pieces to learn besides the characters, each by joining two (fewer in a small text)")
    ] = 32_000


@dataclass(frozen=True)
class BPE:
    """A way to cut words into pieces."""

    file: bytes
    """The contents of tokenizer.json."""
    kept: frozenset[str] | None = field(default=None, repr=False)
    """The pieces that are used, if not all of the file are."""

    @classmethod
    def train(cls, counts: Mapping[str, int], merges: int) -> BPE:
        """Learn from words and how often each was seen. Equal counts give equal bytes.

        Every character is a piece, inside a word and at its end, so any word made of known characters can be cut.
        """
        library = _library()
        characters = sorted({character for word in counts if word not in WHOLE for character in word})
        symbols = [UNKNOWN, *characters, *(character + END_OF_WORD for character in characters)]
        words = ((word, count) for word, count in counts.items() if not _holds_reserved(word))
        learner = library.Tokenizer(library.models.BPE(unk_token=UNKNOWN, end_of_word_suffix=END_OF_WORD))
        trainer = library.trainers.BpeTrainer(
            vocab_size=len(symbols) + merges,
            special_tokens=symbols,  # numbered before the words are seen: ties between pairs go by these numbers
            end_of_word_suffix=END_OF_WORD,
            show_progress=False,
        )
        seen = chain.from_iterable(repeat(word, count) for word, count in words)
        learner.train_from_iterator(chain.from_iterable(map(_stretches, seen)), trainer)
        # Joining two ways to the same piece takes two merges, which the size of the vocabulary does not count.
        joined = [(left, right) for left, right in json.loads(learner.to_str())["model"]["merges"]][:merges]
        pieces = dict.fromkeys([*symbols, *(left + right for left, right in joined)])
        model = library.models.BPE(
            vocab={piece: index for index, piece in enumerate(pieces)},
            merges=joined,
            unk_token=UNKNOWN,
            end_of_word_suffix=END_OF_WORD,
        )
        tokenizer = library.Tokenizer(model)
        tokenizer.pre_tokenizer = library.pre_tokenizers.Split(library.Regex(_WHITESPACE), "removed")
        tokenizer.decoder = library.decoders.BPEDecoder(suffix=END_OF_WORD)
        tokenizer.add_special_tokens(list(WHOLE))
        return cls(tokenizer.to_str(pretty=True).encode())

    def of_text(self, words: Iterable[str]) -> BPE:
        """These merges with the pieces that a text of those words has, and its characters, alone."""
        spelled = {word for word in words if word not in WHOLE}
        characters = {character for word in spelled for character in word}
        ends = {character + END_OF_WORD for character in characters}
        return self.keeping({piece for word in spelled for piece in self.cut(word)} | characters | ends)

    def keeping(self, tokens: Iterable[str]) -> BPE:
        """These merges with those pieces alone that are among `tokens`."""
        kept = self.pieces.intersection(tokens)
        return self if kept == self.pieces else replace(self, kept=kept)

    @cached_property
    def pieces(self) -> frozenset[str]:
        """Every piece that a word can be cut into."""
        if self.kept is not None:
            return self.kept
        return frozenset(json.loads(self.file)["model"]["vocab"]) - {UNKNOWN}

    def cut(self, word: str) -> tuple[str, ...]:
        """The pieces of a word. One with a character that training has not seen stays whole, and is no piece."""
        found = self._cuts.get(word)
        if found is None:
            found = self._cuts[word] = self._cut(word)
        return found

    def _cut(self, word: str) -> tuple[str, ...]:
        if word in WHOLE or not self.pieces.issuperset(word):
            return (word,)
        if _holds_reserved(word):
            return (*word[:-1], word[-1] + END_OF_WORD)
        pieces = [token.value for token in self._tokenizer.model.tokenize(word)]
        return tuple(pieces if self.pieces.issuperset(pieces) else self._undo(pieces))

    def _undo(self, pieces: list[str]) -> Iterator[str]:
        """Pieces, where those that are not kept are what they were joined from."""
        rest = pieces[::-1]
        while rest:
            piece = rest.pop()
            if piece in self.pieces or piece not in self._joined:
                yield piece
            else:
                left, right = self._joined[piece]
                rest += right, left

    def known_parts(self, word: str) -> list[str]:
        """A word cut around the characters that training has not seen, each run of which is `<unk>`. In a script
        without spaces a word is a whole line, of which one new character must not be all that is left."""
        if word in WHOLE or self.pieces.issuperset(word):
            return [word]
        runs = groupby(word, self.pieces.__contains__)
        parts = ("".join(run) if known else UNKNOWN for known, run in runs)
        return [UNKNOWN if part in WHOLE else part for part in parts]  # what stands inside a word ends no line

    def count(self, counts: Mapping[str, int]) -> Counter[str]:
        """How often each piece was seen, those that were only steps to longer ones included, with 0."""
        seen = Counter(dict.fromkeys(self.pieces, 0))
        for word, count in counts.items():
            for piece in self.cut(word):
                seen[piece] += count
        return seen

    def ends_word(self, token: str) -> bool:
        """Whether a token is the last piece of a word, or no piece but a word of its own."""
        return token.endswith(END_OF_WORD) or token not in self.pieces

    def join(self, tokens: Iterable[str]) -> list[str]:
        """The words that tokens make; pieces that nothing ends are a word as well."""
        words, begun = [], ""
        for token in tokens:
            if token not in self.pieces:
                words += [begun, token] if begun else [token]
                begun = ""
            elif token.endswith(END_OF_WORD):
                words.append(begun + token.removesuffix(END_OF_WORD))
                begun = ""
            else:
                begun += token
        return [*words, begun] if begun else words

    @cached_property
    def _cuts(self) -> dict[str, tuple[str, ...]]:
        """A long text has few distinct words; each is cut once."""
        return {}

    @cached_property
    def _joined(self) -> dict[str, tuple[str, str]]:
        """What each piece but the characters is joined from; where there are two ways, the first that was learned."""
        merges = json.loads(self.file)["model"]["merges"]
        return {left + right: (left, right) for left, right in reversed(merges)}

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        tokenizer: Tokenizer = _library().Tokenizer.from_str(self.file.decode())
        return tokenizer


def readable(token: str) -> str:
    """A token among pieces of words as people read it: the end of a word is plain, what goes on has dots."""
    if token.endswith(END_OF_WORD):
        return token.removesuffix(END_OF_WORD)
    return token if token in _RESERVED else f"{token}…"


def _stretches(word: str) -> Iterable[str]:
    if len(word) <= _STRETCH:
        return (word,)
    return (word[first : first + _STRETCH] for first in range(0, len(word), _STRETCH))


def _holds_reserved(word: str) -> bool:
    """Whether merges inside a word could make what must stay unlike any piece; such words are cut into characters."""
    return any(text in word for text in _RESERVED)


def _library() -> ModuleType:
    try:
        import tokenizers
    except ImportError as error:
        raise SettingsError("vocabulary.bpe needs the package tokenizers; pip install tokenizers") from error
    return tokenizers
