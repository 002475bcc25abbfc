"""Acceptance cases of blocks divided over a mesh: the same numbers as on one device."""

import functools
import itertools

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import TRANSFORMS, placement_of, plan_of, quick_jit
from helpers import worst_of_steps as error

import shampoo_optax as so

# (sizes of the mesh, axes that blocks are divided over, kind of the axes)
MESHES = [
    ((8,), None, "Auto"),
    ((4, 2), None, "Explicit"),
    ((4, 2), "x", "Auto"),
    ((2, 2, 2), None, "Auto"),
    ((2, 2, 2), ("y",), "Explicit"),
]
# Two of three axes, not in the mesh's order.
CROSSED = ((2, 2, 2), ("z", "x"), "Explicit")
names = pytest.mark.parametrize("name", TRANSFORMS)


# ---- C15: the same trajectory

# A ridge of 1e-3 leaves no factor ill-conditioned.
SETTINGS = {
    "shampoo": dict(b2=0.9, refresh_every=4, relative_eps=1e-3),
    "ungrafted": dict(b2=0.9, refresh_every=4, relative_eps=1e-3, graft=None),
    "soap": dict(b2=0.9, refresh_every=4),
}


def build(name, placement=None):
    kind = "soap" if name == "soap" else "shampoo"
    return TRANSFORMS[kind](**SETTINGS[name], placement=placement)


MATRICES = helpers.normal_steps({f"w{i:02}": (6, 4) for i in range(13)}, 20)


def first(count, trees):
    """The first matrices of some trees."""
    return [dict(sorted(tree.items())[:count]) for tree in trees]


@functools.lru_cache
def on_one_device(name):
    """All matrices, of which none knows of the others."""
    return helpers.trace(build(name), MATRICES[0], MATRICES)


def mesh_placement(sizes, axes, kind):
    return placement_of(*sizes, axes=axes, kind=kind)


def used(state, count):
    """The slots with blocks; the name of a stack says how many owners it has."""

    def cut(stacks):
        return {
            name.partition("@")[0]: jax.tree.map(lambda x: x[:count], stack)
            for name, stack in stacks.items()
        }

    return type(state)(state.count, *map(cut, state[1:]))


def agrees(name, count, mesh):
    steps = first(count, MATRICES)
    tx = build(name, mesh_placement(*mesh))
    got, states = jax.device_get(helpers.trace(tx, steps[0], steps))
    want, states_wanted = on_one_device(name)
    want = first(count, want)
    assert error(got, want) <= 1e-6
    return (got, states), (want, [used(state, count) for state in states_wanted])


@pytest.mark.parametrize(
    "mesh, count",
    [
        *itertools.product(MESHES[:1], [1, 3, 8, 13]),
        *itertools.product(MESHES[1:], [3, 13]),
        (CROSSED, 13),
    ],
    ids=str,
)
def test_shampoo_on_a_mesh(mesh, count):
    """More than one block is handled bit for bit alike in every state."""
    (_, states), (_, wanted) = agrees("shampoo", count, mesh)
    assert int(states[-1].count) == 20
    if count > 1:  # with one, XLA drops the batch dimension and fuses otherwise
        for state, single in zip(states, wanted, strict=True):
            held = used(state, count)
            helpers.assert_equal(
                held._replace(residuals={}), single._replace(residuals={})
            )
            # They are what rounding leaves, and differ as programs do.
            for part in (held, single):
                assert max(map(np.max, part.residuals.values())) <= 1e-5


@pytest.mark.parametrize(
    "mesh, count",
    [*itertools.product(MESHES[:1], [1, 3, 8]), (MESHES[1], 13), (CROSSED, 13)],
    ids=str,
)
def test_soap_on_a_mesh(mesh, count):
    """Within rounding: the ridge and the correction fuse otherwise on a mesh."""
    agrees("soap", count, mesh)


@pytest.mark.parametrize("mesh, count", [(MESHES[0], 8), (MESHES[1], 13)], ids=str)
def test_ungrafted_shampoo_is_bit_equal(mesh, count):
    (got, _), (want, _) = agrees("ungrafted", count, mesh)
    helpers.assert_equal(got, want)


# On 8 devices there is one padded stack of each order, 0 to 4.
MIXED = {
    "scalar": (),
    "a": (5,),
    "b": (4,),
    "c": (6, 4),
    "d": (4, 5),
    "f": (2, 3, 4),
    "g": (4, 3, 3),
    "h": (2, 3, 2, 4),
}
FEW = {"b": (4,), "c": (6, 4), "d": (4, 5)}
# b2 = 1 and five steps before the first refresh give every factor its full rank.
STEADY = dict(b2=1.0, graft_b2=0.9, refresh_every=5, relative_eps=0.1)
AXES = {1: 0.25, 2: {0: 0.5, 1: 0.0}, 3: {0: 0.2, 2: 0.4}}
VARIANTS = {
    "exponents": ("shampoo", STEADY | dict(exponents=AXES)),
    "newton": ("shampoo", STEADY | dict(root=so.CoupledNewton())),
    # Stopped earlier, the last iterate would depend on where the iteration started.
    "exact newton": (
        "shampoo",
        STEADY | dict(root=so.CoupledNewton(tolerance=1e-12)),
    ),
    "pseudo": ("shampoo", STEADY | dict(root=so.PseudoInverse(), relative_eps=None)),
    "soap": ("soap", dict(b2=0.9, refresh_every=5)),
}


def is_padded(plan):
    return any(
        region.stacked != plan.stacks[piece.stack].block
        for region in plan.regions
        for piece in region.pieces
    )


def on_both(variant, steps):
    """The updates on 8 devices, with padding, and on one."""
    name, kwargs = VARIANTS[variant]
    make = functools.partial(
        TRANSFORMS[name], blocking=so.Blocking(merge_to=None), **kwargs
    )
    want, single = helpers.trace(make(), steps[0], steps, jit=quick_jit)
    tx = make(placement=placement_of(8))
    assert is_padded(plan_of(tx, steps[0]))
    got, states = helpers.trace(tx, steps[0], steps, jit=quick_jit)
    for counter in ("failures", "skipped"):
        for state in (states[-1], single[-1]):
            assert helpers.total(getattr(state, counter)) == 0
    return got, want


@pytest.mark.parametrize("variant", ["newton", "pseudo"])
def test_roots_in_padded_stacks(variant):
    got, want = on_both(variant, helpers.normal_steps(FEW, 20))
    assert error(got, want) <= 1e-6


def in_float64(steps):
    return jax.tree.map(lambda x: x.astype(jnp.float64), steps)


@pytest.mark.parametrize("variant", ["exponents", "soap"])
def test_orders_in_padded_stacks(x64, variant):
    """Eigenvectors of close eigenvalues leave float32 few digits to compare."""
    got, want = on_both(variant, in_float64(helpers.normal_steps(MIXED, 20)))
    assert error(got, want) <= 1e-12


def spread(gradient):
    """Halves the coordinates of every axis one after the other."""
    places = sum(np.indices(gradient.shape))
    return np.asarray(gradient) * 2.0**-places


@pytest.mark.parametrize("variant", ["exact newton", "soap"])
def test_mixed_dtypes_in_padded_stacks(x64, variant):
    """Eigenvalues far from each other leave float32 digits to compare."""
    shapes = FEW | {f"{key}_double": shape for key, shape in FEW.items()}
    steps = [
        {
            key: jnp.asarray(spread(g), jnp.float64 if "double" in key else jnp.float32)
            for key, g in step.items()
        }
        for step in helpers.normal_steps(shapes, 20)
    ]
    got, want = on_both(variant, steps)
    assert error(got, want) <= 1e-6
    doubles = (
        [{k: v for k, v in update.items() if "double" in k} for update in updates]
        for updates in (got, want)
    )
    assert error(*doubles) <= 1e-12


@names
@pytest.mark.parametrize(
    "params", [{}, {"none": None}, {"empty": np.zeros((0, 3), np.float32)}], ids=str
)
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_nothing_to_precondition(name, params, kind):
    tx = TRANSFORMS[name](placement=placement_of(8, kind=kind))
    state = tx.init(params)
    kinds = jax.tree.map(jnp.shape, state)
    for update in (tx.update, jax.jit(tx.update)):
        updates, state = update(params, state, params)
        helpers.assert_equal(updates, jax.tree.map(jnp.asarray, params))
        assert jax.tree.map(jnp.shape, state) == kinds
    assert int(state.count) == 2


# ---- absent and non-finite gradients, a failed root

SHAPES = {"v": (6, 4), "w": (6, 4), "x": (5, 3)}


def slot_of(plan, params, name):
    """The stack and the slot of a parameter of one block."""
    index = sorted(params).index(name)
    (region,) = (region for region in plan.regions if region.leaf == index)
    return region.pieces[0].stack, region.pieces[0].slot


@names
def test_absent_and_bad_gradients(x64, name):
    """One is not finite at the third step, one absent at the fourth."""
    steps = in_float64(helpers.normal_steps(SHAPES, 5))
    steps[3] = steps[3] | {"w": None}
    steps[2] = steps[2] | {"x": steps[2]["x"].at[1, 2].set(np.nan)}
    # A large eps, since a few gradients leave some second moments near 0.
    kwargs = dict(b2=0.9, refresh_every=4, eps=0.1)
    tx = TRANSFORMS[name](**kwargs)
    want, single = helpers.trace(tx, steps[0], steps)
    tx = TRANSFORMS[name](**kwargs, placement=placement_of(8))
    got, states = helpers.trace(tx, steps[0], steps)
    assert got[3]["w"] is None
    assert not np.any(got[2]["x"])
    for step in range(5):
        assert helpers.worst(got[step], want[step]) <= 1e-12
    stack, slot = slot_of(plan_of(tx, steps[0]), SHAPES, "x")
    for state, other in zip(states, single, strict=True):
        wanted = int(int(state.count) > 2)
        assert int(state.skipped[stack][slot]) == wanted
        assert helpers.total(state.skipped) == helpers.total(other.skipped) == wanted
    # The factors of an absent gradient are those of the step before.
    stack, slot = slot_of(plan_of(tx, steps[0]), SHAPES, "w")
    for axis in ("0", "1"):
        first, second, third = (
            state.factors[stack][axis][slot] for state in states[2:]
        )
        np.testing.assert_array_equal(first, second)
        assert np.any(second != third)


def nan_on_third(monkeypatch):
    """Spoils the roots of factors whose trace lies between 2.5 and 3.5."""
    from shampoo_optax import _roots

    genuine = _roots.inverse_roots

    def inverse_roots(factors, *args, **kwargs):
        roots, *about = genuine(factors, *args, **kwargs)
        traces = jnp.trace(factors, axis1=1, axis2=2)
        chosen = (traces > 2.5) & (traces < 3.5)
        return jnp.where(chosen[:, None, None], jnp.nan, roots), *about

    monkeypatch.setattr(_roots, "inverse_roots", inverse_roots)


def test_failed_root_keeps_the_previous_one(monkeypatch):
    """C7: the factor of `w` has the trace t at step t, and refreshes are at 1, 2, …"""
    steps = [
        {
            key: g / jnp.linalg.norm(g) * (1.0 if key == "w" else 10.0)
            for key, g in step.items()
        }
        for step in helpers.normal_steps(SHAPES, 5)
    ]

    def run():
        tx = so.scale_by_shampoo(**helpers.BARE, placement=placement_of(8))
        results = jax.device_get(helpers.trace(tx, steps[0], steps))
        return plan_of(tx, steps[0]), *results

    plan, wanted, sound = run()
    nan_on_third(monkeypatch)
    _, updates, states = run()
    helpers.assert_finite((updates, states))
    stack, slot = slot_of(plan, SHAPES, "w")
    assert slot_of(plan, SHAPES, "v")[0] == stack
    counts = [int(state.failures[stack][slot]) for state in states]
    assert counts == [0, 0, 1, 1, 1]
    assert [helpers.total(state.failures) for state in states] == counts
    for axis in ("0", "1"):
        roots = [np.asarray(state.roots[stack][axis][slot]) for state in states]
        np.testing.assert_array_equal(roots[2], roots[1])
        assert np.any(roots[3] != roots[2])
    for index in range(5):
        for key in SHAPES:
            if (index, key) != (2, "w"):
                same = np.array_equal(updates[index][key], wanted[index][key])
                assert same, (index, key)
    # The third direction, by hand: the new gradient and the roots of step 2.
    left, right = (np.asarray(sound[1].roots[stack][axis][slot]) for axis in "01")
    by_hand = left @ np.asarray(steps[2]["w"]) @ right
    np.testing.assert_allclose(updates[2]["w"], by_hand, rtol=1e-4, atol=1e-6)


# ---- the plan

LEAVES = [(6, 4), (4, 5), (3,), (5, 4), (2, 2, 3), (3, 3), (), (7,)]


@pytest.mark.parametrize("owners", [2, 3, 8])
def test_the_order_of_the_parameters_does_not_matter(owners):
    """The stacks are the same; blocks of one shape may change places."""
    tx = so.scale_by_shampoo(blocking=so.Blocking(merge_to=None))

    def places(order):
        plan = plan_of(tx, [jnp.zeros(LEAVES[i]) for i in order], owners)
        pieces = [(r.stacked, piece) for r in plan.regions for piece in r.pieces]
        assert len(pieces) == len(LEAVES)
        return plan.stacks, sorted(pieces)

    wanted = places(range(8))
    assert places([7, 6, 5, 4, 3, 2, 1, 0]) == wanted
    assert places([3, 0, 6, 1, 7, 2, 5, 4]) == wanted


@names
def test_state_of_another_number_of_owners(name):
    params = {"w": jnp.ones((6, 4)), "b": jnp.ones(5)}
    state = TRANSFORMS[name](placement=placement_of(8)).init(params)
    tx = TRANSFORMS[name](placement=placement_of(4))
    with pytest.raises(ValueError, match="`state` must come from .*`from_portable`"):
        tx.update(params, state, params)
    with pytest.raises(ValueError, match="`state` must be a ScaleBy"):
        tx.update(params, optax.EmptyState(), params)
