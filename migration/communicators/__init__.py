"""One small file per communicator: `base` says who calls what and when, `gloo` and `sandbox` do it."""
