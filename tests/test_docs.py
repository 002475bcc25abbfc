"""Holds the documents to the code: docstrings, their examples, README, CHANGELOG."""

import ast
import dataclasses
import doctest
import functools
import importlib
import inspect
import pkgutil
import re
import textwrap
from pathlib import Path

import helpers
import jax
import numpy as np
import optax
import pytest

import shampoo_optax as so

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
MIGRATION = (ROOT / "shampoo_optax" / "MIGRATION.md").read_text()
CHANGELOG = (ROOT / "shampoo_optax" / "CHANGELOG.md").read_text()

PUBLIC = {name: getattr(so, name) for name in so.__all__}
CALLABLES = {name: value for name, value in PUBLIC.items() if callable(value)}
FUNCTIONS = {n: v for n, v in CALLABLES.items() if inspect.isfunction(v)}
RECORDS = {n: v for n, v in CALLABLES.items() if dataclasses.is_dataclass(v)}
STATES = {n: v for n, v in CALLABLES.items() if hasattr(v, "_fields")}
TRANSFORMS = {
    name: function
    for name, function in FUNCTIONS.items()
    if "GradientTransformation" in str(inspect.signature(function).return_annotation)
}
# The transforms that compute nothing a paper could describe.
PLUMBING = {"fill_absent"}
# What is put together with a method, or stands for one under another name.
PARTS = {"fill_absent", "decay_weights", "momentum", "root_free_rms"}
PARTS |= {"row_wise_adagrad", "graft", "cap_rms", "match_rms", "multi_steps"}
PARTS |= {"replace_adamw_by_soap", "llm_pretraining"}
MODULES = [
    f"shampoo_optax.{info.name}"
    for info in pkgutil.walk_packages(so.__path__)
    if not info.name.startswith("__")
]


def sections(thing) -> dict[str, str]:
    """Splits a docstring into its Google sections; the text before them is ``""``."""
    found = {"": ""}
    current = ""
    for line in (inspect.getdoc(thing) or "").splitlines():
        heading = re.fullmatch(r"([A-Z][A-Za-z]*):", line)
        if heading:
            current = heading[1]
            found[current] = ""
        else:
            found[current] += line + "\n"
    return found


def entries(section: str) -> set[str]:
    """Lists the names that a section describes: ``name: ...`` or ``a, b: ...``."""
    heads = re.findall(
        r"^([*\w][*\w, ]*?)(?: \(.*?\))?:", textwrap.dedent(section), re.M
    )
    return {name.strip(" *") for head in heads for name in head.split(",")}


def raises_itself(thing) -> bool:
    tree = ast.parse(textwrap.dedent(inspect.getsource(thing)))
    return any(isinstance(node, ast.Raise) for node in ast.walk(tree))


def test_all_is_sorted_and_complete():
    assert list(so.__all__) == sorted(so.__all__)
    assert len(set(so.__all__)) == len(so.__all__)
    assert FUNCTIONS and RECORDS and STATES and TRANSFORMS


@pytest.mark.parametrize("name", CALLABLES)
def test_docstring_starts_with_one_sentence(name):
    first, _, rest = sections(CALLABLES[name])[""].partition("\n")
    assert first.endswith(".")
    assert not rest.strip() or rest.startswith("\n")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function_docstring(name):
    function = FUNCTIONS[name]
    found = sections(function)
    arguments = set(inspect.signature(function).parameters)
    assert arguments == (entries(found["Args"]) if arguments else set())
    assert found["Returns"].strip()
    assert ">>>" in found["Examples"]
    if raises_itself(function) or (name in TRANSFORMS and arguments):
        assert "ValueError" in found["Raises"]


@pytest.mark.parametrize("name", sorted(set(TRANSFORMS) - PLUMBING))
def test_algorithm_cites_its_source(name):
    cited = sections(TRANSFORMS[name])["References"]
    assert re.search(r"[12]\d{3}", cited) and "https://" in cited


@pytest.mark.parametrize("name", RECORDS)
def test_record_docstring(name):
    record = RECORDS[name]
    found = sections(record)
    fields = {field.name for field in dataclasses.fields(record)}
    assert entries(found.get("Args") or found["Attributes"]) == fields
    if hasattr(record, "__post_init__"):
        assert "ValueError" in found["Raises"]


@pytest.mark.parametrize("name", STATES)
def test_state_docstring(name):
    state = STATES[name]
    found = sections(state)
    assert entries(found.get("Attributes") or found["Args"]) == set(state._fields)


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples_run(name):
    module = importlib.import_module(name)
    assert module.__doc__
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    assert doctest.testmod(module, optionflags=options).failed == 0


@functools.lru_cache
def readme_names() -> dict:
    """What the code of the README, run in its order, defines."""
    return helpers.run_blocks(README, "README.md")


def test_readme_code_runs():
    assert {"train_step", "muon", "opt_state"} <= set(readme_names())


@pytest.mark.parametrize("nesterov", [False, True])
def test_muon_of_the_readme_is_that_of_optax(nesterov):
    shapes = {"a": (9, 5), "b": (4, 10), "c": (6, 6), "d": (5, 1), "e": (1, 5)}
    steps = helpers.normal_steps(shapes, 20)
    names, rate = readme_names(), optax.scale_by_learning_rate(0.02)
    ours = names["muon"] if nesterov else optax.chain(names["plain"], rate)
    theirs = optax.contrib.muon(0.02, nesterov=nesterov)
    got, want = (
        helpers.trace(tx, steps[0], steps, jit=helpers.quick_jit)[0]
        for tx in (ours, theirs)
    )
    assert max(map(helpers.worst, got, want)) <= 1e-5
    assert all(np.any(update["e"]) for update in want)


@pytest.mark.parametrize(
    "command",
    [
        'python -m pip install -e ".[demo]" && python -m benchmarks.train',
        'python -m pip install -e ".[test]" && python -m pytest',
    ],
)
def test_readme_names_the_commands(command):
    assert command in README


def test_readme_is_short():
    assert README.count("\n") <= 190
    assert max(map(len, README.splitlines())) <= 115


def test_readme_names_what_there_is():
    assert re.findall(r"\bso\.(\w+)", README)
    assert set(re.findall(r"\bso\.(\w+)", README)) - set(so.__all__) == set()


def test_readme_table_of_methods_is_complete():
    _, _, rows = README.partition("| take | where |\n| --- | --- |\n")
    named = set(re.findall(r"`so\.(\w+)", rows.partition("\n\n")[0]))
    choices = {name.removeprefix("scale_by_") for name in TRANSFORMS} - PARTS
    assert choices <= {name.removeprefix("scale_by_") for name in named}


def test_readme_links_lead_somewhere():
    local = re.findall(r"\]\((?!https?://|#)([^)#]+)", README)
    assert [target for target in local if not (ROOT / target).exists()] == []


def test_readme_table_gives_the_defaults():
    parameters = inspect.signature(so.shampoo).parameters
    shown = {}
    for names, defaults in re.findall(r"^\| (`.+?) \| (`.+?) \|", README, re.M):
        values = [eval(text, {"so": so}) for text in re.findall("`(.+?)`", defaults)]
        shown |= zip(re.findall("`(.+?)`", names), values, strict=True)
    assert len(shown) >= 10
    assert shown == {name: parameters[name].default for name in shown}


# ---- from other packages

# The arguments of `DistributedShampoo` (facebookresearch/optimizers, f606606), and the
# records and fields that its configurations are made of.
PYTORCH = """
params lr betas beta3 epsilon weight_decay weight_decay_type max_preconditioner_dim
precondition_frequency start_preconditioning_step use_bias_correction
iterate_averaging_config grafting_config use_pin_memory shampoo_pt2_compile_config
distributed_config preconditioner_config shampoo_runtime_config concurrency_config

RootInvShampooPreconditionerConfig EigendecomposedShampooPreconditionerConfig
EigenvalueCorrectedShampooPreconditionerConfig RootInvKLShampooPreconditionerConfig
EigendecomposedKLShampooPreconditionerConfig SpectralDescentPreconditionerConfig
SignDescentPreconditionerConfig SGDPreconditionerConfig AdaGradPreconditionerConfig
RMSpropPreconditionerConfig AdamPreconditionerConfig beta2
drop_weighting_factor_on_gsquare amortized_computation_config factor_matrix_dtype
inv_factor_matrix_dtype factor_matrix_eigenvectors_dtype factor_matrix_eigenvalues_dtype
corrected_eigenvalues_dtype num_tolerated_failed_amortized_computations
use_symmetric_packing use_trace_scaling trace_scaling_exponent inverse_exponent_override
ignored_basis_change_dims orthogonalization_config scale_fn

EigenConfig EighEigendecompositionConfig QREigendecompositionConfig PerturbationConfig
PseudoInverseConfig CoupledNewtonConfig CoupledHigherOrderConfig abs_epsilon rel_epsilon
perturb_before_computation retry_double_precision eigendecomposition_offload_device
SVDOrthogonalizationConfig NewtonSchulzOrthogonalizationConfig num_iterations
coefficients scale_by_dims_fn

ClassicMomentumConfig GeneralizedPrimalAveragingConfig ScheduleFreeConfig

target_parameter_dimensionality SingleDeviceDistributedConfig DDPDistributedConfig
FSDPDistributedConfig HSDPDistributedConfig FullyShardDistributedConfig
HybridShardDistributedConfig communication_dtype num_trainers_per_group
communicate_params load_balancing_config param_assignment_strategy num_sub_groups
param_to_metadata device_mesh
""".split()
# Those of `distributed_shampoo` (google-research/precondition, 2a0f2f6).
GOOGLE = """
learning_rate block_size beta1 beta2 diagonal_epsilon matrix_epsilon weight_decay
start_preconditioning_step preconditioning_compute_steps
decay_preconditioning_compute_steps end_preconditioning_compute_steps
statistics_compute_steps best_effort_shape_interpretation graft_type nesterov
exponent_override batch_axis_name statistics_partition_spec
preconditioner_partition_spec num_devices_for_pjit shard_optimizer_states
best_effort_memory_usage_reduction inverse_failure_threshold
moving_average_for_momentum skip_preconditioning_dim_size_gt
clip_by_scaled_gradient_norm precision tensordot_precision relative_matrix_epsilon
merge_small_dims_block_size lobpcg_topk_precondition lobpcg_max_iter
precondtioner_type generate_fd_metrics compression_rank frequent_directions
reset_preconditioner average_grad skip_preconditioning_rank_lt decoupled_learning_rate
decoupled_weight_decay generate_training_metrics reuse_preconditioner eigh
""".split()
FROM_PYTORCH, FROM_GOOGLE = MIGRATION.split("\n## ")[1:]
ROW = re.compile(r"^\| (`.+?`) \| (.*?) \|(.*)\|$", re.M)
OURS = sorted(
    {
        code
        for _, ours, remarks in ROW.findall(MIGRATION)
        for code in re.findall("`(.+?)`", ours)
        + re.findall(r"`((?:so\.|optax\.|\w+=).*?)`", remarks)
    }
)


@pytest.mark.parametrize(
    "text, arguments", [(FROM_PYTORCH, PYTORCH), (FROM_GOOGLE, GOOGLE)]
)
def test_every_argument_of_theirs_is_listed(text, arguments):
    assert [name for name in arguments if f"`{name}`" not in text] == []
    rows = {name for row in ROW.findall(text) for name in re.findall(r"\w+", row[0])}
    assert rows - set(arguments) == set()


def named_arguments() -> set[str]:
    """All arguments of transforms, fields of records and of states."""
    callables = [CALLABLES[name] for name in (*TRANSFORMS, *RECORDS, *STATES)]
    return {name for one in callables for name in inspect.signature(one).parameters}


@pytest.mark.parametrize("code", OURS)
def test_every_option_of_ours_is_there(code):
    call = ast.parse(f"_({code})", mode="eval").body
    alone = [node.id for node in call.args if isinstance(node, ast.Name)]
    keywords = [keyword.arg for keyword in call.keywords]
    assert {*alone, *keywords} <= named_arguments()
    spaces = dict(so=so, optax=optax, jax=jax, mesh=helpers.mesh_of(8))
    spaces |= dict(params={"w": np.ones((8, 4))}, specs=jax.sharding.PartitionSpec("x"))
    for node in [*call.args, *(keyword.value for keyword in call.keywords)]:
        if not isinstance(node, ast.Name):
            eval(compile(ast.Expression(node), code, "eval"), spaces)


def test_changelog_top_version():
    newest = re.search(r"^## \[?(\d[^\]\s]*)", CHANGELOG, re.M)
    assert newest[1] == so.__version__
