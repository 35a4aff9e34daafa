"""Model -> ONNX, torch.export, OpenVINO, each checked against the model; and the engines that run them.

packaged, sheet      the network with its preprocessing inside; what travels with it
formats, quantise    written as ONNX, a torch.export program or OpenVINO; ONNX in 8-bit integers
engines              what runs a file or a network: torch, ONNX Runtime, OpenVINO
compare, export      an export beside the model on real pictures; from a network to a file that agrees
choose               the fastest engine that agrees, found once and remembered
extras               packages that only this needs
"""
