"""What the research system patched into other projects' code, here beside the stock wheels."""
