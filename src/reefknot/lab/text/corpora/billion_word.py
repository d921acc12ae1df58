"""The One Billion Word benchmark (Chelba et al. 2013): shuffled sentences of news, one per line.

The release has 99 training shards and 50 held-out shards. The first held-out shard is the test text, as in every paper,
and the eleventh is the validation text. Papers keep the words that occur at least three times (`vocabulary.min_count`
is 3).
"""

from __future__ import annotations

from pathlib import Path

from reefknot.lab.text.prepared import NamedLines, PreparedCorpus
from reefknot.lab.text.published import find_all_files

_TRAIN = tuple(f"news.en-{shard:05}-of-00100" for shard in range(1, 100))
_HELD_OUT = {"news.en.heldout-00010-of-00050": "valid", "news.en.heldout-00000-of-00050": "test"}
_FOLDERS = ("training-monolingual.tokenized.shuffled", "heldout-monolingual.tokenized.shuffled")
_RELEASE = "1-billion-word-language-modeling-benchmark-r13output"


def _find_files(folder: Path) -> list[Path]:
    training_folder, held_out_folder = _FOLDERS
    training_shards = [f"{training_folder}/{name}" for name in _TRAIN]
    held_out_shards = [f"{held_out_folder}/{name}" for name in _HELD_OUT]
    return find_all_files(folder, *training_shards, *held_out_shards)


def _read_lines(files: list[Path]) -> NamedLines:
    for path in files:
        split = _HELD_OUT.get(path.name, "train")
        with path.open(encoding="utf-8", newline="\n") as file:
            yield from ((split, line.rstrip("\n")) for line in file)


BILLION_WORD = PreparedCorpus(
    name="billion-word",
    description="One Billion Word, individual sentences; held-out shards 10 (validation text) and 0 (test text)",
    how_to_get="It is published at https://www.statmt.org/lm-benchmark/.",
    expected=f"{_FOLDERS[0]} ({_TRAIN[0]} to {_TRAIN[-1]}) and {_FOLDERS[1]} ({' and '.join(_HELD_OUT)})",
    folders=("billion-word", _RELEASE),
    files=_find_files,
    lines=_read_lines,
    sha256={
        "news.en.heldout-00000-of-00050": "265dccd51762253e20425c21ff6ddf09e6da2e11a365da399b0390eebb2d52c8",
        "news.en.heldout-00010-of-00050": "13d5e6e54f5a1f12549f997029954781df3fb87b84e628f4ea802ca08e852399",
    },
)
