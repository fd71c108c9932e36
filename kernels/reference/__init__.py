"""Each operator in plain float32 torch, reading like its formula."""
