"""The recurrences as functions: a reference in plain PyTorch, and kernels that give the same answer faster."""
