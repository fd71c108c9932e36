"""Prompts, text and HTTP without torch: what stands between clients and the compute service."""
