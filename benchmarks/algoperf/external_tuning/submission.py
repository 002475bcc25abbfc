"""Distributed Shampoo for AlgoPerf's harness, in both of its rulesets.

With external tuning the harness gives `hyperparameters`, one point of
`tuning_search_space.json`; with self-tuning it gives `None`, and the defaults of
`Hyperparameters` count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from algoperf import jax_sharding_utils, spec
from jax.sharding import Mesh, PartitionSpec

import shampoo_optax as so

BATCH_SIZES = {
    "criteo1tb": 262_144,
    "fastmri": 32,
    "imagenet_resnet": 1024,
    "imagenet_resnet_silu": 512,
    "imagenet_resnet_gelu": 512,
    "imagenet_vit": 1024,
    "librispeech_conformer": 256,
    "librispeech_deepspeech": 256,
    "ogbg": 512,
    "wmt": 128,
    "mnist": 16,
}


class Hyperparameters(NamedTuple):
    """A point of the search space; the defaults are the first one's."""

    learning_rate: float = 0.0017486387539278373  # the largest
    one_minus_b1: float = 0.06733926164  # of the filtered gradient
    one_minus_b2: float = 0.00448403102  # of factors and second moments
    weight_decay: float = 0.08121616522670176  # decoupled
    graft: str = "adam"
    exponent: float | None = None  # of every factor; 1 / (2 * order)
    momentum: float | None = None  # Nesterov's
    nadam: bool = True
    warmup_factor: float = 0.02  # in units of the steps
    label_smoothing: float = 0.0
    dropout_rate: float = 0.1
    step_hint_factor: float = 1.0  # the steps, in units of the workload's hint
    block_size: int = 1024
    refresh_every: int = 100
    eps: float = 1e-8  # of factors
    graft_eps: float = 1e-8
    grad_clip: float = 5.0  # the largest global norm of a gradient
    table_learning_rate: float = 0.01  # of tables, the largest


def make_optimizer(
    point: Hyperparameters, step_hint: int, mesh: Mesh
) -> optax.GradientTransformationExtraArgs:
    """Shampoo divided over a mesh; tables of a million rows by row-wise AdaGrad."""
    steps = round(point.step_hint_factor * step_hint)
    warmup_steps = int(point.warmup_factor * steps)

    def schedule(peak: float) -> so.WarmupCosine:
        return so.WarmupCosine(peak, warmup_steps, steps)

    b1 = 1 - point.one_minus_b1
    shampoo = so.shampoo(
        schedule(point.learning_rate),
        b1,
        1 - point.one_minus_b2,
        point.eps,
        point.weight_decay,
        b3=b1**2 if point.nadam else None,
        refresh_every=point.refresh_every,
        exponents=point.exponent and dict.fromkeys(range(1, 5), point.exponent),
        graft=point.graft,
        graft_eps=point.graft_eps,
        momentum=point.momentum,
        nesterov=point.momentum is not None,
        blocking=so.Blocking(point.block_size),
        # Parameters are whole on every device, which is declared and not found out.
        placement=so.Placement(mesh, axes="batch", specs=PartitionSpec()),
    )
    table = optax.chain(
        so.scale_by_row_wise_adagrad(),
        optax.scale_by_learning_rate(schedule(point.table_learning_rate)),
    )
    groups = {so.TABLE.label: table, "rest": shampoo}
    return optax.chain(
        optax.clip_by_global_norm(point.grad_clip),
        optax.multi_transform(groups, so.label_by(so.TABLE, default="rest")),
    )


def init_optimizer_state(
    workload: spec.Workload,
    model_params: spec.ParameterContainer,
    model_state: spec.ModelAuxiliaryState,
    hyperparameters: spec.Hyperparameters | None,
    rng: spec.RandomState,
) -> spec.OptimizerState:
    """The state, divided over all devices, and the function that updates it."""
    del model_params, model_state, rng
    mesh = jax_sharding_utils.get_replicate_sharding().mesh
    point = hyperparameters or Hyperparameters()
    tx = make_optimizer(point, workload.step_hint, mesh)
    shapes = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape.shape_tuple, jnp.float32),
        workload.param_shapes,
    )

    def init() -> optax.OptState:
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        return tx.init(zeros)

    state = jax.jit(init, out_shardings=so.state_shardings(tx, shapes))()
    return state, tx.update


def train_step(
    workload: spec.Workload,
    update: Callable,
    point: Hyperparameters,
    model_state: spec.ModelAuxiliaryState,
    optimizer_state: optax.OptState,
    params: spec.ParameterContainer,
    batch: dict[str, spec.Tensor],
    rng: spec.RandomState,
) -> tuple:
    """One step on a batch: state, parameters, model state, loss, gradient norm."""

    def mean_loss(params):
        logits, new_model_state = workload.model_fn(
            params,
            batch,
            model_state,
            spec.ForwardPassMode.TRAIN,
            rng,
            update_batch_norm=True,
            dropout_rate=point.dropout_rate,
        )
        losses = workload.loss_fn(
            label_batch=batch["targets"],
            logits_batch=logits,
            mask_batch=batch.get("weights"),
            label_smoothing=point.label_smoothing,
        )
        if new_model_state is None:  # a model without state, whatever it began with
            new_model_state = model_state
        return losses["summed"] / losses["n_valid_examples"], new_model_state

    with_grads = jax.value_and_grad(mean_loss, has_aux=True)
    (loss, model_state), grads = with_grads(params)
    updates, optimizer_state = update(grads, optimizer_state, params)
    params = optax.apply_updates(params, updates)
    norm = jnp.sqrt(sum(jnp.sum(grad**2) for grad in jax.tree.leaves(grads)))
    return optimizer_state, params, model_state, loss, norm


def update_params(
    workload: spec.Workload,
    current_param_container: spec.ParameterContainer,
    current_params_types: spec.ParameterTypeTree,
    model_state: spec.ModelAuxiliaryState,
    hyperparameters: spec.Hyperparameters | None,
    batch: dict[str, spec.Tensor],
    loss_type: spec.LossType,
    optimizer_state: spec.OptimizerState,
    eval_results: list[tuple[int, float]],
    global_step: int,
    rng: spec.RandomState,
    train_state: dict[str, Any] | None = None,
) -> spec.UpdateReturn:
    """The optimizer's state, the parameters and the model's state after a step."""
    del current_params_types, loss_type, eval_results, train_state
    optimizer_state, update = optimizer_state
    whole = jax_sharding_utils.get_replicate_sharding()
    by_example = jax_sharding_utils.get_batch_dim_sharding()
    divided = jax.tree.map(lambda leaf: leaf.sharding, optimizer_state)
    # Some workloads begin with arrays on one device, for which the step would be
    # compiled once and for its own results again.
    params, model_state = jax.device_put((current_param_container, model_state), whole)
    jitted_train_step = jax.jit(
        train_step,
        static_argnums=(0, 1, 2),
        donate_argnums=(3, 4, 5),
        in_shardings=(whole, divided, whole, by_example, whole),
        out_shardings=(divided, whole, whole, whole, whole),
    )
    optimizer_state, params, model_state, loss, grad_norm = jitted_train_step(
        workload,
        update,
        hyperparameters or Hyperparameters(),
        model_state,
        optimizer_state,
        params,
        batch,
        rng,
    )
    log(workload, global_step, loss=loss, grad_norm=grad_norm)
    return (optimizer_state, update), params, model_state


def log(workload: spec.Workload, global_step: int, **scalars: jax.Array) -> None:
    """Gives the harness's logger numbers now and then; they are waited for."""
    if global_step % 100 == 0 and workload.metrics_logger is not None:
        numbers = {name: scalar.item() for name, scalar in scalars.items()}
        workload.metrics_logger.append_scalar_metrics(numbers, global_step)


def prepare_for_eval(
    workload: spec.Workload,
    current_param_container: spec.ParameterContainer,
    current_params_types: spec.ParameterTypeTree,
    model_state: spec.ModelAuxiliaryState,
    hyperparameters: spec.Hyperparameters | None,
    loss_type: spec.LossType,
    optimizer_state: spec.OptimizerState,
    eval_results: list[tuple[int, float]],
    global_step: int,
    rng: spec.RandomState,
) -> spec.UpdateReturn:
    """What is trained is what is evaluated."""
    del workload, current_params_types, hyperparameters, loss_type, eval_results
    del global_step, rng
    return optimizer_state, current_param_container, model_state


def get_batch_size(workload_name: str) -> int:
    """The global batch size; variants of a workload have that of its base."""
    if workload_name not in BATCH_SIZES:
        raise ValueError(
            f"`workload_name` must be one of {', '.join(BATCH_SIZES)}, "
            f"got {workload_name!r}."
        )
    return BATCH_SIZES[workload_name]


def data_selection(
    workload: spec.Workload,
    input_queue: Iterator[dict[str, spec.Tensor]],
    optimizer_state: spec.OptimizerState,
    current_param_container: spec.ParameterContainer,
    model_state: spec.ModelAuxiliaryState,
    hyperparameters: spec.Hyperparameters | None,
    global_step: int,
    rng: spec.RandomState,
) -> dict[str, spec.Tensor]:
    """The next batch of the queue."""
    del workload, optimizer_state, current_param_container, model_state
    del hyperparameters, global_step, rng
    return next(input_queue)
