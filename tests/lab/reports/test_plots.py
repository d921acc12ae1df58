"""Plots: safe to inline in one page, reproducible, and true to the metrics."""

from __future__ import annotations

import json
import math
import re
import warnings
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest

from made_results import bands, in_pieces, result, scored, write_run, write_runs
from reefknot.lab.reports import plots
from reefknot.lab.reports.drawing import Drawing
from reefknot.lab.reports.footnotes import add_footnotes
from reefknot.lab.reports.rows import TableRow, join_runs
from reefknot.lab.runs.loading import collect_runs, load_run


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[TableRow]:
    return join_runs([], collect_runs([write_runs(tmp_path_factory.mktemp("plots"))]))


@pytest.fixture(scope="module")
def all_plots(rows: list[TableRow]) -> list[Drawing]:
    return draw_all(rows)


def draw_all(rows: list[TableRow]) -> list[Drawing]:
    return [*plots.plot_sizes(rows), *plots.plot_curves(rows), *plots.plot_frequency(rows)]


def test_every_plot_is_valid_svg_with_its_rows(all_plots: list[Drawing]) -> None:
    assert len(all_plots) == 5
    for plot in all_plots:
        root = ET.fromstring(plot.svg)
        assert root.attrib["viewBox"].startswith("0 0 ")
        assert not {"width", "height"} & set(root.attrib)
        text = " ".join("".join(node.itertext()) for node in root.iter("text"))
        assert "Small + WT + PR" in text


def test_svg_ids_are_unique_and_resolve(all_plots: list[Drawing]) -> None:
    page = "".join(plot.svg for plot in all_plots)
    ids = re.findall(r' id="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    used = re.findall(r'(?:url\(#|href="#)([^")]+)', page)
    assert used
    assert set(used) <= set(ids)


def test_plots_reference_nothing_external(all_plots: list[Drawing]) -> None:
    for plot in all_plots:
        assert not re.search(r"https?:|<metadata|<!DOCTYPE|<\?xml|@import", plot.svg)


def test_text_has_the_font_and_colour_of_the_page(all_plots: list[Drawing]) -> None:
    for plot in all_plots:
        assert "DejaVu" not in plot.svg
        assert "currentColor" in plot.svg
        assert not re.search(r"fill: #(fff|ffffff|000|000000)\b", plot.svg)


def test_same_results_give_the_same_plots(rows: list[TableRow], all_plots: list[Drawing]) -> None:
    again = draw_all(rows)
    assert [(plot.svg, plot.caption) for plot in again] == [(plot.svg, plot.caption) for plot in all_plots]


def test_validation_is_drawn_at_its_epochs(rows: list[TableRow]) -> None:
    points = plots._read_curve(rows[0].results[0], "valid", "epoch")
    assert [x for x, _ in points] == pytest.approx(range(1, 14))
    assert points[-1][1] == pytest.approx(rows[0].results[0].metrics[-1].perplexity)


def test_loss_by_frequency_is_a_mean_over_seeds(tmp_path: Path) -> None:
    for seed, nll in enumerate((2.0, 4.0)):
        bands = [
            {"low": 0, "high": 9, "tokens": 5, "nll": nll},
            {"low": 10, "high": None, "tokens": 0, "nll": 0},
        ]
        write_run(tmp_path, "Small", seed, result("Small", seed, frequency={"target": bands}))
    (row,) = join_runs([], collect_runs([tmp_path]))
    assert list(plots._band_losses(row, "target").values()) == [3.0]
    assert len(plots.plot_frequency([row])) == 1


def test_run_without_metrics_has_no_plots(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "Small")
    (folder / "metrics.jsonl").unlink()
    assert draw_all(join_runs([], [load_run(folder)])) == []
    assert draw_all([]) == []


def test_unfinished_run_has_curves(tmp_path: Path) -> None:
    assert len(plots.plot_curves(join_runs([], [load_run(write_run(tmp_path, "Small"))]))) == 2


def test_diverged_run_has_a_curve(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "Small")
    lines = [{"kind": "train", "step": step, "epoch": step, "nll": 5000.0} for step in (1, 2)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert len(plots.plot_curves(join_runs([], [load_run(folder)]))) == 1


def test_single_epoch_is_drawn_by_update(tmp_path: Path) -> None:
    """One validation is one point, which is not a curve. The training loss has a point for every few updates."""
    folder = write_run(tmp_path, "Small")
    lines = [{"kind": "train", "step": 10 * n, "epoch": 1, "nll": 5.0 / n} for n in (1, 2, 3)]
    lines.append({"kind": "valid", "step": 30, "epoch": 1, "nll": 2.0, "perplexity": math.exp(2.0)})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (plot,) = plots.plot_curves(join_runs([], [load_run(folder)]))
    assert plot.caption.startswith("Training perplexity per token by update.")
    labels = ["".join(node.itertext()).strip() for node in ET.fromstring(plot.svg).iter("text")]
    assert "update" in labels
    assert "10" in labels

    (folder / "metrics.jsonl").write_text(json.dumps(lines[2]) + "\n" + json.dumps(lines[3]) + "\n")
    assert plots.plot_curves(join_runs([], [load_run(folder)])) == []


def test_any_row_name_can_be_drawn(rows: list[TableRow]) -> None:
    names = ["$x$ <script>&", "_hidden", "語 \u05d0", "x" * 90, "$\\frac{"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for plot in draw_all([replace(rows[n % 3], name=name) for n, name in enumerate(names)]):
            labels = ["".join(node.itertext()) for node in ET.fromstring(plot.svg).iter("text")]
            assert all(any(name in text for text in labels) for name in names)


def test_many_rows_are_all_labelled(rows: list[TableRow]) -> None:
    many = [replace(rows[n % 3], name=f"row {n}") for n in range(20)]
    assert all("row 19" in plot.svg for plot in plots.plot_sizes(many))


def drawn_text(plot: Drawing) -> list[str]:
    return ["".join(node.itertext()).strip() for node in ET.fromstring(plot.svg).iter("text")]


def mixed_rows(root: Path, unknown: int) -> list[TableRow]:
    """Write three rows: words, sub-words (two per word, all frequent), and words with a sampled loss."""
    often = {"target": [band | {"tokens": 7} for band in bands(0.0)[-1:]]}
    write_run(root, "Small", 0, result("Small", 0, test=scored(120.0)))
    record = in_pieces("Small + WT", unknown) | {"frequency": often}
    write_run(root, "Small + WT", 0, record, vocabulary={"bpe": {"merges": 9}})
    record = result("Small + WT + PR", 0, test=scored(110.0))
    write_run(root, "Small + WT + PR", 0, record, output={"kind": "sampled"})
    return join_runs([], collect_runs([root]))


def test_validation_is_drawn_per_word_and_training_per_token(tmp_path: Path) -> None:
    rows = mixed_rows(tmp_path, unknown=77)
    run = rows[1].results[0]
    assert plots._read_curve(run, "valid", "epoch")[-1][1] == pytest.approx(math.exp(2 * run.metrics[-1].nll))
    validation, training = plots.plot_curves(rows)
    assert validation.caption == "Validation perplexity per word by epoch."
    assert {"Small + WT", "Small + WT + PR"} <= set(drawn_text(validation))
    assert {"Small + WT (per sub-word)", "Small + WT + PR (sampled loss)"} <= set(drawn_text(training))
    assert "A sampled loss and a loss per sub-word are not comparable" in training.caption


def test_incomparable_rows_are_left_out_and_named(tmp_path: Path) -> None:
    rows = mixed_rows(tmp_path, unknown=0)
    for plot in (*plots.plot_sizes(rows), plots.plot_curves(rows)[0]):
        assert plot.caption.endswith("Left out, because they were scored differently or on another text: Small + WT.")
        assert "Small + WT" not in drawn_text(plot)


def test_unfinished_sub_word_row_is_left_out_of_validation(tmp_path: Path) -> None:
    rows = join_runs([], [load_run(write_run(tmp_path, "Small", vocabulary={"bpe": {"merges": 9}}))])
    (training,) = plots.plot_curves(rows)
    assert "Small (per sub-word)" in drawn_text(training)
    rows += join_runs([], [load_run(write_run(tmp_path, "Small + WT"))])
    caption = plots.plot_curves(rows)[0].caption
    assert caption.endswith("until a run is finished: Small.")


def test_loss_by_frequency_needs_the_same_tokens(tmp_path: Path) -> None:
    target, _ = plots.plot_frequency(mixed_rows(tmp_path, unknown=77))
    assert target.caption.endswith("Left out, because they were scored differently or on other tokens: Small + WT.")
    assert "Small + WT" not in drawn_text(target)
    assert [text for text in drawn_text(target) if text.endswith(" %")] == ["4 %", "14 %", "24 %", "26 %", "32 %"]


def test_first_row_with_other_tokens_does_not_exclude_the_others(tmp_path: Path) -> None:
    rows = sorted(mixed_rows(tmp_path, unknown=0), key=lambda row: row.name != "Small + WT")
    target, _ = plots.plot_frequency(rows)
    assert target.caption.endswith("Left out, because they were scored differently or on other tokens: Small + WT.")
    assert "Small" in drawn_text(target)
    assert "Small + WT" not in drawn_text(target)


def test_mean_curve_ends_with_the_shortest_seed() -> None:
    curves = [[(1.0, 10.0), (2.0, 6.0), (3.0, 5.0)], [(1.0, 20.0), (2.0, 8.0)]]
    assert plots._mean_curve(curves) == [(1.0, 15.0), (2.0, 7.0)]
    assert plots._mean_curve(curves[:1]) == curves[0]


def test_seeds_are_drawn_as_thin_lines(rows: list[TableRow]) -> None:
    def lines(row: TableRow) -> list[str]:
        (validation, _) = plots.plot_curves([row])
        assert ("Thin lines are seeds" in validation.caption) == (len(row.results) > 1)
        return re.findall(r"stroke-width: 0\.6", validation.svg.partition("legend")[0])

    # Grid lines are as thin, and both plots have the same number of them.
    assert len(lines(rows[0])) == len(lines(replace(rows[0], results=rows[0].results[:1]))) + 2


def test_steep_first_epochs_are_cut_off(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "Small")
    falling = [(epoch, 4.0 + 4.0 * 0.5**epoch) for epoch in range(1, 41)]
    text = '{{"kind": "valid", "step": {0}, "epoch": {0}, "nll": {1}}}\n'
    (folder / "metrics.jsonl").write_text("".join(text.format(*point) for point in falling))
    (plot,) = plots.plot_curves(join_runs([], [load_run(folder)]))
    assert plot.caption == "Validation perplexity per word by epoch. The steep beginning is cut off."
    ticks = [float(text) for text in drawn_text(plot) if re.fullmatch(r"[\d.]+", text)]
    assert 54 < max(ticks) < 70


def test_left_out_rows_are_named_by_their_footnote_sign(tmp_path: Path) -> None:
    marked = add_footnotes(mixed_rows(tmp_path, unknown=0))[0]
    (sizes,) = plots.plot_sizes(marked)
    assert sizes.caption.endswith("Left out, because they were scored differently or on another text: rows with †.")


def test_previous_words_show_only_the_difference(rows: list[TableRow]) -> None:
    target, previous = plots.plot_frequency(rows)
    assert "nats per token" in drawn_text(target)
    assert "nats per token" not in drawn_text(previous)
    assert "difference, nats per token" in drawn_text(previous)
    assert previous.caption.endswith("of the previous token, as the difference from Small; lower is better.")
    assert "nats per token" in drawn_text(plots.plot_frequency(rows[:1])[1])


def test_small_parameter_counts_are_in_thousands(rows: list[TableRow], tmp_path: Path) -> None:
    assert "parameters, millions" in drawn_text(plots.plot_sizes(rows)[0])
    for row in ("Small", "Small + WT"):
        write_run(tmp_path, row, 0, result(row, 0, parameters={"total": 99_846}))
    assert "parameters, thousands" in drawn_text(plots.plot_sizes(join_runs([], collect_runs([tmp_path])))[0])


def test_curve_of_a_second_session_starts_at_step_zero(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "Small")
    path = folder / "metrics.jsonl"
    path.write_text('{"kind": "valid", "step": 0, "epoch": 0, "nll": 4.9}\n' + path.read_text())
    points = plots._read_curve(load_run(folder), "valid", "epoch")
    assert points[0] == (0.0, pytest.approx(math.exp(4.9)))
    assert [x for x, _ in points] == pytest.approx(range(14))


def test_runs_measured_in_updates_are_drawn_by_update(tmp_path: Path) -> None:
    record = result("Small", 0)
    record["training"] |= {"epochs": None}
    folder = write_run(tmp_path, "Small", 0, record)
    validation, training = plots.plot_curves(join_runs([], [load_run(folder)]))
    assert validation.caption == "Validation perplexity per word by update."
    assert training.caption.startswith(
        "Training perplexity per token by update. A point is a mean over the updates since the last point"
    )
    train_metrics = [metric for metric in load_run(folder).metrics if metric.kind == "train"]
    assert [x for x, _ in plots._read_curve(load_run(folder), "train", "update")] == [
        metric.step for metric in train_metrics
    ]
    assert "update" in drawn_text(validation)
