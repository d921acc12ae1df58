"""Pictures of the tables, the tie and the input ends."""

from __future__ import annotations

from drawing.shapes import BAND_WIDTHS, FAINT, Picture, bands, picture


@picture("How to read the pictures", 145)
def legend(p: Picture) -> None:
    p.draw("table", 48, 54, 44, 72)
    p.draw("shared", 134, 54, 44, 72)
    p.draw("matrix", 224, 54, 56, 56)
    p.draw("shared matrix", 314, 54, 56, 56)
    p.draw("vector", 390, 54, 12, 72)
    p.draw("step", 462, 54, 70, 28, "a step")
    p.draw("matrix", 530, 40, 32, 32, dashed=True)
    p.draw("step", 574, 40, 32, 28, dashed=True)
    p.arrow((514, 76), (590, 76), dashed=True)
    p.chart(642, 70, (0.15, 0.3, 1.0, 0.5, 0.2), mark=2)
    names = (
        (48, "table\nof words"),
        (134, "table held\nby both ends"),
        (224, "matrix"),
        (314, "matrix held\nby both ends"),
        (390, "vector"),
        (462, "computation"),
        (552, "dashed:\noptional"),
        (642, "target\namong classes"),
    )
    for x, name in names:
        p.note(x, 94, name)


@picture("A word table: one row per word, all of one width", 180)
def word(p: Picture) -> None:
    p.text(90, 80, "ids fall\nin frequency", 12, colour=FAINT)
    p.arrow((150, 30), (150, 130))
    p.text(230, 80, "the\nof\na\nfile\n…", 14, "end", FAINT)
    p.draw("table", 325, 80, 150, 112, note="V words × d numbers")
    row, vector = p.draw("vector", 325, 96, 150, 8), p.draw("vector", 520, 80, 12, 90)
    p.arrow(row.right, (460, 96), (460, 80), vector.left)
    p.text(540, 80, "the vector of “file”", 13, "start", FAINT)


@picture("A banded table: sizes count words, cutoffs are ids", 245)
def banded(p: Picture) -> None:
    bands(p, "table", 270, (62, 107, 175))
    p.text(130, 22, "cutoffs = [20_000, 60_000]", 13)
    p.text(500, 22, "sizes = [20_000, 40_000]", 13)
    for y, name in ((45, "first id: 0"), (81, "20,000"), (134, "60,000"), (215, "end: V = 267,744")):
        p.text(240, y, name, 12, "end", FAINT)
        p.arrow((246, y), (266, y))
    rows = (
        (62, "20,000 words", "dim = 1024"),
        (107, "40,000 words", "1024 / 4 = 256"),
        (175, "the rest", "256 / 4 = 64"),
    )
    for y, size, width in rows:
        p.text(410, y, size, 13, "start")
        p.text(530, y, width, 13, "start", FAINT)


@picture("Band projections: one matrix per band, upwards for the input, downwards for the output", 280)
def projections(p: Picture) -> None:
    middles = (50, 120, 205)
    wide = p.draw("vector", 528, 125, 14, 200, note="D")
    for band, w, y, number in zip(bands(p, "shared", 30, middles, "E"), BAND_WIDTHS, middles, "123", strict=True):
        matrix = p.draw("shared matrix", 305, y, w, 48, f"W_{number}" if w > 20 else "")
        p.note(305, y + 24, {"1": "D × d", "2": "D × d/4", "3": "W_3: D × d/16"}[number])
        for start, end in ((band.right, matrix.left), (matrix.right, wide.left)):
            p.arrow((start[0], y - 9), (end[0], y - 9))
            first = number == "1"
            p.arrow((end[0], y + 9), (start[0], y + 9), dashed=first, opacity=0.5 if first else 1.0)
    p.text(439, 80, "only with\nhead_projection = shared", 12, colour=FAINT)
    p.text(548, 110, "→ up: input end", 13, "start", FAINT)
    p.text(548, 135, "← down: output end", 13, "start", FAINT)


@picture("Untied, tied and three-way tied ends", 215)
def tie(p: Picture) -> None:
    for x, title in ((125, "untied: two tables"), (350, "tied: one table"), (575, "three-way: one table")):
        p.text(x, 22, title)
    for x in (125, 350):
        ends = [
            p.draw("step", x + dx, 165, w, 32, name)
            for dx, w, name in ((-75, 48, "in"), (0, 66, "encoder"), (75, 48, "out"))
        ]
        p.chain(*ends)
        tables = [(-75, "table"), (75, "table")] if x == 125 else [(0, "shared")]
        drawn = [p.draw(kind, x + dx, 85, 44, 72) for dx, kind in tables]
        p.arrow(drawn[0].bottom, ends[0].top)
        p.arrow(drawn[-1].bottom, ends[-1].top)
    one = p.draw("shared", 575, 85, 44, 72)
    for x, name in ((505, "source\nin"), (575, "target\nin"), (645, "target\nout")):
        p.arrow(one.bottom, p.draw("step", x, 170, 62, 42, name).top)


@picture("Lookup: the row of a word, then optional steps", 165)
def lookup(p: Picture) -> None:
    p.text(42, 75, "id of\n“file”")
    p.draw("shared", 130, 75, 70, 104, note="E")
    row = p.draw("vector", 130, 75, 70, 8)
    p.arrow((64, 75), row.left)
    dropped = p.draw("step", 245, 75, 78, 40, "word\ndropout", dashed=True)
    scaled = p.draw("step", 340, 75, 64, 40, "× scale", dashed=True)
    matrix = p.draw("matrix", 430, 75, 50, 60, "W", "project_to", dashed=True)
    last = p.draw("step", 525, 75, 78, 40, "dropout", dashed=True)
    p.chain(row, dropped, scaled, matrix, last, p.draw("vector", 625, 75, 12, 90, note="x, to the encoder"))


@picture("Adaptive input: rows of falling width, each band with its own matrix up to the model's width", 290)
def adaptive_input(p: Picture) -> None:
    p.text(42, 130, "ids\n“the”\n“reef”\n…", 13)
    order = p.draw("step", 555, 130, 82, 46, "back in\ntheir order")
    middles, widths = (48, 130, 215), ("d", "d/4", "d/16")
    for band, w, y, number in zip(bands(p, "shared", 105, middles, "E"), BAND_WIDTHS, middles, (1, 2, 3), strict=True):
        p.arrow((74, 130), band.left)
        narrow = p.draw("vector", 270, y, 12, w / 2 + 4, note=widths[number - 1])
        matrix = p.draw("shared matrix", 365, y, w, 56, f"W_{number}" if w > 20 else "", "" if w > 20 else "W_3")
        wide = p.draw("vector", 460, y, 12, 56, note="D")
        p.chain(band, narrow, matrix, wide)
        p.arrow(wide.right, order.left)
    p.chain(order, p.draw("vector", 655, 130, 12, 56, note="x"))


@picture("Char-CNN: the bytes of a word through convolutions, a maximum, highway layers and a matrix", 230)
def char_cnn(p: Picture) -> None:
    for number, letter in enumerate("file"):
        p.draw("step", 40, 60 + 30 * number, 26, 26, letter)
        p.arrow((55, 60 + 30 * number), (76, 60 + 30 * number))
        p.draw("vector", 102, 60 + 30 * number, 48, 10)
    p.note(100, 158, "a vector\nper byte")
    longest = p.draw("step", 335, 105, 92, 46, "maximum\nover places")
    filters = ((32, "width 1, 128"), (68, "width 2, 256"), (105, "…"), (142, "width 6, 512"), (178, "width 7, 512"))
    for y, name in filters:
        filter_ = p.draw("matrix", 215, y, 104, 26, name)
        p.arrow((130, 105), filter_.left)
        p.arrow(filter_.right, longest.left)
    features = p.draw("vector", 420, 105, 12, 140, note="2,816 features")
    highway = p.draw("step", 500, 105, 84, 40, "highway")
    matrix = p.draw("matrix", 588, 105, 44, 64, "P")
    p.chain(longest, features, highway, matrix, p.draw("vector", 658, 105, 12, 76, note="x"))


@picture("Sub-words: a word is cut into pieces, each piece is a token, and their probabilities multiply", 210)
def subwords(p: Picture) -> None:
    whole = p.draw("step", 60, 80, 80, 34, "untying")
    p.draw("shared", 330, 80, 80, 128, note="one row per piece")
    encoder = p.draw("step", 450, 80, 76, 34, "encoder")
    for y, piece in ((36, "un"), (80, "ty"), (124, "ing</w>")):
        chip = p.draw("step", 190, y, 74, 28, piece)
        row = p.draw("vector", 330, y, 80, 8)
        p.arrow(whole.right, chip.left)
        p.arrow(chip.right, row.left)
        p.arrow(row.right, encoder.left)
    p.text(190, 165, "merges learned from\nthe training text", 12, colour=FAINT)
    p.arrow(encoder.right, (520, 80))
    p.text(528, 80, "p(un | …)\n× p(ty | … un)\n× p(ing</w> | … un ty)\n= p(untying | …)", 12, "start")
