"""Export to ONNX, torch.export and OpenVINO, each compared with the model; and the engines that run exported files.

tracing, export_metadata           the network with its preprocessing; the metadata stored in an exported file
formats                            writing ONNX, torch.export and OpenVINO files
quantize, compress                 int8: calibrated on images (ONNX), or with dynamic scales per token (OpenVINO)
exporter, compare                  from a network to a file, compared with the network on real images
engines                            torch, ONNX Runtime and OpenVINO behind one interface
autotune, engine_cache             `--engine auto`: the fastest engine that agrees; cached exports
export_options, optional_packages  formats, suffixes and supported precisions; packages of the `export` extra
scratch_folder                     the temporary folder in which an export is written before it is moved into place
pt2_archive                        reading a torch.export archive without executing code from it
sample_images                      images for comparing and timing
"""
