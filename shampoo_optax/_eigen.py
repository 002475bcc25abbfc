"""Eigenvectors of a stack of factors: decomposed, or followed from the old ones."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from shampoo_optax._methods import Basis, EighBasis, QRBasis
from shampoo_optax._newton import add_to_diagonal, largest_row_sum
from shampoo_optax._retry import widened
from shampoo_optax._stacks import contract, per_slot, scale_to_one, traces

Pair = tuple[jax.Array, jax.Array]


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
      unless an :class:`EighBasis` kept the old vectors, whose order then stays; the
      residuals `[n]`, 0 for kept vectors, NaN where the matrix is not finite; and
      how many decompositions there were, int32 `[n]`.
    """
    scaled, scale = scale_to_one(matrices)
    if isinstance(basis, QRBasis):
        found = _followed(scaled, previous, basis, padding)
    else:
        found = _decomposed(scaled, previous, basis, padding)
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
    found = _by_platform(_eigh_one_by_one, _eigh, _with_last(matrices, padding))
    values, vectors = _settle_padding(*found, matrices, padding)
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

    def compute(batch: jax.Array) -> tuple[jax.Array, ...]:
        return eigenbases(batch, previous.astype(batch.dtype), basis, padding)

    return widened(compute, matrices.dtype, max_residual)(matrices)


def align(
    previous: jax.Array, bases: jax.Array, values: jax.Array, least: float
) -> tuple[jax.Array, jax.Array]:
    r"""Puts columns that are old vectors, up to sign, in the old vectors' places.

    What is kept for each column of a basis, such as second moments, then stays with
    its vector when eigenvalues change their order. A new column q is an old one p
    where :math:`|p^\top q|` is at least `least`, which allows for no second one; the
    other columns fill the places that are left, in their order.

    Args:
      previous: `[n, d, d]`, the old orthogonal bases.
      bases: `[n, d, d]`, the new ones.
      values: `[n, d]`, what belongs to the new columns: eigenvalues.
      least: above :math:`1 / \sqrt 2`.

    Returns:
      the new bases and values, in the new order.
    """
    same = jnp.abs(contract(previous, bases, "nij,nik->njk")) >= least
    place, column = (~jnp.any(same, axis=axis) for axis in (2, 1))
    order = jnp.cumsum(place, axis=1)[:, :, None] == jnp.cumsum(column, axis=1)[:, None]
    same |= place[:, :, None] & column[:, None] & order
    return _reorder(bases, values, jnp.argmax(same, axis=2))


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
    rotated = _rotated(matrices, previous)
    needed = ~_is_diagonal(rotated, basis.tolerance)
    found = _where_needed(
        _eigh, _with_last(matrices, padding), needed, (_diagonals(rotated), previous)
    )
    values, vectors = _settle_padding(*found, matrices, padding)
    residuals = _residual(matrices, values, vectors, padding)
    residuals = jnp.where(needed, residuals, 0)
    return values, vectors, residuals, needed.astype(jnp.int32)


def _eigh(matrices: jax.Array) -> Pair:
    return tuple(jnp.linalg.eigh(matrices, symmetrize_input=False))


@jax.jit
def _eigh_one_by_one(matrices: jax.Array) -> Pair:
    """One matrix at a time, in one traced call.

    On CPU a batched eigh waits for threads of the pool that it itself runs in: as
    many of them at once as the pool has threads, one a side or one a simulated
    device, wait for each other for ever. A batched QR does so too.
    """
    return jax.lax.map(_eigh, matrices)


def _residual(matrices, values, vectors, padding) -> jax.Array:
    """How far the decomposition is off, seen by one probe vector v of norm 1, `[n]`.

    The larger of the norms of (A - Q Λ Qᵀ) v / λ_max and (I - Q Qᵀ) v.
    """
    probe = _probe(values, padding)
    coordinates = contract(vectors, probe, "nij,ni->nj")
    product = contract(matrices, probe, "nij,nj->ni")
    rebuilt = contract(vectors, values * coordinates, "nij,nj->ni")
    spectral = jnp.linalg.norm(product - rebuilt, axis=1)
    largest = jnp.max(jnp.abs(values), axis=1)
    return jnp.maximum(
        spectral / jnp.where(largest > 0, largest, 1),
        _distance_from_orthogonal(vectors, probe),
    )


def _distance_from_orthogonal(vectors: jax.Array, probe: jax.Array) -> jax.Array:
    """The norm of (I - Q Qᵀ) v, `[n]`."""
    coordinates = contract(vectors, probe, "nij,ni->nj")
    identity = contract(vectors, coordinates, "nij,nj->ni")
    return jnp.linalg.norm(identity - probe, axis=1)


def _probe(values: jax.Array, padding: jax.Array | None) -> jax.Array:
    """A vector of norm 1 that is 0 on padding, `[n, d]`."""
    probe = jnp.cos(jnp.arange(1, values.shape[1] + 1, dtype=values.dtype))
    probe = jnp.broadcast_to(probe, values.shape)
    if padding is not None:
        probe = jnp.where(padding, 0, probe)
    norm = jnp.linalg.norm(probe, axis=1, keepdims=True)
    return probe / jnp.where(norm > 0, norm, 1)


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
    vectors, values = _reorder(vectors, values, jnp.argsort(order, axis=1))
    values, vectors = _settle_padding(values, vectors, matrices, padding)
    residuals = _distance_from_orthogonal(vectors, _probe(values, padding))
    return values, vectors, residuals, iterations


def _iterate_untested(
    matrices: jax.Array, vectors: jax.Array, basis: QRBasis
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """As `_iterate_qr` with the Q' of A Q = Q' R as the next Q, up to signs.

    An iteration takes one product, and nothing adds up in Q. Only a Q of which A Q is
    a multiple of each column, bit for bit, is good.
    """

    def estimates(vectors: jax.Array, products: jax.Array) -> jax.Array:
        return jnp.sum(vectors * products, axis=1)

    def advance(_, carry):
        vectors, products, iterations = carry
        multiples = vectors * estimates(vectors, products)[:, None]
        moving = jnp.any(products != multiples, axis=(1, 2))
        vectors, _ = _where_needed(_qr, products, moving, (vectors, products))
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
        identity = jnp.broadcast_to(_eye(rotated), rotated.shape)
        # A slot that is done is multiplied by the identity, which is exact.
        turn, rest = _where_needed(_qr, rotated, running, (identity, rotated))
        rotated = contract(rest, turn, "nij,njk->nik")
        vectors = contract(vectors, turn, "nij,njk->nik")
        iterations += running.astype(jnp.int32)
        return rotated, vectors, iterations, is_running(rotated, iterations)

    def is_running(rotated, iterations):
        good = _is_diagonal(rotated, basis.tolerance)
        return ~good & (iterations < basis.max_iterations)

    rotated = _rotated(matrices, vectors)
    iterations = jnp.zeros(len(matrices), jnp.int32)
    start = (rotated, vectors, iterations, is_running(rotated, iterations))
    rotated, vectors, iterations, _ = jax.lax.while_loop(unfinished, advance, start)
    moved = per_slot(iterations > 0, vectors)
    vectors = jnp.where(moved, _orthogonal(vectors), vectors)
    return _diagonals(rotated), vectors, iterations


def _qr(matrices: jax.Array) -> Pair:
    return tuple(jnp.linalg.qr(matrices))


def _orthogonal(vectors: jax.Array) -> jax.Array:
    """Takes away what rounding adds, by one Newton-Schulz step.

    Without it a float32 basis that is followed for ever loses 5e-8 of its
    orthogonality at every refresh, until the guard refuses all that follow.
    """
    gram = contract(vectors, vectors, "nji,njk->nik")
    return 1.5 * vectors - 0.5 * contract(vectors, gram, "nij,njk->nik")


# ---- both


def _by_platform(cpu: Callable, default: Callable, *arrays):
    """Calls one of two functions of the arrays, by where the program will run."""
    if jax.default_backend() == "cpu":
        return cpu(*arrays)
    return jax.lax.platform_dependent(*arrays, cpu=cpu, default=default)


def _where_needed(
    decompose: Callable[[jax.Array], Pair],
    matrices: jax.Array,
    needed: jax.Array,
    otherwise: Pair,
) -> Pair:
    """Decomposes the matrices that need it, `needed` bool `[n]`.

    Nothing is decomposed where none does; on CPU, only those that do.
    """

    def one(arrays):
        matrix, wanted, *rest = arrays
        return jax.lax.cond(wanted, decompose, lambda _: tuple(rest), matrix)

    def one_by_one(*arrays):  # for the reason in `_eigh_one_by_one`
        return jax.lax.map(one, arrays)

    def together(matrices, wanted, *rest):
        fresh = jax.lax.cond(
            jnp.any(wanted), decompose, lambda _: tuple(rest), matrices
        )
        return tuple(
            jnp.where(per_slot(wanted, new), new, old)
            for new, old in zip(fresh, rest, strict=True)
        )

    return _by_platform(one_by_one, together, matrices, needed, *otherwise)


def _is_diagonal(matrices: jax.Array, tolerance: float) -> jax.Array:
    """Whether what is off the diagonal has at most this share of the norm, `[n]`.

    It is summed by itself: as the difference of two sums of squares it would drown
    in rounding below the root of the machine epsilon, 3e-4 in float32.
    """
    squares = jnp.square(matrices)
    off = jnp.sum(squares * (1 - _eye(matrices)), axis=(1, 2))
    return off <= tolerance**2 * jnp.sum(squares, axis=(1, 2))


def _rotated(matrices: jax.Array, bases: jax.Array) -> jax.Array:
    """Qᵀ A Q."""
    products = contract(matrices, bases, "nij,njk->nik")
    return contract(bases, products, "nji,njk->nik")


def _reorder(bases: jax.Array, values: jax.Array, order: jax.Array) -> Pair:
    """The columns, and what belongs to them, in the order `[n, d]`."""
    columns = jnp.take_along_axis(bases, order[:, None], axis=2)
    return columns, jnp.take_along_axis(values, order, axis=1)


def _with_last(matrices: jax.Array, padding: jax.Array | None) -> jax.Array:
    """Gives padding eigenvalues above all others, which come last."""
    if padding is None:
        return matrices
    above = 2 * largest_row_sum(matrices)
    return add_to_diagonal(matrices, jnp.where(padding, above[:, None], 0))


def _settle_padding(
    values: jax.Array, vectors: jax.Array, matrices: jax.Array, padding
) -> Pair:
    """Gives padding its unit vectors, and the mean eigenvalue before padding."""
    if padding is None:
        return values, vectors
    inside = jnp.maximum(jnp.sum(~padding, axis=1), 1)
    mean = traces(matrices) / inside.astype(values.dtype)
    outside = padding[:, :, None] | padding[:, None]
    return (
        jnp.where(padding, mean[:, None], values),
        jnp.where(outside, _eye(vectors), vectors),
    )


def _diagonals(matrices: jax.Array) -> jax.Array:
    return jnp.sum(matrices * _eye(matrices), axis=2)


def _eye(matrices: jax.Array) -> jax.Array:
    return jnp.eye(matrices.shape[-1], dtype=matrices.dtype)[None]
