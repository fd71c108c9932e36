"""The APIs that clients speak: one file an endpoint, its request read and its answer written."""
