"""Exported files, and the engines that run them: torch, ONNX Runtime and OpenVINO.

engine.py            the interface of all engines; open an exported file
openvino_engine.py   OpenVINO
exported_files.py    formats, precisions and suffixes of exported files
export_metadata.py   what is stored in an exported file beside its graph
pt2_archive.py       torch.export archives, read without executing code
"""
