"""Eigenvectors of a stack of factors: decomposed, or followed from the old ones."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp

from shampoo_optax._cholesky import cholesky, divide_by_transpose, gram_of_lower
from shampoo_optax._eigen_methods import Basis, CholeskyBasis, EighBasis, QRBasis
from shampoo_optax._orthogonal import (
    Pair,
    align,
    diagonals,
    distance_from_orthogonal,
    is_diagonal,
    orthogonal,
    probe_of,
    reorder,
    reorder_both,
    rotate,
    settle_padding,
    with_last,
)
from shampoo_optax._retry import widened
from shampoo_optax._slotwise import by_platform, where_needed
from shampoo_optax._stacks import contract, eye_of, per_slot, scale_to_one


def eigenbases(
    matrices: jax.Array,
    previous: jax.Array,
    basis: Basis,
    padding: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    r"""Computes eigenvectors and estimates of eigenvalues for a batch of one side.

    Padding has unit vectors in the same, the last columns, and the mean of the
    matrix's own eigenvalues as its eigenvalue. Neither tests nor order see it.

    Args:
      matrices: `[n, d, d]`, symmetric, float32 or float64, with their ridge if any,
        which the tests and a QR iteration see; 0 on padding.
      previous: `[n, d, d]`, the old eigenvectors in columns, orthogonal; those of
        padding are unit vectors.
      basis: the method.
      padding: bool `[n, d]`, which rows and columns are padding, the last ones of
        each matrix; `None`: none are.

    Returns:
      the eigenvectors `[n, d, d]` in columns; the eigenvalues `[n, d]`, ascending
      unless an :class:`EighBasis` kept the old vectors, whose order then stays, or a
      :class:`CholeskyBasis` followed them, in their places; the residuals `[n]`, 0 for
      what an :class:`EighBasis` kept, NaN where the matrix is not finite; and how many
      decompositions or iterations there were, int32 `[n]`.
    """
    scaled, scale = scale_to_one(matrices)
    find = {EighBasis: _decomposed, QRBasis: _followed, CholeskyBasis: _succeeded}
    found = find[type(basis)](scaled, previous, basis, padding)
    values, vectors, residuals, iterations = found
    return vectors, values * scale[:, None], residuals, iterations


def checked_eigh(
    matrices: jax.Array, padding: jax.Array | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Eigendecompositions of a stack, with residuals.

    Args:
      matrices: `[n, d, d]`, symmetric, of about norm 1.
      padding: bool `[n, d]`, as in :func:`eigenbases`.

    Returns:
      eigenvalues `[n, d]` ascending, eigenvectors `[n, d, d]` in columns, and the
      residuals `[n]`, relative to the largest eigenvalue.
    """
    found = by_platform(_eigh_one_by_one, _eigh, with_last(matrices, padding))
    values, vectors = settle_padding(*found, matrices, padding)
    return values, vectors, _residual(matrices, values, vectors, padding)


def sure_eigenbases(
    matrices: jax.Array,
    previous: jax.Array,
    basis: Basis,
    padding: jax.Array | None,
    max_residual: float,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """As :func:`eigenbases`, and what fails once more in float64 where that is allowed.

    Args:
      matrices: `[n, d, d]`.
      previous: `[n, d, d]`, of any float dtype.
      basis: the method.
      padding: bool `[n, d]`, or `None`.
      max_residual: above it a basis has failed.
    """
    basis = replace(basis, max_residual=max_residual)

    def compute(batch: jax.Array) -> tuple[jax.Array, ...]:
        return eigenbases(batch, previous.astype(batch.dtype), basis, padding)

    return widened(compute, matrices.dtype, max_residual)(matrices)


# ---- eigh


def _decomposed(
    matrices: jax.Array,
    previous: jax.Array,
    basis: EighBasis,
    padding: jax.Array | None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Eigendecompositions where the previous basis is not good enough."""
    if basis.tolerance == 0:
        found = checked_eigh(matrices, padding)
        return *found, jnp.ones(len(matrices), jnp.int32)
    rotated = rotate(matrices, previous)
    needed = ~is_diagonal(rotated, basis.tolerance)
    found = where_needed(
        _eigh, with_last(matrices, padding), needed, (diagonals(rotated), previous)
    )
    values, vectors = settle_padding(*found, matrices, padding)
    residuals = _residual(matrices, values, vectors, padding)
    residuals = jnp.where(needed, residuals, 0)
    return values, vectors, residuals, needed.astype(jnp.int32)


def _eigh(matrices: jax.Array) -> Pair:
    # LAPACK has columns side by side where XLA has rows: a transpose needs no copy.
    transposed = jnp.swapaxes(matrices, -1, -2)
    return tuple(jnp.linalg.eigh(transposed, symmetrize_input=False))


@jax.jit
def _eigh_one_by_one(matrices: jax.Array) -> Pair:
    """One matrix at a time, in one traced call.

    On CPU a batched eigh waits for threads of the pool that it itself runs in: as
    many of them at once as the pool has threads, one a side or one a simulated
    device, wait for each other for ever. A batched QR does so too.
    """

    def one(matrix: jax.Array) -> Pair:
        values, vectors = _eigh(matrix)
        return values, vectors.T

    values, rows = jax.lax.map(one, matrices)
    return values, jnp.swapaxes(rows, 1, 2)


def _residual(matrices, values, vectors, padding) -> jax.Array:
    """How far the decomposition is off, seen by one probe vector v of norm 1, `[n]`.

    The larger of the norms of (A - Q Λ Qᵀ) v / λ_max and (I - Q Qᵀ) v.
    """
    probe = probe_of(values, padding)
    coordinates = contract(vectors, probe, "nij,ni->nj")
    product = contract(matrices, probe, "nij,nj->ni")
    rebuilt = contract(vectors, values * coordinates, "nij,nj->ni")
    spectral = jnp.linalg.norm(product - rebuilt, axis=1)
    largest = jnp.max(jnp.abs(values), axis=1)
    return jnp.maximum(
        spectral / jnp.where(largest > 0, largest, 1),
        distance_from_orthogonal(vectors, probe),
    )


# ---- QR


def _followed(
    matrices: jax.Array,
    previous: jax.Array,
    basis: QRBasis,
    padding: jax.Array | None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """QR iteration from the previous bases, ascending."""
    iterate = _iterate_qr if basis.tolerance > 0 else _iterate_untested
    values, vectors, iterations = iterate(matrices, previous, basis)
    order = values if padding is None else jnp.where(padding, jnp.inf, values)
    vectors, values = reorder(vectors, values, jnp.argsort(order, axis=1))
    values, vectors = settle_padding(values, vectors, matrices, padding)
    residuals = distance_from_orthogonal(vectors, probe_of(values, padding))
    return values, vectors, residuals, iterations


def _iterate_untested(
    matrices: jax.Array, vectors: jax.Array, basis: QRBasis
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """As `_iterate_qr` with the Q' of A Q = Q' R as the next Q, up to signs.

    An iteration takes one product, and nothing adds up in Q. Only a Q of which A Q is
    a multiple of each column, bit for bit, is good.
    """

    def estimates(vectors: jax.Array, products: jax.Array) -> jax.Array:
        # XLA on CPU takes 50 times as long for a sum of the products along columns.
        return contract(vectors, products, "nij,nij->nj")

    def advance(_, carry):
        vectors, products, iterations = carry
        multiples = vectors * estimates(vectors, products)[:, None]
        moving = jnp.any(products != multiples, axis=(1, 2))
        vectors, _ = where_needed(_qr, products, moving, (vectors, products))
        products = contract(matrices, vectors, "nij,njk->nik")
        return vectors, products, iterations + moving.astype(jnp.int32)

    products = contract(matrices, vectors, "nij,njk->nik")
    start = (vectors, products, jnp.zeros(len(matrices), jnp.int32))
    vectors, products, iterations = jax.lax.fori_loop(
        0, basis.max_iterations, advance, start
    )
    return estimates(vectors, products), vectors, iterations


def _iterate_qr(
    matrices: jax.Array, vectors: jax.Array, basis: QRBasis
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The diagonal of Qᵀ A Q, Q, and the iterations done.

    It ends where Q is good or had its iterations.
    """

    def unfinished(carry):
        *_, running = carry
        return jnp.any(running)

    def advance(carry):
        rotated, vectors, iterations, running = carry
        identity = jnp.broadcast_to(eye_of(rotated), rotated.shape)
        # A slot that is done is multiplied by the identity, which is exact.
        turn, rest = where_needed(_qr, rotated, running, (identity, rotated))
        rotated = contract(rest, turn, "nij,njk->nik")
        vectors = contract(vectors, turn, "nij,njk->nik")
        iterations += running.astype(jnp.int32)
        return rotated, vectors, iterations, is_running(rotated, iterations)

    def is_running(rotated, iterations):
        good = is_diagonal(rotated, basis.tolerance)
        return ~good & (iterations < basis.max_iterations)

    rotated = rotate(matrices, vectors)
    iterations = jnp.zeros(len(matrices), jnp.int32)
    start = (rotated, vectors, iterations, is_running(rotated, iterations))
    rotated, vectors, iterations, _ = jax.lax.while_loop(unfinished, advance, start)
    moved = per_slot(iterations > 0, vectors)
    vectors = jnp.where(moved, orthogonal(vectors), vectors)
    return diagonals(rotated), vectors, iterations


def _qr(matrices: jax.Array) -> Pair:
    return tuple(jnp.linalg.qr(matrices))


# ---- Cholesky


def _succeeded(
    matrices: jax.Array,
    previous: jax.Array,
    basis: CholeskyBasis,
    padding: jax.Array | None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Iterations whose columns stay in the places of those that they come from.

    The identity is no basis yet, unless it is good.
    """
    iterate = partial(_iterate_cholesky, basis)

    def one(slot):
        return tuple(found[0] for found in iterate(*(array[None] for array in slot)))

    def one_by_one(*arrays):  # which then stay in the cache
        return jax.lax.map(one, arrays)

    found = by_platform(one_by_one, iterate, matrices, previous)
    values, vectors, iterations = found
    values, vectors = settle_padding(values, vectors, matrices, padding)
    vectors, residuals = _straightened(vectors, probe_of(values, padding))
    first = jnp.all(previous == eye_of(previous), axis=(1, 2))
    first &= ~is_diagonal(matrices, basis.tolerance)
    needed = first | ~(residuals <= basis.max_residual)  # NaN too

    @jax.jit  # by its name operations that are seldom done are not counted
    def retry(found):
        *pair, residuals = found
        arrays = with_last(matrices, padding), previous
        pair = where_needed(_decomposed_in_place, arrays, needed, tuple(pair))
        values, vectors = settle_padding(*pair, matrices, padding)
        fresh = _residual(matrices, values, vectors, padding)
        return values, vectors, jnp.where(needed, fresh, residuals)

    found = values, vectors, residuals
    found = jax.lax.cond(jnp.any(needed), retry, tuple, found)
    return *found, jnp.where(needed, 1, iterations)


def _decomposed_in_place(arrays: tuple[jax.Array, jax.Array]) -> Pair:
    """Eigenvectors of a matrix, in the places of the old ones that they are."""
    matrices, previous = arrays
    values, vectors = _eigh(matrices)
    return align(previous, vectors, values, 0.71)[::-1]


def _straightened(vectors: jax.Array, probe: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Takes away what rounding has added, where it is more than 100 roundings.

    Args:
      vectors: `[n, d, d]`.
      probe: `[n, d]`.

    Returns:
      the vectors and their distance from orthogonal, `[n]`.
    """
    distance = distance_from_orthogonal(vectors, probe)
    bent = distance > 100 * jnp.finfo(vectors.dtype).eps

    def straighten(held):
        straight = (jnp.where(per_slot(bent, held[0]), orthogonal(held[0]), held[0]),)
        return *straight, distance_from_orthogonal(*straight, probe)

    return jax.lax.cond(jnp.any(bent), straighten, tuple, (vectors, distance))


def _iterate_cholesky(
    basis: CholeskyBasis, matrices: jax.Array, vectors: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The estimates, Q, and the iterations done."""

    def advance(_, carry):
        _, vectors, iterations = carry
        rotated = rotate(matrices, vectors)
        order = jnp.argsort(-diagonals(rotated), axis=1)
        back = jnp.argsort(order, axis=1)
        found = turn_all(reorder_both(rotated, order))
        values, turn = found[0], reorder_both(found[1], back)
        values = jnp.take_along_axis(values, back, axis=1)
        vectors = contract(vectors, turn, "nij,njk->nik")
        return values, vectors, iterations + found[2]

    def turn_all(rotated):
        if basis.tolerance == 0:
            return *_turned_once(rotated), jnp.ones(len(rotated), jnp.int32)
        still = (diagonals(rotated), jnp.broadcast_to(eye_of(rotated), rotated.shape))
        moving = ~is_diagonal(rotated, basis.tolerance)
        found = where_needed(_turned_once, rotated, moving, still)
        return *found, moving.astype(jnp.int32)

    start = (diagonals(matrices), vectors, jnp.zeros(len(matrices), jnp.int32))
    return jax.lax.fori_loop(0, basis.max_iterations, advance, start)


def _turned_once(matrices: jax.Array) -> Pair:
    """The estimates after an iteration, and the Q of its QR decomposition.

    Args:
      matrices: `[..., d, d]`, with descending diagonals.
    """
    trace = jnp.trace(matrices, axis1=-2, axis2=-1)[..., None]
    # Of zeros, which a dead layer has, all vectors stay.
    ridge = 16 * jnp.finfo(matrices.dtype).eps * jnp.where(trace > 0, trace, 1)
    first = cholesky(matrices + ridge[..., None] * eye_of(matrices))
    second = cholesky(gram_of_lower(first))
    values = jnp.sum(jnp.square(second), axis=-2) - ridge
    return values, divide_by_transpose(first, second)
