"""Predictions are computed in evaluation mode, and each module's previous mode is restored afterwards."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_models import gradient, model, small
from torch import nn
from training.small_runs import make_photos

import vitrail
from vitrail.bulk.running import embed
from vitrail.config import BiTConfig, DataConfig
from vitrail.engines.engine import TorchEngine
from vitrail.errors import ModelError
from vitrail.evaluation.probing import ProbeSettings, probe
from vitrail.figures.model_figures import ModelFigures
from vitrail.inference import run_network
from vitrail.models.base import eval_mode


def training_model() -> vitrail.Model:
    """A model in training mode whose passes differ by dropout; one block is in evaluation mode."""
    vit = model(small(drop_path=0.9, dropout=0.5, attention_dropout=0.5))
    vit.net.train()
    vit.net.blocks[0].eval()
    return vit


def modes(net: nn.Module) -> dict[str, bool]:
    return {name: module.training for name, module in net.named_modules()}


@contextmanager
def modes_unchanged(net: nn.Module) -> Iterator[None]:
    before = modes(net)
    assert {True, False} == set(before.values())
    yield
    assert modes(net) == before


def pixels() -> np.ndarray:
    return np.array(gradient(32, 32))[None]


CALLS: dict[str, Callable[[vitrail.Model], Any]] = {
    "logits": lambda vit: vit.logits(gradient()),
    "logits of several": lambda vit: vit.logits([gradient()] * 3, batch_size=2),
    "predict": lambda vit: torch.tensor([p.score for p in vit.predict(gradient())]),
    "embed": lambda vit: vit.embed(gradient()),
    "stream": lambda vit: torch.stack(list(vit.stream([gradient()] * 2))),
    "explain": lambda vit: torch.from_numpy(np.stack(list(vit.explain(gradient()).maps.values()))),
    "figures": lambda vit: torch.from_numpy(ModelFigures(vit, [gradient()]).draw("distances").arrays["distances"]),
    "colors": lambda vit: torch.from_numpy(ModelFigures(vit, [gradient()]).draw("colors").arrays["colors"]),
    "engine": lambda vit: torch.from_numpy(TorchEngine(vit.net, vit.info).logits(pixels())),
    "service": lambda vit: run_network(vit.net, vit.preprocess, pixels(), "pooled"),
}


@pytest.mark.parametrize("call", CALLS)
def test_calls_on_a_training_model_are_deterministic_and_keep_its_modes(call: str) -> None:
    vit = training_model()
    with torch.no_grad():
        images = vit.preprocess(gradient())
        assert not torch.equal(vit.net(images), vit.net(images))
    with modes_unchanged(vit.net):
        first, second = CALLS[call](vit), CALLS[call](vit)
    assert torch.equal(first, second)
    vit.net.eval()
    assert torch.equal(CALLS[call](vit), first)


def test_measuring_a_training_model_is_deterministic_and_keeps_its_modes(tmp_path: Path) -> None:
    vit, data = training_model(), f"folder:{make_photos(tmp_path / 'photos', {'cat': 6, 'dog': 6})}"
    measurements = {
        "evaluate": lambda: vitrail.evaluate(vit, data, workers=0).loss,
        "probe": lambda: probe(
            vit, DataConfig(source=data, workers=0), settings=ProbeSettings(methods=("knn",), ks=(1,))
        ).to_dict(),
        "embed": lambda: embed(vit, data, tmp_path / "x.parquet", overwrite=True).num_images,
    }
    for name, call in measurements.items():
        with modes_unchanged(vit.net):
            assert call() == call(), name


def test_modes_are_restored_after_an_exception() -> None:
    vit = training_model()
    with modes_unchanged(vit.net), pytest.raises(ModelError, match="expected images"), eval_mode(vit.net):
        vit.net(torch.zeros(1))


def test_nested_eval_mode_restores_at_the_outermost_exit() -> None:
    vit = training_model()
    with modes_unchanged(vit.net), eval_mode(vit.net):
        with eval_mode(vit.net):
            pass
        assert not any(modes(vit.net).values())


def test_threads_sharing_a_network_all_use_evaluation_mode() -> None:
    """The first thread to leave must not switch the others to training mode."""
    vit, inside, training = training_model(), threading.Barrier(2, timeout=60), list[bool]()
    left = threading.Event()

    def first() -> None:
        with eval_mode(vit.net):
            inside.wait()
        left.set()

    def second() -> None:
        with eval_mode(vit.net):
            inside.wait()
            assert left.wait(60)
            training.append(any(modes(vit.net).values()))

    with modes_unchanged(vit.net):
        threads = [threading.Thread(target=target) for target in (first, second)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert training == [False]


def test_network_in_evaluation_mode_keeps_its_caches() -> None:
    """No mode is set, so caches stay valid and other threads are not affected."""
    vit = model(small())
    vit.logits(gradient())
    caches = [module._cache for module in vit.net.modules() if hasattr(module, "_cache")]
    vit.logits(gradient())
    assert [module._cache for module in vit.net.modules() if hasattr(module, "_cache")] == caches


def test_bit_predictions_restore_the_modes() -> None:
    bit = model(BiTConfig(image_size=32, num_classes=5, layers=(1, 1, 1, 1), width_factor=0.5))
    bit.net.train()
    bit.logits(gradient())
    assert all(modes(bit.net).values())
