"""What the research system patched into NCCL, here without a patch. See README.md in this folder."""
