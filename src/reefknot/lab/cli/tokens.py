"""`reefknot tokens`: how many sub-words the two sides of parallel text share (Press & Wolf 2017, table 1)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from reefknot.lab.cli.options import AsJson, Data, emit

if TYPE_CHECKING:
    from reefknot.lab.text.corpus import CorpusSettings
    from reefknot.lab.text.pair_dataset import PairDataset
    from reefknot.lab.text.vocabulary import VocabularySettings

    Texts = dict[str, tuple[CorpusSettings, VocabularySettings]]

EXAMPLES = """\b
Examples:
  reefknot tokens press2017/table8 --data DIR
  reefknot tokens multi30k --merges 10000 --data DIR
  reefknot tokens FOLDER --source ja --target en --json
"""

FIGURES = ("source_only", "target_only", "both", "source_tokens", "target_tokens")


def tokens(
    texts: Annotated[
        str, typer.Argument(metavar="RECIPE|CORPUS", help="A recipe, a corpus of pairs, or a folder that holds one.")
    ],
    row: Annotated[str | None, typer.Option(help="One row of the recipe only.")] = None,
    data: Data = None,
    source: Annotated[str | None, typer.Option(help="Language of a corpus that is translated.")] = None,
    target: Annotated[str | None, typer.Option(help="Language that it is translated into.")] = None,
    merges: Annotated[
        int | None, typer.Option(help="Merges of byte-pair encoding; else the recipe's, or 32,000.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Count the sub-words of a training text that its source alone has, its target alone, and both.

    Sub-words are learned on both sides together. Counted are those of the pairs that are trained on, without <eos>
    and <unk>; tokens are how often they occur.
    """
    from reefknot.lab.config.settings import check
    from reefknot.lab.text.pair_dataset import open_pairs
    from reefknot.lab.text.vocabulary import VocabularySettings

    chosen = _of_corpus(texts, row, source, target) or _of_recipe(texts, row, source or target)
    pieces = check(VocabularySettings, {"bpe": {"merges": merges}}, "--merges") if merges is not None else None
    found = {}
    for name, (corpus, vocabulary) in chosen.items():
        dataset = open_pairs(corpus, pieces or vocabulary, data=data, say=lambda text: typer.echo(text, err=True))
        found[name] = _count(dataset)
    width = max(map(len, found))
    lines = [" " * width + "".join(f"  {figure.replace('_', ' '):>13}" for figure in FIGURES)]
    lines += [f"{name:<{width}}" + "".join(f"  {each[key]:>13,}" for key in FIGURES) for name, each in found.items()]
    emit(found, "\n".join(lines), as_json)


def _of_corpus(name: str, row: str | None, source: str | None, target: str | None) -> Texts | None:
    """The corpus of that name or the folder, None if there is neither."""
    from pathlib import Path

    from reefknot.errors import SettingsError
    from reefknot.lab.config.settings import check
    from reefknot.lab.text.corpora import parallel_corpora
    from reefknot.lab.text.corpus import CorpusSettings
    from reefknot.lab.text.vocabulary import BPESettings, VocabularySettings

    known = parallel_corpora().get(name)
    if known is None and not Path(name).is_dir():
        return None
    if row is not None:
        raise SettingsError(f"--row is for a recipe, and {name} is a corpus; leave it out")
    languages = (None, None) if known is None else known.languages
    pairs = {"source": source or languages[0], "target": target or languages[1]}
    if None in pairs.values():
        raise SettingsError(f"{name}: say which languages with --source and --target, as its files are called")
    corpus = check(CorpusSettings, {"name": name, "pairs": pairs}, name)
    return {name: (corpus, VocabularySettings(bpe=BPESettings()))}


def _of_recipe(name: str, row: str | None, language: str | None) -> Texts:
    """What the rows of a recipe are trained on, each text once, under its first row; sub-words always joint."""
    from reefknot.errors import SettingsError
    from reefknot.lab.recipes.file import RecipeNotFound
    from reefknot.lab.recipes.recipe import load_recipe
    from reefknot.lab.text.corpora import parallel_corpora

    try:
        recipe = load_recipe(name, (), row)
    except RecipeNotFound as error:
        hint = f"the corpora of pairs are {', '.join(parallel_corpora())}, or a folder"
        raise SettingsError(f"{error}; {hint}") from error
    if language is not None:
        raise SettingsError("--source and --target are for a corpus; a recipe names its languages itself")
    texts: Texts = {}
    for each, experiment in recipe.experiments.items():
        text = experiment.corpus, experiment.vocabulary.model_copy(update={"sides": "joint"})
        if experiment.task == "translation" and text not in texts.values():
            texts[each] = text
    if not texts:
        raise SettingsError(f"{name} trains on no parallel text; name a recipe of translation, or a corpus of pairs")
    return texts


def _count(dataset: PairDataset) -> dict[str, str | int | None]:
    import numpy as np

    from reefknot.lab.text.vocabulary import END_OF_LINE, UNKNOWN

    words, split = dataset.vocabulary, dataset.splits["train"]
    seen = [np.bincount(side.ids, minlength=len(words)) for side in (split.source, split.target)]
    for counts in seen:
        counts[[words.id_of(symbol) for symbol in (END_OF_LINE, UNKNOWN) if symbol in words]] = 0
    source, target = (counts > 0 for counts in seen)
    bpe = dataset.vocabulary_settings.bpe
    figures = (source & ~target, target & ~source, source & target, *seen)
    return {
        "corpus": dataset.name,
        "merges": None if bpe is None else bpe.merges,
        "pairs": split.pairs,
        **{key: int(figure.sum()) for key, figure in zip(FIGURES, figures, strict=True)},
    }
