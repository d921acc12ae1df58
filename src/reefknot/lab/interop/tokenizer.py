"""The tokenizer of an exported model, which Hugging Face's `tokenizers` and transformers load.

It gives a text the ids of the model's vocabulary. A line break is `<eos>`, as in our texts, and so is the start of a
text, because a prompt starts a line. `decode` turns `<eos>` back into line breaks. It returns a space before every
word, also before the first, so that the text of new tokens can be appended to the prompt, as pipelines do.

`<eos>` and `<unk>` are symbols only where white space separates them from other words, but `tokenizers` looks for them
inside words, too. Therefore, the normalizer inserts a mark into such words: a white-space character that does not occur
in normalized text otherwise. A word of the vocabulary has the same mark, and decoding removes it. With sub-words, the
mark separates all characters of the word, because we split such words into characters.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from reefknot.lab.text.bpe import RESERVED_SYMBOLS
from reefknot.lab.text.vocabulary import Vocabulary
from reefknot.nn.constants import END_OF_LINE, END_OF_WORD, UNKNOWN

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_WHITESPACE = r" \t\r\n\x0B\x0C"  # separates words in storage/lines.py
_NOT_SPACE = f"[^{_WHITESPACE}]"
_SYMBOLS = (END_OF_LINE, UNKNOWN)
_HIDDEN = "\x0b"
"""The mark inside a word that contains a symbol."""
_MARKS = {END_OF_LINE: "\x0b", UNKNOWN: "\x0c"}
"""Stand for symbols for a while."""
_START = f"(?<!{_NOT_SPACE})(?!(?:{'|'.join(_SYMBOLS)})(?!{_NOT_SPACE}))"
"""An expression for the start of a word. A symbol that stands alone is not a word."""


def build_tokenizer(vocabulary: Vocabulary, *, eos_at: str = "start", split_unknown: bool = False) -> Tokenizer:
    """Return a tokenizer with the ids of a vocabulary and of its spelled words.

    Args:
        vocabulary: The vocabulary. Its sub-words must not be restricted.
        eos_at: Where `<eos>` is added to every text, if the vocabulary has it: at the `start`, as in a prompt, or at
            the `end`, as in a sentence to translate.
        split_unknown: Of a word with unknown characters, replace only these characters by `<unk>`, as `reefknot
            translate` does. By default, this is as in the vocabulary. It has an effect on sub-words only.
    """
    from tokenizers import AddedToken, Tokenizer, pre_tokenizers, processors

    words = (*vocabulary.words, *vocabulary.spelled_words)
    ids = {_hide_symbols(word): index for index, word in enumerate(words)}
    symbols = [symbol for symbol in _SYMBOLS if symbol in ids]
    tokenizer = Tokenizer(_build_model(ids, vocabulary))
    split_unknown = split_unknown or (vocabulary.bpe is not None and vocabulary.bpe.splits_unknown)
    tokenizer.normalizer = _build_normalizer(ids, vocabulary.bpe is not None, split_unknown)
    splits = [pre_tokenizers.Split(" ", "removed")]
    if vocabulary.bpe is not None:
        splits.append(pre_tokenizers.Split(_HIDDEN, "merged_with_previous"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits)
    tokenizer.decoder = _build_decoder(vocabulary.bpe is not None)
    # The normalizer writes symbols into the text, so they are looked for after it.
    tokenizer.add_special_tokens([AddedToken(symbol, normalized=True, special=True) for symbol in symbols])
    if END_OF_LINE in ids:
        template = f"{END_OF_LINE} $A" if eos_at == "start" else f"$A {END_OF_LINE}"
        tokenizer.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=[(END_OF_LINE, ids[END_OF_LINE])]
        )
    return tokenizer


def _build_model(ids: dict[str, int], vocabulary: Vocabulary) -> Any:
    """Return the part of the tokenizer that looks words up, or splits them into sub-words."""
    from tokenizers import models

    if vocabulary.bpe is None:
        # Without <unk> in the vocabulary, an unknown word raises an error.
        return models.WordLevel(ids, unk_token=UNKNOWN)
    merges = [(left, right) for left, right in json.loads(vocabulary.bpe.file_content)["model"]["merges"]]
    # The normalizer replaces unknown characters. Without unk_token, the model drops the only one that is left, the
    # mark. It does not add </w> to the character before it.
    return models.BPE(vocab=ids, merges=merges, end_of_word_suffix=END_OF_WORD)


def _build_normalizer(ids: dict[str, int], has_subwords: bool, split_unknown: bool) -> Any:
    """Return a normalizer that writes `<eos>` for line breaks, and `<unk>` for unknown characters of sub-words."""
    from tokenizers import Regex, normalizers

    line_break = f" {END_OF_LINE} " if END_OF_LINE in ids else " "
    steps = [normalizers.Replace(Regex(r"[\t\r\x0B\x0C]"), " "), normalizers.Replace("\n", line_break)]
    if not has_subwords:
        steps += [normalizers.Replace(Regex(_inside_word(symbol)), f"<{_HIDDEN}") for symbol in _SYMBOLS]
        return normalizers.Sequence(steps)
    if UNKNOWN in ids:
        steps.append(_replace_unknown(ids, split_unknown))
    # Mark the end of every word that contains a reserved symbol, and then separate the characters before such an end.
    end_mark = "\x0c"
    reserved = "|".join(RESERVED_SYMBOLS)
    steps += [
        normalizers.Replace(Regex(rf"{_START}{_NOT_SPACE}*(?:{reserved}){_NOT_SPACE}*\K"), end_mark),
        normalizers.Replace(Regex(f"(?<={_NOT_SPACE})(?={_NOT_SPACE}+{end_mark})"), _HIDDEN),
        normalizers.Replace(end_mark, ""),
    ]
    return normalizers.Sequence(steps)


def _replace_unknown(ids: dict[str, int], split: bool) -> Any:
    """Return a normalizer that replaces unknown characters, or words that contain them, by <unk>."""
    from tokenizers import Regex, normalizers

    unknown = f"[^{_WHITESPACE}{''.join(re.escape(token) for token in ids if len(token) == 1)}]"
    if not split:
        return normalizers.Replace(Regex(f"{_START}{_NOT_SPACE}*{unknown}{_NOT_SPACE}*"), UNKNOWN)
    alone = {symbol: Regex(f"(?<!{_NOT_SPACE}){symbol}(?!{_NOT_SPACE})") for symbol in _SYMBOLS}
    mark = _MARKS[UNKNOWN]
    return normalizers.Sequence(
        [
            *(normalizers.Replace(alone[symbol], _MARKS[symbol]) for symbol in _SYMBOLS),
            normalizers.Replace(Regex(f"{unknown}+"), f" {mark} "),
            # A symbol that stands alone only now was a part of a word.
            *(normalizers.Replace(alone[symbol], mark) for symbol in _SYMBOLS),
            *(normalizers.Replace(_MARKS[symbol], symbol) for symbol in _SYMBOLS),
        ]
    )


def _inside_word(symbol: str) -> str:
    """Return an expression for the first character of a symbol that is a part of a word."""
    rest = symbol.removeprefix("<")
    return f"(?<={_NOT_SPACE})<(?={rest})|<(?={rest}{_NOT_SPACE})"


def _hide_symbols(word: str) -> str:
    """Return a word of the vocabulary as the normalizer writes it."""
    for symbol in _SYMBOLS:
        word = re.sub(_inside_word(symbol), f"<{_HIDDEN}", word)
    return word


def _build_decoder(has_subwords: bool) -> Any:
    """Return a decoder that joins tokens to a text with line breaks."""
    from tokenizers import Regex, decoders

    steps: list[Any] = [decoders.Replace(Regex(rf"\A{END_OF_LINE}\z"), "\n")]
    if has_subwords:
        mark = _MARKS[UNKNOWN]
        steps += [
            decoders.Replace(Regex(rf"\A{UNKNOWN}\z"), f"{UNKNOWN}{mark}"),
            decoders.BPEDecoder(suffix=END_OF_WORD),
            decoders.Fuse(),
            decoders.Replace(Regex(f"{mark}(?={_NOT_SPACE})"), " "),
            decoders.Replace(mark, ""),
        ]
    else:
        steps += [decoders.WordPiece(prefix="\0", cleanup=False), decoders.Fuse(), decoders.Replace(_HIDDEN, "")]
    steps += [decoders.Replace(Regex(r"\A(?=.)"), " "), decoders.Replace(Regex(" ?\n ?"), "\n")]
    return decoders.Sequence(steps)
