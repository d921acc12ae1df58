"""WMT 2014, as Press & Wolf (2017) and Pappas & Henderson (2019) train translators on it: the user's own files.

Which training text, and how it was cleaned and tokenised, differs from paper to paper and is left to whoever brings
it; valid is newstest2013, test newstest2014. Press & Wolf also test English-German on newstest2015.
"""

from __future__ import annotations

from reefknot.lab.text.pairs import published
from reefknot.lab.text.prepared import Preparation

_STEMS = {"train": "train", "valid": "newstest2013", "test": "newstest2014"}


def _wmt(language: str, named: str) -> Preparation:
    return published(
        title=f"WMT 2014 English-{named}, the user's files; newstest2013 and newstest2014 are valid and test",
        stems=_STEMS,
        languages=("en", language),
        places=(f"wmt14-en-{language}",),
    )


WMT14_EN_DE = _wmt("de", "German")
WMT14_EN_FR = _wmt("fr", "French")
