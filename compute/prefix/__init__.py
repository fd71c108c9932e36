"""Prefix reuse: states of earlier requests, kept so that a request which begins alike goes on."""
