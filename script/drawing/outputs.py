"""Pictures of the classifiers, the normalisers and the penalties on activations."""

from __future__ import annotations

from drawing.shapes import FAINT, Picture, Shape, bands, meet, picture


def against_table(p: Picture, y: float) -> tuple[Shape, Shape]:
    """A hidden state, and the joint at which it is to meet the rows of a table."""
    h, dot, table = p.draw("vector", 50, y, 12, 90, note="h"), meet(p, 370, y), p.draw("shared", 610, y, 90, 110, "E")
    p.arrow(table.left, dot.right)
    return h, dot


@picture("Plain classifier: the hidden state meets the rows of a table", 220)
def plain(p: Picture) -> None:
    h, dot = against_table(p, 70)
    p.chain(h, dot)
    p.text(200, 56, "as it is", 12, colour=FAINT)
    p.text(474, 56, "as they are", 12, colour=FAINT)


@picture("Projected classifier: a penalised matrix on the hidden state", 220)
def projected(p: Picture) -> None:
    h, dot = against_table(p, 70)
    matrix = p.draw("matrix", 150, 70, 74, 74, "P", "penalty λ/2 ‖P‖²")
    p.chain(h, matrix, p.draw("vector", 270, 70, 12, 90, note="c = P h + p"), dot)


@picture("Bilinear classifier: a matrix on the hidden state stands for one on the classes", 235)
def bilinear(p: Picture) -> None:
    h, dot = against_table(p, 85)
    plus = p.joint(270, 85, "+")
    p.chain(h, p.draw("matrix", 160, 85, 74, 74, "U"), plus, dot)
    p.arrow(h.top, (50, 26), (270, 26), plus.top, dashed=True)
    p.text(160, 16, "residual", 12, colour=FAINT)
    p.text(475, 68, "E (U h), never (E U) h", 12, colour=FAINT)


@picture("Dual classifier: the hidden state and the classes each pass a layer and meet in a joint space", 245)
def dual(p: Picture) -> None:
    dot = meet(p, 325, 100)
    h, table = p.draw("vector", 28, 100, 12, 90, note="h"), p.draw("shared", 652, 100, 64, 116, "E")
    layer, act = p.draw("matrix", 86, 100, 54, 66, "A", "+ a"), p.draw("step", 157, 100, 44, 30, "act")
    plus = p.joint(214, 100, "+")
    p.chain(h, layer, act, plus, p.draw("vector", 260, 100, 12, 66, note="J"), dot)
    p.arrow(h.top, (28, 30), (214, 30), plus.top, dashed=True)
    p.text(121, 19, "residual_to_context", 12, colour=FAINT)
    classes = p.draw("table", 409, 100, 44, 116, note="V × J, once\nper update")
    layer, act = p.draw("matrix", 582, 100, 44, 66, "U", "+ u"), p.draw("step", 517, 100, 44, 30, "act")
    plus = p.joint(463, 100, "+")
    for one, other in ((table, layer), (layer, act), (act, plus), (plus, classes), (classes, dot)):
        p.arrow(one.left, other.right)
    p.arrow(table.top, (652, 30), (463, 30), plus.top, dashed=True)
    p.text(557, 19, "residual_to_table", 12, colour=FAINT)


@picture("DRILL: a deep network over the table, to which the table is added after every layer", 235)
def drill(p: Picture) -> None:
    h, dot = p.draw("vector", 28, 100, 12, 90, note="h"), meet(p, 95, 100)
    p.arrow(h.right, dot.left)
    before = table = p.draw("shared", 655, 100, 62, 116, "E")
    for x, number in ((565, "1"), (445, "2"), (290, "k")):
        layer, plus = p.draw("matrix", x, 100, 56, 56, f"U_{number}", "+ u, act"), p.joint(x - 52, 100, "+")
        p.arrow(before.left, layer.right)
        p.arrow(layer.left, plus.right)
        p.arrow(table.top, (655, 30), (x - 52, 30), plus.top)
        before = plus
    p.text(355, 84, "…", 16, colour=FAINT)
    classes = p.draw("table", 182, 100, 44, 116, "E(k)", "once per update")
    p.arrow(before.left, classes.right)
    p.arrow(classes.left, dot.right)
    p.text(440, 18, "residual: E itself, never dropped", 12, colour=FAINT)


@picture("Softmax: scores become a distribution; the loss needs the target's probability alone", 165)
def softmax(p: Picture) -> None:
    parts = [
        p.draw("vector", 45, 70, 12, 90, note="h"),
        p.draw("step", 145, 70, 94, 40, "any classifier"),
        p.chart(275, 70, (0.5, 0.9, 0.35, 0.7, 0.2, 0.45), "scores", mark=3),
        p.draw("step", 405, 70, 96, 40, "exp / sum"),
        p.chart(525, 70, (0.2, 1.0, 0.12, 0.45, 0.08, 0.15), "p(y | h)", mark=3),
        p.draw("step", 640, 70, 84, 40, "−log p(y)"),
    ]
    p.chain(*parts)


@picture("Augmented loss: beside the loss of the target, the divergence of two tempered distributions", 280)
def augmented(p: Picture) -> None:
    h, classes = p.draw("vector", 40, 80, 12, 90, note="h"), p.draw("shared", 130, 80, 66, 80, "W", "classifier")
    p.chain(h, classes)
    hard = p.chart(330, 42, (0.1, 0.2, 1.0, 0.15, 0.1), "p(y | h)", mark=2)
    soft = p.chart(330, 118, (0.4, 0.5, 0.7, 0.45, 0.35), "soft prediction")
    p.arrow(classes.right, hard.left)
    p.arrow(classes.right, soft.left)
    p.text(230, 48, "+ b", 12, colour=FAINT)
    p.text(216, 118, "/ τ, without b", 12, colour=FAINT)
    words = p.draw("shared", 130, 215, 66, 64, note="L, the input's table")
    row, target = p.draw("vector", 130, 215, 66, 8), p.chart(330, 215, (0.3, 0.6, 0.8, 0.5, 0.3), "soft target")
    p.text(42, 215, "target y")
    p.arrow((72, 215), row.left)
    p.arrow(words.right, target.left)
    p.text(228, 200, "L l_y / τ", 12, colour=FAINT)
    nll, kl = p.draw("step", 500, 42, 90, 32, "nll"), p.draw("step", 500, 166, 90, 32, "KL")
    p.chain(hard, nll)
    p.arrow(soft.right, kl.left)
    p.arrow(target.right, kl.left)
    total = p.joint(620, 104, "+")
    p.arrow(nll.right, total.left)
    p.arrow(kl.right, total.left)
    p.text(590, 150, "× α", 13)
    p.text(620, 132, "loss", 12, colour=FAINT)


@picture("Adaptive softmax: a head of frequent words and clusters, tails behind projections", 315)
def adaptive_output(p: Picture) -> None:
    h = p.draw("vector", 35, 145, 12, 100, note="h")
    words = bands(p, "shared", 270, (40, 165, 250), "E")
    p.draw("table", 322, 66, 104, 16)
    p.text(322, 88, "cluster vectors, never shared", 12, colour=FAINT)
    p.arrow(h.right, (266, 50))
    head = p.chart(470, 50, (0.9, 0.6, 0.4, 0.3, 0.5, 0.25))
    p.arrow((378, 50), head.left)
    p.text(520, 45, "p of words,\nthen of clusters", 12, "start", FAINT)
    for band, y, number, bar, turn, x in ((words[1], 165, "2", 487, 118, 580), (words[2], 250, "3", 498, 104, 650)):
        matrix = p.draw("shared matrix", 140, y, 60, 44 if number == "2" else 22, f"W_{number}ᵀ")
        narrow = p.draw("vector", 215, y, 10, 44 if number == "2" else 22)
        tail = p.chart(440, y, (0.8, 0.3, 0.5, 0.4, 0.2), "p within the band")
        times = p.joint(x, y, "×")
        p.arrow(h.right, matrix.left)
        p.chain(matrix, narrow, band, tail, times)
        p.arrow((bar, 73), (bar, turn), (x, turn), times.top)
        p.note(x, y + 13, "p(y | h)")


@picture("Mixture of softmaxes: K readings of the hidden state, one table, a prior that mixes them", 290)
def mixture(p: Picture) -> None:
    h, total = p.draw("vector", 35, 110, 12, 100, note="h"), p.joint(575, 110, "+")
    p.draw("shared", 330, 110, 62, 190, "E", "one for all")
    for y, k, heights in (
        (40, "1", (0.8, 0.3, 0.2, 0.4)),
        (110, "2", (0.2, 0.9, 0.3, 0.1)),
        (180, "K", (0.3, 0.2, 0.4, 0.8)),
    ):
        matrix = p.draw("matrix", 125, y, 62, 44, f"W_{k}")
        tanh, latent = p.draw("step", 205, y, 54, 28, "tanh"), p.draw("vector", 260, y, 12, 48)
        found = p.chart(430, y, heights, f"softmax {k}")
        p.arrow(h.right, matrix.left)
        p.chain(matrix, tanh, latent)
        p.arrow(latent.right, (299, y))
        p.arrow((361, y), found.left)
        p.arrow(found.right, total.left)
        p.text(505, {"1": 56, "2": 100, "K": 172}[k], f"× π_{k}", 12)
    prior, weights = p.draw("matrix", 125, 250, 62, 30, "prior"), p.chart(330, 250, (0.5, 0.3, 0.6))
    p.arrow(h.right, prior.left)
    p.chain(prior, weights)
    p.text(362, 250, "π_1 … π_K = softmax(prior h)", 12, "start", FAINT)
    p.chain(total, p.chart(650, 110, (0.5, 0.6, 0.3, 0.5), "p(y | h)"))


@picture("Sampled softmax: in training over the batch's sample and the row's own target, in evaluation exact", 240)
def sampled(p: Picture) -> None:
    table = p.draw("shared", 110, 105, 80, 168, note="all V classes")
    few = p.draw("table", 245, 66, 70, 40, note="R of them")
    for y, name in ((41, "drawn"), (65, "target"), (97, "drawn"), (145, "target")):
        row = p.draw("vector", 110, y, 80, 8)
        p.text(62, y, name, 12, "end", FAINT)
        p.arrow(row.right, few.left)
    trained, exact = p.joint(345, 66, "·"), p.joint(345, 181, "·")
    h = p.draw("vector", 345, 123, 12, 56)
    p.text(358, 123, "h", 13, "start")
    p.arrow(h.top, trained.bottom)
    p.arrow(h.bottom, exact.top)
    own = p.draw("step", 590, 66, 172, 46, "softmax over the sample\nand the row’s own target")
    p.chain(few, trained, p.draw("step", 430, 66, 74, 40, "− log Q"), own)
    p.arrow((table.right[0], 181), exact.left)
    p.chain(exact, p.draw("step", 590, 181, 172, 40, "softmax over V"))
    p.text(590, 26, "training: one sample per batch", 13)
    p.text(590, 145, "evaluation: exact", 13)


@picture("AR keeps hidden states small, TAR keeps them slow", 190)
def regularisation(p: Picture) -> None:
    p.text(85, 50, "raw")
    p.text(85, 135, "after dropout")
    for t, size in enumerate((44, 56, 36, 60, 48)):
        x = 190 + 75 * t
        p.draw("vector", x, 50, 14, size)
        p.draw("vector", x, 135, 14, size)
        p.draw("step", x, 125 + 8 * (t % 3), 14, 9)
        p.arrow((x, 83), (x, 103))
        if t:
            p.arrow((x - 66, 50), (x - 9, 50))
    p.text(525, 50, "TAR: mean (Δh)², raw", 13, "start")
    p.text(525, 135, "AR: mean h², dropped", 13, "start")
