"""The block formats that weights and activations are stored in."""
