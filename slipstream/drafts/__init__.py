"""Draft models: config, EAGLE-3 training, checks against the policy."""
