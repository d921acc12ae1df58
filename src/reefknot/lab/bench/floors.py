"""Floors: the multiply-adds that no exact method avoids, forward and backward, as floating-point operations.

A product of N x D by D x V costs 2NDV, and its two gradients as much each. What a method does beside these products,
and every product that it makes a second time, is above the floor.
"""

from __future__ import annotations

from itertools import pairwise

from reefknot.lab.bench.problems import DEPTH, EXPERTS, Problem, band_widths


def floor(problem: Problem) -> float:
    """Floating-point operations of one forward and backward pass."""
    N, D, V = problem.shape
    plain = 6.0 * N * D * V
    if problem.end == "adaptive":
        return _adaptive(problem)
    if problem.end == "augmented":
        # Soft targets once per distinct target: scores, mean vectors, and the gradients of both.
        return plain + 10.0 * problem.distinct * D * V
    if problem.end == "augmented-detached":
        return plain + 6.0 * problem.distinct * D * V
    if problem.end == "mixture":
        return EXPERTS * (plain + 6.0 * N * D * D)
    return plain + (6.0 * V * D * D * DEPTH if problem.end == "drill" else 0.0)


def _adaptive(problem: Problem) -> float:
    """Head and clusters on all rows; each tail, and its matrix, on the rows whose target lies in it."""
    N, D, V = problem.shape
    bounds = (*problem.cutoffs, V)
    total = 6.0 * N * D * (bounds[0] + len(bounds) - 1)
    for width, (start, stop) in zip(band_widths(D)[1:], pairwise(bounds), strict=True):
        rows = int(((problem.targets >= start) & (problem.targets < stop)).sum())
        total += 6.0 * rows * width * (stop - start) + 6.0 * rows * D * width
    return total
