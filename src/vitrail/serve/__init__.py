"""A model behind HTTP: requests in, batches through the engine, answers out; and a page to look inside.

server.py      one process: listen, drain, stop;   workers.py: several
connections.py connections that do not wait for ever
app.py         the routes
bodies.py      a request's body -> images and values, within limits
images.py    an image's bytes -> pixels, judged by its header first;   image_headers.py: what that costs
decoding.py    images of many requests -> pixels;   decode_process.py: large ones, in a process of low priority
fork_server.py forks such processes, and ends them
batching.py    pixels of many requests -> batches -> each request's outputs
fair_queue.py  clients take turns;   quota.py: none takes everything;   budget.py: pixels in flight
limits.py      what a client may ask for, how work is shared out
served.py      the engine, the network beside it, what they are called
answers.py     outputs -> JSON;   looking.py: the same for what happens inside
security.py    token, headers;    metrics.py: what Prometheus reads
web.py         the files of web/; schema.py: what /openapi.json says
"""
