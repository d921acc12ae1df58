"""The papers' parameter counts.

Every row is built from settings on the meta device and counted. Where an encoder is not ours, its ends are, and what is
left of the published model must be the encoder, computed here from its equations and the same for all rows of a table.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import TypeAdapter

from reefknot.parts import INPUTS, OUTPUTS, PROJECTIONS, TABLES
from reefknot.recipe import build_model, check_experiment
from reefknot.registry import Registry
from reefknot.text.spelling import spell

Row = dict[str, Any]

WIKITEXT = 267_744  # fairseq's dictionary of WikiText-103: 267,735 types, <s> and <pad>, filled up to a multiple of 8
BILLION_WORD = 793_472
PTB, WT2 = 10_000, 33_278
MODEL = 1024
TRAINING: Row = {
    "epochs": 1,
    "batch": 1,
    "steps": 1,
    "optimiser": {"kind": "sgd", "learning_rate": 1.0},
    "schedule": {"kind": "constant"},
}


def ends(row: Row) -> int:
    """Parameters of the two ends; a tensor that they share counts once."""

    def build(registry: Registry, settings: Any, given: dict[str, Any]) -> Any:
        return registry.build(TypeAdapter(registry.settings()).validate_python(settings), given)

    with torch.device("meta"):
        given: dict[str, Any] = {"vocab_size": row["vocabulary"], "context_dim": row["width"]}
        given["tables"] = {name: build(TABLES, each, given) for name, each in row["tables"].items()}
        projections = row.get("projections", {})
        given["projections"] = {name: build(PROJECTIONS, each, given) for name, each in projections.items()}
        given["spellings"] = spell([""] * 5)
        parts = [build(INPUTS, row["input"], given), build(OUTPUTS, row["output"], given)]
    return sum(parameter.numel() for parameter in {p for part in parts for p in part.parameters()})


def word(dim: int) -> Row:
    return {"kind": "word", "dim": dim}


def fixed_input(name: str, to: int | None) -> Row:
    return {"kind": "lookup", "table": name, "project_to": to}


def softmax(name: str, narrower: bool = False, bias: bool = False) -> Row:
    """A softmax over a table, behind a projection where the table is narrower than the model."""
    if narrower:
        labels = {"kind": "projected", "table": name, "bias": bias, "penalty": 0.0, "projection_bias": False}
    else:
        labels = {"kind": "plain", "table": name, "bias": bias}
    return {"kind": "softmax", "labels": labels}


def adaptive_output(table: str, projections: str, **options: Any) -> Row:
    return {
        "kind": "adaptive",
        "labels": {"kind": "plain", "table": table, "bias": False},
        "projections": projections,
        **options,
    }


def fixed(input_dim: int, output_dim: int, tied: bool, vocabulary: int = WIKITEXT) -> Row:
    """Fixed-width ends (SM, BPE and the like)."""
    tables = {"words": word(input_dim)} | ({} if tied else {"classes": word(output_dim)})
    return {
        "vocabulary": vocabulary,
        "width": MODEL,
        "tables": tables,
        "input": fixed_input("words", None if input_dim == MODEL else MODEL),
        "output": softmax("words" if tied else "classes", narrower=output_dim != MODEL),
    }


def bands(sizes: list[int], dim: int = MODEL) -> Row:
    return {"kind": "banded", "dim": dim, "sizes": sizes, "factor": 4}


def adaptive_softmax(source: Row, tables: Row, vocabulary: int, sizes: list[int]) -> Row:
    """Any input before an adaptive softmax of its own."""
    return {
        "vocabulary": vocabulary,
        "width": MODEL,
        "tables": tables | {"classes": bands(sizes)},
        "projections": {"out": {"kind": "bands", "table": "classes", "dim": MODEL, "head": False}},
        "input": source,
        "output": adaptive_output("classes", "out"),
    }


def adaptive_ends(vocabulary: int, sizes: list[int], vectors: bool, projections: bool, width: int = MODEL) -> Row:
    """Adaptive input and output, which share their vectors, and their projections, or not."""
    table, matrices = "words" if vectors else "classes", "in" if projections else "out"
    row: Row = {
        "vocabulary": vocabulary,
        "width": width,
        "tables": {"words": bands(sizes, width)} | ({} if vectors else {"classes": bands(sizes, width)}),
        "projections": {"in": {"kind": "bands", "table": "words", "dim": width}},
        "input": {"kind": "adaptive", "table": "words", "projections": "in"},
        "output": adaptive_output(table, matrices),
    }
    if not projections:
        row["projections"]["out"] = {"kind": "bands", "table": table, "dim": width, "head": False}
    return row


def char_cnn(vocabulary: int, sizes: list[int], highway: int) -> Row:
    return adaptive_softmax({"kind": "char_cnn", "dim": MODEL, "highway": highway}, {}, vocabulary, sizes)


def narrow_input(dim: int, vocabulary: int = WIKITEXT, sizes: tuple[int, ...] = (20_000, 40_000)) -> Row:
    return adaptive_softmax(fixed_input("words", MODEL), {"words": word(dim)}, vocabulary, list(sizes))


def transformer(width: int = MODEL, feed_forward: int = 4096, blocks: int = 16) -> int:
    """Self-attention blocks with biases, two layer norms each, and none at the end."""
    attention = 4 * (width * width + width)
    return blocks * (attention + 2 * width * feed_forward + feed_forward + width + 2 * 2 * width)


WT103, GBW = [20_000, 40_000], [60_000, 100_000]
NO_REDUCTION: Row = {
    "vocabulary": WIKITEXT,
    "width": MODEL,
    "tables": {"words": {"kind": "banded", "dim": 512, "sizes": WT103, "factor": 1}},
    "projections": {"out": {"kind": "bands", "table": "words", "dim": 512, "head": False}},
    "input": fixed_input("words", MODEL),
    "output": adaptive_output("words", "out", project_to=512),
}

BAEVSKI: dict[str, tuple[int, Row]] = {
    "3 SM": (476_758_016, fixed(512, 512, tied=False)),
    "3 BPE": (269_813_760, fixed(MODEL, MODEL, tied=False, vocabulary=33_337)),
    "3 BPE-T": (235_676_672, fixed(MODEL, MODEL, tied=True, vocabulary=33_337)),
    "3 SM-T": (339_673_088, fixed(512, 512, tied=True)),
    "3 ASM": (263_086_080, narrow_input(64)),
    "3 CNN": (266_343_808, char_cnn(WIKITEXT, WT103, highway=1)),
    "3 ADP": (291_276_800, adaptive_ends(WIKITEXT, WT103, vectors=False, projections=False)),
    "3 ADP-T": (246_933_504, adaptive_ends(WIKITEXT, WT103, vectors=True, projections=True)),
    "7 tied emb, not proj": (247_261_184, adaptive_ends(WIKITEXT, WT103, vectors=True, projections=False)),
    "7 256d Embedding -> Adaptive": (314_689_536, narrow_input(256)),
    "7 128d Embedding -> Adaptive": (280_287_232, narrow_input(128)),
    "7 32d Embedding -> Adaptive": (254_485_504, narrow_input(32)),
    "7 256d Softmax": (339_148_800, fixed(256, 256, tied=False)),
    "7 256d Softmax (tied)": (270_606_336, fixed(256, 256, tied=True)),
    "7 64d -> 512d Softmax": (356_349_952, fixed(64, 512, tied=False)),
    "7 512d Adaptive no dim reduction tied": (340_198_400, NO_REDUCTION),
    "4 BPE-T": (234_662_912, fixed(MODEL, MODEL, tied=True, vocabulary=32_347)),
    "4 BPE": (267_786_240, fixed(MODEL, MODEL, tied=False, vocabulary=32_347)),
    "4 ASM": (532_842_496, narrow_input(256, BILLION_WORD, tuple(GBW))),
    "4 CNN": (365_775_744, char_cnn(BILLION_WORD, GBW, highway=2)),
    "4 ADP": (458_409_984, adaptive_ends(BILLION_WORD, GBW, vectors=False, projections=False)),
    "4 ADP-T": (330_827_776, adaptive_ends(BILLION_WORD, GBW, vectors=True, projections=False)),
}


@pytest.mark.parametrize("name", BAEVSKI)
def test_baevski_tables_3_4_7(name: str) -> None:
    published, row = BAEVSKI[name]
    assert published - ends(row) == transformer()


@pytest.mark.parametrize(
    ("published", "width", "feed_forward", "blocks"), [(465_139_712, 1024, 6144, 20), (1_026_210_816, 1536, 8192, 24)]
)
def test_baevski_table_1(published: int, width: int, feed_forward: int, blocks: int) -> None:
    row = adaptive_ends(BILLION_WORD, GBW, vectors=True, projections=False, width=width)
    assert published - ends(row) == transformer(width, feed_forward, blocks)


def test_what_tying_saves() -> None:
    counts = {name: ends(row) for name, (_, row) in BAEVSKI.items()}
    assert counts["3 ADP"] - counts["3 ADP-T"] == 44_343_296


def whole(row: Row, encoder: Row) -> int:
    """Parameters of a whole model, built as a recipe builds it."""
    parts = {name: row[name] for name in ("tables", "projections", "input", "output") if name in row}
    experiment = check_experiment({"corpus": {}, "training": TRAINING, "encoder": encoder, **parts}, "row")
    with torch.device("meta"):
        model = build_model(experiment, row["vocabulary"])
    return sum(parameter.numel() for parameter in model.parameters())


def labels_on_words(vocabulary: int, dim: int, width: int, labels: Row, tied: bool = True) -> Row:
    """Labels that share the input's table or have one of their own, as wide as the encoder."""
    tables = {"words": word(dim)} | ({} if tied else {"classes": word(width)})
    return {
        "vocabulary": vocabulary,
        "tables": tables,
        "input": fixed_input("words", None),
        "output": {"kind": "softmax", "labels": {"table": "words" if tied else "classes"} | labels},
    }


def pappas(labels: Row, vocabulary: int = PTB) -> Row:
    return labels_on_words(vocabulary, 400, 400, labels)


def mixture(vocabulary: int, dim: int, last: int) -> Row:
    row = labels_on_words(vocabulary, dim, last, {"kind": "plain"})
    row["output"] |= {"kind": "mixture", "experts": 15}
    return row


PLAIN: Row = {"kind": "plain"}
AWD: Row = {"kind": "awd_lstm", "hidden_dim": 1150}
PAPPAS: dict[str, tuple[int, Row, Row]] = {
    "4 Full softmax": (43_827_600, labels_on_words(PTB, 400, 1150, PLAIN, tied=False), AWD | {"output_dim": 1150}),
    "4 Weight tying": (24_221_600, pappas(PLAIN), AWD),
    "4 Bilinear": (24_381_600, pappas({"kind": "bilinear"}), AWD),
    "4 Dual nonlinear": (24_542_400, pappas({"kind": "dual", "joint_dim": 400}), AWD),
    "4 DRILL 1-layer": (24_382_000, pappas({"kind": "drill", "depth": 1}), AWD),
    "4 DRILL 2-layers": (24_542_400, pappas({"kind": "drill", "depth": 2}), AWD),
    "4 DRILL 3-layers": (24_702_800, pappas({"kind": "drill", "depth": 3}), AWD),
    "4 DRILL 4-layers": (24_863_200, pappas({"kind": "drill", "depth": 4}), AWD),
    "2 AWD-LSTM": (33_556_078, pappas(PLAIN, WT2), AWD),
    "2 AWD-LSTM-DRILL": (34_197_678, pappas({"kind": "drill", "depth": 4}, WT2), AWD),
    "1 AWD-LSTM-MoS": (21_500_620, mixture(PTB, 280, 620), AWD | {"hidden_dim": 960, "output_dim": 620}),
    "2 AWD-LSTM-MoS": (34_909_528, mixture(WT2, 300, 650), AWD | {"output_dim": 650}),
}


@pytest.mark.parametrize("name", PAPPAS)
def test_pappas_tables_1_2_4(name: str) -> None:
    published, row, encoder = PAPPAS[name]
    assert whole(row, encoder) == published


def test_what_a_layer_of_drill_adds() -> None:
    counts = [whole(pappas({"kind": "drill", "depth": depth}), AWD) for depth in (3, 4)]
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
def test_inan_tables_1_3(published: int, vocabulary: int, units: int, tied: bool) -> None:
    """REAL has one table and no bias; the augmented loss itself has no parameters."""
    row = labels_on_words(vocabulary, units, units, {"kind": "plain", "bias": not tied}, tied)
    if tied:
        row["output"] |= {"kind": "augmented", "table": "words", "gamma": 0.65}
    assert whole(row, {"kind": "variational_lstm", "hidden_dim": units}) == published


@pytest.mark.parametrize(
    ("published", "labels", "tied"),
    [
        (4_651_600, "plain", False),
        (2_651_600, "plain", True),
        (4_691_800, "projected", False),
        (2_691_800, "projected", True),
    ],
)
def test_press_table_6(published: int, labels: str, tied: bool) -> None:
    row = labels_on_words(PTB, 200, 200, {"kind": labels}, tied)
    assert whole(row, {"kind": "lstm", "hidden_dim": 200}) == published


@pytest.mark.parametrize("kind", ["lstm", "bayesian_lstm"])
def test_press_table_5(kind: str) -> None:
    """Dropout has no parameters, whichever kind it is."""
    assert whole(labels_on_words(PTB, 1500, 1500, PLAIN), {"kind": kind, "hidden_dim": 1500}) == 51_022_000


@pytest.mark.parametrize(
    ("published", "units", "depth", "tied", "exact"),
    [
        (32, 890, 8, False, 32_082_040),
        (24, 860, 9, True, 23_417_480),
        (23, 830, 10, True, 23_482_400),
    ],
)
def test_recurrent_highway_networks(published: int, units: int, depth: int, tied: bool, exact: int) -> None:
    """The three sizes of Zilly et al. on Penn Treebank, which Inan, Press and Pappas cite in millions.

    The tables and the bias of the classes; two matrices for the input; two and two biases for every layer of a step.
    """
    counted = (1 if tied else 2) * PTB * units + PTB + 2 * units * (units + depth * (units + 1))
    assert counted == exact
    row = labels_on_words(PTB, units, units, PLAIN, tied)
    assert whole(row, {"kind": "highway", "hidden_dim": units, "depth": depth}) == exact
    # 23.4 million are cited as 24.
    assert published - 1 < exact / 10**6 < published + 0.5
