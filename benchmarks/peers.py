"""Optimizers of others, where they are installed and can be imported.

`pip install distributed-kron` or `psgd-jax` (PSGD), `optax-shampoo` (Google's Shampoo,
newer from github.com/google-research/precondition), and SOAP_JAX from
github.com/haydn-jones/SOAP_JAX. None of them is needed.
"""

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple


class Peer(NamedTuple):
    """A function of another package, or why there is none."""

    make: Callable[..., Any] | None
    module: Any
    note: str


def find(name: str, *modules: str) -> Peer:
    """Looks for a function in modules of which the first that can be imported counts.

    What was written for other releases of jax fails in many ways on import.
    """
    notes = []
    for path in modules:
        try:
            module = importlib.import_module(path)
            return Peer(getattr(module, name), module, path)
        except Exception as error:
            notes.append(f"{path}: {type(error).__name__}: {error}")
    return Peer(None, None, "; ".join(notes))


KRON = find("kron", "distributed_kron", "psgd_jax.kron")
SOAP_JAX = find("soap", "soap_jax")
GOOGLE = find(
    "distributed_shampoo",
    "precondition.distributed_shampoo",
    "optax_shampoo.distributed_shampoo",
)
