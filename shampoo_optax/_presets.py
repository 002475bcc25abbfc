"""Presets: settings that others have published, as functions of a few numbers."""

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, get_args

import optax
from jax.typing import ArrayLike

from shampoo_optax._alias import shampoo, soap
from shampoo_optax._checks import (
    Mask,
    ScalarOrSchedule,
    check_choice,
    check_integer,
    check_number,
)
from shampoo_optax._config import Blocking
from shampoo_optax._groups import RULES, TABLE, label_by
from shampoo_optax._printed import call
from shampoo_optax._schedules import WarmupCosine

Hidden = Literal["shampoo", "soap"]

# `optax.partition` is the newer name of `optax.multi_transform`.
partition = getattr(optax, "partition", None) or optax.multi_transform


class _Labels(NamedTuple):
    """A function that labels parameters, and how it is written."""

    label: Callable[[Any], Any]
    shown: str

    def __call__(self, params: Any) -> Any:
        return self.label(params)


def replace_adamw(
    learning_rate: ScalarOrSchedule,
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.999,
    eps: ArrayLike = 1e-8,
    *,
    weight_decay: ArrayLike = 1e-4,
    mask: Mask | None = None,
    options: Mapping[str, Any] | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Shampoo in the place of `optax.adamw`, with its numbers.

    :func:`shampoo` with Adam's grafting: every block moves as far as AdamW would move
    it, :math:`\|P\| = \|\hat m / (\sqrt{\hat v} + \epsilon)\|`.

    Args:
      learning_rate: AdamW's, a number or a schedule.
      b1: AdamW's, in [0, 1). Default 0.9.
      b2: AdamW's, in [0, 1), for the factors and the grafted moments. Default 0.999.
      eps: AdamW's, >= 0, for grafting. Default 1e-8.
      weight_decay: AdamW's, >= 0. Default 1e-4.
      mask: AdamW's, which parameters decay. Default `None`: all.
      options: further arguments of :func:`shampoo`, as `dict(placement=placement)`,
        which come before those above. Default `None`: there are none.

    Returns:
      An `optax.GradientTransformationExtraArgs` that prints as the call that it
      stands for.

    Raises:
      ValueError: if an argument has a value that :func:`shampoo` does not take.

    Examples:
      >>> import shampoo_optax as so
      >>> so.replace_adamw(1e-3, weight_decay=0.1)
      so.shampoo(
          learning_rate=0.001,
          b1=0.9,
          b2=0.999,
          weight_decay=0.1,
          graft='adam',
          graft_b2=0.999,
          graft_eps=1e-08,
      )

    References:
      Shi et al., PyTorch Distributed Shampoo, 2023, examples 2 and 4 of its README,
      https://github.com/facebookresearch/optimizers.
    """
    check_number("eps", eps)
    settings = dict(
        learning_rate=learning_rate,
        b1=b1,
        b2=b2,
        weight_decay=weight_decay,
        **({} if mask is None else dict(mask=mask)),
        graft="adam",
        graft_b2=b2,
        graft_eps=eps,
    )
    return call(shampoo, **settings | dict(options or {}))


def replace_sgd(
    learning_rate: ScalarOrSchedule,
    momentum: ArrayLike | None = 0.9,
    nesterov: bool = False,
    *,
    weight_decay: ArrayLike = 0.0,
    options: Mapping[str, Any] | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Shampoo in the place of `optax.sgd` with momentum, with its numbers.

    :func:`shampoo` with SGD's grafting: every block's direction is as long as the
    gradient, :math:`\|P\| = \|G\|`, before momentum.

    Args:
      learning_rate: SGD's, a number or a schedule.
      momentum: SGD's, in [0, 1]. Default 0.9.
      nesterov: whether SGD's momentum is Nesterov's. Default `False`.
      weight_decay: what was added to the gradient before, >= 0, as in PyTorch's SGD or
        by `optax.add_decayed_weights`. Default 0.
      options: further arguments of :func:`shampoo`, as `dict(placement=placement)`,
        which come before those above. Default `None`: there are none.

    Returns:
      An `optax.GradientTransformationExtraArgs` that prints as the call that it
      stands for.

    Raises:
      ValueError: if an argument has a value that :func:`shampoo` does not take.

    Examples:
      >>> import shampoo_optax as so
      >>> so.replace_sgd(0.1, weight_decay=1e-4)
      so.shampoo(
          learning_rate=0.1,
          b1=0.0,
          b2=0.999,
          weight_decay=0.0001,
          graft='sgd',
          momentum=0.9,
          nesterov=False,
          decay='l2',
      )

    References:
      Shi et al., PyTorch Distributed Shampoo, 2023, example 1 of its README,
      https://github.com/facebookresearch/optimizers.
    """
    settings = dict(
        learning_rate=learning_rate,
        b1=0.0,
        b2=0.999,
        weight_decay=weight_decay,
        graft="sgd",
        momentum=momentum,
        nesterov=nesterov,
        decay="l2",
    )
    return call(shampoo, **settings | dict(options or {}))


def replace_adamw_by_soap(
    learning_rate: ScalarOrSchedule,
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.999,
    eps: ArrayLike = 1e-8,
    *,
    weight_decay: ArrayLike = 1e-4,
    mask: Mask | None = None,
    options: Mapping[str, Any] | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""SOAP in the place of `optax.adamw`, with its numbers.

    SOAP is AdamW in the basis Q of the factors, with :math:`\hat m / (\sqrt{\hat v} +
    \epsilon)` of :math:`Q^\top G`; AdamW's numbers are where to start from;
    try larger rates too.

    Args:
      learning_rate: AdamW's, a number or a schedule.
      b1: AdamW's, in [0, 1). Default 0.9.
      b2: AdamW's, in [0, 1], for the factors too. Default 0.999.
      eps: AdamW's, >= 0. Default 1e-8.
      weight_decay: AdamW's, >= 0. Default 1e-4.
      mask: AdamW's, which parameters decay. Default `None`: all.
      options: further arguments of :func:`soap`, as `dict(placement=placement)`,
        which come before those above. Default `None`: there are none.

    Returns:
      An `optax.GradientTransformationExtraArgs` that prints as the call that it
      stands for.

    Raises:
      ValueError: if an argument has a value that :func:`soap` does not take.

    Examples:
      >>> import shampoo_optax as so
      >>> so.replace_adamw_by_soap(3e-3, b1=0.95, b2=0.95)
      so.soap(learning_rate=0.003, b1=0.95, b2=0.95, eps=1e-08, weight_decay=0.0001)

    References:
      Vyas et al., SOAP: Improving and Stabilizing Shampoo using Adam, 2024,
      https://arxiv.org/abs/2409.11321.
    """
    settings = dict(
        learning_rate=learning_rate,
        b1=b1,
        b2=b2,
        eps=eps,
        weight_decay=weight_decay,
        **({} if mask is None else dict(mask=mask)),
    )
    return call(soap, **settings | dict(options or {}))


class _Point(NamedTuple):
    """Settings of the AlgoPerf submission that its five points differ in."""

    learning_rate: float
    one_minus_b1: float
    one_minus_b2: float
    weight_decay: float
    warmup: float  # in units of the steps
    steps: float = 1.0  # in units of the step hint
    graft: str = "adam"
    momentum: float | None = None
    exponent: float | None = None


POINTS = (
    _Point(
        0.0017486387539278373, 0.06733926164, 0.00448403102, 0.08121616522670176, 0.02
    ),
    _Point(
        0.0014381744028656841,
        0.025337537053408913,
        0.02508024059481679,
        0.00019716633625688372,
        0.05,
        steps=0.6,
    ),
    _Point(
        4.199449275251465,
        1.0,
        0.0023701743773090066,
        6.404237434173623e-05,
        0.02,
        graft="sgd",
        momentum=1 - 0.03150207249544311,
    ),
    _Point(
        0.0012,
        0.016610699316537858,
        0.005888216674053163,
        0.00040349948255455174,
        0.02,
        momentum=0.5,
        exponent=1 / 2,
    ),
    _Point(
        0.001308209823469072, 0.02686663061, 0.00187670778, 0.16375311233774334, 0.1
    ),
)
ORDERS = range(1, 5)


def algoperf_winner(
    steps: int, point: int = 1, options: Mapping[str, Any] | None = None
) -> optax.GradientTransformationExtraArgs:
    r"""The settings with which Distributed Shampoo won AlgoPerf's external tuning.

    The submission is a list of five points, of which the best was taken for each
    workload: :func:`shampoo` with blocks of 1024, a refresh at every 100th step, Adam's
    grafting and a gradient that looks ahead (`b3` = `b1`\ :sup:`2`); point 3 has SGD's
    grafting and Nesterov's momentum, point 4 exponents of 1/2. Parameters with a
    dimension of a million or more, embedding tables, have no factors and are left to
    Adam. The rate warms up linearly and falls to 0 as a cosine. Label smoothing and
    dropout, which the points set too, are matters of the model.

    Args:
      steps: the steps of the run, AlgoPerf's `step_hint` of the workload, an integer
        >= 20; point 2 ends after 0.6 of them.
      point: which of the five, an integer from 1 to 5. Default 1.
      options: further arguments of :func:`shampoo`, as `dict(placement=placement)`,
        which come before those above. Default `None`: there are none.

    Returns:
      An `optax.GradientTransformationExtraArgs` that prints as the call that it
      stands for.

    Raises:
      ValueError: if an argument has a value other than those above, or an option one
        that :func:`shampoo` does not take.

    Examples:
      >>> import jax.numpy as jnp
      >>> import shampoo_optax as so
      >>> tx = so.algoperf_winner(steps=10_000, point=5)
      >>> params = {"kernel": jnp.ones((4, 3)), "bias": jnp.ones(3)}
      >>> updates, _ = tx.update(params, tx.init(params), params)
      >>> str(tx).count("so.WarmupCosine(")
      2

    References:
      Kasimbeg et al., Accelerating Neural Network Training: An Analysis of the AlgoPerf
      Competition, 2025, https://arxiv.org/abs/2502.15015.

      The submission, 2024, `shampoo_submission/tuning_search_space.json` of
      https://github.com/mlcommons/submissions_algorithms.
    """
    check_integer("steps", steps, low=20)
    check_choice("point", point, tuple(range(1, len(POINTS) + 1)))
    chosen = POINTS[point - 1]
    steps = round(chosen.steps * steps)
    b1 = 1 - chosen.one_minus_b1
    settings = dict(
        learning_rate=WarmupCosine(
            chosen.learning_rate, int(chosen.warmup * steps), steps
        ),
        b1=b1,
        b2=1 - chosen.one_minus_b2,
        eps=1e-8,
        weight_decay=chosen.weight_decay,
        relative_eps=0.0,
        refresh_every=100,
        graft=chosen.graft,
        blocking=Blocking(1024),
    )
    if b1:
        settings["b3"] = b1**2
    if chosen.momentum is not None:
        settings |= dict(momentum=chosen.momentum, nesterov=True)
    if chosen.exponent is not None:
        settings["exponents"] = dict.fromkeys(ORDERS, chosen.exponent)
    settings |= options or {}
    no_factors = dict(exponents=dict.fromkeys(ORDERS, 0.0), graft="adam")
    groups = {
        TABLE.label: call(shampoo, **settings | no_factors),
        "rest": call(shampoo, **settings),
    }
    labels = _Labels(
        label_by(TABLE, default="rest"), "so.label_by(so.TABLE, default='rest')"
    )
    return call(partition, groups, labels, name=f"optax.{partition.__name__}")


def llm_pretraining(
    learning_rate: float,
    steps: int,
    b1: ArrayLike = 0.95,
    b2: ArrayLike = 0.95,
    weight_decay: ArrayLike = 0.1,
    *,
    hidden: Hidden = "shampoo",
    warmup_steps: int | None = None,
    max_norm: float = 1.0,
    options: Mapping[str, Any] | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Shampoo or SOAP for the hidden matrices of a language model, AdamW for the rest.

    The groups are those of :data:`RULES`: embeddings and heads are left to AdamW,
    norms, biases and other vectors to Adam. The gradient's global norm is clipped, the
    rate warms up linearly and falls to a tenth as a cosine. All groups have one rate:
    grafting, or SOAP's moments, give matrices Adam's step size.

    Args:
      learning_rate: the largest rate of all groups, >= 0.
      steps: the steps of the run, an integer >= 20.
      b1: decay rate of the filtered gradient. Default 0.95.
      b2: decay rate of factors and second moments. Default 0.95.
      weight_decay: decoupled, >= 0, of all but norms and vectors. Default 0.1.
      hidden: `"shampoo"` or `"soap"`. Default `"shampoo"`.
      warmup_steps: an integer below `steps`; `None` stands for a twentieth. Default
        `None`.
      max_norm: the largest global norm of a gradient, > 0. Default 1.
      options: a mapping of further arguments of :func:`shampoo` or :func:`soap`.
        Default `None`: there are none.

    Returns:
      An `optax.GradientTransformationExtraArgs` that prints as the call that it
      stands for.

    Raises:
      ValueError: if an argument has a value other than those above, or an option one
        that the method does not take.

    Examples:
      >>> import jax.numpy as jnp
      >>> import shampoo_optax as so
      >>> tx = so.llm_pretraining(2e-3, steps=1000)
      >>> params = {"embed": jnp.ones((9, 4)), "mlp": jnp.ones((4, 4))}
      >>> updates, _ = tx.update(params, tx.init(params), params)
      >>> print("\n".join(str(tx).splitlines()[:3]))
      optax.chain(
          optax.clip_by_global_norm(max_norm=1.0),
          optax.partition(

    References:
      Vyas et al., SOAP: Improving and Stabilizing Shampoo using Adam, 2024, for both
      averages, https://arxiv.org/abs/2409.11321.

      Brown et al., Language Models are Few-Shot Learners, 2020, for clipping, decay and
      the last rate, https://arxiv.org/abs/2005.14165.

      Jordan, Comparison of optimizers on the modded-nanogpt speedrun, 2024, for the
      groups, https://github.com/KellerJordan/modded-nanogpt.
    """
    check_number("learning_rate", learning_rate)
    check_integer("steps", steps, low=20)
    check_choice("hidden", hidden, get_args(Hidden))
    check_number("max_norm", max_norm, positive=True)
    warmup_steps = steps // 20 if warmup_steps is None else warmup_steps
    check_integer("warmup_steps", warmup_steps, low=0)
    if warmup_steps >= steps:
        raise ValueError(
            f"`warmup_steps` must be below the {steps} steps, got {warmup_steps}."
        )
    schedule = WarmupCosine(learning_rate, warmup_steps, steps, end=0.1)
    shared = dict(learning_rate=schedule, b1=b1, b2=b2)
    decayed = shared | dict(weight_decay=weight_decay)
    method = shampoo if hidden == "shampoo" else soap
    matrices = call(method, **decayed | dict(options or {}))
    adamw = call(optax.adamw, **decayed, name="optax.adamw")
    adam = call(optax.adam, **shared, name="optax.adam")
    groups = dict.fromkeys(("table", "embedding", "head"), adamw)
    groups |= dict.fromkeys(("norm", "vector"), adam) | {"matrix": matrices}
    labels = _Labels(label_by(*RULES), "so.label_by(*so.RULES)")
    return call(
        optax.chain,
        call(
            optax.clip_by_global_norm,
            max_norm=max_norm,
            name="optax.clip_by_global_norm",
        ),
        call(partition, groups, labels, name=f"optax.{partition.__name__}"),
        name="optax.chain",
    )
