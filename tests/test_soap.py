"""SOAP in both forms and KL-SOAP: a dense oracle, order of bases, scale, guards."""

import functools

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import soap_oracle
from helpers import plan_of, quick_jit, scanned

import shampoo_optax as so

SOAPS = {False: so.scale_by_soap, True: so.scale_by_kl_soap}
FORMS = ["official", "paper"]
QR = so.QRBasis()


# ---- the oracle

SHAPES = {"w": (4, 3), "k": (4, 3, 4)}
STEPS = [
    {name: np.asarray(g, np.float64) for name, g in step.items()}
    for step in helpers.normal_steps(SHAPES, 12)
]
PLAIN = dict(b1=0.9, b2=0.9, b3=None, eps=1e-3, refresh_every=3, start=None)
PLAIN |= dict(graft=None, graft_b2=0.95, graft_eps=1e-3, drop_weighting=False)
PLAIN |= dict(exponents=None, ignored_axes=None)
CASES = {
    "official": ("official", False, {}),
    "paper": ("paper", False, {}),
    "paper, grafted": ("paper", False, dict(graft="adam", start=5, b3=0.5)),
    "paper, sums": ("paper", False, dict(b1=0.0, b2=1.0, exponents={3: 0.4})),
    "KL": ("paper", True, {}),
    "KL, official": ("official", True, dict(relative_eps=0.1, drop_weighting=True)),
    "KL, ignored": ("paper", True, dict(ignored_axes={3: (1,), 2: (0,)})),
}


@functools.lru_cache
def of_case(label):
    """The directions and the last state, in float64."""
    form, kl, change = CASES[label]
    tx = SOAPS[kl](**PLAIN | change, form=form, blocking=so.Blocking(merge_to=None))
    return scanned(tx, jax.tree.map(jnp.asarray, STEPS))


def by_oracle(label, **other):
    form, kl, change = CASES[label]
    kwargs = PLAIN | dict(relative_eps=1e-6) | change
    every, exponents = kwargs.pop("refresh_every"), kwargs.pop("exponents") or {}
    ignored = kwargs.pop("ignored_axes") or {}
    kwargs["b3"] = kwargs["b1"] if kwargs["b3"] is None else kwargs["b3"]
    kwargs["start"] = kwargs["start"] or every
    kwargs |= dict(every=every, form=form, kl=kl, drop=kwargs.pop("drop_weighting"))

    def directions(name):
        order = len(SHAPES[name])
        mine = dict(power=exponents.get(order, 0.5), ignored=ignored.get(order, ()))
        steps = [step[name] for step in STEPS]
        return soap_oracle.soap(steps, **kwargs | mine | other)

    columns = {name: directions(name) for name in SHAPES}
    return [{name: columns[name][t] for name in SHAPES} for t in range(len(STEPS))]


@pytest.mark.parametrize("label", CASES)
def test_follows_the_oracle(x64, label):
    got, _ = of_case(label)
    assert helpers.worst(got, by_oracle(label)) <= 1e-9


@pytest.mark.parametrize(
    "label, change",
    [
        ("paper", {"form": "official"}),
        ("paper", {"kl": True}),
        ("paper, grafted", {"graft_b2": 0.94}),
        ("KL", {"relative_eps": 1e-2}),
        ("KL", {"form": "official"}),
        ("KL, ignored", {"ignored": ()}),
    ],
)
def test_the_oracle_tells_one_change(label, change):
    assert helpers.worst(by_oracle(label, **change), by_oracle(label)) > 1e-3


def test_forms_part_at_the_first_refresh(x64):
    """Until then both are Adam; the paper's still is at the refresh itself."""
    adam = optax.scale_by_adam(0.9, 0.9, 1e-3)
    want, _ = scanned(adam, jax.tree.map(jnp.asarray, STEPS))
    official, paper = (of_case(label)[0] for label in FORMS)
    errors = [
        [helpers.worst(got[t], want[t]) for t in range(4)] for got in (official, paper)
    ]
    assert max(errors[0][:2] + errors[1][:3]) <= 1e-12
    assert min(errors[0][2], errors[1][3]) > 1e-2
    assert all(np.all(update != 0) for update in (want[0]["w"], official[0]["w"]))


def test_average_of_the_paper_is_that_of_the_official_form_in_the_bases(x64):
    (_, official), (_, paper) = (of_case(label) for label in FORMS)
    for stack, kept in paper.filtered.items():
        plain = np.asarray(official.filtered[stack][0])
        bases = {int(k): np.asarray(q[0]) for k, q in paper.bases[stack].items()}
        turned = soap_oracle.rotate(plain, bases)
        np.testing.assert_allclose(kept[0], turned, rtol=0, atol=1e-12)
        assert np.max(np.abs(turned - plain)) > 0.1


def test_paper_rotates_once_less():
    """The gradient to the bases and its direction back, not the average."""
    params = helpers.structs({"w": (6, 4)})
    flops = [
        so.describe(params, so.scale_by_soap(form=form)).parts[0].flops
        for form in FORMS
    ]
    rotation = 2 * 6 * 4 * (6 + 4)
    assert flops[0]["application"] - flops[1]["application"] == rotation
    assert flops[1]["refresh"] - flops[0]["refresh"] >= 2 * rotation


# ---- C8: the order of a basis

KINDS = {f"soap, {form}": functools.partial(so.scale_by_soap, form=form)
         for form in FORMS} | {"kl": so.scale_by_kl_soap}  # fmt: skip
BASES = [so.EighBasis(), so.EighBasis(0.1), QR]


def swapping(steps, side):
    """Diagonals whose order of size is turned round half-way, `[steps, side]`."""
    rng = np.random.default_rng(3)
    sizes = np.logspace(0, 1, side)
    sizes = np.where(np.arange(steps)[:, None] < steps // 2, sizes, sizes[::-1])
    return jnp.asarray(sizes * rng.uniform(0.5, 1, sizes.shape), jnp.float32)


@pytest.mark.parametrize("basis", BASES, ids=repr)
def test_swapped_directions_keep_their_moments(basis):
    diagonals = swapping(24, 4)
    steps = [{"w": jnp.diag(row)} for row in diagonals]
    want, _ = scanned(optax.scale_by_adam(0.9, 0.9, 1e-8), steps)

    @quick_jit
    def run(every, gradients):
        def directions(make):
            tx = make(0.9, 0.9, 1e-8, refresh_every=every, basis=basis)

            def step(state, grads):
                update, state = tx.update(grads, state)
                return state, update

            return jax.lax.scan(step, tx.init(steps[0]), gradients)[1]

        return {name: directions(make) for name, make in KINDS.items()}

    for every in (1, 3, 7):
        got = run(jnp.int32(every), {"w": jax.vmap(jnp.diag)(diagonals)})
        for updates in got.values():
            for t, wanted in enumerate(want):
                error = np.max(np.abs(np.asarray(updates["w"][t] - wanted["w"])))
                assert error <= 1e-5, (every, t)


def test_swapped_directions_of_a_rotated_basis(x64):
    """Adam on the diagonal of Uᵀ G V, where the bases are U and V from step 1 on."""
    rng = np.random.default_rng(4)
    u, v = (np.linalg.qr(rng.standard_normal((4, 4)))[0] for _ in range(2))
    diagonals = np.asarray(swapping(24, 4), np.float64)
    steps = [{"w": jnp.asarray(u * row @ v.T)} for row in diagonals]
    got, _ = scanned(so.scale_by_soap(0.9, 0.9, 1e-6, refresh_every=1), steps)
    adam = optax.scale_by_adam(0.9, 0.9, 1e-6)
    want, _ = scanned(adam, [{"w": jnp.asarray(row)} for row in diagonals])
    for update, wanted in zip(got, want, strict=True):
        expected = u * np.asarray(wanted["w"]) @ v.T
        np.testing.assert_allclose(update["w"], expected, rtol=0, atol=1e-6)


# ---- KL-SOAP: scale


@pytest.fixture(scope="module")
def kl_run():
    """Maps gradients `[t, 4, 16]` to the directions and the traces of the factors."""
    tx = so.scale_by_kl_soap(0.0, 0.5, 0.0, refresh_every=5)

    @quick_jit
    def run(gradients):
        def step(state, grads):
            update, state = tx.update(grads, state)
            traces = jax.tree.map(lambda f: jnp.trace(f[0]), state.factors["4x16"])
            return state, (update, traces)

        return jax.lax.scan(step, tx.init(gradients[0]), gradients)[1]

    return run


def test_scales_of_the_factors_do_not_drift(kl_run):
    """In units other than the mean eigenvalue, these grow and shrink for ever."""
    _, traces = kl_run(helpers.normals(5, 400, 4, 16))
    for trace in traces.values():
        early, late = np.mean(trace[50:150]), np.mean(trace[-100:])
        assert 0.5 <= late / early <= 2


def test_directions_do_not_depend_on_the_scale(kl_run):
    """Of three refreshes; at the first one the factors have full rank."""
    gradients = helpers.normals(6, 400, 4, 16)
    want, _ = kl_run(gradients)
    for scale in (1e-12, 1e12):
        got, _ = kl_run(scale * gradients)
        assert helpers.worst(got[:15], want[:15]) <= 1e-3


# ---- axes


def abstract(tx, shape):
    return jax.eval_shape(tx.init, jnp.zeros(shape))


def test_ignored_axes_have_no_factor_and_keep_their_places():
    """Dealt to several owners, axes are otherwise put in descending order."""
    tx = so.scale_by_soap(ignored_axes={2: [1]})
    state = abstract(tx, (3, 6))
    assert state.factors["3x6"].keys() == state.bases["3x6"].keys() == {"0"}
    plan = plan_of(tx, {"w": jnp.zeros((3, 6)), "v": jnp.zeros((5, 4))}, 4)
    assert all(region.axes == (0, 1) for region in plan.regions)
    plain = plan_of(so.scale_by_soap(), {"w": jnp.zeros((3, 6))}, 4)
    assert plain.regions[0].axes == (1, 0)


def test_all_axes_ignored_is_adam():
    steps = helpers.normal_steps({"w": (4, 3)}, 4)
    tx = so.scale_by_soap(0.9, 0.9, refresh_every=1, ignored_axes={2: (0, 1)})
    got, state = scanned(tx, steps)
    want, _ = scanned(optax.scale_by_adam(0.9, 0.9), steps)
    assert state.factors == state.bases == {}
    assert helpers.worst(got, want) <= 1e-5


@pytest.mark.parametrize("limit", ["diagonal_above", "skip_above"])
@pytest.mark.parametrize("make", SOAPS.values())
def test_long_axes_have_no_factor(make, limit):
    axes = so.Axes(**{limit: 8})
    state = abstract(make(axes=axes, blocking=so.Blocking(8)), (12, 4))
    assert state.factors["12x4"].keys() == state.bases["12x4"].keys() == {"1"}
    assert state.moments["12x4"].shape == (1, 12, 4)


@pytest.mark.parametrize(
    "kwargs, message",
    [
        ({"form": "own"}, "`form` must be .* got 'own'"),
        ({"ignored_axes": 1}, "`ignored_axes` must be a mapping .* got 1"),
        ({"ignored_axes": {0: (0,)}}, "`ignored_axes` must be an integer .* got 0"),
        ({"ignored_axes": {2: 1}}, "`ignored_axes` must map .* got 1"),
        ({"ignored_axes": {2: "01"}}, "`ignored_axes` must map .* got '01'"),
        ({"ignored_axes": {2: (2,)}}, "`ignored_axes` must name .* 2, got 2"),
        ({"ignored_axes": {2: (True,)}}, "`ignored_axes` must name .* got True"),
        ({"basis": so.Eigh()}, "`basis` must be .* got Eigh"),
        ({"axes": so.Axes(diagonal_above=9)}, "`diagonal_above` must .* got 9"),
    ],
)
@pytest.mark.parametrize("make", SOAPS.values())
def test_bad_arguments(make, kwargs, message):
    with pytest.raises(ValueError, match=message):
        make(**kwargs)


def test_bad_relative_eps():
    with pytest.raises(ValueError, match="`relative_eps` must be .* got -1"):
        so.scale_by_kl_soap(relative_eps=-1)
