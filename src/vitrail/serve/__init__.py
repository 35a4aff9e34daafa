"""HTTP service: predictions, features, explanations, and the explorer page.

server.py              one process: listen, drain, stop;   supervisor.py: several processes
connections.py         uvicorn's HTTP protocol with timeouts and limits
app.py                 the routes;   schema.py: parameters, /openapi.json;   response_types.py: responses
model_registry.py      names -> versions -> the one that answers by default;   model_version.py: one loaded version
model_manager.py       watches a folder of models: load, switch, drain;   model_folder.py: what is in it
version_loader.py      loads a version in the background;   canary.py: tries it on images
admin.py               routes of operators;   model_choices.py: what they chose, in a file that all workers follow
request_parsing.py     request body -> images and parameters, within limits;   call.py: a request that has been received
image_decoder.py       image bytes -> pixels, header checked first;   image_headers.py: cost of a header
decode_pool.py         images of many requests -> pixels;   decode_process.py: large images, in a low-priority process
fork_server.py         forks and kills those processes
batching.py            pixels of many requests -> batches -> the outputs of each request;   batch_size.py: by timing
fair_queue.py          queue that takes turns between clients;   quota.py: limits per client
weighted_semaphore.py  limit on the pixels being decoded at a time
limits.py              limits on a request, batching and threads
served_model.py        the engine, and the network it was made from
responses.py           outputs -> JSON;   explain_requests.py: explanations -> JSON;   streaming.py: JSON lines
http_errors.py         error responses;   security.py: host and origin checks, security headers
access.py              who may use the server how much, and what is recorded: the following seven
token_store.py         tokens with names;   client_address.py: clients behind proxies
rate_limit.py          token buckets that all workers share
request_record.py      id, client and stages of a request;   access_log.py: a JSON line for each
trace_context.py       the caller's trace;   spans.py: OpenTelemetry
prometheus_metrics.py  metrics;   static_files.py: the files of web/

Other protocols:
protocol_routes.py     their routes;   protocol_schema.py: their part of /openapi.json
open_inference.py      Open Inference Protocol v2;   inference_outputs.py: its outputs
tensor_codec.py        its bodies, JSON and binary
openai_embeddings.py   /v1/embeddings in the shape of OpenAI's API
sagemaker.py           /ping and /invocations of Amazon SageMaker
ray_serve.py           the service as a Ray Serve application: deployment
"""

from vitrail.serve.ray_serve import deployment

__all__ = ["deployment"]
