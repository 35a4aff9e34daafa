"""Run folders: settings, metrics, and what a report reads from them."""
