"""Steps of the official PyTorch package, in a Python that has torch and not jax.

`python -m benchmarks.torch_worker MODEL KIND BLOCK_SIZE THREADS`, with the
repository of facebookresearch/optimizers on `PYTHONPATH`.
"""

import sys
from collections.abc import Callable

import torch
from distributed_shampoo import (
    AdamPreconditionerConfig,
    DistributedShampoo,
    RootInvShampooPreconditionerConfig,
)

from benchmarks.periods import DECAY, RATE, SHORT
from benchmarks.shapes import SMALL, SUITE, as_torch, draw
from benchmarks.worker import serve


def main() -> None:
    """Takes the steps that it is told to."""
    model, kind, block_size, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    shapes = as_torch((SUITE | SMALL)[model])
    params = [torch.nn.Parameter(torch.from_numpy(x)) for x in draw(shapes, seed=0)]
    optimizer = make(kind, params, int(block_size))

    def prepare(turn: int) -> Callable[[], object]:
        for param, grad in zip(params, draw(shapes, seed=turn), strict=True):
            param.grad = torch.from_numpy(grad)
        return optimizer.step

    serve(prepare)


def make(kind: str, params: list, block_size: int) -> torch.optim.Optimizer:
    """Builds an optimizer by its name."""
    if kind == "torch.optim.AdamW":
        return torch.optim.AdamW(params, lr=RATE, weight_decay=DECAY)
    return DistributedShampoo(
        params,
        lr=RATE,
        betas=(0.9, 0.99),
        epsilon=1e-8,
        weight_decay=DECAY,
        max_preconditioner_dim=block_size,
        precondition_frequency=SHORT,
        grafting_config=AdamPreconditionerConfig(beta2=0.99, epsilon=1e-8),
        preconditioner_config=RootInvShampooPreconditionerConfig(
            use_symmetric_packing=kind != "official, unpacked"
        ),
    )


if __name__ == "__main__":
    main()
