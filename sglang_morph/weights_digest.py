"""One SHA-256 over all parameters of a model: equal digests mean equal weights, bit for bit."""

from __future__ import annotations

import hashlib

import torch

from sglang_morph.precision.linear_method import MergedLinearMethod


def weights_digest(model: torch.nn.Module) -> str:
    """SHA-256 over every parameter's name, shape, dtype and bytes, in the model's order.

    A weight that is kept in two halves counts as the weight it is rebuilt to.
    """
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}\n".encode())
        tensor = _merged(model, name) if name.endswith(".weight") else None
        raw = parameter.detach() if tensor is None else tensor
        digest.update(memoryview(raw.contiguous().view(-1).view(torch.uint8).cpu().numpy()))
    return digest.hexdigest()


def _merged(model: torch.nn.Module, name: str) -> torch.Tensor | None:
    module = model.get_submodule(name.rpartition(".")[0])
    method = getattr(module, "quant_method", None)
    return method.rebuild() if isinstance(method, MergedLinearMethod) else None
