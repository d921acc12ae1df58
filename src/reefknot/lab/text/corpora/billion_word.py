"""The One Billion Word benchmark (Chelba et al. 2013): shuffled sentences of news, one per line.

The release has 99 training shards (files) and 50 held-out shards. The first held-out shard is the test text, as in
every paper, and the eleventh is the validation text. Papers keep the words that occur at least three times
(`vocabulary.min_count` is 3).
"""

from __future__ import annotations

from pathlib import Path

from reefknot.lab.text.prepared import NamedLines, PreparedCorpus
from reefknot.lab.text.published import find_all_files

_TRAINING_FOLDER = "training-monolingual.tokenized.shuffled"
_HELD_OUT_FOLDER = "heldout-monolingual.tokenized.shuffled"
_TRAINING_SHARDS = tuple(f"news.en-{number:05}-of-00100" for number in range(1, 100))
_HELD_OUT_SPLITS = {"news.en.heldout-00010-of-00050": "valid", "news.en.heldout-00000-of-00050": "test"}
_RELEASE = "1-billion-word-language-modeling-benchmark-r13output"


def _find_files(folder: Path) -> list[Path]:
    training_shards = [f"{_TRAINING_FOLDER}/{shard}" for shard in _TRAINING_SHARDS]
    held_out_shards = [f"{_HELD_OUT_FOLDER}/{shard}" for shard in _HELD_OUT_SPLITS]
    return find_all_files(folder, *training_shards, *held_out_shards)


def _read_lines(files: list[Path]) -> NamedLines:
    for path in files:
        split = _HELD_OUT_SPLITS.get(path.name, "train")
        with path.open(encoding="utf-8", newline="\n") as file:
            for line in file:
                yield split, line.rstrip("\n")


BILLION_WORD = PreparedCorpus(
    name="billion-word",
    description="One Billion Word, individual sentences; held-out shards 10 (validation text) and 0 (test text)",
    how_to_get="It is published at https://www.statmt.org/lm-benchmark/.",
    expected=f"{_TRAINING_FOLDER} ({_TRAINING_SHARDS[0]} to {_TRAINING_SHARDS[-1]}) and "
    f"{_HELD_OUT_FOLDER} ({' and '.join(_HELD_OUT_SPLITS)})",
    folders=("billion-word", _RELEASE),
    files=_find_files,
    lines=_read_lines,
    sha256={
        "news.en.heldout-00000-of-00050": "265dccd51762253e20425c21ff6ddf09e6da2e11a365da399b0390eebb2d52c8",
        "news.en.heldout-00010-of-00050": "13d5e6e54f5a1f12549f997029954781df3fb87b84e628f4ea802ca08e852399",
    },
)
