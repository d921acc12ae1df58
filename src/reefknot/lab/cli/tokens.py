"""`reefknot tokens`: count the sub-words that both languages of a parallel text share (Press & Wolf 2017, Table 1).

The more sub-words the two languages share, the more a translator gains from one table of word vectors for both.
`tokens` finds the texts of a corpus, a folder or a recipe, and `_count_subwords` counts one text.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from reefknot.lab.cli.options import CheckOption, DataOption, JsonOption, print_result

if TYPE_CHECKING:
    from reefknot.lab.text.corpus import CorpusSettings
    from reefknot.lab.text.pair_dataset import PairDataset
    from reefknot.lab.text.vocabulary_settings import VocabularySettings

EXAMPLES = """\b
Examples:
  reefknot tokens press2017/table8 --data DIR
  reefknot tokens multi30k --merges 10000 --data DIR
  reefknot tokens FOLDER --source ja --target en --json
"""

COUNTS = ("source_only", "target_only", "both", "source_tokens", "target_tokens")
"""Names of the counts, in the order of the columns. They are also the keys in JSON."""


class TextSettings(NamedTuple):
    """The settings of a parallel text."""

    corpus: CorpusSettings
    vocabulary: VocabularySettings


def tokens(
    texts: Annotated[
        str,
        typer.Argument(metavar="RECIPE|CORPUS", help="A recipe, a parallel corpus, or a folder of parallel text."),
    ],
    row: Annotated[
        str | None, typer.Option(help="Count only the text of this row (experiment of the recipe). [default: all rows]")
    ] = None,
    data: DataOption = None,
    check: CheckOption = False,
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
    as_json: JsonOption = False,
) -> None:
    """Count the sub-words of a parallel text that occur only in the source, only in the target, or in both.

    Sub-words are learned from both languages together, and counted in the sentence pairs that a model is trained on.
    <eos> and <unk> do not count. The last two columns are the numbers of tokens in each language.
    """
    from reefknot.lab.config.settings import check_settings
    from reefknot.lab.text.pair_dataset import open_pairs
    from reefknot.lab.text.vocabulary_settings import VocabularySettings

    # Find the texts. The argument `texts` is a corpus, a folder or a recipe.
    settings_by_name = _find_corpus_texts(texts, row, source, target, data)
    if settings_by_name is None:
        settings_by_name = _find_recipe_texts(texts, row, source or target)
    merges_vocabulary = None
    if merges is not None:
        merges_vocabulary = check_settings(VocabularySettings, {"bpe": {"merges": merges}}, "--merges")

    # Count the sub-words of each text.
    notify = partial(typer.echo, err=True)
    counts_by_name = {}
    for name, settings in settings_by_name.items():
        vocabulary = merges_vocabulary or settings.vocabulary
        dataset = open_pairs(settings.corpus, vocabulary, data=data, notify=notify)
        counts_by_name[name] = _count_subwords(dataset)

    # Print a table with one line per text.
    width = max(len(name) for name in counts_by_name)
    titles = "".join(f"  {column.replace('_', ' '):>13}" for column in COUNTS)
    lines = [" " * width + titles]
    for name, counts in counts_by_name.items():
        cells = "".join(f"  {counts[column]:>13,}" for column in COUNTS)
        lines.append(f"{name:<{width}}{cells}")
    print_result(counts_by_name, "\n".join(lines), as_json)


def _find_corpus_texts(
    name: str, row: str | None, source: str | None, target: str | None, data: Path | None
) -> dict[str, TextSettings] | None:
    """Return the settings of a parallel corpus or of a folder, by its name; None if `name` is neither."""
    from reefknot.errors import SettingsError
    from reefknot.lab.config.settings import check_settings
    from reefknot.lab.text.corpora import parallel_corpora
    from reefknot.lab.text.corpus import CorpusSettings
    from reefknot.lab.text.vocabulary_settings import BPESettings, VocabularySettings

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
        raise SettingsError(
            f"{name}: only the sub-words of parallel text are counted; pass the languages with --source and --target, "
            "as they are in the file names"
        )
    corpus = check_settings(CorpusSettings, {"name": name, "pairs": pairs}, name)
    vocabulary = VocabularySettings(bpe=BPESettings())
    return {name: TextSettings(corpus, vocabulary)}


def _find_recipe_texts(name: str, row: str | None, language: str | None) -> dict[str, TextSettings]:
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
    settings_by_row: dict[str, TextSettings] = {}
    for row_name, experiment in recipe.experiments.items():
        vocabulary = experiment.vocabulary.model_copy(update={"sides": "joint"})
        settings = TextSettings(experiment.corpus, vocabulary)
        if experiment.corpus.pairs is not None and settings not in settings_by_row.values():
            settings_by_row[row_name] = settings
    if not settings_by_row:
        raise SettingsError(
            f"{name} does not train on parallel text; pass a recipe for translation, or a parallel corpus"
        )
    return settings_by_row


def _count_subwords(dataset: PairDataset) -> dict[str, str | int | None]:
    """Return the record of a text: the corpus, its sizes, and the `COUNTS` of the training text."""
    import numpy as np

    from reefknot.nn.constants import END_OF_LINE, UNKNOWN

    vocabulary = dataset.vocabulary
    train_split = dataset.splits["train"]

    # How often every sub-word occurs in each language. <eos> and <unk> do not count.
    source_counts = np.bincount(train_split.source.ids, minlength=len(vocabulary))
    target_counts = np.bincount(train_split.target.ids, minlength=len(vocabulary))
    symbol_ids = [vocabulary.id_of(symbol) for symbol in (END_OF_LINE, UNKNOWN) if symbol in vocabulary]
    source_counts[symbol_ids] = 0
    target_counts[symbol_ids] = 0

    in_source = source_counts > 0
    in_target = target_counts > 0
    bpe = dataset.vocabulary_settings.bpe
    return {
        "corpus": dataset.name,
        "merges": None if bpe is None else bpe.merges,
        "pairs": train_split.pairs,
        "source_only": int((in_source & ~in_target).sum()),
        "target_only": int((in_target & ~in_source).sum()),
        "both": int((in_source & in_target).sum()),
        "source_tokens": int(source_counts.sum()),
        "target_tokens": int(target_counts.sum()),
    }
