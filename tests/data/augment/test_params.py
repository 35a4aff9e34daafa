"""Parameters arrive unchanged on the device, and operations change only the selected images."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from vitrail.data.augment.params import ALIGNMENT, _pack, _unpack, apply_to_subset, to_device

DTYPES = (torch.float32, torch.int64, torch.bool, torch.uint8, torch.float64)

tensors = st.builds(
    lambda shape, dtype: torch.randint(0, 2, shape).to(dtype),
    st.lists(st.integers(0, 5), min_size=1, max_size=3),
    st.sampled_from(DTYPES),
)


@given(st.lists(tensors, max_size=8))
def test_packed_parameters_are_unpacked_unchanged(tensors: list[torch.Tensor]):
    parcel = _pack(tensors, pinned=False)
    out = _unpack(parcel, tensors)
    assert [t.dtype for t in out] == [t.dtype for t in tensors]
    assert all(torch.equal(a, b) for a, b in zip(out, tensors, strict=True))
    assert all((t.data_ptr() - parcel.data_ptr()) % ALIGNMENT == 0 for t in out if t.numel())


def test_masks_become_indices_unless_shapes_are_static():
    params = {"part": {"which": np.array([True, False, True]), "amount": np.array([1, 2, 3], np.float32)}}
    some = to_device(params, torch.device("cpu"), static_shapes=False)["part"]
    assert some["which"].tolist() == [0, 2]
    assert some["amount"].tolist() == [1, 2, 3]
    everything = to_device(params, torch.device("cpu"), static_shapes=True)["part"]
    assert everything["which"].tolist() == [True, False, True]


def test_operation_is_applied_to_the_selected_images_with_their_parameters():
    images, amounts = torch.arange(3.0).view(3, 1, 1, 1), torch.tensor([10.0, 20.0, 30.0])
    add = lambda some, amount: some + amount[:, None, None, None]  # noqa: E731
    for mask, expected in (([True, False, True], [10, 1, 32]), ([False] * 3, [0, 1, 2]), ([True] * 3, [10, 21, 32])):
        which = torch.tensor(mask)
        for form in (which, which.nonzero()[:, 0]):
            assert apply_to_subset(form, images.clone(), add, amounts).flatten().tolist() == expected


def test_broadcast_arrays_are_packed():
    """The mean of a gray image's one channel: contiguous to NumPy and torch, with a stride of 0."""
    one = torch.tensor(0.5).expand(1)
    assert one.is_contiguous()
    assert one.stride() == (0,)
    tensors = [one, torch.arange(3), one.expand(1, 1)]
    for was, came in zip(tensors, _unpack(_pack(tensors, pinned=False), tensors), strict=True):
        assert torch.equal(was, came)
