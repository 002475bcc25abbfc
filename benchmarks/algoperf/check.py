"""Runs the submissions in AlgoPerf's own harness: small models, made-up batches.

    python benchmarks/algoperf/check.py run mnist --devices 8 --out out/check
    python benchmarks/algoperf/check.py table --out out/check
    python benchmarks/algoperf/check.py sizes

The harness must be installed, or be on `PYTHONPATH`. Loop, workloads, losses and
checkpoints are the harness's. Models are smaller, every step sees the same batch, a
workload hints at 600 steps, roots are refreshed at every second step, and nothing is
evaluated. With SGD's grafting the rate of 4.2 warms up over 60 steps, and the ridge is
1e-4: factors of few examples have a low rank, and rounding would decide on the rest.
"""

import argparse
import collections
import functools
import importlib
import itertools
import json
import logging
import math
import types
from pathlib import Path
from unittest import mock

import jax
import numpy as np
import submission_runner
from absl import flags
from algoperf import jax_sharding_utils
from algoperf.profiler import PassThroughProfiler
from algoperf.workloads import workloads
from flax.training import checkpoints
from jax.sharding import Mesh

import shampoo_optax as so

FOLDER = Path(__file__).parent
BATCH, STEPS = 16, 5
CHANGES = dict(refresh_every=2)
# MNIST's one large matrix is a single block else, which no devices can share.
BLOCK_SIZES = {"mnist": 256}
SGD_CHANGES = dict(warmup_factor=0.1, eps=1e-4)
SELF = "self"
# The workloads, and the points of the search space that each is run with.
POINTS = {
    "mnist": (1, 2, 3, 4, 5, SELF),
    "criteo1tb": (2, 4, SELF),
    "ogbg": (3, 5, SELF),
    "imagenet_vit": (3, 5, SELF),
    "wmt": (2, 4, SELF),
}

# ---- batches


def digits(rng):
    """Images and labels of MNIST's shapes."""
    inputs = rng.standard_normal((BATCH, 28, 28, 1), np.float32)
    return {"inputs": inputs, "targets": rng.integers(10, size=BATCH)}


def images(rng):
    """Images of four patches."""
    inputs = rng.standard_normal((BATCH, 32, 32, 3), np.float32)
    return {"inputs": inputs, "targets": rng.integers(1000, size=BATCH)}


def clicks(rng):
    """Numbers and rows of the table, one of them for each example."""
    numbers = rng.standard_normal((BATCH, 13), np.float32)
    classes = rng.integers(1_000_000, size=(BATCH, 26)).astype(np.float32)
    return {
        "inputs": np.concatenate([numbers, classes], 1),
        "targets": rng.integers(2, size=BATCH).astype(np.float32),
        "weights": np.ones(BATCH, np.float32),
    }


def sentences(rng):
    """Sentences, half of them with padding."""
    inputs, targets = rng.integers(1, 64, size=(2, BATCH, 12))
    inputs[::2, 8:] = targets[::2, 8:] = 0
    weights = (targets > 0).astype(np.float32)
    return {"inputs": inputs, "targets": targets, "weights": weights}


def molecules(rng):
    """Graphs with unknown labels, put together by the harness for 8 devices."""
    pipeline = importlib.import_module("algoperf.workloads.ogbg.input_pipeline")

    def held(array):
        return types.SimpleNamespace(_numpy=lambda: np.asarray(array))

    def example():
        labels = rng.integers(2, size=128).astype(np.float32)
        labels[::5] = np.nan
        return {
            "edge_feat": held(rng.standard_normal((20, 3), np.float32)),
            "node_feat": held(rng.standard_normal((10, 9), np.float32)),
            "edge_index": held(rng.integers(10, size=(20, 2))),
            "labels": held(labels),
            "num_nodes": held([10]),
        }

    batches = pipeline._get_batch_iterator(iter(example, None), 2 * BATCH, num_shards=8)
    return next(batches)


BATCHES = {
    "mnist": digits,
    "criteo1tb": clicks,
    "ogbg": molecules,
    "imagenet_vit": images,
    "wmt": sentences,
}

# ---- workloads


def smaller_vit():
    """Two blocks of 32 channels."""
    module = importlib.import_module(
        "algoperf.workloads.imagenet_vit.imagenet_jax.workload"
    )
    shape = dict(width=32, depth=2, mlp_dim=48, num_heads=2, patch_size=(16, 16))
    module.decode_variant = lambda variant: shape
    return {}


def smaller_transformer():
    """Two layers of 32 channels, 64 tokens."""
    models = importlib.import_module("algoperf.workloads.wmt.wmt_jax.models")
    shape = dict(emb_dim=32, num_heads=2, num_layers=2, qkv_dim=32, mlp_dim=48)
    config = functools.partial(models.TransformerConfig, vocab_size=64, **shape)
    models.TransformerConfig = config
    return dict(_vocab_size=64)


SMALLER = {
    "mnist": dict,
    "criteo1tb": lambda: dict(  # the table keeps a million rows
        vocab_size=1_000_000,
        embed_dim=4,
        mlp_bottom_dims=(64, 64, 4),
        mlp_top_dims=(64, 64, 64, 1),
    ),
    "ogbg": lambda: dict(hidden_dims=(16,), latent_dim=16, num_message_passing_steps=2),
    "imagenet_vit": smaller_vit,
    "wmt": smaller_transformer,
}


def workload_of(name):
    """The harness's workload with a smaller model, and one batch for ever."""
    entry = workloads.WORKLOADS[name]
    place = f"{workloads.BASE_WORKLOADS_DIR}{entry['workload_path']}_jax/workload.py"
    kind = workloads.import_workload(place, entry["workload_class_name"], True)
    batch = BATCHES[name](np.random.default_rng(0))

    def queue(self, *args, **kwargs):
        split = jax_sharding_utils.shard_along_batch_dim
        return (split(batch) for _ in itertools.count())

    changes = dict(
        step_hint=600,
        _build_input_queue=queue,
        eval_model=lambda self, *args: {},
        has_reached_validation_target=lambda self, result: False,
        has_reached_test_target=lambda self, result: False,
    )
    return type(kind.__name__, (kind,), changes | SMALLER[name]())()


# ---- runs


class Compilations(logging.Handler):
    """Counts how often XLA has compiled the step."""

    count = 0

    def emit(self, record):
        """Looks at one line of the log."""
        self.count += "XLA compilation of jit(train_step)" in record.getMessage()


def watched(update_params, states):
    """As it is, but waited for; the last state of the optimizer stays in a list."""

    @functools.wraps(update_params)
    def update(**kwargs):
        result = jax.block_until_ready(update_params(**kwargs))
        states[:] = [result[0][0]]
        return result

    return update


def fullest(state):
    """The bytes of Shampoo's state on the device that has the most."""
    held = collections.Counter()
    for leaf in jax.tree.leaves(state[1].inner_states["rest"]):
        for shard in leaf.addressable_shards:
            held[shard.device] += shard.data.nbytes
    return max(held.values())


def saved(state, folder):
    """Whether the checkpoint in a folder holds the state, bit for bit."""
    raw = checkpoints.restore_checkpoint(folder, target=None)
    target = raw | {"optimizer_state": state}
    held = checkpoints.restore_checkpoint(folder, target)["optimizer_state"]
    pairs = zip(jax.tree.leaves(state), jax.tree.leaves(held), strict=True)
    return raw["global_step"] == STEPS and all(np.array_equal(a, b) for a, b in pairs)


def run_point(workload, name, point, space, logs):
    """Five steps of the harness's loop, and what there is to say about them."""
    ruleset = SELF if point == SELF else "external"
    module = importlib.import_module(f"{ruleset}_tuning.submission")
    flags.FLAGS.tuning_ruleset = ruleset
    losses, states, compiled = [], [], Compilations()
    logging.getLogger("jax").addHandler(compiled)
    tuning = dict(tuning_search_space=space, num_tuning_trials=5)
    tuning |= dict(hparam_start_index=point != SELF and point - 1)
    tuning |= dict(hparam_end_index=point)
    with mock.patch.multiple(
        module,
        log=lambda *args, loss, **rest: losses.append(loss.item()),
        update_params=watched(module.update_params, states),
        Hyperparameters=functools.partial(module.Hyperparameters, **changes_of(name)),
    ):
        submission_runner.score_submission_on_workload(
            workload,
            name,
            f"{ruleset}_tuning/submission.py",
            data_dir="",
            tuning_ruleset=ruleset,
            profiler=PassThroughProfiler(),
            max_global_steps=STEPS,
            log_dir=str(logs),
            rng_seed=1,
            skip_evals=True,
            **({} if point == SELF else tuning),
        )
    logging.getLogger("jax").removeHandler(compiled)
    trial = logs / f"trial_{1 if point == SELF else point}"
    return dict(
        losses=losses,
        compilations=compiled.count,
        bytes=fullest(states[0]),
        saved=saved(states[0], trial),
    )


def changes_of(name):
    """What is set otherwise than in the search space, for all points of a workload."""
    blocks = {"block_size": BLOCK_SIZES[name]} if name in BLOCK_SIZES else {}
    return CHANGES | blocks


def changed(row, name):
    """A point of the search space as it is run here."""
    return row | changes_of(name) | (SGD_CHANGES if row["graft"] == "sgd" else {})


def run(name, devices, out):
    """Runs a workload on so many simulated devices; writes what it finds."""
    jax.config.update("jax_num_cpu_devices", devices)
    jax.config.update("jax_log_compiles", True)
    flags.FLAGS(["check", "--framework=jax", f"--workload={name}"])
    out.mkdir(parents=True, exist_ok=True)
    rows = json.loads((FOLDER / "external_tuning/tuning_search_space.json").read_text())
    space = out / "search_space.json"
    space.write_text(json.dumps([changed(row, name) for row in rows]))
    workload = workload_of(name)
    found = {}
    for point in POINTS[name]:
        logs = out / f"{name}-{devices}-{point}"
        logs.mkdir()
        found[point] = run_point(workload, name, point, space, logs)
    (out / f"{name}-{devices}.json").write_text(json.dumps(found))


def table(out):
    """Prints a row for each run that there is on one and on 8 devices."""
    print(
        "| workload | point | first and last loss | difference, 8 devices to 1 "
        "| compilations | state of a device, 1 and 8 | checkpoint |\n"
        "|---|---|---|---|---|---|---|"
    )
    for name in POINTS:
        pair = [json.loads((out / f"{name}-{d}.json").read_text()) for d in (1, 8)]
        for point in pair[0]:
            print(row(name, point, *(found[point] for found in pair)))


def row(name, point, one, eight):
    """What was found about a workload and a point."""
    losses, others = np.array(one["losses"]), np.array(eight["losses"])
    cells = (
        name,
        point,
        f"{others[0]:.4f} → {others[-1]:.4f}",
        f"{np.abs(losses - others).max():.0e}",
        f"{one['compilations']}, {eight['compilations']}",
        f"{one['bytes'] / 1e3:,.0f}, {eight['bytes'] / 1e3:,.0f} kB",
        "equal" if one["saved"] and eight["saved"] else "differs",
    )
    return f"| {' | '.join(cells)} |"


# ---- sizes


def whole_models():
    """The parameters of the harness's own models, as shapes."""
    place = "algoperf.workloads"
    vit = importlib.import_module(f"{place}.imagenet_vit.imagenet_jax.models")
    small = importlib.import_module(f"{place}.imagenet_vit.workload")
    gnn = importlib.import_module(f"{place}.ogbg.ogbg_jax.models")
    dlrm = importlib.import_module(f"{place}.criteo1tb.criteo1tb_jax.models")
    wmt = importlib.import_module(f"{place}.wmt.wmt_jax.models")
    images = vit.ViT(num_classes=1000, **small.decode_variant("S/16"))
    words = wmt.Transformer(wmt.TransformerConfig(deterministic=True))
    tokens, graph = np.ones((1, 256)), molecules(np.random.default_rng(0))["inputs"]
    made = {
        "criteo1tb": (dlrm.DlrmSmall(), np.ones((2, 39), np.float32)),
        "ogbg": (gnn.GNN(128), graph),
        "imagenet_vit": (images, np.ones((1, 224, 224, 3), np.float32)),
        "wmt": (words, tokens, tokens),
    }
    for name, (model, *given) in made.items():
        settings = {} if name == "wmt" else dict(train=False)
        init = functools.partial(model.init, **settings)
        yield name, jax.eval_shape(init, jax.random.key(0), *given)["params"]


def sizes():
    """Prints the size of Shampoo's state for the models as they are."""
    jax.config.update("jax_num_cpu_devices", 8)
    module = importlib.import_module("external_tuning.submission")
    print(
        "| workload | parameters | state of a device, of 1 | of 8 |\n|---|---|---|---|"
    )
    for name, params in whole_models():
        held = []
        for devices in (1, 8):
            mesh = Mesh(np.array(jax.devices()[:devices]), ("batch",))
            tx = module.make_optimizer(module.Hyperparameters(), 600, mesh)
            state = so.abstract_state(tx, params)[1].inner_states["rest"]
            held.append(sum(map(bytes_of_shard, jax.tree.leaves(state))))
        millions = sum(leaf.size for leaf in jax.tree.leaves(params)) / 1e6
        shown = (f"{size / 1e6:,.1f} MB" for size in held)
        print(f"| {name} | {millions:.1f} M | {' | '.join(shown)} |")


def bytes_of_shard(leaf):
    """The bytes of an array on one device."""
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


def main():
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("run", "table", "sizes"))
    parser.add_argument("workload", nargs="?", choices=tuple(POINTS))
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.what == "run":
        run(given.workload, given.devices, given.out)
    elif given.what == "table":
        table(given.out)
    else:
        sizes()


if __name__ == "__main__":
    main()
