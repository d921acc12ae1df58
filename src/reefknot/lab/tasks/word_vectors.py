"""Word vectors of a trained model: reads them from its input end and output end, evaluates them, and opens them.

`open_vectors` opens the word vectors of a run folder or of a file. `evaluate_vectors` computes what result.json records
about them. The input end turns ids into vectors; the output end (classifier and loss) has one class vector per word.

Shapes: V words of the vocabulary, D dimensions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from reefknot.lab.evaluation.neighbors import nearest_words, select_examples
from reefknot.lab.runs.result import Neighbors, RunResult, Subspace
from reefknot.lab.text.vocabulary import Vocabulary
from reefknot.nn.models.language_model import LanguageModel, evaluating
from reefknot.storage.progress import Notify, silent
from reefknot.vectors.word_vectors import WordVectors

if TYPE_CHECKING:
    from reefknot.lab.evaluation.similarity import Benchmark

NUM_NEIGHBORS = 5
"""Number of nearest neighbours of a word in a result."""


def compute_end_vectors(model: LanguageModel) -> dict[str, torch.Tensor]:
    """Return the vectors of all tokens at the input and at the output.

    An input end that reads spellings may have additional vectors, of words outside the vocabulary.
    """
    with evaluating(model):
        return {"input": model.input.vectors(), "output": model.output.vectors()}


def build_word_vectors(
    tensors: Mapping[str, torch.Tensor], vocabulary: Vocabulary, *, tied: bool
) -> dict[str, WordVectors]:
    """Return vectors with their words and counts. If tied ends have equal vectors, return them once, as `tied`."""
    vectors_by_end = {end: tensor.detach().float().cpu() for end, tensor in tensors.items()}
    if tied and torch.equal(vectors_by_end["input"][: len(vocabulary)], vectors_by_end["output"]):
        vectors_by_end = {"tied": vectors_by_end["input"]}
    # The words in `spelled` are outside the vocabulary, so they have no counts. They come last.
    words = (*vocabulary.words, *vocabulary.spelled)
    counts = (*vocabulary.counts, *(0 for _ in vocabulary.spelled))
    return {
        end: WordVectors(
            words[: len(vectors_VD)],
            vectors_VD.numpy(),
            np.asarray(counts[: len(vectors_VD)]),
            subwords=vocabulary.bpe is not None,
        )
        for end, vectors_VD in vectors_by_end.items()
    }


def evaluate_vectors(
    vectors: Mapping[str, WordVectors], vocabulary: Vocabulary, benchmarks: Mapping[str, Benchmark], *, tied: bool
) -> dict[str, Any]:
    """Return fields of result.json: neighbours of example words, and the correlation with every available benchmark."""
    fields: dict[str, Any] = {"neighbors": _find_neighbors(vectors, vocabulary, select_examples(vocabulary), tied=tied)}
    if benchmarks:
        from reefknot.lab.evaluation.similarity import score_benchmark

        fields["similarity"] = {
            end: tuple(score_benchmark(table, benchmark) for benchmark in benchmarks.values())
            for end, table in vectors.items()
        }
    return fields


def describe_words(
    vectors: Mapping[str, WordVectors], vocabulary: Vocabulary, words: Sequence[str], *, tied: bool
) -> dict[str, Any]:
    """Return the nearest neighbours of words that all ends have, and a two-dimensional picture (PCA) of the words."""
    from reefknot.lab.evaluation.pca import project_words

    neighbors = _find_neighbors(vectors, vocabulary, words, tied=tied)
    return {"neighbors": neighbors, "embedding": project_words(vectors, vocabulary, words)}


def store_embedding(folder: Path) -> RunResult:
    """Compute the two-dimensional picture (PCA) of a finished run's word vectors, and store it in result.json.

    Training does not compute it. The first report or record that shows the picture does.
    """
    from reefknot.lab.evaluation.pca import project_words
    from reefknot.lab.tasks import open_run

    trained = open_run(folder)
    result = trained.run.result
    assert result is not None  # a finished run
    result = result.replace(embedding=project_words(trained.vectors(), trained.vocabulary))
    trained.run.write_result(result)
    return result


def _find_neighbors(
    vectors: Mapping[str, WordVectors], vocabulary: Vocabulary, words: Sequence[str], *, tied: bool
) -> Neighbors:
    """Return neighbours by end. Words outside the vocabulary, which only have a spelling, are not neighbours."""
    if vocabulary.spelled:
        vectors = {end: table.select(table.words[: len(vocabulary)]) for end, table in vectors.items()}
    neighbors = {end: nearest_words(table, list(words), NUM_NEIGHBORS) for end, table in vectors.items()}
    input_end, output_end = ("tied", "tied") if "tied" in neighbors else ("input", "output")
    return Neighbors(input=neighbors[input_end], output=neighbors[output_end], tied=tied)


def measure_subspace(model: LanguageModel, vocabulary: Vocabulary) -> Subspace:
    """Return the subspace distance of Inan et al. between the ends, over the words of the vocabulary."""
    from reefknot.lab.evaluation.subspace import between_ends

    vectors_by_end = compute_end_vectors(model)
    input_VD, output_VD = (
        vectors_by_end[end][: len(vocabulary)].detach().float().cpu().numpy() for end in ("input", "output")
    )
    return between_ends(input_VD, output_VD)


def open_vectors(path: str | Path, *, device: str = "cpu", notify: Notify = silent) -> dict[str, WordVectors]:
    """Open the word vectors of a run folder of any task, or of a file in any format.

    A run gives `input` and `output`, or `tied` if both ends have the same vectors. The words are those of its
    vocabulary, including symbols such as <eos> and sub-words; skip-gram gives only the words that were trained. Output
    vectors are the class vectors of the classifier, which need not be rows of a table. A file gives `vectors`.

    Args:
        path: A run folder, a file of vectors, or a folder of the TensorBoard projector.
        device: Device on which the model of a run is opened.
        notify: Called with notes about irregular files.
    """
    from reefknot.lab.tasks import open_run
    from reefknot.vectors.files import read_vectors
    from reefknot.vectors.projector import VECTORS

    path = Path(path)
    if path.is_dir() and not (path / VECTORS).exists():
        return open_run(path, device).vectors()
    return {"vectors": read_vectors(path, notify=notify)}
