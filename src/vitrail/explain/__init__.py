"""Explanations: model + image -> arrays. figures.py draws them.

explanation.py    all explanations of one image: `Model.explain`
steps.py          the same as a generator: one forward pass for attention, logits and maps
attention.py      attention of any layer, head and query token, one layer at a time
rollout.py        attention rollout
gradient.py       gradient-weighted attention rollout for a class
swin_attention.py attention inside windows, and both rollouts across windows and merges
occlusion.py      change of a class probability when parts of the image are masked
faithfulness.py   deletion and insertion curves of an explanation
distance.py       mean attention distance of each head
positions.py      similarity of position embeddings
filters.py        principal components of the patch embedding filters
colors.py         principal components of patch features as colors
"""

from vitrail.explain.attention import AttentionIterator, attention_maps
from vitrail.explain.colors import feature_colors, patch_features
from vitrail.explain.distance import attention_distance, uniform_distance
from vitrail.explain.faithfulness import Curve, Faithfulness, faithfulness
from vitrail.explain.filters import filter_components
from vitrail.explain.gradient import gradient_rollout
from vitrail.explain.occlusion import occlusion
from vitrail.explain.positions import position_similarity
from vitrail.explain.rollout import rollout, rollout_map

__all__ = [
    "AttentionIterator",
    "Curve",
    "Faithfulness",
    "attention_distance",
    "attention_maps",
    "faithfulness",
    "feature_colors",
    "filter_components",
    "gradient_rollout",
    "occlusion",
    "patch_features",
    "position_similarity",
    "rollout",
    "rollout_map",
    "uniform_distance",
]
