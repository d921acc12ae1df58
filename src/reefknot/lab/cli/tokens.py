"""`reefknot tokens`: count the sub-words that the two sides of a parallel text share (Press & Wolf 2017, Table 1)."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from reefknot.lab.cli.options import AsJson, Data, emit

if TYPE_CHECKING:
    from reefknot.lab.text.corpus import CorpusSettings
    from reefknot.lab.text.pair_dataset import PairDataset
    from reefknot.lab.text.vocabulary import VocabularySettings

    Texts = dict[str, tuple[CorpusSettings, VocabularySettings]]
    """Settings of parallel texts, by the name that the table shows."""

EXAMPLES = """\b
Examples:
  reefknot tokens press2017/table8 --data DIR
  reefknot tokens multi30k --merges 10000 --data DIR
  reefknot tokens FOLDER --source ja --target en --json
"""

COUNTS = ("source_only", "target_only", "both", "source_tokens", "target_tokens")
"""Names of the counts of a text, in the order of the columns."""


def tokens(
    texts: Annotated[
        str,
        typer.Argument(metavar="RECIPE|CORPUS", help="A recipe, a parallel corpus, or a folder of parallel text."),
    ],
    row: Annotated[
        str | None, typer.Option(help="Count only this row of the recipe. By default, all rows are counted.")
    ] = None,
    data: Data = None,
    source: Annotated[
        str | None, typer.Option(help="Source language of a folder, or of a corpus that has several languages.")
    ] = None,
    target: Annotated[
        str | None, typer.Option(help="Target language of a folder, or of a corpus that has several languages.")
    ] = None,
    merges: Annotated[
        int | None,
        typer.Option(
            help="Number of merges of byte-pair encoding. The default is the recipe's setting, or 32,000.",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Count how many sub-words of a training text are in the source only, in the target only, and in both.

    Sub-words are learned on both sides together. They are counted in the pairs that a model is trained on, without
    <eos> and <unk>. The last two columns are the numbers of tokens.
    """
    from reefknot.lab.config.settings import check_settings
    from reefknot.lab.text.pair_dataset import open_pairs
    from reefknot.lab.text.vocabulary import VocabularySettings

    settings = _corpus_texts(texts, row, source, target, data) or _recipe_texts(texts, row, source or target)
    with_merges = (
        check_settings(VocabularySettings, {"bpe": {"merges": merges}}, "--merges") if merges is not None else None
    )
    counts = {}
    for name, (corpus, vocabulary) in settings.items():
        notify = partial(typer.echo, err=True)
        counts[name] = _count(open_pairs(corpus, with_merges or vocabulary, data=data, notify=notify))
    width = max(map(len, counts))
    lines = [" " * width + "".join(f"  {column.replace('_', ' '):>13}" for column in COUNTS)]
    lines += [
        f"{name:<{width}}" + "".join(f"  {text_counts[column]:>13,}" for column in COUNTS)
        for name, text_counts in counts.items()
    ]
    emit(counts, "\n".join(lines), as_json)


def _corpus_texts(
    name: str, row: str | None, source: str | None, target: str | None, data: Path | None
) -> Texts | None:
    """Return the settings of a parallel corpus or of a folder; None if the name is neither."""
    from reefknot.errors import SettingsError
    from reefknot.lab.config.settings import check_settings
    from reefknot.lab.text.corpora import parallel_corpora
    from reefknot.lab.text.corpus import CorpusSettings
    from reefknot.lab.text.vocabulary import BPESettings, VocabularySettings

    known = parallel_corpora().get(name)
    if known is None and not Path(name).is_dir():
        return None
    if row is not None:
        raise SettingsError(f"--row has no effect on {name}, which is a corpus and not a recipe; leave --row out")
    if known is None and data is not None:
        raise SettingsError(f"--data has no effect on {name}, which is itself the folder of a text; leave --data out")
    languages = (None, None) if known is None else known.languages
    pairs = {"source": source or languages[0], "target": target or languages[1]}
    if None in pairs.values():
        raise SettingsError(f"{name}: name the languages with --source and --target, as in the names of the files")
    corpus = check_settings(CorpusSettings, {"name": name, "pairs": pairs}, name)
    return {name: (corpus, VocabularySettings(bpe=BPESettings()))}


def _recipe_texts(name: str, row: str | None, language: str | None) -> Texts:
    """Return the settings of the parallel texts of a recipe, by the name of the first row that is trained on the text.

    Sub-words are counted as if both sides shared one vocabulary, whatever the row's setting is.
    """
    from reefknot.errors import SettingsError
    from reefknot.lab.recipes.file import RecipeNotFound
    from reefknot.lab.recipes.recipe import load_recipe
    from reefknot.lab.text.corpora import parallel_corpora

    try:
        recipe = load_recipe(name, (), row)
    except RecipeNotFound as error:
        hint = f"the parallel corpora are {', '.join(parallel_corpora())}; a folder works too"
        raise SettingsError(f"{error}; {hint}") from error
    if language is not None:
        raise SettingsError(
            "--source and --target have no effect on a recipe, which names its languages; leave them out"
        )
    texts: Texts = {}
    for row_name, experiment in recipe.experiments.items():
        settings = experiment.corpus, experiment.vocabulary.model_copy(update={"sides": "joint"})
        if experiment.corpus.pairs is not None and settings not in texts.values():
            texts[row_name] = settings
    if not texts:
        raise SettingsError(
            f"{name} does not train on parallel text; name a recipe of translation, or a parallel corpus"
        )
    return texts


def _count(dataset: PairDataset) -> dict[str, str | int | None]:
    """Count the sub-words and tokens of the training text."""
    import numpy as np

    from reefknot.lab.text.vocabulary import END_OF_LINE, UNKNOWN

    words, split = dataset.vocabulary, dataset.splits["train"]
    occurrences = [np.bincount(side.ids, minlength=len(words)) for side in (split.source, split.target)]
    for side in occurrences:
        side[[words.id_of(symbol) for symbol in (END_OF_LINE, UNKNOWN) if symbol in words]] = 0
    source, target = (side > 0 for side in occurrences)
    bpe = dataset.vocabulary_settings.bpe
    counted = (source & ~target, target & ~source, source & target, *occurrences)
    return {
        "corpus": dataset.name,
        "merges": None if bpe is None else bpe.merges,
        "pairs": split.pairs,
        **{column: int(values.sum()) for column, values in zip(COUNTS, counted, strict=True)},
    }
