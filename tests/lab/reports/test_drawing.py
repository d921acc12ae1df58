"""Pictures are well-formed SVG and show words as they are, whatever the words contain."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest
from matplotlib.figure import Figure

from reefknot.lab.reports.drawing import Drawing


def draw_words(*words: str, caption: str = "A caption.") -> Drawing:
    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        axes.set_xticks(range(len(words)), words)
        for index, word in enumerate(words):
            axes.text(index, index, word)

    return Drawing("words", 2.8, [], draw, caption)


def shown_texts(svg: str) -> list[str]:
    return ["".join(node.itertext()) for node in ET.fromstring(svg).iter() if node.tag.endswith("text")]


@pytest.mark.parametrize("character", ["\x00", "\x08", "\x0b", "\x0c", "\x1b", "\x1f", "\ufffe", "\uffff"])
def test_characters_that_xml_forbids_are_replaced(character: str) -> None:
    drawing = draw_words(f"be{character}fore", caption=f"cap{character}tion")
    for svg in (drawing.svg, drawing.svg_file):
        assert shown_texts(svg).count("be\ufffdfore") == 2
        assert ET.fromstring(svg).attrib["aria-label"] == "cap\ufffdtion"


@pytest.mark.parametrize(
    "word",
    [
        "#010203",
        "fill:#010203",
        'font-family: x; id="x"',
        "url(#x)",
        ' id="word"',
        'href="#x"',
        "xlink:href",
        "font: 3px x",
        "<style>",
        "-->--",
        "next\x85line",
        "line\u2028separator",
        "]]>",
    ],
)
def test_words_that_look_like_markup_are_shown_unchanged(word: str) -> None:
    texts = shown_texts(draw_words(word).svg)
    assert texts.count(word) == 2, texts


def test_text_has_the_colour_of_the_page() -> None:
    svg = draw_words("word").svg
    assert "currentColor" in svg
    assert "#010203" not in svg
