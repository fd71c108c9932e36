"""The shared memory that holds the experts: its layout, and how its descriptor changes hands."""
