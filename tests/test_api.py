"""The public API: methods of Model, new networks, and imports."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from small_models import LABELS, model, small

import vitrail
from vitrail.config import BiTConfig
from vitrail.errors import CheckpointError, ConfigError, ImageError, ModelError, NotFoundError, VitrailError

# Methods of Model


def image_inputs(photograph: Image.Image, tmp_path: Path) -> list[object]:
    """The same image as every accepted type."""
    path = tmp_path / "photograph.png"
    photograph.save(path)
    array = np.array(photograph)
    return [path, str(path), path.read_bytes(), photograph, array, torch.from_numpy(array).permute(2, 0, 1)]


def test_predict_accepts_every_type_of_image(vit, photograph, tmp_path):
    inputs = image_inputs(photograph, tmp_path)
    expected = vit.predict(photograph)
    assert [p.index for p in expected] == vit.logits(photograph)[0].argsort(descending=True).tolist()
    assert [p.label for p in expected] == [LABELS[p.index] for p in expected]
    assert sum(p.score for p in expected) == pytest.approx(1)
    for image in inputs:
        assert vit.predict(image) == expected
    for batch in (inputs, tuple(inputs), iter(inputs)):
        results = vit.predict(batch, batch_size=4)
        assert [[p.index for p in result] for result in results] == [[p.index for p in expected]] * 6


def test_empty_input_gives_empty_output(vit):
    assert vit.predict([]) == []
    assert vit.logits([]).shape == (0, 5)
    assert vit.embed([]).shape == (0, 128)
    assert model(BiTConfig(image_size=32, num_classes=5, layers=(1, 1, 1, 1), width_factor=0.5)).embed([]).shape == (
        0,
        1024,
    )


def test_top_and_batch_size(vit, photograph):
    assert len(vit.predict(photograph, top=2)) == 2
    assert len(vit.predict(photograph, top=50)) == 5
    assert torch.equal(vit.logits([photograph] * 3, batch_size=2)[2], vit.logits(photograph)[0])
    with pytest.raises(ConfigError, match="top=0"):
        vit.predict(photograph, top=0)
    with pytest.raises(ConfigError, match="batch_size=0"):
        vit.predict([photograph], batch_size=0)


def test_bad_image_in_a_list_is_named(vit, photograph, tmp_path):
    (tmp_path / "bad.jpg").write_bytes(b"not an image")
    with pytest.raises(ImageError, match=r"bad\.jpg is not an image"):
        vit.predict([photograph, tmp_path / "bad.jpg"])
    with pytest.raises(NotFoundError, match=r"no such file: missing\.jpg"):
        vit.predict("missing.jpg")


def test_stream_continues_after_a_bad_image(vit, photograph):
    first, second, third = vit.stream([photograph, b"nonsense", photograph], batch_size=2)
    assert isinstance(second, VitrailError)
    torch.testing.assert_close(first, third)


def test_stream_reads_at_most_two_batches_ahead(vit, photograph):
    taken = []

    def endless():
        while True:
            taken.append(1)
            yield photograph

    stream = vit.stream(endless(), batch_size=4)
    next(stream)
    assert len(taken) == 8
    stream.close()


def test_embedding_of_a_classifier_is_the_input_of_its_head(vit, photograph):
    features = vit.embed([photograph, photograph])
    assert features.shape == (2, 128)
    logits = vit.net.head(features)
    torch.testing.assert_close(logits, vit.logits([photograph] * 2))
    logits.sum().backward()  # features are ordinary tensors: a probe can be trained on them


def test_embedding_of_clip_is_its_projected_output(photograph):
    clip = model(small(head_bias=False, pre_norm=True, patch_bias=False, num_classes=16), task="embed", family="CLIP")
    assert clip.embed(photograph).shape == (1, 16)
    with torch.no_grad():
        assert torch.equal(clip.embed(photograph), clip.net(clip.preprocess(photograph)))


def test_network_without_a_head_embeds(photograph):
    bare = model(small(num_classes=0), task="embed")
    assert bare.embed([photograph] * 2).shape == (2, 128)
    assert repr(bare).endswith("features>")


@pytest.mark.parametrize("classes", [0, 16])
def test_predict_without_classes_is_a_one_sentence_error(photograph, classes):
    features = model(small(num_classes=classes), task="embed", origin="facebook/dino-vits16")
    for method in (features.predict, features.logits):
        with pytest.raises(ModelError, match=r"^facebook/dino-vits16 has no classes: it outputs features\. Use embed"):
            method(photograph)


def test_clip_with_as_many_classes_as_embedding_dimensions_is_a_classifier(tmp_path, photograph):
    model(small(head_bias=False, num_classes=5), task="embed", labels=None).save(tmp_path / "clip")
    classifier = vitrail.load(tmp_path / "clip", num_classes=5)
    assert classifier.info.task == "classify"
    assert len(classifier.predict(photograph)) == 5


def test_saved_model_loads_unchanged(model_folder, tmp_path, photograph):
    changed = vitrail.load(model_folder, channels=1, image_size=64)
    changed.save(tmp_path / "again")
    loaded = vitrail.load(tmp_path / "again")
    assert loaded.info.to_dict() == changed.info.to_dict()
    assert torch.equal(loaded.logits(photograph), changed.logits(photograph))
    with pytest.raises(CheckpointError, match="already exists"):
        changed.save(tmp_path / "again")


def test_multi_label_scores_are_independent_probabilities(vit, tmp_path, photograph):
    vitrail.Model(vit.net, vit.info.replace(multi_label=True)).save(tmp_path / "tags")
    tags = vitrail.load(tmp_path / "tags")
    predictions, expected = tags.predict(photograph, top=5), tags.logits(photograph)[0].double().sigmoid()
    assert [a.score for a in predictions] == sorted(expected.tolist(), reverse=True)
    assert not vitrail.load(tmp_path / "tags", num_classes=3).info.multi_label


def test_save_writes_the_current_network(vit, tmp_path):
    net = vit.net.resized(64)
    vitrail.Model(net, vit.info.replace(config=net.config)).save(tmp_path / "m")
    assert vitrail.load(tmp_path / "m").config.image_size == (64, 64)


def test_repr_label_device_and_dtype_of_a_model(model_folder, vit):
    assert (
        repr(vitrail.load(model_folder, image_size=(32, 64)))
        == "<vitrail.Model ViT: 0.3 M parameters, 32x64, 5 classes>"
    )
    assert vit.label(1) == "dog"
    assert model(small(), labels=None).label(1) == "class 1"
    assert (vit.device, vit.dtype) == (torch.device("cpu"), torch.float32)


# New networks


def test_create_applies_the_name_and_the_options():
    net = vitrail.create("ViT-B/16", num_classes=10, image_size=384)
    assert isinstance(net, vitrail.ViT)
    assert (net.config.num_classes, net.config.image_size, net.config.width) == (10, (384, 384), 768)
    assert net.head.out_features == 10


def test_same_seed_gives_the_same_weights():
    first, second, third = (vitrail.create("ViT-Ti/16", image_size=32, depth=1, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first.patch.weight, second.patch.weight)
    assert not torch.equal(first.patch.weight, third.patch.weight)
    assert first.head.weight.eq(0).all()


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("vit_small_patch16_224", "ViT-S/16"),
        ("vit_small_patch16_224.augreg_in21k_ft_in1k", "ViT-S/16"),
        ("timm/vit_small_patch16_224.augreg_in21k_ft_in1k", "ViT-S/16"),
        ("facebook/deit-tiny-distilled-patch16-224", "DeiT-Ti/16-distilled"),
        ("facebook/dinov2-with-registers-small", "DINOv2-S/14-reg"),
        ("dino_vits8", "DINO-S/8"),
        ("vit_b_16", "ViT-B/16"),
    ],
)
def test_names_of_other_libraries_are_recognized(theirs, ours):
    first, second = (vitrail.create(name, depth=1, mlp_dim=8, image_size=112, device="meta") for name in (theirs, ours))
    assert first.config == second.config


def test_new_model_has_the_preprocessing_of_its_family(photograph):
    deit = vitrail.create_model("DeiT-Ti/16", depth=1, image_size=32, num_classes=3)
    assert deit.info.preprocess.mean == (0.485, 0.456, 0.406)
    assert len(deit.predict(photograph)) == 3
    assert not deit.net.training
    assert vitrail.create_model("CLIP-B/32", depth=1, image_size=32, width=64, num_heads=1).info.task == "embed"
    with pytest.raises(NotFoundError, match="did you mean 'DeiT-S/16'"):
        vitrail.create_model("DeiT-S16")


# Imports


def run_python(code: str) -> str:
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return completed.stdout


def test_help_does_not_depend_on_earlier_imports():
    code = """if True:
        import pydoc, vitrail
        names = [name for name in vitrail.__all__ if not name.startswith("_")]
        def helped():
            return {name: pydoc.plain(pydoc.render_doc(getattr(vitrail, name))) for name in names}
        before = helped()
        import vitrail.evaluation.scores, vitrail.exporting.exporter, vitrail.training.loop, vitrail.models
        after = helped()
        assert before["evaluate"].startswith("Python Library Documentation: function evaluate"), before["evaluate"][:99]
        print([name for name in names if before[name] != after[name]])
    """
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize("module", ["vitrail", "vitrail.cli", "vitrail.config", "vitrail.runtime"])
def test_importing_the_package_does_not_import_torch(module):
    code = f"import sys, {module}; print([m for m in ('torch', 'numpy', 'PIL', 'huggingface_hub') if m in sys.modules])"
    assert run_python(code) == "[]\n"


def test_loading_and_predicting_import_no_other_heavy_packages(model_folder, photograph, tmp_path):
    photograph.save(tmp_path / "p.png")
    heavy = "pyarrow sklearn matplotlib scipy pandas huggingface_hub timm transformers torchvision torch._dynamo"
    code = (
        f"import sys, vitrail; vitrail.load({str(model_folder)!r}).predict({str(tmp_path / 'p.png')!r});"
        f"print([m for m in {heavy.split()} if m in sys.modules])"
    )
    assert run_python(code) == "[]\n"


def test_every_public_name_exists():
    assert set(dir(vitrail)) == set(vitrail.__all__)
    for name in vitrail.__all__:
        assert getattr(vitrail, name) is not None
    assert vitrail.__version__[0].isdigit()
    with pytest.raises(AttributeError, match="'laod'"):
        vitrail.laod  # noqa: B018


def test_encoded_bytes_of_any_format_are_images(vit, photograph):
    for kind in ("JPEG", "WEBP", "TIFF", "BMP", "GIF"):
        stream = io.BytesIO()
        photograph.save(stream, kind)
        assert len(vit.predict(stream.getvalue())) == 5


def test_to_converts_the_dtype_and_unknown_label_is_an_error(photograph: Image.Image) -> None:
    vit = model(small())
    expected = vit.logits(photograph)
    for converted in (vit.to(torch.float64), vit.to(dtype="float64"), vit.to("cpu", "float64")):
        assert converted.dtype == torch.float64
        torch.testing.assert_close(converted.logits(photograph).float(), expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(ModelError, match="there is no class 5000: this model has"):
        vit.label(5000)
