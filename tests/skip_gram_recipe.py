"""A small skip-gram recipe with an untied and a tied row, and similarity judgements of its words."""

from __future__ import annotations

from pathlib import Path

RECIPE = """
title = "Tiny: skip-gram on a made text"

[base.corpus]
name = {corpus}

[base.vocabulary]
min_count = 2

[base.skip_gram]
dim = 8

[base.training]
epochs = 2
log_every = 50

[base.evaluation]
similarity = true

[[rows]]
name = "untied"
[rows.paper_similarity]
input = {{ SimLex-999 = 0.30, MEN = 0.66 }}
output = {{ SimLex-999 = 0.29, MEN = 0.61 }}

[[rows]]
name = "tied"
paper_similarity.tied = {{ SimLex-999 = 0.17, MEN = 0.50 }}
[rows.set]
skip_gram.tied = true
"""


def write_recipe(folder: Path, corpus: Path) -> Path:
    """Write the recipe for a text."""
    path = folder / "vectors.toml"
    path.write_text(RECIPE.format(corpus=repr(str(corpus))), encoding="utf-8")
    return path


def write_judgements(folder: Path) -> Path:
    """Write a data folder with one benchmark of 999 pairs, 60 of them with words of the text."""
    benchmarks = folder / "data" / "word-similarity"
    benchmarks.mkdir(parents=True)
    pairs = [(f"w{n % 10}", f"w{n % 7 + 10}", n % 11) for n in range(60)]
    pairs += [("king", f"queen{n}", n) for n in range(939)]
    (benchmarks / "EN-SIMLEX-999.txt").write_text(
        "".join(f"{first}\t{second}\t{score}\n" for first, second, score in pairs), encoding="utf-8"
    )
    return benchmarks.parent
