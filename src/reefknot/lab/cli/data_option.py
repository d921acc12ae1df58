"""Checks of `--data DIR`. A data folder that nothing is read from is an error, because the user expects otherwise."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from reefknot.lab.tasks.contract import Experiment


def check_data(data: Path | None, corpora: Iterable[str], reader: str) -> None:
    """Raise an error if `data` is given but none of the corpora is read from it. `reader` names what reads them."""
    from reefknot.errors import SettingsError

    names = list(dict.fromkeys(corpora))
    if data is not None and names and not any(map(is_downloaded, names)):
        raise SettingsError(f"--data has no effect: {reader} reads {', '.join(names)}, not a data folder; leave it out")


def is_downloaded(corpus: str) -> bool:
    """Return whether a corpus is read from the data folder: not a folder of text, and not part of Python."""
    from reefknot.lab.text.corpora import known_corpus

    known = known_corpus(corpus)
    return known is not None and known.needs_data


def check_training_data(data: Path | None, experiments: Iterable[Experiment], reader: str) -> None:
    """Raise an error if `data` is given, but training these experiments reads nothing from it."""
    experiments = list(experiments)
    if not any(experiment.judges_similarity for experiment in experiments):
        check_data(data, (experiment.corpus.name for experiment in experiments), reader)


def data_for(experiment: Experiment, data: Path | None) -> Path | None:
    """Return the data folder if training the experiment reads from it, and None otherwise."""
    return data if experiment.judges_similarity or is_downloaded(experiment.corpus.name) else None
