"""An invalid option is reported in one sentence, and nothing is written."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli.conftest import Command
from images import write_noise_folder

REQUIRED = {
    "convert": "{weights} out",
    "embed": "--model {weights} --data {album} --out features.parquet",
    "eval": "--model {weights} --data {album} --device cpu",
    "explain": "{album}/cat/0.png --model {weights} --out out",
    "figures": "--model {weights} --out out",
    "finetune": "--model {weights} --data {album} data.workers=0 device=cpu",
    "serve": "",
    "vtab": "--model {weights} --root {album}",
}
"""Valid arguments of each command."""


@pytest.fixture(scope="module")
def album(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 images of three of the model's five classes."""
    return write_noise_folder(tmp_path_factory.mktemp("album") / "album", {"bird": 20, "cat": 20, "dog": 20})


@pytest.mark.parametrize(
    ("command", "options", "message"),
    [
        ("convert", "--to tim", "unknown format 'tim'; did you mean 'timm'?"),
        ("convert", "--family DeiTT", "unknown family 'DeiTT'; did you mean 'DeiT'?"),
        ("convert", "--set num_haeds=4", "no field 'num_haeds'; did you mean 'num_heads'?"),
        ("convert", "--set heads", "--set expects KEY=VALUE, such as num_heads=4, got 'heads'."),
        ("convert", "--section teacher", "it has no section 'teacher'"),
        ("embed", "--layer 13", "there is no layer 13 of 2; expected 0 to 2."),
        ("embed", "--layer x", "--layer expects whole numbers such as 5 or 1,5,10, got 'x'."),
        ("embed", "--pool max", "unknown pooling 'max'; available: mean, pooled, token, token+mean."),
        ("embed", "--feature-dtype int8", "features cannot be stored as 'int8'; available: float16, float32."),
        ("embed", "--split tset", "unknown split 'tset'; did you mean 'test'?"),
        ("eval", "--image-size 30", "patch_size=8 leaves 6 px"),
        ("eval", "--image-size 32,30", "patch_size=8 leaves 6 px"),
        ("eval", "--image-size 32,x", "--image-size expects 384 or 384x288"),
        ("eval", "--protocol imagenet", "no WordNet IDs"),
        ("eval", "--protocol imgnet", "did you mean 'imagenet'"),
        ("eval", "--real nowhere.json", "nowhere.json cannot be read"),
        ("eval", "--format jpg --out x", "unknown figure format 'jpg'"),
        ("eval", "--model nowhere.safetensors", "nowhere.safetensors"),
        ("explain", "--layer 3", "there is no layer 3: this network has layers 1 to 2"),
        ("explain", "--layer last", "--layer expects numbers"),
        ("explain", "--class horse", "unknown class 'horse'"),
        ("explain", "--class 9", "there is no class 9: this model has 5"),
        ("explain", "--query distill", "unknown query 'distill'; expected pooled, class, or a patch"),
        ("explain", "--query 5,1", "no patch in row 5, column 1"),
        ("explain", "--method lime", "unknown method 'lime'"),
        ("explain", "--format gif", "unknown format 'gif'"),
        ("explain", "--method ,", "expected comma-separated names"),
        ("figures", "--what filter", "unknown figure 'filter'; did you mean 'filters'"),
        ("figures", "--what colors --layer 5", "there is no layer 5"),
        ("figures", "--what positions --layer 5", "there is no layer 5"),
        ("figures", "--timeline --layer 1", "--layer cannot be combined with --timeline"),
        ("figures", "--timeline --format pdf", "--format cannot be combined with --timeline"),
        ("figures", "--timeline -m a.npz", "--timeline expects a run folder: --model runs/digits, got a.npz"),
        ("figures", "--data nowhere/", "nowhere"),
        ("finetune", "--recipe papers", "unknown fine-tuning recipe 'papers'; did you mean 'paper'?"),
        ("finetune", "--trainable heads", "--trainable expects all, head or a number of blocks, got 'heads'."),
        ("finetune", "--trainable 7", "trainable=7 blocks, but the network has 2; try trainable=all."),
        ("finetune", "--image-size 17", "17"),
        ("finetune", "--image-size big", "--image-size expects 384 or 384x288"),
        ("finetune", "model.depth=5", "model.depth=5, but the checkpoint has 2"),
        ("finetune", "optim.lr", "got 'optim.lr', expected key=value"),
        ("finetune", "batch_size=1000", "batch_size=1000 is more than the 54 training images"),
        ("finetune", "data.class_names=('red',)", "has the class"),
        ("serve", "a --model b", "got a and --model b, expected one of them"),
        ("serve", "--engine torsch", "unknown engine 'torsch'; did you mean 'torch'"),
        ("serve", "--engine openvino --dtype bfloat16",
         "--dtype bfloat16 is only for torch; openvino has a fixed dtype"),
        ("serve", "--calibrate images", "--calibrate needs --engine auto"),
        ("serve", "--token nothing-of-that-name", "no such file and no environment variable"),
        ("serve", "--image-size huge", "--image-size expects 384"),
        ("serve", "--host no.such.host.invalid", "cannot listen on no.such.host.invalid"),
        ("serve", "--port 99999", "port"),
        ("serve", "--workers 0", "workers"),
        ("vtab", "--method magic", "method='magic': expected finetune or linear."),
        ("vtab", "--lr fast", "--lr expects numbers such as 0.003,0.01, got 'fast'."),
        ("vtab", "--tasks mnist", "unknown VTAB task 'mnist'"),
        ("vtab", "--tasks dtd", "does not contain the task dtd; expected a folder such as dtd."),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("in_tmp_dir", "quick_disk")
def test_invalid_options_are_one_sentence_errors(
    vitrail: Command, weights: Path, album: Path, command: str, options: str, message: str
):
    required = REQUIRED[command].format(weights=weights, album=album)
    result = vitrail(command, *required.split(), *options.split())
    assert (result.status, result.out) == (2 if "--help`." in result.err else 1, "")
    assert len(result.errors) == 1
    assert message in result.errors[0]
    assert list(Path().iterdir()) == []
