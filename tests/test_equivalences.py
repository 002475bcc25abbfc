"""What equals what: grafted methods before the start, momentum, averages, NAdam."""

import contextlib
import functools

import golden
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import quick_jit

import shampoo_optax as so

SHAPES = {"a": (4, 3), "b": (5,), "c": (2, 2, 3), "d": (4, 3), "e": ()}
STEPS = 20
# Looked up: XLA rounds the arithmetic of a schedule now this way and now that.
FALLING = golden.schedule(np.linspace(0.1, 0.01, STEPS, dtype=np.float32))

# Of a processor that has no fused products and sums, so that each is rounded.
unfused_jit = functools.partial(
    jax.jit,
    compiler_options={"xla_cpu_max_isa": "AVX", "xla_backend_optimization_level": 0},
)

# Shampoo that does not start within the run.
late = functools.partial(so.shampoo, start=1000, b2=0.9)
ADAM = dict(graft="adam", graft_b2=0.999, graft_eps=1e-8)
SGD = dict(graft="sgd", b1=0.0)
HEAVY = dict(momentum=0.9, weight_decay=0.1)


def decayed(tx):
    return optax.chain(optax.add_decayed_weights(0.1), tx)


# The alias before its start, and the optimizer of optax that it grafts from.
PAIRS = {
    "adam": (late(0.1, **ADAM), optax.adam(0.1)),
    "adam, schedule, l2": (
        late(FALLING, weight_decay=0.1, decay="l2", **ADAM),
        decayed(optax.adam(FALLING)),
    ),
    "adamw, schedule": (
        late(FALLING, weight_decay=0.1, **ADAM),
        optax.adamw(FALLING, weight_decay=0.1),
    ),
    "sgd, schedule": (late(FALLING, **SGD), optax.sgd(FALLING)),
    "heavy ball, decay": (
        late(FALLING, **HEAVY, **SGD),
        decayed(optax.sgd(FALLING, momentum=0.9)),
    ),
    "nesterov": (
        late(0.1, momentum=0.9, nesterov=True, **SGD),
        optax.sgd(0.1, momentum=0.9, nesterov=True),
    ),
}


def random_tree(seed, *time, dtype, shapes=SHAPES):
    rng = np.random.default_rng(seed)
    return {
        name: jnp.asarray(rng.standard_normal((*time, *shape)), dtype)
        for name, shape in shapes.items()
    }


def trajectory(tx, params, grads):
    """The updates and the parameters of every step."""

    def step(carry, grad):
        params, state = carry
        updates, state = tx.update(grad, state, params)
        params = optax.apply_updates(params, updates)
        return (params, state), (updates, params)

    return jax.lax.scan(step, (params, tx.init(params)), grads)[1]


@pytest.mark.parametrize(
    "bits, names", [(32, list(PAIRS)), (64, ["adamw, schedule", "nesterov"])]
)
def test_before_the_start_it_is_the_grafted_method_bit_for_bit(bits, names):
    """Where products and sums are fused, optax differs from itself, jitted or not."""
    with helpers.enable_x64() if bits == 64 else contextlib.nullcontext():
        dtype = jnp.dtype(f"float{bits}")
        data = random_tree(0, dtype=dtype), random_tree(1, STEPS, dtype=dtype)

        @unfused_jit
        def run(params, grads):
            return {
                name: [trajectory(tx, params, grads) for tx in PAIRS[name]]
                for name in names
            }

        for ours, theirs in run(*data).values():
            helpers.assert_equal(ours, theirs)
            assert ours[0]["a"].dtype == dtype


@pytest.mark.parametrize("name", ["adamw, schedule", "heavy ball, decay"])
def test_also_without_jit(name):
    shapes = {"a": (4, 3), "d": (4, 3)}
    params = random_tree(0, dtype=jnp.float32, shapes=shapes)
    grads = random_tree(1, 4, dtype=jnp.float32, shapes=shapes)
    runs = []
    for tx in PAIRS[name]:
        moved, state, found = params, tx.init(params), []
        for t in range(4):
            grad = {key: grad[t] for key, grad in grads.items()}
            updates, state = tx.update(grad, state, moved)
            moved = optax.apply_updates(moved, updates)
            found.append((updates, moved))
        runs.append(found)
    helpers.assert_equal(*runs)


def test_methods_that_optax_divides_by_another_operation():
    """There the divisor is an `rsqrt`, so that only rounding may differ.

    The second moments are equal. From them we take a root, its reciprocal and a
    product, each within eps / 2; they take an `rsqrt`, which XLA holds to 2 eps, and a
    product. In all 4 eps.
    """
    ours = functools.partial(so.scale_by_shampoo, 0.0, start=1000, graft_eps=0.0)
    pairs = [
        (ours(graft="rmsprop", graft_b2=0.9), optax.scale_by_rms(0.9, eps=0.0)),
        (ours(graft="adagrad"), optax.scale_by_rss(0.0, eps=0.0)),
    ]
    data = (random_tree(0, dtype=jnp.float32), random_tree(1, STEPS, dtype=jnp.float32))
    run = quick_jit(lambda: [[trajectory(t, *data)[0] for t in pair] for pair in pairs])
    for pair in jax.tree.map(lambda x: np.asarray(x, np.float64), run()):
        for got, want in zip(*(tree.values() for tree in pair), strict=True):
            assert np.all(np.abs(got - want) <= 4 * 2.0**-23 * np.abs(want))


# ---- momentum

RATE, MU = 1 / 64, 0.75


def averaged(train):
    """Primal averaging at the rate of momentum."""
    rate = RATE / (1 - MU)
    return so.primal_averaging(rate, eval_coefficient=MU, train_coefficient=train)


def classic(**kwargs):
    step = optax.scale_by_learning_rate(RATE)
    return optax.chain(so.scale_by_momentum(MU, **kwargs), step)


def traced(**kwargs):
    step = optax.scale_by_learning_rate(RATE)
    return optax.chain(optax.trace(MU, **kwargs), step)


METHODS = {
    "heavy": classic(),
    "heavy by averaging": averaged(1.0),
    "heavy by optax": traced(),
    "nesterov": classic(nesterov=True),
    "nesterov by averaging": averaged(MU),
    "nesterov by optax": traced(nesterov=True),
}


@pytest.fixture(scope="module")
def momentum_runs():
    """By direction and method: parameters, those to evaluate, and the buffer.

    The gradient is that of a quadratic function, at the parameters of the run.
    """
    directions = {
        "shampoo": so.scale_by_shampoo(graft=None, refresh_every=3, relative_eps=1e-3),
        "sgd": optax.identity(),
    }
    with helpers.enable_x64():
        first = random_tree(0, dtype=jnp.float64)
        data = random_tree(1, STEPS, dtype=jnp.float64)

        def run(direction, method):
            tx = optax.chain(direction, method)

            def step(carry, target):
                params, state = carry
                grads = jax.tree.map(jnp.subtract, params, target)
                updates, state = tx.update(grads, state, params)
                params = optax.apply_updates(params, updates)
                held = jax.tree.leaves(
                    state[1], is_leaf=lambda n: hasattr(n, "_fields")
                )
                mean = momentum = params
                if isinstance(state[1], so.IterateAveragingState):
                    mean = so.eval_params(state, params)
                if isinstance(held[0], so.ScaleByMomentumState):
                    momentum = held[0].momentum
                return (params, state), (params, mean, momentum)

            return jax.lax.scan(step, (first, tx.init(first)), data)[1]

        runs = quick_jit(
            lambda: {
                name: {key: run(direction, method) for key, method in METHODS.items()}
                for name, direction in directions.items()
            }
        )()
        return jax.tree.map(np.asarray, runs)


@pytest.mark.parametrize("direction", ["shampoo", "sgd"])
@pytest.mark.parametrize("kind", ["heavy", "nesterov"])
def test_momentum_is_the_trace_of_optax_and_a_primal_average(
    momentum_runs, direction, kind
):
    """At the parameters that are trained."""
    runs = momentum_runs[direction]
    classic, averaged, traced = (
        runs[name][0] for name in (kind, f"{kind} by averaging", f"{kind} by optax")
    )
    assert helpers.worst(traced, classic) <= 1e-12
    assert helpers.worst(averaged, classic) <= 1e-12
    other = runs["nesterov" if kind == "heavy" else "heavy"][0]
    assert helpers.worst(other, classic) > 1e-3


@pytest.mark.parametrize("direction", ["shampoo", "sgd"])
def test_parameters_to_evaluate_of_averages_that_are_momentum(momentum_runs, direction):
    """Of heavy ball those that are trained; of Nesterov's those without the look ahead.

    Nesterov's parameters are a step of `RATE * MU` times the buffer ahead of them.
    """
    runs = momentum_runs[direction]
    trained, mean, _ = runs["heavy by averaging"]
    assert helpers.worst(mean, trained) <= 1e-12
    params, _, buffer = runs["nesterov"]
    behind = jax.tree.map(lambda w, m: w + RATE * MU * m, params, buffer)
    assert helpers.worst(runs["nesterov by averaging"][1], behind) <= 1e-12


# ---- NAdam


def test_looking_ahead_is_nadam_but_for_its_bias_correction(x64):
    r"""With b3 = b1 * b1 the gradient used is that of NAdam, over one number.

    Ours: (b1 M + (1 - b1) G) / (1 - b1^(t+1)), a mean. That of optax divides the second
    term by 1 - b1^t, so that its weights sum to more than 1. The rest is the same.
    """
    b1, b2, eps = 0.8, 0.9, 1e-8
    tx = so.scale_by_shampoo(
        b1, b3=b1 * b1, start=1000, graft="adam", graft_b2=b2, graft_eps=eps
    )
    theirs = optax.scale_by_adam(b1, b2, eps, nesterov=True)
    params = random_tree(0, dtype=jnp.float64)
    grads = random_tree(1, STEPS, dtype=jnp.float64)
    run = quick_jit(lambda: [trajectory(t, params, grads)[0] for t in (tx, theirs)])
    ours, theirs = jax.tree.map(np.asarray, run())
    apart = []
    for name, grad in jax.tree.map(np.asarray, grads).items():
        moment = 0.0
        for t in range(1, STEPS + 1):
            g = grad[t - 1]
            moment = b2 * moment + (1 - b2) * g * g
            scale = np.sqrt(moment / (1 - b2**t)) + eps
            more = (1 - b1) * (1 / (1 - b1**t) - 1 / (1 - b1 ** (t + 1))) * g / scale
            got, want = ours[name][t - 1], theirs[name][t - 1] - more
            assert np.max(np.abs(got - want)) <= 1e-12 * np.max(np.abs(want))
            apart.append(np.max(np.abs(more)))
    assert max(apart) > 0.1
