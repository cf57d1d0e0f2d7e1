"""`fastweights bench mbpa`: local adaptation beside autograd, a query at a time and through `torch.func.vmap`."""
