"""Whatever is asked of a model is computed in evaluation mode, and every part is then in the mode it was in."""

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
from train.small_runs import photos

import vitrail
from vitrail.api.embedding import embed
from vitrail.api.model_figures import ModelFigures
from vitrail.api.probing import ProbeSettings, probe
from vitrail.config import BiTConfig, DataConfig
from vitrail.errors import ModelError
from vitrail.export.engines import TorchEngine
from vitrail.models.base import eval_mode
from vitrail.serve.served_model import features


def learning() -> vitrail.Model:
    """A model in training mode, in which two passes differ, with one block that is kept in evaluation mode."""
    vit = model(small(drop_path=0.9, dropout=0.5, attention_dropout=0.5))
    vit.net.train()
    vit.net.blocks[0].eval()
    return vit


def modes(net: nn.Module) -> dict[str, bool]:
    return {name: module.training for name, module in net.named_modules()}


@contextmanager
def unchanged(net: nn.Module) -> Iterator[None]:
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
    "service": lambda vit: torch.from_numpy(features(vit, pixels())),
}


@pytest.mark.parametrize("call", CALLS)
def test_two_calls_in_training_mode_give_the_same_and_change_no_mode(call: str) -> None:
    vit = learning()
    with torch.no_grad():
        images = vit.preprocess(gradient())
        assert not torch.equal(vit.net(images), vit.net(images))
    with unchanged(vit.net):
        once, again = CALLS[call](vit), CALLS[call](vit)
    assert torch.equal(once, again)
    vit.net.eval()
    assert torch.equal(CALLS[call](vit), once)


def test_measuring_in_training_mode_gives_the_same_and_changes_no_mode(tmp_path: Path) -> None:
    vit, data = learning(), f"folder:{photos(tmp_path / 'photos', {'cat': 6, 'dog': 6})}"
    measured = {
        "evaluate": lambda: vitrail.evaluate(vit, data, workers=0).loss,
        "probe": lambda: probe(
            vit, DataConfig(source=data, workers=0), settings=ProbeSettings(methods=("knn",), ks=(1,))
        ).to_dict(),
        "embed": lambda: embed(vit, data, tmp_path / "x.parquet", overwrite=True).num_images,
    }
    for name, call in measured.items():
        with unchanged(vit.net):
            assert call() == call(), name


def test_an_exception_restores_the_modes_too() -> None:
    vit = learning()
    with unchanged(vit.net), pytest.raises(ModelError, match="expected images"), eval_mode(vit.net):
        vit.net(torch.zeros(1))


def test_one_inside_the_other_the_outer_restores() -> None:
    vit = learning()
    with unchanged(vit.net), eval_mode(vit.net):
        with eval_mode(vit.net):
            pass
        assert not any(modes(vit.net).values())


def test_threads_that_share_a_network_all_evaluate() -> None:
    """The first one to leave must not put the others into training mode."""
    vit, inside, seen = learning(), threading.Barrier(2, timeout=60), list[bool]()
    left = threading.Event()

    def first() -> None:
        with eval_mode(vit.net):
            inside.wait()
        left.set()

    def second() -> None:
        with eval_mode(vit.net):
            inside.wait()
            assert left.wait(60)
            seen.append(any(modes(vit.net).values()))

    with unchanged(vit.net):
        threads = [threading.Thread(target=each) for each in (first, second)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert seen == [False]


def test_a_network_in_evaluation_mode_keeps_what_it_remembers() -> None:
    """Nothing is set, so that nothing is computed anew and another thread is not disturbed."""
    vit = model(small())
    vit.logits(gradient())
    kept = [module._cache for module in vit.net.modules() if hasattr(module, "_cache")]
    vit.logits(gradient())
    assert [module._cache for module in vit.net.modules() if hasattr(module, "_cache")] == kept


def test_a_bit_evaluates_too() -> None:
    bit = model(BiTConfig(image_size=32, num_classes=5, layers=(1, 1, 1, 1), width_factor=0.5))
    bit.net.train()
    bit.logits(gradient())
    assert all(modes(bit.net).values())
