"""Hugging Face repositories compared with transformers: equal outputs and tensors, loadable by from_pretrained.

Every parameter is random, so that zeros hide no errors. Networks are tiny except where size matters.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from compare import randomized, relative
from safetensors.torch import load_file
from torch import Tensor
from transformers_peers import NO_POOLER, PEERS, VIT, Peer, class_token, logits, peer_output, transformers

from vitrail.config import ViTConfig, pair
from vitrail.errors import FormatError
from vitrail.models import Net, build
from vitrail.weights.archive import Archive, LazyTensors, open_archive
from vitrail.weights.huggingface import HUGGINGFACE
from vitrail.weights.model_info import ModelInfo

pytestmark = pytest.mark.peer


def random_images(height: int = 32, width: int = 32, count: int = 2) -> Tensor:
    return torch.randn(count, 3, height, width)


def normalized(archive: Archive) -> Archive:
    """The archive with its tensors renamed as in the rename table."""
    assert HUGGINGFACE.detect(archive) == ""
    return Archive(**{**vars(archive), "tensors": archive.tensors.rename(HUGGINGFACE.normalize_name)})


def read(source: Path | Archive) -> tuple[Net, ModelInfo]:
    archive = normalized(source if isinstance(source, Archive) else open_archive(source))
    info = HUGGINGFACE.infer_info(archive)
    net = build(info.config, meta=True)
    net.load_state_dict(HUGGINGFACE.table(info.config).read(archive.tensors, net, info.config), assign=True)
    return net.eval(), info


def write(net: Net, info: ModelInfo, path: Path) -> None:
    HUGGINGFACE.check_writable(info)
    assert HUGGINGFACE.write is not None
    HUGGINGFACE.write(path, HUGGINGFACE.table(info.config).write(net.state_dict(), info.config), info, False)


def load_in_transformers(folder: Path, peer: Peer, class_name: str | None = None) -> Any:
    """Loads with from_pretrained, without missing or unexpected tensors."""
    loader = getattr(transformers, class_name or peer.written_class or peer.model)
    pooler_args = peer.arguments or (NO_POOLER if peer.written_class == "ViTModel" else {})
    model, loading_info = loader.from_pretrained(folder, output_loading_info=True, **pooler_args)
    assert not any(loading_info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")), (
        loading_info
    )
    return model.eval()


def image_size_of(info: ModelInfo) -> tuple[int, int]:
    return pair(info.config.image_size) if isinstance(info.config, ViTConfig) else (32, 48)


@dataclass
class Converted:
    """A transformers model, its repository, our model read from it, and the repository we wrote."""

    peer: Peer
    model: Any
    theirs: Path
    net: Net
    info: ModelInfo
    ours: Path


@pytest.fixture(scope="module", params=PEERS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Converted:
    torch.manual_seed(0)
    peer, folder = PEERS[request.param], tmp_path_factory.mktemp("peer")
    model = peer.build()
    model.save_pretrained(folder / "theirs")
    net, info = read(folder / "theirs")
    write(net, info, folder / "ours")
    return Converted(peer, model, folder / "theirs", net, info, folder / "ours")


@torch.no_grad()
def test_outputs_match_transformers_before_and_after_writing(case: Converted) -> None:
    images = random_images(*image_size_of(case.info))
    expected = peer_output(case.peer, case.model, images)
    assert relative(case.net(images), expected) <= 1e-5
    reloaded = load_in_transformers(case.ours, case.peer)
    if "MAE" in type(reloaded).__name__:
        reloaded.config.mask_ratio = 0.0
    assert relative(case.peer.written_output(reloaded(images)), expected) <= 1e-5


def test_written_tensors_equal_the_originals(case: Converted) -> None:
    before, after = (
        {HUGGINGFACE.normalize_name(n): t for n, t in load_file(folder / "model.safetensors").items()}
        for folder in (case.theirs, case.ours)
    )
    unused = (
        "embeddings.mask_token",
        *(("post_layernorm.",) if case.peer.model == "CLIPForImageClassification" else ()),
    )
    network_names = [n for n in after if not n.startswith(unused)]
    assert len(network_names) >= len(case.net.state_dict())
    assert all(torch.equal(after[n], before[n]) for n in network_names)
    reloaded, _ = read(case.ours)
    assert all(
        torch.equal(a, b) for a, b in zip(case.net.state_dict().values(), reloaded.state_dict().values(), strict=True)
    )


def test_model_info_round_trips(case: Converted) -> None:
    _, reloaded = read(case.ours)
    assert reloaded.config == case.info.config
    assert reloaded.preprocess == case.info.preprocess
    assert (reloaded.task, reloaded.labels) == (case.info.task, case.info.labels)


def test_auto_classes_resolve_the_written_class(case: Converted) -> None:
    class_name = json.loads((case.ours / "config.json").read_text())["architectures"][0]
    auto_class = "AutoModelForImageClassification" if "Classification" in class_name else "AutoModel"
    if class_name != "CLIPVisionModelWithProjection":  # it has no auto class
        assert type(load_in_transformers(case.ours, case.peer, auto_class)).__name__ == class_name


def test_state_dict_names_are_read(case: Converted, tmp_path: Path) -> None:
    """`torch.save(model.state_dict())` has the names of transformers 5, `save_pretrained` the Hub's."""
    shutil.copy(case.theirs / "config.json", tmp_path)
    torch.save(case.model.state_dict(), tmp_path / "pytorch_model.bin")
    from_state_dict, from_repository = read(tmp_path)[0].state_dict(), case.net.state_dict()
    assert all(torch.equal(from_repository[n], from_state_dict[n]) for n in from_repository)


@torch.no_grad()
def test_unused_distillation_token_is_read_as_a_register(tmp_path: Path) -> None:
    peer = Peer("DeiTForImageClassification", "DeiTConfig", VIT, logits)
    model, images = peer.build(), random_images()
    model.save_pretrained(tmp_path / "theirs")
    net, info = read(tmp_path / "theirs")
    assert isinstance(info.config, ViTConfig)
    assert (info.config.num_registers, info.config.distilled) == (1, False)
    assert relative(net(images), model(images).logits) <= 1e-5
    write(net, info, tmp_path / "ours")
    assert relative(load_in_transformers(tmp_path / "ours", peer)(images).logits, model(images).logits) <= 1e-5
    reloaded, _ = read(tmp_path / "ours")
    assert all(
        torch.equal(a, b) for a, b in zip(net.state_dict().values(), reloaded.state_dict().values(), strict=True)
    )


def test_pooler_of_a_headless_deit_is_ignored_with_a_note(tmp_path: Path) -> None:
    model = Peer("DeiTModel", "DeiTConfig", VIT, class_token).build()
    model.save_pretrained(tmp_path / "theirs")
    net, info = read(tmp_path / "theirs")
    assert isinstance(info.config, ViTConfig)
    assert info.config.distilled
    assert any("pooler" in note for note in info.notes)
    write(net, info, tmp_path / "ours")
    load_in_transformers(tmp_path / "ours", Peer("DeiTModel", "DeiTConfig", VIT, class_token, NO_POOLER))


@pytest.mark.parametrize(("width", "heads"), [(192, 3), (384, 6), (768, 12)], ids=["Ti", "S", "B"])
@torch.no_grad()
def test_published_sizes_match_transformers_at_224(width: int, heads: int) -> None:
    config = transformers.ViTConfig(
        hidden_size=width, num_attention_heads=heads, intermediate_size=4 * width, num_labels=1000
    )
    with torch.device("meta"):
        model = transformers.ViTForImageClassification(config)
    model = randomized(model.to_empty(device="cpu"))
    net, _ = read(
        Archive("memory", LazyTensors.from_tensors(model.state_dict()), sidecars={"config.json": config.to_dict()})
    )
    images = random_images(224, 224, 1)
    assert relative(net(images), model(images).logits) <= 1e-5


RESIZED = {
    name: PEERS[name]
    for name in (
        "vit",
        "vit, bare (DINO)",
        "deit, two heads",
        "dinov2, head",
        "dinov2, swiglu",
        "dinov2, registers, head",
        "clip, projected",
        "siglip",
    )
}


@pytest.mark.parametrize("name", RESIZED)
@torch.no_grad()
def test_resampling_to_another_size_matches_transformers(name: str, tmp_path: Path) -> None:
    peer = RESIZED[name]
    model = peer.build(attn_implementation="eager")
    model.save_pretrained(tmp_path)
    net, _ = read(tmp_path)
    images = random_images(48, 24)
    options = {} if name.startswith("dinov2") else {"interpolate_pos_encoding": True}
    expected = model(images, output_hidden_states=True, output_attentions=True, **options)
    output = net.features(images, outputs=("logits", "tokens", "attention"))
    assert output.logits is not None
    assert output.tokens is not None
    assert output.attention is not None
    assert relative(output.logits, peer.output(expected)) <= 1e-5
    assert relative(net(images), peer.output(expected)) <= 1e-5
    for a, b in zip(output.tokens, expected.hidden_states, strict=True):
        assert relative(a, b) <= 1e-5
    for a, b in zip(output.attention, expected.attentions, strict=True):
        assert relative(a, b) <= 1e-5


@pytest.mark.parametrize(
    "act", ["gelu", "gelu_python", "gelu_pytorch_tanh", "gelu_fast", "gelu_accurate", "quick_gelu"]
)
@torch.no_grad()
def test_every_activation_matches_transformers(act: str, tmp_path: Path) -> None:
    model = PEERS["vit"].build(hidden_act=act)
    model.save_pretrained(tmp_path)
    images = random_images()
    assert relative(read(tmp_path)[0](images), model(images).logits) <= 1e-5


def test_class_names_are_written_and_read_back(tmp_path: Path) -> None:
    PEERS["vit"].build().save_pretrained(tmp_path / "theirs")
    net, info = read(tmp_path / "theirs")
    names = ("cat", "dog", "owl", "elk", "ant")
    assert not info.multi_label
    write(net, info.replace(labels=names, multi_label=True), tmp_path / "ours")
    reloaded_info = read(tmp_path / "ours")[1]
    assert reloaded_info.labels == names
    assert reloaded_info.multi_label
    config = load_in_transformers(tmp_path / "ours", PEERS["vit"]).config
    assert tuple(config.id2label.values()) == names
    assert config.problem_type == "multi_label_classification"


def test_half_precision_is_kept(tmp_path: Path) -> None:
    PEERS["dinov2, head"].build().to(torch.bfloat16).save_pretrained(tmp_path / "theirs")
    net, info = read(tmp_path / "theirs")
    write(net, info, tmp_path / "ours")
    model = load_in_transformers(tmp_path / "ours", PEERS["dinov2, head"])
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_single_file_has_the_same_tensor_names_as_a_folder(tmp_path: Path) -> None:
    PEERS["vit"].build().save_pretrained(tmp_path / "theirs")
    net, info = read(tmp_path / "theirs")
    write(net, info, tmp_path / "alone.safetensors")
    assert (
        load_file(tmp_path / "alone.safetensors").keys() == load_file(tmp_path / "theirs" / "model.safetensors").keys()
    )


def test_missing_and_unexpected_tensors_are_listed() -> None:
    model = PEERS["vit"].build()
    state, config = model.state_dict(), {"config.json": model.config.to_dict()}
    state["vit.extra.weight"] = torch.zeros(1)
    del state["vit.layers.1.mlp.fc1.bias"]
    with pytest.raises(
        FormatError, match=r"missing encoder\.layer\.1\.intermediate\.dense\.bias; unexpected extra\.weight"
    ):
        read(Archive("memory", LazyTensors.from_tensors(state), sidecars=config))
