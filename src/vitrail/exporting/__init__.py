"""Export to ONNX, torch.export and OpenVINO, each compared with the model; `engines` runs the files.

export_model             `vitrail.export`
open_engine              a model or an exported file with any engine
exporter, compare        from a network to a file, compared with the network on real images
tracing, formats         the network with its preprocessing as a graph; the graph as a file
quantize, compress       int8: calibrated on images (ONNX), or with dynamic scales per token (OpenVINO)
autotune, engine_cache   `--engine auto`: the fastest engine that agrees; cached exports
export_options           the request: format, precision and file, checked before anything is loaded
sample_images            images for comparing and timing
"""
