"""Features and predictions of any number of images, in parts that any number of processes compute.

outputs                    what is stored of each image: features, or the best classes
parts, shard_selection     the parts of a job, always the same ones; `--shard 2/8`
job                        a job: model, data and output; its settings
part_computer              parts -> tables, in one process
running, joining           `embed` and `predict`; folders of parts -> one folder or file
ray_pipeline, ray_session  the same on a Ray cluster
embedder                   `Embedder`, for other engines
"""
