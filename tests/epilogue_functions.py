"""Epilogues of an author's own, in a file, where the compiler reads them."""

import cuda.tile as ct
import torch


def capped(acc, row, column):
    """Sums between -1 and 1, plus the number of the column for the first row."""
    return ct.where(row == 0, column.astype(ct.float32), ct.minimum(ct.maximum(acc, -1.0), 1.0))


def scaled_rows(acc, row, column, rows, columns):
    """Sums, each times the number of its row and that of its column."""
    return acc * ct.gather(rows, row) * ct.gather(columns, column)


def of_its_row(acc, row, column):
    """Sums over those of their row that lie in one tile, which a schedule chooses."""
    return acc / ct.sum(acc, axis=1, keepdims=True)


def in_torchs_words(acc, row, column):
    """The same as :func:`capped`, as torch says it."""
    return torch.where(row == 0, column.float(), acc.clamp(-1.0, 1.0))


def halved_by(factor):
    """A function that multiplies with a number from around it."""

    def halved(acc, row, column):
        return acc * factor

    return halved
