"""Whole-batch augmentation on the device, a pure function of (seed, step, place in the global batch).

    draws      what is drawn on the host, sent in one copy; which images an operation is for
    crop       random resized crop, shift, flip
    color     brightness to equalize, sharpness, blur: one function each
    affine     rotate, shear, translate, as one matrix
    jitter, three, rand, erase, mix     the layers above: what is drawn, in which order it is applied
    compose    `Augment`: all of it

Every operation is a function of images and explicit numbers, and computes an image's values from
that image alone, to the same bits in any batch on a CPU.

kornia 0.9 is used nowhere (benchmarks/augment.py, one core, 256 x 3 x 32 x 32 and 16 x 3 x 224 x 224): its
crop is not antialiased (up to 72 levels of 255 off); the rest is as exact as ours and about as fast or
slower, but for the blur, which takes it about half the time. There, and in its sharpness, a lone gray
image has other bits than in a batch.
"""

from vitrail.data.augment.compose import Augment
from vitrail.data.augment.crop import crop_boxes

__all__ = ["Augment", "crop_boxes"]
