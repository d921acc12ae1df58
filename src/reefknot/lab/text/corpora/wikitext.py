"""WikiText-2 and WikiText-103 (Merity et al. 2017), word level, with 2 and 103 million training tokens.

Both have the same validation and test texts.
"""

from __future__ import annotations

from reefknot.lab.text.published import PublishedCorpus

_TRAIN, _VALID, _TEST = "wiki.train.tokens", "wiki.valid.tokens", "wiki.test.tokens"
_HELD_OUT_SHA256 = {
    _VALID: "f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8",
    _TEST: "d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0",
}


def _define_wikitext(
    millions: int, *, train_tokens: int, types: int, train_sha256: str | None = None
) -> PublishedCorpus:
    return PublishedCorpus(
        name=f"wikitext-{millions}",
        description=f"WikiText-{millions}, word level",
        how_to_get=f"The files are in wikitext-{millions}-v1.zip.",
        files={"train": _TRAIN, "valid": _VALID, "test": _TEST},
        tokens={"train": train_tokens, "valid": 217_646, "test": 245_569},
        types=types,
        sha256=({_TRAIN: train_sha256} if train_sha256 else {}) | _HELD_OUT_SHA256,
    )


WIKITEXT_2 = _define_wikitext(
    2,
    train_tokens=2_088_628,
    types=33_278,
    train_sha256="9e9fa1ad55b1c2c95b08e37dd8e653f638fac2c6de904b79e813611eefbc985f",
)
WIKITEXT_103 = _define_wikitext(103, train_tokens=103_227_021, types=267_735)
