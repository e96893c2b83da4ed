"""Whether a variant's kernel computes what it should, tried on the weights it will run on."""

from __future__ import annotations

import torch
from torch.nn.functional import linear

from sglang_morph.precision.variants.base import Parts, Variant, parts_on_device

BATCHES = (1, 17)
"""One token, and a number that no tile divides."""


class WrongKernel(RuntimeError):
    """A kernel is missing or computes something else. One line naming the linear."""


def preflight(variant: Variant, weight: torch.Tensor, where: str) -> float:
    """The largest relative error of `variant` on `weight` and random activations.

    `weight` is `[N, K]`, contiguous, on the device that will compute, in the dtype of the
    activations; `where` names it. Expects what `for_weight` returned. Raises `WrongKernel` beyond
    the variant's tolerance, or where the kernel fails. Takes a few times the weight in scratch
    memory, and waits for the device.
    """
    reference = variant.reference(weight).to(weight.device)
    try:
        parts = parts_on_device(variant, weight)
        errors = [_error(variant, parts, reference, _tokens(weight, batch)) for batch in BATCHES]
    except Exception as failure:
        cause = str(failure).partition("\n")[0]
        message = f"{where}: {variant.kernel} failed: {cause}; {_remedy(variant)}"
        raise WrongKernel(message) from failure
    for batch, error in zip(BATCHES, errors, strict=True):
        if not error <= variant.tolerance:  # also where it is NaN
            raise WrongKernel(
                f"{where}: {variant.kernel} is off by {error:.3f} of the result's norm at "
                f"{batch} tokens, allowed are {variant.tolerance}; {_remedy(variant)}"
            )
    return max(errors)


def _tokens(weight: torch.Tensor, batch: int) -> torch.Tensor:
    """`[batch, K]`, the same on every device and in every run."""
    generator = torch.Generator().manual_seed(batch)
    x = torch.randn(batch, weight.shape[1], generator=generator)
    return x.to(weight.device, weight.dtype)


def _error(variant: Variant, parts: Parts, reference: torch.Tensor, x: torch.Tensor) -> float:
    expected = linear(x.float(), reference)
    difference = variant.linear(parts, x, None).float() - expected
    return float(difference.norm() / expected.norm().clamp_min(torch.finfo(torch.float32).tiny))


def _remedy(variant: Variant) -> str:
    return f"leave {variant.name} out of --morph-variants, or use --memory-backend static"
