"""`Model.explain` and `ModelFigures` for every kind of network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from explain.test_attention import CONFIGS
from small_models import gradient, model, small

import vitrail
from vitrail.config import BiTConfig, PreprocessConfig
from vitrail.errors import ConfigError, DataError, ModelError
from vitrail.explain import gradient_rollout, rollout_map
from vitrail.explain.steps import METHODS, attribution_maps
from vitrail.figures.model_figures import FIGURES, ModelFigures, dataset_images, sample_images
from vitrail.predictions import class_index

BIT = BiTConfig(image_size=128, num_classes=5, layers=(1, 1, 1, 1), width_factor=0.5)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_kind_of_network_supports_all_methods(name: str):
    vit = model(CONFIGS[name])
    explanation = vit.explain(gradient(), faithfulness=True)
    config = vit.config
    assert set(explanation.maps) == set(METHODS)
    assert all(view.shape == config.grid for view in explanation.maps.values())
    assert explanation.attention.shape == (config.depth, config.num_heads, *config.grid)
    np.testing.assert_allclose(explanation.attention.sum((2, 3)) + explanation.prefix_attention.sum(2), 1, atol=1e-5)
    assert explanation.figures() == ("overview", "heads", "layers", "faithfulness")
    assert set(explanation.faithfulness) == {*METHODS, "random"}
    assert explanation.rollout is explanation.maps["rollout"]
    for kind in explanation.figures():
        assert isinstance(explanation.figure(kind).axes, list)


def test_explanation_equals_the_functions_and_predict():
    vit = model(small())
    explanation = vit.explain(gradient())
    images = vit.preprocess(gradient())
    assert [p.index for p in explanation.predictions] == [p.index for p in vit.predict(gradient())]
    assert explanation.target == explanation.predictions[0]
    np.testing.assert_allclose(explanation.rollout, rollout_map(vit.net, images)[0].numpy())
    expected = gradient_rollout(vit.net, images, torch.tensor([explanation.target.index]))[0].numpy()
    np.testing.assert_allclose(explanation.maps["gradient"], expected)
    assert explanation.pixels.shape == (32, 32, 3)


def test_target_is_a_class_name_or_index():
    vit = model(small())
    by_name, by_number = vit.explain(gradient(), target="Fish"), vit.explain(gradient(), target=3)
    assert by_name.target.label == "fish"
    np.testing.assert_array_equal(by_name.maps["gradient"], by_number.maps["gradient"])
    assert class_index(vit.info, "3") == 3
    with pytest.raises(ModelError, match="unknown class 'fisch'; did you mean 'fish'"):
        vit.explain(gradient(), target="fisch")
    with pytest.raises(ModelError, match="no class 5: this model has 5"):
        vit.explain(gradient(), target=5)
    with pytest.raises(ModelError, match="has no class names, so 'tench' cannot be found"):
        model(small(), labels=None).explain(gradient(), target="tench")
    with pytest.raises(ConfigError, match="no method was given"):
        vit.explain(gradient(), methods=())


@pytest.mark.parametrize("options", [{"pool": "map", "class_token": False}, {"pool": "coca", "pool_heads": 1}])
def test_last_attention_map_is_that_of_the_attention_pool(options: dict[str, Any]):
    vit = model(small(**options))
    images = vit.preprocess(gradient())
    expected = vit.net.features(images, outputs=("pool_attention",)).pool_attention.mean(1)
    torch.testing.assert_close(
        attribution_maps(vit.net, images, ["attention"])["attention"].flatten(1),
        expected[:, vit.config.num_prefix_tokens :],
    )


@pytest.mark.parametrize("size", [(32, 48), (64, 24)])
def test_any_size_and_aspect_ratio(size: tuple[int, int]):
    vit = model(small(image_size=size), preprocess=PreprocessConfig(image_size=size))
    explanation = vit.explain(gradient(), query=(1, 2))
    assert explanation.rollout.shape == (size[0] // 8, size[1] // 8)
    assert explanation.pixels.shape == (*size, 3)
    assert "row 1, column 2" in explanation.figure("layers").texts[1].get_text()
    explanation.figure("heads")


def test_multi_label_curves_start_at_the_predicted_probability():
    explanation = model(small(), multi_label=True).explain(gradient(), faithfulness=True)
    for curves in explanation.faithfulness.values():
        assert curves.deletion.values[0] == pytest.approx(explanation.target.score, abs=1e-5)
        assert curves.insertion.values[-1] == pytest.approx(explanation.target.score, abs=1e-5)


def test_uncovered_pixels_are_not_shown():
    vit = model(small(image_size=35, uncovered="ignore"), preprocess=PreprocessConfig(image_size=35))
    explanation = vit.explain(gradient())
    assert explanation.pixels.shape == (32, 32, 3)
    assert ModelFigures(vit, [gradient()]).shown[0].shape == (32, 32, 3)


def test_single_row_of_patches_is_explained():
    vit = model(small(image_size=(8, 32)), preprocess=PreprocessConfig(image_size=(8, 32)))
    assert set(vit.explain(gradient()).maps) == set(METHODS)


def test_gray_images_are_shown_as_rgb():
    vit = model(small(channels=1), preprocess=PreprocessConfig(image_size=32, mean=(0.5,), std=(0.5,)))
    assert vit.explain(gradient()).pixels.shape == (32, 32, 3)


def test_network_without_attention_supports_only_occlusion():
    vit = model(BIT)
    explanation = vit.explain(gradient())
    assert set(explanation.maps) == {"occlusion"}
    assert explanation.attention is None
    assert explanation.figures() == ("overview",)
    explanation.figure()
    with pytest.raises(ModelError, match="BiT has no attention"):
        vit.explain(gradient(), methods=["rollout"])
    with pytest.raises(ModelError, match="rollout was not requested"):
        _ = explanation.rollout


def test_model_without_classes_has_rollout_and_attention():
    vit = model(small(num_classes=0), task="embed")
    explanation = vit.explain(gradient())
    assert set(explanation.maps) == {"rollout", "attention"}
    assert explanation.target is None
    explanation.figure()
    for options in ({"methods": ["gradient"]}, {"target": "cat"}, {"faithfulness": True}):
        with pytest.raises(ModelError, match="no classes"):
            vit.explain(gradient(), **options)


def test_files_are_named_after_the_image(tmp_path: Path):
    vit = model(small())
    gradient().save(tmp_path / "my cat.png")
    explanation = vit.explain(tmp_path / "my cat.png")
    written = explanation.save(tmp_path / "out", ("png", "svg", "npz"), layers=(1, -1))
    names = [p.name for p in written]
    kinds = ("overview", "layers", "heads-1", "heads-2")
    assert names == [f"my cat-{kind}.{f}" for f in ("png", "svg") for kind in kinds] + ["my cat.npz"]
    with np.load(written[-1]) as arrays:
        assert {"pixels", "attention_by_head", "attention_to_prefix", *METHODS} == set(arrays)
        np.testing.assert_array_equal(arrays["rollout"], explanation.rollout)
    with pytest.raises(ModelError, match="there is no layer 3"):
        explanation.save(tmp_path, layers=(3,))
    with pytest.raises(ConfigError, match="unknown figure 'head'; did you mean 'heads'"):
        explanation.figure("head")


def test_unknown_method_suggests_the_nearest_name():
    with pytest.raises(ConfigError, match="unknown method 'rolout'; did you mean 'rollout'"):
        model(small()).explain(gradient(), methods=["rolout"])


@pytest.mark.parametrize("name", [*CONFIGS, "bit"])
def test_model_figures_of_every_kind_of_network(name: str):
    vit = model(BIT if name == "bit" else CONFIGS[name])
    model_figures = ModelFigures(vit, [gradient(), gradient(80)])
    unavailable = {"bit": set(FIGURES) - {"colors"}, "hybrid": {"filters"}}.get(name, set())
    for figure in FIGURES:
        if figure in unavailable:
            with pytest.raises(ModelError):
                model_figures.draw(figure)
        else:
            assert all(np.isfinite(a).all() for a in model_figures.draw(figure).arrays.values())


def test_unavailable_figures_are_skipped_with_a_note_unless_requested(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    model_figures = ModelFigures(model(BIT), [gradient(), gradient(80)])
    assert [p.name for p in model_figures.save(tmp_path, formats=("png", "npz"))] == ["colors.png", "colors.npz"]
    for figure in ("filters", "positions", "distances", "rollout"):
        assert f"skipped the figure {figure}: " in caplog.text
    with pytest.raises(ModelError, match="rollout: a BiT has no attention"):
        model_figures.save(tmp_path, ["rollout"])


def test_model_figures_need_readable_images(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    vit = model(small())
    (tmp_path / "broken.png").write_bytes(b"not an image")
    with pytest.raises(DataError, match="got no images"):
        ModelFigures(vit, [])
    with pytest.raises(DataError, match="none of the 1 images can be read"):
        ModelFigures(vit, [tmp_path / "broken.png"]).save(tmp_path, ["rollout"])
    ModelFigures(vit, [tmp_path / "broken.png", gradient()]).save(tmp_path / "out", ["rollout"])
    assert "1 of 2 images cannot be read and are skipped" in caplog.text
    with pytest.raises(ConfigError, match="unknown figure 'filter'; did you mean 'filters'"):
        ModelFigures(vit, [gradient()]).save(tmp_path, ["filter"])


def test_dataset_images_returns_at_most_the_given_number(tmp_path: Path):
    for i in range(20):
        folder = tmp_path / "data" / f"class{i % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        gradient(20 + i).save(folder / f"{i:02d}.png")
    images = dataset_images(str(tmp_path / "data"), 4)
    assert len(images) == 4
    assert len(dataset_images(str(tmp_path / "data"), 100)) == 20
    assert len(sample_images()) == 2


def test_real_model_attends_to_the_building_more_than_to_the_sky(real_checkpoint: Path):
    """In scikit-learn's photograph of a pagoda, the pagoda is on the left and the sky in the upper right."""
    explanation = vitrail.load(real_checkpoint).explain(
        sample_images()[0], methods=["rollout", "gradient", "attention"]
    )
    for heatmap in explanation.maps.values():
        assert heatmap[2:7, 1:7].mean() > 1.5 * heatmap[2:7, 8:13].mean()


def test_real_model_positions_are_similar_along_rows_and_columns(real_checkpoint: Path):
    from vitrail.explain import position_similarity

    similarity = position_similarity(vitrail.load(real_checkpoint).net)
    for i, j in [(3, 3), (7, 5), (10, 9)]:
        rest = np.delete(np.delete(similarity[i, j], i, 0), j, 1)
        assert similarity[i, j, i].mean() > rest.mean() + 0.1  # its own row
        assert similarity[i, j, :, j].mean() > rest.mean() + 0.1  # its own column
