"""Encode any text with the vocabulary of a trained model, so that the model can score it.

    encoded = encode_text(open_text("news.txt.gz"), vocabulary)
    encoded.split.ids

The text is read like the text of `reefknot train --text` (`sources.py`): lines without words are skipped. Its ids are
held in memory, 4 bytes per token, and nothing is written to disk.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from reefknot.errors import DataError
from reefknot.lab.text.encoding import ID, Split
from reefknot.lab.text.sources import TextSource
from reefknot.lab.text.vocabulary import Vocabulary
from reefknot.nn.constants import END_OF_LINE
from reefknot.storage.lines import read_stream
from reefknot.storage.progress import Notify, report_progress, silent


class EncodedText(NamedTuple):
    """A text as ids, and the words whose spelling a model needs to read it."""

    split: Split
    """The text. Its name is the name of the source. Its SHA-256 is that of the lines as UTF-8, so it does not depend on
    compression or on the encoding of the file."""
    spelled_words: tuple[str, ...]
    """Words outside the vocabulary, in the order of their input ids. Empty if the model does not read spellings."""


def encode_text(
    source: TextSource, vocabulary: Vocabulary, *, keep_spellings: bool = False, notify: Notify = silent
) -> EncodedText:
    """Encode a text. Unknown words become `<unk>`, or are rejected if the vocabulary does not have `<unk>`.

    Args:
        source: The text.
        vocabulary: The vocabulary of the model.
        keep_spellings: Give words outside the vocabulary their own input ids, for a model that reads spellings.
        notify: Called with lines of progress.
    """
    digest = hashlib.sha256()

    def encode_lines() -> Iterator[bytes]:
        for line in source.read_lines():
            encoded_line = line.encode() + b"\n"
            digest.update(encoded_line)
            yield encoded_line

    ids, inputs = array("i"), array("i")
    new_input_ids: dict[str, int] = {}
    first_new_id = len(vocabulary) + len(vocabulary.spelled_words)
    num_words = num_lines = num_bytes = 0
    lines = read_stream(encode_lines(), source.name)
    for line in report_progress(lines, lambda _: f"{source.name}: {len(ids):,} tokens encoded", notify):
        tokens = line.words if vocabulary.eos is None else [*line.words, END_OF_LINE]
        try:
            ids.extend(vocabulary.encode(tokens))
        except DataError as error:
            raise DataError(f"{source.name}, line {line.number:,} of the lines with words: {error}") from None
        if keep_spellings:
            for token in tokens:
                if vocabulary.can_read(token):
                    inputs.append(vocabulary.id_of(token))
                else:
                    inputs.append(new_input_ids.setdefault(token, first_new_id + len(new_input_ids)))
        num_words += len(line.words)
        num_lines += 1
        num_bytes += line.size

    ids_array = np.array(ids, dtype=ID)
    split = Split(
        name=source.name,
        ids=ids_array,
        words=num_words,
        lines=num_lines,
        bytes=num_bytes,
        unknown=vocabulary.count_unknown(ids_array),
        separate_inputs=np.array(inputs, dtype=ID) if keep_spellings else None,
        sha256=digest.hexdigest(),
    )
    return EncodedText(split, tuple(new_input_ids))
