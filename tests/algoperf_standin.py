"""A small workload with the interface of AlgoPerf's harness, which it does not need.

The submissions import `algoperf` for two modules; here a stand-in takes their place,
whose mesh has as many devices as a test asks for.
"""

import collections
import enum
import functools
import importlib.util
import json
import sys
import types
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.core import pop
from jax.sharding import Mesh, NamedSharding, PartitionSpec

FOLDER = Path(__file__).parents[1] / "benchmarks" / "algoperf"
CLASSES, FEATURES, EXAMPLES = 4, 12, 256


class ForwardPassMode(enum.Enum):
    TRAIN = 0
    EVAL = 1


class ShapeTuple:
    """A shape that is a leaf of a tree."""

    def __init__(self, shape_tuple):
        self.shape_tuple = shape_tuple


def harness(devices):
    """What the submissions import from `algoperf`, on so many devices."""
    mesh = Mesh(np.array(jax.devices()[:devices]), ("batch",))
    sharding_utils = types.SimpleNamespace(
        get_replicate_sharding=lambda: NamedSharding(mesh, PartitionSpec()),
        get_batch_dim_sharding=lambda: NamedSharding(mesh, PartitionSpec("batch")),
    )
    module = types.ModuleType("algoperf")
    module.jax_sharding_utils = sharding_utils
    module.spec = types.SimpleNamespace(ForwardPassMode=ForwardPassMode)
    return module


@functools.lru_cache
def load(ruleset="external_tuning", devices=8):
    """The module of a submission, loaded from its file as the harness does."""
    place = FOLDER / ruleset / "submission.py"
    found = importlib.util.spec_from_file_location(f"{ruleset}_{devices}", place)
    module = importlib.util.module_from_spec(found)
    with mock.patch.dict(sys.modules, {"algoperf": harness(devices)}):
        found.loader.exec_module(module)
    return module


def points():
    """The points of the search space, as the harness makes them of the file."""
    rows = json.loads((FOLDER / "external_tuning/tuning_search_space.json").read_text())
    kind = collections.namedtuple("Hyperparameters", rows[0])
    return [kind(**row) for row in rows]


class Net(nn.Module):
    """Two layers with a batch norm and dropout in between."""

    @nn.compact
    def __call__(self, inputs, train, dropout_rate):
        hidden = nn.Dense(12)(inputs)
        hidden = nn.BatchNorm(use_running_average=not train)(hidden)
        hidden = nn.Dropout(dropout_rate, deterministic=not train)(nn.tanh(hidden))
        return nn.Dense(CLASSES)(hidden)


class Logger:
    """Keeps the numbers that the harness would write."""

    def __init__(self):
        self.rows = []

    def append_scalar_metrics(self, metrics, global_step):
        self.rows.append((global_step, metrics))


class Workload:
    """Classes of random inputs, with the members of the harness's `spec.Workload`."""

    loss_type = model_params_types = None

    def __init__(self, step_hint=100):
        self.step_hint = step_hint
        self.metrics_logger = Logger()
        self.net = Net()
        self.param_shapes = None

    def init_model_fn(self, rng):
        inputs = jnp.ones((1, FEATURES))
        variables = self.net.init(rng, inputs, train=False, dropout_rate=0.0)
        model_state, params = pop(variables, "params")
        self.param_shapes = jax.tree.map(lambda leaf: ShapeTuple(leaf.shape), params)
        return params, model_state

    def model_fn(
        self,
        params,
        augmented_and_preprocessed_input_batch,
        model_state,
        mode,
        rng,
        update_batch_norm,
        dropout_rate=0.0,
    ):
        return self.net.apply(
            {"params": params, **model_state},
            augmented_and_preprocessed_input_batch["inputs"],
            train=mode == ForwardPassMode.TRAIN,
            dropout_rate=dropout_rate,
            mutable=["batch_stats"] if update_batch_norm else False,
            rngs={"dropout": rng},
        )

    def loss_fn(self, label_batch, logits_batch, mask_batch=None, label_smoothing=0.0):
        labels = jax.nn.one_hot(label_batch, CLASSES)
        labels = optax.smooth_labels(labels, label_smoothing)
        losses = optax.softmax_cross_entropy(logits_batch, labels)
        valid = len(losses) if mask_batch is None else mask_batch.sum()
        losses = losses if mask_batch is None else losses * mask_batch
        return dict(summed=losses.sum(), n_valid_examples=valid, per_example=losses)

    def queue(self, seed=0):
        """The same batch for ever; a quarter of its examples does not count."""
        rng = np.random.default_rng(seed)
        inputs = rng.standard_normal((EXAMPLES, FEATURES)).astype(np.float32)
        batch = {
            "inputs": inputs,
            "targets": inputs[:, :CLASSES].argmax(1),
            "weights": (np.arange(EXAMPLES) % 4 > 0).astype(np.float32),
        }
        while True:
            yield dict(batch)


class Run(NamedTuple):
    """What one step leaves behind."""

    optimizer_state: tuple
    params: dict
    model_state: dict


def start(submission, workload, point):
    """A run that has taken no step yet."""
    params, model_state = workload.init_model_fn(jax.random.key(0))
    optimizer_state = submission.init_optimizer_state(
        workload, params, model_state, point, jax.random.key(1)
    )
    return Run(optimizer_state, params, model_state)


def advance(submission, workload, run, point, step):
    """The run after one more step, and the loss before it."""
    queue, rng = workload.queue(), jax.random.fold_in(jax.random.key(2), step)
    chosen = (run.optimizer_state, run.params, run.model_state, point, step, rng)
    batch = submission.data_selection(workload, queue, *chosen)
    optimizer_state, params, model_state = submission.update_params(
        workload=workload,
        current_param_container=run.params,
        current_params_types=workload.model_params_types,
        model_state=run.model_state,
        hyperparameters=point,
        batch=batch,
        loss_type=workload.loss_type,
        optimizer_state=run.optimizer_state,
        eval_results=[],
        global_step=100 * step,  # of which every hundredth is logged
        rng=rng,
        train_state={},
    )
    run = jax.block_until_ready(Run(optimizer_state, params, model_state))
    return run, workload.metrics_logger.rows[-1][1]["loss"]
