"""Groups of parameters: rules that label them, and a report of which went where."""

import math
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from shampoo_optax._checks import check_integer
from shampoo_optax._tables import aligned


@dataclass(frozen=True)
class Rule:
    r"""Which parameters get a label: those for which all given conditions hold.

    A rule without conditions holds for all. The path of a parameter is
    `jax.tree_util.keystr(path, simple=True, separator="/")`, as in
    `"params/Embed_0/embedding"`; those of an `nnx.State` end in `"/value"`. Change a
    ready rule with `dataclasses.replace`.

    Args:
      label: the label, a string.
      path: a regular expression that is searched for in the path, whatever the case
        of its letters. Default `None`: any path.
      orders: a tuple of numbers of dimensions. Default `None`: any.
      side_above: an integer >= 0 that a dimension exceeds. Default `None`: any shape.
      where: a function `(path: str, leaf) -> bool`, which may read the shape and dtype
        of a leaf, but no values: it may be traced. Default `None`: any parameter.

    Raises:
      ValueError: if an argument has a value other than those above.

    Examples:
      >>> import dataclasses, jax.numpy as jnp
      >>> import shampoo_optax as so
      >>> rule = so.Rule("encoder", path=r"(^|/)encoder/", orders=(2,))
      >>> params = {"Encoder": {"w": jnp.ones((4, 3)), "b": jnp.ones(3)}}
      >>> so.label_by(rule, default="other")(params)
      {'Encoder': {'b': 'other', 'w': 'encoder'}}
      >>> dataclasses.replace(so.TABLE, side_above=50_000).label
      'table'
    """

    label: str
    _: KW_ONLY
    path: str | None = None
    orders: tuple[int, ...] | None = None
    side_above: int | None = None
    where: Callable[[str, Any], bool] | None = None

    def __post_init__(self):
        _check_label("label", self.label)
        if self.path is not None:
            _check_expression(self.path)
        if self.orders is not None:
            _check_orders(self.orders)
        if self.side_above is not None:
            check_integer("side_above", self.side_above, low=0)
        if self.where is not None and not callable(self.where):
            raise ValueError(
                "`where` must be a function of a path and a leaf, or None, "
                f"got {self.where!r}."
            )


def _check_label(name: str, value: Any) -> None:
    if not isinstance(value, str):
        raise ValueError(f"`{name}` must be a string, got {value!r}.")


def _check_expression(path: Any) -> None:
    try:
        re.compile(path, re.IGNORECASE)
        valid = isinstance(path, str)
    except (re.error, TypeError):
        valid = False
    if not valid:
        raise ValueError(f"`path` must be a regular expression, got {path!r}.")


def _check_orders(orders: Any) -> None:
    if not isinstance(orders, tuple) or not orders:
        raise ValueError(f"`orders` must be a tuple of integers, got {orders!r}.")
    for order in orders:
        check_integer("orders", order, low=0)


# ---- ready rules

# The end of a path, with what nnx and haliax wrap an array in.
_END = r"(?:/(?:value|raw_value|array))?$"
# What ends a part of a path: head, head_0, head2.
_NUMBER = r"[_\d]*"
_STOP = rf"{_NUMBER}(?=/|$)"
# Where a word begins: after no letter, or at a capital after a small one.
_WORD = r"(?:(?<![a-z])|(?-i:(?<=[a-z])(?=[A-Z])))"
_ATTENTION = r"att(?:entio)?n"

# A part such as LayerNorm_0, input_layernorm, norm1, ln_f or bn_init, and a leaf in it;
# the Dense layers of an adaptive norm lie deeper.
_NORM = (
    r"(?:norm|(?<![a-z])(?:ln|bn|gn))(?:_?\d+|_(?:f|final|init|proj))?"
    rf"(?:/\d+)?/(?:scale|weight|bias|gamma|beta|offset|[wb]){_END}"
    rf"|(?:^|/)(?:scale|gamma){_END}"
)
_HEAD_NAME = (
    r"(?:(?:lm)?head|classifier|readout|un_?embed(?:ding)?|embed_out"
    r"|(?<!pre_)logits?(?:_?dense)?)"
)
_OUTPUT_NAME = r"output_(?:projection|proj|layer)"
# Heads of attention are none, nor is what lies inside of an attention module; names of
# outputs, which hidden layers have too, count outside of repeated layers only.
_HEAD = (
    rf"^(?!.*{_ATTENTION}{_NUMBER}/)(?!.*(?:multi|{_ATTENTION})_?head{_STOP})"
    rf"(?:.*{_WORD}{_HEAD_NAME}{_STOP}"
    rf"|(?!.*(?:(?:^|/)(?:layers?|h)|blocks?){_NUMBER}/).*{_WORD}{_OUTPUT_NAME}{_STOP}"
    rf"|(?:params/|model/)*output/[^/]+{_END})"
)
# A kernel multiplies its input, as those of patches and time steps do; it is no table.
_EMBEDDING = (
    rf"^(?!.*/kernel{_END})(?!.*patch)"
    rf".*{_WORD}(?:(?:pos_?)?emb(?:ed(?:s|ding|dings|der)?)?|wte|wpe)(?![a-z])"
)

TABLE = Rule("table", side_above=999_999)
NORM = Rule("norm", path=_NORM)
VECTOR = Rule("vector", orders=(0, 1))
BIAS = Rule("vector", path=rf"(?:^|/|_)bias{_END}")
HEAD = Rule("head", path=_HEAD)
EMBEDDING = Rule("embedding", path=_EMBEDDING)
# Norms and vectors first: embeddings and heads have biases and norms of their own.
RULES = (TABLE, NORM, VECTOR, BIAS, HEAD, EMBEDDING)


def label_by(*rules: Rule, default: str = "matrix") -> Callable[[optax.Params], Any]:
    r"""Labels parameters by the first rule that holds, for `optax.partition`.

    The ready rules, in the order of `RULES`:

    - `TABLE` (`"table"`): a dimension of 1,000,000 or more, as in the submission that
      won AlgoPerf in 2024;
    - `NORM` (`"norm"`): scales and biases of parts named after norms;
    - `VECTOR` and `BIAS` (`"vector"`): no or one dimension, and biases of more, such
      as those of attention in linen and of scanned layers;
    - `HEAD` (`"head"`): parts named head, lm_head, logits, classifier, readout,
      unembed, output_projection, and the like, but not inside of attention;
    - `EMBEDDING` (`"embedding"`): parts named embed, embedding, embedder, emb, wte or
      wpe, but no `kernel` and no patches. An embedding tied to the head is one.

    All but `TABLE` and `VECTOR` go by names: print :func:`describe_groups`, and put
    rules of your own first where a model has other ones, such as a head `Dense_0`.

    Args:
      *rules: :class:`Rule` records, the first that holds counts.
      default: the label of a parameter for which none holds. Default `"matrix"`.

    Returns:
      A function from a tree of parameters, or of anything with shapes, to a tree of
      labels like it; `None` leaves stay. Give `optax.partition` (in old releases
      `optax.multi_transform`) the function, or, where gradients may be absent
      (`None`), the labels of the parameters.

    Raises:
      ValueError: if an argument has a value other than those above.

    Examples:
      >>> import jax.numpy as jnp
      >>> import shampoo_optax as so
      >>> label = so.label_by(*so.RULES)
      >>> label({"Embed_0": {"embedding": jnp.ones((9, 4))}, "w": jnp.ones((4, 4))})
      {'Embed_0': {'embedding': 'embedding'}, 'w': 'matrix'}

    References:
      Kasimbeg et al., Accelerating Neural Network Training: An Analysis of the
      AlgoPerf Competition, 2025, https://arxiv.org/abs/2502.15015.
    """
    for rule in rules:
        if not isinstance(rule, Rule):
            raise ValueError(
                "`rules` must be Rule records, each an argument of its own (`*RULES`), "
                f"got {rule!r:.200}."
            )
    _check_label("default", default)

    def label(path: Any, leaf: Any) -> str:
        text = _text(path)
        held = (rule.label for rule in rules if _holds(rule, text, leaf))
        return next(held, default)

    return lambda params: jax.tree_util.tree_map_with_path(label, params)


def _text(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _holds(rule: Rule, path: str, leaf: Any) -> bool:
    shape = np.shape(leaf)
    conditions = (
        (rule.path, lambda wanted: re.search(wanted, path, re.IGNORECASE)),
        (rule.orders, lambda wanted: len(shape) in wanted),
        (rule.side_above, lambda wanted: max(shape, default=0) > wanted),
        (rule.where, lambda wanted: wanted(path, leaf)),
    )
    return all(wanted is None or holds(wanted) for wanted, holds in conditions)


# ---- the report


class Labelled(NamedTuple):
    """A parameter and its label."""

    path: str
    shape: tuple[int, ...]
    label: Any

    @property
    def entries(self) -> int:
        return math.prod(self.shape)


class GroupTotal(NamedTuple):
    """What has one label."""

    parameters: int
    entries: int
    share: float  # of all entries


@dataclass(frozen=True)
class Groups:
    """What :func:`describe_groups` finds; printed, two aligned tables.

    Attributes:
      rows: one for each parameter in the order of the tree, with `path`, `shape`,
        `label` and `entries`.

    Examples:
      >>> import jax.numpy as jnp
      >>> import shampoo_optax as so
      >>> params = {"w": jnp.zeros((4, 3)), "bias": jnp.zeros(3)}
      >>> groups = so.describe_groups(params, so.label_by(so.VECTOR))
      >>> groups.labels
      {'bias': 'vector', 'w': 'matrix'}
    """

    rows: tuple[Labelled, ...]

    @property
    def labels(self) -> dict[str, Any]:
        """The label of each path."""
        return {row.path: row.label for row in self.rows}

    @property
    def totals(self) -> dict[Any, GroupTotal]:
        """For each label its `parameters`, `entries` and `share` of all entries."""
        parameters, entries = Counter(), Counter()
        for row in self.rows:
            parameters[row.label] += 1
            entries[row.label] += row.entries
        whole = max(sum(entries.values()), 1)
        return {
            label: GroupTotal(number, entries[label], entries[label] / whole)
            for label, number in parameters.items()
        }

    def __str__(self) -> str:
        rows = (
            (path, "x".join(map(str, shape)) or "scalar", str(label))
            for path, shape, label in self.rows
        )
        totals = (
            (
                str(label),
                str(total.parameters),
                f"{total.entries:,}",
                f"{total.share:.1%}",
            )
            for label, total in self.totals.items()
        )
        return "\n\n".join(
            [
                aligned(("parameter", "shape", "label"), *rows),
                aligned(("label", "parameters", "entries", "share"), *totals),
            ]
        )


def describe_groups(params: optax.Params, labels: Any) -> Groups:
    r"""Says which parameter goes to which group of a partition.

    Args:
      params: a tree of parameters, arrays or `jax.ShapeDtypeStruct`s of any shapes.
      labels: what `optax.partition` takes: a function from parameters to a tree of
        labels, such as that of :func:`label_by`, or such a tree, or a prefix of one.

    Returns:
      A :class:`Groups` with `rows`, `labels` and `totals`; printed, it is two tables.

    Raises:
      ValueError: if `labels` is no prefix of `params`.

    Examples:
      >>> import jax.numpy as jnp
      >>> import shampoo_optax as so
      >>> params = {"Embed_0": {"embedding": jnp.ones((8, 4))}, "w": jnp.ones((4, 4))}
      >>> groups = so.describe_groups(params, so.label_by(*so.RULES))
      >>> print(groups)
      parameter          shape      label
      Embed_0/embedding    8x4  embedding
      w                    4x4     matrix
      <BLANKLINE>
      label      parameters  entries  share
      embedding           1       32  66.7%
      matrix              1       16  33.3%
      >>> groups.totals["matrix"].entries, groups.labels["w"]
      (16, 'matrix')
    """
    tree = labels(params) if callable(labels) else labels
    try:
        each = jax.tree.map(
            lambda label, part: jax.tree.map(lambda _: label, part), tree, params
        )
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"`labels` must be a tree like `params`, or a prefix of it, "
            f"got {tree!r:.200}."
        ) from error
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return Groups(
        tuple(
            Labelled(_text(path), tuple(np.shape(leaf)), label)
            for (path, leaf), label in zip(leaves, jax.tree.leaves(each), strict=True)
        )
    )
