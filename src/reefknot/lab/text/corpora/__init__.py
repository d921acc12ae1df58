"""The corpora that a recipe can name, such as `wikitext-2`. Each has a file in this folder and a line in `CORPORA`.

To add a corpus, write a file in this folder that defines a `PublishedCorpus` or a `PreparedCorpus` (see
`lab/text/published.py` and `lab/text/prepared.py`), and add a line to `CORPORA`. A file is not imported until its
corpus is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from reefknot.lab.text.published import Corpus

# The module and the object of each corpus.
CORPORA = {
    "python-docs": "reefknot.lab.text.corpora.python_docs:PYTHON_DOCS",
    "ptb": "reefknot.lab.text.corpora.ptb:PTB",
    "wikitext-2": "reefknot.lab.text.corpora.wikitext:WIKITEXT_2",
    "wikitext-103": "reefknot.lab.text.corpora.wikitext:WIKITEXT_103",
    "text8": "reefknot.lab.text.corpora.text8:TEXT8",
    "imdb": "reefknot.lab.text.corpora.imdb:IMDB",
    "bbc": "reefknot.lab.text.corpora.bbc:BBC",
    "enwiki-sample": "reefknot.lab.text.corpora.enwiki:ENWIKI",
    "billion-word": "reefknot.lab.text.corpora.billion_word:BILLION_WORD",
    "multi30k": "reefknot.lab.text.corpora.multi30k:MULTI30K",
    "multi30k-raw": "reefknot.lab.text.corpora.multi30k:MULTI30K_RAW",
    "tatoeba": "reefknot.lab.text.corpora.tatoeba:TATOEBA",
    "wmt14-en-de": "reefknot.lab.text.corpora.wmt:WMT14_EN_DE",
    "wmt14-en-fr": "reefknot.lab.text.corpora.wmt:WMT14_EN_FR",
}


def known_corpus(name: str) -> Corpus | None:
    """Return the corpus with this name, or None if the name is not in `CORPORA`."""
    if name not in CORPORA:
        return None
    module_name, _, attribute = CORPORA[name].partition(":")
    module = importlib.import_module(module_name)
    return cast("Corpus", getattr(module, attribute))


def known_corpora() -> dict[str, Corpus]:
    """Return every corpus by name. This imports the files of all corpora."""
    corpora = {}
    for name in CORPORA:
        corpus = known_corpus(name)
        if corpus is not None:
            corpora[name] = corpus
    return corpora


def parallel_corpora() -> dict[str, Corpus]:
    """Return every corpus of parallel text by name."""
    return {name: corpus for name, corpus in known_corpora().items() if corpus.languages}
