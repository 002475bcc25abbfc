"""One training run: a jitted step, evaluations, and a record of what was seen."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tqdm import tqdm

import shampoo_optax as so
from benchmarks.mesh import divided, mesh_of, whole
from benchmarks.optimizers import Settings, make_optimizer, warmup_cosine
from benchmarks.tasks import Task

EVALUATION_BATCH = 1000
Step = Callable[..., tuple["TrainState", jax.Array]]


@dataclass(frozen=True)
class Run:
    """What is run: an optimizer, its rate and schedule, a seed.

    Attributes:
      optimizer: a name of `OPTIMIZERS`.
      learning_rate: the highest of the schedule.
      steps: the length of the schedule.
      seed: of the initial parameters and of the batches.
      eval_every: steps between two evaluations.
      split: `test` or `held_out`, which split is evaluated.
      settings: of the optimizer.
    """

    optimizer: str
    learning_rate: float
    steps: int
    seed: int
    eval_every: int
    split: str
    settings: Settings


@dataclass
class Record:
    """What a run has shown; every list is in the order of steps.

    Attributes:
      run: what was run.
      dataset: the data set's name.
      metric: the metric's name.
      target: the metric to reach, or None.
      state_bytes: size of the optimizer's state, on one of the devices.
      losses: training loss of each step, nats.
      step_seconds: duration of each step, compilation and evaluation left out.
      evaluations: `(step, loss in nats, metric)` triples.
      steps_to_target: the first evaluated step at which the target was reached.
      seconds_to_target: the sum of the step durations until then.
    """

    run: Run
    dataset: str
    metric: str
    target: float | None
    state_bytes: int
    losses: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    evaluations: list[tuple[int, float, float]] = field(default_factory=list)
    steps_to_target: int | None = None
    seconds_to_target: float | None = None

    @property
    def median_step(self) -> float:
        """Median duration of a step in seconds."""
        return statistics.median(self.step_seconds)

    @property
    def mean_step(self) -> float:
        """Mean duration of a step in seconds, refreshes included."""
        return statistics.fmean(self.step_seconds)

    @property
    def final(self) -> float:
        """The metric after the last step."""
        return self.evaluations[-1][2]


class TrainState(NamedTuple):
    """What a step carries to the next, donated to it."""

    params: Any  # the model's tree
    opt_state: Any  # the optimizer's


def train(task: Task, run: Run) -> Record:
    """Trains one model and returns what was seen on the way."""
    optimizer = make_optimizer(
        run.optimizer, warmup_cosine(run.learning_rate, run.steps), run.settings
    )
    devices = run.settings.devices
    data = jax.device_put(task.dataset.train, whole(devices))
    state = initial_state(task, optimizer, run.seed, devices)
    record = Record(
        run=run,
        dataset=task.dataset.name,
        metric=task.metric,
        target=task.target(run.steps),
        state_bytes=_bytes_of_one_device(state.opt_state),
    )
    batches = [
        jax.device_put(index, divided(devices))
        for index in islice(task.draw(run.seed), run.steps)
    ]
    print(f"{run.optimizer}: compiling the step", flush=True)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    step = make_step(task, optimizer, shardings).lower(state, data, batches[0])
    step = step.compile()
    evaluate = make_evaluation(task, run.split)
    _loop(task, record, step, evaluate, state, data, batches)
    return record


def make_step(
    task: Task, optimizer: optax.GradientTransformation, shardings: TrainState
) -> Any:
    """Returns the jitted step `(state, split, index) -> (state, loss)`.

    The state stays where it is, as `shardings` say.
    """

    def step(
        state: TrainState, data: tuple[jax.Array, ...], index: jax.Array
    ) -> tuple[TrainState, jax.Array]:
        def loss_of(params: Any) -> jax.Array:
            inputs, labels = task.take(data, index)
            return _nats(task.model.apply(params, inputs), labels).mean()

        loss, gradient = jax.value_and_grad(loss_of)(state.params)
        updates, opt_state = optimizer.update(gradient, state.opt_state, state.params)
        return TrainState(optax.apply_updates(state.params, updates), opt_state), loss

    return jax.jit(step, donate_argnums=0, out_shardings=(shardings, None))


def make_evaluation(task: Task, split: str) -> Callable[[Any], tuple[float, float]]:
    """Returns a function from parameters to the split's mean loss and metric."""
    arrays: tuple[np.ndarray, ...] = getattr(task.dataset, split)
    data, grid = jax.device_put(arrays), task.grid(arrays)
    chunks = np.split(grid, range(EVALUATION_BATCH, len(grid), EVALUATION_BATCH))

    @jax.jit
    def sums(params: Any, data: tuple[jax.Array, ...], index: jax.Array) -> jax.Array:
        inputs, labels = task.take(data, index)
        logits = task.model.apply(params, inputs)
        hits = logits.argmax(-1) == labels
        return jnp.stack([_nats(logits, labels).sum(), hits.sum(), labels.size])

    def evaluate(params: Any) -> tuple[float, float]:
        params = jax.device_put(params, jax.devices()[0])
        totals = sum(np.asarray(sums(params, data, chunk)) for chunk in chunks)
        loss = float(totals[0] / totals[2])
        accuracy = 100 * float(totals[1] / totals[2])
        return loss, accuracy if task.metric == "accuracy" else loss / np.log(2)

    return evaluate


def initial_state(
    task: Task, optimizer: optax.GradientTransformation, seed: int, devices: int
) -> TrainState:
    """Returns fresh parameters on all devices, and the optimizer's state for them."""
    inputs, _ = task.take(task.dataset.train, jnp.zeros(1, jnp.int32))
    params = task.model.init(jax.random.key(seed), inputs)
    params = jax.device_put(params, whole(devices))
    mesh = mesh_of(devices)
    shardings = mesh and so.state_shardings(optimizer, params, mesh)
    init = jax.jit(optimizer.init, out_shardings=shardings)
    return TrainState(params, init(params))


def _bytes_of_one_device(tree: Any) -> int:
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))


def _nats(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def _loop(
    task: Task,
    record: Record,
    step: Step,
    evaluate: Callable[[Any], tuple[float, float]],
    state: TrainState,
    data: tuple[jax.Array, ...],
    batches: list[jax.Array],
) -> None:
    """Runs the steps, filling the record."""
    run = record.run
    with tqdm(batches, desc=run.optimizer, unit="step") as bar:
        for done, index in enumerate(bar, start=1):
            start = time.perf_counter()
            state, loss = step(state, data, index)
            record.losses.append(float(loss))  # waits for the step
            record.step_seconds.append(time.perf_counter() - start)
            bar.set_postfix_str(
                f"loss {record.losses[-1]:.3f}, {1e3 * record.step_seconds[-1]:.0f} ms"
            )
            if done % run.eval_every == 0 or done == run.steps:
                _note(task, record, done, *evaluate(state.params))


def _note(task: Task, record: Record, done: int, loss: float, metric: float) -> None:
    """Adds an evaluation and, the first time the target is reached, when it was."""
    record.evaluations.append((done, loss, float(metric)))
    if record.target is None or record.steps_to_target is not None:
        return
    if task.reached(metric, record.target):
        record.steps_to_target = done
        record.seconds_to_target = sum(record.step_seconds)
