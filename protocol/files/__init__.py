"""The model's files: config, safetensors headers, tensor names, the slice map and the fingerprint."""
