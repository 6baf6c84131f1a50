"""Studies that users run on their own GPU: the paper's evaluation, the ladder, the ablation, and profiles."""
