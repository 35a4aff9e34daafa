"""Few-shot accuracy of a run's features."""

from __future__ import annotations

from vitrail.data.sources import open_data
from vitrail.evaluation.features import FeatureSpec, extract_features
from vitrail.evaluation.probing import ProbeSettings, probe_features, subsample
from vitrail.training.runs import Run

MAX_PROBE_IMAGES = 5000
IMAGES_PER_CLASS = 20
"""Training and test images of the few-shot probe, at most: the larger number; stratified by class."""


def few_shot(run: Run) -> dict[str, float]:
    """`5-shot`: accuracy of the paper's least-squares classifier on frozen features, 5 images per class.

    The 5 are chosen from all training images, also if the run has used a fraction of them.
    """
    splits, model = open_data(run.config.data.replace(fraction=None)), run.model.to(run.config.device)
    tested = splits.test if splits.test is not None else splits.validation
    limit = max(MAX_PROBE_IMAGES, IMAGES_PER_CLASS * len(splits.train.labels))
    parts = [subsample(source, limit) for source in (splits.train, tested)]
    train, test = (
        extract_features(
            model.net, part, preprocess=model.preprocess, spec=FeatureSpec(), batch_size=500, device=model.device
        )[0]
        for part in parts
    )
    settings = ProbeSettings(methods=("fewshot",), shots=(5,), num_seeds=5)
    (score,) = probe_features(train, test, settings, device=model.device).scores
    return {"5-shot": score.accuracy.value}
