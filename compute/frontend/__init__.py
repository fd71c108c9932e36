"""Prompts and text without torch: tokenizer, token map and stop strings."""
