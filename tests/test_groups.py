"""Groups: rules that label parameters, the report, and the warning of an idle group."""

import dataclasses
import functools
import math

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from helpers import TRANSFORMS

import shampoo_optax as so

READY = so.label_by(*so.RULES)


def labels_of(paths, order, label=READY):
    """Labels of parameters with these paths and this number of dimensions."""
    leaf = jax.ShapeDtypeStruct(order * (6,), jnp.float32)
    return [label({path: leaf})[path] for path in paths]


# ---- names, of parameters with two dimensions

NAMES = {
    "norm": """
        layers/LayerNorm_0/scale
        params/decoder/layers/pre_self_attention_layer_norm/scale
        params/decoder/decoder_norm/scale
        params/decoder/layers/self_attention/query_norm/scale
        model/layers/input_layernorm/weight
        model/layers/post_attention_layernorm/weight
        transformer/layers/stacked/ln_1/weight/array
        transformer/h/ln_f/bias
        params/stage/BatchNorm_3/bias
        params/bn_init/scale
        params/norm_proj/scale
        params/blocks/RMSNorm_0/scale
        params/blocks/MyRMSNorm/weight
        params/embeddings/LayerNorm/scale
        params/lm_head/layer_norm/bias
        blocks/norm1/weight
        blocks/attn/q_norm/scale/value
        params/GroupNorm_0/scale
        layers/norm/0/gamma
        params/ls1/gamma
    """,
    "vector": """
        params/MultiHeadDotProductAttention_0/query/bias
        attn/in_proj_bias
        attn/query/bias/value
        layers/stacked/mlp/c_fc/bias/array
        params/lm_head/bias
    """,
    "head": """
        params/lm_head/kernel
        lm_head/weight/array
        params/decoder/logits_dense/kernel
        params/decoder/logits/kernel
        params/to_logits/kernel
        params/decoder/logitdense/kernel
        output_proj
        head/kernel/value
        params/head/kernel
        params/Head_0/Dense_0/kernel
        params/ClassificationHead/Dense_0/kernel
        mlp_head/layers/1/weight
        params/value_head/kernel
        params/keypoint_head/Conv_0/kernel
        params/multi_task_head/kernel
        classifier/kernel
        params/Classifier_0/Dense_0/kernel
        AttentionNet/head/kernel
        params/readout/w
        unembed
        unembed/W_U
        params/unembedding/kernel
        embed_out/kernel
        decoder/output_projection/weight
        params/output_layer/kernel
        output/weight
        params/output/kernel
        params/token_head/embedding
    """,
    "embedding": """
        params/Embed_0/embedding
        embed/embedding/value
        params/token_embedder/embedding
        params/decoder/position_embedder/embedding
        params/TokenEmbedder_0/table
        params/encoder/relpos_bias/rel_embedding
        params/encoder/layer/relative_attention_bias/embedding
        transformer/wte/embedding
        transformer/wpe/weight/array
        embeddings/token_embeddings/weight/array
        embeddings/position_embeddings/array
        model/embed_tokens/weight
        shared/embedding
        params/embedding_table
        params/pos_embedding
        params/Transformer/posembed_input/pos_embedding
        tok_emb/weight
        tied_embedding
        params/shared_embedding/embedding
        transformer/embedder/input_embedding
        embeddings/word_embeddings/embedding
    """,
    "matrix": """
        params/Dense_0/kernel
        w
        layers/0/weight
        params/MultiHeadDotProductAttention_0/query/kernel
        params/MultiHeadDotProductAttention_0/out/kernel
        params/multi_head_attention/kernel
        params/multi_head/kernel
        params/MultiHead_0/kernel
        params/MAPHead_0/MlpBlock_0/Dense_0/kernel
        params/MAPHead_0/probe
        attn/head_0/query/kernel
        params/self_attention/heads/0/kernel
        params/self_attention/output/kernel
        encoder/layer/0/attention/output/dense/kernel
        encoder/layer/0/output/dense/kernel
        encoder/layers_0/output_projection/kernel
        params/decoder/layers/mlp/wo/kernel
        mixer/out_proj/kernel
        attention_head_1/kernel
        talking_heads/kernel
        attention/output_projection/weight
        attn/value/kernel/value
        params/headline/kernel
        params/overhead/kernel
        params/forehead_encoder/kernel
        params/pre_logits/kernel
        params/attention_logits_proj/kernel
        params/patch_embed/proj/weight
        embeddings/patch_embeddings/projection/kernel
        params/embedding/kernel
        params/time_embedding/linear_1/kernel
        params/members/weight
        params/remember/embeds_of/kernel
        params/scale/kernel
        params/upscale/weight
        params/normalize/weight
        params/abnormal/weight
        params/norm1/linear/kernel
        params/AdaLayerNorm_0/Dense_0/kernel
        params/weight_norm/weight
        params/SpectralNorm/weight
        transformer/layernorm_qkv/weight
        params/outputs/kernel
        params/bias_net/kernel
    """,
}


@pytest.mark.parametrize("wanted", NAMES)
def test_names(wanted):
    paths = NAMES[wanted].split()
    found = dict(zip(paths, labels_of(paths, 2), strict=True))
    assert found == dict.fromkeys(paths, wanted)


def test_names_do_not_depend_on_case():
    paths = ["PARAMS/EMBED_0/EMBEDDING", "Params/LM_Head/Kernel", "Layernorm/Scale"]
    assert labels_of(paths, 2) == ["embedding", "head", "norm"]


def test_vectors_are_no_tables_and_no_heads():
    paths = ["lm_head/b", "embed/cls", "w", "head/kernel"]
    assert labels_of(paths, 1) == labels_of(paths, 0) == 4 * ["vector"]


@pytest.mark.parametrize(
    "shape, wanted",
    [((999_999, 2), "matrix"), ((1_000_000, 2), "table"), ((2, 1_000_000), "table")],
)
def test_tables_are_as_large_as_those_of_the_submission(shape, wanted):
    assert READY(jax.ShapeDtypeStruct(shape, jnp.float32)) == wanted


# ---- real models


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = x + nn.MultiHeadDotProductAttention(2)(nn.LayerNorm()(x))
        return x + nn.Dense(8)(nn.RMSNorm()(x))


class Transformer(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(11, 8)(tokens)
        x = x + self.param("pos_embedding", nn.initializers.normal(), (1, 3, 8))
        x = nn.LayerNorm(name="ln_f")(Block()(x))
        return nn.Dense(11, name="lm_head")(x)


class Convolutional(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Conv(4, (3, 3))(x)
        x = nn.BatchNorm(use_running_average=True)(x)
        x = nn.GroupNorm(2)(nn.Conv(4, (3, 3), use_bias=False)(x))
        return nn.Dense(10, name="head")(x.mean(axis=(1, 2)))


def params_of(module, *inputs):
    shapes = jax.eval_shape(lambda: module.init(jax.random.key(0), *inputs))
    return shapes["params"]


class Network(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(11, 8, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            num_heads=2, in_features=8, rngs=rngs, decode=False
        )
        self.norm = nnx.LayerNorm(8, rngs=rngs)
        self.batch_norm = nnx.BatchNorm(8, rngs=rngs)
        self.conv = nnx.Conv(8, 4, (3,), rngs=rngs)
        self.head = nnx.Linear(8, 11, rngs=rngs)


def nnx_params():
    return nnx.eval_shape(lambda: nnx.state(Network(nnx.Rngs(0)), nnx.Param))


def paths_by_label(params):
    groups = so.describe_groups(params, READY)
    found = {}
    for path, label in groups.labels.items():
        found.setdefault(label, set()).add(path)
    return found


def of_attention(prefix, end=""):
    parts = ("query", "key", "value", "out")
    kernels, biases = (
        {f"{prefix}/{part}/{leaf}{end}" for part in parts}
        for leaf in ("kernel", "bias")
    )
    return kernels, biases


def test_a_linen_transformer():
    kernels, biases = of_attention("Block_0/MultiHeadDotProductAttention_0")
    assert paths_by_label(params_of(Transformer(), jnp.zeros((1, 3), int))) == {
        "embedding": {"Embed_0/embedding", "pos_embedding"},
        "head": {"lm_head/kernel"},
        "norm": {
            "Block_0/LayerNorm_0/scale",
            "Block_0/LayerNorm_0/bias",
            "Block_0/RMSNorm_0/scale",
            "ln_f/scale",
            "ln_f/bias",
        },
        "vector": biases | {"Block_0/Dense_0/bias", "lm_head/bias"},
        "matrix": kernels | {"Block_0/Dense_0/kernel"},
    }


def test_a_linen_convolutional_network():
    assert paths_by_label(params_of(Convolutional(), jnp.zeros((1, 8, 8, 3)))) == {
        "head": {"head/kernel"},
        "norm": {
            f"{part}/{leaf}"
            for part in ("BatchNorm_0", "GroupNorm_0")
            for leaf in ("scale", "bias")
        },
        "vector": {"Conv_0/bias", "head/bias"},
        "matrix": {"Conv_0/kernel", "Conv_1/kernel"},
    }


def test_an_nnx_network():
    kernels, biases = of_attention("attention", "/value")
    assert paths_by_label(nnx_params()) == {
        "embedding": {"embed/embedding/value"},
        "head": {"head/kernel/value"},
        "norm": {
            f"{part}/{leaf}/value"
            for part in ("norm", "batch_norm")
            for leaf in ("scale", "bias")
        },
        "vector": biases | {"conv/bias/value", "head/bias/value"},
        "matrix": kernels | {"conv/kernel/value"},
    }


# ---- rules

TREE = {
    "encoder": ({"w": jnp.ones((4, 3)), "b": jnp.ones(3)}, None),
    "decoder": [jnp.ones((4, 9)), jnp.ones((2, 3, 4))],
}


@pytest.mark.parametrize(
    "conditions, chosen",
    [
        (dict(), "w b d0 d1"),
        (dict(path="^ENCODER/0/"), "w b"),
        (dict(orders=(1, 3)), "b d1"),
        (dict(side_above=4), "d0"),
        (dict(side_above=3), "w d0 d1"),
        (dict(where=lambda path, leaf: leaf.size == 3 or path == "decoder/0"), "b d0"),
        (dict(path="encoder", orders=(2,)), "w"),
        (dict(path="coder", orders=(2,), side_above=8), "d0"),
        (dict(orders=(2, 3), where=lambda path, leaf: "de" in path), "w d0 d1"),
        (dict(path="nothing", orders=(2,)), ""),
    ],
)
def test_all_conditions_of_a_rule_must_hold(conditions, chosen):
    names = chosen.split()
    w, b, d0, d1 = ("yes" if name in names else "no" for name in ("w", "b", "d0", "d1"))
    label = so.label_by(so.Rule("yes", **conditions), default="no")
    wanted = {"encoder": ({"w": w, "b": b}, None), "decoder": [d0, d1]}
    assert label(TREE) == wanted
    assert label(jax.eval_shape(lambda: TREE)) == wanted


def test_the_first_rule_that_holds_counts():
    rules = (so.Rule("vectors", orders=(1,)), so.Rule("inner", path="encoder"))
    first, second = so.label_by(*rules)(TREE), so.label_by(*rules[::-1])(TREE)
    assert first["encoder"][0] == {"w": "inner", "b": "vectors"}
    assert second["encoder"][0] == {"w": "inner", "b": "inner"}
    assert first["decoder"] == second["decoder"] == ["matrix", "matrix"]


def test_a_ready_rule_is_changed_by_replace():
    small = dataclasses.replace(so.TABLE, side_above=8, label="big")
    assert so.label_by(small)(TREE)["decoder"] == ["big", "matrix"]


@pytest.mark.parametrize(
    "arguments, name, value",
    [
        (dict(label=3), "label", "3"),
        (dict(path="("), "path", "'('"),
        (dict(path=b"head"), "path", "b'head'"),
        (dict(path=7), "path", "7"),
        (dict(orders=2), "orders", "2"),
        (dict(orders=()), "orders", "()"),
        (dict(orders=(2, -1)), "orders", "-1"),
        (dict(orders=("2",)), "orders", "'2'"),
        (dict(side_above=-1), "side_above", "-1"),
        (dict(side_above=1.5), "side_above", "1.5"),
        (dict(where="head"), "where", "'head'"),
    ],
)
def test_bad_arguments_of_a_rule(arguments, name, value):
    with pytest.raises(ValueError) as error:
        so.Rule(**dict(label="a") | arguments)
    assert f"`{name}`" in str(error.value) and f"got {value}." in str(error.value)


def test_bad_arguments_of_the_functions():
    with pytest.raises(ValueError, match="`rules` must .* got 'head'"):
        so.label_by(so.TABLE, "head")
    with pytest.raises(ValueError, match="`default` must .* got None"):
        so.label_by(default=None)
    for labels in ({"encoder": "a"}, {"encoder": ("a", None), "decoder": ["a", None]}):
        with pytest.raises(ValueError, match="`labels` must .* got {'encoder'"):
            so.describe_groups(TREE, labels)


# ---- under optax


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["weight", "bias", "absent"],
    meta_fields=["name"],
)
@dataclasses.dataclass
class Layer:
    """A module like Equinox's."""

    weight: jax.Array
    bias: jax.Array
    absent: None = None
    name: str = "layer"


def trees():
    weight, bias = helpers.normals(0, 6, 4), helpers.normals(1, 4)
    state = nnx.State({"layer": {"weight": nnx.Param(weight), "bias": nnx.Param(bias)}})
    return {
        "dict": {"weight": weight, "bias": bias},
        "tuple": (bias, [weight, None]),
        "nnx": state,
        "node": {"layer": Layer(weight, bias)},
    }


@pytest.mark.parametrize("kind", ["dict", "tuple", "nnx", "node"])
def test_a_partition_gives_each_parameter_to_its_transform(kind):
    params = trees()[kind]
    groups = {"matrix": optax.scale(2.0), "vector": optax.scale(3.0)}
    tx = helpers.partition(groups, READY)

    @helpers.quick_jit
    def run(params):  # the labels are made of tracers
        return tx.update(params, tx.init(params), params)[0]

    updates = run(params)
    assert jax.tree.structure(updates) == jax.tree.structure(params)
    for got, param in zip(*map(jax.tree.leaves, (updates, params)), strict=True):
        np.testing.assert_array_equal(got, {1: 3.0, 2: 2.0}[param.ndim] * param)


def test_an_absent_gradient_sits_the_step_out():
    """With the labels of the parameters, as the docstring says."""
    params = {"w": jnp.ones((4, 3)), "v": jnp.ones((3, 3)), "bias": jnp.ones(3)}
    groups = {
        "matrix": so.scale_by_sign_descent(b1=0.0),
        "vector": so.scale_by_row_wise_adagrad(),
    }
    tx = helpers.partition(groups, READY(params))
    gradients = {"w": -2 * params["w"], "v": None, "bias": None}
    state = tx.init(params)
    updates, state = helpers.quick_jit(tx.update)(gradients, state, params)
    assert updates["bias"] is updates["v"] is None
    np.testing.assert_array_equal(updates["w"], -params["w"])
    assert not np.any(helpers.field(state, "accumulators")["bias"])


# ---- the report


def test_the_report():
    params = {
        "Embed_0": {"embedding": jnp.ones((12, 5))},
        "scalar": jnp.ones(()),
        "stack": [jnp.ones((3, 3, 2, 2)), jnp.ones((2, 0))],
        "nothing": None,
    }
    groups = so.describe_groups(params, READY)
    assert groups.rows == (
        ("Embed_0/embedding", (12, 5), "embedding"),
        ("scalar", (), "vector"),
        ("stack/0", (3, 3, 2, 2), "matrix"),
        ("stack/1", (2, 0), "matrix"),
    )
    assert [row.entries for row in groups.rows] == [60, 1, 36, 0]
    assert groups.labels["stack/0"] == "matrix" and len(groups.labels) == 4
    assert groups.totals == {
        "embedding": (1, 60, 60 / 97),
        "vector": (1, 1, 1 / 97),
        "matrix": (2, 36, 36 / 97),
    }
    cells = [line.split() for line in str(groups).splitlines()]
    assert cells == [
        ["parameter", "shape", "label"],
        ["Embed_0/embedding", "12x5", "embedding"],
        ["scalar", "scalar", "vector"],
        ["stack/0", "3x3x2x2", "matrix"],
        ["stack/1", "2x0", "matrix"],
        [],
        ["label", "parameters", "entries", "share"],
        ["embedding", "1", "60", "61.9%"],
        ["vector", "1", "1", "1.0%"],
        ["matrix", "2", "36", "37.1%"],
    ]


def test_the_report_takes_what_a_partition_takes():
    shapes = jax.eval_shape(lambda: TREE)
    tree = {"encoder": ({"w": "a", "b": "a"}, None), "decoder": ["a", 2]}
    prefix = {"encoder": "a", "decoder": ["a", 2]}
    reports = [so.describe_groups(shapes, x) for x in (tree, prefix, lambda _: tree)]
    labels = [label for *_, label in reports[0].rows]
    assert labels == [
        2 if shape == (2, 3, 4) else "a" for _, shape, _ in reports[0].rows
    ]
    assert reports[0] == reports[1] == reports[2]
    assert math.isclose(sum(total.share for total in reports[0].totals.values()), 1)
    nothing = so.describe_groups({"a": None}, {"a": "b"})
    assert nothing.rows == () and nothing.totals == {}
    str(nothing)


# ---- C24: a tree in which nothing is preconditioned is reported

FACTORED = {
    "shampoo": so.scale_by_shampoo,
    "soap": so.scale_by_soap,
    "KL": so.scale_by_kl_shampoo,
    "KL-SOAP": so.scale_by_kl_soap,
    "alias": lambda **kwargs: so.shampoo(0.1, **kwargs),
}
IDLE = "no parameter is preconditioned: no axis of the shapes"
EMPTY = "no parameter is preconditioned: this group of a partition or mask is empty"


def init(tx, params):
    """What `init` warns of, it warns of while it is traced."""
    return jax.eval_shape(tx.init, params)


@pytest.mark.parametrize("name", FACTORED)
def test_parameters_without_a_factor_are_reported(name):
    vectors, matrix = {"a": jnp.ones(5), "b": jnp.ones(())}, {"w": jnp.ones((2, 9))}
    narrow = dict(axes=so.Axes(skip_above=4), blocking=so.Blocking(4))
    with pytest.warns(UserWarning, match=IDLE):
        init(FACTORED[name](axes=so.Axes(min_order=2)), vectors)
    with pytest.warns(UserWarning, match=IDLE):
        init(FACTORED[name](**narrow), {"a": vectors["a"]})
    if name in ("shampoo", "KL", "alias"):  # an exponent, but not one of 0
        with pytest.warns(UserWarning, match=IDLE):
            kwargs = dict(axes=so.Axes(min_order=2), exponents={1: 0.3})
            init(FACTORED[name](**kwargs), vectors)
    # These have factors, so that nothing is said, which would be an error.
    init(FACTORED[name](), vectors)
    init(FACTORED[name](axes=so.Axes(min_order=2)), vectors | matrix)
    init(FACTORED[name](**narrow), matrix)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_an_empty_group_is_reported(name):
    params = {"w": jnp.ones((4, 3)), "bias": jnp.ones(3)}
    groups = {"hidden": TRANSFORMS[name](), "matrix": optax.sgd(0.1)}
    labels = so.label_by(so.Rule("hidden", path="hiden"))
    with pytest.warns(UserWarning, match=EMPTY):
        init(helpers.partition(groups, labels), params)
    with pytest.warns(UserWarning, match=EMPTY):
        init(optax.masked(TRANSFORMS[name](), dict.fromkeys(params, False)), params)


def test_what_was_asked_for_is_not_reported(monkeypatch):
    # The oldest optax calls it by a name that JAX no longer has.
    monkeypatch.setattr(jax, "tree_map", jax.tree.map, raising=False)
    tree = {"w": jnp.ones((4, 3)), "bias": jnp.ones(3)}
    init(so.scale_by_shampoo(exponents={1: 0, 2: {0: 0, 1: 0}}), tree)
    init(so.scale_by_soap(ignored_axes={1: (0,), 2: (0, 1)}), tree)
    init(so.scale_by_sign_descent(), {"b": jnp.ones(())})
    for tx in map(so.shampoo, (0.1, lambda count: 0.1)):
        for nothing in ({}, (None,), {"e": jnp.ones((0, 3))}):
            init(tx, nothing)
    groups = {"matrix": so.shampoo(0.1), "vector": so.soap(0.1)}
    for tx in (so.shampoo(0.1), helpers.partition(groups, READY(tree))):
        optax.tree_utils.tree_map_params(tx, lambda leaf: leaf, init(tx, tree))
    so.describe({"bias": tree["bias"]}, so.scale_by_shampoo(axes=so.Axes(min_order=2)))
