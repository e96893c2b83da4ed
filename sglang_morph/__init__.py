"""sglang_morph: SGLang with weight precision and KV-cache capacity as one elastic memory budget."""

__version__ = "0.1.0"
