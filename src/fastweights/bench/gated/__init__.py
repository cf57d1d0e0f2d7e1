"""The layer of Schlag & Schmidhuber 2017 beside plain PyTorch, torch.compile, an LSTM, and their table 2."""
