"""The compute process: the model's layers, its sequences and the command line around them."""
