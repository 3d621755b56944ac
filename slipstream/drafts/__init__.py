"""Draft models: methods, config, pretraining, online training, draft length, and checks against the policy."""
