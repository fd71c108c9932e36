"""Readers for the files of a checkpoint: config, safetensors headers, slice map."""
