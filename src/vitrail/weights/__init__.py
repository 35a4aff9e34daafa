"""Read and write checkpoints: vitrail's own format and those of other libraries.

`loading.load_checkpoint` finds a model's files (`locate`, `hub`), reads them (`checkpoint.read`) and adapts the
network; `checkpoint.write` writes a network, and `conversion` also verifies the result. Where each step is:

- Opening a file: `file_type` detects its type from the first bytes; `archive` gives access to its tensors and to the
  JSON files beside it (sidecars). `pickles` and `torchscript` read PyTorch files without executing code.
- Detecting the format: `checkpoint.detect_format` tries each `Format` (`format`); `sidecars` reads the model that a
  JSON file names; `unsupported` names the model families that vitrail does not support.
- Renaming tensors: `renaming` applies the rename table of `native`, `timm`, `torchvision`, `facebook`, `open_clip`,
  `google`, `google_bit` or `huggingface` (its tables are in `huggingface_names`).
- Inferring the config: `infer_info` in the same modules, with `timm_config` and `huggingface_config` for config.json
  and `timm_family` for files that have none; `family_defaults` has what no tensor shows, such as how positions are
  resampled. `size_limits` checks the config before a network is built.
- Preprocessing and class names: a sidecar decides (`timm_config`, `huggingface_preprocess`), else the family
  (`family_defaults`); `class_names` reads labels. `model_info.ModelInfo` holds config, both, and notes.
- Writing: each format's `write`, through `writers` and `storage.atomic_write`. `module_reader` reads modules in memory.
"""
