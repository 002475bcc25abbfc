"""Forms of the state: one triangle of a matrix, dtypes, and what goes on from where."""

import functools
import math

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_equal, mesh_of, normal_steps, quick_jit, replicate, worst

import shampoo_optax as so
from shampoo_optax import _storage

BF16 = jnp.bfloat16
SIDES = [*range(1, 10), 33, 64]
SHAPES = {"long": (11, 4), "square": (5, 5), "vector": (6,)}
STEPS = normal_steps(SHAPES, 6)
PARAMS = STEPS[0]
PACKED = so.Storage(packed=True)
NARROW = so.Storage("bfloat16", "bfloat16", "bfloat16", packed=True)


def symmetric(side, n=3):
    """Symmetric matrices whose upper entries are all different, exact in bfloat16."""
    matrices = np.zeros((n, side, side))
    rows, columns = np.triu_indices(side)
    values = np.random.default_rng(side).permutation(n * len(rows)).reshape(n, -1)
    matrices[:, rows, columns] = matrices[:, columns, rows] = values % 251 + 1
    return matrices


# ---- packing


@pytest.mark.parametrize("dtype", [BF16, np.float32, np.float64])
def test_there_and_back(dtype, x64):
    """On the host and in one program; every entry has a place, and there is no more."""

    @quick_jit
    def both(matrices):
        packed = {side: _storage.pack(m) for side, m in matrices.items()}
        return packed, {side: _storage.unpack(m, side) for side, m in packed.items()}

    whole = {side: symmetric(side).astype(dtype) for side in SIDES}
    packed, again = both(whole)
    assert_equal(again, whole)
    for side, matrices in whole.items():
        on_host = _storage.pack(matrices)
        assert isinstance(on_host, np.ndarray)
        assert_equal(packed[side], on_host)
        assert_equal(_storage.unpack(on_host, side), matrices)
        assert on_host.shape == (3, *_storage.packed_shape(side))
        assert on_host[0].size == side * (side + 1) // 2
        upper = matrices[0][np.triu_indices(side)]
        assert sorted(on_host[0].ravel()) == sorted(upper)
        assert _storage.side_of(on_host) == side
        assert _storage.is_packed(on_host) == (side > 1)  # one entry is whole


def test_traces_are_read_off_every_form():
    for side in SIDES:
        whole = symmetric(side).astype(np.float32)
        diagonals = np.diagonal(whole, axis1=1, axis2=2)
        wanted = np.trace(whole, axis1=1, axis2=2)
        for stored in (whole, _storage.pack(whole), diagonals, whole.astype(BF16)):
            got = _storage.stored_traces(jnp.asarray(stored))
            assert got.dtype == jnp.float32
            np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("side", [1, 6, 7])
def test_the_identity_is_packed(side):
    found = _storage.identities(
        so._stacks.Stack((side,), np.dtype(np.float32), 2), side, "bfloat16", True
    )
    wanted = np.tile(np.eye(side, dtype=BF16), (2, 1, 1))
    assert_equal(np.asarray(_storage.load(found)), wanted.astype(np.float32))


@pytest.mark.parametrize("side", [8, 9])
def test_packing_is_a_few_operations_on_entries(side):
    """No gathers, no sorts, no products; as many for every side."""

    def around(matrices):
        packed = _storage.pack(matrices)
        return _storage.unpack(packed, side), _storage.stored_traces(packed)

    traced = jax.make_jaxpr(around)(jnp.ones((2, side, side)))
    used = {eqn.primitive.name for eqn, _ in helpers.equations(traced.jaxpr)}
    entrywise = {"slice", "pad", "concatenate", "transpose", "select_n", "reshape"}
    masks = {"iota", "broadcast_in_dim", "ge", "add", "convert_element_type"}
    assert used - entrywise - masks - {"jit", "pjit", "reduce_sum"} == set()
    assert not any(np.size(constant) > 1 for constant in traced.consts)


# ---- packed and whole


CASES = {
    "eigh": (so.scale_by_shampoo, {}),
    "newton": (so.scale_by_shampoo, dict(root=so.CoupledNewton())),
    "eigendecomposed": (
        so.scale_by_shampoo,
        dict(root=so.Eigendecomposed(so.QRBasis()), trace_scaling=0.5),
    ),
    "kl": (so.scale_by_kl_shampoo, {}),
    "soap": (so.scale_by_soap, {}),
    "diagonal": (so.scale_by_shampoo, dict(axes=so.Axes(diagonal_above=10))),
}


def made(case, storage, **changes):
    make, kwargs = CASES[case]
    kwargs = dict(refresh_every=2, blocking=so.Blocking(8), **kwargs)
    if make is not so.scale_by_soap:
        kwargs = dict(relative_eps=0.1) | kwargs
    return make(storage=storage, **kwargs | changes)


def scanned(tx, steps=STEPS, params=PARAMS):
    """Updates of all steps and the last state; a scan takes no other types."""
    grads = jax.tree.map(lambda *g: jnp.stack(g), *steps)

    @quick_jit
    def run(grads):
        def step(state, now):
            updates, state = tx.update(now, state, params)
            return state, updates

        return jax.lax.scan(step, tx.init(params), grads)

    return run(grads)


@pytest.mark.parametrize("case", CASES)
def test_packed_is_whole(case):
    """One even and one odd side, and a long one where there is a diagonal."""
    shape = (11, 3) if case == "diagonal" else (8, 3)
    steps = [helpers.normals(seed, *shape) for seed in range(5)]
    packed, whole = (made(case, storage) for storage in (PACKED, so.Storage()))
    held, updates = zip(
        *(scanned(tx, steps, steps[0]) for tx in (packed, whole)), strict=True
    )
    assert worst(*updates) < 1e-6
    portable = [
        so.to_portable(tx, state, steps[0])
        for tx, state in zip((packed, whole), held, strict=True)
    ]
    assert worst(*portable) < 1e-6
    stored = {
        field: next(iter(axes.values()))
        for field, axes in held[0]._asdict().items()
        if field in ("factors", "roots", "bases") and axes
    }
    assert len(stored) == 2
    for field, axes in stored.items():
        long = (11,) if case == "diagonal" else (8, 8) if field == "bases" else (4, 9)
        assert axes["0"].shape[1:] == long
        assert axes["1"].shape[1:] == ((3, 3) if field == "bases" else (2, 3))


def test_a_gradient_that_is_refused_leaves_every_form_alone():
    tx = made("eigh", NARROW)
    update = jax.jit(tx.update)
    _, before = update(STEPS[0], tx.init(PARAMS), PARAMS)
    bad = STEPS[1] | {"square": STEPS[1]["square"].at[0, 0].set(jnp.inf)}
    updates, after = update(bad, before, PARAMS)
    for field in ("factors", "roots", "filtered"):
        held, kept = getattr(before, field), getattr(after, field)
        assert_equal(kept["5x5"], held["5x5"])
    assert not np.any(updates["square"]) and int(after.skipped["5x5"][0]) == 1
    assert np.any(after.factors["8x4"]["0"] != before.factors["8x4"]["0"])


# ---- dtypes


DTYPES = {
    "factors": {"factors"},
    "roots": {"roots", "bases"},
    "momentum": {"filtered"},
}
COUNTED = {"count", "failures", "iterations", "skipped"}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("params_dtype", ["bfloat16", "float32", "float64"])
def test_dtypes_are_those_asked_for(dtype, params_dtype, x64):
    """Of the fields asked for and of no others, before and after a step."""
    usual = "float64" if params_dtype == "float64" else "float32"
    params = helpers.structs(SHAPES, params_dtype)
    for option, fields in DTYPES.items():
        for case in ("eigh", "eigendecomposed", "kl", "soap"):
            storage = so.Storage(**{option: dtype}, packed=option == "factors")
            tx = made(case, storage)
            state = jax.eval_shape(tx.init, params)
            updates, later = jax.eval_shape(tx.update, params, state, params)
            assert_types(later, state)
            assert {x.dtype.name for x in jax.tree.leaves(updates)} == {params_dtype}
            for field, part in state._asdict().items():
                wanted = dtype if field in fields else usual
                wanted = "int32" if field in COUNTED else wanted
                wanted = "float32" if field == "residuals" else wanted
                assert {x.dtype.name for x in jax.tree.leaves(part)} <= {wanted}, field


def assert_types(tree, expected):
    assert jax.tree.structure(tree) == jax.tree.structure(expected)
    for got, want in zip(jax.tree.leaves(tree), jax.tree.leaves(expected), strict=True):
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        assert got.weak_type == want.weak_type


def test_strict_promotion():
    """Nothing is widened or narrowed by chance."""
    tx = made("kl", NARROW)
    with jax.numpy_dtype_promotion("strict"):
        jax.eval_shape(tx.update, PARAMS, jax.eval_shape(tx.init, PARAMS), PARAMS)


@pytest.mark.parametrize("field", DTYPES)
@pytest.mark.parametrize("make", [so.scale_by_shampoo, so.scale_by_soap])
def test_64_bits_must_be_enabled(make, field):
    storage = so.Storage(**{field: "float64"})
    tx = make(storage=storage)
    with pytest.raises(ValueError, match=f"`{field}` of `storage` .*got 'float64'"):
        tx.init(PARAMS)


@pytest.mark.parametrize(
    "field, value", [("factors", "float16"), ("roots", "int8"), ("momentum", 3)]
)
def test_other_dtypes_are_refused(field, value):
    with pytest.raises(ValueError, match=f"`{field}` .*got {value!r}"):
        so.Storage(**{field: value})
    with pytest.raises(ValueError, match="`packed` .*got 'yes'"):
        so.Storage(packed="yes")
    with pytest.raises(ValueError, match="`storage` .*got 'packed'"):
        so.scale_by_shampoo(storage="packed")


def test_dtypes_have_several_names():
    storages = [so.Storage(x) for x in (BF16, "bfloat16", jnp.dtype(BF16))]
    assert len(set(storages)) == 1


def test_factors_of_64_bits_are_sums_of_64_bits(x64):
    """Of float32 gradients, and roots from them; the direction alone is rounded."""
    tx = so.scale_by_shampoo(
        **helpers.BARE, relative_eps=1e-9, storage=so.Storage("float64", "float64")
    )
    steps = [g["square"] for g in STEPS]
    state, updates = scanned(tx, steps, steps[0])
    wide = [np.asarray(g, np.float64) for g in steps]
    left = sum(g @ g.T for g in wide)
    values, vectors = np.linalg.eigh(left)
    root = (vectors * (values + 1e-9 * values[-1]) ** -0.25) @ vectors.T
    np.testing.assert_allclose(state.factors["5x5"]["0"][0], left, rtol=1e-13)
    np.testing.assert_allclose(state.roots["5x5"]["0"][0], root, rtol=1e-9, atol=1e-9)
    assert updates.dtype == jnp.float32


def test_bfloat16_is_the_rounded_number():
    """A factor, its root and the moving average after one step."""
    kwargs = dict(b1=0.9, b2=0.9, graft=None, refresh_every=1, relative_eps=1e-2)
    narrow, wide = (
        so.scale_by_shampoo(**kwargs, storage=storage)
        for storage in (so.Storage(momentum="bfloat16"), so.Storage())
    )
    steps = [g["square"] for g in STEPS]

    def run(tx, count=1):
        return scanned(tx, steps[:count], steps[0])

    states, updates = zip(*map(run, (narrow, wide)), strict=True)
    assert_equal(updates[0], updates[1])  # the average that is kept is not yet used
    rounded = jax.tree.map(lambda x: x.astype(BF16), states[1].filtered)
    assert_equal(states[0].filtered, rounded)
    second, wanted = (run(tx, 2)[1][1] for tx in (narrow, wide))
    assert 1e-4 < worst(second, wanted) < 1e-2
    tx = so.scale_by_shampoo(**kwargs, storage=so.Storage("bfloat16"))
    factors = jax.tree.map(lambda x: x.astype(BF16), states[1].factors)
    assert_equal(run(tx)[0].factors, factors)


@functools.cache
def losses(case, storage):
    """The losses of 150 steps of a two-layer regression with noise in its labels."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)  # noqa: E731
    inputs = draw(256, 16) * jnp.geomspace(1.0, 0.05, 16)[None]
    labels = jnp.tanh(inputs @ draw(16, 8)) + 0.3 * draw(256, 8)
    params = {"a": draw(16, 24) / 3, "b": draw(1, 24) / 3, "c": draw(24, 8) / 3}
    inner = made(case, storage, refresh_every=5)
    tx = optax.chain(inner, optax.scale(-0.02))

    def loss(params):
        hidden = jnp.tanh(inputs @ params["a"] + params["b"])
        return jnp.mean(jnp.square(hidden @ params["c"] - labels))

    def step(carry, _):
        params, state = carry
        value, grads = jax.value_and_grad(loss)(params)
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), value

    start = params, tx.init(params)
    run = quick_jit(lambda start: jax.lax.scan(step, start, length=150))
    return np.asarray(run(start)[1])


@pytest.mark.parametrize("case", ["eigh", "kl", "soap"])
def test_bfloat16_learns_as_float32_does(case):
    wide, narrow = losses(case, so.Storage()), losses(case, NARROW)
    assert wide[-1] < wide[0] / 5
    assert abs(narrow[-1] / wide[-1] - 1) < 0.02


def test_the_ridge_is_wider_than_the_rounding_of_bfloat16():
    """Without `relative_eps`; in float32 its default is smaller, and it matters."""
    make = functools.partial(so.scale_by_shampoo, **helpers.BARE)
    storage = so.Storage("bfloat16")
    steps = [g["square"] for g in STEPS[:1]]

    def run(**kwargs):
        return scanned(make(**kwargs), steps, steps[0])[1]

    assert_equal(run(storage=storage), run(storage=storage, relative_eps=1e-2))
    assert_equal(run(), run(relative_eps=1e-6))
    assert worst(run(relative_eps=1e-2), run()) > 1e-3


def test_bfloat16_factors_stop_as_documented():
    """The mean of equal terms by b2, and what is left of it after smaller ones."""

    def factor(b2, dtype):
        tx = so.scale_by_shampoo(
            0.0, b2, graft=None, refresh_every=10**6, storage=so.Storage(dtype)
        )
        grads = STEPS[0]["square"]

        @quick_jit
        def run(scale, count, state):
            step = lambda _, state: tx.update(scale * grads, state)[1]  # noqa: E731
            return jax.lax.fori_loop(0, count, step, state)

        steady = run(1.0, 2000, tx.init(grads))
        later = run(1e-2, 500, steady)
        diagonals = [np.diag(s.factors["5x5"]["0"][0]) for s in (steady, later)]
        wanted = np.sum(np.square(np.asarray(grads)), axis=1)
        return diagonals[0] / wanted, diagonals[1] / diagonals[0]

    mean, left = factor(0.99, "bfloat16")
    assert np.all((0.7 < mean) & (mean < 0.9)) and np.all(left < 0.02)
    mean, left = factor(0.999, "bfloat16")
    assert np.all((0.2 < mean) & (mean < 0.4)) and np.all(left == 1)
    mean, left = factor(0.999, "float32")
    assert np.all(mean > 0.85) and np.all(left < 0.65)


# ---- across forms and devices


def test_forms_are_exchanged(tmp_path):
    """From every form to every other, through a file; a narrow one rounds once."""
    storages = {"whole": so.Storage(), "packed": PACKED, "narrow": NARROW}
    transforms = {name: made("eigh", storage) for name, storage in storages.items()}
    for tx in transforms.values():
        state, _ = scanned(tx)
        np.savez(tmp_path / "state.npz", **so.to_portable(tx, state, PARAMS))
        for other, into in transforms.items():
            with np.load(tmp_path / "state.npz") as file:
                loaded = so.from_portable(into, dict(file), PARAMS)
            assert_types(loaded, jax.eval_shape(into.init, PARAMS))
            again = so.to_portable(into, loaded, PARAMS)
            wanted = so.to_portable(tx, state, PARAMS)
            if other == "narrow":
                wanted = jax.tree.map(lambda x, y: x.astype(y.dtype), wanted, again)
            assert again.keys() == wanted.keys()
            for key, array in wanted.items():
                np.testing.assert_array_equal(
                    again[key], array.astype(again[key].dtype)
                )


@functools.cache
def float64_on(devices, packed):
    """Padded stacks on a mesh; sums of several gradients, so of full rank."""
    placement = so.Placement(mesh_of(devices)) if devices else None
    return so.scale_by_shampoo(
        b2=1.0,
        graft="adagrad",
        refresh_every=2,
        start=4,
        relative_eps=1e-3,
        storage=so.Storage(packed=packed),
        blocking=so.Blocking(8),
        placement=placement,
    )


def test_packed_goes_on_on_other_devices(x64):
    """Eight devices, one, four: as whole factors on none, in float64."""
    steps = jax.tree.map(lambda x: x.astype(jnp.float64), STEPS + STEPS[::-1])
    params, wanted, updates, portable = steps[0], [], [], None
    plain = float64_on(0, packed=False)
    wanted, _ = helpers.trace(plain, params, steps, jit=quick_jit)
    for index, devices in enumerate((8, 1, 4)):
        mesh = mesh_of(devices)
        held = replicate(params, mesh)
        tx = float64_on(devices, packed=True)
        state = tx.init(held)
        if portable is not None:
            state = so.from_portable(tx, portable, held)
        update = quick_jit(tx.update)
        for grads in steps[4 * index : 4 * index + 4]:
            found = update(replicate(grads, mesh), state, held)
            update_now, state = jax.block_until_ready(found)
            updates.append(update_now)
        portable = so.to_portable(tx, state, params)
    assert worst(updates, wanted) < 1e-12
    assert {name for name in state.factors if "@4" in name} == set(state.factors)


# ---- what it costs, and how it behaves


@pytest.mark.parametrize("devices", [1, 8])
def test_bytes_are_exact(devices):
    """Those that `describe` says, that arrays have, and that the formula gives."""
    shapes = {"a": (8, 8), "b": (8, 5), "c": (7,)}
    bits = {"float32": 4, "bfloat16": 2, None: 4}
    mesh = mesh_of(devices)
    params = replicate(normal_steps(shapes, 1)[0], mesh)
    for storage in (so.Storage(), PACKED, NARROW, so.Storage(roots="bfloat16")):
        tx = so.scale_by_shampoo(
            storage=storage, placement=so.Placement(mesh), blocking=so.Blocking(8)
        )
        (part,) = so.describe(params, tx).parts
        state = tx.init(params)
        for field, found in part.bytes.items():
            leaves = jax.tree.leaves(getattr(state, field))
            assert sum(leaf.nbytes for leaf in leaves) == found.total
            local = [leaf.addressable_shards[0].data for leaf in leaves]
            assert sum(shard.nbytes for shard in local) == found.device
        slots = {stack.block: stack.slots * devices for stack in part.stacks.values()}
        for field in ("factors", "roots"):
            sides = [(n, side) for block, n in slots.items() for side in block]
            numbers = [
                n * (side * (side + 1) // 2 if storage.packed else side**2)
                for n, side in sides
            ]
            wanted = bits[getattr(storage, field)] * sum(numbers)
            assert part.bytes[field].total == wanted
        size = sum(n * math.prod(block) for block, n in slots.items())
        assert part.bytes["filtered"].total == bits[storage.momentum] * size


@pytest.mark.parametrize("devices", [0, 8])
def test_compiles_once_and_gives_its_memory_back(devices):
    mesh = mesh_of(devices) if devices else None
    placement = so.Placement(mesh) if devices else None
    tx = made("eigh", NARROW, placement=placement)
    params, later = (replicate({"w": g["long"]}, mesh) for g in STEPS[:2])
    update = jax.jit(tx.update, donate_argnums=1)
    state = tx.init(params)
    with helpers.compilations() as found:
        _, state = update(params, state, params)
    assert found[0] > 0
    old = jax.tree.leaves((state.factors, state.roots, state.filtered))
    with helpers.compilations() as found:
        _, state = update(later, state, params)
        _, state = update(params, state, params)
    assert found == [0]
    assert all(leaf.is_deleted() for leaf in old)


def test_injected_hyperparameters_and_mapped_parameters(monkeypatch):
    # The oldest optax calls it by a name that JAX no longer has.
    monkeypatch.setattr(jax, "tree_map", jax.tree.map, raising=False)
    kwargs = dict(b1=0.5, b2=0.5, refresh_every=2, relative_eps=0.125, storage=PACKED)
    tx = so.scale_by_shampoo(**kwargs)
    injected = optax.inject_hyperparams(so.scale_by_shampoo)(**kwargs)
    steps = [g["square"] for g in STEPS[:4]]
    state, updates = scanned(tx, steps, steps[0])
    other, others = scanned(injected, steps, steps[0])
    assert worst(others, updates) < 1e-6
    assert_types(other.inner_state, state)
    mapped = optax.tree_utils.tree_map_params(tx, lambda x: x + 1, state)
    assert_equal(mapped.factors, state.factors)
