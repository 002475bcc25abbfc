"""The AlgoPerf submissions, run through a stand-in for the harness's workloads."""

import functools

import algoperf_standin as standin
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training import checkpoints

import shampoo_optax as so

POINTS = dict(zip((1, 2, 3, 4, 5), standin.points(), strict=True))
STEPS = 5
PLAIN = standin.load().Hyperparameters(  # a step along the gradient
    learning_rate=0.5,
    one_minus_b1=1.0,
    weight_decay=0.0,
    graft="sgd",
    nadam=False,
    warmup_factor=0.0,
    dropout_rate=0.0,
)


def train(point, devices, ruleset, step_hint):
    """What five steps of the harness's loop leave behind."""
    submission, workload = standin.load(ruleset, devices), standin.Workload(step_hint)
    run = standin.start(submission, workload, point)
    update, losses, found = run.optimizer_state[1], [], [shares(run)]
    with helpers.compilations() as compiled:
        for step in range(STEPS):
            run, loss = standin.advance(submission, workload, run, point, step)
            losses.append(loss)
    assert compiled == [1]
    assert hash(update) == hash(run.optimizer_state[1])
    assert losses[-1] < losses[0]
    return losses, [*found, shares(run)]


def shares(run):
    """The part of each array of the optimizer's state that one device holds."""
    leaves = jax.tree_util.tree_leaves_with_path(run.optimizer_state[0])
    return {
        jax.tree_util.keystr(path): leaf.addressable_shards[0].data.size / leaf.size
        for path, leaf in leaves
    }


# ---- runs


# SGD's rate is large and so warms up for longer.
@pytest.mark.parametrize("number, step_hint", [(None, 100), (3, 1000)])
def test_a_run_on_8_devices_is_that_on_one(number, step_hint, monkeypatch):
    """Refreshed at every second step; with a ridge that bounds what rounding does."""
    changes = dict(refresh_every=2, eps=1e-5)
    ruleset = "external_tuning" if number else "self_tuning"
    own = PLAIN._replace(**POINTS[1]._asdict() | changes)
    for devices in (1, 8):
        submission = standin.load(ruleset, devices)
        monkeypatch.setattr(submission, "Hyperparameters", lambda: own)
    point = number and POINTS[number]._replace(**changes)
    alone, _ = train(point, 1, ruleset, step_hint)
    losses, found = train(point, 8, ruleset, step_hint)
    np.testing.assert_allclose(losses, alone, atol=1e-4)
    for each in found:  # before the first step and after the last
        statistics = {path for path in each if "factors" in path or "roots" in path}
        assert len(statistics) >= 6
        assert {each[path] for path in statistics} == {1 / 8}


# ---- what the points say

SHAPES = {"kernel": (5, 4)}


def updates_of(make):
    """What transforms do in the last of three steps, in one program."""
    steps = helpers.normal_steps(SHAPES, 3)
    params = jax.tree.map(jnp.ones_like, steps[0])

    @helpers.quick_jit
    def run(stacked):
        def last(tx):
            def step(state, grads):
                updates, state = tx.update(grads, state, params)
                return state, updates

            _, updates = jax.lax.scan(step, tx.init(params), stacked)
            return jax.tree.map(lambda each: each[-1], updates)

        return [last(tx) for tx in make]

    return run(jax.tree.map(lambda *each: jnp.stack(each), *steps))


def test_the_points_are_those_of_algoperf_winner():
    """All five build and run; a ridge bounds what rounding does."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("batch",))
    changes = dict(refresh_every=1, eps=1e-3)
    points = [p._replace(grad_clip=1e9, **changes) for p in POINTS.values()]
    ours = [standin.load().make_optimizer(point, 400, mesh) for point in points]
    published = [so.algoperf_winner(400, point, changes) for point in POINTS]
    got, wanted = updates_of(ours), updates_of(published)
    assert max(map(helpers.worst, got, wanted)) <= 1e-5


def test_the_fields_of_the_search_space():
    """The published numbers, typed again and rounded; nothing else differs."""
    published = dict(
        learning_rate=[1.7486e-3, 1.4382e-3, 4.1994, 1.2e-3, 1.3082e-3],
        one_minus_b1=[0.06734, 0.02534, 1, 0.01661, 0.02687],
        one_minus_b2=[0.004484, 0.02508, 0.002370, 0.005888, 0.001877],
        weight_decay=[0.08122, 1.97e-4, 6.4e-5, 4.03e-4, 0.16375],
        graft=["adam", "adam", "sgd", "adam", "adam"],
        exponent=[None, None, None, 0.5, None],
        momentum=[None, None, 0.9685, 0.5, None],
        nadam=[True, True, False, True, True],
        warmup_factor=[0.02, 0.05, 0.02, 0.02, 0.1],
        label_smoothing=[0, 0.2, 0.1, 0.1, 0.1],
        dropout_rate=[0.1, 0, 0, 0.1, 0],
        step_hint_factor=[1, 0.6, 1, 1, 1],
    )
    for name, column in published.items():
        for point, wanted in zip(POINTS.values(), column, strict=True):
            inexact = isinstance(wanted, float)
            got = getattr(point, name)
            assert got == (pytest.approx(wanted, rel=2e-3) if inexact else wanted)
    rest = {point._replace(**dict.fromkeys(published)) for point in POINTS.values()}
    assert len(rest) == 1
    shared = rest.pop()
    assert (shared.block_size, shared.refresh_every) == (1024, 100)
    assert shared.eps == shared.graft_eps == 1e-8
    first = standin.load().Hyperparameters()
    assert POINTS[1]._asdict() == first._asdict()


# ---- clipping, smoothing, dropout, tables


def one_update(point, grads):
    """The first update of a submission's optimizer on one device."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("batch",))
    tx = standin.load().make_optimizer(point, 100, mesh)
    params = jax.tree.map(jnp.ones_like, grads)
    return jax.jit(lambda grads: tx.update(grads, tx.init(params), params)[0])(grads)


def test_gradients_are_clipped_by_their_global_norm():
    """The first step along the gradient, -0.5 G min(1, c / |G|), for two norms."""
    grads = helpers.normal_steps(SHAPES, 1)[0]
    norm = np.sqrt(sum(np.sum(np.square(x, dtype=np.float64)) for x in grads.values()))
    for clip, share in ((0.25 * norm, 0.25), (1.5 * norm, 1.0)):
        got = one_update(PLAIN._replace(grad_clip=float(clip)), grads)
        wanted = {name: -0.5 * share * np.asarray(x) for name, x in grads.items()}
        assert helpers.worst(got, wanted) <= 1e-6


def test_tables_of_a_million_rows_move_by_row_wise_adagrad():
    """Their first step is -rate G / |G|, the root of a row's mean square."""
    rows = 1_000_000
    column = 1 + jnp.arange(rows, dtype=jnp.float32)[:, None]
    point = PLAIN._replace(table_learning_rate=0.25, grad_clip=1e30)
    update = one_update(point, {"table": column, "kernel": jnp.ones((3, 2))})
    np.testing.assert_allclose(update["table"], -0.25, rtol=1e-5)
    np.testing.assert_allclose(update["kernel"], -0.5, rtol=1e-5)


def test_what_is_a_table():
    """One number a row from a million rows on; below that factors, as elsewhere."""
    shapes = {"table": (1_000_000, 3), "rest": (999_999, 3)}
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("batch",))
    tx = standin.load().make_optimizer(POINTS[1], 100, mesh)
    state = jax.eval_shape(tx.init, helpers.structs(shapes))
    assert helpers.field(state, "accumulators")["table"].shape == (1_000_000,)
    sizes = [leaf.size for leaf in jax.tree.leaves(helpers.field(state, "factors"))]
    blocks = -(-999_999 // 1024)  # each with a factor of each side
    assert blocks * (1024**2 + 9) <= sum(sizes) <= 1.1 * blocks * (1024**2 + 9)


def reference_loss(workload, params, model_state, smoothing, dropout_rate, rng):
    """The mean over the examples that count, in float64."""
    batch = next(workload.queue())
    logits, _ = workload.net.apply(
        {"params": params, **model_state},
        batch["inputs"],
        train=True,
        dropout_rate=dropout_rate,
        mutable=["batch_stats"],
        rngs={"dropout": rng},
    )
    logits = np.asarray(logits, np.float64)
    log_p = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    labels = np.eye(4)[batch["targets"]] * (1 - smoothing) + smoothing / 4
    return -np.average((labels * log_p).sum(1), weights=batch["weights"])


def test_labels_are_smoothed_and_units_dropped():
    submission, workload = standin.load(), standin.Workload()
    params, model_state = workload.init_model_fn(jax.random.key(0))
    step, rng = (
        jax.jit(submission.train_step, static_argnums=(0, 1, 2)),
        jax.random.key(2),
    )
    found = []
    for smoothing, rate in ((0.0, 0.0), (0.3, 0.0), (0.0, 0.4)):
        point = PLAIN._replace(label_smoothing=smoothing, dropout_rate=rate)
        batch, update = next(workload.queue()), optax.identity().update
        *_, loss, _ = step(workload, update, point, model_state, (), params, batch, rng)
        wanted = reference_loss(workload, params, model_state, smoothing, rate, rng)
        assert float(loss) == pytest.approx(wanted, rel=1e-5)
        found.append(float(loss))
    assert abs(found[1] - found[0]) > 0.01 and abs(found[2] - found[0]) > 0.01


class Stateless(standin.Workload):
    """As the harness's ViT, which begins with an empty state and returns none."""

    def model_fn(self, *args, **kwargs):
        return super().model_fn(*args, **kwargs)[0], None


def test_a_model_without_state_keeps_what_it_began_with():
    submission, workload = standin.load(), Stateless()
    params, model_state = workload.init_model_fn(jax.random.key(0))
    batch, rng = next(workload.queue()), jax.random.key(2)
    chosen = workload, optax.identity().update, PLAIN
    step = functools.partial(submission.train_step, *chosen)
    found = jax.eval_shape(step, model_state, (), params, batch, rng)
    assert jax.tree.structure(found[2]) == jax.tree.structure(model_state)
    assert jax.tree.structure(found[1]) == jax.tree.structure(params)


# ---- checkpoints


def test_a_run_goes_on_from_its_checkpoint(tmp_path):
    """Saved and restored by flax with the harness's arguments."""
    point = POINTS[3]._replace(refresh_every=2)
    submission, workload = standin.load(), standin.Workload(step_hint=1000)

    def advance(run, steps):
        for step in steps:
            run, _ = standin.advance(submission, workload, run, point, step)
        return run

    def state_of(run, step):
        return {
            "model_params": run.params,
            "optimizer_state": run.optimizer_state[0],
            "model_state": run.model_state,
            "train_state": {"training_complete": False},
            "eval_results": (),
            "global_step": step,
            "preemption_count": 0,
        }

    run = standin.start(submission, workload, point)
    target = jax.tree.map(jnp.copy, state_of(run, -1))
    run = advance(run, range(3))
    checkpoints.save_checkpoint(
        tmp_path, target=state_of(run, 3), step=3, overwrite=True, keep=np.inf
    )
    held = checkpoints.restore_checkpoint(tmp_path, target=target)
    helpers.assert_equal(held["optimizer_state"], run.optimizer_state[0])
    assert held["global_step"] == 3
    resumed = standin.Run(
        (held["optimizer_state"], run.optimizer_state[1]),
        held["model_params"],
        held["model_state"],
    )
    wanted = advance(run, range(3, 6))
    got = advance(resumed, range(3, 6))
    helpers.assert_equal(got.params, wanted.params)
    helpers.assert_equal(got.optimizer_state[0], wanted.optimizer_state[0])


# ---- the folders


@pytest.mark.parametrize("ruleset", ["external_tuning", "self_tuning"])
def test_a_folder_is_complete(ruleset):
    folder = standin.FOLDER / ruleset
    names = {"submission.py", "requirements.txt", "submission_info.yml"}
    if ruleset == "external_tuning":
        names.add("tuning_search_space.json")
    assert {path.name for path in folder.iterdir() if path.is_file()} == names
    assert (folder / "requirements.txt").read_text() == "shampoo-optax\n"
    info = (folder / "submission_info.yml").read_text()
    assert f"\nsubmission_folder: submissions/{ruleset}/shampoo_optax\n" in info
    assert f"\nruleset: {ruleset.removesuffix('_tuning')}" in info


def test_batch_sizes_and_evaluation():
    submission = standin.load()
    sizes = [submission.get_batch_size(name) for name in submission.BATCH_SIZES]
    assert len(sizes) == 11 and not any(size % 8 for size in sizes)
    with pytest.raises(ValueError, match="`workload_name` must be .* got 'criteo'"):
        submission.get_batch_size("criteo")
    run = standin.Run(("state", "update"), "params", "model state")
    given = dict(
        workload=None,
        current_param_container=run.params,
        current_params_types=None,
        model_state=run.model_state,
        hyperparameters=None,
        loss_type=None,
        optimizer_state=run.optimizer_state,
        eval_results=[],
        global_step=1,
        rng=None,
    )
    assert submission.prepare_for_eval(**given) == run
