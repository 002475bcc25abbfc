"""Shampoo: Kronecker factors, their inverse roots, and the preconditioned gradient."""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import optax
from jax.typing import ArrayLike

from shampoo_optax._balance import balance_of, balanced, balanced_fields
from shampoo_optax._checks import Exponents, Graft, Period
from shampoo_optax._config import Axes, Blocking, Options, Root, Storage
from shampoo_optax._eigen_methods import Eigendecomposed, Eigh
from shampoo_optax._factors import (
    factored_axes,
    factored_memory,
    identity_bases,
    identity_roots,
    statistics_correction,
    unit_eigenvalues,
)
from shampoo_optax._metrics import Metrics
from shampoo_optax._periods import statistics_count
from shampoo_optax._placement import Placement
from shampoo_optax._preconditioning import precondition
from shampoo_optax._refresh import Derived, Report
from shampoo_optax._roots import refresh_roots
from shampoo_optax._stacks import AxisStacks, Inputs, Stack, Stacks
from shampoo_optax._step import begin, factored_fields, finish, refresh_if_due, unite
from shampoo_optax._transform import Method, block_transform


class ScaleByShampooState(NamedTuple):
    """State of :func:`scale_by_shampoo`.

    A stack is named by the shape of its blocks, an axis by its number. A tree
    without any block has an array of shape [] in place of each dict.

    Attributes:
      count: the number of steps taken, t.
      factors: the statistics L of each axis (L and R in the papers), in the form that
        `storage` says; of diagonal axes the diagonals.
      roots: their inverse roots, likewise, the identity before the first refresh;
        empty with `Eigendecomposed`.
      bases: with `Eigendecomposed` the eigenvectors, in columns, else empty.
      eigenvalues: with `Eigendecomposed` theirs, else empty.
      graft_moments: second moments of the grafted method; empty without any.
      filtered: moving average of the gradient; empty where `b1` is 0.
      failures: how many new roots were refused, for each block.
      residuals: the largest residual of a block's roots at its last refresh.
      iterations: the most iterations of one of these; 0 without any.
      skipped: how many steps gave no finite direction, for each block.
      metrics: empty without `metrics=True`, else of each block the `conditions` of the
        factors of the roots in use, by axis; `refreshed`, the step of the last refresh
        without a failure; and of the last step the `rms` of the direction, the
        `cosines` between direction and gradient, and the norm of the `grafting` over
        that of the direction. What is not known, or did not move, is 0.

    Examples:
      >>> import jax.numpy as jnp
      >>> import shampoo_optax as so
      >>> tx = so.scale_by_shampoo()
      >>> state = tx.init({"w": jnp.zeros((4, 3))})
      >>> state.factors["4x3"]["0"].shape
      (1, 4, 4)
      >>> state.roots["4x3"]["1"].shape
      (1, 3, 3)
    """

    count: jax.Array  # [], int32
    factors: AxisStacks  # {stack: {axis: [n, d, d]}}, as in `storage`
    roots: AxisStacks  # {stack: {axis: [n, d, d]}}, as in `storage`
    bases: AxisStacks  # {stack: {axis: [n, d, d]}}, as in `storage`
    eigenvalues: AxisStacks  # {stack: {axis: [n, d]}}, float32 or wider
    graft_moments: Stacks  # {stack: [n, *block]}, float32 or wider
    filtered: Stacks  # {stack: [n, *block]}, as in `storage`
    failures: dict[str, jax.Array]  # {stack: [n]}, int32
    residuals: dict[str, jax.Array]  # {stack: [n]}, float32
    iterations: dict[str, jax.Array]  # {stack: [n]}, int32
    skipped: dict[str, jax.Array]  # {stack: [n]}, int32
    metrics: Metrics  # {name: {stack: [n]}}, conditions {stack: {axis: [n]}}, float32


def shampoo_transform(
    options: Options, placement: Placement | None, whitened: bool = False
) -> optax.GradientTransformationExtraArgs:
    """The transform on blocks with these arguments.

    Args:
      options: the arguments, checked.
      placement: where blocks live.
      whitened: whether the gradient enters the factor of an axis multiplied by the
        roots of the others, as in KL-Shampoo.
    """
    method = Method(
        ScaleByShampooState,
        partial(_init_fields, options),
        partial(_step, options, whitened),
        partial(factored_memory, options),
        partial(_step, options.at_once, whitened),
        options.turns,
    )
    return block_transform(method, options, placement)


def _init_fields(options: Options, stacks: dict[str, Stack]) -> dict[str, Any]:
    derived = dict(roots={}, bases={}, eigenvalues={})
    if isinstance(options.root, Eigendecomposed):
        derived |= dict(
            bases=identity_bases(stacks, options),
            eigenvalues=unit_eigenvalues(stacks, options),
        )
    else:
        derived["roots"] = identity_roots(stacks, options)
    return derived | factored_fields(stacks, options)


def _step(
    options: Options, whitened: bool, inputs: Inputs
) -> tuple[Stacks, dict[str, Any]]:
    options = replace(options, **inputs.numbers)
    shapes = {name: block.shape[1:] for name, block in inputs.blocks.items()}
    exponents = factored_axes(shapes, options)
    multiply = partial(
        precondition, sides=inputs.sides, exponents=exponents, options=options
    )

    def whiten(name: str, block: jax.Array, axis: str) -> jax.Array:
        return multiply({name: block}, inputs.fields, left_out=axis, back=False)[name]

    step = begin(inputs, options, whiten if whitened else None)
    balance = (
        balance_of(step.factors, step.due_slots, inputs.sides, exponents, options)
        if whitened
        else {}
    )
    factors = balanced("factors", step.factors, balance)

    def recompute(derived: Derived, report: Report) -> tuple[Derived, Report]:
        return refresh_roots(
            factors,
            balanced_fields(derived, balance),
            report,
            usable=step.usable,
            sides=inputs.sides,
            exponents=exponents,
            correction=statistics_correction(
                options, statistics_count(options, inputs.count)
            ),
            options=options,
            turns=step.turns,
        )

    derived = refresh_if_due(step, recompute, ("roots", "bases", "eigenvalues"))
    directions, fields = finish(step, options, partial(multiply, derived=derived))
    return directions, unite(fields, derived, dict(factors=factors))


def scale_by_shampoo(
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.99,
    eps: ArrayLike = 0.0,
    *,
    relative_eps: ArrayLike | None = None,
    b3: ArrayLike | None = None,
    refresh_every: Period = 10,
    statistics_every: ArrayLike = 1,
    stagger: bool = False,
    start: ArrayLike | None = None,
    bias_correction: bool = True,
    drop_weighting: bool = False,
    exponents: Exponents | None = None,
    graft: Graft | None = "adam",
    graft_b2: ArrayLike | None = None,
    graft_eps: ArrayLike = 1e-8,
    graft_drop_weighting: bool = False,
    trace_scaling: ArrayLike = 0.0,
    root: Root = Eigh(),
    axes: Axes = Axes(),
    storage: Storage = Storage(),
    blocking: Blocking = Blocking(),
    metrics: bool = False,
    placement: Placement | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Preconditions gradients by Kronecker factors, as Distributed Shampoo does.

    Each parameter is merged and cut into blocks. For every axis k of a block
    with gradient :math:`G_t`, and :math:`G_{(k)}` its unfolding along k,

    .. math::
      L_k &\leftarrow b_2 L_k + w\, G_{(k)} G_{(k)}^\top \\
      R_k &= (L_k / c + \rho I)^{-e_k} \quad \text{at a refresh} \\
      \hat G &= (b_3 \tilde G + (1 - b_3)\, G_t) / (1 - b_3 b_1^{t-1}), \qquad
      \tilde G \leftarrow b_1 \tilde G + (1 - b_1)\, G_t \\
      P &= \hat G \times_1 R_1 \times_2 R_2 \cdots, \qquad
      P \leftarrow P\, \|P_{graft}\| / \|P\|

    with :math:`w = 1 - b_2` and :math:`c = 1 - b_2^t`, both 1 where :math:`b_2 = 1`,
    and the ridge :math:`\rho = \max(\varepsilon, \varepsilon_{rel}
    \lambda_{max}(L_k / c))`. For a matrix and the default exponents this is
    :math:`P \propto L^{-1/4} \hat G R^{-1/4}`. Refreshes are at the steps `start`
    and, after it, at the multiples of `refresh_every`; other steps do no root work.

    Where `refresh_every` is a schedule, step t, counted from 1, goes by the period
    `refresh_every(t - 1)`, rounded and at least 1, and `start` is the first one: with
    `optax.piecewise_constant_schedule(1, {100: 10})` each of 100 steps refreshes,
    and then every tenth. Take one that stays at each value for long. Apart from that,
    a basis that is still good may be kept at a refresh: `tolerance` of
    :class:`EighBasis` and :class:`QRBasis`, for SOAP and :class:`Eigendecomposed`.

    With `statistics_every` of n, factors change at the multiples of n alone, with
    :math:`c = 1 - b_2^{\lfloor t / n \rfloor}`, and other steps have no Gram products:
    an average then remembers n times as many steps. All other averages, the second
    moments of SOAP among them, go on at every step. Where n divides the period, every
    refresh has the statistics of its own step.

    With `stagger` a block has a phase p, and its turn at the steps t with t mod
    `refresh_every` = p, first in the period that ends with `start`; `start` is by
    default `refresh_every` + `statistics_every` - 1. No step then does much more
    than another, where no block does most of the work. Without grafting a block is
    preconditioned from its first turn on. Phases are dealt by cost, on each device
    among its own blocks: other devices or blocks mean other phases.

    The direction has the gradient's sign and no step size: chain it with
    `optax.scale_by_learning_rate`, or take :func:`shampoo`. Statistics are kept in
    float32, or float64 for float64 parameters; every product runs at the highest
    precision, but those that `root` lowers. Keep the transform out of `jax.vmap`: with
    a batched step count the refresh is done at every step.

    Guards: a block whose gradient has a NaN or Inf, or would overflow the factors,
    is left as it is at that step, with a direction of 0; a direction that is not
    finite is 0 too (`state.skipped` counts both). Averages miss such a step, or one
    without a gradient, while the step count goes on: without grafting, directions right
    after it are shorter.
    A new root that is not finite, or whose method has a large residual, is refused,
    and the old one stays (`state.failures` counts); so it does for a zero factor
    without `eps`. A gradient leaf that is `None` where
    `params` has an array is absent: its state stays as it is, and its update is
    `None` (:func:`fill_absent` makes it 0).

    Args:
      b1: decay rate of the filtered gradient, in [0, 1); 0 takes the gradient as it
        is and stores nothing. Default 0.9.
      b2: decay rate of the factors, in [0, 1]; 1 makes them sums, as AdaGrad does.
        Default 0.99.
      eps: ridge added to the eigenvalues of a factor, >= 0, in units of the squared
        gradient. Default 0.
      relative_eps: ridge in units of a factor's largest eigenvalue, >= 0; the larger
        ridge counts. Default `None`: 1e-6, or 1e-5 with an iteration
        (`CoupledNewton`, `HigherOrderNewton`, `NewtonDB`), 1e-2 with bfloat16 factors,
        0 with `PseudoInverse`.
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
        alone moves the parameters, or the plain gradient where there is none. Default
        `None`.
      bias_correction: whether factors and filtered gradient are divided by the sum of
        their weights. Adam's grafted moments always are. Default `True`.
      drop_weighting: whether new statistics enter with weight 1 in place of 1 - b2,
        without bias correction. Default `False`.
      exponents: overrides of e by the order of a block, `{order: e}` or
        `{order: {axis: e}}` with e >= 0; an axis with 0 has no factor and is left
        alone. Default `None`: 1 / (2 * order).
      graft: the method whose step size each block takes: `"adam"`, `"rmsprop"`,
        `"adagrad"`, `"sgd"`, or `None`. Default `"adam"`.
      graft_b2: decay rate of the grafted second moments, in [0, 1); `None` stands for
        `b2`. Default `None`.
      graft_eps: added to the root of the grafted second moments, >= 0. Default 1e-8.
      graft_drop_weighting: whether new second moments enter with weight 1 in place
        of 1 - graft_b2, without bias correction. Default `False`.
      trace_scaling: the a >= 0 of :math:`L_k / c` times :math:`\mathrm{tr}(L_k /
        c)^{-a}`, which takes its place in the root; the official package has 0.5
        where this is on. Default 0.
      root: how inverse roots are computed, an :class:`Eigh`, :class:`PseudoInverse`,
        :class:`CoupledNewton`, :class:`HigherOrderNewton`, :class:`NewtonDB` or
        :class:`Eigendecomposed`. Default `Eigh()`.
      axes: which axes have a factor, or a diagonal one, an :class:`Axes`. Default
        `Axes()`: all have a whole one.
      storage: in what form the state is kept, a :class:`Storage`. Default `Storage()`:
        float32 or wider.
      blocking: how parameters are merged and cut, a :class:`Blocking`. Default
        `Blocking()`.
      metrics: whether the state has metrics of every block, for :func:`diagnose`.
        Default `False`.
      placement: the devices that statistics, roots and work are divided over, a
        :class:`Placement`. Default `None`: all stay on one device.

    Returns:
      An `optax.GradientTransformationExtraArgs` whose state is a
      :class:`ScaleByShampooState`. Updates have the shapes and dtypes of the
      gradients.

    Raises:
      ValueError: if an argument has a value other than those above; in `init` or
        `update`, if a leaf is not a real floating-point array, or the gradients'
        paths or shapes are not those of the parameters.

    Examples:
      >>> import jax, jax.numpy as jnp, optax
      >>> import shampoo_optax as so
      >>> tx = optax.chain(
      ...     so.scale_by_shampoo(refresh_every=2), optax.scale_by_learning_rate(0.1)
      ... )
      >>> f = lambda w: jnp.sum(w**2)
      >>> w = jnp.array([[1.0, 2.0], [3.0, 4.0]])
      >>> state = tx.init(w)
      >>> for _ in range(5):
      ...     updates, state = tx.update(jax.grad(f)(w), state, w)
      ...     w = optax.apply_updates(w, updates)
      ...     print(f"{f(w):.2f}")
      28.04
      26.48
      24.92
      23.44
      21.88

    References:
      Shi et al., A Distributed Data-Parallel PyTorch Implementation of the
      Distributed Shampoo Optimizer, 2023, https://arxiv.org/abs/2309.06497.

      Gupta, Koren and Singer, Shampoo: Preconditioned Stochastic Tensor
      Optimization, 2018, https://arxiv.org/abs/1802.09568.

      Anil et al., Scalable Second Order Optimization for Deep Learning, 2020,
      https://arxiv.org/abs/2002.09018.

      Agarwal et al., Disentangling Adaptive Gradient Methods from Learning Rates,
      2020, https://arxiv.org/abs/2002.11803.
    """
    options = Options(
        b1=b1,
        b2=b2,
        eps=eps,
        relative_eps=relative_eps,
        b3=b3,
        refresh_every=refresh_every,
        statistics_every=statistics_every,
        stagger=stagger,
        start=start,
        bias_correction=bias_correction,
        drop_weighting=drop_weighting,
        exponents=exponents,
        graft=graft,
        graft_b2=graft_b2,
        graft_eps=graft_eps,
        graft_drop_weighting=graft_drop_weighting,
        trace_scaling=trace_scaling,
        root=root,
        axes=axes,
        storage=storage,
        blocking=blocking,
        metrics=metrics,
    )

    return shampoo_transform(options, placement)
