"""WikiText-2 and WikiText-103 (Merity et al. 2017), word level, with 2 and 103 million training tokens.

Both have the same validation and test texts.
"""

from __future__ import annotations

from reefknot.lab.text.published import PublishedCorpus

_FILE_NAMES = {"train": "wiki.train.tokens", "valid": "wiki.valid.tokens", "test": "wiki.test.tokens"}
_HELD_OUT_SHA256 = {
    "wiki.valid.tokens": "f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8",
    "wiki.test.tokens": "d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0",
}


def _define_wikitext(
    millions: int, *, train_tokens: int, types: int, train_sha256: str | None = None
) -> PublishedCorpus:
    """Define WikiText-2 or WikiText-103, by the millions of training tokens in its name."""
    sha256 = dict(_HELD_OUT_SHA256)
    if train_sha256 is not None:
        sha256[_FILE_NAMES["train"]] = train_sha256
    return PublishedCorpus(
        name=f"wikitext-{millions}",
        description=f"WikiText-{millions}, word level",
        how_to_get=f"The files are in wikitext-{millions}-v1.zip.",
        files=_FILE_NAMES,
        tokens={"train": train_tokens, "valid": 217_646, "test": 245_569},
        types=types,
        sha256=sha256,
    )


WIKITEXT_2 = _define_wikitext(
    2,
    train_tokens=2_088_628,
    types=33_278,
    train_sha256="9e9fa1ad55b1c2c95b08e37dd8e653f638fac2c6de904b79e813611eefbc985f",
)
WIKITEXT_103 = _define_wikitext(103, train_tokens=103_227_021, types=267_735)
