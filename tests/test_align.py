"""Columns of a new basis in the places of their old selves."""

import helpers
import jax.numpy as jnp
import numpy as np
import pytest
from test_eigen import assert_columns, dtypes

from shampoo_optax._orthogonal import align

compiled_align = helpers.quick_jit(align, static_argnames="least")


def brute_force(previous, bases, least):
    """The new columns in their places, by a search over all pairs."""
    side = len(previous)
    places = [None] * side
    for column in range(side):
        for place in range(side):
            if abs(previous[:, place] @ bases[:, column]) >= least:
                assert places[place] is None
                places[place] = column
    rest = iter(sorted(set(range(side)) - set(places)))
    return [next(rest) if column is None else column for column in places]


def turned(bases, pairs, angle):
    """The bases with pairs of their columns turned in their plane."""
    bases = bases.copy()
    for i, j in pairs:
        a, b = bases[:, i].copy(), bases[:, j].copy()
        bases[:, i] = np.cos(angle) * a + np.sin(angle) * b
        bases[:, j] = np.cos(angle) * b - np.sin(angle) * a
    return bases


# The angles by which some columns are turned more and others less than `least` allows.
@pytest.mark.parametrize(
    "least, large, small", [(0.99999, 0.01, 1e-3), (0.75, 0.76, 0.3)]
)
@dtypes
def test_columns_take_the_places_of_their_old_selves(dtype, least, large, small, x64):
    rng = np.random.default_rng(3)
    previous, bases, orders = [], [], []
    for pairs in ([], [(0, 3)], [(1, 2), (4, 6)], [(0, 1), (2, 3), (4, 5)]):
        for _ in range(3):
            old, _ = np.linalg.qr(rng.standard_normal((7, 7)))
            new = turned(turned(old, pairs, large), [(5, 6)], small)
            new = new[:, rng.permutation(7)] * rng.choice([-1, 1], 7)
            previous.append(old), bases.append(new)
            orders.append(brute_force(old, new, least))
    previous, bases = np.array(previous, dtype), np.array(bases, dtype)
    values = rng.standard_normal((12, 7)).astype(dtype)
    got, moved = compiled_align(
        *map(jnp.asarray, (previous, bases, values)), least=least
    )
    orders = np.array(orders)
    np.testing.assert_array_equal(
        got, np.take_along_axis(bases, orders[:, None], axis=2)
    )
    np.testing.assert_array_equal(moved, np.take_along_axis(values, orders, axis=1))
    assert_columns(np.asarray(got[:3]), previous[:3], 1.1 * small)  # all were old ones


def test_new_columns_keep_their_order():
    rng = np.random.default_rng(4)
    previous, bases = np.linalg.qr(rng.standard_normal((2, 5, 6, 6)))[0]
    values = rng.standard_normal((5, 6))
    got = compiled_align(
        *(jnp.asarray(x, jnp.float32) for x in (previous, bases, values)), least=0.99999
    )
    np.testing.assert_array_equal(got[0], bases.astype(np.float32))
    np.testing.assert_array_equal(got[1], values.astype(np.float32))
