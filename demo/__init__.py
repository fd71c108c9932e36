"""The demo model: a small trained checkpoint in the DeepSeek-V4.1 Flash layout, as package data.

The package holds files and no code that headrace runs; README.md says what each file is.
`--model demo` names this folder. `train_demo.py` is the program that made it, kept as it was run.
"""
