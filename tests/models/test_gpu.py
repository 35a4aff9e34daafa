"""On a GPU: the same outputs as on the CPU, also compiled and in bfloat16, and memory use."""

from __future__ import annotations

import pytest
import torch
from compare import randomized, relative
from models.test_compile import KINDS
from small_models import small

from vitrail.config import ViTConfig
from vitrail.models import build
from vitrail.models.model_names import config_from_name

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),  # TF32 is disabled on purpose
]


@pytest.fixture(autouse=True)
def _disable_tf32() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.compiler.reset()


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_the_same_as_on_the_cpu(kind: str) -> None:
    net, images = randomized(build(KINDS[kind])), torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        expected = net(images)
        cuda = net.cuda()
        assert relative(cuda(images.cuda()).cpu(), expected) <= 1e-5
        assert relative(cuda.features(images.cuda(), outputs="logits").logits.cpu(), expected) <= 1e-5


@pytest.mark.parametrize(
    "kind", ["plain", "relative", "rope, registers", "map", "distilled", "dinov2", "hybrid", "bit"]
)
def test_compiles_with_inductor_for_training_and_evaluation(kind: str) -> None:
    net, images = randomized(build(KINDS[kind])).cuda(), torch.randn(2, 3, 32, 32, device="cuda")
    compiled = torch.compile(net, fullgraph=True)
    with torch.no_grad():
        assert relative(compiled(images), net(images)) <= 1e-5
    net.train()
    compiled(images).square().sum().backward()
    got = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    net(images).square().sum().backward()
    for ours, parameter in zip(got, net.parameters(), strict=True):
        assert (ours - parameter.grad).norm() <= 1e-3 * (parameter.grad.norm() + 1e-3)


@pytest.mark.parametrize("name", ["ViT-Ti/16", "ViT-B/16"])
def test_bf16_autocast_is_within_a_few_percent_and_attention_agrees(name: str) -> None:
    net, images = randomized(build(config_from_name(name))).cuda(), torch.randn(4, 3, 224, 224, device="cuda")
    with torch.no_grad():
        expected = net(images)
        with torch.autocast("cuda", torch.bfloat16):
            assert relative(net(images), expected) <= 0.03
        out = net.features(images, outputs=("logits", "attention"))
        assert relative(out.logits, expected) <= 1e-5
        assert len(out.attention) == 12


@pytest.mark.parametrize("kind", [k for k, c in KINDS.items() if isinstance(c, ViTConfig)])
def test_tokens_stay_in_bf16_under_autocast(kind: str) -> None:
    net, images = randomized(build(KINDS[kind])).cuda().train(), torch.randn(2, 3, 32, 32, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        out = net.features(images, outputs=("tokens", "logits"))
    assert {t.dtype for t in out.tokens} == {torch.bfloat16}
    out.logits.float().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in net.parameters())


@pytest.mark.parametrize("compiled", [False, True])
def test_dropout_is_the_same_as_on_the_cpu(compiled: bool) -> None:
    config = small(width=16, depth=3, mlp_dim=24, dropout=0.2, drop_path=0.4)
    net, images = randomized(build(config)).double().train(), torch.randn(4, 3, 32, 32).double()
    sample_seeds = torch.randint(1 << 62, (4,))
    expected = net(images, sample_seeds)
    cuda = net.cuda()
    run = torch.compile(cuda, fullgraph=True) if compiled else cuda
    torch.testing.assert_close(run(images.cuda(), sample_seeds.cuda()).cpu(), expected, rtol=1e-9, atol=1e-9)


def test_resampled_positions_are_cached_on_the_device() -> None:
    net = randomized(build(config_from_name("ViT-Ti/16"))).cuda()
    images = torch.randn(2, 3, 288, 192, device="cuda")
    with torch.no_grad():
        first = net(images)
        assert net.positions[0]._cache.value.is_cuda
        assert torch.equal(net(images), first)
        cpu_logits = net.cpu()(images.cpu())
    assert relative(cpu_logits, first.cpu()) <= 1e-4


def test_gradient_checkpointing_saves_memory() -> None:
    peaks = []
    for checkpointing in (False, True):
        net = build(ViTConfig(width=384, num_heads=6, mlp_dim=1536, depth=12, num_classes=10)).cuda().train()
        net.gradient_checkpointing = checkpointing
        torch.cuda.reset_peak_memory_stats()
        net(torch.randn(32, 3, 224, 224, device="cuda")).sum().backward()
        peaks.append(torch.cuda.max_memory_allocated())
        del net
        torch.cuda.empty_cache()
    assert peaks[1] < 0.5 * peaks[0]
