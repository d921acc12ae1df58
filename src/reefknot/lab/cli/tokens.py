"""`reefknot tokens`: count the sub-words that both languages of a parallel text share (Press & Wolf 2017, Table 1).

The more sub-words the two languages share, the more a translator gains from one table for both. `tokens` finds the
texts of a corpus, a folder or a recipe, and `_count_subwords` counts one text.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from reefknot.lab.cli.options import AsJson, Data, print_result

if TYPE_CHECKING:
    from reefknot.lab.text.corpus import CorpusSettings
    from reefknot.lab.text.pair_dataset import PairDataset
    from reefknot.lab.text.vocabulary import VocabularySettings

    TextSettings = dict[str, tuple[CorpusSettings, VocabularySettings]]
    """Settings of parallel texts, by the name that the table shows."""

EXAMPLES = """\b
Examples:
  reefknot tokens press2017/table8 --data DIR
  reefknot tokens multi30k --merges 10000 --data DIR
  reefknot tokens FOLDER --source ja --target en --json
"""

COUNTS = ("source_only", "target_only", "both", "source_tokens", "target_tokens")
"""Names of the counts, in the order of the columns. They are also the keys in JSON."""


def tokens(
    texts: Annotated[
        str,
        typer.Argument(metavar="RECIPE|CORPUS", help="A recipe, a parallel corpus, or a folder of parallel text."),
    ],
    row: Annotated[
        str | None, typer.Option(help="Count only the text of this row (experiment of the recipe). [default: all rows]")
    ] = None,
    data: Data = None,
    source: Annotated[
        str | None, typer.Option(help="Source language, if you pass a folder or a corpus with several languages.")
    ] = None,
    target: Annotated[
        str | None, typer.Option(help="Target language, if you pass a folder or a corpus with several languages.")
    ] = None,
    merges: Annotated[
        int | None,
        typer.Option(
            help="Number of byte-pair merges to learn. [default: the recipe's setting, or 32,000]",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Count the sub-words of a parallel text that occur only in the source, only in the target, or in both.

    Sub-words are learned from both languages together, and counted in the sentence pairs that a model is trained on.
    <eos> and <unk> do not count. The last two columns are the numbers of tokens in each language.
    """
    from reefknot.lab.config.settings import check_settings
    from reefknot.lab.text.pair_dataset import open_pairs
    from reefknot.lab.text.vocabulary import VocabularySettings

    settings = _find_corpus_texts(texts, row, source, target, data)
    if settings is None:
        settings = _find_recipe_texts(texts, row, source or target)
    merges_vocabulary = None
    if merges is not None:
        merges_vocabulary = check_settings(VocabularySettings, {"bpe": {"merges": merges}}, "--merges")
    counts = {}
    for name, (corpus, vocabulary) in settings.items():
        notify = partial(typer.echo, err=True)
        counts[name] = _count_subwords(open_pairs(corpus, merges_vocabulary or vocabulary, data=data, notify=notify))
    width = max(map(len, counts))
    lines = [" " * width + "".join(f"  {column.replace('_', ' '):>13}" for column in COUNTS)]
    lines += [
        f"{name:<{width}}" + "".join(f"  {text_counts[column]:>13,}" for column in COUNTS)
        for name, text_counts in counts.items()
    ]
    print_result(counts, "\n".join(lines), as_json)


def _find_corpus_texts(
    name: str, row: str | None, source: str | None, target: str | None, data: Path | None
) -> TextSettings | None:
    """Return the settings of a parallel corpus or of a folder; None if `name` is neither."""
    from reefknot.errors import SettingsError
    from reefknot.lab.config.settings import check_settings
    from reefknot.lab.text.corpora import parallel_corpora
    from reefknot.lab.text.corpus import CorpusSettings
    from reefknot.lab.text.vocabulary import BPESettings, VocabularySettings

    published = parallel_corpora().get(name)
    if published is None and not Path(name).is_dir():
        return None
    if row is not None:
        raise SettingsError(f"--row has no effect on {name}, which is a corpus and not a recipe; leave --row out")
    if published is None and data is not None:
        raise SettingsError(f"--data has no effect on {name}, which is itself the folder of a text; leave --data out")
    languages = (None, None) if published is None else published.languages
    pairs = {"source": source or languages[0], "target": target or languages[1]}
    if None in pairs.values():
        raise SettingsError(f"{name}: pass the languages with --source and --target, as they are in the file names")
    corpus = check_settings(CorpusSettings, {"name": name, "pairs": pairs}, name)
    return {name: (corpus, VocabularySettings(bpe=BPESettings()))}


def _find_recipe_texts(name: str, row: str | None, language: str | None) -> TextSettings:
    """Return the settings of a recipe's parallel texts, each by the name of the first row that is trained on it.

    Sub-words are counted as if both languages shared one vocabulary, whatever the row's setting is.
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
    texts: TextSettings = {}
    for row_name, experiment in recipe.experiments.items():
        settings = experiment.corpus, experiment.vocabulary.model_copy(update={"sides": "joint"})
        if experiment.corpus.pairs is not None and settings not in texts.values():
            texts[row_name] = settings
    if not texts:
        raise SettingsError(
            f"{name} does not train on parallel text; pass a recipe for translation, or a parallel corpus"
        )
    return texts


def _count_subwords(dataset: PairDataset) -> dict[str, str | int | None]:
    """Count the sub-words and tokens of the training text."""
    import numpy as np

    from reefknot.lab.text.vocabulary import END_OF_LINE, UNKNOWN

    vocabulary, split = dataset.vocabulary, dataset.splits["train"]
    symbol_ids = [vocabulary.id_of(symbol) for symbol in (END_OF_LINE, UNKNOWN) if symbol in vocabulary]
    source_counts = np.bincount(split.source.ids, minlength=len(vocabulary))
    target_counts = np.bincount(split.target.ids, minlength=len(vocabulary))
    source_counts[symbol_ids] = 0
    target_counts[symbol_ids] = 0
    in_source, in_target = source_counts > 0, target_counts > 0
    bpe = dataset.vocabulary_settings.bpe
    columns = (in_source & ~in_target, in_target & ~in_source, in_source & in_target, source_counts, target_counts)
    return {
        "corpus": dataset.name,
        "merges": None if bpe is None else bpe.merges,
        "pairs": split.pairs,
        **{column: int(values.sum()) for column, values in zip(COUNTS, columns, strict=True)},
    }
