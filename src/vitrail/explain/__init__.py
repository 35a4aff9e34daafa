"""Model + image -> arrays that say what happens inside; figures.py: arrays -> images.

attention.py      attention of any layer, head and token, one layer at a time
rollout.py        how much of each patch reaches the answer through all layers
gradient.py       the same, weighed by what speaks for a class
occlusion.py      what hiding a part does to the class's probability
faithfulness.py   which of these can be trusted: deletion and insertion
distance.py       how far each head looks
positions.py      how alike the positions are
filters.py        what the patch projection looks for
colors.py        patches colored by their features
"""

from vitrail.explain.attention import Walk, attention_views
from vitrail.explain.colors import feature_colors, patch_features
from vitrail.explain.distance import attention_distance, uniform_distance
from vitrail.explain.faithfulness import Curve, Faithfulness, faithfulness
from vitrail.explain.filters import filters
from vitrail.explain.gradient import gradient_view
from vitrail.explain.occlusion import occlusion
from vitrail.explain.positions import position_similarity
from vitrail.explain.rollout import class_view, rollout

__all__ = [
    "Curve",
    "Faithfulness",
    "Walk",
    "attention_distance",
    "attention_views",
    "class_view",
    "faithfulness",
    "feature_colors",
    "filters",
    "gradient_view",
    "occlusion",
    "patch_features",
    "position_similarity",
    "rollout",
    "uniform_distance",
]
