"""Byte-pair encoding: words are split into pieces (sub-words) by merging frequent pairs (Sennrich et al. 2016).

Hugging Face's `tokenizers` trains and applies it, and can load its file, `tokenizer.json`. Ids are those of our
vocabulary, ordered by frequency, not those of the file. The last piece of a word ends in `</w>`, so that pieces can be
joined to words again. For the same reason `<unk>` is always a whole word: a word with a character that is not in the
training text becomes `<unk>`, whereas other programs that load the file replace only that character.

Merges that were learned on two texts together can be restricted to the pieces of one text (`of_text`). If a word would
need another piece, the merges of that piece are undone until all pieces are allowed, as in subword-nmt. The file does
not record the restriction and still has all pieces.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, groupby, repeat
from types import ModuleType
from typing import TYPE_CHECKING

from reefknot.errors import SettingsError
from reefknot.nn.constants import END_OF_LINE, END_OF_WORD, PADDING, START, UNKNOWN

if TYPE_CHECKING:
    from tokenizers import Tokenizer

WHOLE = (UNKNOWN, END_OF_LINE)
"""Words that are never split."""
_RESERVED = (*WHOLE, START, PADDING, END_OF_WORD)
_WHITESPACE = r"[ \t\r\n\x0B\x0C]+"  # separates words in storage/lines.py, and therefore in tokenizer.json
_LONGEST = 4_096  # training time is quadratic in the length of a word, and a line without spaces is one word


@dataclass(frozen=True)
class BPE:
    """A byte-pair encoding."""

    file: bytes
    """The contents of tokenizer.json."""
    allowed: frozenset[str] | None = field(default=None, repr=False)
    """The pieces that may be used; all pieces of the file if None."""

    @classmethod
    def train(cls, counts: Mapping[str, int], merges: int) -> BPE:
        """Learn merges from words and their counts. Equal counts give equal bytes.

        Every character is a piece, inside a word and at its end, so every word of known characters can be split.
        """
        library = _library()
        characters = sorted({character for word in counts if word not in WHOLE for character in word})
        symbols = [UNKNOWN, *characters, *(character + END_OF_WORD for character in characters)]
        words = ((word, count) for word, count in counts.items() if not _holds_reserved(word))
        learner = library.Tokenizer(library.models.BPE(unk_token=UNKNOWN, end_of_word_suffix=END_OF_WORD))
        trainer = library.trainers.BpeTrainer(
            vocab_size=len(symbols) + merges,
            special_tokens=symbols,  # their numbers, given in advance, break ties between pairs
            end_of_word_suffix=END_OF_WORD,
            show_progress=False,
        )
        occurrences = chain.from_iterable(repeat(word, count) for word, count in words)
        learner.train_from_iterator(chain.from_iterable(map(_limited, occurrences)), trainer)
        # Two merges may give the same piece, so the size of the vocabulary does not limit the number of merges.
        learned = [(left, right) for left, right in json.loads(learner.to_str())["model"]["merges"]][:merges]
        pieces = dict.fromkeys([*symbols, *(left + right for left, right in learned)])
        model = library.models.BPE(
            vocab={piece: index for index, piece in enumerate(pieces)},
            merges=learned,
            unk_token=UNKNOWN,
            end_of_word_suffix=END_OF_WORD,
        )
        tokenizer = library.Tokenizer(model)
        tokenizer.pre_tokenizer = library.pre_tokenizers.Split(library.Regex(_WHITESPACE), "removed")
        tokenizer.decoder = library.decoders.BPEDecoder(suffix=END_OF_WORD)
        tokenizer.add_special_tokens(list(WHOLE))
        return cls(tokenizer.to_str(pretty=True).encode())

    def of_text(self, words: Iterable[str]) -> BPE:
        """Return the encoding restricted to the pieces and characters of a text with these words."""
        divisible = {word for word in words if word not in WHOLE}
        characters = {character for word in divisible for character in word}
        ends = {character + END_OF_WORD for character in characters}
        return self.restricted({piece for word in divisible for piece in self.cut(word)} | characters | ends)

    def restricted(self, tokens: Iterable[str]) -> BPE:
        """Return the encoding restricted to the pieces that are among `tokens`."""
        allowed = self.pieces.intersection(tokens)
        return self if allowed == self.pieces else replace(self, allowed=allowed)

    @cached_property
    def pieces(self) -> frozenset[str]:
        """Every piece that may be used."""
        if self.allowed is not None:
            return self.allowed
        return frozenset(json.loads(self.file)["model"]["vocab"]) - {UNKNOWN}

    def cut(self, word: str) -> tuple[str, ...]:
        """Split a word into pieces. A word with a character that is not a piece is returned whole."""
        pieces = self._cuts.get(word)
        if pieces is None:
            pieces = self._cuts[word] = self._cut(word)
        return pieces

    def _cut(self, word: str) -> tuple[str, ...]:
        if word in WHOLE or not self.pieces.issuperset(word):
            return (word,)
        if _holds_reserved(word):
            return (*word[:-1], word[-1] + END_OF_WORD)
        pieces = [token.value for token in self._tokenizer.model.tokenize(word)]
        return tuple(pieces if self.pieces.issuperset(pieces) else self._undo(pieces))

    def _undo(self, pieces: list[str]) -> Iterator[str]:
        """Yield the pieces, with every piece that is not allowed replaced by the two that it was merged from."""
        stack = pieces[::-1]
        while stack:
            piece = stack.pop()
            if piece in self.pieces or piece not in self._merged_from:
                yield piece
            else:
                left, right = self._merged_from[piece]
                stack += right, left

    def known_parts(self, word: str) -> list[str]:
        """Split a word around its unknown characters, each run of which becomes `<unk>`.

        In a script without spaces a word is a whole line, which one unknown character must not make unknown.
        """
        if word in WHOLE or self.pieces.issuperset(word):
            return [word]
        runs = groupby(word, self.pieces.__contains__)
        parts = ("".join(run) if known else UNKNOWN for known, run in runs)
        return [UNKNOWN if part in WHOLE else part for part in parts]  # a symbol inside a word is not an end of line

    def count(self, counts: Mapping[str, int]) -> Counter[str]:
        """Return the count of each piece; pieces that occur only inside longer ones have the count 0."""
        pieces = Counter(dict.fromkeys(self.pieces, 0))
        for word, count in counts.items():
            for piece in self.cut(word):
                pieces[piece] += count
        return pieces

    def ends_word(self, token: str) -> bool:
        """Whether a token is the last piece of a word, or a whole word."""
        return token.endswith(END_OF_WORD) or token not in self.pieces

    def join(self, tokens: Iterable[str]) -> list[str]:
        """Join tokens to words. Pieces at the end that lack `</w>` form a word as well."""
        words, partial = [], ""
        for token in tokens:
            if token not in self.pieces:
                words += [partial, token] if partial else [token]
                partial = ""
            elif token.endswith(END_OF_WORD):
                words.append(partial + token.removesuffix(END_OF_WORD))
                partial = ""
            else:
                partial += token
        return [*words, partial] if partial else words

    @cached_property
    def _cuts(self) -> dict[str, tuple[str, ...]]:
        """Pieces of the words split so far: a text repeats its words."""
        return {}

    @cached_property
    def _merged_from(self) -> dict[str, tuple[str, str]]:
        """The two pieces that each longer piece was merged from, by the merge that was learned first."""
        merges = json.loads(self.file)["model"]["merges"]
        return {left + right: (left, right) for left, right in reversed(merges)}

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        tokenizer: Tokenizer = _library().Tokenizer.from_str(self.file.decode())
        return tokenizer


def readable(token: str) -> str:
    """Format a token for people: the last piece of a word is shown as it is, other pieces with dots."""
    if token.endswith(END_OF_WORD):
        return token.removesuffix(END_OF_WORD)
    return token if token in _RESERVED else f"{token}…"


def _limited(word: str) -> Iterable[str]:
    """Split a very long word into parts for training."""
    if len(word) <= _LONGEST:
        return (word,)
    return (word[first : first + _LONGEST] for first in range(0, len(word), _LONGEST))


def _holds_reserved(word: str) -> bool:
    """Whether merges inside a word could produce a reserved symbol; such words are split into characters."""
    return any(symbol in word for symbol in _RESERVED)


def _library() -> ModuleType:
    try:
        import tokenizers
    except ImportError as error:
        raise SettingsError("vocabulary.bpe needs the package tokenizers; pip install tokenizers") from error
    return tokenizers
