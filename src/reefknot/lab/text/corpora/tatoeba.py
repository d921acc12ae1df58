"""Tatoeba's English-German sentences (manythings.org/anki, file of 2018-05-13): 169,813 pairs, as they were written.

Many sentences have several translations, or occur again with different punctuation. If lines or English sentences were
split at random, references of the test text would be in the training text. Therefore pairs are split by the connected
components of a graph: its nodes are the sentences of both languages without case, punctuation and spaces ("bare"), and
each pair is an edge. Components are sorted by the SHA-256 of their smallest English sentence; the first 2,000 are
valid, the next 2,000 are test, the others train. So no bare sentence of either language is in two splits.

Valid and test keep one pair for each bare English sentence, the one with the lowest SHA-256, so that no sentence counts
twice in BLEU; its other translations are dropped. This gives 164,418 training, 2,156 valid and 2,165 test pairs.

deu-eng.zip is read as it is published: English, tab, German.
"""

from __future__ import annotations

import hashlib
import zipfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from reefknot.errors import DataError
from reefknot.lab.text.prepared import Lines, PreparedCorpus
from reefknot.lab.text.published import all_of

_ARCHIVE = "deu-eng.zip"
_TEXT = "deu.txt"
_HELD_OUT = 2_000  # components for each of valid and test

_Pair = tuple[str, str]  # English, German
_Node = tuple[str, str]  # language, bare sentence


def _lines(files: list[Path]) -> Lines:
    (path,) = files
    by_hash = sorted(_components(_pairs(path)), key=lambda component: _hash(min(english for english, _ in component)))
    for rank, component in enumerate(by_hash):
        split = "valid" if rank < _HELD_OUT else "test" if rank < 2 * _HELD_OUT else "train"
        for english, german in component if split == "train" else _one_translation_each(component):
            yield f"{split}.en", english
            yield f"{split}.de", german


def _pairs(path: Path) -> Iterator[_Pair]:
    with zipfile.ZipFile(path) as archive:
        if _TEXT not in archive.namelist():
            raise DataError(f"{path} does not contain {_TEXT}; download it again")
        lines = archive.read(_TEXT).decode().removesuffix("\n").split("\n")
    for number, line in enumerate(lines, start=1):
        columns = line.removesuffix("\r").split("\t")
        if len(columns) != 2:
            raise DataError(f"{path}, line {number}: not English, tab, German; download it again")
        yield columns[0], columns[1]


def _components(pairs: Iterable[_Pair]) -> Iterable[list[_Pair]]:
    """Return the pairs of each connected component of the graph of bare sentences, by union-find."""
    parents: dict[_Node, _Node] = {}

    def root(node: _Node) -> _Node:
        while (parent := parents.setdefault(node, node)) != node:
            parents[node] = parents[parent]  # path halving
            node = parent
        return node

    edges = []
    for pair in pairs:
        english, german = ("en", _bare(pair[0])), ("de", _bare(pair[1]))
        parents[root(german)] = root(english)
        edges.append((english, pair))
    components: dict[_Node, list[_Pair]] = defaultdict(list)
    for english, pair in edges:
        components[root(english)].append(pair)
    return components.values()


def _one_translation_each(component: list[_Pair]) -> Iterable[_Pair]:
    """Return the translation with the lowest hash for each English sentence."""
    chosen: dict[str, _Pair] = {}
    for pair in sorted(component, key=lambda pair: _hash("\t".join(pair))):
        chosen.setdefault(_bare(pair[0]), pair)
    return chosen.values()


def _bare(sentence: str) -> str:
    """Return the letters and digits of a sentence, case-folded."""
    return "".join(filter(str.isalnum, sentence.casefold()))


def _hash(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


TATOEBA = PreparedCorpus(
    name="tatoeba",
    description="Tatoeba English-German; by hash 2,000 groups of sentences that share translations are valid, 2,000"
    " test",
    how_to_get="It is published at https://www.manythings.org/anki/; the file of 2018-05-13 is needed.",
    expected=_ARCHIVE,
    folders=("tatoeba-deu-eng", "tatoeba"),
    files=lambda folder: all_of(folder, _ARCHIVE),
    lines=_lines,
    sha256={_ARCHIVE: "b7688f84f99fa33c17397c14d8bd9cef1fdeb2ee0bf50074767023aee8926e28"},
    version=2,
    languages=("en", "de"),
)
