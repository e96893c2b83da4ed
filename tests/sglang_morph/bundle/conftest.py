from tests.sglang_morph.precision.conftest import sglang_distributed

__all__ = ["sglang_distributed"]
