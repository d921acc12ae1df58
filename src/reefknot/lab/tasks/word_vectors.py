"""Open and evaluate the word vectors of trained models.

    vectors_by_end = open_vectors("runs/demo/untied/seed0")     # {"input": WordVectors, "output": WordVectors}

The ends of a model are the input end, which turns ids into vectors, and the output end (classifier and loss), which has
one class vector per word. Vectors are kept by end: `input` and `output`, or only `tied` if both ends have the same
vectors. `evaluate_vectors` computes what result.json records about them.

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
    is_projector_folder = (path / VECTORS).exists()
    if path.is_dir() and not is_projector_folder:
        return open_run(path, device).vectors()
    return {"vectors": read_vectors(path, notify=notify)}


def compute_end_vectors(model: LanguageModel) -> dict[str, torch.Tensor]:
    """Return the vectors of all tokens at the input and at the output.

    An input end that reads spellings may have additional vectors, of words outside the vocabulary.
    """
    with evaluating(model):
        return {"input": model.input.vectors(), "output": model.output.vectors()}


def build_word_vectors(
    tensors_by_end: Mapping[str, torch.Tensor], vocabulary: Vocabulary, *, tied: bool
) -> dict[str, WordVectors]:
    """Return vectors with their words and counts. If tied ends have equal vectors, return them once, as `tied`."""
    tensors_by_end = {end: vectors_VD.detach().float().cpu() for end, vectors_VD in tensors_by_end.items()}
    if tied and torch.equal(tensors_by_end["input"][: len(vocabulary)], tensors_by_end["output"]):
        tensors_by_end = {"tied": tensors_by_end["input"]}

    # The words in `spelled_words` are outside the vocabulary, so they have no counts. They come last.
    words = (*vocabulary.words, *vocabulary.spelled_words)
    counts = (*vocabulary.counts, *(0 for _ in vocabulary.spelled_words))
    vectors_by_end = {}
    for end, vectors_VD in tensors_by_end.items():
        num_words = len(vectors_VD)
        vectors_by_end[end] = WordVectors(
            words[:num_words],
            vectors_VD.numpy(),
            np.asarray(counts[:num_words]),
            subwords=vocabulary.bpe is not None,
        )
    return vectors_by_end


def evaluate_vectors(
    vectors_by_end: Mapping[str, WordVectors],
    vocabulary: Vocabulary,
    benchmarks: Mapping[str, Benchmark],
    *,
    tied: bool,
) -> dict[str, Any]:
    """Return fields of result.json: neighbours of example words, and the correlation with every available benchmark."""
    example_words = select_examples(vocabulary)
    fields: dict[str, Any] = {"neighbors": _find_neighbors(vectors_by_end, vocabulary, example_words, tied=tied)}
    if benchmarks:
        from reefknot.lab.evaluation.similarity import score_benchmark

        fields["similarity"] = {
            end: tuple(score_benchmark(vectors, benchmark) for benchmark in benchmarks.values())
            for end, vectors in vectors_by_end.items()
        }
    return fields


def describe_words(
    vectors_by_end: Mapping[str, WordVectors], vocabulary: Vocabulary, words: Sequence[str], *, tied: bool
) -> dict[str, Any]:
    """Return fields of result.json for words that all ends have: their neighbours, and a picture of them (2-D PCA)."""
    from reefknot.lab.evaluation.pca import project_words

    neighbors = _find_neighbors(vectors_by_end, vocabulary, words, tied=tied)
    return {"neighbors": neighbors, "embedding": project_words(vectors_by_end, vocabulary, words)}


def _find_neighbors(
    vectors_by_end: Mapping[str, WordVectors], vocabulary: Vocabulary, words: Sequence[str], *, tied: bool
) -> Neighbors:
    """Return neighbours by end. Words outside the vocabulary, which only have a spelling, are not neighbours."""
    if vocabulary.spelled_words:
        vectors_by_end = {
            end: vectors.select(vectors.words[: len(vocabulary)]) for end, vectors in vectors_by_end.items()
        }
    neighbors_by_end = {
        end: nearest_words(vectors, list(words), NUM_NEIGHBORS) for end, vectors in vectors_by_end.items()
    }
    if "tied" in neighbors_by_end:
        return Neighbors(input=neighbors_by_end["tied"], output=neighbors_by_end["tied"], tied=tied)
    return Neighbors(input=neighbors_by_end["input"], output=neighbors_by_end["output"], tied=tied)


def store_embedding(folder: Path) -> RunResult:
    """Compute the picture (2-D PCA) of a finished run's word vectors, and store it in result.json.

    Training does not compute it. The first report or record that shows the picture does.
    """
    from reefknot.lab.evaluation.pca import project_words
    from reefknot.lab.tasks import open_run

    trained_run = open_run(folder)
    result = trained_run.run.result
    assert result is not None  # a finished run
    embedding = project_words(trained_run.vectors(), trained_run.vocabulary)
    result = result.replace(embedding=embedding)
    trained_run.run.write_result(result)
    return result


def measure_subspace(model: LanguageModel, vocabulary: Vocabulary) -> Subspace:
    """Return the subspace distance of Inan et al. between the ends, over the words of the vocabulary."""
    from reefknot.lab.evaluation.subspace import between_ends

    tensors_by_end = compute_end_vectors(model)
    input_VD = tensors_by_end["input"][: len(vocabulary)].detach().float().cpu().numpy()
    output_VD = tensors_by_end["output"][: len(vocabulary)].detach().float().cpu().numpy()
    return between_ends(input_VD, output_VD)
