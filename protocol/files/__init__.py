"""The model's files: config, safetensors headers, tensor names, slice map, fingerprint."""
