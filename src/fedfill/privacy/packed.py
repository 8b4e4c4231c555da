"""Symmetric matrices as their upper triangle, row by row, and Gaussian noise on them.

The isometric coordinates of a symmetric matrix are its diagonal, and what lies above it times ``sqrt(2)``: their l2
length is the Frobenius norm of the matrix.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedfill.privacy.discrete import discrete_gaussian
from fedfill.privacy.keyed import KeyedStream


def pack(matrix: Tensor) -> Tensor:
    """The upper triangle of symmetric matrices, row by row.

    Args:
        matrix: ``[..., d, d]``; what lies below the diagonal is not read.

    Returns:
        ``[..., d (d + 1) / 2]``.
    """
    rows, columns = torch.triu_indices(*matrix.shape[-2:], device=matrix.device)
    return matrix[..., rows, columns]


def unpack(packed: Tensor) -> Tensor:
    """The symmetric matrices of upper triangles, exactly symmetric.

    Args:
        packed: ``[..., d (d + 1) / 2]``, as `pack` made it.

    Returns:
        ``[..., d, d]``.

    Raises:
        ValueError: Where the length is that of no triangle.
    """
    d = _side(packed)
    rows, columns = torch.triu_indices(d, d, device=packed.device)
    matrix = packed.new_empty(*packed.shape[:-1], d, d)
    matrix[..., rows, columns] = packed
    matrix[..., columns, rows] = packed
    return matrix


def isometric(packed: Tensor) -> Tensor:
    """The coordinates of symmetric matrices whose length is the Frobenius norm.

    Args:
        packed: ``[..., d (d + 1) / 2]``, as `pack` made it.

    Returns:
        The same with all but the diagonal times ``sqrt(2)``.

    Raises:
        ValueError: Where the length is that of no triangle.
    """
    return packed * _lengths(packed)


def add_noise(block: Tensor, std: float, symmetric: bool, stream: KeyedStream) -> Tensor:
    """A block with independent Gaussian noise on each coordinate; of a symmetric one, on each isometric coordinate.

    Back in a symmetric matrix that is `std` on the diagonal and ``std / sqrt(2)`` off it, which is the least that has
    the mu of bound over std for every record.

    Args:
        block: Float64, so that nothing was rounded before the noise; ``[..., d (d + 1) / 2]`` where it is symmetric.
        std: Standard deviation, 0 or more.
        symmetric: Whether the block is the upper triangle of symmetric matrices.
        stream: Of the noise, which must not be used for anything else.

    Returns:
        A new tensor of the same shape.

    Raises:
        ValueError: Where the block is not float64, or `std` is negative or not finite.
    """
    if block.dtype != torch.float64:
        raise ValueError(f"noise is added before numbers are rounded, to float64 and not to {block.dtype}")
    if not 0 <= std < math.inf:
        raise ValueError(f"the standard deviation of noise is a finite number of at least 0, not {std}")
    noise = stream.normal(block.shape).to(block.device)
    return block + std * (noise / _lengths(block) if symmetric else noise)


def add_whole_noise(block: Tensor, std: float, symmetric: bool, stream: KeyedStream) -> Tensor:
    """A block of whole numbers with independent discrete Gaussian noise, of `add_noise`'s deviations.

    Args:
        block: int64, in steps of its grid; ``[..., d (d + 1) / 2]`` where it is symmetric.
        std: Standard deviation in steps, above `discrete.STEPS`.
        symmetric: Whether the block is the upper triangle of symmetric matrices.
        stream: Of the noise, which must not be used for anything else.

    Returns:
        A new tensor, int64.

    Raises:
        ValueError: Where the block is not int64, or `std` is out of range.
    """
    if block.dtype != torch.int64:
        raise ValueError(f"whole noise is added to whole numbers of 64 bits, not to {block.dtype}")
    each = torch.full(block.shape, std, dtype=torch.float64)
    return block + discrete_gaussian(each / _lengths(each) if symmetric else each, stream).to(block.device)


def _side(packed: Tensor) -> int:
    length = packed.shape[-1]
    d = (math.isqrt(8 * length + 1) - 1) // 2
    if d < 1 or d * (d + 1) // 2 != length:
        raise ValueError(f"{length} numbers are no upper triangle")
    return d


def _lengths(packed: Tensor) -> Tensor:
    """By how much a packed coordinate is longer in the matrix, where all but the diagonal stand twice."""
    row = torch.arange(_side(packed), device=packed.device)
    lengths = torch.full(packed.shape[-1:], math.sqrt(2), dtype=packed.dtype, device=packed.device)
    lengths[row * len(row) - row * (row - 1) // 2] = 1.0  # where each row begins
    return lengths
