"""SOAP: second moments in the eigenbasis of Shampoo's factors."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from shampoo_optax._bases import (
    accumulate_squares,
    divide_by_roots,
    move_average,
    move_due_averages,
    refresh_bases,
)
from shampoo_optax._checks import (
    Graft,
    Period,
    check_choice,
    check_exponents,
    check_integer,
)
from shampoo_optax._config import Axes, Blocking, Options, Storage
from shampoo_optax._eigen_methods import Basis, EighBasis, check_basis
from shampoo_optax._factors import (
    Whiten,
    apply_axes,
    factored_memory,
    identity_bases,
    statistics_correction,
    unit_eigenvalues,
)
from shampoo_optax._grafting import keeps_filtered, zero_blocks
from shampoo_optax._metrics import Metrics
from shampoo_optax._periods import statistics_count
from shampoo_optax._placement import Placement
from shampoo_optax._preconditioning import precondition
from shampoo_optax._stacks import AxisStacks, Inputs, Stack, Stacks, per_slot
from shampoo_optax._step import (
    Step,
    Turned,
    begin,
    factored_fields,
    finish,
    refresh_if_due,
    unite,
)
from shampoo_optax._transform import Method, block_transform
from shampoo_optax._trees import when_due

Form = Literal["official", "paper"]
IgnoredAxes = Mapping[int, Sequence[int]]


class ScaleBySoapState(NamedTuple):
    """State of :func:`scale_by_soap` and :func:`scale_by_kl_soap`.

    Attributes:
      count: the number of steps taken, t.
      factors: the statistics L of each axis.
      bases: their eigenvectors Q in columns, the identity before the first refresh.
      eigenvalues: theirs, which whiten gradients in KL-SOAP, 1 before the first
        refresh; empty in SOAP.
      moments: second moments D of the gradient in the bases.
      graft_moments: second moments of the grafted method; empty without any.
      filtered: moving average of the gradient, in the bases with `form="paper"`;
        empty where `b1` is 0.
      failures: how many new bases were refused, for each block.
      residuals: the largest residual of a block's bases at its last refresh.
      iterations: the most iterations of one of these; 0 where the old ones were kept.
      skipped: how many steps gave no finite direction, for each block.
      metrics: empty without `metrics=True`, else of each block the `conditions` of the
        factors of the bases in use, by axis; `refreshed`, the step of the last refresh
        without a failure; and of the last step the `rms` of the direction, the
        `cosines` between direction and gradient, and the norm of the `grafting` over
        that of the direction. What is not known, or did not move, is 0.

    Examples:
      >>> import jax.numpy as jnp
      >>> import shampoo_optax as so
      >>> tx = so.scale_by_soap()
      >>> state = tx.init({"w": jnp.zeros((4, 3))})
      >>> state.bases["4x3"]["0"].shape
      (1, 4, 4)
    """

    count: jax.Array  # [], int32
    factors: AxisStacks  # {stack: {axis: [n, d, d]}}, as in `storage`
    bases: AxisStacks  # {stack: {axis: [n, d, d]}}, as in `storage`
    eigenvalues: AxisStacks  # {stack: {axis: [n, d]}}, float32 or wider
    moments: Stacks  # {stack: [n, *block]}, float32 or wider
    graft_moments: Stacks  # {stack: [n, *block]}, float32 or wider
    filtered: Stacks  # {stack: [n, *block]}, as in `storage`
    failures: dict[str, jax.Array]  # {stack: [n]}, int32
    residuals: dict[str, jax.Array]  # {stack: [n]}, float32
    iterations: dict[str, jax.Array]  # {stack: [n]}, int32
    skipped: dict[str, jax.Array]  # {stack: [n]}, int32
    metrics: Metrics  # {name: {stack: [n]}}, conditions {stack: {axis: [n]}}, float32


# The |cos| from which on a new column is an old one. The official package leaves
# columns up to 0.9999 alike in the places of each other.
_SAME = {"official": 0.99999, "paper": 0.71}


class Rules(NamedTuple):
    """What SOAP is told besides the options of all transforms."""

    basis: Basis
    form: Form
    exponents: Mapping[int, float]  # p by the order of a block, 1/2 where there is none
    whitened: bool = False  # whether factors are those of KL-Shampoo


def soap_transform(
    options: Options, rules: Rules, placement: Placement | None
) -> optax.GradientTransformationExtraArgs:
    """The transform on blocks with these arguments."""
    limits = options.axes.limits
    if limits:  # a diagonal factor has no basis to rotate into
        axes = replace(options.axes, diagonal_above=None, skip_above=min(limits))
        options = replace(options, axes=axes)
    method = Method(
        ScaleBySoapState,
        partial(_init_fields, options, rules),
        partial(_step, options, rules),
        partial(factored_memory, options),
        partial(_step, options.at_once, rules),
        options.turns,
    )
    return block_transform(method, options, placement)


def unrotated(ignored_axes: IgnoredAxes | None) -> dict[int, dict[int, float]]:
    """The ignored axes, checked, as axes with the exponent 0: without a factor."""
    ignored_axes = {} if ignored_axes is None else ignored_axes
    if not isinstance(ignored_axes, Mapping):
        raise ValueError(
            f"`ignored_axes` must be a mapping from orders, got {ignored_axes!r}."
        )
    for order, axes in ignored_axes.items():
        check_integer("ignored_axes", order)
        if isinstance(axes, str) or not isinstance(axes, Sequence):
            raise ValueError(
                f"`ignored_axes` must map orders to sequences of axes, got {axes!r}."
            )
        for axis in axes:
            if isinstance(axis, bool) or axis not in range(order):
                raise ValueError(
                    f"`ignored_axes` must name axes below the order {order}, "
                    f"got {axis!r}."
                )
    return {order: dict.fromkeys(axes, 0.0) for order, axes in ignored_axes.items()}


def _init_fields(
    options: Options, rules: Rules, stacks: dict[str, Stack]
) -> dict[str, Any]:
    return dict(
        bases=identity_bases(stacks, options),
        eigenvalues=unit_eigenvalues(stacks, options) if rules.whitened else {},
        moments=zero_blocks(stacks),
        **factored_fields(stacks, options),
    )


def _whiten(inputs: Inputs, options: Options) -> Whiten:
    """Multiplies blocks by the inverse square roots of the factors of other axes.

    Eigenvalues count in units of their mean: a Kronecker product says nothing of the
    scales of its single factors, which would drift apart from step to step.
    """

    def whiten(name: str, block: jax.Array, axis: str) -> jax.Array:
        derived = {f: {name: inputs.fields[f][name]} for f in ("bases", "eigenvalues")}
        values = derived["eigenvalues"][name]
        sides = {n: s for n, s in inputs.sides.items() if n == name}
        halves = {name: dict.fromkeys(values, 1 / 2)}
        block = precondition(
            {name: block}, derived, sides, halves, options, left_out=axis, back=False
        )[name]
        for other in sorted(values.keys() - {axis}):
            mean = _own_mean(values[other], sides.get(name, {}).get(other))
            block = block * per_slot(jnp.sqrt(mean), block)
        return block

    return whiten


def _own_mean(values: jax.Array, sides: jax.Array | None) -> jax.Array:
    """The means `[n]` of the first `sides` of the values `[n, d]`, or of all."""
    if sides is None:
        return jnp.mean(values, axis=1)
    inside = jnp.arange(values.shape[1])[None] < jnp.asarray(sides)[:, None]
    total = jnp.sum(jnp.where(inside, values, 0), axis=1)
    return total / jnp.asarray(sides, values.dtype)


def _step(
    options: Options, rules: Rules, inputs: Inputs
) -> tuple[Stacks, dict[str, Any]]:
    options = replace(options, **inputs.numbers)
    # KL-SOAP adds `eps` to second moments alone.
    ridge = 0.0 if rules.whitened else options.eps
    whiten = _whiten(inputs, replace(options, eps=ridge)) if rules.whitened else None
    step = begin(inputs, options, whiten)
    recompute = partial(
        refresh_bases,
        step.factors,
        usable=step.usable,
        sides=inputs.sides,
        correction=statistics_correction(
            options, statistics_count(options, inputs.count)
        ),
        ridge=ridge,
        basis=rules.basis,
        least=_SAME[rules.form],
        options=options,
        turns=step.turns,
    )
    renew = partial(refresh_if_due, step, recompute, ("bases", "eigenvalues"))
    if rules.form == "official":
        derived = renew()
        directions, fields = _direct(step, options, rules, derived["bases"])
        return directions, unite(fields, derived, dict(factors=step.factors))
    before = inputs.fields["bases"]
    directions, fields = _direct(step, options, rules, before)
    derived = renew()
    if keeps_filtered(options):
        fields["filtered"] = _turn_average(step, fields, before, derived["bases"])
    return directions, unite(fields, derived, dict(factors=step.factors))


def _turn_average(
    step: Step, fields: dict[str, Any], before: AxisStacks, after: AxisStacks
) -> Stacks:
    """The moving average in the bases of after a refresh."""
    held = fields["filtered"]
    if step.turns is not None:
        return move_due_averages(held, before, after, step.usable, step.turns)

    def move(filtered: Stacks) -> tuple[Stacks]:
        return (move_average(filtered, before, after, step.usable),)

    (filtered,) = when_due(step.due, move, held)
    return filtered


def _direct(
    step: Step, options: Options, rules: Rules, bases: AxisStacks
) -> tuple[Stacks, dict[str, Any]]:
    """The directions with these bases, and the fields but for those of a refresh."""
    turn = partial(apply_axes, bases, transpose=True)
    back = partial(apply_axes, bases)
    turned = turn(step.blocks)
    moments = accumulate_squares(
        step.inputs.fields["moments"], turned, step.usable, options
    )
    correction = statistics_correction(options, step.inputs.count)
    in_bases = rules.form == "paper"

    def direct(used: Stacks) -> Stacks:
        used = used if in_bases else turn(used)
        divided = divide_by_roots(
            used, moments, correction, rules.exponents, options.eps
        )
        return back(divided)

    kept = Turned(turned, back) if in_bases else None
    directions, fields = finish(step, options, direct, kept)
    return directions, dict(fields, moments=moments)


def scale_by_soap(
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.99,
    eps: ArrayLike = 1e-8,
    *,
    exponents: Mapping[int, float] | None = None,
    b3: ArrayLike | None = None,
    refresh_every: Period = 10,
    statistics_every: ArrayLike = 1,
    stagger: bool = False,
    start: ArrayLike | None = None,
    bias_correction: bool = True,
    drop_weighting: bool = False,
    graft: Graft | None = None,
    graft_b2: ArrayLike | None = None,
    graft_eps: ArrayLike = 1e-8,
    graft_drop_weighting: bool = False,
    ignored_axes: IgnoredAxes | None = None,
    form: Form = "official",
    basis: Basis = EighBasis(),
    axes: Axes = Axes(),
    storage: Storage = Storage(),
    blocking: Blocking = Blocking(),
    metrics: bool = False,
    placement: Placement | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Runs Adam's second moment in the eigenbasis of Shampoo's factors (SOAP).

    With the factors :math:`L_k`, the filtered gradient :math:`\hat G`, the weight w
    and the correction c of :func:`scale_by_shampoo`, and the eigenvectors
    :math:`Q_k` of the factors, taken at a refresh,

    .. math::
      D &\leftarrow b_2 D + w\, (G_t \times_1 Q_1^\top \times_2 \cdots)^2 \\
      P &= \frac{\hat G \times_1 Q_1^\top \times_2 \cdots}
        {(D / c)^p + \varepsilon} \times_1 Q_1 \times_2 \cdots

    D stays as it is when the bases change, but a column that is an old one, up to
    its sign, takes the old one's place, so that no moment is left behind where
    eigenvalues only change their order. It counts as an old one from a |cos| of 0.71
    on, or of 0.99999 in the official form, which follows the order of the official
    package wherever columns turn; a :class:`CholeskyBasis` leaves all in their places.
    Precision, guards and absent gradients are those of :func:`scale_by_shampoo`.

    Where gradients have entries that stay 0 for long, a turned basis may divide an
    average by a moment that has seen nothing; of a gradient of rank one the rounding,
    above `eps`, gets full steps: clip updates or graft there. Bases in
    bfloat16 (`Storage.roots`) are orthogonal to 1e-2 only and make that worse where
    gradients lack rank.

    The two forms differ in the order of a step. In the official PyTorch package the
    refresh comes first, from factors that hold this step's gradient, and D and the
    direction are taken in the new bases. In the paper the direction comes first, in
    the bases of before, which are refreshed afterwards and act from the next step on.
    As in the code of the paper, the average of the gradient is then kept in the bases
    and turned with them, :math:`\tilde G \leftarrow \tilde G \times_1 Q_1'^\top Q_1
    \times_2 \cdots`: the same numbers as in the parameter's coordinates, for one
    rotation less at each step. Where bases do not change the forms agree. That code
    also spends the first step on its first bases, without an update; here the first
    updates are Adam's.

    Args:
      b1: decay rate of the filtered gradient, in [0, 1); 0 takes the gradient as it
        is and stores nothing. Default 0.9.
      b2: decay rate of the factors and of the second moments, in [0, 1]; 1 makes
        them sums, as AdaGrad does. Default 0.99.
      eps: added to the root of the second moments, and to the diagonals of the factors
        before bases are taken, >= 0. Default 1e-8.
      exponents: overrides of p by the order of a block, `{order: p}` with p >= 0.
        Default `None`: 1/2.
      b3: weight of the old average in the gradient used now, in [0, 1); `b1 * b1`
        looks ahead as NAdam does, `None` stands for `b1`. Default `None`.
      refresh_every: steps from one refresh to the next, an integer >= 1, or a schedule
        that maps the number of steps taken to one, which `optax.inject_hyperparams`
        needs in its `static_args`. Default 10.
      statistics_every: steps from one update of the factors to the next, an integer
        from 1 to `refresh_every`. Default 1.
      stagger: whether blocks take turns, so that every step refreshes some of them, in
        place of all at once. Default `False`.
      start: step of the first refresh, an integer >= `refresh_every`, which `None`
        stands for (with `stagger` plus `statistics_every` - 1, and with a schedule the
        later of its first value and `statistics_every`); until then the grafted method
        alone moves the parameters, or Adam in the unrotated basis where there is none.
        Default `None`.
      bias_correction: whether second moments and filtered gradient are divided by
        the sum of their weights. Adam's grafted moments always are. Default `True`.
      drop_weighting: whether new statistics enter with weight 1 in place of 1 - b2,
        without bias correction. Default `False`.
      graft: the method whose step size each block takes: `"adam"`, `"rmsprop"`,
        `"adagrad"`, `"sgd"`, or `None`. Default `None`.
      graft_b2: decay rate of the grafted second moments, in [0, 1); `None` stands for
        `b2`. Default `None`.
      graft_eps: added to the root of the grafted second moments, >= 0. Default 1e-8.
      graft_drop_weighting: whether new second moments enter with weight 1 in place
        of 1 - graft_b2, without bias correction. Default `False`.
      ignored_axes: axes that are not rotated and have no factor, by the order of a
        block, `{order: axes}`. Default `None`: none are ignored.
      form: `"official"` or `"paper"`. Default `"official"`.
      basis: how eigenvectors are computed, an :class:`EighBasis`,
        :class:`QRBasis` or :class:`CholeskyBasis`. Default `EighBasis()`.
      axes: which axes are rotated, an :class:`Axes`; one above `diagonal_above` is
        not, as above `skip_above`. Default `Axes()`: all.
      storage: in what form the state is kept, a :class:`Storage`; bases are never
        packed. Default `Storage()`: float32 or wider.
      blocking: how parameters are merged and cut, a :class:`Blocking`. Default
        `Blocking()`.
      metrics: whether the state has metrics of every block, for :func:`diagnose`.
        Default `False`.
      placement: the devices that statistics, bases and work are divided over, a
        :class:`Placement`. Default `None`: all stay on one device.

    Returns:
      An `optax.GradientTransformationExtraArgs` whose state is a
      :class:`ScaleBySoapState`. Updates have the shapes and dtypes of the gradients.

    Raises:
      ValueError: if an argument has a value other than those above; in `init` or
        `update`, if a leaf is not a real floating-point array, or the gradients'
        paths or shapes are not those of the parameters.

    Examples:
      >>> import jax, jax.numpy as jnp, optax
      >>> import shampoo_optax as so
      >>> tx = optax.chain(
      ...     so.scale_by_soap(refresh_every=2), optax.scale_by_learning_rate(0.1)
      ... )
      >>> f = lambda w: jnp.sum(w**2)
      >>> w = jnp.array([[1.0, 2.0], [3.0, 4.0]])
      >>> state = tx.init(w)
      >>> for _ in range(5):
      ...     updates, state = tx.update(jax.grad(f)(w), state, w)
      ...     w = optax.apply_updates(w, updates)
      ...     print(f"{f(w):.2f}")
      28.04
      26.81
      25.66
      24.57
      23.52

    References:
      Vyas et al., SOAP: Improving and Stabilizing Shampoo using Adam, 2024,
      https://arxiv.org/abs/2409.11321.

      Shi et al., A Distributed Data-Parallel PyTorch Implementation of the
      Distributed Shampoo Optimizer, 2023, https://arxiv.org/abs/2309.06497.
    """
    check_exponents(exponents, per_axis=False)
    check_choice("form", form, get_args(Form))
    check_basis(basis)
    options = Options(
        b1=b1,
        b2=b2,
        eps=eps,
        b3=b3,
        refresh_every=refresh_every,
        statistics_every=statistics_every,
        stagger=stagger,
        start=start,
        bias_correction=bias_correction,
        drop_weighting=drop_weighting,
        graft=graft,
        graft_b2=graft_b2,
        graft_eps=graft_eps,
        graft_drop_weighting=graft_drop_weighting,
        exponents=unrotated(ignored_axes),
        axes=axes,
        storage=storage,
        blocking=blocking,
        metrics=metrics,
    )

    rules = Rules(basis, form, exponents or {})
    return soap_transform(options, rules, placement)
