"""Multi30k (Elliott et al. 2016): captions of 31,014 pictures in English and German, 29,000 of them for training.

The test text is test_2016_flickr. `multi30k` reads the files that its authors have lower-cased and tokenised, so BLEU
is computed on their tokens (`evaluation.bleu.tokenize = "none"`). `multi30k-raw` reads the captions as they were
written.
"""

from __future__ import annotations

from reefknot.lab.text.pairs import published_pairs

_LANGUAGES = ("en", "de")
_HOW_TO_GET = "It is published at https://github.com/multi30k/dataset, in data/task1."

MULTI30K = published_pairs(
    name="multi30k",
    description="Multi30k English-German, lower-cased and tokenised by its authors; the test text is test_2016_flickr",
    stems={
        "train": "train.lc.norm.tok",
        "valid": "val.lc.norm.tok",
        "test": "test_2016_flickr.lc.norm.tok",
    },
    how_to_get=_HOW_TO_GET,
    languages=_LANGUAGES,
    folders=("multi30k/tok", "multi30k"),
    sha256={
        "train.lc.norm.tok.en": "08925f8e0572bcd5a006702fc5fe20e2d77c6917d4eebd576fc20de6693c2119",
        "train.lc.norm.tok.de": "cb5a23529b65ec2061f1dc446192a9c37382b63cc75f81a0be59d34894b3a505",
        "val.lc.norm.tok.en": "46573ce391ae227f1c72f873392436a20ef18e0a6d518098cfbd70b77c8572ec",
        "val.lc.norm.tok.de": "97232bd273eceb7207f689527386a97e4be2616b18ada47576bdaf96c8ae1f00",
        "test_2016_flickr.lc.norm.tok.en": "5b7f32627cf99eced828311b955dae9800bb52bc8b91cf8b6526829e605b29d2",
        "test_2016_flickr.lc.norm.tok.de": "c6a33d39d48f9f510de147651316cd9d918e09ad0219df734a2f16b6baccacc4",
    },
)

MULTI30K_RAW = published_pairs(
    name="multi30k-raw",
    description="Multi30k English-German as it was written; the test text is test_2016_flickr",
    stems={"train": "train", "valid": "val", "test": "test_2016_flickr"},
    how_to_get=_HOW_TO_GET,
    languages=_LANGUAGES,
    folders=("multi30k/raw", "multi30k-raw", "multi30k"),
    sha256={
        "train.en.gz": "d79cfa999dd4c51d2cb42499b6796d5a882c3a8a961923c25a898c90f8bbd56f",
        "train.de.gz": "726e39b2fa9eb9ffb6dc763fb35a179f80fae06ffc5d28b6ace5faa883de28a6",
        "val.en.gz": "14f7d25ddd868909a9213e361768460edcacdd6ab9d1e77b92560dc10c10dc28",
        "val.de.gz": "f0cba2f995189cf5770f29a8a9a537a3ad3f51657ad873405082ff6863a5e75a",
        "test_2016_flickr.en.gz": "611d361c6334bc7246101d48097c13cf5c4413c5befc793cc629934359d532d9",
        "test_2016_flickr.de.gz": "9204244e408ccb38d2a55cfcd344df15005fc42a07a6e55ca6c52b6ababb8cc8",
    },
)
