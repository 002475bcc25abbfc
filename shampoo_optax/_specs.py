"""How parameters are divided over a mesh: as declared, or as their types say."""

import itertools
import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shampoo_optax._rules import Chooser, Kind, Rules, checked, chosen, name_of, unfit

# For every dimension of a parameter the mesh axes it is divided over, major first.
Spec = tuple[tuple[str, ...], ...]


def _names(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """The mesh axes that an entry of a `PartitionSpec` names."""
    return (entry,) if isinstance(entry, str) else entry or ()


def _is_names(entry: Any) -> bool:
    several = isinstance(entry, tuple) and all(isinstance(n, str) for n in entry)
    return several or entry is None or isinstance(entry, str)


def _is_spec(value: Any) -> bool:
    """Whether that is a `PartitionSpec` which says all and has names alone."""
    if not isinstance(value, PartitionSpec) or value.unreduced or value.reduced:
        return False
    return all(map(_is_names, value))


def _read(value: Any) -> PartitionSpec | None:
    if value is None or _is_spec(value):
        return value
    raise TypeError(value)


_KIND = Kind("specs", "a PartitionSpec of names of mesh axes", _read)


def checked_specs(specs: Any) -> PartitionSpec | Rules | Chooser | None:
    """The `specs` of a `Placement`, in the form in which they are kept."""
    return checked(_KIND, specs)


def specs_for(
    specs: PartitionSpec | Rules | Chooser | None,
    paths: Sequence[tuple],
    leaves: Sequence[Any],
    mesh: Mesh,
    axes: Sequence[str],
    local: bool = False,
) -> tuple[Spec, ...]:
    """How each parameter is divided, an entry for every dimension.

    Types that nothing is declared for may name axes other than `axes`. These are left
    out: devices along them hold copies of blocks, and so of what the step takes. In
    local mode, in which nothing is sent, they are refused.

    Args:
      specs: those of a `Placement`.
      paths: of the parameters, as `jax.tree_util` has them.
      leaves: arrays, traced or not, or `ShapeDtypeStruct`s, of global shapes.
      mesh: that of the placement.
      axes: those of the placement.
      local: whether its mode is local.

    Raises:
      ValueError: if what is declared does not fit a parameter.
    """
    if specs is None:
        return tuple(
            _typed(name_of(path), leaf, mesh, axes, local)
            for path, leaf in zip(paths, leaves, strict=True)
        )
    return tuple(
        _declared(specs, name_of(path), leaf, mesh, axes)
        for path, leaf in zip(paths, leaves, strict=True)
    )


def are_declared(
    specs: PartitionSpec | Rules | Chooser | None,
    paths: Sequence[tuple],
    leaves: Sequence[Any],
) -> list[bool]:
    """Whether it is declared how each parameter is divided."""
    if specs is None:
        return [False] * len(leaves)
    return [
        chosen(_KIND, specs, name_of(path), leaf) is not None
        for path, leaf in zip(paths, leaves, strict=True)
    ]


def check_lies(
    specs: Sequence[Spec],
    names: Sequence[str],
    leaves: Sequence[Any],
    mesh: Mesh,
    local: bool,
) -> None:
    """Refuses specs that arrays do not lie by, where they are known to lie.

    Those that are divided over fewer axes than a spec says are left to the step, and,
    unless the mode is local, also those that a spec takes as whole.

    Args:
      specs: of the parameters.
      names: their paths.
      leaves: arrays or `ShapeDtypeStruct`s; of those without a sharding on this mesh,
        as of traced ones, nothing is known.
      mesh: that of the placement.
      local: whether its mode is local.

    Raises:
      ValueError: if an array lies otherwise.
    """
    for spec, path, leaf in zip(specs, names, leaves, strict=True):
        found = _known_spec(leaf, mesh)
        if (local or any(spec)) and not _is_within(spec, _per_dim(found, leaf)):
            raise ValueError(
                f"`specs` must be as the parameter lies, {found}, got "
                f"{PartitionSpec(*(names or None for names in spec))} for "
                f"{list(leaf.shape)} at {path!r}; specs_of(params) writes it down."
            )


def _is_within(spec: Spec, other: Spec) -> bool:
    """Whether shards by a spec are parts of those by another."""
    pairs = zip(spec, other, strict=True)
    return all(names[: len(held)] == held for names, held in pairs)


def _known_spec(leaf: Any, mesh: Mesh) -> PartitionSpec:
    """How an array lies on a mesh; one of which nothing is known counts as whole."""
    sharding = None
    if not isinstance(leaf, jax.core.Tracer):
        sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, NamedSharding) or not _is_spec(sharding.spec):
        return PartitionSpec()
    return _spec_on(sharding, mesh)


def _spec_on(sharding: NamedSharding, mesh: Mesh) -> PartitionSpec:
    """What a sharding says; nothing if it is on another mesh."""
    names, sizes = sharding.mesh.axis_names, sharding.mesh.axis_sizes
    same = names == mesh.axis_names and sizes == mesh.axis_sizes
    return sharding.spec if same else PartitionSpec()


def shards_of(spec: Spec, mesh: Mesh) -> tuple[int, ...]:
    """The number of shards along every dimension."""
    return tuple(math.prod(mesh.shape[axis] for axis in names) for names in spec)


def _per_dim(spec: PartitionSpec, leaf: Any) -> Spec:
    found = tuple(map(_names, spec))
    return found + ((),) * (len(leaf.shape) - len(found))


def _typed(path: str, leaf: Any, mesh: Mesh, axes: Sequence[str], local: bool) -> Spec:
    """What the type says, in which Explicit axes alone appear."""
    kind = _spec_on(jax.typeof(leaf).sharding, mesh)
    spec = _per_dim(kind, leaf)
    if local and not set(itertools.chain(*spec)) <= set(axes):
        what = f"divide parameters over the placement's axes, {tuple(axes)}"
        raise unfit(_KIND, what, kind, path, leaf)
    return tuple(tuple(axis for axis in names if axis in axes) for names in spec)


def _declared(
    specs: PartitionSpec | Rules | Chooser,
    path: str,
    leaf: Any,
    mesh: Mesh,
    axes: Sequence[str],
) -> Spec:
    value = chosen(_KIND, specs, path, leaf)
    spec = _per_dim(PartitionSpec() if value is None else value, leaf)
    if fault := _fault(spec, leaf, mesh, axes):
        raise unfit(_KIND, fault, value, path, leaf)
    return spec


def _fault(spec: Spec, leaf: Any, mesh: Mesh, axes: Sequence[str]) -> str | None:
    """What a declaration must do and does not."""
    names = list(itertools.chain(*spec))
    if len(spec) > len(leaf.shape):
        return "have no more entries than the parameter has dimensions"
    if not set(names) <= set(mesh.axis_names):
        return f"name axes of the mesh, {mesh.axis_names}"
    if not set(names) <= set(axes):
        return f"name axes of the placement, {tuple(axes)}"
    if len(set(names)) < len(names):
        return "name no mesh axis twice"
    shards = shards_of(spec, mesh)
    for dim, (side, n) in enumerate(zip(leaf.shape, shards, strict=True)):
        if side % n:
            return f"divide dimensions evenly, not the {side} of dimension {dim} by {n}"
    return None


def specs_of(params: optax.Params) -> Rules:
    r"""Reads from parameters how they are divided over a mesh, for `Placement.specs`.

    Inside of `jax.jit` nothing says how arrays on Auto axes are divided; outside of it
    they know, and this writes it down. For a parameter of the shape
    :math:`(s_1, \dots, s_k)` the rule names for each dimension :math:`i` the mesh axes
    of sizes :math:`n_1, \dots, n_m` that it is divided over, the major one first: each
    device has :math:`s_i / (n_1 \cdots n_m)` neighbouring entries of it.

    Args:
      params: the parameters, a tree of arrays of any shapes and dtypes or of
        `ShapeDtypeStruct`s, with their shardings. To be called outside of `jax.jit`.

    Returns:
      A tuple of rules `(regular expression, PartitionSpec)`, one for each parameter
      that is divided, in the order of the tree. An expression is found in the path of
      its parameter alone. Parameters without a rule are whole on every device.

    Raises:
      ValueError: if a parameter is traced or is a `ShapeDtypeStruct` without sharding,
        or is divided in a way that is not said by a `jax.sharding.NamedSharding`.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> import shampoo_optax as so
      >>> from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
      >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
      >>> w = jax.device_put(jnp.ones((8, 4)), NamedSharding(mesh, P(None, "data")))
      >>> params = {"dense": {"w": w, "b": jnp.ones(4)}}
      >>> specs = so.specs_of(params)
      >>> specs == (("^dense/w$", P(None, "data")),)
      True
      >>> tx = so.shampoo(1e-3, placement=so.Placement(mesh, specs=specs))

    References:
      Xu et al., GSPMD: General and Scalable Parallelization for ML Computation Graphs,
      2021, https://arxiv.org/abs/2105.04663, section 3.
    """
    found, _ = jax.tree_util.tree_flatten_with_path(params)
    pairs = [(name_of(path), _lies(name_of(path), leaf)) for path, leaf in found]
    alike = Counter(path.casefold() for path, _ in pairs)
    return tuple(
        (_only(path, alike[path.casefold()] > 1), spec)
        for path, spec in pairs
        if any(map(_names, spec))
    )


def _only(path: str, cased: bool) -> str:
    """An expression for this path; where others have its letters, for its cases."""
    exact = re.escape(path)
    return f"^(?-i:{exact})$" if cased else f"^{exact}$"


def _lies(path: str, leaf: Any) -> PartitionSpec:
    if isinstance(leaf, jax.core.Tracer):
        raise ValueError(
            "`params` must be arrays that are not traced, outside of jax.jit, got "
            f"{leaf!r} at {path!r}."
        )
    sharding = getattr(leaf, "sharding", None)
    if isinstance(leaf, jax.ShapeDtypeStruct) and sharding is None:
        raise ValueError(
            "`params` must have shardings, which a ShapeDtypeStruct may be given, got "
            f"{leaf!r} at {path!r}."
        )
    if isinstance(sharding, NamedSharding) and _is_spec(sharding.spec):
        return sharding.spec
    if sharding is None or sharding.is_fully_replicated:
        return PartitionSpec()
    raise ValueError(
        "`params` must have a NamedSharding by names where they are divided, got "
        f"{sharding!r} at {path!r}."
    )
