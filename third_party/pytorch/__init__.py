"""What the research system patched into PyTorch, here as wiring on the stock wheel. See README.md in this folder."""
