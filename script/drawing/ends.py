"""The pictures of docs/ends.md: tables, the tie, input ends, classifiers, normalisers and penalties on activations."""

from __future__ import annotations

from collections.abc import Sequence

from drawing.shapes import Canvas, Shape, picture

BAND_WIDTHS = (104, 36, 14)
SCORES = (0.5, 0.9, 0.35, 0.7, 0.2, 0.45)


def bands(p: Canvas, left: float, middles: Sequence[float], name: str = "", kind: str = "shared table") -> list[Shape]:
    """Draw the three bands of a table: each has more words and shorter vectors than the one before."""
    sizes = zip(BAND_WIDTHS, (34, 50, 80), middles, "₁₂₃", strict=True)
    return [
        p.box(kind, left + width / 2, y, width, height, *named(name and name + number, width))
        for width, height, y, number in sizes
    ]


def named(name: str, width: float) -> tuple[str, str]:
    """Return the name and the note of a box: the name goes below the box if the box is narrow."""
    return (name, "") if width > 20 else ("", name)


def scores(p: Canvas, x: float, y: float) -> Shape:
    """Draw the product of context and class vectors, the bias, and the scores that result."""
    dot = p.joint(x, y, "·")
    p.arrow(dot.bottom, p.chart(x, y + 85, SCORES, "scores, one per class").top)
    p.text(x + 10, y + 32, "+ bias", "left")
    return dot


def against_table(p: Canvas, y: float) -> tuple[Shape, Shape]:
    """Draw a hidden state, and its product with the rows of a table."""
    dot = scores(p, 370, y)
    p.chain(p.box("shared table", 610, y, 90, 110, "E"), dot)
    return p.box("vector", 50, y, 12, 90, note="h"), dot


@picture(145)
def legend(p: Canvas) -> None:
    """How to read the pictures"""
    p.box("table", 48, 54, 44, 72, note="table\nof words")
    p.box("shared table", 134, 54, 44, 72, note="table held\nby both ends")
    p.box("matrix", 224, 54, 56, 72, note="matrix")
    p.box("shared matrix", 314, 54, 56, 72, note="matrix held\nby both ends")
    p.box("vector", 390, 54, 12, 72, note="vector")
    p.box("step", 462, 54, 70, 28, "a step")
    p.text(462, 101, "computation")
    p.box("dashed matrix", 532, 40, 32, 32)
    p.box("dashed step", 572, 40, 32, 32)
    p.arrow((516, 76), (590, 76), dash="--")
    p.text(552, 109, "dashed:\noptional")
    p.chart(642, 70, (0.15, 0.3, 1.0, 0.5, 0.2), "\ntarget\namong classes", target=2)


@picture(180)
def word(p: Canvas) -> None:
    """A word table: one row of the same dimension per word"""
    p.text(90, 80, "ids by falling\nfrequency")
    p.arrow((150, 30), (150, 130))
    p.box("table", 325, 80, 150, 112, note="V words × d numbers")
    for number, entry in enumerate(("the", "of", "a", "file", "…")):
        p.text(240, 48 + 16 * number, entry, "right")
    row = p.box("vector", 325, 96, 150, 8)
    p.arrow(row.right, (460, 96), (460, 80), p.box("vector", 520, 80, 12, 90).left)
    p.text(540, 80, "the vector of “file”", "left")


@picture(245)
def banded(p: Canvas) -> None:
    """A banded table: sizes count words, cutoffs are ids"""
    bands(p, 270, (62, 107, 175), kind="table")
    p.text(130, 22, "cutoffs = [20_000, 60_000]", faint=False)
    p.text(500, 22, "sizes = [20_000, 40_000]", faint=False)
    for y, text in ((45, "first id: 0"), (82, "20,000"), (134, "60,000"), (215, "end: V = 267,744")):
        p.text(240, y, text, "right")
        p.arrow((246, y), (266, y))
    sizes = ("20,000 words", "dim = 1024"), ("40,000 words", "1024 / 4 = 256"), ("the rest", "256 / 4 = 64")
    for y, (words, width) in zip((62, 107, 175), sizes, strict=True):
        p.text(410, y, words, "left", faint=False)
        p.text(530, y, width, "left")


@picture(285)
def projections(p: Canvas) -> None:
    """Band projections: one matrix per band, upwards for the input, downwards for the output"""
    middles, names = (46, 122, 206), (("W₁", "D × d"), ("W₂", "D × d/4"), ("", "W₃: D × d/16"))
    wide = p.box("vector", 528, 125, 14, 200, note="D")
    for band, width, y, name in zip(bands(p, 30, middles, "E"), BAND_WIDTHS, middles, names, strict=True):
        matrix = p.box("shared matrix", 305, y, width, 48, *name)
        for start, end in ((band.right[0], matrix.left[0]), (matrix.right[0], wide.left[0])):
            p.arrow((start, y - 9), (end, y - 9))
            p.arrow((end, y + 9), (start, y + 9), dash="--" if y == 46 else "-")
    p.text(439, 79, "only with\nhead_projection = shared")
    p.text(548, 122, "→ up: input end\n← down: output end", "left")


@picture(215)
def tie(p: Canvas) -> None:
    """Untied, tied and three-way tied ends"""
    for x, text in ((125, "untied: two tables"), (350, "tied: one table"), (575, "three-way: one table")):
        p.text(x, 22, text, faint=False)
    for x, offsets, kind in ((125, (-75, 75), "table"), (350, (0, 0), "shared table")):
        ends = p.box("step", x - 75, 165, 48, 32, "in"), p.box("step", x + 75, 165, 48, 32, "out")
        p.chain(ends[0], p.box("step", x, 165, 66, 32, "encoder"), ends[1])
        for offset, end in zip(offsets, ends, strict=True):
            p.arrow(p.box(kind, x + offset, 85, 44, 72).bottom, end.top)
    table = p.box("shared table", 575, 85, 44, 72)
    for x, name in ((505, "source\nin"), (575, "target\nin"), (645, "target\nout")):
        p.arrow(table.bottom, p.box("step", x, 170, 62, 42, name).top)


@picture(165)
def lookup(p: Canvas) -> None:
    """Lookup: the row of a word, then optional steps"""
    p.text(38, 75, "id of\n“file”", faint=False)
    p.box("shared table", 125, 75, 70, 104, note="E")
    row, dropped = p.box("vector", 125, 75, 70, 8), p.box("dashed step", 240, 75, 78, 40, "word\ndropout")
    p.arrow((62, 75), row.left)
    scaled, last = p.box("dashed step", 340, 75, 64, 40, "× scale"), p.box("dashed step", 525, 75, 78, 40, "dropout")
    matrix = p.box("dashed matrix", 430, 75, 50, 60, "W", "project_to")
    p.chain(row, dropped, scaled, matrix, last, p.box("vector", 625, 75, 12, 90, note="x, to the encoder"))


@picture(285)
def adaptive_input(p: Canvas) -> None:
    """Adaptive input: rows of decreasing dimension, and a matrix per band up to the dimension of the model"""
    p.text(40, 130, "ids\n“the”\n“reef”\n…", faint=False)
    order, middles = p.box("step", 560, 130, 86, 46, "back in\ntheir order"), (48, 130, 210)
    names = zip(("d", "d/4", "d/16"), ("W₁", "W₂", "W₃"), strict=True)
    for band, width, y, (note, name) in zip(bands(p, 105, middles, "E"), BAND_WIDTHS, middles, names, strict=True):
        p.arrow((70, 130), band.left)
        narrow, wide = p.box("vector", 270, y, 12, width / 2 + 4, note=note), p.box("vector", 465, y, 12, 56, note="D")
        p.chain(band, narrow, p.box("shared matrix", 370, y, width, 56, *named(name, width)), wide)
        p.arrow(wide.right, order.left)
    p.chain(order, p.box("vector", 655, 130, 12, 56, note="x"))


@picture(230)
def char_cnn(p: Canvas) -> None:
    """Char-CNN: the bytes of a word through convolutions, a maximum, highway layers and a matrix"""
    for number, letter in enumerate("file"):
        p.chain(p.box("step", 40, 60 + 30 * number, 26, 26, letter), p.box("vector", 102, 60 + 30 * number, 48, 10))
    p.text(100, 178, "a vector\nper byte")
    longest = p.box("step", 340, 105, 96, 46, "maximum over\npositions")
    for number, name in enumerate(("width 1, 128", "width 2, 256", "…", "width 6, 512", "width 7, 512")):
        convolution = p.box("matrix", 215, 32 + 36.5 * number, 104, 26, name)
        p.arrow((130, 105), convolution.left)
        p.arrow(convolution.right, longest.left)
    features, x = p.box("vector", 425, 105, 12, 140, note="2,816 features"), p.box("vector", 660, 105, 12, 76, note="x")
    p.chain(longest, features, p.box("step", 505, 105, 84, 40, "highway"), p.box("matrix", 592, 105, 44, 64, "P"), x)


@picture(210)
def subwords(p: Canvas) -> None:
    """Sub-words: a word is split into sub-words, each sub-word is a token, and their probabilities multiply"""
    whole, encoder = p.box("step", 60, 80, 80, 34, "untying"), p.box("step", 450, 80, 76, 34, "encoder")
    p.box("shared table", 330, 80, 80, 128, note="one row per sub-word")
    for y, piece in ((36, "un"), (80, "ty"), (124, "ing</w>")):
        row = p.box("vector", 330, y, 80, 8)
        p.chain(whole, p.box("step", 190, y, 74, 28, piece), row)
        p.arrow(row.right, encoder.left)
    p.text(190, 165, "merges learned from\nthe training text")
    p.arrow(encoder.right, (520, 80))
    p.text(528, 80, "p(un | …)\n× p(ty | … un)\n× p(ing</w> | … un ty)\n= p(untying | …)", "left", faint=False)


@picture(220)
def plain(p: Canvas) -> None:
    """Plain classifier: dot products of the hidden state with the rows of a table"""
    p.chain(*against_table(p, 70))
    p.text(200, 56, "unchanged")
    p.text(474, 56, "unchanged")


@picture(220)
def projected(p: Canvas) -> None:
    """Projected classifier: a penalised matrix on the hidden state"""
    h, dot = against_table(p, 70)
    matrix = p.box("matrix", 150, 70, 74, 74, "P", "penalty λ/2 ‖P‖²")
    p.chain(h, matrix, p.box("vector", 270, 70, 12, 90, note="c = P h + p"), dot)


@picture(235)
def bilinear(p: Canvas) -> None:
    """Bilinear classifier: a matrix on the hidden state replaces one on the classes"""
    (h, dot), plus = against_table(p, 85), p.joint(270, 85, "+")
    p.chain(h, p.box("matrix", 160, 85, 74, 74, "U"), plus, dot)
    p.arrow(h.top, (50, 26), (270, 26), plus.top, dash="--")
    p.text(160, 16, "residual")
    p.text(475, 68, "E (U h), never (E U) h")


@picture(245)
def dual(p: Canvas) -> None:
    """Dual classifier: the hidden state and the classes each pass through a layer into a joint space"""
    dot, h, plus = scores(p, 325, 100), p.box("vector", 28, 100, 12, 90, note="h"), p.joint(214, 100, "+")
    layer, act = p.box("matrix", 86, 100, 54, 66, "A", "+ a"), p.box("step", 157, 100, 44, 30, "act")
    p.chain(h, layer, act, plus, p.box("vector", 260, 100, 12, 66, note="J"), dot)
    p.arrow(h.top, (28, 30), (214, 30), plus.top, dash="--")
    p.text(121, 19, "residual_to_context")
    table, plus = p.box("shared table", 652, 100, 64, 116, "E"), p.joint(463, 100, "+")
    layer, act = p.box("matrix", 582, 100, 44, 66, "U", "+ u"), p.box("step", 517, 100, 44, 30, "act")
    p.chain(table, layer, act, plus, p.box("table", 409, 100, 44, 116, note="V × J, once\nper update"), dot)
    p.arrow(table.top, (652, 30), (463, 30), plus.top, dash="--")
    p.text(557, 19, "residual_to_table")


@picture(235)
def drill(p: Canvas) -> None:
    """DRILL: a deep network over the table; the table is added after every layer"""
    dot = scores(p, 95, 100)
    p.chain(p.box("vector", 28, 100, 12, 90, note="h"), dot)
    before = table = p.box("shared table", 655, 100, 62, 116, "E")
    for x, name in ((565, "U₁"), (445, "U₂"), (290, "Uₖ")):
        plus = p.joint(x - 52, 100, "+")
        p.chain(before, p.box("matrix", x, 100, 56, 56, name, "+ u, act"), plus)
        p.arrow(table.top, (655, 30), (x - 52, 30), plus.top)
        before = plus
    p.text(355, 84, "…")
    p.chain(before, p.box("table", 182, 100, 44, 116, "E(k)", "once per update"), dot)
    p.text(440, 18, "residual: E itself, never dropped")


@picture(165)
def softmax(p: Canvas) -> None:
    """Softmax: scores become a distribution; the loss needs only the target's probability"""
    h, classifier = p.box("vector", 40, 70, 12, 90, note="h"), p.box("step", 140, 70, 104, 40, "any classifier")
    before, normalise = p.chart(275, 70, SCORES, "scores", target=3), p.box("step", 400, 70, 90, 40, "exp / sum")
    after = p.chart(522, 70, (0.2, 1.0, 0.12, 0.45, 0.08, 0.15), "p(y | h)", target=3)
    p.chain(h, classifier, before, normalise, after, p.box("step", 640, 70, 88, 40, "−log p(y)"))


@picture(280)
def augmented(p: Canvas) -> None:
    """Augmented loss: the loss of the target, plus the divergence of two tempered distributions"""
    classes, words = p.box("shared table", 130, 80, 66, 80, "W", "classifier"), p.box("shared table", 130, 215, 66, 64)
    p.chain(p.box("vector", 40, 80, 12, 90, note="h"), classes)
    hard = p.chart(330, 42, (0.1, 0.2, 1.0, 0.15, 0.1), "p(y | h)", target=2)
    soft = p.chart(330, 118, (0.4, 0.5, 0.7, 0.45, 0.35), "soft prediction")
    target = p.chart(330, 215, (0.3, 0.6, 0.8, 0.5, 0.3), "soft target")
    p.arrow((70, 215), p.box("vector", 130, 215, 66, 8).left)
    nll, kl = p.box("step", 500, 42, 90, 32, "nll"), p.box("step", 500, 166, 90, 32, "KL")
    total = p.joint(620, 104, "+")
    for chain in ((classes, hard, nll, total), (classes, soft, kl, total), (words, target, kl)):
        p.chain(*chain)
    notes = (230, 46, "+ b"), (212, 120, "/ τ, without b"), (228, 200, "L l(y) / τ"), (130, 259, "L, the input's table")
    for x, y, note in (*notes, (40, 215, "target y"), (596, 150, "× α"), (620, 130, "loss")):
        p.text(x, y, note)


@picture(315)
def adaptive_output(p: Canvas) -> None:
    """Adaptive softmax: a head of frequent words and clusters, tails behind projections"""
    h, words = p.box("vector", 35, 145, 12, 100, note="h"), bands(p, 270, (40, 165, 250), "E")
    p.box("table", 322, 66, 104, 16, note="cluster vectors, never shared")
    p.arrow(h.right, (266, 50))
    p.arrow((378, 50), p.chart(470, 50, (0.9, 0.6, 0.4, 0.3, 0.5, 0.25)).left)
    p.text(520, 45, "p of words,\nthen of clusters", "left")
    tails = (words[1], 165, 44, "W₂ᵀ", 487, 118, 580), (words[2], 250, 22, "W₃ᵀ", 498, 104, 650)
    for band, y, height, name, bar, turn, x in tails:
        matrix, narrow = p.box("shared matrix", 140, y, 60, height, name), p.box("vector", 215, y, 10, height)
        times = p.joint(x, y, "×")
        p.chain(h, matrix, narrow, band, p.chart(440, y, (0.8, 0.3, 0.5, 0.4, 0.2), "p within the band"), times)
        p.arrow((bar, 73), (bar, turn), (x, turn), times.top)
        p.text(x, y + 24, "p(y | h)")


@picture(290)
def mixture(p: Canvas) -> None:
    """Mixture of softmaxes: K maps of the hidden state, one table, and a prior that mixes the distributions"""
    h, total = p.box("vector", 35, 110, 12, 100, note="h"), p.joint(575, 110, "+")
    p.box("shared table", 330, 110, 62, 190, "E", "one for all")
    heights = (0.8, 0.3, 0.2, 0.4), (0.2, 0.9, 0.3, 0.1), (0.3, 0.2, 0.4, 0.8)
    for y, k, weight, bars in zip((40, 110, 180), "₁₂ₖ", (56, 100, 174), heights, strict=True):
        latent, expert = p.box("vector", 260, y, 12, 48), p.chart(430, y, bars, f"softmax{k}")
        p.chain(h, p.box("matrix", 125, y, 62, 44, f"W{k}"), p.box("step", 205, y, 54, 28, "tanh"), latent)
        p.arrow(latent.right, (299, y))
        p.arrow((361, y), expert.left)
        p.chain(expert, total)
        p.text(512, weight, f"× π{k}", faint=False)
    p.chain(h, p.box("matrix", 125, 250, 62, 30, "prior"), p.chart(330, 250, (0.5, 0.3, 0.6)))
    p.text(362, 250, "π₁ … πₖ = softmax(prior h)", "left")
    p.chain(total, p.chart(650, 110, (0.5, 0.6, 0.3, 0.5), "p(y | h)"))


@picture(240)
def sampled(p: Canvas) -> None:
    """Sampled softmax: over a sample of the classes and the target in training, over all classes in evaluation"""
    p.box("shared table", 110, 105, 80, 168, note="all V classes")
    few, h = p.box("table", 245, 66, 70, 40, note="R of them"), p.box("vector", 345, 123, 12, 56)
    for y, name in ((41, "drawn"), (65, "target"), (97, "drawn"), (145, "target")):
        p.text(62, y, name, "right")
        p.arrow(p.box("vector", 110, y, 80, 8).right, few.left)
    trained, exact = p.joint(345, 66, "·"), p.joint(345, 181, "·")
    p.text(358, 123, "h", "left")
    p.arrow(h.top, trained.bottom)
    p.arrow(h.bottom, exact.top)
    both = p.box("step", 590, 66, 180, 46, "softmax over the sample\nand the target of the row")
    p.chain(few, trained, p.box("step", 430, 66, 74, 40, "− log Q"), both)
    p.arrow((150, 181), exact.left)
    p.chain(exact, p.box("step", 590, 181, 180, 40, "softmax over V"))
    p.text(590, 26, "training: one sample per batch", faint=False)
    p.text(590, 145, "evaluation: exact", faint=False)


@picture(190)
def regularisation(p: Canvas) -> None:
    """AR keeps hidden states small, TAR keeps their changes small"""
    for t, height in enumerate((44, 56, 36, 60, 48)):
        x = 190 + 75 * t
        for y in (50, 135):
            p.box("vector", x, y, 14, height)
        p.box("step", x, 125 + 8 * (t % 3), 14, 9)
        p.arrow((x, 83), (x, 103))
        if t:
            p.arrow((x - 66, 50), (x - 9, 50))
    for y, left, right in ((50, "raw", "TAR: mean (Δh)², raw"), (135, "after dropout", "AR: mean h², dropped")):
        p.text(85, y, left, faint=False)
        p.text(525, y, right, "left", faint=False)
