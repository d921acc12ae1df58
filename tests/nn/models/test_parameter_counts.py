"""Parameter counts of the papers: every row is built from its recipe on the meta device and counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from reefknot.lab.recipes.recipe import load_recipe
from reefknot.lab.tasks import build_model, check_experiment
from reefknot.lab.tasks.language_model import LanguageModelExperiment

Row = dict[str, Any]

PTB, WT2 = 10_000, 33_278
WIKITEXT = 267_744  # fairseq's dictionary of WikiText-103: 267,735 words, <s> and <pad>, padded to a multiple of 8
BILLION_WORD = 793_472  # words that occur at least three times
PIECES = {"wikitext-103": 33_337, "billion-word": 32_347}
TRAINING: Row = {
    "epochs": 1,
    "batch": 1,
    "steps": 1,
    "optimiser": {"kind": "sgd", "learning_rate": 1.0},
    "schedule": {"kind": "constant"},
}


def word_table(dim: int) -> Row:
    return {"kind": "word", "dim": dim}


ADP_T = 246_933_504  # without a norm after the last block, which would add 2,048
BAEVSKI: dict[str, dict[str, int]] = {
    "table1": {
        "Char-CNN": 365_775_744,
        "Adaptive inputs": 330_827_776,
        "Adaptive inputs (large)": 465_139_712,
        "Adaptive inputs (very large)": 1_026_210_816,
    },
    "table2": {"Adaptive inputs": ADP_T},
    "table3": {
        "SM": 476_758_016,
        "BPE": 269_813_760,
        "BPE-T": 235_676_672,
        "SM-T": 339_673_088,
        "ASM": 263_086_080,
        "CNN": 266_343_808,
        "ADP": 291_276_800,
        "ADP-T": ADP_T,
    },
    "table4": {
        "BPE-T": 234_662_912,
        "BPE": 267_786_240,
        "ASM": 532_842_496,
        "CNN": 365_775_744,
        "ADP": 458_409_984,
        "ADP-T": 330_827_776,
    },
    "table5": {f"train block {block} / inference context 0": ADP_T for block in (512, 2048, 3072)},
    "table6": {
        "Softmax (SM)": 476_758_016,
        "Adaptive, tail dropout 0.0": 263_086_080,
        "Adaptive, tail dropout 0.2": 263_086_080,
    },
    "table7": {
        "256d Embedding -> Adaptive": 314_689_536,
        "128d Embedding -> Adaptive": 280_287_232,
        "64d Embedding -> Adaptive": 263_086_080,
        "32d Embedding -> Adaptive": 254_485_504,
        "512d Embedding -> 512d Softmax (tied)": 339_673_088,
        "512d Embedding -> 512d Softmax (tied), dropout 0.4": 339_673_088,
        "512d Embedding -> 512d Softmax": 476_758_016,
        "512d Embedding -> 512d Softmax, dropout 0.4": 476_758_016,
        "256d Embedding -> 256d Softmax (tied)": 270_606_336,
        "256d Embedding -> 256d Softmax": 339_148_800,
        "64d Embedding -> 512d Softmax": 356_349_952,
        "Adaptive -> Adaptive (tied emb, not proj)": 247_261_184,
        "Adaptive -> Adaptive (tied emb/proj not head)": ADP_T,
        "Adaptive -> Adaptive (tied emb/proj + head)": ADP_T,
        "512d Embedding -> 512d Adaptive (no dim reduction, tied)": 340_198_400,
    },
}
"""Exact counts; the paper gives them in millions."""
BODY = 16 * (4 * (1024 * 1024 + 1024) + 2 * 1024 * 4096 + 4096 + 1024 + 2 * 2 * 1024)
"""Parameters of 16 self-attention blocks with biases and two layer norms each, without a final norm."""


@pytest.mark.parametrize("name", BAEVSKI)
def test_baevski_counts_equal_the_paper(name: str) -> None:
    recipe = load_recipe(f"baevski2019/{name}")
    assert set(recipe.experiments) == set(BAEVSKI[name])
    for row, published in BAEVSKI[name].items():
        experiment = recipe.experiments[row]
        words = WIKITEXT if experiment.corpus.name == "wikitext-103" else BILLION_WORD
        assert (
            count_experiment(experiment, PIECES[experiment.corpus.name] if experiment.vocabulary.bpe else words)
            == published
        )


@pytest.mark.parametrize("name", ["20k/40k/200k", "20k/140k/100k", "20k/40k/60k/140k", "60k/100k/100k", "5k/155k/100k"])
def test_baevski_table_8_counts_equal_the_formula(name: str) -> None:
    """The paper gives no counts. Each band has a quarter of the dimension of the band before, and a projection."""
    sizes = [1_000 * int(size.removesuffix("k")) for size in name.split("/")[:-1]]
    sizes.append(WIKITEXT - sum(sizes))
    widths = [1024 // 4**band for band in range(len(sizes))]
    tables = sum(size * width for size, width in zip(sizes, widths, strict=True))
    ends = tables + sum(1024 * width for width in widths) + 1024 * (len(sizes) - 1)
    recipe = load_recipe("baevski2019/table8")
    assert count_experiment(recipe.experiments[name], WIKITEXT) == ends + BODY


def count_model(row: Row, encoder: Row) -> int:
    """Return the parameter count of a model built from recipe settings."""
    parts = {name: row[name] for name in ("tables", "projections", "input", "output") if name in row}
    experiment = check_experiment({"corpus": {}, "training": TRAINING, "encoder": encoder, **parts}, "row")
    return count_experiment(experiment, row["vocabulary"])


def count_experiment(experiment: LanguageModelExperiment, vocabulary: int) -> int:
    with torch.device("meta"):
        model = build_model(experiment, vocabulary)
    return sum(parameter.numel() for parameter in model.parameters())


def softmax_row(vocabulary: int, dim: int, class_dim: int, classifier: Row, tied: bool = True) -> Row:
    """Return settings of a softmax that shares the input table or has its own table of the encoder's dimension."""
    tables = {"words": word_table(dim)} | ({} if tied else {"classes": word_table(class_dim)})
    return {
        "vocabulary": vocabulary,
        "tables": tables,
        "input": {"kind": "lookup", "table": "words"},
        "output": {"kind": "softmax", "classifier": {"table": "words" if tied else "classes"} | classifier},
    }


def pappas_row(classifier: Row, vocabulary: int = PTB) -> Row:
    return softmax_row(vocabulary, 400, 400, classifier)


def mixture_row(vocabulary: int, dim: int, last: int) -> Row:
    row = softmax_row(vocabulary, dim, last, {"kind": "plain"})
    row["output"] |= {"kind": "mixture", "experts": 15}
    return row


PLAIN: Row = {"kind": "plain"}
AWD: Row = {"kind": "awd_lstm", "hidden_dim": 1150}
PAPPAS: dict[str, tuple[int, Row, Row]] = {
    "4 Full softmax": (43_827_600, softmax_row(PTB, 400, 1150, PLAIN, tied=False), AWD | {"output_dim": 1150}),
    "4 Weight tying": (24_221_600, pappas_row(PLAIN), AWD),
    "4 Bilinear": (24_381_600, pappas_row({"kind": "bilinear"}), AWD),
    "4 Dual nonlinear": (24_542_400, pappas_row({"kind": "dual", "joint_dim": 400}), AWD),
    "4 DRILL 1-layer": (24_382_000, pappas_row({"kind": "drill", "depth": 1}), AWD),
    "4 DRILL 2-layers": (24_542_400, pappas_row({"kind": "drill", "depth": 2}), AWD),
    "4 DRILL 3-layers": (24_702_800, pappas_row({"kind": "drill", "depth": 3}), AWD),
    "4 DRILL 4-layers": (24_863_200, pappas_row({"kind": "drill", "depth": 4}), AWD),
    "2 AWD-LSTM": (33_556_078, pappas_row(PLAIN, WT2), AWD),
    "2 AWD-LSTM-DRILL": (34_197_678, pappas_row({"kind": "drill", "depth": 4}, WT2), AWD),
    "1 AWD-LSTM-MoS": (21_500_620, mixture_row(PTB, 280, 620), AWD | {"hidden_dim": 960, "output_dim": 620}),
    "2 AWD-LSTM-MoS": (34_909_528, mixture_row(WT2, 300, 650), AWD | {"output_dim": 650}),
}


@pytest.mark.parametrize("name", PAPPAS)
def test_pappas_counts_equal_tables_1_2_and_4(name: str) -> None:
    published, row, encoder = PAPPAS[name]
    assert count_model(row, encoder) == published


def test_drill_layer_adds_160400_parameters() -> None:
    counts = [count_model(pappas_row({"kind": "drill", "depth": depth}), AWD) for depth in (3, 4)]
    assert counts[1] - counts[0] == 160_400


@pytest.mark.parametrize(
    ("published", "vocabulary", "units", "tied"),
    [
        (66_022_000, PTB, 1500, False),
        (51_012_000, PTB, 1500, True),
        (13_265_200, PTB, 650, True),
        (28_395_900, WT2, 650, True),
    ],
)
def test_inan_counts_equal_tables_1_and_3(published: int, vocabulary: int, units: int, tied: bool) -> None:
    """REAL has one table and no bias; the augmented loss has no parameters."""
    row = softmax_row(vocabulary, units, units, {"kind": "plain", "bias": not tied}, tied)
    if tied:
        row["output"] |= {"kind": "augmented", "table": "words", "gamma": 0.65}
    assert count_model(row, {"kind": "variational_lstm", "hidden_dim": units}) == published


@pytest.mark.parametrize(
    ("published", "classifier", "tied"),
    [
        (4_651_600, "plain", False),
        (2_651_600, "plain", True),
        (4_691_800, "projected", False),
        (2_691_800, "projected", True),
    ],
)
def test_press_counts_equal_table_6(published: int, classifier: str, tied: bool) -> None:
    row = softmax_row(PTB, 200, 200, {"kind": classifier}, tied)
    assert count_model(row, {"kind": "lstm", "hidden_dim": 200}) == published


@pytest.mark.parametrize("kind", ["lstm", "bayesian_lstm"])
def test_press_counts_equal_table_5(kind: str) -> None:
    """No kind of dropout has parameters."""
    assert count_model(softmax_row(PTB, 1500, 1500, PLAIN), {"kind": kind, "hidden_dim": 1500}) == 51_022_000


@pytest.mark.parametrize(
    ("published", "units", "depth", "tied", "exact"),
    [
        (32, 890, 8, False, 32_082_040),
        (24, 860, 9, True, 23_417_480),
        (23, 830, 10, True, 23_482_400),
    ],
)
def test_recurrent_highway_counts_equal_the_formula(
    published: int, units: int, depth: int, tied: bool, exact: int
) -> None:
    """The three sizes of Zilly et al. on Penn Treebank, which Inan, Press and Pappas cite in millions.

    The count is made of tables, output bias, two input matrices, and two matrices and two biases per layer of a step.
    """
    expected = (1 if tied else 2) * PTB * units + PTB + 2 * units * (units + depth * (units + 1))
    assert expected == exact
    row = softmax_row(PTB, units, units, PLAIN, tied)
    assert count_model(row, {"kind": "highway", "hidden_dim": units, "depth": depth}) == exact
    # The papers cite 23.4 million as 24.
    assert published - 1 < exact / 10**6 < published + 0.5
