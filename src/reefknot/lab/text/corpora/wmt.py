"""WMT 2014, a translation benchmark that Press & Wolf (2017) and Pappas & Henderson (2019) use.

The user provides the files. The papers differ in the choice, cleaning and tokenisation of the training text, so these
are left to the user.

The validation text is newstest2013, and the test text is newstest2014. Press & Wolf also test English-German on
newstest2015.
"""

from __future__ import annotations

from reefknot.lab.text.pairs import published_pairs
from reefknot.lab.text.prepared import PreparedCorpus


def _define_wmt14(language_code: str, language: str) -> PreparedCorpus:
    return published_pairs(
        name=f"wmt14-en-{language_code}",
        description=f"WMT 2014 English-{language}, the user's files; validation on newstest2013, test on newstest2014",
        how_to_get="The texts are published at https://www.statmt.org/wmt14/translation-task.html; clean and tokenise"
        " them as you like.",
        languages=("en", language_code),
        stems={"train": "train", "valid": "newstest2013", "test": "newstest2014"},
    )


WMT14_EN_DE = _define_wmt14("de", "German")
WMT14_EN_FR = _define_wmt14("fr", "French")
