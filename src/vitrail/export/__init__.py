"""Model -> ONNX, torch.export, OpenVINO, each checked against the model; and the engines that run them.

packaged, metadata      the network with its preprocessing inside; what travels with it
formats              written as ONNX, a torch.export program or OpenVINO
quantize, compress   8-bit integers: calibrated on images, in ONNX; token by token, in OpenVINO
engines              what runs a file or a network: torch, ONNX Runtime, OpenVINO
compare, export      an export beside the model on real images; from a network to a file that agrees
choose, kept         the fastest engine that agrees, found once and remembered; files that engines have run before
names, workplace     what an export is called and asked for; where it is made before it is called done
program              a torch.export program, read without running what a stranger put there
extras               packages that only this needs
"""
