"""SGLang on a CPU: its kernels' stand-in, the environment, and defaults for a small machine."""

from sglang_morph.cpu.defaults import fill_cpu_defaults
from sglang_morph.cpu.environment import (
    cpu_environment,
    is_prepared,
    prepare_process,
    wants_cpu,
)

__all__ = ["cpu_environment", "fill_cpu_defaults", "is_prepared", "prepare_process", "wants_cpu"]
