"""The operators of the model, one a file; `reference/` in plain torch, `formats/` for blocks."""
