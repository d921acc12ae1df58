"""The tokenizer of an exported model, as a `PreTrainedTokenizerFast`.

It gives a text the ids of the model's vocabulary. A line break is `<eos>`, as in our texts, and so is the start of a
text, because a prompt starts a line. `decode` turns `<eos>` back into line breaks. It returns a space before every
word, also before the first, so that the text of new tokens can be appended to the prompt, as pipelines do.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerFast

from reefknot.nn.constants import END_OF_LINE, END_OF_WORD, UNKNOWN

_WHITESPACE = r" \t\r\n\x0B\x0C"  # separates words in storage/lines.py
_PRIVATE_CHARACTERS = "\ue000\ue001"


def build_tokenizer(
    words: Sequence[str], bpe_file: bytes | None = None, *, eos_at: str = "start", split_unknown: bool = False
) -> Any:
    """Return a tokenizer whose ids are the positions of the words.

    Args:
        words: The tokens of a vocabulary, in the order of their ids.
        bpe_file: The content of the run's tokenizer.json, if the tokens are sub-words.
        eos_at: Where `<eos>` is added to every text, if the vocabulary has it: at the `start`, as in a prompt, or at
            the `end`, as in a sentence to translate.
        split_unknown: Of a word with unknown characters, replace only these characters by `<unk>`, as `reefknot
            translate` does. By default, the whole word becomes `<unk>`. This has an effect on sub-words only.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors

    ids = {word: index for index, word in enumerate(words)}
    symbols = [symbol for symbol in (END_OF_LINE, UNKNOWN) if symbol in ids]
    steps: list[Any] = []
    if END_OF_LINE in ids:
        steps.append(normalizers.Replace("\n", f" {END_OF_LINE} "))
    if bpe_file is None:
        model = _word_model(ids)
        word_decoders = [decoders.WordPiece(prefix="\0", cleanup=False), decoders.Fuse()]
    else:
        model = _bpe_model(ids, bpe_file)
        word_decoders = [
            decoders.BPEDecoder(suffix=END_OF_WORD),
            decoders.Fuse(),
            decoders.Replace(Regex(rf"{UNKNOWN}(?=[^{_WHITESPACE}])"), f"{UNKNOWN} "),
        ]
        if UNKNOWN in ids:
            steps.append(_replace_unknown(ids, split_unknown))

    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(f"[{_WHITESPACE}]+"), "removed")
    tokenizer.decoder = decoders.Sequence(
        [
            *word_decoders,
            decoders.Replace(Regex(r"\A(?=.)"), " "),
            decoders.Replace(Regex(f" ?{END_OF_LINE} ?"), "\n"),
        ]
    )
    # The normalizer writes symbols into the text, so they are looked for after it.
    tokenizer.add_special_tokens([AddedToken(symbol, normalized=True, special=True) for symbol in symbols])
    if END_OF_LINE in ids:
        template = f"{END_OF_LINE} $A" if eos_at == "start" else f"$A {END_OF_LINE}"
        tokenizer.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=[(END_OF_LINE, ids[END_OF_LINE])]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        padding_side="left" if eos_at == "start" else "right",
        clean_up_tokenization_spaces=False,
        **_named_symbols(symbols),
    )


def _word_model(ids: dict[str, int]) -> Any:
    from tokenizers import models

    # Without <unk> in the vocabulary, an unknown word raises an error.
    return models.WordLevel(ids, unk_token=UNKNOWN)


def _bpe_model(ids: dict[str, int], bpe_file: bytes) -> Any:
    from tokenizers import models

    merges = [(left, right) for left, right in json.loads(bpe_file)["model"]["merges"]]
    unk_token = UNKNOWN if UNKNOWN in ids else None
    return models.BPE(vocab=ids, merges=merges, unk_token=unk_token, end_of_word_suffix=END_OF_WORD)


def _replace_unknown(ids: dict[str, int], split: bool) -> Any:
    """Return a normalizer that replaces unknown characters, or words that contain them, by <unk>."""
    from tokenizers import Regex, normalizers

    known = "".join(re.escape(token) for token in ids if len(token) == 1)
    not_space = f"[^{_WHITESPACE}]"
    if not split:
        # The lookarounds are the limits of a word. A symbol that stands alone is not a word.
        start = f"(?<!{not_space})(?!(?:{END_OF_LINE}|{UNKNOWN})(?!{not_space}))"
        unknown = f"[^{_WHITESPACE}{known}]"
        return normalizers.Replace(Regex(f"{start}{not_space}*{unknown}{not_space}*"), UNKNOWN)
    # While unknown characters are replaced, private characters stand for the symbols.
    hide, restore = [], []
    for symbol, private in zip((END_OF_LINE, UNKNOWN), _PRIVATE_CHARACTERS, strict=True):
        hide.append(normalizers.Replace(Regex(f"(?<!{not_space}){symbol}(?!{not_space})"), private))
        restore.append(normalizers.Replace(private, symbol))
    unknown = f"[^{_WHITESPACE}{known}{_PRIVATE_CHARACTERS}]+"
    return normalizers.Sequence([*hide, normalizers.Replace(Regex(unknown), f" {UNKNOWN} "), *restore])


def _named_symbols(symbols: Sequence[str]) -> dict[str, str]:
    """Return the special tokens by the names that transformers gives them."""
    names = {}
    if UNKNOWN in symbols:
        names["unk_token"] = UNKNOWN
    if END_OF_LINE in symbols:
        names |= {"bos_token": END_OF_LINE, "eos_token": END_OF_LINE, "pad_token": END_OF_LINE}
    return names
