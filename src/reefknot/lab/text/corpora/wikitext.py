"""WikiText-2 and WikiText-103 (Merity et al. 2017), word level. Both have the same valid and test texts."""

from __future__ import annotations

from reefknot.lab.text.published import PublishedCorpus

_FILES = {"train": "wiki.train.tokens", "valid": "wiki.valid.tokens", "test": "wiki.test.tokens"}
_HELD_OUT_TOKENS = {"valid": 217_646, "test": 245_569}
_HELD_OUT_SHA256 = {
    "wiki.valid.tokens": "f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8",
    "wiki.test.tokens": "d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0",
}

WIKITEXT_2 = PublishedCorpus(
    name="wikitext-2",
    description="WikiText-2, word level",
    how_to_get="The files are in wikitext-2-v1.zip.",
    files=_FILES,
    tokens={"train": 2_088_628, **_HELD_OUT_TOKENS},
    types=33_278,
    sha256={
        "wiki.train.tokens": "9e9fa1ad55b1c2c95b08e37dd8e653f638fac2c6de904b79e813611eefbc985f",
        **_HELD_OUT_SHA256,
    },
)

WIKITEXT_103 = PublishedCorpus(
    name="wikitext-103",
    description="WikiText-103, word level",
    how_to_get="The files are in wikitext-103-v1.zip.",
    files=_FILES,
    tokens={"train": 103_227_021, **_HELD_OUT_TOKENS},
    types=267_735,
    sha256=_HELD_OUT_SHA256,
)
