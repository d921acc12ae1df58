"""Exchange with gensim: it reads our files, we read its files, and `KeyedVectors` are converted in memory."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from reefknot.errors import DataError, SettingsError
from reefknot.vectors.files import FORMATS, read_vectors, write_vectors
from reefknot.vectors.word_vectors import WordVectors, from_keyed_vectors, to_keyed_vectors

from .sample_words import PLAIN, STRANGE

LOAD_OPTIONS = {"word2vec": {}, "word2vec-binary": {"binary": True}, "glove": {"no_header": True}}


def _vectors(counts: bool = False) -> WordVectors:
    rows = np.random.default_rng(1).standard_normal((len(PLAIN), 7)).astype(np.float32) * 1e-3
    return WordVectors(PLAIN, rows, np.arange(len(PLAIN))[::-1] if counts else None)


@pytest.mark.parametrize("format", LOAD_OPTIONS)
def test_gensim_reads_our_files(format: str, tmp_path: Path) -> None:
    models = pytest.importorskip("gensim.models")
    write_vectors(_vectors(), tmp_path / "v", format)
    keyed = models.KeyedVectors.load_word2vec_format(str(tmp_path / "v"), **LOAD_OPTIONS[format])
    assert tuple(keyed.index_to_key) == PLAIN
    assert keyed.vectors.tobytes() == _vectors().vectors_VD.tobytes()


@pytest.mark.parametrize("format", LOAD_OPTIONS)
def test_gensim_files_are_read(format: str, tmp_path: Path) -> None:
    pytest.importorskip("gensim")
    keyed = to_keyed_vectors(_vectors(counts=True))
    options = {"word2vec": {}, "word2vec-binary": {"binary": True}, "glove": {"write_header": False}}[format]
    keyed.save_word2vec_format(str(tmp_path / "v"), **options)
    vectors = read_vectors(tmp_path / "v")
    assert vectors.words == PLAIN
    assert vectors.vectors_VD.tobytes() == _vectors().vectors_VD.tobytes()


@pytest.mark.parametrize("word", STRANGE)
@pytest.mark.parametrize("format", LOAD_OPTIONS)
def test_gensim_reads_every_word_that_we_write(word: str, format: str, tmp_path: Path) -> None:
    models = pytest.importorskip("gensim.models")
    vectors = WordVectors((word, "b"), np.ones((2, 3), np.float32))
    try:
        write_vectors(vectors, tmp_path / "v", format)
    except DataError:
        return
    keyed = models.KeyedVectors.load_word2vec_format(str(tmp_path / "v"), **LOAD_OPTIONS[format])
    assert tuple(keyed.index_to_key) == (word, "b")


@pytest.mark.parametrize("counts", [False, True])
def test_vectors_survive_conversion_to_keyed_vectors_and_back(counts: bool) -> None:
    pytest.importorskip("gensim")
    vectors = _vectors(counts)
    keyed = to_keyed_vectors(vectors)
    assert keyed["日本"].tolist() == vectors.vector("日本").tolist()
    nearest = keyed.most_similar("the", topn=1)[0]
    cosines = vectors.unit_VD @ vectors.unit_VD[0]
    assert nearest[0] == PLAIN[int(np.argsort(-cosines)[1])]
    assert nearest[1] == pytest.approx(np.sort(cosines)[-2], abs=1e-6)
    back = from_keyed_vectors(keyed)
    assert back.words == PLAIN
    assert back.vectors_VD.tobytes() == vectors.vectors_VD.tobytes()
    assert (back.counts is not None) == counts
    if counts:
        assert keyed.get_vecattr("</s>", "count") == len(PLAIN) - 2
        assert back.counts is not None
        assert back.counts.tolist() == list(range(len(PLAIN)))[::-1]


def test_vectors_of_a_trained_gensim_model_can_be_written_in_every_format(tmp_path: Path) -> None:
    models = pytest.importorskip("gensim.models")
    model = models.Word2Vec([["a", "b", "c", "d"]] * 20, vector_size=4, min_count=1, workers=1, epochs=1, seed=1)
    vectors = from_keyed_vectors(model)
    assert vectors.counts is not None
    assert vectors.counts.tolist() == [20] * 4
    for format in FORMATS:
        write_vectors(vectors, tmp_path / format, format)
        assert read_vectors(tmp_path / format).vectors_VD.tobytes() == model.wv.vectors.tobytes()


def test_missing_gensim_and_other_objects_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gensim.models", None)
    with pytest.raises(SettingsError, match=r"needs gensim; install it with: pip install 'reefknot\[gensim\]'"):
        to_keyed_vectors(_vectors())
    with pytest.raises(DataError, match=r"expected gensim's KeyedVectors .*, not dict"):
        from_keyed_vectors({})
