"""Sign descent: the signs of the filtered gradient."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from shampoo_optax._checks import Graft, check_integer, check_number
from shampoo_optax._config import Blocking, Options
from shampoo_optax._placement import Placement
from shampoo_optax._polar import check_scale, signs_of_scales
from shampoo_optax._stacks import Inputs, Stack, Stacks, per_slot
from shampoo_optax._step import begin, finish, plain_fields
from shampoo_optax._transform import Method, block_transform

NamedScale = Literal["l1", "mean"]
SignScale = NamedScale | Callable[[jax.Array], ArrayLike]


class ScaleBySignDescentState(NamedTuple):
    """State of :func:`scale_by_sign_descent`.

    Attributes:
      count: the number of steps taken, t.
      graft_moments: second moments of the grafted method; empty without any.
      filtered: moving average of the gradient; empty where `b1` is 0.
      skipped: how many steps gave no finite direction, for each block.

    Examples:
      >>> import jax.numpy as jnp
      >>> import shampoo_optax as so
      >>> tx = so.scale_by_sign_descent()
      >>> state = tx.init({"w": jnp.zeros((4, 3))})
      >>> state.filtered["4x3"].shape
      (1, 4, 3)
    """

    count: jax.Array  # [], int32
    graft_moments: Stacks  # {stack: [n, *block]}, float32 or wider
    filtered: Stacks  # {stack: [n, *block]}, float32 or wider
    skipped: dict[str, jax.Array]  # {stack: [n]}, int32


def _sums(blocks: jax.Array) -> jax.Array:
    return jnp.sum(jnp.abs(blocks), axis=tuple(range(1, blocks.ndim)))


def _entries(inputs: Inputs, name: str) -> jax.Array:
    """The numbers of entries of a stack's blocks before padding, `[n]`."""
    block = inputs.blocks[name]
    known = inputs.sides.get(name, {})
    entries = jnp.ones(len(block), block.dtype)
    for axis, side in enumerate(block.shape[1:]):
        entries *= jnp.asarray(known.get(str(axis), side), block.dtype)
    return entries


def _scales(
    inputs: Inputs, name: str, blocks: jax.Array, scale: SignScale
) -> jax.Array:
    """What the signs of each block are multiplied by, `[n]`."""
    if scale == "l1":
        return _sums(blocks)
    if scale == "mean":
        return _sums(blocks) / _entries(inputs, name)
    return jnp.asarray(jax.vmap(scale)(blocks), blocks.dtype)


def _step(
    options: Options, scale: SignScale | None, inputs: Inputs
) -> tuple[Stacks, dict[str, Any]]:
    def one(name: str, blocks: jax.Array) -> jax.Array:
        signs = jnp.sign(blocks)
        if scale is None:
            return signs
        scales = _scales(inputs, name, blocks, scale)
        if options.graft is not None:
            scales = signs_of_scales(scales)
        return per_slot(scales, blocks) * signs

    def direct(used: Stacks) -> Stacks:
        return {name: one(name, blocks) for name, blocks in used.items()}

    options = replace(options, **inputs.numbers)
    return finish(begin(inputs, options), options, direct)


def _check_scale(scale: Any) -> None:
    names = get_args(NamedScale)
    if callable(scale):
        check_scale(scale, jax.ShapeDtypeStruct((3, 2), jnp.float32))
    elif scale is not None and not (isinstance(scale, str) and scale in names):
        listed = ", ".join(map(repr, names))
        raise ValueError(
            f"`scale` must be {listed}, None or a function of a block, got {scale!r}."
        )


def scale_by_sign_descent(
    b1: ArrayLike = 0.9,
    *,
    b3: ArrayLike | None = None,
    scale: SignScale | None = None,
    start: ArrayLike = 1,
    bias_correction: bool = True,
    graft: Graft | None = None,
    graft_b2: ArrayLike = 0.99,
    graft_eps: ArrayLike = 1e-8,
    graft_drop_weighting: bool = False,
    blocking: Blocking = Blocking(),
    placement: Placement | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Takes the signs of the filtered gradient.

    For each block, with the filtered gradient :math:`\hat G` of
    :func:`scale_by_shampoo`,

    .. math::
      P = s(\hat G)\, \mathrm{sign}(\hat G), \qquad
      P \leftarrow P\, \|P_{graft}\| / (\|P\| + 10^{-16})

    with the second step only where `graft` says so; there the sign of s counts alone.
    The sign of 0 is 0. With
    `b1=0.99, b3=0.9` it is Lion; with `scale="l1"` steepest descent in the largest
    absolute entry of a block. No factors are kept; blocks may have any number of axes.

    Precision, guards and absent gradients are those of :func:`scale_by_shampoo`.

    Args:
      b1: decay rate of the filtered gradient, in [0, 1); 0 takes the gradient as it
        is and stores nothing. Default 0.9.
      b3: weight of the old average in the gradient used now, in [0, 1); `None`
        stands for `b1`. Default `None`.
      scale: what the signs of a block are multiplied by: `"l1"`, the sum of the
        absolute entries of its filtered gradient, `"mean"`, their mean, or a function
        that maps this gradient, an array of the block's shape, to a number. It is
        tried on a shape [3, 2] at once, and on those of all blocks in `init`. With a
        `placement` a block may have zeros behind and its axes in another order: the
        function must not depend on them. Default `None`: 1.
      start: the first step that is not left to the grafted method alone, an integer
        >= 1; without effect where there is none. Default 1.
      bias_correction: whether the filtered gradient is divided by the sum of its
        weights, which is felt through `scale` and grafting alone. Adam's grafted
        moments always are. Default `True`.
      graft: the method whose step size each block takes: `"adam"`, `"rmsprop"`,
        `"adagrad"`, `"sgd"`, or `None`. Default `None`.
      graft_b2: decay rate of the grafted second moments, in [0, 1). Default 0.99.
      graft_eps: added to the root of the grafted second moments, >= 0. Default 1e-8.
      graft_drop_weighting: whether new second moments enter with weight 1 in place
        of 1 - graft_b2, without bias correction. Default `False`.
      blocking: how parameters are merged and cut, a :class:`Blocking`. Default
        `Blocking()`.
      placement: the devices that averages and work are divided over, a
        :class:`Placement`. Default `None`: all stay on one device.

    Returns:
      An `optax.GradientTransformationExtraArgs` whose state is a
      :class:`ScaleBySignDescentState`. Updates have the shapes and dtypes of the
      gradients.

    Raises:
      ValueError: if an argument has a value other than those above; in `init` or
        `update`, if `scale` does not give a number for a block, a leaf is not a real
        floating-point array, or the gradients' paths or shapes are not those of the
        parameters.

    Examples:
      >>> import jax, jax.numpy as jnp, optax
      >>> import shampoo_optax as so
      >>> tx = optax.chain(
      ...     so.scale_by_sign_descent(), optax.scale_by_learning_rate(0.1)
      ... )
      >>> f = lambda w: jnp.sum(w**2)
      >>> w = jnp.array([[1.0, 2.0], [3.0, 4.0]])
      >>> state = tx.init(w)
      >>> for _ in range(5):
      ...     updates, state = tx.update(jax.grad(f)(w), state, w)
      ...     w = optax.apply_updates(w, updates)
      ...     print(f"{f(w):.2f}")
      28.04
      26.16
      24.36
      22.64
      21.00

    References:
      Bernstein et al., signSGD: Compressed Optimisation for Non-Convex Problems,
      2018, https://arxiv.org/abs/1802.04434.

      Chen et al., Symbolic Discovery of Optimization Algorithms, 2023,
      https://arxiv.org/abs/2302.06675.
    """
    _check_scale(scale)
    check_integer("start", start)
    check_number("graft_b2", graft_b2, high=1.0)
    options = Options(
        b1=b1,
        b3=b3,
        start=start,
        bias_correction=bias_correction,
        graft=graft,
        graft_b2=graft_b2,
        graft_eps=graft_eps,
        graft_drop_weighting=graft_drop_weighting,
        blocking=blocking,
    )

    def init_fields(stacks: dict[str, Stack]) -> dict[str, Any]:
        for stack in stacks.values() if callable(scale) else ():
            check_scale(scale, jax.ShapeDtypeStruct(stack.block, stack.dtype))
        return plain_fields(stacks, options)

    method = Method(
        ScaleBySignDescentState, init_fields, partial(_step, options, scale)
    )
    return block_transform(method, options, placement)
