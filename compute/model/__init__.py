"""The model of the checkpoint, module by module, in plain torch."""
