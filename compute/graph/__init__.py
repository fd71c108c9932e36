"""One token's step as launches without a host between them, and the graphs that replay them."""
