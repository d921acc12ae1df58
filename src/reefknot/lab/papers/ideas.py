"""List the ideas of the papers, with the code that implements each idea and our experiment that demonstrates it.

`IDEAS` is the first table of PAPERS.md, in the order of the page; `page.py` writes it. An idea is demonstrated by a row
(one experiment) of a recipe, or by a figure:

    Idea("weight tying (WT)", "Press and Wolf 2017", "src/reefknot/nn/tables.py", "press2017/table6", "Small + WT")
    Idea("subspace distance", "Inan et al. 2017", "src/reefknot/lab/evaluation/subspace.py", "inan2017/1")
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Idea:
    """An idea of a paper, the file that implements it, and the row of a recipe or the figure that demonstrates it."""

    name: str
    paper: str
    code: str
    """The path of the file, relative to the root of the project."""
    shown_by: str
    """The name of the recipe or of the figure."""
    row: str | None = None
    """The row of the recipe; None for a figure."""


# Papers.
_PRESS = "Press and Wolf 2017"
_INAN = "Inan et al. 2017"
_BAEVSKI = "Baevski and Auli 2019"
_PAPPAS = "Pappas and Henderson 2019"

# Folders with the code of the ideas.
_ENCODERS = "src/reefknot/nn/encoders"
_OUTPUTS = "src/reefknot/nn/outputs"
_CLASSIFIERS = "src/reefknot/nn/classifiers"
_EVALUATION = "src/reefknot/lab/evaluation"
_FIGURES = "src/reefknot/lab/papers/figures"

# Recipes.
_PRESS_TABLE5 = "press2017/table5"
_PRESS_TABLE6 = "press2017/table6"
_PRESS_TABLE8 = "press2017/table8"
_PRESS_MULTI30K = "press2017/multi30k"
_PRESS_VECTORS = "press2017/enwiki-vectors"
_INAN_TABLE1 = "inan2017/table1"
_BAEVSKI_TABLE3 = "baevski2019/table3"
_BAEVSKI_ENWIKI = "baevski2019/enwiki"
_BAEVSKI_WIKITEXT2 = "baevski2019/wikitext2"
_PAPPAS_TABLE1 = "pappas2019/table1"
_PAPPAS_TABLE4 = "pappas2019/table4"
_PAPPAS_TABLE5 = "pappas2019/table5"
_PAPPAS_MULTI30K = "pappas2019/multi30k"
ENDS_RECIPE = "ends"
"""The recipe with every kind of input end (embedding) and output end (classifier and loss) on the same encoder.

Its table is also in docs/ends.md.
"""

IDEAS = (
    Idea("LSTM of Zaremba et al.", _PRESS, f"{_ENCODERS}/stacked.py", _PRESS_TABLE6, "Small model"),
    Idea("weight tying (WT)", _PRESS, "src/reefknot/nn/tables.py", _PRESS_TABLE6, "Small + WT"),
    Idea("projection regularisation (PR)", _PRESS, f"{_CLASSIFIERS}/projected.py", _PRESS_TABLE6, "Small + PR"),
    Idea("Bayesian dropout (Gal), tied", _PRESS, f"{_ENCODERS}/bayesian_lstm.py", _PRESS_TABLE5, "Large + BD + WT"),
    Idea("recurrent highway network, tied", _PRESS, f"{_ENCODERS}/highway.py", _PRESS_TABLE5, "RHN + BD + WT"),
    Idea("variational LSTM", _INAN, f"{_ENCODERS}/variational_lstm.py", _INAN_TABLE1, "VD-LSTM small"),
    Idea("augmented loss (AL)", _INAN, f"{_OUTPUTS}/augmented.py", _INAN_TABLE1, "VD-LSTM+AL small"),
    Idea("reused embeddings (RE)", _INAN, "src/reefknot/nn/tables.py", _INAN_TABLE1, "VD-LSTM+RE small"),
    Idea("AL and RE together (REAL)", _INAN, f"{_OUTPUTS}/augmented.py", _INAN_TABLE1, "VD-LSTM+REAL small"),
    Idea("word dropout", _PAPPAS, "src/reefknot/nn/inputs/lookup.py", ENDS_RECIPE, "tied, word dropout"),
    Idea("fixed narrow input", _BAEVSKI, "src/reefknot/nn/inputs/lookup.py", ENDS_RECIPE, "narrow input"),
    Idea("adaptive input", _BAEVSKI, "src/reefknot/nn/inputs/adaptive.py", ENDS_RECIPE, "adaptive ends, tied"),
    Idea("adaptive softmax", _BAEVSKI, f"{_OUTPUTS}/adaptive.py", ENDS_RECIPE, "adaptive softmax"),
    Idea("char-CNN input", _BAEVSKI, "src/reefknot/nn/inputs/char_cnn.py", ENDS_RECIPE, "char-CNN"),
    Idea("sub-words (BPE)", _BAEVSKI, "src/reefknot/lab/text/bpe.py", ENDS_RECIPE, "BPE, tied"),
    Idea("Transformer", _BAEVSKI, f"{_ENCODERS}/transformer.py", _BAEVSKI_TABLE3, "ADP-T"),
    Idea("cosine cycles", _BAEVSKI, "src/reefknot/lab/training/schedules.py", _BAEVSKI_TABLE3, "ADP-T"),
    Idea("batches of sentences", _BAEVSKI, "src/reefknot/lab/text/sentence_batches.py", "baevski2019/table4", "ADP-T"),
    Idea("adaptive ends, tied (ADP-T)", _BAEVSKI, "src/reefknot/nn/tables.py", _BAEVSKI_ENWIKI, "ADP-T"),
    Idea("context at inference", _BAEVSKI, f"{_EVALUATION}/windows.py", _BAEVSKI_ENWIKI, "ADP-T, context 480"),
    Idea("tail dropout", _BAEVSKI, f"{_OUTPUTS}/adaptive.py", _BAEVSKI_WIKITEXT2, "ADP-T, tail dropout 0.2"),
    Idea("AWD-LSTM", _PAPPAS, f"{_ENCODERS}/awd_lstm.py", _PAPPAS_TABLE1, "AWD-LSTM w/o finetune"),
    Idea("finetuning with averaging", _PAPPAS, "src/reefknot/lab/training/averaging.py", _PAPPAS_TABLE1, "AWD-LSTM"),
    Idea("bilinear mapping", _PAPPAS, f"{_CLASSIFIERS}/bilinear.py", _PAPPAS_TABLE4, "Bilinear map. [G18]"),
    Idea("dual nonlinear mapping", _PAPPAS, f"{_CLASSIFIERS}/dual.py", _PAPPAS_TABLE4, "Dual nonlinear map. [PH18]"),
    Idea("deep residual output layer (DRILL)", _PAPPAS, f"{_CLASSIFIERS}/drill.py", _PAPPAS_TABLE4, "DRILL 4-layers"),
    Idea("mixture of softmaxes", _PAPPAS, f"{_OUTPUTS}/mixture.py", _PAPPAS_TABLE1, "AWD-LSTM-MoS"),
    Idea("sampled softmax", _PAPPAS, f"{_OUTPUTS}/sampled.py", ENDS_RECIPE, "sampled"),
    Idea(
        "dynamic evaluation",
        _PAPPAS,
        f"{_EVALUATION}/dynamic.py",
        _PAPPAS_TABLE1,
        "AWD-LSTM-DRILL + dynamic evaluation",
    ),
    Idea("attention-based translation model", _PRESS, f"{_ENCODERS}/attention_gru.py", _PRESS_MULTI30K, "Baseline"),
    Idea("three-way tying (TWWT)", _PRESS, "src/reefknot/nn/models/translator.py", _PRESS_MULTI30K, "TWWT"),
    Idea("BPE learned on both sides", _PRESS, "src/reefknot/lab/text/vocabulary.py", _PRESS_TABLE8, "EN-DE: TWWT"),
    Idea("Adadelta", _PRESS, "src/reefknot/lab/training/optimisers.py", _PRESS_TABLE8, "EN-FR: Baseline"),
    Idea("translation Transformer", _PAPPAS, f"{_ENCODERS}/encoder_decoder.py", _PAPPAS_MULTI30K, "TWWT"),
    Idea("DRILL in translation", _PAPPAS, f"{_CLASSIFIERS}/drill.py", _PAPPAS_TABLE5, "Transformer-DRILL (base)"),
    Idea("dual mapping in translation", _PAPPAS, f"{_CLASSIFIERS}/dual.py", _PAPPAS_MULTI30K, "TWWT + dual"),
    Idea("label smoothing", _PAPPAS, f"{_OUTPUTS}/softmax.py", _PAPPAS_MULTI30K, "Baseline"),
    Idea("beam search", _PAPPAS, f"{_EVALUATION}/beam.py", _PAPPAS_MULTI30K, "TWWT + DRILL"),
    Idea(
        "continuous cache pointer",
        _PAPPAS,
        f"{_EVALUATION}/cache.py",
        _PAPPAS_TABLE1,
        "AWD-LSTM + continuous cache pointer",
    ),
    Idea("skip-gram", _PRESS, "src/reefknot/kernels/skip_gram.py", _PRESS_VECTORS, "untied"),
    Idea("tied skip-gram", _PRESS, "src/reefknot/nn/models/skip_gram.py", _PRESS_VECTORS, "tied"),
    Idea("word similarity", _PRESS, f"{_EVALUATION}/similarity.py", "press2017/table3", "Small, PTB"),
    Idea("pairwise similarity of two tables", _PRESS, f"{_EVALUATION}/pairwise_similarity.py", "press2017/table4"),
    Idea("which rows an update changes", _PRESS, f"{_EVALUATION}/updates.py", "press2017/section3"),
    Idea("subspace distance", _INAN, f"{_EVALUATION}/subspace.py", "inan2017/1"),
    Idea("loss by frequency", _BAEVSKI, f"{_EVALUATION}/frequency.py", "baevski2019/2"),
    Idea("loss relative to another model", _PAPPAS, f"{_FIGURES}/relative_loss.py", "pappas2019/3"),
)
