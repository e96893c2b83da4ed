"""Quantized checkpoints of other tools as sources of variants."""
