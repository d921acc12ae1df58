"""Tatoeba's English-German sentences (manythings.org/anki, file of 2018-05-13): 169,813 pairs, as they were written.

Many sentences have several translations, or occur again with different punctuation. If pairs were split at random,
translations of the test text would be in the training text. Therefore groups of sentences that share translations stay
together:

* The groups are the connected components of a graph. Its nodes are the sentences of both languages, normalised (without
  case, punctuation and spaces), and each pair is an edge.
* Components are sorted by the SHA-256 of their smallest English sentence. The first 2,000 are the validation text, the
  next 2,000 are the test text, and the others are the training text.
* For each normalised English sentence, the validation and test texts keep only the pair with the lowest SHA-256, so
  that no sentence counts twice in BLEU.

So no normalised sentence of either language is in two splits. There are 164,418 training, 2,156 validation and 2,165
test pairs.

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
_NUM_HELD_OUT = 2_000  # components for each of valid and test

_Pair = tuple[str, str]  # English, German
_Node = tuple[str, str]  # language, normalised sentence


def _read_lines(files: list[Path]) -> NamedLines:
    (path,) = files
    components = _find_components(_read_pairs(path))
    components.sort(key=_component_hash)
    for index, component in enumerate(components):
        split = _choose_split(index)
        pairs = component
        if split != "train":
            pairs = _keep_one_translation(component)
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
        english, german = columns
        yield english, german


def _choose_split(index: int) -> str:
    """Return the split of a component, from its index in the order of the hashes."""
    if index < _NUM_HELD_OUT:
        return "valid"
    if index < 2 * _NUM_HELD_OUT:
        return "test"
    return "train"


def _find_components(pairs: Iterable[_Pair]) -> list[list[_Pair]]:
    """Return the pairs of each connected component of the graph of normalised sentences, by union-find.

    Every node points to a parent in its component, and the root of a component points to itself. For each pair, the
    root of the German sentence is made to point to the root of the English sentence, which joins their components.
    """
    parents: dict[_Node, _Node] = {}

    def find_root(node: _Node) -> _Node:
        parents.setdefault(node, node)
        while parents[node] != node:
            parent = parents[node]
            parents[node] = parents[parent]  # path halving
            node = parent
        return node

    # Join the components of both sentences of each pair.
    pairs_with_nodes = []
    for english, german in pairs:
        english_node = ("en", _normalise(english))
        german_node = ("de", _normalise(german))
        english_root = find_root(english_node)
        german_root = find_root(german_node)
        parents[german_root] = english_root
        pairs_with_nodes.append(((english, german), english_node))

    # Collect the pairs of each component.
    components: dict[_Node, list[_Pair]] = defaultdict(list)
    for pair, english_node in pairs_with_nodes:
        components[find_root(english_node)].append(pair)
    return list(components.values())


def _component_hash(component: list[_Pair]) -> bytes:
    smallest_sentence = min(english for english, _ in component)
    return _hash(smallest_sentence)


def _keep_one_translation(component: list[_Pair]) -> list[_Pair]:
    """Return the translation with the lowest hash for each English sentence."""
    pair_by_english: dict[str, _Pair] = {}
    for pair in sorted(component, key=_pair_hash):
        english, _ = pair
        pair_by_english.setdefault(_normalise(english), pair)
    return list(pair_by_english.values())


def _pair_hash(pair: _Pair) -> bytes:
    return _hash("\t".join(pair))


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
