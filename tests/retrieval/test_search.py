"""`vitrail.search`: images are embedded as the features were, by the same model only."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image
from small_models import model, small

import vitrail
from vitrail.cli import main
from vitrail.errors import ConfigError, ImageError
from vitrail.evaluation.features import FeatureSpec
from vitrail.retrieval.query_features import QueryEncoder
from vitrail.retrieval.search import without_self


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Eight images, of which two are copies of each other."""
    folder, rng = tmp_path_factory.mktemp("data") / "photos", np.random.default_rng(0)
    for i in range(7):
        path = folder / "ab"[i % 2] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 255, (40, 50, 3), dtype=np.uint8)).save(path)
    (folder / "a" / "copy.png").write_bytes((folder / "a" / "2.png").read_bytes())
    return folder


@pytest.fixture(scope="module")
def features(photos, model_folder, tmp_path_factory):
    return embed(model_folder, photos, tmp_path_factory.mktemp("features") / "f.parquet")


def embed(model_folder, photos, out, *options):
    assert main(["embed", "-m", str(model_folder), "--data", str(photos), "--out", str(out), *options]) == 0
    return out


def test_image_finds_itself_and_its_copy(features, photos, vit):
    found = vitrail.search(photos / "a" / "2.png", features, model=vit, top=3)
    assert {match.key for match in found[:2]} == {"a/2.png", "a/copy.png"}
    assert found[0].similarity == pytest.approx(1, abs=1e-5)
    assert found[0].label == "a"
    assert found[0].similarity >= found[1].similarity >= found[2].similarity


def test_excluding_the_image_itself_keeps_its_copy(features, photos, vit):
    found = vitrail.search(photos / "a" / "2.png", features, model=vit, top=3, exclude_self=True)
    assert found[0].key == "a/copy.png"
    assert (len(found), "a/2.png" in [match.key for match in found]) == (3, False)
    everything = vitrail.search(photos / "a" / "2.png", features, model=vit, top=100, exclude_self=True)
    assert len(everything) == 7


def test_other_image_of_the_same_name_is_not_excluded(tmp_path, vit):
    matches = [vitrail.Match("2.png", "train", None, 0.4, 0)]
    assert without_self(matches, tmp_path / "2.png") == matches
    assert without_self([vitrail.Match("2.png", "train", None, 1.0, 0)], tmp_path / "2.png") == []
    assert without_self([vitrail.Match("12.png", "train", None, 1.0, 0)], tmp_path / "2.png") != []


def test_several_images_give_a_list_each(features, photos, vit):
    index = vitrail.FeatureIndex.open(features)
    paths = sorted(photos.rglob("?.png"))
    found = vitrail.search(paths, index, model=vit, top=2, batch_size=3)
    assert [matches[0].key for matches in found if "2.png" not in matches[0].key and "copy" not in matches[0].key] == [
        path.relative_to(photos).as_posix() for path in paths if path.name != "2.png"
    ]
    assert vitrail.search([], index, model=vit) == []
    with pytest.raises(ImageError):
        vitrail.search([paths[0], b"no image"], index, model=vit)


@pytest.mark.parametrize(
    "options",
    ["--layers 1,2 --pool token+mean", "--pool token --no-norm", "--layer 0 --pool mean", "--feature-dtype float16"],
)
def test_queries_use_the_layers_and_pooling_of_the_features(tmp_path, photos, vit, model_folder, options):
    features = embed(model_folder, photos, tmp_path / "f.parquet", *options.split())
    [match] = vitrail.search(photos / "b" / "1.png", features, model=vit, top=1)
    assert (match.key, match.similarity) == ("b/1.png", pytest.approx(1, abs=1e-5))


def test_spec_is_read_back_from_its_text():
    for layers in ((), (3,), (0, 11)):
        for pool in ("pooled", "token", "mean", "token+mean"):
            for norm in (True, False):
                spec = FeatureSpec(layers=layers, pool=pool, norm=norm)
                if spec == FeatureSpec(norm=False):
                    continue  # the head's input has no choice of norm
                assert FeatureSpec.from_text(str(spec)) == spec
    with pytest.raises(ConfigError, match="expected such as"):
        FeatureSpec.from_text("the fifth layer")


def test_another_model_is_an_error_that_names_both(features, photos):
    other = model(small(mlp_dim=128), origin="other")
    with pytest.raises(ConfigError, match=r"f.parquet was made by .* \(weights [0-9a-f]{8}\), not by other \(weights"):
        vitrail.search(photos / "a" / "2.png", features, model=other)


def test_preprocessing_is_that_of_the_features(features, photos, vit):
    changed = vitrail.Model(vit.net, vit.info.replace(preprocess=vit.info.preprocess.replace(mean=(0.1, 0.2, 0.3))))
    [match] = vitrail.search(photos / "b" / "1.png", features, model=changed, top=1)
    assert match.similarity == pytest.approx(1, abs=1e-5)
    assert changed.info.preprocess.mean == (0.1, 0.2, 0.3)  # the caller's model is unchanged


def test_features_that_do_not_say_how_they_were_made_are_an_error(vit):
    from vitrail.weights.checksum import weights_checksum

    metadata = {"weights": weights_checksum(vit.net), "features": "head input"}
    with pytest.raises(vitrail.VitrailError, match="does not say how its features were made"):
        QueryEncoder.for_features(vit, metadata, "f.parquet")
