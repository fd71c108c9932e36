"""What every endpoint shares of HTTP: who may ask, how much, bodies, errors, event streams."""
