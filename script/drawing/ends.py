"""Draw the pictures of docs/ends.md, one function per picture, in the order of the page.

An input end turns ids into vectors, and an output end (a normaliser over a classifier) turns hidden states into a
distribution over classes. The pictures show word tables, tied ends, input ends, classifiers, normalisers and penalties
on activations. The docstring of a function is the caption of its picture; `script/pictures` writes the files.

Coordinates are x from the left and y from the top, in units of 1/700 of the width (see `shapes.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

from drawing.shapes import Canvas, Shape, picture

BAND_WIDTHS = (104, 36, 14)
BAND_HEIGHTS = (34, 50, 80)
"""The sizes of the three bands of a banded table: groups of words of similar frequency, from frequent to rare."""
EXAMPLE_SCORES = (0.5, 0.9, 0.35, 0.7, 0.2, 0.45)


def draw_bands(
    canvas: Canvas, left: float, middles: Sequence[float], name: str = "", kind: str = "shared table"
) -> list[Shape]:
    """Draw the three bands of a table: each has more words and shorter vectors than the one before.

    Args:
        canvas: The canvas.
        left: The left edge of all bands.
        middles: The vertical centre of each band.
        name: The letter of the table, without a subscript.
        kind: The kind of box.
    """
    bands = []
    for width, height, middle, subscript in zip(BAND_WIDTHS, BAND_HEIGHTS, middles, "₁₂₃", strict=True):
        label = name + subscript if name else ""
        bands.append(canvas.box(kind, left + width / 2, middle, width, height, *split_label(label, width)))
    return bands


def split_label(label: str, width: float) -> tuple[str, str]:
    """Return the text inside a box and the note below it: the label of a narrow box does not fit inside."""
    if width > 20:
        return label, ""
    return "", label


def draw_scores(canvas: Canvas, x: float, y: float) -> Shape:
    """Draw the product of context and class vectors, the bias, and the scores that result; return the product."""
    dot = canvas.joint(x, y, "·")
    scores = canvas.chart(x, y + 85, EXAMPLE_SCORES, "scores, one per class")
    canvas.arrow(dot.bottom, scores.top)
    canvas.text(x + 10, y + 32, "+ bias", "left")
    return dot


def draw_table_product(canvas: Canvas, y: float) -> tuple[Shape, Shape]:
    """Draw a hidden state, and its product with the rows of a table. Return both."""
    dot = draw_scores(canvas, 370, y)
    table = canvas.box("shared table", 610, y, 90, 110, "E")
    canvas.chain(table, dot)
    hidden_state = canvas.box("vector", 50, y, 12, 90, note="h")
    return hidden_state, dot


@picture(145)
def legend(canvas: Canvas) -> None:
    """How to read the pictures"""
    canvas.box("table", 48, 54, 44, 72, note="table\nof words")
    canvas.box("shared table", 134, 54, 44, 72, note="table held\nby both ends")
    canvas.box("matrix", 224, 54, 56, 72, note="matrix")
    canvas.box("shared matrix", 314, 54, 56, 72, note="matrix held\nby both ends")
    canvas.box("vector", 390, 54, 12, 72, note="vector")
    canvas.box("step", 462, 54, 70, 28, "a step")
    canvas.text(462, 101, "computation")
    canvas.box("dashed matrix", 532, 40, 32, 32)
    canvas.box("dashed step", 572, 40, 32, 32)
    canvas.arrow((516, 76), (590, 76), dash="--")
    canvas.text(552, 109, "dashed:\noptional")
    canvas.chart(642, 70, (0.15, 0.3, 1.0, 0.5, 0.2), "\ntarget\namong classes", target=2)


@picture(180)
def word(canvas: Canvas) -> None:
    """A word table: one row of the same dimension per word"""
    canvas.text(90, 80, "ids by falling\nfrequency")
    canvas.arrow((150, 30), (150, 130))
    canvas.box("table", 325, 80, 150, 112, note="V words × d numbers")
    for index, word in enumerate(("the", "of", "a", "file", "…")):
        canvas.text(240, 48 + 16 * index, word, "right")
    row = canvas.box("vector", 325, 96, 150, 8)
    vector = canvas.box("vector", 520, 80, 12, 90)
    canvas.arrow(row.right, (460, 96), (460, 80), vector.left)
    canvas.text(540, 80, "the vector of “file”", "left")


@picture(245)
def banded(canvas: Canvas) -> None:
    """A banded table: sizes count words, cutoffs are ids"""
    draw_bands(canvas, 270, (62, 107, 175), kind="table")
    canvas.text(130, 22, "cutoffs = [20_000, 60_000]", faint=False)
    canvas.text(500, 22, "sizes = [20_000, 40_000]", faint=False)
    for y, text in ((45, "first id: 0"), (82, "20,000"), (134, "60,000"), (215, "end: V = 267,744")):
        canvas.text(240, y, text, "right")
        canvas.arrow((246, y), (266, y))
    sizes = ("20,000 words", "dim = 1024"), ("40,000 words", "1024 / 4 = 256"), ("the rest", "256 / 4 = 64")
    for y, (words, width) in zip((62, 107, 175), sizes, strict=True):
        canvas.text(410, y, words, "left", faint=False)
        canvas.text(530, y, width, "left")


@picture(285)
def projections(canvas: Canvas) -> None:
    """Band projections: one matrix per band, upwards for the input, downwards for the output"""
    middles = (46, 122, 206)
    labels = (("W₁", "D × d"), ("W₂", "D × d/4"), ("", "W₃: D × d/16"))  # inside and below the matrix
    wide = canvas.box("vector", 528, 125, 14, 200, note="D")
    bands = draw_bands(canvas, 30, middles, "E")
    for band, width, y, (name, note) in zip(bands, BAND_WIDTHS, middles, labels, strict=True):
        matrix = canvas.box("shared matrix", 305, y, width, 48, name, note)
        gaps = ((band.right[0], matrix.left[0]), (matrix.right[0], wide.left[0]))
        for left_x, right_x in gaps:
            canvas.arrow((left_x, y - 9), (right_x, y - 9))
            canvas.arrow((right_x, y + 9), (left_x, y + 9), dash="--" if y == 46 else "-")
    canvas.text(439, 79, "only with\nhead_projection = shared")
    canvas.text(548, 122, "→ up: input end\n← down: output end", "left")


@picture(215)
def tie(canvas: Canvas) -> None:
    """Untied, tied and three-way tied ends"""
    for x, text in ((125, "untied: two tables"), (350, "tied: one table"), (575, "three-way: one table")):
        canvas.text(x, 22, text, faint=False)
    for x, offsets, kind in ((125, (-75, 75), "table"), (350, (0, 0), "shared table")):
        input_end = canvas.box("step", x - 75, 165, 48, 32, "in")
        output_end = canvas.box("step", x + 75, 165, 48, 32, "out")
        encoder = canvas.box("step", x, 165, 66, 32, "encoder")
        canvas.chain(input_end, encoder, output_end)
        for offset, end in zip(offsets, (input_end, output_end), strict=True):
            table = canvas.box(kind, x + offset, 85, 44, 72)
            canvas.arrow(table.bottom, end.top)
    table = canvas.box("shared table", 575, 85, 44, 72)
    for x, name in ((505, "source\nin"), (575, "target\nin"), (645, "target\nout")):
        end = canvas.box("step", x, 170, 62, 42, name)
        canvas.arrow(table.bottom, end.top)


@picture(165)
def lookup(canvas: Canvas) -> None:
    """Lookup: the row of a word, then optional steps"""
    canvas.text(38, 75, "id of\n“file”", faint=False)
    canvas.box("shared table", 125, 75, 70, 104, note="E")
    row = canvas.box("vector", 125, 75, 70, 8)
    word_dropout = canvas.box("dashed step", 240, 75, 78, 40, "word\ndropout")
    canvas.arrow((62, 75), row.left)
    scale = canvas.box("dashed step", 340, 75, 64, 40, "× scale")
    dropout = canvas.box("dashed step", 525, 75, 78, 40, "dropout")
    matrix = canvas.box("dashed matrix", 430, 75, 50, 60, "W", "project_to")
    vector = canvas.box("vector", 625, 75, 12, 90, note="x, to the encoder")
    canvas.chain(row, word_dropout, scale, matrix, dropout, vector)


@picture(285)
def adaptive_input(canvas: Canvas) -> None:
    """Adaptive input: rows of decreasing dimension, and a matrix per band up to the dimension of the model"""
    canvas.text(40, 130, "ids\n“the”\n“reef”\n…", faint=False)
    order = canvas.box("step", 560, 130, 86, 46, "back in\ntheir order")
    middles = (48, 130, 210)
    dimensions = ("d", "d/4", "d/16")
    matrix_names = ("W₁", "W₂", "W₃")
    bands = draw_bands(canvas, 105, middles, "E")
    for band, width, y, dimension, name in zip(bands, BAND_WIDTHS, middles, dimensions, matrix_names, strict=True):
        canvas.arrow((70, 130), band.left)
        narrow = canvas.box("vector", 270, y, 12, width / 2 + 4, note=dimension)
        wide = canvas.box("vector", 465, y, 12, 56, note="D")
        matrix = canvas.box("shared matrix", 370, y, width, 56, *split_label(name, width))
        canvas.chain(band, narrow, matrix, wide)
        canvas.arrow(wide.right, order.left)
    canvas.chain(order, canvas.box("vector", 655, 130, 12, 56, note="x"))


@picture(230)
def char_cnn(canvas: Canvas) -> None:
    """Char-CNN: the bytes of a word through convolutions, a maximum, highway layers and a matrix"""
    for index, letter in enumerate("file"):
        canvas.chain(
            canvas.box("step", 40, 60 + 30 * index, 26, 26, letter),
            canvas.box("vector", 102, 60 + 30 * index, 48, 10),
        )
    canvas.text(100, 178, "a vector\nper byte")
    maximum = canvas.box("step", 340, 105, 96, 46, "maximum over\npositions")
    for index, name in enumerate(("width 1, 128", "width 2, 256", "…", "width 6, 512", "width 7, 512")):
        convolution = canvas.box("matrix", 215, 32 + 36.5 * index, 104, 26, name)
        canvas.arrow((130, 105), convolution.left)
        canvas.arrow(convolution.right, maximum.left)
    features = canvas.box("vector", 425, 105, 12, 140, note="2,816 features")
    x = canvas.box("vector", 660, 105, 12, 76, note="x")
    canvas.chain(
        maximum,
        features,
        canvas.box("step", 505, 105, 84, 40, "highway"),
        canvas.box("matrix", 592, 105, 44, 64, "P"),
        x,
    )


@picture(210)
def subwords(canvas: Canvas) -> None:
    """Sub-words: a word is split into sub-words, each sub-word is a token, and their probabilities multiply"""
    word_box, encoder = canvas.box("step", 60, 80, 80, 34, "untying"), canvas.box("step", 450, 80, 76, 34, "encoder")
    canvas.box("shared table", 330, 80, 80, 128, note="one row per sub-word")
    for y, subword in ((36, "un"), (80, "ty"), (124, "ing</w>")):
        row = canvas.box("vector", 330, y, 80, 8)
        canvas.chain(word_box, canvas.box("step", 190, y, 74, 28, subword), row)
        canvas.arrow(row.right, encoder.left)
    canvas.text(190, 165, "merges learned from\nthe training text")
    canvas.arrow(encoder.right, (520, 80))
    canvas.text(528, 80, "p(un | …)\n× p(ty | … un)\n× p(ing</w> | … un ty)\n= p(untying | …)", "left", faint=False)


@picture(220)
def plain(canvas: Canvas) -> None:
    """Plain classifier: dot products of the hidden state with the rows of a table"""
    canvas.chain(*draw_table_product(canvas, 70))
    canvas.text(200, 56, "unchanged")
    canvas.text(474, 56, "unchanged")


@picture(220)
def projected(canvas: Canvas) -> None:
    """Projected classifier: a penalised matrix on the hidden state"""
    hidden_state, dot = draw_table_product(canvas, 70)
    matrix = canvas.box("matrix", 150, 70, 74, 74, "P", "penalty λ/2 ‖P‖²")
    projected_state = canvas.box("vector", 270, 70, 12, 90, note="c = P h + p")
    canvas.chain(hidden_state, matrix, projected_state, dot)


@picture(235)
def bilinear(canvas: Canvas) -> None:
    """Bilinear classifier: a matrix on the hidden state replaces one on the classes"""
    hidden_state, dot = draw_table_product(canvas, 85)
    plus = canvas.joint(270, 85, "+")
    matrix = canvas.box("matrix", 160, 85, 74, 74, "U")
    canvas.chain(hidden_state, matrix, plus, dot)
    canvas.arrow(hidden_state.top, (50, 26), (270, 26), plus.top, dash="--")
    canvas.text(160, 16, "residual")
    canvas.text(475, 68, "E (U h), never (E U) h")


@picture(245)
def dual(canvas: Canvas) -> None:
    """Dual classifier: the hidden state and the classes each pass through a layer into a joint space"""
    dot = draw_scores(canvas, 325, 100)

    # From the left, the hidden state.
    hidden_state = canvas.box("vector", 28, 100, 12, 90, note="h")
    plus = canvas.joint(214, 100, "+")
    matrix = canvas.box("matrix", 86, 100, 54, 66, "A", "+ a")
    activation = canvas.box("step", 157, 100, 44, 30, "act")
    joint_vector = canvas.box("vector", 260, 100, 12, 66, note="J")
    canvas.chain(hidden_state, matrix, activation, plus, joint_vector, dot)
    canvas.arrow(hidden_state.top, (28, 30), (214, 30), plus.top, dash="--")
    canvas.text(121, 19, "residual_to_context")

    # From the right, the classes.
    table = canvas.box("shared table", 652, 100, 64, 116, "E")
    plus = canvas.joint(463, 100, "+")
    matrix = canvas.box("matrix", 582, 100, 44, 66, "U", "+ u")
    activation = canvas.box("step", 517, 100, 44, 30, "act")
    joint_table = canvas.box("table", 409, 100, 44, 116, note="V × J, once\nper update")
    canvas.chain(table, matrix, activation, plus, joint_table, dot)
    canvas.arrow(table.top, (652, 30), (463, 30), plus.top, dash="--")
    canvas.text(557, 19, "residual_to_table")


@picture(235)
def drill(canvas: Canvas) -> None:
    """DRILL: a deep network over the table; the table is added after every layer"""
    dot = draw_scores(canvas, 95, 100)
    hidden_state = canvas.box("vector", 28, 100, 12, 90, note="h")
    canvas.chain(hidden_state, dot)
    table = canvas.box("shared table", 655, 100, 62, 116, "E")
    previous = table
    for x, name in ((565, "U₁"), (445, "U₂"), (290, "Uₖ")):
        plus = canvas.joint(x - 52, 100, "+")
        layer = canvas.box("matrix", x, 100, 56, 56, name, "+ u, act")
        canvas.chain(previous, layer, plus)
        canvas.arrow(table.top, (655, 30), (x - 52, 30), plus.top)
        previous = plus
    canvas.text(355, 84, "…")
    encoded_table = canvas.box("table", 182, 100, 44, 116, "E(k)", "once per update")
    canvas.chain(previous, encoded_table, dot)
    canvas.text(440, 18, "residual: E itself, never dropped")


@picture(165)
def softmax(canvas: Canvas) -> None:
    """Softmax: scores become a distribution; the loss needs only the target's probability"""
    hidden_state = canvas.box("vector", 40, 70, 12, 90, note="h")
    classifier = canvas.box("step", 140, 70, 104, 40, "any classifier")
    scores = canvas.chart(275, 70, EXAMPLE_SCORES, "scores", target=3)
    normalise = canvas.box("step", 400, 70, 90, 40, "exp / sum")
    distribution = canvas.chart(522, 70, (0.2, 1.0, 0.12, 0.45, 0.08, 0.15), "p(y | h)", target=3)
    loss = canvas.box("step", 640, 70, 88, 40, "−log p(y)")
    canvas.chain(hidden_state, classifier, scores, normalise, distribution, loss)


@picture(280)
def augmented(canvas: Canvas) -> None:
    """Augmented loss: the loss of the target, plus the divergence of two tempered distributions"""
    classes = canvas.box("shared table", 130, 80, 66, 80, "W", "classifier")
    words = canvas.box("shared table", 130, 215, 66, 64)
    hidden_state = canvas.box("vector", 40, 80, 12, 90, note="h")
    canvas.chain(hidden_state, classes)
    prediction = canvas.chart(330, 42, (0.1, 0.2, 1.0, 0.15, 0.1), "p(y | h)", target=2)
    soft_prediction = canvas.chart(330, 118, (0.4, 0.5, 0.7, 0.45, 0.35), "soft prediction")
    soft_target = canvas.chart(330, 215, (0.3, 0.6, 0.8, 0.5, 0.3), "soft target")
    target_row = canvas.box("vector", 130, 215, 66, 8)
    canvas.arrow((70, 215), target_row.left)
    nll = canvas.box("step", 500, 42, 90, 32, "nll")
    divergence = canvas.box("step", 500, 166, 90, 32, "KL")
    total = canvas.joint(620, 104, "+")
    canvas.chain(classes, prediction, nll, total)
    canvas.chain(classes, soft_prediction, divergence, total)
    canvas.chain(words, soft_target, divergence)
    notes = (
        (230, 46, "+ b"),
        (212, 120, "/ τ, without b"),
        (228, 200, "L l(y) / τ"),
        (130, 259, "L, the input's table"),
        (40, 215, "target y"),
        (596, 150, "× α"),
        (620, 130, "loss"),
    )
    for x, y, note in notes:
        canvas.text(x, y, note)


@picture(315)
def adaptive_output(canvas: Canvas) -> None:
    """Adaptive softmax: a head of frequent words and clusters, tails behind projections"""
    hidden_state = canvas.box("vector", 35, 145, 12, 100, note="h")
    _, second_band, third_band = draw_bands(canvas, 270, (40, 165, 250), "E")
    canvas.box("table", 322, 66, 104, 16, note="cluster vectors, never shared")
    canvas.arrow(hidden_state.right, (266, 50))
    head_distribution = canvas.chart(470, 50, (0.9, 0.6, 0.4, 0.3, 0.5, 0.25))
    canvas.arrow((378, 50), head_distribution.left)
    canvas.text(520, 45, "p of words,\nthen of clusters", "left")

    # An arrow runs from the bar of a cluster (at bar_x), with a turn at turn_y, to the product at x.
    tails = (
        (second_band, 165, 44, "W₂ᵀ", 487, 118, 580),
        (third_band, 250, 22, "W₃ᵀ", 498, 104, 650),
    )
    for band, y, height, name, bar_x, turn_y, x in tails:
        matrix = canvas.box("shared matrix", 140, y, 60, height, name)
        narrow = canvas.box("vector", 215, y, 10, height)
        product = canvas.joint(x, y, "×")
        distribution = canvas.chart(440, y, (0.8, 0.3, 0.5, 0.4, 0.2), "p within the band")
        canvas.chain(hidden_state, matrix, narrow, band, distribution, product)
        canvas.arrow((bar_x, 73), (bar_x, turn_y), (x, turn_y), product.top)
        canvas.text(x, y + 24, "p(y | h)")


@picture(290)
def mixture(canvas: Canvas) -> None:
    """Mixture of softmaxes: K maps of the hidden state, one table, and a prior that mixes the distributions"""
    hidden_state = canvas.box("vector", 35, 110, 12, 100, note="h")
    total = canvas.joint(575, 110, "+")
    canvas.box("shared table", 330, 110, 62, 190, "E", "one for all")

    # One softmax per component: its height, its subscript, the height of its weight, and its probabilities.
    components = (
        (40, "₁", 56, (0.8, 0.3, 0.2, 0.4)),
        (110, "₂", 100, (0.2, 0.9, 0.3, 0.1)),
        (180, "ₖ", 174, (0.3, 0.2, 0.4, 0.8)),
    )
    for y, subscript, weight_y, probabilities in components:
        latent = canvas.box("vector", 260, y, 12, 48)
        distribution = canvas.chart(430, y, probabilities, f"softmax{subscript}")
        matrix = canvas.box("matrix", 125, y, 62, 44, f"W{subscript}")
        tanh = canvas.box("step", 205, y, 54, 28, "tanh")
        canvas.chain(hidden_state, matrix, tanh, latent)
        canvas.arrow(latent.right, (299, y))
        canvas.arrow((361, y), distribution.left)
        canvas.chain(distribution, total)
        canvas.text(512, weight_y, f"× π{subscript}", faint=False)

    prior_matrix = canvas.box("matrix", 125, 250, 62, 30, "prior")
    prior = canvas.chart(330, 250, (0.5, 0.3, 0.6))
    canvas.chain(hidden_state, prior_matrix, prior)
    canvas.text(362, 250, "π₁ … πₖ = softmax(prior h)", "left")
    mixed_distribution = canvas.chart(650, 110, (0.5, 0.6, 0.3, 0.5), "p(y | h)")
    canvas.chain(total, mixed_distribution)


@picture(240)
def sampled(canvas: Canvas) -> None:
    """Sampled softmax: over a sample of the classes and the target in training, over all classes in evaluation"""
    canvas.box("shared table", 110, 105, 80, 168, note="all V classes")
    sampled_rows = canvas.box("table", 245, 66, 70, 40, note="R of them")
    hidden_state = canvas.box("vector", 345, 123, 12, 56)
    for y, name in ((41, "drawn"), (65, "target"), (97, "drawn"), (145, "target")):
        canvas.text(62, y, name, "right")
        row = canvas.box("vector", 110, y, 80, 8)
        canvas.arrow(row.right, sampled_rows.left)
    training_product = canvas.joint(345, 66, "·")
    exact_product = canvas.joint(345, 181, "·")
    canvas.text(358, 123, "h", "left")
    canvas.arrow(hidden_state.top, training_product.bottom)
    canvas.arrow(hidden_state.bottom, exact_product.top)
    sample_softmax = canvas.box("step", 590, 66, 180, 46, "softmax over the sample\nand the target of the row")
    correction = canvas.box("step", 430, 66, 74, 40, "− log Q")
    canvas.chain(sampled_rows, training_product, correction, sample_softmax)
    canvas.arrow((150, 181), exact_product.left)
    exact_softmax = canvas.box("step", 590, 181, 180, 40, "softmax over V")
    canvas.chain(exact_product, exact_softmax)
    canvas.text(590, 26, "training: one sample per batch", faint=False)
    canvas.text(590, 145, "evaluation: exact", faint=False)


@picture(190)
def regularisation(canvas: Canvas) -> None:
    """AR keeps hidden states small, TAR keeps their changes small"""
    for time_step, height in enumerate((44, 56, 36, 60, 48)):
        x = 190 + 75 * time_step
        for y in (50, 135):
            canvas.box("vector", x, y, 14, height)
        canvas.box("step", x, 125 + 8 * (time_step % 3), 14, 9)
        canvas.arrow((x, 83), (x, 103))
        if time_step > 0:
            canvas.arrow((x - 66, 50), (x - 9, 50))
    for y, states, penalty in ((50, "raw", "TAR: mean (Δh)², raw"), (135, "after dropout", "AR: mean h², dropped")):
        canvas.text(85, y, states, faint=False)
        canvas.text(525, y, penalty, "left", faint=False)
