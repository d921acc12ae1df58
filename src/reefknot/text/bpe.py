"""Byte-pair encoding: words as pieces, learned from how often characters stand together (Sennrich et al. 2016).

Trained and applied by Hugging Face's `tokenizers`; its file, `tokenizer.json`, reads there as well. Ids are those of
the vocabulary, by frequency, not the file's. The last piece of a word ends in `</w>`, so words can be put together
again. For the same reason `<unk>` is always a word: one with a character that training has not seen is unknown as a
whole, where another reader of the file gives `<unk>` for that character alone.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, repeat
from types import ModuleType
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from reefknot.errors import SettingsError
from reefknot.settings import Count, Settings
from reefknot.text.symbols import END_OF_LINE, END_OF_WORD, PADDING, START, UNKNOWN

if TYPE_CHECKING:
    from tokenizers import Tokenizer

WHOLE = (UNKNOWN, END_OF_LINE)
"""Words that are never cut."""
_RESERVED = (*WHOLE, START, PADDING, END_OF_WORD)
_WHITESPACE = r"[ \t\r\n\x0B\x0C]+"  # what parts words in lines.py: tokenizer.json cuts a text there and nowhere else


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
        learner.train_from_iterator(chain.from_iterable(repeat(word, count) for word, count in words), trainer)
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

    @cached_property
    def pieces(self) -> frozenset[str]:
        """Every piece that a word can be cut into."""
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
        return tuple(token.value for token in self._tokenizer.model.tokenize(word))

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
    def _tokenizer(self) -> Tokenizer:
        tokenizer: Tokenizer = _library().Tokenizer.from_str(self.file.decode())
        return tokenizer


def _holds_reserved(word: str) -> bool:
    """Whether merges inside a word could make what must stay unlike any piece; such words are cut into characters."""
    return any(text in word for text in _RESERVED)


def _library() -> ModuleType:
    try:
        import tokenizers
    except ImportError as error:
        raise SettingsError("vocabulary.bpe needs the package tokenizers; pip install tokenizers") from error
    return tokenizers
