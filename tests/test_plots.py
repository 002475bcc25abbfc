"""The figures: what is drawn is what NumPy finds, and axes say what they are of."""

import dataclasses
import importlib

import helpers
import jax
import jax.numpy as jnp
import matplotlib.colors
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from matplotlib import pyplot
from matplotlib.figure import Figure

import shampoo_optax as so

PARAMS = {"a": jnp.zeros((9, 6)), "b": {"w": jnp.zeros((5, 3)), "v": jnp.zeros(6)}}
TX = so.shampoo(
    0.1,
    refresh_every=2,
    metrics=True,
    blocking=so.Blocking(block_size=6),
    storage=so.Storage(packed=True),
    placement=helpers.placement_of(8),
)


@pytest.fixture(scope="module")
def history():
    """The states and diagnoses of four steps on eight devices; `v` has no gradient."""
    rng = np.random.default_rng(0)
    update, state, states = helpers.quick_jit(TX.update), TX.init(PARAMS), []
    for _ in range(4):
        grads = jax.tree.map(
            lambda x: jnp.asarray(rng.standard_normal(x.shape), jnp.float32), PARAMS
        )
        grads["b"]["v"] = jnp.zeros(6)
        _, state = update(grads, state, PARAMS)
        states.append(state)
    return states, [so.diagnose(state, PARAMS, TX) for state in states]


@pytest.fixture(autouse=True)
def nothing_is_left_to_pyplot():
    yield
    assert pyplot.get_fignums() == []


def spectra(factors):
    """The eigenvalues over the largest, the largest first."""
    values = np.linalg.eigvalsh(np.asarray(factors, np.float64))[..., ::-1]
    return values / values[..., :1]


@pytest.mark.parametrize(
    "path, block, title",
    [
        ("b/w", None, "b/w, block 0 of 1: 5x3"),
        ("a", 0, "a, block 0 of 2: 6x6"),
        ("a", 1, "a, block 1 of 2: 3x6"),
    ],
)
def test_spectra_are_those_of_the_factors(history, path, block, title):
    """In padded slots of other devices too, and of packed matrices."""
    state = history[0][-1]
    figure = so.plot_spectra(state, PARAMS, TX, path, block=block)
    assert isinstance(figure, Figure)
    (axes,) = figure.axes
    assert axes.get_title() == title
    assert axes.get_xlabel() == "rank of the eigenvalue (1 is the largest)"
    assert axes.get_ylabel() == "eigenvalue / largest (1)"
    assert axes.get_yscale() == "log"
    key = "['b']['w']" if path == "b/w" else "['a']"
    start = "6,0" if block else "0,0"
    portable = so.to_portable(TX, state, PARAMS)
    curves = {line.get_label(): line.get_xydata() for line in axes.lines}
    for axis in (0, 1):
        (factor,) = portable[f"[0].factors/{key}/{start}/{axis}"]
        (curve,) = [y for x, y in curves.items() if x.startswith(f"axis {axis},")]
        np.testing.assert_array_equal(curve[:, 0], np.arange(1, len(factor) + 1))
        np.testing.assert_allclose(curve[:, 1], spectra(factor), rtol=1e-5)
    limit = curves["machine epsilon"][:, 1]
    np.testing.assert_array_equal(limit, np.finfo(np.float32).eps)


def test_the_worst_block_is_the_one_that_is_drawn(history):
    state = history[0][-1]
    portable = so.to_portable(TX, state, PARAMS)
    worst = [
        max(portable[f"[0].metrics.conditions/['a']/{x}/{axis}"][0] for axis in (0, 1))
        for x in ("0,0", "6,0")
    ]
    title = so.plot_spectra(state, PARAMS, TX, "a").axes[0].get_title()
    assert title.startswith(f"a, block {np.argmax(worst)} of 2")
    tx = so.scale_by_soap(blocking=so.Blocking(block_size=6))
    plain = so.plot_spectra(tx.init(PARAMS), PARAMS, tx, "a")
    assert plain.axes[0].get_title().startswith("a, block 0 of 2")


@pytest.mark.parametrize(
    "path, kwargs, message",
    [
        ("c", {}, r"`path` must be .* one of \['a', 'b/v', 'b/w'\], got 'c'"),
        ("a", dict(block=2), "`block` must be below 2, .* 'a', got 2"),
        ("a", dict(block=-1), "`block` must be an integer .*, got -1"),
    ],
)
def test_spectra_errors(history, path, kwargs, message):
    with pytest.raises(ValueError, match=message):
        so.plot_spectra(history[0][-1], PARAMS, TX, path, **kwargs)


# ---- health

LABELS = {
    "condition": "condition number (1)",
    "residual": "residual of roots (1)",
    "age": "age of roots (steps)",
    "failures": "refused roots (number)",
    "skipped": "skipped steps (number)",
    "grafting": "grafting ratio (1)",
    "rms": "RMS of the direction (1)",
    "cosine": "cosine to gradient (1)",
}
LOGARITHMIC = ("condition", "residual", "grafting")


def shown(row, name):
    """What there is to draw: logarithmic axes have no place for 0."""
    value = getattr(row, name)
    return None if value is None or (name in LOGARITHMIC and value <= 0) else value


def points(line):
    return [xy for xy in line.get_xydata().tolist() if not np.isnan(xy).any()]


def test_one_diagnosis_has_a_mark_for_each_parameter(history):
    diagnosis = history[1][-1]
    rows = sorted(diagnosis.rows, key=lambda row: -len(row.remarks))
    assert rows[0].path == "b/v" and rows[0].remarks == ("no refresh", "still")
    figure = so.plot_health(diagnosis)
    assert [axes.get_xlabel() for axes in figure.axes] == list(LABELS.values())
    assert figure.axes[0].get_ylabel() == "parameter"
    names = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert names == [f"shampoo/{row.path}" for row in rows]
    for axes, name in zip(figure.axes, LABELS, strict=True):
        assert (axes.get_xscale() == "log") == (name in LOGARITHMIC)
        for line, marked in zip(axes.lines[:2], (False, True), strict=True):
            assert points(line) == [
                [shown(row, name), place]
                for place, row in enumerate(rows)
                if bool(row.remarks) == marked and shown(row, name) is not None
            ]
            assert (line.get_color() == "C3") == marked


def test_several_have_a_curve_for_each_parameter(history):
    diagnoses = history[1]
    figure = so.plot_health(diagnoses)
    drawn = [axes for axes in figure.axes if axes.get_visible()]
    assert [axes.get_ylabel() for axes in drawn] == list(LABELS.values())
    (legend,) = figure.legends
    names = [text.get_text() for text in legend.get_texts()]
    assert sorted(names) == ["shampoo/a", "shampoo/b/v", "shampoo/b/w"]
    for axes, name in zip(drawn, LABELS, strict=True):
        assert axes.get_xlabel() == "step"
        wanted = []
        for place in range(3):
            rows = [diagnosis.rows[place] for diagnosis in diagnoses]
            pairs = [[row.step, shown(row, name)] for row in rows]
            wanted.append([pair for pair in pairs if pair[1] is not None])
        assert sorted(points(line) for line in axes.lines[:3]) == sorted(wanted)


def test_of_many_parameters_few_have_a_colour_or_a_mark(history):
    diagnosis = history[1][-1]
    row = diagnosis.rows[0]
    rows = tuple(row._replace(path=str(n), remarks=()) for n in range(60))
    many = dataclasses.replace(
        diagnosis, rows=(*rows, row._replace(remarks=("still",)))
    )
    figure = so.plot_health(many)
    assert "40 of 61 parameters" in figure.get_suptitle()
    assert figure.axes[0].get_yticklabels()[0].get_text() == f"shampoo/{row.path}"
    (legend,) = so.plot_health([many, many]).legends
    names = [text.get_text() for text in legend.get_texts()]
    assert len(names) == 11 and names[0] == f"shampoo/{row.path}"
    assert names[-1] == "others"


@pytest.mark.parametrize("value", [None, [], "sick", [1], so.Diagnosis(())])
def test_history_is_a_diagnosis_or_several(value):
    with pytest.raises(ValueError, match="`history` must be a Diagnosis .*, got "):
        so.plot_health(value)


# ---- placement


def test_bars_are_the_bytes_of_each_device():
    """Four matrices and a padded one for three devices, in bytes of float32."""
    params = helpers.structs({**dict.fromkeys("abcd", (4, 4)), "e": (2, 4)})
    tx = so.scale_by_shampoo(graft=None, b1=0.0)
    figure = so.plot_placement(params, tx, devices=3)
    (axes,) = figure.axes
    size = sum(
        x.device for x in so.describe(params, tx, devices=3).parts[0].bytes.values()
    )
    total = size - 4  # the step count
    assert axes.get_ylabel() == "device"
    assert axes.get_xlabel() == "state (B)"
    widths = {}
    for bar in axes.patches:
        device = round(bar.get_y() + bar.get_height() / 2)
        color = matplotlib.colors.to_hex(bar.get_facecolor())
        widths[device, color] = widths.get((device, color), 0) + bar.get_width()
    for device in range(3):
        held = sum(width for (own, _), width in widths.items() if own == device)
        np.testing.assert_allclose(held, total)
    # Factors and roots of two sides, and four counters and residuals.
    colors = [matplotlib.colors.to_hex(f"C{n}") for n in range(5)]
    own = [sum(w for (_, c), w in widths.items() if c == color) for color in colors]
    whole, small = 4 * (4 * 4**2 + 4), 4 * (2 * (2**2 + 4**2) + 4)
    np.testing.assert_allclose(sorted(own), [small, *[whole] * 4])
    padding = 1 - (4 * whole + small) / (3 * total)
    assert (
        axes.get_title() == f"shampoo: {total} B a device, {padding:.1%} of it padding"
    )
    (legend,) = figure.legends
    names = [text.get_text() for text in legend.get_texts()]
    assert names == ["a", "b", "c", "d", "e", "padding"]


def test_each_transform_has_bars():
    tx = optax.chain(so.scale_by_soap(metrics=True), so.scale_by_sign_descent())
    figure = so.plot_placement(PARAMS, tx, devices=2)
    titles = [axes.get_title().partition(":")[0] for axes in figure.axes]
    assert titles == ["soap", "sign_descent"]


@pytest.mark.parametrize(
    "tx, devices, message",
    [
        (optax.sgd(0.1), None, "`tx` must hold a transform that works on blocks"),
        (TX, 0, "`devices` must be an integer .*, got 0"),
    ],
)
def test_placement_errors(tx, devices, message):
    with pytest.raises(ValueError, match=message):
        so.plot_placement(PARAMS, tx, devices=devices)


def test_without_matplotlib_the_error_says_what_to_install(history, monkeypatch):
    genuine = importlib.import_module

    def import_module(name, *args):
        if name.startswith("matplotlib"):
            raise ModuleNotFoundError(name)
        return genuine(name, *args)

    monkeypatch.setattr(importlib, "import_module", import_module)
    for plot in (
        lambda: so.plot_health(history[1]),
        lambda: so.plot_spectra(history[0][-1], PARAMS, TX, "a"),
        lambda: so.plot_placement(PARAMS, TX),
    ):
        with pytest.raises(ImportError, match=r"pip install 'shampoo-optax\[plots\]'"):
            plot()


def test_blocks_of_all_shards_are_drawn():
    """The first shard of `w` is well conditioned, the third is not; `v` is whole."""
    mesh = helpers.mesh_of(4, kind="Explicit")
    shardings = {"w": NamedSharding(mesh, P("x")), "v": NamedSharding(mesh, P())}
    placement = so.Placement(mesh, mode="local")
    tx = so.scale_by_shampoo(refresh_every=1, metrics=True, placement=placement)
    rng = np.random.default_rng(0)
    grads = {"w": rng.standard_normal((16, 4)), "v": rng.standard_normal(5)}
    grads["w"][8:12] *= np.logspace(0, -2, 4)
    wanted = [spectra(shard @ shard.T) for shard in grads["w"].reshape(4, 4, 4)]
    grads = jax.device_put(jax.tree.map(np.float32, grads), shardings)
    _, state = tx.update(grads, tx.init(grads), grads)
    for block in (None, 0, 2, 3):
        (axes,) = so.plot_spectra(state, grads, tx, "w", block=block).axes
        shown = 2 if block is None else block
        assert axes.get_title() == f"w, block {shown} of 4: 4x4"
        drawn = axes.lines[0].get_ydata()
        np.testing.assert_allclose(drawn, wanted[shown], rtol=1e-3, atol=1e-6)
    (axes,) = so.plot_placement(grads, tx).axes
    assert axes.get_title().endswith("0.0% of it padding")
    for bars in axes.containers[:2]:
        widths = [bar.get_width() for bar in bars]
        assert min(widths) == max(widths) > 0


def test_there_must_be_something_to_draw():
    with pytest.raises(ValueError, match="`params` must have blocks"):
        so.plot_placement({}, so.shampoo(0.1))
