"""Inverse-free Shampoo: roots that follow the factors by matrix products alone."""

import functools
import math
from dataclasses import replace
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from shampoo_optax._checks import Graft, Period, check_choice, check_number, is_static
from shampoo_optax._config import Blocking, Options, Storage
from shampoo_optax._division import memory
from shampoo_optax._factors import apply_along, gram, squares_along
from shampoo_optax._periods import period_at
from shampoo_optax._placement import Placement
from shampoo_optax._stacks import (
    AxisStacks,
    Inputs,
    Stack,
    Stacks,
    contract,
    norms,
    per_slot,
)
from shampoo_optax._step import Step, begin, count_slots, finish, plain_fields
from shampoo_optax._storage import identities, is_diagonal
from shampoo_optax._transform import Method, block_transform
from shampoo_optax._trees import when_due

Structure = Literal["dense", "diagonal"]
Computed = Literal["float32", "bfloat16"]


class ScaleByInverseFreeShampooState(NamedTuple):
    """State of :func:`scale_by_inverse_free_shampoo`.

    Attributes:
      count: the number of steps taken, t.
      roots: the K of each axis, the identity before the first step.
      momenta: moving averages m of their velocities; empty where `root_momentum` is 0.
      graft_moments: second moments of the grafted method; empty without any.
      filtered: moving average of the gradient; empty where `b1` is 0.
      failures: how many new roots were refused, for each block.
      skipped: how many steps gave no finite direction, for each block.

    Examples:
      >>> import jax.numpy as jnp
      >>> import shampoo_optax as so
      >>> tx = so.scale_by_inverse_free_shampoo(batch_size=8.0)
      >>> state = tx.init({"w": jnp.zeros((4, 3))})
      >>> state.roots["4x3"]["1"].shape
      (1, 3, 3)
    """

    count: jax.Array  # [], int32
    roots: AxisStacks  # {stack: {axis: [n, d, d] or [n, d]}}, `dtype`
    momenta: AxisStacks  # {stack: {axis: [n, d, d] or [n, d]}}, `dtype`
    graft_moments: Stacks  # {stack: [n, *block]}, float32 or wider
    filtered: Stacks  # {stack: [n, *block]}, `dtype`
    failures: dict[str, jax.Array]  # {stack: [n]}, int32
    skipped: dict[str, jax.Array]  # {stack: [n]}, int32


def _fields(
    options: Options, structure: Structure, stacks: dict[str, Stack]
) -> dict[str, Any]:
    def ones(stack: Stack, axis: int) -> jax.Array:
        side, dtype = stack.block[axis], options.storage.roots
        if structure == "diagonal":
            return jnp.ones((stack.size, side), dtype or stack.dtype)
        return identities(stack, side, dtype, packed=False)

    roots = {
        name: {str(axis): ones(stack, axis) for axis in range(len(stack.block))}
        for name, stack in stacks.items()
        if stack.block
    }
    plain = plain_fields(stacks, options)
    return dict(
        plain,
        roots=roots,
        momenta={} if is_static(options.root_momentum, 0) else _zeros(roots),
        failures=_zeros({name: plain["skipped"][name] for name in roots}),
    )


def _zeros(tree: Any) -> Any:
    return jax.tree.map(jnp.zeros_like, tree)


# ---- one axis of a stack; a root is [n, d, d], or [n, d] where it is diagonal


def _multiply(
    root: jax.Array, blocks: jax.Array, axis: int, transpose: bool = False
) -> jax.Array:
    """Multiplies one axis of each block by its root, or the root's transpose."""
    flipped = transpose and not is_diagonal(root)
    return apply_along(root.mT if flipped else root, blocks, axis)


def _outer(root: jax.Array, blocks: jax.Array, axis: int) -> jax.Array:
    """The Gram matrix of one axis, as far as the root's structure goes."""
    return (squares_along if is_diagonal(root) else gram)(blocks, axis)


def _inner(root: jax.Array) -> jax.Array:
    """The product of the root's transpose and the root."""
    return jnp.square(root) if is_diagonal(root) else gram(root, 1)


def _compose(root: jax.Array, velocity: jax.Array) -> jax.Array:
    if is_diagonal(root):
        return root * velocity
    return contract(root, velocity, "nij,njk->nik")


class _Axis(NamedTuple):
    """An axis of a stack, without its padding."""

    side: jax.Array  # [n]
    inside: jax.Array  # broadcasts with a root: 1 in its rows, 0 in padded ones
    identity: jax.Array  # broadcasts with a root


def _axes_of(inputs: Inputs, name: str, roots: dict[str, jax.Array]) -> dict:
    """What the padding leaves of each axis of a stack."""
    dtype, known = inputs.blocks[name].dtype, inputs.sides.get(name, {})

    def look(axis: str, root: jax.Array) -> _Axis:
        size, length = root.shape[:2]
        side = jnp.asarray(known.get(axis, jnp.full(size, length)))
        inside = (jnp.arange(length)[None] < side[:, None]).astype(dtype)
        side = jnp.maximum(side, 1).astype(dtype)
        if is_diagonal(root):
            return _Axis(side, inside, inside)
        inside = inside[:, :, None]
        return _Axis(side, inside, inside * jnp.eye(length, dtype=dtype)[None])

    return {axis: look(axis, root) for axis, root in roots.items()}


def _mean_square(root: jax.Array, axis: _Axis) -> jax.Array:
    """The trace of the root's square over its side, `[n]`."""
    squares = axis.inside * jnp.square(root.astype(axis.side.dtype))
    return jnp.sum(squares, axis=tuple(range(1, root.ndim))) / axis.side


def _velocities(
    roots: dict[str, jax.Array],
    axes: dict[str, _Axis],
    blocks: jax.Array,
    options: Options,
) -> dict[str, jax.Array]:
    """The H / 2 of each axis of a stack, in the dtype of its blocks."""
    wide = blocks.dtype
    rotated = blocks * jnp.sqrt(jnp.asarray(options.batch_size, wide))
    for axis, root in roots.items():
        rotated = _multiply(root, rotated.astype(root.dtype), int(axis), True)
    means = {axis: _mean_square(root, axes[axis]) for axis, root in roots.items()}
    entries = math.prod(axis.side for axis in axes.values())
    damping = jnp.asarray(options.eps, wide) * math.prod(means.values())

    def velocity(axis: str, root: jax.Array) -> jax.Array:
        side, inside, identity = axes[axis]
        outer = _outer(root, rotated, int(axis)).astype(wide)
        inner = _inner(root).astype(wide) * inside
        seen = per_slot(side / entries, outer) * outer
        damped = per_slot(damping / means[axis], inner) * inner
        return (seen + damped - identity) / 2

    return {axis: velocity(axis, root) for axis, root in roots.items()}


def _move(
    root: jax.Array, momentum: jax.Array | None, velocity: jax.Array, options: Options
) -> tuple[jax.Array, jax.Array]:
    """The new root and momentum."""
    wide = velocity.dtype
    if momentum is not None:
        old = jnp.asarray(options.root_momentum, wide)
        velocity = old * momentum.astype(wide) + (1 - old) * velocity
    rate = jnp.asarray(1 - options.b2, wide) / jnp.maximum(norms(velocity), 1)
    momentum = velocity.astype(root.dtype)
    change = _compose(root, momentum).astype(wide)
    moved = root.astype(wide) - per_slot(rate, change) * change
    return moved.astype(root.dtype), momentum


def _all_finite(arrays: list[jax.Array]) -> jax.Array:
    """The slots in which all arrays are finite, `[n]`."""
    found = [jnp.all(jnp.isfinite(x), axis=tuple(range(1, x.ndim))) for x in arrays]
    return functools.reduce(jnp.logical_and, found)


def _refresh(
    step: Step,
    options: Options,
    held: AxisStacks,
    held_momenta: AxisStacks,
    failed: dict[str, jax.Array],
) -> tuple[AxisStacks, AxisStacks, dict[str, jax.Array]]:
    """Moves all roots by one step; refuses those of a block with one not finite.

    Returns:
      the roots, the momenta, and which slots failed.
    """
    roots, momenta, failed = {}, {}, dict(failed)
    for name, old in held.items():
        axes = _axes_of(step.inputs, name, old)
        velocities = _velocities(old, axes, step.blocks[name], options)
        before = held_momenta.get(name, {})
        moved = {
            axis: _move(root, before.get(axis), velocities[axis], options)
            for axis, root in old.items()
        }
        finite = _all_finite(jax.tree.leaves(moved))
        good = step.usable[name] & finite
        failed[name] = step.usable[name] & ~finite

        def take(new: jax.Array, old: jax.Array, good: jax.Array = good) -> jax.Array:
            return jnp.where(per_slot(good, old), new, old)

        roots[name] = {axis: take(moved[axis][0], root) for axis, root in old.items()}
        momenta[name] = {axis: take(moved[axis][1], m) for axis, m in before.items()}
    return roots, {n: axes for n, axes in momenta.items() if axes}, failed


def _precondition(roots: AxisStacks, used: Stacks) -> Stacks:
    """Multiplies every axis by its root's transpose, and then by its root."""

    def apply(blocks: jax.Array, of_axes: dict[str, jax.Array]) -> jax.Array:
        wide = blocks.dtype
        for axis, root in of_axes.items():
            for transpose in (True, False):
                blocks = _multiply(
                    root, blocks.astype(root.dtype), int(axis), transpose
                )
        return blocks.astype(wide)

    return {name: apply(blocks, roots.get(name, {})) for name, blocks in used.items()}


def _step(options: Options, inputs: Inputs) -> tuple[Stacks, dict[str, Any]]:
    options = replace(options, **inputs.numbers)
    held, step = inputs.fields, begin(inputs, options)
    every = period_at(options, inputs.count)
    due = is_static(options.refresh_every, 1) or (inputs.count - 1) % every == 0
    step = step._replace(started=inputs.count >= 1)
    roots, momenta, failed = when_due(
        due,
        functools.partial(_refresh, step, options),
        held["roots"],
        held["momenta"],
        {name: jnp.zeros_like(step.usable[name]) for name in held["failures"]},
    )
    failures = count_slots(held["failures"], failed, step.groups)
    directions, fields = finish(step, options, functools.partial(_precondition, roots))
    return directions, dict(fields, roots=roots, momenta=momenta, failures=failures)


def scale_by_inverse_free_shampoo(
    b1: ArrayLike = 0.0,
    b2: ArrayLike = 0.8,
    eps: ArrayLike = 1e-4,
    *,
    root_momentum: ArrayLike = 0.5,
    batch_size: ArrayLike = 128,
    b3: ArrayLike | None = None,
    refresh_every: Period = 1,
    bias_correction: bool = True,
    graft: Graft | None = None,
    graft_b2: ArrayLike = 0.99,
    graft_eps: ArrayLike = 1e-8,
    structure: Structure = "dense",
    dtype: Computed | None = None,
    blocking: Blocking = Blocking(),
    placement: Placement | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Shampoo without roots of matrices or inverses: matrix products alone.

    Each axis k of a block with gradient G, of order N and with sides
    :math:`d_1 \dots d_N` whose product is D, has a root :math:`K_k` such that
    :math:`K_k K_k^\top` follows the inverse of a factor:

    .. math::
      X &= \sqrt B\, G \times_1 K_1^\top \times_2 K_2^\top \cdots \\
      H_k &= \frac{d_k}{D} X_{(k)} X_{(k)}^\top + \varepsilon
        \Bigl(\prod_{j \ne k} \frac{\mathrm{tr}\, K_j^\top K_j}{d_j}\Bigr)
        K_k^\top K_k - I \\
      m_k &\leftarrow a\, m_k + (1 - a)\, H_k / 2 \\
      K_k &\leftarrow K_k \Bigl(I - \frac{1 - b_2}{\max(1, \|m_k\|)} m_k\Bigr) \\
      P &= \hat G \times_1 K_1 K_1^\top \times_2 K_2 K_2^\top \cdots

    from :math:`K_k = I` and :math:`m_k = 0`, with B the `batch_size`, a the
    `root_momentum` and the filtered gradient :math:`\hat G` of
    :func:`scale_by_shampoo`. For a matrix it is :math:`P = C C^\top \hat G K K^\top`;
    a vector has one root, a block of order 3 has three, and a scalar without any axis
    (`merge_to=None`) has none. The bracket is the matrix exponential of
    :math:`-(1 - b_2) m_k` up to the first order; the norm keeps it invertible. Up to
    that order :math:`K_k` follows a moving average of the factors with decay
    :math:`b_2`. With the diagonal structure only the diagonals of :math:`K_k`,
    :math:`m_k` and :math:`H_k` are there. Roots move at the steps 1,
    1 + `refresh_every` and so on, before they are used.

    No square root of the statistics is taken: directions are in units of the inverse
    gradient, as those of Newton's method, and their size depends on `batch_size`.
    Tune the learning rate first (1e-3 to 4e-3 with a momentum of 0.9), then
    `eps` from 1e-5 to 1e-3 and `b2` from 0.2 to 0.95. The first steps are small where
    gradients are: roots start from 1 and grow from step to step. With `graft` the
    size is that of another method.

    With `dtype="bfloat16"` roots, their momenta and the filtered gradient are kept
    in it, and all matrix products take and give it; what is done entry by entry, as
    the second moments of `graft`, stays in float32. A root in bfloat16 does not move
    by less than 2^-9 of itself: keep `1 - b2` above a tenth for large blocks. Products
    in float32 run at the highest precision.

    Guards and absent gradients are those of :func:`scale_by_shampoo`
    (`state.skipped`). Where the new roots of a block would not all be finite, the old
    ones stay (`state.failures`).

    Args:
      b1: decay rate of the filtered gradient, in [0, 1); 0 takes the gradient as it
        is and stores nothing. Default 0.
      b2: decay rate of the factors that the roots follow, in (0, 1]. Default 0.8.
      eps: damping, > 0, in units of the squared gradient times `batch_size`. Default
        1e-4.
      root_momentum: decay rate of the velocities of the roots, in [0, 1); 0 stores
        none. Default 0.5.
      batch_size: the number of examples of which the gradient is the mean, > 0; their
        squared gradients are taken to be that much larger. Default 128.
      b3: weight of the old average in the gradient used now, in [0, 1); `None` stands
        for `b1`. Default `None`.
      refresh_every: steps from one move of the roots to the next, an integer >= 1, or a
        schedule that maps the number of steps taken to one, which
        `optax.inject_hyperparams` needs in its `static_args`. Default 1.
      bias_correction: whether the filtered gradient is divided by the sum of its
        weights. Default `True`.
      graft: the method whose step size each block takes: `"adam"`, `"rmsprop"`,
        `"adagrad"`, `"sgd"`, or `None`. Default `None`.
      graft_b2: decay rate of the grafted second moments, in [0, 1). Default 0.99.
      graft_eps: added to the root of the grafted second moments, >= 0. Default 1e-8.
      structure: of the roots, `"dense"` or `"diagonal"`. Default `"dense"`.
      dtype: `"float32"` or `"bfloat16"`, in which roots, momenta and the filtered
        gradient are kept and matrix products are computed. Default `None`: float32,
        or float64 for float64 parameters.
      blocking: how parameters are merged and cut, a :class:`Blocking`. Default
        `Blocking()`.
      placement: the devices that roots and work are divided over, a
        :class:`Placement`. Default `None`: all stay on one device.

    Returns:
      An `optax.GradientTransformationExtraArgs` whose state is a
      :class:`ScaleByInverseFreeShampooState`. Updates have the shapes and dtypes of
      the gradients.

    Raises:
      ValueError: if an argument has a value other than those above; in `init` or
        `update`, if a leaf is not a real floating-point array, or the gradients'
        paths or shapes are not those of the parameters.

    Examples:
      >>> import jax, jax.numpy as jnp, optax
      >>> import shampoo_optax as so
      >>> tx = optax.chain(
      ...     so.scale_by_inverse_free_shampoo(batch_size=1),
      ...     optax.scale_by_learning_rate(0.1),
      ... )
      >>> f = lambda w: jnp.sum(w**2)
      >>> w = jnp.array([[1.0, 2.0], [3.0, 4.0]])
      >>> state = tx.init(w)
      >>> for _ in range(5):
      ...     updates, state = tx.update(jax.grad(f)(w), state, w)
      ...     w = optax.apply_updates(w, updates)
      ...     print(f"{f(w):.2f}")
      25.26
      23.57
      22.90
      22.63
      22.51

    References:
      Lin et al., Can We Remove the Square-Root in Adaptive Gradient Methods? A
      Second-Order Perspective, 2024, https://arxiv.org/abs/2402.03496.

      Lin et al., Structured Inverse-Free Natural Gradient: Memory-Efficient &
      Numerically-Stable KFAC, 2023, https://arxiv.org/abs/2312.05705.
    """
    check_choice("structure", structure, get_args(Structure))
    check_choice("dtype", dtype, (None, *get_args(Computed)))
    check_number("b2", b2, high=1.0, positive=True)
    check_number("eps", eps, positive=True)
    options = Options(
        b1=b1,
        b2=b2,
        b3=b3,
        eps=eps,
        refresh_every=refresh_every,
        start=None,
        bias_correction=bias_correction,
        graft=graft,
        graft_b2=graft_b2,
        graft_eps=graft_eps,
        graft_drop_weighting=False,
        blocking=blocking,
        batch_size=batch_size,
        root_momentum=root_momentum,
        storage=Storage(roots=dtype, momentum=dtype),
    )
    method = Method(
        ScaleByInverseFreeShampooState,
        functools.partial(_fields, options, structure),
        functools.partial(_step, options),
        memory if structure == "dense" else math.prod,
    )
    return block_transform(method, options, placement)
