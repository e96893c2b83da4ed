"""One SHA-256 over all parameters of a model: equal digests mean equal weights, bit for bit."""

from __future__ import annotations

import hashlib

import torch


def weights_digest(model: torch.nn.Module) -> str:
    """SHA-256 over every parameter's name, shape, dtype and bytes, in the model's order."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}\n".encode())
        raw = parameter.detach().contiguous().view(-1).view(torch.uint8).cpu()
        digest.update(memoryview(raw.numpy()))
    return digest.hexdigest()
