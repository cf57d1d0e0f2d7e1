"""`fastweights bench hebbian-softmax`: a training step of the head beside `torch.nn.Linear` and cross entropy."""
