"""Datasets: encoding, counts, and how the cache is used, repaired and shared."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from reefknot.errors import CorpusNotFound, DataError
from reefknot.lab.text.corpora import known_corpus
from reefknot.lab.text.corpus import CorpusSettings
from reefknot.lab.text.dataset import Dataset, open_dataset
from reefknot.lab.text.vocabulary import Vocabulary
from reefknot.lab.text.vocabulary_settings import VocabularySettings
from reefknot.storage import manifest
from tiny import PATIENCE

Corpus = Callable[..., Path]
Open = Callable[..., Dataset]


def decoded_text(dataset: Dataset, split: str = "train") -> str:
    return " ".join(dataset.vocabulary.decode(dataset.splits[split].ids.tolist()))


def test_small_corpus_is_encoded_as_expected(corpus: Corpus, opened: Open) -> None:
    dataset = opened(corpus())
    assert decoded_text(dataset) == "the cat sat <eos> the dog sat on the cat <eos> <eos> a bird <eos>"
    assert decoded_text(dataset, "test") == "the bird sat <eos> a <unk> <eos>"
    assert dataset.vocabulary.words[:3] == ("<eos>", "the", "cat")
    train, test = dataset.splits["train"], dataset.splits["test"]
    assert (train.tokens, train.words, train.lines, train.bytes, train.unknown) == (15, 11, 4, 43, 0)
    assert (test.tokens, test.words, test.lines, test.bytes, test.unknown) == (7, 5, 2, 20, 1)
    assert list(dataset.splits) == ["train", "valid", "test"]
    assert isinstance(train.ids, np.memmap)
    assert train.ids.dtype == np.int32


def test_vocabulary_of_the_whole_text_is_the_same_for_every_part(corpus: Corpus, opened: Open) -> None:
    folder = corpus()
    first, second = (opened(folder, part=part, text="all") for part in ("1/2", "2/2"))
    every_word = {"the", "cat", "sat", "dog", "on", "a", "bird", "<eos>", "<unk>"}
    assert every_word < set(first.vocabulary.words)
    assert set(first.vocabulary.words) == set(second.vocabulary.words)
    assert decoded_text(first) == "the cat sat <eos> the dog sat on the cat <eos>"
    assert first.splits["test"].unknown == second.splits["test"].unknown == 0, "test words are in the vocabulary"
    counts = dict(zip(second.vocabulary.words, second.vocabulary.counts, strict=True))
    assert (counts["bird"], counts["cat"], counts["<eos>"]) == (1, 0, 2), "counts are those of the training text"
    assert first.fingerprint != opened(folder, part="1/2").fingerprint


def test_end_of_line_false_adds_no_eos(corpus: Corpus, opened: Open) -> None:
    dataset = opened(corpus(), end_of_line=False)
    assert decoded_text(dataset) == "the cat sat the dog sat on the cat a bird"
    assert dataset.vocabulary.eos is None


@pytest.mark.parametrize(
    ("cut", "expected", "size"),
    [
        ({"tokens": 4}, "the cat sat <eos>", 12),
        ({"tokens": 3}, "the cat sat", 11),
        ({"tokens": 6}, "the cat sat <eos> the dog", 12 + 7),
        ({"part": "2/2"}, "<eos> a bird <eos>", 8),
        ({"part": "2/2", "tokens": 2}, "<eos> a", 1 + 1),
        ({"tokens": 15}, "the cat sat <eos> the dog sat on the cat <eos> <eos> a bird <eos>", 43),
        ({"tokens": 99}, "the cat sat <eos> the dog sat on the cat <eos> <eos> a bird <eos>", 43),
    ],
)
def test_part_and_tokens_keep_the_first_tokens_of_a_part(
    cut: dict[str, object], expected: str, size: int, corpus: Corpus, opened: Open
) -> None:
    dataset = opened(corpus(), **cut)
    train = dataset.splits["train"]
    assert decoded_text(dataset) == expected
    assert train.bytes == size
    assert train.words == len(expected.replace("<eos>", "").split())
    assert dataset.splits["valid"].tokens == 7
    assert sum(dataset.vocabulary.counts) == train.tokens


def test_unknown_word_error_names_word_file_and_line(corpus: Corpus, opened: Open) -> None:
    with pytest.raises(DataError, match=r"valid\.txt, line 2: 'fish' is not in the vocabulary"):
        opened(corpus(), unknown="refuse")
    with pytest.raises(DataError, match=r"train\.txt, line 2: 'dog' is not in the vocabulary"):
        opened(corpus(), unknown="refuse", min_count=2)


@pytest.mark.parametrize("text", [b"", b"\n", b" \r\n\t\n", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("split", ["train", "valid", "test"])
def test_text_without_words_is_rejected(text: bytes, split: str, corpus: Corpus, opened: Open) -> None:
    with pytest.raises(DataError, match=rf"{split}\.txt: the {split} text has no words"):
        opened(corpus(**{split: text}))


@pytest.mark.parametrize("text", [b"a\0b\n", b"a \xff b\n"])
def test_unreadable_text_leaves_no_cache_entry(text: bytes, corpus: Corpus, opened: Open, cache: Path) -> None:
    with pytest.raises(DataError, match=r"test\.txt, line 1: .*byte"):
        opened(corpus(test=text))
    assert list((cache / "datasets").iterdir()) == []


def test_text_of_one_token_is_encoded(corpus: Corpus, opened: Open) -> None:
    dataset = opened(corpus(train=b"word"), end_of_line=False)
    assert dataset.splits["train"].ids.tolist() == [0]


def test_line_ending_style_and_bom_change_nothing(corpus: Corpus, opened: Open) -> None:
    plain = decoded_text(opened(corpus(train=b"a b\nc\n")))
    for same in (b"a b\r\nc\r\n", b"\xef\xbb\xbfa b\nc\n", b"a b\nc", b"a  b \n\tc"):
        assert decoded_text(opened(corpus(train=same))) == plain


def test_very_long_line_is_read(corpus: Corpus, opened: Open) -> None:
    dataset = opened(corpus(train=b"word " * 200_000))
    assert dataset.splits["train"].tokens == 200_001


def test_equal_settings_share_a_cache_entry_others_do_not(corpus: Corpus, opened: Open, cache: Path) -> None:
    folder = corpus()
    first = opened(folder)
    [entry] = (cache / "datasets").iterdir()
    made = (entry / "train.ids").stat().st_mtime_ns
    again = opened(folder)
    assert (entry / "train.ids").stat().st_mtime_ns == made
    assert again.fingerprint == first.fingerprint

    others = [opened(folder, min_count=2), opened(folder, part="1/2"), opened(folder, end_of_line=False)]
    (folder / "test.txt").write_bytes(b"another text\n")
    others.append(opened(folder))
    assert len({first.fingerprint, *(other.fingerprint for other in others)}) == 5
    assert len(list((cache / "datasets").iterdir())) == 5


@pytest.mark.parametrize(
    ("settings", "fingerprint", "entry"),
    [
        ({}, "58a956ef66ceaffca653374b9c073d28", "7b7b89380aeadf587582b4221b86f230"),
        ({"part": "1/2", "tokens": 4}, "187bc9d6f3043e70ac4311c7ed19fae1", "7ea7edef5532fa4af26c5fcfd7c79a08"),
        ({"bpe": {"merges": 3}}, "82ddb9c534cc17bc0674d11c6896c5b8", "ce7df288fc711d552920b589ac85b95c"),
    ],
)
def test_fingerprints_and_cache_keys_are_stable(
    settings: dict[str, object], fingerprint: str, entry: str, corpus: Corpus, opened: Open, cache: Path
) -> None:
    """Earlier runs must keep matching their text when new settings are added."""
    assert opened(corpus(), **settings).fingerprint.startswith(fingerprint)
    assert [path.name for path in (cache / "datasets").iterdir()] == [entry]


@pytest.mark.parametrize("file", ["train.ids", "test.ids", "counts.json", "vocabulary.json", "MANIFEST.json"])
@pytest.mark.parametrize("damage", ["gone", "short", "long", "other"])
def test_damaged_cache_entry_is_encoded_again(
    file: str, damage: str, corpus: Corpus, opened: Open, cache: Path
) -> None:
    folder = corpus()
    before = opened(folder)
    text_before = decoded_text(before)
    [entry] = (cache / "datasets").iterdir()
    intact = (entry / file).read_bytes()
    if damage == "gone":
        (entry / file).unlink()
    elif damage == "other":
        (entry / file).write_bytes(intact.replace(b"1" if file.endswith(".json") else b"\1", b"2"))
    else:
        (entry / file).write_bytes(intact[:-1] if damage == "short" else intact + b"x")
    messages: list[str] = []
    after = opened(folder, notify=messages.append)
    assert "damaged and is written again" in messages[0]
    assert (entry / file).read_bytes() == intact
    assert decoded_text(after) == text_before
    assert opened(folder, notify=messages.append).fingerprint == before.fingerprint
    assert [path.name for path in (cache / "datasets").iterdir()] == [entry.name]


def test_describe_states_size_part_and_vocabulary(corpus: Corpus, opened: Open) -> None:
    dataset = opened(corpus(), part="1/2", tokens=9, min_count=2, max_size=5)
    text = dataset.describe()
    assert text.startswith(f"corpus/: a folder of text; {len(dataset.vocabulary)} types; hash ")
    assert dataset.fingerprint[:12] in text
    assert "cut to part 1/2 of its lines, of that its first 9 tokens" in text
    assert "seen at least 2 times, at most 5 types" in text
    assert "unknown words become <unk>; each line ends with <eos>" in text
    for split in dataset.splits.values():
        assert f"{split.tokens:,} tokens" in text
        assert f"{split.unknown / split.tokens:.2%} unknown" in text


def test_progress_is_reported_on_long_texts(corpus: Corpus, opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reefknot.storage.progress._PROGRESS_SECONDS", -1.0)
    messages: list[str] = []
    opened(corpus(), notify=messages.append)
    assert messages[3] == "train: 15 tokens counted"
    assert "valid: 7 tokens encoded" in messages


def test_bpe_encodes_words_as_sub_words(corpus: Corpus, opened: Open, cache: Path) -> None:
    dataset = opened(corpus(), bpe={"merges": 3})
    vocabulary, train = dataset.vocabulary, dataset.splits["train"]
    assert decoded_text(dataset) == "the cat sat <eos> the dog sat on the cat <eos> <eos> a bird <eos>"
    assert decoded_text(dataset, "test") == "the bird sat <eos> a <unk> <eos>"
    assert (train.words, train.lines, train.unknown) == (11, 4, 0)
    assert train.tokens == sum(vocabulary.counts) > 15
    assert dataset.splits["test"].unknown == 1  # no f in the training text
    assert "sub-words learned from it by byte-pair encoding (3 merges)" in dataset.describe()
    [entry] = (cache / "datasets").iterdir()
    (entry / "tokenizer.json").write_bytes(b"{}")
    messages: list[str] = []
    assert opened(corpus(), notify=messages.append, bpe={"merges": 3}).fingerprint == dataset.fingerprint
    assert "tokenizer.json is damaged" in messages[0]


def test_bpe_with_enough_merges_equals_whole_words(corpus: Corpus, opened: Open) -> None:
    plain, pieces = opened(corpus()), opened(corpus(), bpe={"merges": 1_000})
    for name, split in pieces.splits.items():
        tokens = [pieces.vocabulary.words[index].removesuffix("</w>") for index in split.ids]
        assert tokens == plain.vocabulary.decode(plain.splits[name].ids.tolist())
    assert plain.vocabulary.counts == (*filter(None, pieces.vocabulary.counts), 0)


def test_fairseq_dictionary_does_not_change_ids(corpus: Corpus, opened: Open) -> None:
    plain, fairseq = opened(corpus()), opened(corpus(), dictionary="fairseq")
    assert plain.splits["train"].ids.tolist() == fairseq.splits["train"].ids.tolist()
    assert (len(plain.vocabulary), len(fairseq.vocabulary)) == (9, 16)
    assert decoded_text(fairseq, "test") == decoded_text(plain, "test")
    assert "fairseq's dictionary" in fairseq.describe()


def test_keep_spellings_stores_words_outside_the_vocabulary(corpus: Corpus, opened: Open, cache: Path) -> None:
    folder = corpus(valid=b"a wolf saw\n", test=b"a fish saw the dog\n")
    plain, dataset = opened(folder, min_count=2), opened(folder, min_count=2, keep_spellings=True)
    vocabulary = dataset.vocabulary
    assert vocabulary.spelled_words == ("dog", "on", "a", "bird", "wolf", "saw", "fish")
    assert vocabulary.words == plain.vocabulary.words
    all_words = (*vocabulary.words, *vocabulary.spelled_words)
    for name, text in (("valid", "a wolf saw <eos>"), ("test", "a fish saw the dog <eos>")):
        split = dataset.splits[name]
        assert " ".join(all_words[index] for index in split.inputs) == text
        assert split.ids.tolist() == plain.splits[name].ids.tolist()
        assert isinstance(split.inputs, np.memmap)
    assert plain.splits["test"].inputs is plain.splits["test"].ids
    assert dataset.fingerprint != plain.fingerprint
    assert "as inputs their 7 spellings are read" in dataset.describe()
    (damaged,) = [path for path in (cache / "datasets").iterdir() if (path / "test.inputs").exists()]
    (damaged / "test.inputs").unlink()
    again = opened(folder, min_count=2, keep_spellings=True)
    assert again.splits["test"].inputs.tolist() == dataset.splits["test"].inputs.tolist()


def test_no_spellings_are_stored_if_every_word_is_known(corpus: Corpus, opened: Open) -> None:
    dataset = opened(corpus(valid=b"a cat\n", test=b"the dog\n"), keep_spellings=True)
    assert dataset.vocabulary.spelled_words == ()
    assert dataset.splits["test"].inputs is dataset.splits["test"].ids


OPEN = """
import sys
from pathlib import Path
import numpy, pydantic
from reefknot.lab.text.corpus import CorpusSettings
from reefknot.lab.text.dataset import open_dataset
from reefknot.lab.text.vocabulary import Vocabulary
from reefknot.lab.text.vocabulary_settings import VocabularySettings

def pages():
    return int(Path("/proc/self/statm").read_text().split()[1]) if Path("/proc").exists() else 0

before = pages()
dataset = open_dataset(CorpusSettings(name=sys.argv[1]), VocabularySettings(), cache=Path(sys.argv[2]))
after = pages()
train = dataset.splits["train"]
print(train.tokens, after - before, int(train.ids[-1]), dataset.fingerprint)
"""


def start_process(folder: Path, cache: Path) -> subprocess.Popen[str]:
    """Open the corpus in a new process, which prints token count, memory pages, last id and fingerprint."""
    command = [sys.executable, "-c", OPEN, str(folder), str(cache)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_concurrent_processes_share_one_cache_entry(corpus: Corpus, cache: Path) -> None:
    rng = np.random.default_rng(0)
    text = "\n".join(" ".join(map(str, row)) for row in rng.zipf(1.3, (10_000, 20)) % 5_000)
    folder = corpus(train=text.encode())
    processes = [start_process(folder, cache) for _ in range(3)]
    answers = [process.communicate(timeout=PATIENCE)[0].split() for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert {answer[0] for answer in answers} == {"210000"}
    assert len({answer[3] for answer in answers}) == 1
    assert len(list((cache / "datasets").iterdir())) == 1


def test_large_text_is_memory_mapped(corpus: Corpus, opened: Open, cache: Path) -> None:
    types = 267_735  # the vocabulary size of WikiText-103
    folder = corpus(train="\n".join(f"{index:x}word" for index in range(types - 2)).encode())
    for path in folder.iterdir():
        os.utime(path, (1, 1))
    assert len(opened(folder).vocabulary) == types
    [entry] = (cache / "datasets").iterdir()
    record = json.loads((entry / "counts.json").read_bytes())
    record["splits"]["train"]["tokens"] = 100_000_000
    (entry / "counts.json").write_text(json.dumps(record))
    os.truncate(entry / "train.ids", 400_000_000)  # a sparse file: it takes no disk space
    manifest.create(entry, [path for path in entry.iterdir() if path.name != manifest.MANIFEST_FILE])
    tokens, pages, last, _ = start_process(folder, cache).communicate(timeout=PATIENCE)[0].split()  # a new process
    assert int(tokens) == 100_000_000
    assert int(last) == 0
    assert int(pages) * os.sysconf("SC_PAGE_SIZE") < 50e6


def test_given_vocabulary_is_used_as_it_is(corpus: Corpus, cache: Path) -> None:
    given = Vocabulary(("<s>", "<eos>", "<unk>", "bird", "sat"), (0, 0, 0, 2, 9), ordered=False)
    settings = CorpusSettings(name=str(corpus())), VocabularySettings()
    dataset = open_dataset(*settings, cache=cache, words=given)
    assert dataset.vocabulary == given
    assert dataset.splits["test"].ids.tolist() == [2, 3, 4, 1, 2, 2, 1]
    assert dataset.splits["test"].unknown == 3
    assert open_dataset(*settings, cache=cache, words=given).fingerprint == dataset.fingerprint
    assert open_dataset(*settings, cache=cache).fingerprint != dataset.fingerprint


@pytest.mark.corpus
@pytest.mark.skipif(not os.environ.get("REEFKNOT_DATA"), reason="REEFKNOT_DATA names no folder of real corpora")
@pytest.mark.parametrize("name", ["ptb", "wikitext-2", "wikitext-103"])
def test_real_corpora_have_the_published_counts(name: str, tmp_path: Path) -> None:
    known = known_corpus(name)
    assert known is not None
    assert known.types is not None
    try:
        dataset = open_dataset(CorpusSettings(name=name), VocabularySettings(), cache=tmp_path)
    except CorpusNotFound:
        pytest.skip(f"REEFKNOT_DATA names no folder that holds {name}")
    assert len(dataset.vocabulary) == known.types
    assert {split.name: split.tokens for split in dataset.splits.values()} == known.tokens
    assert dataset.name == name
    assert int(dataset.splits["train"].ids.max()) == known.types - 1
