"""Feature extraction from any layer with any pooling, and the feature file."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from bulk.folders import begin_folder
from compare import randomized
from image_source import Images
from small_models import model, small

from vitrail.bulk.outputs import sample_columns, vectors
from vitrail.config import BiTConfig
from vitrail.errors import ConfigError, DataError, ModelError, NotFoundError
from vitrail.evaluation.feature_file import read_features, read_metadata
from vitrail.evaluation.features import Features, FeatureSpec, extract, extract_features, resolve_features
from vitrail.models import build
from vitrail.storage.part_folder import file_metadata, join_parts
from vitrail.weights.checksum import weights_checksum

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def images(count: int = 3) -> torch.Tensor:
    return torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def bit() -> torch.nn.Module:
    return randomized(build(BiTConfig(layers=(1, 1), width_factor=0.5, image_size=32, num_classes=5)))


def features(net: torch.nn.Module, **spec: object) -> torch.Tensor:
    return extract(net, images(), resolve_features(FeatureSpec(**spec), net))


CONFIGS = {
    "token": small(),
    "gap, norm after": small(pool="gap", pool_norm="after"),
    "token+gap": small(pool="token+gap"),
    "registers": small(num_registers=3),
    "distilled": small(distilled=True),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_default_features_are_the_input_of_the_head(name: str):
    net = randomized(build(CONFIGS[name]))
    assert torch.equal(features(net), net.features(images(), outputs="pooled").pooled)


@pytest.mark.parametrize(
    ("name", "pool"), [("token", "token"), ("gap, norm after", "mean"), ("token+gap", "token+mean")]
)
def test_last_layer_with_the_networks_pooling_is_the_input_of_the_head(name: str, pool: str):
    net = randomized(build(CONFIGS[name]))
    expected = net.features(images(), outputs="pooled").pooled
    torch.testing.assert_close(features(net, pool=pool), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(features(net, layers=(2,), pool=pool), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_layer_features_are_the_output_of_its_block(layer: int):
    net = randomized(build(small(num_registers=2)))
    tokens = net.features(images(), outputs="tokens").tokens[layer]
    assert torch.equal(features(net, layers=(layer,), pool="token", norm=False), tokens[:, 0])
    assert torch.equal(features(net, layers=(layer,), pool="mean", norm=False), tokens[:, 3:].mean(1))
    assert torch.equal(features(net, layers=(layer,), pool="token"), net.norm(tokens)[:, 0])


def test_features_of_several_layers_are_concatenated():
    net = randomized(build(small()))
    parts = [features(net, layers=(layer,)) for layer in (1, 2)]
    assert torch.equal(features(net, layers=(1, 2)), torch.cat(parts, 1))


def test_default_pooling_of_a_layer_is_the_class_token_or_the_mean():
    assert resolve_features(FeatureSpec(layers=(1,)), build(small())).pool == "token"
    assert resolve_features(FeatureSpec(layers=(1,)), build(small(class_token=False, pool="gap"))).pool == "mean"


def test_stages_of_a_bit_are_mean_pooled():
    net = bit()
    maps = net.features(images(), outputs="feature_maps").feature_maps
    assert torch.equal(features(net, layers=(1, 2), pool="mean"), torch.cat([m.mean((2, 3)) for m in maps], 1))
    assert torch.equal(features(net), net.features(images(), outputs="pooled").pooled)


def test_negative_layers_count_from_the_end():
    assert resolve_features(FeatureSpec(layers=(-1, -2)), build(small())).layers == (2, 1)
    assert resolve_features(FeatureSpec(layers=(-1,), pool="mean"), bit()).layers == (2,)


def test_blocks_after_the_last_selected_layer_are_not_computed():
    net = randomized(build(small()))
    computed: list[int] = []
    for i, block in enumerate(net.blocks):
        block.register_forward_hook(lambda *_, i=i: computed.append(i))
    features(net, layers=(1,))
    assert computed == [0]
    features(net, layers=(0,))
    assert computed == [0]


@pytest.mark.parametrize("config", [{"position_at": "layers"}, {"position": "relative"}, {"position": "rope-2d"}])
def test_layers_equal_those_of_a_full_pass_for_every_kind_of_position(config: dict[str, object]):
    net = randomized(build(small(**config)))
    tokens = net.features(images(), outputs="tokens").tokens
    assert torch.equal(
        features(net, layers=(2, 0), norm=False, pool="mean"),
        torch.cat([tokens[n][:, net.config.num_prefix_tokens :].mean(1) for n in (2, 0)], 1),
    )


@pytest.mark.parametrize("layer", [-3, 3, 13])
def test_unknown_layers_are_refused(layer: int):
    with pytest.raises(ModelError, match=rf"there is no layer {layer} of 2; expected 0 to 2\."):
        resolve_features(FeatureSpec(layers=(layer,)), build(small()))


def test_unavailable_pooling_and_stages_are_refused():
    with pytest.raises(ModelError, match="no class token for 'token'"):
        resolve_features(FeatureSpec(pool="token"), build(small(class_token=False, pool="gap")))
    with pytest.raises(ModelError, match="BiT has no tokens"):
        resolve_features(FeatureSpec(pool="token"), bit())
    with pytest.raises(ModelError, match="there is no stage 0 of 2; expected 1 to 2"):
        resolve_features(FeatureSpec(layers=(0,)), bit())
    with pytest.raises(ConfigError, match="unknown pooling 'men'; did you mean 'mean'"):
        FeatureSpec(pool="men")


def random_images(count: int) -> list[np.ndarray]:
    return list(np.random.default_rng(0).integers(0, 255, (count, 32, 32, 3), dtype=np.uint8))


@pytest.mark.parametrize("batch", [1, 4, 64])
def test_labeled_images_are_extracted_in_order_at_any_batch_size(batch: int):
    vit, arrays = model(small()), random_images(11)
    source = Images(arrays, [0, 1, 2, -1, 0, 1, 2, 0, 1, 2, 0])
    counts: list[int] = []
    extracted, unreadable = extract_features(
        vit.net, source, preprocess=vit.preprocess, spec=FeatureSpec(), batch_size=batch, device=CPU, workers=0,
        advance=counts.append,
    )  # fmt: skip
    labeled = [i for i in range(11) if i != 3]
    assert extracted.targets.tolist() == [source.targets[i] for i in labeled]
    assert torch.allclose(extracted.values, vit.embed([arrays[i] for i in labeled]), atol=1e-5)
    assert (unreadable, sum(counts)) == ({}, 11)


def test_unreadable_images_are_skipped_and_reported():
    vit, arrays = model(small()), random_images(5)
    source = Images([arrays[0], b"no image", *arrays[2:]])
    extracted, unreadable = extract_features(
        vit.net, source, preprocess=vit.preprocess, spec=FeatureSpec(), device=CPU, workers=0
    )
    assert (len(extracted), list(unreadable)) == (4, ["1"])


def test_empty_and_multi_label_sources_are_refused():
    vit = model(small())
    options = {"preprocess": vit.preprocess, "spec": FeatureSpec(), "device": CPU}
    with pytest.raises(DataError, match="images has no images"):
        extract_features(vit.net, Images([], []), **options)
    with pytest.raises(DataError, match="is multi-label"):
        extract_features(vit.net, Images(random_images(2), np.ones((2, 3), bool)), **options)


def test_different_weights_have_different_checksums():
    net, same, other = build(small(), seed=0), build(small(), seed=0), build(small(), seed=1)
    assert weights_checksum(net) == weights_checksum(same) != weights_checksum(other)


SETTINGS = {"model": "small", "weights": "00000000", "features": "last", "labels": ["class 0", "class 1", "class 2"]}


def write_features(
    path, count: int = 7, split: str = "train", width: int = 4, dtype: str = "float32", targets=None, **changes: object
):
    """Write a feature file, or a folder of parts of at most three images; returns its values."""
    source = Images(random_images(count)) if targets is None else Images(random_images(count), targets)
    settings = {"task": "embed", **SETTINGS, "images": {split: [count, "00000000"]}} | changes
    folder = begin_folder(path if not path.suffix else path.with_suffix(".parts"), settings, images_per_part=3)
    values = torch.arange(count * width).view(count, width).float()
    for number, first in enumerate(range(0, count, 3)):
        rows = range(first, min(first + 3, count))
        table = pa.table(sample_columns(source, split, rows) | {"embedding": vectors(values[list(rows)], dtype)})
        folder.write_part(number, table, len(rows), {} if number else {"a.jpg": "broken"})
    _, unreadable = folder.finish()
    if path.suffix:
        join_parts(folder.part_paths(), file_metadata(settings, unreadable), path)
    return values


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_written_features_are_read_back(tmp_path, dtype: str):
    values = write_features(tmp_path / "train.parquet", dtype=dtype)
    write_features(tmp_path / "test.parquet", 5, "test", dtype=dtype)
    train, test = read_features([tmp_path / "train.parquet", tmp_path / "test.parquet"])
    assert torch.equal(train.values, values)
    assert train.targets.tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert (len(test), train.labels) == (5, ("class 0", "class 1", "class 2"))
    table = pq.read_table(tmp_path / "train.parquet")
    assert table["key"].to_pylist() == list("0123456")
    assert table["label"].to_pylist()[:2] == ["class 0", "class 1"]
    assert (
        str(table.schema.field("embedding").type)
        == f"fixed_size_list<element: {'float' if dtype == 'float32' else 'halffloat'}>[4]"
    )
    assert read_metadata(tmp_path / "train.parquet")["unreadable"] == {"a.jpg": "broken"}


def test_a_folder_of_parts_is_read_as_a_file_is(tmp_path):
    write_features(tmp_path / "file.parquet", 20)
    write_features(tmp_path / "folder", 20)
    for of_file, of_folder in zip(
        read_features([tmp_path / "file.parquet"]), read_features([tmp_path / "folder"]), strict=True
    ):
        assert torch.equal(of_file.values, of_folder.values)
        assert torch.equal(of_file.targets, of_folder.targets)


def test_incomplete_folders_and_predictions_are_refused(tmp_path):
    write_features(tmp_path / "parts", 20)
    for number in (2, 4, 5):
        (tmp_path / "parts" / f"part-{number:05d}.parquet").unlink()
    message = r"parts is not complete: parts 2, 4 to 5 of 7 are missing; run the command that made it again"
    with pytest.raises(DataError, match=message):
        read_features([tmp_path / "parts"])
    write_features(tmp_path / "classes", task="predict")
    with pytest.raises(DataError, match="classes was made by vitrail predict and has no features"):
        read_features([tmp_path / "classes"])


def test_features_of_another_model_are_refused(tmp_path):
    write_features(tmp_path / "a.parquet")
    write_features(tmp_path / "b.parquet", model="other")
    write_features(tmp_path / "c.parquet", labels=["x", "y", "z"])
    with pytest.raises(
        DataError, match=r"b\.parquet was made with another model than .*a\.parquet \(other, not small\)"
    ):
        read_features([tmp_path / "a.parquet", tmp_path / "b.parquet"])
    with pytest.raises(DataError, match="has other classes"):
        read_features([tmp_path / "a.parquet", tmp_path / "c.parquet"])


def test_missing_and_invalid_feature_files_are_refused(tmp_path):
    with pytest.raises(NotFoundError, match="create it with vitrail embed"):
        read_metadata(tmp_path / "none.parquet")
    (tmp_path / "x.parquet").write_bytes(b"something else")
    with pytest.raises(DataError, match="is not a feature file"):
        read_metadata(tmp_path / "x.parquet")


def test_without_test_images_a_tenth_is_held_out_with_a_note(tmp_path, caplog):
    values = write_features(tmp_path / "train.parquet", 200)
    train, test = read_features([tmp_path / "train.parquet"])
    assert 10 < len(test) < 35
    assert sorted(torch.cat([train.values, test.values])[:, 0].tolist()) == values[:, 0].tolist()
    assert f"there are no test images: {len(test)} of 200 are held out for testing" in caplog.text
    repeated = read_features([tmp_path / "train.parquet"])
    assert torch.equal(repeated[1].values, test.values)


def test_features_without_training_or_test_images_are_refused(tmp_path):
    write_features(tmp_path / "test.parquet", split="test")
    with pytest.raises(DataError, match="has only test images, and nothing to train on; pass --features twice"):
        read_features([tmp_path / "test.parquet"])
    write_features(tmp_path / "few.parquet", targets=[0, 1, 2, -1, -1, -1, -1])
    with pytest.raises(DataError, match=r"few\.parquet has no test images, and none can be held out: .* one image"):
        read_features([tmp_path / "few.parquet"])


def test_nan_and_infinite_features_are_refused():
    values = torch.zeros(5, 3)
    values[1, 2], values[4, 0] = torch.nan, torch.inf
    with pytest.raises(DataError, match="2 of the 5 images of photos have features that are NaN or infinite"):
        Features(values, torch.zeros(5, dtype=torch.int64), ("a",), "photos")
