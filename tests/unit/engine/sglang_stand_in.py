"""Stands in for SGLang's process: notes each call in the file of the first argument, and gives recorded answers.

The answers are those of sglang 0.5.23 on a policy of random weights, shortened.
"""

import json
import os
import socket
import sys

STOPPED = {"token_ids": [34, 36, 3], "logprobs": [-1.6910631656646729, -2.25, -0.5], "ended_by": "stop"}
CUT = {"token_ids": [34, 58, 68, 99], "logprobs": [-2.11, -1.5, -3.25, -0.75], "ended_by": "length"}
RESPONSES = [STOPPED | {"num_retractions": 0}, CUT | {"num_retractions": 1}]
ANSWERS = {
    "start": "0.5.23",
    "load": "00aa",
    "weights": {"dtypes": {"model.norm.weight": "float32"}, "fingerprints": {"model.norm.weight": 2**63 + 1}},
    "token_logprobs": [[-0.5, -1.25]],
}


def answer(call: dict) -> dict:
    arguments = call["arguments"]
    if call["name"] == "generate":
        kinds = [RESPONSES[seed % 2] for seed in (each["sampling_seed"] for each in arguments["sampling_params"])]
        return {"value": {"responses": kinds, "span_s": [5.0, 7.5]}}
    if arguments.get("path") == "missing":
        return {"error": "RuntimeError: no weights"}
    if arguments.get("path") == "deadly":
        os._exit(1)
    return {"value": ANSWERS[call["name"]]}


connection = socket.socket(fileno=int(sys.argv[2]))
with connection, connection.makefile("rw") as stream, open(sys.argv[1], "w") as log:
    for line in stream:
        log.write(line)
        log.flush()
        stream.write(json.dumps(answer(json.loads(line))) + "\n")
        stream.flush()
    log.write('"closed"\n')
