"""What a state says of a run's health, parameter by parameter."""

import operator
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from shampoo_optax._checks import check_integer, check_number
from shampoo_optax._layouts import layouts_of
from shampoo_optax._slots import Slots, slots_of
from shampoo_optax._tables import aligned
from shampoo_optax._transform import Layout

# What is measured of a parameter, in the order of the columns.
MEASURES = (
    "condition",
    "residual",
    "age",
    "failures",
    "skipped",
    "grafting",
    "rms",
    "cosine",
)

# The fields that all states have, or those with factors.
_COUNTED = ("residuals", "failures", "skipped")


class Health(NamedTuple):
    """What is known of one parameter; a measure is `None` where it is not known."""

    transform: str  # "shampoo", "soap", …; numbered where there are several of a kind
    path: str  # "layers/0/kernel"
    step: int  # steps taken
    blocks: int
    condition: float | None  # the largest of a factor
    residual: float | None  # the largest of a root
    age: int | None  # most steps since the last refresh without a failure
    failures: int | None  # most roots refused
    skipped: int  # most steps without a finite direction
    grafting: float | None  # the ratio furthest from 1
    rms: float | None  # the largest
    cosine: float | None  # the smallest
    remarks: tuple[str, ...]  # what is suspicious


@dataclass(frozen=True)
class Diagnosis:
    """What :func:`diagnose` finds; printed, one aligned table for each transform.

    Counts that are 0 everywhere are not printed.

    Attributes:
      rows: one for each parameter of each transform, with `transform`, `path`, `step`,
        `blocks`, the measures of its worst block, and `remarks`.

    Examples:
      >>> import jax.numpy as jnp
      >>> import shampoo_optax as so
      >>> params = {"w": jnp.zeros((4, 3))}
      >>> tx = so.scale_by_shampoo(metrics=True)
      >>> (row,) = so.diagnose(tx.init(params), params, tx).rows
      >>> row.path, row.blocks
      ('w', 1)
    """

    rows: tuple[Health, ...]

    @property
    def suspicious(self) -> tuple[Health, ...]:
        """The rows with remarks."""
        return tuple(row for row in self.rows if row.remarks)

    def scalars(self) -> dict[str, float]:
        """All known measures as `{"shampoo/layers/0/kernel/condition": number}`."""
        return {
            f"{row.transform}/{row.path}/{name}": float(getattr(row, name))
            for row in self.rows
            for name in MEASURES
            if getattr(row, name) is not None
        }

    def __str__(self) -> str:
        groups = {}
        for row in self.rows:
            groups.setdefault(row.transform, []).append(row)
        return "\n\n".join(_table(name, rows) for name, rows in groups.items())


class _Limits(NamedTuple):
    """What is suspicious beyond."""

    condition: float
    residual: float
    age: int | None
    cosine: float


class _Found(NamedTuple):
    """The small arrays of one of our states, on the host."""

    step: int
    arrays: dict[str, dict[str, np.ndarray]]  # {name: {stack: [n]}}


def diagnose(
    state: optax.OptState,
    params: optax.Params,
    tx: optax.GradientTransformation,
    *,
    max_condition: float = 1e6,
    max_residual: float = 1e-2,
    max_age: int | None = None,
    min_cosine: float = 1e-2,
    mesh: Mesh | None = None,
) -> Diagnosis:
    r"""Says how healthy a run is, parameter by parameter, and what is suspicious.

    Counters and residuals are in every state; all the rest takes a transform made with
    `metrics=True`. Of a parameter's blocks the worst counts, for each measure by
    itself:

    - `condition`, :math:`\lambda_{max} / \lambda_{min}` of the factors whose roots or
      bases are in use, up to 1 / machine epsilon (8.4e6 in float32). Bases by
      iterations have estimates of the eigenvalues; iterations for roots have none, and
      estimate the number of the factor with its ridge;
    - `residual` of the roots at the last refresh, as their method defines it;
    - `age`: steps since the last refresh without a failure; since step 0 where the
      state was without metrics until now;
    - `failures`: how many new roots or bases were refused; `skipped`: how many steps
      had no finite direction;
    - `grafting`: :math:`\|P_{graft}\| / \|P\|` at the last step, :math:`P` being the
      preconditioned gradient, where there is grafting;
    - `rms`: :math:`\|U\| / \sqrt{n}` of the direction U of the last step, before any
      learning rate;
    - `cosine`: :math:`\langle U, G \rangle / (\|U\| \|G\|)` with the gradient of the
      last step. The direction is the gradient's own, before its sign is turned:
      healthy ones have a positive cosine.

    Only these numbers are read, one for each block, and no factor. A state of several
    processes is read by all of them together.

    Args:
      state: the state of `tx`, outside of `jax.jit`.
      params: the parameters, arrays or `jax.ShapeDtypeStruct`s of any shapes.
      tx: the transform, with ours anywhere inside.
      max_condition: condition numbers above are suspicious, > 0. Default 1e6, from
        where on the default ridge decides. A factor that has seen fewer gradients than
        it has rows, such as that of a long bias, is above it without harm.
      max_residual: residuals above are suspicious, > 0. Default 1e-2.
      max_age: ages above are suspicious, an integer >= 1. Default `None`: those of
        blocks that have missed the last refresh of their transform, or their turn.
      min_cosine: cosines below are suspicious, a number from -1 to 1. Default 1e-2.
      mesh: as in :func:`state_shardings`. Default `None`.

    Returns:
      A :class:`Diagnosis`: `rows`, those that are `suspicious`, `scalars()` for a
      log, and a table when printed.

    Raises:
      ValueError: if `state` is not that of `tx` and `params`, `tx` holds no transform
        that works on blocks, or a limit has another value than those above.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> import shampoo_optax as so
      >>> tx = so.soap(0.1, refresh_every=2, metrics=True)
      >>> params = {"w": jnp.array([[1.0, 2.0], [3.0, 4.0]]), "dead": jnp.ones(3)}
      >>> state = tx.init(params)
      >>> for _ in range(5):
      ...     grads = {"w": 2 * params["w"], "dead": jnp.zeros(3)}
      ...     updates, state = tx.update(grads, state, params)
      >>> diagnosis = so.diagnose(state, params, tx)
      >>> print(diagnosis)
      soap: step 5, parameters 2, suspicious 1
      <BLANKLINE>
      parameter  blocks  condition  residual  age    rms  cosine  remarks
      dead            1          -         0    5      0       -  no refresh, still
      w               1        223       ...    1  0.621   0.879
      >>> [(row.path, row.remarks) for row in diagnosis.suspicious]
      [('dead', ('no refresh', 'still'))]

      For TensorBoard, or any writer that has an `add_scalar`:

      >>> class Writer:
      ...     def add_scalar(self, tag, value, step):
      ...         print(tag, f"{value:.3g}", step)
      >>> for tag, value in diagnosis.scalars().items():
      ...     if tag.endswith(("age", "skipped")):
      ...         Writer().add_scalar(tag, value, diagnosis.rows[0].step)
      soap/dead/age 5 5
      soap/dead/skipped 0 5
      soap/w/age 1 5
      soap/w/skipped 0 5
    """
    check_number("max_condition", max_condition, positive=True)
    check_number("max_residual", max_residual, positive=True)
    check_number("min_cosine", min_cosine, low=-1.0, high=1.0)
    if max_age is not None:
        check_integer("max_age", max_age)
    limits = _Limits(max_condition, max_residual, max_age, min_cosine)
    names = simple_paths(params)
    rows = []
    for transform, layout, held in states_of(state, params, tx, mesh):
        found = _read(held)
        newest, turns = _newest(found), layout.method.turns
        for path, slots in slots_of(layout).items():
            row = _row(found, transform, names.get(path, path), slots)
            rows.append(
                row._replace(remarks=tuple(_remarks(row, newest, turns, limits)))
            )
    return Diagnosis(tuple(rows))


def simple_paths(params: optax.Params) -> dict[str, str]:
    """The paths of parameters as in `"layers/0/kernel"`, by those of layouts."""
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    return {
        jax.tree_util.keystr(path): jax.tree_util.keystr(
            path, simple=True, separator="/"
        )
        for path in paths
    }


def states_of(
    state: optax.OptState,
    params: optax.Params,
    tx: optax.GradientTransformation,
    mesh: Mesh | None,
) -> list[tuple[str, Layout, Any]]:
    """The name, layout and state of each of our transforms in a state."""
    if mesh is not None and not isinstance(mesh, Mesh):
        raise ValueError(f"`mesh` must be a jax.sharding.Mesh, got {mesh!r}.")
    tree, found = layouts_of(tx, params, mesh or 0), []

    def visit(node: Any, held: Any) -> None:
        if isinstance(node, Layout):
            _check(node, held)
            found.append((node, held))

    names = name_layouts(all_layouts(tx, tree))
    try:
        jax.tree.map(visit, tree, state, is_leaf=_is_layout)
    except (TypeError, ValueError) as error:
        raise _other_state(state) from error
    return [(name, *pair) for name, pair in zip(names, found, strict=True)]


def all_layouts(tx: optax.GradientTransformation, tree: Any) -> list[Layout]:
    """The layouts in a tree, of which there must be some."""
    layouts = list(filter(_is_layout, jax.tree.leaves(tree, is_leaf=_is_layout)))
    if not layouts:
        raise ValueError(
            "`tx` must hold a transform that works on blocks, such as "
            f"scale_by_shampoo or scale_by_soap, at some depth, got {tx!r}."
        )
    return layouts


def _is_layout(node: Any) -> bool:
    return isinstance(node, Layout)


def _check(layout: Layout, held: Any) -> None:
    """Refuses a state of another transform, or of other blocks."""
    wanted = layout.abstract()
    kinds = (jax.tree.structure(x) for x in (held, wanted))
    shapes = (list(map(np.shape, jax.tree.leaves(x))) for x in (held, wanted))
    if not (operator.eq(*kinds) and operator.eq(*shapes)):
        raise _other_state(held)


def _other_state(state: Any) -> ValueError:
    kind = type(state).__name__
    return ValueError(
        "`state` must be the state of `tx` (with its placement) and of `params`, got "
        f"another {kind}."
    )


def name_layouts(layouts: list[Layout]) -> list[str]:
    """The names of transforms, with a number where there are several of a kind."""
    kinds = list(map(_kind, layouts))
    numbers = (kinds[: place + 1].count(kind) for place, kind in enumerate(kinds))
    return [
        f"{kind}-{number}" if kinds.count(kind) > 1 else kind
        for kind, number in zip(kinds, numbers, strict=True)
    ]


def _kind(layout: Layout) -> str:
    """The transform's name: "inverse_free_shampoo" of `ScaleByInverseFree…State`."""
    name = layout.method.state.__name__.removeprefix("ScaleBy").removesuffix("State")
    return re.sub(r"(?<=.)(?=[A-Z])", "_", name).lower()


def _read(held: Any) -> _Found:
    """The small arrays of a state, on the host."""
    arrays = {name: _by_stack(getattr(held, name, {})) for name in _COUNTED}
    metrics = getattr(held, "metrics", {})
    for name, stacks in metrics.items() if isinstance(metrics, dict) else ():
        arrays[name] = _by_stack(stacks)
    for name in arrays.keys() & {"cosines", "grafting"}:  # of blocks that have moved
        arrays[name] = {
            stack: np.where(arrays["rms"][stack] > 0, values, np.nan)
            for stack, values in arrays[name].items()
        }
    return _Found(int(_on_host(held.count)), arrays)


def _by_stack(stacks: Any) -> dict[str, np.ndarray]:
    """Of the axes of a stack the largest number; of a tree without blocks nothing."""
    if not isinstance(stacks, dict):
        return {}
    return {
        name: np.max([_on_host(x) for x in jax.tree.leaves(held)], axis=0)
        for name, held in stacks.items()
    }


def _on_host(array: jax.Array) -> np.ndarray:
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        return np.asarray(multihost_utils.process_allgather(array, tiled=True))
    return np.asarray(array)


def _newest(found: _Found) -> int:
    """The step of the last refresh of any block."""
    steps = found.arrays.get("refreshed", {}).values()
    return max((int(np.max(step)) for step in steps), default=0)


def _row(found: _Found, transform: str, path: str, slots: tuple[Slots, ...]) -> Health:
    def worst(name: str, pick: Callable = np.max) -> float | None:
        stacks = found.arrays.get(name, {})
        parts = [stacks[s.stack][s.start : s.stop] for s in slots if s.stack in stacks]
        values = np.concatenate(parts) if parts else np.zeros(0)
        values = values[~np.isnan(values)]
        return pick(values).item() if values.size else None

    def of_step(name: str, pick: Callable = np.max) -> float | None:
        return worst(name, pick) if found.step else None

    refreshed = worst("refreshed", np.min)
    return Health(
        transform,
        path,
        found.step,
        sum(s.stop - s.start for s in slots),
        condition=worst("conditions") or None,
        residual=worst("residuals"),
        age=None if refreshed is None else found.step - refreshed,
        failures=worst("failures"),
        skipped=worst("skipped"),
        grafting=of_step("grafting", _furthest),
        rms=of_step("rms"),
        cosine=of_step("cosines", np.min),
        remarks=(),
    )


def _furthest(ratios: np.ndarray) -> np.ndarray:
    """The ratio that is furthest from 1."""
    return ratios[np.argmax(np.abs(np.log(np.maximum(ratios, 1e-30))))]


def _remarks(row: Health, newest: int, turns: int, limits: _Limits) -> Iterator[str]:
    missed = row.step - newest + turns - 1
    oldest = missed if limits.age is None else limits.age
    never = newest >= turns and row.age == row.step
    still = row.rms == 0
    found = {
        "ill-conditioned": _above(row.condition, limits.condition),
        "large residual": _above(row.residual, limits.residual),
        f"refused {row.failures}": _above(row.failures, 0),
        f"skipped {row.skipped}": _above(row.skipped, 0),
        "no refresh": never,
        "stale": _above(row.age, oldest) and not never,
        "still": still,
        "not along the gradient": _above(limits.cosine, row.cosine) and not still,
    }
    return (remark for remark, holds in found.items() if holds)


def _above(value: float | None, limit: float | None) -> bool:
    return value is not None and limit is not None and value > limit


def _table(name: str, rows: list[Health]) -> str:
    shown = [name for name in MEASURES if _is_shown(name, rows)]
    lines = [
        [row.path, str(row.blocks), *(_cell(getattr(row, name)) for name in shown)]
        for row in rows
    ]
    remarks = ["remarks", *(", ".join(row.remarks) for row in rows)]
    table = [["parameter", "blocks", *shown], *lines]
    if any(remarks[1:]):
        width = max(map(len, remarks))
        table = [
            [*line, remark.ljust(width)]
            for line, remark in zip(table, remarks, strict=True)
        ]
    suspicious = sum(bool(row.remarks) for row in rows)
    head = f"{name}: step {rows[0].step}, parameters {len(rows)}"
    return f"{head}, suspicious {suspicious}\n\n{aligned(*table)}"


def _is_shown(name: str, rows: list[Health]) -> bool:
    values = {getattr(row, name) for row in rows} - {None}
    return bool(values - {0} if name in ("failures", "skipped") else values)


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
