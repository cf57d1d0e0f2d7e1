"""The layer of Ba et al. 2016 beside plain PyTorch, torch.compile and `torch.nn.LSTM`: time and peak memory."""
