"""Tatoeba's English-German sentences (manythings.org/anki, file of 2018-05-13): 169,813 pairs, as they were written.

Many sentences have several translations, or occur again with different punctuation. If pairs were split at random,
translations of the test text would be in the training text. Therefore groups of sentences that share translations stay
together. The groups are the connected components of a graph: its nodes are the sentences of both languages, normalised
(without case, punctuation and spaces), and each pair is an edge. Components are sorted by the SHA-256 of their smallest
English sentence. The first 2,000 are the validation text, the next 2,000 are the test text, and the others are the
training text. So no normalised sentence of either language is in two splits.

The validation and test texts keep one pair for each normalised English sentence, the one with the lowest SHA-256, so
that no sentence counts twice in BLEU. This gives 164,418 training, 2,156 validation and 2,165 test pairs.

deu-eng.zip is read as it is published: English, tab, German.
"""

from __future__ import annotations

import hashlib
import zipfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from reefknot.errors import DataError
from reefknot.lab.text.prepared import NamedLines, PreparedCorpus
from reefknot.lab.text.published import find_all_files

_ARCHIVE = "deu-eng.zip"
_ARCHIVE_MEMBER = "deu.txt"
_HELD_OUT = 2_000  # components for each of valid and test

_Pair = tuple[str, str]  # English, German
_Node = tuple[str, str]  # language, normalised sentence


def _read_lines(files: list[Path]) -> NamedLines:
    (path,) = files
    components = sorted(_find_components(_read_pairs(path)), key=_component_hash)
    for index, component in enumerate(components):
        split = _choose_split(index)
        pairs = component if split == "train" else _keep_one_translation(component)
        for english, german in pairs:
            yield f"{split}.en", english
            yield f"{split}.de", german


def _read_pairs(path: Path) -> Iterator[_Pair]:
    with zipfile.ZipFile(path) as archive:
        if _ARCHIVE_MEMBER not in archive.namelist():
            raise DataError(f"{path} does not contain {_ARCHIVE_MEMBER}; download it again")
        lines = archive.read(_ARCHIVE_MEMBER).decode().removesuffix("\n").split("\n")
    for line_number, line in enumerate(lines, start=1):
        columns = line.removesuffix("\r").split("\t")
        if len(columns) != 2:
            raise DataError(f"{path}, line {line_number}: not English, tab, German; download it again")
        yield columns[0], columns[1]


def _choose_split(index: int) -> str:
    """Return the split of a component, from its index in the order of the hashes."""
    if index < _HELD_OUT:
        return "valid"
    return "test" if index < 2 * _HELD_OUT else "train"


def _find_components(pairs: Iterable[_Pair]) -> Iterable[list[_Pair]]:
    """Return the pairs of each connected component of the graph of normalised sentences, by union-find.

    Every node points to a parent in its component, and the root of a component points to itself. For each pair, the
    root of the German sentence is made to point to the root of the English sentence, which joins their components.
    """
    parents: dict[_Node, _Node] = {}

    def find_root(node: _Node) -> _Node:
        while (parent := parents.setdefault(node, node)) != node:
            parents[node] = parents[parent]  # path halving
            node = parent
        return node

    edges = []
    for pair in pairs:
        english, german = pair
        english_node, german_node = ("en", _normalise(english)), ("de", _normalise(german))
        parents[find_root(german_node)] = find_root(english_node)
        edges.append((english_node, pair))
    components: dict[_Node, list[_Pair]] = defaultdict(list)
    for english_node, pair in edges:
        components[find_root(english_node)].append(pair)
    return components.values()


def _component_hash(component: list[_Pair]) -> bytes:
    return _hash(min(english for english, _ in component))


def _keep_one_translation(component: list[_Pair]) -> Iterable[_Pair]:
    """Return the translation with the lowest hash for each English sentence."""
    pair_by_english: dict[str, _Pair] = {}
    for pair in sorted(component, key=lambda pair: _hash("\t".join(pair))):
        pair_by_english.setdefault(_normalise(pair[0]), pair)
    return pair_by_english.values()


def _normalise(sentence: str) -> str:
    """Return the letters and digits of a sentence, case-folded."""
    return "".join(filter(str.isalnum, sentence.casefold()))


def _hash(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


TATOEBA = PreparedCorpus(
    name="tatoeba",
    description="Tatoeba English-German; sentences that share translations are in one group; 2,000 groups are"
    " validation text and 2,000 test text, chosen by hash",
    how_to_get="It is published at https://www.manythings.org/anki/; the file of 2018-05-13 is needed.",
    expected=_ARCHIVE,
    folders=("tatoeba-deu-eng", "tatoeba"),
    files=lambda folder: find_all_files(folder, _ARCHIVE),
    lines=_read_lines,
    sha256={_ARCHIVE: "b7688f84f99fa33c17397c14d8bd9cef1fdeb2ee0bf50074767023aee8926e28"},
    version=2,
    languages=("en", "de"),
)
