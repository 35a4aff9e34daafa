"""Figures of a model and of a run: the paper's figures, and their development over a run's snapshots."""
