"""Reference trajectories in `data/`, and their metadata as chains of transforms.

The data come from the official PyTorch package (facebookresearch/optimizers,
commit f606606), run on fixed gradients; `meta["groups"]` holds its arguments.
"""

import dataclasses
import json
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
from helpers import partition

import shampoo_optax as so

DATA = pathlib.Path(__file__).parent / "data"

_GRAFTS = {"SGD": "sgd", "AdaGrad": "adagrad", "RMSprop": "rmsprop", "Adam": "adam"}
_DECAYS = {"DECOUPLED": "decoupled", "CORRECTED": "corrected"}
_DECAYS["INDEPENDENT"] = "independent"
_WHITENED = {"KLShampoo": so.scale_by_kl_shampoo, "Shampoo": so.scale_by_shampoo}


@dataclasses.dataclass(frozen=True)
class Case:
    """One trajectory: arrays by parameter name `p0`, `p1`, …, time first."""

    meta: dict
    init: dict
    grads: dict
    params: dict
    evals: dict  # {step: {name: array}}

    @property
    def tolerance(self) -> float:
        """Allowed error, relative to the movement |p - p_init|."""
        if self.meta["kind"] == "float32-as-shipped":
            return 1e-3
        return max(1000 * self.meta["sensitivity"]["max_rel_to_movement"], 1e-9)

    def gradients(self, step: int) -> dict:
        """The gradient tree of one step (from 0); `None` where there is none."""
        present = self.meta["grad_mask"][step]
        return {
            name: jnp.asarray(grads[step]) if present[index] else None
            for index, (name, grads) in enumerate(self.grads.items())
        }


def load(name: str) -> Case:
    with np.load(DATA / f"{name}.npz") as data:
        arrays = dict(data)
    meta = json.loads(str(arrays.pop("meta_json")))
    names = [f"p{index}" for index in range(len(meta["param_shapes"]))]

    def collect(suffix):
        return {name: arrays.pop(f"{name}_{suffix}") for name in names}

    case = Case(
        meta,
        init=collect("init"),
        grads=collect("grads"),
        params=collect("params"),
        evals={t: collect(f"eval_{t}") for t in meta["eval_after_steps"]},
    )
    assert not arrays, f"not read: {sorted(arrays)}"
    return case


def _take(options: dict, *names) -> None:
    """Fails on an option that the translation does not know."""
    unknown = set(options) - {"type", *names}
    if unknown:
        raise NotImplementedError(f"no translation of {unknown} in {options}")


def _finite(value):
    return None if value == "inf" else value


def _exponents(override: dict) -> dict:
    def one(value):
        if isinstance(value, dict):
            return {int(axis): number for axis, number in value.items()}
        return value

    return {int(order): one(value) for order, value in override.items()}


def _all_exponents(override: dict) -> dict:
    """With the official default where nothing is said: 1 / (2 order)."""

    def of_axes(order):
        default, said = 1 / (2 * order), override.get(order, {})
        said = said if isinstance(said, dict) else dict.fromkeys(range(order), said)
        return {axis: said.get(axis, default) for axis in range(order)}

    return {order: of_axes(order) for order in range(1, 5)}


def root_of(method: dict) -> dict:
    """The root record of an official configuration, and the ridges that it names."""
    options = {key: value for key, value in method.items() if key != "type"}
    match method["type"]:
        case "Eigen" | "Eigh":
            return dict(root=_decomposition(options), relative_eps=0.0)
        case "CoupledNewton":
            # The official method accepts whatever its last iterate is.
            root = so.CoupledNewton(**options, max_residual=1e6)
            return dict(root=root, relative_eps=0.0)
        case "CoupledHigherOrder":
            ridges = dict(
                eps=options.pop("abs_epsilon", 0.0),
                relative_eps=options.pop("rel_epsilon", 0.0),
            )
            return dict(root=so.HigherOrderNewton(**options), **ridges)
    raise NotImplementedError(f"no translation of the root method {method}")


def _decomposition(options: dict):
    _take(options, "rank_deficient_stability")
    stability = options.get("rank_deficient_stability", {"type": "Perturbation"})
    if stability["type"] == "PseudoInverse":
        _take(stability, "rank_rtol", "rank_atol")
        atol = stability.get("rank_atol", 0.0)
        return so.PseudoInverse(rtol=stability.get("rank_rtol"), atol=atol)
    _take(stability, "perturb_before_computation")
    before = stability.get("perturb_before_computation", True)
    return so.Eigh(ridge="before" if before else "after")


def basis_of(method: dict):
    """The record of an official way to eigenvectors."""
    options = {key: value for key, value in method.items() if key != "type"}
    if method["type"] == "QR":
        _take(options, "max_iterations", "tolerance")
        return so.QRBasis(**options)
    assert method["type"] in ("Eigh", "Eigen")
    _take(options, "tolerance", "rank_deficient_stability")
    return so.EighBasis(options.get("tolerance", 0.0))


def _eigendecomposed(method: dict) -> dict:
    stability = {k: v for k, v in method.items() if k == "rank_deficient_stability"}
    root = so.Eigendecomposed(basis_of(method), _decomposition(stability))
    return dict(root=root, relative_eps=0.0)


def _graft(options: dict) -> dict:
    _take(options, "beta2", "epsilon", "drop_weighting_factor_on_gsquare")
    drop = options.get("drop_weighting_factor_on_gsquare", False)
    arguments = dict(graft=_GRAFTS[options["type"]], graft_drop_weighting=drop)
    if "beta2" in options:
        arguments["graft_b2"] = options["beta2"]
    if "epsilon" in options:
        arguments["graft_eps"] = options["epsilon"]
    return arguments


def _filter(group: dict) -> dict:
    b1, b3 = group["betas"][0], group["beta3"]
    bias_correction = group["use_bias_correction"]
    return dict(b1=b1, b3=None if b3 < 0 else b3, bias_correction=bias_correction)


def _blocking(group: dict) -> so.Blocking:
    size, target = group["max_preconditioner_dim"], "target_parameter_dimensionality"
    return so.Blocking(_finite(size), _finite(group[target]), "trailing")


def factored_arguments(group: dict) -> dict:
    """The keywords of the direction, without those of grafting alone."""
    start = group["start_preconditioning_step"]
    return dict(
        _filter(group),
        b2=group["betas"][1],
        eps=group["epsilon"],
        refresh_every=group["precondition_frequency"],
        start=None if start < 0 else start,
        blocking=_blocking(group),
    )


def _direction(group: dict, steps: int):
    """Steps 2 to 6: the preconditioned, grafted gradient."""
    method = group["preconditioner"]
    if method["type"] in _GRAFTS:
        # A diagonal method is what grafting alone gives, before the start.
        alone = dict(b2=0.5, start=steps + 1, refresh_every=1)
        blocking = _blocking(group)
        arguments = _filter(group) | _graft(method) | alone
        return so.scale_by_shampoo(**arguments, blocking=blocking)
    if method["type"] in ("SpectralDescent", "SignDescent"):
        return _without_factors(group)
    known = ("inverse_exponent_override", "drop_weighting_factor_on_gsquare")
    scaling = ("use_trace_scaling", "trace_scaling_exponent")
    ignored = "ignored_basis_change_dims"
    _take(method, "amortized_computation", *known, *scaling, ignored)
    grafting = group["grafting"]
    arguments = factored_arguments(group) | dict(
        drop_weighting=method.get("drop_weighting_factor_on_gsquare", False),
        exponents=_exponents(method.get("inverse_exponent_override", {})),
        **(_graft(grafting) if grafting else {"graft": None}),
    )
    computation = method["amortized_computation"]
    if method["type"] == "EigenvalueCorrectedShampoo":
        axes = {int(order): axes for order, axes in method.get(ignored, {}).items()}
        arguments |= dict(basis=basis_of(computation), ignored_axes=axes)
        return so.scale_by_soap(**arguments)
    if method.get("use_trace_scaling", False):
        arguments["trace_scaling"] = method.get("trace_scaling_exponent", 0.5)
    form, kind = re.fullmatch(
        "(RootInv|Eigendecomposed)(Shampoo|KLShampoo)", method["type"]
    ).groups()
    if kind == "KLShampoo":
        arguments["exponents"] = _all_exponents(arguments["exponents"])
    root = (root_of if form == "RootInv" else _eigendecomposed)(computation)
    return _WHITENED[kind](**arguments | root)


_SIGN_SCALES = {"one": None, "sum(abs(g))": "l1"}
# Rows are outputs there.
_SCALES = {
    "one": None,
    "sqrt(d_out/d_in)": lambda rows, columns: jnp.sqrt(rows / columns),
    "sqrt(max(1,d_out/d_in))": lambda rows, columns: jnp.sqrt(
        jnp.maximum(1, rows / columns)
    ),
    "0.2*sqrt(max(d_in,d_out))": lambda rows, columns: (
        0.2 * jnp.sqrt(jnp.maximum(rows, columns))
    ),
}


def polar_of(options: dict):
    """The record of an official way to orthogonalize."""
    scale = _SCALES[options.get("scale_by_dims_fn", "one")]
    if options["type"] == "SVD":
        _take(options, "scale_by_nuclear_norm", "scale_by_dims_fn")
        return so.Svd(options.get("scale_by_nuclear_norm", False), scale)
    assert options["type"] == "NewtonSchulz"
    _take(options, "coefficients", "num_iterations", "scale_by_dims_fn")
    coefficients = options.get("coefficients", (3.4445, -4.775, 2.0315))
    steps = options.get("num_iterations", 5)
    return so.NewtonSchulz(coefficients, steps, eps=1e-8, scale=scale)


def _without_factors(group: dict):
    """Spectral descent or sign descent."""
    method, grafting = group["preconditioner"], group["grafting"]
    start = group["start_preconditioning_step"]
    arguments = dict(
        _filter(group),
        start=group["precondition_frequency"] if start < 0 else start,
        blocking=_blocking(group),
        **(_graft(grafting) if grafting else {}),
    )
    if method["type"] == "SignDescent":
        _take(method, "scale_fn")
        scale = _SIGN_SCALES[method["scale_fn"]]
        return so.scale_by_sign_descent(**arguments, scale=scale)
    _take(method, "orthogonalization")
    polar = polar_of(method["orthogonalization"])
    return so.scale_by_spectral_descent(**arguments, method=polar)


def _averaging(options: dict, rate, decay: dict):
    if options["type"] == "GeneralizedPrimalAveraging":
        _take(options, "eval_interp_coeff", "train_interp_coeff")
        return so.primal_averaging(
            rate,
            eval_coefficient=options["eval_interp_coeff"],
            train_coefficient=options["train_interp_coeff"],
            **decay,
        )
    if options["type"] == "ScheduleFree":
        _take(options, "train_interp_coeff", "eval_coeff_lr_power")
        return so.schedule_free(
            rate,
            train_coefficient=options["train_interp_coeff"],
            power=options.get("eval_coeff_lr_power", 2),
            **decay,
        )
    raise NotImplementedError(f"no translation of the averaging {options}")


def schedule(rates: list):
    """A schedule that looks its rate up in a table."""
    return lambda count: jnp.asarray(rates)[count]


def momentum_arguments(options: dict | None) -> dict:
    if options is None:
        return {}
    _take(options, "momentum", "dampening", "use_nesterov")
    nesterov = options.get("use_nesterov", False)
    dampening = options.get("dampening", 0.0)
    return dict(momentum=options["momentum"], dampening=dampening, nesterov=nesterov)


def chain_of_group(group: dict, rates: list):
    """The chain of public transforms that one parameter group stands for."""
    rate, averaging = schedule(rates), group["iterate_averaging"]
    decay, mode = group["weight_decay"], group["weight_decay_type"]
    parts = [_direction(group, len(rates))]
    if decay and mode == "L2":
        parts.insert(0, so.decay_weights(decay))
        decay = 0.0
    mode = _DECAYS.get(mode, "decoupled")
    peak = group["peak_lr"]
    if averaging and averaging["type"] != "ClassicMomentum":
        shrink = dict(weight_decay=decay, decay=mode, peak_learning_rate=peak)
        return optax.chain(
            *parts, _averaging(averaging, rate, shrink), so.fill_absent()
        )
    if decay:
        rates_of_decay = dict(learning_rate=rate, peak_learning_rate=peak)
        parts.append(so.decay_weights(decay, decay=mode, **rates_of_decay))
    if averaging:
        parts.append(so.scale_by_momentum(**momentum_arguments(averaging)))
    parts.append(optax.scale_by_learning_rate(rate))
    return optax.chain(*parts, so.fill_absent())


def chain_of(case: Case):
    """The transform of a whole case, of one or several groups."""
    groups, rates = case.meta["groups"], case.meta["lr_schedule"]
    chains = [chain_of_group(g, r) for g, r in zip(groups, rates, strict=True)]
    if len(chains) == 1:
        return chains[0]
    labels = {}
    for label, group in enumerate(groups):
        labels |= {f"p{index}": str(label) for index in group["param_indices"]}
    return partition({str(i): chain for i, chain in enumerate(chains)}, labels)


def alias_of(case: Case):
    """The alias `so.shampoo` with the arguments of a case of one group."""
    (group,), (rates,) = case.meta["groups"], case.meta["lr_schedule"]
    _take(group["preconditioner"], "amortized_computation")
    mode, grafting = group["weight_decay_type"], group["grafting"]
    graft = _graft(grafting) if grafting else {"graft": None}
    graft.pop("graft_drop_weighting", None)
    return so.shampoo(
        schedule(rates),
        **factored_arguments(group),
        relative_eps=0.0,
        **graft,
        **momentum_arguments(group["iterate_averaging"]),
        weight_decay=group["weight_decay"],
        decay="l2" if mode == "L2" else _DECAYS[mode],
        peak_learning_rate=group["peak_lr"],
    )


def _error(got: dict, want: dict, init: dict) -> float:
    """The largest error of a parameter, relative to its movement so far."""
    errors = [0.0]
    for name, target in want.items():
        value, target = np.asarray(got[name], np.float64), target.astype(np.float64)
        assert value.shape == target.shape
        movement = np.max(np.abs(target - init[name]), initial=0.0)
        error = np.max(np.abs(value - target), initial=0.0)
        errors.append(0.0 if error == 0 else np.divide(error, movement))
    return float(max(errors))


def replay(case: Case, tx) -> list[float]:
    """Runs a transform on the gradients of a case; the error after each step."""

    @jax.jit
    def advance(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params = {name: jnp.asarray(value) for name, value in case.init.items()}
    state, errors = tx.init(params), []
    for step in range(case.meta["num_steps"]):
        params, state = advance(params, state, case.gradients(step))
        wanted = {name: values[step] for name, values in case.params.items()}
        error = _error(params, wanted, case.init)
        if step + 1 in case.evals:
            snapshot = so.eval_params(state, params)
            error = max(error, _error(snapshot, case.evals[step + 1], case.init))
            back = so.train_params(state, snapshot)
            error = max(error, _error(back, wanted, case.init))
        errors.append(error)
    return errors
