"""Whole-batch augmentation on the device, a pure function of (seed, step, slot in the global batch).

    compose           `Augment`: the whole pipeline
    crop              random resized crop, shift, flip
    rand_augment, three_augment, color_jitter, random_erasing, mix
                      policies: they draw parameters and apply operations
    color             color operations, sharpness, blur
    affine            rotation, shear, translation
    params            parameters drawn on the host, copied to the device, applied to some of the images

Operations are functions of images and explicit parameters. An image's result does not depend on the other
images, on a CPU to the bit.

kornia 0.9 is not used (benchmarks/augment.py, one core, 256 x 3 x 32 x 32 and 16 x 3 x 224 x 224): its crop is
not antialiased (up to 72 levels of 255 off). Its other operations are as exact and as fast or slower, except
the blur, which takes about half the time; but its blur and sharpness give a gray image other bits alone than
in a batch.
"""

from vitrail.data.augment.compose import Augment
from vitrail.data.augment.crop import crop_boxes

__all__ = ["Augment", "crop_boxes"]
