"""Distributed Shampoo and its family as optax gradient transforms."""

from shampoo_optax._accumulation import multi_steps
from shampoo_optax._alias import shampoo, soap
from shampoo_optax._alias_root_free import inverse_free_shampoo, root_free_rmsprop
from shampoo_optax._averaging import (
    IterateAveragingState,
    eval_params,
    primal_averaging,
    schedule_free,
    train_params,
)
from shampoo_optax._blocking import Batch
from shampoo_optax._chain import fill_absent
from shampoo_optax._config import Axes, Blocking, Storage
from shampoo_optax._decay import DecayWeightsState, decay_weights
from shampoo_optax._describe import Description, describe
from shampoo_optax._diagnose import Diagnosis, diagnose
from shampoo_optax._eigen_methods import (
    CholeskyBasis,
    Eigendecomposed,
    Eigh,
    EighBasis,
    PseudoInverse,
    QRBasis,
)
from shampoo_optax._graft import GraftState, graft
from shampoo_optax._groups import (
    BIAS,
    EMBEDDING,
    HEAD,
    NORM,
    RULES,
    TABLE,
    VECTOR,
    Groups,
    Rule,
    describe_groups,
    label_by,
)
from shampoo_optax._inverse_free import (
    ScaleByInverseFreeShampooState,
    scale_by_inverse_free_shampoo,
)
from shampoo_optax._kl import kl_shampoo, scale_by_kl_shampoo
from shampoo_optax._kl_soap import kl_soap, scale_by_kl_soap
from shampoo_optax._momentum import ScaleByMomentumState, scale_by_momentum
from shampoo_optax._newton_methods import CoupledNewton, HigherOrderNewton, NewtonDB
from shampoo_optax._placement import Placement
from shampoo_optax._plot_placement import plot_placement
from shampoo_optax._plots import plot_health, plot_spectra
from shampoo_optax._polar import NewtonSchulz, Svd
from shampoo_optax._portable import from_portable, to_portable
from shampoo_optax._presets import (
    algoperf_winner,
    llm_pretraining,
    replace_adamw,
    replace_adamw_by_soap,
    replace_sgd,
)
from shampoo_optax._rms import cap_rms, match_rms
from shampoo_optax._root_free import ScaleByRootFreeRmsState, scale_by_root_free_rms
from shampoo_optax._row_wise import (
    ScaleByRowWiseAdagradState,
    scale_by_row_wise_adagrad,
)
from shampoo_optax._schedules import WarmupCosine
from shampoo_optax._shampoo import ScaleByShampooState, scale_by_shampoo
from shampoo_optax._shardings import abstract_state, state_shardings
from shampoo_optax._sign import ScaleBySignDescentState, scale_by_sign_descent
from shampoo_optax._soap import ScaleBySoapState, scale_by_soap
from shampoo_optax._specs import specs_of
from shampoo_optax._spectral import (
    ScaleBySpectralDescentState,
    scale_by_spectral_descent,
)

__version__ = "0.1.0"

__all__ = [
    "Axes",
    "BIAS",
    "Batch",
    "Blocking",
    "CholeskyBasis",
    "CoupledNewton",
    "DecayWeightsState",
    "Description",
    "Diagnosis",
    "EMBEDDING",
    "Eigendecomposed",
    "Eigh",
    "EighBasis",
    "GraftState",
    "Groups",
    "HEAD",
    "HigherOrderNewton",
    "IterateAveragingState",
    "NORM",
    "NewtonDB",
    "NewtonSchulz",
    "Placement",
    "PseudoInverse",
    "QRBasis",
    "RULES",
    "Rule",
    "ScaleByInverseFreeShampooState",
    "ScaleByMomentumState",
    "ScaleByRootFreeRmsState",
    "ScaleByRowWiseAdagradState",
    "ScaleByShampooState",
    "ScaleBySignDescentState",
    "ScaleBySoapState",
    "ScaleBySpectralDescentState",
    "Storage",
    "Svd",
    "TABLE",
    "VECTOR",
    "WarmupCosine",
    "abstract_state",
    "algoperf_winner",
    "cap_rms",
    "decay_weights",
    "describe",
    "describe_groups",
    "diagnose",
    "eval_params",
    "fill_absent",
    "from_portable",
    "graft",
    "inverse_free_shampoo",
    "kl_shampoo",
    "kl_soap",
    "label_by",
    "llm_pretraining",
    "match_rms",
    "multi_steps",
    "plot_health",
    "plot_placement",
    "plot_spectra",
    "primal_averaging",
    "replace_adamw",
    "replace_adamw_by_soap",
    "replace_sgd",
    "root_free_rmsprop",
    "scale_by_inverse_free_shampoo",
    "scale_by_kl_shampoo",
    "scale_by_kl_soap",
    "scale_by_momentum",
    "scale_by_root_free_rms",
    "scale_by_row_wise_adagrad",
    "scale_by_shampoo",
    "scale_by_sign_descent",
    "scale_by_soap",
    "scale_by_spectral_descent",
    "schedule_free",
    "shampoo",
    "soap",
    "specs_of",
    "state_shardings",
    "to_portable",
    "train_params",
]
