"""Studies: variants beside a baseline, trained apart (an ablation) or with their steps in turn (a bake-off)."""
