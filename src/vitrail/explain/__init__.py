"""Model + image -> arrays that say what happens inside."""

from vitrail.explain.rollout import class_view, rollout

__all__ = ["class_view", "rollout"]
